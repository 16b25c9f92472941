// Rows of a chunk in and out of a warpgroup's accumulators [64 value channels, 64 tokens]: results to memory, gated or with
// what mamba_ssd adds to them, and the state as an operand for the gradients.
#pragma once

#include "mechanisms/recurrence/cuda/tile/decays.cuh"

namespace linnet::cuda {
namespace {

// What lies behind the sequence counts as zero, NaN or not: in K and V, whose rows a product sums over. By all state groups.
template <int K, int V>
__device__ __forceinline__ void clear_rows(char* k, char* v, int rows, int thread) {
  constexpr int kThreads = V / 64 * 128, kPieces = (K + V) / 8;
  for (int piece = thread; piece < (C - rows) * kPieces; piece += kThreads) {
    const int token = rows + piece / kPieces, column = piece % kPieces * 8;
    char* at = column < K ? k + ptx::tile_byte(C, token, column) : v + ptx::tile_byte(C, token, column - K);
    *reinterpret_cast<uint4*>(at) = uint4{0, 0, 0, 0};
  }
  ptx::fence_async_shared();
  ptx::group_sync<2, kThreads>();
}

// out = o z sigmoid(z) of 8 channels.
template <bool bf16>
__device__ __forceinline__ void gate_row(uint4& o, const uint4& z) {
  uint32_t* const out = &o.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 y = ptx::unpack<bf16>(out[i]), gate = ptx::unpack<bf16>((&z.x)[i]);
    out[i] = ptx::pack<bf16>(y.x * __fdividef(gate.x, 1 + __expf(-fmaxf(gate.x, -80))),
                             y.y * __fdividef(gate.y, 1 + __expf(-fmaxf(gate.y, -80))));
  }
}

// O^T += D V^T: V's tile holds this warp's 16 channels in the places of the sums.
template <bool bf16>
__device__ __forceinline__ void add_skip(float (&O)[32], const float (&skip)[2], uint32_t v, int warp, int lane) {
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    const int token = 16 * kk + lane / 16 * 8 + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
    uint32_t values[4];
    ptx::load_matrices_transposed(values, v + ptx::tile_byte(C, token, channel));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = ptx::unpack<bf16>(values[j]);
      float* o = O + 8 * kk + 2 * j;
      o[0] = fmaf(skip[j & 1], x.x, o[0]);
      o[1] = fmaf(skip[j & 1], x.y, o[1]);
    }
  }
}

// The first `left` of these sums are those that this lane and its neighbour 2 left lanes away still have together.
template <int left>
__device__ __forceinline__ void halve(float (&sums)[16], int lane) {
  const bool upper = (lane & (2 * left)) != 0;
#pragma unroll
  for (int i = 0; i < left; ++i) {
    const float sent = upper ? sums[i] : sums[i + left], kept = upper ? sums[i + left] : sums[i];
    sums[i] = kept + __shfl_xor_sync(0xffffffff, sent, 2 * left);
  }
}

// mamba_ssd's dv, O^T = dv^T [64 value channels of this warpgroup, 64 tokens], with the rows x of these tokens, 16 bytes of a
// token each, and dy in the tile v: O^T becomes dx, dots gets dv . x of the tokens over each warp's 16 channels, and dD the
// sums of dy x over the tokens. `tile` is as free as store_rows wants it, which may follow at once: a warp reads and writes its
// own 16 channels.
template <bool bf16>
__device__ __forceinline__ void finish_steps(float (&O)[32], const uint4 (&x)[4], const float (&skip)[2], const float* weight,
                                             uint32_t v, char* tile, int group, int rows, float (&dD)[2], float* dots) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    *reinterpret_cast<uint4*>(tile + ptx::tile_byte(C, 16 * j + thread / 8, thread % 8 * 8)) = x[j];
  }
  group == 0 ? ptx::group_sync<3, 128>() : ptx::group_sync<4, 128>();
  float sums[16];
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    const int token = 16 * kk + lane / 16 * 8 + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
    uint32_t inputs[4], given[4];
    ptx::load_matrices_transposed(inputs, ptx::shared_address(tile) + ptx::tile_byte(C, token, channel));
    ptx::load_matrices_transposed(given, v + ptx::tile_byte(C, token, channel));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 size = *reinterpret_cast<const float2*>(weight + ptx::Fragment{lane}.operand_pair(kk, 2 * half));
      float* o = O + 8 * kk + 4 * half;
      float dot[2] = {};
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float2 from = ptx::unpack<bf16>(inputs[2 * half + row]), dy = ptx::unpack<bf16>(given[2 * half + row]);
        dot[0] = fmaf(o[2 * row], from.x, dot[0]);
        dot[1] = fmaf(o[2 * row + 1], from.y, dot[1]);
        dD[row] = fmaf(dy.x, from.x, fmaf(dy.y, from.y, dD[row]));
        o[2 * row] = fmaf(size.x, o[2 * row], skip[row] * dy.x);
        o[2 * row + 1] = fmaf(size.y, o[2 * row + 1], skip[row] * dy.y);
      }
      sums[4 * kk + 2 * half] = dot[0];
      sums[4 * kk + 2 * half + 1] = dot[1];
    }
  }
  // Over the 8 lanes of a column: each step halves the columns that a lane still has, and leaves it tokens 2 lane and the next.
  halve<8>(sums, lane);
  halve<4>(sums, lane);
  halve<2>(sums, lane);
  if (2 * lane < rows) dots[2 * lane] = sums[0];
  if (2 * lane + 1 < rows) dots[2 * lane + 1] = sums[1];
}

