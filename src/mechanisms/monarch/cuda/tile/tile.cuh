// Monarch attention in one step, 16-bit, blocks and numbers of blocks up to P = 64 or 128, widths up to D = 64 or 128: one
// kernel whose blocks of threads each run one program.
//
//   block program (head, block):  S = q k^T, R = softmax(S) in registers, [a | y] = R [k | v]
//   slot program (head, slot):    S = q a^T - c, L = softmax(S) in registers, out = L y
//
// One warpgroup per 64 queries; S by wgmma from shared memory, the averages with R or L as the left operand in registers. Tiles
// are [P][64] panels of 128-byte rows with the 128-byte swizzle; rows are gathered by 16-byte copies, so that slots (rows far
// apart), padding, masks and narrow heads cost nothing extra.
//
// The entropy needs no sums of its own: sum_i R z of (block k, slot j) is a[j,k].q[k,j], the diagonal of the slot's S, so that
// c = S[k,k] - lse_R[k] and block programs hand on the normaliser of R alone. That also takes a as it was rounded on both sides
// of the difference a.q[l,j] - a.q[k,j].
//
// Programs take tickets in an order in which the slots of a chunk of heads come `lag` chunks behind its blocks: what passes
// between them and the second reading of q then hit the L2 cache, and since chunks share a ring of memory most of it is
// overwritten there before it would be written to memory. A program waits for earlier tickets only, so some program can always
// run. Nothing depends on who takes which ticket: results are the same bits every time.
//
// Instructions, not bytes, bound the first version (2.5 of 4 a clock, 1600 a warp and program), hence one thread works out the
// ticket for all, addresses are stepped, and tiles without padding or mask take loops without tests.
#pragma once

#include "mechanisms/monarch/cuda/place.cuh"
#include "ptx/copy.cuh"
#include "ptx/layout.h"
#include "ptx/mma.cuh"
#include "ptx/numbers.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

namespace linnet::cuda {

__device__ __forceinline__ void wait_until(const uint32_t* counter, uint32_t count) {
  while (ptx::load_acquire(counter) < count) __nanosleep(64);
}

// Which program a ticket stands for.
struct MonarchItem {
  bool slot, there;  // there: the last chunk may be short of heads
  int chunk, b, h;   //
  int place, index;  // head of the ring; block or slot
};
__device__ __forceinline__ MonarchItem item_of(const MonarchProblem& g, const MonarchRing& ring, uint32_t ticket) {
  const uint32_t blocks = g.blocks * ring.heads, slots = g.cols * ring.heads, both = blocks + slots;
  MonarchItem item = {};
  uint32_t t = ticket;
  if (t < ring.lag * blocks) {
    item.chunk = t / blocks, t %= blocks;
  } else {
    t -= ring.lag * blocks;
    const uint32_t steady = (ring.chunks - ring.lag) * both;
    if (t < steady) {
      item.chunk = t / both, t %= both;
      item.slot = t >= blocks;
      if (item.slot) {
        t -= blocks;
      } else {
        item.chunk += ring.lag;
      }
    } else {
      t -= steady;
      item.slot = true;
      item.chunk = ring.chunks - ring.lag + t / slots, t %= slots;
    }
  }
  const uint32_t head = t % ring.heads, unit = item.chunk * ring.heads + head;
  item.index = t / ring.heads;
  item.place = item.chunk % ring.ring * ring.heads + head;
  item.there = unit < ring.units;
  item.b = unit / g.H, item.h = unit % g.H;
  return item;
}

template <int D, int P, bool bf16>
struct MonarchTile {
  static constexpr int kThreads = 2 * P, kPieces = D / 8, kPanels = D / 64, kTile = P * D * 2;
  static constexpr int kAtOnce = kThreads / kPieces;  // rows that all threads load in one go: a multiple of 8
  static constexpr float kInfinity = __builtin_huge_valf();

  const MonarchProblem& g;
  uint32_t q, k, v;               // shared addresses of tiles
  float* bias;                    // [P]
  int b, h, thread, lane, first;  // first: of the 16 queries of this warp

