// The two kinds of program that alternate in Monarch attention, on one head and one tile of queries (a unit).
//
//   block program, one per key block p:   queries or means of all slots in the lanes, the block's keys in the rows
//     ST [keys, 64] = K QT;  R = softmax down the rows, entropy beside it;  [a | y] = [K | V]^T R
//   slot program, one per slot j:          the slot's queries in the lanes, the blocks' a in the rows
//     ST [blocks, 64] = A QT - c;  L = softmax down the rows;  OT = Y^T L,  or, before the last step, the means of the queries:
//     the same with the roles exchanged, since W[p, :] = softmax_l(log L[p, l])
//
// Logits are in base 2 (log2(e) is folded into the queries), c and lse too. Only valid keys and queries are gathered, so
// nothing is masked except in the causal form. What passes between the programs is [slot, block] rows: a, y, mean [cols, P,
// width] and c [cols, P]; of the factors R and L only strips of 64 columns exist, [max(cols, P), 64] per thread. A strip is
// whole: no running maximum, one sum per element in the order of the rows.
#pragma once

#include "mechanisms/monarch/grid.h"
#include "mechanisms/softmax/softmax_strip.h"
#include "simd/finite.h"
#include "simd/gemm.h"

namespace linnet::LINNET_ISA {

// What one thread works in.
template <class T>
struct MonarchScratch {
  int64_t ldk, ldv;    // widths of key and value rows
  T* kv;               // [max(cols, rows), ldk + ldv]: keys and values of a block, or queries of a slot
  T *qt, *ot;          // [K, 64], [ldk + V, 64]
  T* qrow;             // [64, ldk + ldv]
  T* strip[3];         // [longest, 64]
  T *dt, *drow, *dkv;  // backward: [ldk + V, 64], [64, ldk + ldv], [cols, ldk + ldv]
  T* line[6];          // [64] each
  T* column;           // [longest]
  int64_t* tokens;     // [longest]

  LINNET_INLINE MonarchScratch(Arena& arena, const MonarchGrid& g, bool backward)
      : ldk(round_up<T>(g.K)), ldv(round_up<T>(g.V)) {
    const int64_t P = g.k_tiles * g.rows, keys = larger(g.cols, g.rows), longest = larger(keys, P);
    kv = arena.take<T>(keys * (ldk + ldv));
    qt = arena.take<T>(larger(g.K, g.V) * kLanes);
    ot = arena.take<T>((ldk + g.V) * kLanes);
    qrow = arena.take<T>(kLanes * (ldk + ldv));
    for (int i = 0; i < 3; ++i) strip[i] = arena.take<T>(i < (backward ? 3 : g.causal ? 2 : 1) ? longest * kLanes : 0);
    dt = arena.take<T>(backward ? (ldk + g.V) * kLanes : 0);
    drow = arena.take<T>(backward ? kLanes * (ldk + ldv) : 0);
    dkv = arena.take<T>(backward ? g.cols * (ldk + ldv) : 0);
    for (T*& x : line) x = arena.take<T>(kLanes);
    column = arena.take<T>(longest);
    tokens = arena.take<int64_t>(longest);
  }
};

// What passes between the programs of one unit.
template <class T>
struct MonarchUnit {
  MonarchGrid g;
  int64_t b = 0, h = 0, tile = 0;
  int64_t P = 0;         // blocks that take part
  int64_t stride, side;  // cells per slot: of blocks and of queries; odd, so that columns do not collide in the caches
  int64_t ldk, ldv;
  int64_t* present;       // [P]: key tile * rows + row
  T *mean, *a, *y;        // [cols, stride, ld]
  T *c, *top_w, *rest_w;  // [cols, stride]; of W: the largest logit and log2 of the sum beside it
  T *top, *rest;          // [cols, side]: the same of L, before the last step
  T* lse;                 // [cols, side]: causal, of the own block
  T* own;                 // causal: [cols, side, ldv], the attention to the own block
  int64_t step_elements;

