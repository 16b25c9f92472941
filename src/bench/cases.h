// cases: what `linnet bench` measures, one printable line each.
//
//   softmax B=1 Tq=4096 Tk=4096 H=8 Hkv=8 K=64 V=64 causal=1 dtype=f32 pass=fwd
//
// A declaration (Op::benchmarks) or the user (--case) writes them with alternatives and letters: K=64|128 V=K gives two cases.
// A word is a letter of the operator's shapes, an option, a tensor that counts tokens (lengths=4000: the same for every item),
// with=NAME for an optional tensor, other=NAME for the second of a tensor's two shapes, dtype, or pass (fwd, fwd+bwd).
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/op.h"

namespace linnet::bench {

struct Case {
  const Op* op = nullptr;
  Dtype dtype = Dtype::f32;
  bool backward = false;                                 // forward and backward, else forward alone
  std::vector<std::pair<std::string, int64_t>> letters;  // in the order of the line
  std::vector<std::pair<std::string, std::string>> options;
  std::vector<std::pair<std::string, int64_t>> counts;  // lengths=4000
  std::vector<std::string> with;                        // optional tensors that are given
  std::vector<std::string> other;                       // inputs that take the second of their two shapes
  std::string line() const;                             // without the operator's name
  int64_t letter(std::string_view name) const;          // 0 when absent
};

// The letters that the shapes of the operator's inputs are written in, and whether one of them counts tokens.
std::vector<std::string> letters_of(const Op& op);
bool is_length(std::string_view letter);

Status parse_cases(const Op& op, std::string_view text, std::vector<Case>* cases);

// The same case with all lengths (T, S, Tq, Tk, capacity, pages, counts of tokens) halved until none exceeds `longest`.
Case shortened(const Case& original, int64_t longest);

}  // namespace linnet::bench
