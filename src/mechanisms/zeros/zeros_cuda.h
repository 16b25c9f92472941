// zeros on the GPU: three walks of shared/mapped_cuda.h, over keys weighted by exp(s - m), by s - c and by 1:
//
//   r_ti = A_t exp(s_i - m_t) + B_t (s_i - c) + C_t,   A = sh / E,  B = (s1 - sh) / n,  C = (s0 - sh) / n - B (mean - c)
//
// with m the largest logit so far (the first walk's decay is m_{t-1} - m_t), E = sum exp(s_i - m), c the first logit. What the
// kernels are told (plain data).
#pragma once

#include "zeros.h"

namespace linnet::cuda {

// What the scalars of a row are: [rows] each.
struct ZerosScalars {
  float *A = nullptr, *B = nullptr, *C = nullptr;     // of the reading row
  float *weight = nullptr, *less = nullptr;           // of the key: exp(s - m), s - c
  float *E = nullptr, *n = nullptr, *mean = nullptr;  // mean - c
  double* level = nullptr;                            // m + log E
  float *X = nullptr, *Y = nullptr, *key = nullptr;   // backward
};
struct ZerosRows {
  ZerosArgs args;
  ZerosOut out;
  ZerosGrads grads;
  int64_t B = 0, T = 0, rows = 0;
  int32_t H = 0, K = 0, V = 0, columns = 0, tiles = 1, dparts = 1;
  int64_t part_stride = 0;
  ZerosScalars x;
  float *phi_q = nullptr, *phi_k = nullptr, *values = nullptr, *gradient = nullptr, *decays = nullptr;
  const float *parts = nullptr, *dphi_q = nullptr, *dphi_k = nullptr;
};
struct ZerosDecode {
  ZerosDecodeArgs args;
  View out;
  int64_t T = 0;
  int32_t H = 0, K = 0, V = 0;
  float* steps = nullptr;  // [B, T, H, 7]: nu, nu shift, lam, lam - nu, w0, w1, wp
};

}  // namespace linnet::cuda
