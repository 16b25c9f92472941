// One sequence of each of MAD's tasks (Poli et al., 2024, arXiv 2403.17844), drawn from a running stream: the tasks of this
// folder repeat them, and the vector file tasks-mad holds one of each from one stream.
#pragma once

#include <cstdint>
#include <vector>

#include "tasks/random.h"

namespace linnet::tasks {

// Recall and noisy recall. Ids 0 .. vocab - noise_vocab - 1 are keys (the first half) and values, the rest noise.
struct RecallSize {
  int64_t vocab = 16, length = 128, noise_vocab = 0;
  double noise = 0;
};
// length - 1 tokens each: the sequence, the next token everywhere, and the next token only where it is the value of a key that
// was shown before (-100 elsewhere).
void draw_recall(Stream& stream, const RecallSize& size, int64_t* inputs, int64_t* next, int64_t* probe);

// length tokens each; targets are -100 but at the last `items` positions.
void draw_selective_copy(Stream& stream, int64_t vocab, int64_t length, int64_t items, int64_t* inputs, int64_t* targets);

// The table from keys 0 .. floor((vocab - 1) / 2) - 1 to values.
std::vector<int64_t> memorisation_table(uint64_t seed, int64_t vocab);
void draw_memorisation(Stream& stream, const std::vector<int64_t>& table, int64_t vocab, int64_t length, int64_t* inputs,
                       int64_t* targets);

void draw_compression(Stream& stream, int64_t vocab, int64_t length, int64_t* inputs);

}  // namespace linnet::tasks
