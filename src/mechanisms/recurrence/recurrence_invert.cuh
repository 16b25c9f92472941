// (I + A)^-1 of a strictly lower 64 x 64 matrix in f32, by one warpgroup.
#pragma once

#include "mechanisms/recurrence/recurrence_tile.cuh"

namespace linnet::cuda {
namespace {

constexpr int kLine = 68;  // floats of a row of the inverse's scratch: 8 rows of a column lie in 8 banks

// x[rows of the block][its columns] = A -> (I + A)^-1 for the 16 x 16 block on the diagonal, by one warp: its two 8 x 8 blocks
// by substitution (a lane has a column), then X21 = -X22 (A21 X11), two neighbouring elements to a lane.
__device__ void invert_block(float (&x)[C][kLine], int first, int lane) {
  const int block = first + (lane & 8), own = lane & 7;
  float column[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float4 a[2] = {};
    if (i > 0) a[0] = *reinterpret_cast<const float4*>(&x[block + i][block]);
    if (i > 4) a[1] = *reinterpret_cast<const float4*>(&x[block + i][block + 4]);
    const float factor[8] = {a[0].x, a[0].y, a[0].z, a[0].w, a[1].x, a[1].y, a[1].z, a[1].w};
    float sum[2] = {};
#pragma unroll
    for (int j = 0; j < i; ++j) sum[j % 2] = fmaf(factor[j], column[j], sum[j % 2]);
    column[i] = i == own ? 1 : i > own ? -(sum[0] + sum[1]) : 0;
  }
  __syncwarp();
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[block + i][block + own] = column[i];
  }
  __syncwarp();
  const int row = lane / 4, at = lane % 4 * 2;
  // The block above the diagonal takes A21 X11, and is zero afterwards.
  const auto product = [&](const float* a, const float* b) {
    const float4 low = *reinterpret_cast<const float4*>(a), high = *reinterpret_cast<const float4*>(a + 4);
    const float factor[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float2 sum = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 y = *reinterpret_cast<const float2*>(b + j * kLine);
      sum.x = fmaf(factor[j], y.x, sum.x);
      sum.y = fmaf(factor[j], y.y, sum.y);
    }
    return sum;
  };
  float2& above = *reinterpret_cast<float2*>(&x[first + row][first + 8 + at]);
  above = product(&x[first + 8 + row][first], &x[first][first + at]);
  __syncwarp();
  const float2 sum = product(&x[first + 8 + row][first + 8], &x[first][first + 8 + at]);
  *reinterpret_cast<float2*>(&x[first + 8 + row][first + at]) = float2{-sum.x, -sum.y};
  __syncwarp();
  above = float2{0, 0};
}

// 16 x 8 tiles of sign * A B: rows of A from `a`, columns of B from `b`, 8 * kSteps of K; the tile goes to `to`. In f32 by
// three products of tf32 halves (the fourth, low times low, is below f32's rounding).
template <int kSteps>
__device__ __forceinline__ void multiply_tile(const float* a, const float* b, float* to, float sign, int lane) {
  float d[4] = {};
#pragma unroll 2
  for (int k = 0; k < kSteps; ++k) {
    float x[4], y[2];
    uint32_t x_high[4], x_low[4], y_high[2], y_low[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = a[(lane / 4 + i % 2 * 8) * kLine + 8 * k + lane % 4 + i / 2 * 4];
#pragma unroll
    for (int i = 0; i < 2; ++i) y[i] = b[(8 * k + lane % 4 + i * 4) * kLine + lane / 4];
      // The upper bits, and what they leave: exact, and the instruction cuts the rest off.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x_high[i] = __float_as_uint(x[i]) & 0xffffe000;
      x_low[i] = __float_as_uint(x[i] - __uint_as_float(x_high[i]));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      y_high[i] = __float_as_uint(y[i]) & 0xffffe000;
      y_low[i] = __float_as_uint(y[i] - __uint_as_float(y_high[i]));
    }
    ptx::mma_tf32(d, x_low, y_high);
    ptx::mma_tf32(d, x_high, y_low);
    ptx::mma_tf32(d, x_high, y_high);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    *reinterpret_cast<float2*>(&to[(lane / 4 + 8 * i) * kLine + lane % 4 * 2]) = float2{sign * d[2 * i], sign * d[2 * i + 1]};
  }
}

// (I + A)^-1 in place of A, strictly lower: 16 -> 32 -> 64 by X21 = -X22 (A21 X11). Blocks above the diagonal serve as scratch.
// 128 threads.
__device__ void invert(float (&x)[C][kLine], int thread) {
  const int warp = thread / 32, lane = thread % 32;
  invert_block(x, warp * 16, lane);
  ptx::group_sync<2, 128>();
  // Two pairs of 16, two warps each: 8 columns of 16.
  const int pair = warp / 2 * 32, part = warp % 2 * 8;
  multiply_tile<2>(&x[pair + 16][pair], &x[pair][pair + part], &x[pair][pair + 16 + part], 1, lane);
  ptx::group_sync<2, 128>();
  multiply_tile<2>(&x[pair + 16][pair + 16], &x[pair][pair + 16 + part], &x[pair + 16][pair + part], -1, lane);
  ptx::group_sync<2, 128>();
  // That scratch is now read as a part of X11 and X22, where it is zero.
  *reinterpret_cast<float4*>(&x[pair + thread % 64 / 4][pair + 16 + thread % 4 * 4]) = float4{0, 0, 0, 0};
  ptx::group_sync<2, 128>();
  // One pair of 32: a warp takes 16 rows x 16 columns.
  const int row = warp / 2 * 16, column = warp % 2 * 16;
#pragma unroll 1
  for (int c = 0; c < 16; c += 8) multiply_tile<4>(&x[32 + row][0], &x[0][column + c], &x[row][32 + column + c], 1, lane);
  ptx::group_sync<2, 128>();
#pragma unroll 1
  for (int c = 0; c < 16; c += 8)
    multiply_tile<4>(&x[32 + row][32], &x[0][32 + column + c], &x[32 + row][column + c], -1, lane);
  ptx::group_sync<2, 128>();
}

}  // namespace
}  // namespace linnet::cuda
