// The delta rules for bf16, and the fold of long sequences' segments.
#include "mechanisms/recurrence/recurrence_delta_walk.cuh"

namespace linnet::cuda {

LINNET_DELTA(delta_64, true, 64, false, true)
LINNET_DELTA(delta_64_decay, true, 64, true, true)
LINNET_DELTA(delta_128, true, 128, false, true)
LINNET_DELTA(delta_128_decay, true, 128, true, true)
LINNET_DELTA(summary_64, true, 64, false, false)
LINNET_DELTA(summary_64_decay, true, 64, true, false)
LINNET_DELTA(summary_128, true, 128, false, false)
LINNET_DELTA(summary_128_decay, true, 128, true, false)

// Between the walks of a cut sequence: the states after its segments, S^T = S^T A^T + B^T, in place of B^T; back in time their
// gradients before them, dS^T = dS^T A + D^T. A block has kFoldRows rows of S^T of a head, a thread one column of a part of
// them; A passes through shared memory in pieces, the next one on its way while one is used.
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
  const int used = min(segments, static_cast<int>((w.length + kDeltaSegment - 1) / kDeltaSegment) - 1);
  float sum[kRows] = {};
  for (int i = 0; i < used; ++i) {
    const int segment = back ? used - i : i;
    const float* const map = delta.maps + ((segment * heads + n * e.H + h) * 2 + 1) * D * D;
    float* const b = (back ? delta.dmaps + (segment * heads + n * e.H + h) * D * D
                           : delta.maps + (segment * heads + n * e.H + h) * 2 * D * D) +
                     (blockIdx.y * kFoldRows + first) * D + column;
    const bool forgets = i == 0 || delta.forgets[(segment * e.N + n) * e.H + h] != 0;
    float next[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) next[r] = b[r * kApart * D];
    if (!forgets) {
      // 4 numbers of a piece: of its rows, or, back, of its columns.
      const auto ask = [&](int piece, int j) {
        const int at = thread + 256 * j;
        return *reinterpret_cast<const float4*>(back ? map + at / (kFoldPiece / 4) * D + piece + at % (kFoldPiece / 4) * 4
                                                     : map + piece * D + at * 4);
      };
      float4 ahead[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) ahead[j] = ask(0, j);
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
#pragma unroll
          for (int j = 0; j < kLoads; ++j) ahead[j] = ask(piece + kFoldPiece, j);
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
    for (int r = 0; r < kRows; ++r) b[r * kApart * D] = sum[r] = next[r];
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
