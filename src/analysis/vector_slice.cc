#include "analysis/vector_slice.h"

#include <charconv>
#include <cmath>

#include "core/files/safetensors.h"

namespace linnet::analysis {
namespace {

// Which tensors of an operator's file a mixer reads, and under which names.
struct Translation {
  const char *mechanism, *operation, *mixer;
  std::vector<std::pair<const char*, const char*>> tensors;  // of the file, of the mixer
  bool scaled;                                               // by K^-0.5 unless the file says otherwise
};
const std::vector<Translation>& translations() {
  static const std::vector<Translation> list = {
      {"softmax", "attention", "softmax", {{"q", "q"}, {"k", "k"}, {"v", "v"}}, true},
      {"linear", "attention", "linear", {{"q", "q"}, {"k", "k"}, {"v", "v"}}, false},
      {"decay", "attention", "retention", {{"q", "q"}, {"k", "k"}, {"v", "v"}, {"g", "log_alpha"}}, true},
      {"gla", "attention", "gla", {{"q", "q"}, {"k", "k"}, {"v", "v"}, {"g", "log_alpha"}}, true},
      {"delta", "attention", "delta", {{"q", "q"}, {"k", "k"}, {"v", "v"}, {"beta", "beta"}}, true},
      {"gated_delta",
       "attention",
       "gated_delta",
       {{"q", "q"}, {"k", "k"}, {"v", "v"}, {"g", "log_alpha"}, {"beta", "beta"}},
       true},
      {"metala", "core", "metala", {{"q", "q"}, {"g", "log_alpha"}, {"v", "v"}}, true},
      {"zeros",
       "attention",
       "zeros",
       {{"q", "q"}, {"k", "k"}, {"v", "v"}, {"s", "s"}, {"s1", "s1"}, {"sh", "sh"}, {"s0", "s0"}},
       false},
      {"zeros",
       "softmax",
       "zeros_softmax",
       {{"q", "q"}, {"k", "k"}, {"v", "v"}, {"s1", "s1"}, {"sh", "sh"}, {"s0", "s0"}},
       true},
  };
  return list;
}

std::string number_text(double x) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, x);
  return {text, end};
}

Status read_tensor(const SafetensorsFile& file, const std::string& name, Array* array) {
  SafetensorsEntry entry;
  LINNET_TRY(file.find(name, entry));
  array->shape = entry.shape;
  return file.read_f64(name, array->values, ReadValues::any);
}

// [B, T, H] or [B, T, H, D] to [T] or [T, D]. A file with fewer key heads repeats them.
Status slice(const std::string& path, const std::string& name, int64_t batch, int64_t head, int64_t heads, Array* array) {
  const std::vector<int64_t> shape = array->shape;
  const auto refuse = [&](const std::string& why) { return bad_input(path + ": " + name + " " + why); };
  if (shape.size() != 3 && shape.size() != 4)
    return refuse("has rank " + std::to_string(shape.size()) + ", expected [B, T, H] or [B, T, H, D]");
  const int64_t B = shape[0], T = shape[1], H = shape[2], D = shape.size() == 4 ? shape[3] : 1;
  if (batch >= B) return refuse("has " + std::to_string(B) + " batch rows, but --batch is " + std::to_string(batch));
  if (head >= heads) return refuse("belongs to " + std::to_string(heads) + " heads, but --head is " + std::to_string(head));
  const int64_t own = H == heads ? head : H == 0 ? 0 : head / std::max<int64_t>(1, heads / H);
  std::vector<double> values;
  for (int64_t t = 0; t < T; ++t) {
    const auto from = array->values.begin() + ((batch * T + t) * H + own) * D;
    values.insert(values.end(), from, from + D);
  }
  array->values = std::move(values);
  array->shape = shape.size() == 4 ? std::vector<int64_t>{T, D} : std::vector<int64_t>{T};
  return {};
}

}  // namespace

Status read_slice(const std::string& path, int64_t batch, int64_t head, MixerInputs* inputs, std::string* mixer) {
  SafetensorsFile file;
  LINNET_TRY(SafetensorsFile::open(path, file));
  *inputs = MixerInputs();
  const std::string mechanism = file.metadata("mechanism"), operation = file.metadata("operator");
  for (const Translation& translation : translations()) {
    if (mechanism != translation.mechanism || operation != translation.operation) continue;
    *mixer = translation.mixer;
    int64_t heads = 0;
    for (const auto& [from, to] : translation.tensors) {
      if (!file.has(from)) continue;
      Array& array = inputs->tensors[to];
      LINNET_TRY(read_tensor(file, from, &array));
      if (array.shape.size() > 2) heads = std::max(heads, array.shape[2]);
    }
    for (auto& [name, array] : inputs->tensors) LINNET_TRY(slice(path, name, batch, head, heads, &array));
    if (inputs->tensors.count("q") == 0) return bad_input(path + ": it has no tensor q");
    if (*mixer == "gated_delta" && inputs->tensors["log_alpha"].shape.size() == 2) *mixer = "kda";
    if (*mixer == "retention" && inputs->tensors.count("log_alpha") == 0) {
      return bad_input(path + ": it has no tensor g, the logarithm of the decay");
    }
    if (*mixer == "linear" && file.metadata("normalize") != "1") *mixer = "linear_sum";
    const std::string map = file.metadata("map");
    if (!map.empty()) inputs->words["feature"] = map;
    if (mechanism == "linear" && map.empty()) inputs->words["feature"] = "identity";
    if (const std::string scale = file.metadata("scale"); !scale.empty()) {
      inputs->words["scale"] = scale;
    } else if (translation.scaled && mechanism != "softmax") {
      inputs->words["scale"] = number_text(1 / std::sqrt(static_cast<double>(inputs->tensors["q"].shape.back())));
    }
    if (mechanism == "zeros" && file.has("key_mask")) return bad_input(path + ": its keys are masked, which no system has");
    if ((mechanism == "softmax" || mechanism == "zeros") && file.metadata("causal") != "1") {
      return bad_input(path + ": its attention is not causal: no system runs from token to token");
    }
    return {};
  }
  if (mechanism != "dsf") {
    return bad_input(path + ": its mechanism is '" + mechanism + "', operator '" + operation +
                     "'; analyze dsf reads dsf files and calls of softmax, linear, decay, gla, delta, gated_delta, zeros, h3 "
                     "and metala's core");
  }
  for (const std::string& name : file.names()) {
    for (const Mixer& each : all_mixers()) {
      if ((" " + each.tensors + " alpha u ").find(" " + name + " ") == std::string::npos) continue;
      LINNET_TRY(read_tensor(file, name, &inputs->tensors[name]));
      break;
    }
  }
  for (const auto& [key, value] : file.metadata()) inputs->words[key] = value;
  *mixer = file.metadata("mixer");
  return {};
}

}  // namespace linnet::analysis
