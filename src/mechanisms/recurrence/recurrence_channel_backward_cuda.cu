// Gradients of the recurrence with a decay per channel: one block per (chunk, head), from the state S before the chunk and the
// gradient R of the state behind it (recurrence_channel.cuh keeps both).
//
//   dq_i = scale (exp(G_i) S dO_i + sum_{j <= i} dP_ij k_j exp(G_i - G_j))       dP = tril(dO V^T)
//   dk_j = scale (exp(G_C - G_j) R v_j + sum_{i >= j} dP_ij q_i exp(G_i - G_j))
//   dv_j = scale (R^T k_j exp(G_C - G_j) + sum_{i >= j} P_ij dO_i)
//   dg_t = scale (sum_{i >= t} (q_i dq'_i - k_i dk'_i) + sum_{j < t} k_j dk"_j + exp(G_C) rowsum(S R))
//
// dq', dk': without the diagonal and without what leaves the chunk (dk"): those carry no decay, and would cancel only in exact
// arithmetic. In the sum of dg every pair of rows behind t cancels: both sides take the same rounded Q' and K', so that it
// does.
//
// Four warpgroups: dq, dk", dP and dv, P and dk'. The decays are applied by the threads of two channels and 16 rows that summed
// them, of the first two. A chunk whose gates range too far (kSplit) takes its pairs one by one in f32.
#include "mechanisms/recurrence/recurrence_channel_back.cuh"

