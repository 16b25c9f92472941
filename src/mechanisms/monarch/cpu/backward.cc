// monarch and monarch_tiled, backward, for one instruction set.
//
// Nothing is saved; the factors are rebuilt (the forward is cheap). A unit is (batch row, head): its tiles of queries one after
// the other, since they add to the same keys. Per tile, with a, c, y (and of every step mean, lse) rebuilt by the forward's
// programs:
//   slots:   dbeta = L (dout.y - delta);  dq, da, dc, dy          blocks: dR from da, dc, dy;  dk, dv, dmean
//   and between steps  slots: dW from dmean through both softmaxes to dbeta of the step before.
// Products: 5 of rows^2 and 7 of cols^2 per slot and block after the forward's 3 of cols^2: three times the forward.
#include "programs.h"

namespace linnet::LINNET_ISA {

int64_t monarch_forward_workspace(const MonarchGrid& g, int workers);  // forward.cc

namespace {

// Gradients that pass between the programs of a unit, in the layout of MonarchUnit.
template <class T>
struct Passing {
  T *da, *dmean, *dy;  // [cols, stride, ld]
  T* dc;               // [cols, stride]
  T* dq;               // [cols, side, ldk]
  T* dkv;              // [S, ldk + ldv]
  T* delta;            // causal: [cols, side], dout.out - dlse
  Passing(Arena& arena, const MonarchGrid& g, const MonarchUnit<T>& u) {
    const int64_t cells = g.cols * u.stride;
    da = arena.take<T>(cells * u.ldk);
    dmean = arena.take<T>(cells * u.ldk);
    dy = arena.take<T>(cells * u.ldv);
    dc = arena.take<T>(cells);
    dq = arena.take<T>(g.cols * u.side * u.ldk);
    dkv = arena.take<T>(g.S * (u.ldk + u.ldv));
    delta = arena.take<T>(g.causal ? g.cols * u.side : 0);
  }
};

// dout of tokens as rows; zeros when there is none.
template <class T>
void gather_dout(const MonarchUnit<T>& u, const View& dout, const int64_t* tokens, int n, T* dst, int64_t ld) {
  if (dout.given()) return gather_tokens(u, dout, tokens, n, dst, ld);
  for (int64_t i = 0; i < n * ld; ++i) dst[i] = 0;
}

// strip = 2^(strip - lse[lane]); rows at or above the lane's limit become 0.
template <class T>
void weights(T* strip, int n, int lanes, const T* lse, const T* limit) {
  using X = Vec<T>;
  for (int i = 0; i < n; ++i) {
    for (int v = 0; v < lanes; v += X::W) {
      T* const at = strip + i * kLanes + v;
      const typename X::V p = exp2_nonpositive(X::load(at) - X::load(lse + v));
      X::store(at, select(lt(X::broadcast(static_cast<T>(i)), X::load(limit + v)), p, X::zero()));
    }
  }
}
// p = p inverse[lane]; delta[lane] += sum of p d over the rows. With `centred` d is first taken relative to its value in the
// row of the lane's largest weight (p = 1 before): where one weight is nearly 1, d - delta of its row is then no difference of
// equal numbers.
template <class T>
void normalise(T* p, T* d, int n, int lanes, const T* inverse, bool centred, T* delta) {
  using X = Vec<T>;
  for (int v = 0; v < lanes; v += X::W) {
    typename X::V total = X::load(delta + v), base = X::zero();
    for (int i = 0; centred && i < n; ++i) {
      base = select(eq(X::load(p + i * kLanes + v), X::broadcast(1)), X::load(d + i * kLanes + v), base);
    }
    for (int i = 0; i < n; ++i) {
      const int64_t at = static_cast<int64_t>(i) * kLanes + v;
      const typename X::V x = X::load(p + at) * X::load(inverse + v), y = X::load(d + at) - base;
      X::store(p + at, x);
      X::store(d + at, y);
      total = fma(x, y, total);
    }
    X::store(delta + v, total);
  }
}
// c[row] = (first ? 0 : c[row]) - sum of the strip's row
template <class T>
void subtract_row_sums(const T* strip, int n, int lanes, bool first, T* c) {
  using X = Vec<T>;
  for (int i = 0; i < n; ++i) {
    typename X::V total = X::zero();
    for (int v = 0; v < lanes; v += X::W) total = total + X::load(strip + i * kLanes + v, lanes - v);
    c[i] = (first ? T(0) : c[i]) - sum(total);
  }
}
template <class T>
void store_or_add(bool first, int m, int n, int k, Left<T> a, const T* b, int64_t ldb, T* c, int64_t ldc) {
  if (first) {
    gemm<T>(m, n, k, a, b, ldb, c, ldc, Store{});
  } else {
    gemm<T>(m, n, k, a, b, ldb, c, ldc, Add{});
  }
}
// After the last step: from dout of the queries of slot j to dq, and da, dc, dy of every block.
template <class T>
void slot_backward(const MonarchUnit<T>& u, const Passing<T>& d, const MonarchScratch<T>& s, int64_t j,
                   const MonarchGrads& grads) {
  const int K = static_cast<int>(u.g.K), V = static_cast<int>(u.g.V), P = static_cast<int>(u.P);
  const Span rows = u.token_rows(j);
  const T *const a = u.a + u.cell(j, 0) * u.ldk, *const y = u.y + u.cell(j, 0) * u.ldv;
  T *const da = d.da + u.cell(j, 0) * u.ldk, *const dy = d.dy + u.cell(j, 0) * u.ldv, *const dc = d.dc + u.cell(j, 0);
  using X = Vec<T>;
  T *const maximum = s.line[0], *const total = s.line[1], *const delta = s.line[2], *const inverse = s.line[3];
  T *const limit = s.line[4], *const own = s.line[5];
  if (u.g.causal || rows.begin >= rows.end) {  // lanes of the causal form leave later blocks alone
    clear_rows(da, P * u.ldk);
    clear_rows(dy, P * u.ldv);
    clear_rows(dc, P);
  }
  for (int64_t l0 = rows.begin; l0 < rows.end; l0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, rows.end - l0));
    const bool first = l0 == rows.begin && !u.g.causal;
    const int n = static_cast<int>(u.g.causal ? smaller(u.P, l0 + lanes - 1) : u.P);
    int64_t tokens[kLanes];
    for (int i = 0; i < lanes; ++i) tokens[i] = u.g.query(u.tile, l0 + i, j);
    gather_tokens(u, u.g.q, tokens, lanes, s.qrow, s.ldk);
    gather_dout(u, grads.dout, tokens, lanes, s.drow, s.ldv);
    for (int i = 0; i < kLanes; ++i) {
      limit[i] = static_cast<T>(l0 + i);
      own[i] = u.g.causal && i < lanes ? u.lse[j * u.side + l0 + i] : T(0);
    }
    load_tile_transposed<T>(s.qrow, s.ldk, lanes, K, s.qt, kLanes, u.factor());
    load_tile_transposed<T>(s.drow, s.ldv, lanes, V, s.dt, kLanes);
    gemm<T>(n, lanes, K, as_is(a, u.ldk), s.qt, kLanes, s.strip[0], kLanes, Store{});
    strip_softmax<T>(s.strip[0], n, lanes, u.c + u.cell(j, 0), u.g.causal ? limit : nullptr, u.g.causal ? own : nullptr,
                     maximum, total, nullptr);
    for (int v = 0; v < lanes; v += X::W) {
      typename X::V l = X::load(total + v), mine = X::zero();
      if (u.g.causal) mine = exp2_nonpositive(X::load(own + v) - X::load(maximum + v));
      l = l + mine;
      X::store(inverse + v, select(eq(l, X::zero()), X::zero(), X::broadcast(1) / l));
      X::store(own + v, mine * X::load(inverse + v));
      X::store(maximum + v, X::load(maximum + v) + log2_of<T>(l));
    }
    for (int i = 0; i < kLanes; ++i) delta[i] = 0;
    if (u.g.causal) {
      // dout.own, its terms in the order of the products of block_backward: of one visible key the two are equal.
      load_tile_transposed<T>(u.own + (j * u.side + l0) * u.ldv, u.ldv, lanes, V, s.qt, kLanes);
      for (int v = 0; v < lanes; v += X::W) {
        typename X::V dot = X::zero();
        for (int k = 0; k < V; ++k) dot = fma(X::load(s.qt + k * kLanes + v), X::load(s.dt + k * kLanes + v), dot);
        X::store(delta + v, X::load(own + v) * dot);
      }
    }
    gemm<T>(n, lanes, V, as_is(y, u.ldv), s.dt, kLanes, s.strip[1], kLanes, Store{});
    normalise(s.strip[0], s.strip[1], n, lanes, inverse, !u.g.causal, delta);  // causal: the own block has the same delta
    for (int i = 0; i < lanes; ++i) {
      if (grads.dlse.given()) delta[i] -= static_cast<T*>(grads.dlse.data)[u.offset(grads.dlse, tokens[i])];
      if (!u.g.causal) continue;
      u.lse[j * u.side + l0 + i] = maximum[i];  // of the whole row, for the own block
      d.delta[j * u.side + l0 + i] = delta[i];
    }
    through_softmax(s.strip[0], s.strip[1], n, lanes, delta);
    gemm<T>(K, lanes, n, transposed(a, u.ldk), s.strip[1], kLanes, s.ot, kLanes, Scale<T>{static_cast<T>(u.g.scale)});
    store_tile_transposed(s.ot, kLanes, lanes, K, d.dq + (j * u.side + l0) * u.ldk, u.ldk);
    store_or_add(first, n, K, lanes, as_is(s.strip[1], kLanes), s.qrow, s.ldk, da, u.ldk);
    store_or_add(first, n, V, lanes, as_is(s.strip[0], kLanes), s.drow, s.ldv, dy, u.ldv);
    subtract_row_sums(s.strip[1], n, lanes, first, dc);
  }
}

