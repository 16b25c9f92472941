// What the kernels of the gradient of one decay for all channels of a head share: the pairs inside a chunk, and the end.
#pragma once

#include "mechanisms/recurrence/cuda/tile/gradients.h"
#include "mechanisms/recurrence/cuda/tile/tile.cuh"

namespace linnet::cuda {
namespace {

// p = dout V^T and x = Q K^T [64, 64] of a chunk's tiles, by a warpgroup.
template <bool bf16, int K, int V>
__device__ __forceinline__ void multiply_pairs(float (&p)[32], float (&x)[32], const char* q_tile, const char* k_tile,
                                               const char* v_tile, const char* dout_tile) {
  const uint64_t q = ptx::descriptor_k_major(ptx::shared_address(q_tile), C, 0);
  const uint64_t k = ptx::descriptor_k_major(ptx::shared_address(k_tile), C, 0);
  const uint64_t v = ptx::descriptor_k_major(ptx::shared_address(v_tile), C, 0);
  const uint64_t dout = ptx::descriptor_k_major(ptx::shared_address(dout_tile), C, 0);
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < V / 16; ++kk) {
    ptx::wgmma_shared<bf16, false, false>(p, ptx::step_k_major(dout, C, kk), ptx::step_k_major(v, C, kk), kk > 0);
  }
#pragma unroll
  for (int kk = 0; kk < K / 16; ++kk) {
    ptx::wgmma_shared<bf16, false, false>(x, ptx::step_k_major(q, C, kk), ptx::step_k_major(k, C, kk), kk > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::hold(p);
  ptx::hold(x);
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
