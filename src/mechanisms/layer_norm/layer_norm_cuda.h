// layer_norm on the GPU: what the kernels are told (plain data).
#pragma once

#include "core/view.h"

namespace linnet::cuda {

struct LayerNormRows {
  int64_t T = 0, rows = 0, warps = 0;  // warps: of the backward
  int32_t H = 0, D = 0;
  bool whole = false;  // rows in pieces of 16 bytes
  float unit = 1, eps = 0;
  View x, out, dout, dx;                               // [B, T, H, D]
  View weight, bias;                                   // [D]
  float *weight_sums = nullptr, *bias_sums = nullptr;  // [warps, D]
};

}  // namespace linnet::cuda
