// The gradients of every recurrence, token by token (plain.h): a warp has 4 columns of a head's state, 8 lanes a
// column, each with kRows contiguous rows in registers.
#include "mechanisms/recurrence/cuda/map.cuh"
#include "mechanisms/recurrence/cuda/plain/plain.h"
#include "ptx/numbers.cuh"

namespace linnet::cuda {
namespace {

constexpr int kChunk = 64, kColumns = 4;

__device__ float over_rows(float x) {  // the sum over the 8 lanes of a column
  for (int lane = 4; lane < 32; lane *= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
  return x;
}
__device__ float over_columns(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

template <int kRows>
__device__ __forceinline__ void normalize(float (&x)[kRows]) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) squares = fmaf(x[i], x[i], squares);
  const float factor = 1 / sqrtf(over_rows(squares) + 1e-6f);
#pragma unroll
  for (int i = 0; i < kRows; ++i) x[i] *= factor;
}

// A decay as one number: exp(g) - 1 where that is exact enough to matter, else exp(g); the last bit says which.
__device__ __forceinline__ float factor_of(float g) {
  const bool near = g > kMinusLog2;
  const uint32_t bits = __float_as_uint(near ? expm1f(g) : expf(g));
  return __uint_as_float(near ? bits | 1 : bits & ~1u);
}
__device__ __forceinline__ float decayed(float factor, float x) {
  return fmaf(factor, x, (__float_as_uint(factor) & 1) != 0 ? x : 0);
}

// Sums over the 4 columns of a warp: of `count` numbers of every lane, lane i of 4 keeps the i-th quarter (bits reversed).
template <int count>
__device__ __forceinline__ void sum_columns(float (&x)[count], int lane) {
  const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
#pragma unroll
  for (int i = 0; i < count / 2; ++i) {
    const float other = __shfl_xor_sync(0xffffffff, odd ? x[i] : x[i + count / 2], 1);
    x[i] = (odd ? x[i + count / 2] : x[i]) + other;
  }
#pragma unroll
  for (int i = 0; i < count / 4; ++i) {
    const float other = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i + count / 4], 2);
    x[i] = (upper ? x[i + count / 4] : x[i]) + other;
  }
}

template <int kRows>
__device__ void plain(const Plain& p) {
  constexpr int kWarps = plain_warps(kRows), kWidth = 8 * kRows;
  extern __shared__ float memory[];
  float* const slots = memory;                                         // [kPlainTokens][kWarps][kRows * 32]
  float* const written = memory + kPlainTokens * kWarps * kRows * 32;  // [kChunk][kWarps * 4]: v - S'^T k, or v
  float* const factors = written + kChunk * kWarps * kColumns;  // [kChunk][kWidth]: decays; one for all channels: the first
  const Engine& e = p.e;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = lane / kColumns * kRows;
  const int column = (blockIdx.y * kWarps + warp) * kColumns + lane % kColumns, own = warp * kColumns + lane % kColumns;
  const int index = blockIdx.x % p.heads, h = p.first_head + index;
  const int64_t n = blockIdx.x / p.heads;
  const bool mine = column < e.V, corrects = e.beta.data != nullptr;
  const bool channels = e.g_width > 1;
  int64_t b = n, begin = 0, end = e.T;
  if (e.offsets != nullptr) {
    b = 0;
    begin = offset(e, n);
    end = offset(e, n + 1);
  }
  const auto slot = [&](int number, int i) -> float& { return slots[((number * kWarps + warp) * kRows + i) * 32 + lane]; };
  const auto state_at = [&](const States& s, int row) {
    return n * s.stride_n + h * s.stride_h + row * s.stride_row + column * s.stride_column;
  };
  const auto load_key = [&](int64_t t, float(&k)[kRows]) {
    load_numbers(e.k, row_of(e.k, b, t, h) + first, e.K - first, k);
    if (e.l2_norm) normalize(k);
  };
  const auto decay = [&](int i, float(&S)[kRows]) {  // token i of the chunk
    if (e.g_width == 0) return;
    if (channels) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) S[j] = decayed(factors[i * kWidth + first + j], S[j]);
    } else {
      const float factor = factors[i * kWidth];
#pragma unroll
      for (int j = 0; j < kRows; ++j) S[j] = decayed(factor, S[j]);
    }
  };
  const auto beta_of = [&](int64_t t) {
    return corrects ? e.beta_factor * ptx::load(e.beta.data, e.beta.dtype, row_of(e.beta, b, t, h)) : 1;
  };
  // One step of the state; what the token writes is known when it was walked before.
  const auto step = [&](int64_t t, int i, bool known, float(&S)[kRows], const auto& with_decayed) {
    float k[kRows];
    load_key(t, k);
    decay(i, S);
    with_decayed();
    float w;
    if (known) {
      w = written[i * kWarps * kColumns + own];
    } else {
      w = mine ? ptx::load(e.v.data, e.v.dtype, row_of(e.v, b, t, h) + column) : 0;
      if (corrects) {
        float read = 0;
#pragma unroll
        for (int j = 0; j < kRows; ++j) read = fmaf(k[j], S[j], read);
        w -= over_rows(read);
      }
      if (lane < kColumns) written[i * kWarps * kColumns + own] = w;
    }
    const float u = beta_of(t) * w;
#pragma unroll
    for (int j = 0; j < kRows; ++j) S[j] = fmaf(k[j], u, S[j]);
  };

  float R[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    R[i] = first + i < e.K && mine && p.dfinal.data != nullptr ? p.dfinal.data[state_at(p.dfinal, first + i)] : 0;
  }
  const int64_t chunks = (end - begin + kChunk - 1) / kChunk;