  LINNET_INLINE MonarchUnit(Arena& arena, const MonarchGrid& grid, int64_t kept_steps) : g(grid) {
    stride = (g.k_tiles * g.rows) | 1, side = g.rows | 1;
    ldk = round_up<T>(g.K), ldv = round_up<T>(g.V);
    const int64_t cells = g.cols * stride, queries = g.cols * side;
    present = arena.take<int64_t>(g.k_tiles * g.rows);
    y = arena.take<T>(cells * ldv);
    own = arena.take<T>(g.causal ? queries * ldv : 0);
    Arena one;
    step(one);
    step_elements = one.used() / static_cast<int64_t>(sizeof(T));
    char* const base = arena.take<char>(one.used() * kept_steps);
    Arena first(base);
    step(first);
  }
  // The pieces that every step has of its own when steps are kept.
  LINNET_INLINE void step(Arena& arena) {
    const int64_t cells = g.cols * stride, queries = g.cols * side;
    mean = arena.take<T>(g.steps > 1 ? cells * ldk : 0);
    a = arena.take<T>(cells * ldk);
    c = arena.take<T>(cells);
    for (T** x : {&top_w, &rest_w}) *x = arena.take<T>(g.steps > 1 ? cells : 0);
    for (T** x : {&top, &rest}) *x = arena.take<T>(g.steps > 1 ? queries : 0);
    lse = arena.take<T>(g.causal ? queries : 0);
  }
  LINNET_INLINE MonarchUnit at_step(int64_t s) const {
    MonarchUnit u = *this;
    const int64_t by = s * step_elements;
    for (T** x : {&u.mean, &u.a, &u.c, &u.top_w, &u.rest_w, &u.top, &u.rest, &u.lse}) *x += by;
    return u;
  }

