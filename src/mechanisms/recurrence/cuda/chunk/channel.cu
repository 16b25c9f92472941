// The recurrence with a decay per channel in chunks of 64 tokens on the multiply-add units: true f32, for every type, keys and
// values up to 128 wide, no beta. The three kernels of head.cu, with decays that differ by channel:
//
//   channel_chunk_states    B = (K exp(G_C - G))^T V
//   fold_channel_chunks     S_0 of each chunk, S = exp(G_C) S + B, in place
//   channel_chunk_outputs   out = scale ((Q exp(G)) S_0 + P V),  P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)
//
// No decay is the difference of two sums from elsewhere. A chunk is four blocks of 16 rows: between blocks, the decay is that
// from a row to the end of its block, that of the blocks between, and that from the start of a block to a row, each at most 1;
// inside of a block keys are decayed row by row.
#include "mechanisms/recurrence/cuda/chunk/chunk.cuh"

namespace linnet::cuda {
namespace {

constexpr int kBlock = 16, kBlocks = C / kBlock;

__device__ __forceinline__ float gate_of(const Engine& e, const Place& p, int row, int c) {
  return row < p.rows && c < e.K ? ptx::load(e.g.data, e.g.dtype, row_of(e.g, p.b, p.begin + row, p.h) + c) : 0;
}

template <int K, int V>
__device__ void states(const Chunks& chunks) {
  extern __shared__ float memory[];
  __shared__ float totals[kBlocks][K];
  constexpr int kRow = K + 4, vRow = V + 4;
  float *k = memory, *v = memory + C * kRow;
  const Engine& e = chunks.e;
  Place p;
  if (!find_place(e, &p)) return;
  load_rows<K>(e.k, p, e.K, chunks.vectors, k, kRow, [](int) { return 1.0f; });
  load_rows<V>(e.v, p, e.V, chunks.vectors, v, vRow, [](int) { return 1.0f; });
  for (int unit = threadIdx.x; unit < kBlocks * K; unit += kThreads) {
    const int block = unit / K, c = unit % K;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) sum += gate_of(e, p, block * kBlock + i, c);
    totals[block][c] = sum;
  }
  __syncthreads();
  for (int unit = threadIdx.x; unit < kBlocks * K; unit += kThreads) {
    const int block = unit / K, c = unit % K;
    float sum = 0;
    for (int i = kBlocks - 1; i > block; --i) sum += totals[i][c];
#pragma unroll
    for (int i = kBlock - 1; i >= 0; --i) {
      const int row = block * kBlock + i;
      k[row * kRow + c] *= expf(sum);
      sum += gate_of(e, p, row, c);
    }
    if (block == 0 && c < e.K) chunks.totals[(p.slot * e.H + p.h) * e.K + c] = sum;
  }
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
      for (int r = 0; r < 16; ++r) {
        const int row = ty + 64 * i + r / 4, c = tx + 64 * j + r % 4;
        if (row < e.K && c < e.V) to[row * e.V + c] = x[i][j][r / 4][r % 4];
      }
    }
  }
}

template <int K, int V>
__device__ void outputs(const Chunks& chunks) {
  extern __shared__ float memory[];
  __shared__ float totals[kBlocks][K], before[kBlocks][K], between[3][K];  // between: blocks 0 and 2, 1 and 3, 0 and 3
  constexpr int kRow = K + 4, pRow = C + 4, kWidth = V / 32, kOwn = K / 32;
  constexpr int kTile = C * (K + 4 > V ? K + 4 : V);
  float *q = memory, *tile = q + C * kRow, *weights = tile + kTile;
  const Engine& e = chunks.e;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * 8, own = warp / 2;
  Place p;
  if (!find_place(e, &p)) return;
  load_rows<K>(e.q, p, e.K, chunks.vectors, q, kRow, [](int) { return 1.0f; });
  load_rows<K>(e.k, p, e.K, chunks.vectors, tile, kRow, [](int) { return 1.0f; });
  for (int i = threadIdx.x; i < C * pRow; i += kThreads) weights[i] = 0;
  __syncthreads();
  {  // pairs of a block: 8 columns of its 16 rows to a warp
    const int from = own * kBlock + warp % 2 * 8;
    float decayed[8][kOwn];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int u = 0; u < kOwn; ++u) decayed[j][u] = tile[(from + j) * kRow + lane + 32 * u];
    }
#pragma unroll 1
    for (int row = from; row < own * kBlock + kBlock; ++row) {
      float a[kOwn], x[kOwn], mine = 0;
#pragma unroll
      for (int u = 0; u < kOwn; ++u) {
        x[u] = q[row * kRow + lane + 32 * u];
        a[u] = expf(gate_of(e, p, row, lane + 32 * u));
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (from + j > row) continue;
        float sum = 0;
#pragma unroll
        for (int u = 0; u < kOwn; ++u) {
          if (from + j < row) decayed[j][u] *= a[u];
          sum = fmaf(x[u], decayed[j][u], sum);
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        if (lane == j) mine = sum;
      }
      if (lane < 8 && from + lane <= row) weights[row * pRow + from + lane] = mine;
    }
  }
  __syncthreads();
  for (int unit = threadIdx.x; unit < kBlocks * K; unit += kThreads) {
    const int block = unit / K, c = unit % K;
    float sum = 0, rest = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int row = block * kBlock + i;
      sum += gate_of(e, p, row, c);
      q[row * kRow + c] *= expf(sum);
    }
