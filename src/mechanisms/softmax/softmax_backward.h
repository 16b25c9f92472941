// The backward of softmax: keys in the lanes, so that P and dS need no reductions.
//
//   for each tile of 64 keys (KT, VT transposed once), for each tile of 64 queries:
//     S = Q KT,  dP = dO VT,  P = 2^(S - lse2),  dS = P (dP - delta)
//     dV += P^T dO,  dK += dS^T Q      the transposed operand is the broadcast one
//     dQ += dS K                       rows of the head, key tiles in ascending order
//
// 5 products per (sequence, key head). With fewer of these than threads two passes of their own are made instead, one over key
// blocks for dK and dV, one over query blocks for dQ: 7 products, the same sums in the same order, the same bits.
//
// As in the forward, products over pairs that the mask cuts are redone pair by visible pair when an operand holds NaN or
// infinity. The gradient of the bias has a pass of its own: each of its tiles is one task, which sums what is broadcast in
// order.
//
// A is the arithmetic: DirectBackward<T> below, or PairsBackward (softmax_pairs.h).
#pragma once

#include "softmax_forward.h"

namespace linnet::LINNET_ISA {

inline constexpr int kMaxBlock = 4;  // key tiles of a block

// Per row (b, h, i), at ((b H + h) Tq + i).
template <class T>
struct RowData {
  T *lse2, *delta;
  int64_t H, Tq;
  LINNET_INLINE int64_t at(int64_t b, int64_t h, int64_t i) const { return (b * H + h) * Tq + i; }
};

// Rows of queries of one head: tokens i0 .. of head h.
struct QueryRows {
  int64_t h, i0;
  int rows;
  LINNET_INLINE int64_t offset(const View& x, const Sequence& seq) const {
    return seq.b * x.stride[0] + (seq.q0 + i0) * x.stride[1] + h * x.stride[2];
  }
};

// Key tiles of a block share a copy of the queries; they stay within a third of L2.
LINNET_INLINE int tiles_per_block(int64_t tile_bytes) {
  return static_cast<int>(larger(1, smaller(kMaxBlock, 327680 / larger(1, tile_bytes))));
}

template <class T>
void load_bias_rows(const Problem& p, const Sequence& seq, const QueryRows& rows, int64_t j0, int keys, T* dst) {
  const View& b = p.bias;
  const int64_t offset =
      seq.b * b.stride[0] + rows.h * b.stride[1] + (seq.q0 + rows.i0) * b.stride[2] + (seq.k0 + j0) * b.stride[3];
  if (b.stride[3] == 1) {
    with_type<T>(b, offset, [&](auto* x) { load_tile<T>(x, b.stride[2], rows.rows, keys, dst, kKeys); });
    return;
  }
  for (int r = 0; r < rows.rows; ++r) {
    for (int j = 0; j < round_up<T>(keys); ++j) {
      dst[r * kKeys + j] = j < keys ? element_at<T>(b, offset + r * b.stride[2] + j * b.stride[3]) : T(0);
    }
  }
}

// Which keys of the tile (as lanes) the query at position t sees: the two spans' masks joined.
template <class T>
LINNET_INLINE typename Vec<T>::M key_mask(const Mask::Keys& seen, int64_t j0, int v) {
  const auto lanes = [&](Span span) {
    return Span{larger(0, smaller(span.begin - j0, kKeys)), larger(0, smaller(span.end - j0, kKeys))};
  };
  return span_mask<T>(lanes(seen.first), v) | span_mask<T>(lanes(seen.rest), v);
}

// S and dP of a tile become P and dS, two rows at a time: store(row, lane, P, dS, P of row + 1, dS of row + 1). With `slopes`
// dS is multiplied by the slope of the soft cap (not for the gradient of the bias).
template <class T, class Tile, class F>
LINNET_INLINE void weights(const Problem& p, const Sequence& seq, const QueryRows& rows, const Tile& tile, bool masked,
                           bool slopes, const T* lse2, const T* delta, const T* s, const T* ds, const T* bias, const F& store) {
  using X = Vec<T>;
  using V = typename X::V;
  const bool capped = p.softcap > 0;
  if (!masked && !capped && bias == nullptr) {
    for (int r = 0; r < rows.rows; r += 2) {
      const bool two = r + 1 < rows.rows;
      const V shift = X::broadcast(lse2[r]), mean = X::broadcast(delta[r]);
      const V shift1 = X::broadcast(two ? lse2[r + 1] : T(0)), mean1 = X::broadcast(two ? delta[r + 1] : T(0));
      const T *const s0 = s + r * kKeys, *const d0 = ds + r * kKeys;
      for (int v = 0; v < tile.lanes; v += X::W) {
        const V w = exp2_nonpositive(X::load(s0 + v) - shift), g = w * (X::load(d0 + v) - mean);
        V w1 = X::zero(), g1 = X::zero();
        if (two) {
          w1 = exp2_nonpositive(X::load(s0 + kKeys + v) - shift1);
          g1 = w1 * (X::load(d0 + kKeys + v) - mean1);
        }
        store(r, v, w, g, w1, g1);
      }
    }
    return;
  }
  const V cap = X::broadcast(static_cast<T>(p.softcap * kLog2e<double>)), hidden = X::broadcast(-kInfinity<T>);
  for (int r = 0; r < rows.rows; r += 2) {
    const Mask::Keys seen[2] = {p.mask.keys(rows.i0 + r + seq.shift(), seq.n),
                                p.mask.keys(rows.i0 + r + 1 + seq.shift(), seq.n)};
    for (int v = 0; v < tile.lanes; v += X::W) {
      V w[2] = {}, g[2] = {};
      for (int e = 0; e < 2 && r + e < rows.rows; ++e) {
        const int64_t at = (r + e) * kKeys + v;
        V x = X::load(s + at), slope = X::broadcast(1);
        if (capped) {
          // 1 - tanh(x)^2 = 4 y / (1 + y)^2, y = exp(-2 |x|): keeps its digits where the cap saturates
          const V y = exp(X::broadcast(-2) * abs(x)), more = slope + y;
          slope = X::broadcast(4) * y / (more * more);
          x = cap * tanh(x);
        }
        auto see = masked ? key_mask<T>(seen[e], tile.j0, v) : X::prefix(tile.keys - v);
        if (bias != nullptr) {
          const V b = X::load(bias + at);
          see = see & ~eq(b, hidden);
          x = fma(b, X::broadcast(kLog2e<T>), x);
        }
        w[e] = select(see, exp2_nonpositive(x - X::broadcast(lse2[r + e])), X::zero());
        V gradient = w[e] * (X::load(ds + at) - X::broadcast(delta[r + e]));
        if (capped && slopes) gradient = gradient * slope;
        g[e] = select(see, gradient, X::zero());
      }
      store(r, v, w[0], g[0], w[1], g[1]);
    }
  }
}
// In place.
template <class T, class Tile>
[[gnu::noinline]] void weights_in_place(const Problem& p, const Sequence& seq, const QueryRows& rows, const Tile& tile,
                                        bool masked, bool slopes, const T* lse2, const T* delta, T* s, T* ds, const T* bias) {
  using X = Vec<T>;
  weights(p, seq, rows, tile, masked, slopes, lse2, delta, s, ds, bias,
          [&](int r, int v, typename X::V w, typename X::V g, typename X::V w1, typename X::V g1) {
            X::store(s + r * kKeys + v, w);
            X::store(ds + r * kKeys + v, g);
            if (r + 1 >= rows.rows) return;
            X::store(s + (r + 1) * kKeys + v, w1);
            X::store(ds + (r + 1) * kKeys + v, g1);
          });
}

// dst[j] += weight[i][j] x(i, .) over visible pairs (by_key), or dst[i] += weight[i][j] x(j, .).
template <class T, class Tile, class F>
[[gnu::noinline]] void careful_product(const Problem& p, const Sequence& seq, const QueryRows& rows, const Tile& tile,
                                       const T* weight, const T* bias, bool by_key, int width, const F& x, T* dst, int64_t ld) {
  for (int r = 0; r < rows.rows; ++r) {
    const Mask::Keys seen = p.mask.keys(rows.i0 + r + seq.shift(), seq.n);
    for (int j = 0; j < tile.keys; ++j) {
      const int64_t at = tile.j0 + j;
      const bool visible = (at >= seen.first.begin && at < seen.first.end) || (at >= seen.rest.begin && at < seen.rest.end);
      if (!visible || (bias != nullptr && bias[r * kKeys + j] == -kInfinity<T>)) continue;
      T* const to = dst + (by_key ? j : r) * ld;
      for (int c = 0; c < width; ++c) to[c] += weight[r * kKeys + j] * x(by_key ? r : j, c);
    }
  }
}

// All products in T.
template <class Element>
struct DirectBackward {
  using T = Element;
  struct Scratch {
    T *q, *dout, *s, *ds, *bias, *key_tiles;
    int64_t ldk, ldv, key_tile_size;
    int block;
    LINNET_INLINE Scratch(Arena& arena, const Problem& p) {
      const int64_t K = p.key_width(), V = p.value_width();
      ldk = round_up<T>(K) + Vec<T>::W;
      ldv = round_up<T>(V) + Vec<T>::W;
      q = arena.take<T>(kLanes * ldk);
      dout = arena.take<T>(kLanes * ldv);
      s = arena.take<T>(kLanes * kKeys);
      ds = arena.take<T>(kLanes * kKeys);
      bias = arena.take<T>(p.bias.given() ? kLanes * kKeys : 0);
      key_tile_size = 2 * kKeys * ldk + kKeys * ldv + (K + V) * kLanes;
      block = tiles_per_block(key_tile_size * static_cast<int64_t>(sizeof(T)));
      key_tiles = arena.take<T>(key_tile_size * block);
    }
  };
  struct Tile {
    int64_t j0;
    int keys, lanes, finite;   // finite: of the keys; 1, 0, or -1 unknown
    T *dk, *dv, *k, *kt, *vt;  // [kKeys, ldk], [kKeys, ldv], [kKeys, ldk], [K, kLanes], [V, kLanes]
  };

