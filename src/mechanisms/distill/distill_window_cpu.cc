// distill_window on the vector units: hybrids of a softmax window with hedgehog features, their gradients, statistics of heads.
//
// Hybrids go in tiles of 32 rows. lo is the first key of the tile's first window: older keys stand in a state S = sum f(k) [v |
// 1] and are read by one product; keys from lo on lie in a strip [32, keys], where each is near (g exp(s - top)), far for this
// row only (f(q).f(k)), or later (0). A strip has at most 2 window + 31 columns. The backward walks forward in time for what
// the rows get (and their strips give), then backward in time with R = sum f(q) g^ for what the state's keys get; in double
// whatever the type: dwq, dwk and dwindow_factor are sums that nearly cancel. Statistics are a few sums over all pairs, in
// double, a strip [32, T] at a time. Memory grows with T alone.
#include "core/half.h"
#include "distill.h"
#include "distill_spectra.h"
#include "mechanisms/features/features_maps.h"
#include "mechanisms/recurrence/cpu/walk.h"
#include "simd/finite.h"

namespace linnet::LINNET_ISA {
namespace {

template <class Body>
LINNET_INLINE auto by_type(Dtype dtype, const Body& body) {
  return dtype == Dtype::f64 ? body.template operator()<double>() : body.template operator()<float>();
}
LINNET_INLINE int64_t row_of(const View& view, int64_t b, int64_t t, int64_t h) {
  return b * view.stride[0] + t * view.stride[1] + h * view.stride[2];
}
LINNET_INLINE double entry(const View& view, int64_t i, int64_t j = 0, int64_t k = 0) {
  return load_f64(view.data, view.dtype, i * view.stride[0] + j * view.stride[1] + k * view.stride[2]);
}
LINNET_INLINE void put(const View& view, double x, int64_t i, int64_t j = 0, int64_t k = 0) {
  if (view.given()) store_f64(view.data, view.dtype, i * view.stride[0] + j * view.stride[1] + k * view.stride[2], x);
}
template <class T>
LINNET_INLINE void clear(T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = 0;
}
template <class T>
LINNET_INLINE T sum_of(const T* x, int64_t n) {
  using X = Vec<T>;
  typename X::V sums = X::zero();
  for (int64_t c = 0; c < n; c += X::W) sums += X::load(x + c, static_cast<int>(n - c < X::W ? n - c : X::W));
  return sum(sums);
}

template <class T>
struct Shape {
  int64_t B, length, H, F, window;
  int K, V, features;     // features: 2 F
  int64_t ldk, ldv, ldf;  // rows of K, V + 1, 2 F
  int64_t ldn, span;      // rows of F; columns of a strip
  T scale;