#pragma unroll
    for (int i = kBlock - 1; i >= 0; --i) {
      const int row = block * kBlock + i;
      tile[row * kRow + c] *= expf(rest);
      rest += gate_of(e, p, row, c);
    }
    totals[block][c] = sum;
  }
  __syncthreads();
  if (threadIdx.x < K) {
    const int c = threadIdx.x;
    float sum = 0;
    for (int i = 0; i < kBlocks; ++i) {
      before[i][c] = expf(sum);
      sum += totals[i][c];
    }
    between[0][c] = expf(totals[1][c]);
    between[1][c] = expf(totals[2][c]);
    between[2][c] = expf(totals[1][c] + totals[2][c]);
  }
  __syncthreads();
  if (own > 0) {  // pairs of two blocks: columns lane and lane + 32
    float x[8][2] = {};
    const float* middle[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int block = (lane + 32 * j) / kBlock;
      middle[j] = own - block == 2 ? between[block == 0 ? 0 : 1] : own - block == 3 ? between[2] : nullptr;
    }
    const int count = own * kBlock > 32 ? 2 : 1;
#pragma unroll 2
    for (int k = 0; k < K; k += 4) {
      float4 b[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (j >= count) continue;
        b[j] = *reinterpret_cast<const float4*>(tile + (lane + 32 * j) * kRow + k);
        if (middle[j] != nullptr) {
          const float4 f = *reinterpret_cast<const float4*>(middle[j] + k);
          b[j] = {b[j].x * f.x, b[j].y * f.y, b[j].z * f.z, b[j].w * f.w};
        }
      }
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const float4 a = *reinterpret_cast<const float4*>(q + (first + r) * kRow + k);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (j >= count) continue;
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
        if (lane + 32 * j < own * kBlock) weights[(first + r) * pRow + lane + 32 * j] = x[r][j];
      }
    }
  }
  __syncwarp();
  for (int i = lane; i < 8 * K; i += 32) q[(first + i / K) * kRow + i % K] *= before[own][i % K];  // its own rows
  float o[8][kWidth] = {};
  const auto multiply = [&](const float* left, int stride, int to) {  // o += left [64, ..] tile
#pragma unroll 2
    for (int k = 0; k < to; k += 4) {
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
    for (int i = threadIdx.x; i < C * V; i += kThreads) {
      const int row = half * 64 + i / V, c = i % V;
      tile[i] = row < e.K && c < e.V ? state[row * e.V + c] : 0;
    }
    __syncthreads();
    multiply(q + half * 64, kRow, 64);
  }
  __syncthreads();
  load_rows<V>(e.v, p, e.V, chunks.vectors, tile, V, [](int) { return 1.0f; });
  __syncthreads();
  multiply(weights, pRow, first + 8);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    if (first + r >= p.rows) break;
    const int64_t place = row_of(e.out, p.b, p.begin + first + r, p.h) + lane * kWidth;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      if (lane * kWidth + c < e.V) ptx::store(const_cast<void*>(e.out.data), e.out.dtype, place + c, e.scale * o[r][c]);
    }
  }
}

}  // namespace

// Each thread one element of a head's state, over the sequence's chunks; 8 of them are on their way at once.
extern "C" __global__ void __launch_bounds__(kThreads) fold_channel_chunks(const __grid_constant__ Chunks chunks) {
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
      const int64_t chunk = (slot + i + j) * e.H + h;
      x[j] = chunks.states[chunk * width + element];
      g[j] = chunks.totals[chunk * e.K + row];
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j >= count) break;
      chunks.states[((slot + i + j) * e.H + h) * width + element] = state;
      state = g[j] > kMinusLog2 ? state + fmaf(expm1f(g[j]), state, x[j]) : fmaf(expf(g[j]), state, x[j]);
    }
  }
  if (e.final.data != nullptr) e.final.data[place(e.final)] = e.out_factor * state;
}

#define LINNET_CHANNEL_CHUNK(K, V)                                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads, 2) channel_chunk_states_##K##_##V(const __grid_constant__ Chunks c) { \
    states<K, V>(c);                                                                                                           \
  }                                                                                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                                    \
      channel_chunk_outputs_##K##_##V(const __grid_constant__ Chunks c) {                                                      \
    outputs<K, V>(c);                                                                                                          \
  }
LINNET_CHANNEL_CHUNK(64, 64)
LINNET_CHANNEL_CHUNK(64, 128)
LINNET_CHANNEL_CHUNK(128, 64)
LINNET_CHANNEL_CHUNK(128, 128)

}  // namespace linnet::cuda
