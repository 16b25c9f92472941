// The gradient of one decay for all channels of a head (gradients.h): a block has one chunk of 64 tokens of a head.
//
// Tiled: q, k, v, dout by the copy engine, S_0 and dS_C as the walks left them, which is how a warpgroup wants its A operand:
// S_0 dout^T and dS_C v^T have key channels as rows and tokens as columns, and their products with q^T and k^T are sums over
// rows. Nothing is written but dg; 2 blocks of a multiprocessor keep 256 KB on the way.
#include "mechanisms/recurrence/cuda/tile/gradients.h"
#include "mechanisms/recurrence/cuda/tile/pairs.cuh"
#include "mechanisms/recurrence/cuda/tile/tile.cuh"

namespace linnet::cuda {
namespace {

template <int K, int V>
struct PairsShared {
  alignas(1024) char q[K / 64 * kPanel];
  char k[K / 64 * kPanel];
  char v[V / 64 * kPanel];
  char dout[V / 64 * kPanel];
  Decays decays;
  float read[C], write[C], weight[C];         // weight: of what a row writes
  float reads[K / 16][C], writes[K / 16][C];  // by warp
  float rows[C], columns[4][C];
  float over[K / 16];
  uint64_t full;
};

// x[token] = the sum over this warp's 16 rows of O [64 rows, 64 tokens] times the tile's rows (key channels) of the same
// tokens.
template <bool bf16>
__device__ __forceinline__ void dot_rows(const float (&O)[32], uint32_t tile, const float (&units)[2], int warp, int lane,
                                         float* to) {
  float sums[16];
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    const int token = 16 * kk + lane / 16 * 8 + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
    uint32_t x[4];
    ptx::load_matrices_transposed(x, tile + ptx::tile_byte(C, token, channel));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 up = ptx::unpack<bf16>(x[2 * half]), low = ptx::unpack<bf16>(x[2 * half + 1]);
      const float* o = O + 4 * (2 * kk + half);
      sums[4 * kk + 2 * half] = units[0] * o[0] * up.x + units[1] * o[2] * low.x;
      sums[4 * kk + 2 * half + 1] = units[0] * o[1] * up.y + units[1] * o[3] * low.y;
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sums[i] += __shfl_xor_sync(0xffffffff, sums[i], step);
  }
  if (lane >= 4) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[8 * i + 2 * lane] = sums[2 * i];
    to[8 * i + 2 * lane + 1] = sums[2 * i + 1];
  }
}