// From dmean of the step behind `u` (made of u's L) to dq and da, dc of u's step. `next` holds the means themselves.
template <class T>
void slot_between(const MonarchUnit<T>& u, const MonarchUnit<T>& next, const Passing<T>& d, const MonarchScratch<T>& s,
                  int64_t j) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = static_cast<int>(u.g.K), P = static_cast<int>(u.P), n = slot_queries(u, s, j);
  const T *const a = u.a + u.cell(j, 0) * u.ldk, *const mean = next.mean + u.cell(j, 0) * u.ldk;
  const T *const dmean = d.dmean + u.cell(j, 0) * u.ldk, *const c = u.c + u.cell(j, 0);
  const T *const top_w = u.top_w + u.cell(j, 0), *const rest_w = u.rest_w + u.cell(j, 0);
  T *const da = d.da + u.cell(j, 0) * u.ldk, *const dc = d.dc + u.cell(j, 0);
  T *const top = s.line[0], *const unit = s.line[1], *const rest = s.line[2];
  if (n == 0) {
    clear_rows(da, P * u.ldk);
    clear_rows(dc, P);
  }
  for (int i = 0; i < kLanes; ++i) unit[i] = 1;
  // sum_l W dW = dmean.mean, its terms in the order of the products below: where one weight is 1, mean is that query and the
  // difference of the two is 0.
  for (int p0 = 0; p0 < P; p0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, P - p0));
    load_tile_transposed<T>(dmean + p0 * u.ldk, u.ldk, lanes, K, s.dt, kLanes);
    load_tile_transposed<T>(mean + p0 * u.ldk, u.ldk, lanes, K, s.qt, kLanes);
    for (int v = 0; v < lanes; v += X::W) {
      V total = X::zero();
      for (int k = 0; k < K; ++k) total = fma(X::load(s.dt + k * kLanes + v), X::load(s.qt + k * kLanes + v), total);
      X::store(s.column + p0 + v, total, lanes - v);
    }
  }
  for (int l0 = 0; l0 < n; l0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, n - l0));
    const T* const qrow = s.kv + l0 * s.ldk;
    for (int i = 0; i < kLanes; ++i) {
      top[i] = i < lanes ? u.top[j * u.side + l0 + i] : kInfinity<T>;
      rest[i] = i < lanes ? u.rest[j * u.side + l0 + i] : T(0);
    }
    load_tile_transposed<T>(qrow, s.ldk, lanes, K, s.qt, kLanes);
    gemm<T>(P, lanes, K, as_is(a, u.ldk), s.qt, kLanes, s.strip[0], kLanes, Scale<T>{u.factor()});
    gemm<T>(P, lanes, K, as_is(dmean, u.ldk), s.qt, kLanes, s.strip[2], kLanes, Store{});
    for (int v = 0; v < lanes; v += X::W) {
      V total = X::zero(), whole = X::zero();
      for (int p = 0; p < P; ++p) {
        const int64_t at = static_cast<int64_t>(p) * kLanes + v;
        const V logit = X::load(s.strip[0] + at) - X::broadcast(c[p]) - X::load(top + v) - X::load(rest + v);
        const V w = exp2_nonpositive(logit - X::broadcast(top_w[p]) - X::broadcast(rest_w[p]));
        const V dlog = w * (X::load(s.strip[2] + at) - X::broadcast(s.column[p]));
        const V share = exp2_nonpositive(logit);
        X::store(s.strip[0] + at, share);
        X::store(s.strip[1] + at, w);
        X::store(s.strip[2] + at, dlog);
        total = total + dlog;
        whole = whole + share;
      }
      // Shares that sum to 1 but for rounding.
      total = select(eq(whole, X::zero()), X::zero(), total / whole);
      for (int p = 0; p < P; ++p) {
        const int64_t at = static_cast<int64_t>(p) * kLanes + v;
        X::store(s.strip[2] + at, fma(-X::load(s.strip[0] + at), total, X::load(s.strip[2] + at)));
      }
    }
    gemm<T>(K, lanes, P, transposed(a, u.ldk), s.strip[2], kLanes, s.ot, kLanes, Scale<T>{static_cast<T>(u.g.scale)});
    gemm<T>(K, lanes, P, transposed(dmean, u.ldk), s.strip[1], kLanes, s.ot, kLanes, Add{});
    store_tile_transposed(s.ot, kLanes, lanes, K, s.qrow, s.ldk, unit);
    for (int i = 0; i < lanes; ++i) {
      add_rows(s.qrow + i * s.ldk, 0, 1, K, d.dq + (j * u.side + s.tokens[l0 + i]) * u.ldk, 0, T(1));
    }
    store_or_add(l0 == 0, P, K, lanes, as_is(s.strip[2], kLanes), qrow, s.ldk, da, u.ldk);
    subtract_row_sums(s.strip[2], P, lanes, l0 == 0, dc);
  }
}

