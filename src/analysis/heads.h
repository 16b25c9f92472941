// heads: what the attention heads of a pretrained model do, measured on real activations, without a matrix of T x T.
//
// p are the softmax weights of a head, rows i over sampled queries:
//   entropy        mean of -sum p ln p;   entropy_ratio: divided by the mean of ln(number of visible keys)
//   distance       mean of sum p |i - j|
//   window_mass(w) mean of the weight on |i - j| < w;   sink_mass(s): on the first s keys
//   stable_rank    |P|_F^2 / |P|_2^2 of the first block of at most 512 tokens
#pragma once

#include <cstdint>
#include <vector>

#include "core/status.h"
#include "runtime/layered.h"

namespace linnet::analysis {

struct HeadStatistics {
  int64_t layer = 0, head = 0;
  double entropy = 0, entropy_ratio = 0, distance = 0, sink_mass = 0, stable_rank = 0;
  std::vector<double> window_mass;  // of each window
};

struct HeadOptions {
  int64_t rows = 128;  // sampled queries
  int64_t sinks = 4;
  std::vector<int64_t> windows = {64, 128, 512};
};

// One entry for each head of queries. A weight that is not finite is named: the layer's activations are broken.
Status head_statistics(const HeadTaps& taps, int64_t layer, bool causal, const HeadOptions& options,
                       std::vector<HeadStatistics>& out);

}  // namespace linnet::analysis