namespace linnet::cuda {
namespace {

template <int K, int V>
struct GradientShared {
  alignas(1024) char q[K / 64 * kPanel];
  char k[K / 64 * kPanel], v[V / 64 * kPanel], d[V / 64 * kPanel];
  char g[256 * K];                              // the gates, then Q' and K', then f32 sums of dk'
  char s[256 * K];                              // S, then f32 sums of dq'
  char r[256 * K];                              // R, then f32 sums of dk"
  char written[(K > V ? K : V) / 64 * kPanel];  // K exp(G_C - G), then dv
  char p[kPanel], dp[kPanel];
  float totals[4][K], upper[4][K], lower[4][K];
  float middle[K], both[3][K];  // factors of S; rowsum(S R), in two parts
  float diagonal[C];
  int split;
  uint64_t full[3];
};

// What a block works on.
struct Chunk {
  Walk w;
  int64_t n;
  int number, rows, h;
  int64_t image;  // of the states
};

// The first two warpgroups: decays; dq' and dk"; then everything that the decays act on.
template <int K, int V, bool split>
__device__ void gradient_keys(const ChannelGradient& t, const Chunk& c, GradientShared<K, V>& s) {
  constexpr int kThreads = K / 64 * 128;  // that sum the gates
  constexpr uint32_t kImage = K * 128;    // of 64 values
  const Engine& e = t.e;
  const Walk& w = c.w;
  const int h = c.h, rows = c.rows, chunk = c.number;
  const int thread = threadIdx.x % 128, group = threadIdx.x / 128, warp = thread / 32, lane = thread % 32;
  const int channel = group * 64 + 2 * lane, first = 16 * warp;
  const bool sums = group < K / 64;
  char *scaled_q = s.g, *scaled_k = s.g + K / 64 * kPanel;
  float2 l[16];
  if (sums) {
    ptx::barrier_wait(&s.full[0], 0);
    const float range = sum_rows(s.g, t.wide, channel, first, rows, l);
    *reinterpret_cast<float2*>(&s.totals[warp][channel]) = l[15];
    const bool far = ptx::group_any<1, kThreads>(!(range <= kSplit));
    if (threadIdx.x == 0) s.split = far;
    const Place p = place_of(s.totals, warp, channel);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t at = ptx::tile_byte(C, first + i, channel);
      const float2 k = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.k + at));
      const float2 q = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.q + at));
      const bool in = first + i < rows;
      const float2 rest = {p.behind.x + l[15].x - l[i].x, p.behind.y + l[15].y - l[i].y};
      *reinterpret_cast<uint32_t*>(s.written + at) =
          in ? ptx::pack<true>(k.x * ptx::exp2_fast(rest.x), k.y * ptx::exp2_fast(rest.y)) : 0;
      if (!split) {
        const float2 x = {l[i].x + p.middle.x, l[i].y + p.middle.y};
        *reinterpret_cast<uint32_t*>(scaled_q + at) =
            in ? ptx::pack<true>(q.x * ptx::exp2_fast(x.x), q.y * ptx::exp2_fast(x.y)) : 0;
        *reinterpret_cast<uint32_t*>(scaled_k + at) =
            in ? ptx::pack<true>(k.x * ptx::exp2_fast(-x.x), k.y * ptx::exp2_fast(-x.y)) : 0;
      }
    }
    if (warp == 2) {  // the block that begins in the middle
      const float2 x = p.before;
      *reinterpret_cast<float2*>(&s.middle[channel]) = {ptx::exp2_fast(x.x), ptx::exp2_fast(x.y)};
    }
    if (split) {
      for (int i = threadIdx.x; i < kPanel / 16; i += kThreads) reinterpret_cast<uint4*>(s.p)[i] = {};
      ptx::group_sync<1, kThreads>();
      constexpr int kColumns = K == 128 ? 8 : 16;
      exact_scores<K, kColumns>(s.q, s.k, s.g, t.wide, s.p, (group * 4 + warp) * kColumns, C, lane);
      ptx::group_sync<1, kThreads>();
      if (rows < C) {  // of rows behind the sequence
        for (int i = threadIdx.x; i < (C - rows) * 8; i += kThreads) {
          *reinterpret_cast<uint4*>(s.p + (rows + i / 8) * 128 + i % 8 * 16) = {};
        }
      }
    }
  }
  ptx::fence_async_shared();
  sync_roles();
  if (!split && s.split != 0) {  // the other kernel's; nothing may be on its way here when the block ends
    if (threadIdx.x == 0) t.exact[c.image] = 1;
    ptx::barrier_wait(&s.full[1], 0);
    ptx::barrier_wait(&s.full[2], 0);
    return;
  }
  {
    const uint32_t d = ptx::shared_address(s.d), v = ptx::shared_address(s.v), dp = ptx::shared_address(s.dp);
    const uint32_t ks = ptx::shared_address(scaled_k), state = ptx::shared_address(s.s), later = ptx::shared_address(s.r);
    float x[K / 2];
    ptx::barrier_wait(&s.full[2], 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < V / 16; ++kk) {
      ptx::wgmma_shared<true, false, true>(x, ptx::descriptor_k_major(group == 0 ? d : v, C, kk),
                                           ptx::descriptor_mn_major((group == 0 ? state : later) + kk / 4 * kImage, 64, kk % 4),
                                           kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(x);
    if (group == 0 && !split) {
#pragma unroll
      for (int j = 0; j < K / 2; j += 4) {
        const float2 f = *reinterpret_cast<const float2*>(&s.middle[j / 4 * 8 + lane % 4 * 2]);
        x[j] *= f.x;
        x[j + 1] *= f.y;
        x[j + 2] *= f.x;
        x[j + 3] *= f.y;
      }
      ptx::hold(x);
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        ptx::wgmma_shared<true, false, true>(x, ptx::descriptor_k_major(dp, C, kk), ptx::descriptor_mn_major(ks, C, kk), true);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(x);
    }
    sync_roles();  // S, R, Q', K' are read
    store_sums<K>(x, group == 0 ? s.s : s.r, thread);
  }
  sync_roles();
  if (!sums) return;
  // Decays of the sums, the diagonal, and dg.
  const Place place = place_of(s.totals, warp, channel);
  float2 dq[16], dk[16], written[16];
  if (split) {
    exact_pairs(s.q, s.k, s.dp, s.g, t.wide, channel, first, rows, dq, dk);
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) dq[i] = dk[i] = {0, 0};
  }
  float2 sum = {0, 0};
  const int64_t token = w.begin + static_cast<int64_t>(chunk) * C + first;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t at = ptx::tile_byte(C, first + i, channel);
    float2 k = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.k + at));
    float2 q = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.q + at));
    const float2 rest = {place.behind.x + l[15].x - l[i].x, place.behind.y + l[15].y - l[i].y};
    const float2 read = sums_at<K>(s.s, first + i, channel / 2), leaves = sums_at<K>(s.r, first + i, channel / 2);
    const float2 ks2 = {leaves.x * ptx::exp2_fast(rest.x), leaves.y * ptx::exp2_fast(rest.y)};
    const float diagonal = s.diagonal[first + i];
    const bool in = first + i < rows;
    float2 upper;
    if (split) {
      const float2 from = {l[i].x + place.before.x, l[i].y + place.before.y};
      dq[i] = {fmaf(read.x, ptx::exp2_fast(from.x), dq[i].x), fmaf(read.y, ptx::exp2_fast(from.y), dq[i].y)};
      upper = {q.x * dq[i].x - k.x * dk[i].x, q.y * dq[i].y - k.y * dk[i].y};
    } else {
      const float2 e2 = {l[i].x + place.middle.x, l[i].y + place.middle.y}, pairs = sums_at<K>(s.g, first + i, channel / 2);
      const float2 fq = {ptx::exp2_fast(e2.x), ptx::exp2_fast(e2.y)}, fk = {ptx::exp2_fast(-e2.x), ptx::exp2_fast(-e2.y)};
      const float2 qr = ptx::unpack<true>(ptx::pack<true>(q.x * fq.x, q.y * fq.y));
      const float2 kr = ptx::unpack<true>(ptx::pack<true>(k.x * fk.x, k.y * fk.y));
      dq[i] = {read.x * fq.x, read.y * fq.y};
      dk[i] = {pairs.x * fk.x, pairs.y * fk.y};
      upper = {qr.x * read.x - kr.x * pairs.x, qr.y * read.y - kr.y * pairs.y};
    }
    if (in) {
      if (t.dq.data != nullptr) {
        store_pair(t.dq, row_of(t.dq, w.b, token + i, h) + channel, e.scale * fmaf(diagonal, k.x, dq[i].x),
                   e.scale * fmaf(diagonal, k.y, dq[i].y));
      }
      if (t.dk.data != nullptr) {
        store_pair(t.dk, row_of(t.dk, w.b, token + i, h) + channel, e.scale * (fmaf(diagonal, q.x, dk[i].x) + ks2.x),
                   e.scale * (fmaf(diagonal, q.y, dk[i].y) + ks2.y));
      }
    }
    dq[i] = in ? upper : float2{0, 0};
    written[i] = sum;
    if (in) sum = {fmaf(k.x, ks2.x, sum.x), fmaf(k.y, ks2.y, sum.y)};
  }
  if (t.dg.data == nullptr) return;
  *reinterpret_cast<float2*>(&s.lower[warp][channel]) = sum;
  sum = {0, 0};