// From da, dc (and dy after the last step) of block p to dk, dv and dmean; causal: also the own block's attention.
template <class T>
void block_backward(const MonarchUnit<T>& u, const Passing<T>& d, const MonarchScratch<T>& s, int64_t p, int64_t step,
                    bool values, const MonarchGrads& grads) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = static_cast<int>(u.g.K), width = static_cast<int>(u.g.V), n = block_keys(u, s, p, values);
  const int64_t ld = s.ldk + s.ldv;
  const int depth = values ? static_cast<int>(s.ldk) + width : K;
  const T scale = static_cast<T>(u.g.scale);
  T *const maximum = s.line[0], *const total = s.line[1], *const dc = s.line[2], *const sums = s.line[3];
  clear_rows(s.dkv, n * ld);
  for (int64_t j0 = 0; j0 < u.g.cols; j0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, u.g.cols - j0));
    T *const R = s.strip[0], *const z = s.strip[1], *const dz = s.strip[2];
    block_queries(u, p, step, j0, lanes, s.qrow, s.ldk, T(1));
    load_tile_transposed<T>(s.qrow, s.ldk, lanes, K, s.qt, kLanes, u.factor());
    gemm<T>(n, lanes, K, as_is(s.kv, ld), s.qt, kLanes, R, kLanes, Store{});
    for (int i = 0; i < n; ++i) {
      for (int v = 0; v < lanes; v += X::W) X::store(z + i * kLanes + v, X::load(R + i * kLanes + v));
    }
    strip_softmax<T>(R, n, lanes, nullptr, nullptr, nullptr, maximum, total, nullptr);
    load_tile_transposed<T>(d.da + u.cell(j0, p) * u.ldk, u.stride * u.ldk, lanes, K, s.dt, kLanes, scale);
    load_tile<T>(d.da + u.cell(j0, p) * u.ldk, u.stride * u.ldk, lanes, K, s.drow, ld, scale);
    if (values) {
      for (int64_t i = K * kLanes; i < s.ldk * kLanes; ++i) s.dt[i] = 0;  // the gap between keys and values
      load_tile_transposed<T>(d.dy + u.cell(j0, p) * u.ldv, u.stride * u.ldv, lanes, width, s.dt + s.ldk * kLanes, kLanes);
      load_tile<T>(d.dy + u.cell(j0, p) * u.ldv, u.stride * u.ldv, lanes, width, s.drow + s.ldk, ld);
    }
    for (int i = 0; i < kLanes; ++i) dc[i] = i < lanes ? d.dc[u.cell(j0 + i, p)] * kLn2<T> : T(0);  // z is in base 2
    gemm<T>(n, lanes, depth, as_is(s.kv, ld), s.dt, kLanes, dz, kLanes, Store{});
    for (int v = 0; v < lanes; v += X::W) {
      const V inverse = X::broadcast(1) / X::load(total + v), factor = X::load(dc + v), top = X::load(maximum + v);
      V sum = X::zero(), base = X::zero();  // as in normalise
      for (int i = 0; i < n; ++i) {
        const int64_t at = static_cast<int64_t>(i) * kLanes + v;
        base = select(eq(X::load(z + at), top), X::load(dz + at), base);
      }
      for (int i = 0; i < n; ++i) {
        const int64_t at = static_cast<int64_t>(i) * kLanes + v;
        const V r = X::load(R + at) * inverse, x = fma(factor, X::load(z + at) - top, X::load(dz + at) - base);
        X::store(R + at, r);
        X::store(dz + at, x);
        sum = fma(r, x, sum);
      }
      X::store(sums + v, sum);
    }
    through_softmax(R, dz, n, lanes, sums);
    gemm<T>(K, lanes, n, transposed(s.kv, ld), dz, kLanes, s.ot, kLanes, Scale<T>{scale});
    store_tile_transposed(s.ot, kLanes, lanes, K, d.dmean + u.cell(j0, p) * u.ldk, u.stride * u.ldk);
    gemm<T>(n, depth, lanes, as_is(R, kLanes), s.drow, ld, s.dkv, ld, Add{});
    for (int64_t i = 0; i < lanes * s.ldk; ++i) s.qrow[i] *= scale;
    gemm<T>(n, K, lanes, as_is(dz, kLanes), s.qrow, s.ldk, s.dkv, ld, Add{});
    if (!u.g.causal) continue;
    // The own block: keys up to the query's own, weights from the final lse. qrow holds scale q.
    T *const lse = s.line[0], *const delta = s.line[1], *const limit = s.line[4];
    int64_t tokens[kLanes];
    for (int i = 0; i < lanes; ++i) tokens[i] = u.g.query(u.tile, u.present[p], j0 + i);
    gather_dout(u, grads.dout, tokens, lanes, s.drow, s.ldv);
    for (int i = 0; i < kLanes; ++i) {
      const bool here = i < lanes && tokens[i] >= 0;
      lse[i] = here ? u.lse[(j0 + i) * u.side + u.present[p]] : kInfinity<T>;
      delta[i] = here ? d.delta[(j0 + i) * u.side + u.present[p]] : T(0);
      limit[i] = static_cast<T>(j0 + i + 1);
    }
    weights(z, n, lanes, lse, limit);
    load_tile_transposed<T>(s.drow, s.ldv, lanes, width, s.dt, kLanes);
    gemm<T>(n, lanes, width, as_is(s.kv + s.ldk, ld), s.dt, kLanes, dz, kLanes, Store{});
    through_softmax(z, dz, n, lanes, delta);
    gemm<T>(K, lanes, n, transposed(s.kv, ld), dz, kLanes, s.ot, kLanes, Scale<T>{scale});
    gemm<T>(n, K, lanes, as_is(dz, kLanes), s.qrow, s.ldk, s.dkv, ld, Add{});
    gemm<T>(n, width, lanes, as_is(z, kLanes), s.drow, s.ldv, s.dkv + s.ldk, ld, Add{});
    store_tile_transposed(s.ot, kLanes, lanes, K, s.qrow, s.ldk);
    for (int i = 0; i < lanes; ++i) {
      add_rows(s.qrow + i * s.ldk, 0, 1, K, d.dq + ((j0 + i) * u.side + u.present[p]) * u.ldk, 0, T(1));
    }
  }
  for (int i = 0; i < n; ++i) {
    T* const row = d.dkv + s.tokens[i] * ld;
    add_rows(s.dkv + i * ld, 0, 1, K, row, 0, T(1));
    if (values) add_rows(s.dkv + i * ld + s.ldk, 0, 1, width, row + s.ldk, 0, T(1));
  }
}