  __device__ __forceinline__ static uint32_t place(int row, int piece) { return ptx::tile_byte(P, row, piece * 8); }
  // From one row's places to that of another: rows % 8 are exchanged by the swizzle.
  __device__ __forceinline__ static uint32_t rows_down(uint32_t at, int rows) {
    return (at ^ (rows % 8 * 16)) + rows * ptx::kRowBytes;
  }

  // P rows of a tile, `step` bytes apart from `from` on (which may lie before the tensor, and is not read then). `there(row)`
  // tells which rows exist, the others are zero; `full`: all do. `safe` is an address of the tensor.
  template <class There>
  __device__ __forceinline__ void load(uint32_t to, const void* safe, const char* from, int64_t step, int width, bool full,
                                       const There& there) const {
    const int piece = thread % kPieces, row = thread / kPieces;
    const char* at = from + row * step + piece * 16;
    const int64_t stride = step * kAtOnce;
    uint32_t place_at = to + place(row, piece);
    if (full) {
#pragma unroll
      for (int i = 0; i < P / kAtOnce; ++i, at += stride, place_at += kAtOnce * ptx::kRowBytes) {
        ptx::copy_16(place_at, at, 16);
      }
    } else {
#pragma unroll
      for (int i = 0; i < P / kAtOnce; ++i, at += stride, place_at += kAtOnce * ptx::kRowBytes) {
        const bool valid = piece * 8 < width && there(row + i * kAtOnce);
        ptx::copy_16(place_at, valid ? at : safe, valid ? 16 : 0);
      }
    }
  }
  __device__ __forceinline__ const char* row_of(const MonarchRows& x, int64_t t) const {  // t may be outside of the tensor
    return static_cast<const char*>(x.data) + 2 * (b * x.stride_b + h * x.stride_h + t * x.stride_t);
  }