  int64_t begin(bool terraced, int64_t i) const { return distill_window_begin(terraced, window, i); }
};
template <class T>
Shape<T> shape_of(const DistillWindowArgs& args) {
  Shape<T> s;
  s.B = args.q.size[0];
  s.length = args.q.size[1];
  s.H = args.q.size[2];
  s.K = static_cast<int>(args.q.size[3]);
  s.V = static_cast<int>(args.v.size[3]);
  s.F = args.wq.size[2];
  s.features = static_cast<int>(2 * s.F);
  s.window = args.window;
  s.ldk = round_up<T>(s.K);
  s.ldv = round_up<T>(s.V + 1);
  s.ldf = round_up<T>(s.features);
  s.ldn = round_up<T>(s.F);
  const int64_t widest = s.window < s.length ? 2 * s.window + kChunk : s.length;
  s.span = ((widest < s.length ? widest : s.length) + kChunk - 1) / kChunk * kChunk + kChunk;
  s.scale = static_cast<T>(s.K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(s.K)));
  return s;
}

// The hedgehog maps of queries and keys.
template <class T>
struct Maps {
  T *in[2], *back[2];  // [H, K, ldn], [H, F, ldk]
};
template <class T>
Maps<T> cut_maps(Arena& arena, const Shape<T>& s) {
  Maps<T> maps;
  for (int key = 0; key < 2; ++key) {
    maps.in[key] = arena.take<T>(s.H * s.K * s.ldn);
    maps.back[key] = arena.take<T>(s.H * s.F * s.ldk);
  }
  return maps;
}
template <class T>
void load_maps(const DistillWindowArgs& args, const Shape<T>& s, const Maps<T>& maps) {
  for (int key = 0; key < 2; ++key) {
    const View& w = key ? args.wk : args.wq;
    clear(maps.in[key], s.H * s.K * s.ldn);
    clear(maps.back[key], s.H * s.F * s.ldk);
    for (int64_t i = 0; i < s.H * s.K * s.F; ++i) {
      const int64_t h = i / (s.K * s.F), k = i / s.F % s.K, c = i % s.F;
      maps.in[key][(h * s.K + k) * s.ldn + c] = maps.back[key][(h * s.F + c) * s.ldk + k] = static_cast<T>(entry(w, h, k, c));
    }
  }
}
template <class T>
FeatureSelf<T> map_of(const Shape<T>& s, const Maps<T>& maps, bool key) {
  FeatureSelf<T> m;
  m.s = {};
  m.s.map = FeaturesMap::hedgehog;
  m.s.B = s.B;
  m.s.H = s.H;
  m.s.K = s.K;
  m.s.R = s.F;
  m.s.F = s.features;
  m.n = s.F;
  m.in = maps.in[key ? 1 : 0];
  m.back = maps.back[key ? 1 : 0];
  return m;
}

template <class T>
struct Scratch {
  T *fq, *fk;       // [T, ldf]: features of the head
  T *q, *k, *v;     // [C, ldk], [C, ldk], [C, ldv] with 1 behind the values
  T *kt, *ft, *vt;  // [K, C], [2 F, C], [V + 1, C]: keys' rows, features and values turned
  T *p, *far, *e;   // [C, span]
  T* o;             // [C, ldv]
  T *S, *St;        // [2 F, ldv], [V + 1, ldf]
  T* map;           // of the maps
  int* largest;     // [C]: the key of the largest score, in columns of the strip
  T* g;             // backward: [T, ldv], g^ = [dout | -dout.out] / den
  T *dq, *dk, *dv;  // [T, ldk], [T, ldk], [T, ldv]
  T *dfq, *dfk;     // [T, ldf]
};
template <class T>
Scratch<T> cut_scratch(Arena& arena, const Shape<T>& s, const Maps<T>& maps, Pass pass) {
  Scratch<T> r{};
  for (T** x : {&r.fq, &r.fk}) *x = arena.take<T>(s.length * s.ldf);
  for (T** x : {&r.q, &r.k}) *x = arena.take<T>(kChunk * s.ldk);
  for (T** x : {&r.v, &r.o}) *x = arena.take<T>(kChunk * s.ldv);
  for (T** x : {&r.p, &r.far}) *x = arena.take<T>(kChunk * s.span);
  r.kt = arena.take<T>(s.K * kChunk);
  r.ft = arena.take<T>(s.features * kChunk);
  r.S = arena.take<T>(s.features * s.ldv);
  r.map = arena.take<T>(map_of(s, maps, false).scratch());
  if (pass == Pass::forward) return r;
  r.largest = arena.take<int>(kChunk);
  r.e = arena.take<T>(kChunk * s.span);
  r.vt = arena.take<T>((s.V + 1) * kChunk);
  r.St = arena.take<T>((s.V + 1) * s.ldf);
  for (T** x : {&r.g, &r.dv}) *x = arena.take<T>(s.length * s.ldv);
  for (T** x : {&r.dq, &r.dk}) *x = arena.take<T>(s.length * s.ldk);
  for (T** x : {&r.dfq, &r.dfk}) *x = arena.take<T>(s.length * s.ldf);
  return r;
}

// One head of one batch row.
template <class T>
struct Head {
  using X = Vec<T>;
  using V = typename X::V;
  const DistillWindowArgs& args;
  const Shape<T>& s;
  const Maps<T>& maps;
  const Scratch<T>& r;
  int64_t b, h;
  int64_t past = 0;  // rows of keys before the first query

  int rows_at(int64_t at, int64_t end) const { return static_cast<int>(end - at < kChunk ? end - at : kChunk); }
  void load(const View& x, int64_t at, int rows, T* to, int64_t ld) const {
    load_rows<T>(x, row_of(x, b, at, h), x.stride[1], rows, static_cast<int>(x.size[3]), to, ld);
  }
  void load_values(int64_t at, int rows) const {
    load(args.v, at, rows, r.v, s.ldv);
    for (int i = 0; i < rows; ++i) r.v[i * s.ldv + s.V] = 1;
  }
  MapRows places(bool key, int64_t at, int rows) const { return {b, h, at, 1, key, rows}; }
  void find_features(bool key, int64_t from, int64_t to) const {
    const FeatureSelf<T> map = map_of(s, maps, key);
    for (int64_t at = from; at < to; at += kChunk) {
      const int rows = rows_at(at, to);
      load(key ? args.k : args.q, key ? at : at - past, rows, r.q, s.ldk);
      features_apply<T>(&map, places(key, at, rows), r.q, s.ldk, (key ? r.fk : r.fq) + at * s.ldf, s.ldf, r.map);
    }
  }
  void find_features() const {
    find_features(false, 0, s.length);
    find_features(true, 0, s.length);
  }
  T share() const {
    return static_cast<T>(1 / (1 + __builtin_exp(-entry(args.window_factor, h))));  // g
  }
  // Keys [from, to) into the state.
  void absorb(int64_t from, int64_t to) const {
    for (; from < to; from += kChunk) {
      const int n = rows_at(from, to);
      const T* f = r.fk + from * s.ldf;
      load_values(from, n);
      gemm<T>(s.features, s.V + 1, n, transposed(f, s.ldf), r.v, s.ldv, r.S, s.ldv, Add{});
      if (r.St != nullptr) {
        gemm<T>(s.V + 1, s.features, n, transposed(static_cast<const T*>(r.v), s.ldv), f, s.ldf, r.St, s.ldf, Add{});
      }
    }
  }

