#include "ssd.h"

#include <limits>

#include "core/op.h"
#include "ssd_rows.h"

namespace linnet {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class Args>
Status check_limits(const char* op, const Args& args) {
  if (!args.dt_max.given || args.dt_max.value >= args.dt_min) return {};
  return bad_input(std::string(op) + ": dt_max is " + std::to_string(args.dt_max.value) + ", expected at least dt_min (" +
                   std::to_string(args.dt_min) + ")");
}
template <class Args>
Status check_heads(const char* op, const Args& args, const Dims& dims) {
  if (dims["H"] > 0 || dims["G"] == 0) return check_limits(op, args);
  return bad_input(std::string(op) + ": x has 0 heads, expected at least one for each of B's " + std::to_string(dims["G"]) +
                   " groups");
}
Status check_ssd(const SsdArgs& args, const Dims& dims) { return check_heads("mamba_ssd", args, dims); }
Status check_decode(const SsdDecodeArgs& args, const Dims& dims) { return check_heads("mamba_ssd_decode", args, dims); }

// As `decay` (recurrence.cc), chunks of 32: scores and their use C (K + V), state 4 K V; and what happens to x and y.
Cost cost_ssd(const SsdArgs& args, const Dims& dims, Pass pass) {
  const double K = static_cast<double>(dims["K"]), V = static_cast<double>(dims["V"]), H = static_cast<double>(dims["H"]);
  const double tokens = static_cast<double>(dims["B"] * dims["T"]), size = static_cast<double>(dtype_size(args.x.dtype));
  const double flops = tokens * H * (32 * (K + V) + 4 * K * V + 6 * V);
  const double rows = (args.z.given() ? 3 : 2) * H * V + 2 * static_cast<double>(dims["G"]) * K + H;
  const double bytes = size * tokens * rows + 4 * static_cast<double>(dims["N"]) * H * K * V;
  return pass == Pass::forward ? Cost{flops, bytes} : Cost{2.5 * flops, 2 * bytes};
}
Cost cost_decode(const SsdDecodeArgs&, const Dims& dims, Pass) {
  const double state = static_cast<double>(dims["B"] * dims["H"] * dims["K"] * dims["V"]);
  return {5 * state * static_cast<double>(dims["T"]), 8 * state};
}

}  // namespace

// clang-format off
const Op& mamba_ssd_op() {
  using A = SsdArgs;
  using O = SsdOut;
  using G = SsdGrads;
  static const Op op =
      Declare<A, O, G>("mamba_ssd", "mamba", "SSD, the recurrence of Mamba-2")
          .equation("delta = clamp(softplus(dt + dt_bias));  S_t = exp(delta A) S_{t-1} + B_t (delta x_t)^T;  y_t = S_t^T C_t + D x_t, times silu(z_t)")
          .decode("mamba_ssd_decode")
          .input("x", &A::x, "B T H V", "inputs").grad(&G::dx)
          .input("dt", &A::dt, "B T H", "step sizes before bias and softplus").element(Element::param).grad(&G::ddt)
          .input("A", &A::A, "H", "rate of each head, negative").element(Element::acc).values(Values::log_decay).grad(&G::dA)
          .input("B", &A::B, "B T G K", "input maps; head h uses group h / (H / G)").grad(&G::dB)
          .input("C", &A::C, "B T G K", "output maps").grad(&G::dC)
          .input("D", &A::D, "H V", "the skip").or_shape("H").element(Element::param).optional().grad(&G::dD)
          .input("z", &A::z, "B T H V", "the gate: y silu(z)").optional().grad(&G::dz)
          .input("dt_bias", &A::dt_bias, "H", "added to dt").element(Element::param).optional().grad(&G::ddt_bias)
          .input("cu_seqlens", &A::cu_seqlens, "N+1", "offsets of packed sequences; x is then [total, H, V]")
          .element(Element::index).values(Values::offsets, "T").optional()
          .input("initial_state", &A::initial_state, "N H K V", "S before the first token; zeros when absent")
          .element(Element::acc).optional().grad(&G::dinitial_state)
          .output("out", &O::out, "B T H V", "the read of the state").grad(&G::dout)
          .output("final_state", &O::final_state, "N H K V", "S after the last token").element(Element::acc).optional().grad(&G::dfinal_state)
          .option("dt_min", &A::dt_min, 0, kAnyReal, "least delta")
          .option("dt_max", &A::dt_max, 0, kInfinity, "largest delta; none: no limit")
          .letter("N", "B")
          .multiple("H", "G")
          .check<check_ssd>()
          .always_causal()
          .cost<cost_ssd>()
          .bench("B=1 T=8192 H=8 V=128 G=1 K=128 with=D,dt_bias dtype=f32|bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 H=16 V=128 G=1 K=128 with=D,dt_bias dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=1 T=32768 H=16 V=128 G=1 K=128 with=D,dt_bias dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 H=24 V=64 G=1 K=128 with=D,z,dt_bias dtype=bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 H=16 V=64 G=1 K=64 with=D,dt_bias dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 H=24 V=64 G=1 K=128 with=D,z,dt_bias dtype=f32 pass=fwd|fwd+bwd")
          .compare("", "x=@v B=unit@k C=unit@q dt=-3.5 A=-1")
          .impl<ref::mamba_ssd_forward, ref::mamba_ssd_backward, ref::mamba_ssd_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(mamba_ssd)
          .cuda_rows<cuda::SsdTable, cuda::Row::step, cuda::Row::chunk, cuda::Row::tile>();
  return op;
}

