// The gradients of softmax attention in f32 on the multiply-add units (plain.cuh), and that of a bias for both rows of the
// table.
#include "mechanisms/softmax/cuda/plain.cuh"

namespace linnet::cuda {
namespace {

// P and dS of the block's rows and keys j0 ..; s: P, or (softcap taken in) dS. `capped`: dS is of the product, else of the
// logit.
template <bool capped>
__device__ __forceinline__ void plain_weights(PlainMemory& m, const PlainTile& tile, int32_t j0, float (&weight)[4][4],
                                              float (&ds)[4][4]) {
  const Attend& p = tile.p;
  const Thread thread;
  float slope[4][4], dp[4][4];
  plain_logits<true>(m, tile, j0, weight, slope);
  if (p.dout.data != nullptr) {
    plain_products(
        m, dp, p.dout, [&](int r) { return tile.row_of(p.dout, r); }, p.v, [&](int r) { return tile.key_of(p.v, j0 + r); },
        p.V);
  } else {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
      for (int b = 0; b < 4; ++b) dp[a][b] = 0;
    }
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const RowPlace row = tile.row(thread.y + 16 * a);
    float lse = 0, delta = 0;
    if (row.there) {
      lse = static_cast<const float*>(p.lse.data)[row_at(p.lse, tile.place.seq, row)];
      delta = static_cast<const float*>(p.delta.data)[row_at(p.delta, tile.place.seq, row)];
      if (lse == -infinity()) lse = 0;
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      // A masked pair gives nothing, whatever dP has.
      const bool seen = weight[a][b] != -infinity();
      weight[a][b] = seen ? exp2f((weight[a][b] - lse) * kLog2e) : 0;
      ds[a][b] = seen ? weight[a][b] * (dp[a][b] - delta) * (capped ? slope[a][b] : 1) : 0;
    }
  }
}

}  // namespace

// Grid: row tiles, slices of the keys' channels.
extern "C" __global__ void __launch_bounds__(kPlainThreads) plain_query_gradients(const __grid_constant__ Attend p) {
  extern __shared__ char memory[];
  PlainMemory& m = *reinterpret_cast<PlainMemory*>(memory);
  Place place;
  if (!find_place<false, 64>(p, blockIdx.x, &place)) return;
  const PlainTile tile = {p, place, place.tile * 64};
  const int32_t rows = place.seq.tq * p.G, slice = blockIdx.y * kAttendSlice;
  if (tile.first_row >= rows) return;
  const KeyTiles tiles(p.mask, tile.row(0).t, tile.row(min(64, rows - tile.first_row) - 1).t, place.seq.n);
  const Thread thread;
  float sum[4][4] = {};
  for (int32_t each = tiles.begin; each < tiles.end; each = tiles.next(each)) {
    const int32_t j0 = each * kAttendKeys;
    float weight[4][4], ds[4][4];
    plain_weights<true>(m, tile, j0, weight, ds);
    __syncthreads();
    keep_weights(m, ds);
    plain_rows(m, p.k, p.K, slice, [&](int r) { return tile.key_of(p.k, j0 + r); });
    __syncthreads();
    plain_sums<false>(m, sum);
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const RowPlace row = tile.row(thread.y + 16 * a);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int c = slice + thread.x + 16 * b;
      if (row.there && c < p.K) ptx::store(p.dq.data, p.dq.dtype, row_at(p.dq, place.seq, row) + c, p.scale * sum[a][b]);
    }
  }
}

// Grid: key tiles, slices of the channels of keys and values.
extern "C" __global__ void __launch_bounds__(kPlainThreads) plain_key_gradients(const __grid_constant__ Attend p) {
  extern __shared__ char memory[];
  PlainMemory& m = *reinterpret_cast<PlainMemory*>(memory);
  Place place;
  if (!find_place<true, 64>(p, blockIdx.x, &place)) return;
  const Sequence& seq = place.seq;
  const int32_t j0 = place.tile * kAttendKeys, stored = p.cu_q.data != nullptr ? seq.n : p.Tk,
                slice = blockIdx.y * kAttendSlice;
  if (j0 >= stored) return;
  const int32_t j1 = min(j0 + kAttendKeys, seq.n) - 1, rows = seq.tq * p.G;
  const QueryRange range(p.mask, j0, j1, seq);
  const int32_t begin = j1 < j0 ? 0 : max(range.begin, 0) * p.G / 64,
                end = j1 < j0 ? 0 : (min(range.end * p.G, rows) + 63) / 64;
  const Thread thread;
  float dk[4][4] = {}, dv[4][4] = {};
  for (int32_t each = begin; each < end; ++each) {
    const PlainTile tile = {p, place, each * 64};
    float weight[4][4], ds[4][4];
    plain_weights<true>(m, tile, j0, weight, ds);
    if (p.dk.data != nullptr) {
      __syncthreads();
      keep_weights(m, ds);
      plain_rows(m, p.q, p.K, slice, [&](int r) { return tile.row_of(p.q, r); });
      __syncthreads();
      plain_sums<true>(m, dk);
    }
    if (p.dv.data != nullptr && p.dout.data != nullptr) {
      __syncthreads();
      keep_weights(m, weight);
      plain_rows(m, p.dout, p.V, slice, [&](int r) { return tile.row_of(p.dout, r); });
      __syncthreads();
      plain_sums<true>(m, dv);
    }
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int32_t j = j0 + thread.y + 16 * a;
    if (j >= stored) continue;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int c = slice + thread.x + 16 * b;
      if (c < p.K && p.dk.data != nullptr) {
        ptx::store(p.dk.data, p.dk.dtype, key_at(p, p.dk, place, j) + c, p.scale * dk[a][b]);
      }
      if (c < p.V && p.dv.data != nullptr) ptx::store(p.dv.data, p.dv.dtype, key_at(p, p.dv, place, j) + c, dv[a][b]);
    }
  }
}

