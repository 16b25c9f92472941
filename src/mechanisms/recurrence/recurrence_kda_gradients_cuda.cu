// Gradients of the delta rule with a decay per channel, a block for each chunk and head, from what the walks kept
// (recurrence_kda.h). Four warpgroups: dQ', dK", what leaves the chunk (N R'^T), and the pairs inside it; then the decays, by
// threads of two channels and 16 rows.
//
//   dg_t = sum_{i >= t} (q' dQ' + k" dK" - k' dK'_inside)_i + sum_{j < t} (k' N R'^T)_j + rowsum(S' R')
//
// The diagonal of dP carries no decay and is kept apart: in the sum it would cancel only in exact arithmetic. A chunk whose
// gates range too far takes its pairs one by one in f32, from q, k, S and R without factors.
#include "mechanisms/recurrence/recurrence_channel_back.cuh"
#include "mechanisms/recurrence/recurrence_kda.h"

namespace linnet::cuda {
namespace {

template <int D>
struct KdaGradientShared {
  alignas(1024) char q[D * 128];
  char read[D * 128], k[D * 128];              // Q', K", K'; one by one: q, k
  char dout[D * 128], residuals[D * 128];      // then f32 sums of dK"
  char adjoints[D * 128], dp[8192], dl[8192];  // then f32 sums of dK' inside the chunk
  char state[256 * D], dstate[256 * D];        // S', R'; then f32 sums of dQ', and of what leaves the chunk
  char g[256 * D];
  float totals[4][D], upper[4][D], lower[4][D], both[2][D];
  float diagonal[C], inverse_beta[C];
  uint64_t full[3];
};

struct KdaChunk {
  Walk w;
  int64_t n, image;
  int number, rows, h;
};

template <int D>
__device__ void store_values(const Kda& t, const KdaChunk& c, const KdaGradientShared<D>& s, int thread) {
  if (t.dv.data == nullptr) return;
  const int64_t token = c.w.begin + static_cast<int64_t>(c.number) * C;
  for (int i = thread; i < c.rows * (D / 8); i += 128) {
    const int row = i / (D / 8), column = i % (D / 8) * 8;
    const uint4 x = *reinterpret_cast<const uint4*>(s.adjoints + ptx::tile_byte(C, row, column));
    const int64_t place = row_of(t.dv, c.w.b, token + row, c.h) + column;
    if (t.dv_pieces) {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(const_cast<void*>(t.dv.data)) + place) = x;
    } else {
      const uint32_t parts[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 y = ptx::unpack<true>(parts[j]);
        store_pair(t.dv, place + 2 * j, y.x, y.y);
      }
    }
  }
}

// dP and dL, and dbeta.
template <int D>
__device__ void pair_chunk(const Kda& t, const KdaChunk& c, KdaGradientShared<D>& s) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const uint32_t n = ptx::shared_address(s.residuals);
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const uint32_t from = ptx::shared_address(part == 0 ? s.dout : s.adjoints);
    float x[32];
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      ptx::wgmma_shared<true, false, false>(x, ptx::descriptor_k_major(from, C, kk), ptx::descriptor_k_major(n, C, kk), kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(x);
    const float sign = part == 0 ? 1 : -1;
    char* const to = part == 0 ? s.dp : s.dl;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const int row = 16 * warp + lane / 4 + (j & 2) * 4, column = j / 4 * 8 + lane % 4 * 2;
      const bool in = row < c.rows;
      if (row / 2 * 2 == column) {
        const float diagonal = !in ? 0 : row % 2 == 0 ? x[j] : x[j + 1];
        if (part == 0) {
          s.diagonal[row] = diagonal;
        } else if (in && t.dbeta.data != nullptr) {
          const float inverse = s.inverse_beta[row];
          ptx::store(const_cast<void*>(t.dbeta.data), t.dbeta.dtype,
                     row_of(t.dbeta, c.w.b, c.w.begin + static_cast<int64_t>(c.number) * C + row, c.h),
                     t.e.beta_factor * (diagonal * inverse * inverse));
        }
      }
      *reinterpret_cast<uint32_t*>(to + ptx::tile_byte(C, row, column)) =
          ptx::pack<true>(in && column < row ? sign * x[j] : 0, in && column + 1 < row ? sign * x[j + 1] : 0);
    }
  }
  ptx::fence_async_shared();
}

