// Layer: one of the papers' layers, written once as a short function that records its steps.
//
//   Record record;
//   LINNET_TRY(record_layer(*find_layer("gated_deltanet"), {{"hidden", "1024"}, {"heads", "4"}}, &record));
//   Runner runner;                                          // runner.h: bind weights, prefill, decode
//   LINNET_TRY(Runner::make(std::move(record), {}, &runner));
//
// In a block or a model, inside a larger record:
//
//   Recorder::Scope scope(l, "self_attn");                  // parameters are self_attn.q_proj.weight, ...
//   y = record_layer(l, "softmax_attention", {{"hidden", "576"}, {"heads", "9"}, {"kv_heads", "3"}}, y);
//
// A layer is one file: a struct of options with defaults, a function from options and x to the output, and how vector files
// name its options. Options, parameters, states and costs of a layer are shown by `linnet info LAYER [option=value ...]`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "../core/op.h"
#include "record.h"

namespace linnet {
class SafetensorsFile;
}

namespace linnet::layers {

struct NoTensors {};

// What a vector file says: metadata and the shapes of its tensors.
struct FileFacts {
  std::vector<Setting> metadata;
  std::vector<std::pair<std::string, Shape>> tensors;

  bool has(std::string_view tensor) const;
  int64_t size(std::string_view tensor, int dimension) const;  // 0 when there is none
  std::string text(std::string_view key, std::string_view otherwise = "") const;
  int64_t number(std::string_view key, int64_t otherwise = 0) const;
};

FileFacts facts_of(const SafetensorsFile& file);

// The options that a file of this mechanism and operator stands for, as far as they do not bear the option's own name in the
// metadata. `names` maps metadata keys to options.
struct LayerFile {
  std::string mechanism, operation;
  std::vector<std::pair<std::string, std::string>> names;  // (key of the metadata, option); an empty option: it is read below
  void (*options)(const FileFacts& facts, std::vector<Setting>* settings) = nullptr;
  std::string input = "x", output = "out";
  std::string marker;  // a tensor that such a file has beside those of the operator, which is checked too
  std::string needs;   // a tensor that tells it from other layers' files of the same operator, where tensors are known
};

struct Layer {
  std::string module;  // the class in Python: GatedDeltaNet
  std::string paper;   // source
  Op options;          // name, summary, equation and options; no tensors
  Value (*record)(Recorder& l, const void* options, Value x) = nullptr;
  std::vector<LayerFile> files;

  const std::string& name() const { return options.name; }
};

template <class Options>
using Declaration = Declare<Options, NoTensors, NoTensors>;

// Layer of a function Value record(Recorder&, const Options&, Value x).
template <class Options, Value (*F)(Recorder&, const Options&, Value)>
Layer make_layer(std::string module, std::string paper, const Declaration<Options>& declaration,
                 std::vector<LayerFile> files = {}) {
  Layer layer{std::move(module), std::move(paper), declaration, nullptr, std::move(files)};
  layer.record = [](Recorder& l, const void* options, Value x) { return F(l, *static_cast<const Options*>(options), x); };
  return layer;
}

const std::vector<const Layer*>& all_layers();  // in the order of list.h
const Layer* find_layer(std::string_view name);

// A record of the layer alone: x [B, T, hidden] -> out.
Status record_layer(const Layer& layer, const std::vector<Setting>& options, Record* record);
// The layer as part of another record. Failures are kept by the recorder.
Value record_layer(Recorder& l, std::string_view layer, const std::vector<Setting>& options, Value x);

// The layer that a vector file is about; null when it is about none. `form` is the entry of Layer::files.
const Layer* layer_of_file(std::string_view mechanism, std::string_view operation, const FileFacts& facts,
                           const LayerFile** form);
// The options of the file.
Status options_of_file(const Layer& layer, const LayerFile& form, const FileFacts& facts, std::vector<Setting>* options);

std::string number_text(double x);  // the shortest text that reads back to the same number

}  // namespace linnet::layers
