// What the kernels of softmax attention share on the GPU: where a block's rows and keys lie, who sees whom, logits, and what
// becomes of a row that has been read.
#pragma once

#include "mechanisms/softmax/cuda/problem.h"
#include "ptx/numbers.cuh"
#include "ptx/rows.cuh"

namespace linnet::cuda {

inline constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ int64_t index_of(const AttendIndices& x, int64_t i, int64_t j = 0) {
  const int64_t at = i * x.stride[0] + j * x.stride[1];
  return x.is_64 ? static_cast<const int64_t*>(x.data)[at] : static_cast<const int32_t*>(x.data)[at];
}
__device__ __forceinline__ int32_t bounded(int64_t x, int32_t low, int32_t high) {
  return x < low ? low : x > high ? high : static_cast<int32_t>(x);
}

// Queries q0 .. q0+tq-1 and keys k0 .. k0+n-1 of batch row b. What lies on the GPU is checked by nobody: it is bounded here.
struct Sequence {
  int64_t b;
  int32_t q0, tq, k0, n;
  __device__ __forceinline__ int32_t shift() const { return n - tq; }  // query i stands at key position i + shift
};
__device__ __forceinline__ Sequence sequence(const Attend& p, int64_t s) {
  if (p.cu_q.data != nullptr) {
    const int32_t q0 = bounded(index_of(p.cu_q, s), 0, p.Tq), q1 = bounded(index_of(p.cu_q, s + 1), q0, p.Tq);
    const int32_t k0 = bounded(index_of(p.cu_k, s), 0, p.Tk), k1 = bounded(index_of(p.cu_k, s + 1), k0, p.Tk);
    return {0, q0, q1 - q0, k0, k1 - k0};
  }
  const int32_t end = p.lengths.data != nullptr ? bounded(index_of(p.lengths, s), 0, p.Tk) : p.Tk;
  const int32_t begin = p.start.data != nullptr ? bounded(index_of(p.start, s), 0, end) : 0;
  return {s, 0, p.Tq, begin, end - begin};
}

// The block's place: tile `tile` of sequence s, key head `head`; false: there is no such tile. rows: how many a sequence has.
// Packed, every sequence has its own number of tiles, which a warp adds up 32 at a time.
struct Place {
  Sequence seq;
  int32_t head, tile, part;
};
template <bool of_keys, int size>
__device__ __forceinline__ bool find_place(const Attend& p, int64_t block, Place* place) {
  int64_t tile = block % p.tiles;
  block /= p.tiles;
  if constexpr (!of_keys) {
    place->part = static_cast<int32_t>(block % p.parts);
    block /= p.parts;
  }
  place->head = static_cast<int32_t>(block % p.Hkv);
  block /= p.Hkv;
  if (p.cu_q.data == nullptr) {
    place->seq = sequence(p, block);
    // With a limit on the right the last tiles have the most keys: they go first.
    place->tile = static_cast<int32_t>(!of_keys && p.mask.right >= 0 ? p.tiles - 1 - tile : tile);
    return true;
  }
  const int lane = threadIdx.x % 32;
  for (int64_t s0 = 0; s0 < p.N; s0 += 32) {
    int64_t count = 0;
    if (s0 + lane < p.N) {
      const Sequence seq = sequence(p, s0 + lane);
      count = of_keys ? (seq.n + size - 1) / size : (static_cast<int64_t>(seq.tq) * p.G + size - 1) / size;
    }
    int64_t sum = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t before = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += before;
    }
    const uint32_t behind = __ballot_sync(0xffffffff, sum > tile);
    if (behind != 0) {
      const int found = __ffs(static_cast<int>(behind)) - 1;
      place->tile = static_cast<int32_t>(tile - __shfl_sync(0xffffffff, sum - count, found));
      place->seq = sequence(p, s0 + found);
      return true;
    }
    tile -= __shfl_sync(0xffffffff, sum, 31);
  }
  return false;
}

