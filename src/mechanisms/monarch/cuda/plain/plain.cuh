// The plain kernels of Monarch attention: every type, width, shape and number of steps, in f32 arithmetic.
//
// A program works on square tiles of 16 R scores, 256 threads, thread (ty, tx) on scores (ty + 16 i, tx + 16 j), i, j < R. Two
// steps make everything: contract (scores += rows . rows, 64 channels at a time) and expand (rows of 64 channels += weights
// rows). Rows are named by lists of offsets in shared memory, -1 for a row of zeros, so that tokens, slots, padding and masks
// look alike. Normalisers come from a pass of their own; where one tile holds all scores of a row they stay in registers.
#pragma once

#include "mechanisms/monarch/cuda/place.cuh"
#include "ptx/numbers.cuh"

namespace linnet::cuda::plain {

constexpr int kThreads = 256, kChannels = 64;
constexpr float kInfinity = __builtin_huge_valf(), kLn2 = 0.69314718f;

// Rows that a list of offsets picks from.
struct Source {
  const void* data;
  Dtype dtype;
  int width;
};
__device__ __forceinline__ Source source_of(const MonarchRows& x, int width) { return {x.data, x.dtype, width}; }
__device__ __forceinline__ Source source_of(const float* x, int width) { return {x, Dtype::f32, width}; }

template <int R>
struct Shared {
  static constexpr int kTile = 16 * R;
  float left[kTile][kChannels + 1], right[kTile][kChannels + 1], weight[kTile][kTile + 1];
  int64_t left_at[4][kTile], right_at[4][kTile];
  float left_number[4][kTile], right_number[4][kTile];
};

template <int R>
using Scores = float[R][R];
template <int R>
using Rows = float[R][kChannels / 16];

// Sum or maximum over the 16 threads of a row, the same order for each of them.
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int by = 8; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int by = 8; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, by));
  return x;
}

template <int R>
struct Program {
  static constexpr int kTile = 16 * R;
  const MonarchProblem& g;
  Shared<R>& s;
  int tx, ty;

  __device__ __forceinline__ Program(const MonarchProblem& problem, char* memory)
      : g(problem), s(*reinterpret_cast<Shared<R>*>(memory)), tx(threadIdx.x % 16), ty(threadIdx.x / 16) {}

  // Fills a list: one entry per thread, behind the last reading of the old one.
  template <class F>
  __device__ __forceinline__ void list(const F& fill) const {
    __syncthreads();
    if (threadIdx.x < kTile) fill(static_cast<int>(threadIdx.x));
    __syncthreads();
  }

  __device__ __forceinline__ void load(float (*to)[kChannels + 1], const Source& x, const int64_t* at, int c0) const {
    for (int i = threadIdx.x; i < kTile * kChannels; i += kThreads) {
      const int row = i / kChannels, c = i % kChannels;
      to[row][c] = at[row] >= 0 && c0 + c < x.width ? ptx::load(x.data, x.dtype, at[row] + c0 + c) : 0;
    }
  }
  // scores += left rows . right rows
  __device__ __forceinline__ void contract(Scores<R>& z, const Source& a, const int64_t* a_at, const Source& b,
                                           const int64_t* b_at) const {
    for (int c0 = 0; c0 < a.width; c0 += kChannels) {
      __syncthreads();
      load(s.left, a, a_at, c0);
      load(s.right, b, b_at, c0);
      __syncthreads();
      const int n = a.width - c0 < kChannels ? a.width - c0 : kChannels;
#pragma unroll 4
      for (int c = 0; c < n; ++c) {
        float x[R], y[R];
#pragma unroll
        for (int i = 0; i < R; ++i) x[i] = s.left[ty + 16 * i][c], y[i] = s.right[tx + 16 * i][c];
#pragma unroll
        for (int i = 0; i < R; ++i) {
#pragma unroll
          for (int j = 0; j < R; ++j) z[i][j] = fmaf(x[i], y[j], z[i][j]);
        }
      }
    }
  }
  // rows += weights right rows, 64 channels from c0 on. Sums of 16 are added up: in one long sum equal rows round the same way
  // again and again (189 of them to 1.3e-6). What has no weight may be NaN: a later token of a causal call.
  __device__ __forceinline__ void expand(Rows<R>& o, const Scores<R>& w, const Source& b, const int64_t* b_at, int c0) const {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < R; ++i) {
#pragma unroll
      for (int j = 0; j < R; ++j) s.weight[ty + 16 * i][tx + 16 * j] = w[i][j];
    }
    load(s.right, b, b_at, c0);
    __syncthreads();
    for (int k0 = 0; k0 < kTile; k0 += 16) {
      Rows<R> sum = {};
#pragma unroll 4
      for (int k = k0; k < k0 + 16; ++k) {
        float x[R], y[kChannels / 16];
#pragma unroll
        for (int i = 0; i < R; ++i) x[i] = s.weight[ty + 16 * i][k];
#pragma unroll
        for (int j = 0; j < kChannels / 16; ++j) y[j] = s.right[k][tx + 16 * j];
#pragma unroll
        for (int i = 0; i < R; ++i) {
#pragma unroll
          for (int j = 0; j < kChannels / 16; ++j) sum[i][j] = x[i] == 0 ? sum[i][j] : fmaf(x[i], y[j], sum[i][j]);
        }
      }
#pragma unroll
      for (int i = 0; i < R; ++i) {
#pragma unroll
        for (int j = 0; j < kChannels / 16; ++j) o[i][j] += sum[i][j];
      }
    }
  }
  // f(row of the tile, channel, value) for the rows of this thread
  template <class F>
  __device__ __forceinline__ void each(const Rows<R>& o, int width, int c0, const F& f) const {
#pragma unroll
    for (int i = 0; i < R; ++i) {
#pragma unroll
      for (int j = 0; j < kChannels / 16; ++j) {
        if (c0 + tx + 16 * j < width) f(ty + 16 * i, c0 + tx + 16 * j, o[i][j]);
      }
    }
  }
};

