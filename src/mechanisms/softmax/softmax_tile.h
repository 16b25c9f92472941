// The softmax tile engine: queries in the lanes, online softmax down the rows, nothing of size Tq x Tk.
//
//   QT [K, 64]               queries of one tile, transposed, the scale and log2(e) folded in
//   for each tile of 64 keys:
//     ST [64 keys, 64] = K QT                       keys are the broadcast operand: read as they lie
//     m, l, alpha                                   vectors over the lanes: no horizontal operation anywhere
//     OT [V, 64] = OT alpha + V^T ST                the rescale is the epilogue of the product
//
// A task takes a block of several query tiles of one key head, so that a tile of keys and values is copied to dense scratch
// (and converted) once for all of them. Every lane is computed for itself and key tiles count from the sequence's first key:
// neither blocks nor threads nor the heads packed into a tile change a bit.
//
// Values that some lanes of a tile must not see cannot be left out of the product: 0 x NaN would spoil those lanes. So in tiles
// that the mask cuts, the values are searched for non-finite numbers, and only if there are any the product is redone pair by
// visible pair (careful_values).
#pragma once

#include "simd/finite.h"
#include "simd/gemm.h"
#include "softmax_problem.h"

namespace linnet::LINNET_ISA {

// C = acc, and the running maximum over the rows of each lane.
template <class T>
struct StoreMax {
  T* maximum;  // [kLanes]
  static constexpr bool kReadsC = false;
  template <class V, int R, int N>
  LINNET_INLINE void tile(V (&acc)[R][N], T* c, int64_t ldc, int, int j) const {
    using X = Vec<T>;
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      V top = X::load(maximum + j + v * X::W);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        top = max(acc[r][v], top);  // a NaN is left out
        X::store(c + r * ldc + v * X::W, acc[r][v]);
      }
      X::store(maximum + j + v * X::W, top);
    }
  }
};

// The lanes of a span as a mask of vector v.
template <class T>
LINNET_INLINE typename Vec<T>::M span_mask(Span lanes, int v) {
  using X = Vec<T>;
  return X::prefix(static_cast<int>(lanes.end) - v) & ~X::prefix(static_cast<int>(lanes.begin) - v);
}

// A tile of queries and its running sums. Q: the element of its transposed queries (Direct, Pairs).
template <class T, class Q>
struct QueryTile {
  int64_t r0;  // first row
  int rows, lanes;
  int64_t t0, t1;  // positions of its first and last token
  Q* qt;           // [K, kLanes] (pairs: [K / 2, kLanes])
  T *ot, *maximum, *sum;
};

// Which lanes of the tile see key j of the sequence.
template <class Tile>
LINNET_INLINE Span visible_lanes(const Mask& mask, const Sequence& seq, int64_t group, const Tile& tile, int64_t j) {
  const Span t = mask.queries(j);
  const int64_t first = larger(0, smaller(t.begin - seq.shift(), seq.tq)),
                last = larger(0, smaller(t.end - seq.shift(), seq.tq));
  return {larger(0, smaller(first * group - tile.r0, kLanes)), larger(0, smaller(last * group - tile.r0, kLanes))};
}

// Soft cap, bias and mask on the logits of a tile, then the maximum of each lane.
template <class T, class Tile, class P>
[[gnu::noinline]] void finish_logits(const P& problem, const Sequence& seq, const Tile& tile, int64_t j0, int keys, bool masked,
                                     T* st, const T* bias) {
  using X = Vec<T>;
  using V = typename X::V;
  const bool capped = problem.softcap > 0;
  const V cap = X::broadcast(static_cast<T>(problem.softcap * kLog2e<double>)), hidden = X::broadcast(-kInfinity<T>);
  for (int j = 0; j < keys; ++j) {
    const Span lanes = masked ? visible_lanes(problem.mask, seq, problem.group(), tile, j0 + j) : Span{0, kLanes};
    for (int v = 0; v < tile.lanes; v += X::W) {
      V s = X::load(st + j * kLanes + v);
      if (capped) s = cap * tanh(s);
      if (bias != nullptr) {
        const V b = X::load(bias + j * kLanes + v);
        s = select(eq(b, hidden), hidden, fma(b, X::broadcast(kLog2e<T>), s));
      }
      if (masked) s = select(span_mask<T>(lanes, v), s, hidden);
      X::store(st + j * kLanes + v, s);
      X::store(tile.maximum + v, max(s, X::load(tile.maximum + v)));
    }
  }
}

template <class Element>
struct DirectRows;

// Direct<T>: the arithmetic of the engine with all products in T. (Pairs, softmax_pairs.h, multiplies in bf16.)
template <class Element>
struct Direct {
  using T = Element;
  using Rows = DirectRows<T>;  // for few rows (softmax_rows.h)
  using Query = T;
  using Tile = QueryTile<T, T>;

