#include "zeros.h"

#include "core/op.h"
#include "cuda/softmax.h"

namespace linnet {
namespace {

Status check_zeroth(const char* op, bool zeroth, const View& s0) {
  if (zeroth && !s0.given()) return bad_input(std::string(op) + ": s0 is missing; zeroth needs it");
  return {};
}
Status check_zeros(const ZerosArgs& args, const Dims&) {
  if (args.masked && !args.key_mask.given()) return bad_input("zeros: key_mask is missing; masked needs it");
  return check_zeroth("zeros", args.zeroth, args.s0);
}
Status check_decode(const ZerosDecodeArgs& args, const Dims&) { return check_zeroth("zeros_decode", args.zeroth, args.s0); }
Status check_softmax(const ZerosSoftmaxArgs& args, const Dims&) { return check_zeroth("zeros_softmax", args.zeroth, args.s0); }

// Multiply-adds as two flops, with chunks of C = 64 and the half of each triangle that counts: read and write of three states
// 12 K V, scores and their use C (K + V); backward: two walks, each with three reads and writes.
Cost cost_zeros(const ZerosArgs& args, const Dims& dims, Pass pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double rows = size("B") * size("T") * size("H"), K = size("K"), V = size("V"), C = args.causal ? 64 : 0;
  const double bytes = static_cast<double>(dtype_size(args.q.dtype)) * rows * (2 * K + 2 * V + 4);
  if (pass == Pass::forward) return {rows * (12 * K * V + C * (K + V)), bytes};
  return {rows * (24 * K * V + C * (4 * K + 3 * V)), 2 * bytes};
}
// The reference writes every row of weights out: six exponentials and kin per pair.
double check_zeros_flops(const ZerosArgs&, const Dims& dims, Pass pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double pairs = size("B") * size("H") * size("T") * size("T");
  return pairs * (100 + (pass == Pass::forward ? 4 : 16) * (size("K") + size("V")));
}
Cost cost_decode(const ZerosDecodeArgs&, const Dims& dims, Pass) {
  const double state = 3 * static_cast<double>(dims["B"] * dims["H"] * dims["K"] * dims["V"]);
  return {4 * state * static_cast<double>(dims["T"]), 8 * state};
}
// The weights need a pass of their own over the keys; the backward takes the scores four times.
Cost cost_softmax(const ZerosSoftmaxArgs& args, const Dims& dims, Pass pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double T = size("T"), pairs = size("B") * size("H") * (args.causal ? T * (T + 1) / 2 : T * T), K = size("K"),
               V = size("V");
  const double bytes = static_cast<double>(dtype_size(args.q.dtype)) * size("B") * T * size("H") * (2 * K + 2 * V);
  if (pass == Pass::forward) return {2 * pairs * (2 * K + V), bytes};
  return {2 * pairs * (6 * K + 4 * V), 2 * bytes};
}

}  // namespace

// clang-format off
const Op& zeros_op() {
  using A = ZerosArgs;
  using O = ZerosOut;
  using G = ZerosGrads;
  static const Op op =
      Declare<A, O, G>("zeros", "zeros", "zero-sum linear attention (ZeroS)")
          .equation("o_t = sum_i r_ti <q_t, k_i> v_i,  r = s1 delta/n + sh (softmax(s) - 1/n - delta/n) + s0/n,  delta = s - mean(s)")
          .decode("zeros_decode")
          .input("q", &A::q, "B T H K", "queries, of unit length").values(Values::unit_rows).grad(&G::dq)
          .input("k", &A::k, "B S H K", "keys, of unit length").values(Values::unit_rows).grad(&G::dk)
          .input("v", &A::v, "B S H V", "values").grad(&G::dv)
          .input("s", &A::s, "B S H", "the logit of each key").element(Element::param).values(Values::finite).grad(&G::ds)
          .input("s1", &A::s1, "B T H", "gate of the first order, in (0, 1)").element(Element::param).values(Values::unit_interval).grad(&G::ds1)
          .input("sh", &A::sh, "B T H", "gate of the higher orders, in (0, 1)").element(Element::param).values(Values::unit_interval).grad(&G::dsh)
          .input("s0", &A::s0, "B T H", "gate of the zeroth order, in (-1, 1)").element(Element::param).values(Values::unit_interval).optional().grad(&G::ds0)
          .input("key_mask", &A::key_mask, "B S", "keys with 0 are not there").element(Element::mask).optional()
          .output("out", &O::out, "B T H V", "the weighted sum").grad(&G::dout)
          .option("causal", &A::causal, "a token sees no later key")
          .option("zeroth", &A::zeroth, "s0 must be given").unsampled()
          .option("masked", &A::masked, "key_mask must be given").unsampled()
          .letter("S", "T")  // keys: what key_mask leaves out may hold anything
          .growing()
          .check<check_zeros>()
          .largest_logit<ref::zeros_largest_logit>()
          .cost<cost_zeros>()
          .check_flops<check_zeros_flops>()
          .bench("B=1 T=8192 H=8 K=64|128 V=K causal=1 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=1024|4096|16384|65536 H=4 K=64 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 H=8 K=64 V=K causal=0 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=32 T=64 H=8 K=64 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .compare("", "q=unit@q k=unit@k s=normal s1=0.5 sh=0.5 s0=1 zeroth=1")
          .gpu_bench("B=16 T=2048 H=16 K=64 V=K causal=1 dtype=bf16 pass=fwd|fwd+bwd")
          .impl<ref::zeros_forward, ref::zeros_backward, ref::zeros_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(zeros)
          .cuda<cuda::zeros_forward, cuda::zeros_backward, cuda::zeros_workspace, cuda::zeros_refuses>();
  return op;
}

const Op& zeros_decode_op() {
  using A = ZerosDecodeArgs;
  using O = ZerosDecodeOut;
  static const Op op =
      Declare<A, O, ZerosDecodeGrads>("zeros_decode", "zeros", "continues zero-sum linear attention token by token, the memory in place")
          .equation("R0, R1, Rp and the moments of s take in the new key;  o = q (sh Rp + (s1 - sh) R1 + s0 R0)")
          .input("q", &A::q, "B T H K", "queries of the new tokens, of unit length").values(Values::unit_rows)
          .input("k", &A::k, "B T H K", "keys of the new tokens, of unit length").values(Values::unit_rows)
          .input("v", &A::v, "B T H V", "values of the new tokens")
          .input("s", &A::s, "B T H", "the logit of each key").element(Element::param).values(Values::finite)
          .input("s1", &A::s1, "B T H", "gate of the first order, in (0, 1)").element(Element::param).values(Values::unit_interval)
          .input("sh", &A::sh, "B T H", "gate of the higher orders, in (0, 1)").element(Element::param).values(Values::unit_interval)
          .input("s0", &A::s0, "B T H", "gate of the zeroth order, in (-1, 1)").element(Element::param).values(Values::unit_interval).optional()
          .input("state", &A::state, "B H 3 K V", "R0, R1, Rp; zeros at first; read and overwritten").element(Element::acc).mutated()
          .input("moments", &A::moments, "B H 5", "log mean exp(s) and mean(s), each as a sum of two numbers, and n; zeros at first")
          .element(Element::acc).values(Values::unit_interval).mutated()
          .output("out", &O::out, "B T H V", "the weighted sum")
          .option("zeroth", &A::zeroth, "s0 must be given").unsampled()
          .growing()
          .check<check_decode>()
          .cost<cost_decode>()
          .bench("B=1|16 T=1 H=12 K=64 V=K dtype=f32|bf16 pass=fwd")
          .gpu_bench("B=1|64 T=1 H=32 K=64 V=K dtype=bf16 pass=fwd")
          .impl<ref::zeros_decode_forward, nullptr, ref::zeros_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(zeros_decode)
          .cuda<cuda::zeros_decode_forward, nullptr, cuda::zeros_decode_workspace, cuda::zeros_decode_refuses>();
  return op;
}

const Op& zeros_softmax_op() {
  using A = ZerosSoftmaxArgs;
  using O = ZerosOut;
  using G = ZerosSoftmaxGrads;
  static const Op op =
      Declare<A, O, G>("zeros_softmax", "zeros", "softmax attention with the orders of its weights reweighted, so that they sum to zero")
          .equation("o_t = sum_i r_ti v_i,  r = s1 delta/n + sh (softmax(s) - 1/n - delta/n) + s0/n,  s_ti = scale <q_t, k_i>")
          .input("q", &A::q, "B T H K", "queries").grad(&G::dq)
          .input("k", &A::k, "B T H K", "keys").grad(&G::dk)
          .input("v", &A::v, "B T H V", "values").grad(&G::dv)
          .input("s1", &A::s1, "B T H", "gate of the first order, in (0, 1)").element(Element::param).values(Values::unit_interval).grad(&G::ds1)
          .input("sh", &A::sh, "B T H", "gate of the higher orders, in (0, 1)").element(Element::param).values(Values::unit_interval).grad(&G::dsh)
          .input("s0", &A::s0, "B T H", "gate of the zeroth order, in (-1, 1)").element(Element::param).values(Values::unit_interval).optional().grad(&G::ds0)
          .output("out", &O::out, "B T H V", "the weighted sum").grad(&G::dout)
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies q.k; default K^-0.5")
          .option("causal", &A::causal, "a token sees no later key")
          .option("zeroth", &A::zeroth, "s0 must be given").unsampled()
          .growing()
          .check<check_softmax>()
          .largest_logit<ref::zeros_softmax_largest_logit>()
          .cost<cost_softmax>()
          .bench("B=1 T=4096 H=8 K=64 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .gpu_bench("B=1 T=2048 H=16 K=64 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .compare("half", "s1=0.5 sh=0.5 s0=1")
          .impl<ref::zeros_softmax_forward, ref::zeros_softmax_backward, ref::zeros_softmax_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(zeros_softmax)
          .cuda<cuda::zeros_softmax_forward, cuda::zeros_softmax_backward, cuda::zeros_softmax_workspace, cuda::zeros_softmax_refuses>();
  return op;
}
// clang-format on

Status zeros(const ZerosArgs& args, const ZerosOut& out, const Context& context) {
  return run(zeros_op(), Pass::forward, &args, &out, nullptr, context);
}
Status zeros_backward(const ZerosArgs& args, const ZerosOut& out, const ZerosGrads& grads, const Context& context) {
  return run(zeros_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t zeros_workspace(const ZerosArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(zeros_op(), pass, &args, context);
}
Status zeros_decode(const ZerosDecodeArgs& args, const ZerosDecodeOut& out, const Context& context) {
  return run(zeros_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t zeros_decode_workspace(const ZerosDecodeArgs& args, const Context& context) {
  return workspace_bytes(zeros_decode_op(), Pass::forward, &args, context);
}
Status zeros_softmax(const ZerosSoftmaxArgs& args, const ZerosOut& out, const Context& context) {
  return run(zeros_softmax_op(), Pass::forward, &args, &out, nullptr, context);
}
Status zeros_softmax_backward(const ZerosSoftmaxArgs& args, const ZerosOut& out, const ZerosSoftmaxGrads& grads,
                              const Context& context) {
  return run(zeros_softmax_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t zeros_softmax_workspace(const ZerosSoftmaxArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(zeros_softmax_op(), pass, &args, context);
}

}  // namespace linnet