  void begin() {  // finds the blocks that take part
    P = 0;
    for (int64_t f = 0; f < g.k_tiles; ++f) {
      if (!g.visible(tile, f)) continue;
      for (int64_t r = 0; r < g.rows; ++r) {
        bool any = false;
        for (int64_t i = 0; i < g.cols && !any; ++i) any = g.valid_key(b, g.key(f, r, i));
        if (any) present[P++] = f * g.rows + r;
      }
    }
  }
  LINNET_INLINE int64_t cell(int64_t j, int64_t p) const { return j * stride + p; }
  LINNET_INLINE T factor() const { return static_cast<T>(g.scale * kLog2e<double>); }
  LINNET_INLINE int64_t offset(const View& x, int64_t t) const { return b * x.stride[0] + t * x.stride[1] + h * x.stride[2]; }
  // The rows of slot j that hold tokens: [first, end).
  LINNET_INLINE Span token_rows(int64_t j) const {
    int64_t first = 0, end = g.rows;
    while (first < end && g.query(tile, first, j) < 0) ++first;
    while (end > first && g.query(tile, end - 1, j) < 0) --end;
    return {first, end};
  }
};

// Rows of tokens[0 .. n) of a [B, T, H, D] tensor; -1: zeros.
template <class T>
void gather_tokens(const MonarchUnit<T>& u, const View& x, const int64_t* tokens, int n, T* dst, int64_t ld, T scale = 1) {
  const int width = static_cast<int>(x.size[3]);
  with_type<T>(x, 0, [&](auto* base) {
    for (int i = 0; i < n;) {
      if (tokens[i] < 0) {
        for (int64_t c = 0; c < round_up<T>(width); ++c) dst[i * ld + c] = 0;
        ++i;
        continue;
      }
      int run = 1;  // equally spaced tokens in one go
      const int64_t gap = i + 1 < n ? tokens[i + 1] - tokens[i] : 1;
      while (i + run < n && tokens[i + run] >= 0 && tokens[i + run] - tokens[i + run - 1] == gap) ++run;
      load_tile<T>(base + u.offset(x, tokens[i]), gap * x.stride[1], run, width, dst + i * ld, ld, scale);
      i += run;
    }
  });
}

// The queries of block p's own row (first step) for slots j0 .. j0+lanes, as rows [lanes, ld].
template <class T>
void block_queries(const MonarchUnit<T>& u, int64_t p, int64_t step, int64_t j0, int lanes, T* dst, int64_t ld, T scale) {
  if (step > 0) {
    load_tile<T>(u.mean + u.cell(j0, p) * u.ldk, u.stride * u.ldk, lanes, static_cast<int>(u.g.K), dst, ld, scale);
    return;
  }
  int64_t tokens[kLanes];
  for (int i = 0; i < lanes; ++i) tokens[i] = u.g.query(u.tile, u.present[p] % u.g.rows, j0 + i);
  gather_tokens(u, u.g.q, tokens, lanes, dst, ld, scale);
}

// The valid keys of block p, and their values from column ldk on when wanted; returns how many, their tokens in s.tokens.
template <class T>
int block_keys(const MonarchUnit<T>& u, const MonarchScratch<T>& s, int64_t p, bool values) {
  int n = 0;
  const int64_t f = u.present[p] / u.g.rows, row = u.present[p] % u.g.rows;
  for (int64_t i = 0; i < u.g.cols; ++i) {
    const int64_t t = u.g.key(f, row, i);
    if (u.g.valid_key(u.b, t)) s.tokens[n++] = t;
  }
  gather_tokens(u, u.g.k, s.tokens, n, s.kv, s.ldk + s.ldv);
  if (values) gather_tokens(u, u.g.v, s.tokens, n, s.kv + s.ldk, s.ldk + s.ldv);
  return n;
}

// OT [width, 64] = X^T P: lane l reads the rows of x [n, ld] with its weights p [n, 64], of which those from limit[l] on are 0.
// Where x is not finite, a lane takes exactly the rows that it sees: 0 x NaN is NaN. The bits of finite lanes are the same.
template <class T>
void read_visible(int width, int lanes, int n, const T* x, int64_t ld, const T* p, const T* limit, T* ot) {
  using X = Vec<T>;
  if (limit == nullptr || rows_are_finite(x, ld, n, width)) {
    gemm<T>(width, lanes, n, transposed(x, ld), p, kLanes, ot, kLanes, Store{});
    return;
  }
  for (int c = 0; c < width; ++c) {
    for (int v = 0; v < lanes; v += X::W) {
      typename X::V sum = X::zero();
      for (int i = 0; i < n; ++i) {
        const auto seen = lt(X::broadcast(static_cast<T>(i)), X::load(limit + v));
        sum = select(seen, fma(X::broadcast(x[i * ld + c]), X::load(p + i * kLanes + v), sum), sum);
      }
      X::store(ot + c * kLanes + v, sum);
    }
  }
}

// The block program of step `step`: a, c and, with values, y of block p for every slot; causal: also the own block's attention.
template <class T>
void block_program(const MonarchUnit<T>& u, const MonarchScratch<T>& s, int64_t p, int64_t step, bool values) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = static_cast<int>(u.g.K), width = static_cast<int>(u.g.V), n = block_keys(u, s, p, values);
  const int64_t ld = s.ldk + s.ldv;
  T *const maximum = s.line[0], *const total = s.line[1], *const products = s.line[2], *const inverse = s.line[3];
  for (int64_t j0 = 0; j0 < u.g.cols; j0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, u.g.cols - j0));
    block_queries(u, p, step, j0, lanes, s.qrow, s.ldk, T(1));
    load_tile_transposed<T>(s.qrow, s.ldk, lanes, K, s.qt, kLanes, u.factor());
    T* const strip = s.strip[0];
    gemm<T>(n, lanes, K, as_is(s.kv, ld), s.qt, kLanes, strip, kLanes, Store{});
    if (u.g.causal) {  // the own block: keys up to the query's own
      T *const own = s.strip[1], *const limit = s.line[4];
      for (int i = 0; i < n; ++i) {
        for (int v = 0; v < lanes; v += X::W) X::store(own + i * kLanes + v, X::load(strip + i * kLanes + v));
      }
      for (int i = 0; i < kLanes; ++i) limit[i] = static_cast<T>(j0 + i + 1);
      strip_softmax<T>(own, n, lanes, nullptr, limit, nullptr, maximum, total, nullptr);
      read_visible(width, lanes, n, s.kv + s.ldk, ld, own, limit, s.ot);
      for (int v = 0; v < lanes; v += X::W) {
        X::store(inverse + v, X::broadcast(1) / X::load(total + v));
        X::store(limit + v, X::load(maximum + v) + log2_of<T>(X::load(total + v)));
      }
      store_tile_transposed(s.ot, kLanes, lanes, width, u.own + (j0 * u.side + p) * u.ldv, u.side * u.ldv, inverse);
      for (int i = 0; i < lanes; ++i) u.lse[(j0 + i) * u.side + p] = limit[i];
    }
    strip_softmax<T>(strip, n, lanes, nullptr, nullptr, nullptr, maximum, total, products);
    gemm<T>(values ? static_cast<int>(s.ldk) + width : K, lanes, n, transposed(s.kv, ld), strip, kLanes, s.ot, kLanes, Store{});
    for (int v = 0; v < lanes; v += X::W) {
      const V l = X::load(total + v), factor = X::broadcast(1) / l;
      X::store(inverse + v, factor);
      X::store(products + v, fma(X::load(products + v), factor, -log2_of<T>(l)));
    }
    store_tile_transposed(s.ot, kLanes, lanes, K, u.a + u.cell(j0, p) * u.ldk, u.stride * u.ldk, inverse);
    if (values) {
      store_tile_transposed(s.ot + s.ldk * kLanes, kLanes, lanes, width, u.y + u.cell(j0, p) * u.ldv, u.stride * u.ldv,
                            inverse);
    }
    for (int i = 0; i < lanes; ++i) u.c[u.cell(j0 + i, p)] = products[i];
  }
}