#pragma unroll
  for (int i = 15; i >= 0; --i) {
    sum = {sum.x + dq[i].x, sum.y + dq[i].y};
    written[i] = {written[i].x + sum.x, written[i].y + sum.y};
  }
  *reinterpret_cast<float2*>(&s.upper[warp][channel]) = sum;
  ptx::group_sync<1, kThreads>();
  float2 base = *reinterpret_cast<const float2*>(&s.both[0][channel]);
  {
    const float2 other = *reinterpret_cast<const float2*>(&s.both[1][channel]);
    base = {(base.x + other.x) * ptx::exp2_fast(place.all.x), (base.y + other.y) * ptx::exp2_fast(place.all.y)};
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j == warp) continue;
    const float2 add = *reinterpret_cast<const float2*>(j < warp ? &s.lower[j][channel] : &s.upper[j][channel]);
    base = {base.x + add.x, base.y + add.y};
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (first + i >= rows) break;
    const float2 gate = {l[i].x - (i > 0 ? l[i - 1].x : 0), l[i].y - (i > 0 ? l[i - 1].y : 0)};
    store_pair(t.dg, row_of(t.dg, w.b, token + i, h) + channel, gate.x < -126 ? 0 : e.scale * (base.x + written[i].x),
               gate.y < -126 ? 0 : e.scale * (base.y + written[i].y));
  }
}

