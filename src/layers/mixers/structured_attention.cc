// Attention over structures in place of softmax: Monarch matrices (arXiv 2505.18698), trees (arXiv 2509.15448).
#include "layers/mixers/projections.h"

namespace linnet::layers {
namespace {

enum class Pad : int32_t { post, pre };
enum class Tie : int32_t { block, prefix, row };
constexpr const char* kTies[] = {"block", "prefix", "row"};

struct Monarch : Projections {
  int64_t block = 0, steps = 1;
  Pad pad = Pad::post;
  bool causal = false;
  Maybe scale;
};

Value record_monarch(Recorder& l, const Monarch& o, Value x) {  // x [B, T, hidden]
  if (!check_projections(l, o)) return {};
  const Heads h = project(l, o, x);
  const Value y = l.op("monarch", {{"q", h.q}, {"k", h.k}, {"v", h.v}},
                       {{"block", whole(o.block > 0 ? o.block : -1)},
                        {"steps", whole(o.steps)},
                        {"pad", o.pad == Pad::post ? "post" : "pre"},
                        {"scale", o.scale.given ? number_text(o.scale.value) : "none"},
                        {"causal", flag(o.causal)}});
  return project_out(l, o, y);
}

struct Hierarchical : Projections {
  Tie tie = Tie::row;
  bool include_self = true, causal = true, head_norm = false, residual = false;
  int64_t arity = 4;
  Sizes branching;
  Maybe scale;
  double eps = 1e-5;
};

Value record_hierarchical(Recorder& l, const Hierarchical& o, Value x) {  // x [B, T, hidden]
  if (!check_projections(l, o)) return {};
  if (!l.require(!o.causal || o.tie != Tie::block, "tie is block, expected prefix or row when causal")) return {};
  Heads h = project(l, o, x);
  if (o.head_norm) {  // the encoder of the paper: q, k and v normed over the head
    const std::vector<Setting> eps = {{"eps", number_text(o.eps)}};
    const auto norm = [&](Value y, const std::string& n, int64_t width) {
      return l.op("layer_norm",
                  {{"x", y},
                   {"weight", l.weight(n + "_layernorm.weight", {width}, ones())},
                   {"bias", l.weight(n + "_layernorm.bias", {width}, zeros())}},
                  eps, n + "_layernorm");
    };
    h = {norm(h.q, "q", o.keys()), norm(h.k, "k", o.keys()), norm(h.v, "v", o.values())};
  }
  std::string branching;
  for (int64_t i = 0; i < o.branching.count; ++i) branching += (i ? "," : "") + whole(o.branching.value[i]);
  std::vector<Setting> options = {{"tie", kTies[static_cast<size_t>(o.tie)]},
                                  {"include_self", flag(o.include_self)},
                                  {"causal", flag(o.causal)},
                                  {"scale", o.scale.given ? number_text(o.scale.value) : "none"},
                                  {"arity", whole(o.arity)}};
  if (!branching.empty()) options.push_back({"branching", branching});
  Value y = l.op("hierarchical", {{"q", h.q}, {"k", h.k}, {"v", h.v}}, options);
  if (o.residual) {
    l.require(o.keys() == o.values(), "residual needs values as wide as queries");
    y = l.op("add", {{"x", y}, {"y", h.q}}, {}, "residual");
  }
  return project_out(l, o, y);
}

}  // namespace

const Layer& monarch_attention_layer() {
  using O = Monarch;
  static const Layer layer = make_layer<O, record_monarch>(
      "MonarchAttention", "Yaras, Xu, Abillama, Lee, Balzano, NeurIPS 2025, arXiv 2505.18698",
      Declaration<O>("monarch_attention", "monarch", "softmax attention approximated by a Monarch matrix")
          .equation("y = Wo monarch(q, k, v); the same projections as softmax attention")
          .LINNET_PROJECTION_OPTIONS(O)
          .option("block", &O::block, 0, kAnyCount,
                  "tokens of a block; 0: the root of the length (token by token: must be fixed)")
          .option("steps", &O::steps, 1, 1000, "updates of the factors")
          .option("pad", &O::pad, {"post", "pre"}, "the end that is filled up to whole blocks")
          .option("causal", &O::causal, "the strictly causal form, one step")
          .option("scale", &O::scale, -kAnyReal, kAnyReal, "multiplies q.k; default key^-0.5"),
      {{"monarch", "layer", {}, projections_of_file}});
  return layer;
}

const Layer& hierarchical_attention_layer() {
  using O = Hierarchical;
  static const Layer layer = make_layer<O, record_hierarchical>(
      "HierarchicalAttention", "Amizadeh, Abdali, Li, Koishida, NeurIPS 2025, arXiv 2509.15448",
      Declaration<O>("hierarchical_attention", "hierarchical", "attention over a tree of tokens")
          .equation("y = Wo hierarchical(q, k, v); the same projections as softmax attention")
          .LINNET_PROJECTION_OPTIONS(O)
          .option("tie", &O::tie, {"block", "prefix", "row"},
                  "what is shared: weights of blocks, the same strictly causal, or keys and values")
          .option("include_self", &O::include_self, "a token attends to itself too")
          .option("causal", &O::causal, "only what lies to the left")
          .option("arity", &O::arity, 2, kAnyCount, "children of a node, where no branching is given")
          .option("branching", &O::branching, 1, kAnyCount, "windows of so many nodes, from the bottom")
          .option("scale", &O::scale, -kAnyReal, kAnyReal, "multiplies q.k; default key^-0.5")
          .option("head_norm", &O::head_norm, "LayerNorm of each head's q, k and v, as in the paper's encoder")
          .option("residual", &O::residual, "the queries are added to the read, as in the paper's encoder")
          .option("eps", &O::eps, 0, 1, "of the norms"),
      {{"hierarchical", "layer", {}, projections_of_file}});
  return layer;
}

}  // namespace linnet::layers
