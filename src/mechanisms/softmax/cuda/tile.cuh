// Tiles of softmax attention on the matrix units with the instructions of sm_80 (ldmatrix, mma.sync, cp.async): what forward
// and gradients share, and the forward.
//
// Forward, FlashAttention-2's schedule: a block has 16 rows per warp and walks over tiles of 64 keys; the values of a tile are
// on their way while its logits are made, the next keys while values are summed. Weights stay in registers.
// Rows lie in shared memory with 16 bytes between them, so that the 8 rows of a matrix lie in different banks.
#pragma once

#include "mechanisms/softmax/cuda/attend.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"

namespace linnet::cuda {

template <int D>
inline constexpr int kPitch = 2 * D + 16;  // bytes from row to row

// `rows` rows of `width` 16-bit numbers, zeros up to D, by `threads` threads; at(r): the place of row r in x, or -1.
template <int D, int rows, int threads, class At>
__device__ __forceinline__ void copy_tile(uint32_t to, const AttendRows& x, int width, const At& at) {
  constexpr int kChunks = D / 8;
  const uint16_t* const data = static_cast<const uint16_t*>(x.data);
  if (!x.aligned) {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * D; i += threads) {
      const int r = i / D, c = i % D;
      const int64_t row = at(r);
      const uint16_t number = row >= 0 && c < width ? data[row + c] : 0;
      ptx::store_shared_2(to + r * kPitch<D> + c * 2, number);
    }
    return;
  }
#pragma unroll 2
  for (int i = threadIdx.x; i < rows * kChunks; i += threads) {
    const int r = i / kChunks, c = i % kChunks * 8;
    const int64_t row = at(r);
    const bool there = row >= 0 && c < width;
    ptx::copy_16(to + r * kPitch<D> + c * 2, there ? data + row + c : data, there ? 16 : 0);
  }
}

// Whether one of two 16-bit numbers is not finite.
template <bool bf16>
__device__ __forceinline__ bool is_wild(uint32_t two) {
  constexpr uint32_t kExponent = bf16 ? 0x7f80 : 0x7c00;
  return (two & kExponent) == kExponent || (two >> 16 & kExponent) == kExponent;
}
template <bool bf16>
__device__ __forceinline__ bool is_wild(const uint4& x) {
  return is_wild<bf16>(x.x) || is_wild<bf16>(x.y) || is_wild<bf16>(x.z) || is_wild<bf16>(x.w);
}
// Rows of a tile of 64 that hold a number that is not finite: bit r for row r. They become zeros, since a weight of 0 would not
// keep them from rows that do not see them; who sees them adds them by hand (add_wild). By the whole block, between barriers.
template <bool bf16, int D, int threads>
__device__ __forceinline__ uint64_t clean_tile(uint32_t tile, uint32_t* flags) {
  constexpr int kPieces = D / 8;
  const auto at = [&](int i) { return tile + i / kPieces * kPitch<D> + i % kPieces * 16; };
  bool wild = false;
  for (int i = threadIdx.x; i < 64 * kPieces; i += threads) wild |= is_wild<bf16>(ptx::load_shared_16(at(i)));
  if (!__syncthreads_or(wild)) return 0;
  if (threadIdx.x < 2) flags[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * kPieces; i += threads) {
    const int r = i / kPieces;
    if (is_wild<bf16>(ptx::load_shared_16(at(i)))) atomicOr(flags + r / 32, 1u << (r % 32));
  }
  __syncthreads();
  const uint64_t rows = flags[0] | static_cast<uint64_t>(flags[1]) << 32;
  for (int i = threadIdx.x; i < 64 * kPieces; i += threads) {
    if ((rows >> (i / kPieces) & 1) == 0) continue;
    ptx::store_shared_16(at(i), {0, 0, 0, 0});
  }
  __syncthreads();
  return rows;
}
// Adds value j times its weight to the rows that see it; weight[h]: of the lane's two rows.
template <int D>
__device__ __forceinline__ void add_wild(const Attend& p, const Place& place, int32_t j, const SeenKeys (&seen)[2],
                                         const float (&weight)[2], float (&read)[D / 8][4]) {
  const int64_t value = key_at(p, p.v, place, j);
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int c = n * 8 + 2 * (threadIdx.x % 4) + e;
      const float v = c < p.V ? ptx::load(p.v.data, p.v.dtype, value + c) : 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (seen[h].has(j)) read[n][2 * h + e] = fmaf(weight[h], v, read[n][2 * h + e]);
      }
    }
  }
}

