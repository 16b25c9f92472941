// What the heads do, and the errors of the candidates in each layer.
#include "convert/job.h"
#include "core/files/file.h"

namespace linnet::convert {

// Stages 3 and 4.
Status Job::statistics() {
  const size_t layers = static_cast<size_t>(parts_->layers());
  if (exists(at("statistics.json"))) return read_statistics();
  std::vector<std::vector<float>> x(calibration_.size()), y;
  for (size_t s = 0; s < calibration_.size(); ++s) LINNET_TRY(embed(*parts_, calibration_[s], x[s]));
  errors_.resize(layers);
  for (size_t i = 0; i < layers; ++i) {
    tell("statistics", static_cast<int64_t>(i), static_cast<int64_t>(layers));
    LINNET_TRY(measure_layer(*parts_, static_cast<int64_t>(i), calibration_, x, windows_, o_.sinks, whole_, errors_[i], y));
    x.swap(y);
  }
  x.resize(recall_.size());
  for (size_t s = 0; s < recall_.size(); ++s) LINNET_TRY(embed(*parts_, recall_[s], x[s]));
  for (size_t i = 0; i < layers && !recall_.empty(); ++i) {
    tell("statistics of repeated passages", static_cast<int64_t>(i), static_cast<int64_t>(layers));
    LayerErrors found;
    LINNET_TRY(measure_layer(*parts_, static_cast<int64_t>(i), recall_, x, windows_, o_.sinks, {}, found, y));
    errors_[i].recall = std::move(found.window);
    x.swap(y);
  }
  JsonWriter w;
  w.begin_object().key("windows").begin_array();
  for (const int64_t each : windows_) w.value(each);
  w.end_array().key("whole").begin_array();
  for (const ConvertedLayer& each : whole_) w.value(each.label());
  w.end_array().key("layers").begin_array();
  for (size_t i = 0; i < layers; ++i) {
    const LayerErrors& e = errors_[i];
    w.begin_object().member("index", i).member("energy", e.energy);
    for (const auto& [name, list] :
         {std::pair("window_error", &e.window), std::pair("recall_error", &e.recall), std::pair("single_error", &e.single)}) {
      w.key(name).begin_array();
      for (const std::vector<double>& head : *list) {
        w.begin_array();
        for (const double each : head) w.value(each);
        w.end_array();
      }
      w.end_array();
    }
    write_numbers(w, "whole_error", e.whole);
    w.key("heads").begin_array();
    for (const analysis::HeadStatistics& h : e.heads) {
      w.begin_object().member("head", h.head).member("entropy", h.entropy).member("entropy_ratio", h.entropy_ratio);
      w.member("distance", h.distance)
          .member("sink_mass", h.sink_mass)
          .member("stable_rank", h.stable_rank)
          .member("dof", h.dof);
      write_numbers(w, "window_mass", h.window_mass);
      w.end_object();
    }
    w.end_array().end_object();
  }
  return write_file(at("statistics.json"), w.end_array().end_object().text());
}

Status Job::read_statistics() {
  std::string text;
  JsonValue root;
  LINNET_TRY(read_file(at("statistics.json"), kMaxStageBytes, text));
  LINNET_TRY(parse_json(text, at("statistics.json"), {.max_bytes = kMaxStageBytes}, root));
  errors_.clear();
  for (JsonItems items(root.find("layers")); items.next();) {
    LayerErrors e;
    e.energy = number_of(items.value().find("energy"));
    for (JsonItems heads(items.value().find("window_error")); heads.next();) e.window.push_back(numbers(heads.value()));
    for (JsonItems heads(items.value().find("recall_error")); heads.next();) e.recall.push_back(numbers(heads.value()));
    for (JsonItems heads(items.value().find("single_error")); heads.next();) e.single.push_back(numbers(heads.value()));
    e.whole = numbers(items.value().find("whole_error"));
    for (JsonItems heads(items.value().find("heads")); heads.next();) {
      analysis::HeadStatistics h;
      const JsonValue& v = heads.value();
      h.layer = static_cast<int64_t>(errors_.size());
      h.head = static_cast<int64_t>(number_of(v.find("head")));
      h.entropy = number_of(v.find("entropy")), h.entropy_ratio = number_of(v.find("entropy_ratio"));
      h.distance = number_of(v.find("distance")), h.sink_mass = number_of(v.find("sink_mass"));
      h.stable_rank = number_of(v.find("stable_rank")), h.dof = number_of(v.find("dof"));
      h.window_mass = numbers(v.find("window_mass"));
      e.heads.push_back(std::move(h));
    }
    errors_.push_back(std::move(e));
  }
  if (errors_.size() != static_cast<size_t>(parts_->layers()))
    return bad_input(at("statistics.json") + ": has another number of layers");
  return {};
}

double Job::reference_error(size_t i) const {
  double sum = 0;
  if (usable(i) == 0) return 0;
  for (const std::vector<double>& head : errors_[i].window) sum += head[reference(i)];
  return sum;
}

size_t Job::usable(size_t i) const {
  const int64_t own = parts_->own_window(static_cast<int64_t>(i));
  size_t n = 0;
  while (n < windows_.size() && (own == 0 || windows_[n] + o_.sinks < own)) ++n;
  return n;
}

double Job::own_cost(size_t i) const {
  return window_cost(parts_->own_window(static_cast<int64_t>(i)), 0, length_, parts_->causal());
}

double Job::layer_cost(const ConvertedLayer& layer, size_t i) const {
  if (layer.mechanism == "softmax") return 1;
  const int64_t index = static_cast<int64_t>(i);
  return mechanism_cost(layer, length_, parts_->key(index), parts_->value(index), parts_->causal()) / own_cost(i);
}

}  // namespace linnet::convert