// The slot program after the last step: out and lse of the queries of slot j.
template <class T>
void slot_output(const MonarchUnit<T>& u, const MonarchScratch<T>& s, int64_t j, const MonarchOut& out) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = static_cast<int>(u.g.K), width = static_cast<int>(u.g.V);
  const Span rows = u.token_rows(j);
  T *const maximum = s.line[0], *const total = s.line[1], *const inverse = s.line[2], *const lse = s.line[3];
  T *const limit = s.line[4], *const share = s.line[5];
  for (int64_t l0 = rows.begin; l0 < rows.end; l0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, rows.end - l0));
    const int64_t t0 = u.g.query(u.tile, l0, j), step = u.g.cols;
    const int n = static_cast<int>(u.g.causal ? smaller(u.P, l0 + lanes - 1) : u.P);
    with_type<T>(u.g.q, u.offset(u.g.q, t0),
                 [&](auto* x) { load_tile_transposed<T>(x, step * u.g.q.stride[1], lanes, K, s.qt, kLanes, u.factor()); });
    gemm<T>(n, lanes, K, as_is(u.a + u.cell(j, 0) * u.ldk, u.ldk), s.qt, kLanes, s.strip[0], kLanes, Store{});
    const T* const own = u.g.causal ? u.lse + j * u.side + l0 : nullptr;
    if (u.g.causal) {
      for (int i = 0; i < kLanes; ++i) {
        limit[i] = static_cast<T>(l0 + i);
        share[i] = i < lanes ? own[i] : T(0);
      }
    }
    strip_softmax<T>(s.strip[0], n, lanes, u.c + u.cell(j, 0), u.g.causal ? limit : nullptr, u.g.causal ? share : nullptr,
                     maximum, total, nullptr);
    read_visible(width, lanes, n, u.y + u.cell(j, 0) * u.ldv, u.ldv, s.strip[0], u.g.causal ? limit : nullptr, s.ot);
    for (int v = 0; v < lanes; v += X::W) {
      const V m = X::load(maximum + v);
      V l = X::load(total + v), mine = X::zero();
      if (u.g.causal) {
        mine = exp2_nonpositive(X::load(share + v) - m);
        l = l + mine;
      }
      const V factor = select(eq(l, X::zero()), X::zero(), X::broadcast(1) / l);
      X::store(inverse + v, factor);
      X::store(share + v, mine * factor);
      X::store(lse + v, (m + log2_of<T>(l)) * kLn2<T>);
    }
    if (u.g.causal) {  // the own block joins
      store_tile_transposed(s.ot, kLanes, lanes, width, s.qrow, s.ldv, inverse);
      for (int i = 0; i < lanes; ++i) {
        const T* const row = u.own + (j * u.side + l0 + i) * u.ldv;
        for (int c = 0; c < width; c += X::W) {
          X::store(s.qrow + i * s.ldv + c, fma(X::broadcast(share[i]), X::load(row + c), X::load(s.qrow + i * s.ldv + c)));
        }
      }
    }
    with_type<T>(out.out, u.offset(out.out, t0), [&](auto* x) {
      if (u.g.causal) {
        store_tile<T>(s.qrow, s.ldv, lanes, width, x, step * out.out.stride[1]);
      } else {
        store_tile_transposed(s.ot, kLanes, lanes, width, x, step * out.out.stride[1], inverse);
      }
    });
    if (!out.lse.given()) continue;
    for (int i = 0; i < lanes; ++i) {
      static_cast<T*>(out.lse.data)[u.offset(out.lse, t0 + i * step)] = u.P == 0 ? -kInfinity<T> : lse[i];
    }
  }
}

