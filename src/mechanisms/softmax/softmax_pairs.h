// Pairs: the arithmetic of the softmax engine with products of bf16 numbers and float sums (gemm_bf16.h), for bf16 calls on
// machines with AVX512_BF16. Queries, keys, values and dout enter the products exactly as given; P and dS are rounded to bf16.
//
//   array                       forward                          backward
//   rows as they lie, [n, D/2]  keys (broadcast)                 queries, dout (broadcast)
//   transposed, [D/2, 64]       queries (lanes)                  keys, values (lanes)
//   row pairs, [n/2, D]         values (broadcast, transposed)   queries, dout, keys (lanes)
//   weights, [keys/2, 64]       P (lanes)                        P, dS by query pairs (broadcast, transposed)
//   weights as rows, [64, 32]                                    dS (broadcast)
#pragma once

#include "simd/gemm_bf16.h"
#include "softmax_backward.h"

namespace linnet::LINNET_ISA {

LINNET_INLINE int64_t pairs_of(int64_t n) { return (n + 1) / 2; }

// Rows by address: they may lie in several pages.
struct RowList {
  const Bf16* row[kKeys];
  int count;
};
LINNET_INLINE RowList rows_at(const View& x, int64_t offset, int64_t stride, int count) {
  RowList list;
  list.count = count;
  for (int r = 0; r < count; ++r) list.row[r] = static_cast<const Bf16*>(x.data) + offset + r * stride;
  return list;
}

// dst[r * ld + c / 2] = the pair (c, c + 1) of row r; zeros up to ld.
inline void copy_pairs(const RowList& rows, int width, Pair* dst, int64_t ld) {
  for (int r = 0; r < rows.count; ++r) {
    __builtin_memcpy(dst + r * ld, rows.row[r], static_cast<size_t>(width) * 2);
    __builtin_memset(reinterpret_cast<char*>(dst + r * ld) + width * 2, 0, static_cast<size_t>(ld * 4 - width * 2));
  }
}
// dst[c / 2 * kLanes + r] = the pair (c, c + 1) of row r; lanes behind the rows are zero.
inline void transpose_pairs(const RowList& rows, int width, Pair* dst) {
  const int pairs = static_cast<int>(pairs_of(width));
  for (int r = 0; r < rows.count; ++r) {
    for (int c = 0; c < width / 2; ++c) __builtin_memcpy(dst + c * kLanes + r, rows.row[r] + 2 * c, 4);
    if (width % 2 != 0) dst[(pairs - 1) * kLanes + r] = {rows.row[r][width - 1].bits};
  }
  for (int r = rows.count; r < round_up<float>(rows.count); ++r) {
    for (int c = 0; c < pairs; ++c) dst[c * kLanes + r] = {0};
  }
}
// dst[r / 2 * ld + c] = (row r, row r + 1) of channel c; a missing row and channels up to the next vector are zero.
inline void interleave_rows(const RowList& rows, int width, Pair* dst, int64_t ld) {
  constexpr int W = Vec<float>::W;
  const auto load = [](const Bf16* p, int n) {
    return reinterpret_cast<vu16>(_mm256_maskz_loadu_epi16(Vec<float>::prefix(n), p));
  };
  for (int r = 0; r < rows.count; r += 2, dst += ld) {
    const Bf16 *const low = rows.row[r], *const high = r + 1 < rows.count ? rows.row[r + 1] : nullptr;
    for (int c = 0; c < width; c += W) {
      store_pairs(dst + c, interleave(load(low + c, width - c), high ? load(high + c, width - c) : vu16{}));
    }
  }
}
// True when neither half of any pair is infinite or NaN.
LINNET_INLINE bool pairs_finite(const Pair* x, int64_t ld, int rows, int width) {
  vu32 bad = {};
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < width; ++c) {
      const uint32_t b = x[r * ld + c].bits;
      bad[0] |= ((b & 0x7f80u) == 0x7f80u) | ((b & 0x7f800000u) == 0x7f800000u);
    }
  }
  return bad[0] == 0;
}
LINNET_INLINE float low_half(Pair p) { return __builtin_bit_cast(float, p.bits << 16); }
LINNET_INLINE float high_half(Pair p) { return __builtin_bit_cast(float, p.bits & 0xffff0000u); }
LINNET_INLINE float half(Pair p, int which) { return which % 2 == 0 ? low_half(p) : high_half(p); }

