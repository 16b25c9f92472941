// MetaLA (arXiv 2411.10741): no key projection, key = 1 - decay; a short convolution in front, self-augmentation.
#include <cmath>

#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

enum class Aug : int32_t { sigmoid, linear, none };
constexpr const char* kAugs[] = {"sigmoid", "linear", "none"};

struct MetaLa {
  int64_t hidden = 1024, heads = 8, key = 0, value = 0, taps = 4;
  double tau = 16, floor = -88, ln_eps = 1e-5, decay_init = 0.02;
  Maybe scale;
  Aug aug = Aug::sigmoid;
  bool gate = true, gate_bias = true;
};

Value record(Recorder& l, const MetaLa& o, Value x) {  // x [B, T, hidden]
  if (o.key == 0 || o.value == 0) {
    l.require(o.hidden % (2 * o.heads) == 0,
              "hidden is " + whole(o.hidden) + ", expected a multiple of 2 heads, " + whole(2 * o.heads));
  }
  if (!l.ok()) return {};
  const int64_t K = o.key > 0 ? o.key : o.hidden / (2 * o.heads), V = o.value > 0 ? o.value : o.hidden / o.heads;
  Value u = x;
  if (o.taps > 0) {
    const double bound = 1 / std::sqrt(static_cast<double>(o.taps));
    u = l.op("causal_conv",
             {{"x", x}, {"weight", l.weight("conv1d.weight", {o.hidden, o.taps}, uniform(-bound, bound), as("conv"))}},
             {{"activation", "silu"}}, "conv1d");
  }
  const auto project = [&](const std::string& name, const std::string& alias, int64_t width, Value bias = {},
                           const Init& init = normal(0.02)) {
    return l.split(l.dense(u, l.weight(name, {o.heads * width, o.hidden}, init, as(alias)), bias), o.heads);
  };
  const Value q = project("q_proj.weight", "wq", K), a = project("a_proj.weight", "wa", K, {}, normal(o.decay_init)),
              v = project("v_proj.weight", "wv", V);
  const Value w_aug = o.aug == Aug::none ? Value() : l.weight("w_aug", {o.heads, K}, zeros(), as("w_aug"));
  const bool shifted = o.aug == Aug::sigmoid;
  Value y = l.op("metala_mixer", {{"q", q}, {"a", a}, {"v", v}, {"w_aug", shifted ? Value() : w_aug}},
                 {{"tau", number_text(o.tau)},
                  {"scale", o.scale.given ? number_text(o.scale.value) : "none"},
                  {"floor", number_text(o.floor)},
                  {"aug", shifted ? "none" : kAugs[static_cast<size_t>(o.aug)]}});
  if (shifted) {
    // sigmoid(u v) = 1/2 + tanh(u v / 2) / 2, and the norm takes every constant away: without it no digit is lost to it.
    const std::string key = "expm1(max(logsigmoid(a) / " + number_text(o.tau) + ", " + number_text(o.floor) + "))";
    const Value u_aug = l.map("sum(-q * w_aug * " + key + ")", {{"q", q}, {"w_aug", w_aug}, {"a", a}}, "u");
    y = l.map("c + 0.5 * tanh(0.5 * u * v)", {{"c", y}, {"u", l.column(u_aug)}, {"v", v}}, "augmented");
  }
  y = l.op("layer_norm", {{"x", y}}, {{"eps", number_text(o.ln_eps)}}, "o_norm");
  if (o.gate) {
    const Value bias = o.gate_bias ? l.weight("g_proj.bias", {o.heads * V}, zeros(), as("bg")) : Value();
    y = l.op("glu", {{"gate", project("g_proj.weight", "wg", V, bias)}, {"up", y}}, {{"act", "silu"}}, "gate");
  }
  return l.dense(l.join(y), l.weight("o_proj.weight", {o.hidden, o.heads * V}, normal(0.02), as("wo")));
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  const int64_t heads = f.number("heads", 1);
  s->push_back({"key", whole(f.size("wq", 0) / heads)});
  s->push_back({"value", whole(f.size("wv", 0) / heads)});
  s->push_back({"taps", whole(f.size("conv", 1))});
  s->push_back({"gate", flag(f.has("wg"))});
  s->push_back({"gate_bias", flag(f.has("bg"))});
  if (!f.has("w_aug")) s->push_back({"aug", "none"});
}

}  // namespace

const Layer& metala_layer() {
  using O = MetaLa;
  static const Layer layer = make_layer<O, record>(
      "MetaLA", "Chou et al., NeurIPS 2024, arXiv 2411.10741",
      Declaration<O>("metala_attention", "metala", "MetaLA: linear attention whose key is one minus its decay")
          .equation("u = silu(conv(x)); y = Wo (silu(Wg u + bg) layernorm(metala(Wq u, Wa u, Wv u)))")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("heads", &O::heads, 1, kAnyCount, "heads")
          .option("key", &O::key, 0, kAnyCount, "channels of a head's queries and decays; 0: hidden / (2 heads)")
          .option("value", &O::value, 0, kAnyCount, "channels of a head's values; 0: hidden / heads")
          .option("taps", &O::taps, 0, 64, "of the short convolution; 0: none")
          .option("tau", &O::tau, 1e-300, kAnyReal, "the decay's temperature")
          .option("scale", &O::scale, -kAnyReal, kAnyReal, "of q in the recurrence; default key^-0.5")
          .option("decay_init", &O::decay_init, 0, kAnyReal,
                  "deviation of Wa at the start; the keys of small models differ sooner with a large one")
          .option("floor", &O::floor, -kAnyReal, 0, "lower bound of the log decay")
          .option("aug", &O::aug, {"sigmoid", "linear", "none"}, "the self-augmentation")
          .option("gate", &O::gate, "the output gate silu(Wg u + bg)")
          .option("gate_bias", &O::gate_bias, "the gate has a bias")
          .option("ln_eps", &O::ln_eps, 0, 1, "of the norm"),
      {{"metala", "layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