  static Tile load_keys(const Problem& p, const Sequence& seq, int64_t head, int64_t j0, int slot, const Scratch& s) {
    const int K = static_cast<int>(p.key_width()), V = static_cast<int>(p.value_width());
    Tile tile{j0, static_cast<int>(smaller(kKeys, seq.n - j0)), 0, -1, s.key_tiles + slot * s.key_tile_size};
    tile.lanes = static_cast<int>(round_up<T>(tile.keys));
    tile.dv = tile.dk + kKeys * s.ldk;
    tile.k = tile.dv + kKeys * s.ldv;
    tile.kt = tile.k + kKeys * s.ldk;
    tile.vt = tile.kt + K * kLanes;
    p.load_values(seq, head, j0, tile.keys, tile.dv, s.ldv);  // dv is cleared below
    load_tile_transposed<T>(tile.dv, s.ldv, tile.keys, V, tile.vt, kLanes);
    p.load_keys(seq, head, j0, tile.keys, tile.k, s.ldk);
    load_tile_transposed<T>(tile.k, s.ldk, tile.keys, K, tile.kt, kLanes, p.query_factor<T>());
    for (int64_t i = 0; i < kKeys * (s.ldk + s.ldv); ++i) tile.dk[i] = 0;
    return tile;
  }
  static void load_queries(const Problem& p, const View& dout, const Sequence& seq, const QueryRows& rows, const Scratch& s) {
    const int K = static_cast<int>(p.key_width()), V = static_cast<int>(p.value_width());
    with_type<T>(p.q, rows.offset(p.q, seq), [&](auto* x) { load_tile<T>(x, p.q.stride[1], rows.rows, K, s.q, s.ldk); });
    if (dout.given()) {
      with_type<T>(dout, rows.offset(dout, seq),
                   [&](auto* x) { load_tile<T>(x, dout.stride[1], rows.rows, V, s.dout, s.ldv); });
    } else {
      for (int64_t i = 0; i < rows.rows * s.ldv; ++i) s.dout[i] = 0;
    }
  }
  // S = Q KT, dP = dO VT
  LINNET_INLINE static void scores(const Problem& p, const QueryRows& rows, const Tile& tile, const Scratch& s) {
    const int K = static_cast<int>(p.key_width()), V = static_cast<int>(p.value_width());
    gemm<T>(rows.rows, tile.lanes, K, as_is(s.q, s.ldk), tile.kt, kLanes, s.s, kKeys, Store{});
    gemm<T>(rows.rows, tile.lanes, V, as_is(s.dout, s.ldv), tile.vt, kLanes, s.ds, kKeys, Store{});
  }
  LINNET_INLINE static void make_weights(const Problem& p, const Sequence& seq, const QueryRows& rows, const Tile& tile,
                                         bool masked, const T* lse2, const T* delta, const Scratch& s, const T* bias, bool) {
    weights_in_place(p, seq, rows, tile, masked, true, lse2, delta, s.s, s.ds, bias);
  }
  LINNET_INLINE static void add_keys(const Problem& p, const QueryRows& rows, const Tile& tile, const Scratch& s) {
    const int K = static_cast<int>(p.key_width()), V = static_cast<int>(p.value_width());
    gemm<T>(tile.keys, V, rows.rows, transposed(s.s, kKeys), s.dout, s.ldv, tile.dv, s.ldv, Add{});
    gemm<T>(tile.keys, K, rows.rows, transposed(s.ds, kKeys), s.q, s.ldk, tile.dk, s.ldk, Add{});
  }
  LINNET_INLINE static void add_queries(const Problem& p, const QueryRows& rows, const Tile& tile, const Scratch& s, T* dq) {
    gemm<T>(rows.rows, static_cast<int>(p.key_width()), tile.keys, as_is(s.ds, kKeys), tile.k, s.ldk, dq, s.ldk, Add{});
  }
  static bool queries_finite(const Problem& p, int rows, const Scratch& s) {
    return rows_are_finite(s.q, s.ldk, rows, static_cast<int>(p.key_width())) &&
           rows_are_finite(s.dout, s.ldv, rows, static_cast<int>(p.value_width()));
  }
  static bool keys_finite(const Problem& p, const Tile& tile, const Scratch& s) {
    return rows_are_finite(tile.k, s.ldk, tile.keys, static_cast<int>(p.key_width()));
  }
  LINNET_INLINE static T query_at(const Scratch& s, int r, int c) { return s.q[r * s.ldk + c]; }
  LINNET_INLINE static T dout_at(const Scratch& s, int r, int c) { return s.dout[r * s.ldv + c]; }
  LINNET_INLINE static T key_at(const Scratch& s, const Tile& tile, int j, int c) { return tile.k[j * s.ldk + c]; }
};

struct Wanted {
  bool keys, queries;  // dK and dV; dQ
};

// Key tiles from key_begin to key_end outside, the tokens [i_begin, i_end) of heads [h_begin, h_end) inside. dq: rows of these
// tokens, head by head, ldk apart.
template <class A>
void backward_walk(const Problem& p, const Gradients& g, const RowData<typename A::T>& data, const Sequence& seq, int64_t head,
                   int64_t key_begin, int64_t key_end, int64_t h_begin, int64_t h_end, int64_t i_begin, int64_t i_end,
                   Wanted want, const typename A::Scratch& s, typename A::T* dq) {
  using T = typename A::T;
  const int K = static_cast<int>(p.key_width()), V = static_cast<int>(p.value_width());
  const bool biased = p.bias.given();
  for (int64_t block = key_begin; block < key_end; block += kKeys * s.block) {
    typename A::Tile tiles[kMaxBlock];
    int count = 0;
    for (; count < s.block && block + count * kKeys < key_end; ++count) {
      tiles[count] = A::load_keys(p, seq, head, block + count * kKeys, count, s);
    }
    const int64_t block_end = smaller(key_end, block + count * kKeys);
    for (int64_t h = h_begin; h < h_end; ++h) {
      for (int64_t i0 = i_begin; i0 < i_end; i0 += kLanes) {
        const QueryRows rows{h, i0, static_cast<int>(smaller(kLanes, i_end - i0))};
        const int64_t t0 = i0 + seq.shift(), t1 = t0 + rows.rows - 1;
        if (p.mask.cover(t0, t1, block, block_end - 1) == Cover::none) continue;
        A::load_queries(p, g.dout, seq, rows, s);
        int finite = -1;  // of q and dout
        const int64_t row = data.at(seq.b, h, seq.q0 + i0);
        T* const dq_rows = dq + ((h - h_begin) * (i_end - i_begin) + i0 - i_begin) * s.ldk;
        for (int n = 0; n < count; ++n) {
          typename A::Tile& tile = tiles[n];
          const Cover cover = p.mask.cover(t0, t1, tile.j0, tile.j0 + tile.keys - 1);
          if (cover == Cover::none) continue;
          const bool masked = cover == Cover::some, cut = masked || biased;
          A::scores(p, rows, tile, s);
          if (biased) load_bias_rows(p, seq, rows, tile.j0, tile.keys, s.bias);
          const T* const bias = biased ? s.bias : nullptr;
          if (cut && want.keys && finite < 0) finite = A::queries_finite(p, rows.rows, s) ? 1 : 0;
          if (cut && want.queries && tile.finite < 0) tile.finite = A::keys_finite(p, tile, s) ? 1 : 0;
          const bool careful_keys = cut && want.keys && finite == 0, careful_queries = cut && want.queries && tile.finite == 0;
          A::make_weights(p, seq, rows, tile, masked, data.lse2 + row, data.delta + row, s, bias,
                          careful_keys || careful_queries);
          if (careful_keys) {
            careful_product(
                p, seq, rows, tile, s.s, bias, true, V, [&](int r, int c) { return A::dout_at(s, r, c); }, tile.dv, s.ldv);
            careful_product(
                p, seq, rows, tile, s.ds, bias, true, K, [&](int r, int c) { return A::query_at(s, r, c); }, tile.dk, s.ldk);
          } else if (want.keys) {
            A::add_keys(p, rows, tile, s);
          }
          if (careful_queries) {
            careful_product(
                p, seq, rows, tile, s.ds, bias, false, K, [&](int j, int c) { return A::key_at(s, tile, j, c); }, dq_rows,
                s.ldk);
          } else if (want.queries) {
            A::add_queries(p, rows, tile, s, dq_rows);
          }
        }
      }
    }
    if (!want.keys) continue;
    T factors[kKeys];
    for (T& x : factors) x = static_cast<T>(p.scale);
    for (int n = 0; n < count; ++n) {
      const auto& tile = tiles[n];
      const auto at = [&](const View& x) {
        return seq.b * x.stride[0] + (seq.k0 + tile.j0) * x.stride[1] + head * x.stride[2];
      };
      if (g.dk.given()) {
        with_type<T>(g.dk, at(g.dk), [&](auto* x) { store_tile(tile.dk, s.ldk, tile.keys, K, x, g.dk.stride[1], factors); });
      }
      if (g.dv.given()) {
        with_type<T>(g.dv, at(g.dv), [&](auto* x) { store_tile(tile.dv, s.ldv, tile.keys, V, x, g.dv.stride[1]); });
      }
    }
  }
}

template <class T>
void store_dq(const Problem& p, const Gradients& g, const Sequence& seq, int64_t h, int64_t i0, int64_t count, const T* dq,
              int64_t ld) {
  T factors[kLanes];
  for (T& x : factors) x = static_cast<T>(p.scale);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t at = seq.b * g.dq.stride[0] + (seq.q0 + i0 + i) * g.dq.stride[1] + h * g.dq.stride[2];
    with_type<T>(g.dq, at, [&](auto* x) {
      store_tile(dq + i * ld, ld, static_cast<int>(smaller(kLanes, count - i)), static_cast<int>(p.key_width()), x,
                 g.dq.stride[1], factors);
    });
  }
}

