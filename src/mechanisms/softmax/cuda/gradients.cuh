// The gradients of softmax attention in tiles on the matrix units (tile.cuh), in two kernels without atomics: every result has
// one block that sums it in a fixed order.
//
//   P = exp(s - lse),  dP = dout V^T,  dS = P (dP - delta),  delta = sum_c dout out - dlse
//   query_gradients: a block has 64 rows and walks over keys:     dQ = scale dS K
//   key_gradients:   a block has 64 keys and walks over rows:     dV = P^T dout,  dK = scale dS^T Q
//
// The second has its matrices transposed, so that P^T and dS^T are left operands where the products leave them. Widths above
// 128 take twice the warps: each half makes P and dS and sums half of the channels.
#pragma once

#include "mechanisms/softmax/cuda/tile.cuh"

namespace linnet::cuda {

inline constexpr int kGradientRows = 64;

template <bool bf16, int D>
__device__ __forceinline__ void query_gradients(const Attend& p, char* memory) {
  constexpr int kThreads = 128, kKeys = kAttendKeys, kTile = 64 * kPitch<D>;
  Place place;
  if (!find_place<false, kGradientRows>(p, blockIdx.x, &place)) return;
  const Sequence& seq = place.seq;
  const int32_t first_row = place.tile * kGradientRows, rows = seq.tq * p.G;
  if (first_row >= rows) return;
  const uint32_t q_tile = ptx::shared_address(memory), d_tile = q_tile + kTile, stages = d_tile + kTile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const RowPlace first = row_place(p, place, first_row), last = row_place(p, place, min(first_row + kGradientRows, rows) - 1);
  const KeyTiles tiles(p.mask, first.t, last.t, seq.n);

  const auto copy_stage = [&](int32_t tile, int stage) {
    const uint32_t to = stages + stage * 2 * kTile;
    const auto at = [&](const AttendRows& x, int r) {
      const int32_t j = tile * kKeys + r;
      return j < seq.n ? key_at(p, x, place, j) : int64_t{-1};
    };
    copy_tile<D, kKeys, kThreads>(to, p.k, p.K, [&](int r) { return at(p.k, r); });
    copy_tile<D, kKeys, kThreads>(to + kTile, p.v, p.V, [&](int r) { return at(p.v, r); });
    ptx::copy_commit();
  };
  const auto copy_queries = [&](const AttendRows& x, uint32_t to, int width) {
    copy_tile<D, kGradientRows, kThreads>(to, x, width, [&](int r) {
      const RowPlace row = row_place(p, place, first_row + r);
      return row.there ? row_at(x, seq, row) : int64_t{-1};
    });
  };
  copy_queries(p.q, q_tile, p.K);
  copy_queries(p.dout, d_tile, p.V);
  ptx::copy_commit();
  if (tiles.begin < tiles.end) copy_stage(tiles.begin, 0);

  RowPlace row[2];
  SeenKeys seen[2];
  float lse[2], delta[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row[h] = row_place(p, place, first_row + warp * 16 + lane / 4 + 8 * h);
    seen[h] = seen_keys(p.mask, row[h].t, row[h].there ? seq.n : 0);
    lse[h] = infinity();
    delta[h] = 0;
    if (!row[h].there) continue;
    const float natural = static_cast<const float*>(p.lse.data)[row_at(p.lse, seq, row[h])];
    lse[h] = natural == -infinity() ? infinity() : natural * kLog2e;
    delta[h] = static_cast<const float*>(p.delta.data)[row_at(p.delta, seq, row[h])];
  }
  float dq[D / 8][4];
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) dq[n][e] = 0;
  }
  int stage = 0;
  for (int32_t tile = tiles.begin; tile < tiles.end; stage ^= 1) {
    const int32_t next = tiles.next(tile), j0 = tile * kKeys;
    const uint32_t k_tile = stages + stage * 2 * kTile, v_tile = k_tile + kTile;
    ptx::copy_wait<0>();
    __syncthreads();  // this stage is there, and nobody reads the other
    if (next < tiles.end) copy_stage(next, stage ^ 1);
    float s[8][4], dp[8][4];
    multiply_rows<bf16, D>(s, q_tile, warp * 16, k_tile);
    multiply_rows<bf16, D>(dp, d_tile, warp * 16, v_tile);
    const bool cut = j0 + kKeys > seq.n || !all_see(p.mask, first.t, last.t, j0, j0 + kKeys - 1);
    if (p.hooked) {
      const int64_t bias[2] = {bias_row(p, seq, row[0]), bias_row(p, seq, row[1])};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int h = e / 2, j = j0 + n * 8 + 2 * (lane % 4) + e % 2;
          float weight = 0;
          if (seen[h].has(j)) {
            const float2 x = logit(p, s[n][e], bias[h], seq.k0 + j);
            weight = ptx::exp2_fast(fmaf(x.x, kLog2e, -lse[h])) * (dp[n][e] - delta[h]) * x.y;
          }
          s[n][e] = weight;
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int h = e / 2;
          const float weight = ptx::exp2_fast(fmaf(s[n][e], p.factor, -lse[h])) * (dp[n][e] - delta[h]);
          s[n][e] = !cut || seen[h].has(j0 + n * 8 + 2 * (lane % 4) + e % 2) ? weight : 0;
        }
      }
    }
    uint32_t weights[4][4];
    pack_rows<bf16>(weights, s);
    add_rows<bf16, D, D>(dq, weights, k_tile, 0);
    tile = next;
  }
  ptx::copy_wait<0>();
  __syncthreads();
  float* const mine = warp_rows<D>(memory);
  keep_rows<D, D>(mine, dq, p.scale, p.scale);
  __syncwarp();
  put_rows<D>(p.dq, mine, p.K, [&](int r) {
    const RowPlace each = row_place(p, place, first_row + warp * 16 + r);
    return each.there ? row_at(p.dq, seq, each) : int64_t{-1};
  });
}

