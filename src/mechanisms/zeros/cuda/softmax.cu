// zeros_softmax in f32 on the multiply-add units, tiles of 64 rows by 64 keys (softmax/cuda/plain.cuh); as on the CPU
// (zeros_softmax_cpu.cc) the scores are those of keys minus the first key, which changes no weight:
//
//   zeros_rows:  mean, then rest = mean(s - mean) and gap = log mean exp(delta), by log1p(mean(expm1 - id)) where it is small
//   zeros_read:  r_i = [ sh expm1(delta_i - gap) + (s1 - sh) delta_i + s0 ] / n,  o = r v
//   zeros_sums:  X, Y and the gradients of the gates;  zeros_query_gradients: dq;  zeros_key_gradients: dk, dv
//
// Split into softmax and linear attention it would cancel: 3e-5 for scores of standard deviation 0.1.
#include "mechanisms/softmax/cuda/plain.cuh"
#include "mechanisms/zeros/cuda/softmax.h"

namespace linnet::cuda {
namespace {

struct ZerosTile {
  const ZerosSoftmaxCall& p;
  int64_t b, head;
  int32_t row0;  // first row of the tile
  __device__ __forceinline__ ZerosTile(const ZerosSoftmaxCall& call)
      : p(call),
        b(blockIdx.x / call.tiles / call.H),
        head(blockIdx.x / call.tiles % call.H),
        row0(static_cast<int32_t>(blockIdx.x % call.tiles) * 64) {}
  __device__ __forceinline__ int64_t at(const AttendRows& x, int64_t t) const {
    return b * x.stride_b + t * x.stride_t + head * x.stride_h;
  }
  __device__ __forceinline__ float number(const AttendRows& x, int64_t t, int64_t c = 0) const {
    return x.data != nullptr && t < p.T ? ptx::load(x.data, x.dtype, at(x, t) + c) : 0;
  }
  __device__ __forceinline__ ZerosRow& row(int32_t t) const { return p.rows[(b * p.H + head) * p.T + t]; }
  __device__ __forceinline__ float count(int32_t t) const { return static_cast<float>(p.causal ? t + 1 : p.T); }
  __device__ __forceinline__ bool sees(int32_t t, int32_t j) const { return t < p.T && j < p.T && (!p.causal || j <= t); }
  __device__ __forceinline__ int32_t key_end(int32_t first_row) const { return p.causal ? min(first_row + 64, p.T) : p.T; }
  // Scores of rows t0 .. and keys j0 ..
  __device__ __forceinline__ void scores(PlainMemory& m, int32_t t0, int32_t j0, float (&s)[4][4]) const {
    plain_products(
        m, s, [&](int r, int c) { return number(p.q, t0 + r, c); },
        [&](int r, int c) { return j0 + r < p.T ? number(p.k, j0 + r, c) - number(p.k, 0, c) : 0.0f; }, p.K);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
      for (int b4 = 0; b4 < 4; ++b4) s[a][b4] *= p.scale;
    }
  }
  // x = dout . v
  __device__ __forceinline__ void value_products(PlainMemory& m, int32_t t0, int32_t j0, float (&x)[4][4]) const {
    plain_products(
        m, x, [&](int r, int c) { return number(p.dout, t0 + r, c); }, [&](int r, int c) { return number(p.v, j0 + r, c); },
        p.V);
  }
};

// One pair: delta, expm1(delta - gap), and what follows from them.
struct ZerosPair {
  float delta, excess;
  __device__ __forceinline__ ZerosPair(const ZerosRow& row, float s)
      : delta((s - row.mean) - row.rest), excess(expm1f(delta - row.gap)) {}
};
struct ZerosGates {
  float s1, sh, s0, inverse;
  __device__ __forceinline__ ZerosGates(const ZerosTile& tile, int32_t t)
      : s1(tile.number(tile.p.s1, t)),
        sh(tile.number(tile.p.sh, t)),
        s0(tile.number(tile.p.s0, t)),
        inverse(1 / tile.count(t)) {}
  __device__ __forceinline__ float weight(const ZerosPair& pair) const {
    return (fmaf(s1, pair.delta, sh * (pair.excess - pair.delta)) + s0) * inverse;
  }
  __device__ __forceinline__ float slope(const ZerosPair& pair, const ZerosRow& row, float x) const {
    return (sh * (1 + pair.excess) * (x - row.X) + (s1 - sh) * (x - row.Y)) * inverse;
  }
};
__device__ __forceinline__ float least_of_row(float x) { return -row_most(-x); }

}  // namespace

