// What the converter puts in the place of softmax: learned positive features (arXiv 2507.03340), and a window with features
// beyond it (LoLCATs, arXiv 2410.10254). Projections, biases and positions are the teacher's.
#include "layers/projections.h"

namespace linnet::layers {
namespace {

struct Distilled : Projections {
  int64_t features = 64;
  bool causal = true;
  Maybe scale;
};

Value record_distilled(Recorder& l, const Distilled& o, Value x) {  // x [B, T, hidden]
  if (!check_projections(l, o)) return {};
  const Heads h = project(l, o, x);
  const Value z = l.weight("z", {o.heads, o.features, o.keys()}, normal(1), as("z"), "directions of the features");
  const Value alpha =
      l.map("exp(log_alpha)", {{"log_alpha", l.weight("log_alpha", {o.heads, o.features}, zeros(), as("log_alpha"))}}, "alpha");
  const Value y = l.op("distill", {{"q", h.q}, {"k", h.k}, {"v", h.v}, {"z", z}, {"alpha", alpha}},
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

}  // namespace

const Layer& distilled_attention_layer() {
  using O = Distilled;
  static const Layer layer = make_layer<O, record_distilled>(
      "DistilledAttention", "Nishikawa, Higuchi, Suzuki, NeurIPS 2025, arXiv 2507.03340",
      Declaration<O>("distilled_attention", "distill", "softmax attention distilled into learned positive features")
          .equation("y = Wo distill(q, k, v; z, exp(log_alpha)); the same projections as softmax attention")
          .LINNET_PROJECTION_OPTIONS(O)
          .option("features", &O::features, 1, kAnyCount, "features of a head")
          .option("causal", &O::causal, "a token sees no later one")
          .option("scale", &O::scale, -kAnyReal, kAnyReal, "of the scores; default key^-0.5"),
      {{"distill", "layer", {}, projections_of_file}});
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
      {{"distill", "hybrid_layer", {}, projections_of_file}});
  return layer;
}

}  // namespace linnet::layers