// ---- who sees whom ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int32_t block_of(const AttendMask& m, int32_t x) {
  return (x >= 0 ? x / m.chunk : -((-x + m.chunk - 1) / m.chunk)) * m.chunk;
}
// The keys that a query at position t sees, of n: begin .. end-1, without those from `gap` to `window` - 1.
struct SeenKeys {
  int32_t begin, end, gap, window;
  __device__ __forceinline__ bool has(int32_t j) const { return j >= begin && j < end && (j >= window || j < gap); }
};
__device__ __forceinline__ SeenKeys seen_keys(const AttendMask& m, int32_t t, int32_t n) {
  SeenKeys seen = {0, n, 0, 0};
  if (m.right >= 0) seen.end = min(n, t + m.right + 1);
  if (m.chunk > 0) {
    seen.begin = block_of(m, t);
    seen.end = t < 0 ? 0 : min(seen.end, seen.begin + m.chunk);
  }
  if (m.left >= 0) {
    seen.gap = m.prefix;
    seen.window = t - m.left;
  }
  return seen;
}
// The positions that see key j of n: begin .. end-1.
struct SeenBy {
  int32_t begin, end;
  __device__ __forceinline__ bool has(int32_t t) const { return t >= begin && t < end; }
};
__device__ __forceinline__ SeenBy seen_by(const AttendMask& m, int32_t j, int32_t n) {
  constexpr int32_t kFar = 1 << 30;
  SeenBy seen = {m.right >= 0 ? j - m.right : -kFar, m.left >= 0 && j >= m.prefix ? j + m.left + 1 : kFar};
  if (m.chunk > 0) {
    const int32_t start = block_of(m, j);
    seen.begin = max(seen.begin, start);
    seen.end = min(seen.end, start + m.chunk);
  }
  if (j >= n) seen.end = seen.begin;
  return seen;
}
// Whether all queries t0 .. t1 see all keys j0 .. j1.
__device__ __forceinline__ bool all_see(const AttendMask& m, int32_t t0, int32_t t1, int32_t j0, int32_t j1) {
  if (m.right >= 0 && j1 > t0 + m.right) return false;
  if (m.left >= 0 && j0 < t1 - m.left && j1 >= m.prefix) return false;
  if (m.chunk > 0 && (t0 < 0 || block_of(m, t0) != block_of(m, t1) || block_of(m, j0) != block_of(m, t0) ||
                      block_of(m, j1) != block_of(m, t0))) {
    return false;
  }
  return true;
}
// The key tiles of `size` that queries t0 .. t1 of a sequence with n keys look at.
template <int size>
struct KeyTilesOf {
  int32_t begin, end, window, prefix;  // tiles; below `window` only those before `prefix`
  __device__ __forceinline__ KeyTilesOf(const AttendMask& m, int32_t t0, int32_t t1, int32_t n) {
    int32_t low = 0, high = n;
    if (m.right >= 0 && t1 + m.right + 1 < high) high = t1 + m.right + 1;
    if (m.chunk > 0) {
      low = max(low, block_of(m, t0));
      high = min(high, block_of(m, t1) + m.chunk);
    }
    begin = low / size;
    end = high > low ? (high + size - 1) / size : begin;
    window = m.left >= 0 && t0 - m.left > 0 ? (t0 - m.left) / size : 0;
    prefix = (m.prefix + size - 1) / size;
    begin = next(begin - 1);
  }
  __device__ __forceinline__ int32_t next(int32_t tile) const {
    ++tile;
    return tile < window && tile >= prefix ? window : tile;
  }
  // Part `part` of `parts`: an equal share of the tiles between begin and end.
  __device__ __forceinline__ void take_part(int32_t part, int32_t parts) {
    const int32_t share = (max(end - begin, 0) + parts - 1) / parts, first = begin + part * share;
    end = min(end, first + share);
    begin = next(first - 1);
  }
};
using KeyTiles = KeyTilesOf<kAttendKeys>;
// The queries that look at keys j0 .. j1: tokens begin .. end-1 of the sequence.
struct QueryRange {
  int32_t begin, end;
  __device__ __forceinline__ QueryRange(const AttendMask& m, int32_t j0, int32_t j1, const Sequence& seq) {
    int32_t low = seq.shift(), high = low + seq.tq;  // positions
    if (m.right >= 0) low = max(low, j0 - m.right);
    if (m.left >= 0 && j0 >= m.prefix) high = min(high, j1 + m.left + 1);
    if (m.chunk > 0) {
      low = max(low, block_of(m, j0));
      high = min(high, block_of(m, j1) + m.chunk);
    }
    begin = low - seq.shift();
    end = high - seq.shift();
  }
};