// dQ', dK", or what leaves the chunk, by group; sums of the pairs are added between the block's barriers.
template <int D, bool split>
__device__ __forceinline__ void key_sums(const Kda& t, const KdaChunk& c, int group, KdaGradientShared<D>& s) {
  constexpr uint32_t kImage = D * 128;  // of 64 values
  const int thread = threadIdx.x % 128;
  const uint32_t left = ptx::shared_address(group == 0 ? s.dout : group == 1 ? s.adjoints : s.residuals);
  const uint32_t state = ptx::shared_address(group == 2 ? s.dstate : s.state);
  float x[D / 2];
  ptx::barrier_wait(&s.full[2], 0);
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < D / 16; ++kk) {
    ptx::wgmma_shared<true, false, true>(x, ptx::descriptor_k_major(left, C, kk),
                                         ptx::descriptor_mn_major(state + kk / 4 * kImage, 64, kk % 4), kk > 0);
  }
  ptx::wgmma_commit();
  if (group == 2) {
    // rowsum(S' R'): a thread has two channels, and a part of the values.
    constexpr int kParts = 2;
    if (thread < D) {
      const int pair = thread % (D / 2), half = thread / (D / 2);
      float2 sum = {0, 0};
#pragma unroll 4
      for (int i = 0; i < D / kParts; ++i) {
        const int value = half * (D / kParts) + i;
        const uint32_t at = value / 64 * kImage + ptx::tile_byte(64, value % 64, 2 * pair);
        const float2 a = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.state + at));
        const float2 b = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.dstate + at));
        sum = {fmaf(a.x, b.x, sum.x), fmaf(a.y, b.y, sum.y)};
      }
      *reinterpret_cast<float2*>(&s.both[half][2 * pair]) = sum;
    }
    store_values<D>(t, c, s, thread);
  }
  ptx::wgmma_wait<0>();
  ptx::hold(x);
  sync_roles();  // dP, dL
  if (group < 2 && !split) {
    const uint32_t pairs = ptx::shared_address(group == 0 ? s.dp : s.dl), k = ptx::shared_address(s.k);
    if (group == 1) {
#pragma unroll
      for (int j = 0; j < D / 2; ++j) x[j] = -x[j];
    }
    ptx::hold(x);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      ptx::wgmma_shared<true, false, true>(x, ptx::descriptor_k_major(pairs, C, kk), ptx::descriptor_mn_major(k, C, kk), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(x);
  } else if (group == 1) {
#pragma unroll
    for (int j = 0; j < D / 2; ++j) x[j] = -x[j];
  }
  sync_roles();  // everything is read
  store_sums<D>(x, group == 0 ? s.state : group == 1 ? s.dout : s.dstate, thread);
  sync_roles();
}

