// The recurrence with a decay per key channel on matrix units, bf16, K and V of 64 or 128: one block per (sequence, head) walks
// chunks of 64 tokens, and the state never leaves the registers.
//
// Decays stand between every two rows and channels, but they are products: with G the sums of g in the chunk and a row m in its
// middle, exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j). So two tiles serve everything,
//
//   Q' = Q exp(G - G_m),  K' = K exp(G_m - G):
//   S' = S exp(G_m),   O^T = scale (S'^T Q'^T + V^T P^T),  P = tril(Q' K'^T),   S = (S' + K'^T V) exp(G_C - G_m)
//
// and every term has the relative error of its two roundings. One of the two exponents is positive: that is why bf16 (its
// exponents are those of f32), and why a chunk in which 16 rows of some channel decay by more than 2^-45 takes another way:
// four parts of 16 rows, each with factors of at most 1 from its first row and to its last one, its own 16 x 16 scores one by
// one in f32, and the state passed on from part to part. Which way is a property of the chunk's gates alone.
//
//   prepare   a warpgroup for each 64 key channels, one chunk ahead: a thread has two channels of 16 rows; Q', K' in place, P
//   walk      a warpgroup for each 64 value channels: S^T in f32 accumulators, and rounded as the A operand of its own read
//
// Walks without reads (segments) take K exp(G_C - G), or K exp(G) in reverse time: at most 1.
//
// Bytes per token and head: 2 (2 K + 2 V) + 4 K (g in f32); at 16,2048,16,128 0.19 ms of an H200's copy bandwidth.
#pragma once

#include "mechanisms/recurrence/cuda/channel/channel.h"
#include "mechanisms/recurrence/cuda/tile/tile.cuh"

namespace linnet::cuda {
namespace {

// Exponents of 2. Decays below 2^-144 are 0; a segment begins where the decays behind leave 2^-80.
constexpr float kLog2E = 1.44269504f, kNothing = -144, kForgotten = -80, kSplit = 45;

template <int K, int V>
struct ChannelShared {
  alignas(1024) char q[kStages][K / 64 * kPanel];
  char k[kStages][K / 64 * kPanel];
  char v[kStages][V / 64 * kPanel];  // at last a chunk's results
  char g[2 * K / 64 * kPanel];
  char p[2][kPanel];
  float totals[2][4][K];  // sums of the gates of 16 rows
  float before[2][K];     // factors of the state: before the chunk,
  float after[2][K];      // behind it,
  float parts[2][4][K];   // and behind each part of a chunk in four
  int split[2];
  uint64_t full[kStages], empty[kStages], p_full[2], g_full;
  Walk walk;  // of walks without reads: there are no registers to keep it
};

__device__ __forceinline__ int chunk_rows(const Walk& w, int chunk) {
  return static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(chunk) * C));
}

// The sequence and chunk of a block.
__device__ inline bool find_chunk(const Engine& e, uint32_t number, Walk* w, int64_t* n, int* chunk) {
  if (e.offsets == nullptr) {
    const auto each = static_cast<uint32_t>((e.T + C - 1) / C);  // 32 bits: a division of 64 takes a hundred instructions
    *n = number / each;
    *chunk = static_cast<int>(number % each);
    w->b = *n;
    w->begin = 0;
    w->length = e.T;
    return true;
  }
  int64_t low = 0, high = e.N;  // the last sequence that begins at or before this number
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (channel_chunk(true, e.T, middle, offset(e, middle)) <= number ? low : high) = middle;
  }
  *n = low;
  w->b = 0;
  w->begin = offset(e, low);
  w->length = offset(e, low + 1) - w->begin;
  *chunk = static_cast<int>(number - channel_chunk(true, e.T, low, w->begin));
  return *chunk >= 0 && static_cast<int64_t>(*chunk) * C < w->length;
}