// C = factor acc, and the running maximum of each lane.
struct ScaleMax {
  float factor;
  float* maximum;
  static constexpr bool kReadsC = false;
  template <int R, int N>
  LINNET_INLINE void tile(vf (&acc)[R][N], float* c, int64_t ldc, int i, int j) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) acc[r][v] = acc[r][v] * factor;
    }
    StoreMax<float>{maximum}.tile(acc, c, ldc, i, j);
  }
};

// The row kernel with bf16 products. The values of two tokens are interleaved inside 16-byte pieces, which leaves the channels
// of each 32 in the order 0-3, 8-11, 16-19, 24-27, 4-7, ..., 28-31; result() puts them right.
struct PairRows {
  using T = float;
  struct Scratch {
    Pair *q, *p;                     // [heads, rows, ldq], [heads, rows, kKeys / 2]
    float *o, *s, *maximum, *total;  // [heads, rows, ldo], [heads, rows, kKeys], [heads, kLanes]
    float* ordered;                  // [rows, round_up(V)]
    int64_t ldq, ldo;
    LINNET_INLINE Scratch(Arena& arena, int64_t K, int64_t V, int heads)
        : ldq(round_up<float>(pairs_of(K))), ldo((V + 31) / 32 * 32) {
      q = arena.take<Pair>(heads * kFewRows * ldq);
      p = arena.take<Pair>(heads * kFewRows * (kKeys / 2));
      o = arena.take<float>(heads * kFewRows * ldo);
      s = arena.take<float>(heads * kFewRows * kKeys);
      maximum = arena.take<float>(heads * kLanes);
      total = arena.take<float>(heads * kLanes);
      ordered = arena.take<float>(kFewRows * ldo);
    }
    const float* result(int h, int rows, int width) const {
      const int64_t ld = round_up<float>(width);
      for (int r = 0; r < rows; ++r) {
        const float* const from = o + (h * rows + r) * ldo;
        for (int c = 0; c < ld; ++c) ordered[r * ld + c] = from[c / 32 * 32 + c / 4 % 2 * 16 + c % 32 / 8 * 4 + c % 4];
      }
      return ordered;
    }
  };
  template <class F>
  LINNET_INLINE static void with_cache(const View& x, const F& f) {
    f(static_cast<const Bf16*>(x.data));
  }
  LINNET_INLINE static vu32 load32(const Bf16* p, int n) {  // 32 neighbours, zeros behind the first n
    const __mmask32 mask = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
    return reinterpret_cast<vu32>(_mm512_maskz_loadu_epi16(mask, p));
  }
  static void load_queries(const Problem& p, const Sequence& seq, int64_t head, int h, int rows, const Scratch& s) {
    const int K = static_cast<int>(p.key_width());
    for (int r = 0; r < rows; ++r) {
      const Bf16* const from = static_cast<const Bf16*>(p.q.data) + p.row_offset(p.q, seq, head, r);
      for (int c = 0; c < K; c += 32) store_pairs(s.q + (h * rows + r) * s.ldq + c / 2, load32(from + c, K - c));
    }
  }
  static void pack_weights(const Problem&, int h, int rows, const Scratch& s) {
    // 64 neighbours as bf16 are 32 pairs.
    for (int i = h * rows * kKeys; i < (h + 1) * rows * kKeys; i += Vec<float>::W) {
      const auto rounded = _mm512_cvtneps_pbh(Vec<float>::load(s.s + i));
      __builtin_memcpy(s.p + i / 2, &rounded, sizeof rounded);
    }
  }
  template <int R>
  LINNET_INLINE static void scores(const Bf16* const (&k)[kScoreTokens], int count, int K, int row, int j, const Scratch& s,
                                   float factor) {
    vf acc[R][4] = {};
    for (int c = 0; c < K; c += 32) {
      vu32 x[4];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) x[n] = load32(k[n] + c, K - c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const vu32 y = load_pairs(s.q + (row + r) * s.ldq + c / 2);
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) acc[r][n] = dot_pairs(acc[r][n], x[n], y);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float sums[4];
      sum_each(acc[r], sums);
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) {
        if (n < count) s.s[(row + r) * kKeys + j + n] = sums[n] * factor;
      }
    }
  }
  template <int R>
  LINNET_INLINE static void values(const Bf16* const* v, int count, int width, int row, int j, const Scratch& s) {
    constexpr int N = R <= 2 ? 4 : 2;  // 16 sums in registers
    int c = 0;
    for (; c + N * 32 <= width; c += N * 32) values_part<R, N>(v, count, width, row, j, s, c);
    for (; c < width; c += 32) values_part<R, 1>(v, count, width, row, j, s, c);
  }
  template <int R, int N>
  LINNET_INLINE static void values_part(const Bf16* const* v, int count, int width, int row, int j, const Scratch& s, int c) {
    using X = Vec<float>;
    float* const o = s.o + row * s.ldo + c;
    vf acc[R][2 * N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < 2 * N; ++n) acc[r][n] = X::load(o + r * s.ldo + n * 16);
    }
    for (int t = 0; t < count;) {
      // An odd token alone, or one whose neighbour is not among the given, meets zeros.
      const bool odd = (j + t) % 2 != 0, two = !odd && t + 1 < count;
      vu32 pairs[2 * N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const vu32 x = load32(v[t] + c + n * 32, width - c - n * 32), zero = {};
        const vu32 y = two ? load32(v[t + 1] + c + n * 32, width - c - n * 32) : zero;
        const __m512i low = reinterpret_cast<__m512i>(odd ? zero : x), high = reinterpret_cast<__m512i>(odd ? x : y);
        pairs[2 * n] = reinterpret_cast<vu32>(_mm512_unpacklo_epi16(low, high));
        pairs[2 * n + 1] = reinterpret_cast<vu32>(_mm512_unpackhi_epi16(low, high));
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        uint32_t weight = s.p[((row + r) * kKeys + j + t) / 2].bits;
        if (!two) weight &= odd ? 0xffff0000u : 0xffffu;  // the other weight may be NaN
        const vu32 w = vu32{} + weight;
#pragma GCC unroll 8
        for (int n = 0; n < 2 * N; ++n) acc[r][n] = dot_pairs(acc[r][n], w, pairs[n]);
      }
      t += two ? 2 : 1;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < 2 * N; ++n) X::store(o + r * s.ldo + n * 16, acc[r][n]);
    }
  }
};