// Zeros in rows [begin, end) of a [B, T, H, D] tensor.
LINNET_INLINE void clear_rows(const View& x, int64_t b, int64_t begin, int64_t end, int64_t h) {
  const int64_t bytes = dtype_size(x.dtype);
  for (int64_t i = begin; i < end; ++i) {
    __builtin_memset(static_cast<char*>(x.data) + (b * x.stride[0] + i * x.stride[1] + h * x.stride[2]) * bytes, 0,
                     static_cast<size_t>(x.size[3] * bytes));
  }
}

template <class A>
struct BackwardMemory {
  using T = typename A::T;
  RowData<T> data;
  double* sink_parts;  // [sequences, H]
  int64_t* first_task;
  char* worker;
  int64_t worker_bytes, longest_queries;
  bool split;  // two passes

  LINNET_INLINE BackwardMemory(Arena& arena, const Problem& p, int workers) {
    const int64_t B = p.q.size[0], Tq = p.q.size[1], H = p.q.size[2], N = p.sequences();
    data = {arena.take<T>(B * Tq * H), arena.take<T>(B * Tq * H), H, Tq};
    sink_parts = arena.take<double>(p.sinks.given() ? N * H : 0);
    first_task = arena.take<int64_t>(2 * N + 2);
    longest_queries = 0;
    for (int64_t s = 0; s < N; ++s) longest_queries = larger(longest_queries, p.sequence(s).tq);
    const int64_t units = N * p.key_heads();
    split = divide_up(units, workers) * 5 * workers > units * 7;
    Arena one;
    const typename A::Scratch scratch(one, p);
    const int64_t rows = split ? kLanes * kMaxBlock : p.group() * longest_queries;
    one.take<T>(rows * scratch.ldk);
    worker_bytes = larger(one.used(), (2 * p.value_width() * kLanes * static_cast<int64_t>(sizeof(T)) + 127) / 128 * 128);
    worker = arena.take<char>(worker_bytes * workers);
  }
};