// The third: dP, rowsum(S R), dv.
template <int K, int V, bool split>
__device__ void gradient_values(const ChannelGradient& t, const Chunk& c, GradientShared<K, V>& s) {
  constexpr uint32_t kImage = K * 128;
  const Engine& e = t.e;
  const Walk& w = c.w;
  const int h = c.h, rows = c.rows, chunk = c.number;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const uint32_t d = ptx::shared_address(s.d), v = ptx::shared_address(s.v), p = ptx::shared_address(s.p);
  const uint32_t later = ptx::shared_address(s.r), ws = ptx::shared_address(s.written);
  ptx::barrier_wait(&s.full[1], 0);
  for (int i = thread; i < (C - rows) * (V / 8); i += 128) {
    *reinterpret_cast<uint4*>(s.d + ptx::tile_byte(C, rows + i / (V / 8), i % (V / 8) * 8)) = {};
  }
  float x[32];
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < V / 16; ++kk) {
    ptx::wgmma_shared<true, false, false>(x, ptx::descriptor_k_major(d, C, kk), ptx::descriptor_k_major(v, C, kk), kk > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::hold(x);
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    const int row = 16 * warp + lane / 4 + (j & 2) * 4, column = j / 4 * 8 + lane % 4 * 2;
    const bool in = row < rows;
    if (row / 2 * 2 == column) s.diagonal[row] = !in ? 0 : row % 2 == 0 ? x[j] : x[j + 1];
    *reinterpret_cast<uint32_t*>(s.dp + ptx::tile_byte(C, row, column)) =
        ptx::pack<true>(in && column < row ? x[j] : 0, in && column + 1 < row ? x[j + 1] : 0);
  }
  ptx::fence_async_shared();
  sync_roles();
  if (!split && s.split != 0) return;
  // rowsum(S R): a thread has two channels, and half of the values.
  ptx::barrier_wait(&s.full[2], 0);
  if (thread < K) {
    const int pair = thread % (K / 2), half = thread / (K / 2);
    float2 sum = {0, 0};
#pragma unroll 4
    for (int i = 0; i < V / 2; ++i) {
      const int value = half * (V / 2) + i;
      const uint32_t at = value / 64 * kImage + ptx::tile_byte(64, value % 64, 2 * pair);
      const float2 a = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.s + at));
      const float2 b = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.r + at));
      sum = {fmaf(a.x, b.x, sum.x), fmaf(a.y, b.y, sum.y)};
    }
    *reinterpret_cast<float2*>(&s.both[half][2 * pair]) = sum;
  }
  ptx::group_sync<5, 256>();  // P
  float z[V / 64][32];
  ptx::wgmma_fence();
#pragma unroll
  for (int part = 0; part < V / 64; ++part) {
#pragma unroll
    for (int kk = 0; kk < K / 16; ++kk) {
      ptx::wgmma_shared<true, false, false>(z[part], ptx::descriptor_k_major(ws, C, kk),
                                            ptx::descriptor_k_major(later + part * kImage, 64, kk), kk > 0);
    }
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      ptx::wgmma_shared<true, true, true>(z[part], ptx::descriptor_mn_major(p, C, kk),
                                          ptx::descriptor_mn_major(d + part * kPanel, C, kk), true);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int part = 0; part < V / 64; ++part) ptx::hold(z[part]);
  ptx::group_sync<6, 128>();
  if (t.dv.data != nullptr) {
    if (!t.dv_pieces) {
#pragma unroll
      for (int j = 0; j < V / 2; j += 2) {
        const int row = 16 * warp + lane / 4 + (j & 2) * 4, column = j / 4 * 8 + lane % 4 * 2;
        if (row >= rows) continue;
        const int64_t place = row_of(t.dv, w.b, w.begin + static_cast<int64_t>(chunk) * C + row, h) + column;
        store_pair(t.dv, place, e.scale * z[j / 32][j % 32], e.scale * z[j / 32][j % 32 + 1]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < V / 2; j += 2) {
        const int row = 16 * warp + lane / 4 + (j & 2) * 4, column = j / 4 * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(s.written + ptx::tile_byte(C, row, column)) =
            ptx::pack<true>(e.scale * z[j / 32][j % 32], e.scale * z[j / 32][j % 32 + 1]);
      }
      ptx::group_sync<6, 128>();
      auto* to = static_cast<uint16_t*>(const_cast<void*>(t.dv.data));
      for (int i = thread; i < rows * (V / 8); i += 128) {
        const int row = i / (V / 8), column = i % (V / 8) * 8;
        const int64_t place = row_of(t.dv, w.b, w.begin + static_cast<int64_t>(chunk) * C + row, h) + column;
        *reinterpret_cast<uint4*>(to + place) = *reinterpret_cast<const uint4*>(s.written + ptx::tile_byte(C, row, column));
      }
    }
  }
  sync_roles();
  sync_roles();
}

