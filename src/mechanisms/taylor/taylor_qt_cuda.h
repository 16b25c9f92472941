// What the kernels of taylor_qt_layer are told (taylor_qt_cuda.cu).
#pragma once

#include "taylor.h"

namespace linnet::cuda {

struct TaylorQtRows {
  TaylorQtArgs args;
  TaylorQtOut out;
  TaylorQtGrads grads;
  float* keys = nullptr;                                 // [B, T, H, K]: k + ape; backward: their gradient
  float* rows = nullptr;                                 // [B, T, H, K]: the attention, or its dv
  float *weight_terms = nullptr, *bias_terms = nullptr;  // [B, T, H, K]: what dbn_weight and dbn_bias are sums of, or null
};

}  // namespace linnet::cuda
