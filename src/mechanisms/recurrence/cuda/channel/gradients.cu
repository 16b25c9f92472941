// Gradients with a decay per channel, with beta (kda/kda.h) and without (gla), for all chunks at once, from the state
// S before each chunk and the gradient R of the state behind it. With G the sums of g in the chunk and m its middle row
//
//   Q' = scale Q exp(G - G_m),  K" = K exp(G - G_m),  K' = K exp(G_m - G),  S' = S exp(G_m),  R' = R exp(G_C - G_m)
//   dP = tril(dO N^T),  dL = -tril(dY N^T, -1)     (without beta N = V, and there is no dY)
//   dQ' = dO S'^T + dP K'    dK" = -dY S'^T + dL K'    dK' = N R'^T + dP^T Q' + dL^T K"
//   dq = scale dQ' exp(G - G_m)    dk = dK" exp(G - G_m) + dK' exp(G_m - G)    dbeta_i = dY_i N_i / beta_i^2
//   dg_t = sum_{i >= t} (q' dQ' + k" dK" - k' (dK' - N R'^T))_i + sum_{j < t} (k' N R'^T)_j + rowsum(S' R')
//   dv = dY, or without beta scale K exp(G_C - G) R + tril(Q' K'^T)^T dO
//
// The diagonal of dP carries no decay and is kept apart: in the sum of dg it would cancel only in exact arithmetic. Both sides
// of the pairs behind t take the same rounded Q' and K', so that they do cancel.
//
// Every part of this but dv is one of its 64 key channels alone: a block has 64 of them, and, without beta, one more has dv.
// Two blocks fit in a multiprocessor, so that one works while the other's tiles come. In a block all threads have two channels
// of 8 rows each where decays are, and two warpgroups share the products.
//
// Chunks whose gates range too far (kSplit) are told, and a second kernel takes their pairs one by one in f32, from q, k, S and
// R without factors.
#include "mechanisms/recurrence/cuda/channel/back.cuh"
#include "mechanisms/recurrence/cuda/kda/kda.h"

