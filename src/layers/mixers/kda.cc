// Kimi Delta Attention (arXiv 2510.26692), with the parameter names of flash-linear-attention's checkpoints.
#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

struct Kda {
  int64_t hidden = 2048, heads = 16, key = 128, value = 128, rank = 0, gate_rank = 0, taps = 4;
  bool gate = true, gate_bias = true, double_beta = false, conv_bias = false;
  Maybe lower;
  double eps = 1e-5;
};

Value record(Recorder& l, const Kda& o, Value x) {  // x [B, T, hidden]
  const int64_t R = o.rank > 0 ? o.rank : o.value, G = o.gate_rank > 0 ? o.gate_rank : o.value, H = o.heads;
  const Value q = branch(l, "q", {o.hidden, H, o.key, o.taps, "silu", o.conv_bias}, x);
  const Value k = branch(l, "k", {o.hidden, H, o.key, o.taps, "silu", o.conv_bias}, x);
  const Value v = branch(l, "v", {o.hidden, H, o.value, o.taps, "silu", o.conv_bias}, x);
  const Value b = l.dense(x, l.weight("b_proj.weight", {H, o.hidden}, normal(0.02), transposed("wb")));
  const Value beta = l.map(o.double_beta ? "2 * sigmoid(b)" : "sigmoid(b)", {{"b", b}}, "beta");
  Value a = l.dense(x, l.weight("f_proj.0.weight", {R, o.hidden}, normal(0.02), transposed("wf1")));
  a = l.split(l.dense(a, l.weight("f_proj.1.weight", {H * o.key, R}, normal(0.02), transposed("wf2"))), H);
  const Value A_log = l.column(l.weight("A_log", {H}, o.lower.given ? zeros() : log_uniform(1, 16), as("A_log")));
  const Value dt_bias = l.weight("dt_bias", {H, o.key}, inverse_softplus_log_uniform(1e-3, 0.1), as("dt_bias"));
  // The bounded gate keeps the decay of 16 tokens within the range of f32.
  const std::string gate = o.lower.given ? number_text(o.lower.value) + " * sigmoid(exp(A_log) * (a + dt_bias))"
                                         : "-exp(A_log) * softplus(a + dt_bias)";
  const Value g = l.map(gate, {{"a", a}, {"A_log", A_log}, {"dt_bias", dt_bias}}, "g");
  Value y = l.op("gated_delta", {{"q", q}, {"k", k}, {"v", v}, {"g", g}, {"beta", beta}}, {{"l2_norm", "1"}});
  Value z;
  if (o.gate) {
    z = l.dense(x, l.weight("g_proj.0.weight", {G, o.hidden}, normal(0.02), transposed("wg1")));
    const Value bias = o.gate_bias ? l.weight("g_proj.1.bias", {H * o.value}, zeros(), as("bg")) : Value();
    z = l.split(l.dense(z, l.weight("g_proj.1.weight", {H * o.value, G}, normal(0.02), transposed("wg2")), bias), H);
  }
  y = l.op("rms_norm_gated", {{"x", y}, {"z", z}, {"weight", l.weight("o_norm.weight", {o.value}, ones(), as("norm"))}},
           {{"eps", number_text(o.eps)}, {"gate", "sigmoid"}, {"norm_before_gate", "1"}}, "o_norm");
  return l.dense(l.join(y), l.weight("o_proj.weight", {o.hidden, H * o.value}, normal(0.02), transposed("wo")));
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  const int64_t heads = f.number("heads", 1);
  s->push_back({"key", whole(f.size("wq", 1) / heads)});
  s->push_back({"value", whole(f.size("wv", 1) / heads)});
  s->push_back({"rank", whole(f.size("wf1", 1))});
  s->push_back({"gate_rank", whole(f.size("wg1", 1))});
  s->push_back({"taps", whole(f.size("cq", 1))});
  s->push_back({"gate", flag(f.has("wg1"))});
  s->push_back({"gate_bias", flag(f.has("bg"))});
  s->push_back({"conv_bias", flag(f.has("cq_b"))});
}

}  // namespace

const Layer& kda_layer() {
  using O = Kda;
  static const Layer layer = make_layer<O, record>(
      "KimiDeltaAttention", "Kimi Team 2025, arXiv 2510.26692",
      Declaration<O>("kda", "gated_delta", "Kimi Delta Attention: the delta rule with a decay per channel")
          .equation("y = Wo (rmsnorm(gated_delta(q, k, v, g, beta)) sigmoid(Wg2 Wg1 x + bg)); "
                    "g = -exp(A_log) softplus(Wf2 Wf1 x + dt_bias)")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("heads", &O::heads, 1, kAnyCount, "heads")
          .option("key", &O::key, 1, kAnyCount, "channels of a head's queries and keys")
          .option("value", &O::value, 1, kAnyCount, "channels of a head's values")
          .option("rank", &O::rank, 0, kAnyCount, "of the decay's projection; 0: as value")
          .option("gate_rank", &O::gate_rank, 0, kAnyCount, "of the gate's projection; 0: as value")
          .option("taps", &O::taps, 0, 64, "of the short convolutions; 0: none")
          .option("conv_bias", &O::conv_bias, "the convolutions have a bias")
          .option("gate", &O::gate, "the output gate")
          .option("gate_bias", &O::gate_bias, "the gate has a bias")
          .option("double", &O::double_beta, "beta times 2: negative eigenvalues")
          .option("lower", &O::lower, -kAnyReal, 0, "bounded decay lower sigmoid(exp(A_log) (a + dt_bias)); none: unbounded")
          .option("eps", &O::eps, 0, 1, "of the output norm"),
      {{"gated_delta", "kda_layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
