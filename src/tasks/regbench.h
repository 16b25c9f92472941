// RegBench's automata and words, for the task and its vector file.
#pragma once

#include <cstdint>
#include <vector>

#include "tasks/random.h"

namespace linnet::tasks {

inline constexpr int64_t kSymbols = 18, kSeparator = 18;

struct Automaton {
  int64_t nodes = 0;
  std::vector<int64_t> next;  // [nodes, kSymbols]: the next node, -1: no edge
};
Automaton draw_automaton(Stream& stream);
// Appends words joined by separators, and the symbols that were legal at each position [.., kSymbols].
void draw_words(Stream& stream, const Automaton& automaton, int64_t words, int64_t max_word, std::vector<int64_t>* sequence,
                std::vector<int64_t>* legal);

}  // namespace linnet::tasks
