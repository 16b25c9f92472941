// Normalised attention of the Dynamical Systems Framework: linear attention whose normaliser is learned from the token itself
// instead of summed over the past. The other normalisers of the framework stand beside it, so that they can be compared with
// everything else equal.
#include <cmath>

#include "layers/mixers/projections.h"

namespace linnet::layers {
namespace {

enum class Normaliser : int32_t { exp, softplus, sigmoid, sum, softmax, none };
enum class Map : int32_t { identity, elu1 };

struct NormalisedAttention : Projections {
  Normaliser normaliser = Normaliser::exp;
  Map map = Map::identity;
  double offset = 0;
  bool scaled = false;
  int64_t taps = 0;
};

Value record(Recorder& l, const NormalisedAttention& o, Value x) {  // x [B, T, hidden]
  if (!check_projections(l, o)) return {};
  const bool sum = o.normaliser == Normaliser::sum, softmax = o.normaliser == Normaliser::softmax;
  if (!l.require(!sum || o.map == Map::elu1, "normaliser=sum needs map=elu1: the sum of identity's weights may be 0"))
    return {};
  if (!l.require(o.taps == 0 || o.kv_heads == 0, "taps and kv_heads do not go together")) return {};
  Heads h;
  if (o.taps > 0) {
    const auto one = [&](const char* name, int64_t width) { return branch(l, name, {o.hidden, o.heads, width, o.taps}, x); };
    h = {one("q", o.keys()), one("k", o.keys()), one("v", o.values())};
  } else {
    h = project(l, o, x);
  }
  const double scale = 1 / std::sqrt(static_cast<double>(o.keys()));
  const std::vector<Named> inputs = {{"q", h.q}, {"k", h.k}, {"v", h.v}};
  Value y;
  if (softmax) {
    y = l.op("softmax", inputs, {{"causal", "1"}});
  } else if (o.map == Map::elu1) {
    y = l.op("features", inputs, {{"map", "elu1"}, {"causal", "1"}, {"normalizer", sum ? "standard" : "none"}});
    if (o.scaled && !sum) y = l.map("y * " + number_text(scale), {{"y", y}}, "scaled");
  } else {
    y = l.op("linear", inputs,
             {{"map", "identity"},
              {"causal", "1"},
              {"normalize", "0"},
              {"scale", o.scaled ? number_text(scale) : std::string("1")}});
  }
  if (!sum && !softmax && o.normaliser != Normaliser::none) {
    const Value bias = l.weight("n_proj.bias", {o.heads}, constant(o.offset), as("bn"));
    const Value n = l.dense(x, l.weight("n_proj.weight", {o.heads, o.hidden}, normal(0.02), transposed("wn")), bias);
    const char* form = o.normaliser == Normaliser::exp        ? "y * exp(-n)"
                       : o.normaliser == Normaliser::softplus ? "y / softplus(n)"
                                                              : "y / sigmoid(n)";
    y = l.map(form, {{"y", y}, {"n", l.column(n)}}, "normalised");
  }
  return project_out(l, o, y);
}

}  // namespace

const Layer& normalised_attention_layer() {
  using O = NormalisedAttention;
  static const Layer layer = make_layer<O, record>(
      "NormalisedAttention", "Sieber, Amo Alonso, Didier, Zeilinger, Orvieto, NeurIPS 2024, arXiv 2405.15731",
      Declaration<O>("normalised_attention", "dsf", "linear attention with a learned normaliser")
          .equation("y_t = Wo (exp(-n_t) sum_{i<=t} (q_t.k_i) v_i), n = Wn x + b, one per head")
          .LINNET_PROJECTION_OPTIONS(O)
          .option("normaliser", &O::normaliser, {"exp", "softplus", "sigmoid", "sum", "softmax", "none"},
                  "times exp(-n), over softplus(n) or sigmoid(n); sum: linear attention's own; softmax; none")
          .option("map", &O::map, {"identity", "elu1"}, "of q and k")
          .option("offset", &O::offset, -100, 100, "what b starts as")
          .option("scaled", &O::scaled, "scores times key^-0.5")
          .option("taps", &O::taps, 0, 64, "of short convolutions of q, k and v with SiLU; 0: none"));
  return layer;
}

}  // namespace linnet::layers
