// Simple GLA: gated linear attention with one data-dependent decay per head, as in flash-linear-attention.
#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

struct SimpleGla {
  int64_t hidden = 2048, heads = 4, key = 0, value = 0, taps = 4;
  double tau = 16, eps = 1e-5;
  bool gate = true, decay_bias = true;
};

Value record(Recorder& l, const SimpleGla& o, Value x) {  // x [B, T, hidden]
  const bool derived = o.key == 0 || o.value == 0;
  if (!l.require(!derived || o.hidden % o.heads == 0,
                 "hidden is " + whole(o.hidden) + ", expected a multiple of heads, " + whole(o.heads))) {
    return {};
  }
  const int64_t K = o.key > 0 ? o.key : o.hidden / o.heads, V = o.value > 0 ? o.value : o.hidden / o.heads;
  const Value q = branch(l, "q", {o.hidden, o.heads, K, o.taps}, x), k = branch(l, "k", {o.hidden, o.heads, K, o.taps}, x);
  const Value v = branch(l, "v", {o.hidden, o.heads, V, o.taps}, x);
  const Value bias = o.decay_bias ? l.weight("gk_proj.bias", {o.heads}, zeros(), as("ba")) : Value();
  const Value a = l.dense(x, l.weight("gk_proj.weight", {o.heads, o.hidden}, normal(0.02), transposed("wa")), bias);
  const Value g = l.map("logsigmoid(a) / " + number_text(o.tau), {{"a", a}}, "g");
  Value y = l.op("decay", {{"q", q}, {"k", k}, {"v", v}, {"g", g}});
  Value z;
  if (o.gate)
    z = l.split(l.dense(x, l.weight("g_proj.weight", {o.heads * V, o.hidden}, normal(0.02), transposed("wg"))), o.heads);
  y = l.op("rms_norm_gated", {{"x", y}, {"z", z}, {"weight", l.weight("g_norm.weight", {V}, ones(), as("norm"))}},
           {{"eps", number_text(o.eps)}, {"norm_before_gate", "1"}}, "g_norm");
  return l.dense(l.join(y), l.weight("o_proj.weight", {o.hidden, o.heads * V}, normal(0.02), transposed("wo")));
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  const int64_t heads = f.number("heads", 1);
  s->push_back({"key", whole(f.size("wq", 1) / heads)});
  s->push_back({"value", whole(f.size("wv", 1) / heads)});
  s->push_back({"taps", whole(f.size("cq", 1))});
  s->push_back({"gate", flag(f.has("wg"))});
  s->push_back({"decay_bias", flag(f.has("ba"))});
}

}  // namespace

const Layer& simple_gla_layer() {
  using O = SimpleGla;
  static const Layer layer = make_layer<O, record>(
      "SimpleGatedLinearAttention", "Yang et al., flash-linear-attention; Peng et al. 2021, arXiv 2103.02143",
      Declaration<O>("simple_gla", "decay", "linear attention with a data-dependent decay per head")
          .equation("y = Wo (rmsnorm(decay(q, k, v, g)) silu(Wg x)); q, k, v = silu(conv(W x)), g = logsigmoid(Wa x + b) / tau")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("heads", &O::heads, 1, kAnyCount, "heads")
          .option("key", &O::key, 0, kAnyCount, "channels of a head's queries and keys; 0: hidden / heads")
          .option("value", &O::value, 0, kAnyCount, "channels of a head's values; 0: hidden / heads")
          .option("taps", &O::taps, 0, 64, "of the short convolutions; 0: none")
          .option("tau", &O::tau, 1e-300, kAnyReal, "the decay's temperature")
          .option("decay_bias", &O::decay_bias, "the decay's projection has a bias")
          .option("gate", &O::gate, "the output gate silu(Wg x)")
          .option("eps", &O::eps, 0, 1, "of the output norm"),
      {{"decay", "simple_gla_layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
