// What metala_rows_cuda.cu is told: plain data, for host and device.
#pragma once

#include "mechanisms/recurrence/cuda/engine.h"

namespace linnet::cuda {

struct Metala {
  int64_t B = 0, T = 0;
  int32_t H = 0, K = 0, V = 0;
  Rows q, v, out;
  Rows gates;  // a of the mixer, g of the core
  Rows w;      // [H, K]
  bool mixer = false;
  int32_t aug = 2;  // 0 sigmoid, 1 linear, 2 none
  float tau = 1, floor = 0;
  const uint8_t* mask = nullptr;  // [B, T]; 0: the token is masked
  int64_t mask_stride_b = 0, mask_stride_t = 0;
  bool skip_masked = false;
  Dtype dtype = Dtype::none;  // of k
  float* g = nullptr;         // dense [B, T, H, K], as is k
  void* k = nullptr;
  Rows source_v;  // with a mask: v is a copy of these, zero where masked
  // Gradients: of the result; of the recurrence, dense; wanted.
  Rows dout;
  float *dq = nullptr, *dk = nullptr, *dv = nullptr, *dg = nullptr, *parts = nullptr;
  Rows to_q, to_v, to_gates, to_w;
};

}  // namespace linnet::cuda
