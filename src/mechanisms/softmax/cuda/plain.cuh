// Softmax attention in f32 on the multiply-add units, for tensors of any type and any width: tiles of 64 rows by 64 keys, a
// thread for 4 x 4 of them (rows and columns 16 apart). Products go over 32 channels at a time; a block has one slice of 64
// channels of its result, and makes the weights anew for every slice.
#pragma once

#include "mechanisms/softmax/cuda/attend.cuh"

namespace linnet::cuda {

inline constexpr int kPlainChannels = 32;
struct PlainMemory {
  float left[64][kPlainChannels + 1], right[64][kPlainChannels + 1];  // operands of products over channels
  float weights[64][65], rows[64][kAttendSlice];                      // operands of products over rows
};

struct Thread {
  int y = threadIdx.x / 16, x = threadIdx.x % 16;
};

// s[a][b] = sum_c left(y + 16 a, c) right(x + 16 b, c) over `width` channels.
template <class Left, class Right>
__device__ __forceinline__ void plain_products(PlainMemory& m, float (&s)[4][4], const Left& left, const Right& right,
                                               int width) {
  const Thread thread;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
#pragma unroll
    for (int b = 0; b < 4; ++b) s[a][b] = 0;
  }
  for (int c0 = 0; c0 < width; c0 += kPlainChannels) {
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * kPlainChannels; i += kPlainThreads) {
      const int r = i / kPlainChannels, c = i % kPlainChannels;
      m.left[r][c] = c0 + c < width ? left(r, c0 + c) : 0;
      m.right[r][c] = c0 + c < width ? right(r, c0 + c) : 0;
    }
    __syncthreads();
#pragma unroll 8
    for (int c = 0; c < kPlainChannels; ++c) {
      float l[4], r[4];
#pragma unroll
      for (int a = 0; a < 4; ++a) l[a] = m.left[thread.y + 16 * a][c];
#pragma unroll
      for (int b = 0; b < 4; ++b) r[b] = m.right[thread.x + 16 * b][c];
#pragma unroll
      for (int a = 0; a < 4; ++a) {
#pragma unroll
        for (int b = 0; b < 4; ++b) s[a][b] = fmaf(l[a], r[b], s[a][b]);
      }
    }
  }
}
// The same of rows of tensors; left_at(r), right_at(r): where row r lies in its tensor, or -1.
template <class Left, class Right>
__device__ __forceinline__ void plain_products(PlainMemory& m, float (&s)[4][4], const AttendRows& left, const Left& left_at,
                                               const AttendRows& right, const Right& right_at, int width) {
  const auto number = [](const AttendRows& x, int64_t row, int c) {
    return row >= 0 ? ptx::load(x.data, x.dtype, row + c) : 0.0f;
  };
  plain_products(
      m, s, [&](int r, int c) { return number(left, left_at(r), c); },
      [&](int r, int c) { return number(right, right_at(r), c); }, width);
}
// rows[r][c] = channel first + c of row r, zeros where there is none. Whether this thread met a number that is not finite.
template <class At>
__device__ __forceinline__ bool plain_rows(PlainMemory& m, const AttendRows& x, int width, int first, const At& at) {
  bool wild = false;
  for (int i = threadIdx.x; i < 64 * kAttendSlice; i += kPlainThreads) {
    const int r = i / kAttendSlice, c = first + i % kAttendSlice;
    const int64_t row = at(r);
    const float number = row >= 0 && c < width ? ptx::load(x.data, x.dtype, row + c) : 0;
    m.rows[r][i % kAttendSlice] = number;
    wild |= !(number - number == 0);
  }
  return wild;
}
// sum[a][b] += sum_r weights[y + 16 a][r] rows[r][x + 16 b]; transposed: weights[r][y + 16 a].
template <bool transposed>
__device__ __forceinline__ void plain_sums(const PlainMemory& m, float (&sum)[4][4]) {
  const Thread thread;
#pragma unroll 8
  for (int r = 0; r < 64; ++r) {
    float w[4], x[4];
#pragma unroll
    for (int a = 0; a < 4; ++a) w[a] = transposed ? m.weights[r][thread.y + 16 * a] : m.weights[thread.y + 16 * a][r];
#pragma unroll
    for (int b = 0; b < 4; ++b) x[b] = m.rows[r][thread.x + 16 * b];
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
      for (int b = 0; b < 4; ++b) sum[a][b] = fmaf(w[a], x[b], sum[a][b]);
    }
  }
}
// The same without what weights of 0 would make of numbers that are not finite.
template <bool transposed>
__device__ __forceinline__ void plain_sums_seen(const PlainMemory& m, float (&sum)[4][4]) {
  const Thread thread;
  for (int r = 0; r < 64; ++r) {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const float w = transposed ? m.weights[r][thread.y + 16 * a] : m.weights[thread.y + 16 * a][r];
#pragma unroll
      for (int b = 0; b < 4; ++b) sum[a][b] = w == 0 ? sum[a][b] : fmaf(w, m.rows[r][thread.x + 16 * b], sum[a][b]);
    }
  }
}
__device__ __forceinline__ void keep_weights(PlainMemory& m, const float (&s)[4][4]) {
  const Thread thread;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
#pragma unroll
    for (int b = 0; b < 4; ++b) m.weights[thread.y + 16 * a][thread.x + 16 * b] = s[a][b];
  }
}
// Over the 16 threads of a row.
__device__ __forceinline__ float row_most(float x) {
#pragma unroll
  for (int step = 1; step < 16; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

// The rows and keys of a block.
struct PlainTile {
  const Attend& p;
  const Place& place;
  int32_t first_row;
  __device__ __forceinline__ RowPlace row(int r) const { return row_place(p, place, first_row + r); }
  __device__ __forceinline__ int64_t row_of(const AttendRows& x, int r) const {
    const RowPlace each = row(r);
    return each.there ? row_at(x, place.seq, each) : -1;
  }
  __device__ __forceinline__ int64_t key_of(const AttendRows& x, int32_t j) const {
    return j < place.seq.n ? key_at(p, x, place, j) : -1;
  }
};

// The logits of the block's rows and keys j0 .., -inf where masked; slope where wanted.
template <bool slopes>
__device__ __forceinline__ void plain_logits(PlainMemory& m, const PlainTile& tile, int32_t j0, float (&s)[4][4],
                                             float (&slope)[4][4]) {
  const Attend& p = tile.p;
  const Thread thread;
  plain_products(
      m, s, p.q, [&](int r) { return tile.row_of(p.q, r); }, p.k, [&](int r) { return tile.key_of(p.k, j0 + r); }, p.K);
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const RowPlace row = tile.row(thread.y + 16 * a);
    const SeenKeys seen = seen_keys(p.mask, row.t, row.there ? tile.place.seq.n : 0);
    const int64_t bias = bias_row(p, tile.place.seq, row);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int32_t j = j0 + thread.x + 16 * b;
      float2 x = {-infinity(), 0};
      if (seen.has(j)) x = p.hooked ? logit(p, s[a][b], bias, tile.place.seq.k0 + j) : make_float2(s[a][b] * p.scale, 1);
      s[a][b] = x.x;
      if constexpr (slopes) slope[a][b] = x.y;
    }
  }
}

}  // namespace linnet::cuda