template <bool reads, int K, int V>
__device__ void load_chunk(const ChannelTile& tile, const Walk& w, int h, int i, ChannelShared<K, V>& s) {
  const Engine& e = tile.e;
  const int stage = i % kStages, t = static_cast<int>(w.begin) + (e.reverse ? w.first - i : w.first + i) * C;
  const int b = static_cast<int>(w.b);
  ptx::barrier_arrive_expect(&s.full[stage], ((reads ? 2 * K : K) + V) / 64 * kPanel);
  ptx::load_box(s.k[stage], &tile.k, &s.full[stage], 0, t, 0, h / e.k.group, b);
  if (reads) ptx::load_box(s.q[stage], &tile.q, &s.full[stage], 0, t, 0, h / e.q.group, b);
  ptx::load_box(s.v[stage], &tile.v, &s.full[stage], 0, t, 0, h / e.v.group, b);
}
template <int K, int V>
__device__ void load_gates(const ChannelTile& tile, const Walk& w, int h, int i, ChannelShared<K, V>& s) {
  const int t = static_cast<int>(w.begin) + (tile.e.reverse ? w.first - i : w.first + i) * C;
  ptx::barrier_arrive_expect(&s.g_full, (tile.wide ? 2 : 1) * K / 64 * kPanel);
  ptx::load_box(s.g, &tile.g, &s.g_full, 0, t, 0, h, static_cast<int>(w.b));
}

__device__ __forceinline__ float clamp_gate(float g) {  // a NaN stays one
  return ptx::greatest(g, kNothing);
}

// The gates (exponents of 2) of a row, two channels.
__device__ __forceinline__ float2 gates_of(const char* g, bool wide, uint32_t row, uint32_t channel) {
  float2 x;
  if (wide) {
    x = *reinterpret_cast<const float2*>(g + channel / 32 * kPanel + row * 128 + ((channel % 32 / 4) ^ (row % 8)) * 16 +
                                         channel % 4 * 4);
  } else {
    x = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(g + ptx::tile_byte(C, row, channel)));
  }
  return {clamp_gate(x.x * kLog2E), clamp_gate(x.y * kLog2E)};
}

// Sums of the gates of a thread's two channels over kRows rows from `first` on; how far they range, at most.
template <int kRows>
__device__ __forceinline__ float sum_rows(const char* g, bool wide, int channel, int first, int rows, float2 (&l)[kRows]) {
  float2 sum = {0, 0}, range = {0, 0};
  const auto add = [&](int i, float2 x) {
    sum = {sum.x + x.x, sum.y + x.y};
    range = {range.x + fabsf(x.x), range.y + fabsf(x.y)};
    l[i] = sum;
  };
  // One branch for all rows, so that the loads overlap.
  if (first + kRows > rows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) add(i, first + i < rows ? gates_of(g, wide, first + i, channel) : float2{0, 0});
  } else if (wide) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) add(i, gates_of(g, true, first + i, channel));
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i) add(i, gates_of(g, false, first + i, channel));
  }
  return fmaxf(range.x, range.y) + (range.x + range.y) * 0;  // a NaN stays one
}

// Scores one by one in f32, every factor at most 1: columns `from` on, rows up to `end`, by a warp; a lane has K / 32 channels.
// `p` is zero before.
template <int K, int kColumns>
__device__ void exact_scores(const char* q, const char* k, const char* g, bool wide, char* p, int from, int end, int lane) {
  constexpr int kOwn = K / 32;
  const int channel = lane * kOwn;
  const auto load = [&](const char* tile, int row, float(&x)[kOwn]) {
#pragma unroll
    for (int c = 0; c < kOwn; c += 2) {
      const float2 y = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(tile + ptx::tile_byte(C, row, channel + c)));
      x[c] = y.x;
      x[c + 1] = y.y;
    }
  };
  float decayed[kColumns][kOwn];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) load(k, from + j, decayed[j]);
#pragma unroll 1
  for (int row = from; row < end; ++row) {
    float own[kOwn], a[kOwn];
    load(q, row, own);
#pragma unroll
    for (int c = 0; c < kOwn; c += 2) {
      const float2 x = gates_of(g, wide, row, channel + c);
      a[c] = ptx::exp2_fast(x.x);
      a[c + 1] = ptx::exp2_fast(x.y);
    }
    float mine = 0;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (from + j > row) continue;
      float sum = 0;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        if (from + j < row) decayed[j][c] *= a[c];
        sum = fmaf(own[c], decayed[j][c], sum);
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
      if (lane == j) mine = sum;
    }
    if (lane < kColumns && from + lane <= row) {
      *reinterpret_cast<__nv_bfloat16*>(p + ptx::tile_byte(C, row, from + lane)) = __float2bfloat16_rn(mine);
    }
  }
}

