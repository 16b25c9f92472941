// measure: what another mechanism in the place of softmax does to a layer's output and to the whole model, on real texts.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "analysis/heads.h"
#include "core/status.h"
#include "runtime/layered.h"

namespace linnet::convert {

// A text for models that read tokens, an image for the others.
struct Sample {
  std::vector<int32_t> tokens;
  std::vector<float> pixels;
  int64_t from = 0;  // what stands before is read, not measured
};

using Told = std::function<void(const std::string& what, int64_t done, int64_t total)>;

// One layer: its heads, and the error of the attention's output behind the output projection, |Wo (out_o - out)|^2 summed over
// sampled tokens; heads are counted one by one, so that windows of different heads can be combined.
struct LayerErrors {
  std::vector<analysis::HeadStatistics> heads;
  std::vector<std::vector<double>> window;  // [head of keys][window]
  std::vector<std::vector<double>> recall;  // the same where a passage far back is repeated; empty: not measured
  std::vector<double> whole;                // of each candidate for the whole layer
  std::vector<std::vector<double>> single;  // [head of keys][candidate]: the same by heads
  double energy = 0;                        // |Wo out|^2, in the same way
};
Status measure_layer(const LayeredModel& model, int64_t layer, const std::vector<Sample>& samples,
                     const std::vector<std::vector<float>>& inputs, const std::vector<int64_t>& windows, int64_t sinks,
                     const std::vector<ConvertedLayer>& whole, LayerErrors& out, std::vector<std::vector<float>>& outputs);

// The states of a model on samples, and how far another's are from them.
struct Traced {
  std::vector<std::vector<std::vector<float>>> inputs;  // [layer][sample]: x before each block
  std::vector<std::vector<float>> last;                 // [sample]: finished states
};
Status embed(const LayeredModel& model, const Sample& sample, std::vector<float>& x);
Status trace(const LayeredModel& model, const std::vector<Sample>& samples, bool keep_inputs, const Told& told, Traced& out);
// From block `first` on, with these layers: finished states.
Status run_from(const LayeredModel& model, const std::vector<ConvertedLayer>& layers, size_t first, std::vector<float> x,
                const ParameterValues* extra, std::vector<float>& out);
// Mean KL of the next token in nats over sampled rows, from `from` on; encoders: 1 - cosine of the pooled states.
Status distance(const LayeredModel& model, const std::vector<std::vector<float>>& expected,
                const std::vector<std::vector<float>>& found, bool pool_first, double& out, int64_t from = 0);

// Encoders: the pooled states of one sample, of length one.
std::vector<float> pooled(const LayeredModel& model, const std::vector<float>& states);

// Loss and KL of all tokens of one block, both models' finished states [T, hidden].
struct BlockScore {
  std::vector<float> teacher, student, kl;  // [T - 1], nats
  int64_t agreed = 0;                       // rows whose most likely token is the same
};
Status score_block(const LayeredModel& head, const std::vector<int32_t>& tokens, const std::vector<float>& teacher,
                   const std::vector<float>& student, BlockScore& out);

}  // namespace linnet::convert