template <bool bf16, int K, int V>
__device__ void pairs_tile(const Pairs& pairs) {
  extern __shared__ char memory[];
  static_assert(sizeof(PairsShared<K, V>) + 1024 <= pairs_shared_bytes(K, V));
  auto& s = ptx::shared_as<PairsShared<K, V>>(memory);
  const Engine& e = pairs.e;
  const int h = blockIdx.x % e.H, chunk = blockIdx.y, group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  const int64_t n = blockIdx.x / e.H;
  const Walk w = walk_of(e, n, 0, false);
  if (chunk >= w.count) return;
  const int rows = static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(chunk) * C));
  if (threadIdx.x == 0) {
    ptx::barrier_init(&s.full, 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int t = static_cast<int>(w.begin) + chunk * C, b = static_cast<int>(w.b);
    ptx::barrier_arrive_expect(&s.full, (2 * K + 2 * V) / 64 * kPanel);
    ptx::load_box(s.dout, &pairs.dout, &s.full, 0, t, 0, h / e.out.group, b);
    ptx::load_box(s.q, &pairs.q, &s.full, 0, t, 0, h / e.q.group, b);
    ptx::load_box(s.v, &pairs.v, &s.full, 0, t, 0, h / e.v.group, b);
    ptx::load_box(s.k, &pairs.k, &s.full, 0, t, 0, h / e.k.group, b);
  }
  const int64_t place = saved_slot(e, n, w.begin, chunk) * e.H + h;
  uint32_t states[2][V / 4];
  float units[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto* from = static_cast<const uint4*>(pairs.saved[i]) + (place * (K / 64) + group) * (128 * V / 16) + thread;
#pragma unroll
    for (int j = 0; j < V / 16; ++j) {
      const uint4 x = __ldcs(from + 128 * j);
      states[i][4 * j] = x.x, states[i][4 * j + 1] = x.y, states[i][4 * j + 2] = x.z, states[i][4 * j + 3] = x.w;
    }
    const float* unit = pairs.units[i] + place * K + group * 64 + warp * 16 + lane / 4;
    units[i][0] = bf16 ? 1 : unit[0];
    units[i][1] = bf16 ? 1 : unit[8];
  }
  float all = 0;  // G_C, of the first warp
  if (threadIdx.x < 32) {
    const Numbers numbers = ask_numbers(e.g, w, h, chunk, lane);
    float2 g = take_gates(numbers, e.g.dtype), weight = {1, 1};
    if (e.steps.A != nullptr) {
      const float2 dt = take_numbers(numbers, e.g.dtype);
      const float rate = e.steps.A[h * e.steps.stride_A], bias = step_bias(e.steps, h);
      weight = {lane < rows ? step_size<true>(e.steps, dt.x + bias) : 0,
                lane + 32 < rows ? step_size<true>(e.steps, dt.y + bias) : 0};
      g = {fmaxf(step_decay(weight.x, rate), kLeastGate), fmaxf(step_decay(weight.y, rate), kLeastGate)};
    }
    const Sums G = sum_gates(g, lane);
    store_decays(G, lane, s.decays);
    s.weight[lane] = weight.x;
    s.weight[lane + 32] = weight.y;
    s.read[lane] = expf(G.low);
    s.read[lane + 32] = expf(G.high);
    s.write[lane] = expf(G.all - G.low);
    s.write[lane + 32] = expf(G.all - G.high);
    all = G.all;
  }
  __syncthreads();
  ptx::barrier_wait(&s.full, 0);

  // reads and writes
  float O[32];
  const char* const panels[2] = {s.dout, s.v};
  const char* const dotted[2] = {s.q, s.k};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t tile = ptx::shared_address(panels[i]);
    ptx::hold(states[i]);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < V / 16; ++kk) {
      ptx::wgmma<bf16, false>(O, states[i] + 4 * kk, ptx::descriptor_k_major(tile, C, kk), kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(O);
    dot_rows<bf16>(O, ptx::shared_address(dotted[i]) + group * kPanel, units[i], warp, lane,
                   (i == 0 ? s.reads : s.writes)[group * 4 + warp]);
  }
  float over = 0;  // <S_0, dS_C>, this warp's part
#pragma unroll
  for (int j = 0; j < V / 4; ++j) {
    const float2 x = ptx::unpack<bf16>(states[0][j]), y = ptx::unpack<bf16>(states[1][j]);
    over = fmaf(units[0][j & 1] * units[1][j & 1], fmaf(x.x, y.x, x.y * y.y), over);
  }
  for (int step = 1; step < 32; step *= 2) over += __shfl_xor_sync(0xffffffff, over, step);
  if (lane == 0) s.over[group * 4 + warp] = over;

  if (group == 0) {  // pairs inside the chunk
    float p[32], x[32];
    multiply_pairs<bf16, K, V>(p, x, s.q, s.k, s.v, s.dout);
    weigh<true, true>(p, s.decays, warp, lane, false);
    const int row = warp * 16 + lane / 4;
    float sums[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 32; ++j) {  // rows behind the sequence see nothing; columns there are seen by none
      const int r = row + ptx::Fragment::below(j);
      const bool seen = r < rows && ptx::Fragment{lane}.column(j) < r;
      p[j] = seen ? p[j] * x[j] * s.weight[ptx::Fragment{lane}.column(j)] : 0;
      sums[j / 2 % 2] += p[j];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] = sums[i] + __shfl_xor_sync(0xffffffff, sums[i], 1);
      sums[i] = sums[i] + __shfl_xor_sync(0xffffffff, sums[i], 2);
      if (lane % 4 == 0) s.rows[row + 8 * i] = sums[i];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = p[4 * j + i] + p[4 * j + 2 + i];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        if (lane < 4) s.columns[warp][8 * j + 2 * lane + i] = sum;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  float whole[2], write[2], product = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = lane + 32 * i;
    float reads = 0, writes = 0, columns = 0;
    for (int j = 0; j < K / 16; ++j) {
      reads += s.reads[j][t];
      writes += s.writes[j][t];
    }
    for (int j = 0; j < 4; ++j) columns += s.columns[j][t];
    whole[i] = t < rows ? e.scale * (s.rows[t] - columns + s.read[t] * reads) : 0;
    write[i] = t < rows ? e.scale * s.write[t] * s.weight[t] * writes : 0;
  }
  for (int j = 0; j < K / 16; ++j) product += s.over[j];
  store_dg(pairs, w, h, chunk, lane, whole, write, e.scale * expf(all) * product, load_gates(pairs, w, h, chunk, lane).g);
}

}  // namespace

#define LINNET_PAIRS(name, bf16, K, V)                                                                              \
  extern "C" __global__ void __launch_bounds__(2 * K, K == 128 ? 2 : 4) name(const __grid_constant__ Pairs pairs) { \
    pairs_tile<bf16, K, V>(pairs);                                                                                  \
  }
LINNET_PAIRS(pairs_bf16_64_64, true, 64, 64)
LINNET_PAIRS(pairs_bf16_64_128, true, 64, 128)
LINNET_PAIRS(pairs_bf16_128_64, true, 128, 64)
LINNET_PAIRS(pairs_bf16_128_128, true, 128, 128)
LINNET_PAIRS(pairs_f16_64_64, false, 64, 64)
LINNET_PAIRS(pairs_f16_64_128, false, 64, 128)
LINNET_PAIRS(pairs_f16_128_64, false, 128, 64)
LINNET_PAIRS(pairs_f16_128_128, false, 128, 128)

}  // namespace linnet::cuda
