// Case: one check of an operator against its reference, written as one line that reproduces it.
//
//   softmax B=2 Tq=100 Tk=100 H=4 Hkv=2 K=64 V=64 causal=1 with=bias,sinks dtype=bf16 pass=bwd impl=avx512 threads=3 seed=7
//
// The operator's name, then in any order: letters and options of its declaration, and
//   with=A,B     optional inputs that are given          skip=A,B   optional outputs and gradients that are not
//   dtype=f32    f64, f32, bf16, f16                     pass=bwd   fwd, or bwd: forward, then backward
//   other=A,B    inputs that take the second of their two shapes
//   impl=NAME    the implementation; absent: the best    threads=N
//   strided=1    views with gaps and exchanged dimensions
//   values=...   masked: -inf in logits and log decays, zeros in masks; garbage: NaN in all that must not be read;
//                repeated: every token the same; mixed: rows of very different size
//   seed=N       of all values, offsets and lengths
// Letters that are left out take small defaults; V=K takes the value of a letter before it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/op.h"

namespace linnet::check {

struct Case {
  const Op* op = nullptr;
  std::vector<std::pair<std::string, int64_t>> letters;
  std::vector<std::pair<std::string, std::string>> options;  // those not left at their default
  std::vector<std::string> with, skip, other, values;
  Dtype dtype = Dtype::f32;
  bool backward = false;
  std::string impl;  // empty: the best
  int threads = 1;
  bool strided = false;
  uint64_t seed = 1;

  bool has_value(std::string_view name) const;
};

std::string to_text(const Case& c);
Status parse_case(std::string_view text, Case* c);

inline constexpr std::string_view kValueFlags[] = {"masked", "garbage", "repeated", "mixed"};

// The letters that a case of this operator chooses when these optional inputs are given, in the order of the shapes; the others
// follow from rules of the declaration.
std::vector<std::string> free_letters(const Op& op, const std::vector<std::string>& with);
// Whether the offsets of packed sequences are among the given inputs.
bool is_packed(const Op& op, const std::vector<std::string>& with);
bool contains(const std::vector<std::string>& list, std::string_view item);

}  // namespace linnet::check
