// mamba_ssd's rows on the GPU, before and behind the gradients of the recurrence (plain data, for host and device).
//
//   before:   v = delta x,   g = delta A,   dy = dout silu(z)
//   behind:   dx = delta dv + D dy,   ddelta = A dg + dv . x,   ddt = ddelta slope,   dz = dout (y + D x) silu'(z)
//             dA = sum delta dg,   ddt_bias = sum ddt,   dD = sum dy x            over tokens, in one order
#pragma once

#include "mechanisms/recurrence/recurrence_cuda.h"

namespace linnet::cuda {

struct SsdRows {
  int64_t B = 0, T = 0;
  int32_t H = 0, V = 0;
  Rows x, dt, z, dout;
  StepSizes steps;
  Finish skip;            // D alone
  Rows v, g, dy;          // before: results; v, g where the walks do not take step sizes, dy where there is a gate
  Rows dv, dg, y;         // behind: of the recurrence; y where dz is wanted
  Rows dx, ddt, dz;       // behind: results, those that are wanted
  int32_t parts = 0;      // blocks that share the tokens of a head
  float* sums = nullptr;  // [H, parts, V + 2]: dD, dA, ddt_bias
};

}  // namespace linnet::cuda