// delta_i = dout_i . out_i - dlse_i (out not given: -dlse_i); lse in base 2, 0 for rows that see nothing; each sequence's part
// of dsinks. The sum runs over the channels in the order of the product dP = dO VT: where one key has all the weight, out = v
// and dP - delta is exactly 0.
template <class A>
void row_data(const Problem& p, const Gradients& g, const BackwardMemory<A>& memory, const Launch& launch, double flops) {
  using T = typename A::T;
  using X = Vec<T>;
  const int64_t H = p.q.size[2];
  const int V = static_cast<int>(p.value_width());
  run_tasks(launch, p.sequences() * H, flops, [&](int64_t task, int worker) {
    const int64_t h = task % H;
    const Sequence seq = p.sequence(task / H);
    const T z = p.sinks.given() ? element_at<T>(p.sinks, h * p.sinks.stride[0]) : -kInfinity<T>;
    double sink_sum = 0;
    for (int64_t i0 = 0; i0 < seq.tq; i0 += kLanes) {
      const QueryRows rows{h, i0, static_cast<int>(smaller(kLanes, seq.tq - i0))};
      T delta[kLanes] = {};
      if (g.dout.given() && g.out.given()) {
        T* const dt = reinterpret_cast<T*>(memory.worker + worker * memory.worker_bytes);
        T* const ot = dt + V * kLanes;
        with_type<T>(g.dout, rows.offset(g.dout, seq),
                     [&](auto* x) { load_tile_transposed<T>(x, g.dout.stride[1], rows.rows, V, dt, kLanes); });
        with_type<T>(g.out, rows.offset(g.out, seq),
                     [&](auto* x) { load_tile_transposed<T>(x, g.out.stride[1], rows.rows, V, ot, kLanes); });
        for (int v = 0; v < rows.rows; v += X::W) {
          typename X::V acc = X::zero();
          for (int c = 0; c < V; ++c) acc = fma(X::load(dt + c * kLanes + v), X::load(ot + c * kLanes + v), acc);
          X::store(delta + v, acc);
        }
      }
      for (int r = 0; r < rows.rows; ++r) {
        const QueryRows one{h, i0 + r, 1};
        if (g.dlse.given()) delta[r] -= static_cast<const T*>(g.dlse.data)[one.offset(g.dlse, seq)];
        const T lse = static_cast<const T*>(g.lse.data)[one.offset(g.lse, seq)];
        const int64_t row = memory.data.at(seq.b, h, seq.q0 + i0 + r);
        memory.data.delta[row] = delta[r];
        memory.data.lse2[row] = lse == -kInfinity<T> ? T(0) : lse * kLog2e<T>;
        if (z == -kInfinity<T>) continue;
        const T weight = exp2_nonpositive(X::broadcast((z - lse) * kLog2e<T>))[0];
        sink_sum -= static_cast<double>(weight) * static_cast<double>(delta[r]);
      }
    }
    if (p.sinks.given()) memory.sink_parts[task] = sink_sum;
  });
  if (!g.dsinks.given()) return;
  for (int64_t h = 0; h < H; ++h) {
    double total = 0;
    for (int64_t s = 0; s < p.sequences(); ++s) total += memory.sink_parts[s * H + h];
    set_element<T>(g.dsinks, h * g.dsinks.stride[0], static_cast<T>(total));
  }
}

