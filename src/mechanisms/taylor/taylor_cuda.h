// The maps of taylor on the GPU: what their kernels are told (plain data).
#pragma once

#include "taylor.h"

namespace linnet::cuda {

inline constexpr int kTaylorWarps = 4;  // rows of a block

struct TaylorRows {
  TaylorMap map;                      // alpha, beta, gamma and constant are on the GPU, below
  View x, key_mask;                   // [B, T, H, K]; the mask of keys, absent for queries
  View alpha, beta, gamma, constant;  // []
  int64_t rows = 0, T = 0;
  int32_t H = 0, padded = 0;
  View phi_out;                 // phi for the caller, or absent
  float* phi = nullptr;         // [B, T, H, padded]
  const float* dphi = nullptr;  // [parts, B, T, H, padded]
  int64_t part_stride = 0;
  int32_t parts = 0;
  View dx;
  float* scalars = nullptr;  // [B, T, H, 3]: what the gradients of alpha, beta, gamma (or of the constant) are sums of
};

}  // namespace linnet::cuda