  struct Tile {
    int64_t first, lo, end;  // rows from `first`, keys [lo, end)
    int rows;
    int64_t far_end;  // keys before it are far for some row
  };
  Tile tile_at(bool terraced, int64_t first) const {
    const int rows = rows_at(first, s.length);
    return {first, s.begin(terraced, first), first + rows, rows, s.begin(terraced, first + rows - 1)};
  }
  // p: the weights; o: their sums with [v | 1], the state's part included. The queries stand in r.q.
  void weigh(bool terraced, const Tile& t) const {
    const T* fq = r.fq + t.first * s.ldf;
    load(args.q, t.first - past, t.rows, r.q, s.ldk);
    for (int64_t at = t.lo; at < t.end; at += kChunk) {
      const int n = rows_at(at, t.end);
      load(args.k, at, n, r.k, s.ldk);
      load_tile_transposed<T>(static_cast<const T*>(r.k), s.ldk, n, s.K, r.kt, kChunk);
      gemm<T>(t.rows, n, s.K, as_is(static_cast<const T*>(r.q), s.ldk), r.kt, kChunk, r.p + (at - t.lo), s.span,
              Scale<T>{s.scale});
      if (at >= t.far_end) continue;
      load_tile_transposed<T>(static_cast<const T*>(r.fk) + at * s.ldf, s.ldf, n, s.features, r.ft, kChunk);
      gemm<T>(t.rows, n, s.features, as_is(fq, s.ldf), r.ft, kChunk, r.far + (at - t.lo), s.span, Store{});
    }
    const T g = share();
    const int64_t keys = t.end - t.lo;
    for (int i = 0; i < t.rows; ++i) {
      T* p = r.p + i * s.span;
      const int64_t near = s.begin(terraced, t.first + i) - t.lo, last = t.first + i - t.lo;
      const int n = static_cast<int>(last - near + 1);
      const T top = static_cast<T>(top_of(p + near, n, T(1)));
      if (r.largest != nullptr) {
        int at = static_cast<int>(near);
        while (at < last && p[at] != top) ++at;
        r.largest[i] = at;
      }
      const V less = X::broadcast(top), factor = X::broadcast(g);
      for (int c = 0; c < n; c += X::W) X::store(p + near + c, exp(X::load(p + near + c, n - c) - less) * factor, n - c);
      for (int64_t j = 0; j < near; ++j) p[j] = r.far[i * s.span + j];
      for (int64_t j = last + 1; j < keys; ++j) p[j] = 0;
    }
    gemm<T>(t.rows, s.V + 1, s.features, as_is(fq, s.ldf), r.S, s.ldv, r.o, s.ldv, Store{});
    for (int64_t at = t.lo; at < t.end; at += kChunk) {
      const int n = rows_at(at, t.end);
      load_values(at, n);
      const T* p = r.p + (at - t.lo);
      if (rows_are_finite<T>(r.v, s.ldv, n, s.V + 1)) {
        gemm<T>(t.rows, s.V + 1, n, as_is(p, s.span), r.v, s.ldv, r.o, s.ldv, Add{});
        continue;
      }
      for (int i = 0; i < t.rows; ++i) {  // exactly the keys that a row sees: a weight of 0 does not hide a NaN
        const int64_t seen = t.first + i + 1 - at;
        const int visible = seen < n ? static_cast<int>(seen) : n;
        if (visible > 0) gemm<T>(1, s.V + 1, visible, as_is(p + i * s.span, s.span), r.v, s.ldv, r.o + i * s.ldv, s.ldv, Add{});
      }
    }
  }

  void hybrid(bool terraced, const View& out) const {
    clear(r.S, s.features * s.ldv);
    walk(terraced, out, 0, 0);
  }
  // Rows from `from` on; the state holds the keys before `absorbed`.
  void walk(bool terraced, const View& out, int64_t from, int64_t absorbed) const {
    for (int64_t first = from; first < s.length; first += kChunk) {
      const Tile t = tile_at(terraced, first);
      T inverse[kChunk];
      absorb(absorbed, t.lo);
      absorbed = t.lo;
      weigh(terraced, t);
      for (int i = 0; i < t.rows; ++i) {
        const T den = r.o[i * s.ldv + s.V];
        inverse[i] = den == 0 ? T(0) : 1 / den;
      }
      store_rows<T>(r.o, s.ldv, t.rows, s.V, out, row_of(out, b, first - past, h), out.stride[1], inverse);
    }
    if (s.length > from) absorb(absorbed, s.begin(terraced, s.length - 1));
  }

