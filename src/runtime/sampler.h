// Sampler: the next token from a row of logits.
//
//   Sampler sampler({.temperature = 0.8, .top_p = 0.95, .seed = 7});
//   int32_t token = sampler.next(logits, vocabulary);
//   sampler.accept(token);                                            // what the repeat penalty looks back on
//
// In this order, as in the Hugging Face library: repeat penalty, temperature, top-k, top-p, min-p, draw. Temperature 0 takes
// the largest logit, the smallest number where two are equal. The draw depends on logits, options and seed alone.
#pragma once

#include <cstdint>
#include <vector>

#include "../core/status.h"

namespace linnet {

struct SamplerOptions {
  double temperature = 0;     // 0: the most likely token
  int64_t top_k = 0;          // 0: all
  double top_p = 1;           // the most likely tokens that together have this probability
  double min_p = 0;           // tokens at least this likely relative to the most likely one
  double repeat_penalty = 1;  // 1: none
  int64_t repeat_last = 64;   // how far the penalty looks back
  uint64_t seed = 0;
};
Status check_sampling(const SamplerOptions& options);

class Sampler {
 public:
  explicit Sampler(const SamplerOptions& options) : options_(options), state_(options.seed) {}
  void accept(int32_t token) { history_.push_back(token); }
  int32_t next(const float* logits, int64_t vocabulary);  // logits that are NaN are never taken

 private:
  double uniform();  // [0, 1)

  SamplerOptions options_;
  uint64_t state_;
  std::vector<int32_t> history_;
  struct Candidate {
    float logit;
    int32_t token;
    double weight;
  };
  std::vector<Candidate> candidates_;
  std::vector<float> penalised_;
};

}  // namespace linnet
