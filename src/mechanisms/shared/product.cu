// Products of strided matrices (product.h): tiles of 64 x 64, 16 terms at a time, 4 x 4 sums to a thread.
#include "mechanisms/shared/pieces.cuh"
#include "mechanisms/shared/product.h"

namespace linnet::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16;

// to[k][i] = matrix(i0 + i, k0 + k), along the memory; zeros outside.
template <bool k_first>
__device__ __forceinline__ void load_tile(const Matrix& m, int64_t base, int64_t i0, int64_t rows, int64_t k0, int64_t k1,
                                          int64_t step_i, int64_t step_k, const uint8_t* mask, float (&to)[kDepth][kTile + 4]) {
  for (int e = threadIdx.x; e < kTile * kDepth; e += 256) {
    const int i = k_first ? e / kDepth : e % kTile, k = k_first ? e % kDepth : e / kTile;
    const bool there = i0 + i < rows && k0 + k < k1 && (mask == nullptr || mask[k0 + k] != 0);
    to[k][i] = there ? ptx::load(m.data, m.dtype, base + (i0 + i) * step_i + (k0 + k) * step_k) : 0;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) product(const __grid_constant__ Product p) {
  __shared__ __align__(16) float a[kDepth][kTile + 4], b[kDepth][kTile + 4];
  const int64_t across = (p.N + kTile - 1) / kTile, down = (p.M + kTile - 1) / kTile, tiles = across * down;
  const int64_t tile = blockIdx.x % tiles, unit = blockIdx.x / tiles, head = unit % p.H, batch = unit / p.H;
  const int64_t i0 = tile / across * kTile, j0 = tile % across * kTile;
  const int64_t share = (p.K + p.slices - 1) / p.slices, first = blockIdx.y * share, last = min(p.K, first + share);
  const int64_t a_base = batch * p.a.batch + head * p.a.head, b_base = batch * p.b.batch + head * p.b.head;
  const uint8_t* mask = p.mask == nullptr ? nullptr : p.mask + batch * p.mask_stride;
  const int tx = threadIdx.x % 16 * 4, ty = threadIdx.x / 16 * 4;
  float sums[4][4] = {};
  for (int64_t k0 = first; k0 < last; k0 += kDepth) {
    if (p.a.column == 1) {
      load_tile<true>(p.a, a_base, i0, p.M, k0, last, p.a.row, p.a.column, mask, a);
    } else {
      load_tile<false>(p.a, a_base, i0, p.M, k0, last, p.a.row, p.a.column, mask, a);
    }
    if (p.b.row == 1) {
      load_tile<true>(p.b, b_base, j0, p.N, k0, last, p.b.column, p.b.row, mask, b);
    } else {
      load_tile<false>(p.b, b_base, j0, p.N, k0, last, p.b.column, p.b.row, mask, b);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const float4 x = *reinterpret_cast<const float4*>(&a[k][ty]), y = *reinterpret_cast<const float4*>(&b[k][tx]);
      const float left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
      }
    }
    __syncthreads();
  }
  const int64_t base = batch * p.c.batch + head * p.c.head + blockIdx.y * p.slice_stride;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      if (i0 + ty + i < p.M && j0 + tx + j < p.N) {
        ptx::store(const_cast<void*>(p.c.data), p.c.dtype, base + (i0 + ty + i) * p.c.row + (j0 + tx + j) * p.c.column,
                   sums[i][j]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) column_sums(const float* x, int64_t rows, int64_t columns, float* parts) {
  __shared__ double sums[8][32];
  const int lane = threadIdx.x % 32, slot = threadIdx.x / 32;
  const int64_t column = blockIdx.x * 32ll + lane, share = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share;
  double sum = 0;
  for (int64_t row = first + slot; row < min(rows, first + share); row += 8) {
    if (column < columns) sum += x[row * columns + column];
  }
  sums[slot][lane] = sum;
  __syncthreads();
  if (slot != 0 || column >= columns) return;
  for (int i = 1; i < 8; ++i) sum += sums[i][lane];
  parts[blockIdx.y * columns + column] = static_cast<float>(sum);
}

}  // namespace linnet::cuda
