// inline on the GPU: walks of shared/mapped_cuda.h over keys and values less the means k0, v0 of the head's first tokens, and
// running sums of the values:
//
//   o = v0 + (num + (1 - d / n) zv) / n,   num = s phi(q) S,   d = s phi(q).zk,   zv = sum (v - v0),   n keys
//
// What the kernels are told (plain data).
#pragma once

#include "inline.h"

namespace linnet::cuda {

struct InlineRows {
  InlineArgs args;
  InlineOut out;
  InlineGrads grads;
  int64_t B = 0, T = 0, S = 0;
  int32_t H = 0, K = 0, V = 0, padded = 0, columns = 0, tiles = 1, tile = 0, dparts = 1;
  float scale = 1;
  float *k0 = nullptr, *v0 = nullptr;  // [B, H, K], [B, H, V]
  float *phi_q = nullptr, *phi_k = nullptr, *values = nullptr;
  float* sums = nullptr;                       // [B, T, H, V + 1]: zv, n; not causal: the last row's serve all
  float *gradient = nullptr, *back = nullptr;  // [B, T, H, columns], [B, T, H, V]: c G / n, then its sums
  const float *parts = nullptr, *state = nullptr, *dphi_q = nullptr, *dphi_k = nullptr;
  int64_t q_stride = 0, k_stride = 0;  // from one part of dphi to the next
};
struct InlineDecode {
  InlineDecodeArgs args;
  View out;
  int64_t T = 0;
  int32_t H = 0, K = 0, V = 0;
  float scale = 1;
  float *keys = nullptr, *queries = nullptr, *counts = nullptr;  // [B, T, H, K] twice, [B, T, H]
};

}  // namespace linnet::cuda