namespace linnet::cuda {
namespace {

constexpr int kRows = 8, kBlocks = C / kRows;  // of a thread; of a chunk

template <bool split>
struct PanelShared {
  alignas(16) char q[kPanel], k[kPanel];  // Q', K'; one by one: q, k
  char dout[2 * kPanel];                  // dO; then dP and dL
  char writes[2 * kPanel];                // N; then f32 sums of dK"
  char adjoints[2 * kPanel];              // dY; then f32 sums of dK' inside the chunk
  char state[2 * kPanel];                 // S; then f32 sums of dQ'
  char dstate[2 * kPanel];                // R, its second half after the gates; then f32 sums of what leaves the chunk
  char read[kPanel];                      // the second half of the gates, then K"
  char gates[split ? 2 * kPanel : 16];    // one by one: the gates
  float totals[kBlocks][64], upper[kBlocks][64], lower[kBlocks][64];
  float both[4][64], middle[64], diagonal[C], inverse_beta[C];  // both: rowsum(S R), in four parts
};

template <int K, int V>
struct ValuesShared {
  alignas(16) char q[K * 128];  // Q', at last dv, with K'; one by one: q
  char k[K * 128];              // K'; one by one: k
  char written[K * 128];        // K exp(G_C - G)
  char dout[V * 128];
  char gates[K * 256];  // then R
  char p[kPanel];
  float ranges[256];
  float totals[512 / K][K];
};
// From the first multiple of 1024 behind the barriers on.
static_assert(sizeof(PanelShared<false>) + 960 <= gradient_shared_bytes(false) && gradient_shared_bytes(false) + 64 <= 115712);
static_assert(sizeof(PanelShared<true>) + 960 <= gradient_shared_bytes(true));
static_assert(sizeof(ValuesShared<128, 128>) + 960 <= gradient_shared_bytes(false));

// What a block works on.
struct Chunk {
  Walk w;
  int64_t image;
  int number, rows, h;
  uint32_t turn;  // of the barriers
};

// Whether gates range too far somewhere: 16 rows of a channel count. All threads.
template <int kOwn>
__device__ __forceinline__ bool range_too_far(float range, float* ranges) {
  if constexpr (kOwn == 16) {
    return __syncthreads_or(!(range <= kSplit)) != 0;
  } else {
    ranges[threadIdx.x] = range;
    __syncthreads();
    return __syncthreads_or(!(ranges[threadIdx.x] + ranges[threadIdx.x ^ 32] <= kSplit)) != 0;
  }
}

// dY of 64 values as dv.
__device__ __forceinline__ void store_adjoints(const ChannelGradient& t, const Chunk& c, const char* panel, int first) {
  if (t.dv.data == nullptr) return;
  const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 8;  // and 32 rows below
  const PairRows to = pair_rows(t.dv, c.w.b, c.w.begin + static_cast<int64_t>(c.number) * C + row, c.h, first + column);
#pragma unroll
  for (int i = 0; i < C; i += 32) {
    if (row + i >= c.rows) break;
    const uint4 x = *reinterpret_cast<const uint4*>(panel + ptx::tile_byte(C, row + i, column));
    if (t.dv_pieces) {
      *reinterpret_cast<uint4*>(to.at + i * to.step) = x;
    } else {
      const uint32_t parts[4] = {x.x, x.y, x.z, x.w};
#pragma unroll 1
      for (int j = 0; j < 4; ++j) {
        const float2 y = ptx::unpack<true>(j == 0 ? parts[0] : j == 1 ? parts[1] : j == 2 ? parts[2] : parts[3]);
        store_pair(to.at + i * to.step + 2 * j * (t.dv.dtype == Dtype::f32 ? 4 : 2), t.dv, false, y.x, y.y);
      }
    }
  }
}

// dP (group 0) or dL as operand, the diagonal of dP, and dbeta.
__device__ __forceinline__ void store_pairs(const ChannelGradient& t, const Chunk& c, bool tells_beta, const float (&x)[32],
                                            const float* inverse_beta, float* diagonals, char* to) {
  const int thread = threadIdx.x % 128, group = threadIdx.x / 128, warp = thread / 32, lane = thread % 32;
  const int first = 16 * warp + lane / 4;  // of the rows; and 8 below
  const float sign = group == 0 ? 1 : -1;
  float diagonal[2] = {};
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    const int half = j / 2 % 2, row = first + 8 * half, column = ptx::Fragment{lane}.pair(j);
    const bool in = row < c.rows;
    if (j / 4 == 2 * warp + half) diagonal[half] = lane / 4 % 2 == 0 ? x[j] : x[j + 1];
    *reinterpret_cast<uint32_t*>(to + ptx::tile_byte(C, row, column)) =
        ptx::pack<true>(in && column < row ? sign * x[j] : 0, in && column + 1 < row ? sign * x[j + 1] : 0);
  }
  if (lane % 4 != lane / 8) return;  // the others' columns
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int row = first + 8 * half;
    const float own = row >= c.rows ? 0 : half == 0 ? diagonal[0] : diagonal[1];
    if (group == 0) {
      diagonals[row] = own;
    } else if (row < c.rows && tells_beta) {
      const float inverse = inverse_beta[row];
      ptx::store(const_cast<void*>(t.dbeta.data), t.dbeta.dtype,
                 row_of(t.dbeta, c.w.b, c.w.begin + static_cast<int64_t>(c.number) * C + row, c.h),
                 t.e.beta_factor * (own * inverse * inverse));
    }
  }
}

