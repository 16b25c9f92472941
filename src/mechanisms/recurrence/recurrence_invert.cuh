// The first step of (I + A)^-1 of a strictly lower 64 x 64 matrix in f32: the 16 x 16 blocks on its diagonal.
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

}  // namespace
}  // namespace linnet::cuda
