// evaluate: how well a causal model predicts a text, and whether it finds again what it was told.
//
// Perplexity: windows of `length` tokens, each `stride` behind the last one; every token is scored once, in the first window
// that holds it with something before it. bits_per_byte counts the bytes of the tokens that were scored, so that models with
// different vocabularies can be compared.
//
// Recall: a five-digit key hidden in repeated sentences, at several depths, and one of many name = number lines; the model has
// to continue with it, token by token the most likely one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/status.h"
#include "runtime.h"

namespace linnet {

struct LossBucket {
  int64_t first = 0, last = 0;  // positions in the window
  int64_t tokens = 0;
  double loss = 0;  // mean, in nats
};
struct TextScore {
  int64_t tokens = 0, scored = 0, bytes = 0, windows = 0;
  double loss = 0, perplexity = 0, bits_per_byte = 0, seconds = 0;
  std::vector<LossBucket> buckets;
};
using Progressed = std::function<void(int64_t done, int64_t total)>;

struct TextOptions {
  int64_t length = 1024, stride = 0;  // stride 0: as length
  int64_t limit = 0;                  // only the first tokens; 0: all
};
Status score_text(const Model& model, const std::string& text, const TextOptions& options, const Progressed& progressed,
                  TextScore& out);

struct RecallScore {
  std::string task;  // passkey, associative
  int64_t length = 0, trials = 0, right = 0;
};
int64_t shortest_recall(const Model& model);  // tokens of the shortest of these puzzles
Status score_recall(const Model& model, const std::vector<int64_t>& lengths, int64_t trials, uint64_t seed,
                    const Progressed& progressed, std::vector<RecallScore>& out);

// What `linnet info MODEL --json` prints.
std::string model_json(const Model& model);

}  // namespace linnet
