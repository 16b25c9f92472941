// The delta rules for bf16, and the fold of long sequences' segments.
#include "mechanisms/recurrence/cuda/delta/walk.cuh"

namespace linnet::cuda {

LINNET_DELTA(delta_64, true, 64, false, true, false)
LINNET_DELTA(delta_64_decay, true, 64, true, true, false)
LINNET_DELTA(delta_128, true, 128, false, true, false)
LINNET_DELTA(delta_128_decay, true, 128, true, true, false)
LINNET_DELTA(summary_64, true, 64, false, false, false)
LINNET_DELTA(summary_64_decay, true, 64, true, false, false)
LINNET_DELTA(summary_128, true, 128, false, false, false)
LINNET_DELTA(summary_128_decay, true, 128, true, false, false)
LINNET_DELTA(record_64, true, 64, false, false, true)
LINNET_DELTA(record_64_decay, true, 64, true, false, true)
LINNET_DELTA(record_128, true, 128, false, false, true)
LINNET_DELTA(record_128_decay, true, 128, true, false, true)
LINNET_DELTA_EARLY(early_128, true, 128)

// Between the walks of a cut sequence: the states after its segments, S^T = S^T A^T + B^T, in place of B^T; back in time their
// gradients before them, dS^T = dS^T A + D^T. A block has kFoldRows rows of S^T of a head, a thread one column of a part of
// them; A passes through shared memory in pieces, the next one, be it of the next segment, on its way while one is used.
constexpr int kFoldPiece = 32;
template <int D, bool back>
__device__ void fold(const Delta& delta, int segments) {
  constexpr int kApart = 256 / D, kRows = kFoldRows / kApart;  // the distance between the rows of a thread, and their number
  constexpr int kLoads = kFoldPiece * D / 1024, kPitch = back ? D + 1 : D;
  __shared__ float a[kFoldPiece * kPitch];
  __shared__ alignas(16) float state[kFoldRows][D];
  const Engine& e = delta.e;
  const int h = blockIdx.x % e.H, thread = threadIdx.x, column = thread % D, first = thread / D;
  const int64_t n = blockIdx.x / e.H, heads = e.N * e.H;
  const Walk w = walk_of(e, n, 0, false);
  if (w.length <= kLongest) return;
  const int used = min(segments, static_cast<int>((w.length + delta.segment - 1) / delta.segment) - 1);
  const auto number = [&](int i) { return (back ? used - i : i) * heads + n * e.H + h; };
  const auto map_of = [&](int i) -> const float* {  // nullptr: A is zero, or there is no state yet
    const bool forgets = i == 0 || (delta.phase != DeltaPhase::early && delta.forgets[number(i)] != 0);
    return forgets ? nullptr : delta.maps + (number(i) * 2 + 1) * D * D;
  };
  const auto rows_of = [&](int i) {
    float* const b = back ? delta.dmaps + number(i) * D * D : delta.maps + number(i) * 2 * D * D;
    return b + (blockIdx.y * kFoldRows + first) * D + column;
  };
  float4 ahead[kLoads];
  const auto ask = [&](const float* map, int piece) {  // 4 numbers each: of the piece's rows, or, back, of its columns
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int at = thread + 256 * j;
      ahead[j] = *reinterpret_cast<const float4*>(back ? map + at / (kFoldPiece / 4) * D + piece + at % (kFoldPiece / 4) * 4
                                                       : map + piece * D + at * 4);
    }
  };
  const float* map = nullptr;
  float sum[kRows] = {}, next[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) next[r] = rows_of(0)[r * kApart * D];
  for (int i = 0; i < used; ++i) {
    const float* const following = i + 1 < used ? map_of(i + 1) : nullptr;
    float coming[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) coming[r] = i + 1 < used ? rows_of(i + 1)[r * kApart * D] : 0;
    if (map == nullptr && following != nullptr) ask(following, 0);
    if (map != nullptr) {
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kRows; ++r) state[first + r * kApart][column] = sum[r];
      for (int piece = 0; piece < D; piece += kFoldPiece) {
        __syncthreads();
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          const int at = thread + 256 * j;
          if constexpr (back) {
            float* to = a + at % (kFoldPiece / 4) * 4 * kPitch + at / (kFoldPiece / 4);
            to[0] = ahead[j].x;
            to[kPitch] = ahead[j].y;
            to[2 * kPitch] = ahead[j].z;
            to[3 * kPitch] = ahead[j].w;
          } else {
            reinterpret_cast<float4*>(a)[at] = ahead[j];
          }
        }
        if (piece + kFoldPiece < D) {
          ask(map, piece + kFoldPiece);
        } else if (following != nullptr) {
          ask(following, 0);
        }
        __syncthreads();
#pragma unroll 2
        for (int j = 0; j < kFoldPiece; j += 4) {
          float x[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) x[k] = a[(j + k) * kPitch + column];
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const float4 y = *reinterpret_cast<const float4*>(&state[first + r * kApart][piece + j]);
            next[r] = fmaf(y.w, x[3], fmaf(y.z, x[2], fmaf(y.y, x[1], fmaf(y.x, x[0], next[r]))));
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows_of(i)[r * kApart * D] = sum[r] = next[r];
      next[r] = coming[r];
    }
    map = following;
  }
}
#define LINNET_FOLD(name, D, back)                                                                            \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Delta delta, int segments) { \
    fold<D, back>(delta, segments);                                                                           \
  }
LINNET_FOLD(fold_64, 64, false)
LINNET_FOLD(fold_128, 128, false)
LINNET_FOLD(fold_back_64, 64, true)
LINNET_FOLD(fold_back_128, 128, true)

}  // namespace linnet::cuda
