// Free energy mixer (arXiv 2602.07160): values read through a log-sum-exp under a prior, with local conditioning.
#include <cmath>

#include "layers/mixers/rope.h"
#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

enum class Prior : int32_t { softmax, linear, gated, aft, ssm };
constexpr const char* kPriors[] = {"softmax", "linear", "gated", "aft", "ssm"};

struct Fem {
  int64_t hidden = 768, heads = 12, width = 0, key = 0, conv_hidden = 64, rank = 16;
  Prior prior = Prior::softmax;
  bool causal = true, conv = true, temperature = true, lse = true, gate = true, bias = true;
  Rope rope = Rope::half;
  double rope_base = 10000, norm_eps = 1e-5;
  Maybe cap = 40;
};

// A gate scaled to mean square 1 over its last dimension.
std::string unit_gate(const std::string& g, int64_t width) {
  return g + " / max(sqrt(sum(square(" + g + "))), 1e-5) * " + number_text(std::sqrt(static_cast<double>(width)));
}

// c [B, T, 3E + 2K]: what the projections are multiplied by, less 1; a short memory of the tokens before.
Value conditioning(Recorder& l, const Fem& o, int64_t columns, Value x) {
  const int64_t Hc = o.conv_hidden;
  const std::vector<Setting> eps = {{"eps", number_text(o.norm_eps)}};
  const Value n = l.op("layer_norm",
                       {{"x", x},
                        {"weight", l.weight("conv.norm.weight", {o.hidden}, ones(), as("norm_w"))},
                        {"bias", l.weight("conv.norm.bias", {o.hidden}, zeros(), as("norm_b"))}},
                       eps, "conv.norm");
  const auto project = [&](const std::string& name) {
    const Value bias = o.bias ? l.weight("conv." + name + "_proj.bias", {Hc}, zeros(), as("b" + name)) : Value();
    return l.dense(n, l.weight("conv." + name + "_proj.weight", {Hc, o.hidden}, normal(0.02), as("w" + name)), bias);
  };
  const Value s = l.map("softplus(s) + 1e-8", {{"s", project("s")}}, "conv.gate");
  const Value gate = l.map(unit_gate("s", Hc), {{"s", s}}, "conv.unit_gate");
  const Value a = l.map("-softplus(a)", {{"a", project("a")}}, "conv.decay");
  // h_t = exp(a_t) h_{t-1} + y_t for each channel: a head of one key and one value channel.
  const Value one = l.constant(1, {kB, kT, Hc, 1});
  const Value h =
      l.op("decay", {{"q", one}, {"k", one}, {"v", l.split(project("y"), Hc)}, {"g", a}}, {{"scale", "1"}}, "conv.memory");
  const Value mid = l.op("layer_norm",
                         {{"x", l.join(h)},
                          {"weight", l.weight("conv.mid_norm.weight", {Hc}, ones(), as("mid_w"))},
                          {"bias", l.weight("conv.mid_norm.bias", {Hc}, zeros(), as("mid_b"))}},
                         eps, "conv.mid_norm");
  const Value mixed = l.map("gate * mid", {{"gate", gate}, {"mid", mid}}, "conv.mixed");
  return l.dense(mixed, l.weight("conv.out_proj.weight", {columns, Hc}, zeros(), transposed("wc")));
}

