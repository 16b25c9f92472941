// Gated linear attention (arXiv 2312.06635), with the parameter names of flash-linear-attention's checkpoints.
#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

struct Gla {
  int64_t hidden = 2048, heads = 4, kv_heads = 0, key = 0, value = 0, rank = 16, taps = 0;
  double tau = 16, eps = 1e-5;
  bool gate = true, gate_bias = false, norm = true;
  Maybe clamp;
};

Value record(Recorder& l, const Gla& o, Value x) {  // x [B, T, hidden]
  const int64_t kv = o.kv_heads > 0 ? o.kv_heads : o.heads, groups = o.heads / kv;
  l.require(o.heads % kv == 0, "heads is " + whole(o.heads) + ", expected a multiple of kv_heads, " + whole(kv));
  if (o.key == 0 || o.value == 0) {
    l.require(o.hidden % (2 * o.heads) == 0,
              "hidden is " + whole(o.hidden) + ", expected a multiple of 2 heads, " + whole(2 * o.heads));
  }
  if (!l.ok()) return {};
  const int64_t K = o.key > 0 ? o.key : o.hidden / (2 * o.heads), V = o.value > 0 ? o.value : o.hidden / o.heads;
  const auto of = [&](int64_t heads, int64_t width) { return Branch{o.hidden, heads, width, o.taps, "silu", false, false}; };
  const Value q = branch(l, "q", of(o.heads, K), x), k = branch(l, "k", of(kv, K), x), v = branch(l, "v", of(kv, V), x);
  Value a = l.dense(x, l.weight("gk_proj.0.weight", {o.rank, o.hidden}, normal(0.02), transposed("wa1")));
  a = l.dense(a, l.weight("gk_proj.1.weight", {kv * K, o.rank}, normal(0.02), transposed("wa2")),
              l.weight("gk_proj.1.bias", {kv * K}, zeros(), as("ba")));
  std::string decay = "logsigmoid(a) / " + number_text(o.tau);
  if (o.clamp.given) decay = "max(" + decay + ", " + number_text(o.clamp.value) + ")";
  const Value g = l.map(decay, {{"a", l.split(a, kv)}}, "g");
  Value y = l.op("gla", {{"q", q}, {"k", l.repeat(k, groups)}, {"v", l.repeat(v, groups)}, {"g", l.repeat(g, groups)}});
  Value z;
  if (o.gate) {
    const Value bias = o.gate_bias ? l.weight("g_proj.bias", {o.heads * V}, zeros(), as("br")) : Value();
    z = l.split(l.dense(x, l.weight("g_proj.weight", {o.heads * V, o.hidden}, normal(0.02), transposed("wr")), bias), o.heads);
  }
  const Value weight = o.norm ? l.weight("g_norm_swish_gate.weight", {V}, ones(), as("norm")) : Value();
  y = l.op("rms_norm_gated", {{"x", y}, {"z", z}, {"weight", weight}}, {{"eps", number_text(o.eps)}, {"norm_before_gate", "1"}},
           "g_norm_swish_gate");
  return l.dense(l.join(y), l.weight("o_proj.weight", {o.hidden, o.heads * V}, normal(0.02), transposed("wo")));
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  const int64_t heads = f.number("heads", 1), kv = f.number("kv_heads", heads);
  s->push_back({"key", whole(f.size("wq", 1) / heads)});
  s->push_back({"value", whole(f.size("wv", 1) / kv)});
  s->push_back({"rank", whole(f.size("wa1", 1))});
  s->push_back({"taps", whole(f.size("cq", 1))});
  s->push_back({"gate", flag(f.has("wr"))});
  s->push_back({"gate_bias", flag(f.has("br"))});
  s->push_back({"norm", flag(f.has("norm"))});
}

}  // namespace

const Layer& gated_linear_attention_layer() {
  using O = Gla;
  static const Layer layer = make_layer<O, record>(
      "GatedLinearAttention", "Yang, Wang, Shen, Panda, Kim, ICML 2024, arXiv 2312.06635",
      Declaration<O>("gated_linear_attention", "gla", "gated linear attention: a data-dependent decay per key channel")
          .equation("y = Wo (rmsnorm(gla(q, k, v, g)) silu(Wr x)); g = logsigmoid(Wa2 Wa1 x + ba) / tau")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("heads", &O::heads, 1, kAnyCount, "heads of queries")
          .option("kv_heads", &O::kv_heads, 0, kAnyCount, "heads of keys, values and decays, a divisor of heads; 0: as many")
          .option("key", &O::key, 0, kAnyCount, "channels of a head's queries and keys; 0: hidden / (2 heads)")
          .option("value", &O::value, 0, kAnyCount, "channels of a head's values; 0: hidden / heads")
          .option("rank", &O::rank, 1, kAnyCount, "of the decay's projection")
          .option("tau", &O::tau, 1e-300, kAnyReal, "the decay's temperature")
          .option("clamp", &O::clamp, -kAnyReal, 0, "lower bound of the log decay; none: off")
          .option("taps", &O::taps, 0, 64, "of the short convolutions; 0: none")
          .option("gate", &O::gate, "the output gate silu(Wr x)")
          .option("gate_bias", &O::gate_bias, "the gate has a bias")
          .option("norm", &O::norm, "the norm has a weight")
          .option("eps", &O::eps, 0, 1, "of the output norm"),
      {{"gla", "layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