// What a stage has of its rows beside the tiles.
struct RowNumbers {
  float lse[kGradientRows], delta[kGradientRows];
  int32_t t[kGradientRows];
  int64_t bias[kGradientRows];
};

template <bool bf16, int D>
__device__ __forceinline__ void key_gradients(const Attend& p, char* memory) {
  constexpr int kHalves = D > 128 ? 2 : 1, kThreads = 128 * kHalves, kKeys = kAttendKeys, kTile = 64 * kPitch<D>;
  constexpr int kColumns = D / kHalves;
  Place place;
  if (!find_place<true, kKeys>(p, blockIdx.x, &place)) return;
  const Sequence& seq = place.seq;
  const int32_t j0 = place.tile * kKeys, stored = p.cu_q.data != nullptr ? seq.n : p.Tk;  // keys behind key_len get zeros
  if (j0 >= stored) return;
  const uint32_t k_tile = ptx::shared_address(memory), v_tile = k_tile + kTile, stages = v_tile + kTile;
  RowNumbers* const numbers = reinterpret_cast<RowNumbers*>(memory + 6 * kTile);
  const int warp = threadIdx.x / 32 % 4, half = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int32_t j1 = min(j0 + kKeys, seq.n) - 1, rows = seq.tq * p.G;
  const QueryRange range(p.mask, j0, j1, seq);
  const int32_t begin = j1 < j0 ? 0 : max(range.begin, 0) * p.G / kGradientRows;
  const int32_t end = j1 < j0 ? 0 : (min(range.end * p.G, rows) + kGradientRows - 1) / kGradientRows;

  const auto copy_stage = [&](int32_t tile, int stage) {
    const uint32_t to = stages + stage * 2 * kTile;
    const auto at = [&](const AttendRows& x, int r) {
      const RowPlace row = row_place(p, place, tile * kGradientRows + r);
      return row.there ? row_at(x, seq, row) : int64_t{-1};
    };
    copy_tile<D, kGradientRows, kThreads>(to, p.q, p.K, [&](int r) { return at(p.q, r); });
    copy_tile<D, kGradientRows, kThreads>(to + kTile, p.dout, p.V, [&](int r) { return at(p.dout, r); });
    ptx::copy_commit();
    if (threadIdx.x < kGradientRows) {
      RowNumbers& to_numbers = numbers[stage];
      const int r = threadIdx.x;
      const RowPlace row = row_place(p, place, tile * kGradientRows + r);
      const float natural = row.there ? static_cast<const float*>(p.lse.data)[row_at(p.lse, seq, row)] : infinity();
      to_numbers.lse[r] = natural == -infinity() ? infinity() : natural * kLog2e;
      to_numbers.delta[r] = row.there ? static_cast<const float*>(p.delta.data)[row_at(p.delta, seq, row)] : 0;
      to_numbers.t[r] = row.there ? row.t : -(1 << 30) - 1;  // that nobody is seen by
      to_numbers.bias[r] = bias_row(p, seq, row);
    }
  };
  const auto copy_keys = [&](const AttendRows& x, uint32_t to, int width) {
    copy_tile<D, kKeys, kThreads>(to, x, width, [&](int r) {
      const int32_t j = j0 + r;
      return j < seq.n ? key_at(p, x, place, j) : int64_t{-1};
    });
  };
  if (begin < end) {
    copy_keys(p.k, k_tile, p.K);
    copy_keys(p.v, v_tile, p.V);
    copy_stage(begin, 0);
  }
  const int32_t j[2] = {j0 + warp * 16 + lane / 4, j0 + warp * 16 + lane / 4 + 8};
  const SeenBy seen[2] = {seen_by(p.mask, j[0], seq.n), seen_by(p.mask, j[1], seq.n)};
  float dk[kColumns / 8][4], dv[kColumns / 8][4];
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) dk[n][e] = dv[n][e] = 0;
  }
  int stage = 0;
  for (int32_t tile = begin; tile < end; ++tile, stage ^= 1) {
    const uint32_t q_tile = stages + stage * 2 * kTile, d_tile = q_tile + kTile;
    const RowNumbers& row = numbers[stage];
    ptx::copy_wait<0>();
    __syncthreads();  // this stage is there, and nobody reads the other
    if (tile + 1 < end) copy_stage(tile + 1, stage ^ 1);
    float s[8][4], dp[8][4];
    multiply_rows<bf16, D>(s, k_tile, warp * 16, q_tile);
    multiply_rows<bf16, D>(dp, v_tile, warp * 16, d_tile);
    const bool cut = (tile + 1) * kGradientRows > rows || j0 + kKeys > seq.n ||
                     !all_see(p.mask, row.t[0], row.t[kGradientRows - 1], j0, j0 + kKeys - 1);
    if (p.hooked) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int h = e / 2, i = n * 8 + 2 * (lane % 4) + e % 2;
          float weight = 0, slope = 0;
          if (seen[h].has(row.t[i])) {
            const float2 x = logit(p, s[n][e], row.bias[i], seq.k0 + j[h]);
            weight = ptx::exp2_fast(fmaf(x.x, kLog2e, -row.lse[i]));
            slope = x.y;
          }
          s[n][e] = weight;
          dp[n][e] = weight * (dp[n][e] - row.delta[i]) * slope;
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int i = n * 8 + 2 * (lane % 4);
        const float2 lse = *reinterpret_cast<const float2*>(row.lse + i),
                     delta = *reinterpret_cast<const float2*>(row.delta + i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float weight = ptx::exp2_fast(fmaf(s[n][e], p.factor, e % 2 == 0 ? -lse.x : -lse.y));
          s[n][e] = !cut || seen[e / 2].has(row.t[i + e % 2]) ? weight : 0;
          dp[n][e] = s[n][e] == 0 ? 0 : s[n][e] * (dp[n][e] - (e % 2 == 0 ? delta.x : delta.y));
        }
      }
    }
    uint32_t weights[4][4];
    pack_rows<bf16>(weights, s);
    add_rows<bf16, D, kColumns>(dv, weights, d_tile, half * kColumns);
    pack_rows<bf16>(weights, dp);
    add_rows<bf16, D, kColumns>(dk, weights, q_tile, half * kColumns);
  }
  ptx::copy_wait<0>();
  __syncthreads();
  float* const mine = warp_rows<kColumns>(memory);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const AttendRows& x = which == 0 ? p.dk : p.dv;
    if (x.data == nullptr) continue;
    __syncwarp();
    if (which == 0) {
      keep_rows<kColumns, kColumns>(mine, dk, p.scale, p.scale);
    } else {
      keep_rows<kColumns, kColumns>(mine, dv, 1, 1);
    }
    __syncwarp();
    const int width = min((which == 0 ? p.K : p.V) - half * kColumns, kColumns);
    put_rows<kColumns>(x, mine, width, [&](int r) {
      const int32_t key = j0 + warp * 16 + r;
      return key < stored ? key_at(p, x, place, key) + half * kColumns : int64_t{-1};
    });
  }
}

}  // namespace linnet::cuda