template <int K, int V, bool reads>
__device__ void prepare(const ChannelTile& tile, const Walk& w, int64_t n, int h, int segment, ChannelShared<K, V>& s) {
  constexpr int kThreads = K / 64 * 128;
  const Engine& e = tile.e;
  const int thread = threadIdx.x - V / 64 * 128, group = thread / 128, warp = thread % 128 / 32, first = 16 * warp;
  int lane = thread % 32;
  if (thread == 0 && w.count > 0) load_gates(tile, w, h, 0, s);
  float2 all = {0, 0};  // of the segment
  for (int i = 0; i < w.count; ++i) {
    const int stage = i % kStages, slot = i % 2, rows = chunk_rows(w, e.reverse ? w.first - i : w.first + i);
    char *q = s.q[stage], *k = s.k[stage];
    ptx::forget(lane);  // kept, the addresses would take the registers of the sums
    const int channel = group * 64 + 2 * lane;
    float2 l[16];
    ptx::barrier_wait(&s.g_full, i & 1);
    const float range = sum_rows(s.g, tile.wide, channel, first, rows, l);
    *reinterpret_cast<float2*>(&s.totals[slot][warp][channel]) = l[15];
    const bool split = ptx::group_any<1, kThreads>(reads && !(range <= kSplit));
    if (!split && thread == 0 && i + 1 < w.count) load_gates(tile, w, h, i + 1, s);
    float2 D[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) D[j] = *reinterpret_cast<const float2*>(&s.totals[slot][j][channel]);
    ptx::ring_wait(s.full, stage, i);
    if (rows < C) {  // V behind the sequence
      for (int piece = thread; piece < (C - rows) * (V / 8); piece += kThreads) {
        *reinterpret_cast<uint4*>(s.v[stage] + ptx::tile_byte(C, rows + piece / (V / 8), piece % (V / 8) * 8)) = {};
      }
    }
    if (i >= 2) ptx::barrier_wait(&s.empty[(i - 2) % kStages], ((i - 2) / kStages) & 1);

    // Factors: of q exp(l + a), of k exp(b - l) (in reverse exp(b + l)).
    float2 a, b;
    const float2 own = l[15];
    if (!reads) {
      const float2 later = {warp == 0   ? D[1].x + D[2].x + D[3].x
                            : warp == 1 ? D[2].x + D[3].x
                            : warp == 2 ? D[3].x
                                        : 0,
                            warp == 0   ? D[1].y + D[2].y + D[3].y
                            : warp == 1 ? D[2].y + D[3].y
                            : warp == 2 ? D[3].y
                                        : 0};
      const float2 earlier = {warp == 0   ? 0
                              : warp == 1 ? D[0].x
                              : warp == 2 ? D[0].x + D[1].x
                                          : D[0].x + D[1].x + D[2].x,
                              warp == 0   ? 0
                              : warp == 1 ? D[0].y
                              : warp == 2 ? D[0].y + D[1].y
                                          : D[0].y + D[1].y + D[2].y};
      a = {};
      b = e.reverse ? earlier : float2{own.x + later.x, own.y + later.y};
    } else if (split) {
      a = {};
      b = own;
    } else {
      a = {warp == 0   ? -D[0].x - D[1].x
           : warp == 1 ? -D[1].x
           : warp == 2 ? 0
                       : D[2].x,
           warp == 0   ? -D[0].y - D[1].y
           : warp == 1 ? -D[1].y
           : warp == 2 ? 0
                       : D[2].y};
      b = {-a.x, -a.y};
    }
    if (warp == 0) {
      const float2 total = {D[0].x + D[1].x + D[2].x + D[3].x, D[0].y + D[1].y + D[2].y + D[3].y};
      all = {all.x + total.x, all.y + total.y};
      const auto put = [&](float* to, float x, float y) {
        *reinterpret_cast<float2*>(to + channel) = {ptx::exp2_fast(x), ptx::exp2_fast(y)};
      };
      if (split) {
#pragma unroll
        for (int j = 0; j < 4; ++j) put(s.parts[slot][j], D[j].x, D[j].y);
      } else if (reads) {
        put(s.before[slot], D[0].x + D[1].x, D[0].y + D[1].y);
        put(s.after[slot], D[2].x + D[3].x, D[2].y + D[3].y);
      } else {
        put(s.before[slot], total.x, total.y);
      }
      if (thread == 0) s.split[slot] = split;
    }
    if (split) {
      for (int piece = thread; piece < kPanel / 16; piece += kThreads) reinterpret_cast<uint4*>(s.p[slot])[piece] = {};
      ptx::group_sync<1, kThreads>();
      constexpr int kColumns = K == 128 ? 8 : 16;
      const int from = warp * 16 + group * kColumns;
      exact_scores<K, kColumns>(q, k, s.g, tile.wide, s.p[slot], from, warp * 16 + 16, lane);
      sum_rows(s.g, tile.wide, channel, first, rows, l);  // again: there were no registers to keep them
      ptx::group_sync<1, kThreads>();
      if (thread == 0 && i + 1 < w.count) load_gates(tile, w, h, i + 1, s);
    }
    const float sign = e.reverse ? 1 : -1;
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const uint32_t at = ptx::tile_byte(C, first + r, channel);
      const float2 x = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(k + at));
      const float2 f = {ptx::exp2_fast(fmaf(sign, l[r].x, b.x)), ptx::exp2_fast(fmaf(sign, l[r].y, b.y))};
      *reinterpret_cast<uint32_t*>(k + at) = first + r < rows ? ptx::pack<true>(x.x * f.x, x.y * f.y) : 0;
      if (reads) {
        const float2 y = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(q + at));
        *reinterpret_cast<uint32_t*>(q + at) =
            ptx::pack<true>(y.x * ptx::exp2_fast(l[r].x + a.x), y.y * ptx::exp2_fast(l[r].y + a.y));
      }
    }
    ptx::fence_async_shared();
    if (reads && !split) {
      ptx::group_sync<1, kThreads>();
      const uint32_t qs = ptx::shared_address(q), ks = ptx::shared_address(k);
#pragma unroll
      for (int part = 0; part < 128 / K; ++part) {  // 32 columns each
        const int half = K == 128 ? group : part, row = warp * 16 + lane / 4;
        float p[16];
        ptx::wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < K / 16; ++kk) {
          ptx::wgmma_shared<true, false, false>(p, ptx::descriptor_k_major(qs, C, kk),
                                                ptx::descriptor_k_major(ks + half * 32 * ptx::kRowBytes, C, kk), kk > 0);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::hold(p);
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
          const int r = row + ptx::Fragment::below(j), c = half * 32 + ptx::Fragment{lane}.pair(j);
          *reinterpret_cast<uint32_t*>(s.p[slot] + ptx::tile_byte(C, r, c)) =
              ptx::pack<true>(c <= r ? p[j] : 0, c + 1 <= r ? p[j + 1] : 0);
        }
      }
      ptx::fence_async_shared();
    }
    ptx::barrier_arrive(&s.p_full[slot]);
  }
  if (tile.phase == 1 && !w.ends && w.count > 0 && warp == 0) {
    const int channel = group * 64 + 2 * lane;
    float* to = tile.decays + ((segment * e.N + n) * e.H + h) * K + channel;
    to[0] = ptx::exp2_fast(all.x);
    to[1] = ptx::exp2_fast(all.y);
  }
}

