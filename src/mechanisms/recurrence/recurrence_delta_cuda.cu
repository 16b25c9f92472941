// The delta rules on matrix units (bf16, K = V of 64 or 128): the walk of recurrence_tile.cuh with the triangular system of a
// chunk (docs/mechanisms/recurrence.md), everything transposed.
//
//   U = S^T K^T * read     Y = V^T - U     N = Y T^T          T = (I + tril(beta K K^T D, -1))^-1 diag(beta)
//   S^T = total S^T + (N * write) K        O^T = scale (S^T Q^T * read + N P^T)
//
//   producer    one thread: Q, K, V of the next chunks by the copy engine, three stages
//   state       a warpgroup for each 64 value channels: three waits per chunk
//   auxiliary   a warpgroup, one chunk ahead: decays, K K^T, its inverse, Q K^T
//
// T, Y, P and N are operands in tf32: in bf16 they alone would cost more than the tolerance (with keys that are alike, four
// times as much). The inverse is in f32: 16-row blocks by substitution, then 16 -> 32 -> 64 by -X22 (A21 X11).
//
// Products per chunk, D = 128: 12 of 64 x 64 x 128 where tf32 counts twice; at 16,2048,16,128 0.147 ms of an H200's matrix
// units.
#include "mechanisms/recurrence/recurrence_tile.cuh"

namespace linnet::cuda {
namespace {

constexpr int kLine = 68;  // floats of a row of the inverse's scratch: 8 rows of a column lie in 8 banks

struct alignas(16) DeltaGates {
  float read[C], write[C], beta[C];
  Decays decays;
  float total;
};

template <int D>
struct DeltaShared {
  alignas(1024) char q[kStages][D / 64 * kPanel];
  char k[kStages][D / 64 * kPanel];
  char v[kStages][D / 64 * kPanel];
  char t[2 * kPanel], p[2 * kPanel];  // f32, paired columns
  char o[D / 64][kPanel];
  float x[C][kLine];
  DeltaGates gates[2];
  uint64_t full[kStages], empty[kStages], t_full, t_empty, p_full, p_empty;
};

// x[rows of the block][its columns] = A -> (I + A)^-1 for the 16 x 16 block on the diagonal; lane = column.
__device__ void invert_block(float (&x)[C][kLine], int first, int lane) {
  float column[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    asm volatile("" ::: "memory");  // keeps ptxas from loading the whole block at once, for which there is no room
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 a = *reinterpret_cast<const float4*>(&x[first + i][first + j]);
      sum[0] = fmaf(a.x, column[j], sum[0]);
      if (j + 1 < i) sum[1] = fmaf(a.y, column[j + 1], sum[1]);
      if (j + 2 < i) sum[2] = fmaf(a.z, column[j + 2], sum[2]);
      if (j + 3 < i) sum[3] = fmaf(a.w, column[j + 3], sum[3]);
    }
    column[i] = i == lane ? 1 : i > lane ? -((sum[0] + sum[1]) + (sum[2] + sum[3])) : 0;
  }
  __syncwarp();
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[first + i][first + lane] = column[i];
  }
}

// 16 x 8 tiles of sign * A B: rows of A from `a`, columns of B from `b`, 8 * kSteps of K; the tile goes to `to`. In f32 by
// three products of tf32 halves (the fourth, low times low, is below f32's rounding).
template <int kSteps>
__device__ __forceinline__ void multiply_tile(const float* a, const float* b, float* to, float sign, int lane) {
  float d[4] = {};
#pragma unroll 2
  for (int k = 0; k < kSteps; ++k) {
    float x[4], y[2];
    uint32_t x_high[4], x_low[4], y_high[2], y_low[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = a[(lane / 4 + i % 2 * 8) * kLine + 8 * k + lane % 4 + i / 2 * 4];
#pragma unroll
    for (int i = 0; i < 2; ++i) y[i] = b[(8 * k + lane % 4 + i * 4) * kLine + lane / 4];
      // The upper bits, and what they leave: exact, and the instruction cuts the rest off.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x_high[i] = __float_as_uint(x[i]) & 0xffffe000;
      x_low[i] = __float_as_uint(x[i] - __uint_as_float(x_high[i]));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      y_high[i] = __float_as_uint(y[i]) & 0xffffe000;
      y_low[i] = __float_as_uint(y[i] - __uint_as_float(y_high[i]));
    }
    ptx::mma_tf32(d, x_low, y_high);
    ptx::mma_tf32(d, x_high, y_low);
    ptx::mma_tf32(d, x_high, y_high);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    *reinterpret_cast<float2*>(&to[(lane / 4 + 8 * i) * kLine + lane % 4 * 2]) = float2{sign * d[2 * i], sign * d[2 * i + 1]};
  }
}

