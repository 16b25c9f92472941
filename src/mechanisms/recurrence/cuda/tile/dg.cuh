// The gradient of one decay for all channels of a head (gradients.h): the gates of a chunk, and the last steps.
#pragma once

#include "mechanisms/recurrence/cuda/tile/gradients.h"
#include "mechanisms/recurrence/cuda/tile/walk.cuh"
#include "ptx/numbers.cuh"

namespace linnet::cuda {
namespace {

// The log decays of tokens lane and lane + 32.
struct TokenGates {
  float g[2] = {};
};
__device__ __forceinline__ TokenGates load_gates(const Pairs& pairs, const Walk& w, int h, int chunk, int lane) {
  TokenGates gates;
  const StepSizes& steps = pairs.e.steps;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t t = static_cast<int64_t>(chunk) * C + lane + 32 * i;
    if (t >= w.length) continue;
    float g = ptx::load(pairs.e.g.data, pairs.e.g.dtype, row_of(pairs.e.g, w.b, w.begin + t, h));
    if (steps.A != nullptr) g = step_decay(step_size(steps, g + step_bias(steps, h)), steps.A[h * steps.stride_A]);
    gates.g[i] = g;
  }
  return gates;
}

// The last steps, by one warp: of token lane + 32 i, whole = rows - columns + reads, write = what it wrote, g its log decay.
__device__ __forceinline__ void store_dg(const Pairs& pairs, const Walk& w, int h, int chunk, int lane, const float (&whole)[2],
                                         const float (&write)[2], float over, const float (&g)[2]) {
  float behind[2] = {whole[0], whole[1]}, before[2] = {write[0], write[1]};
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float later = __shfl_down_sync(0xffffffff, behind[i], step), earlier = __shfl_up_sync(0xffffffff, before[i], step);
      if (lane + step < 32) behind[i] += later;
      if (lane >= step) before[i] += earlier;
    }
  }
  behind[0] += __shfl_sync(0xffffffff, behind[1], 0);
  const float low = __shfl_sync(0xffffffff, before[0], 31);
  float excluded[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    excluded[i] = __shfl_up_sync(0xffffffff, before[i], 1);
    if (lane == 0) excluded[i] = 0;
  }
  excluded[1] += low;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t t = static_cast<int64_t>(chunk) * C + lane + 32 * i;
    if (t >= w.length) continue;
    const float dg = expf(g[i]) == 0 ? 0 : behind[i] + excluded[i] + over;
    ptx::store(const_cast<void*>(pairs.dg.data), pairs.dg.dtype, row_of(pairs.dg, w.b, w.begin + t, h), dg);
  }
}

}  // namespace
}  // namespace linnet::cuda
