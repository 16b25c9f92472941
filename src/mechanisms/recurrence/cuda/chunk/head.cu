// The recurrence in chunks of 64 tokens on the multiply-add units: true f32, for every type, keys and values up to 128 wide,
// no beta, no decay or one for all channels, elementwise maps.
//
//   chunk_states    per chunk: B = (K * write)^T V                              all chunks at once
//   fold_chunks     per state element: S_0 of each chunk from those before      S = exp(G_C) S + B, in place
//   chunk_outputs   per chunk: out = scale ((Q * read) S_0 + P V),  P = tril(Q K^T * D)
//
// Sums G of the log decays in a chunk are double, so that their differences are exact beside f32. In reverse time chunks are
// folded from the last one, read and write change places, and P keeps the other triangle. Work per chunk and head at K = V =
// 128: 6.3 MFLOP, 256 threads with 32 to 64 sums each; a state costs 64 KB written, folded and read.
#include "mechanisms/recurrence/cuda/chunk/chunk.cuh"

namespace linnet::cuda {
namespace {

// Sums of the log decays from the chunk's first row, by one warp.
// weights: what multiplies the values that the rows write.
__device__ void sum_decays(const Engine& e, const Place& p, double* sums, float* weights) {
  const int lane = threadIdx.x % 32;
  double g[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane + 32 * i;
    float x = row < p.rows && e.g_width != 0 ? ptx::load(e.g.data, e.g.dtype, row_of(e.g, p.b, p.begin + row, p.h)) : 0;
    weights[row] = 1;
    if (e.steps.A != nullptr) {
      const float delta = row < p.rows ? step_size(e.steps, x + step_bias(e.steps, p.h)) : 0;
      weights[row] = delta;
      x = step_decay(delta, e.steps.A[p.h * e.steps.stride_A]);
    }
    g[i] = x;
    g[i] = g[i] < -1e4 ? -1e4 : g[i];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double before = __shfl_up_sync(0xffffffff, g[i], step);
      if (lane >= step) g[i] += before;
    }
  }
  g[1] += __shfl_sync(0xffffffff, g[0], 31);
  sums[lane] = g[0];
  sums[lane + 32] = g[1];
}

template <int K, int V>
__device__ void chunk_states(const Chunks& chunks) {
  extern __shared__ float memory[];
  __shared__ double sums[C];
  __shared__ float write[C];
  constexpr int kRow = K + 4, vRow = V + 4;
  float *k = memory, *v = memory + C * kRow;
  const Engine& e = chunks.e;
  Place p;
  if (!find_place(e, &p)) return;
  if (threadIdx.x < 32) {
    sum_decays(e, p, sums, write);
    __syncwarp();
    for (int i = 0; i < 2; ++i) {
      const int row = threadIdx.x + 32 * i;
      const bool kept = row >= p.rows || writes(e, p, row);
      write[row] *= kept ? expf(static_cast<float>(e.reverse ? sums[row] : sums[C - 1] - sums[row])) : 0;
    }
    if (threadIdx.x == 0) chunks.totals[p.slot * e.H + p.h] = static_cast<float>(sums[C - 1]);
  }
  __syncthreads();
  load_rows<K>(e.k, p, e.K, chunks.vectors, k, kRow, [&](int row) { return write[row]; });
  load_rows<V>(e.v, p, e.V, chunks.vectors, v, vRow, [&](int row) { return writes(e, p, row) ? 1.0f : 0.0f; });
  __syncthreads();
  const int tx = threadIdx.x % 16 * 4, ty = threadIdx.x / 16 * 4;
  float x[K / 64][V / 64][4][4] = {};
#pragma unroll 4
  for (int t = 0; t < C; ++t) {
    float4 a[K / 64], b[V / 64];
#pragma unroll
    for (int i = 0; i < K / 64; ++i) a[i] = *reinterpret_cast<const float4*>(k + t * kRow + ty + 64 * i);
#pragma unroll
    for (int j = 0; j < V / 64; ++j) b[j] = *reinterpret_cast<const float4*>(v + t * vRow + tx + 64 * j);
#pragma unroll
    for (int i = 0; i < K / 64; ++i) {
#pragma unroll
      for (int j = 0; j < V / 64; ++j) {
#pragma unroll
        for (int r = 0; r < 16; ++r) {
          x[i][j][r / 4][r % 4] = fmaf((&a[i].x)[r / 4], (&b[j].x)[r % 4], x[i][j][r / 4][r % 4]);
        }
      }
    }
  }
  float* to = chunks.states + (p.slot * e.H + p.h) * e.K * e.V;
#pragma unroll
  for (int i = 0; i < K / 64; ++i) {
#pragma unroll
    for (int j = 0; j < V / 64; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = ty + 64 * i + r, c = tx + 64 * j;
        if (row >= e.K) continue;
        if (e.V % 4 == 0) {
          if (c < e.V) *reinterpret_cast<float4*>(to + row * e.V + c) = *reinterpret_cast<const float4*>(x[i][j][r]);
        } else {
#pragma unroll
          for (int u = 0; u < 4; ++u) {
            if (c + u < e.V) to[row * e.V + c + u] = x[i][j][r][u];
          }
        }
      }
    }
  }
}