// (I + A)^-1 in place of A, strictly lower: 16 -> 32 -> 64 by X21 = -X22 (A21 X11). Blocks above the diagonal serve as scratch.
// 128 threads.
__device__ void invert(float (&x)[C][kLine], int thread) {
  const int warp = thread / 32, lane = thread % 32;
  invert_block(x, warp * 16, lane);
  ptx::group_sync<1, 128>();
  // Two pairs of 16, two warps each: 8 columns of 16.
  const int pair = warp / 2 * 32, part = warp % 2 * 8;
  multiply_tile<2>(&x[pair + 16][pair], &x[pair][pair + part], &x[pair][pair + 16 + part], 1, lane);
  ptx::group_sync<1, 128>();
  multiply_tile<2>(&x[pair + 16][pair + 16], &x[pair][pair + 16 + part], &x[pair + 16][pair + part], -1, lane);
  ptx::group_sync<1, 128>();
  // That scratch is now read as a part of X11 and X22, where it is zero.
  *reinterpret_cast<float4*>(&x[pair + thread % 64 / 4][pair + 16 + thread % 4 * 4]) = float4{0, 0, 0, 0};
  ptx::group_sync<1, 128>();
  // One pair of 32: a warp takes 16 rows x 16 columns.
  const int row = warp / 2 * 16, column = warp % 2 * 16;
#pragma unroll 1
  for (int c = 0; c < 16; c += 8) multiply_tile<4>(&x[32 + row][0], &x[0][column + c], &x[row][32 + column + c], 1, lane);
  ptx::group_sync<1, 128>();
#pragma unroll 1
  for (int c = 0; c < 16; c += 8)
    multiply_tile<4>(&x[32 + row][32], &x[0][32 + column + c], &x[32 + row][column + c], -1, lane);
  ptx::group_sync<1, 128>();
}