// 16 bytes of this thread in the rows of a walk: 8 threads have 128 bytes of a token, every 16th token. Found once: the way to
// a row costs as much as all that is done with it.
struct RowPlace {
  uint16_t* at;      // in row thread / 8 of the sequence
  int64_t distance;  // of 16 rows
};
__device__ __forceinline__ RowPlace place_of(const Rows& rows, const Walk& w, int h, int group) {
  const int thread = threadIdx.x % 128;
  auto* data = static_cast<uint16_t*>(const_cast<void*>(rows.data));
  return {data + row_of(rows, w.b, w.begin + thread / 8, h) + group * 64 + thread % 8 * 8, 16 * rows.stride_t};
}

// O^T [64 value channels of this warpgroup, 64 tokens] times `factor` to rows of tokens, and out. `tile` is free again behind
// the barrier of the next call.
template <bool bf16, bool gated>
__device__ __forceinline__ void store_rows(const RowPlace& place, int group, int chunk, int rows, const float (&O)[32],
                                           float factor, char* tile, const uint4 (&z)[4], bool gate) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const uint32_t o = ptx::shared_address(tile);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int token = 8 * (j + lane / 16) + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
    const float* x = O + 4 * j;
    ptx::store_matrices_transposed(o + ptx::tile_byte(C, token, channel), ptx::pack<bf16>(x[0] * factor, x[1] * factor),
                                   ptx::pack<bf16>(x[2] * factor, x[3] * factor), ptx::pack<bf16>(x[4] * factor, x[5] * factor),
                                   ptx::pack<bf16>(x[6] * factor, x[7] * factor));
  }
  group == 0 ? ptx::group_sync<3, 128>() : ptx::group_sync<4, 128>();
  uint16_t* to = place.at + chunk * (C / 16) * place.distance;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int token = 16 * j + thread / 8, channel = thread % 8 * 8;
    uint4 x = *reinterpret_cast<const uint4*>(tile + ptx::tile_byte(C, token, channel));
    if constexpr (gated) {
      if (gate) gate_row<bf16>(x, z[j]);
    }
    if (token < rows) *reinterpret_cast<uint4*>(to + j * place.distance) = x;
  }
}

// The state as operand, for the gradient of g: in the order of the registers, 16 bytes of neighbouring threads in a row.
template <int K, int V>
__device__ __forceinline__ void save_operand(const Engine& e, int64_t slot, int h, int group, const uint32_t (&A)[K / 4],
                                             const float (&units)[2], int row, int lane) {
  const int64_t place = slot * e.H + h;
  auto* to = static_cast<uint4*>(e.saved) + (place * (V / 64) + group) * (128 * K / 16) + threadIdx.x % 128;
#pragma unroll
  for (int j = 0; j < K / 16; ++j) to[128 * j] = uint4{A[4 * j], A[4 * j + 1], A[4 * j + 2], A[4 * j + 3]};
  if (lane % 4 == 0) {
    e.saved_units[place * V + row] = units[0];
    e.saved_units[place * V + row + 8] = units[1];
  }
}

// The same transposed: 16 key channels x this warp's 16 value channels at a time, where a warpgroup of 64 key channels wants
// them.
template <int K, int V>
__device__ __forceinline__ void save_transposed(const Engine& e, int64_t slot, int h, int group, const uint32_t (&A)[K / 4]) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  auto* to = static_cast<uint4*>(e.saved) + (slot * e.H + h) * (K * V / 8) + 128 * (group * 4 + warp) + lane;
#pragma unroll
  for (int j = 0; j < K / 16; ++j) {
    to[j / 4 * (128 * V / 16) + j % 4 * 32] = uint4{ptx::transpose_matrix(A[4 * j]), ptx::transpose_matrix(A[4 * j + 2]),
                                                    ptx::transpose_matrix(A[4 * j + 1]), ptx::transpose_matrix(A[4 * j + 3])};
  }
}

}  // namespace
}  // namespace linnet::cuda