template <class T>
void store_token(const MonarchUnit<T>& u, const View& x, int64_t t, const T* row) {
  if (!x.given()) return;
  with_type<T>(x, u.offset(x, t), [&](auto* to) { store_tile<T>(row, 0, 1, static_cast<int>(x.size[3]), to, 0); });
}

// dq of slot j: the queries were also the first means of their own row.
template <class T>
void finish_slot(const MonarchUnit<T>& u, const Passing<T>& d, int64_t j, const MonarchGrads& grads) {
  const int K = static_cast<int>(u.g.K);
  for (int64_t p = 0; p < u.P; ++p) {
    const int64_t l = u.present[p] % u.g.rows;
    if (u.g.query(u.tile, l, j) < 0) continue;
    add_rows(d.dmean + u.cell(j, p) * u.ldk, 0, 1, K, d.dq + (j * u.side + l) * u.ldk, 0, T(1));
  }
  const Span rows = u.token_rows(j);
  for (int64_t l = rows.begin; l < rows.end; ++l) {
    store_token(u, grads.dq, u.g.query(u.tile, l, j), d.dq + (j * u.side + l) * u.ldk);
  }
}

template <class T>
struct Backward {
  MonarchPlan plan;
  MonarchScratch<T>* scratch;
  MonarchUnit<T>* units;
  Passing<T>* passing;

