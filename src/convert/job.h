// Job: one conversion, stage by stage. Each stage reads what the ones before left in the work folder, and writes its own file
// complete or not at all; a job that was stopped goes on behind the last file.
//
//   convert.cc      the order of stages; checks, loading, the report at the end
//   data.cc         texts cut into parts, and tokens
//   statistics.cc   heads and the errors of the candidates
//   planning.cc     measured damage, the plan, its refinement
//   recall.cc       plans that keep what the model finds far back
//   students.cc     initial values, the fit in Python, the written folder
//   evaluation.cc   before and after
#pragma once

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "convert/checkpoint.h"
#include "convert/convert.h"
#include "core/files/json.h"

namespace linnet::convert {

namespace fs = std::filesystem;

inline constexpr uint64_t kMaxTextBytes = uint64_t{4} << 30, kMaxStageBytes = uint64_t{512} << 20;
inline constexpr size_t kMostPoints = 24;  // of a layer's windows

inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

inline uint64_t mix(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

inline bool exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

inline bool contains(const std::vector<std::string>& list, const char* word) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

inline std::vector<double> numbers(const JsonValue& list) {
  std::vector<double> out;
  for (JsonItems items(list); items.next();) {
    double x = 0;
    items.value().number(x);
    out.push_back(x);
  }
  return out;
}

inline double number_of(const JsonValue& value) {
  double x = 0;
  value.number(x);
  return x;
}

inline void write_numbers(JsonWriter& w, const char* name, const std::vector<double>& list) {
  w.key(name).begin_array();
  for (const double x : list) w.value(x);
  w.end_array();
}

class Job {
 public:
  Job(const ConvertOptions& options, const Told& told, ConvertResult& result) : o_(options), told_(told), r_(result) {}
  Status run();

 private:
  template <class F>
  Status stage(const char* name, F&& body) {
    const double start = now();
    Status status = body();
    r_.seconds.emplace_back(name, now() - start);
    return status;
  }
  void tell(const std::string& what, int64_t done, int64_t total) const {
    if (told_) told_(what, done, total);
  }
  std::string at(const char* file) const { return work_ + "/" + file; }
  void remove_work() const {
    std::error_code error;
    fs::remove_all(work_, error);
  }

  Status check();
  // Stage 1.
  Status load();
  Status finish();

  // Stage 2.
  Status data();

  // Stages 3 and 4.
  Status statistics();
  Status read_statistics();
  // How many of the windows, ascending, are cheaper than the layer's own.
  size_t usable(size_t i) const;
  // The window whose damage to each layer alone sets the scale of all its options.
  size_t reference(size_t i) const { return std::min<size_t>(std::max<size_t>(usable(i), 1) - 1, 1); }
  double own_cost(size_t i) const;                                 // of the layer as it is: share of attention to all keys
  double layer_cost(const ConvertedLayer& layer, size_t i) const;  // share of the layer's cost as it is
  double reference_error(size_t i) const;
  ConvertedLayer reference_layer(size_t i) const;

  std::vector<ConvertedLayer> plain_layers() const;
  // What one layer's replacement alone does.
  Status alone(const ConvertedLayer& layer, double& kl);
  Status joint(const std::vector<ConvertedLayer>& list, double& kl);
  Status traced();
  // A list of numbers that grows one by one, each saved as soon as it is known.
  Status read_list(const char* file, std::vector<double>& out) const;
  Status write_list(const char* file, const std::vector<double>& list) const;
  // Stage 5, the first half.
  Status damage();
  std::vector<int64_t> feature_widths() const;
  // recall: the weight of repeated passages beside the text.
  std::vector<std::vector<LayerOption>> options(double recall = 0) const;
  // The plan under the budget; where a number of layers was given, the ones that every replacement harms most stay.
  Status pick(const std::vector<std::vector<LayerOption>>& all, std::vector<size_t>& chosen) const;
  static size_t least_harm(const std::vector<LayerOption>& list);  // of the options behind the first, which is softmax
  bool keeps_all() const { return o_.budget >= 1 && o_.keep_count < 0; }
  void take(const std::vector<std::vector<LayerOption>>& all, const std::vector<size_t>& chosen);
  std::vector<ConvertedLayer> planned() const;
  // Stage 5, the second half: the knapsack, then the scale of each layer measured again where the plan stands, and again.
  Status plan();
  // Encoders are small: every option that is worth its cost is measured, and the plan made again.
  Status measure_options(std::vector<std::vector<LayerOption>>& all, std::vector<size_t>& chosen);
  Status measure_together(std::vector<std::vector<LayerOption>>& all, std::vector<size_t>& chosen);
  // Encoders whose heads can differ: what each kind of each head alone does to the pooled states, and a choice by heads.
  bool chooses_heads() const;
  Status measure_heads();
  Status refine(std::vector<std::vector<LayerOption>>& all, std::vector<size_t>& chosen);
  // The plan made again with growing weight on repeated passages, until what the teacher finds far back is found.
  Status keep_recall();
  // The teacher on repeated passages, and whether it finds what it needs for them; what each layer's reference window alone
  // does to them, which scales its errors there; what a plan makes of them.
  Status recall_damage();
  Status recall_of(const std::vector<ConvertedLayer>& list, double& kl, double& loss) const;
  // Which layers stay, where a number of them was given, by measuring.
  Status choose_kept(const std::vector<std::vector<LayerOption>>& all);
  Status read_plan(const std::string& path);

  // Stage 6: values of new parameters from the statistics of the heads.
  Status initial();
  Status initial_values(const std::vector<ConvertedLayer>& layers, NewTensors& tensors) const;
  void fill(const std::string& name, const ConvertedLayer& layer, const std::vector<int64_t>& shape, std::vector<float>& values,
            const std::string& full) const;
  // Stages 7 and 8 are Python; whether there is anything to train.
  bool needs_fit() const;
  Status fit();
  // Stage 10: the folder in the making.
  Status write();
  // The layers of the section: of the plan, and what an earlier conversion left.
  std::vector<ConvertedLayer> section_layers() const;
  // Each part is saved as soon as it is there.
  template <class F>
  Status part(const char* name, F&& body);

  Status evaluate();
  // Ten lines: the layers that a window of the reference size harms least get this form, as many as the plan's cost allows.
  std::vector<ConvertedLayer> baseline(const ConvertedLayer& form, bool uniform) const;
  // Other choices at the plan's cost: windows by harm and evenly spaced, and published forms with their initial values.
  Status others(const std::set<int64_t>& lengths);
  // The written model gives what the plan gives in memory, to the last bit (new parameters that were trained: what was fitted).
  Status same_numbers(JsonWriter& w);
  Status score_encoder(JsonWriter& w);
  // The written model with a part of its attention left out: which branch carries the result.
  Status branches(int64_t length);
  Status score_text_blocks(int64_t length, const std::vector<ConvertedLayer>& list, JsonWriter& w,
                           const ParameterValues* extra = nullptr, const Model* model = nullptr);
  Status continuations(JsonWriter& w);
  // 4-bit weights for both, as someone in need of speed would run them.
  Status fast(Model& teacher, Model& student);
  Status recall(JsonWriter& w);
  Status speed(JsonWriter& w);

  const ConvertOptions& o_;
  const Told& told_;
  ConvertResult& r_;
  std::string out_, work_;
  bool fresh_ = false, no_plan_ = false;  // no work was there before; no plan fits, or the given one is none
  Model teacher_, student_;
  std::unique_ptr<LayeredModel> parts_;
  int64_t length_ = 0;
  std::vector<double> weights_;  // of each layer in the softmax cost
  std::vector<int64_t> windows_;
  std::vector<ConvertedLayer> whole_;
  std::map<std::string, std::string> sources_;
  std::vector<Sample> calibration_, plan_, recall_, evaluation_;
  std::vector<LayerErrors> errors_;
  Traced traced_, recalled_;  // of the teacher: on the plan's text, on repeated passages
  bool finds_ = false;        // whether it finds them
  std::vector<double> alone_, scale_, recall_scale_;
  std::vector<bool> stays_;                                                  // empty: not chosen by measuring
  std::map<std::pair<int64_t, size_t>, std::vector<float>> teacher_states_;  // of blocks that are scored several times
  std::vector<std::string> raw_;
  std::vector<std::pair<std::string, std::string>> evaluated_;
};

}  // namespace linnet::convert
