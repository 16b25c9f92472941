// What the two walks of the delta rule with a decay per channel share (kda.h): segments, states in accumulators, and
// the roles of a block's warpgroups.
#pragma once

#include "mechanisms/recurrence/cuda/channel/channel.cuh"
#include "mechanisms/recurrence/cuda/kda/kda.h"
#include "mechanisms/recurrence/cuda/segment.cuh"

namespace linnet::cuda {
namespace {

constexpr int kFetched = 2;  // chunks in shared memory

// Whether the last (first) chunks of a segment forget what is before them.
__device__ __forceinline__ int32_t& forgets(const Kda& t, int64_t n, int h, int segment, bool first) {
  return t.forgets[((segment * 2 + (first ? 1 : 0)) * t.e.N + n) * t.e.H + h];
}

// Element j of a thread's accumulators: S^T has the 64 values of its group in rows, channels in columns.
__device__ __forceinline__ int state_channel(int j, int thread) { return ptx::Fragment{thread}.column(j); }
__device__ __forceinline__ int state_value(int j, int group, int thread) {
  return group * 64 + thread / 32 * 16 + thread % 32 / 4 + ptx::Fragment::below(j);
}
__device__ __forceinline__ float& state_element(const States& states, int64_t n, int h, int j, int group, int thread) {
  return states.data[n * states.stride_n + h * states.stride_h + state_channel(j, thread) * states.stride_row +
                     state_value(j, group, thread) * states.stride_column];
}
__device__ __forceinline__ void sync_values(int group) { group == 0 ? ptx::group_sync<3, 128>() : ptx::group_sync<4, 128>(); }

// N += A B, A the rounded accumulators of a product [64 values, 64 tokens], B = T or P as a whole tile.
__device__ __forceinline__ void multiply_lower(float (&N)[32], const uint32_t (&A)[32], uint32_t system, bool add) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    ptx::wgmma_tf32(N, A[4 * j], A[4 * j + 2], A[4 * j + 1], A[4 * j + 3], ptx::descriptor_k_major(system, C, j), add || j > 0);
  }
}

// A warpgroup for each 64 values walks, and one thread more fetches.
template <int D, class Shared, class Walks, class Fetches>
__device__ __forceinline__ void share_roles(Shared& s, const Walks& walks, const Fetches& fetches) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kFetched; ++i) {
      ptx::barrier_init(&s.full[i], 1);
      ptx::barrier_init(&s.empty[i], D / 64 * 128);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < D / 64 * 128) {
    if constexpr (D == 128) ptx::more_registers<240>();
    walks();
  } else {
    if constexpr (D == 128) ptx::fewer_registers<24>();
    if (threadIdx.x % 128 == 0) fetches();
  }
}

}  // namespace
}  // namespace linnet::cuda