// The valid queries of slot j as rows in s.kv [n, ldk], their rows of the grid in s.tokens; returns n.
template <class T>
int slot_queries(const MonarchUnit<T>& u, const MonarchScratch<T>& s, int64_t j) {
  int n = 0;
  for (int64_t l = 0; l < u.g.rows; ++l) {
    const int64_t t = u.g.query(u.tile, l, j);
    if (u.g.valid_query(u.b, t)) s.tokens[n++] = t;
  }
  gather_tokens(u, u.g.q, s.tokens, n, s.kv, s.ldk);
  for (int i = 0; i < n; ++i) s.tokens[i] = (s.tokens[i] + u.g.front) / u.g.cols - u.tile * u.g.rows;
  return n;
}

// The slot program between steps: from a, c of `u` the means of step `next`; keeps the normalisers of L and of W.
//
// log L is near 0 where a query has chosen its block, and W divides by what such logarithms sum to: they keep their digits
// beside logits of thousands only if the same logit is taken off itself. So both products round alike (the scale comes behind
// them), and a normaliser stays the pair of the largest logit and log2 of the sum beside it.
template <class T>
void slot_means(const MonarchUnit<T>& u, const MonarchUnit<T>& next, const MonarchScratch<T>& s, int64_t j) {
  using X = Vec<T>;
  const int K = static_cast<int>(u.g.K), P = static_cast<int>(u.P), n = slot_queries(u, s, j);
  T *const maximum = s.line[0], *const total = s.line[1], *const inverse = s.line[2], *const entropy = s.line[3];
  const T *const a = u.a + u.cell(j, 0) * u.ldk, *const c = u.c + u.cell(j, 0);
  T *const top = u.top + j * u.side, *const rest = u.rest + j * u.side;
  for (int l0 = 0; l0 < n; l0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, n - l0));
    load_tile_transposed<T>(s.kv + l0 * s.ldk, s.ldk, lanes, K, s.qt, kLanes);
    gemm<T>(P, lanes, K, as_is(a, u.ldk), s.qt, kLanes, s.strip[0], kLanes, Scale<T>{u.factor()});
    strip_softmax<T>(s.strip[0], P, lanes, c, nullptr, nullptr, maximum, total, nullptr);
    for (int v = 0; v < lanes; v += X::W) X::store(total + v, log2_of<T>(X::load(total + v)));
    for (int i = 0; i < lanes; ++i) top[l0 + i] = maximum[i], rest[l0 + i] = total[i];
  }
  for (int p0 = 0; p0 < P; p0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, P - p0));
    T* const mean = next.mean + u.cell(j, p0) * u.ldk;
    load_tile_transposed<T>(a + p0 * u.ldk, u.ldk, lanes, K, s.qt, kLanes);
    gemm<T>(n, lanes, K, as_is(s.kv, s.ldk), s.qt, kLanes, s.strip[0], kLanes, Scale<T>{u.factor()});
    for (int i = 0; i < kLanes; ++i) entropy[i] = i < lanes ? c[p0 + i] : T(0);
    for (int i = 0; i < n; ++i) {
      for (int v = 0; v < lanes; v += X::W) {
        T* const at = s.strip[0] + i * kLanes + v;
        X::store(at, X::load(at) - X::load(entropy + v) - X::broadcast(top[i]) - X::broadcast(rest[i]));
      }
    }
    strip_softmax<T>(s.strip[0], n, lanes, nullptr, nullptr, nullptr, maximum, total, nullptr);
    gemm<T>(K, lanes, n, transposed(s.kv, s.ldk), s.strip[0], kLanes, s.ot, kLanes, Store{});
    for (int v = 0; v < lanes; v += X::W) {
      const typename X::V l = X::load(total + v);
      X::store(inverse + v, select(eq(l, X::zero()), X::zero(), X::broadcast(1) / l));
      X::store(total + v, log2_of<T>(l));
    }
    store_tile_transposed(s.ot, kLanes, lanes, K, mean, u.ldk, inverse);
    for (int i = 0; i < lanes; ++i) {
      u.top_w[u.cell(j, p0 + i)] = maximum[i];
      u.rest_w[u.cell(j, p0 + i)] = total[i];
    }
  }
}

