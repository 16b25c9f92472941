#include "taylor.h"

#include "core/op.h"

namespace linnet {
namespace {

const std::vector<std::string>& modes() {
  static const std::vector<std::string> names = {"exact", "compact", "compact_l2"};
  return names;
}

Status check_lengths(const char* op, bool causal, const Dims& dims) {
  if (!causal || dims["S"] == dims["T"]) return {};
  return bad_input(std::string(op) + ": k has " + std::to_string(dims["S"]) + " tokens, expected " + std::to_string(dims["T"]) +
                   " (same as q) when causal");
}
Status check_exact(const TaylorExactArgs& args, const Dims& dims) {
  LINNET_TRY(check_lengths("taylor_exact", args.causal, dims));
  if (dims["K"] <= 512) return {};  // 131,841 features
  return bad_input("taylor_exact: q has " + std::to_string(dims["K"]) +
                   " channels, expected at most 512: the features are their products");
}
Status check_compact(const TaylorCompactArgs& args, const Dims& dims) {
  return check_lengths("taylor_compact", args.causal, dims);
}
Status check_compact_l2(const TaylorCompactL2Args& args, const Dims& dims) {
  return check_lengths("taylor_compact_l2", args.causal, dims);
}
Status check_decode(const TaylorDecodeArgs& args, const Dims& dims) {
  const std::string mode = modes()[static_cast<size_t>(args.mode)];
  const auto wanted = [&](const char* name, const View& view, bool by) -> Status {
    if (view.given() == by) return {};
    return bad_input("taylor_decode: " + std::string(name) +
                     (by ? " is missing; mode " + mode + " needs it" : " is given, expected none with mode " + mode));
  };
  LINNET_TRY(wanted("alpha", args.alpha, args.mode == TaylorMode::compact));
  LINNET_TRY(wanted("beta", args.beta, args.mode == TaylorMode::compact));
  LINNET_TRY(wanted("gamma", args.gamma, args.mode == TaylorMode::compact));
  LINNET_TRY(wanted("const", args.constant, args.mode == TaylorMode::compact_l2));
  if (args.mode != TaylorMode::exact || dims["K"] <= 512) return {};
  return bad_input("taylor_decode: q has " + std::to_string(dims["K"]) + " channels, expected at most 512 with mode exact");
}

// Read and write of the state 4 F (V + 1), and inside a chunk of 32 the half of each triangle that counts: scores from s (K),
// not from features, and their use.
Cost cost_of(const Dims& dims, Dtype dtype, double F, bool causal, Pass pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double B = size("B"), T = size("T"), S = dims.find("S") == nullptr ? T : size("S"), H = size("H"), K = size("K");
  const double V = dims.find("V") == nullptr ? K : size("V"), C = causal ? 32 : 0;
  const double rows = static_cast<double>(dtype_size(dtype)) * B * H * (T * (K + V) + S * (K + V));
  if (pass == Pass::forward) return {B * H * (2 * F * (V + 1) * (T + S) + C * (K + V) * T), rows};
  return {B * H * (2 * F * (V + 1) * (2 * T + 3 * S) + C * (3 * K + 2 * V) * T), 2 * rows};
}
double exact_width(const Dims& dims) {
  const double K = static_cast<double>(dims["K"]);
  return 1 + K + K * (K + 1) / 2;
}
Cost cost_exact(const TaylorExactArgs& args, const Dims& dims, Pass pass) {
  return cost_of(dims, args.q.dtype, exact_width(dims), args.causal, pass);
}
Cost cost_compact(const TaylorCompactArgs& args, const Dims& dims, Pass pass) {
  return cost_of(dims, args.q.dtype, 2 * static_cast<double>(dims["K"]) + 2, args.causal, pass);
}
Cost cost_compact_l2(const TaylorCompactL2Args& args, const Dims& dims, Pass pass) {
  return cost_of(dims, args.q.dtype, static_cast<double>(dims["K"]) + 1, args.causal, pass);
}
Cost cost_qt(const TaylorQtArgs& args, const Dims& dims, Pass pass) {
  return cost_of(dims, args.q.dtype, static_cast<double>(dims["K"]) + 1, args.causal, pass);
}
Cost cost_decode(const TaylorDecodeArgs&, const Dims& dims, Pass) {
  const double state = static_cast<double>(dims["B"] * dims["H"] * dims["F"] * dims["V"]);
  return {4 * state * static_cast<double>(dims["T"]), 8 * state};
}

}  // namespace

// clang-format off
#define TAYLOR_INPUTS                                                                                        \
  .input("q", &A::q, "B T H K", "queries").grad(&G::dq)                                                      \
  .input("k", &A::k, "B S H K", "keys; S = T when causal").grad(&G::dk)                                      \
  .input("v", &A::v, "B S H V", "values").grad(&G::dv)                                                       \
  .input("key_mask", &A::key_mask, "B S", "keys with 0 take no part").element(Element::mask).optional()
#define TAYLOR_OUTPUTS                                                                                       \
  .output("out", &O::out, "B T H V", "the output").grad(&G::dout).saved()                                    \
  .output("den", &O::den, "B T H", "sums of the weights, eps included").element(Element::acc).optional().saved() \
  .output("phi_q", &O::phi_q, "B T H F", "the features of q").element(Element::acc).optional()               \
  .output("final_state", &O::final_state, "B H F V", "sum of phi(k) v^T").element(Element::acc).optional()   \
  .output("final_z", &O::final_z, "B H F", "sum of phi(k)").element(Element::acc).optional()

const Op& taylor_exact_op() {
  using A = TaylorExactArgs;
  using O = TaylorOut;
  using G = TaylorExactGrads;
  static const Op op =
      Declare<A, O, G>("taylor_exact", "taylor", "attention with weights 1 + s + s^2/2, in linear time")
          .equation("o_i = sum_j w_ij v_j / (sum_j w_ij + eps),  w = 1 + s + s^2/2,  s = scale q.k")
          .decode("taylor_decode")
          TAYLOR_INPUTS
          TAYLOR_OUTPUTS
          .option("causal", &A::causal, "a token sees no later key")
          .option("scale", &A::scale, 0, kAnyReal, "of the logits s; default K^-0.5").sampled_to(0.1)  // small logits are what it is for; s^2 is a sum of K^2 terms that cancel
          .option("eps", &A::eps, 0, kAnyReal, "added to the denominator")
          .letter("F", "1+K+K*(K+1)//2")
          .growing()
          .check<check_exact>()
          .cost<cost_exact>()
          .bench("B=1 T=4096 S=T H=8 K=16 V=64 causal=1|0 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=1024|16384 S=T H=8 K=16 V=64 causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .compare("", "")
          .gpu_bench("B=16 T=2048 S=T H=16 K=16 V=64 causal=1 dtype=bf16 pass=fwd|fwd+bwd")
          .impl<ref::taylor_exact_forward, ref::taylor_exact_backward, ref::taylor_exact_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(taylor_exact)
          .cuda<cuda::taylor_exact_forward, cuda::taylor_exact_backward, cuda::taylor_exact_workspace, cuda::taylor_exact_refuses>();
  return op;
}

const Op& taylor_compact_op() {
  using A = TaylorCompactArgs;
  using O = TaylorOut;
  using G = TaylorCompactGrads;
  static const Op op =
      Declare<A, O, G>("taylor_compact", "taylor", "QT-ViT's compact quadratic attention, as in the paper")
          .equation("w = (alpha^2 sum_d q_d^2 k_d^2 + 2 beta^2 scale q.k + gamma^2 + 1) / 2")
          .decode("taylor_decode")
          TAYLOR_INPUTS
          // Weights are positive where beta^4 <= alpha^2 (1 + gamma^2); random cases keep to that.
          .input("alpha", &A::alpha, "", "of the squares; 1 at first").element(Element::param).values(Values::gain).grad(&G::dalpha)
          .input("beta", &A::beta, "", "of the linear part; 0 at first").element(Element::param).values(Values::unit_interval).grad(&G::dbeta)
          .input("gamma", &A::gamma, "", "of the constant; 1 at first").element(Element::param).values(Values::gain).grad(&G::dgamma)
          TAYLOR_OUTPUTS
          .option("causal", &A::causal, "a token sees no later key")
          .option("scale", &A::scale, 0, kAnyReal, "of the linear part; default K^-0.5")
          .option("eps", &A::eps, 0, kAnyReal, "added to the denominator")
          .letter("F", "2*K+2")
          .growing()
          .check<check_compact>()
          .cost<cost_compact>()
          .bench("B=1 T=8192 S=T H=8 K=32 V=64 causal=1|0 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=1024|4096|16384|65536 S=T H=4 K=32 V=64 causal=1 dtype=f32 pass=fwd")
          .compare("", "alpha=1 beta=0 gamma=1")
          .gpu_bench("B=16 T=2048 S=T H=16 K=32 V=64 causal=1 dtype=bf16 pass=fwd|fwd+bwd")
          .impl<ref::taylor_compact_forward, ref::taylor_compact_backward, ref::taylor_compact_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(taylor_compact)
          .cuda<cuda::taylor_compact_forward, cuda::taylor_compact_backward, cuda::taylor_compact_workspace, cuda::taylor_compact_refuses>();
  return op;
}

const Op& taylor_compact_l2_op() {
  using A = TaylorCompactL2Args;
  using O = TaylorOut;
  using G = TaylorCompactL2Grads;
  static const Op op =
      Declare<A, O, G>("taylor_compact_l2", "taylor", "QT-ViT's compact quadratic attention, as released")
          .equation("w = u(q).u(k) + const^2,  u(x) = unit(unit(x)^2)")
          .decode("taylor_decode")
          TAYLOR_INPUTS
          .input("const", &A::constant, "", "the constant feature; 1 at first").element(Element::param).grad(&G::dconstant)
          TAYLOR_OUTPUTS
          .option("causal", &A::causal, "a token sees no later key")
          .option("eps", &A::eps, 0, 1, "added to the denominator and to the norms")
          .letter("F", "K+1")
          .growing()
          .check<check_compact_l2>()
          .cost<cost_compact_l2>()
          .bench("B=1 T=8192 S=T H=8 K=32 V=32 causal=1|0 dtype=f32 pass=fwd|fwd+bwd")
          .compare("", "const=1")
          .impl<ref::taylor_compact_l2_forward, ref::taylor_compact_l2_backward, ref::taylor_compact_l2_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(taylor_compact_l2)
          .cuda<cuda::taylor_compact_l2_forward, cuda::taylor_compact_l2_backward, cuda::taylor_compact_l2_workspace, cuda::taylor_compact_l2_refuses>();
  return op;
}

const Op& taylor_qt_layer_op() {
  using A = TaylorQtArgs;
  using O = TaylorQtOut;
  using G = TaylorQtGrads;
  static const Op op =
      Declare<A, O, G>("taylor_qt_layer", "taylor", "QT-ViT's attention between its convolutions: embedding, compact_l2, shortcut")
          .equation("compact_l2(q, k + ape, v) + gelu(batch_norm(v))")
          .input("q", &A::q, "B T H K", "queries").grad(&G::dq)
          .input("k", &A::k, "B T H K", "keys").grad(&G::dk)
          .input("v", &A::v, "B T H K", "values").grad(&G::dv)
          .input("ape", &A::ape, "T H K", "position embedding, added to k").element(Element::param).grad(&G::dape)
          .input("const", &A::constant, "", "the constant feature; 1 at first").element(Element::param).grad(&G::dconstant)
          .input("bn_weight", &A::bn_weight, "K", "of the batch norm, shared by all heads").element(Element::param).grad(&G::dbn_weight)
          .input("bn_bias", &A::bn_bias, "K", "of the batch norm").element(Element::param).grad(&G::dbn_bias)
          .input("bn_mean", &A::bn_mean, "K", "running mean of the batch norm").element(Element::param)
          .input("bn_var", &A::bn_var, "K", "running variance of the batch norm").element(Element::param).values(Values::unit_interval)
          .output("out", &O::out, "B T H K", "the output").grad(&G::dout)
          .option("causal", &A::causal, "a token sees no later key")
          .option("eps", &A::eps, 0, 1, "added to the denominator and to the norms")
          .option("bn_eps", &A::bn_eps, 1e-12, 1, "added to the variance")
          .growing()
          .cost<cost_qt>()
          .bench("B=8 T=196 H=16 K=16 dtype=f32 pass=fwd|fwd+bwd")
          .compare("", "ape=0 const=1 bn_weight=0.5 bn_bias=0 bn_mean=0 bn_var=1")
          .impl<ref::taylor_qt_layer_forward, ref::taylor_qt_layer_backward, ref::taylor_qt_layer_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(taylor_qt_layer)
          .cuda<cuda::taylor_qt_layer_forward, cuda::taylor_qt_layer_backward, cuda::taylor_qt_layer_workspace, cuda::taylor_qt_layer_refuses>();
  return op;
}

const Op& taylor_decode_op() {
  using A = TaylorDecodeArgs;
  using O = TaylorDecodeOut;
  static const Op op =
      Declare<A, O, TaylorDecodeGrads>("taylor_decode", "taylor", "continues Taylor attention token by token, the state in place")
          .equation("S += phi(k) v^T;  z += phi(k);  o = phi(q) S / (phi(q).z + eps)")
          .input("q", &A::q, "B T H K", "queries of the new tokens")
          .input("k", &A::k, "B T H K", "keys of the new tokens")
          .input("v", &A::v, "B T H V", "values of the new tokens")
          .input("state", &A::state, "B H F V", "S; read and overwritten").element(Element::acc).mutated()
          .input("z", &A::z, "B H F", "z; read and overwritten").element(Element::acc).values(Values::feature_sums).mutated()
          // Random states are no sums of features: any linear part could cancel their denominators, so beta is drawn 0.
          .input("alpha", &A::alpha, "", "mode compact").element(Element::param).values(Values::gain).optional()
          .input("beta", &A::beta, "", "mode compact").element(Element::param).values(Values::unit_interval).optional()
          .input("gamma", &A::gamma, "", "mode compact").element(Element::param).values(Values::gain).optional()
          .input("const", &A::constant, "", "mode compact_l2").element(Element::param).optional()
          .output("out", &O::out, "B T H V", "the output")
          .option("mode", &A::mode, modes(), "which weights")
          .option("scale", &A::scale, 0, kAnyReal, "modes exact and compact; default K^-0.5")
          .option("eps", &A::eps, 0, 1, "added to the denominator; default 1e-12, compact_l2 1e-15")
          .letter_by("F", "mode", {{"exact", "1+K+K*(K+1)//2"}, {"compact", "2*K+2"}, {"compact_l2", "K+1"}})
          .growing()
          .check<check_decode>()
          .cost<cost_decode>()
          .bench("B=1|16 T=1 H=16 K=16 V=64 dtype=f32 pass=fwd")
          .impl<ref::taylor_decode_forward, nullptr, ref::taylor_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(taylor_decode)
          .cuda<cuda::taylor_decode_forward, nullptr, cuda::taylor_decode_workspace, cuda::taylor_decode_refuses>();
  return op;
}
// clang-format on

Status taylor_exact(const TaylorExactArgs& args, const TaylorOut& out, const Context& context) {
  return run(taylor_exact_op(), Pass::forward, &args, &out, nullptr, context);
}
Status taylor_exact_backward(const TaylorExactArgs& args, const TaylorOut& out, const TaylorExactGrads& grads,
                             const Context& context) {
  return run(taylor_exact_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t taylor_exact_workspace(const TaylorExactArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(taylor_exact_op(), pass, &args, context);
}
Status taylor_compact(const TaylorCompactArgs& args, const TaylorOut& out, const Context& context) {
  return run(taylor_compact_op(), Pass::forward, &args, &out, nullptr, context);
}
Status taylor_compact_backward(const TaylorCompactArgs& args, const TaylorOut& out, const TaylorCompactGrads& grads,
                               const Context& context) {
  return run(taylor_compact_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t taylor_compact_workspace(const TaylorCompactArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(taylor_compact_op(), pass, &args, context);
}
Status taylor_compact_l2(const TaylorCompactL2Args& args, const TaylorOut& out, const Context& context) {
  return run(taylor_compact_l2_op(), Pass::forward, &args, &out, nullptr, context);
}
Status taylor_compact_l2_backward(const TaylorCompactL2Args& args, const TaylorOut& out, const TaylorCompactL2Grads& grads,
                                  const Context& context) {
  return run(taylor_compact_l2_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t taylor_compact_l2_workspace(const TaylorCompactL2Args& args, Pass pass, const Context& context) {
  return workspace_bytes(taylor_compact_l2_op(), pass, &args, context);
}
Status taylor_qt_layer(const TaylorQtArgs& args, const TaylorQtOut& out, const Context& context) {
  return run(taylor_qt_layer_op(), Pass::forward, &args, &out, nullptr, context);
}
Status taylor_qt_layer_backward(const TaylorQtArgs& args, const TaylorQtOut& out, const TaylorQtGrads& grads,
                                const Context& context) {
  return run(taylor_qt_layer_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t taylor_qt_layer_workspace(const TaylorQtArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(taylor_qt_layer_op(), pass, &args, context);
}
Status taylor_decode(const TaylorDecodeArgs& args, const TaylorDecodeOut& out, const Context& context) {
  return run(taylor_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t taylor_decode_workspace(const TaylorDecodeArgs& args, const Context& context) {
  return workspace_bytes(taylor_decode_op(), Pass::forward, &args, context);
}

}  // namespace linnet