// dq, dk, dg from the sums: the decays, by threads of two channels and kRows rows; `l` are sums of the gates from the chunk's
// middle on (one by one: from the first row on, and `middle` is 0).
template <bool beta, bool split>
__device__ __forceinline__ void finish_keys(const ChannelGradient& t, const Chunk& c, int panel, PanelShared<split>& s,
                                            const float2 (&l)[kRows], float2 middle) {
  const Engine& e = t.e;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = 2 * lane, first = kRows * warp;
  Place place = {};
  if constexpr (!beta || split) place = place_of(s.totals, warp, channel);
  const int64_t token = c.w.begin + static_cast<int64_t>(c.number) * C + first;
  const PairRows to_dq = pair_rows(t.dq, c.w.b, token, c.h, 64 * panel + channel);
  const PairRows to_dk = pair_rows(t.dk, c.w.b, token, c.h, 64 * panel + channel);
  float2 lower[kRows], upper[kRows], x[split ? kRows : 1], y[split && beta ? kRows : 1], z[split ? kRows : 1];
  if constexpr (split) {
    exact_pairs(s.q, s.k, s.dout, s.gates, t.wide, channel, first, c.rows, x, z);
#pragma unroll
    for (int i = 0; i < kRows; ++i) z[i] = {e.scale * z[i].x, e.scale * z[i].y};
    if constexpr (beta) {
      float2 inside[kRows];
      exact_pairs(s.k, s.k, s.dout + kPanel, s.gates, t.wide, channel, first, c.rows, y, inside);
#pragma unroll
      for (int i = 0; i < kRows; ++i) z[i] = {z[i].x + inside[i].x, z[i].y + inside[i].y};
    }
  }
  const bool plain =
      t.pairs && t.dq.data != nullptr && t.dq.dtype == Dtype::bf16 && t.dk.data != nullptr && t.dk.dtype == Dtype::bf16;
  // Without beta R is in units of the scale, and has no factors.
  const float unit = beta ? 1 : e.scale;
  const float2 late =
      beta || split ? float2{unit, unit} : float2{unit * ptx::exp2_fast(place.late.x), unit * ptx::exp2_fast(place.late.y)};
  float2 sum = {0, 0};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t at = ptx::tile_byte(C, first + i, channel);
    const auto word = [&](const char* tile) { return ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(tile + at)); };
    const uint32_t sums_at = sums_byte<64>(first + i, lane);
    const auto sums = [&](const char* tile) { return *reinterpret_cast<const float2*>(tile + sums_at); };
    const float2 q = word(s.q), k = word(s.k), dq = sums(s.state);
    const float2 out = sums(s.dstate), leaves = {late.x * out.x, late.y * out.y};
    const float diagonal = s.diagonal[first + i];
    float2 dk = {}, to_q, to_k, left;
    if constexpr (beta) dk = sums(s.writes);
    if constexpr (split) {
      const float2 from = {ptx::exp2_fast(l[i].x + place.before.x), ptx::exp2_fast(l[i].y + place.before.y)};
      const float2 rest = {ptx::exp2_fast(place.behind.x + l[kRows - 1].x - l[i].x),
                           ptx::exp2_fast(place.behind.y + l[kRows - 1].y - l[i].y)};
      const float2 a = {e.scale * fmaf(dq.x, from.x, x[i].x), e.scale * fmaf(dq.y, from.y, x[i].y)};
      float2 b = {};
      if constexpr (beta) b = {fmaf(dk.x, from.x, y[i].x), fmaf(dk.y, from.y, y[i].y)};
      const float2 d = {leaves.x * rest.x, leaves.y * rest.y};
      const float own = e.scale * diagonal;
      to_q = {fmaf(own, k.x, a.x), fmaf(own, k.y, a.y)};
      to_k = {fmaf(own, q.x, b.x + z[i].x + d.x), fmaf(own, q.y, b.y + z[i].y + d.y)};
      upper[i] = {q.x * a.x + k.x * (b.x - z[i].x), q.y * a.y + k.y * (b.y - z[i].y)};
      left = {k.x * d.x, k.y * d.y};
    } else {
      const float2 inside = sums(s.adjoints), exponent = l[i];
      const float2 up = {ptx::exp2_fast(exponent.x), ptx::exp2_fast(exponent.y)};
      const float2 down = {ptx::exp2_fast(-exponent.x), ptx::exp2_fast(-exponent.y)};
      to_q = {e.scale * up.x * fmaf(diagonal, k.x, dq.x), e.scale * up.y * fmaf(diagonal, k.y, dq.y)};
      to_k = {down.x * (fmaf(diagonal, q.x, inside.x) + leaves.x), down.y * (fmaf(diagonal, q.y, inside.y) + leaves.y)};
      upper[i] = {q.x * dq.x - k.x * inside.x, q.y * dq.y - k.y * inside.y};
      left = {k.x * leaves.x, k.y * leaves.y};
      if constexpr (beta) {
        const float2 read = word(s.read);
        to_k = {fmaf(up.x, dk.x, to_k.x), fmaf(up.y, dk.y, to_k.y)};
        upper[i] = {fmaf(read.x, dk.x, upper[i].x), fmaf(read.y, dk.y, upper[i].y)};
      }
    }
    const bool in = first + i < c.rows;
    if (in && plain) {
      *reinterpret_cast<uint32_t*>(to_dq.at + i * to_dq.step) = ptx::pack<true>(to_q.x, to_q.y);
      *reinterpret_cast<uint32_t*>(to_dk.at + i * to_dk.step) = ptx::pack<true>(to_k.x, to_k.y);
    } else if (in) {
      if (t.dq.data != nullptr) store_pair(to_dq.at + i * to_dq.step, t.dq, t.pairs, to_q.x, to_q.y);
      if (t.dk.data != nullptr) store_pair(to_dk.at + i * to_dk.step, t.dk, t.pairs, to_k.x, to_k.y);
    }
    if (!in) upper[i] = {0, 0};
    lower[i] = sum;
    if (in) sum = {sum.x + left.x, sum.y + left.y};
  }
  if (t.dg.data == nullptr) return;
  *reinterpret_cast<float2*>(&s.lower[warp][channel]) = sum;
  sum = {0, 0};