template <int R>
__device__ __forceinline__ void clear(Scores<R>& z) {
#pragma unroll
  for (int i = 0; i < R; ++i) {
#pragma unroll
    for (int j = 0; j < R; ++j) z[i][j] = 0;
  }
}
template <int R>
__device__ __forceinline__ void clear_rows(Rows<R>& z) {
#pragma unroll
  for (int i = 0; i < R; ++i) {
#pragma unroll
    for (int j = 0; j < kChannels / 16; ++j) z[i][j] = 0;
  }
}

// A running logsumexp per row, in base 2.
template <int R>
struct Normaliser {
  float m[R], total[R];
  __device__ __forceinline__ Normaliser() {
#pragma unroll
    for (int i = 0; i < R; ++i) m[i] = -kInfinity, total[i] = 0;
  }
  __device__ __forceinline__ void add(const Scores<R>& z) {
#pragma unroll
    for (int i = 0; i < R; ++i) {
      float best = m[i], sum = 0;
#pragma unroll
      for (int j = 0; j < R; ++j) best = fmaxf(best, z[i][j]);
      best = row_max(best);
      const float shift = best == -kInfinity ? 0 : best;  // no scores yet
#pragma unroll
      for (int j = 0; j < R; ++j) sum += exp2f(z[i][j] - shift);
      total[i] = total[i] * exp2f(m[i] - shift) + row_sum(sum);
      m[i] = best;
    }
  }
  // A score's weight, from its distance to the largest one: the logarithm of the sum would round as the logits do. 0 in a row
  // without scores.
  __device__ __forceinline__ float shift(int i) const { return m[i] == -kInfinity ? 0 : m[i]; }
  __device__ __forceinline__ float weight(int i, float z) const { return total[i] > 0 ? exp2f(z - shift(i)) / total[i] : 0; }
  // One more score.
  __device__ __forceinline__ void join(int i, float z) {
    if (z == -kInfinity) return;
    const float best = fmaxf(z, m[i]);
    total[i] = exp2f(z - best) + total[i] * exp2f(m[i] - best);
    m[i] = best;
  }
  // +inf for a row without scores, so that its weights are 0
  __device__ __forceinline__ float value(int i) const { return total[i] > 0 ? m[i] + log2f(total[i]) : kInfinity; }
};

__device__ __forceinline__ int64_t cell(const MonarchProblem& g, int64_t local, int j, int p) {
  return (local * g.cols + j) * g.blocks + p;
}
__device__ __forceinline__ int64_t query_cell(const MonarchProblem& g, int64_t local, int j, int l) {
  return (local * g.cols + j) * g.rows + l;
}

