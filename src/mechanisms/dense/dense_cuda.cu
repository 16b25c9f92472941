// dense without cuBLAS: few rows, where the weights' bytes are all that costs; and tiles of 64 x 64 for everything else, in
// f32.
#include "dense_cuda.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

constexpr int kColumns = 1024;  // of x that a block keeps in shared memory
constexpr int kTile = 64, kDepth = 16;

__device__ __forceinline__ float input(const DenseCall& d, int64_t row, int64_t i) {
  const float x = get(d.x, row / d.x.size[1], row % d.x.size[1], i);
  return d.to_bf16 ? __bfloat162float(__float2bfloat16_rn(x)) : x;
}

// A warp has one output, 8 the block; R rows of x.
template <class T, int R>
__device__ void few_rows(const DenseCall& d) {
  constexpr int W = ptx::kVector<T>;
  __shared__ float x[R][kColumns];
  const int lane = threadIdx.x % 32, width = static_cast<int>(d.x.size[2]);
  const int64_t row0 = blockIdx.y * int64_t{R};
  const int64_t o = blockIdx.x * 8ll + threadIdx.x / 32, outputs = d.weight.size[0];
  const T* weights = static_cast<const T*>(d.weight.data) + (o < outputs ? place(d.weight, o) : 0);
  float sums[R] = {};
  for (int first = 0; first < width; first += kColumns) {
    const int count = min(kColumns, width - first);
    __syncthreads();
    for (int i = threadIdx.x; i < R * kColumns; i += 256) {
      const int row = i / kColumns, c = i % kColumns;
      x[row][c] = row0 + row < d.rows && c < count ? input(d, row0 + row, first + c) : 0;
    }
    __syncthreads();
    if (o >= outputs) continue;
#pragma unroll 4
    for (int c = lane * W; c < count; c += 32 * W) {
      float w[W];
      load_piece<T>(weights + first, c, count, d.whole, w);
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int i = 0; i < W; ++i) sums[r] = fmaf(w[i], x[r][c + i], sums[r]);
      }
    }
  }
  const float bias = o < outputs ? get_or(0, d.bias, o) : 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float sum = ptx::sum_lanes<32>(sums[r]) + bias;
    const int64_t row = row0 + r;
    if (lane == 0 && o < outputs && row < d.rows) put(d.out, sum, row / d.out.size[1], row % d.out.size[1], o);
  }
}

}  // namespace

#define LINNET_FEW_ROWS(suffix, T, R)                                                                              \
  extern "C" __global__ void __launch_bounds__(256) few_rows_##R##_##suffix(const __grid_constant__ DenseCall d) { \
    few_rows<T, R>(d);                                                                                             \
  }
LINNET_FEW_ROWS(f32, float, 1)
LINNET_FEW_ROWS(bf16, __nv_bfloat16, 1)
LINNET_FEW_ROWS(f16, __half, 1)
LINNET_FEW_ROWS(f32, float, 8)
LINNET_FEW_ROWS(bf16, __nv_bfloat16, 8)
LINNET_FEW_ROWS(f16, __half, 8)

extern "C" __global__ void __launch_bounds__(256) dense_tile(const __grid_constant__ DenseCall d) {
  __shared__ float x[kDepth][kTile + 4], w[kDepth][kTile + 4];
  const int64_t row0 = blockIdx.x * int64_t{kTile}, o0 = blockIdx.y * int64_t{kTile};
  const int64_t outputs = d.weight.size[0], width = d.x.size[2];
  const int tx = threadIdx.x % 16 * 4, ty = threadIdx.x / 16 * 4;
  float sums[4][4] = {};
  for (int64_t k0 = 0; k0 < width; k0 += kDepth) {
    for (int i = threadIdx.x; i < kTile * kDepth; i += 256) {
      const int r = i / kDepth, k = i % kDepth;
      x[k][r] = row0 + r < d.rows && k0 + k < width ? input(d, row0 + r, k0 + k) : 0;
      w[k][r] = o0 + r < outputs && k0 + k < width ? get(d.weight, o0 + r, k0 + k) : 0;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(x[k][ty + i], w[k][tx + j], sums[i][j]);
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      const int64_t row = row0 + ty + i, o = o0 + tx + j;
      if (row < d.rows && o < outputs) {
        put(d.out, sums[i][j] + get_or(0, d.bias, o), row / d.out.size[1], row % d.out.size[1], o);
      }
    }
  }
}

// out = bias, for cuBLAS to add to.
extern "C" __global__ void __launch_bounds__(256) fill_bias(const __grid_constant__ DenseCall d) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x, outputs = d.weight.size[0], row = i / outputs;
  if (row < d.rows) put(d.out, get(d.bias, i % outputs), row / d.out.size[1], row % d.out.size[1], i % outputs);
}

}  // namespace linnet::cuda