  Backward(Arena& arena, const MonarchGrid& g, int workers, bool counting) : plan(monarch_plan(g.B * g.H, workers)) {
    scratch = arena.take<MonarchScratch<T>>(workers);
    units = arena.take<MonarchUnit<T>>(plan.memories);
    passing = arena.take<Passing<T>>(plan.memories);
    for (int i = 0; i < workers; ++i) {
      const MonarchScratch<T> cut(arena, g, true);
      if (!counting) scratch[i] = cut;
    }
    for (int64_t i = 0; i < plan.memories; ++i) {
      const MonarchUnit<T> cut(arena, g, g.steps);
      const Passing<T> gradients(arena, g, cut);
      if (counting) continue;
      units[i] = cut;
      passing[i] = gradients;
    }
  }
  template <class For>
  void tile(MonarchUnit<T>& u, const Passing<T>& d, const MonarchGrads& grads, const For& for_items) const {
    const MonarchGrid& g = u.g;
    monarch_factors(u, true, scratch, for_items);
    const MonarchUnit<T> last = u.at_step(g.steps - 1);
    for_items(g.cols, slot_flops(g), [&](int64_t j, int worker) { slot_backward(last, d, scratch[worker], j, grads); });
    for (int64_t step = g.steps - 1; step >= 0; --step) {
      const MonarchUnit<T> now = u.at_step(step);
      for_items(u.P, block_flops(g),
                [&](int64_t p, int worker) { block_backward(now, d, scratch[worker], p, step, step + 1 == g.steps, grads); });
      if (step == 0) break;
      const MonarchUnit<T> before = u.at_step(step - 1);
      for_items(g.cols, slot_flops(g), [&](int64_t j, int worker) { slot_between(before, now, d, scratch[worker], j); });
    }
    for_items(g.cols, slot_flops(g), [&](int64_t j, int) { finish_slot(u, d, j, grads); });
  }
  template <class For>
  void unit(int64_t index, MonarchUnit<T>& u, const Passing<T>& d, const MonarchGrads& grads, const For& for_items) const {
    const MonarchGrid& g = u.g;
    const int64_t ld = u.ldk + u.ldv;
    u.h = index % g.H, u.b = index / g.H;
    clear_rows(d.dkv, g.S * ld);
    for (u.tile = 0; u.tile < g.q_tiles; ++u.tile) tile(u, d, grads, for_items);
    for (int64_t t = 0; t < g.S; ++t) {
      store_token(u, grads.dk, t, d.dkv + t * ld);
      store_token(u, grads.dv, t, d.dkv + t * ld + u.ldk);
    }
  }
  static int64_t workspace(const MonarchGrid& g, int workers) {
    Arena arena;
    const Backward backward(arena, g, workers, true);
    return arena.used();
  }
  static void run(const MonarchGrid& g, const MonarchGrads& grads, const Launch& launch) {
    Arena arena(launch.workspace);
    const Backward f(arena, g, launch.workers, false);
    const double flops = 3 * (block_flops(g) * static_cast<double>(g.rows) + slot_flops(g) * static_cast<double>(g.cols));
    if (f.plan.whole) {
      run_tasks(launch, f.plan.units, flops * static_cast<double>(f.plan.units), [&](int64_t task, int worker) {
        f.unit(task, f.units[worker], f.passing[worker], grads, InThisThread{worker});
      });
    } else {
      for (int64_t i = 0; i < f.plan.units; ++i) f.unit(i, f.units[0], f.passing[0], grads, OnAllThreads{&launch});
    }
  }
};