  // Adds to dq, dk, dv, dfq, dfk; returns what the window's logit gets.
  double hybrid_backward(bool terraced, const View& dout) const {
    int64_t absorbed = 0;
    double dfactor = 0;
    clear(r.S, s.features * s.ldv);
    clear(r.St, (s.V + 1) * s.ldf);
    const double more = 1 / (1 + __builtin_exp(entry(args.window_factor, h)));  // 1 - g
    for (int64_t first = 0; first < s.length; first += kChunk) {
      const Tile t = tile_at(terraced, first);
      absorb(absorbed, t.lo);
      absorbed = t.lo;
      weigh(terraced, t);
      T* g = r.g + first * s.ldv;
      load(dout, first, t.rows, g, s.ldv);
      for (int i = 0; i < t.rows; ++i) {
        T* row = g + i * s.ldv;
        const T* o = r.o + i * s.ldv;
        const T inverse = o[s.V] == 0 ? T(0) : 1 / o[s.V];
        T dot = 0;
        for (int c = 0; c < s.V; ++c) {
          row[c] *= inverse;
          dot += row[c] * o[c] * inverse;
        }
        row[s.V] = -dot;
      }
      dfactor += more * strip_backward(terraced, t, g);
      gemm<T>(t.rows, s.features, s.V + 1, as_is(static_cast<const T*>(g), s.ldv), r.St, s.ldf, r.dfq + first * s.ldf, s.ldf,
              Add{});
    }
    // Backward in time: R and its transpose, over the rows of later tiles, for the keys that these hold in their state.
    clear(r.S, s.features * s.ldv);
    clear(r.St, (s.V + 1) * s.ldf);
    int64_t end = s.length;
    for (int64_t first = (s.length - 1) / kChunk * kChunk; first >= 0; first -= kChunk) {
      const Tile t = tile_at(terraced, first);
      for (int64_t at = t.lo; at < end; at += kChunk) {
        const int n = rows_at(at, end);
        load_values(at, n);
        gemm<T>(n, s.features, s.V + 1, as_is(static_cast<const T*>(r.v), s.ldv), r.St, s.ldf, r.dfk + at * s.ldf, s.ldf,
                Add{});
        gemm<T>(n, s.V, s.features, as_is(static_cast<const T*>(r.fk) + at * s.ldf, s.ldf), r.S, s.ldv, r.dv + at * s.ldv,
                s.ldv, Add{});
      }
      end = t.lo;
      const T* fq = r.fq + first * s.ldf;
      const T* g = r.g + first * s.ldv;
      gemm<T>(s.features, s.V + 1, t.rows, transposed(fq, s.ldf), g, s.ldv, r.S, s.ldv, Add{});
      gemm<T>(s.V + 1, s.features, t.rows, transposed(g, s.ldv), fq, s.ldf, r.St, s.ldf, Add{});
    }
    return dfactor;
  }
  // What the tile's strip gives its rows and keys; returns the sum of a e over the windows, e = g^.[v | 1] the gradient of a.
  double strip_backward(bool terraced, const Tile& t, const T* g) const {
    double all = 0;
    for (int64_t at = t.lo; at < t.end; at += kChunk) {
      const int n = rows_at(at, t.end);
      load_values(at, n);
      load_tile_transposed<T>(static_cast<const T*>(r.v), s.ldv, n, s.V + 1, r.vt, kChunk);
      gemm<T>(t.rows, n, s.V + 1, as_is(g, s.ldv), r.vt, kChunk, r.e + (at - t.lo), s.span, Store{});
      gemm<T>(n, s.V, t.rows, transposed(static_cast<const T*>(r.p) + (at - t.lo), s.span), g, s.ldv, r.dv + at * s.ldv, s.ldv,
              Add{});
    }
    for (int i = 0; i < t.rows; ++i) {
      T* p = r.p + i * s.span;  // becomes the gradient of the scores' products
      T* e = r.e + i * s.span;  // keeps that of the far weights
      const int64_t near = s.begin(terraced, t.first + i) - t.lo, last = t.first + i - t.lo, keys = t.end - t.lo;
      T total = 0;
      for (int64_t j = 0; j < near; ++j) p[j] = 0;
      for (int64_t j = near; j <= last; ++j) {
        const T d = p[j] * e[j];
        total += d;
        p[j] = d * s.scale;
      }
      for (int64_t j = near; j < keys; ++j) e[j] = 0;
      p[r.largest[i]] -= total * s.scale;
      all += static_cast<double>(total);
    }
    for (int64_t at = t.lo; at < t.end; at += kChunk) {
      const int n = rows_at(at, t.end);
      const T* p = r.p + (at - t.lo);
      const T* e = r.e + (at - t.lo);
      load(args.k, at, n, r.k, s.ldk);
      gemm<T>(t.rows, s.K, n, as_is(p, s.span), r.k, s.ldk, r.dq + t.first * s.ldk, s.ldk, Add{});
      gemm<T>(n, s.K, t.rows, transposed(p, s.span), r.q, s.ldk, r.dk + at * s.ldk, s.ldk, Add{});
      if (at >= t.far_end) continue;
      gemm<T>(t.rows, s.features, n, as_is(e, s.span), r.fk + at * s.ldf, s.ldf, r.dfq + t.first * s.ldf, s.ldf, Add{});
      gemm<T>(n, s.features, t.rows, transposed(e, s.span), r.fq + t.first * s.ldf, s.ldf, r.dfk + at * s.ldf, s.ldf, Add{});
    }
    return all;
  }
  // Gradients of the features through their map, added to those of the scores.
  void leave(bool key, const View& dx, T* dparam) const {
    const FeatureSelf<T> map = map_of(s, maps, key);
    for (int64_t at = 0; at < s.length; at += kChunk) {
      const int rows = rows_at(at, s.length);
      T* sums = (key ? r.dk : r.dq) + at * s.ldk;
      load(key ? args.k : args.q, at, rows, r.q, s.ldk);
      features_backward_rows<T>(&map, places(key, at, rows), r.q, s.ldk, (key ? r.dfk : r.dfq) + at * s.ldf, s.ldf, r.k, dparam,
                                r.map);
      for (int64_t c = 0; c < rows * s.ldk; c += X::W) X::store(sums + c, X::load(sums + c) + X::load(r.k + c));
      if (dx.given()) store_rows<T>(sums, s.ldk, rows, s.K, dx, row_of(dx, b, at, h), dx.stride[1], nullptr);
    }
  }
};

// ---- statistics

struct Row {
  double entropy = 0, uniform = 0, distance = 0, sink = 0, mass[Sizes::kMax] = {};
};
struct Statistics {
  double *q, *k, *kt, *strip;                    // [C, ldk], [C, ldk], [K, C], [C, T]
  double *weights, *turned, *gram, *values, *e;  // [N, ldr] three times, N = min(T, 512); [N], [N]
  int64_t ldt, N, ldr;
};
Statistics cut_statistics(Arena& arena, const Shape<double>& s) {
  Statistics r;
  r.ldt = (s.length + kChunk - 1) / kChunk * kChunk + kChunk;
  r.N = s.length < kDistillRankBlock ? s.length : kDistillRankBlock;
  r.ldr = round_up<double>(r.N);
  for (double** x : {&r.q, &r.k}) *x = arena.take<double>(kChunk * s.ldk);
  r.kt = arena.take<double>(s.K * kChunk);
  r.strip = arena.take<double>(kChunk * r.ldt);
  for (double** x : {&r.weights, &r.turned, &r.gram}) *x = arena.take<double>(r.N * r.ldr);
  for (double** x : {&r.values, &r.e}) *x = arena.take<double>(r.N);
  return r;
}
// Scores less their row's largest of rows [first, first + rows) over keys [begin, ...]; calls body(row, score, how many).
template <class Body>
void each_row(const DistillWindowArgs& args, const Shape<double>& s, const Statistics& r, int64_t b, int64_t h, int64_t begin,
              int64_t first, int64_t end, const Body& body) {
  using X = Vec<double>;
  const int rows = static_cast<int>(end - first < kChunk ? end - first : kChunk);
  const auto load = [&](const View& x, int64_t at, int n, double* to) {
    load_rows<double>(x, row_of(x, b, at, h), x.stride[1], n, s.K, to, s.ldk);
  };
  load(args.q, first, rows, r.q);
  for (int64_t at = begin; at < first + rows; at += kChunk) {
    const int n = static_cast<int>(first + rows - at < kChunk ? first + rows - at : kChunk);
    load(args.k, at, n, r.k);
    load_tile_transposed<double>(static_cast<const double*>(r.k), s.ldk, n, s.K, r.kt, kChunk);
    gemm<double>(rows, n, s.K, as_is(static_cast<const double*>(r.q), s.ldk), r.kt, kChunk, r.strip + (at - begin), r.ldt,
                 Scale<double>{s.scale});
  }
  for (int i = 0; i < rows; ++i) {
    double* row = r.strip + i * r.ldt;
    const int n = static_cast<int>(first + i - begin + 1);
    const X::V top = X::broadcast(top_of(row, n, 1.0));
    for (int c = 0; c < n; c += X::W) X::store(row + c, X::load(row + c, n - c) - top, n - c);
    body(first + i, row, n);
  }
}
// Adds the statistics of rows of one tile, over all their keys.
void add_rows(const DistillWindowArgs& args, const Shape<double>& s, const Statistics& r, int64_t b, int64_t h, int64_t first,
              Row* to) {
  using X = Vec<double>;
  each_row(args, s, r, b, h, 0, first, s.length, [&](int64_t i, double* row, int n) {
    X::V sums = X::zero(), logs = X::zero(), far = X::zero();
    double places[X::W];
    for (int l = 0; l < X::W; ++l) places[l] = static_cast<double>(i - l);
    X::V distance = X::load(places);
    for (int c = 0; c < n; c += X::W) {
      const X::V score = X::load(row + c, n - c), e = select(X::prefix(n - c), exp(score), X::zero());
      sums += e;
      logs = fma(e, score, logs);
      far = fma(e, distance, far);
      distance = distance - X::broadcast(X::W);
      X::store(row + c, e, n - c);
    }
    const double total = sum(sums), share = 1 / total;
    to->entropy += __builtin_log(total) - sum(logs) * share;  // -sum p log p, log p = score - log total
    to->uniform += __builtin_log(static_cast<double>(n));
    to->distance += sum(far) * share;
    to->sink += sum_of(row, args.sinks < n ? args.sinks : n) * share;
    for (int64_t w = 0; w < args.windows.count; ++w) {
      const int64_t wide = args.windows.value[w] < n ? args.windows.value[w] : n;
      to->mass[w] += sum_of(row + (n - wide), wide) * share;
    }
  });
}
// Ranks of one block as a sequence of its own, by the eigenvalues of P P^T.
void ranks(const DistillWindowArgs& args, const Shape<double>& s, const Statistics& r, int64_t b, int64_t h, int64_t begin,
           double* to) {
  using X = Vec<double>;
  const int64_t end = begin + r.N < s.length ? begin + r.N : s.length;
  const int n = static_cast<int>(end - begin);
  clear(r.weights, n * r.ldr);
  for (int64_t first = begin; first < end; first += kChunk) {
    each_row(args, s, r, b, h, begin, first, end, [&](int64_t i, double* row, int keys) {
      double* p = r.weights + (i - begin) * r.ldr;
      X::V sums = X::zero();
      for (int c = 0; c < keys; c += X::W) {
        const X::V e = select(X::prefix(keys - c), exp(X::load(row + c, keys - c)), X::zero());
        sums += e;
        X::store(p + c, e, keys - c);
      }
      const X::V share = X::broadcast(1 / sum(sums));
      for (int c = 0; c < keys; c += X::W) X::store(p + c, X::load(p + c, keys - c) * share, keys - c);
    });
  }
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) r.turned[j * r.ldr + i] = r.weights[i * r.ldr + j];
  }
  gemm<double>(n, n, n, as_is(static_cast<const double*>(r.weights), r.ldr), r.turned, r.ldr, r.gram, r.ldr, Store{});
  double trace = 0, entropy = 0;
  for (int64_t i = 0; i < n; ++i) {
    trace += r.gram[i * r.ldr + i];
    for (int64_t j = 0; j < n; ++j) r.weights[i * n + j] = r.gram[i * r.ldr + j];  // dense rows, as the eigensolver wants
  }
  symmetric_eigenvalues(n, r.weights, r.values, r.e);
  for (int64_t i = 0; i < n; ++i) {
    const double share = r.values[i] / trace;
    if (share > 0) entropy -= share * __builtin_log(share);
  }
  to[0] = trace / r.values[0];
  to[1] = __builtin_exp(entropy);
}

