// Softmax attention as transformers have it: grouped heads, rotary positions, norms of q and k, sinks, windows, a soft cap,
// and the gates G1 to G5 of gated attention (arXiv 2505.06708). Parameter names of Llama, Qwen2 and Qwen3.
#include "layers/layer.h"

namespace linnet::layers {
namespace {

enum class Rotary : int32_t { none, half, interleaved };
enum class Scaling : int32_t { none, linear, llama3 };
enum class QkNorm : int32_t { none, rms, rms_plus_one, layer };
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
constexpr const char* kScalings[] = {"none", "linear", "llama3"};

struct SoftmaxAttention {
  int64_t hidden = 2048, heads = 16, kv_heads = 0, key = 0, value = 0;
  bool causal = true, bias = false, out_bias = false, sinks = false, shared = false;
  Rotary rope = Rotary::half;
  double rope_base = 10000, rope_factor = 1, rope_low = 1, rope_high = 4;
  int64_t rope_dims = 0, rope_length = 8192;
  Scaling rope_scaling = Scaling::none;
  QkNorm qk_norm = QkNorm::none;
  double norm_eps = 1e-6, softcap = 0;
  Maybe scale;
  Window window;
  int64_t prefix = 0;
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

Value record(Recorder& l, const SoftmaxAttention& o, Value x) {  // x [B, T, hidden]
  const int64_t kv = o.kv_heads > 0 ? o.kv_heads : o.heads;
  if (o.key == 0) {
    l.require(o.hidden % o.heads == 0,
              "hidden is " + std::to_string(o.hidden) + ", expected a multiple of heads, " + std::to_string(o.heads));
  }
  l.require(o.heads % kv == 0,
            "heads is " + std::to_string(o.heads) + ", expected a multiple of kv_heads, " + std::to_string(kv));
  const int64_t K = o.key > 0 ? o.key : o.hidden / o.heads, V = o.value > 0 ? o.value : K;
  if (!l.ok()) return {};

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
  const auto project = [&](const std::string& n, int64_t heads, int64_t width) {
    const Value bias = o.bias ? l.weight(n + "_proj.bias", {heads * width}, zeros(), as("b" + n)) : Value();
    return l.split(l.dense(x, l.weight(n + "_proj.weight", {heads * width, o.hidden}, normal(0.02), transposed("w" + n)), bias),
                   heads);
  };
  Value q = project("q", o.heads, K), k = project("k", kv, K), v = project("v", kv, V);
  if (o.position == Gate::g2) v = gated(v, kv, V);
  if (o.position == Gate::g3) k = gated(k, kv, K);
  if (o.position == Gate::g4) q = gated(q, o.heads, K);
  const auto placed = [&](Value y, const std::string& n) {  // norm, then rotation
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
    if (o.rope == Rotary::none) return y;
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
  };
  q = placed(q, "q");
  k = placed(k, "k");
  const Value sinks = o.sinks ? l.weight("sinks", {o.heads}, normal(0.02), as("sinks")) : Value();
  std::vector<Setting> options = {{"causal", o.causal ? "1" : "0"},
                                  {"scale", o.scale.given ? number_text(o.scale.value) : "none"},
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
  const Value out_bias = o.out_bias ? l.weight("o_proj.bias", {o.hidden}, zeros(), as("bo")) : Value();
  y = l.dense(l.join(y), l.weight("o_proj.weight", {o.hidden, o.heads * V}, normal(0.02), transposed("wo")), out_bias);
  if (o.position == Gate::g5) {
    l.require(!headwise, "the gate G5 has no heads, expected granularity elementwise");
    y = l.join(gated(l.split(y, 1), 1, o.hidden));
  }
  return y;
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
          .option("rope_scaling", &O::rope_scaling, {"none", "linear", "llama3"}, "of the frequencies")
          .option("rope_factor", &O::rope_factor, 1e-300, kAnyReal, "of the scaling")
          .option("rope_low", &O::rope_low, 0, kAnyReal, "llama3: low_freq_factor")
          .option("rope_high", &O::rope_high, 0, kAnyReal, "llama3: high_freq_factor")
          .option("rope_length", &O::rope_length, 1, kAnyCount, "llama3: original length")
          .option("qk_norm", &O::qk_norm, {"none", "rms", "rms_plus_one", "layer"}, "norm of each head's q and k")
          .option("norm_eps", &O::norm_eps, 0, 1, "of that norm")
          .option("scale", &O::scale, -kAnyReal, kAnyReal, "multiplies q.k; default key^-0.5")
          .option("window", &O::window, "keys seen to the left and right; -1: all")
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

}  // namespace linnet::layers