  struct Scratch {
    T *k, *v, *st, *bias, *alpha, *tiles;
    int64_t ldk, ldv;
    // Leading dimensions are padded by one line: rows at a distance of a large power of two collide in L1.
    LINNET_INLINE Scratch(Arena& arena, int64_t K, int64_t V, bool has_bias, int tile_count)
        : ldk(round_up<T>(K) + Vec<T>::W), ldv(round_up<T>(V) + Vec<T>::W) {
      k = arena.take<T>(kKeys * larger(ldk, ldv));
      v = arena.take<T>(kKeys * ldv);
      st = arena.take<T>(kKeys * kLanes);
      bias = arena.take<T>(has_bias ? kKeys * kLanes : 0);
      alpha = arena.take<T>(kLanes);
      tiles = arena.take<T>((query_size(K) + (V + 2) * kLanes) * tile_count);
    }
    LINNET_INLINE T* staging() const { return k; }  // [kLanes, width of queries or values], before and after the keys
  };
  LINNET_INLINE static int64_t query_size(int64_t K) { return K * kLanes; }  // in T

  template <class P>
  static void load_queries(const P& problem, const Sequence& seq, int64_t head, const Tile& tile, const Scratch& s) {
    problem.load_queries(seq, head, tile.r0, tile.rows, tile.qt, s.staging());
  }
  template <class P>
  static void load_tile(const P& problem, const Sequence& seq, int64_t head, int64_t j0, int keys, const Scratch& s) {
    problem.load_keys(seq, head, j0, keys, s.k, s.ldk);
    problem.load_values(seq, head, j0, keys, s.v, s.ldv);
  }
  // ST = K QT, and the maximum of each lane unless the logits still change.
  template <class P>
  LINNET_INLINE static void scores(const P& problem, const Tile& tile, int keys, bool with_maximum, const Scratch& s) {
    const int K = static_cast<int>(problem.key_width());
    if (with_maximum) {
      gemm<T>(keys, tile.lanes, K, as_is(s.k, s.ldk), tile.qt, kLanes, s.st, kLanes, StoreMax<T>{tile.maximum});
    } else {
      gemm<T>(keys, tile.lanes, K, as_is(s.k, s.ldk), tile.qt, kLanes, s.st, kLanes, Store{});
    }
  }
  // P = 2^(S - m) in place; alpha = 2^(m_old - m); l = l alpha + column sums.
  template <int N>
  LINNET_INLINE static void exponentials(int keys, int v0, const T* old_maximum, const Tile& tile, const Scratch& s, bool) {
    using X = Vec<T>;
    using V = typename X::V;
    V m[N], l[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      m[v] = X::load(tile.maximum + v0 + v * X::W);
      l[v] = X::zero();
    }
    for (int j = 0; j < keys; ++j) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        T* const at = s.st + j * kLanes + v0 + v * X::W;
        const V p = exp2_nonpositive(X::load(at) - m[v]);
        X::store(at, p);
        l[v] = l[v] + p;
      }
    }
    end_exponentials<N>(v0, old_maximum, m, l, tile, s);
  }
  template <int N, class V, class S>
  LINNET_INLINE static void end_exponentials(int v0, const T* old_maximum, const V (&m)[N], const V (&l)[N], const auto& tile,
                                             const S& s) {
    using X = Vec<T>;
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      const int at = v0 + v * X::W;
      const V alpha = exp2_nonpositive(X::load(old_maximum + at) - m[v]);
      X::store(s.alpha + at, alpha);
      X::store(tile.sum + at, fma(X::load(tile.sum + at), alpha, l[v]));
    }
  }
  // OT = OT alpha + V^T ST
  template <class P>
  LINNET_INLINE static void values(const P& problem, const Tile& tile, int keys, const Scratch& s) {
    gemm<T>(static_cast<int>(problem.value_width()), tile.lanes, keys, transposed(s.v, s.ldv), s.st, kLanes, tile.ot, kLanes,
            LaneScaleAdd<T>{s.alpha});
  }
  LINNET_INLINE static bool values_finite(int keys, int V, const Scratch& s) { return rows_are_finite(s.v, s.ldv, keys, V); }
  LINNET_INLINE static T value(const Scratch& s, int j, int c) { return s.v[j * s.ldv + c]; }
};

// OT = OT alpha + V^T ST over the visible pairs alone.
template <class A, class P>
[[gnu::noinline]] void careful_values(const P& problem, const Sequence& seq, const typename A::Tile& tile, int64_t j0, int keys,
                                      const typename A::Scratch& s, bool biased) {
  using T = typename A::T;
  using X = Vec<T>;
  using V = typename X::V;
  for (int c = 0; c < problem.value_width(); ++c) {
    for (int v = 0; v < tile.lanes; v += X::W) {
      V sum = X::zero();
      for (int j = 0; j < keys; ++j) {
        auto seen = span_mask<T>(visible_lanes(problem.mask, seq, problem.group(), tile, j0 + j), v);
        if (biased) seen = seen & ~eq(X::load(s.bias + j * kLanes + v), X::broadcast(-kInfinity<T>));
        const V next = fma(X::broadcast(A::value(s, j, c)), X::load(s.st + j * kLanes + v), sum);
        sum = select(seen, next, sum);
      }
      T* const o = tile.ot + c * kLanes + v;
      X::store(o, fma(X::load(s.alpha + v), X::load(o), sum));
    }
  }
}