// Sums by task, added up in order: tiles of 256 rows (their cost grows with their place), and blocks of ranks.
inline constexpr int64_t kTaskRows = 256;
struct Parts {
  Row* rows;      // [B, H, tasks]
  double* ranks;  // [B, H, blocks, 2]
  double *entropy, *distance;
  int64_t tasks, blocks;
};
Parts cut_parts(Arena& arena, const Shape<double>& s) {
  Parts p;
  p.tasks = (s.length + kTaskRows - 1) / kTaskRows;
  p.blocks = (s.length + kDistillRankBlock - 1) / kDistillRankBlock;
  p.rows = arena.take<Row>(s.B * s.H * p.tasks);
  p.ranks = arena.take<double>(s.B * s.H * p.blocks * 2);
  p.entropy = arena.take<double>(s.H);
  p.distance = arena.take<double>(s.H);
  return p;
}
void statistics(const DistillWindowArgs& args, const DistillWindowOut& out, const Launch& launch) {
  const Shape<double> s = shape_of<double>(args);
  Arena arena(launch.workspace), each;
  const Parts parts = cut_parts(arena, s);
  cut_statistics(each, s);
  const auto own = [&](int worker) {
    Arena mine(launch.workspace + arena.used() + worker * each.used());
    return cut_statistics(mine, s);
  };
  const bool rows = out.entropy.given() || out.entropy_ratio.given() || out.distance.given() || out.window_mass.given() ||
                    out.sink_mass.given() || out.gate_dt_bias.given() || out.gate_beta.given() || out.gate_beta_logit.given();
  if (rows) {
    parallel(launch, s.B * s.H * parts.tasks, [&](int64_t task, int worker) {
      const Statistics r = own(worker);
      const int64_t b = task / parts.tasks / s.H, h = task / parts.tasks % s.H, begin = task % parts.tasks * kTaskRows;
      Row& sums = parts.rows[task] = Row();
      for (int64_t at = begin; at < s.length && at < begin + kTaskRows; at += kChunk) add_rows(args, s, r, b, h, at, &sums);
    });
  }
  const bool wants_ranks = out.stable_rank.given() || out.effective_rank.given();
  if (wants_ranks) {
    parallel(launch, s.B * s.H * parts.blocks, [&](int64_t task, int worker) {
      const int64_t b = task / parts.blocks / s.H, h = task / parts.blocks % s.H;
      ranks(args, s, own(worker), b, h, task % parts.blocks * kDistillRankBlock, parts.ranks + task * 2);
    });
  }
  const double count = static_cast<double>(s.B * s.length > 0 ? s.B * s.length : 1);
  for (int64_t h = 0; h < s.H; ++h) {
    Row sums;
    double stable = 0, effective = 0;
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t i = 0; rows && i < parts.tasks; ++i) {
        const Row& part = parts.rows[(b * s.H + h) * parts.tasks + i];
        sums.entropy += part.entropy;
        sums.uniform += part.uniform;
        sums.distance += part.distance;
        sums.sink += part.sink;
        for (int64_t w = 0; w < args.windows.count; ++w) sums.mass[w] += part.mass[w];
      }
      for (int64_t i = 0; wants_ranks && i < parts.blocks; ++i) {
        stable += parts.ranks[((b * s.H + h) * parts.blocks + i) * 2];
        effective += parts.ranks[((b * s.H + h) * parts.blocks + i) * 2 + 1];
      }
    }
    const double blocks = static_cast<double>(s.B * parts.blocks > 0 ? s.B * parts.blocks : 1);
    parts.entropy[h] = sums.entropy / count;
    parts.distance[h] = sums.distance / count;
    put(out.entropy, parts.entropy[h], h);
    put(out.entropy_ratio, sums.uniform == 0 ? 0 : sums.entropy / sums.uniform, h);
    put(out.distance, parts.distance[h], h);
    put(out.sink_mass, sums.sink / count, h);
    put(out.stable_rank, stable / blocks, h);
    put(out.effective_rank, effective / blocks, h);
    for (int64_t w = 0; w < args.windows.count; ++w) put(out.window_mass, sums.mass[w] / count, h, w);
  }
  distill_gates(out, s.H, parts.entropy, parts.distance);
}
int64_t statistics_bytes(const DistillWindowArgs& args, int workers) {
  const Shape<double> s = shape_of<double>(args);
  Arena arena, each;
  cut_parts(arena, s);
  cut_statistics(each, s);
  return arena.used() + workers * each.used();
}