#pragma unroll
  for (int i = kRows - 1; i >= 0; --i) {
    sum = {sum.x + upper[i].x, sum.y + upper[i].y};
    lower[i] = {lower[i].x + sum.x, lower[i].y + sum.y};
  }
  *reinterpret_cast<float2*>(&s.upper[warp][channel]) = sum;
  __syncthreads();
  float2 base = {0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = *reinterpret_cast<const float2*>(&s.both[i][channel]);
    base = {fmaf(unit, x.x, base.x), fmaf(unit, x.y, base.y)};
  }
  if constexpr (!beta || split) {
    const float2 own = {l[kRows - 1].x - middle.x, l[kRows - 1].y - middle.y};
    const float2 all = {place.before.x + own.x + place.behind.x, place.before.y + own.y + place.behind.y};
    base = {base.x * ptx::exp2_fast(all.x), base.y * ptx::exp2_fast(all.y)};
  }
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    if (j == warp) continue;
    const float2 add = *reinterpret_cast<const float2*>(j < warp ? &s.lower[j][channel] : &s.upper[j][channel]);
    base = {base.x + add.x, base.y + add.y};
  }
  const PairRows to_dg = pair_rows(t.dg, c.w.b, token, c.h, 64 * panel + channel);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i >= c.rows) break;
    const float2 gate = {l[i].x - (i > 0 ? l[i - 1].x : middle.x), l[i].y - (i > 0 ? l[i - 1].y : middle.y)};
    store_pair(to_dg.at + i * to_dg.step, t.dg, t.pairs, gate.x < -126 ? 0 : base.x + lower[i].x,
               gate.y < -126 ? 0 : base.y + lower[i].y);
  }
}