// O^T [64 value channels of this warpgroup, tokens from `first` on] times `factor` to rows of tokens in `tile`: the place of
// this group's values, which nobody else reads.
template <int kCount>
__device__ __forceinline__ void stage_results(const float (&O)[kCount], int first, float factor, char* tile, int group,
                                              int thread) {
  const int warp = thread / 32, lane = thread % 32;
  group == 0 ? ptx::group_sync<3, 128>() : ptx::group_sync<4, 128>();  // the values are read
  const uint32_t o = ptx::shared_address(tile);
#pragma unroll
  for (int j = 0; j < kCount / 4; j += 2) {
    const int token = first + 8 * (j + lane / 16) + lane % 8, channel = 16 * warp + lane / 8 % 2 * 8;
    const float* x = O + 4 * j;
    ptx::store_matrices_transposed(o + ptx::tile_byte(C, token, channel), ptx::pack<true>(x[0] * factor, x[1] * factor),
                                   ptx::pack<true>(x[2] * factor, x[3] * factor), ptx::pack<true>(x[4] * factor, x[5] * factor),
                                   ptx::pack<true>(x[6] * factor, x[7] * factor));
  }
}
// And out: 128 bytes of a token for 8 threads.
__device__ __forceinline__ void send_results(const Engine& e, const Walk& w, int h, int group, int chunk, int rows,
                                             const char* tile, int thread) {
  group == 0 ? ptx::group_sync<3, 128>() : ptx::group_sync<4, 128>();
  auto* to = static_cast<uint16_t*>(const_cast<void*>(e.out.data));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int token = 16 * j + thread / 8, channel = thread % 8 * 8;
    if (token >= rows) continue;
    const uint4 x = *reinterpret_cast<const uint4*>(tile + ptx::tile_byte(C, token, channel));
    const int64_t t = w.begin + static_cast<int64_t>(chunk) * C + token;
    *reinterpret_cast<uint4*>(to + row_of(e.out, w.b, t, h) + group * 64 + channel) = x;
  }
  ptx::fence_async_shared();
}