// Gradients of the maps and of the window's logit, by batch row and head.
struct Gradients {
  double* maps;     // [2 (q, k), B, H, K ldn + ldn]
  double* factors;  // [B, H]
  int64_t params;
};
Gradients cut_gradients(Arena& arena, const Shape<double>& s) {
  Gradients g;
  g.params = s.K * s.ldn + s.ldn;
  g.maps = arena.take<double>(2 * s.B * s.H * g.params);
  g.factors = arena.take<double>(s.B * s.H);
  return g;
}

}  // namespace

void distill_window_forward(const DistillWindowArgs& args, const DistillWindowOut& out, const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    const Shape<T> s = shape_of<T>(args);
    Arena arena(launch.workspace), each;
    const Maps<T> maps = cut_maps(arena, s);
    cut_scratch(each, s, maps, Pass::forward);
    load_maps(args, s, maps);
    const bool features = out.fq.given() || out.fk.given() || out.out_sliding.given() || out.out_terraced.given();
    parallel(launch, features ? s.B * s.H : 0, [&](int64_t task, int worker) {
      Arena mine(launch.workspace + arena.used() + worker * each.used());
      const Scratch<T> r = cut_scratch(mine, s, maps, Pass::forward);
      const Head<T> head{args, s, maps, r, task / s.H, task % s.H};
      head.find_features();
      const auto store = [&](const View& view, const T* f) {
        if (!view.given() || s.length == 0) return;
        store_rows<T>(f, s.ldf, static_cast<int>(s.length), s.features, view, row_of(view, head.b, 0, head.h), view.stride[1],
                      nullptr);
      };
      store(out.fq, r.fq);
      store(out.fk, r.fk);
      if (out.out_sliding.given()) head.hybrid(false, out.out_sliding);
      if (out.out_terraced.given()) head.hybrid(true, out.out_terraced);
    });
  });
  statistics(args, out, launch);
}