// The decays, and dg.
template <int D, bool split>
__device__ void finish_keys(const Kda& t, const KdaChunk& c, KdaGradientShared<D>& s, const float2 (&l)[16]) {
  constexpr int kThreads = D / 64 * 128;
  const Engine& e = t.e;
  const int thread = threadIdx.x % 128, group = threadIdx.x / 128, warp = thread / 32, lane = thread % 32;
  const int channel = group * 64 + 2 * lane, first = 16 * warp, h = c.h, rows = c.rows;
  const Place place = place_of(s.totals, warp, channel);
  const int64_t token = c.w.begin + static_cast<int64_t>(c.number) * C + first;
  float2 upper[16], lower[16], x[split ? 16 : 1], y[split ? 16 : 1], z[split ? 16 : 1];
  if constexpr (split) {
    float2 inside[16];
    exact_pairs(s.q, s.read, s.dp, s.g, t.wide, channel, first, rows, x, inside);
    exact_pairs(s.read, s.read, s.dl, s.g, t.wide, channel, first, rows, y, z);
#pragma unroll
    for (int i = 0; i < 16; ++i) z[i] = {fmaf(e.scale, inside[i].x, z[i].x), fmaf(e.scale, inside[i].y, z[i].y)};
  }
  float2 sum = {0, 0};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t at = ptx::tile_byte(C, first + i, channel);
    const float2 q = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.q + at));
    const float2 k = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.read + at));
    const float2 dq = sums_at<D>(s.state, first + i, channel / 2), dk = sums_at<D>(s.dout, first + i, channel / 2);
    const float2 leaves = sums_at<D>(s.dstate, first + i, channel / 2);
    const float diagonal = s.diagonal[first + i];
    float2 to_q, to_k, left;
    if constexpr (split) {
      const float2 from = {ptx::exp2_fast(l[i].x + place.before.x), ptx::exp2_fast(l[i].y + place.before.y)};
      const float2 rest = {ptx::exp2_fast(place.behind.x + l[15].x - l[i].x),
                           ptx::exp2_fast(place.behind.y + l[15].y - l[i].y)};
      const float2 a = {e.scale * fmaf(dq.x, from.x, x[i].x), e.scale * fmaf(dq.y, from.y, x[i].y)};
      const float2 b = {fmaf(dk.x, from.x, y[i].x), fmaf(dk.y, from.y, y[i].y)};
      const float2 d = {leaves.x * rest.x, leaves.y * rest.y};
      const float own = e.scale * diagonal;
      to_q = {fmaf(own, k.x, a.x), fmaf(own, k.y, a.y)};
      to_k = {fmaf(own, q.x, b.x + z[i].x + d.x), fmaf(own, q.y, b.y + z[i].y + d.y)};
      upper[i] = {q.x * a.x + k.x * (b.x - z[i].x), q.y * a.y + k.y * (b.y - z[i].y)};
      left = {k.x * d.x, k.y * d.y};
    } else {
      const float2 scaled = ptx::unpack<true>(*reinterpret_cast<const uint32_t*>(s.k + at));
      const float2 inside = sums_at<D>(s.adjoints, first + i, channel / 2);
      const float2 place_up = {l[i].x + place.middle.x, l[i].y + place.middle.y};
      const float2 up = {ptx::exp2_fast(place_up.x), ptx::exp2_fast(place_up.y)};
      const float2 down = {ptx::exp2_fast(-place_up.x), ptx::exp2_fast(-place_up.y)};
      to_q = {e.scale * up.x * fmaf(diagonal, scaled.x, dq.x), e.scale * up.y * fmaf(diagonal, scaled.y, dq.y)};
      to_k = {fmaf(up.x, dk.x, down.x * (fmaf(diagonal, q.x, inside.x) + leaves.x)),
              fmaf(up.y, dk.y, down.y * (fmaf(diagonal, q.y, inside.y) + leaves.y))};
      upper[i] = {q.x * dq.x + k.x * dk.x - scaled.x * inside.x, q.y * dq.y + k.y * dk.y - scaled.y * inside.y};
      left = {scaled.x * leaves.x, scaled.y * leaves.y};
    }
    const bool in = first + i < rows;
    if (in && t.dq.data != nullptr) store_pair(t.dq, row_of(t.dq, c.w.b, token + i, h) + channel, to_q.x, to_q.y);
    if (in && t.dk.data != nullptr) store_pair(t.dk, row_of(t.dk, c.w.b, token + i, h) + channel, to_k.x, to_k.y);
    if (!in) upper[i] = {0, 0};
    lower[i] = sum;
    if (in) sum = {sum.x + left.x, sum.y + left.y};
  }
  if (t.dg.data == nullptr) return;
  *reinterpret_cast<float2*>(&s.lower[warp][channel]) = sum;
  sum = {0, 0};
#pragma unroll
  for (int i = 15; i >= 0; --i) {
    sum = {sum.x + upper[i].x, sum.y + upper[i].y};
    lower[i] = {lower[i].x + sum.x, lower[i].y + sum.y};
  }
  *reinterpret_cast<float2*>(&s.upper[warp][channel]) = sum;
  ptx::group_sync<1, kThreads>();
  float2 base = *reinterpret_cast<const float2*>(&s.both[0][channel]);
  const float2 other = *reinterpret_cast<const float2*>(&s.both[1][channel]);
  base = {base.x + other.x, base.y + other.y};
  if constexpr (split) base = {base.x * ptx::exp2_fast(place.all.x), base.y * ptx::exp2_fast(place.all.y)};
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
    store_pair(t.dg, row_of(t.dg, c.w.b, token + i, h) + channel, gate.x < -126 ? 0 : base.x + lower[i].x,
               gate.y < -126 ? 0 : base.y + lower[i].y);
  }
}