// The last: P, dk'.
template <int K, int V, bool split>
__device__ void gradient_scores(GradientShared<K, V>& s) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const uint32_t qs = ptx::shared_address(s.g), ks = qs + K / 64 * kPanel, dp = ptx::shared_address(s.dp);
  sync_roles();
  if (!split && s.split != 0) return;
  if (!split) {
    float scores[32];
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < K / 16; ++kk) {
      ptx::wgmma_shared<true, false, false>(scores, ptx::descriptor_k_major(qs, C, kk), ptx::descriptor_k_major(ks, C, kk),
                                            kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const int row = 16 * warp + lane / 4 + (j & 2) * 4, column = j / 4 * 8 + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(s.p + ptx::tile_byte(C, row, column)) =
          ptx::pack<true>(column <= row ? scores[j] : 0, column + 1 <= row ? scores[j + 1] : 0);
    }
    ptx::fence_async_shared();
    ptx::group_sync<5, 256>();
    float y[K / 2];
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      ptx::wgmma_shared<true, true, true>(y, ptx::descriptor_mn_major(dp, C, kk), ptx::descriptor_mn_major(qs, C, kk), kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(y);
    sync_roles();
    store_sums<K>(y, s.g, thread);
  } else {
    ptx::group_sync<5, 256>();
    sync_roles();
  }
  sync_roles();
}

template <int K, int V, bool split>
__device__ void gradient_kernel(const ChannelGradient& t) {
  extern __shared__ char memory[];
  static_assert(sizeof(GradientShared<K, V>) + 1024 <= gradient_shared_bytes(K, V) && gradient_shared_bytes(K, V) <= 232448);
  auto& s = ptx::shared_as<GradientShared<K, V>>(memory);
  const Engine& e = t.e;
  Chunk c;
  c.h = blockIdx.x % e.H;
  if (!find_chunk(e, blockIdx.x / e.H, &c.w, &c.n, &c.number)) return;
  c.rows = chunk_rows(c.w, c.number);
  c.image = (channel_chunk(e.offsets != nullptr, e.T, c.n, c.w.begin) + c.number) * e.H + c.h;
  if (split) {
    if (t.exact[c.image] == 0) return;
  } else if (threadIdx.x == 0) {
    t.exact[c.image] = 0;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) ptx::barrier_init(&s.full[i], 1);
    ptx::barrier_init_fence();
    const int row = static_cast<int>(c.w.begin) + c.number * C, b = static_cast<int>(c.w.b), h = c.h;
    const int64_t number = c.image;
    ptx::barrier_arrive_expect(&s.full[0], (t.wide ? 4 : 3) * (K / 64 * kPanel));
    ptx::load_box(s.g, &t.g, &s.full[0], 0, row, 0, h, b);
    ptx::load_box(s.q, &t.q, &s.full[0], 0, row, 0, h / e.q.group, b);
    ptx::load_box(s.k, &t.k, &s.full[0], 0, row, 0, h / e.k.group, b);
    ptx::barrier_arrive_expect(&s.full[1], 2 * (V / 64 * kPanel));
    ptx::load_box(s.d, &t.d, &s.full[1], 0, row, 0, h, b);
    ptx::load_box(s.v, &t.v, &s.full[1], 0, row, 0, h / e.v.group, b);
    ptx::barrier_arrive_expect(&s.full[2], 2 * (K * V * 2));
    ptx::load_bytes(s.s, t.states + number * (K * V * 2), K * V * 2, &s.full[2]);
    ptx::load_bytes(s.r, t.later + number * (K * V * 2), K * V * 2, &s.full[2]);
  }
  __syncthreads();
  if (threadIdx.x < 256) {  // 128 registers each, shared out again
    ptx::more_registers<152>();
    gradient_keys<K, V, split>(t, c, s);
  } else {
    ptx::fewer_registers<104>();
    if (threadIdx.x < 384) {
      gradient_values<K, V, split>(t, c, s);
    } else {
      gradient_scores<K, V, split>(s);
    }
  }
}

}  // namespace

#define LINNET_GRADIENT(name, K, V, split)                                                                  \
  extern "C" __global__ void __launch_bounds__(512, 1) name(const __grid_constant__ ChannelGradient tile) { \
    gradient_kernel<K, V, split>(tile);                                                                     \
  }
LINNET_GRADIENT(channel_gradient_64_64, 64, 64, false)
LINNET_GRADIENT(channel_gradient_64_128, 64, 128, false)
LINNET_GRADIENT(channel_gradient_128_64, 128, 64, false)
LINNET_GRADIENT(channel_gradient_128_128, 128, 128, false)
LINNET_GRADIENT(channel_exact_64_64, 64, 64, true)
LINNET_GRADIENT(channel_exact_64_128, 64, 128, true)
LINNET_GRADIENT(channel_exact_128_64, 128, 64, true)
LINNET_GRADIENT(channel_exact_128_128, 128, 128, true)

}  // namespace linnet::cuda
