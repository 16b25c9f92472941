// zeros_softmax on the GPU, in f32 on the multiply-add units (softmax.cu).
#pragma once

#include "mechanisms/softmax/cuda/problem.h"
#include "mechanisms/zeros/zeros.h"

namespace linnet::cuda {

struct ZerosRow {  // of a row of weights: delta_i = (s_i - mean) - rest, n p_i = exp(delta_i - gap)
  float mean, rest, gap;
  float X, Y;  // gradients: sum_i p_i x_i, sum_i x_i / n, x_i the gradient of r_i
};
struct ZerosSoftmaxCall {
  AttendRows q, k, v, s1, sh, s0, out;
  AttendRows dout, dq, dk, dv, ds1, dsh, ds0;
  ZerosRow* rows = nullptr;  // [B, H, T]
  int64_t B = 0;
  int32_t T = 0, H = 0, K = 0, V = 0, tiles = 0;
  float scale = 1;
  bool causal = true;
};

}  // namespace linnet::cuda

namespace linnet {
LINNET_CUDA_KERNELS(zeros_softmax, ZerosSoftmaxArgs, ZerosOut, ZerosSoftmaxGrads)
}  // namespace linnet
