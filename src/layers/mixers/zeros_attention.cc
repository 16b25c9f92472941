// ZeroS (arXiv 2602.05230): attention whose weights sum to zero; the linear form, and the quadratic one on softmax scores.
#include <cmath>

#include "layers/mixers/rope.h"
#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

enum class Order : int32_t { linear, quadratic };
enum class Logits : int32_t { deviation, square, mean, l1, rms };

struct Zeros {
  int64_t hidden = 768, heads = 12;
  bool causal = true, zeroth = false, norm = true, bias = true;
  Order order = Order::linear;
  Logits logits = Logits::deviation;
  Rope rope = Rope::half;
  double rope_base = 10000, norm_eps = 1e-5;
  Maybe scale;
};

// The logit of each step from u [B, T, H, D].
Value step_logits(Recorder& l, const Zeros& o, Value u) {
  const int64_t D = o.hidden / o.heads;
  if (o.logits == Logits::square) return l.map("mean(u * u)", {{"u", u}}, "s");
  if (o.logits == Logits::mean) return l.map("mean(u)", {{"u", u}}, "s");
  // Sums of u over the tokens so far: linear attention with every weight 1.
  const Value one = l.constant(1, {kB, kT, o.heads, 1});
  const std::vector<Setting> sums = {{"scale", "1"}, {"causal", flag(o.causal)}};
  const Value total = l.op("linear", {{"q", one}, {"k", one}, {"v", u}}, sums, "u_sum");
  const Value count =
      o.causal ? Value() : l.reshape(l.op("linear", {{"q", one}, {"k", one}, {"v", one}}, sums, "count"), {o.heads});
  const std::string n = o.causal ? "(position + 1)" : "n";
  if (o.logits == Logits::deviation) {
    const Value mu = l.weight("mu", {o.heads, D}, zeros(), as("mu"));
    const Value log_tau = l.weight("log_tau", {o.heads}, zeros(), as("log_tau"));
    const Value along = l.map("sum(u * (exp(clip(log_tau, -50, 30)) * mu + total))",
                              {{"u", u}, {"log_tau", l.column(log_tau)}, {"mu", mu}, {"total", total}}, "u_mean");
    return l.map(
        "-along / (" + number_text(std::sqrt(static_cast<double>(D))) + " * (exp(clip(log_tau, -50, 30)) + " + n + "))",
        {{"along", along}, {"log_tau", log_tau}, {"n", count}}, "s");
  }
  const Value n_column = o.causal ? Value() : l.column(count);
  const Value away = l.map("u - total / " + n, {{"u", u}, {"total", total}, {"n", n_column}}, "u_away");
  if (o.logits == Logits::l1) return l.map("mean(abs(away))", {{"away", away}}, "s");
  const Value squares = l.map("mean(away * away)", {{"away", away}}, "u_squares");
  return l.map("sqrt(squares + 1e-8)", {{"squares", squares}}, "s");
}

Value record(Recorder& l, const Zeros& o, Value x) {  // x [B, T, hidden]
  const int64_t C = o.hidden, H = o.heads;
  if (!l.require(C % H == 0, "hidden is " + whole(C) + ", expected a multiple of heads, " + whole(H))) return {};
  const double bound = 1 / std::sqrt(static_cast<double>(C));
  const auto project = [&](const std::string& n, const std::string& alias, int64_t width) {
    const Value bias = o.bias ? l.weight(n + ".bias", {width}, uniform(-bound, bound), as("b" + alias)) : Value();
    return l.split(l.dense(x, l.weight(n + ".weight", {width, C}, fan_in(), as("w" + alias)), bias), H);
  };
  Value q = project("q_proj", "q", C), k = project("k_proj", "k", C);
  const Value v = project("v_proj", "v", C);
  const bool linear = o.order == Order::linear;
  const Value u = linear ? project("u_proj", "u", C) : Value();
  const Value gate = project("g_proj", "g", 3 * H);  // [B, T, H, 3]
  const auto gated = [&](int64_t i, const std::string& f, const std::string& name) {
    return l.reshape(l.map(f + "(gate)", {{"gate", l.slice(gate, i, i + 1)}}, name), {H});
  };
  const Value s1 = gated(0, "sigmoid", "s1"), sh = gated(1, "sigmoid", "sh"), s0 = o.zeroth ? gated(2, "tanh", "s0") : Value();
  q = rope(l, o.rope, o.rope_base, q, "q_rotary");
  k = rope(l, o.rope, o.rope_base, k, "k_rotary");
  const std::vector<Setting> options = {{"causal", flag(o.causal)}, {"zeroth", flag(o.zeroth)}};
  Value y;
  if (linear) {
    const Value s = step_logits(l, o, u);
    q = l.map("x / max(sqrt(sum(x * x)), 1e-12)", {{"x", q}}, "q_norm");
    k = l.map("x / max(sqrt(sum(x * x)), 1e-12)", {{"x", k}}, "k_norm");
    y = l.op("zeros", {{"q", q}, {"k", k}, {"v", v}, {"s", s}, {"s1", s1}, {"sh", sh}, {"s0", s0}}, options);
  } else {
    std::vector<Setting> scaled = options;
    scaled.push_back({"scale", o.scale.given ? number_text(o.scale.value) : "none"});
    y = l.op("zeros_softmax", {{"q", q}, {"k", k}, {"v", v}, {"s1", s1}, {"sh", sh}, {"s0", s0}}, scaled);
  }
  if (o.norm) y = l.op("layer_norm", {{"x", y}}, {{"eps", number_text(o.norm_eps)}}, "o_norm");
  const Value bias = o.bias ? l.weight("o_proj.bias", {C}, uniform(-bound, bound), as("bo")) : Value();
  return l.dense(l.join(y), l.weight("o_proj.weight", {C, C}, fan_in(), as("wo")), bias);
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  s->push_back({"bias", flag(f.has("bq"))});
  if (!f.has("wu")) s->push_back({"order", "quadratic"});
}

}  // namespace

const Layer& zeros_attention_layer() {
  using O = Zeros;
  static const Layer layer = make_layer<O, record>(
      "ZerosAttention", "Lu, Han, Sun, Pati, Kim, Somani, Yang, NeurIPS 2025, arXiv 2602.05230",
      Declaration<O>("zeros_attention", "zeros", "ZeroS: attention whose weights sum to zero, linear or quadratic")
          .equation("y = Wo layernorm(zeros(unit(rotary(q)), unit(rotary(k)), v, s, s1, sh)); s_i = -u_i.mean_i / sqrt(d)")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("heads", &O::heads, 1, kAnyCount, "heads, a divisor of hidden")
          .option("causal", &O::causal, "a token sees no later one")
          .option("order", &O::order, {"linear", "quadratic"}, "linear attention on step logits, or softmax scores reweighted")
          .option("zeroth", &O::zeroth, "the zeroth order is kept, with a gate of its own")
          .option("logits", &O::logits, {"deviation", "square", "mean", "l1", "rms"}, "what the logit of a step is made of")
          .option("rope", &O::rope, rope_names(), "rotary positions")
          .option("rope_base", &O::rope_base, 1e-300, kAnyReal, "base of the frequencies")
          .option("scale", &O::scale, -kAnyReal, kAnyReal, "order quadratic: multiplies q.k; default d^-0.5")
          .option("norm", &O::norm, "the norm of each head's read")
          .option("norm_eps", &O::norm_eps, 0, 1, "of that norm")
          .option("bias", &O::bias, "the projections have a bias"),
      {{"zeros", "layer", {}, of_file}, {"zeros", "softmax_layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