template <int D, bool split>
__device__ void kda_gradient(const Kda& t) {
  extern __shared__ char memory[];
  static_assert(sizeof(KdaGradientShared<D>) + 1024 <= kda_gradient_bytes(D) && kda_gradient_bytes(D) <= 232448);
  auto& s = ptx::shared_as<KdaGradientShared<D>>(memory);
  constexpr int kThreads = D / 64 * 128;  // that sum the gates
  const Engine& e = t.e;
  KdaChunk c;
  c.h = blockIdx.x % e.H;
  if (!find_chunk(e, blockIdx.x / e.H, &c.w, &c.n, &c.number)) return;
  c.rows = chunk_rows(c.w, c.number);
  c.image = (channel_chunk(e.offsets != nullptr, e.T, c.n, c.w.begin) + c.number) * e.H + c.h;
  if ((t.records[c.image * kda_record(D) + 2 * D] != 0) != split) return;
  const int64_t row = c.w.begin + static_cast<int64_t>(c.number) * C;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) ptx::barrier_init(&s.full[i], 1);
    ptx::barrier_init_fence();
    const int at = static_cast<int>(row), b = static_cast<int>(c.w.b);
    ptx::barrier_arrive_expect(&s.full[0], (t.wide ? 2 : 1) * (D * 128) + (split ? 2 : 3) * (D * 128));
    ptx::load_box(s.g, &t.g, &s.full[0], 0, at, 0, c.h, b);
    if (split) {
      ptx::load_box(s.q, &t.q, &s.full[0], 0, at, 0, c.h / e.q.group, b);
      ptx::load_box(s.read, &t.k, &s.full[0], 0, at, 0, c.h / e.k.group, b);
    } else {
      ptx::load_bytes(s.q, t.images + c.image * t.image, kda_operands(D), &s.full[0]);
    }
    ptx::barrier_arrive_expect(&s.full[1], 3 * (D * 128));
    ptx::load_box(s.dout, &t.dout, &s.full[1], 0, at, 0, c.h, b);
    ptx::load_bytes(s.residuals, t.residuals + c.image * (D * 128), D * 128, &s.full[1]);
    ptx::load_bytes(s.adjoints, t.adjoints + c.image * (D * 128), D * 128, &s.full[1]);
    ptx::barrier_arrive_expect(&s.full[2], 2 * (D * D * 2));
    ptx::load_bytes(s.state, t.states + c.image * (D * D * 2), D * D * 2, &s.full[2]);
    ptx::load_bytes(s.dstate, t.dstates + c.image * (D * D * 2), D * D * 2, &s.full[2]);
  }
  if (threadIdx.x >= 448 && static_cast<int>(threadIdx.x) - 448 < c.rows) {
    const int i = threadIdx.x - 448;
    const float beta = e.beta_factor * ptx::load(e.beta.data, e.beta.dtype, row_of(e.beta, c.w.b, row + i, c.h));
    s.inverse_beta[i] = 1 / (beta == 0 ? kKdaLeastBeta : beta);
  }
  __syncthreads();
  ptx::barrier_wait(&s.full[1], 0);
  if (c.rows < C) {  // what lies behind the sequence counts as zero, NaN or not
    for (int piece = threadIdx.x; piece < (C - c.rows) * (D / 8); piece += 512) {
      const uint32_t at = ptx::tile_byte(C, c.rows + piece / (D / 8), piece % (D / 8) * 8);
      *reinterpret_cast<uint4*>(s.dout + at) = {};
    }
    ptx::fence_async_shared();
    __syncthreads();
  }
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (group < 2) {
    ptx::more_registers<152>();
    float2 l[16];
    ptx::barrier_wait(&s.full[0], 0);
    if (group < D / 64) {
      const int warp = thread / 32, channel = group * 64 + 2 * (thread % 32);
      sum_rows(s.g, t.wide, channel, 16 * warp, c.rows, l);
      *reinterpret_cast<float2*>(&s.totals[warp][channel]) = l[15];
    }
    key_sums<D, split>(t, c, group, s);
    if (threadIdx.x < kThreads) finish_keys<D, split>(t, c, s, l);
  } else if (group == 2) {
    ptx::fewer_registers<104>();
    key_sums<D, split>(t, c, 2, s);
  } else {
    ptx::fewer_registers<104>();
    ptx::barrier_wait(&s.full[0], 0);
    pair_chunk<D>(t, c, s);
    sync_roles();  // dP, dL
    if constexpr (!split) {
      const uint32_t q = ptx::shared_address(s.q), read = ptx::shared_address(s.read);
      const uint32_t dp = ptx::shared_address(s.dp), dl = ptx::shared_address(s.dl);
      float y[D / 2];
      ptx::wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        ptx::wgmma_shared<true, true, true>(y, ptx::descriptor_mn_major(dp, C, kk), ptx::descriptor_mn_major(q, C, kk), kk > 0);
      }
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        ptx::wgmma_shared<true, true, true>(y, ptx::descriptor_mn_major(dl, C, kk), ptx::descriptor_mn_major(read, C, kk),
                                            true);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(y);
      sync_roles();
      store_sums<D>(y, s.adjoints, thread);
    } else {
      sync_roles();
    }
    sync_roles();
  }
}

}  // namespace

#define LINNET_KDA_GRADIENT(name, D, split) \
  extern "C" __global__ void __launch_bounds__(512, 1) name(const __grid_constant__ Kda t) { kda_gradient<D, split>(t); }
LINNET_KDA_GRADIENT(kda_gradient_64, 64, false)
LINNET_KDA_GRADIENT(kda_gradient_128, 128, false)
LINNET_KDA_GRADIENT(kda_exact_64, 64, true)
LINNET_KDA_GRADIENT(kda_exact_128, 128, true)

}  // namespace linnet::cuda