extern "C" __global__ void __launch_bounds__(kPlainThreads) zeros_rows(const __grid_constant__ ZerosSoftmaxCall p) {
  extern __shared__ char memory[];
  PlainMemory& m = *reinterpret_cast<PlainMemory*>(memory);
  const ZerosTile tile(p);
  const Thread thread;
  const int32_t end = tile.key_end(tile.row0);
  float mean[4] = {}, top[4], low[4], rest[4] = {}, more[4] = {}, total[4] = {}, s[4][4];
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    top[a] = -infinity();
    low[a] = infinity();
  }
  for (int32_t j0 = 0; j0 < end; j0 += 64) {
    tile.scores(m, tile.row0, j0, s);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if (!tile.sees(tile.row0 + thread.y + 16 * a, j0 + thread.x + 16 * b)) continue;
        mean[a] += s[a][b];
        top[a] = fmaxf(top[a], s[a][b]);
        low[a] = fminf(low[a], s[a][b]);
      }
    }
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    mean[a] = ptx::sum_lanes<16>(mean[a]) / tile.count(tile.row0 + thread.y + 16 * a);
    top[a] = row_most(top[a]);
    low[a] = least_of_row(low[a]);
  }
  for (int32_t j0 = 0; j0 < end; j0 += 64) {
    tile.scores(m, tile.row0, j0, s);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if (!tile.sees(tile.row0 + thread.y + 16 * a, j0 + thread.x + 16 * b)) continue;
        const float delta = s[a][b] - mean[a];
        rest[a] += delta;
        more[a] += excess(fminf(delta, 16));
        total[a] += expf(s[a][b] - top[a]);
      }
    }
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int32_t t = tile.row0 + thread.y + 16 * a;
    const float n = tile.count(t), inverse = 1 / n;
    const float less = ptx::sum_lanes<16>(rest[a]) * inverse, over = ptx::sum_lanes<16>(more[a]) * inverse;
    const float share = ptx::sum_lanes<16>(total[a]) * inverse;
    if (t >= p.T || thread.x != 0) continue;
    const bool is_small = top[a] - mean[a] <= 8 && mean[a] - low[a] <= 8;
    // log mean exp(delta): mean exp(s - mean) = 1 + less + over
    const float gap = is_small ? log1pf(less + over) - less : ((top[a] - mean[a]) - less) + logf(share);
    tile.row(t) = {mean[a], less, gap, 0, 0};
  }
}

// Grid: row tiles, slices of the values.
extern "C" __global__ void __launch_bounds__(kPlainThreads) zeros_read(const __grid_constant__ ZerosSoftmaxCall p) {
  extern __shared__ char memory[];
  PlainMemory& m = *reinterpret_cast<PlainMemory*>(memory);
  const ZerosTile tile(p);
  const Thread thread;
  const int32_t end = tile.key_end(tile.row0), slice = blockIdx.y * kAttendSlice;
  float read[4][4] = {}, s[4][4];
  for (int32_t j0 = 0; j0 < end; j0 += 64) {
    tile.scores(m, tile.row0, j0, s);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const int32_t t = tile.row0 + thread.y + 16 * a;
      const ZerosGates gates(tile, t);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        s[a][b] = tile.sees(t, j0 + thread.x + 16 * b) ? gates.weight(ZerosPair(tile.row(t), s[a][b])) : 0;
      }
    }
    __syncthreads();
    keep_weights(m, s);
    const bool wild = plain_rows(m, p.v, p.V, slice, [&](int r) { return j0 + r < p.T ? tile.at(p.v, j0 + r) : int64_t{-1}; });
    if (__syncthreads_or(wild)) {
      plain_sums_seen<false>(m, read);
    } else {
      plain_sums<false>(m, read);
    }
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int32_t t = tile.row0 + thread.y + 16 * a;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int c = slice + thread.x + 16 * b;
      if (t < p.T && c < p.V) ptx::store(p.out.data, p.out.dtype, tile.at(p.out, t) + c, read[a][b]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kPlainThreads) zeros_sums(const __grid_constant__ ZerosSoftmaxCall p) {
  extern __shared__ char memory[];
  PlainMemory& m = *reinterpret_cast<PlainMemory*>(memory);
  const ZerosTile tile(p);
  const Thread thread;
  const int32_t end = tile.key_end(tile.row0);
  float X[4] = {}, Y[4] = {}, first[4] = {}, higher[4] = {}, s[4][4], x[4][4];
  for (int32_t j0 = 0; j0 < end; j0 += 64) {
    tile.scores(m, tile.row0, j0, s);
    tile.value_products(m, tile.row0, j0, x);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const int32_t t = tile.row0 + thread.y + 16 * a;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if (!tile.sees(t, j0 + thread.x + 16 * b)) continue;
        const ZerosPair pair(tile.row(t), s[a][b]);
        X[a] = fmaf(1 + pair.excess, x[a][b], X[a]);
        Y[a] += x[a][b];
        first[a] = fmaf(pair.delta, x[a][b], first[a]);
        higher[a] = fmaf(pair.excess - pair.delta, x[a][b], higher[a]);
      }
    }
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int32_t t = tile.row0 + thread.y + 16 * a;
    const float inverse = 1 / tile.count(t);
    X[a] = ptx::sum_lanes<16>(X[a]) * inverse;
    Y[a] = ptx::sum_lanes<16>(Y[a]) * inverse;
    first[a] = ptx::sum_lanes<16>(first[a]) * inverse;
    higher[a] = ptx::sum_lanes<16>(higher[a]) * inverse;
    if (t >= p.T || thread.x != 0) continue;
    tile.row(t).X = X[a];
    tile.row(t).Y = Y[a];
    if (p.ds1.data != nullptr) ptx::store(p.ds1.data, p.ds1.dtype, tile.at(p.ds1, t), first[a]);
    if (p.dsh.data != nullptr) ptx::store(p.dsh.data, p.dsh.dtype, tile.at(p.dsh, t), higher[a]);
    if (p.ds0.data != nullptr) ptx::store(p.ds0.data, p.ds0.dtype, tile.at(p.ds0, t), Y[a]);
  }
}

