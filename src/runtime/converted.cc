#include "runtime/converted.h"

#include <algorithm>
#include <set>

#include "layers/layer.h"

namespace linnet {

namespace {

constexpr int64_t kFormat = 1, kMostKeys = int64_t{1} << 40, kMostFeatures = 65536;

const char* kMechanisms[] = {"softmax", "window",       "distill",  "hybrid", "gdn",         "gla",
                             "monarch", "hierarchical", "hedgehog", "t2r",    "hybrid-exact"};

bool is_causal(const BlockSpec& block) {
  return std::none_of(block.options.begin(), block.options.end(),
                      [](const layers::Setting& s) { return s.name == "causal" && s.text == "0"; });
}

ConvertedLayer read_layer(Config& entry) {
  ConvertedLayer layer;
  layer.index = entry.count("index", 0, kMaxLayers - 1);
  layer.mechanism = entry.text("mechanism", "");
  const bool known =
      std::any_of(std::begin(kMechanisms), std::end(kMechanisms), [&](const char* name) { return layer.mechanism == name; });
  if (!known) {
    std::string names;
    for (const char* name : kMechanisms) names += std::string(names.empty() ? "" : ", ") + name;
    entry.refuse("linnet.layers: the mechanism of layer " + std::to_string(layer.index) + " is " +
                 json_quote_short(layer.mechanism) + ", expected one of " + names);
  }
  const std::string& m = layer.mechanism;
  for (const auto& [name, list] :
       {std::pair("windows", &layer.windows), std::pair("blocks", &layer.blocks), std::pair("updates", &layer.updates)}) {
    for (JsonItems items(entry.value(name)); items.next();) {
      int64_t number = 0;
      if (items.value().count(number) != nullptr || number > kMostKeys)
        entry.refuse("linnet.layers: " + std::string(name) + " holds no count");
      list->push_back(number);
    }
  }
  if ((!layer.blocks.empty() && layer.blocks.size() != layer.windows.size()) || layer.updates.size() != layer.blocks.size())
    entry.refuse("linnet.layers: windows, blocks and updates are lists of one length");
  const bool needs_window = (m == "window" && layer.windows.empty()) || m == "hybrid" || m == "hybrid-exact";
  layer.window = needs_window ? entry.count("window", 1, kMostKeys) : entry.count("window", 0, kMostKeys, 0);
  layer.sinks = entry.count("sinks", 0, kMostKeys, 0);
  if (m == "distill" || m == "hybrid" || m == "hedgehog" || m == "t2r" || m == "hybrid-exact")
    layer.features = entry.count("features", 1, kMostFeatures);
  layer.form = entry.text("form", "sliding");
  layer.block = entry.count("block", 0, kMostKeys, 0);
  layer.steps = entry.count("steps", 1, 1000, 1);
  layer.tie = entry.text("tie", "row");
  layer.arity = entry.count("arity", 2, kMostKeys, 4);
  return layer;
}

}  // namespace

std::string ConvertedLayer::label() const {
  const std::string near = (window > 0 ? " " + std::to_string(window) : "") + (sinks > 0 ? " + " + std::to_string(sinks) : "");
  if (mechanism == "softmax") return mechanism;
  if (!windows.empty()) {
    std::string list;
    for (size_t h = 0; h < windows.size(); ++h) {
      list += list.empty() ? " " : "/";
      if (!blocks.empty() && blocks[h] > 0) {
        list += "monarch " + std::to_string(blocks[h]) + " x " + std::to_string(updates[h]);
      } else {
        list += windows[h] > 0 ? std::to_string(windows[h]) : "all";
      }
    }
    return mechanism + list + (sinks > 0 ? " + " + std::to_string(sinks) : "");
  }
  if (mechanism == "monarch") return "monarch " + std::to_string(block) + " x " + std::to_string(steps);
  if (mechanism == "hierarchical") return "hierarchical " + tie + " " + std::to_string(arity);
  return mechanism + (features > 0 ? " " + std::to_string(features) : "") + (features > 0 && window > 0 ? " window" : "") +
         near;
}

void ConvertedLayer::write(JsonWriter& w) const {
  w.begin_object().member("index", index).member("mechanism", mechanism);
  if (mechanism != "softmax" && mechanism != "monarch" && mechanism != "hierarchical") {
    if (windows.empty()) {
      w.member("window", window);
    } else {
      for (const auto& [name, list] :
           {std::pair("windows", &windows), std::pair("blocks", &blocks), std::pair("updates", &updates)}) {
        if (list->empty()) continue;
        w.key(name).begin_array();
        for (const int64_t each : *list) w.value(each);
        w.end_array();
      }
    }
    w.member("sinks", sinks);
  }
  if (features > 0) w.member("features", features);
  if (mechanism == "hybrid") w.member("form", form);
  if (mechanism == "monarch") w.member("block", block).member("steps", steps);
  if (mechanism == "hierarchical") w.member("tie", tie).member("arity", arity);
  w.end_object();
}

int64_t window_of(const BlockSpec& block) {
  for (const layers::Setting& s : block.options) {
    if (s.name != "window") continue;
    const size_t comma = s.text.find(',');
    const int64_t left = std::atoll(s.text.c_str()),
                  right = comma < s.text.size() ? std::atoll(s.text.c_str() + comma + 1) : -1;
    if (left < 0 || (right < 0 && !is_causal(block))) return 0;
    return left + 1 + (is_causal(block) ? 0 : right);
  }
  return 0;
}

Status convert_block(const ConvertedLayer& layer, BlockSpec& block) {
  if (layer.mechanism == "softmax") return {};
  if (block.mixer != "softmax_attention") {
    return bad_input("layer " + std::to_string(layer.index) + " is " + block.mixer + ", expected softmax_attention");
  }
  // A window of the model's own: beside the first keys, no mechanism sees more than it.
  if (const int64_t own = window_of(block); own > 0) {
    const std::string sees =
        "layer " + std::to_string(layer.index) + " has a window of its own, " + std::to_string(own) + " keys";
    if (layer.mechanism != "window" || !layer.blocks.empty())
      return bad_input(sees + ", and cannot be " + layer.mechanism + ", only a smaller window");
    std::vector<int64_t> windows = layer.windows;
    if (windows.empty()) windows.push_back(layer.window);
    for (const int64_t w : windows) {
      if (w == 0 || w > own)
        return bad_input(sees + ", expected no larger one than that, not " + (w > 0 ? std::to_string(w) : "all"));
    }
    std::erase_if(block.options, [](const layers::Setting& s) { return s.name == "window"; });
  }
  const bool window = layer.mechanism == "window" && layer.windows.empty();
  if (window) {
    const std::string sides = is_causal(block)
                                  ? std::to_string(layer.window - 1) + ",-1"
                                  : std::to_string(layer.window / 2) + "," + std::to_string((layer.window - 1) / 2);
    block.options.push_back({"window", sides});
    block.options.push_back({"prefix", std::to_string(layer.sinks)});
  } else {
    block.mixer = "converted_attention";
    const auto listed = [](const std::vector<int64_t>& list) {
      std::string text;
      for (const int64_t each : list) text += (text.empty() ? "" : ",") + std::to_string(each);
      return text;
    };
    block.options.insert(block.options.end(), {{"mechanism", layer.mechanism},
                                               {"window", std::to_string(layer.window)},
                                               {"sinks", std::to_string(layer.sinks)},
                                               {"features", std::to_string(layer.features)},
                                               {"form", layer.form},
                                               {"block", std::to_string(layer.block)},
                                               {"steps", std::to_string(layer.steps)},
                                               {"tie", layer.tie},
                                               {"arity", std::to_string(layer.arity)}});
    if (!layer.windows.empty()) block.options.push_back({"windows", listed(layer.windows)});
    if (!layer.blocks.empty()) {
      block.options.push_back({"blocks", listed(layer.blocks)});
      block.options.push_back({"updates", listed(layer.updates)});
    }
  }
  block.label = layer.label();
  return {};
}

Status read_conversion(const JsonValue& section, const std::string& source, std::vector<ConvertedLayer>& out) {
  out.clear();
  Config own(section, source);
  if (const int64_t format = own.count("format", 1, INT64_MAX); own.status().ok() && format != kFormat) {
    own.refuse("linnet.format is " + std::to_string(format) + ", expected " + std::to_string(kFormat));
  }
  LINNET_TRY(own.status());
  if (!own.value("layers").is(JsonValue::Kind::array))
    return bad_input(source + ": linnet.layers is missing: the list of layers");
  std::set<int64_t> seen;
  for (JsonItems items(own.value("layers")); items.next();) {
    Config entry(items.value(), source);
    const ConvertedLayer layer = read_layer(entry);
    LINNET_TRY(entry.status());
    if (!seen.insert(layer.index).second) {
      return bad_input(source + ": linnet.layers has layer " + std::to_string(layer.index) + " twice");
    }
    out.push_back(layer);
  }
  return {};
}

Status apply_conversion(Config& config, Description& d) {
  std::vector<ConvertedLayer> list;
  LINNET_TRY(read_conversion(config.value("linnet"), config.source(), list));
  for (const ConvertedLayer& layer : list) {
    if (layer.index >= static_cast<int64_t>(d.blocks.size())) {
      return bad_input(config.source() + ": linnet.layers has layer " + std::to_string(layer.index) + ", the model has " +
                       std::to_string(d.blocks.size()));
    }
    if (const Status status = convert_block(layer, d.blocks[static_cast<size_t>(layer.index)]); !status.ok()) {
      return Status(status.code(), config.source() + ": " + status.message());
    }
  }
  // Before the family's own rules, some of which take every name of a layer.
  std::vector<NameRule> rules;
  for (const char* name : kMechanisms) {
    rules.push_back({"layers.#.self_attn." + std::string(name) + ".*", "linnet.layers.#." + std::string(name) + ".*"});
  }
  d.names.insert(d.names.begin(), rules.begin(), rules.end());
  return {};
}

}  // namespace linnet