template <int K, int V>
__device__ void chunk_outputs(const Chunks& chunks) {
  extern __shared__ float memory[];
  __shared__ double sums[C];
  __shared__ float given[C];
  constexpr int kRow = K + 4, pRow = C + 4, kWidth = V / 32;  // columns of a thread
  constexpr int kTile = C * (K + 4 > V ? K + 4 : V);
  float *q = memory, *tile = q + C * kRow, *weights = tile + kTile;
  const Engine& e = chunks.e;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * 8;
  Place p;
  if (!find_place(e, &p)) return;
  if (threadIdx.x < 32) sum_decays(e, p, sums, given);
  load_rows<K>(e.q, p, e.K, chunks.vectors, q, kRow, [](int) { return 1.0f; });
  load_rows<K>(e.k, p, e.K, chunks.vectors, tile, kRow, [&](int row) { return writes(e, p, row) ? 1.0f : 0.0f; });
  __syncthreads();
  {  // P: rows first .. first + 7, columns lane and lane + 32
    float x[8][2] = {};
#pragma unroll 2
    for (int k = 0; k < K; k += 4) {
      float4 b[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) b[j] = *reinterpret_cast<const float4*>(tile + (lane + 32 * j) * kRow + k);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const float4 a = *reinterpret_cast<const float4*>(q + (first + r) * kRow + k);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          x[r][j] = fmaf(a.x, b[j].x, x[r][j]);
          x[r][j] = fmaf(a.y, b[j].y, x[r][j]);
          x[r][j] = fmaf(a.z, b[j].z, x[r][j]);
          x[r][j] = fmaf(a.w, b[j].w, x[r][j]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = first + r, column = lane + 32 * j;
        const bool seen = e.reverse ? column >= row : column <= row;
        float factor = 1;
        if (e.g_width != 0) factor = expf(static_cast<float>(e.reverse ? sums[column] - sums[row] : sums[row] - sums[column]));
        weights[row * pRow + column] = seen ? x[r][j] * (factor * given[column]) : 0;
      }
    }
  }
  float o[8][kWidth] = {};
  const auto multiply = [&](const float* left, int stride, int from, int to) {  // o += left [64, ..] tile
#pragma unroll 2
    for (int k = from; k < to; k += 4) {
      float b[4][kWidth];
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        if constexpr (kWidth == 4) {
          *reinterpret_cast<float4*>(b[u]) = *reinterpret_cast<const float4*>(tile + (k + u) * V + 4 * lane);
        } else {
          *reinterpret_cast<float2*>(b[u]) = *reinterpret_cast<const float2*>(tile + (k + u) * V + 2 * lane);
        }
      }
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const float4 a = *reinterpret_cast<const float4*>(left + (first + r) * stride + k);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          o[r][c] = fmaf(a.x, b[0][c], o[r][c]);
          o[r][c] = fmaf(a.y, b[1][c], o[r][c]);
          o[r][c] = fmaf(a.z, b[2][c], o[r][c]);
          o[r][c] = fmaf(a.w, b[3][c], o[r][c]);
        }
      }
    }
  };
  const float* state = chunks.states + (p.slot * e.H + p.h) * e.K * e.V;
  for (int half = 0; half < K / 64; ++half) {
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < C * V / 4; i += kThreads) {
      const int row = half * 64 + i / (V / 4), c = i % (V / 4) * 4;
      float4 x = {0, 0, 0, 0};
      if (row < e.K && c < e.V) {
        if (e.V % 4 == 0) {
          x = *reinterpret_cast<const float4*>(state + row * e.V + c);
        } else {
          for (int u = 0; u < 4; ++u) (&x.x)[u] = c + u < e.V ? state[row * e.V + c + u] : 0;
        }
      }
      *reinterpret_cast<float4*>(tile + i * 4) = x;
    }
    __syncthreads();
    multiply(q + half * 64, kRow, 0, 64);
  }
  if (e.g_width != 0) {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const float read = expf(static_cast<float>(e.reverse ? sums[C - 1] - sums[first + r] : sums[first + r]));
#pragma unroll
      for (int c = 0; c < kWidth; ++c) o[r][c] *= read;
    }
  }
  __syncthreads();
  load_rows<V>(e.v, p, e.V, chunks.vectors, tile, V, [&](int row) { return writes(e, p, row) ? 1.0f : 0.0f; });
  __syncthreads();
  multiply(weights, pRow, e.reverse ? first : 0, e.reverse ? C : first + 8);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int row = first + r;
    if (row >= p.rows) break;
    const int64_t t = p.begin + row;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      const int column = lane * kWidth + c;
      if (column >= e.V) break;
      float x = e.scale * o[r][c];
      if (e.out_bias.data != nullptr) {
        x += e.out_bias.data[p.n * e.out_bias.stride_n + p.h * e.out_bias.stride_h + column * e.out_bias.stride_column];
      }
      if (e.out_source.data != nullptr && e.out_source.map != Map::identity) {
        const float at = ptx::load(e.out_source.data, e.out_source.dtype, row_of(e.out_source, p.b, t, p.h) + column);
        x *= derivative(e.out_source.map, at);
      }
      if (e.finish.D != nullptr) {
        x = fmaf(skip_of(e.finish, p.h, column), ptx::load(e.v.data, e.v.dtype, row_of(e.v, p.b, t, p.h) + column), x);
      }
      if (e.finish.z.data != nullptr) {
        const float z = ptx::load(e.finish.z.data, e.finish.z.dtype, row_of(e.finish.z, p.b, t, p.h) + column);
        x *= z * sigmoid(z);
      }
      if (e.out_mask != nullptr && e.out_mask[p.b * e.mask_stride_b + t] == 0) x = 0;
      o[r][c] = x;
    }
    const int64_t place = row_of(e.out, p.b, t, p.h) + lane * kWidth;
    if (kWidth == 4 && chunks.vectors && e.out.dtype == Dtype::f32 && lane * kWidth + 4 <= e.V) {
      *reinterpret_cast<float4*>(static_cast<float*>(const_cast<void*>(e.out.data)) + place) =
          float4{o[r][0], o[r][1], o[r][kWidth - 2], o[r][kWidth - 1]};
    } else {
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        if (lane * kWidth + c < e.V) ptx::store(const_cast<void*>(e.out.data), e.out.dtype, place + c, o[r][c]);
      }
    }
  }
}

}  // namespace