const Op& mamba_ssd_decode_op() {
  using A = SsdDecodeArgs;
  using O = SsdDecodeOut;
  static const Op op =
      Declare<A, O, SsdDecodeGrads>("mamba_ssd_decode", "mamba", "continues SSD token by token, the state in place")
          .equation("delta = clamp(softplus(dt + dt_bias));  S = exp(delta A) S + B (delta x)^T;  y = S^T C + D x, times silu(z)")
          .input("x", &A::x, "B T H V", "inputs of the new tokens")
          .input("dt", &A::dt, "B T H", "step sizes before bias and softplus").element(Element::param)
          .input("A", &A::A, "H", "rate of each head, negative").element(Element::acc).values(Values::log_decay)
          .input("B", &A::B, "B T G K", "input maps; head h uses group h / (H / G)")
          .input("C", &A::C, "B T G K", "output maps")
          .input("D", &A::D, "H V", "the skip").or_shape("H").element(Element::param).optional()
          .input("z", &A::z, "B T H V", "the gate: y silu(z)").optional()
          .input("dt_bias", &A::dt_bias, "H", "added to dt").element(Element::param).optional()
          .input("state", &A::state, "B H K V", "S; read and overwritten").element(Element::acc).mutated()
          .output("out", &O::out, "B T H V", "the read of the state")
          .option("dt_min", &A::dt_min, 0, kAnyReal, "least delta")
          .option("dt_max", &A::dt_max, 0, kInfinity, "largest delta; none: no limit")
          .multiple("H", "G")
          .check<check_decode>()
          .cost<cost_decode>()
          .gpu_bench("B=16|256 T=1 H=32 V=128 G=1 K=128 with=D,dt_bias dtype=bf16 pass=fwd")
          .bench("B=1|16|64 T=1 H=24 V=64 G=1 K=128 with=D,dt_bias dtype=f32|bf16 pass=fwd")
          .impl<ref::mamba_ssd_decode_forward, nullptr, ref::mamba_ssd_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(mamba_ssd_decode)
          .cuda_rows<cuda::SsdDecodeTable, cuda::Row::step, cuda::Row::tile, cuda::Row::decode>();
  return op;
}
// clang-format on

Status mamba_ssd(const SsdArgs& args, const SsdOut& out, const Context& context) {
  return run(mamba_ssd_op(), Pass::forward, &args, &out, nullptr, context);
}
Status mamba_ssd_backward(const SsdArgs& args, const SsdOut& out, const SsdGrads& grads, const Context& context) {
  return run(mamba_ssd_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t mamba_ssd_workspace(const SsdArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(mamba_ssd_op(), pass, &args, context);
}
Status mamba_ssd_decode(const SsdDecodeArgs& args, const SsdDecodeOut& out, const Context& context) {
  return run(mamba_ssd_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t mamba_ssd_decode_workspace(const SsdDecodeArgs& args, const Context& context) {
  return workspace_bytes(mamba_ssd_decode_op(), Pass::forward, &args, context);
}

}  // namespace linnet
