#include "analysis/taps.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "core/files/safetensors.h"
#include "layers/layer.h"
#include "layers/runner.h"

namespace linnet::analysis {
namespace {

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

std::string exact(double x) {
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", x);
  return text;
}

// The tensors of one head.
class Slices {
 public:
  Slices(const OpTaps& taps, int64_t head) : taps_(taps), head_(head), heads_(heads_of(taps)) {}

  bool has(const std::string& name) const { return taps_.inputs.count(name) > 0; }
  std::string option(const std::string& name, const std::string& otherwise = "") const {
    const auto found = taps_.options.find(name);
    return found == taps_.options.end() ? otherwise : found->second;
  }
  double number(const std::string& name, double otherwise) const {
    const std::string text = option(name, "none");
    return text == "none" || text.empty() ? otherwise : std::atof(text.c_str());
  }
  bool on(const std::string& name) const { return option(name, "0") == "1"; }

  // [1, T, H, D] or [1, T, H] to [T, D] or [T]; fewer heads than the call has are shared between them.
  Array of(const std::string& name) const { return cut(taps_.inputs.at(name)); }
  Array cut(const OpTaps::Tensor& t) const {
    const int64_t T = t.shape[1], H = t.shape[2], D = t.shape.size() > 3 ? t.shape[3] : 1;
    const int64_t own = head_ / std::max<int64_t>(1, heads_ / std::max<int64_t>(H, 1));
    Array a;
    a.shape = t.shape.size() > 3 ? std::vector<int64_t>{T, D} : std::vector<int64_t>{T};
    for (int64_t i = 0; i < T; ++i) {
      const auto from = t.values.begin() + (i * H + own) * D;
      a.values.insert(a.values.end(), from, from + D);
    }
    return a;
  }
  // Channels begin .. end - 1 of [1, T, E].
  Array channels(const std::string& name, int64_t begin, int64_t end) const {
    const OpTaps::Tensor& t = taps_.inputs.at(name);
    Array a;
    a.shape = {t.shape[1], end - begin};
    for (int64_t i = 0; i < t.shape[1]; ++i) {
      const auto row = t.values.begin() + i * t.shape[2];
      a.values.insert(a.values.end(), row + begin, row + end);
    }
    return a;
  }
  const std::vector<int64_t>& shape(const std::string& name) const { return taps_.inputs.at(name).shape; }
  const std::vector<double>& whole(const std::string& name) const { return taps_.inputs.at(name).values; }