// 64 key channels: dq, dk, dg; with beta also 64 values of dv, and dbeta.
template <int K, int V, bool beta, bool split>
__device__ void panel_gradients(const ChannelGradient& t, const Chunk& c, int panel, PanelShared<split>& s, uint64_t (&full)[3],
                                int32_t* exact) {
  const Engine& e = t.e;
  const int thread = threadIdx.x, group = thread / 128, warp = thread / 32, lane = thread % 32;
  const int channel = 2 * lane, first = kRows * warp;
  const uint32_t turn = c.turn & 1;
  char* const gates = split ? s.gates : s.dstate + kPanel;
  const int64_t token = c.w.begin + static_cast<int64_t>(c.number) * C;
  const auto load_state = [&](char* to, const char* from, int half) {  // of 64 values
    ptx::load_bytes(to + half * kPanel, from + c.image * (K * V * 2) + half * (K * 128) + panel * kPanel, kPanel, &full[2]);
  };
  if (thread == 0) {
    const int row = static_cast<int>(token), b = static_cast<int>(c.w.b);
    ptx::barrier_arrive_expect(&full[0], (t.wide ? 4 : 3) * kPanel);
    ptx::load_box(gates, &t.g[panel], &full[0], 0, row, 0, c.h, b);
    ptx::load_box(s.q, &t.q[panel], &full[0], 0, row, 0, c.h / e.q.group, b);
    ptx::load_box(s.k, &t.k[panel], &full[0], 0, row, 0, c.h / e.k.group, b);
    ptx::barrier_arrive_expect(&full[1], (beta ? 3 : 2) * V * 128);
    ptx::load_box(s.dout, &t.d, &full[1], 0, row, 0, c.h, b);
    if constexpr (beta) {
      ptx::load_bytes(s.writes, t.residuals + c.image * (V * 128), V * 128, &full[1]);
      ptx::load_bytes(s.adjoints, t.adjoints + c.image * (V * 128), V * 128, &full[1]);
    } else {
      ptx::load_box(s.writes, &t.v, &full[1], 0, row, 0, c.h / e.v.group, b);
    }
    ptx::barrier_arrive_expect(&full[2], 2 * V * 128);
    load_state(s.state, t.states, 0);
    load_state(s.dstate, t.later, 0);
    if constexpr (V == 128) load_state(s.state, t.states, 1);
    if constexpr (V == 128 && split) load_state(s.dstate, t.later, 1);
  }
  if (beta && thread >= 192 && thread - 192 < c.rows) {
    const int i = thread - 192;
    const float x = e.beta_factor * ptx::load(e.beta.data, e.beta.dtype, row_of(e.beta, c.w.b, token + i, c.h));
    s.inverse_beta[i] = 1 / (x == 0 ? kKdaLeastBeta : x);
  }
  float2 l[kRows];
  ptx::barrier_wait(&full[0], turn);
  const float range = sum_rows(gates, t.wide, channel, first, c.rows, l);
  *reinterpret_cast<float2*>(&s.totals[warp][channel]) = l[kRows - 1];
  bool far = false;
  if constexpr (!beta && !split) {
    far = range_too_far<kRows>(range, s.upper[0]);
    if (thread == 0) *exact = far;
  } else {
    __syncthreads();
  }
  if (V == 128 && !split && thread == 0) load_state(s.dstate, t.later, 1);  // the gates are read
  if (far) {  // the other kernel's; nothing may be on its way here when the block ends
    ptx::barrier_wait(&full[1], turn);
    ptx::barrier_wait(&full[2], turn);
    return;
  }
  float2 middle = {};
  if constexpr (!split) {
    const Place place = place_of(s.totals, warp, channel);
    middle = place.middle;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t at = ptx::tile_byte(C, first + i, channel);
      const float2 k = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.k + at));
      const float2 q = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.q + at));
      const float2 x = l[i] = {l[i].x + middle.x, l[i].y + middle.y};
      const float2 up = {ptx::exp2_fast(x.x), ptx::exp2_fast(x.y)}, down = {ptx::exp2_fast(-x.x), ptx::exp2_fast(-x.y)};
      const bool in = first + i < c.rows;
      *reinterpret_cast<uint32_t*>(s.q + at) = in ? ptx::pack<true>(q.x * (e.scale * up.x), q.y * (e.scale * up.y)) : 0;
      *reinterpret_cast<uint32_t*>(s.k + at) = in ? ptx::pack<true>(k.x * down.x, k.y * down.y) : 0;
      if constexpr (beta) *reinterpret_cast<uint32_t*>(s.read + at) = in ? ptx::pack<true>(k.x * up.x, k.y * up.y) : 0;
    }
    if (!beta && warp == kBlocks / 2) {
      *reinterpret_cast<float2*>(&s.middle[channel]) = {ptx::exp2_fast(place.before.x), ptx::exp2_fast(place.before.y)};
    }
    ptx::fence_async_shared();
  }
  ptx::barrier_wait(&full[1], turn);
  ptx::barrier_wait(&full[2], turn);
  float a[32], b[32], pairs[32];  // dQ' and what leaves the chunk; of the second group dK" and dK' inside; dP or dL
  const uint32_t q = ptx::shared_address(s.q), k = ptx::shared_address(s.k), read = ptx::shared_address(s.read);
  const uint32_t dp = ptx::shared_address(s.dout), dl = dp + kPanel, writes = ptx::shared_address(s.writes);
  const uint32_t left = group == 0 ? dp : ptx::shared_address(s.adjoints), state = ptx::shared_address(s.state);
  const auto rows_of = [](uint64_t tile, int kk) { return ptx::step_k_major(tile, C, kk); };  // 16 columns of its rows
  const auto panels_of = [](uint64_t tile, int kk) { return ptx::step_descriptor(tile, kk / 4 * kPanel + kk % 4 * 2048); };
  const uint64_t left_rows = ptx::descriptor_k_major(left, C, 0), writes_rows = ptx::descriptor_k_major(writes, C, 0);
  if (group == 0 || beta) {
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < V / 16; ++kk) {
      ptx::wgmma_shared<true, false, false>(pairs, rows_of(left_rows, kk), rows_of(writes_rows, kk), kk > 0);
    }
    const uint64_t state_panels = ptx::descriptor_mn_major(state, 64, 0);
