// (I + A)^-1 of a strictly lower 64 x 64 matrix in f32.
#pragma once

#include "mechanisms/recurrence/cuda/tile/tile.cuh"

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

// 16 x 8 tiles of sign * A B, kTiles side by side: rows of A from `a`, columns of B from `b`, 8 * kSteps of K; to `to`. In f32
// by three products of tf32 halves (the fourth, low times low, is below f32's rounding).
template <int kSteps, int kTiles>
__device__ __forceinline__ void multiply_tiles(const float* a, const float* b, float* to, float sign, int lane) {
  float d[kTiles][4] = {};
  // The upper bits, and what they leave: exact, and the instruction cuts the rest off.
  const auto split = [](float x, uint32_t& high, uint32_t& low) {
    high = __float_as_uint(x) & 0xffffe000;
    low = __float_as_uint(x - __uint_as_float(high));
  };
#pragma unroll 2
  for (int k = 0; k < kSteps; ++k) {
    uint32_t x_high[4], x_low[4], y_high[2], y_low[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      split(a[(lane / 4 + i % 2 * 8) * kLine + 8 * k + lane % 4 + i / 2 * 4], x_high[i], x_low[i]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) split(b[(8 * k + lane % 4 + i * 4) * kLine + 8 * tile + lane / 4], y_high[i], y_low[i]);
      ptx::mma_tf32(d[tile], x_low, y_high);
      ptx::mma_tf32(d[tile], x_high, y_low);
      ptx::mma_tf32(d[tile], x_high, y_high);
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(&to[(lane / 4 + 8 * i) * kLine + 8 * tile + lane % 4 * 2]) =
          float2{sign * d[tile][2 * i], sign * d[tile][2 * i + 1]};
    }
  }
}

// (I + A)^-1 in place of A, strictly lower: 16 -> 32 -> 64 by X21 = -X22 (A21 X11). Blocks above the diagonal serve as scratch.
// A warpgroup.
__device__ void invert(float (&x)[C][kLine], int thread) {
  const int warp = thread / 32, lane = thread % 32;
  invert_block(x, warp * 16, lane);
  ptx::group_sync<2, 128>();
  // Two pairs of 16, two warps each: 8 columns of 16.
  const int pair = warp / 2 * 32, part = warp % 2 * 8;
  multiply_tiles<2, 1>(&x[pair + 16][pair], &x[pair][pair + part], &x[pair][pair + 16 + part], 1, lane);
  ptx::group_sync<2, 128>();
  multiply_tiles<2, 1>(&x[pair + 16][pair + 16], &x[pair][pair + 16 + part], &x[pair + 16][pair + part], -1, lane);
  ptx::group_sync<2, 128>();
  // That scratch is now read as a part of X11 and X22, where it is zero.
  *reinterpret_cast<float4*>(&x[pair + thread % 64 / 4][pair + 16 + thread % 4 * 4]) = float4{0, 0, 0, 0};
  ptx::group_sync<2, 128>();
  // One pair of 32: a warp takes 16 rows x 16 columns.
  const int row = warp / 2 * 16, column = warp % 2 * 16;
  multiply_tiles<4, 2>(&x[32 + row][0], &x[0][column], &x[row][32 + column], 1, lane);
  ptx::group_sync<2, 128>();
  multiply_tiles<4, 2>(&x[32 + row][32], &x[0][32 + column], &x[32 + row][column], -1, lane);
  ptx::group_sync<2, 128>();
}

}  // namespace
}  // namespace linnet::cuda
