#include "layers/layer.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdlib>

#include "core/files/safetensors.h"

namespace linnet::layers {

#define LINNET_LAYER(name) const Layer& name##_layer();
#include "layers/list.h"
#undef LINNET_LAYER

const std::vector<const Layer*>& all_layers() {
  static const std::vector<const Layer*> layers = {
#define LINNET_LAYER(name) &name##_layer(),
#include "layers/list.h"
#undef LINNET_LAYER
  };
  return layers;
}

const Layer* find_layer(std::string_view name) {
  for (const Layer* layer : all_layers()) {
    if (layer->name() == name) return layer;
  }
  return nullptr;
}

namespace {

// Other words for the same option, as papers and libraries have them.
std::string option_word(const std::string& key) {
  static constexpr std::pair<const char*, const char*> kWords[] = {
      {"num_heads", "heads"}, {"n_heads", "heads"},    {"num_kv_heads", "kv_heads"}, {"block_size", "block"},
      {"num_steps", "steps"}, {"is_causal", "causal"}, {"rope_theta", "rope_base"}};
  for (const auto& [word, option] : kWords) {
    if (key == word) return option;
  }
  return key;
}

}  // namespace

FileFacts facts_of(const SafetensorsFile& file) {
  FileFacts facts;
  for (const auto& [key, value] : file.metadata()) facts.metadata.push_back({key, value});
  for (size_t i = 0; i < file.size(); ++i) {
    const SafetensorsEntry entry = file.entry(i);
    facts.tensors.emplace_back(entry.name, entry.shape);
  }
  return facts;
}

bool FileFacts::has(std::string_view tensor) const { return size(tensor, -1) != 0; }
int64_t FileFacts::size(std::string_view tensor, int dimension) const {
  for (const auto& [name, shape] : tensors) {
    if (name != tensor) continue;
    if (dimension < 0) return 1;
    return dimension < static_cast<int>(shape.size()) ? shape[static_cast<size_t>(dimension)] : 0;
  }
  return 0;
}
std::string FileFacts::text(std::string_view key, std::string_view otherwise) const {
  for (const Setting& entry : metadata) {
    if (entry.name == key) return entry.text;
  }
  for (const Setting& entry : metadata) {
    if (option_word(entry.name) == key) return entry.text;
  }
  return std::string(otherwise);
}
int64_t FileFacts::number(std::string_view key, int64_t otherwise) const {
  const std::string found = text(key);
  return found.empty() ? otherwise : static_cast<int64_t>(std::atof(found.c_str()));
}

std::string number_text(double x) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof text, x).ptr);
}

namespace {

struct Options {
  alignas(std::max_align_t) char values[kMaxStruct], out[8], grads[8];
};

Status read_options(const Layer& layer, const std::vector<Setting>& settings, Options* options) {
  layer.options.construct(options->values, options->out, options->grads);
  for (const Setting& setting : settings) {
    LINNET_TRY(set_option(layer.options, setting.name, setting.text, options->values));
  }
  return {};
}

int64_t hidden_of(const Layer& layer, const Options& options) {
  const OptionDecl* hidden = layer.options.find_option("hidden");
  return *reinterpret_cast<const int64_t*>(options.values + hidden->offset);
}

}  // namespace

Value record_layer(Recorder& l, std::string_view name, const std::vector<Setting>& settings, Value x) {
  const Layer* layer = find_layer(name);
  if (!l.require(layer != nullptr, "there is no layer '" + std::string(name) + "'; linnet list shows them")) return {};
  Options options;
  const Status status = read_options(*layer, settings, &options);
  if (!l.require(status.ok(), status.message()) || !x.given()) return {};
  const int64_t hidden = hidden_of(*layer, options);
  if (!l.require(l.width(x) == hidden, layer->name() + ": x has " + std::to_string(l.width(x)) + " channels, expected " +
                                           std::to_string(hidden) + " (hidden)")) {
    return {};
  }
  return layer->record(l, options.values, x);
}

Status record_layer(const Layer& layer, const std::vector<Setting>& settings, Record* record) {
  Options options;
  LINNET_TRY(read_options(layer, settings, &options));
  Recorder l(layer.name());
  const Value x = l.input("x", {kB, kT, hidden_of(layer, options)});
  l.output(layer.record(l, options.values, x));
  LINNET_TRY(l.finish(record));
  for (const OptionDecl& option : layer.options.options) {
    record->options.push_back({option.name, option_text(option, options.values)});
  }
  return {};
}

const Layer* layer_of_file(std::string_view mechanism, std::string_view operation, const FileFacts& facts,
                           const LayerFile** form) {
  for (const Layer* layer : all_layers()) {
    for (const LayerFile& file : layer->files) {
      if (file.mechanism != mechanism || file.operation != operation) continue;
      if (!file.marker.empty() && !facts.has(file.marker)) continue;
      if (!file.needs.empty() && !facts.tensors.empty() && !facts.has(file.needs)) continue;
      *form = &file;
      return layer;
    }
  }
  return nullptr;
}

Status options_of_file(const Layer& layer, const LayerFile& form, const FileFacts& facts, std::vector<Setting>* options) {
  options->clear();
  if (const int64_t hidden = facts.size(form.input, 2); hidden > 0) options->push_back({"hidden", std::to_string(hidden)});
  if (form.options != nullptr) form.options(facts, options);
  for (const Setting& entry : facts.metadata) {
    if (entry.name == "mechanism" || entry.name == "operator" || entry.name == "format" || entry.name == "seed") continue;
    const auto name = std::find_if(form.names.begin(), form.names.end(), [&](const auto& n) { return n.first == entry.name; });
    std::string option = name == form.names.end() ? entry.name : name->second;
    if (option.empty()) continue;
    if (layer.options.find_option(option) == nullptr) option = option_word(option);
    if (layer.options.find_option(option) == nullptr) {
      // What a layer cannot be told, but what it is: off, or causal by nature.
      if (entry.text == "0" || entry.text == "none" || (entry.name == "causal" && entry.text == "1")) continue;
      return bad_input(layer.name() + ": the metadata has '" + entry.name + "', which is no option of the layer");
    }
    options->push_back({option, entry.text});
  }
  return {};
}

}  // namespace linnet::layers
