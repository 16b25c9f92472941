#include "h3.h"

#include "core/op.h"

namespace linnet {
namespace {

const std::vector<std::string>& discs() {
  static const std::vector<std::string> names = {"bilinear", "zoh"};
  return names;
}

const std::vector<std::string>& forms() {
  static const std::vector<std::string> names = {"auto", "chunk", "fft"};
  return names;
}

template <class Args>
Status check_sizes(const char* name, const Args& args, const Dims& dims) {
  const std::string op = name;
  if (dims["H"] == 0 && dims["C"] > 0)
    return bad_input(op + ": log_dt has no heads, expected a divisor of " + std::to_string(dims["C"]));
  if (dims["M"] == 0) return bad_input(op + ": log_neg_re has no state pairs, expected at least 1");
  if (dims["R"] == 0) return bad_input(op + ": sb has no entries, expected at least 1");
  if (args.heads != 0 && args.heads != dims["H"]) {
    return bad_input(op + ": heads is " + std::to_string(args.heads) + ", expected " + std::to_string(dims["H"]) +
                     " (the heads of log_dt)");
  }
  if (args.head_dim != 0 && args.head_dim * dims["H"] != dims["C"]) {
    return bad_input(op + ": head_dim is " + std::to_string(args.head_dim) + ", expected " +
                     std::to_string(dims["H"] == 0 ? 0 : dims["C"] / dims["H"]) +
                     " (the channels of q over the heads of log_dt)");
  }
  return {};
}
Status check_h3(const H3Args& args, const Dims& dims) { return check_sizes("h3", args, dims); }
Status check_decode(const H3DecodeArgs& args, const Dims& dims) { return check_sizes("h3_decode", args, dims); }

// The chunked form with chunks of 64: 64 + 4 M multiply-adds per token and (p, r), and the short filter; the backward does the
// forward again, its transpose, and the products for the parameters.
Cost cost_h3(const H3Args& args, const Dims& dims, Pass pass) {
  const double rows = static_cast<double>(dims["B"] * dims["T"]), C = static_cast<double>(dims["C"]);
  const double P = dims["H"] == 0 ? 0 : C / static_cast<double>(dims["H"]), M = static_cast<double>(dims["M"]);
  const double flops = 2 * rows * C * (P * (64 + 4 * M) + static_cast<double>(dims["R"]));
  const double bytes = 4 * rows * C * static_cast<double>(dtype_size(args.q.dtype));
  return pass == Pass::forward ? Cost{flops, bytes} : Cost{4 * flops, 2 * bytes};
}
Cost cost_decode(const H3DecodeArgs&, const Dims& dims, Pass) {
  const double B = static_cast<double>(dims["B"]), C = static_cast<double>(dims["C"]), R = static_cast<double>(dims["R"]);
  const double P = dims["H"] == 0 ? 0 : C / static_cast<double>(dims["H"]), M = static_cast<double>(dims["M"]);
  const double state = B * C * (R + 2 * P * M);
  return {4 * state * static_cast<double>(dims["T"]), 8 * state};
}

}  // namespace

// clang-format off
const Op& h3_op() {
  using A = H3Args;
  using O = H3Out;
  using G = H3Grads;
  static const Op op =
      Declare<A, O, G>("h3", "h3", "H3: shift and diagonal state space models with two gates")
          .equation("kbar = shift(k) + sd k;  s_t[p,r] = sum_{i<=t} kd_{t-i} kbar_i[p] v_i[r] + d kbar_t[p] v_t[r];  y_t[r] = sum_p q_t[p] s_t[p,r]")
          .decode("h3_decode")
          .input("q", &A::q, "B T C", "queries").grad(&G::dq)
          .input("k", &A::k, "B T C", "keys").grad(&G::dk)
          .input("v", &A::v, "B T C", "values").grad(&G::dv)
          .input("sb", &A::sb, "C R", "shift input vector").element(Element::param).grad(&G::dsb)
          .input("sc", &A::sc, "C R", "shift output vector").element(Element::param).grad(&G::dsc)
          .input("sd", &A::sd, "C", "shift skip").element(Element::param).grad(&G::dsd)
          .input("log_dt", &A::log_dt, "H", "log step size").element(Element::param).grad(&G::dlog_dt)
          .input("log_neg_re", &A::log_neg_re, "H M", "log of minus the real part of A").element(Element::param).grad(&G::dlog_neg_re)
          .input("imag", &A::imag, "H M", "imaginary part of A").element(Element::param).grad(&G::dimag)
          .input("b", &A::b, "H M 2", "complex input vector").element(Element::param).grad(&G::db)
          .input("c", &A::c, "H M 2", "complex output vector").element(Element::param).grad(&G::dc)
          .input("d", &A::d, "H", "skip").element(Element::param).grad(&G::dd)
          .input("cu_seqlens", &A::cu_seqlens, "N+1", "offsets of packed sequences; q is then [total, C]")
          .element(Element::index).values(Values::offsets, "T").optional()
          .input("initial_state_shift", &A::initial_state_shift, "N C R", "x before the first token; zeros when absent")
          .element(Element::acc).optional().grad(&G::dinitial_state_shift)
          .input("initial_state_diag", &A::initial_state_diag, "N H C//H C//H M 2", "X before the first token; zeros when absent")
          .element(Element::acc).optional().grad(&G::dinitial_state_diag)
          .output("out", &O::out, "B T C", "the mixed values, slot-major").grad(&G::dout)
          .output("taps_shift", &O::taps_shift, "C T", "the short filter").element(Element::acc).optional()
          .output("taps_diag", &O::taps_diag, "H T", "the long filter, without d").element(Element::acc).optional()
          .output("state_shift", &O::state_shift, "N C R", "x after the last token").element(Element::acc).optional().grad(&G::dstate_shift)
          .output("state_diag", &O::state_diag, "N H C//H C//H M 2", "X after the last token").element(Element::acc).optional().grad(&G::dstate_diag)
          .option("disc", &A::disc, discs(), "how A and b become a and bd")
          .option("form", &A::form, forms(), "the long filter by chunks (linear in T) or by FFT (T log T; one sequence a row, no states); auto: the faster")
          .option("head_dim", &A::head_dim, 0, kAnyCount, "slots of a head; 0: C / H").unsampled()
          .option("heads", &A::heads, 0, kAnyCount, "heads; 0: as log_dt has them").unsampled()
          .letter("N", "B")
          .multiple("C", "H")
          .check<check_h3>()
          .always_causal().earlier_rows(EarlierRows::numbers)  // form fft
          .cost<cost_h3>()
          .bench("B=1 T=1024|2048|4096|8192|16384|32768|65536|131072 C=64 R=64 H=C M=32 form=chunk|fft dtype=f32 pass=fwd")
          .bench("B=8 T=1024|4096|16384 C=64 R=64 H=C M=32 form=chunk|fft dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 C=768 R=64 H=C M=32 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=2048 C=64 R=64 H=8 M=32 dtype=f32 pass=fwd|fwd+bwd")
          .compare("", "H=HK R=4 M=1 sb=0 sc=0 sd=0.3 log_dt=-3.5 log_neg_re=0 imag=0 b=first c=first d=0")
          .impl<ref::h3_forward, ref::h3_backward, ref::h3_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(h3)
          .cuda<cuda::h3_forward, cuda::h3_backward, cuda::h3_workspace, cuda::h3_refuses>();
  return op;
}

const Op& h3_decode_op() {
  using A = H3DecodeArgs;
  using O = H3DecodeOut;
  static const Op op =
      Declare<A, O, H3DecodeGrads>("h3_decode", "h3", "continues H3 token by token, the states in place")
          .equation("x = shift(x) + sb k;  X = a X + bd kv;  s = 2 Re(c X) + d kv;  y[r] = sum_p q[p] s[p,r]")
          .input("q", &A::q, "B T C", "queries of the new tokens")
          .input("k", &A::k, "B T C", "keys of the new tokens")
          .input("v", &A::v, "B T C", "values of the new tokens")
          .input("sb", &A::sb, "C R", "shift input vector").element(Element::param)
          .input("sc", &A::sc, "C R", "shift output vector").element(Element::param)
          .input("sd", &A::sd, "C", "shift skip").element(Element::param)
          .input("log_dt", &A::log_dt, "H", "log step size").element(Element::param)
          .input("log_neg_re", &A::log_neg_re, "H M", "log of minus the real part of A").element(Element::param)
          .input("imag", &A::imag, "H M", "imaginary part of A").element(Element::param)
          .input("b", &A::b, "H M 2", "complex input vector").element(Element::param)
          .input("c", &A::c, "H M 2", "complex output vector").element(Element::param)
          .input("d", &A::d, "H", "skip").element(Element::param)
          .input("state_shift", &A::state_shift, "B C R", "x; read and overwritten").element(Element::acc).mutated()
          .input("state_diag", &A::state_diag, "B H C//H C//H M 2", "X; read and overwritten").element(Element::acc).mutated()
          .output("out", &O::out, "B T C", "the mixed values, slot-major")
          .option("disc", &A::disc, discs(), "how A and b become a and bd")
          .option("head_dim", &A::head_dim, 0, kAnyCount, "slots of a head; 0: C / H").unsampled()
          .option("heads", &A::heads, 0, kAnyCount, "heads; 0: as log_dt has them").unsampled()
          .multiple("C", "H")
          .check<check_decode>()
          .cost<cost_decode>()
          .bench("B=1|4|16|64 T=1 C=768 R=64 H=C M=32 dtype=f32|bf16 pass=fwd")
          .bench("B=256 T=1 C=768 R=64 H=C M=32 dtype=f32 pass=fwd")
          .impl<ref::h3_decode_forward, nullptr, ref::h3_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(h3_decode)
          .cuda<cuda::h3_decode_forward, nullptr, cuda::h3_decode_workspace, cuda::h3_decode_refuses>();
  return op;
}
// clang-format on

Status h3(const H3Args& args, const H3Out& out, const Context& context) {
  return run(h3_op(), Pass::forward, &args, &out, nullptr, context);
}
Status h3_backward(const H3Args& args, const H3Out& out, const H3Grads& grads, const Context& context) {
  return run(h3_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t h3_workspace(const H3Args& args, Pass pass, const Context& context) {
  return workspace_bytes(h3_op(), pass, &args, context);
}
Status h3_decode(const H3DecodeArgs& args, const H3DecodeOut& out, const Context& context) {
  return run(h3_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t h3_decode_workspace(const H3DecodeArgs& args, const Context& context) {
  return workspace_bytes(h3_decode_op(), Pass::forward, &args, context);
}

}  // namespace linnet
