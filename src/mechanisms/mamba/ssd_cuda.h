// mamba_ssd's rows on the GPU, before and behind the gradients of the recurrence (plain data, for host and device).
//
//   before:   v = delta x,   g = delta A,   dy = dout silu(z)
//   behind:   dx = delta dv + D dy,   ddelta = A dg + dv . x,   ddt = ddelta slope,   dz = dout (y + D x) silu'(z)
//             dA = sum delta dg,   ddt_bias = sum ddt,   dD = sum dy x            over tokens, in one order
//
// On tiles the walks take step sizes themselves, and that of dv leaves dx, dv . x and parts of dD (StepGradients): then
// behind_steps and behind_gate have the rest. Elsewhere dv comes in f32: ddt cancels where dx does not.
#pragma once

#include "mechanisms/recurrence/cuda/engine.h"

namespace linnet::cuda {

struct SsdRows {
  int64_t B = 0, T = 0;
  int32_t H = 0, V = 0;
  Rows x, dt, z, dout;
  StepSizes steps;
  Finish skip;                  // D alone
  Rows v, g, dy;                // before: results; v, g where the walks do not take step sizes, dy where dout itself is not it
  Rows dv, dg, y;               // behind: of the recurrence, dv in f32; y where dz is wanted
  const float* dots = nullptr;  // behind, on tiles: [B, H, V / 16, T]
  Rows dx, ddt, dz;             // behind: results, those that are wanted
  int32_t parts = 0;            // blocks that share the tokens of a head
  int32_t skip_parts = 0;       // those that share them in the sums of dD
  float* skip_sums = nullptr;   // [H, skip_parts, V]: dD
  float* step_sums = nullptr;   // [H, parts, 2]: dA, ddt_bias
};

}  // namespace linnet::cuda