 private:
  const OpTaps& taps_;
  int64_t head_, heads_;
};

void unit_rows(Array* a) {
  const int64_t T = a->shape[0], D = a->shape[1];
  for (int64_t t = 0; t < T; ++t) {
    double sum = 1e-6;
    for (int64_t c = 0; c < D; ++c) sum += std::pow(a->values[static_cast<size_t>(t * D + c)], 2);
    for (int64_t c = 0; c < D; ++c) a->values[static_cast<size_t>(t * D + c)] /= std::sqrt(sum);
  }
}

Status attention(const Slices& s, MixerInputs* x, std::string* mixer) {
  if (s.option("causal", "1") != "1") return bad_input("its attention is not causal: no system runs from token to token");
  const std::string window = s.option("window", "-1,-1");
  if (window.rfind("-1", 0) != 0) return bad_input("its attention has a window, which no system of the framework has");
  if (s.has("sinks")) return bad_input("its softmax has a logit without a value (sinks), which no system of the framework has");
  if (s.number("softcap", 0) > 0) return bad_input("its scores have a soft cap, which no system of the framework has");
  *mixer = "softmax";
  x->words["scale"] = exact(s.number("scale", 1 / std::sqrt(static_cast<double>(x->tensors["q"].shape[1]))));
  return {};
}

// A gate on the read (G1) is no part of the system: what it multiplies by, or what it adds taken off again.
void ungate(const OpTaps& taps, int64_t head, KernelRead* read) {
  const Slices s(taps, head);
  if (s.option("position", "G1") != "G1") return;
  const std::string act = s.option("act", "sigmoid");
  const auto opened = [&](double g) {
    const double half = 1 / (1 + std::exp(-g));
    return act == "sigmoid" ? half : act == "ns_sigmoid" ? 0.5 + 0.5 * half : act == "silu" ? g * half : g;
  };
  const OpTaps::Tensor& g = taps.inputs.at("g");
  const int64_t T = g.shape[1], H = g.shape[2], D = g.shape.size() > 3 ? g.shape[3] : 1;
  const int64_t V = static_cast<int64_t>(read->out.size()) / std::max<int64_t>(T, 1);
  std::vector<double> gate(read->out.size(), 0);
  for (int64_t i = 0; i < T * V; ++i) {
    const int64_t channel = D == 1 ? 0 : i % V;  // one logit of a head is that of all its channels
    const bool shared = s.on("shared");
    for (int64_t h = shared ? 0 : head; h < (shared ? H : head + 1); ++h) {
      const double x = opened(g.values[static_cast<size_t>((i / V * H + h) * D + channel)]);
      gate[static_cast<size_t>(i)] += x / static_cast<double>(shared ? H : 1);
    }
  }
  if (s.option("mode", "multiply") == "multiply") {
    read->behind = [gate](const System&, const std::vector<double>& y) {
      std::vector<double> out(y.size());
      for (size_t i = 0; i < y.size(); ++i) out[i] = gate[i] * y[i];
      return out;
    };
    return;
  }
  for (size_t i = 0; i < gate.size(); ++i) read->out[i] -= gate[i];
}

Status kernel(const Slices& s, const std::string& op, MixerInputs* x, std::string* mixer) {
  if (s.option("causal", "1") != "1") return bad_input("its attention is not causal: no system runs from token to token");
  const std::string map = s.option("map", op == "linear" ? "identity" : "elu1");
  const bool sum = op == "linear" ? s.on("normalize") : s.option("normalizer", "standard") != "none";
  *mixer = sum ? "linear" : "linear_sum";
  x->words["feature"] = map;
  if (op == "linear" && map == "identity" && !sum) x->words["scale"] = exact(s.number("scale", 1));
  return {};
}

Status scan(const Slices& s, int64_t head, MixerInputs* x) {
  const auto bias = [&](int64_t channel) { return s.has("dt_bias") ? s.whole("dt_bias")[static_cast<size_t>(channel)] : 0.0; };
  const int64_t T = s.shape("x")[1], E = s.shape("x")[2];
  const int64_t begin = head * kScanChannels, end = std::min(E, begin + kScanChannels);
  x->tensors["u"] = s.channels("x", begin, end);
  x->tensors["delta"] = s.channels("dt", begin, end);
  const int64_t width = end - begin;
  for (size_t i = 0; i < x->tensors["delta"].values.size(); ++i) {
    double& dt = x->tensors["delta"].values[i];
    dt = softplus(dt + bias(begin + static_cast<int64_t>(i) % width));
  }
  const std::vector<int64_t>& maps = s.shape("B");  // [1, T, K], or [1, T, groups, K]
  const int64_t K = maps.back(), G = maps.size() == 4 ? maps[2] : 1, group = begin / std::max<int64_t>(1, E / G);
  if (end > (group + 1) * (E / G))
    return bad_input("its groups of maps do not hold " + std::to_string(kScanChannels) + " channels");
  for (const auto& [from, to] : {std::pair{"B", "b"}, std::pair{"C", "c"}}) {
    Array& map = x->tensors[to];
    map.shape = {T, K};
    for (int64_t t = 0; t < T; ++t) {
      const auto row = s.whole(from).begin() + (t * G + group) * K;
      map.values.insert(map.values.end(), row, row + K);
    }
  }
  x->tensors["A"] = {{width, K}, {s.whole("A").begin() + begin * K, s.whole("A").begin() + end * K}};
  if (s.has("D")) x->tensors["d"] = {{width}, {s.whole("D").begin() + begin, s.whole("D").begin() + end}};
  if (s.has("z")) {  // the output gate acts on the read
    Array& gate = x->tensors["gate"] = s.channels("z", begin, end);
    for (double& z : gate.values) z /= 1 + std::exp(-z);
  }
  return {};
}

Status ssd(const Slices& s, int64_t head, MixerInputs* x) {
  if (s.has("z")) return bad_input("its call has a gate z, which the system of SSD does not have");
  x->tensors["u"] = s.of("x");
  x->tensors["b"] = s.of("B");
  x->tensors["c"] = s.of("C");
  Array delta = s.of("dt");
  for (double& dt : delta.values) {
    dt = softplus(dt + (s.has("dt_bias") ? s.whole("dt_bias")[static_cast<size_t>(head)] : 0.0));
    dt = std::max(dt, s.number("dt_min", 0));
    dt = std::min(dt, s.number("dt_max", HUGE_VAL));
  }
  x->tensors["delta"] = std::move(delta);
  x->tensors["A"] = {{1}, {s.whole("A")[static_cast<size_t>(head)]}};
  if (!s.has("D")) return {};
  const std::vector<double>& D = s.whole("D");
  const auto heads = static_cast<int64_t>(s.whole("A").size()), each = static_cast<int64_t>(D.size()) / heads;
  for (int64_t c = 1; c < each; ++c) {
    if (D[static_cast<size_t>(head * each + c)] != D[static_cast<size_t>(head * each)])
      return bad_input("its skip differs between the channels of a head, which the system of SSD does not have");
  }
  x->tensors["d"] = {{1}, {D[static_cast<size_t>(head * each)]}};
  return {};
}

// The key filter runs before the system: k becomes kbar. Channel c of q, k, v is head c / P, slot c % P.
Status h3(const Slices& s, int64_t head, MixerInputs* x) {
  const int64_t T = s.shape("q")[1], C = s.shape("q")[2], H = s.shape("log_dt")[0], P = C / H, M = s.shape("imag")[1];
  const int64_t taps = s.shape("sb")[1], begin = head * P;
  const auto at = [&](const char* name, int64_t i) { return s.whole(name)[static_cast<size_t>(i)]; };
  x->tensors["q"] = s.channels("q", begin, begin + P);
  x->tensors["v"] = s.channels("v", begin, begin + P);
  const Array k = s.channels("k", begin, begin + P);
  Array& filtered = x->tensors["k"];
  filtered = k;
  for (int64_t p = 0; p < P; ++p) {
    const int64_t c = begin + p;
    for (int64_t t = 0; t < T; ++t) {
      double sum = at("sd", c) * k.values[static_cast<size_t>(t * P + p)];
      for (int64_t lag = 0; lag < std::min(taps, t + 1); ++lag) {
        double tap = 0;
        for (int64_t n = 0; n + lag < taps; ++n) tap += at("sb", c * taps + n) * at("sc", c * taps + n + lag);
        sum += tap * k.values[static_cast<size_t>((t - lag) * P + p)];
      }
      filtered.values[static_cast<size_t>(t * P + p)] = sum;
    }
  }
  const double dt = std::exp(at("log_dt", head));
  const bool zoh = s.option("disc", "bilinear") == "zoh";
  for (const char* name : {"a_real", "a_imag", "b_real", "b_imag", "c_real", "c_imag"}) x->tensors[name].shape = {M};
  for (int64_t m = 0; m < M; ++m) {
    const int64_t i = head * M + m;
    const Complex A(-std::exp(at("log_neg_re", i)), at("imag", i)), z = A * dt;
    const Complex a = zoh ? std::exp(z) : (1.0 + z / 2.0) / (1.0 - z / 2.0);
    const Complex b = Complex(at("b", 2 * i), at("b", 2 * i + 1)) * (zoh ? (a - 1.0) / A : dt / (1.0 - z / 2.0));
    x->tensors["a_real"].values.push_back(a.real()), x->tensors["a_imag"].values.push_back(a.imag());
    x->tensors["b_real"].values.push_back(b.real()), x->tensors["b_imag"].values.push_back(b.imag());
    x->tensors["c_real"].values.push_back(at("c", 2 * i)), x->tensors["c_imag"].values.push_back(at("c", 2 * i + 1));
  }
  x->words["d"] = exact(at("d", head));
  return {};
}

// What the layer adds behind the operator for aug=sigmoid depends on the own token alone: it is no part of the system.
Status metala(const Slices& s, int64_t head, MixerInputs* x) {
  x->tensors["q"] = s.of("q");
  x->tensors["v"] = s.of("v");
  Array& g = x->tensors["log_alpha"] = s.of("a");
  const int64_t K = g.shape[1];
  for (double& each : g.values) each = std::max(-softplus(-each) / s.number("tau", 16), s.number("floor", -88));
  x->words["scale"] = exact(s.number("scale", 1 / std::sqrt(static_cast<double>(K))));
  x->words["aug"] = s.option("aug", "sigmoid");
  if (s.has("w_aug")) {
    const auto own = s.whole("w_aug").begin() + head * K;
    x->tensors["w_aug"] = {{K}, {own, own + K}};
  }
  return {};
}

Status zeros(const Slices& s, const std::string& op, MixerInputs* x) {
  if (s.option("causal", "1") != "1") return bad_input("its attention is not causal: no system runs from token to token");
  if (s.has("key_mask")) return bad_input("its keys are masked, which its system has no word for");
  for (const char* name : {"q", "k", "v", "s", "s1", "sh", "s0"}) {
    if (s.has(name)) x->tensors[name] = s.of(name);
  }
  if (op == "zeros_softmax")
    x->words["scale"] = exact(s.number("scale", 1 / std::sqrt(static_cast<double>(x->tensors["q"].shape[1]))));
  return {};
}

// The prior is the system, of values within the cap: a free energy mixer reads the system of v and the system of exp(beta v).
Status fem(const Slices& s, int64_t head, MixerInputs* x, std::string* mixer) {
  if (s.option("causal", "1") != "1") return bad_input("its prior is not causal: no system runs from token to token");
  if (s.has("key_mask")) return bad_input("its keys are masked, which its system has no word for");
  const std::string prior = s.option("prior", "softmax");
  *mixer = prior == "softmax" ? prior : "fem_" + prior;
  Array& v = x->tensors["v"] = s.of("v");
  const int64_t V = v.shape[1];
  const double cap = s.number("cap", HUGE_VAL);
  for (size_t i = 0; i < v.values.size(); ++i) {
    const double most = cap / s.whole("beta")[static_cast<size_t>(head * V) + i % static_cast<size_t>(V)];
    v.values[i] = std::clamp(v.values[i], -most, most);
  }
  if (prior != "ssm") {
    x->tensors["q"] = s.of("q");
    x->tensors["k"] = s.of("k");
    if (prior == "gated") x->tensors["a"] = s.of("a");
    return {};
  }
  x->tensors["delta"] = s.of("delta");
  x->tensors["b"] = s.channels("Bm", 0, s.shape("Bm").back());
  x->tensors["c"] = s.channels("Cm", 0, s.shape("Cm").back());
  const int64_t R = s.shape("A").back();
  const auto A = s.whole("A").begin() + head * V * R, D = s.whole("D").begin() + head * V;
  x->tensors["A"] = {{V, R}, {A, A + V * R}};
  x->tensors["d"] = {{V}, {D, D + V}};
  return {};
}

// y = g ((1 - lam) mu + lam F), F = log(mean of exp(beta v)) / beta.
void free_energy(const Slices& s, int64_t head, const MixerInputs& x, KernelRead* read) {
  const Array lam = s.of("lam"), v = x.tensors.at("v");
  const std::vector<double> gate = s.has("g") ? s.of("g").values : std::vector<double>(v.values.size(), 1);
  const auto V = static_cast<size_t>(v.shape[1]);
  const auto own = s.whole("beta").begin() + head * v.shape[1];
  const std::vector<double> beta(own, own + v.shape[1]);
  read->behind = [=](const System& system, const std::vector<double>& mean) {
    std::vector<double> lifted, top(V, -HUGE_VAL), out;
    for (size_t i = 0; i < v.values.size(); ++i) top[i % V] = std::max(top[i % V], beta[i % V] * v.values[i]);
    for (size_t i = 0; i < v.values.size(); ++i) lifted.push_back(std::exp(beta[i % V] * v.values[i] - top[i % V]));
    const std::vector<double> z = run(system, lifted);
    for (size_t i = 0; i < mean.size(); ++i) {
      const double energy = (top[i % V] + std::log(z[i])) / beta[i % V];
      out.push_back(gate[i] * ((1 - lam.values[i]) * mean[i] + lam.values[i] * energy));
    }
    return out;
  };
}

Status translate(const OpTaps& taps, int64_t head, MixerInputs* x, std::string* mixer) {
  const Slices s(taps, head);
  const std::string& op = taps.op;
  if (op == "h3") return *mixer = "h3", h3(s, head, x);
  if (op == "fem_read") return fem(s, head, x, mixer);
  if (op == "metala_mixer") return *mixer = "metala", metala(s, head, x);
  if (op == "zeros" || op == "zeros_softmax") return *mixer = op, zeros(s, op, x);
  if (op == "mamba_selective_scan") return *mixer = "s6", scan(s, head, x);
  if (op == "mamba_ssd") return *mixer = "ssd", ssd(s, head, x);
  for (const char* name : {"q", "k", "v"}) x->tensors[name] = s.of(name);
  if (op == "softmax" || op == "gated") return attention(s, x, mixer);
  if (op == "linear" || op == "features") return kernel(s, op, x, mixer);
  const int64_t K = x->tensors["q"].shape[1];
  x->words["scale"] = exact(s.number("scale", 1 / std::sqrt(static_cast<double>(K))));
  if (op == "taylor_exact") {
    if (s.option("causal", "0") != "1") return bad_input("its attention is not causal: no system runs from token to token");
    x->words["order"] = "2";
    *mixer = "taylor";
    return {};
  }
  if (s.on("l2_norm")) {
    unit_rows(&x->tensors["q"]);
    unit_rows(&x->tensors["k"]);
  }
  if (op == "decay") {
    *mixer = "retention";
    if (s.has("g_head")) {
      x->tensors["log_alpha"] = {
          {x->tensors["q"].shape[0]},
          std::vector<double>(static_cast<size_t>(x->tensors["q"].shape[0]), s.whole("g_head")[static_cast<size_t>(head)])};
    } else if (s.has("g")) {
      x->tensors["log_alpha"] = s.of("g");
    } else {
      x->words["gamma"] = "1";
    }
    return {};
  }
  *mixer = op;
  if (op != "delta") x->tensors["log_alpha"] = s.of("g");
  if (op != "gla") {
    x->tensors["beta"] = s.of("beta");
    if (s.on("double_beta")) {
      for (double& beta : x->tensors["beta"].values) beta *= 2;
    }
  }
  if (op == "gated_delta" && x->tensors["log_alpha"].shape.size() == 2) *mixer = "kda";
  return {};
}

}  // namespace

const std::vector<std::string>& tapped_ops() {
  static const std::vector<std::string> ops = {"softmax",      "gated", "linear",       "features",  "decay",
                                               "gla",          "delta", "gated_delta",  "mamba_ssd", "mamba_selective_scan",
                                               "taylor_exact", "h3",    "metala_mixer", "zeros",     "zeros_softmax",
                                               "fem_read"};
  return ops;
}

int64_t heads_of(const OpTaps& taps) {
  const std::vector<int64_t>& shape = taps.out.shape;
  if (taps.op == "mamba_selective_scan") return shape.empty() ? 0 : (shape.back() + kScanChannels - 1) / kScanChannels;
  if (taps.op == "h3") return taps.inputs.at("log_dt").shape[0];
  return shape.size() == 4 ? shape[2] : 0;
}

Status mixer_of_taps(const OpTaps& taps, int64_t head, MixerInputs* inputs, std::string* mixer, KernelRead* read) {
  *inputs = {};
  const int64_t heads = heads_of(taps);
  if (head < 0 || head >= heads)
    return bad_input("it has heads 0 to " + std::to_string(heads - 1) + ", but --head is " + std::to_string(head));
  LINNET_TRY(translate(taps, head, inputs, mixer));
  if (read == nullptr) return {};
  const Slices s(taps, head);
  std::vector<double>* out = &read->out;
  read->behind = nullptr;
  if (taps.op == "mamba_selective_scan") {
    const int64_t E = taps.out.shape[2], begin = head * kScanChannels, end = std::min(E, begin + kScanChannels);
    out->clear();
    for (int64_t t = 0; t < taps.out.shape[1]; ++t) {
      const auto row = taps.out.values.begin() + t * E;
      out->insert(out->end(), row + begin, row + end);
    }
    return {};
  }
  if (taps.op == "h3") {  // slot-major: channel r H + head
    out->clear();
    for (size_t i = static_cast<size_t>(head); i < static_cast<size_t>(taps.out.shape[1] * taps.out.shape[2]);
         i += static_cast<size_t>(heads)) {
      out->push_back(taps.out.values[i]);
    }
    return {};
  }
  *out = s.cut(taps.out).values;
  if (taps.op == "gated") ungate(taps, head, read);
  if (taps.op == "fem_read") free_energy(s, head, *inputs, read);
  return {};
}

Status taps_of_h3_file(const std::string& path, int64_t batch, OpTaps* taps) {
  SafetensorsFile file;
  LINNET_TRY(SafetensorsFile::open(path, file));
  *taps = {};
  taps->op = "h3";
  taps->options["disc"] = file.metadata("disc").empty() ? "bilinear" : file.metadata("disc");
  for (const char* name : {"q", "k", "v", "out", "sb", "sc", "sd", "log_dt", "log_neg_re", "imag", "b", "c", "d"}) {
    SafetensorsEntry entry;
    LINNET_TRY(file.find(name, entry));
    OpTaps::Tensor& t = std::string(name) == "out" ? taps->out : taps->inputs[name];
    LINNET_TRY(file.read_f64(name, t.values));
    t.shape = entry.shape;
    if (t.shape.size() != 3 || std::string("q k v out").find(name) == std::string::npos) continue;
    if (batch >= t.shape[0]) {
      return bad_input(path + ": " + name + " has " + std::to_string(t.shape[0]) + " batch rows, but --batch is " +
                       std::to_string(batch));
    }
    const int64_t row = t.shape[1] * t.shape[2];
    t.values = {t.values.begin() + batch * row, t.values.begin() + (batch + 1) * row};
    t.shape[0] = 1;
  }
  const std::vector<int64_t>&q = taps->inputs["q"].shape, &dt = taps->inputs["log_dt"].shape,
        &modes = taps->inputs["imag"].shape, &shift = taps->inputs["sb"].shape;
  if (q.size() != 3 || dt.size() != 1 || modes.size() != 2 || shift.size() != 2 || dt[0] < 1 || q[2] % dt[0] != 0)
    return bad_input(path + ": its shapes are not those of a call of h3");
  return {};
}

Status taps_of_layer_file(const std::string& path, OpTaps* taps) {
  SafetensorsFile file;
  LINNET_TRY(SafetensorsFile::open(path, file));
  const layers::FileFacts facts = layers::facts_of(file);
  const layers::LayerFile* form = nullptr;
  const layers::Layer* layer = layers::layer_of_file(file.metadata("mechanism"), file.metadata("operator"), facts, &form);
  if (layer == nullptr) return bad_input(path + ": no layer has such files");
  std::vector<layers::Setting> options;
  layers::Record record;
  LINNET_TRY(layers::options_of_file(*layer, *form, facts, &options));
  LINNET_TRY(layers::record_layer(*layer, options, &record));
  layers::Runner runner;
  LINNET_TRY(layers::Runner::make(std::move(record), {.activations = Dtype::f64}, &runner));
  for (const layers::Parameter& p : runner.record().parameters) {
    const std::string name = p.alias.name.empty() ? p.name : p.alias.name;
    if (!p.trained && !file.has(name)) continue;
    std::vector<double> values, turned;
    LINNET_TRY(file.read_f64(name, values));
    if (p.alias.transposed && p.shape.size() == 2) {
      turned.resize(values.size());
      for (int64_t r = 0; r < p.shape[0]; ++r) {
        for (int64_t c = 0; c < p.shape[1]; ++c)
          turned[static_cast<size_t>(r * p.shape[1] + c)] = values.at(static_cast<size_t>(c * p.shape[0] + r));
      }
      values.swap(turned);
    }
    LINNET_TRY(runner.bind_values(p.name, values));
  }
  LINNET_TRY(runner.bind_buffers());
  SafetensorsEntry entry;
  LINNET_TRY(file.find(form->input, entry));
  if (entry.shape.size() != 3)
    return bad_input(path + ": " + form->input + " has rank " + std::to_string(entry.shape.size()) + ", expected 3");
  std::vector<double> x;
  LINNET_TRY(file.read_f64(form->input, x));
  const layers::Shape& shape = runner.record().values[static_cast<size_t>(runner.record().output)].shape;
  std::vector<double> y(x.size() / static_cast<size_t>(entry.shape[2]) * static_cast<size_t>(shape.back()));
  LINNET_TRY(runner.keep_values(true));
  LINNET_TRY(runner.run(View::dense(x.data(), Dtype::f64, {entry.shape[0], entry.shape[1], entry.shape[2]}),
                        View::dense(y.data(), Dtype::f64, {entry.shape[0], entry.shape[1], shape.back()})));
  const Status status = tap_runner(runner, tapped_ops(), taps);
  return status.ok() ? status : bad_input(path + ": " + layer->name() + ": " + status.message());
}

}  // namespace linnet::analysis