// S^T of a warpgroup, [64 values, K], its channels times their factors.
template <int kState>
__device__ __forceinline__ void scale_channels(float (&S)[kState], const float* factors, int thread) {
#pragma unroll
  for (int j = 0; j < kState; j += 4) {
    const float2 f = *reinterpret_cast<const float2*>(factors + ptx::Fragment{thread}.pair(j));
    S[j] *= f.x;
    S[j + 1] *= f.y;
    S[j + 2] *= f.x;
    S[j + 3] *= f.y;
  }
}

// S^T of a warpgroup, [64 values, K], rounded, through `image` to memory as it lies there.
template <int kState>
__device__ __forceinline__ void keep_state(const float (&S)[kState], char* image, char* to, bool again, int group, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  if (again) {
    if (thread == 0) ptx::wait_stores_read();
    group == 0 ? ptx::group_sync<3, 128>() : ptx::group_sync<4, 128>();
  }
#pragma unroll
  for (int j = 0; j < kState; j += 2) {
    const int value = warp * 16 + lane / 4 + ptx::Fragment::below(j), channel = ptx::Fragment{lane}.pair(j);
    *reinterpret_cast<uint32_t*>(image + ptx::tile_byte(64, value, channel)) = ptx::pack<true>(S[j], S[j + 1]);
  }
  ptx::fence_async_shared();
  group == 0 ? ptx::group_sync<3, 128>() : ptx::group_sync<4, 128>();
  if (thread == 0) ptx::store_bytes(to, image, kState * 256);
}