#pragma unroll
    for (int kk = 0; kk < V / 16; ++kk) {
      ptx::wgmma_shared<true, false, true>(a, rows_of(left_rows, kk), panels_of(state_panels, kk), kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(pairs);
    ptx::hold(a);
  }
  if (group == 0) {
    const uint64_t dstate = ptx::descriptor_mn_major(ptx::shared_address(s.dstate), 64, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < V / 16; ++kk) {
      ptx::wgmma_shared<true, false, true>(b, rows_of(writes_rows, kk), panels_of(dstate, kk), kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(b);
  } else {  // rowsum(S R): a thread has two channels, and a quarter of the values
    const int part = warp % 4;
    const uint32_t place = part * (V / 4) / 64 * kPanel + part * (V / 4) % 64 * ptx::kRowBytes;
    float2 sum = {0, 0};
#pragma unroll
    for (int i = 0; i < V / 4; ++i) {
      const uint32_t at = place + ptx::tile_byte(64, i, channel);
      const float2 x = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.state + at));
      const float2 y = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.dstate + at));
      sum = {fmaf(x.x, y.x, sum.x), fmaf(x.y, y.y, sum.y)};
    }
    *reinterpret_cast<float2*>(&s.both[part][channel]) = sum;
  }
  if constexpr (beta) store_adjoints(t, c, s.adjoints + panel * kPanel, 64 * panel);
  __syncthreads();  // dO is read
  if (group == 0 || beta) {
    store_pairs(t, c, t.dbeta.data != nullptr && panel == 0, pairs, s.inverse_beta, s.diagonal, s.dout + group * kPanel);
  }
  ptx::fence_async_shared();
  __syncthreads();
  if constexpr (!split) {
    if (group == 0) {
      if constexpr (!beta) {
#pragma unroll
        for (int j = 0; j < 32; j += 4) {
          const float2 f = *reinterpret_cast<const float2*>(&s.middle[ptx::Fragment{lane}.pair(j)]);
          a[j] *= f.x;
          a[j + 1] *= f.y;
          a[j + 2] *= f.x;
          a[j + 3] *= f.y;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < 32; ++j) a[j] = -a[j];
    }
    if (group == 0 || beta) {
      const uint64_t own = ptx::descriptor_k_major(group == 0 ? dp : dl, C, 0), keys = ptx::descriptor_mn_major(k, C, 0);
      ptx::hold(a);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        ptx::wgmma_shared<true, false, true>(a, rows_of(own, kk), panels_of(keys, kk), true);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(a);
    }
    if (group == 1) {
      const uint64_t pairs_q = ptx::descriptor_mn_major(dp, C, 0), pairs_k = ptx::descriptor_mn_major(dl, C, 0);
      const uint64_t queries = ptx::descriptor_mn_major(q, C, 0), reads = ptx::descriptor_mn_major(read, C, 0);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        ptx::wgmma_shared<true, true, true>(b, panels_of(pairs_q, kk), panels_of(queries, kk), kk > 0);
      }
      if constexpr (beta) {
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
          ptx::wgmma_shared<true, true, true>(b, panels_of(pairs_k, kk), panels_of(reads, kk), true);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(b);
      store_sums<64>(b, s.adjoints, thread % 128);
    }
  } else if (group == 1) {
#pragma unroll
    for (int j = 0; j < 32; ++j) a[j] = -a[j];
  }
  if (group == 0) {
    store_sums<64>(a, s.state, thread % 128);
    store_sums<64>(b, s.dstate, thread % 128);
  } else if (beta) {
    store_sums<64>(a, s.writes, thread % 128);
  }
  __syncthreads();
  finish_keys<beta, split>(t, c, panel, s, l, middle);
}

