// fem_read's priors on the GPU but softmax: what their kernels are told (plain data).
//
// linear, gated: the walks of shared/mapped_cuda.h over features relu(x) + eps and values [vc, exp(beta vc), 1]. aft: a thread
// has a channel, three sums of it. ssm: three selective scans (mamba/selective_scan_cuda.h), as batch rows of one. The bound on
// |beta v| keeps exp(beta v) in f32, so nothing is shifted.
#pragma once

#include "fem.h"

namespace linnet::cuda {

inline constexpr double kFemLargestCap = 60;  // of |beta v|: exp of it, times sums of tokens, is still a float

// A tensor of at most four dimensions without its sizes: the parameters of a kernel are at most 4096 bytes.
struct Strided {
  void* data = nullptr;
  Dtype dtype = Dtype::none;
  int64_t stride[4] = {};
};
struct FemStrided {  // FemReadGrads
  Strided dout, dv, dbeta, dlam, dq, dk, da, ddelta, dA, dBm, dCm, dD, dg;
};
struct FemRows {
  FemReadArgs args;
  FemReadOut out;
  FemStrided grads;
  FemDenominator rule = FemDenominator::exact;
  int64_t B = 0, T = 0, rows = 0;                                   // rows: B T H
  int32_t H = 0, K = 0, V = 0, padded = 0, columns = 0, tiles = 1;  // padded features and columns (mapped_cuda.h)
  float cap = 40, eps = 0;
  float *phi_q = nullptr, *phi_k = nullptr, *values = nullptr, *gradient = nullptr;
  const float *parts = nullptr, *dphi_q = nullptr, *dphi_k = nullptr;
  int64_t part_stride = 0;  // of dphi
  int32_t dparts = 1;
  float* dbeta = nullptr;   // [B, T, H, V]: what the gradient of beta is a sum of
  double* steps = nullptr;  // gated: [B, T, H]: what the gradients of the decays are sums of, backward in time
  float* small = nullptr;   // [B, H, V]: 1 where sums of expm1 serve
  float* levels = nullptr;  // aft, backward: [B, T, H, V], log of the sum of exp(k)
};

// Prior ssm: the tensors of the scans, dense f32; rows of u = vc, exp(beta vc) and 1 behind each other.
struct FemScan {
  float *x = nullptr, *steps = nullptr, *y = nullptr;                      // [3, B, T, E]
  float *in = nullptr, *out = nullptr, *rates = nullptr, *skip = nullptr;  // [3, B, T, R] twice, [E, R], [E]
  float *dy = nullptr, *dx = nullptr, *dsteps = nullptr, *din = nullptr, *dout = nullptr;
};
struct FemDecode {
  FemReadDecodeArgs args;
  View out;
  FemDenominator rule = FemDenominator::exact;
  int32_t H = 0, K = 0, V = 0, R = 0;
  int64_t T = 0;
  float cap = 40, eps = 0;
  float* sums = nullptr;  // linear, gated: [B, T, H], of the weights
};

}  // namespace linnet::cuda