template <int K, int V, bool reads>
__device__ void walk(const ChannelTile& tile, const Walk& w, int64_t n, int h, int segment, ChannelShared<K, V>& s) {
  const Engine& e = tile.e;
  const int group = threadIdx.x / 128;
  int thread = threadIdx.x % 128;
  constexpr int kState = K / 2;
  float S[kState];
  const auto element = [&](const States& states, int j) -> float& {
    const int channel = ptx::Fragment{thread}.column(j);
    const int value = group * 64 + thread / 32 * 16 + thread % 32 / 4 + ptx::Fragment::below(j);
    return states.data[n * states.stride_n + h * states.stride_h + channel * states.stride_row + value * states.stride_column];
  };
  const auto saved = [&](int number) { return tile.states + ((number * e.N + n) * e.H + h) * K * V + group * 64 * K + thread; };
  if (segment > 0 && tile.phase == 2) {
#pragma unroll
    for (int j = 0; j < kState; ++j) S[j] = saved(segment - 1)[128 * j];
  } else {
    const bool given = e.initial.data != nullptr && w.starts;
#pragma unroll
    for (int j = 0; j < kState; ++j) S[j] = given ? e.in_factor * element(e.initial, j) : 0;
  }
  for (int i = 0; i < w.count; ++i) {
    const int stage = i % kStages, slot = i % 2, chunk = e.reverse ? w.first - i : w.first + i, rows = chunk_rows(w, chunk);
    const uint32_t q = ptx::shared_address(s.q[stage]), k = ptx::shared_address(s.k[stage]), p = ptx::shared_address(s.p[slot]);
    const uint32_t v = ptx::shared_address(s.v[stage]) + group * kPanel;
    ptx::forget(thread);
    ptx::ring_wait(s.p_full, slot, i);
    float O[32];
    uint32_t A[kState / 2];
    const auto round_state = [&] {
#pragma unroll
      for (int j = 0; j < kState; j += 2) A[j / 2] = ptx::pack<true>(S[j], S[j + 1]);
    };
    if (!reads) {
      if (tile.kept != nullptr) {
        const int64_t number = channel_chunk(e.offsets != nullptr, e.T, n, w.begin) + chunk;
        keep_state(S, s.q[group], tile.kept + ((number * e.H + h) * (V / 64) + group) * (K * 128), i > 0, group, thread);
      }
      scale_channels(S, s.before[slot], thread);
      ptx::hold(S);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        ptx::wgmma_shared<true, true, true>(S, ptx::descriptor_mn_major(v, C, kk), ptx::descriptor_mn_major(k, C, kk), true);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(S);
    } else if (s.split[slot] == 0) {
      scale_channels(S, s.before[slot], thread);
      round_state();
      ptx::hold(A);
      ptx::hold(S);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < K / 16; ++kk) {
        ptx::wgmma<true, false>(O, A + 4 * kk, ptx::descriptor_k_major(q, C, kk), kk > 0);
      }
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        ptx::wgmma_shared<true, true, true>(S, ptx::descriptor_mn_major(v, C, kk), ptx::descriptor_mn_major(k, C, kk), true);
      }
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        ptx::wgmma_shared<true, true, false>(O, ptx::descriptor_mn_major(v, C, kk), ptx::descriptor_k_major(p, C, kk), true);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(S);
      ptx::hold(O);
      scale_channels(S, s.after[slot], thread);
      stage_results(O, 0, e.scale, s.v[stage] + group * kPanel, group, thread);
      send_results(e, w, h, group, chunk, rows, s.v[stage] + group * kPanel, thread);
    } else {
#pragma unroll 1
      for (int part = 0; part < 4; ++part) {
        float o[8];
        round_state();
        scale_channels(S, s.parts[slot][part], thread);
        ptx::hold(A);
        ptx::hold(S);
        ptx::wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < K / 16; ++kk) {
          ptx::wgmma<true, false>(o, A + 4 * kk, ptx::descriptor_k_major(q + part * 16 * ptx::kRowBytes, C, kk), kk > 0);
        }
        ptx::wgmma_shared<true, true, false>(o, ptx::descriptor_mn_major(v, C, part),
                                             ptx::descriptor_k_major(p + part * 16 * ptx::kRowBytes, C, part), true);
        ptx::wgmma_shared<true, true, true>(S, ptx::descriptor_mn_major(v, C, part), ptx::descriptor_mn_major(k, C, part),
                                            true);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::hold(S);
        ptx::hold(o);
        stage_results(o, part * 16, e.scale, s.v[stage] + group * kPanel, group, thread);
      }
      send_results(e, w, h, group, chunk, rows, s.v[stage] + group * kPanel, thread);
    }
    ptx::barrier_arrive(&s.empty[stage]);
    if (threadIdx.x == 0 && i + kStages < w.count) {
      ptx::ring_wait(s.empty, stage, i);
      load_chunk<reads>(tile, w, h, i + kStages, s);
    }
  }
  if (!reads && thread == 0) ptx::wait_stores_read();
  if (tile.phase == 1) {
    if (w.ends || w.count == 0) return;  // nobody starts from there
#pragma unroll
    for (int j = 0; j < kState; ++j) saved(segment)[128 * j] = S[j];
  } else if (e.final.data != nullptr && w.ends) {
#pragma unroll
    for (int j = 0; j < kState; ++j) element(e.final, j) = e.out_factor * S[j];
  }
}