// Addresses that a lane gives: of a left operand [16, 16] in rows, of a right one given by its columns (two of 8 columns), and
// of a right one given by its rows, to be transposed.
template <int D>
__device__ __forceinline__ uint32_t left_at(uint32_t tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  return tile + (row + lane % 16) * kPitch<D> + (column + lane / 16 * 8) * 2;
}
template <int D>
__device__ __forceinline__ uint32_t right_at(uint32_t tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  return tile + (row + lane / 16 * 8 + lane % 8) * kPitch<D> + (column + lane / 8 % 2 * 8) * 2;
}

// s [16, 64] = rows row .. row+15 of `left` times the 64 rows of `right`, over D channels.
template <bool bf16, int D>
__device__ __forceinline__ void multiply_rows(float (&s)[8][4], uint32_t left, int row, uint32_t right) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = 0;
  }
#pragma unroll
  for (int c = 0; c < D; c += 16) {
    uint32_t a[4];
    ptx::load_matrices(a, left_at<D>(left, row, c));
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      ptx::load_matrices(b, right_at<D>(right, n * 8, c));
      ptx::mma<bf16>(s[n], a, b[0], b[1]);
      ptx::mma<bf16>(s[n + 1], a, b[2], b[3]);
    }
  }
}
// sum [16, columns] += weights [16, 64] times the 64 rows of `right`, from channel `first` on.
template <bool bf16, int D, int columns>
__device__ __forceinline__ void add_rows(float (&sum)[columns / 8][4], const uint32_t (&weights)[4][4], uint32_t right,
                                         int first) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int n = 0; n < columns / 8; n += 2) {
      uint32_t b[4];
      ptx::load_matrices_transposed(b, left_at<D>(right, k * 16, first + n * 8));
      ptx::mma<bf16>(sum[n], weights[k], b[0], b[1]);
      ptx::mma<bf16>(sum[n + 1], weights[k], b[2], b[3]);
    }
  }
}
// An accumulator [16, 64] as left operands.
template <bool bf16>
__device__ __forceinline__ void pack_rows(uint32_t (&packed)[4][4], const float (&s)[8][4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    packed[k][0] = ptx::pack<bf16>(s[2 * k][0], s[2 * k][1]);
    packed[k][1] = ptx::pack<bf16>(s[2 * k][2], s[2 * k][3]);
    packed[k][2] = ptx::pack<bf16>(s[2 * k + 1][0], s[2 * k + 1][1]);
    packed[k][3] = ptx::pack<bf16>(s[2 * k + 1][2], s[2 * k + 1][3]);
  }
}
// Rows of a warp's results through its own memory, f32 [16, D]: so that stores are of whole rows.
template <int D>
__device__ __forceinline__ float* warp_rows(char* memory) {
  return reinterpret_cast<float*>(memory) + threadIdx.x / 32 * 16 * D;
}
template <int D, int columns>
__device__ __forceinline__ void keep_rows(float* rows, const float (&x)[columns / 8][4], float low_factor, float high_factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < columns / 8; ++n) {
    const int c = n * 8 + 2 * (lane % 4);
    *reinterpret_cast<float2*>(rows + lane / 4 * D + c) = {x[n][0] * low_factor, x[n][1] * low_factor};
    *reinterpret_cast<float2*>(rows + (lane / 4 + 8) * D + c) = {x[n][2] * high_factor, x[n][3] * high_factor};
  }
}
// The 16 rows of a warp, `width` of D channels each; at(r): the place of row r in x, or -1.
template <int D, class At>
__device__ __forceinline__ void put_rows(const AttendRows& x, const float* rows, int width, const At& at) {
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < 16 * (D / 4); i += 32) {
    const int r = i / (D / 4), c = i % (D / 4) * 4;
    const int64_t place = at(r);
    if (place < 0 || c >= width) continue;
    const float4 y = *reinterpret_cast<const float4*>(rows + r * D + c);
    put_four(x, place, c, width, {y.x, y.y, y.z, y.w});
  }
}

