// Sums of weighted values over tokens, before or behind each chunk of 32: what lies outside of a row's own chunk stands in such
// a sum, and the row's kernel adds the few tokens inside. In double, in one order.
//
//   S[m, e] = sum_t weight[t, m] w[t, e],   weight = x, or exp(l) in units of exp(top[m]), the largest of the sum
#pragma once

#include "core/launch.h"

namespace linnet::cuda {

inline constexpr int64_t kDistillChunk = 32;

struct DistillSums {
  int64_t B = 0, T = 0, H = 0, M = 0, W = 0;
  const double* l = nullptr;  // [B, T, H, M]: logarithms of the weights; null: x holds the weights
  double* x = nullptr;        // [B, T, H, M]: the weights, in units of their chunk's largest where l is given
  const double* w = nullptr;  // [B, T, H, W]
  double* states = nullptr;   // [B, H, chunks + 1, M, W]: before each chunk (in reverse: behind it), and of all tokens
  double* own = nullptr;      // [B, H, chunks, M]: the largest of each chunk
  double* tops = nullptr;     // [B, H, chunks + 1, M]: units of the states
  bool reverse = false;
};
constexpr int64_t distill_chunks(int64_t T) { return (T + kDistillChunk - 1) / kDistillChunk; }

// Sizes and memory; l, x and w are the caller's.
DistillSums cut_distill_sums(Arena& arena, int64_t B, int64_t T, int64_t H, int64_t M, int64_t W, bool logarithms);
void run_distill_sums(const Launch& launch, const DistillSums& sums);

}  // namespace linnet::cuda