// The gradient of the bias. Each of its tiles is one task, which recomputes S and dP of all pairs that share it.
template <class A>
void bias_gradient(const Problem& p, const Gradients& g, const BackwardMemory<A>& memory, const Launch& launch, double flops) {
  using T = typename A::T;
  using X = Vec<T>;
  const View& d = g.dbias;
  const int64_t N = p.sequences(), H = p.q.size[2], G = p.group();
  const bool packed = p.cu_q.given(), one_query = d.size[2] == 1, one_key = d.size[3] == 1;
  const bool one_sequence = packed ? one_query && one_key : d.size[0] == 1;
  const bool one_head = d.size[1] == 1;
  int64_t longest_keys = 0;
  for (int64_t s = 0; s < N; ++s) longest_keys = larger(longest_keys, p.sequence(s).n);
  // What no visible pair reaches is zero.
  for (int64_t b = 0; b < d.size[0]; ++b) {
    for (int64_t h = 0; h < d.size[1]; ++h) {
      for (int64_t i = 0; i < d.size[2]; ++i) {
        for (int64_t j = 0; j < d.size[3]; ++j) {
          set_element<T>(d, b * d.stride[0] + h * d.stride[1] + i * d.stride[2] + j * d.stride[3], T(0));
        }
      }
    }
  }
  const int64_t query_tiles = divide_up(memory.longest_queries, kLanes), key_tiles = divide_up(longest_keys, kKeys);
  const int64_t q_tasks = one_query ? 1 : query_tiles, k_tasks = one_key ? 1 : key_tiles;
  const int64_t tasks = (one_sequence ? 1 : N) * d.size[1] * q_tasks * k_tasks;
  if (query_tiles == 0 || key_tiles == 0) return;
  run_tasks(launch, tasks, flops, [&](int64_t task, int worker) {
    Arena own(memory.worker + worker * memory.worker_bytes);
    const typename A::Scratch s(own, p);

    const int64_t k_task = task % k_tasks, q_task = task / k_tasks % q_tasks;
    const int64_t h_task = task / k_tasks / q_tasks % d.size[1], s_task = task / k_tasks / q_tasks / d.size[1];
    T sums[kLanes][kKeys];
    for (auto& row : sums) {
      for (T& x : row) x = 0;
    }
    int rows_used = 0, keys_used = 0;
    const int64_t s_end = one_sequence ? N : s_task + 1, h_end = one_head ? H : h_task + 1;
    for (int64_t e = one_sequence ? 0 : s_task; e < s_end; ++e) {
      const Sequence seq = p.sequence(e);
      for (int64_t h = one_head ? 0 : h_task; h < h_end; ++h) {
        const int64_t j_end = one_key ? seq.n : smaller(seq.n, (k_task + 1) * kKeys);
        for (int64_t j0 = one_key ? 0 : k_task * kKeys; j0 < j_end; j0 += kKeys) {
          const typename A::Tile tile = A::load_keys(p, seq, h / G, j0, 0, s);
          const int64_t i_end = one_query ? seq.tq : smaller(seq.tq, (q_task + 1) * kLanes);
          for (int64_t i0 = one_query ? 0 : q_task * kLanes; i0 < i_end; i0 += kLanes) {
            const QueryRows rows{h, i0, static_cast<int>(smaller(kLanes, i_end - i0))};
            const int64_t t0 = i0 + seq.shift(), t1 = t0 + rows.rows - 1;
            const Cover cover = p.mask.cover(t0, t1, j0, j0 + tile.keys - 1);
            if (cover == Cover::none) continue;
            A::load_queries(p, g.dout, seq, rows, s);
            A::scores(p, rows, tile, s);
            load_bias_rows(p, seq, rows, j0, tile.keys, s.bias);
            const int64_t row = memory.data.at(seq.b, h, seq.q0 + i0);
            weights_in_place(p, seq, rows, tile, cover == Cover::some, false, memory.data.lse2 + row, memory.data.delta + row,
                             s.s, s.ds, s.bias);
            for (int r = 0; r < rows.rows; ++r) {
              T* const to = sums[one_query ? 0 : r];
              for (int v = 0; v < tile.lanes; v += X::W) {
                X::store(to + v, X::load(to + v) + select(X::prefix(tile.keys - v), X::load(s.ds + r * kKeys + v), X::zero()));
              }
            }
            rows_used = one_query || rows.rows < rows_used ? rows_used : rows.rows;
            keys_used = tile.keys < keys_used ? keys_used : tile.keys;
          }
        }
      }
    }
    if (keys_used == 0) return;
    if (one_query) rows_used = 1;
    const Sequence seq = p.sequence(one_sequence ? 0 : s_task);
    const int64_t base = (d.size[0] == 1 ? 0 : seq.b) * d.stride[0] + h_task * d.stride[1] +
                         (one_query ? 0 : seq.q0 + q_task * kLanes) * d.stride[2] +
                         (one_key ? 0 : seq.k0 + k_task * kKeys) * d.stride[3];
    for (int r = 0; r < rows_used; ++r) {
      if (one_key) {
        T row_sum = 0;
        for (int j = 0; j < kKeys; ++j) row_sum += sums[r][j];
        set_element<T>(d, base + r * d.stride[2], row_sum);
        continue;
      }
      for (int j = 0; j < keys_used; ++j) set_element<T>(d, base + r * d.stride[2] + j * d.stride[3], sums[r][j]);
    }
  });
}

