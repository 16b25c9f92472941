// What the kernels of inline_residual are told (inline_residual_cuda.cu).
#pragma once

#include "mechanisms/inline/inline.h"

namespace linnet::cuda {

struct InlineResidualRows {
  InlineResidualArgs args;
  InlineResidualOut out;
  InlineResidualGrads grads;
  float* attention = nullptr;                                          // [B, T, H, D]: out or dv of the attention
  float *pre = nullptr, *r = nullptr, *dr = nullptr, *dpre = nullptr;  // [B, H, D], [B, H, 9 D], the same for gradients
};

}  // namespace linnet::cuda