// How the work of a call is spread. Whole units when there are enough of them, otherwise the programs of one unit at a time:
// both call the same programs on the same data, so nothing changes but the time.
struct MonarchPlan {
  int64_t units;
  bool whole;
  int64_t memories;  // units that are worked on at a time
};
LINNET_INLINE MonarchPlan monarch_plan(int64_t units, int workers) {
  const bool whole = units >= 4 * workers || (units >= workers && units % workers == 0);
  return {units, whole, units == 0 ? 0 : whole ? smaller(units, workers) : 1};
}

// f(item, worker) for items of a unit: in order in this thread, or in tasks of `grain` items on all of them.
struct InThisThread {
  int worker;
  template <class F>
  LINNET_INLINE void operator()(int64_t items, double, const F& f) const {
    for (int64_t i = 0; i < items; ++i) f(i, worker);
  }
};
struct OnAllThreads {
  const Launch* launch;
  template <class F>
  LINNET_INLINE void operator()(int64_t items, double flops, const F& f) const {
    const int64_t grain = larger(1, static_cast<int64_t>(1e6 / (flops + 1)));  // about 10 us
    run_tasks(*launch, divide_up(items, grain), flops * static_cast<double>(items), [&](int64_t task, int worker) {
      for (int64_t i = task * grain; i < smaller(items, (task + 1) * grain); ++i) f(i, worker);
    });
  }
};

// Flops of a block program and of a slot program, about.
LINNET_INLINE double block_flops(const MonarchGrid& g) {
  return 2.0 * static_cast<double>(g.cols * g.cols) * static_cast<double>(2 * g.K + g.V);
}
LINNET_INLINE double slot_flops(const MonarchGrid& g) {
  return 2.0 * static_cast<double>(g.rows * g.rows * g.k_tiles) * static_cast<double>(g.K + g.V);
}

// The steps of one unit up to a, c, y of the last; kept: every step in memory of its own.
template <class T, class For>
void monarch_factors(MonarchUnit<T>& u, bool kept, const MonarchScratch<T>* scratch, const For& for_items) {
  u.begin();
  for (int64_t step = 0; step < u.g.steps; ++step) {
    const MonarchUnit<T> now = u.at_step(kept ? step : 0), next = u.at_step(kept ? step + 1 : 0);
    const bool last = step + 1 == u.g.steps;
    for_items(u.P, block_flops(u.g), [&](int64_t p, int worker) { block_program(now, scratch[worker], p, step, last); });
    if (last) break;
    for_items(u.g.cols, slot_flops(u.g), [&](int64_t j, int worker) { slot_means(now, next, scratch[worker], j); });
  }
}

}  // namespace linnet::LINNET_ISA
