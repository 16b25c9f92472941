// Where the kernels of the delta rules find their chunks (delta.h).
#pragma once

#include "mechanisms/recurrence/cuda/delta/delta.h"
#include "mechanisms/recurrence/cuda/segment.cuh"

namespace linnet::cuda {
namespace {

__device__ __forceinline__ int64_t slot_of(const Engine& e, int64_t n, const Walk& w, int chunk) {
  return e.offsets != nullptr ? w.begin / C + n + chunk : n * ((e.T + C - 1) / C) + chunk;
}

// The sequence and the chunk of a slot; chunk < 0: the slot is not used.
struct Place {
  int64_t n;
  int chunk;
};
__device__ inline Place place_of(const Engine& e, int64_t slot) {
  if (e.offsets == nullptr) {  // slots are counted by a grid, in 32 bits
    const auto at = static_cast<uint32_t>(slot), chunks = static_cast<uint32_t>((e.T + C - 1) / C);
    return {at / chunks, static_cast<int>(at % chunks)};
  }
  int64_t low = 0, high = e.N - 1;  // the last sequence that begins at this slot or before
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (offset(e, middle) / C + middle <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t begin = offset(e, low), end = offset(e, low + 1), chunk = slot - begin / C - low;
  return {low, chunk >= 0 && chunk * C < end - begin ? static_cast<int>(chunk) : -1};
}

// For gradients, a beta of 0 counts as this: what is divided by it again must not be lost.
constexpr float kLeastBeta = 0x1p-60f;
__device__ __forceinline__ float inverse_of(float beta) { return beta == 0 ? 1 / kLeastBeta : 1 / beta; }

// The scale is a power of two times a unit in [1, 2): the gradient of the state is in that unit, so that the rows of dout are
// multiplied by the power alone, and as operands stay as they are.
__device__ __forceinline__ float power_of(float scale) {
  const float power = __uint_as_float(__float_as_uint(scale) & 0xff800000);
  return power == 0 ? scale : power;  // 0, and what is almost
}
__device__ __forceinline__ float unit_of_scale(float scale) { return scale == 0 ? 1 : scale / power_of(scale); }

// What rounding took from one number is added to the next one of a sum where it is small beside it, so that the sum of the
// rounded numbers is that of the numbers to one rounding. Zeros stay.
__device__ __forceinline__ float settle(float x, float left, float most) {
  return fabsf(left) <= fabsf(x) * most ? x + left : x;
}

// The factors of a chunk's rows from the sums of its decays, by one warp.
template <class Gates>
__device__ __forceinline__ void store_factors(const Sums& G, int lane, Gates& gates) {
  gates.read[lane] = expf(G.low);
  gates.read[lane + 32] = expf(G.high);
  gates.write[lane] = expf(G.all - G.low);
  gates.write[lane + 32] = expf(G.all - G.high);
}

// The barriers of a walk, whichever its direction. By all threads; a stage is left by the state groups (`consumers`) and
// `others`.
template <class Shared>
__device__ __forceinline__ void begin_walk(Shared& s, const Walk& w, int consumers, int others) {
  if (threadIdx.x == 0) {
    s.walk = w;
    for (uint64_t& barrier : s.full) ptx::barrier_init(&barrier, 1);
    for (uint64_t& barrier : s.empty) ptx::barrier_init(&barrier, consumers + others);
    for (uint64_t& barrier : s.t_full) ptx::barrier_init(&barrier, 1);
    for (uint64_t& barrier : s.t_empty) ptx::barrier_init(&barrier, consumers);
    for (uint64_t& barrier : s.p_full) ptx::barrier_init(&barrier, 128);
    for (uint64_t& barrier : s.p_empty) ptx::barrier_init(&barrier, consumers);
    ptx::barrier_init_fence();
  }
  ptx::fence_async_shared();
  __syncthreads();
}

// The threads of one state group.
__device__ __forceinline__ void sync_state(int group) { group == 0 ? ptx::group_sync<3, 128>() : ptx::group_sync<4, 128>(); }

// Rows [64 group, 64 group + 64) of S^T, packed as an operand, to the image of a tile [D][D] in memory; by the way of `tile`.
template <int D>
__device__ __forceinline__ void store_state(char* image, const uint32_t (&A)[D / 4], int group, char* tile) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  if (thread == 0) ptx::wait_stores_read();
  sync_state(group);
  const uint32_t to = ptx::shared_address(tile);
#pragma unroll
  for (int j = 0; j < D / 4; j += 4) {
    const int row = 16 * warp + lane / 8 % 2 * 8 + lane % 8, column = 4 * j + lane / 16 * 8;
    ptx::store_matrices(to + ptx::tile_byte(64, row, column), A[j], A[j + 1], A[j + 2], A[j + 3]);
  }
  ptx::fence_async_shared();
  sync_state(group);
  if (thread == 0) {
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel) {
      ptx::store_bytes(image + panel * D * 128 + group * kPanel, tile + panel * kPanel, kPanel);
    }
  }
}

// Two neighbouring tokens of a channel, as 16-bit numbers; with `settled` the sum of four tokens, of which the lane beside has
// the others, is rounded once (settle). Gradients of decays are sums over tokens in which, with keys that are alike, the terms
// cancel and their roundings would not.
template <bool bf16, bool settled>
__device__ __forceinline__ uint32_t pack_tokens(float x, float y) {
  if constexpr (!settled) return ptx::pack<bf16>(x, y);
  constexpr float kMost = 0x1p-6f;
  y = settle(y, x - ptx::unpack<bf16>(ptx::pack<bf16>(x, 0)).x, kMost);
  uint32_t packed = ptx::pack<bf16>(x, y);
  const float left = __shfl_xor_sync(0xffffffff, y - ptx::unpack<bf16>(packed).y, 1);
  if (threadIdx.x % 2 == 1) packed = ptx::pack<bf16>(x, settle(y, left, kMost));
  return packed;
}

// X^T [64 value channels of this group, 64 tokens] to panel `group` of the image of a tile [64 tokens][D]; by the way of
// `tile`, which is not the one of store_state.
template <bool bf16, bool settled>
__device__ __forceinline__ void store_chunk(char* image, const float (&x)[32], int group, char* tile) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  if (thread == 0) ptx::wait_stores_read();
  sync_state(group);
  const uint32_t to = ptx::shared_address(tile);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int token = 8 * (j + lane / 16) + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
    const float* y = x + 4 * j;
    ptx::store_matrices_transposed(to + ptx::tile_byte(C, token, channel), pack_tokens<bf16, settled>(y[0], y[1]),
                                   pack_tokens<bf16, settled>(y[2], y[3]), pack_tokens<bf16, settled>(y[4], y[5]),
                                   pack_tokens<bf16, settled>(y[6], y[7]));
  }
  ptx::fence_async_shared();
  sync_state(group);
  if (thread == 0) ptx::store_bytes(image + group * kPanel, tile, kPanel);
}

}  // namespace
}  // namespace linnet::cuda