// Each thread one element of a head's state, over the sequence's chunks; 8 of them are on their way at once.
extern "C" __global__ void __launch_bounds__(kThreads) fold_chunks(const __grid_constant__ Chunks chunks) {
  const Engine& e = chunks.e;
  const int64_t width = static_cast<int64_t>(e.K) * e.V, at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t head = at / width, element = at % width, n = head / e.H;
  if (n >= e.N) return;
  const int h = static_cast<int>(head % e.H);
  const int64_t row = element / e.V, column = element % e.V;
  const auto place = [&](const States& s) {
    return n * s.stride_n + h * s.stride_h + row * s.stride_row + column * s.stride_column;
  };
  const int64_t first = e.offsets == nullptr ? 0 : offset(e, n), end = e.offsets == nullptr ? e.T : offset(e, n + 1);
  const int64_t count = end > first ? (end - first + C - 1) / C : 0, slot = saved_slot(e, n, first, 0);
  float state = e.initial.data == nullptr ? 0 : e.in_factor * e.initial.data[place(e.initial)];
  constexpr int kAhead = 8;
  for (int64_t i = 0; i < count; i += kAhead) {
    float x[kAhead], g[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j >= count) break;
      const int64_t chunk = (slot + (e.reverse ? count - 1 - i - j : i + j)) * e.H + h;
      x[j] = chunks.states[chunk * width + element];
      g[j] = e.g_width == 0 ? 0 : chunks.totals[chunk];
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j >= count) break;
      const int64_t chunk = (slot + (e.reverse ? count - 1 - i - j : i + j)) * e.H + h;
      chunks.states[chunk * width + element] = state;
      if (e.g_width == 0) {
        state += x[j];
      } else {
        state = g[j] > kMinusLog2 ? state + fmaf(expm1f(g[j]), state, x[j]) : fmaf(expf(g[j]), state, x[j]);
      }
    }
  }
  if (e.final.data != nullptr) e.final.data[place(e.final)] = e.out_factor * state;
}

#define LINNET_CHUNK(K, V)                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, 2) chunk_states_##K##_##V(const __grid_constant__ Chunks c) {  \
    chunk_states<K, V>(c);                                                                                              \
  }                                                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads, 2) chunk_outputs_##K##_##V(const __grid_constant__ Chunks c) { \
    chunk_outputs<K, V>(c);                                                                                             \
  }
LINNET_CHUNK(64, 64)
LINNET_CHUNK(64, 128)
LINNET_CHUNK(128, 64)
LINNET_CHUNK(128, 128)

}  // namespace linnet::cuda
