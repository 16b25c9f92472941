// Second-order Taylor attention: Based's causal layer (arXiv 2402.18668), and QT-ViT's on a map of tokens (NeurIPS 2024).
#include <cmath>

#include "layers/mixers/projections.h"

namespace linnet::layers {
namespace {

enum class Mode : int32_t { exact, compact, compact_l2 };

struct Taylor : Projections {
  Mode mode = Mode::exact;
  bool causal = true;
  Maybe scale, eps;
};

Value record_taylor(Recorder& l, const Taylor& o, Value x) {  // x [B, T, hidden]
  if (!check_projections(l, o)) return {};
  const Heads h = project(l, o, x);
  std::vector<Named> inputs = {{"q", h.q}, {"k", h.k}, {"v", h.v}};
  std::vector<Setting> options = {{"causal", flag(o.causal)}};
  if (o.eps.given) options.push_back({"eps", number_text(o.eps.value)});
  if (o.scale.given && o.mode != Mode::compact_l2) options.push_back({"scale", number_text(o.scale.value)});
  if (o.mode == Mode::compact) {
    inputs.push_back({"alpha", l.weight("alpha", {}, ones(), as("alpha"))});
    inputs.push_back({"beta", l.weight("beta", {}, zeros(), as("beta"))});
    inputs.push_back({"gamma", l.weight("gamma", {}, ones(), as("gamma"))});
  } else if (o.mode == Mode::compact_l2) {
    inputs.push_back({"const", l.weight("const", {}, ones(), as("const"))});
  }
  const char* op = o.mode == Mode::exact ? "taylor_exact" : o.mode == Mode::compact ? "taylor_compact" : "taylor_compact_l2";
  return project_out(l, o, l.op(op, inputs, options));
}

struct Qt {
  int64_t hidden = 128, dim = 16, height = 14, width = 14, tokens = 0, taps = 5;
  double eps = 1e-15, bn_eps = 1e-5;
};

// Rows and columns of the map: as given, or a square of `tokens`.
bool grid_of(Recorder& l, const Qt& o, int64_t* height, int64_t* width) {
  *height = o.height;
  *width = o.width;
  if (o.tokens == 0 || o.tokens == o.height * o.width) return true;
  const int64_t side = std::llround(std::sqrt(static_cast<double>(o.tokens)));
  *height = o.taps == 0 ? 1 : side;
  *width = o.taps == 0 ? o.tokens : side;
  return l.require(o.taps == 0 || side * side == o.tokens,
                   "tokens is " + whole(o.tokens) + ", expected a square, or height and width of the map");
}

// On a map of tokens, row by row. The second scale mixes neighbouring tokens of q, k and v, then the channels of each, and
// gives as many heads again.
Value record_qt(Recorder& l, const Qt& o, Value x) {  // x [B, height * width, hidden]
  if (!l.require(o.hidden % o.dim == 0, "hidden is " + whole(o.hidden) + ", expected a multiple of dim, " + whole(o.dim)))
    return {};
  l.require(o.taps % 2 == 1 || o.taps == 0, "taps is " + whole(o.taps) + ", expected an odd number, or 0");
  int64_t height = 0, width = 0;
  if (!grid_of(l, o, &height, &width)) return {};
  const int64_t C = o.hidden, D = o.dim, T = height * width, H = C / D * (o.taps > 0 ? 2 : 1);
  l.tokens(T);
  // For each head q, k, v side by side.
  Value qkv = l.dense(x, l.weight("qkv.conv.weight", {3 * C, C}, fan_in(), transposed("wqkv")));
  if (o.taps > 0) {
    const Value near = l.op("grid_conv",
                            {{"x", qkv},
                             {"weight", l.weight("aggreg.0.0.weight", {3 * C, o.taps, o.taps}, fan_in(), as("wdw"),
                                                 "the second scale's taps of each channel")}},
                            {{"height", whole(height)}, {"width", whole(width)}}, "aggreg.0.0");
    const Value mixed = l.op("dense_heads",
                             {{"x", l.split(near, 3 * C / D)},
                              {"weight", l.weight("aggreg.0.1.weight", {3 * C / D, D, D}, fan_in(), as("wpw"),
                                                  "the second scale's map of each q, k and v (group, in, out)")}},
                             {}, "aggreg.0.1");
    qkv = l.concat(qkv, l.join(mixed));
  }
  qkv = l.split(qkv, H);  // [B, T, H, 3 D]
  const auto norm = [&](const std::string& name, int64_t channels, const std::string& alias) {
    return std::vector<Named>{{"weight", l.weight(name + ".weight", {channels}, ones(), as(alias + "weight"))},
                              {"bias", l.weight(name + ".bias", {channels}, zeros(), as(alias + "bias"))},
                              {"mean", l.buffer(name + ".running_mean", {channels}, zeros(), as(alias + "mean"))},
                              {"var", l.buffer(name + ".running_var", {channels}, ones(), as(alias + "var"))}};
  };
  const std::vector<Named> bn = norm("norm", D, "bn_");
  Value y = l.op("taylor_qt_layer",
                 {{"q", l.slice(qkv, 0, D)},
                  {"k", l.slice(qkv, D, 2 * D)},
                  {"v", l.slice(qkv, 2 * D, 3 * D)},
                  {"ape", l.weight("ape", {T, H, D}, zeros(), as("ape"), "position embedding of the keys")},
                  {"const", l.weight("const", {}, ones(), as("const"))},
                  {"bn_weight", bn[0].value},
                  {"bn_bias", bn[1].value},
                  {"bn_mean", bn[2].value},
                  {"bn_var", bn[3].value}},
                 {{"eps", number_text(o.eps)}, {"bn_eps", number_text(o.bn_eps)}});
  y = l.dense(l.join(y), l.weight("proj.conv.weight", {o.hidden, H * D}, fan_in(), transposed("wo")));
  std::vector<Named> inputs = norm("proj.norm", o.hidden, "proj_");
  inputs.push_back({"x", y});
  return l.map("(x - mean) / sqrt(var + " + number_text(o.bn_eps) + ") * weight + bias", inputs, "proj.norm");
}

void qt_of_file(const FileFacts& f, std::vector<Setting>* s) {
  s->push_back({"taps", whole(f.size("wdw", 1))});
  s->push_back({"dim", whole(f.size("ape", 2))});
  if (f.text("height").empty()) s->push_back({"tokens", whole(f.size("ape", 0))});
}

}  // namespace

const Layer& taylor_attention_layer() {
  using O = Taylor;
  static const Layer layer = make_layer<O, record_taylor>(
      "TaylorAttention", "Arora et al. 2024, arXiv 2402.18668; Xu et al., NeurIPS 2024",
      Declaration<O>("taylor_attention", "taylor", "attention with the weights 1 + s + s^2/2, in linear time")
          .equation("y = Wo (sum_j w_ij v_j / sum_j w_ij), w = 1 + s + s^2/2, s = q.k key^-0.5")
          .LINNET_PROJECTION_OPTIONS(O)
          .option("mode", &O::mode, {"exact", "compact", "compact_l2"}, "all second-order features, or QT-ViT's squares alone")
          .option("causal", &O::causal, "a token sees no later one")
          .option("scale", &O::scale, 0, kAnyReal, "of the logits; default key^-0.5")
          .option("eps", &O::eps, 0, 1, "added to the denominator; default as the mode"),
      {{"taylor", "layer", {}, projections_of_file, "x", "out", "", "wq"}});
  return layer;
}

const Layer& qt_attention_layer() {
  using O = Qt;
  static const Layer layer = make_layer<O, record_qt>(
      "QtAttention", "Xu, Li, Li, Sheng, Jiang, Tian, Barsoum, NeurIPS 2024",
      Declaration<O>("qt_attention", "taylor", "QT-ViT's attention on a map of tokens, of one or two scales")
          .equation("y = BN(Wo (compact_l2(q, k + ape, v) + gelu(BN(v)))); q, k, v of x, and their 5 x 5 neighbourhoods")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("dim", &O::dim, 1, kAnyCount, "channels of a head, a divisor of hidden")
          .option("height", &O::height, 1, kAnyCount, "rows of the map, for which the position embedding is")
          .option("width", &O::width, 1, kAnyCount, "columns of the map")
          .option("tokens", &O::tokens, 0, kAnyCount, "tokens of a square map, in place of height and width")
          .option("taps", &O::taps, 0, kAnyCount, "of the second scale's convolution in each direction, odd; 0: one scale")
          .option("eps", &O::eps, 0, 1, "of the norms and the denominator")
          .option("bn_eps", &O::bn_eps, 1e-12, 1, "of the batch norms"),
      {{"taylor", "layer", {{"heads", ""}}, qt_of_file, "x", "out", "", "wqkv"},
       {"taylor", "qt_attention", {{"heads", ""}}, qt_of_file}});
  return layer;
}

}  // namespace linnet::layers