void distill_window_backward(const DistillWindowArgs& args, const DistillWindowOut&, const DistillWindowGrads& grads,
                             const Launch& launch) {
  const Shape<double> s = shape_of<double>(args);
  Arena arena(launch.workspace), each;
  const Maps<double> maps = cut_maps(arena, s);
  const Gradients sums = cut_gradients(arena, s);
  cut_scratch(each, s, maps, Pass::backward);
  load_maps(args, s, maps);
  parallel(launch, s.B * s.H, [&](int64_t task, int worker) {
    Arena mine(launch.workspace + arena.used() + worker * each.used());
    const Scratch<double> r = cut_scratch(mine, s, maps, Pass::backward);
    const Head<double> head{args, s, maps, r, task / s.H, task % s.H};
    for (double* x : {r.dq, r.dk}) clear(x, s.length * s.ldk);
    for (double* x : {r.dfq, r.dfk}) clear(x, s.length * s.ldf);
    clear(r.dv, s.length * s.ldv);
    head.find_features();
    double dfactor = 0;
    if (grads.dout_sliding.given()) dfactor += head.hybrid_backward(false, grads.dout_sliding);
    if (grads.dout_terraced.given()) dfactor += head.hybrid_backward(true, grads.dout_terraced);
    sums.factors[task] = dfactor;
    for (const bool key : {false, true}) {
      double* dparam = sums.maps + ((key ? s.B * s.H : 0) + task) * sums.params;
      clear(dparam, sums.params);
      head.leave(key, key ? grads.dk : grads.dq, dparam);
    }
    if (!grads.dv.given() || s.length == 0) return;
    store_rows<double>(r.dv, s.ldv, static_cast<int>(s.length), s.V, grads.dv, row_of(grads.dv, head.b, 0, head.h),
                       grads.dv.stride[1], nullptr);
  });
  for (int64_t h = 0; h < s.H; ++h) {
    double factor = 0;
    for (int64_t b = 0; b < s.B; ++b) factor += sums.factors[b * s.H + h];
    put(grads.dwindow_factor, factor, h);
    for (const bool key : {false, true}) {
      for (int64_t i = 0; i < s.K * s.F; ++i) {
        double total = 0;
        for (int64_t b = 0; b < s.B; ++b) {
          total += sums.maps[((key ? s.B * s.H : 0) + b * s.H + h) * sums.params + i / s.F * s.ldn + i % s.F];
        }
        put(key ? grads.dwk : grads.dwq, total, h, i / s.F, i % s.F);
      }
    }
  }
}

// ---- token by token

