// The convolution on the GPU: what its kernels are told, for host and device (plain data).
#pragma once

#include <cstdint>

#include "core/view.h"

namespace linnet::cuda {

// A tensor [B, T, E] or a state [N, E, W-1], strides in elements.
struct ConvTensor {
  void* data = nullptr;  // null: absent
  int64_t stride[3] = {};
};

struct Conv {
  int64_t B = 0, T = 0, N = 0;
  int32_t E = 0, W = 0;
  int32_t tile = 32;  // tokens that a thread walks
  ConvTensor x, out, state, final_state;
  ConvTensor dout, dx, dfinal_state, dinitial_state;
  const void* weight = nullptr;  // [E, W]
  const void* bias = nullptr;    // [E]
  int64_t weight_stride[2] = {}, bias_stride = 0;
  bool packed = false;  // 4 taps side by side, aligned
  Dtype weight_dtype = Dtype::none, bias_dtype = Dtype::none;
  const void* offsets = nullptr;  // cu_seqlens: sequence n is tokens offsets[n] .. offsets[n+1] of batch row 0
  bool offsets_64 = false;
  bool silu = false;
  float* sums = nullptr;  // backward: [tiles, W + 1, E]: each tile's part of the gradients of taps and bias
};

}  // namespace linnet::cuda
