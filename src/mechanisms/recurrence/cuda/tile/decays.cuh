// The log decays of a chunk's rows, and scores times the decays between their rows.
#pragma once

#include "mechanisms/recurrence/cuda/tile/walk.cuh"
#include "ptx/fragment.cuh"
#include "ptx/layout.h"
#include "ptx/matrix.cuh"
#include "ptx/numbers.cuh"
#include "ptx/ring.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace linnet::cuda {
namespace {

constexpr int kStages = kTileStages, kPanel = C * 128;
constexpr float kLeastGate = -40;  // exp(-40) is zero beside anything that a float still resolves
constexpr float kFarGate = 50;  // exp(50) times what a bf16 holds in practice is still a bf16: the ranges of e^88 are left e^38

// The log decays of a chunk: their sums G, and the decays from the first row of each 16 to a row, and from a row to their last.
struct alignas(16) Decays {
  float sums[C], left[C], right[C];
};

// The sums G of the chunk's log decays, from its first row: those of rows lane and lane + 32, and all of them.
struct Sums {
  float low, high, all;
};
__device__ __forceinline__ Sums sum_gates(float2 gates, int lane) {
  float g[2] = {gates.x, gates.y};
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float before = __shfl_up_sync(0xffffffff, g[i], step);
      if (lane >= step) g[i] += before;
    }
  }
  g[1] += __shfl_sync(0xffffffff, g[0], 31);
  return {g[0], g[1], __shfl_sync(0xffffffff, g[1], 31)};
}

// The numbers [B, T, H] of a chunk's rows lane and lane + 32, as they come from memory, and as numbers. They are asked for a
// chunk ahead and come from far away: nothing may touch them before, not even to convert them or to branch on their type.
struct Numbers {
  uint32_t low[2] = {}, high[2] = {};
};
__device__ __forceinline__ Numbers ask_numbers(const Rows& rows, const Walk& w, int h, int chunk, int lane) {
  Numbers x;
  const bool wide = rows.dtype == Dtype::f32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t t = static_cast<int64_t>(chunk) * C + lane + 32 * i;
    const bool in = t >= 0 && t < w.length;
    const auto* at = static_cast<const uint16_t*>(rows.data) + (in ? row_of(rows, w.b, w.begin + t, h) << wide : 0);
    x.low[i] = in ? at[0] : 0;
    x.high[i] = in && wide ? at[1] : 0;
  }
  return x;
}
__device__ __forceinline__ float2 take_numbers(const Numbers& x, Dtype dtype) {
  float y[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float f16 = __half2float(__ushort_as_half(static_cast<unsigned short>(x.low[i])));
    const uint32_t bits = dtype == Dtype::f32 ? x.low[i] | x.high[i] << 16 : x.low[i] << 16;
    y[i] = dtype == Dtype::f16 ? f16 : __uint_as_float(bits);
  }
  return {y[0], y[1]};
}
__device__ __forceinline__ float2 take_gates(const Numbers& x, Dtype dtype) {
  const float2 g = take_numbers(x, dtype);
  return {g.x < kLeastGate ? kLeastGate : g.x, g.y < kLeastGate ? kLeastGate : g.y};
}

__device__ __forceinline__ void store_decays(const Sums& G, int lane, Decays& d) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float sum = j == 0 ? G.low : G.high;
    d.sums[lane + 32 * j] = sum;
    d.left[lane + 32 * j] = __expf(sum - __shfl_sync(0xffffffff, sum, lane / 16 * 16));
    d.right[lane + 32 * j] = __expf(__shfl_sync(0xffffffff, sum, lane / 16 * 16 + 15) - sum);
  }
}

// Scores p [64, 64] of a warpgroup, times the decays between their rows, zero where a row does not see a column: above the
// diagonal (reverse: below it), and on it when strict. A warp has 16 rows: exponentials for its own 16 columns alone, elsewhere
// three factors (no quotient: each is at most 1).
template <bool decays, bool strict>
__device__ __forceinline__ void weigh(float (&p)[32], const Decays& d, int warp, int lane, bool reverse) {
  const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
  float own[2] = {1, 1};
  if constexpr (decays) {
    own[0] = reverse ? d.right[row] : d.left[row];
    own[1] = reverse ? d.right[row + 8] : d.left[row + 8];
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int block = j / 2, c = 8 * j + column;
    float* x = p + 4 * j;
    if (block == warp) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + ptx::Fragment::below(i), at = c + (i & 1);
        const bool seen = reverse ? at >= r : strict ? at < r : at <= r;
        float factor = 1;
        if constexpr (decays) factor = __expf(reverse ? d.sums[at] - d.sums[r] : d.sums[r] - d.sums[at]);
        x[i] = seen ? x[i] * factor : 0;
      }
    } else if (reverse ? block > warp : block < warp) {
      if constexpr (decays) {
        const float middle =
            __expf(reverse ? d.sums[16 * block] - d.sums[16 * warp + 15] : d.sums[16 * warp] - d.sums[16 * block + 15]);
        const float2 other = *reinterpret_cast<const float2*>((reverse ? d.left : d.right) + c);
        x[0] *= own[0] * (middle * other.x);
        x[1] *= own[0] * (middle * other.y);
        x[2] *= own[1] * (middle * other.x);
        x[3] *= own[1] * (middle * other.y);
      }
    } else {
      x[0] = x[1] = x[2] = x[3] = 0;
    }
  }
}

}  // namespace
}  // namespace linnet::cuda