// ---- rows -------------------------------------------------------------------------------------------------------------------

// A row of the tile: its token, query head and key position.
struct RowPlace {
  int32_t token, head, t;
  bool there;
};
__device__ __forceinline__ RowPlace row_place(const Attend& p, const Place& place, int32_t r) {
  const int32_t i = p.G == 1 ? r : r / p.G, g = p.G == 1 ? 0 : r - i * p.G;
  return {place.seq.q0 + i, place.head * p.G + g, i + place.seq.shift(), i < place.seq.tq};
}
__device__ __forceinline__ int64_t row_at(const AttendRows& x, const Sequence& seq, const RowPlace& row) {
  return seq.b * x.stride_b + row.token * x.stride_t + row.head * x.stride_h;
}
// Of key j of the sequence, in its tensor or in its page.
__device__ __forceinline__ int64_t key_at(const Attend& p, const AttendRows& x, const Place& place, int32_t j) {
  const int32_t token = place.seq.k0 + j;
  if (p.pages.data == nullptr) return place.seq.b * x.stride_b + token * x.stride_t + place.head * x.stride_h;
  const int64_t entry = index_of(p.pages, place.seq.b, token / p.page);
  const int64_t page = entry < 0 || entry >= p.page_count ? 0 : entry;
  return page * x.stride_b + token % p.page * x.stride_t + place.head * x.stride_h;
}

// ---- logits -----------------------------------------------------------------------------------------------------------------

// The logit of a product, -inf where the bias says so, and its derivative in the product, up to `scale`. Not inlined: a tile
// has 32 of these in every thread, and few calls need them.
__device__ __noinline__ float2 logit(const Attend& p, float product, int64_t bias_row, int32_t key) {
  float s = product * p.scale, slope = 1;
  if (p.softcap > 0) {
    const float t = tanhf(s / p.softcap);
    s = p.softcap * t;
    slope = 1 - t * t;
  }
  if (p.bias.data != nullptr) {
    const float b = ptx::load(p.bias.data, p.bias.dtype, bias_row + key * p.bias.stride[3]);
    s = b == -infinity() ? b : s + b;
  }
  return {s, slope};
}
__device__ __forceinline__ int64_t bias_row(const Attend& p, const Sequence& seq, const RowPlace& row) {
  return seq.b * p.bias.stride[0] + row.head * p.bias.stride[1] + row.token * p.bias.stride[2];
}

// exp(z) - 1 - z.
__device__ __forceinline__ float excess(float z) {
  if (fabsf(z) > 0.5f) return expm1f(z) - z;
  float sum = 1.0f / 40320;
  sum = fmaf(sum, z, 1.0f / 5040);
  sum = fmaf(sum, z, 1.0f / 720);
  sum = fmaf(sum, z, 1.0f / 120);
  sum = fmaf(sum, z, 1.0f / 24);
  sum = fmaf(sum, z, 1.0f / 6);
  sum = fmaf(sum, z, 0.5f);
  return z * z * sum;
}
// ---- after the read ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float gate_value(AttendAct act, float g) {
  switch (act) {
    case AttendAct::sigmoid: return ptx::logistic_pair<false>(g).x;
    case AttendAct::ns_sigmoid: return 0.5f + 0.5f * ptx::logistic_pair<false>(g).x;
    case AttendAct::silu: return g == -infinity() ? 0 : g * ptx::logistic_pair<false>(g).x;
    case AttendAct::identity: break;
  }
  return g;
}
__device__ __forceinline__ float gate_slope(AttendAct act, float g) {
  const float2 s = ptx::logistic_pair<false>(g);
  switch (act) {
    case AttendAct::sigmoid: return s.x * s.y;
    case AttendAct::ns_sigmoid: return 0.5f * s.x * s.y;
    case AttendAct::silu: return g == infinity() ? 1 : g == -infinity() ? 0 : s.x * (1 + g * s.y);
    case AttendAct::identity: break;
  }
  return 1;
}