// Without beta: dv.
template <int K, int V, bool split>
__device__ void value_gradients(const ChannelGradient& t, const Chunk& c, ValuesShared<K, V>& s, uint64_t (&full)[3],
                                int32_t* exact) {
  constexpr int kOwn = K / 8, kParts = C / kOwn;  // rows of a thread; of a chunk
  const Engine& e = t.e;
  const int thread = threadIdx.x, group = thread / 128, warp = thread / 32, lane = thread % 32;
  const int channel = 2 * lane + (K == 128 ? 64 * group : 0), block = warp % kParts, first = kOwn * block;
  const uint32_t turn = c.turn & 1;
  const auto load_later = [&] {
    ptx::barrier_arrive_expect(&full[2], K * V * 2);
    ptx::load_bytes(s.gates, t.later + c.image * (K * V * 2), K * V * 2, &full[2]);
  };
  if (thread == 0) {
    const int row = static_cast<int>(c.w.begin) + c.number * C, b = static_cast<int>(c.w.b), gates = t.wide ? 2 : 1;
    ptx::barrier_arrive_expect(&full[0], (gates + 2) * (K * 128));
    for (int i = 0; i < K / 64; ++i) {
      ptx::load_box(s.gates + i * gates * kPanel, &t.g[i], &full[0], 0, row, 0, c.h, b);
      ptx::load_box(s.q + i * kPanel, &t.q[i], &full[0], 0, row, 0, c.h / e.q.group, b);
      ptx::load_box(s.k + i * kPanel, &t.k[i], &full[0], 0, row, 0, c.h / e.k.group, b);
    }
    ptx::barrier_arrive_expect(&full[1], V * 128);
    ptx::load_box(s.dout, &t.d, &full[1], 0, row, 0, c.h, b);
  }
  float2 l[kOwn];
  ptx::barrier_wait(&full[0], turn);
  const float range = sum_rows(s.gates, t.wide, channel, first, c.rows, l);
  *reinterpret_cast<float2*>(&s.totals[block][channel]) = l[kOwn - 1];
  if constexpr (!split) {
    const bool far = range_too_far<kOwn>(range, s.ranges);
    if (thread == 0) *exact = far;
    if (far) {
      ptx::barrier_wait(&full[1], turn);
      return;
    }
    if (thread == 0) load_later();  // the gates are read
  } else {
    __syncthreads();
  }
  const Place place = place_of(s.totals, block, channel);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t at = ptx::tile_byte(C, first + i, channel);
    const float2 k = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.k + at));
    const bool in = first + i < c.rows;
    const float2 rest = {place.behind.x + l[kOwn - 1].x - l[i].x, place.behind.y + l[kOwn - 1].y - l[i].y};
    *reinterpret_cast<uint32_t*>(s.written + at) =
        in ? ptx::pack<true>(k.x * ptx::exp2_fast(rest.x), k.y * ptx::exp2_fast(rest.y)) : 0;
    if constexpr (!split) {
      const float2 q = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.q + at));
      const float2 x = {l[i].x + place.middle.x, l[i].y + place.middle.y};
      *reinterpret_cast<uint32_t*>(s.q + at) = in ? ptx::pack<true>(q.x * ptx::exp2_fast(x.x), q.y * ptx::exp2_fast(x.y)) : 0;
      *reinterpret_cast<uint32_t*>(s.k + at) = in ? ptx::pack<true>(k.x * ptx::exp2_fast(-x.x), k.y * ptx::exp2_fast(-x.y)) : 0;
    }
  }
  if constexpr (split) {
    for (int i = thread; i < kPanel / 16; i += 256) reinterpret_cast<uint4*>(s.p)[i] = {};
    __syncthreads();
    exact_scores<K, 8>(s.q, s.k, s.gates, t.wide, s.p, 8 * warp, C, lane);
    __syncthreads();
    for (int i = thread; i < (C - c.rows) * 8; i += 256) {  // rows behind the sequence
      *reinterpret_cast<uint4*>(s.p + (c.rows + i / 8) * 128 + i % 8 * 16) = {};
    }
    if (thread == 0) load_later();
  } else {
    ptx::fence_async_shared();
    __syncthreads();
    const uint32_t q = ptx::shared_address(s.q), k = ptx::shared_address(s.k);
    float p[16];  // 32 columns for each group
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < K / 16; ++kk) {
      ptx::wgmma_shared<true, false, false>(p, ptx::descriptor_k_major(q, C, kk),
                                            ptx::descriptor_k_major(k + group * 32 * ptx::kRowBytes, C, kk), kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(p);
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      const int row = 16 * (warp % 4) + lane / 4 + ptx::Fragment::below(j), column = 32 * group + ptx::Fragment{lane}.pair(j);
      *reinterpret_cast<uint32_t*>(s.p + ptx::tile_byte(C, row, column)) =
          ptx::pack<true>(column <= row ? p[j] : 0, column + 1 <= row ? p[j + 1] : 0);
    }
  }
  ptx::barrier_wait(&full[1], turn);
  for (int i = thread; i < (C - c.rows) * (V / 8); i += 256) {  // behind the sequence zero, NaN or not
    *reinterpret_cast<uint4*>(s.dout + ptx::tile_byte(C, c.rows + i / (V / 8), i % (V / 8) * 8)) = {};
  }
  ptx::fence_async_shared();
  __syncthreads();
  ptx::barrier_wait(&full[2], turn);
  const bool has = group < V / 64;
  if (has) {
    const uint32_t written = ptx::shared_address(s.written), p = ptx::shared_address(s.p);
    const uint32_t d = ptx::shared_address(s.dout) + group * kPanel, later = ptx::shared_address(s.gates) + group * (K * 128);
    float z[32];
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < K / 16; ++kk) {
      ptx::wgmma_shared<true, false, false>(z, ptx::descriptor_k_major(written, C, kk), ptx::descriptor_k_major(later, 64, kk),
                                            kk > 0);
    }
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      ptx::wgmma_shared<true, true, true>(z, ptx::descriptor_mn_major(p, C, kk), ptx::descriptor_mn_major(d, C, kk), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(z);
    char* tile = s.q + group * kPanel;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const int row = 16 * (warp % 4) + lane / 4 + ptx::Fragment::below(j), column = ptx::Fragment{lane}.pair(j);
      if (t.dv_pieces) {
        *reinterpret_cast<uint32_t*>(tile + ptx::tile_byte(C, row, column)) =
            ptx::pack<true>(e.scale * z[j], e.scale * z[j + 1]);
      } else if (row < c.rows && t.dv.data != nullptr) {
        const int64_t token = c.w.begin + static_cast<int64_t>(c.number) * C + row;
        store_pair(pair_rows(t.dv, c.w.b, token, c.h, 64 * group + column).at, t.dv, false, e.scale * z[j], e.scale * z[j + 1]);
      }
    }
  }
  __syncthreads();
  if (t.dv_pieces && t.dv.data != nullptr) {
    for (int part = 0; part < V / 64; ++part) store_adjoints(t, c, s.q + part * kPanel, 64 * part);
  }
}

