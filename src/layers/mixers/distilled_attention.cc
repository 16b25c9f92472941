// What the converter puts in the place of softmax: learned positive features (arXiv 2507.03340), and a window with features
// beyond it (LoLCATs, arXiv 2410.10254). Projections, biases and positions are the teacher's.
#include <cmath>

#include "layers/mixers/projections.h"

namespace linnet::layers {
namespace {

struct Distilled : Projections {
  int64_t features = 64;
  bool causal = true, balanced = false;
  Maybe scale;
};

Value record_distilled(Recorder& l, const Distilled& o, Value x) {  // x [B, T, hidden]
  if (!check_projections(l, o)) return {};
  Heads h = project(l, o, x);
  const int64_t H = o.heads, K = o.keys();
  Value logw;
  if (o.balanced) {  // symmetries of softmax attention: it does not change, and its kernel is easier for features
    const Value q_mean = l.weight("q_mean", {H, K}, zeros(), as("q_mean"), "taken off q"),
                k_mean = l.weight("k_mean", {H, K}, zeros(), as("k_mean"), "taken off k"),
                balance = l.weight("balance", {H, K}, ones(), as("balance"), "multiplies q and divides k");
    const double eta = o.scale.given ? o.scale.value : 1 / std::sqrt(static_cast<double>(K));
    logw = l.map("sum(k * m * " + number_text(eta) + ")", {{"k", h.k}, {"m", q_mean}}, "key_logw");
    h.q = l.map("(q - m) * a", {{"q", h.q}, {"m", q_mean}, {"a", balance}}, "q_balanced");
    h.k = l.map("(k - m) / a", {{"k", h.k}, {"m", k_mean}, {"a", balance}}, "k_balanced");
  }
  const Value z = l.weight("z", {H, o.features, K}, normal(1), as("z"), "directions of the features");
  const Value alpha =
      l.map("exp(log_alpha)", {{"log_alpha", l.weight("log_alpha", {H, o.features}, zeros(), as("log_alpha"))}}, "alpha");
  const Value y = l.op("distill", {{"q", h.q}, {"k", h.k}, {"v", h.v}, {"z", z}, {"alpha", alpha}, {"key_logw", logw}},
                       {{"causal", flag(o.causal)}, {"scale", o.scale.given ? number_text(o.scale.value) : "none"}});
  return project_out(l, o, y);
}

enum class Form : int32_t { sliding, terraced };

struct Hybrid : Projections {
  int64_t features = 0, window = 64;
  Form form = Form::sliding;
};

Value record_hybrid(Recorder& l, const Hybrid& o, Value x) {  // x [B, T, hidden]
  if (!check_projections(l, o)) return {};
  const Heads h = project(l, o, x);
  const int64_t K = o.keys(), F = o.features > 0 ? o.features : (K + 1) / 2;
  const Init start = F == K ? identity() : fan_in();
  const Value wq = l.weight("feature_map_q.weight", {o.heads, K, F}, start, as("fq")),
              wk = l.weight("feature_map_k.weight", {o.heads, K, F}, start, as("fk"));
  const Value factor =
      l.weight("window_factor", {o.heads}, constant(-2.1972246), as("window_factor"), "logit of the window's share");
  const Value y =
      l.op("distill_window", {{"q", h.q}, {"k", h.k}, {"v", h.v}, {"wq", wq}, {"wk", wk}, {"window_factor", factor}},
           {{"window", whole(o.window)}}, "hybrid", o.form == Form::sliding ? "out_sliding" : "out_terraced");
  return project_out(l, o, y);
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  projections_of_file(f, s);
  if (f.has("z")) s->push_back({"features", whole(f.size("z", 1))});
  if (f.has("q_mean")) s->push_back({"balanced", "1"});
  if (f.has("fq")) s->push_back({"features", whole(f.size("fq", 2))});
}

}  // namespace

const Layer& distilled_attention_layer() {
  using O = Distilled;
  static const Layer layer = make_layer<O, record_distilled>(
      "DistilledAttention", "Nishikawa, Higuchi, Suzuki, NeurIPS 2025, arXiv 2507.03340",
      Declaration<O>("distilled_attention", "distill", "softmax attention distilled into learned positive features")
          .equation("y = Wo distill(q, k, v; z, exp(log_alpha)); the same projections as softmax attention")
          .LINNET_PROJECTION_OPTIONS(O)
          .option("features", &O::features, 1, kAnyCount, "features of a head")
          .option("balanced", &O::balanced, "q and k are centred and balanced before the features")
          .option("causal", &O::causal, "a token sees no later one")
          .option("scale", &O::scale, -kAnyReal, kAnyReal, "of the scores; default key^-0.5"),
      {{"distill", "layer", {}, of_file}});
  return layer;
}

const Layer& hybrid_attention_layer() {
  using O = Hybrid;
  static const Layer layer = make_layer<O, record_hybrid>(
      "HybridAttention", "Zhang et al., ICLR 2025, arXiv 2410.10254",
      Declaration<O>("hybrid_attention", "distill", "a softmax window with hedgehog features for older keys")
          .equation("a_ij = g exp(s_ij - top_i) for near keys, f(q_i).f(k_j) for older ones; y = Wo (sum a v / sum a)")
          .LINNET_PROJECTION_OPTIONS(O)
          .option("features", &O::features, 0, kAnyCount, "F: q and k have 2 F features; 0: key / 2")
          .option("window", &O::window, 1, kAnyCount, "near keys, the current one included")
          .option("form", &O::form, {"sliding", "terraced"}, "near: the last keys, or the current and the previous block"),
      {{"distill", "hybrid_layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