  // Products of this warpgroup's 64 rows. They are issued between begin and end, which hold the accumulators.
  template <class... Sums>
  __device__ __forceinline__ static void begin(Sums&... sums) {
    (hold_all(sums), ...);
    ptx::wgmma_fence();
  }
  template <class... Sums>
  __device__ __forceinline__ static void end(Sums&... sums) {
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    (hold_all(sums), ...);
  }
  template <int panels>
  __device__ __forceinline__ static void hold_all(float (&x)[panels][32]) {
#pragma unroll
    for (int n = 0; n < panels; ++n) ptx::hold(x[n]);
  }
  // s (+)= left rows . right rows
  __device__ __forceinline__ void multiply(float (&s)[P / 64][32], uint32_t left, uint32_t right, bool add = false) const {
    left += first / 64 * 64 * ptx::kRowBytes;
#pragma unroll
    for (int n = 0; n < P / 64; ++n) {
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        ptx::wgmma_shared<bf16, false, false>(s[n], ptx::descriptor_k_major(left, P, i),
                                              ptx::descriptor_k_major(right + n * 64 * ptx::kRowBytes, P, i), add || i > 0);
      }
    }
  }
  // o = p rows of the tile
  __device__ __forceinline__ static void average(float (&o)[kPanels][32], const uint32_t (&p)[P / 16][4], uint32_t tile) {
#pragma unroll
    for (int n = 0; n < kPanels; ++n) {
#pragma unroll
      for (int i = 0; i < P / 16; ++i) {
        ptx::wgmma<bf16, true>(o[n], p[i], ptx::descriptor_mn_major(tile + n * P * ptx::kRowBytes, P, i), i > 0);
      }
    }
  }
  // This warp's rows of the tile `to` = o times the row's factor.
  __device__ __forceinline__ void put(const float (&o)[kPanels][32], const float (&by)[2], uint32_t to) const {
    to += place(first + lane % 16, lane / 16);
#pragma unroll
    for (int n = 0; n < kPanels; ++n) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float* const x = o[n] + 4 * i;
        ptx::store_matrices((to ^ (i * 16)) + n * P * ptx::kRowBytes, ptx::pack<bf16>(x[0] * by[0], x[1] * by[0]),
                            ptx::pack<bf16>(x[2] * by[1], x[3] * by[1]), ptx::pack<bf16>(x[4] * by[0], x[5] * by[0]),
                            ptx::pack<bf16>(x[6] * by[1], x[7] * by[1]));
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void logits(float (&s)[P / 64][32]) const {
    begin(s);
    multiply(s, q, k);
    end(s);
  }
  // This warp's rows of q = p rows of the tile times the row's factor.
  __device__ __forceinline__ void average_to_q(const uint32_t (&p)[P / 16][4], const float (&by)[2], uint32_t tile) const {
    float o[kPanels][32];
    begin(o);
    average(o, p, tile);
    end(o);
    put(o, by, q);
  }
  // The 16 rows of this warp in a tile, 16 bytes at a time: give(i, x) for row first + lane / kPieces + i kRowsAtOnce.
  static constexpr int kRowsAtOnce = 32 / kPieces;
  template <class Give>
  __device__ __forceinline__ void hand_out(uint32_t tile, const Give& give) const {
    const uint32_t from = tile + place(first + lane / kPieces, lane % kPieces);
#pragma unroll
    for (int i = 0; i < 16 / kRowsAtOnce; ++i) give(i, ptx::load_shared_16(rows_down(from, i * kRowsAtOnce)));
    __syncwarp();
  }

  __device__ __forceinline__ static float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }
  __device__ __forceinline__ static float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }
  // p by = softmax of the rows of s factor (+ bias), the largest p of a row 1, so that the heaviest weight is not rounded; lse
  // in base 2; a row without scores has zeros and -inf.
  template <bool biased>
  __device__ __forceinline__ void softmax(float (&s)[P / 64][32], uint32_t (&p)[P / 16][4], float (&by)[2],
                                          float (&lse)[2]) const {
    float m[2] = {-kInfinity, -kInfinity}, total[2] = {};
#pragma unroll
    for (int n = 0; n < P / 64; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float* const x = s[n] + 4 * i;
        if constexpr (biased) {
          const float2 add = *reinterpret_cast<const float2*>(bias + n * 64 + i * 8 + lane % 4 * 2);
          x[0] = fmaf(x[0], g.factor, add.x), x[1] = fmaf(x[1], g.factor, add.y);
          x[2] = fmaf(x[2], g.factor, add.x), x[3] = fmaf(x[3], g.factor, add.y);
        }
        m[0] = fmaxf(m[0], fmaxf(x[0], x[1]));
        m[1] = fmaxf(m[1], fmaxf(x[2], x[3]));
      }
    }
    const float factor = biased ? 1 : g.factor;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      m[half] = quad_max(m[half]) * factor;
      if (biased && m[half] == -kInfinity) m[half] = 0;
    }