// Grid: row tiles, slices of the keys' channels.
extern "C" __global__ void __launch_bounds__(kPlainThreads) zeros_query_gradients(const __grid_constant__ ZerosSoftmaxCall p) {
  extern __shared__ char memory[];
  PlainMemory& m = *reinterpret_cast<PlainMemory*>(memory);
  const ZerosTile tile(p);
  const Thread thread;
  const int32_t end = tile.key_end(tile.row0), slice = blockIdx.y * kAttendSlice;
  float dq[4][4] = {}, s[4][4], x[4][4];
  for (int32_t j0 = 0; j0 < end; j0 += 64) {
    tile.scores(m, tile.row0, j0, s);
    tile.value_products(m, tile.row0, j0, x);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const int32_t t = tile.row0 + thread.y + 16 * a;
      const ZerosGates gates(tile, t);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const bool seen = tile.sees(t, j0 + thread.x + 16 * b);
        s[a][b] = seen ? gates.slope(ZerosPair(tile.row(t), s[a][b]), tile.row(t), x[a][b]) : 0;
      }
    }
    __syncthreads();
    keep_weights(m, s);
    // The gradients of a row's scores sum to zero: keys minus the first give the same dq, without its rounding.
    for (int i = threadIdx.x; i < 64 * kAttendSlice; i += kPlainThreads) {
      const int r = i / kAttendSlice, c = slice + i % kAttendSlice;
      const bool there = j0 + r < p.T && c < p.K;
      m.rows[r][i % kAttendSlice] = there ? tile.number(p.k, j0 + r, c) - tile.number(p.k, 0, c) : 0;
    }
    __syncthreads();
    plain_sums<false>(m, dq);
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int32_t t = tile.row0 + thread.y + 16 * a;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int c = slice + thread.x + 16 * b;
      if (t < p.T && c < p.K) ptx::store(p.dq.data, p.dq.dtype, tile.at(p.dq, t) + c, p.scale * dq[a][b]);
    }
  }
}

// Grid: key tiles, slices of the channels of keys and values.
extern "C" __global__ void __launch_bounds__(kPlainThreads) zeros_key_gradients(const __grid_constant__ ZerosSoftmaxCall p) {
  extern __shared__ char memory[];
  PlainMemory& m = *reinterpret_cast<PlainMemory*>(memory);
  const ZerosTile tile(p);
  const Thread thread;
  const int32_t j0 = tile.row0, slice = blockIdx.y * kAttendSlice;
  float dk[4][4] = {}, dv[4][4] = {}, s[4][4], x[4][4];
  for (int32_t t0 = p.causal ? j0 : 0; t0 < p.T; t0 += 64) {
    tile.scores(m, t0, j0, s);
    tile.value_products(m, t0, j0, x);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const int32_t t = t0 + thread.y + 16 * a;
      const ZerosGates gates(tile, t);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        float weight = 0, slope = 0;
        if (tile.sees(t, j0 + thread.x + 16 * b)) {
          const ZerosPair pair(tile.row(t), s[a][b]);
          weight = gates.weight(pair);
          slope = gates.slope(pair, tile.row(t), x[a][b]);
        }
        s[a][b] = weight;
        x[a][b] = slope;
      }
    }
    const auto row = [&](const AttendRows& rows, int r) {
      return t0 + r < p.T && rows.data != nullptr ? tile.at(rows, t0 + r) : int64_t{-1};
    };
    __syncthreads();
    keep_weights(m, s);
    plain_rows(m, p.dout, p.V, slice, [&](int r) { return row(p.dout, r); });
    __syncthreads();
    plain_sums<true>(m, dv);
    __syncthreads();
    keep_weights(m, x);
    plain_rows(m, p.q, p.K, slice, [&](int r) { return row(p.q, r); });
    __syncthreads();
    plain_sums<true>(m, dk);
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int32_t j = j0 + thread.y + 16 * a;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int c = slice + thread.x + 16 * b;
      if (j >= p.T) continue;
      if (c < p.K && p.dk.data != nullptr) ptx::store(p.dk.data, p.dk.dtype, tile.at(p.dk, j) + c, p.scale * dk[a][b]);
      if (c < p.V && p.dv.data != nullptr) ptx::store(p.dv.data, p.dv.dtype, tile.at(p.dv, j) + c, dv[a][b]);
    }
  }
}

}  // namespace linnet::cuda
