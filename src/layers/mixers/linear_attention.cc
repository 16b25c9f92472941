// Linear attention with every feature map: the linear transformer (arXiv 2006.16236) and what followed it.
#include <cmath>

#include "layers/mixers/projections.h"

namespace linnet::layers {
namespace {

enum class Map : int32_t {
  elu1,
  identity,
  cosine,
  relu,
  relu2,
  silu,
  softplus,
  exp,
  focused,
  cosformer,
  favor,
  favor_hyp,
  favor_relu,
  hedgehog,
  hedgehog_exp,
  hedgehog_joint,
  t2r,
  rebased,
  dpfp,
  taylor,
  taylor2,
  efficient,
  product,
};
constexpr const char* kMaps[] = {"elu1",       "identity", "cosine",       "relu",           "relu2",  "silu",
                                 "softplus",   "exp",      "focused",      "cosformer",      "favor",  "favor_hyp",
                                 "favor_relu", "hedgehog", "hedgehog_exp", "hedgehog_joint", "t2r",    "rebased",
                                 "dpfp",       "taylor",   "taylor2",      "efficient",      "product"};
enum class Divide : int32_t { standard, none, add, max };
constexpr const char* kDivides[] = {"standard", "none", "add", "max"};
enum class OutNorm : int32_t { none, rms, layer };
enum class Top : int32_t { global, running };
enum class Sums : int32_t { map, plain, normalized };

struct LinearAttention : Projections {
  Map map = Map::elu1;
  bool causal = true, unit_sum = false;
  Divide normalizer = Divide::standard;
  Sums normalize = Sums::map;
  OutNorm norm = OutNorm::none;
  Maybe eps, scale;
  int64_t features = 0, dpfp_nu = 1, max_length = 0;
  double temperature = 1, focused_power = 3, favor_eps = 1e-4, out_eps = 1e-5;
  Top key_top = Top::running;
};

bool is_one_of(Map map, std::initializer_list<Map> maps) {
  for (const Map other : maps) {
    if (map == other) return true;
  }
  return false;
}

Value record(Recorder& l, const LinearAttention& o, Value x) {  // x [B, T, hidden]
  if (!check_projections(l, o)) return {};
  const int64_t H = o.heads, K = o.keys();
  Heads h = project(l, o, x);
  const bool product = o.map == Map::product;
  if (product) {  // W1 q * W2 q: each head's channels through two maps of their own
    const auto twice = [&](Value y, const std::string& n) {
      const Value a = l.dense(l.join(y), l.weight(n + "_map1.weight", {H * K, H * K}, fan_in(), transposed("m" + n + "1")));
      const Value b = l.dense(l.join(y), l.weight(n + "_map2.weight", {H * K, H * K}, fan_in(), transposed("m" + n + "2")));
      return l.split(l.map("a * b", {{"a", a}, {"b", b}}, n + "_map"), H);
    };
    h.q = twice(h.q, "q");
    h.k = twice(h.k, "k");
  }
  if (o.unit_sum) {
    h.q = l.map("q / (sum(q) + 1e-4)", {{"q", h.q}}, "q_unit");
    h.k = l.map("k / (sum(k) + 1e-4)", {{"k", h.k}}, "k_unit");
  }
  const std::string causal = flag(o.causal), eps = o.eps.given ? number_text(o.eps.value) : "none";
  Value y;
  const bool own =
      product || is_one_of(o.map, {Map::silu, Map::softplus, Map::taylor2}) || (o.map == Map::identity && o.scale.given);
  if (own || o.normalize != Sums::map) {  // the operator `linear`, with the maps of its page
    const bool by_map =
        o.normalizer == Divide::add || (o.normalizer == Divide::standard && is_one_of(o.map, {Map::softplus, Map::taylor2}));
    const bool divides = o.normalize == Sums::map ? by_map : o.normalize == Sums::normalized;
    std::vector<Setting> options = {{"map", product ? "identity" : kMaps[static_cast<size_t>(o.map)]},
                                    {"causal", causal},
                                    {"normalize", flag(divides)},
                                    {"dpfp_nu", whole(o.dpfp_nu)}};
    if (o.scale.given) options.push_back({"scale", number_text(o.scale.value)});
    if (o.eps.given) options.push_back({"eps", eps});
    std::vector<Named> inputs = {{"q", h.q}, {"k", h.k}, {"v", h.v}};
    if (o.map == Map::t2r) {
      inputs.push_back({"w", l.weight("feature_map.weight", {H, o.features > 0 ? o.features : K, K}, fan_in(), as("w"))});
    }
    y = l.op("linear", inputs, options);
  } else {
    const int64_t F = o.features > 0 ? o.features : K;
    std::vector<Named> inputs = {{"q", h.q}, {"k", h.k}, {"v", h.v}};
    if (is_one_of(o.map, {Map::hedgehog, Map::hedgehog_exp})) {
      inputs.push_back({"w", l.weight("feature_map.weight", {H, K, F}, F == K ? identity() : fan_in(), as("w"))});
    } else if (o.map == Map::t2r) {
      inputs.push_back({"w", l.weight("feature_map.weight", {H, K, F}, fan_in(), as("w"))});
      inputs.push_back({"b", l.weight("feature_map.bias", {H, F}, zeros(), as("b"))});
    } else if (o.map == Map::hedgehog_joint) {
      inputs.push_back({"w", l.weight("feature_map.weight", {K, K}, identity(), as("w"))});
      inputs.push_back({"b", l.weight("feature_map.bias", {K}, zeros(), as("b"))});
    } else if (o.map == Map::focused) {
      inputs.push_back({"scale", l.weight("feature_map.scale", {H * K}, zeros(), as("scale"))});
    } else if (o.map == Map::rebased) {
      inputs.push_back({"gamma", l.weight("feature_map.gamma", {K}, ones(), as("gamma"))});
      inputs.push_back({"beta", l.weight("feature_map.beta", {K}, zeros(), as("beta"))});
    } else if (is_one_of(o.map, {Map::favor, Map::favor_hyp, Map::favor_relu})) {
      const int64_t M =
          o.features > 0 ? o.features : static_cast<int64_t>(static_cast<double>(K) * std::log(static_cast<double>(K)));
      inputs.push_back({"proj", l.buffer("feature_map.proj", {M > 0 ? M : 1, K}, normal(1), as("proj"), "random directions")});
    }
    std::vector<Setting> options = {{"map", kMaps[static_cast<size_t>(o.map)]},
                                    {"causal", causal},
                                    {"normalizer", kDivides[static_cast<size_t>(o.normalizer)]},
                                    {"temperature", number_text(o.temperature)},
                                    {"dpfp_nu", whole(o.dpfp_nu)},
                                    {"focused_power", number_text(o.focused_power)},
                                    {"favor_eps", number_text(o.favor_eps)},
                                    {"max_length", whole(o.max_length)},
                                    {"eps", eps}};
    if (o.causal && is_one_of(o.map, {Map::exp, Map::favor, Map::favor_hyp, Map::efficient})) {
      options.push_back({"key_top", o.key_top == Top::running ? "running" : "global"});
    }
    y = l.op("features", inputs, options);
  }
  if (o.norm == OutNorm::rms) {
    y = l.op("rms_norm", {{"x", y}, {"weight", l.weight("norm.weight", {o.values()}, ones(), as("norm"))}},
             {{"eps", number_text(o.out_eps)}}, "norm");
  } else if (o.norm == OutNorm::layer) {
    y = l.op("layer_norm", {{"x", y}}, {{"eps", number_text(o.out_eps)}}, "norm");
  }
  return project_out(l, o, y);
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  projections_of_file(f, s);
  if (f.has("norm")) s->push_back({"norm", "rms"});
  if (f.has("w") && f.size("w", 2) > 0) s->push_back({"features", whole(f.size("w", 2))});
  if (f.has("proj")) s->push_back({"features", whole(f.size("proj", 0))});
}

// Files of the mechanism `linear`: its page's defaults and maps.
void of_linear_file(const FileFacts& f, std::vector<Setting>* s) {
  projections_of_file(f, s);
  if (f.has("norm")) s->push_back({"norm", "rms"});
  if (f.has("w")) s->push_back({"features", whole(f.size("w", 1))});
  s->push_back({"map", f.has("mq1") ? "product" : "identity"});
  s->push_back({"normalize", "0"});
}

}  // namespace

const Layer& linear_attention_layer() {
  using O = LinearAttention;
  static const Layer layer = make_layer<O, record>(
      "LinearAttention", "Katharopoulos, Vyas, Pappas, Fleuret, ICML 2020, arXiv 2006.16236; maps: docs/mechanisms/features.md",
      Declaration<O>("linear_attention", "features", "linear attention with any feature map")
          .equation("y = Wo (sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j))")
          .LINNET_PROJECTION_OPTIONS(O)
          .option("map", &O::map, std::vector<std::string>(std::begin(kMaps), std::end(kMaps)),
                  "the feature map; product: W1 x times W2 x")
          .option("causal", &O::causal, "a token sees no later one")
          .option("normalizer", &O::normalizer, {"standard", "none", "add", "max"},
                  "what divides; standard: what the map's source uses")
          .option("normalize", &O::normalize, {"map", "0", "1"},
                  "0 or 1: the operator `linear` without or with its denominator, and its maps; map: as normalizer says")
          .option("eps", &O::eps, 0, kAnyReal, "of the normaliser; default as in the map's source")
          .option("scale", &O::scale, -kAnyReal, kAnyReal,
                  "maps identity, silu, softplus, taylor2, product: multiplies the weights; default key^-0.5")
          .option("unit_sum", &O::unit_sum, "q and k divided by their sums")
          .option("norm", &O::norm, {"none", "rms", "layer"}, "of each head's read")
          .option("out_eps", &O::out_eps, 0, 1, "of that norm")
          .option("features", &O::features, 0, kAnyCount, "hedgehog, t2r, favor: number of features; 0: as the source")
          .option("dpfp_nu", &O::dpfp_nu, 1, 64, "map dpfp: number of rolls")
          .option("temperature", &O::temperature, -1e3, 1e3, "map exp")
          .option("focused_power", &O::focused_power, 1, 16, "map focused")
          .option("favor_eps", &O::favor_eps, 0, 1, "maps favor: added to each feature")
          .option("max_length", &O::max_length, 0, kAnyCount, "map cosformer: longest sequence; 0: as long as the call")
          .option("key_top", &O::key_top, {"global", "running"},
                  "maps exp, favor, causal: what exponents of keys are taken less of"),
      {{"linear", "layer", {}, of_linear_file}, {"features", "layer", {}, of_file}});
  return layer;
}

}  // namespace linnet::layers
