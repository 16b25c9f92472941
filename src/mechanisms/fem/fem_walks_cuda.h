// fem_read's priors on the GPU but softmax: what their kernels are told (plain data).
//
// linear, gated: the walks of shared/mapped_cuda.h over features relu(x) + eps and values [vc, exp(beta vc), 1]. aft: a thread
// has a channel, three sums of it. ssm: three selective scans (mamba/selective_scan_cuda.h), as batch rows of one. The bound on
// |beta v| keeps exp(beta v) in f32, so nothing is shifted.
#pragma once

#include "fem.h"
#include "mechanisms/shared/strided.h"

namespace linnet::cuda {

inline constexpr double kFemLargestCap = 60;  // of |beta v|: exp of it, times sums of tokens, is still a float

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
  // Backward of the walks: [2, B, H, V], what vc and exp(beta vc) lose before they are summed. Where all keys are almost equal,
  // they are those of the first: then the gradient of a sum of weights does not cancel between the two.
  float* origin = nullptr;
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