Value record(Recorder& l, const Fem& o, Value x) {  // x [B, T, hidden]
  const int64_t C = o.hidden, H = o.heads, E = o.width > 0 ? o.width : C / 2;
  const bool ssm = o.prior == Prior::ssm;
  const int64_t K = ssm ? 0 : o.key > 0 ? o.key : o.prior == Prior::aft ? E : 2 * E;
  l.require(E % H == 0, "width is " + whole(E) + ", expected a multiple of heads, " + whole(H));
  l.require(K % H == 0, "key is " + whole(K) + ", expected a multiple of heads, " + whole(H));
  l.require(o.prior != Prior::aft || K == E,
            "key is " + whole(K) + ", expected the width, " + whole(E) + ", for the prior aft");
  if (!l.ok()) return {};
  const int64_t V = E / H;
  const Value c = o.conv ? conditioning(l, o, 3 * E + 2 * K, x) : Value();
  int64_t column = 0;
  const auto project = [&](const std::string& n, const std::string& alias, int64_t width, bool conditioned = true) -> Value {
    if (width == 0) return {};
    const int64_t begin = column;
    if (conditioned) column += width;
    const Value bias = o.bias ? l.weight(n + "_proj.bias", {width}, zeros(), as("b" + alias)) : Value();
    const Value y = l.dense(x, l.weight(n + "_proj.weight", {width, C}, normal(0.02), as("w" + alias)), bias);
    if (!o.conv || !conditioned) return y;
    return l.map("y * (1 + c)", {{"y", y}, {"c", l.slice(c, begin, begin + width)}}, n);
  };
  Value v = project("v", "v", E), q = project("q", "q", K), k = project("k", "k", K);
  Value inner, g;
  if (o.lse) {
    inner = project("l", "l", E);
  } else {
    column += E;
  }
  if (o.gate) g = project("g", "g", E);
  if (!ssm) {
    q = rope(l, o.rope, o.rope_base, l.split(q, H), "q_rotary");
    k = rope(l, o.rope, o.rope_base, l.split(k, H), "k_rotary");
  }
  if (ssm) v = l.map("sigmoid(v)", {{"v", v}}, "v_sigmoid");
  const Value lam = o.lse ? l.map("sigmoid(l)", {{"l", l.split(inner, H)}}, "lam")
                          : l.map("one * 0", {{"one", l.constant(1, {kB, kT, H, V})}}, "lam");
  if (o.gate) {
    const Value soft = l.map("softplus(g) + 1e-6", {{"g", l.split(g, H)}}, "g_soft");
    g = l.map(unit_gate("g", V), {{"g", soft}}, "g_unit");
  }
  const bool learned = o.lse && o.temperature;
  const Value beta =
      learned ? l.map("softplus(b) + 1e-6", {{"b", l.split(l.weight("beta", {E}, constant(1.8), as("beta")), H)}}, "beta_soft")
              : l.map("one * 1", {{"one", l.constant(1, {H, V})}}, "beta_soft");
  std::vector<Named> inputs = {{"v", l.split(v, H)}, {"beta", beta}, {"lam", lam}, {"q", q}, {"k", k}, {"g", g}};
  if (o.prior == Prior::gated) {
    inputs.push_back({"a", l.map("-(relu(d) + 1e-6)", {{"d", project("d", "d", H, false)}}, "a")});
  }
  if (ssm) {
    const Value p = project("p", "p", E + 2 * o.rank, false);
    inputs.push_back({"delta", l.map("exp(-softplus(p))", {{"p", l.split(l.slice(p, 0, E), H)}}, "delta")});
    inputs.push_back({"Bm", l.map("softplus(p) + 1e-6", {{"p", l.slice(p, E, E + o.rank)}}, "Bm")});
    inputs.push_back({"Cm", l.map("softplus(p) + 1e-6", {{"p", l.slice(p, E + o.rank, E + 2 * o.rank)}}, "Cm")});
    const Value A_log = l.weight("A_log", {H, V, o.rank}, constant(-1), as("A_log"));
    inputs.push_back({"A", l.map("-softplus(A_log)", {{"A_log", A_log}}, "A")});
    inputs.push_back(
        {"D", l.map("softplus(D) + 1e-6", {{"D", l.split(l.weight("D_diag", {E}, ones(), as("D_diag")), H)}}, "D")});
  }
  const Value y = l.op("fem_read", inputs,
                       {{"prior", kPriors[static_cast<size_t>(o.prior)]},
                        {"causal", flag(o.causal)},
                        {"cap", learned && o.cap.given && o.cap.value > 0 ? number_text(o.cap.value) : "none"}},
                       "read");
  const Value bias = o.bias ? l.weight("o_proj.bias", {C}, zeros(), as("bo")) : Value();
  return l.dense(l.join(y), l.weight("o_proj.weight", {C, E}, normal(0.02), as("wo")), bias);
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  s->push_back({"width", whole(f.size("wv", 0))});
  s->push_back({"key", whole(f.size("wq", 0))});
  s->push_back({"conv", flag(f.has("wc"))});
  if (f.has("ws")) s->push_back({"conv_hidden", whole(f.size("ws", 0))});
  s->push_back({"bias", flag(f.has("bv"))});
  s->push_back({"gate", flag(f.has("wg"))});
  s->push_back({"lse", flag(f.has("wl"))});
  s->push_back({"temperature", flag(f.has("beta"))});
  if (f.text("prior") == "ssm") s->push_back({"rank", whole((f.size("wp", 0) - f.size("wv", 0)) / 2)});
}

}  // namespace

const Layer& free_energy_mixer_layer() {
  using O = Fem;
  static const Layer layer = make_layer<O, record>(
      "FreeEnergyMixer", "Lu, Yang, ICLR 2026, arXiv 2602.07160",
      Declaration<O>("free_energy_mixer", "fem", "free energy mixer: each channel between the mean and the largest of its past")
          .equation("y = Wo g ((1 - lam) mu + lam F), F = log(sum_i p_t(i) exp(beta v_i)) / beta; p from a prior")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("heads", &O::heads, 1, kAnyCount, "heads")
          .option("width", &O::width, 0, kAnyCount, "channels of the values of all heads; 0: hidden / 2")
          .option("key", &O::key, 0, kAnyCount, "channels of the queries of all heads; 0: 2 width, aft: width")
          .option("prior", &O::prior, {"softmax", "linear", "gated", "aft", "ssm"}, "how positions are weighed")
          .option("causal", &O::causal, "a token sees no later one")
          .option("rope", &O::rope, rope_names(), "rotary positions")
          .option("rope_base", &O::rope_base, 1e-300, kAnyReal, "base of the frequencies")
          .option("conv", &O::conv, "local conditioning of the projections")
          .option("conv_hidden", &O::conv_hidden, 1, kAnyCount, "channels of the conditioning")
          .option("norm_eps", &O::norm_eps, 0, 1, "of its norms")
          .option("temperature", &O::temperature, "a learned temperature per channel")
          .option("lse", &O::lse, "the log-sum-exp; else the mean alone")
          .option("gate", &O::gate, "the outer gate")
          .option("cap", &O::cap, 0, kAnyReal, "bound on |beta v|; none or 0: no bound")
          .option("rank", &O::rank, 1, kAnyCount, "prior ssm: states of a channel")
          .option("bias", &O::bias, "the projections have a bias"),
      {{"fem", "layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
