// What the walks of the delta rules share, whatever their decays (Delta, Kda): the segments of a long sequence, each of which
// has a length of its own, and the product with T^T.
#pragma once

#include "mechanisms/recurrence/cuda/tile/tile.cuh"

namespace linnet::cuda {
namespace {

// The chunks of a segment; cut: whether the sequence is cut at all where it is long.
template <class Rule>
__device__ inline Walk segment_of(const Rule& rule, int64_t n, int segment, bool cut = true) {
  Walk w = walk_of(rule.e, n, 0, false);
  const int chunks = w.count, part = static_cast<int>(rule.segment / C);
  const int segments = !cut || w.length <= kLongest ? 1 : (chunks + part - 1) / part;
  if (segments > 1) {
    w.first = segment * part;
    w.count = min(chunks, w.first + part) - w.first;
  }
  if (segment >= segments) w.count = 0;
  w.starts = segment == 0;
  w.ends = segment == segments - 1;
  return w;
}

// N (+)= A T: A the rounded accumulators of a product [64 values, 64 tokens], T^T a tile in tf32 as it is kept: its first 32
// columns have 32 rows alone, since the others are zero.
__device__ __forceinline__ void multiply_upper(float (&N)[32], const uint32_t (&A)[32], uint32_t system, bool add) {
#pragma unroll
  for (int j = 4; j < 8; ++j) {
    ptx::wgmma_tf32(N, A[4 * j], A[4 * j + 2], A[4 * j + 1], A[4 * j + 3], ptx::descriptor_k_major(system + 4096, C, j - 4),
                    add || j > 4);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    ptx::wgmma_tf32_half(N, A[4 * j], A[4 * j + 2], A[4 * j + 1], A[4 * j + 3], ptx::descriptor_k_major(system, C, j), true);
  }
}

}  // namespace
}  // namespace linnet::cuda
