// What the kernels of the gradient of one decay for all channels of a head share: the pairs inside a chunk.
#pragma once

#include "mechanisms/recurrence/cuda/tile/dg.cuh"
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

}  // namespace
}  // namespace linnet::cuda
