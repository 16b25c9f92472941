#include "selective_scan.h"

#include "core/op.h"

namespace linnet {
namespace {

template <class Args>
Status check_groups(const char* op, const Args& args) {
  if (args.B.rank == args.C.rank) return {};
  return bad_input(std::string(op) + ": C has rank " + std::to_string(args.C.rank) + ", expected " +
                   std::to_string(args.B.rank) + " (same as B)");
}
Status check_scan(const SelectiveScanArgs& args, const Dims&) { return check_groups("mamba_selective_scan", args); }
Status check_decode(const SelectiveScanDecodeArgs& args, const Dims&) {
  return check_groups("mamba_selective_scan_decode", args);
}

// Per token, channel and state element 9 flops of the page, and 14 of the exponential; three times as many backward.
Cost cost_scan(const SelectiveScanArgs& args, const Dims& dims, Pass pass) {
  const double rows = static_cast<double>(dims["B"] * dims["T"]), E = static_cast<double>(dims["E"]);
  const double K = static_cast<double>(dims["K"]), size = static_cast<double>(dtype_size(args.x.dtype));
  const double tensors = args.z.given() ? 4 : 3, groups = static_cast<double>(grouped(args.B).size[2]);
  const double bytes = size * rows * (tensors * E + 2 * groups * K) + 8 * static_cast<double>(dims["N"]) * E * K;
  if (pass == Pass::forward) return {23 * rows * E * K, bytes};
  return {46 * rows * E * K, 2 * bytes};
}
Cost cost_decode(const SelectiveScanDecodeArgs&, const Dims& dims, Pass) {
  const double state = static_cast<double>(dims["B"] * dims["E"] * dims["K"]);
  return {23 * state * static_cast<double>(dims["T"]), 8 * state};
}

}  // namespace

// clang-format off
const Op& mamba_selective_scan_op() {
  using A = SelectiveScanArgs;
  using O = SelectiveScanOut;
  using G = SelectiveScanGrads;
  static const Op op =
      Declare<A, O, G>("mamba_selective_scan", "mamba", "S6, the selective scan of Mamba")
          .equation("delta = softplus(dt + dt_bias);  h_t = exp(delta A) h_{t-1} + delta B_t x_t;  y_t = C_t.h_t + D x_t, times silu(z_t)")
          .decode("mamba_selective_scan_decode")
          .input("x", &A::x, "B T E", "inputs").grad(&G::dx)
          .input("dt", &A::dt, "B T E", "step sizes before bias and softplus").grad(&G::ddt)
          .input("A", &A::A, "E K", "rate of each state element, negative").element(Element::acc).values(Values::log_decay).grad(&G::dA)
          .input("B", &A::B, "B T G K", "input maps; channel e uses group e / (E / G)").or_shape("B T K").grad(&G::dB)
          .input("C", &A::C, "B T G K", "output maps").or_shape("B T K").grad(&G::dC)
          .input("D", &A::D, "E", "the skip").element(Element::param).optional().grad(&G::dD)
          .input("z", &A::z, "B T E", "the gate: y silu(z)").optional().grad(&G::dz)
          .input("dt_bias", &A::dt_bias, "E", "added to dt").element(Element::param).optional().grad(&G::ddt_bias)
          .input("cu_seqlens", &A::cu_seqlens, "N+1", "offsets of packed sequences; x is then [total, E]")
          .element(Element::index).values(Values::offsets, "T").optional()
          .input("initial_state", &A::initial_state, "N E K", "h before the first token; zeros when absent")
          .element(Element::acc).optional().grad(&G::dinitial_state)
          .output("out", &O::out, "B T E", "the read of the state").grad(&G::dout)
          .output("final_state", &O::final_state, "N E K", "h after the last token").element(Element::acc).optional().grad(&G::dfinal_state)
          .letter("N", "B")
          .multiple("E", "G")
          .check<check_scan>()
          .always_causal()
          .cost<cost_scan>()
          .bench("B=1 T=2048|8192 E=1536 G=1 K=16 with=D,z,dt_bias dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=4 T=33 E=64 G=1 K=16 with=D,z,dt_bias dtype=f32 pass=fwd|fwd+bwd")
          .compare("", "x=@v B=unit@k C=unit@q dt=-3.5 A=-1")
          .gpu_bench("B=16 T=2048 E=2048 G=1 K=16 with=D,z,dt_bias dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=1 T=32768 E=2048 G=1 K=16 with=D,z,dt_bias dtype=bf16 pass=fwd")
          .impl<ref::mamba_selective_scan_forward, ref::mamba_selective_scan_backward, ref::mamba_selective_scan_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(mamba_selective_scan)
          .cuda<cuda::mamba_selective_scan_forward, cuda::mamba_selective_scan_backward, cuda::mamba_selective_scan_workspace, cuda::mamba_selective_scan_refuses>();
  return op;
}

const Op& mamba_selective_scan_decode_op() {
  using A = SelectiveScanDecodeArgs;
  using O = SelectiveScanDecodeOut;
  static const Op op =
      Declare<A, O, SelectiveScanDecodeGrads>("mamba_selective_scan_decode", "mamba", "continues the selective scan token by token, the state in place")
          .equation("delta = softplus(dt + dt_bias);  h = exp(delta A) h + delta B x;  y = C.h + D x, times silu(z)")
          .input("x", &A::x, "B T E", "inputs of the new tokens")
          .input("dt", &A::dt, "B T E", "step sizes before bias and softplus")
          .input("A", &A::A, "E K", "rate of each state element, negative").element(Element::acc).values(Values::log_decay)
          .input("B", &A::B, "B T G K", "input maps; channel e uses group e / (E / G)").or_shape("B T K")
          .input("C", &A::C, "B T G K", "output maps").or_shape("B T K")
          .input("D", &A::D, "E", "the skip").element(Element::param).optional()
          .input("z", &A::z, "B T E", "the gate: y silu(z)").optional()
          .input("dt_bias", &A::dt_bias, "E", "added to dt").element(Element::param).optional()
          .input("state", &A::state, "B E K", "h; read and overwritten").element(Element::acc).mutated()
          .output("out", &O::out, "B T E", "the read of the state")
          .multiple("E", "G")
          .check<check_decode>()
          .cost<cost_decode>()
          .bench("B=1|4|16|64 T=1 E=1536|5120 G=1 K=16 with=D,z,dt_bias dtype=f32 pass=fwd")
          .bench("B=1024 T=1 E=1536 G=1 K=16 with=D,z,dt_bias dtype=f32 pass=fwd")
          .bench("B=16 T=1 E=1536 G=1 K=16 with=D,z,dt_bias dtype=bf16 pass=fwd")
          .gpu_bench("B=1|64 T=1 E=5120 G=1 K=16 with=D,z,dt_bias dtype=bf16 pass=fwd")
          .impl<ref::mamba_selective_scan_decode_forward, nullptr, ref::mamba_selective_scan_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(mamba_selective_scan_decode)
          .cuda<cuda::mamba_selective_scan_decode_forward, nullptr, cuda::mamba_selective_scan_decode_workspace, cuda::mamba_selective_scan_decode_refuses>();
  return op;
}
// clang-format on

Status mamba_selective_scan(const SelectiveScanArgs& args, const SelectiveScanOut& out, const Context& context) {
  return run(mamba_selective_scan_op(), Pass::forward, &args, &out, nullptr, context);
}
Status mamba_selective_scan_backward(const SelectiveScanArgs& args, const SelectiveScanOut& out,
                                     const SelectiveScanGrads& grads, const Context& context) {
  return run(mamba_selective_scan_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t mamba_selective_scan_workspace(const SelectiveScanArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(mamba_selective_scan_op(), pass, &args, context);
}
Status mamba_selective_scan_decode(const SelectiveScanDecodeArgs& args, const SelectiveScanDecodeOut& out,
                                   const Context& context) {
  return run(mamba_selective_scan_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t mamba_selective_scan_decode_workspace(const SelectiveScanDecodeArgs& args, const Context& context) {
  return workspace_bytes(mamba_selective_scan_decode_op(), Pass::forward, &args, context);
}

}  // namespace linnet