template <class A>
void backward(const Problem& p, const Gradients& g, const Launch& launch) {
  using T = typename A::T;
  Arena arena(launch.workspace);
  const BackwardMemory<A> memory(arena, p, launch.workers);
  const int64_t N = p.sequences(), heads = p.key_heads(), G = p.group(), H = p.q.size[2];
  double pairs = 0;
  for (int64_t s = 0; s < N; ++s) {
    const Sequence seq = p.sequence(s);
    pairs += static_cast<double>(seq.tq) * static_cast<double>(seq.n);
  }
  const double flops = pairs * 2 * static_cast<double>((3 * p.key_width() + 2 * p.value_width()) * H);
  row_data<A>(p, g, memory, launch, flops);
  if (p.lengths.given()) {  // keys behind the length
    for (int64_t b = 0; b < N; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        if (g.dk.given()) clear_rows(g.dk, b, p.sequence(b).n, g.dk.size[1], h);
        if (g.dv.given()) clear_rows(g.dv, b, p.sequence(b).n, g.dv.size[1], h);
      }
    }
  }
  const Wanted want{g.dk.given() || g.dv.given(), g.dq.given()};
  if (!memory.split) {
    run_tasks(launch, want.keys || want.queries ? N * heads : 0, flops, [&](int64_t task, int worker) {
      const Sequence seq = p.sequence(task / heads);
      const int64_t head = task % heads;
      Arena own(memory.worker + worker * memory.worker_bytes);
      const typename A::Scratch scratch(own, p);
      T* const dq = own.take<T>(G * memory.longest_queries * scratch.ldk);
      for (int64_t i = 0; i < G * seq.tq * scratch.ldk && want.queries; ++i) dq[i] = 0;
      backward_walk<A>(p, g, memory.data, seq, head, 0, seq.n, head * G, (head + 1) * G, 0, seq.tq, want, scratch, dq);
      for (int64_t h = 0; h < G && want.queries; ++h) {
        store_dq(p, g, seq, head * G + h, 0, seq.tq, dq + h * seq.tq * scratch.ldk, scratch.ldk);
      }
    });
  } else {
    Arena probe;
    const int64_t key_block = kKeys * typename A::Scratch(probe, p).block, query_block = kLanes * kMaxBlock;
    int64_t *const key_first = memory.first_task, *const query_first = memory.first_task + N + 1;
    key_first[0] = query_first[0] = 0;
    for (int64_t s = 0; s < N; ++s) {
      const Sequence seq = p.sequence(s);
      key_first[s + 1] = key_first[s] + (want.keys ? divide_up(seq.n, key_block) * heads : 0);
      query_first[s + 1] = query_first[s] + (want.queries ? divide_up(seq.tq, query_block) * H : 0);
    }
    const auto sequence_of = [&](const int64_t* first, int64_t task) {
      int64_t low = 0, high = N;
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (first[middle] <= task ? low : high) = middle;
      }
      return low;
    };
    run_tasks(launch, key_first[N] + query_first[N], flops, [&](int64_t task, int worker) {
      Arena own(memory.worker + worker * memory.worker_bytes);
      const typename A::Scratch scratch(own, p);
      T* const dq = own.take<T>(query_block * scratch.ldk);
      if (task < key_first[N]) {
        const int64_t s = sequence_of(key_first, task), local = task - key_first[s], begin = local / heads * key_block;
        const Sequence seq = p.sequence(s);
        const int64_t head = local % heads;
        backward_walk<A>(p, g, memory.data, seq, head, begin, smaller(seq.n, begin + key_block), head * G, (head + 1) * G, 0,
                         seq.tq, {true, false}, scratch, dq);
        return;
      }
      task -= key_first[N];
      const int64_t s = sequence_of(query_first, task), local = task - query_first[s];
      const Sequence seq = p.sequence(s);
      const int64_t h = local % H, begin = (divide_up(seq.tq, query_block) - 1 - local / H) * query_block;
      const int64_t end = smaller(seq.tq, begin + query_block);
      for (int64_t i = 0; i < query_block * scratch.ldk; ++i) dq[i] = 0;
      backward_walk<A>(p, g, memory.data, seq, h / G, 0, seq.n, h, h + 1, begin, end, {false, true}, scratch, dq);
      store_dq(p, g, seq, h, begin, end - begin, dq, scratch.ldk);
    });
  }
  if (g.dbias.given()) bias_gradient<A>(p, g, memory, launch, flops);
}

template <class A>
int64_t backward_workspace(const Problem& p, int workers) {
  Arena arena;
  BackwardMemory<A>(arena, p, workers);
  return arena.used();
}

}  // namespace linnet::LINNET_ISA