namespace {

// The call of distill_window over the buffer of near keys.
DistillWindowArgs over_buffer(const DistillWindowDecodeArgs& args) {
  DistillWindowArgs to;
  to.q = args.q;
  to.k = args.k_near;
  to.v = args.v_near;
  to.wq = args.wq;
  to.wk = args.wk;
  to.window_factor = args.window_factor;
  to.window = args.window;
  return to;
}
template <class T>
Shape<T> buffer_shape(const DistillWindowArgs& args) {
  DistillWindowArgs whole = args;
  whole.q.size[1] = args.k.size[1];
  return shape_of<T>(whole);
}
void copy_rows(const View& from, int64_t at, const View& to, int64_t place, int64_t rows, int64_t b, int64_t h) {
  const int64_t bytes = dtype_size(from.dtype);
  for (int64_t i = 0; i < rows; ++i) {
    const char* source = static_cast<const char*>(from.data) + row_of(from, b, at + i, h) * bytes;
    __builtin_memcpy(static_cast<char*>(to.data) + row_of(to, b, place + i, h) * bytes, source,
                     static_cast<size_t>(to.size[3] * bytes));
  }
}

// The tokens of one head: into the buffer as many as it takes, over these the tiles, then its older half moves out.
template <class T>
void continue_head(const DistillWindowDecodeArgs& args, const DistillWindowArgs& buffer, Shape<T> s, const Maps<T>& maps,
                   const Scratch<T>& r, const View& out, int64_t b, int64_t h) {
  const bool terraced = args.form == DistillForm::terraced;
  const int64_t tokens = args.q.size[1], room = 2 * s.window;
  const auto state_at = [&](int64_t f) {
    return static_cast<T*>(args.state.data) + b * args.state.stride[0] + h * args.state.stride[1] + f * args.state.stride[2];
  };
  const auto n_at = [&](int64_t f) {
    return static_cast<T*>(args.n.data) + b * args.n.stride[0] + h * args.n.stride[1] + f * args.n.stride[2];
  };
  clear(r.S, s.features * s.ldv);
  for (int64_t f = 0; f < s.features; ++f) {
    __builtin_memcpy(r.S + f * s.ldv, state_at(f), static_cast<size_t>(s.V) * sizeof(T));
    r.S[f * s.ldv + s.V] = *n_at(f);
  }
  int64_t held = distill_held_rows(args.held, b);
  int64_t absorbed = held > 0 ? s.begin(terraced, held - 1) : 0;
  for (int64_t t = 0; t < tokens;) {
    if (held == room) {
      s.length = room;
      const Head<T> head{buffer, s, maps, r, b, h};
      head.find_features(true, absorbed, s.window);
      head.absorb(absorbed, s.window);
      for (const View* near : {&args.k_near, &args.v_near}) copy_rows(*near, s.window, *near, 0, s.window, b, h);
      held = s.window;
      absorbed = 0;
    }
    const int64_t count = tokens - t < room - held ? tokens - t : room - held;
    copy_rows(args.k, t, args.k_near, held, count, b, h);
    copy_rows(args.v, t, args.v_near, held, count, b, h);
    s.length = held + count;
    const Head<T> head{buffer, s, maps, r, b, h, held - t};
    const int64_t leaves = s.begin(terraced, s.length - 1);
    head.find_features(false, held, s.length);
    head.find_features(true, absorbed, leaves);
    head.walk(terraced, out, held, absorbed);
    absorbed = leaves;
    held += count;
    t += count;
  }
  for (int64_t f = 0; f < s.features; ++f) {
    __builtin_memcpy(state_at(f), r.S + f * s.ldv, static_cast<size_t>(s.V) * sizeof(T));
    *n_at(f) = r.S[f * s.ldv + s.V];
  }
}

}  // namespace

void distill_window_decode_forward(const DistillWindowDecodeArgs& args, const DistillWindowDecodeOut& out,
                                   const Launch& launch) {
  const DistillWindowArgs buffer = over_buffer(args);
  by_type(args.q.dtype, [&]<class T>() {
    const Shape<T> s = buffer_shape<T>(buffer);
    Arena arena(launch.workspace), each;
    const Maps<T> maps = cut_maps(arena, s);
    cut_scratch(each, s, maps, Pass::forward);
    load_maps(buffer, s, maps);
    parallel(launch, s.B * s.H, [&](int64_t task, int worker) {
      Arena mine(launch.workspace + arena.used() + worker * each.used());
      continue_head(args, buffer, s, maps, cut_scratch(mine, s, maps, Pass::forward), out.out, task / s.H, task % s.H);
    });
  });
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    distill_window_hold(args.held, b, distill_window_held(args.window, distill_held_rows(args.held, b) + args.q.size[1]));
  }
}

int64_t distill_window_decode_workspace(const DistillWindowDecodeArgs& args, Pass, int workers) {
  const DistillWindowArgs buffer = over_buffer(args);
  return by_type(args.q.dtype, [&]<class T>() {
    const Shape<T> s = buffer_shape<T>(buffer);
    Arena arena, each;
    const Maps<T> maps = cut_maps(arena, s);
    cut_scratch(each, s, maps, Pass::forward);
    return arena.used() + workers * each.used();
  });
}

int64_t distill_window_workspace(const DistillWindowArgs& args, Pass pass, int workers) {
  return by_type(pass == Pass::backward ? Dtype::f64 : args.q.dtype, [&]<class T>() {
    const Shape<T> s = shape_of<T>(args);
    Arena arena, each;
    const Maps<T> maps = cut_maps(arena, s);
    if (pass == Pass::backward) cut_gradients(arena, shape_of<double>(args));
    cut_scratch(each, s, maps, pass);
    const int64_t hybrid = arena.used() + workers * each.used(), other = statistics_bytes(args, workers);
    return pass == Pass::backward || hybrid > other ? hybrid : other;
  });
}

}  // namespace linnet::LINNET_ISA
