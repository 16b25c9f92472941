// What the kernels of chunks on the multiply-add units share: where a block's chunk lies, and its rows in shared memory.
#pragma once

#include "mechanisms/recurrence/cuda/chunk/chunk.h"
#include "mechanisms/recurrence/cuda/map.cuh"

namespace linnet::cuda {
namespace {

constexpr int C = 64, kThreads = 256;

struct Place {
  int64_t n, b, begin, slot;  // sequence, batch row, first token of the chunk, place of its state
  int h, rows;                // tokens
};
__device__ bool find_place(const Engine& e, Place* p) {
  p->h = blockIdx.x % e.H;
  p->n = blockIdx.x / e.H;
  p->b = e.offsets == nullptr ? p->n : 0;
  const int64_t first = e.offsets == nullptr ? 0 : offset(e, p->n), end = e.offsets == nullptr ? e.T : offset(e, p->n + 1);
  p->begin = first + static_cast<int64_t>(blockIdx.y) * C;
  p->slot = saved_slot(e, p->n, first, blockIdx.y);
  p->rows = static_cast<int>(min(static_cast<int64_t>(C), end - p->begin));
  return p->rows > 0;
}

// Whether a token of the chunk writes: what it holds otherwise may be no number.
__device__ __forceinline__ bool writes(const Engine& e, const Place& p, int row) {
  return e.write_mask == nullptr || e.write_mask[p.b * e.mask_stride_b + p.begin + row] != 0;
}

__device__ __forceinline__ float4 load_four(const Rows& rows, int64_t place, int count, bool vectors) {
  float x[4];
  if (vectors && count >= 4) {
    if (rows.dtype == Dtype::f32) return *reinterpret_cast<const float4*>(static_cast<const float*>(rows.data) + place);
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(rows.data) + place);
    const bool bf16 = rows.dtype == Dtype::bf16;
    const float2 low = bf16 ? ptx::unpack<true>(raw.x) : ptx::unpack<false>(raw.x);
    const float2 high = bf16 ? ptx::unpack<true>(raw.y) : ptx::unpack<false>(raw.y);
    return {low.x, low.y, high.x, high.y};
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = i < count ? ptx::load(rows.data, rows.dtype, place + i) : 0;
  return {x[0], x[1], x[2], x[3]};
}

// to [64, stride] = the chunk's rows, mapped, times factor(row), 0 where that is 0 whatever the row holds; zeros outside of
// [rows, width].
template <int W, class Factor>
__device__ __forceinline__ void load_rows(const Rows& from, const Place& p, int width, bool vectors, float* to, int stride,
                                          const Factor& factor) {
#pragma unroll 4
  for (int i = threadIdx.x; i < C * W / 4; i += kThreads) {
    const int row = i / (W / 4), c = i % (W / 4) * 4;
    float4 x = {0, 0, 0, 0};
    if (row < p.rows && c < width) {
      x = load_four(from, row_of(from, p.b, p.begin + row, p.h) + c, width - c, vectors);
      if (from.map != Map::identity) {
        x = {apply(from.map, x.x), c + 1 < width ? apply(from.map, x.y) : 0, c + 2 < width ? apply(from.map, x.z) : 0,
             c + 3 < width ? apply(from.map, x.w) : 0};
      }
      const float f = factor(row);
      x = f == 0 ? float4{0, 0, 0, 0} : float4{f * x.x, f * x.y, f * x.z, f * x.w};
    }
    *reinterpret_cast<float4*>(to + row * stride + c) = x;
  }
}

}  // namespace
}  // namespace linnet::cuda