// The state that a segment leaves begins where the decays from there to its end leave something in some channel. By all
// threads of the block; `sums`: one for each, in shared memory.
template <int K, int threads>
__device__ void skip_forgotten_channels(const ChannelTile& tile, int h, Walk& w, float* sums) {
  constexpr int kParts = threads / K;
  static_assert(threads % K == 0);
  const Engine& e = tile.e;
  const int channel = threadIdx.x % K, part = threadIdx.x / K;
  float left = 0;
  int from = w.count - 1;
  for (; from > 0; --from) {
    const int chunk = e.reverse ? w.first - from : w.first + from, rows = chunk_rows(w, chunk);
    const int64_t place = row_of(e.g, w.b, w.begin + static_cast<int64_t>(chunk) * C, h) + channel;
    float sum = 0;
    const auto add = [&](const auto* g) {  // one branch for all rows, so that the loads overlap
#pragma unroll
      for (int i = 0; i < (C + kParts - 1) / kParts; ++i) {
        const int row = part + kParts * i;
        sum += row < rows ? clamp_gate(kLog2E * static_cast<float>(g[place + row * e.g.stride_t])) : 0;
      }
    };
    tile.wide ? add(static_cast<const float*>(e.g.data)) : add(static_cast<const __nv_bfloat16*>(e.g.data));
    sums[threadIdx.x] = sum;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kParts; ++i) left += sums[i * K + channel];
    if (__syncthreads_or(!(left < kForgotten)) == 0) break;
  }
  if (from <= 0) return;
  w.first += e.reverse ? -from : from;
  w.count -= from;
}

template <int K, int V, bool reads>
__device__ void channel_kernel(const ChannelTile& tile) {
  extern __shared__ char memory[];
  static_assert(sizeof(ChannelShared<K, V>) + 1024 <= channel_shared_bytes(K, V) && channel_shared_bytes(K, V) <= 232448);
  auto& s = ptx::shared_as<ChannelShared<K, V>>(memory);
  const int h = blockIdx.x % tile.e.H, segment = blockIdx.y;
  const int64_t n = blockIdx.x / tile.e.H;
  Walk w = walk_of(tile.e, n, segment);
  if (!reads && tile.phase == 1) {
    static_assert(sizeof(s.totals) >= channel_threads(K, V) * 4);
    skip_forgotten_channels<K, channel_threads(K, V)>(tile, h, w, &s.totals[0][0][0]);
  }
  if (threadIdx.x == 0) {
    s.walk = w;
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&s.full[i], 1);
      ptx::barrier_init(&s.empty[i], V / 64 * 128);
    }
    for (int i = 0; i < 2; ++i) ptx::barrier_init(&s.p_full[i], K / 64 * 128);
    ptx::barrier_init(&s.g_full, 1);
    ptx::barrier_init_fence();
    ptx::prefetch_map(&tile.k);
    ptx::prefetch_map(&tile.v);
    ptx::prefetch_map(&tile.q);
    ptx::prefetch_map(&tile.g);
    for (int i = 0; i < kStages && i < w.count; ++i) load_chunk<reads>(tile, w, h, i, s);
  }
  __syncthreads();
  const Walk& own = reads ? w : s.walk;
  constexpr bool many = K + V == 256;  // 512 threads: 128 registers each, shared out again
  if (threadIdx.x < V / 64 * 128) {
    if constexpr (many) ptx::more_registers<160>();
    walk<K, V, reads>(tile, own, n, h, segment, s);
  } else {
    if constexpr (many) ptx::fewer_registers<96>();
    prepare<K, V, reads>(tile, own, n, h, segment, s);
  }
}

}  // namespace

#define LINNET_CHANNEL(name, K, V, reads)                                                   \
  extern "C" __global__ void __launch_bounds__(channel_threads(K, V), K + V == 128 ? 2 : 1) \
      name(const __grid_constant__ ChannelTile tile) {                                      \
    channel_kernel<K, V, reads>(tile);                                                      \
  }

}  // namespace linnet::cuda
