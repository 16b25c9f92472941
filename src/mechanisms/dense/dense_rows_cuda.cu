// dense of few rows: the weights' bytes are all that costs. A block has 16 outputs and up to 64 rows of x; its 8 warps take
// turns at pieces of 32 inputs. A lane brings 16 bytes of two rows of the weight (8 neighbouring inputs of outputs l / 4 and 8
// below), which are the left operand of two products by mma.sync as they come: the order of the inputs inside a product is
// free, and the rows of x, the right operand, are read in the same order. So 1 KB of weights costs a warp 2 loads and 2
// products for each 8 rows. The warps' sums are added in order.
//
// x in f32 beside weights in bf16 is rounded once (`to_bf16`), or taken as three bf16 numbers, which is all of it.
#include "dense_cuda.h"
#include "mechanisms/shared/pieces.cuh"
#include "ptx/mma.cuh"

namespace linnet::cuda {
namespace {

constexpr int kWarps = 8, kOutputs = 16, kPiece = 32;

// Eight neighbouring numbers of a row of x as right operands of two products.
template <class X, class W, int planes>
__device__ __forceinline__ void load_row(const X* row, uint32_t (&b)[planes][4]) {
  if constexpr (std::is_same_v<X, W>) {
    const uint4 raw = *reinterpret_cast<const uint4*>(row);
    b[0][0] = raw.x, b[0][1] = raw.y, b[0][2] = raw.z, b[0][3] = raw.w;
  } else {
    const float4 low = *reinterpret_cast<const float4*>(row), high = *reinterpret_cast<const float4*>(row + 4);
    float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int p = 0; p < planes; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[p][i] = ptx::pack<true>(x[2 * i], x[2 * i + 1]);
        const float2 two = ptx::unpack<true>(b[p][i]);
        x[2 * i] -= two.x;
        x[2 * i + 1] -= two.y;
      }
    }
  }
}

template <class X, class W, int planes, int tiles>
__device__ void dense_rows(const DenseCall& d) {
  constexpr bool bf16 = std::is_same_v<W, __nv_bfloat16>;
  constexpr int kAtOnce = tiles > 2 ? 2 : 4;  // pieces on their way
  __shared__ float parts[kWarps][tiles][kOutputs][8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = static_cast<int>(d.x.size[2]);
  const int64_t outputs = d.weight.size[0], o0 = blockIdx.x * int64_t{kOutputs}, row0 = blockIdx.y * int64_t{8 * tiles};
  const int first = lane % 4 * 8;  // of the lane's inputs in a piece
  const W* weights[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    weights[i] = static_cast<const W*>(d.weight.data) + min(o0 + lane / 4 + 8 * i, outputs - 1) * d.weight.stride[0] + first;
  }
  const X* rows[tiles];
#pragma unroll
  for (int n = 0; n < tiles; ++n) {
    const int64_t row = min(row0 + 8 * n + lane / 4, d.rows - 1);
    rows[n] = static_cast<const X*>(d.x.data) + row / d.x.size[1] * d.x.stride[0] + row % d.x.size[1] * d.x.stride[1] + first;
  }
  float sums[tiles][4] = {};
  for (int k0 = warp * kPiece; k0 < width; k0 += kAtOnce * kWarps * kPiece) {
    uint4 w[kAtOnce][2] = {};
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int k = k0 + u * kWarps * kPiece;
      if (k + first >= width) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) w[u][i] = __ldg(reinterpret_cast<const uint4*>(weights[i] + k));
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int k = k0 + u * kWarps * kPiece;
      if (k >= width) break;  // the whole warp
      const uint32_t low[4] = {w[u][0].x, w[u][1].x, w[u][0].y, w[u][1].y};
      const uint32_t high[4] = {w[u][0].z, w[u][1].z, w[u][0].w, w[u][1].w};
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        uint32_t b[planes][4] = {};
        if (k + first < width) load_row<X, W, planes>(rows[n] + k, b);
#pragma unroll
        for (int p = planes - 1; p >= 0; --p) {
          ptx::mma<bf16>(sums[n], low, b[p][0], b[p][1]);
          ptx::mma<bf16>(sums[n], high, b[p][2], b[p][3]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < tiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) parts[warp][n][lane / 4 + (j & 2) * 4][lane % 4 * 2 + (j & 1)] = sums[n][j];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < tiles * 8 * kOutputs; i += kWarps * 32) {
    const int n = i / (8 * kOutputs), r = i / kOutputs % 8, o = i % kOutputs;
    const int64_t row = row0 + 8 * n + r;
    if (row >= d.rows || o0 + o >= outputs) continue;
    float sum = parts[0][n][o][r];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += parts[w][n][o][r];
    put(d.out, sum + get_or(0, d.bias, o0 + o), row / d.out.size[1], row % d.out.size[1], o0 + o);
  }
}

}  // namespace

#define LINNET_DENSE_ROWS(suffix, X, W, planes, tiles)                     \
  extern "C" __global__ void __launch_bounds__(256, tiles > 2 ? 2 : 3)     \
      dense_rows_##tiles##_##suffix(const __grid_constant__ DenseCall d) { \
    dense_rows<X, W, planes, tiles>(d);                                    \
  }
#define LINNET_DENSE_ROWS_OF(suffix, X, W, planes) \
  LINNET_DENSE_ROWS(suffix, X, W, planes, 1)       \
  LINNET_DENSE_ROWS(suffix, X, W, planes, 2)       \
  LINNET_DENSE_ROWS(suffix, X, W, planes, 8)
LINNET_DENSE_ROWS_OF(bf16, __nv_bfloat16, __nv_bfloat16, 1)
LINNET_DENSE_ROWS_OF(f16, __half, __half, 1)
LINNET_DENSE_ROWS_OF(rounded, float, __nv_bfloat16, 1)
LINNET_DENSE_ROWS_OF(whole, float, __nv_bfloat16, 3)

}  // namespace linnet::cuda
