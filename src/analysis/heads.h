// heads: what the attention heads of a pretrained model do, measured on real activations, without a matrix of T x T.
//
// p are the softmax weights of a head, rows i over sampled queries:
//   entropy        mean of -sum p ln p;   entropy_ratio: divided by the mean of ln(number of visible keys)
//   distance       mean of sum p |i - j|
//   window_mass(w) mean of the weight on |i - j| < w;   sink_mass(s): on the first s keys;   first_mass: on the first key
//   stable_rank    |P|_F^2 / |P|_2^2 of the first block of at most 512 tokens
//   effective_rank exp of the entropy of P's squared singular values, the same block
//   dof            degrees of freedom of the gauss kernel on balanced queries and keys at lambda 2^-6
//   (docs/mechanisms/distill.md) key_condition  smallest / largest singular value of the centred keys: InLine's weights tell
//   queries apart by that margin kl             mean KL(cheaper || softmax) in nats over the rows, for each of cheaper_names():
//   what a mechanism would cost
//                  here before anything is trained. -ln(mass) for windows; the log-normaliser that Monarch (one step, block
//                  sqrt T) or a tree of spans (16 to a family) falls short of; balanced random features against each row.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "analysis/confusion.h"
#include "core/status.h"
#include "runtime/layered.h"

namespace linnet::analysis {

struct HeadStatistics {
  int64_t layer = 0, head = 0;
  double entropy = 0, entropy_ratio = 0, distance = 0, sink_mass = 0, stable_rank = 0;
  std::vector<double> window_mass;  // of each window
  double first_mass = 0;
  double effective_rank = 0, dof = 0, key_condition = 0;  // with HeadOptions::spectra
  Confusions confusions;                                  // the same
  // With HeadOptions::cheaper, in the order of cheaper_names; empty where the head sees a window already, NaN where a soft cap
  // leaves no such form.
  std::vector<double> kl;
};

struct HeadOptions {
  int64_t rows = 128;  // sampled queries
  int64_t sinks = 4;
  std::vector<int64_t> windows = {64, 128, 512};
  bool spectra = false, cheaper = false;
  bool degrees = false;               // of spectra the degrees of freedom alone
  double apart = 1e-3, alike = 1e-3;  // of queries and of their weights, where they are confused
  int64_t samples = 1024;             // queries and keys of a head for the degrees of freedom
  int64_t features = 64;              // of the random features
  int64_t family = 16;                // spans to a family of the tree
};

// window_64, window_64+sinks, ..., features_64, monarch, hierarchical.
std::vector<std::string> cheaper_names(const HeadOptions& options);

// One entry for each head of queries. A weight that is not finite is named: the layer's activations are broken.
Status head_statistics(const HeadTaps& taps, int64_t layer, bool causal, const HeadOptions& options,
                       std::vector<HeadStatistics>& out);

}  // namespace linnet::analysis
