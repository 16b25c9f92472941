// Gated DeltaNet (arXiv 2412.06464), with the parameter names of flash-linear-attention's and transformers' checkpoints.
#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

struct GatedDeltaNet {
  int64_t hidden = 2048, heads = 6, value_heads = 0, key = 256, value = 512, taps = 4;
  bool gate = true, double_beta = false, conv_bias = false;
  double eps = 1e-5;
};

Value record(Recorder& l, const GatedDeltaNet& o, Value x) {  // x [B, T, hidden]
  const int64_t heads = o.value_heads > 0 ? o.value_heads : o.heads;
  l.require(heads % o.heads == 0,
            "value_heads is " + std::to_string(heads) + ", expected a multiple of heads, " + std::to_string(o.heads));
  const Value q = branch(l, "q", {o.hidden, o.heads, o.key, o.taps, "silu", o.conv_bias}, x);
  const Value k = branch(l, "k", {o.hidden, o.heads, o.key, o.taps, "silu", o.conv_bias}, x);
  const Value v = branch(l, "v", {o.hidden, heads, o.value, o.taps, "silu", o.conv_bias}, x);
  const Value b = l.dense(x, l.weight("b_proj.weight", {heads, o.hidden}, normal(0.02), transposed("wb")));
  const Value a = l.dense(x, l.weight("a_proj.weight", {heads, o.hidden}, normal(0.02), transposed("wa")));
  const Value beta = l.map(o.double_beta ? "2 * sigmoid(b)" : "sigmoid(b)", {{"b", b}}, "beta");
  const Value g = l.map("-exp(A_log) * softplus(a + dt_bias)",
                        {{"a", a},
                         {"A_log", l.weight("A_log", {heads}, log_uniform(0, 16), as("A_log"))},
                         {"dt_bias", l.weight("dt_bias", {heads}, inverse_softplus_log_uniform(1e-3, 0.1), as("dt_bias"))}},
                        "g");
  Value y = l.op("gated_delta", {{"q", q}, {"k", k}, {"v", v}, {"g", g}, {"beta", beta}}, {{"l2_norm", "1"}});
  Value z;
  if (o.gate) {
    z = l.split(l.dense(x, l.weight("g_proj.weight", {heads * o.value, o.hidden}, normal(0.02), transposed("wg"))), heads);
  }
  y = l.op("rms_norm_gated", {{"x", y}, {"z", z}, {"weight", l.weight("o_norm.weight", {o.value}, ones(), as("norm"))}},
           {{"eps", number_text(o.eps)}, {"norm_before_gate", "1"}}, "o_norm");
  return l.dense(l.join(y), l.weight("o_proj.weight", {o.hidden, heads * o.value}, normal(0.02), transposed("wo")));
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  const int64_t heads = f.number("heads", 1), value_heads = f.size("A_log", 0);
  s->push_back({"key", std::to_string(f.size("wq", 1) / heads)});
  s->push_back({"value_heads", std::to_string(value_heads)});
  s->push_back({"value", std::to_string(f.size("wv", 1) / (value_heads > 0 ? value_heads : heads))});
  s->push_back({"taps", std::to_string(f.size("cq", 1))});
  s->push_back({"gate", f.has("wg") ? "1" : "0"});
  s->push_back({"conv_bias", f.has("cq_b") ? "1" : "0"});
}

}  // namespace

const Layer& gated_deltanet_layer() {
  using O = GatedDeltaNet;
  static const Layer layer = make_layer<O, record>(
      "GatedDeltaNet", "Yang, Kautz, Hatamizadeh, ICLR 2025, arXiv 2412.06464",
      Declaration<O>("gated_deltanet", "gated_delta", "Gated DeltaNet: the delta rule with a decay per head")
          .equation("y = Wo (rmsnorm(gated_delta(q, k, v, g, beta)) silu(Wg x)); q, k, v = silu(conv(W x)), "
                    "g = -exp(A_log) softplus(Wa x + dt_bias), beta = sigmoid(Wb x)")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("heads", &O::heads, 1, kAnyCount, "heads of queries and keys")
          .option("value_heads", &O::value_heads, 0, kAnyCount, "heads of values, a multiple of heads; 0: as many")
          .option("key", &O::key, 1, kAnyCount, "channels of a head's queries and keys")
          .option("value", &O::value, 1, kAnyCount, "channels of a head's values")
          .option("taps", &O::taps, 0, 64, "of the short convolutions; 0: none")
          .option("conv_bias", &O::conv_bias, "the convolutions have a bias")
          .option("gate", &O::gate, "the output gate silu(Wg x)")
          .option("double", &O::double_beta, "beta times 2: negative eigenvalues")
          .option("eps", &O::eps, 0, 1, "of the output norm"),
      {{"gated_delta", "gdn_layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