template <int D, bool decays>
__device__ void assist_delta(const Tile& tile, const Walk& w, int h, DeltaShared<D>& s) {
  const Engine& e = tile.e;
  int thread = threadIdx.x % 128, lane = thread % 32;
  const int warp = thread / 32;
  // Addresses of shared memory are the same in every chunk, and kept in registers there would be no room for the product: each
  // part of a chunk computes its own again.
  const auto forget = [&] {
    asm volatile("" : "+r"(thread), "+r"(lane));
    return warp * 16 + lane / 4;
  };
  for (int i = thread; i < 2 * kPanel / 16; i += 128) reinterpret_cast<uint4*>(s.p)[i] = uint4{0, 0, 0, 0};
  ptx::group_sync<1, 128>();
  Numbers next_gates, next_beta;
  if (warp == 0) {
    if constexpr (decays) next_gates = ask_numbers(e.g, w, h, w.first, lane);
    next_beta = ask_numbers(e.beta, w, h, w.first, lane);
  }
  for (int i = 0; i < w.count; ++i) {
    const int stage = i % kStages, chunk = w.first + i;
    const int rows = static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(chunk) * C));
    DeltaGates& gates = s.gates[i % 2];
    const uint32_t q = ptx::shared_address(s.q[stage]), k = ptx::shared_address(s.k[stage]);
    ptx::barrier_wait(&s.full[stage], (i / kStages) & 1);
    float p[32];
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      const uint64_t keys = ptx::descriptor_k_major(k, C, kk);
      ptx::wgmma_shared<true, false, false>(p, keys, keys, kk > 0);
    }
    ptx::wgmma_commit();
    if (warp == 0) {
      Sums G = {};
      const float2 beta = take_numbers(next_beta, e.beta.dtype);
      if constexpr (decays) {
        G = sum_gates(take_gates(next_gates, e.g.dtype), lane);
        next_gates = ask_numbers(e.g, w, h, chunk + 1, lane);
      }
      next_beta = ask_numbers(e.beta, w, h, chunk + 1, lane);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = lane + 32 * j;
        const float sum = j == 0 ? G.low : G.high;
        gates.beta[at] = e.beta_factor * (j == 0 ? beta.x : beta.y);
        gates.read[at] = expf(sum);
        gates.write[at] = expf(G.all - sum);
      }
      if constexpr (decays) store_decays(G, lane, gates.decays);
      if (lane == 0) gates.total = expf(G.all);
    }
    ptx::group_sync<1, 128>();
    int row = forget();
    ptx::wgmma_wait<0>();
    ptx::hold(p);
    weigh<decays, true>(p, gates.decays, warp, lane, false);
    const float beta[2] = {gates.beta[row], gates.beta[row + 8]};
    const bool in[2] = {row < rows, row + 8 < rows};
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      if (j / 8 > warp) continue;
      const int half = j / 2 % 2;
      *reinterpret_cast<float2*>(&s.x[row + 8 * half][j / 4 * 8 + lane % 4 * 2]) =
          float2{in[half] ? beta[half] * p[j] : 0, in[half] ? beta[half] * p[j + 1] : 0};
    }
    ptx::group_sync<1, 128>();
    forget();
    invert(s.x, thread);
    forget();
    if (i >= 1) ptx::barrier_wait(&s.t_empty, (i - 1) & 1);
    {
      const int r = thread % 64, first = thread / 64 * 32;
#pragma unroll
      for (int c = first; c < first + 32; c += 8) {
        float x[8], beta[8];
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          *reinterpret_cast<float4*>(x + j) = *reinterpret_cast<const float4*>(&s.x[r][c + j]);
          *reinterpret_cast<float4*>(beta + j) = *reinterpret_cast<const float4*>(&gates.beta[c + j]);
        }
        uint32_t t[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) t[j] = ptx::round_tf32(c + j <= r ? x[j] * beta[j] : 0);
        *reinterpret_cast<uint4*>(s.t + ptx::tile_byte_paired_f32(C, r, c)) = uint4{t[0], t[2], t[4], t[6]};
        *reinterpret_cast<uint4*>(s.t + ptx::tile_byte_paired_f32(C, r, c + 1)) = uint4{t[1], t[3], t[5], t[7]};
      }
    }
    ptx::fence_async_shared();
    ptx::barrier_arrive(&s.t_full);
    float scores[32];
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      ptx::wgmma_shared<true, false, false>(scores, ptx::descriptor_k_major(q, C, kk), ptx::descriptor_k_major(k, C, kk),
                                            kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    ptx::barrier_arrive(&s.empty[stage]);
    if (i >= 1) ptx::barrier_wait(&s.p_empty, (i - 1) & 1);
    row = forget();
    weigh<decays, false>(scores, gates.decays, warp, lane, false);
    // tile_byte_paired_f32, by hand: a row's pieces differ in bits 4 to 6.
    char* at = s.p + row * 128 + lane % 4 * 4;
    const uint32_t swizzle = lane / 4 * 16;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      if (j / 8 > warp) continue;  // zero from the start
      const uint32_t piece = (j / 4 % 4 * 2 + (j & 1)) * 16;
      *reinterpret_cast<uint32_t*>(at + (piece ^ swizzle) + j / 16 * kPanel + (j & 2) * 512) = ptx::round_tf32(scores[j]);
    }
    ptx::fence_async_shared();
    ptx::barrier_arrive(&s.p_full);
  }
}