#pragma unroll
    for (int n = 0; n < P / 64; ++n) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float& x = s[n][i];
        x = ptx::exp2_fast(biased ? x - m[i % 4 / 2] : fmaf(x, factor, -m[i % 4 / 2]));
        total[i % 4 / 2] += x;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] = quad_sum(total[half]);
      by[half] = biased && total[half] == 0 ? 0 : __fdividef(1, total[half]);
      lse[half] = m[half] + __log2f(total[half]);
    }
    to_left(s, p);
  }
  // Scores, rounded, as a left operand.
  __device__ __forceinline__ static void to_left(const float (&s)[P / 64][32], uint32_t (&p)[P / 16][4]) {
#pragma unroll
    for (int i = 0; i < P / 8; ++i) {
      const float* const x = s[i / 8] + i % 8 * 4;
      p[i / 2][i % 2 * 2] = ptx::pack<bf16>(x[0], x[1]);
      p[i / 2][i % 2 * 2 + 1] = ptx::pack<bf16>(x[2], x[3]);
    }
  }
  // From bias = lse_R to bias = -c = lse_R - the diagonal of S: this warp has the 16 of its own rows, lane 4 r + r / 2 those of
  // rows r and r + 8.
  __device__ __forceinline__ void subtract_diagonal(const float (&s)[P / 64][32]) const {
    if (lane % 4 != lane / 8) return;
#pragma unroll
    for (int warp = 0; warp < P / 16; ++warp) {
      if (first != 16 * warp) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const x = s[warp / 4] + (warp % 4 * 2 + half) * 4 + 2 * half;
        bias[first + lane / 4 + 8 * half] -= (lane / 4 % 2 == 0 ? x[0] : x[1]) * g.factor;
      }
    }
  }

  // Loads of a block: queries and keys, then values. The bias says which keys are valid, unless all are.
  __device__ __forceinline__ bool ask_keys(int block) const {
    const int64_t t0 = static_cast<int64_t>(block) * g.cols - g.front;
    const bool whole = g.cols == P && t0 >= 0 && t0 + P <= g.T, full = whole && g.mask == nullptr;
    const auto there = [&](int i) { return i < g.cols && t0 + i >= 0 && t0 + i < g.T; };
    const auto valid = [&](int i) { return there(i) && mask_at(g, b, static_cast<int>(t0) + i); };
    load(q, g.q.data, row_of(g.q, t0), 2 * g.q.stride_t, g.K, whole && g.K == D, there);
    load(k, g.k.data, row_of(g.k, t0), 2 * g.k.stride_t, g.K, full && g.K == D, valid);
    if (!full && thread < P) bias[thread] = valid(thread) ? 0 : -kInfinity;
    return full;
  }
  __device__ __forceinline__ void ask_values(int block) const {
    const int64_t t0 = static_cast<int64_t>(block) * g.cols - g.front;
    const bool full = g.cols == P && t0 >= 0 && t0 + P <= g.T && g.mask == nullptr;
    load(v, g.v.data, row_of(g.v, t0), 2 * g.v.stride_t, g.V, full && g.V == D,
         [&](int i) { return i < g.cols && t0 + i >= 0 && t0 + i < g.T && mask_at(g, b, static_cast<int>(t0) + i); });
  }
  // `ay` and `lse_r` are those of this block at slot 0; slots lie `blocks` rows apart.
  __device__ __forceinline__ void block_program(int block, char* ay, float* lse_r) const {
    const bool full = ask_keys(block);
    ptx::copy_commit();
    ask_values(block);
    ptx::copy_commit();
    ptx::copy_wait<1>();
    ptx::fence_async_shared();
    __syncthreads();
    float s[P / 64][32], by[2], lse[2];
    uint32_t r[P / 16][4];
    logits(s);
    if (full) {
      softmax<false>(s, r, by, lse);
    } else {
      softmax<true>(s, r, by, lse);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = first + lane / 4 + 8 * half;
      if (lane % 4 == 0 && j < g.cols) lse_r[j * static_cast<int64_t>(g.blocks)] = lse[half];
    }
    ptx::copy_wait<0>();
    ptx::fence_async_shared();
    __syncthreads();
    const int64_t stride = int64_t{4 * D} * g.blocks;
    const int j = first + lane / kPieces;
    char* const to = ay + j * stride + lane % kPieces * 16;
    const auto give = [&](int64_t byte) {
      hand_out(q, [&](int i, const uint4& x) {
        if (j + i * kRowsAtOnce < g.cols) *reinterpret_cast<uint4*>(to + i * kRowsAtOnce * stride + byte) = x;
      });
    };
    average_to_q(r, by, k);  // the barrier above stands behind the last reading of q
    give(0);
    average_to_q(r, by, v);
    give(2 * D);
  }

  // The queries of the slot can be asked for before the blocks are there.
  __device__ __forceinline__ void ask_queries(int slot) const {
    const int64_t t0 = slot - g.front, last = t0 + static_cast<int64_t>(P - 1) * g.cols;
    const bool full = g.rows == P && t0 >= 0 && last < g.T && g.K == D;
    load(q, g.q.data, row_of(g.q, t0), 2 * g.q.stride_t * g.cols, g.K, full,
         [&](int l) { return query_at(g, 0, l, slot) >= 0; });
  }
  __device__ __forceinline__ void slot_program(int slot, const char* ay, const float* lse_r) const {
    const auto there = [&](int p) { return p < g.blocks; };
    load(k, ay, ay, 4 * D, D, g.blocks == P, there);
    ptx::copy_commit();
    load(v, ay, ay + 2 * D, 4 * D, D, g.blocks == P, there);
    ptx::copy_commit();
    if (thread < P) bias[thread] = thread < g.blocks ? __ldcg(lse_r + thread) : -kInfinity;
    ptx::copy_wait<1>();
    ptx::fence_async_shared();
    __syncthreads();
    float s[P / 64][32], by[2], lse[2];
    uint32_t p[P / 16][4];
    logits(s);
    subtract_diagonal(s);
    ptx::copy_wait<0>();
    ptx::fence_async_shared();
    __syncthreads();
    softmax<true>(s, p, by, lse);
    give_lse(slot, lse);
    average_to_q(p, by, v);  // the barrier above stands behind the last reading of q
    give_queries(g.out, slot, q, g.V);
  }
  __device__ __forceinline__ void give_lse(int slot, const float (&lse)[2]) const {
#pragma unroll
    for (int half = 0; half < 2 && g.lse.data != nullptr; ++half) {
      const int t = query_at(g, 0, first + lane / 4 + 8 * half, slot);
      if (t >= 0 && lane % 4 == 0) static_cast<float*>(g.lse.data)[offset_of(g.lse, b, t, h)] = lse[half] * 0.69314718f;
    }
  }
  // This warp's rows of a tile to the tokens of a slot.
  __device__ __forceinline__ void give_queries(const MonarchRows& to, int slot, uint32_t tile, int width) const {
    const int l = first + lane / kPieces, piece = lane % kPieces;
    const int64_t t0 = static_cast<int64_t>(l) * g.cols + slot - g.front, step = static_cast<int64_t>(kRowsAtOnce) * g.cols;
    const int64_t at = b * to.stride_b + h * to.stride_h + t0 * to.stride_t + piece * 8;
    hand_out(tile, [&](int i, const uint4& x) {
      const int64_t t = t0 + i * step;
      if (l + i * kRowsAtOnce < g.rows && t >= 0 && t < g.T && piece * 8 < width) {
        store_row(to, g.out_aligned, at + i * step * to.stride_t, x);
      }
    });
  }

  __device__ __forceinline__ static void run(const MonarchProblem& g, const MonarchRing& ring) {
    extern __shared__ char memory[];
    __shared__ MonarchItem taken;
    char* const aligned = memory + (1024 - ptx::shared_address(memory) % 1024) % 1024;
    const uint32_t start = ptx::shared_address(aligned);
    const int thread = threadIdx.x;
    if (thread == 0) {
      const MonarchItem item = item_of(g, ring, atomicAdd(ring.counters, 1));
      taken = item;
      if (!item.slot && item.chunk >= ring.ring) {  // the chunk before it in the ring
        wait_until(ring.counters + 1 + ring.chunks + item.chunk - ring.ring, g.cols * ring.heads);
      }
    }
    __syncthreads();
    const MonarchItem item = taken;
    const MonarchTile tile = {g,      start,  start + kTile, start + 2 * kTile, reinterpret_cast<float*>(aligned + 3 * kTile),
                              item.b, item.h, thread,        thread % 32,       thread / 32 * 16};
    const int64_t cells = static_cast<int64_t>(item.place) * g.cols * g.blocks;
    uint32_t* const blocks_done = ring.counters + 1 + item.chunk;
    if (!item.slot) {
      const int64_t at = cells + item.index;
      if (item.there) tile.block_program(item.index, static_cast<char*>(ring.ay) + at * (4 * D), ring.lse + at);
    } else {
      if (item.there) tile.ask_queries(item.index);
      if (thread == 0) wait_until(blocks_done, g.blocks * ring.heads);
      __syncthreads();
      const int64_t at = cells + static_cast<int64_t>(item.index) * g.blocks;
      if (item.there) tile.slot_program(item.index, static_cast<const char*>(ring.ay) + at * (4 * D), ring.lse + at);
    }
    __syncthreads();
    if (thread == 0) {
      __threadfence();
      atomicAdd(blocks_done + (item.slot ? ring.chunks : 0), 1);
    }
  }
};

#define LINNET_MONARCH_TILE(name, D, P, bf16, blocks)                                            \
  extern "C" __global__ void __launch_bounds__(2 * P, blocks)                                    \
      name(const __grid_constant__ MonarchProblem g, const __grid_constant__ MonarchRing ring) { \
    MonarchTile<D, P, bf16>::run(g, ring);                                                       \
  }

}  // namespace linnet::cuda