// Grid: tiles of 64 x 64 of dbias. Where the bias is broadcast (a size of 1), a block goes over all that share the number, in
// order.
extern "C" __global__ void __launch_bounds__(kPlainThreads)
    plain_bias_gradient(const __grid_constant__ Attend p, const __grid_constant__ BiasGradient bias) {
  extern __shared__ char memory[];
  PlainMemory& m = *reinterpret_cast<PlainMemory*>(memory);
  const bool all_q = bias.size[2] == 1, all_k = bias.size[3] == 1;
  int64_t block = blockIdx.x;
  const int32_t tile_k = static_cast<int32_t>(block % bias.tiles_k);
  block /= bias.tiles_k;
  const int32_t tile_q = static_cast<int32_t>(block % bias.tiles_q);
  block /= bias.tiles_q;
  const int32_t heads = p.Hkv * p.G, h_own = static_cast<int32_t>(block % bias.size[1]);
  const int64_t b_own = block / bias.size[1];
  const int32_t h0 = bias.size[1] == 1 ? 0 : h_own, h1 = bias.size[1] == 1 ? heads : h_own + 1;
  const bool packed = p.cu_q.data != nullptr;
  const int64_t s0 = packed || bias.size[0] == 1 ? 0 : b_own, s1 = packed || bias.size[0] == 1 ? p.N : b_own + 1;
  const Thread thread;
  float sum[4][4] = {};
  // One query head at a time: a group of one.
  for (int64_t s = s0; s < s1; ++s) {
    for (int32_t h = h0; h < h1; ++h) {
      Place place;
      place.seq = sequence(p, s);
      place.head = h / p.G;
      place.tile = place.part = 0;
      const Sequence& seq = place.seq;
      // Tokens and keys of the whole tensor; of a packed batch a tile may have several sequences.
      const int32_t q_low = all_q ? seq.q0 : max(tile_q * 64, seq.q0);
      const int32_t q_high = all_q ? seq.q0 + seq.tq : min(tile_q * 64 + 64, seq.q0 + seq.tq);
      const int32_t k_low = all_k ? seq.k0 : max(tile_k * 64, seq.k0);
      const int32_t k_high = all_k ? seq.k0 + seq.n : min(tile_k * 64 + 64, seq.k0 + seq.n);
      for (int32_t q0 = all_q ? q_low : tile_q * 64; q_low < q_high && q0 < q_high; q0 += 64) {
        for (int32_t k0 = all_k ? k_low : tile_k * 64; k_low < k_high && k0 < k_high; k0 += 64) {
          // Rows of the block: tokens q0 + r, keys k0 + r of the tensor.
          const auto row = [&](int r) {
            const int32_t token = q0 + r;
            return RowPlace{token, h, token - seq.q0 + seq.shift(), token >= q_low && token < q_high};
          };
          const auto row_of = [&](const AttendRows& x, int r) {
            const RowPlace each = row(r);
            return each.there ? row_at(x, seq, each) : int64_t{-1};
          };
          const auto key_of = [&](const AttendRows& x, int r) {
            const int32_t key = k0 + r;
            return key >= k_low && key < k_high ? seq.b * x.stride_b + key * x.stride_t + place.head * x.stride_h : int64_t{-1};
          };
          float product[4][4], dp[4][4] = {};
          plain_products(
              m, product, p.q, [&](int r) { return row_of(p.q, r); }, p.k, [&](int r) { return key_of(p.k, r); }, p.K);
          if (p.dout.data != nullptr) {
            plain_products(
                m, dp, p.dout, [&](int r) { return row_of(p.dout, r); }, p.v, [&](int r) { return key_of(p.v, r); }, p.V);
          }
#pragma unroll
          for (int a = 0; a < 4; ++a) {
            const RowPlace each = row(thread.y + 16 * a);
            if (!each.there) continue;
            const SeenKeys seen = seen_keys(p.mask, each.t, seq.n);
            float lse = static_cast<const float*>(p.lse.data)[row_at(p.lse, seq, each)];
            if (lse == -infinity()) lse = 0;
            const float delta = static_cast<const float*>(p.delta.data)[row_at(p.delta, seq, each)];
            const int64_t at = bias_row(p, seq, each);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
              const int32_t key = k0 + thread.x + 16 * b;
              if (key < k_low || key >= k_high || !seen.has(key - seq.k0)) continue;
              const float s = logit(p, product[a][b], at, key).x;
              if (s == -infinity()) continue;
              sum[a][b] += exp2f((s - lse) * kLog2e) * (dp[a][b] - delta);
            }
          }
        }
      }
    }
  }
  __syncthreads();
  keep_weights(m, sum);
  __syncthreads();
  const int rows = all_q ? 1 : 64, columns = all_k ? 1 : 64;
  for (int i = threadIdx.x; i < rows * columns; i += kPlainThreads) {
    const int r = i / columns, c = i % columns;
    float total = 0;
    for (int y = all_q ? 0 : r; y < (all_q ? 64 : r + 1); ++y) {
      for (int x = all_k ? 0 : c; x < (all_k ? 64 : c + 1); ++x) total += m.weights[y][x];
    }
    const int64_t q = all_q ? 0 : tile_q * 64 + r, k = all_k ? 0 : tile_k * 64 + c;
    if (q >= bias.size[2] || k >= bias.size[3]) continue;
    const int64_t at = b_own * bias.to.stride[0] + h_own * bias.to.stride[1] + q * bias.to.stride[2] + k * bias.to.stride[3];
    ptx::store(bias.to.data, bias.to.dtype, at, total);
  }
}

}  // namespace linnet::cuda