struct Pairs {
  using T = float;
  using Rows = PairRows;
  using Query = Pair;
  using Tile = QueryTile<float, Pair>;

  struct Scratch {
    Pair *k, *v, *p;  // [kKeys, ldk], [kKeys / 2, ldv], [kKeys / 2, kLanes]
    float *st, *bias, *alpha, *tiles, *stage;
    int64_t ldk, ldv;
    LINNET_INLINE Scratch(Arena& arena, int64_t K, int64_t V, bool has_bias, int tile_count)
        : ldk(round_up<float>(pairs_of(K)) + 16), ldv(round_up<float>(V) + 16) {
      k = arena.take<Pair>(kKeys * ldk);
      v = arena.take<Pair>(kKeys / 2 * ldv);
      p = arena.take<Pair>(kKeys / 2 * kLanes);
      st = arena.take<float>(kKeys * kLanes);
      bias = arena.take<float>(has_bias ? kKeys * kLanes : 0);
      alpha = arena.take<float>(kLanes);
      stage = arena.take<float>(kLanes * round_up<float>(V));
      tiles = arena.take<float>((query_size(K) + (V + 2) * kLanes) * tile_count);
    }
    LINNET_INLINE float* staging() const { return stage; }
  };
  LINNET_INLINE static int64_t query_size(int64_t K) { return pairs_of(K) * kLanes; }