#pragma unroll 1
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t start = begin + chunk * kChunk;
    const int tokens = static_cast<int>(end - start < kChunk ? end - start : kChunk);
    float S[kRows], kept[kChunk / kPlainTokens][kRows];
    if (e.g_width != 0) {  // the block is done with those of the chunk behind
      const int width = channels ? kWidth : 1;
      for (int place = threadIdx.x; place < tokens * width; place += 32 * kWarps) {
        const int i = place / width, c = place % width;
        const float g = c < (channels ? e.K : 1) ? ptx::load(e.g.data, e.g.dtype, row_of(e.g, b, start + i, h) + c) : 0;
        factors[i * kWidth + c] = factor_of(g);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t place = ((saved_slot(e, n, begin, chunk) * e.H + h) * e.K + first + i) * e.V + column;
      S[i] = first + i < e.K && mine ? ptx::load(e.saved, saved_dtype(e.v.dtype, e.K, e.V), place) : 0;
    }
#pragma unroll 1
    for (int i = 0; i < tokens; ++i) {
      if (i % kPlainTokens == 0) {
#pragma unroll
        for (int j = 0; j < kRows; ++j) kept[i / kPlainTokens][j] = S[j];
      }
      step(start + i, i, false, S, [] {});
      __syncwarp();
    }
#pragma unroll 1
    for (int part = (tokens - 1) / kPlainTokens; part >= 0; --part) {
      const int from = part * kPlainTokens, count = tokens - from < kPlainTokens ? tokens - from : kPlainTokens;
#pragma unroll
      for (int j = 0; j < kRows; ++j) S[j] = kept[part][j];
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        step(start + from + i, from + i, true, S, [&] {
#pragma unroll
          for (int j = 0; j < kRows; ++j) slot(i, j) = S[j];
        });
      }
#pragma unroll 1
      for (int i = count - 1; i >= 0; --i) {
        const int64_t t = start + from + i;
        float k[kRows], q[kRows];
        load_key(t, k);
        load_numbers(e.q, row_of(e.q, b, t, h) + first, e.K - first, q);
        if (e.l2_norm) normalize(q);
        const float d = mine && p.dout.data != nullptr
                            ? e.scale * ptx::load(p.dout.data, p.dout.dtype, row_of(p.dout, b, t, h) + column)
                            : 0;
        const float beta = beta_of(t), w = mine ? written[(from + i) * kWarps * kColumns + own] : 0, u = beta * w;
        float du = 0;
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          R[j] = fmaf(q[j], d, R[j]);
          du = fmaf(R[j], k[j], du);
        }
        du = over_rows(du);
        const float taken = corrects ? beta * du : 0;
        const float dbeta = over_columns(du * w);
        if (mine && lane < kColumns && p.dv.data != nullptr) {
          ptx::store(const_cast<void*>(p.dv.data), p.dv.dtype, row_of(p.dv, b, t, h) + column, corrects ? taken : du);
        }
        // Sums over the columns of the warp take the place of the token's state, which this warp alone reads.
        float x[3 * kRows];  // dq, dk, dg
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          const float s = slot(i, j);
          x[j] = fmaf(k[j], u, s) * d;
          x[kRows + j] = fmaf(R[j], u, -s * taken);
          R[j] = fmaf(-k[j], taken, R[j]);
          x[2 * kRows + j] = R[j] * s;
        }
        sum_columns(x, lane);
        __syncwarp();
        float* const sums = slots + (i * kWarps + warp) * kRows * 32;
        constexpr int kQuarter = 3 * kRows / 4;
        const int base = ((lane & 1) * 2 + (lane & 2) / 2) * kQuarter;
