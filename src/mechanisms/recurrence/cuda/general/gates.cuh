// Decays inside a chunk, without quotients (general.h).
#pragma once

#include "mechanisms/recurrence/cuda/general/planes.cuh"

namespace linnet::cuda {
namespace {

// The level on which two rows of a chunk are tied: the highest bit in which they differ.
__device__ __forceinline__ int level_of(int i, int j) { return 31 - __clz(i ^ j); }

// Decays that are one number for a row, by the first 64 threads: between[level][row] = F, and those from the chunk's first row
// on and to its last. `left`: 2 floats of shared memory; all threads of the block are here.
struct RowDecays {
  float *between, *before, *after;  // [6][64], [64], [64]
  float* total;                     // the sum of all
};
template <int kPlanes>
__device__ __forceinline__ void make_decays(const RowDecays& d, float g, float* scratch) {
  const int row = threadIdx.x, lane = threadIdx.x % 32;
  float low = 0, high = 0;  // sums from the block's first row (without it) to here, from here (without it) to its last row
  if (row < 64) {
#pragma unroll
    for (int level = 0; level < 5; ++level) {
      const int size = 1 << level, middle = (lane & ~(2 * size - 1)) + size;
      const bool upper = (lane & size) != 0;
      const float gate = __shfl_sync(0xffffffff, g, middle);
      const float below = __shfl_sync(0xffffffff, low, middle - 1), above = __shfl_sync(0xffffffff, low, lane | (2 * size - 1));
      d.between[level * 64 + row] = decay_of<kPlanes>(upper ? low : high + gate);
      if (upper) {
        low = below + gate + low;
      } else {
        high = high + gate + above;
      }
    }
    if (row == 31) scratch[0] = low;  // rows 1 to 31
    if (row == 32) scratch[1] = g;
    if (row == 63) scratch[2] = low;  // rows 33 to 63
    if (row == 0) scratch[3] = g;
  }
  __syncthreads();
  if (row < 64) {
    const bool upper = row >= 32;
    d.between[5 * 64 + row] = decay_of<kPlanes>(upper ? low : high + scratch[1]);
    if (upper) {
      low = scratch[0] + scratch[1] + low;
    } else {
      high = high + scratch[1] + scratch[2];
    }
    d.before[row] = decay_of<kPlanes>(scratch[3] + low);
    d.after[row] = decay_of<kPlanes>(high);
    if (row == 0) *d.total = scratch[3] + (scratch[0] + scratch[1] + scratch[2]);
  }
  __syncthreads();
}

// Decays of one channel, by four threads with 16 rows each: visit(row, F) on this level, gates at g[row * stride].
template <int kPlanes, class Visit>
__device__ __forceinline__ void visit_level(const float* g, int stride, int quarter, int level, const Visit& visit) {
  const int begin = quarter * 16;
  // Rows below the first row `at` of an upper block, downwards; `sum`: the gates from behind the last of them to `at`.
  const auto down = [&](int last, int count, float sum) {
    for (int row = last; row > last - count; --row) {
      visit(row, decay_of<kPlanes>(sum));
      sum += g[row * stride];
    }
  };
  const auto up = [&](int first, int count, float sum) {
    for (int row = first; row < first + count; ++row) {
      visit(row, decay_of<kPlanes>(sum));
      if (row + 1 < first + count) sum += g[(row + 1) * stride];
    }
  };
  if (level == 5) {
    float sum = quarter < 2 ? g[32 * stride] : 0;
    if (quarter == 0) {
      for (int t = 31; t >= 16; --t) sum += g[t * stride];
    } else if (quarter == 3) {
      for (int t = 33; t <= 48; ++t) sum += g[t * stride];
    }
    if (quarter < 2) {
      down(begin + 15, 16, sum);
    } else {
      up(begin, 16, sum);
    }
  } else if (level == 4) {
    if (quarter % 2 == 0) {
      down(begin + 15, 16, g[(begin + 16) * stride]);
    } else {
      up(begin, 16, 0);
    }
  } else {
    const int size = 1 << level;
    for (int pair = begin; pair < begin + 16; pair += 2 * size) {
      down(pair + size - 1, size, g[(pair + size) * stride]);
      up(pair + size, size, 0);
    }
  }
}
// The same from the chunk's first row on, and to its last; returns the sum of all.
template <int kPlanes, class Visit>
__device__ __forceinline__ float visit_ends(const float* g, int stride, int quarter, const Visit& visit) {
  float before = 0, rest = 0, own[16];
  for (int i = 0; i < 16 * quarter; ++i) before += g[i * stride];
  for (int i = 63; i >= 16 * quarter + 16; --i) rest += g[i * stride];
  float all = before + rest;
#pragma unroll
  for (int i = 15; i >= 0; --i) {
    own[i] = rest;
    rest += g[(16 * quarter + i) * stride];
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float gate = g[(16 * quarter + i) * stride];
    before += gate;
    all += gate;
    visit(16 * quarter + i, decay_of<kPlanes>(before), decay_of<kPlanes>(own[i]));
  }
  return all;
}

// The state behind a chunk whose gates add up to `sum`: an f32 sum keeps what decays of almost 1 leave (recurrence.md, 4).
__device__ __forceinline__ float carry(float state, float sum, float written) {
  return sum > kMinusLog2 ? state + fmaf(expm1f(sum), state, written) : fmaf(expf(sum), state, written);
}

}  // namespace
}  // namespace linnet::cuda
