// model: a pretrained, converted or trained model under the microscope: a text runs through it block by block, and each layer
// says what its heads do there.
//
//   ModelReport report;
//   LINNET_TRY(analyse_model(parts, x, options, told, &report));
//   std::string json = model_json(report);                        // the page and the table are made from it
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "analysis/dsf.h"
#include "analysis/heads.h"
#include "analysis/taps.h"
#include "core/files/json.h"

namespace linnet::analysis {

// Hidden states behind a block: the largest entry, where it stands, and the median of the magnitudes. Massive activations are a
// few entries thousands of times the median.
struct LayerActivity {
  int64_t index = 0;
  std::string mixer;
  double largest = 0, median = 0;
  int64_t token = 0, channel = 0;
};

// A head without softmax weights, as a dynamical system on the first tokens of the text.
struct RecurrentHead {
  int64_t layer = 0, head = 0;
  SystemReport system;
  double kernel_error = 0;
};

struct ModelReport {
  std::string path;
  int64_t tokens = 0;
  bool causal = true;
  HeadOptions options;
  std::vector<HeadStatistics> heads;
  std::vector<LayerActivity> layers;
  std::vector<RecurrentHead> recurrent;
  std::vector<std::string> left_out;  // layers of which nothing more can be said, a sentence each
};

inline constexpr int64_t kRecurrentTokens = 256;  // of a text, for heads as systems

// x [T, hidden]: the embedded text. A state that is not finite is named by its layer.
Status analyse_model(const LayeredModel& parts, std::vector<float> x, const HeadOptions& options,
                     const std::function<void(int64_t layer)>& told, ModelReport* report);

// One head of one layer, the text run through the layers before it.
Status model_mixer(const LayeredModel& parts, std::vector<float> x, int64_t layer, int64_t head, MixerInputs* inputs,
                   std::string* mixer, KernelRead* read);
// The model's own kernel against the system, of max(1, max|out|).
double kernel_error(const SystemReport& report, const KernelRead& read);

std::string model_json(const ModelReport& report);
// Of that JSON: the rows of the table (the first is the heading), and one self-contained page.
std::vector<std::vector<std::string>> model_rows(const JsonValue& json, int digits);
std::string model_page(const JsonValue& json);

}  // namespace linnet::analysis
