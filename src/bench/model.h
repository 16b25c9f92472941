// Models: how fast a whole model reads a prompt and writes tokens, beside llama.cpp and transformers.
//
//   ModelResult result;
//   LINNET_TRY(measure_model(model, {.decode = true, .tokens = 400}, settings, &result));
//
// The tokens are drawn from the vocabulary: what they are does not change the work. Rounds of ours and of each peer take turns.
// measure_linear shows what linear layers promise: a token behind 100,000 others costs what one behind 400 does.
#pragma once

#include <string>
#include <vector>

#include "bench/peer.h"
#include "bench/timing.h"
#include "runtime.h"

namespace linnet::bench {

struct ModelWork {
  bool decode = false;  // one token behind `tokens` others, or a prompt of `tokens`
  int64_t tokens = 512;
  bool linear = false;  // of the model with linear layers that measure_linear makes

  std::string line() const;  // "prefill of 512", "decode after 400", "linear layers: decode after 400"
};

struct ModelResult {
  ModelWork what;
  Spread ours;  // seconds of one token
  struct Other {
    std::string name;  // "llama.cpp (llama-cpp-python 0.3.36)"
    Spread time;
  };
  std::vector<Other> others;
  int64_t state_bytes = 0;
  std::vector<std::string> notes;  // what a peer lacks, and the line that installs it
};

struct ModelSettings {
  double seconds = 2;  // of ours per work, about; each peer gets as much
  int rounds = 3;
  Peer* peer = nullptr;
};

// What the table of docs/run-a-model.md measures, as far as the model's context holds it.
std::vector<ModelWork> usual_work(int64_t context);
Status measure_model(const Model& model, const ModelWork& what, const ModelSettings& settings, ModelResult* result);
// Six blocks of gated_deltanet with random weights, made for the occasion: decode after 400 and after 100,000 tokens, in turn.
// The first stands as a peer of the second.
Status measure_linear(int threads, const ModelSettings& settings, std::vector<ModelResult>* results);

}  // namespace linnet::bench
