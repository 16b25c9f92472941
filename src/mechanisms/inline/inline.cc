#include "inline.h"

#include "core/op.h"

namespace linnet {
namespace {

const std::vector<std::string>& kernels() {
  static const std::vector<std::string> names = {"identity", "relu", "leakyrelu", "exp"};
  return names;
}

template <class Args>
Status check_lengths(const char* op, const Args& args) {
  if (!args.causal || args.k.size[1] == args.q.size[1]) return {};
  return bad_input(std::string(op) + ": k has " + std::to_string(args.k.size[1]) + " tokens, expected " +
                   std::to_string(args.q.size[1]) + " (same as q) when causal");
}

Status check_inline(const InlineArgs& args, const Dims&) { return check_lengths("inline", args); }

Status check_residual(const InlineResidualArgs& args, const Dims& dims) {
  // The three numbers may be anything: compare without their product overflowing.
  const int64_t rest = dims["T"] - args.prefix;
  const bool fits = rest >= 0 && (args.width == 0 ? rest == 0 : rest % args.width == 0 && rest / args.width == args.height);
  if (fits) return {};
  return bad_input("inline_residual: q has " + std::to_string(dims["T"]) + " tokens, expected prefix + height * width = " +
                   std::to_string(args.prefix) + " + " + std::to_string(args.height) + " * " + std::to_string(args.width));
}

// Reads and writes of the state as in linear, with one feature more; centring costs a pass over the keys.
Cost cost_of(const View& q, const View& k, const View& v, bool causal, Pass pass) {
  const double B = static_cast<double>(q.size[0]), T = static_cast<double>(q.size[1]), S = static_cast<double>(k.size[1]);
  const double H = static_cast<double>(q.size[2]), F = static_cast<double>(q.size[3]), V = static_cast<double>(v.size[3]);
  const double C = causal ? 32 : 0, rows = static_cast<double>(dtype_size(q.dtype)) * B * H * (T * (F + V) + S * (F + V));
  if (pass == Pass::forward) return {B * H * (2 * F * V * (T + S) + C * (F + V) * T), rows};
  return {B * H * (2 * F * V * (2 * T + 3 * S) + C * (3 * F + 2 * V) * T), 2 * rows};
}
Cost cost_inline(const InlineArgs& args, const Dims&, Pass pass) { return cost_of(args.q, args.k, args.v, args.causal, pass); }
Cost cost_residual(const InlineResidualArgs& args, const Dims& dims, Pass pass) {
  Cost cost = cost_of(args.q, args.k, args.v, args.causal, pass);
  const double rows = static_cast<double>(dims["B"] * dims["T"] * dims["H"] * dims["D"]), D = static_cast<double>(dims["D"]);
  cost.flops += (pass == Pass::forward ? 1 : 2) * (18 * rows + 20 * static_cast<double>(dims["B"] * dims["H"]) * D * D);
  return cost;
}
Cost cost_decode(const InlineDecodeArgs&, const Dims& dims, Pass) {
  const double state = static_cast<double>(dims["B"] * dims["H"] * dims["K"] * dims["V"]);
  return {4 * state * static_cast<double>(dims["T"]), 8 * state};
}

}  // namespace

// clang-format off
const Op& inline_op() {
  using A = InlineArgs;
  using O = InlineOut;
  using G = InlineGrads;
  static const Op op =
      Declare<A, O, G>("inline", "inline", "injective linear attention: the mean over keys is subtracted, not divided out")
          .equation("o_i = vbar + scale phi(q_i) (1/n) sum_j (phi(k_j) - kbar)^T (v_j - vbar)")
          .decode("inline_decode")
          .input("q", &A::q, "B T H K", "queries, before the kernel").grad(&G::dq)
          .input("k", &A::k, "B S H K", "keys, before the kernel; S = T when causal").grad(&G::dk)
          .input("v", &A::v, "B S H V", "values").grad(&G::dv)
          .input("mask", &A::mask, "B S", "keys with 0 take no part").element(Element::mask).optional()
          .output("out", &O::out, "B T H V", "the output").grad(&G::dout)
          .output("final_moment", &O::final_moment, "B H K V", "sum of the centred outer products").element(Element::acc).optional()
          .output("final_key", &O::final_key, "B H K", "the mean mapped key").element(Element::acc).optional()
          .output("final_value", &O::final_value, "B H V", "the mean value").element(Element::acc).optional()
          .output("final_count", &O::final_count, "B H", "the number of keys").element(Element::acc).optional()
          .option("kernel", &A::kernel, kernels(), "phi: identity, relu, leakyrelu (slope 0.01) or exp(0.2 x)")
          .option("causal", &A::causal, "a token sees no later key")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies the weights; default K^-0.5")
          .growing()
          .check<check_inline>()
          .earlier_rows(EarlierRows::numbers)  // values are centred chunk by chunk
          .cost<cost_inline>()
          .bench("B=1 T=8192 S=T H=8 K=64 V=K causal=1|0 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=1024|4096|16384|65536 S=T H=4 K=64 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=8 T=196 S=T H=6 K=32 V=K causal=0 dtype=f32 pass=fwd|fwd+bwd")
          .compare("", "")
          .gpu_bench("B=16 T=2048 S=T H=16 K=64 V=K causal=1|0 dtype=bf16 pass=fwd|fwd+bwd")
          .impl<ref::inline_forward, ref::inline_backward, ref::inline_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(inline)
          .cuda<cuda::inline_forward, cuda::inline_backward, cuda::inline_workspace, cuda::inline_refuses>();
  return op;
}

const Op& inline_residual_op() {
  using A = InlineResidualArgs;
  using O = InlineResidualOut;
  using G = InlineResidualGrads;
  static const Op op =
      Declare<A, O, G>("inline_residual", "inline", "injective linear attention with the local 3 x 3 residual")
          .equation("inline(q, k, v) + sum_tap r_tap v_shifted,  r = w2 gelu(w1 pooled + b1) + b2")
          .input("q", &A::q, "B T H D", "queries, before the kernel").grad(&G::dq)
          .input("k", &A::k, "B S H D", "keys, before the kernel").grad(&G::dk)
          .input("v", &A::v, "B S H D", "values; tokens prefix .. on a grid, row by row").grad(&G::dv)
          .input("mask", &A::mask, "B S", "tokens with 0 take no part: not in the attention, and the residual reads zeros there").element(Element::mask).optional()
          .input("pooled", &A::pooled, "B H D", "mean token of the layer's input, in heads").grad(&G::dpooled)
          .input("w1", &A::w1, "H D D", "first map of the coefficients (out, in)").element(Element::param).grad(&G::dw1)
          .input("b1", &A::b1, "H D", "its bias").element(Element::param).grad(&G::db1)
          .input("w2", &A::w2, "H 9*D D", "second map of the coefficients; rows channel * 9 + tap").element(Element::param).grad(&G::dw2)
          .input("b2", &A::b2, "H 9*D", "its bias").element(Element::param).grad(&G::db2)
          .output("out", &O::out, "B T H D", "attention and residual").grad(&G::dout)
          .output("r", &O::r, "B H D 9", "the coefficients of each channel's 3 x 3 kernel").element(Element::acc).optional()
          .option("kernel", &A::kernel, kernels(), "phi: identity, relu, leakyrelu (slope 0.01) or exp(0.2 x)")
          .option("causal", &A::causal, "a token sees no later key")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies the weights; default D^-0.5")
          .option("height", &A::height, 0, kAnyCount, "rows of the grid")
          .option("width", &A::width, 0, kAnyCount, "columns of the grid")
          .option("prefix", &A::prefix, 0, kAnyCount, "tokens before the grid, such as a class token")
          .letter("T", "prefix+height*width")
          .letter("S", "prefix+height*width")  // keys: what the mask leaves out may hold anything
          .growing()
          .check<check_residual>()
          .earlier_rows(EarlierRows::nothing)  // the residual's coefficients are made of all tokens
          .cost<cost_residual>()
          .bench("B=8 T=50 H=6 D=32 height=7 width=7 prefix=1 dtype=f32 pass=fwd|fwd+bwd")
          .impl<ref::inline_residual_forward, ref::inline_residual_backward, ref::inline_residual_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(inline_residual)
          .cuda<cuda::inline_residual_forward, cuda::inline_residual_backward, cuda::inline_residual_workspace, cuda::inline_residual_refuses>();
  return op;
}

const Op& inline_decode_op() {
  using A = InlineDecodeArgs;
  using O = InlineDecodeOut;
  static const Op op =
      Declare<A, O, InlineDecodeGrads>("inline_decode", "inline", "continues causal injective attention token by token")
          .equation("n += 1; dk = phi(k) - kbar; dv = v - vbar; kbar += dk/n; vbar += dv/n; M += (n-1)/n dk^T dv; o = vbar + (scale/n) phi(q) M")
          .input("q", &A::q, "B T H K", "queries of the new tokens")
          .input("k", &A::k, "B T H K", "keys of the new tokens")
          .input("v", &A::v, "B T H V", "values of the new tokens")
          .input("moment", &A::moment, "B H K V", "sum of the centred outer products; read and overwritten").element(Element::acc).mutated()
          .input("key", &A::key, "B H K", "the mean mapped key; read and overwritten").element(Element::acc).mutated()
          .input("value", &A::value, "B H V", "the mean value; read and overwritten").element(Element::acc).mutated()
          .input("count", &A::count, "B H", "the number of keys; read and overwritten")
          .element(Element::acc).values(Values::feature_sums).mutated()
          .output("out", &O::out, "B T H V", "the output")
          .option("kernel", &A::kernel, kernels(), "phi: identity, relu, leakyrelu (slope 0.01) or exp(0.2 x)")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies the weights; default K^-0.5")
          .growing()
          .cost<cost_decode>()
          .bench("B=1|16 T=1 H=32 K=128 V=K dtype=f32 pass=fwd")
          .impl<ref::inline_decode_forward, nullptr, ref::inline_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(inline_decode)
          .cuda<cuda::inline_decode_forward, nullptr, cuda::inline_decode_workspace, cuda::inline_decode_refuses>();
  return op;
}
// clang-format on

Status inline_attention(const InlineArgs& args, const InlineOut& out, const Context& context) {
  return run(inline_op(), Pass::forward, &args, &out, nullptr, context);
}
Status inline_backward(const InlineArgs& args, const InlineOut& out, const InlineGrads& grads, const Context& context) {
  return run(inline_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t inline_workspace(const InlineArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(inline_op(), pass, &args, context);
}
Status inline_residual(const InlineResidualArgs& args, const InlineResidualOut& out, const Context& context) {
  return run(inline_residual_op(), Pass::forward, &args, &out, nullptr, context);
}
Status inline_residual_backward(const InlineResidualArgs& args, const InlineResidualOut& out, const InlineResidualGrads& grads,
                                const Context& context) {
  return run(inline_residual_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t inline_residual_workspace(const InlineResidualArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(inline_residual_op(), pass, &args, context);
}
Status inline_decode(const InlineDecodeArgs& args, const InlineDecodeOut& out, const Context& context) {
  return run(inline_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t inline_decode_workspace(const InlineDecodeArgs& args, const Context& context) {
  return workspace_bytes(inline_decode_op(), Pass::forward, &args, context);
}

}  // namespace linnet