template <int D, bool decays>
__device__ void carry_delta(const Tile& tile, const Walk& w, int64_t n, int h, DeltaShared<D>& s) {
  const Engine& e = tile.e;
  const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int row = group * 64 + warp * 16 + lane / 4;  // of S^T: this value channel and the one 8 below
  constexpr int kState = D / 2;
  float S[kState];
  const auto element = [&](const States& states, int j) -> float& {
    const int channel = j / 4 * 8 + lane % 4 * 2 + (j & 1), value = row + (j & 2) * 4;
    return states.data[n * states.stride_n + h * states.stride_h + channel * states.stride_row + value * states.stride_column];
  };
#pragma unroll
  for (int j = 0; j < kState; ++j) S[j] = e.initial.data != nullptr ? e.in_factor * element(e.initial, j) : 0;

  const uint32_t t = ptx::shared_address(s.t), p = ptx::shared_address(s.p);
  for (int i = 0; i < w.count; ++i) {
    const int stage = i % kStages, chunk = w.first + i;
    const int rows = static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(chunk) * C));
    const DeltaGates& gates = s.gates[i % 2];
    const uint32_t q = ptx::shared_address(s.q[stage]), k = ptx::shared_address(s.k[stage]);
    const uint32_t v = ptx::shared_address(s.v[stage]) + group * kPanel;

    float U[32], O[32];
    {
      uint32_t A[kState / 2];
#pragma unroll
      for (int j = 0; j < kState; j += 2) A[j / 2] = ptx::pack<true>(S[j], S[j + 1]);
      ptx::barrier_wait(&s.full[stage], (i / kStages) & 1);
      if (rows < C) clear_rows<D, D>(s.k[stage], s.v[stage], rows, group * 128 + thread);
      ptx::hold(A);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk) ptx::wgmma<true, false>(U, A + 4 * kk, ptx::descriptor_k_major(k, C, kk), kk > 0);
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk) ptx::wgmma<true, false>(O, A + 4 * kk, ptx::descriptor_k_major(q, C, kk), kk > 0);
      ptx::wgmma_commit();
      ptx::barrier_wait(&s.t_full, i & 1);
      ptx::wgmma_wait<0>();
      ptx::hold(U);
      ptx::hold(O);
    }
    // Y = V^T - U, in tf32.
    uint32_t Y[32];
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      uint32_t values[4];
      const int token = 16 * kk + lane / 16 * 8 + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
      ptx::load_matrices_transposed(values, v + ptx::tile_byte(C, token, channel));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = ptx::unpack<true>(values[j]);
        float2 read = {1, 1};
        if constexpr (decays) read = *reinterpret_cast<const float2*>(&gates.read[16 * kk + j / 2 * 8 + lane % 4 * 2]);
        Y[8 * kk + 2 * j] = ptx::round_tf32(fmaf(-read.x, U[8 * kk + 2 * j], x.x));
        Y[8 * kk + 2 * j + 1] = ptx::round_tf32(fmaf(-read.y, U[8 * kk + 2 * j + 1], x.y));
      }
    }
    float N[32];
    ptx::hold(Y);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      ptx::wgmma_tf32(N, Y[4 * j], Y[4 * j + 2], Y[4 * j + 1], Y[4 * j + 3], ptx::descriptor_k_major(t, C, j), j > 0);
    }
    ptx::wgmma_commit();
    if constexpr (decays) {
      const float total = gates.total;
#pragma unroll
      for (int j = 0; j < 32; ++j) O[j] *= gates.read[j / 4 * 8 + lane % 4 * 2 + (j & 1)];
#pragma unroll
      for (int j = 0; j < kState; ++j) S[j] *= total;
    }
    ptx::wgmma_wait<0>();
    ptx::hold(N);
    ptx::barrier_arrive(&s.t_empty);
    // N times its decays as bf16 for the state, N itself as tf32 for the output.
    uint32_t written[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float2 write = {1, 1};
      if constexpr (decays) write = *reinterpret_cast<const float2*>(&gates.write[j / 2 * 8 + lane % 4 * 2]);
      written[j] = ptx::pack<true>(N[2 * j] * write.x, N[2 * j + 1] * write.y);
    }
