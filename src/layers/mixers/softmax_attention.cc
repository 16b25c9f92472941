// Softmax attention as transformers have it: grouped heads, rotary positions, norms of q and k, sinks, windows, a soft cap,
// and the gates G1 to G5 of gated attention (arXiv 2505.06708). Parameter names of Llama, Qwen2 and Qwen3.
#include <algorithm>
#include <cmath>

#include "layers/layer.h"

namespace linnet::layers {
namespace {

enum class Rotary : int32_t { none, half, interleaved };
enum class Scaling : int32_t { none, linear, llama3, yarn };
enum class QkNorm : int32_t { none, rms, rms_plus_one, layer, rms_all, rms_plain };
enum class Gate : int32_t { none, g1, g2, g3, g4, g5 };
enum class Grain : int32_t { elementwise, headwise };
enum class GateAct : int32_t { sigmoid, silu, identity, ns_sigmoid };
enum class GateMode : int32_t { multiply, add };
enum class GateFrom : int32_t { input, parameter };

constexpr const char* kGates[] = {"none", "G1", "G2", "G3", "G4", "G5"};
constexpr const char* kGrains[] = {"elementwise", "headwise"};
constexpr const char* kActs[] = {"sigmoid", "silu", "identity", "ns_sigmoid"};
constexpr const char* kModes[] = {"multiply", "add"};
constexpr const char* kPairs[] = {"none", "half", "interleaved"};
constexpr const char* kScalings[] = {"none", "linear", "llama3", "yarn"};

struct SoftmaxAttention {
  int64_t hidden = 2048, heads = 16, kv_heads = 0, key = 0, value = 0;
  bool causal = true, bias = false, out_bias = false, sinks = false, shared = false, rope_back = false, norm_last = false;
  Rotary rope = Rotary::half;
  double rope_base = 10000, rope_factor = 1, rope_low = 1, rope_high = 4;
  int64_t rope_dims = 0, rope_length = 8192;
  Scaling rope_scaling = Scaling::none;
  Maybe rope_attention;
  QkNorm qk_norm = QkNorm::none;
  double norm_eps = 1e-6, softcap = 0;
  Maybe scale;
  Window window;
  int64_t prefix = 0, alibi = 0;
  Gate position = Gate::none;
  Grain granularity = Grain::elementwise;
  GateAct act = GateAct::sigmoid;
  GateMode mode = GateMode::multiply;
  GateFrom gate_from = GateFrom::input;
};

template <class E, size_t N>
std::string name_of(const char* const (&names)[N], E value) {
  return names[static_cast<size_t>(value)];
}

bool check_heads(Recorder& l, const SoftmaxAttention& o) {
  const int64_t kv = o.kv_heads > 0 ? o.kv_heads : o.heads;
  if (o.key == 0) {
    l.require(o.hidden % o.heads == 0,
              "hidden is " + std::to_string(o.hidden) + ", expected a multiple of heads, " + std::to_string(o.heads));
  }
  l.require(o.heads % kv == 0,
            "heads is " + std::to_string(o.heads) + ", expected a multiple of kv_heads, " + std::to_string(kv));
  return l.ok();
}

// q, k or v as projected: [B, T, heads, width].
Value project_heads(Recorder& l, const SoftmaxAttention& o, const std::string& n, int64_t heads, int64_t width, Value x) {
  const Value bias = o.bias ? l.weight(n + "_proj.bias", {heads * width}, zeros(), as("b" + n)) : Value();
  return l.split(l.dense(x, l.weight(n + "_proj.weight", {heads * width, o.hidden}, normal(0.02), transposed("w" + n)), bias),
                 heads);
}

// YaRN (arXiv 2309.00071): pairs that turn less than rope_low times within the trained length are slowed down by the factor,
// those that turn more than rope_high times are kept, between them the two are mixed.
std::vector<double> yarn_frequencies(const SoftmaxAttention& o, int64_t dims) {
  constexpr double kTurn = 6.283185307179586;
  const auto width = static_cast<double>(dims), length = static_cast<double>(o.rope_length);
  const auto pair = [&](double turns) { return width * std::log(length / (turns * kTurn)) / (2 * std::log(o.rope_base)); };
  const double low = std::max(std::floor(pair(o.rope_high)), 0.0);
  double high = std::min(std::ceil(pair(o.rope_low)), width - 1);
  if (low == high) high += 0.001;
  std::vector<double> frequencies;
  for (int64_t i = 0; i < dims / 2; ++i) {
    const double own = std::pow(o.rope_base, -2 * static_cast<double>(i) / width);
    const double slowed = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies.push_back(own / o.rope_factor * slowed + own * (1 - slowed));
  }
  return frequencies;
}

Value norm_heads(Recorder& l, const SoftmaxAttention& o, const std::string& n, Value y) {
  const int64_t K = l.width(y);
  const std::vector<Setting> eps = {{"eps", number_text(o.norm_eps)}};
  if (o.qk_norm == QkNorm::rms || o.qk_norm == QkNorm::rms_plus_one) {
    const bool plus = o.qk_norm == QkNorm::rms_plus_one;
    const Value weight = l.weight(n + "_norm.weight", {K}, plus ? zeros() : ones(), as(n + "_norm"));
    y = l.op("rms_norm", {{"x", y}, {"weight", weight}}, {eps[0], {"plus_one", plus ? "1" : "0"}}, n + "_norm");
  } else if (o.qk_norm == QkNorm::layer) {
    const Value weight = l.weight(n + "_norm.weight", {K}, ones(), as(n + "_norm"));
    y = l.op("layer_norm", {{"x", y}, {"weight", weight}, {"bias", l.weight(n + "_norm.bias", {K}, zeros())}}, eps,
             n + "_norm");
  }
  if (o.qk_norm == QkNorm::rms_all) {
    const int64_t heads = l.shape(y)[2];
    const Value weight = l.weight(n + "_norm.weight", {heads * K}, ones(), as(n + "_norm"));
    y = l.split(l.op("rms_norm", {{"x", l.join(y)}, {"weight", weight}}, eps, n + "_norm"), heads);
  }
  if (o.qk_norm == QkNorm::rms_plain) y = l.op("rms_norm", {{"x", y}}, eps, n + "_norm");
  return y;
}

Value turn_heads(Recorder& l, const SoftmaxAttention& o, const std::string& n, Value y) {
  if (o.rope == Rotary::none) return y;
  const int64_t K = l.width(y);
  if (o.rope_back) {  // the other way round: negative frequencies
    const int64_t dims = o.rope_dims > 0 ? o.rope_dims : K;
    if (!l.require(o.rope_scaling == Scaling::none, "rope_back has no scaling, expected rope_scaling none") ||
        !l.require(dims % 2 == 0, "rope_dims is " + std::to_string(dims) + ", expected an even number")) {
      return {};
    }
    std::vector<double> frequencies;
    for (int64_t i = 0; i < dims; i += 2) {
      frequencies.push_back(-std::pow(o.rope_base, -static_cast<double>(i) / static_cast<double>(dims)));
    }
    return l.op("rotary", {{"x", y}, {"frequencies", l.table(frequencies)}},
                {{"pairs", name_of(kPairs, o.rope)}, {"dims", std::to_string(dims)}}, n + "_rotary");
  }
  if (o.rope_scaling == Scaling::yarn) {
    const int64_t dims = o.rope_dims > 0 ? o.rope_dims : K;
    if (!l.require(dims % 2 == 0 && dims <= K,
                   "rope_dims is " + std::to_string(dims) + ", expected an even number of at most " + std::to_string(K)) ||
        !l.require(o.rope_base > 1, "rope_base is not above 1, as scaling yarn needs it")) {
      return {};
    }
    y = l.op("rotary", {{"x", y}, {"frequencies", l.table(yarn_frequencies(o, dims))}},
             {{"pairs", name_of(kPairs, o.rope)}, {"dims", std::to_string(dims)}}, n + "_rotary");
    const double usual = o.rope_factor > 1 ? 0.1 * std::log(o.rope_factor) + 1 : 1;
    const std::string longer = "x * " + number_text(o.rope_attention.given ? o.rope_attention.value : usual);
    if (longer == "x * 1") return y;
    if (dims == K) return l.map(longer, {{"x", y}}, n + "_longer");
    return l.concat(l.map(longer, {{"x", l.slice(y, 0, dims)}}, n + "_longer"), l.slice(y, dims, K));
  }
  return l.op("rotary", {{"x", y}},
              {{"theta", number_text(o.rope_base)},
               {"pairs", name_of(kPairs, o.rope)},
               {"dims", std::to_string(o.rope_dims)},
               {"scaling", name_of(kScalings, o.rope_scaling)},
               {"factor", number_text(o.rope_factor)},
               {"low_freq_factor", number_text(o.rope_low)},
               {"high_freq_factor", number_text(o.rope_high)},
               {"original_length", std::to_string(o.rope_length)}},
              n + "_rotary");
}

// The norm of q or k and its rotation.
Value place_heads(Recorder& l, const SoftmaxAttention& o, const std::string& n, Value y) {
  if (!y.given()) return {};
  if (!o.norm_last) return turn_heads(l, o, n, norm_heads(l, o, n, y));
  y = turn_heads(l, o, n, y);
  return y.given() ? norm_heads(l, o, n, y) : y;
}

// Linear biases (ALiBi, arXiv 2108.12409): slope (j - i), where softmax does not see slope i. Further channels hold the slope
// in q and the key's number in k, in pieces of at most 256, which 16 bits hold exactly.
std::vector<double> alibi_slopes(int64_t heads) {
  int64_t power = 1;
  while (2 * power <= heads) power *= 2;
  std::vector<double> slopes;
  for (int64_t i = 1; i <= power; ++i) slopes.push_back(std::exp2(-8.0 * static_cast<double>(i) / static_cast<double>(power)));
  for (int64_t i = 1; static_cast<int64_t>(slopes.size()) < heads; i += 2) {
    slopes.push_back(std::exp2(-4.0 * static_cast<double>(i) / static_cast<double>(power)));
  }
  return slopes;
}
void add_alibi(Recorder& l, const SoftmaxAttention& o, double scale, Value* q, Value* k) {
  if (!q->given() || !k->given()) return;
  std::vector<double> slopes = alibi_slopes(o.heads), starts;
  for (double& slope : slopes) slope /= scale;
  for (int64_t start = 0; start < o.alibi; start += 256) starts.push_back(static_cast<double>(start));
  const int64_t pieces = static_cast<int64_t>(starts.size()), kv = l.shape(*k)[2];
  const Value slope = l.column(l.table(slopes)), start = l.table(starts);
  const Value ones_of_q = l.constant(1, {kB, kT, o.heads, pieces}), ones_of_k = l.constant(1, {kB, kT, kv, pieces});
  *q = l.concat(*q, l.map("one * slope", {{"one", ones_of_q}, {"slope", slope}}, "q_slope"));
  *k = l.concat(*k, l.map("one * clip(position - start, 0, 256)", {{"one", ones_of_k}, {"start", start}}, "k_number"));
}

Value project_output(Recorder& l, const SoftmaxAttention& o, Value y) {  // y [B, T, heads, V]
  if (!y.given()) return {};
  const int64_t joined = o.heads * l.width(y);
  const Value bias = o.out_bias ? l.weight("o_proj.bias", {o.hidden}, zeros(), as("bo")) : Value();
  return l.dense(l.join(y), l.weight("o_proj.weight", {o.hidden, joined}, normal(0.02), transposed("wo")), bias);
}

Value record(Recorder& l, const SoftmaxAttention& o, Value x) {  // x [B, T, hidden]
  if (!check_heads(l, o)) return {};
  const int64_t kv = o.kv_heads > 0 ? o.kv_heads : o.heads;
  const int64_t K = o.key > 0 ? o.key : o.hidden / o.heads, V = o.value > 0 ? o.value : K;

  const bool headwise = o.granularity == Grain::headwise;
  const std::vector<Setting> gate_options = {{"granularity", name_of(kGrains, o.granularity)},
                                             {"act", name_of(kActs, o.act)},
                                             {"mode", name_of(kModes, o.mode)},
                                             {"shared", o.shared ? "1" : "0"}};
  const auto logits = [&](int64_t heads, int64_t width) {  // of the gate: [B, T, heads, width], or [B, T, heads]
    const int64_t channels = headwise ? heads : heads * width;
    Value g;
    if (o.gate_from == GateFrom::parameter) {
      const Value theta = l.weight("gate", {channels}, zeros(), as("theta"), "logits of a gate that does not see the token");
      g = l.map("one * theta", {{"one", l.constant(1, {kB, kT, 1})}, {"theta", theta}}, "gate");
    } else {
      g = l.dense(x, l.weight("g_proj.weight", {channels, o.hidden}, normal(0.02), transposed("wg")));
    }
    return headwise ? g : l.split(g, heads);
  };
  const auto gated = [&](Value y, int64_t heads, int64_t width) {
    return l.op("gated_gate", {{"y", y}, {"g", logits(heads, width)}}, gate_options);
  };
  Value q = project_heads(l, o, "q", o.heads, K, x), k = project_heads(l, o, "k", kv, K, x),
        v = project_heads(l, o, "v", kv, V, x);
  if (o.position == Gate::g2) v = gated(v, kv, V);
  if (o.position == Gate::g3) k = gated(k, kv, K);
  if (o.position == Gate::g4) q = gated(q, o.heads, K);
  q = place_heads(l, o, "q", q);
  k = place_heads(l, o, "k", k);
  const double scale = o.scale.given ? o.scale.value : 1 / std::sqrt(static_cast<double>(K));
  if (o.alibi > 0) add_alibi(l, o, scale, &q, &k);
  const Value sinks = o.sinks ? l.weight("sinks", {o.heads}, normal(0.02), as("sinks")) : Value();
  std::vector<Setting> options = {{"causal", o.causal ? "1" : "0"},
                                  {"scale", o.scale.given || o.alibi > 0 ? number_text(scale) : "none"},
                                  {"window", std::to_string(o.window.left) + "," + std::to_string(o.window.right)},
                                  {"prefix", std::to_string(o.prefix)},
                                  {"softcap", number_text(o.softcap)}};
  Value y;
  if (o.position == Gate::g1) {
    options.push_back({"position", "G1"});
    options.insert(options.end(), gate_options.begin(), gate_options.end());
    y = l.op("gated", {{"q", q}, {"k", k}, {"v", v}, {"g", logits(o.heads, V)}, {"sinks", sinks}}, options);
  } else {
    y = l.op("softmax", {{"q", q}, {"k", k}, {"v", v}, {"sinks", sinks}}, options);
  }
  y = project_output(l, o, y);
  if (o.position == Gate::g5) {
    l.require(!headwise, "the gate G5 has no heads, expected granularity elementwise");
    y = l.join(gated(l.split(y, 1), 1, o.hidden));
  }
  return y;
}

// ---- what the converter puts in its place
// ------------------------------------------------------------------------------------

enum class Mechanism : int32_t { window, distill, hybrid, gdn, gla, monarch, hierarchical, hedgehog, t2r, exact };
enum class Form : int32_t { sliding, terraced };
enum class Tie : int32_t { block, prefix, row };
constexpr const char* kMechanisms[] = {"window",  "distill",      "hybrid",   "gdn", "gla",
                                       "monarch", "hierarchical", "hedgehog", "t2r", "hybrid-exact"};
constexpr const char* kTies[] = {"block", "prefix", "row"};

struct Converted : SoftmaxAttention {
  Mechanism mechanism = Mechanism::window;
  int64_t near = 64, first = 0, features = 0, block = 0, steps = 1, arity = 4;
  Sizes windows, blocks, updates;
  Form form = Form::sliding;
  Tie tie = Tie::row;
};

// The projections, norms and positions of softmax attention with another mechanism between them. Its own parameters stand
// below its name (gdn.A_log), as converted checkpoints have them (docs/convert.md).
Value record_converted(Recorder& l, const Converted& o, Value x) {  // x [B, T, hidden]
  if (!check_heads(l, o)) return {};
  const int64_t H = o.heads, kv = o.kv_heads > 0 ? o.kv_heads : H, groups = H / kv;
  const int64_t K = o.key > 0 ? o.key : o.hidden / H, V = o.value > 0 ? o.value : K;
  const Value q_raw = project_heads(l, o, "q", H, K, x), k_raw = project_heads(l, o, "k", kv, K, x),
              v = project_heads(l, o, "v", kv, V, x);
  const Value q = place_heads(l, o, "q", q_raw), k = place_heads(l, o, "k", k_raw);
  if (!l.ok()) return {};
  const std::string scale = o.scale.given ? number_text(o.scale.value) : "none", causal = o.causal ? "1" : "0";
  const std::string name = name_of(kMechanisms, o.mechanism);
  const Recorder::Scope scope(l, name);
  const auto needs_causal = [&] { return l.require(o.causal, name + " sees no later token, expected causal=1"); };
  // Exact attention to the last w keys and to the first ones; on both sides where it is not causal.
  const auto window = [&](Value qs, Value ks, Value vs, int64_t w) {
    const std::string sides =
        o.causal ? std::to_string(w - 1) + ",-1" : std::to_string(w / 2) + "," + std::to_string((w - 1) / 2);
    return l.op(
        "softmax", {{"q", qs}, {"k", ks}, {"v", vs}},
        {{"causal", causal}, {"scale", scale}, {"window", w > 0 ? sides : "-1,-1"}, {"prefix", std::to_string(o.first)}},
        "near");
  };
  const auto monarch = [&](Value qs, Value ks, Value vs, int64_t block, int64_t steps) {
    return l.op("monarch", {{"q", qs}, {"k", l.repeat(ks, groups)}, {"v", l.repeat(vs, groups)}},
                {{"block", std::to_string(block > 0 ? block : -1)},
                 {"steps", std::to_string(steps)},
                 {"causal", causal},
                 {"scale", scale}});
  };
  // The read of a recurrent mechanism beside a window: a share for each head.
  const auto beside_window = [&](Value y) {
    if (o.near == 0) return y;
    const Value factor = l.column(l.weight("window_factor", {H}, zeros(), {}, "logit of the window's share"));
    return l.map("y + sigmoid(f) * (w - y)", {{"y", y}, {"w", window(q, k, v, o.near)}, {"f", factor}}, "mixed");
  };
  Value y;
  switch (o.mechanism) {
    case Mechanism::window: {
      if (o.windows.count == 0) {
        y = window(q, k, v, o.near);
        break;
      }
      if (!l.require(o.windows.count == kv, "windows has " + std::to_string(o.windows.count) +
                                                " entries, expected one for each head of keys, " + std::to_string(kv))) {
        return {};
      }
      const bool mixed = o.blocks.count > 0;
      if (!l.require(!mixed || (o.blocks.count == kv && o.updates.count == kv),
                     "blocks and updates have one entry for each head of keys, " + std::to_string(kv)) ||
          !l.require(!mixed || !o.causal, "Monarch in single heads has no bounded state, expected causal=0")) {
        return {};
      }
      for (int64_t g = 0; g < kv; ++g) {
        const auto part = [&](Value from, int64_t heads, int64_t width) {
          return l.split(l.slice(l.join(from), g * heads * width, (g + 1) * heads * width), heads);
        };
        const Value qs = part(q, groups, K), ks = part(k, 1, K), vs = part(v, 1, V);
        const Value own = l.join(mixed && o.blocks.value[g] > 0 ? monarch(qs, ks, vs, o.blocks.value[g], o.updates.value[g])
                                                                : window(qs, ks, vs, o.windows.value[g]));
        y = g == 0 ? own : l.concat(y, own);
      }
      y = l.split(y, H);
      break;
    }
    case Mechanism::distill: {
      const int64_t M = o.features > 0 ? o.features : K;
      const Value q_mean = l.weight("q_mean", {H, K}, zeros(), {}, "taken off q: the symmetries of softmax attention"),
                  k_mean = l.weight("k_mean", {H, K}, zeros(), {}, "taken off k"),
                  balance = l.weight("balance", {H, K}, ones(), {}, "multiplies q and divides k");
      const Value keys = l.repeat(k, groups);
      const Value qb = l.map("(q - m) * a", {{"q", q}, {"m", q_mean}, {"a", balance}}, "q_balanced"),
                  kb = l.map("(k - m) / a", {{"k", keys}, {"m", k_mean}, {"a", balance}}, "k_balanced");
      const double eta = o.scale.given ? o.scale.value : 1 / std::sqrt(static_cast<double>(K));
      const Value logw = l.map("sum(k * m * " + number_text(eta) + ")", {{"k", keys}, {"m", q_mean}}, "key_logw");
      const Value z = l.weight("z", {H, M, K}, normal(1), {}, "directions of the features");
      const Value alpha = l.map("exp(a)", {{"a", l.weight("log_alpha", {H, M}, zeros())}}, "alpha");
      y = l.op("distill", {{"q", qb}, {"k", kb}, {"v", l.repeat(v, groups)}, {"z", z}, {"alpha", alpha}, {"key_logw", logw}},
               {{"causal", causal}, {"scale", scale}});
      break;
    }
    case Mechanism::hybrid: {
      if (!needs_causal()) return {};
      l.require(!o.scale.given || o.scale.value * o.scale.value * static_cast<double>(K) == 1,
                "hybrid has the scale key^-0.5, not " + scale);
      const int64_t F = o.features > 0 ? o.features : (K + 1) / 2;
      const Init start = F == K ? identity() : fan_in();
      const Value wq = l.weight("feature_map_q.weight", {H, K, F}, start),
                  wk = l.weight("feature_map_k.weight", {H, K, F}, start),
                  factor = l.weight("window_factor", {H}, constant(-2.1972246), {}, "logit of the window's share");
      y = l.op(
          "distill_window",
          {{"q", q}, {"k", l.repeat(k, groups)}, {"v", l.repeat(v, groups)}, {"wq", wq}, {"wk", wk}, {"window_factor", factor}},
          {{"window", std::to_string(o.near)}}, "hybrid", o.form == Form::sliding ? "out_sliding" : "out_terraced");
      break;
    }
    case Mechanism::exact: {
      if (!needs_causal()) return {};
      const int64_t M = o.features > 0 ? o.features : K;
      const double root = std::sqrt(static_cast<double>(K)), factor = o.scale.given ? o.scale.value * root : 1;
      const Value q_mean = l.buffer("q_mean", {H, K}, zeros(), {}, "taken off q: the symmetries of softmax attention"),
                  k_mean = l.buffer("k_mean", {H, K}, zeros(), {}, "taken off k"),
                  A = l.buffer("A", {H, K, K}, identity(), {}, "maps q; the second moments of q A and of k A^-1 are equal"),
                  inverse = l.buffer("A_inverse", {H, K, K}, identity(), {}, "maps k");
      const Value z = l.weight("z", {H, M, K}, normal(1), {}, "directions of the features");
      const Value alpha = l.map("exp(a)", {{"a", l.weight("log_alpha", {H, M}, zeros())}}, "alpha");
      const Value keys = l.repeat(k, groups),
                  qs = factor == 1 ? q : l.map("q * " + number_text(factor), {{"q", q}}, "q_scaled");
      const Value q_centred = l.map("q - m", {{"q", qs}, {"m", q_mean}}, "q_centred"),
                  k_centred = l.map("k - m", {{"k", keys}, {"m", k_mean}}, "k_centred");
      const std::string eta = number_text(1 / root);
      y = l.op("distill_hybrid",
               {{"q", qs},
                {"k", keys},
                {"v", l.repeat(v, groups)},
                {"q_balanced", l.op("dense_heads", {{"x", q_centred}, {"weight", A}}, {}, "q_balanced")},
                {"k_balanced", l.op("dense_heads", {{"x", k_centred}, {"weight", inverse}}, {}, "k_balanced")},
                {"query_logw", l.map("sum(q * m * " + eta + ")", {{"q", q_centred}, {"m", k_mean}}, "query_logw")},
                {"key_logw", l.map("sum(k * m * " + eta + ")", {{"k", keys}, {"m", q_mean}}, "key_logw")},
                {"z", z},
                {"alpha", alpha}},
               {{"window", std::to_string(std::max<int64_t>(o.near, 1))}, {"sinks", std::to_string(o.first)}});
      break;
    }
    case Mechanism::hedgehog:
    case Mechanism::t2r: {
      const bool hedgehog = o.mechanism == Mechanism::hedgehog;
      const int64_t F = o.features > 0 ? o.features : (K + 1) / 2;
      const auto features = [&](const std::string& n, Value rows) {
        const std::string map = "feature_map_" + n;
        const Value weight = l.weight(map + ".weight", {H, K, F}, hedgehog && F == K ? identity() : fan_in()),
                    bias = hedgehog ? Value() : l.weight(map + ".bias", {H, F}, zeros());
        const Value mapped = l.op("dense_heads", {{"x", rows}, {"weight", weight}, {"bias", bias}}, {}, map);
        if (!hedgehog) return l.map("max(y, 1e-12)", {{"y", mapped}}, n + "_features");
        return l.concat(l.map("max(exp(y - amax(y)) / sum(exp(y - amax(y))), 1e-12)", {{"y", mapped}}, n + "_plus"),
                        l.map("max(exp(-y - amax(-y)) / sum(exp(-y - amax(-y))), 1e-12)", {{"y", mapped}}, n + "_minus"));
      };
      y = l.op(
          "linear", {{"q", features("q", q)}, {"k", features("k", l.repeat(k, groups))}, {"v", l.repeat(v, groups)}},
          {{"map", "identity"}, {"causal", causal}, {"normalize", "1"}, {"scale", "1"}, {"eps", "0"}, {"allow_signed", "1"}});
      break;
    }
    case Mechanism::gdn: {
      if (!needs_causal()) return {};
      const Value a = l.dense(x, l.weight("a_proj.weight", {H, o.hidden}, zeros())),
                  b = l.dense(x, l.weight("b_proj.weight", {H, o.hidden}, zeros()), l.weight("b_proj.bias", {H}, zeros()));
      const Value g =
          l.map("-exp(A_log) * softplus(a + dt_bias)",
                {{"a", a}, {"A_log", l.weight("A_log", {H}, zeros())}, {"dt_bias", l.weight("dt_bias", {H}, zeros())}}, "g");
      y = l.op("gated_delta",
               {{"q", q},
                {"k", l.repeat(k, groups)},
                {"v", l.repeat(v, groups)},
                {"g", g},
                {"beta", l.map("sigmoid(b)", {{"b", b}}, "beta")}},
               {{"l2_norm", "1"}});
      y = l.map("y * s", {{"y", y}, {"s", l.column(l.weight("v_scale", {H}, ones(), {}, "scale of a head's values"))}},
                "scaled");
      y = beside_window(y);
      break;
    }
    case Mechanism::gla: {
      if (!needs_causal()) return {};
      const auto softmax = [&](Value raw, const char* step) {
        return l.map("exp(x - amax(x)) / sum(exp(x - amax(x)))", {{"x", raw}}, step);
      };
      const Value g = l.map("logsigmoid(k) / 16", {{"k", k_raw}}, "g");
      y = l.op("gla", {{"q", softmax(q_raw, "q_softmax")},
                       {"k", l.repeat(softmax(k_raw, "k_softmax"), groups)},
                       {"v", l.repeat(v, groups)},
                       {"g", l.repeat(g, groups)}});
      y = beside_window(y);
      break;
    }
    case Mechanism::monarch: y = monarch(q, k, v, o.block, o.steps); break;
    case Mechanism::hierarchical:
      y = l.op("hierarchical", {{"q", q}, {"k", l.repeat(k, groups)}, {"v", l.repeat(v, groups)}},
               {{"tie", name_of(kTies, o.tie)},
                {"include_self", "1"},
                {"causal", causal},
                {"scale", scale},
                {"arity", std::to_string(o.arity)}});
      break;
  }
  return y;
}

Value record_converted_layer(Recorder& l, const Converted& o, Value x) {
  return project_output(l, o, record_converted(l, o, x));
}

void of_file(const FileFacts& f, std::vector<Setting>* s) {
  const int64_t heads = f.number("heads", 1), kv = f.number("kv_heads", heads);
  s->push_back({"key", std::to_string(f.size("wk", 1) / kv)});
  s->push_back({"value", std::to_string(f.size("wv", 1) / kv)});
  s->push_back({"bias", f.has("bq") ? "1" : "0"});
  s->push_back({"out_bias", f.has("bo") ? "1" : "0"});
  s->push_back({"sinks", f.has("sinks") ? "1" : "0"});
  s->push_back({"qk_norm", f.has("q_norm") ? "rms" : "none"});
  s->push_back({"rope", f.number("use_rope", f.has("wg") ? 1 : 0) == 0 ? "none" : f.text("rope", "half")});
  if (f.has("theta")) s->push_back({"gate_from", "parameter"});
  if ((f.has("wg") || f.has("theta")) && f.text("position").empty()) s->push_back({"position", "G1"});
}

}  // namespace

const Layer& softmax_attention_layer() {
  using O = SoftmaxAttention;
  static const Layer layer = make_layer<O, record>(
      "SoftmaxAttention", "Vaswani et al. 2017, arXiv 1706.03762; gates: Qiu et al., NeurIPS 2025, arXiv 2505.06708",
      Declaration<O>("softmax_attention", "softmax",
                     "softmax attention with grouped heads, rotary positions, norms, gates, sinks")
          .equation("y = Wo softmax(q k^T scale) v; q, k = rotary(norm(W x)); G1: the read times act(Wg x)")
          .option("hidden", &O::hidden, 1, kAnyCount, "channels of x")
          .option("heads", &O::heads, 1, kAnyCount, "heads of queries")
          .option("kv_heads", &O::kv_heads, 0, kAnyCount, "heads of keys and values, a divisor of heads; 0: as many")
          .option("key", &O::key, 0, kAnyCount, "channels of a head's queries and keys; 0: hidden / heads")
          .option("value", &O::value, 0, kAnyCount, "channels of a head's values; 0: as key")
          .option("causal", &O::causal, "a token sees no later one")
          .option("bias", &O::bias, "q, k and v have a bias")
          .option("out_bias", &O::out_bias, "the output projection has a bias")
          .option("rope", &O::rope, {"none", "half", "interleaved"}, "rotary positions: how channels are paired")
          .option("rope_base", &O::rope_base, 1e-300, kAnyReal, "base of the frequencies")
          .option("rope_dims", &O::rope_dims, 0, kAnyCount, "channels that turn; 0: all")
          .option("rope_back", &O::rope_back, "turn the other way round")
          .option("rope_scaling", &O::rope_scaling, {"none", "linear", "llama3", "yarn"}, "of the frequencies")
          .option("rope_factor", &O::rope_factor, 1e-300, kAnyReal, "of the scaling")
          .option("rope_low", &O::rope_low, 0, kAnyReal, "llama3: low_freq_factor; yarn: beta_slow")
          .option("rope_high", &O::rope_high, 0, kAnyReal, "llama3: high_freq_factor; yarn: beta_fast")
          .option("rope_length", &O::rope_length, 1, kAnyCount, "llama3, yarn: original length")
          .option("rope_attention", &O::rope_attention, 0, kAnyReal,
                  "yarn: multiplies what turns of q and k; default 0.1 ln(rope_factor) + 1")
          .option("qk_norm", &O::qk_norm, {"none", "rms", "rms_plus_one", "layer", "rms_all", "rms_plain"},
                  "norm of q and k: of each head, or of all heads together; plain: without a weight")
          .option("norm_eps", &O::norm_eps, 0, 1, "of that norm")
          .option("norm_last", &O::norm_last, "the norm stands behind the rotation")
          .option("scale", &O::scale, -kAnyReal, kAnyReal, "multiplies q.k; default key^-0.5")
          .option("window", &O::window, "keys seen to the left and right; -1: all")
          .option("alibi", &O::alibi, 0, int64_t{1} << 16, "linear biases (ALiBi) over so many positions; 0: none")
          .option("prefix", &O::prefix, 0, kAnyCount, "first keys that escape the window")
          .option("softcap", &O::softcap, 0, kAnyReal, "logits become softcap tanh(logit / softcap); 0: off")
          .option("sinks", &O::sinks, "one learned logit per head without a value")
          .option("position", &O::position, {"none", "G1", "G2", "G3", "G4", "G5"},
                  "what is gated: the read, values, keys, queries, or the output")
          .option("granularity", &O::granularity, {"elementwise", "headwise"}, "one gate per channel, or per head")
          .option("act", &O::act, {"sigmoid", "silu", "identity", "ns_sigmoid"}, "the gate's activation")
          .option("mode", &O::mode, {"multiply", "add"}, "multiply by the gate, or add it")
          .option("shared", &O::shared, "every head uses the mean of the heads' gates")
          .option("gate_from", &O::gate_from, {"input", "parameter"}, "gate logits from x, or learned constants"),
      {{"gated", "layer", {{"use_rope", ""}, {"rope", ""}}, of_file},
       {"softmax", "layer", {{"use_rope", ""}, {"rope", ""}}, of_file}});
  return layer;
}

// The options of projections and positions; O is SoftmaxAttention or derives from it.
#define LINNET_OF(O, member) (static_cast<decltype(SoftmaxAttention::member) O::*>(&O::member))

const Layer& converted_attention_layer() {
  using O = Converted;
  static const Layer layer = make_layer<O, record_converted_layer>(
      "ConvertedAttention",
      "docs/convert.md; LoLCATs 2410.10254, Liger 2503.01496, distill 2507.03340, Taylor-Calibrate 2606.16429",
      Declaration<O>("converted_attention", "softmax",
                     "softmax attention of a pretrained model with another mechanism between its projections")
          .equation("y = Wo mechanism(q, k, v); q, k = rotary(norm(W x)) as in softmax_attention")
          .option("hidden", LINNET_OF(O, hidden), 1, kAnyCount, "channels of x")
          .option("heads", LINNET_OF(O, heads), 1, kAnyCount, "heads of queries")
          .option("kv_heads", LINNET_OF(O, kv_heads), 0, kAnyCount, "heads of keys and values, a divisor of heads; 0: as many")
          .option("key", LINNET_OF(O, key), 0, kAnyCount, "channels of a head's queries and keys; 0: hidden / heads")
          .option("value", LINNET_OF(O, value), 0, kAnyCount, "channels of a head's values; 0: as key")
          .option("causal", LINNET_OF(O, causal), "a token sees no later one")
          .option("bias", LINNET_OF(O, bias), "q, k and v have a bias")
          .option("out_bias", LINNET_OF(O, out_bias), "the output projection has a bias")
          .option("rope", LINNET_OF(O, rope), {"none", "half", "interleaved"}, "rotary positions: how channels are paired")
          .option("rope_base", LINNET_OF(O, rope_base), 1e-300, kAnyReal, "base of the frequencies")
          .option("rope_dims", LINNET_OF(O, rope_dims), 0, kAnyCount, "channels that turn; 0: all")
          .option("rope_back", LINNET_OF(O, rope_back), "turn the other way round")
          .option("rope_scaling", LINNET_OF(O, rope_scaling), {"none", "linear", "llama3", "yarn"}, "of the frequencies")
          .option("rope_factor", LINNET_OF(O, rope_factor), 1e-300, kAnyReal, "of the scaling")
          .option("rope_low", LINNET_OF(O, rope_low), 0, kAnyReal, "llama3: low_freq_factor; yarn: beta_slow")
          .option("rope_high", LINNET_OF(O, rope_high), 0, kAnyReal, "llama3: high_freq_factor; yarn: beta_fast")
          .option("rope_length", LINNET_OF(O, rope_length), 1, kAnyCount, "llama3, yarn: original length")
          .option("rope_attention", LINNET_OF(O, rope_attention), 0, kAnyReal,
                  "yarn: multiplies what turns of q and k; default 0.1 ln(rope_factor) + 1")
          .option("qk_norm", LINNET_OF(O, qk_norm), {"none", "rms", "rms_plus_one", "layer", "rms_all", "rms_plain"},
                  "norm of q and k: of each head, or of all heads together; plain: without a weight")
          .option("norm_eps", LINNET_OF(O, norm_eps), 0, 1, "of that norm")
          .option("norm_last", LINNET_OF(O, norm_last), "the norm stands behind the rotation")
          .option("scale", LINNET_OF(O, scale), -kAnyReal, kAnyReal, "multiplies q.k; default key^-0.5")
          .option("mechanism", &O::mechanism,
                  {"window", "distill", "hybrid", "gdn", "gla", "monarch", "hierarchical", "hedgehog", "t2r", "hybrid-exact"},
                  "what stands in softmax's place")
          .option("window", &O::near, 0, kAnyCount,
                  "keys that are attended exactly; hybrids, gdn and gla: beside the rest; 0: none")
          .option("windows", &O::windows, 0, kAnyCount, "mechanism window: one for each head of keys; 0: all keys")
          .option("blocks", &O::blocks, 0, kAnyCount,
                  "beside windows, encoders: heads above 0 are Monarch with blocks of so many tokens")
          .option("updates", &O::updates, 0, kAnyCount, "beside blocks: updates of the factors of these heads")
          .option("sinks", &O::first, 0, kAnyCount, "first keys that are always attended exactly")
          .option("features", &O::features, 0, kAnyCount,
                  "distill, hybrid-exact, t2r: features of a head; hybrid, hedgehog: half of them; 0: from key")
          .option("form", &O::form, {"sliding", "terraced"}, "hybrid: the last keys, or the current and the previous block")
          .option("block", &O::block, 0, kAnyCount, "monarch: tokens of a block; 0: the root of the length")
          .option("steps", &O::steps, 1, 1000, "monarch: updates of the factors")
          .option("tie", &O::tie, {"block", "prefix", "row"}, "hierarchical: what is shared")
          .option("arity", &O::arity, 2, kAnyCount, "hierarchical: children of a node"));
  return layer;
}

#undef LINNET_OF

}  // namespace linnet::layers