  static RowList keys_of(const Problem& p, const View& x, const Sequence& seq, int64_t head, int64_t j0, int count) {
    RowList list;
    list.count = count;
    p.key_runs(x, seq, head, j0, count, [&](int64_t offset, int first, int run) {
      for (int r = 0; r < run; ++r) list.row[first + r] = static_cast<const Bf16*>(x.data) + offset + r * x.stride[1];
    });
    return list;
  }
  static void load_queries(const Problem& p, const Sequence& seq, int64_t head, const Tile& tile, const Scratch&) {
    RowList list;
    list.count = tile.rows;
    for (int r = 0; r < tile.rows; ++r) {
      list.row[r] = static_cast<const Bf16*>(p.q.data) + p.row_offset(p.q, seq, head, tile.r0 + r);
    }
    transpose_pairs(list, static_cast<int>(p.key_width()), tile.qt);
  }
  static void load_tile(const Problem& p, const Sequence& seq, int64_t head, int64_t j0, int keys, const Scratch& s) {
    copy_pairs(keys_of(p, p.k, seq, head, j0, keys), static_cast<int>(p.key_width()), s.k, s.ldk);
    interleave_rows(keys_of(p, p.v, seq, head, j0, keys), static_cast<int>(p.value_width()), s.v, s.ldv);
  }
  LINNET_INLINE static void scores(const Problem& p, const Tile& tile, int keys, bool with_maximum, const Scratch& s) {
    const int pairs = static_cast<int>(pairs_of(p.key_width()));
    const float factor = p.query_factor<float>();
    if (with_maximum) {
      gemm_pairs(keys, tile.lanes, pairs, as_is(s.k, s.ldk), tile.qt, kLanes, s.st, kLanes, ScaleMax{factor, tile.maximum});
    } else {
      gemm_pairs(keys, tile.lanes, pairs, as_is(s.k, s.ldk), tile.qt, kLanes, s.st, kLanes, Scale<float>{factor});
    }
  }
  // P in pairs of keys; in st as well when the product will be made pair by pair.
  template <int N>
  LINNET_INLINE static void exponentials(int keys, int v0, const float* old_maximum, const Tile& tile, const Scratch& s,
                                         bool careful) {
    using X = Vec<float>;
    vf m[N], l[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      m[v] = X::load(tile.maximum + v0 + v * X::W);
      l[v] = X::zero();
    }
    for (int j = 0; j < keys; j += 2) {
      const bool two = j + 1 < keys;
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        float* const at = s.st + j * kLanes + v0 + v * X::W;
        const vf p = exp2_nonpositive(X::load(at) - m[v]);
        const vf q = two ? exp2_nonpositive(X::load(at + kLanes) - m[v]) : X::zero();
        const vu32 pairs = make_pairs(p, q);
        store_pairs(s.p + j / 2 * kLanes + v0 + v * X::W, pairs);
        l[v] = l[v] + (p + q);
        if (!careful) continue;
        X::store(at, low_halves(pairs));
        if (two) X::store(at + kLanes, high_halves(pairs));
      }
    }
    Direct<float>::end_exponentials<N>(v0, old_maximum, m, l, tile, s);
  }
  LINNET_INLINE static void values(const Problem& p, const Tile& tile, int keys, const Scratch& s) {
    gemm_pairs(static_cast<int>(p.value_width()), tile.lanes, static_cast<int>(pairs_of(keys)), transposed(s.v, s.ldv), s.p,
               kLanes, tile.ot, kLanes, LaneScaleAdd<float>{s.alpha});
  }
  LINNET_INLINE static bool values_finite(int keys, int V, const Scratch& s) {
    return pairs_finite(s.v, s.ldv, static_cast<int>(pairs_of(keys)), V);
  }
  LINNET_INLINE static float value(const Scratch& s, int j, int c) { return half(s.v[j / 2 * s.ldv + c], j); }
};