#pragma unroll
    for (int j = 0; j < 32; ++j) Y[j] = ptx::round_tf32(N[j]);
    ptx::barrier_wait(&s.p_full, i & 1);
    ptx::hold(S);
    ptx::hold(O);
    ptx::hold(written);
    ptx::hold(Y);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) ptx::wgmma<true, true>(S, written + 4 * kk, ptx::descriptor_mn_major(k, C, kk), true);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      ptx::wgmma_tf32(O, Y[4 * j], Y[4 * j + 2], Y[4 * j + 1], Y[4 * j + 3], ptx::descriptor_k_major(p, C, j), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(S);
    ptx::hold(O);
    ptx::barrier_arrive(&s.empty[stage]);
    ptx::barrier_arrive(&s.p_empty);
    store_rows<true>(e, w, h, group, chunk, rows, O, e.scale, s.o[group]);
  }
  if (e.final.data != nullptr) {
#pragma unroll
    for (int j = 0; j < kState; ++j) element(e.final, j) = e.out_factor * S[j];
  }
}

template <int D>
__device__ void produce_delta(const Tile& tile, const Walk& w, int h, DeltaShared<D>& s) {
  const Engine& e = tile.e;
  const int b = static_cast<int>(w.b);
  for (int i = 0; i < w.count; ++i) {
    const int stage = i % kStages, t = static_cast<int>(w.begin) + (w.first + i) * C;
    if (i >= kStages) ptx::barrier_wait(&s.empty[stage], (i / kStages - 1) & 1);
    ptx::barrier_arrive_expect(&s.full[stage], 3 * (D / 64) * kPanel);
    ptx::load_box(s.k[stage], &tile.k, &s.full[stage], 0, t, 0, h / e.k.group, b);
    ptx::load_box(s.q[stage], &tile.q, &s.full[stage], 0, t, 0, h / e.q.group, b);
    ptx::load_box(s.v[stage], &tile.v, &s.full[stage], 0, t, 0, h / e.v.group, b);
  }
}

template <int D, bool decays>
__device__ void delta_kernel(const Tile& tile) {
  extern __shared__ char memory[];
  static_assert(sizeof(DeltaShared<D>) + 1024 <= delta_shared_bytes(D) && delta_shared_bytes(D) <= 232448);
  auto& s = *reinterpret_cast<DeltaShared<D>*>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
  const int h = blockIdx.x % tile.e.H;
  const int64_t n = blockIdx.x / tile.e.H;
  constexpr int kGroups = D / 64, kConsumers = 128 * kGroups;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&s.full[i], 1);
      ptx::barrier_init(&s.empty[i], kConsumers + 128);
    }
    ptx::barrier_init(&s.t_full, 128);
    ptx::barrier_init(&s.p_full, 128);
    ptx::barrier_init(&s.t_empty, kConsumers);
    ptx::barrier_init(&s.p_empty, kConsumers);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const Walk w = walk_of(tile.e, n, 0, false);
  const int role = threadIdx.x / 128;
  if (role == 0) {
    ptx::fewer_registers<24>();
    if (threadIdx.x == 0) produce_delta<D>(tile, w, h, s);
  } else if (role <= kGroups) {
    ptx::more_registers<kGroups == 2 ? 192 : 240>();
    carry_delta<D, decays>(tile, w, n, h, s);
  } else {
    if constexpr (kGroups == 2) {
      ptx::fewer_registers<104>();
    } else {
      ptx::more_registers<240>();
    }
    assist_delta<D, decays>(tile, w, h, s);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1) delta_64(const __grid_constant__ Tile tile) {
  delta_kernel<64, false>(tile);
}
extern "C" __global__ void __launch_bounds__(384, 1) delta_64_decay(const __grid_constant__ Tile tile) {
  delta_kernel<64, true>(tile);
}
extern "C" __global__ void __launch_bounds__(512, 1) delta_128(const __grid_constant__ Tile tile) {
  delta_kernel<128, false>(tile);
}
extern "C" __global__ void __launch_bounds__(512, 1) delta_128_decay(const __grid_constant__ Tile tile) {
  delta_kernel<128, true>(tile);
}

}  // namespace linnet::cuda
