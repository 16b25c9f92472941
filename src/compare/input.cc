#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "compare/compare.h"
#include "core/files/safetensors.h"

extern "C" const char linnet_sample_begin[], linnet_sample_end[];  // data/attention_sample.safetensors, by cmake/embed.cmake

namespace linnet::compare {
namespace {

// One tensor, [B, T, H, D] or [T, H, D]; its sizes are compared with, or taken into, `size`.
Status read_tensor(const SafetensorsFile& file, const std::string& name, int64_t (&size)[4], std::vector<double>* values) {
  SafetensorsEntry entry;
  LINNET_TRY(file.find(name, entry));
  std::vector<int64_t> shape = entry.shape;
  if (shape.size() == 3) shape.insert(shape.begin(), 1);
  const auto wrong = [&](const std::string& reason) {
    return bad_input("compare: " + file.path() + ": tensor \"" + name + "\" " + reason);
  };
  if (shape.size() != 4) return wrong("has " + std::to_string(entry.shape.size()) + " dimensions, expected [B, T, H, D]");
  static constexpr const char* kNames[] = {"batch rows", "tokens", "heads", "channels"};
  for (size_t i = 0; i < 4; ++i) {
    if (shape[i] < 1) return wrong(std::string("has 0 ") + kNames[i] + ", expected at least 1");
    if (size[i] == 0) size[i] = shape[i];
    if (size[i] == shape[i]) continue;
    return wrong("has " + std::to_string(shape[i]) + " " + kNames[i] + ", expected " + std::to_string(size[i]) +
                 " as in the tensors before it");
  }
  return file.read_f64(name, *values);
}

Status read_layer(const SafetensorsFile& file, const std::string& prefix, Input* input) {
  Layer layer;
  layer.name = prefix.empty() ? "input" : prefix.substr(0, prefix.size() - 1);
  int64_t q[4] = {input->B, input->T, input->H, input->K};
  LINNET_TRY(read_tensor(file, prefix + "q", q, &layer.q));
  int64_t k[4] = {q[0], q[1], input->Hkv, q[3]};
  LINNET_TRY(read_tensor(file, prefix + "k", k, &layer.k));
  int64_t v[4] = {q[0], q[1], k[2], input->V};
  LINNET_TRY(read_tensor(file, prefix + "v", v, &layer.v));
  if (q[2] % k[2] != 0) {
    return bad_input("compare: " + file.path() + ": " + std::to_string(k[2]) + " key heads do not divide the " +
                     std::to_string(q[2]) + " query heads of \"" + prefix + "q\"");
  }
  input->B = q[0], input->T = q[1], input->H = q[2], input->K = q[3], input->Hkv = k[2], input->V = v[3];
  input->layers.push_back(std::move(layer));
  return {};
}

Status read_open(const SafetensorsFile& file, Input* input) {
  for (const std::string& name : file.names()) {
    const bool ends = name == "q" || (name.size() > 2 && name.substr(name.size() - 2) == ".q");
    if (ends) LINNET_TRY(read_layer(file, name.substr(0, name.size() - 1), input));
  }
  if (input->layers.empty()) {
    return bad_input("compare: " + file.path() +
                     " has no tensor \"q\" or \"NAME.q\", expected q, k and v of at least one layer");
  }
  input->scale = 1 / std::sqrt(static_cast<double>(input->K));
  if (const std::string text = file.metadata("scale"); !text.empty()) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), input->scale);
    if (error != std::errc() || end != text.data() + text.size() || !(input->scale > 0)) {
      return bad_input("compare: " + file.path() + ": the scale in the metadata is '" + text + "', expected a number above 0");
    }
  }
  const std::string causal = file.metadata("causal");
  if (!causal.empty() && causal != "true" && causal != "false") {
    return bad_input("compare: " + file.path() + ": causal in the metadata is '" + causal + "', expected true or false");
  }
  input->causal = causal == "true";
  for (const char* key : {"model", "text"}) {
    const std::string text = file.metadata(key);
    if (!text.empty()) input->description += (input->description.empty() ? "" : "; ") + std::string(key) + ": " + text;
  }
  return {};
}

// [B, T, row] -> [B, length, row]
void repeat(int64_t batches, int64_t tokens, int64_t length, std::vector<double>* x) {
  const int64_t row = static_cast<int64_t>(x->size()) / (batches * tokens);
  std::vector<double> longer(static_cast<size_t>(batches * length * row));
  for (int64_t b = 0; b < batches; ++b) {
    for (int64_t t = 0; t < length; ++t) {
      const double* from = x->data() + (b * tokens + t % tokens) * row;
      std::copy(from, from + row, longer.data() + (b * length + t) * row);
    }
  }
  *x = std::move(longer);
}

}  // namespace

Status read_input(const std::string& path, Input* input) {
  SafetensorsFile file;
  LINNET_TRY(SafetensorsFile::open(path, file));
  input->source = path;
  return read_open(file, input);
}

Status read_sample(Input* input) {
  // The reader takes files: give it one that lives in memory.
  const int descriptor = memfd_create("linnet_sample", MFD_CLOEXEC);
  const ssize_t bytes = linnet_sample_end - linnet_sample_begin;
  if (descriptor < 0 || write(descriptor, linnet_sample_begin, static_cast<size_t>(bytes)) != bytes) {
    if (descriptor >= 0) close(descriptor);
    return impossible("compare: no memory for the sample");
  }
  SafetensorsFile file;
  Status status = SafetensorsFile::open("/proc/self/fd/" + std::to_string(descriptor), file);
  close(descriptor);
  if (status.ok()) status = read_open(file, input);
  input->source = "the built-in sample";
  return status;
}

Status choose_layers(const std::vector<std::string>& names, Input* input) {
  std::vector<Layer> chosen;
  for (const std::string& name : names) {
    const auto same = [&](const Layer& layer) { return layer.name == name || layer.name == "layer" + name; };
    const auto found = std::find_if(input->layers.begin(), input->layers.end(), same);
    if (found == input->layers.end()) {
      std::string all;
      for (const Layer& layer : input->layers) all += (all.empty() ? "" : ", ") + layer.name;
      return bad_input("compare: there is no layer '" + name + "', expected some of " + all);
    }
    chosen.push_back(*found);
  }
  input->layers = std::move(chosen);
  return {};
}

void set_length(int64_t length, Input* input) {
  for (Layer& layer : input->layers) {
    for (std::vector<double>* x : {&layer.q, &layer.k, &layer.v}) repeat(input->B, input->T, length, x);
  }
  input->T = length;
}

std::string shape_text(const Input& input) {
  return "[" + std::to_string(input.B) + ", " + std::to_string(input.T) + ", " + std::to_string(input.H) + ", " +
         std::to_string(input.K) + "]";
}

}  // namespace linnet::compare