struct PairsBackward {
  using T = float;
  struct Scratch {
    Pair *q, *dout, *q_rows, *dout_rows;  // as they lie [kLanes, ..]; by row pairs [kLanes / 2, ..]
    Pair *p, *g, *g_rows;                 // P and dS by query pairs [kLanes / 2, kKeys]; dS as rows [kLanes, kKeys / 2]
    float *s, *ds, *bias, *key_tiles;
    int64_t ldq, ldo, ldk, ldv, key_tile_size;
    int block;
    LINNET_INLINE Scratch(Arena& arena, const Problem& problem) {
      const int64_t K = problem.key_width(), V = problem.value_width();
      ldk = round_up<float>(K) + 16;
      ldv = round_up<float>(V) + 16;
      ldq = round_up<float>(pairs_of(K)) + 16;
      ldo = round_up<float>(pairs_of(V)) + 16;
      q = arena.take<Pair>(kLanes * ldq);
      dout = arena.take<Pair>(kLanes * ldo);
      q_rows = arena.take<Pair>(kLanes / 2 * ldk);
      dout_rows = arena.take<Pair>(kLanes / 2 * ldv);
      p = arena.take<Pair>(kLanes / 2 * kKeys);
      g = arena.take<Pair>(kLanes / 2 * kKeys);
      g_rows = arena.take<Pair>(kLanes * (kKeys / 2));
      s = arena.take<float>(kLanes * kKeys);
      ds = arena.take<float>(kLanes * kKeys);
      bias = arena.take<float>(problem.bias.given() ? kLanes * kKeys : 0);
      key_tile_size = kKeys * (ldk + ldv) + kKeys / 2 * ldk + (pairs_of(K) + pairs_of(V)) * kLanes;
      block = tiles_per_block(key_tile_size * 4);
      key_tiles = arena.take<float>(key_tile_size * block);
    }
  };
  struct Tile {
    int64_t j0;
    int keys, lanes, finite;
    float *dk, *dv;     // [kKeys, ldk], [kKeys, ldv]
    Pair *k, *kt, *vt;  // by row pairs [kKeys / 2, ldk], [K / 2, kLanes], [V / 2, kLanes]
  };