// One tile of queries meets one tile of keys that stands in the scratch. finite: 1 the values are finite, 0 not, -1 unknown
// yet.
template <class A, class P>
LINNET_INLINE void forward_step(const P& problem, const Sequence& seq, int64_t head, const typename A::Tile& tile, Cover cover,
                                int64_t j0, int keys, const typename A::Scratch& s, int& finite) {
  using T = typename A::T;
  using X = Vec<T>;
  const bool biased = problem.bias.given(), masked = cover == Cover::some, changed = biased || masked || problem.softcap > 0;
  T old_maximum[kLanes];
  for (int v = 0; v < tile.lanes; v += X::W) X::store(old_maximum + v, X::load(tile.maximum + v));
  A::scores(problem, tile, keys, !changed, s);
  if (biased) problem.load_bias(seq, head, j0, keys, tile.r0, tile.rows, s.bias);
  if (changed) finish_logits(problem, seq, tile, j0, keys, masked, s.st, biased ? s.bias : nullptr);
  if ((biased || masked) && finite < 0) finite = A::values_finite(keys, static_cast<int>(problem.value_width()), s) ? 1 : 0;
  const bool careful = (biased || masked) && finite == 0;
  int v = 0;
  for (; v + 4 * X::W <= tile.lanes; v += 4 * X::W) A::template exponentials<4>(keys, v, old_maximum, tile, s, careful);
  for (; v < tile.lanes; v += X::W) A::template exponentials<1>(keys, v, old_maximum, tile, s, careful);
  if (careful) {
    careful_values<A>(problem, seq, tile, j0, keys, s, biased);
  } else {
    A::values(problem, tile, keys, s);
  }
}

template <class A, class P>
typename A::Tile begin_tile(const P& problem, const Sequence& seq, int64_t head, int64_t r0, const typename A::Scratch& s,
                            int slot) {
  using T = typename A::T;
  const int64_t G = problem.group(), K = problem.key_width(), V = problem.value_width();
  typename A::Tile tile;
  tile.r0 = r0;
  tile.rows = static_cast<int>(smaller(kLanes, seq.tq * G - r0));
  tile.lanes = static_cast<int>(round_up<T>(tile.rows));
  tile.t0 = r0 / G + seq.shift();
  tile.t1 = (r0 + tile.rows - 1) / G + seq.shift();
  T* const base = s.tiles + slot * (A::query_size(K) + (V + 2) * kLanes);
  tile.qt = reinterpret_cast<typename A::Query*>(base);
  tile.ot = base + A::query_size(K);
  tile.maximum = tile.ot + V * kLanes;
  tile.sum = tile.maximum + kLanes;
  A::load_queries(problem, seq, head, tile, s);
  for (int64_t i = 0; i < V * kLanes; ++i) tile.ot[i] = 0;
  for (int i = 0; i < kLanes; ++i) {
    tile.maximum[i] = kLowest<T>;  // finite, so that a lane that sees nothing keeps l = 0 without a NaN
    tile.sum[i] = 0;
  }
  return tile;
}

inline constexpr int kMaxTiles = 8;  // query tiles of one task

// Tiles of rows from r0 on over keys [key_begin, key_end); the caller finishes the tiles.
template <class A, class P>
int forward_block(const P& problem, const Sequence& seq, int64_t head, int64_t r0, int tile_count, int64_t key_begin,
                  int64_t key_end, const typename A::Scratch& s, typename A::Tile (&tiles)[kMaxTiles]) {
  const int64_t rows = seq.tq * problem.group();
  int count = 0;
  for (; count < tile_count && r0 + count * kLanes < rows; ++count) {
    tiles[count] = begin_tile<A>(problem, seq, head, r0 + count * kLanes, s, count);
  }
  const Mask::Keys reach = problem.mask.reach(tiles[0].t0, tiles[count - 1].t1, seq.n);
  for (int64_t j0 = key_begin; j0 < key_end; j0 += kKeys) {
    if (j0 >= reach.rest.end && j0 >= reach.first.end) break;
    if (j0 >= reach.first.end && j0 + kKeys <= reach.rest.begin) {
      j0 = key_begin + (reach.rest.begin - key_begin) / kKeys * kKeys;
      if (j0 >= key_end) break;
    }
    const int keys = static_cast<int>(smaller(kKeys, key_end - j0));
    int finite = -1;
    bool loaded = false;
    for (int i = 0; i < count; ++i) {
      const Cover cover = problem.mask.cover(tiles[i].t0, tiles[i].t1, j0, j0 + keys - 1);
      if (cover == Cover::none) continue;
      if (!loaded) A::load_tile(problem, seq, head, j0, keys, s);
      loaded = true;
      forward_step<A>(problem, seq, head, tiles[i], cover, j0, keys, s, finite);
    }
  }
  return count;
}

}  // namespace linnet::LINNET_ISA
