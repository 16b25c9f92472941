// InLine attention (arXiv 2412.06590): linear attention that subtracts instead of dividing, with a local residual on a grid.
#include <cmath>

#include "layers/mixers/projections.h"

namespace linnet::layers {
namespace {

enum class Kernel : int32_t { identity, relu, leakyrelu, exp };
constexpr const char* kKernels[] = {"identity", "relu", "leakyrelu", "exp"};

struct Inline {
  int64_t hidden = 192, heads = 6, height = 0, width = 0, prefix = 0;
  Kernel kernel = Kernel::identity;
  bool causal = false, bias = true, residual = true;
  Maybe scale;
};

Value record(Recorder& l, const Inline& o, Value x) {  // x [B, T, hidden]
  const int64_t C = o.hidden, H = o.heads, D = C / H;
  if (!l.require(C % H == 0, "hidden is " + whole(C) + ", expected a multiple of heads, " + whole(H))) return {};
  const Value qkv = l.dense(x, l.weight("qkv.weight", {3 * C, C}, normal(0.02), transposed("wqkv")),
                            o.bias ? l.weight("qkv.bias", {3 * C}, zeros(), as("bqkv")) : Value());
  const Value q = l.split(l.slice(qkv, 0, C), H), k = l.split(l.slice(qkv, C, 2 * C), H),
              v = l.split(l.slice(qkv, 2 * C, 3 * C), H);
  std::vector<Setting> options = {{"kernel", kKernels[static_cast<size_t>(o.kernel)]},
                                  {"causal", flag(o.causal)},
                                  {"scale", o.scale.given ? number_text(o.scale.value) : "none"}};
  Value y;
  if (o.residual) {
    const int64_t T = o.prefix + o.height * o.width;
    if (!l.require(T > o.prefix, "the residual needs height and width of the grid")) return {};
    l.tokens(T);
    const double bound = 1 / std::sqrt(static_cast<double>(D));
    // The mean token, in heads: linear attention with every weight 1, divided by their number.
    const Value one = l.constant(1, {kB, kT, H, 1});
    const Value mean = l.op("linear", {{"q", one}, {"k", one}, {"v", l.split(x, H)}},
                            {{"map", "relu"}, {"causal", "0"}, {"normalize", "1"}, {"eps", "0"}}, "mean");
    const Value pooled = l.drop_token(l.last(mean));
    for (const auto& [name, size] :
         {std::pair<const char*, int64_t>{"height", o.height}, {"width", o.width}, {"prefix", o.prefix}})
      options.push_back({name, whole(size)});
    y = l.op("inline_residual",
             {{"q", q},
              {"k", k},
              {"v", v},
              {"pooled", pooled},
              {"w1", l.weight("residual.0.weight", {H, D, D}, fan_in(), as("w1"))},
              {"b1", l.weight("residual.0.bias", {H, D}, uniform(-bound, bound), as("b1"))},
              {"w2", l.weight("residual.2.weight", {H, 9 * D, D}, fan_in(), as("w2"))},
              {"b2", l.weight("residual.2.bias", {H, 9 * D}, uniform(-bound, bound), as("b2"))}},
             options);
  } else {
    y = l.op("inline", {{"q", q}, {"k", k}, {"v", v}}, options);
  }
  return l.dense(l.join(y), l.weight("proj.weight", {C, C}, normal(0.02), transposed("wo")),
                 o.bias ? l.weight("proj.bias", {C}, zeros(), as("bo")) : Value());
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  s->push_back({"bias", flag(f.has("bqkv"))});
  s->push_back({"residual", flag(f.has("w1"))});
}

}  // namespace

const Layer& inline_attention_layer() {
  using O = Inline;
  static const Layer layer = make_layer<O, record>(
      "InLineAttention", "Han et al., NeurIPS 2024, arXiv 2412.06590",
      Declaration<O>("inline_attention", "inline", "injective linear attention with a local residual on a grid of tokens")
          .equation("y = Wo (inline(q, k, v) + r * v), r [3 x 3] per channel from the mean token")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("heads", &O::heads, 1, kAnyCount, "heads, a divisor of hidden")
          .option("kernel", &O::kernel, {"identity", "relu", "leakyrelu", "exp"}, "of q and k")
          .option("causal", &O::causal, "a token sees no later one")
          .option("scale", &O::scale, -kAnyReal, kAnyReal, "multiplies the weights; default (hidden / heads)^-0.5")
          .option("residual", &O::residual, "the local residual")
          .option("height", &O::height, 0, kAnyCount, "rows of the grid")
          .option("width", &O::width, 0, kAnyCount, "columns of the grid")
          .option("prefix", &O::prefix, 0, kAnyCount, "tokens before the grid, such as a class token")
          .option("bias", &O::bias, "the projections have a bias"),
      {{"inline", "layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
