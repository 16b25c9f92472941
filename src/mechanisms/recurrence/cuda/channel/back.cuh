// What the gradients with a decay per channel share (gla and KDA): f32 sums of tiles, pairs one by one, places in a chunk.
#pragma once

#include "mechanisms/recurrence/cuda/channel/channel.cuh"

namespace linnet::cuda {
namespace {

// The byte of element pair `pair` in a row of f32 sums, so that neither the accumulators of a warp nor its rows meet in a bank.
template <int K>
__device__ __forceinline__ uint32_t sums_byte(uint32_t row, uint32_t pair) {
  return row * (K * 4) + (pair ^ (row % 8 * 4)) * 8;
}
template <int K>
__device__ __forceinline__ void store_sums(const float (&x)[K / 2], char* tile, int thread) {
  const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int j = 0; j < K / 2; j += 2) {
    *reinterpret_cast<float2*>(tile + sums_byte<K>(row + ptx::Fragment::below(j), j / 4 * 4 + thread % 4)) =
        float2{x[j], x[j + 1]};
  }
}

// Two channels of rows of a result (heads as the call's), from a first row on.
struct PairRows {
  char* at = nullptr;  // absent: not wanted
  int64_t step = 0;
};
__device__ __forceinline__ PairRows pair_rows(const Rows& rows, int64_t b, int64_t token, int h, int channel) {
  if (rows.data == nullptr) return {};
  const int size = rows.dtype == Dtype::f32 ? 4 : 2;
  const int64_t place = b * rows.stride_b + token * rows.stride_t + h * rows.stride_h + channel;
  return {static_cast<char*>(const_cast<void*>(rows.data)) + place * size, rows.stride_t * size};
}
// `whole`: a pair may be stored at once. It and the type are the same for all threads.
__device__ __forceinline__ void store_pair(char* to, const Rows& rows, bool whole, float x, float y) {
  if (rows.dtype == Dtype::f32) {
    if (whole) {
      *reinterpret_cast<float2*>(to) = {x, y};
    } else {
      reinterpret_cast<float*>(to)[0] = x;
      reinterpret_cast<float*>(to)[1] = y;
    }
  } else {
    const uint32_t both = ptx::pack<true>(x, y);
    if (whole) {
      *reinterpret_cast<uint32_t*>(to) = both;
    } else {
      reinterpret_cast<uint16_t*>(to)[0] = static_cast<uint16_t>(both);
      reinterpret_cast<uint16_t*>(to)[1] = static_cast<uint16_t>(both >> 16);
    }
  }
}

// Pairs of one chunk one by one: with x_ij the weights of `pairs` below the diagonal, dq'_i = sum_j x_ij k_j exp(G_i - G_j) of
// kRows rows from `first` on, and dk'_j = sum_i x_ij q_i exp(G_i - G_j), two channels; every factor is at most 1.
template <int kRows>
__device__ void exact_pairs(const char* queries, const char* keys, const char* pairs, const char* gates, bool wide, int channel,
                            int first, int rows, float2 (&dq)[kRows], float2 (&dk)[kRows]) {
  const auto word = [&](const char* tile, int row) {
    return ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(tile + ptx::tile_byte(C, row, channel)));
  };
  const auto decay = [&](int row) {  // 1 behind the sequence
    const float2 g = row < rows ? gates_of(gates, wide, row, channel) : float2{0, 0};
    return float2{ptx::exp2_fast(g.x), ptx::exp2_fast(g.y)};
  };
  const auto pair = [&](int i, int j) {
    return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(pairs + ptx::tile_byte(C, i, j)));
  };
#pragma unroll
  for (int i = 0; i < kRows; ++i) dq[i] = dk[i] = {0, 0};
  float2 near = {1, 1};  // from row j to the last one before the block
#pragma unroll 1
  for (int j = first - 1; j >= 0; --j) {
    const float2 k = word(keys, j), a = decay(j);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float x = pair(first + i, j);
      dq[i] = {fmaf(x, k.x * near.x, dq[i].x), fmaf(x, k.y * near.y, dq[i].y)};
    }
    near = {near.x * a.x, near.y * a.y};
  }
  near = {1, 1};  // from the last row of the block to row i
#pragma unroll 1
  for (int i = first + kRows; i < C; ++i) {
    const float2 q = word(queries, i), a = decay(i);
    near = {near.x * a.x, near.y * a.y};
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float x = pair(i, first + j);
      if (x != 0) dk[j] = {fmaf(x, q.x * near.x, dk[j].x), fmaf(x, q.y * near.y, dk[j].y)};
    }
  }
  near = {1, 1};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float2 a = decay(first + i);
    near = {near.x * a.x, near.y * a.y};
    dq[i] = {dq[i].x * near.x, dq[i].y * near.y};
  }
  near = {1, 1};
#pragma unroll
  for (int j = kRows - 1; j >= 0; --j) {
    const float2 a = decay(first + j);
    dk[j] = {dk[j].x * near.x, dk[j].y * near.y};
    near = {near.x * a.x, near.y * a.y};
  }
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const float2 k = word(keys, first + j);
    float2 e = {1, 1};
#pragma unroll
    for (int i = j + 1; i < kRows; ++i) {
      const float2 a = decay(first + i), q = word(queries, first + i);
      const float x = pair(first + i, first + j);
      e = {e.x * a.x, e.y * a.y};
      if (x == 0) continue;  // behind the sequence
      dq[i] = {fmaf(x, k.x * e.x, dq[i].x), fmaf(x, k.y * e.y, dq[i].y)};
      dk[j] = {fmaf(x, q.x * e.x, dk[j].x), fmaf(x, q.y * e.y, dk[j].y)};
    }
  }
}

// Where a thread's rows, one of kBlocks blocks, stand in the chunk: sums of the gates of the blocks before and behind them.
struct Place {
  float2 before, behind, middle, late;  // middle: from the chunk's middle to the block's first row; late: from there to the end
};
template <int kBlocks, int K>
__device__ __forceinline__ Place place_of(const float (&totals)[kBlocks][K], int block, int channel) {
  constexpr int kMiddle = kBlocks / 2;
  Place p = {};
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const float2 x = *reinterpret_cast<const float2*>(&totals[j][channel]);
    const auto add = [&](float2& to, bool counts, float sign) {
      to = {to.x + (counts ? sign * x.x : 0), to.y + (counts ? sign * x.y : 0)};
    };
    add(p.before, j < block, 1);
    add(p.behind, j > block, 1);
    add(p.middle, j >= block && j < kMiddle, -1);
    add(p.middle, j >= kMiddle && j < block, 1);
    add(p.late, j >= kMiddle, 1);
  }
  return p;
}

}  // namespace
}  // namespace linnet::cuda
