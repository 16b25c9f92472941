// Retention (RetNet, arXiv 2307.08621) as released, and as flash-linear-attention has it (rope=half, norm=1, eps=1e-5).
#include <cmath>

#include "layers/mixers/short_conv.h"

namespace linnet::layers {
namespace {

enum class Rope : int32_t { none, retnet, half };

struct Retention {
  int64_t hidden = 2048, heads = 8, key = 0, value = 0;
  Rope rope = Rope::retnet;
  double rope_base = 10000, eps = 1e-6;
  bool norm = false, gate = true;
};

Value record(Recorder& l, const Retention& o, Value x) {  // x [B, T, hidden]
  const bool derived = o.key == 0 || o.value == 0;
  if (!l.require(!derived || o.hidden % o.heads == 0,
                 "hidden is " + whole(o.hidden) + ", expected a multiple of heads, " + whole(o.heads))) {
    return {};
  }
  const int64_t K = o.key > 0 ? o.key : o.hidden / o.heads, V = o.value > 0 ? o.value : 2 * o.hidden / o.heads;
  const auto project = [&](const std::string& n, int64_t width) {
    return l.split(
        l.dense(x, l.weight(n + "_proj.weight", {o.heads * width, o.hidden}, xavier(0.17677669529663687), transposed("w" + n))),
        o.heads);
  };
  Value q = project("q", K), k = project("k", K);
  const Value v = project("v", V);
  if (o.rope != Rope::none) {
    // RetNet's angles base^(-i / (K/2 - 1)) are those of rotary with another base: a grid that includes both ends.
    const double width = static_cast<double>(K);
    const bool grid = o.rope == Rope::retnet && K > 2;
    const double theta = grid ? std::pow(o.rope_base, width / (width - 2)) : o.rope_base;
    const std::vector<Setting> rotary = {{"theta", number_text(theta)},
                                         {"pairs", o.rope == Rope::half ? "half" : "interleaved"}};
    q = l.op("rotary", {{"x", q}}, rotary, "q_rotary");
    k = l.op("rotary", {{"x", k}}, rotary, "k_rotary");
  }
  const Value decay = l.buffer("decay", {o.heads}, {Init::Rule::retention, 0, 0}, {}, "log(1 - 2^(-5 - head))");
  Value y = l.op("decay", {{"q", q}, {"k", k}, {"v", v}, {"g_head", decay}}, {}, "retention");
  const Value z = o.gate ? project("g", V) : Value();
  const Value weight = o.norm ? l.weight("g_norm.weight", {V}, ones(), as("norm")) : Value();
  y = l.op("rms_norm_gated", {{"x", y}, {"z", z}, {"weight", weight}}, {{"eps", number_text(o.eps)}, {"norm_before_gate", "1"}},
           "g_norm");
  return l.dense(l.join(y), l.weight("o_proj.weight", {o.hidden, o.heads * V}, xavier(1), transposed("wo")));
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  const int64_t heads = f.number("heads", 1);
  s->push_back({"key", whole(f.size("wq", 1) / heads)});
  s->push_back({"value", whole(f.size("wv", 1) / heads)});
  s->push_back({"norm", flag(f.has("norm"))});
  s->push_back({"gate", flag(f.has("wg"))});
}

}  // namespace

const Layer& retention_layer() {
  using O = Retention;
  static const Layer layer = make_layer<O, record>(
      "Retention", "Sun et al. 2023, arXiv 2307.08621",
      Declaration<O>("retention", "decay", "retention: linear attention with one fixed decay per head")
          .equation("y = Wo (silu(Wg x) rmsnorm(S_t^T q_t K^-0.5)); S_t = (1 - 2^(-5-h)) S_{t-1} + k_t v_t^T, q and k rotated")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("heads", &O::heads, 1, kAnyCount, "heads")
          .option("key", &O::key, 0, kAnyCount, "channels of a head's queries and keys; 0: hidden / heads")
          .option("value", &O::value, 0, kAnyCount, "channels of a head's values; 0: 2 hidden / heads")
          .option("rope", &O::rope, {"none", "retnet", "half"}, "positions: RetNet's angles, or ordinary rotary")
          .option("rope_base", &O::rope_base, 1e-300, kAnyReal, "base of the angles")
          .option("norm", &O::norm, "the norm has a weight")
          .option("gate", &O::gate, "the output gate silu(Wg x)")
          .option("eps", &O::eps, 0, 1, "of the norm"),
      {{"decay", "retention_layer", {}, of_file}, {"decay", "layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
