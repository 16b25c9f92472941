// Softmax attention of few rows (a decode): 16 rows in a block whose 4 warps share the keys. Of every tile of 64 keys a warp
// takes 16, with sums of its own that are joined at the end; two stages of keys and values are on their way, 3 blocks to a
// multiprocessor at D = 128. Memory bounds it.
#pragma once

#include "mechanisms/softmax/cuda/tile.cuh"

namespace linnet::cuda {

template <int D>
struct FewJoined {  // over the tiles, once they have been read
  float read[4][16][D];
  float top[4][16], sum[4][16], factor[4][16];
};

template <bool bf16, int D>
__device__ __forceinline__ void attend_few(const Attend& p, char* memory) {
  constexpr int kThreads = 128, kKeys = kAttendKeys, kTile = kKeys * kPitch<D>;
  __shared__ uint32_t flags[2];
  Place place;
  if (!find_place<false, 16>(p, blockIdx.x, &place)) return;
  const Sequence& seq = place.seq;
  const int32_t first_row = place.tile * 16, rows = seq.tq * p.G;
  if (first_row >= rows) return;
  const uint32_t q_tile = ptx::shared_address(memory), stages = q_tile + 16 * kPitch<D>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const RowPlace first = row_place(p, place, first_row), last = row_place(p, place, min(first_row + 16, rows) - 1);
  KeyTiles tiles(p.mask, first.t, last.t, seq.n);
  if (p.parts > 1) tiles.take_part(place.part, p.parts);
  const auto copy_stage = [&](int32_t tile, int stage) {
    const uint32_t to = stages + stage * 2 * kTile;
    const auto at = [&](const AttendRows& x, int r) {
      const int32_t j = tile * kKeys + r;
      return j < seq.n ? key_at(p, x, place, j) : int64_t{-1};
    };
    copy_tile<D, kKeys, kThreads>(to, p.k, p.K, [&](int r) { return at(p.k, r); });
    copy_tile<D, kKeys, kThreads>(to + kTile, p.v, p.V, [&](int r) { return at(p.v, r); });
  };
  copy_tile<D, 16, kThreads>(q_tile, p.q, p.K, [&](int r) {
    const RowPlace row = row_place(p, place, first_row + r);
    return row.there ? row_at(p.q, seq, row) : int64_t{-1};
  });
  if (tiles.begin < tiles.end) copy_stage(tiles.begin, 0);
  ptx::copy_commit();
  RowPlace row[2];
  SeenKeys seen[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row[h] = row_place(p, place, first_row + lane / 4 + 8 * h);
    seen[h] = seen_keys(p.mask, row[h].t, row[h].there ? seq.n : 0);
  }
  float top[2] = {-infinity(), -infinity()}, sum[2] = {0, 0}, read[D / 8][4];
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) read[n][e] = 0;
  }
  const float factor = p.hooked ? 1.0f : p.factor;
  int stage = 0;
  for (int32_t tile = tiles.begin; tile < tiles.end; stage ^= 1) {
    const int32_t next = tiles.next(tile), j0 = tile * kKeys + warp * 16;
    const uint32_t k_tile = stages + stage * 2 * kTile, v_tile = k_tile + kTile;
    if (next < tiles.end) copy_stage(next, stage ^ 1);
    ptx::copy_commit();
    ptx::copy_wait<1>();
    __syncthreads();  // this stage is there
    float s[2][4] = {};
#pragma unroll
    for (int c = 0; c < D; c += 16) {
      uint32_t a[4], b[4];
      ptx::load_matrices(a, left_at<D>(q_tile, 0, c));
      ptx::load_matrices(b, right_at<D>(k_tile, warp * 16, c));
      ptx::mma<bf16>(s[0], a, b[0], b[1]);
      ptx::mma<bf16>(s[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int h = e / 2, j = j0 + n * 8 + 2 * (lane % 4) + e % 2;
        if (!seen[h].has(j)) {
          s[n][e] = -infinity();
        } else if (p.hooked) {
          s[n][e] = logit(p, s[n][e], bias_row(p, seq, row[h]), seq.k0 + j).x * kLog2e;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = fmaxf(fmaxf(top[h], fmaxf(s[0][2 * h], s[0][2 * h + 1])), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
      const float safe = most == -infinity() ? 0 : most * factor, shrink = ptx::exp2_fast(top[h] * factor - safe);
      top[h] = most;
      float total = 0;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        s[n][2 * h] = ptx::exp2_fast(fmaf(s[n][2 * h], factor, -safe));
        s[n][2 * h + 1] = ptx::exp2_fast(fmaf(s[n][2 * h + 1], factor, -safe));
        total += s[n][2 * h] + s[n][2 * h + 1];
      }
      sum[h] = fmaf(sum[h], shrink, total);
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        read[n][2 * h] *= shrink;
        read[n][2 * h + 1] *= shrink;
      }
    }
    // Any tile that is not seen by all of the rows; values of the cache are read once, and so are its exponents.
    const bool cut = !all_see(p.mask, first.t, last.t, tile * kKeys, tile * kKeys + kKeys - 1);
    uint64_t wild = cut ? clean_tile<bf16, D, kThreads>(v_tile, flags) >> (warp * 16) & 0xffff : 0;
    const uint32_t weights[4] = {ptx::pack<bf16>(s[0][0], s[0][1]), ptx::pack<bf16>(s[0][2], s[0][3]),
                                 ptx::pack<bf16>(s[1][0], s[1][1]), ptx::pack<bf16>(s[1][2], s[1][3])};
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t b[4];
      ptx::load_matrices_transposed(b, left_at<D>(v_tile, warp * 16, n * 8));
      ptx::mma<bf16>(read[n], weights, b[0], b[1]);
      ptx::mma<bf16>(read[n + 1], weights, b[2], b[3]);
    }
    while (wild != 0) {
      const int r = __ffsll(static_cast<long long>(wild)) - 1;
      wild &= wild - 1;
      float weight[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = r % 2 == 0 ? s[0][2 * h] : s[0][2 * h + 1], high = r % 2 == 0 ? s[1][2 * h] : s[1][2 * h + 1];
        weight[h] = __shfl_sync(0xffffffff, r < 8 ? low : high, lane / 4 * 4 + r % 8 / 2);
      }
      add_wild<D>(p, place, j0 + r, seen, weight, read);
    }
    __syncthreads();  // nobody reads this stage
    tile = next;
  }
  // The warps' sums, joined in order.
  ptx::copy_wait<0>();
  __syncthreads();
  FewJoined<D>& joined = *reinterpret_cast<FewJoined<D>*>(memory);
  keep_rows<D, D>(&joined.read[warp][0][0], read, 1, 1);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(0xffffffff, sum[h], 1);
    sum[h] += __shfl_xor_sync(0xffffffff, sum[h], 2);
    if (lane % 4 != 0) continue;
    joined.top[warp][lane / 4 + 8 * h] = top[h] * factor;
    joined.sum[warp][lane / 4 + 8 * h] = sum[h];
  }
  __syncthreads();
  if (threadIdx.x < 16) {
    const int r = threadIdx.x;
    const RowPlace each = row_place(p, place, first_row + r);
    float most = -infinity(), total = 0;
    for (int w = 0; w < 4; ++w) most = fmaxf(most, joined.top[w][r]);
    for (int w = 0; w < 4; ++w) {
      joined.factor[w][r] = joined.top[w][r] == -infinity() ? 0 : exp2f(joined.top[w][r] - most);
      total += joined.sum[w][r] * joined.factor[w][r];
    }
    float inverse, lse;
    if (p.parts > 1) {
      inverse = total == 0 ? 0 : 1 / total;
      lse = total == 0 ? -infinity() : fmaf(most, kLn2, logf(total));
    } else {
      const Normal normal = normalise(p, each.there ? each.head : 0, most * kLn2, total);
      inverse = normal.inverse;
      lse = normal.lse;
    }
    for (int w = 0; w < 4; ++w) joined.factor[w][r] *= inverse;
    if (each.there && p.parts > 1) {
      p.part_lse[place.part * flat_rows(p) + flat_row(p, seq, each)] = lse;
    } else if (each.there && p.lse.data != nullptr) {
      static_cast<float*>(p.lse.data)[row_at(p.lse, seq, each)] = lse;
    }
  }
  __syncthreads();
  const AttendRows parts = {p.part_read, 0, 0, 0, Dtype::f32, p.V % 4 == 0};
  for (int i = threadIdx.x; i < 16 * (D / 4); i += kThreads) {
    const int r = i / (D / 4), c = i % (D / 4) * 4;
    const RowPlace each = row_place(p, place, first_row + r);
    if (!each.there || c >= p.V) continue;
    float4 y = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float4 x = *reinterpret_cast<const float4*>(&joined.read[w][r][c]);
      const float f = joined.factor[w][r];
      y = {fmaf(f, x.x, y.x), fmaf(f, x.y, y.y), fmaf(f, x.z, y.z), fmaf(f, x.w, y.w)};
    }
    if (p.parts > 1) {
      const int64_t at = (place.part * flat_rows(p) + flat_row(p, seq, each)) * p.V;
      put_four(parts, at, c, p.V, {y.x, y.y, y.z, y.w});
    } else {
      finish_four(p, seq, each, c, y);
    }
  }
}

}  // namespace linnet::cuda