template <int K, int V, bool beta, bool split>
__device__ void gradient_kernel(const ChannelGradient& t) {
  extern __shared__ char memory[];
  __shared__ uint64_t full[3];
  __shared__ uint32_t flagged[8];
  constexpr int kParts = K / 64 + (beta ? 0 : 1);
  const Engine& e = t.e;
  if (threadIdx.x == 0) {
    for (auto& barrier : full) ptx::barrier_init(&barrier, 1);
    ptx::barrier_init_fence();
  }
  Chunk c;
  c.turn = 0;
  int64_t n;
  const auto find = [&](int64_t item) {  // there are less than 2^31
    const auto image = static_cast<uint32_t>(item) / kParts, H = static_cast<uint32_t>(e.H);
    c.image = image;
    c.h = static_cast<int>(image % H);
    if (!find_chunk(e, image / H, &c.w, &n, &c.number)) return false;
    c.rows = chunk_rows(c.w, c.number);
    return true;
  };
  const auto is_far = [&](int64_t item) { return beta ? t.records[c.image * kda_record(K) + 2 * K] != 0 : t.exact[item] != 0; };
  const auto work = [&](int64_t item) {
    const int part = static_cast<int>(item % kParts);
    if (!beta && part == K / 64) {
      if constexpr (!beta) value_gradients<K, V, split>(t, c, ptx::shared_as<ValuesShared<K, V>>(memory), full, t.exact + item);
    } else {
      panel_gradients<K, V, beta, split>(t, c, part, ptx::shared_as<PanelShared<split>>(memory), full,
                                         beta ? nullptr : t.exact + item);
    }
  };
  if constexpr (!split) {
    if (!find(blockIdx.x) || (beta && is_far(blockIdx.x))) return;
    __syncthreads();
    work(blockIdx.x);
  } else {
    const int64_t items = channel_chunks(e.offsets != nullptr, e.N, e.T) * e.H * kParts, apart = gridDim.x;
    for (int64_t from = blockIdx.x; from < items; from += 256 * apart) {
      const int64_t own = from + threadIdx.x * apart;
      const uint32_t mine = __ballot_sync(0xffffffff, own < items && find(own) && is_far(own));
      if (threadIdx.x % 32 == 0) flagged[threadIdx.x / 32] = mine;
      __syncthreads();
#pragma unroll 1
      for (int word = 0; word < 8; ++word) {
#pragma unroll 1
        for (uint32_t left = flagged[word]; left != 0; left &= left - 1) {
          const int64_t item = from + (32 * word + __ffs(static_cast<int>(left)) - 1) * apart;
          find(item);
          work(item);
          ptx::fence_async_shared();
          __syncthreads();
          ++c.turn;
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace

#define LINNET_GRADIENT(name, K, V, beta, split)                                                                        \
  extern "C" __global__ void __launch_bounds__(256, split ? 1 : 2) name(const __grid_constant__ ChannelGradient tile) { \
    gradient_kernel<K, V, beta, split>(tile);                                                                           \
  }
LINNET_GRADIENT(channel_gradient_64_64, 64, 64, false, false)
LINNET_GRADIENT(channel_gradient_64_128, 64, 128, false, false)
LINNET_GRADIENT(channel_gradient_128_64, 128, 64, false, false)
LINNET_GRADIENT(channel_gradient_128_128, 128, 128, false, false)
LINNET_GRADIENT(channel_exact_64_64, 64, 64, false, true)
LINNET_GRADIENT(channel_exact_64_128, 64, 128, false, true)
LINNET_GRADIENT(channel_exact_128_64, 128, 64, false, true)
LINNET_GRADIENT(channel_exact_128_128, 128, 128, false, true)
LINNET_GRADIENT(kda_gradient_64, 64, 64, true, false)
LINNET_GRADIENT(kda_gradient_128, 128, 128, true, false)
LINNET_GRADIENT(kda_exact_64, 64, 64, true, true)
LINNET_GRADIENT(kda_exact_128, 128, 128, true, true)

}  // namespace linnet::cuda