  static Tile load_keys(const Problem& p, const Sequence& seq, int64_t head, int64_t j0, int slot, const Scratch& s) {
    const int K = static_cast<int>(p.key_width()), V = static_cast<int>(p.value_width());
    Tile tile{j0, static_cast<int>(smaller(kKeys, seq.n - j0)), 0, -1, s.key_tiles + slot * s.key_tile_size};
    tile.lanes = static_cast<int>(round_up<float>(tile.keys));
    tile.dv = tile.dk + kKeys * s.ldk;
    tile.k = reinterpret_cast<Pair*>(tile.dv + kKeys * s.ldv);
    tile.kt = tile.k + kKeys / 2 * s.ldk;
    tile.vt = tile.kt + pairs_of(K) * kLanes;
    const RowList keys = Pairs::keys_of(p, p.k, seq, head, j0, tile.keys);
    interleave_rows(keys, K, tile.k, s.ldk);
    transpose_pairs(keys, K, tile.kt);
    transpose_pairs(Pairs::keys_of(p, p.v, seq, head, j0, tile.keys), V, tile.vt);
    for (int64_t i = 0; i < kKeys * (s.ldk + s.ldv); ++i) tile.dk[i] = 0;
    return tile;
  }
  static void load_queries(const Problem& p, const View& dout, const Sequence& seq, const QueryRows& rows, const Scratch& s) {
    const int K = static_cast<int>(p.key_width()), V = static_cast<int>(p.value_width());
    const RowList q = rows_at(p.q, rows.offset(p.q, seq), p.q.stride[1], rows.rows);
    copy_pairs(q, K, s.q, s.ldq);
    interleave_rows(q, K, s.q_rows, s.ldk);
    if (dout.given()) {
      const RowList d = rows_at(dout, rows.offset(dout, seq), dout.stride[1], rows.rows);
      copy_pairs(d, V, s.dout, s.ldo);
      interleave_rows(d, V, s.dout_rows, s.ldv);
    } else {
      for (int64_t i = 0; i < kLanes * s.ldo; ++i) s.dout[i] = {0};
      for (int64_t i = 0; i < kLanes / 2 * s.ldv; ++i) s.dout_rows[i] = {0};
    }
  }
  LINNET_INLINE static void scores(const Problem& p, const QueryRows& rows, const Tile& tile, const Scratch& s) {
    const int K = static_cast<int>(pairs_of(p.key_width())), V = static_cast<int>(pairs_of(p.value_width()));
    gemm_pairs(rows.rows, tile.lanes, K, as_is(s.q, s.ldq), tile.kt, kLanes, s.s, kKeys, Scale<float>{p.query_factor<float>()});
    gemm_pairs(rows.rows, tile.lanes, V, as_is(s.dout, s.ldo), tile.vt, kLanes, s.ds, kKeys, Store{});
  }
  static void make_weights(const Problem& p, const Sequence& seq, const QueryRows& rows, const Tile& tile, bool masked,
                           const float* lse2, const float* delta, const Scratch& s, const float* bias, bool careful) {
    weights(p, seq, rows, tile, masked, true, lse2, delta, s.s, s.ds, bias, [&](int r, int v, vf w, vf g, vf w1, vf g1) {
      using X = Vec<float>;
      const vu32 pairs = make_pairs(g, g1), weight_pairs = make_pairs(w, w1);
      store_pairs(s.p + r / 2 * kKeys + v, weight_pairs);
      store_pairs(s.g + r / 2 * kKeys + v, pairs);
      const vu16 low = __builtin_convertvector(pairs, vu16), high = __builtin_convertvector(pairs >> 16, vu16);
      __builtin_memcpy(s.g_rows + r * (kKeys / 2) + v / 2, &low, sizeof low);
      if (r + 1 < rows.rows) __builtin_memcpy(s.g_rows + (r + 1) * (kKeys / 2) + v / 2, &high, sizeof high);
      if (!careful) return;
      X::store(s.s + r * kKeys + v, low_halves(weight_pairs));
      X::store(s.ds + r * kKeys + v, low_halves(pairs));
      if (r + 1 >= rows.rows) return;
      X::store(s.s + (r + 1) * kKeys + v, high_halves(weight_pairs));
      X::store(s.ds + (r + 1) * kKeys + v, high_halves(pairs));
    });
    // An odd number of keys: the last pair's other half meets a row of zeros, and must not be NaN.
    if (tile.keys % 2 == 0) return;
    for (int r = 0; r < rows.rows; ++r) s.g_rows[r * (kKeys / 2) + tile.keys / 2].bits &= 0xffffu;
  }
  LINNET_INLINE static void add_keys(const Problem& p, const QueryRows& rows, const Tile& tile, const Scratch& s) {
    const int K = static_cast<int>(p.key_width()), V = static_cast<int>(p.value_width());
    const int pairs = static_cast<int>(pairs_of(rows.rows));
    gemm_pairs(tile.keys, V, pairs, transposed(s.p, kKeys), s.dout_rows, s.ldv, tile.dv, s.ldv, Add{});
    gemm_pairs(tile.keys, K, pairs, transposed(s.g, kKeys), s.q_rows, s.ldk, tile.dk, s.ldk, Add{});
  }
  LINNET_INLINE static void add_queries(const Problem& p, const QueryRows& rows, const Tile& tile, const Scratch& s,
                                        float* dq) {
    gemm_pairs(rows.rows, static_cast<int>(p.key_width()), static_cast<int>(pairs_of(tile.keys)), as_is(s.g_rows, kKeys / 2),
               tile.k, s.ldk, dq, s.ldk, Add{});
  }
  static bool queries_finite(const Problem& p, int rows, const Scratch& s) {
    return pairs_finite(s.q, s.ldq, rows, static_cast<int>(pairs_of(p.key_width()))) &&
           pairs_finite(s.dout, s.ldo, rows, static_cast<int>(pairs_of(p.value_width())));
  }
  static bool keys_finite(const Problem& p, const Tile& tile, const Scratch& s) {
    return pairs_finite(tile.k, s.ldk, static_cast<int>(pairs_of(tile.keys)), static_cast<int>(p.key_width()));
  }
  LINNET_INLINE static float query_at(const Scratch& s, int r, int c) { return half(s.q[r * s.ldq + c / 2], c); }
  LINNET_INLINE static float dout_at(const Scratch& s, int r, int c) { return half(s.dout[r * s.ldo + c / 2], c); }
  LINNET_INLINE static float key_at(const Scratch& s, const Tile& tile, int j, int c) {
    return half(tile.k[j / 2 * s.ldk + c], j);
  }
};

}  // namespace linnet::LINNET_ISA