// f(i, j) for the scores of a thread.
template <int R, class F>
__device__ __forceinline__ void each_score(const F& f) {
#pragma unroll
  for (int i = 0; i < R; ++i) {
#pragma unroll
    for (int j = 0; j < R; ++j) f(i, j);
  }
}
template <int R>
__device__ __forceinline__ float sum_row(const float (&x)[R]) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < R; ++j) sum += x[j];
  return row_sum(sum);
}
__device__ __forceinline__ int64_t token_offset(const MonarchRows& x, const MonarchUnitIndex& u, int t) {
  return t < 0 || x.data == nullptr ? -1 : offset_of(x, u.b, t, u.h);
}

// A program of tile blockIdx.y of the queries or blocks of a slot. Grid: units * cols, tiles.
template <int R>
struct SlotProgram : Program<R> {
  using Program<R>::g, Program<R>::s, Program<R>::tx, Program<R>::ty, Program<R>::kTile;
  int slot, first;
  int64_t local;
  MonarchUnitIndex u;

  __device__ __forceinline__ SlotProgram(const MonarchProblem& problem, char* memory)
      : Program<R>(problem, memory),
        slot(blockIdx.x % problem.cols),
        first(blockIdx.y * kTile),
        local(blockIdx.x / problem.cols),
        u(unit_of(problem, local)) {}

  // The blocks p0 on: their a and y, and c, of those that take part.
  __device__ __forceinline__ void list_blocks(const MonarchStep& step, int p0, int64_t (*at)[kTile],
                                              float (*number)[kTile]) const {
    Program<R>::list([&](int i) {
      const float c = p0 + i < g.blocks ? step.c[cell(g, local, slot, p0 + i)] : kInfinity;
      number[0][i] = c;
      at[0][i] = c < kInfinity ? cell(g, local, slot, p0 + i) * g.K : -1;
      at[1][i] = c < kInfinity ? cell(g, local, slot, p0 + i) * g.V : -1;
    });
  }
  // beta of the queries of the left list and the blocks p0 on, which go to the right one.
  __device__ __forceinline__ void beta(Scores<R>& z, const MonarchStep& step, int p0) const {
    list_blocks(step, p0, s.right_at, s.right_number);
    clear<R>(z);
    Program<R>::contract(z, source_of(g.q, g.K), s.left_at[0], source_of(step.a, g.K), s.right_at[0]);
    each_score<R>([&](int i, int j) {
      const int p = tx + 16 * j;
      const bool there = s.right_at[0][p] >= 0 && (!g.causal || p0 + p < first + ty + 16 * i);
      z[i][j] = there ? fmaf(z[i][j], g.factor, -s.right_number[0][p]) : -kInfinity;
    });
  }
};

// A program of tile blockIdx.y of the slots of a block. Grid: units * blocks, tiles.
template <int R>
struct BlockProgram : Program<R> {
  using Program<R>::g, Program<R>::s, Program<R>::kTile;
  int p, first;
  int64_t local;
  MonarchUnitIndex u;

  __device__ __forceinline__ BlockProgram(const MonarchProblem& problem, char* memory)
      : Program<R>(problem, memory),
        p(blockIdx.x % problem.blocks),
        first(blockIdx.y * kTile),
        local(blockIdx.x / problem.blocks),
        u(unit_of(problem, local)) {}

  // Queries of the left list times the keys i0 on, which go to the right one with their values; factor and masks are left out.
  __device__ __forceinline__ void key_scores(Scores<R>& z, const Source& q, int i0) const {
    const bool visible = is_visible(g, u.tile, p);
    Program<R>::list([&](int i) {
      const int t = visible ? valid_key_at(g, u.b, p, i0 + i) : -1;
      s.right_at[0][i] = token_offset(g.k, u, t);
      s.right_at[1][i] = token_offset(g.v, u, t);
    });
    clear<R>(z);
    Program<R>::contract(z, q, s.left_at[0], source_of(g.k, g.K), s.right_at[0]);
  }
};

}  // namespace linnet::cuda::plain

// A kernel for each size of tile: name_1, name_2, name_4.
#define LINNET_MONARCH_PLAIN(name, parameters, call)                                                           \
  extern "C" __global__ void __launch_bounds__(linnet::cuda::plain::kThreads) name##_1 parameters { call(1); } \
  extern "C" __global__ void __launch_bounds__(linnet::cuda::plain::kThreads) name##_2 parameters { call(2); } \
  extern "C" __global__ void __launch_bounds__(linnet::cuda::plain::kThreads) name##_4 parameters { call(4); }