// A row's sums with its sink: what its weighted values are multiplied by, and its normaliser. top: the largest logit; sum: of
// exp(logit - top).
struct Normal {
  float inverse, lse;
};
__device__ __forceinline__ Normal normalise(const Attend& p, int32_t head, float top, float sum) {
  float factor = 1;
  if (p.sinks.data != nullptr) {
    const float z = ptx::load(p.sinks.data, p.sinks.dtype, head * p.sinks.stride[0]);
    if (z != -infinity()) {
      const float higher = fmaxf(top, z);
      factor = top == -infinity() ? 0 : exp2f((top - higher) * kLog2e);
      sum = sum * factor + exp2f((z - higher) * kLog2e);
      top = higher;
    }
  }
  return {sum == 0 ? 0 : factor / sum, sum == 0 ? -infinity() : top + logf(sum)};
}
// Channel c of a finished row y.
__device__ __forceinline__ void put_channel(const Attend& p, const Sequence& seq, const RowPlace& row, int32_t c, float y) {
  if (p.read.data != nullptr) ptx::store(p.read.data, p.read.dtype, row_at(p.read, seq, row) + c, y);
  if (p.kept.data != nullptr) ptx::store(p.kept.data, p.kept.dtype, row_at(p.kept, seq, row) + c, y);
  if (p.gate.data != nullptr) {
    const float g = ptx::load(p.gate.data, p.gate.dtype, row_at(p.gate, seq, row) + (p.gate_per_head ? 0 : c));
    const float a = gate_value(p.act, g);
    y = p.gate_adds ? y + a : y * a;
  }
  ptx::store(p.out.data, p.out.dtype, row_at(p.out, seq, row) + c, y);
}
// Channels c .. c+3 of a row of x at `at`, in one store where they can be.
__device__ __forceinline__ void put_four(const AttendRows& x, int64_t at, int32_t c, int32_t width, const float (&y)[4]) {
  if (x.aligned && x.dtype == Dtype::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(x.data) + at + c) = make_float4(y[0], y[1], y[2], y[3]);
  } else if (x.aligned) {
    const bool bf16 = x.dtype == Dtype::bf16;
    const uint2 packed = {bf16 ? ptx::pack<true>(y[0], y[1]) : ptx::pack<false>(y[0], y[1]),
                          bf16 ? ptx::pack<true>(y[2], y[3]) : ptx::pack<false>(y[2], y[3])};
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(x.data) + at + c) = packed;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (c + i < width) ptx::store(x.data, x.dtype, at + c + i, y[i]);
    }
  }
}
// Channels c .. c+3 of a finished row y, which has some of them.
__device__ __forceinline__ void finish_four(const Attend& p, const Sequence& seq, const RowPlace& row, int32_t c, float4 read) {
  float y[4] = {read.x, read.y, read.z, read.w};
  if (p.read.data != nullptr) put_four(p.read, row_at(p.read, seq, row), c, p.V, y);
  if (p.kept.data != nullptr) put_four(p.kept, row_at(p.kept, seq, row), c, p.V, y);
  if (p.gate.data != nullptr) {
    const int64_t at = row_at(p.gate, seq, row);
    float g[4];
    if (p.gate.aligned && p.gate.dtype != Dtype::f32 && !p.gate_per_head) {
      const uint2 packed = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.gate.data) + at + c);
      const bool bf16 = p.gate.dtype == Dtype::bf16;
      const float2 low = bf16 ? ptx::unpack<true>(packed.x) : ptx::unpack<false>(packed.x);
      const float2 high = bf16 ? ptx::unpack<true>(packed.y) : ptx::unpack<false>(packed.y);
      g[0] = low.x, g[1] = low.y, g[2] = high.x, g[3] = high.y;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = p.gate_per_head || c + i < p.V;
        g[i] = there ? ptx::load(p.gate.data, p.gate.dtype, at + (p.gate_per_head ? 0 : c + i)) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = gate_value(p.act, g[i]);
      y[i] = p.gate_adds ? y[i] + a : y[i] * a;
    }
  }
  put_four(p.out, row_at(p.out, seq, row), c, p.V, y);
}
// The place of a row among all rows: of the parts of split keys.
__device__ __forceinline__ int64_t flat_row(const Attend& p, const Sequence& seq, const RowPlace& row) {
  return (seq.b * p.Tq + row.token) * (static_cast<int64_t>(p.Hkv) * p.G) + row.head;
}
__device__ __forceinline__ int64_t flat_rows(const Attend& p) {
  const int64_t batch = p.cu_q.data != nullptr ? 1 : p.N;
  return batch * p.Tq * (static_cast<int64_t>(p.Hkv) * p.G);
}

}  // namespace linnet::cuda