// Stores 16 rows from row `first` on, by a warp: as a part of split keys, or finished.
template <int D>
__device__ __forceinline__ void finish_rows(const Attend& p, const Place& place, int32_t first, const float* rows) {
  const AttendRows parts = {p.part_read, 0, 0, 0, Dtype::f32, p.V % 4 == 0};
#pragma unroll 2
  for (int i = threadIdx.x % 32; i < 16 * (D / 4); i += 32) {
    const int r = i / (D / 4), c = i % (D / 4) * 4;
    const RowPlace each = row_place(p, place, first + r);
    if (!each.there || c >= p.V) continue;
    const float4 y = *reinterpret_cast<const float4*>(rows + r * D + c);
    if (p.parts > 1) {
      const int64_t at = (place.part * flat_rows(p) + flat_row(p, place.seq, each)) * p.V;
      put_four(parts, at, c, p.V, {y.x, y.y, y.z, y.w});
    } else {
      finish_four(p, place.seq, each, c, y);
    }
  }
}

template <bool bf16, int D, int warps>
__device__ __forceinline__ void attend_tile(const Attend& p, char* memory) {
  constexpr int kRows = 16 * warps, kThreads = 32 * warps, kKeys = kAttendKeys;
  __shared__ uint32_t flags[2];
  Place place;
  if (!find_place<false, kRows>(p, blockIdx.x, &place)) return;
  const Sequence& seq = place.seq;
  const int32_t first_row = place.tile * kRows, rows = seq.tq * p.G;
  if (first_row >= rows) return;
  const uint32_t q_tile = ptx::shared_address(memory), k_tile = q_tile + kRows * kPitch<D>, v_tile = k_tile + kKeys * kPitch<D>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const RowPlace first = row_place(p, place, first_row), last = row_place(p, place, min(first_row + kRows, rows) - 1);
  KeyTiles tiles(p.mask, first.t, last.t, seq.n);
  if (p.parts > 1) tiles.take_part(place.part, p.parts);
  const auto copy_keys = [&](int32_t tile) {
    copy_tile<D, kKeys, kThreads>(k_tile, p.k, p.K, [&](int r) {
      const int32_t j = tile * kKeys + r;
      return j < seq.n ? key_at(p, p.k, place, j) : int64_t{-1};
    });
    ptx::copy_commit();
  };
  const auto copy_values = [&](int32_t tile) {
    copy_tile<D, kKeys, kThreads>(v_tile, p.v, p.V, [&](int r) {
      const int32_t j = tile * kKeys + r;
      return j < seq.n ? key_at(p, p.v, place, j) : int64_t{-1};
    });
    ptx::copy_commit();
  };
  copy_tile<D, kRows, kThreads>(q_tile, p.q, p.K, [&](int r) {
    const RowPlace row = row_place(p, place, first_row + r);
    return row.there ? row_at(p.q, seq, row) : int64_t{-1};
  });
  ptx::copy_commit();  // of the queries: without keys nothing else would, and the end would not wait for them
  if (tiles.begin < tiles.end) copy_keys(tiles.begin);

  // A lane has two rows, 8 apart, and columns 2 (lane % 4) and the next of every 8.
  RowPlace row[2];
  SeenKeys seen[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row[h] = row_place(p, place, first_row + warp * 16 + lane / 4 + 8 * h);
    seen[h] = seen_keys(p.mask, row[h].t, row[h].there ? seq.n : 0);
  }
  float top[2] = {-infinity(), -infinity()}, sum[2] = {0, 0}, read[D / 8][4];
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) read[n][e] = 0;
  }
  const float factor = p.hooked ? 1.0f : p.factor;
  for (int32_t tile = tiles.begin; tile < tiles.end;) {
    const int32_t next = tiles.next(tile), j0 = tile * kKeys;
    ptx::copy_wait<0>();
    __syncthreads();  // the keys are there, and nobody reads the values before
    copy_values(tile);
    float s[8][4];
    multiply_rows<bf16, D>(s, q_tile, warp * 16, k_tile);
    const bool cut = j0 + kKeys > seq.n || !all_see(p.mask, first.t, last.t, j0, j0 + kKeys - 1);
    if (cut) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!seen[e / 2].has(j0 + n * 8 + 2 * (lane % 4) + e % 2)) s[n][e] = -infinity();
        }
      }
    }
    if (p.hooked) {
      const int64_t bias[2] = {bias_row(p, seq, row[0]), bias_row(p, seq, row[1])};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int j = j0 + n * 8 + 2 * (lane % 4) + e % 2;
          if (seen[e / 2].has(j)) s[n][e] = logit(p, s[n][e], bias[e / 2], seq.k0 + j).x * kLog2e;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = top[h];
#pragma unroll
      for (int n = 0; n < 8; ++n) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
      const float safe = most == -infinity() ? 0 : most * factor;
      const float shrink = ptx::exp2_fast(top[h] * factor - safe);  // 0 at first
      top[h] = most;
      float total = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
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
    uint32_t weights[4][4];
    pack_rows<bf16>(weights, s);
    ptx::copy_wait<0>();
    __syncthreads();  // the values are there, and nobody reads the keys
    if (next < tiles.end) copy_keys(next);
    uint64_t wild = cut ? clean_tile<bf16, D, kThreads>(v_tile, flags) : 0;
    add_rows<bf16, D, D>(read, weights, v_tile, 0);
    while (wild != 0) {
      const int r = __ffsll(static_cast<long long>(wild)) - 1;
      wild &= wild - 1;
      float weight[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) weight[h] = n != r / 8 ? weight[h] : r % 2 == 0 ? s[n][2 * h] : s[n][2 * h + 1];
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) weight[h] = __shfl_sync(0xffffffff, weight[h], lane / 4 * 4 + r % 8 / 2);
      add_wild<D>(p, place, j0 + r, seen, weight, read);
    }
    tile = next;
  }

  // The rows are finished through shared memory, which nobody reads any more: one row after the other, a lane for each channel.
  float inverse[2], lse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(0xffffffff, sum[h], 1);
    sum[h] += __shfl_xor_sync(0xffffffff, sum[h], 2);
    if (p.parts > 1) {
      inverse[h] = sum[h] == 0 ? 0 : 1 / sum[h];
      lse[h] = sum[h] == 0 ? -infinity() : fmaf(top[h] * factor, kLn2, logf(sum[h]));
    } else {
      const Normal normal = normalise(p, row[h].there ? row[h].head : 0, top[h] * factor * kLn2, sum[h]);
      inverse[h] = normal.inverse;
      lse[h] = normal.lse;
    }
  }
  ptx::copy_wait<0>();
  __syncthreads();
  float* const mine = warp_rows<D>(memory);
  keep_rows<D, D>(mine, read, inverse[0], inverse[1]);
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (lane % 4 != 0 || !row[h].there) continue;
    if (p.parts > 1) {
      p.part_lse[place.part * flat_rows(p) + flat_row(p, seq, row[h])] = lse[h];
    } else if (p.lse.data != nullptr) {
      static_cast<float*>(p.lse.data)[row_at(p.lse, seq, row[h])] = lse[h];
    }
  }
  finish_rows<D>(p, place, first_row + warp * 16, mine);
}

}  // namespace linnet::cuda