int64_t workspace(const MonarchGrid& g, Pass pass, int workers) {
  if (pass == Pass::forward) return monarch_forward_workspace(g, workers);
  return g.q.dtype == Dtype::f64 ? Backward<double>::workspace(g, workers) : Backward<float>::workspace(g, workers);
}
void backward(const MonarchGrid& g, const MonarchGrads& grads, const Launch& launch) {
  g.q.dtype == Dtype::f64 ? Backward<double>::run(g, grads, launch) : Backward<float>::run(g, grads, launch);
}

}  // namespace

int64_t monarch_workspace(const MonarchArgs& args, Pass pass, int workers) {
  return workspace(monarch_grid(args), pass, workers);
}
void monarch_backward(const MonarchArgs& args, const MonarchOut&, const MonarchGrads& grads, const Launch& launch) {
  backward(monarch_grid(args), grads, launch);
}
int64_t monarch_tiled_workspace(const MonarchTiledArgs& args, Pass pass, int workers) {
  return workspace(monarch_grid(args), pass, workers);
}
void monarch_tiled_backward(const MonarchTiledArgs& args, const MonarchOut&, const MonarchGrads& grads, const Launch& launch) {
  backward(monarch_grid(args), grads, launch);
}

}  // namespace linnet::LINNET_ISA