#pragma unroll
        for (int j = 0; j < kQuarter; ++j) {
          const int place = base + j;
          sums[place / kRows * kWidth + first + place % kRows] = x[j];
        }
        if (lane == 3) sums[3 * kWidth] = dbeta;
        decay(from + i, R);
      }
      __syncthreads();
      const int64_t record = plain_record(e.K), rows = (e.offsets == nullptr ? e.N : 1) * e.T;
      for (int place = threadIdx.x; place < count * static_cast<int>(record); place += 32 * kWarps) {
        const int i = place / static_cast<int>(record), c = place % static_cast<int>(record);
        const int at = c == 3 * e.K ? 3 * kWidth : c / e.K * kWidth + c % e.K;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kWarps; ++j) sum += slots[(i * kWarps + j) * kRows * 32 + at];
        p.parts[((blockIdx.y * rows + b * e.T + start + from + i) * p.heads + index) * record + c] = sum;
      }
      __syncthreads();
    }
  }
  if (p.dinitial.data == nullptr || !mine) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i < e.K) p.dinitial.data[state_at(p.dinitial, first + i)] = R[i];
  }
}

}  // namespace

#define LINNET_PLAIN(rows)                                                                                             \
  extern "C" __global__ void __launch_bounds__(32 * plain_warps(rows)) plain_##rows(const __grid_constant__ Plain p) { \
    plain<rows>(p);                                                                                                    \
  }
LINNET_PLAIN(4)
LINNET_PLAIN(8)
LINNET_PLAIN(16)
LINNET_PLAIN(32)

// A warp takes a token and head of the call: its own dg and dbeta, and where it is the first of its group, dq and dk.
extern "C" __global__ void __launch_bounds__(256) plain_sums(const __grid_constant__ PlainSums s) {
  const Engine& e = s.e;
  const int lane = threadIdx.x % 32;
  const int64_t tokens = (e.offsets == nullptr ? e.N : 1) * e.T, record = plain_record(e.K);
  for (int64_t i = blockIdx.x * 8ll + threadIdx.x / 32; i < tokens * s.heads; i += gridDim.x * 8ll) {
    const int64_t row = i / s.heads, b = row / e.T, t = row % e.T;
    const int index = static_cast<int>(i % s.heads), h = s.first_head + index;
    const auto sum = [&](int64_t at, int group) {
      float x = 0;
      for (int j = 0; j < group; ++j) {
        for (int block = 0; block < s.blocks; ++block) {
          x += s.parts[((block * tokens + row) * s.heads + index + j) * record + at];
        }
      }
      return x;
    };
    const auto keys = [&](const Rows& to, int heads, int64_t from, const Rows& source) {
      if (to.data == nullptr || h % (e.H / heads) != 0) return;
      const int group = e.H / heads;
      const int64_t place = row_of(to, b, t, h / group), at = row_of(source, b, t, h);
      // d(x r) = r (d - x r (x r . d)), r = 1 / sqrt(x.x + eps). With 1 = r^2 (x.x + eps) it is r^3 (eps d + (x.x d - x x.d)):
      // a d along x cancels in double alone, and with one channel the bracket is 0.
      double squares = 0, product = 0, factor = 1;
      if (e.l2_norm) {
        for (int c = lane; c < e.K; c += 32) {
          const double x = ptx::load(source.data, source.dtype, at + c);
          squares += x * x;
          product += x * sum(from + c, group);
        }
        for (int step = 1; step < 32; step *= 2) {
          squares += __shfl_xor_sync(0xffffffff, squares, step);
          product += __shfl_xor_sync(0xffffffff, product, step);
        }
        factor = 1 / sqrt(squares + 1e-6);
      }
      for (int c = lane; c < e.K; c += 32) {
        float x = sum(from + c, group);
        if (e.l2_norm) {
          const double across = e.K == 1 ? 0 : squares * x - product * ptx::load(source.data, source.dtype, at + c);
          x = static_cast<float>(factor * factor * factor * (1e-6 * x + across));
        }
        ptx::store(const_cast<void*>(to.data), to.dtype, place + c, x);
      }
    };
    keys(s.dq, s.q_heads, 0, e.q);
    keys(s.dk, s.k_heads, e.K, e.k);
    if (s.dg.data != nullptr) {
      const int64_t place = row_of(s.dg, b, t, h);
      float all = 0;
      for (int c = lane; c < e.K; c += 32) {
        const float x = sum(2 * e.K + c, 1);
        if (e.g_width > 1) ptx::store(const_cast<void*>(s.dg.data), s.dg.dtype, place + c, x);
        all += x;
      }
      for (int step = 1; step < 32; step *= 2) all += __shfl_xor_sync(0xffffffff, all, step);
      if (e.g_width <= 1 && lane == 0) ptx::store(const_cast<void*>(s.dg.data), s.dg.dtype, place, all);
    }
    if (s.dbeta.data != nullptr && lane == 0) {
      ptx::store(const_cast<void*>(s.dbeta.data), s.dbeta.dtype, row_of(s.dbeta, b, t, h), e.beta_factor * sum(3 * e.K, 1));
    }
  }
}

}  // namespace linnet::cuda
