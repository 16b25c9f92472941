// zeros_softmax for one instruction set: two passes over the keys, queries in the lanes, nothing of size T x T.
//
//   mean_t = scale <q_t, kbar_t>, keys minus the first key, kbar_t their running mean
//   pass 1: dbar = mean_i (s_ti - mean_t),  delta = s - mean - dbar,  gap = log mean exp(delta), by log1p(mean(expm1 - id))
//   pass 2: r_ti = [ sh expm1(delta - gap) + (s1 - sh) delta + s0 ] / n,  o = r v
// (Splitting it into softmax and linear attention cancels: 3e-5 for scores of standard deviation 0.1, where this holds 3e-7.)
// Backward: pass 1 again, a pass for the row sums X, Y and the gates, a pass for dq; then key tiles for dk and dv.
#include "mechanisms/softmax/softmax_problem.h"
#include "simd/finite.h"
#include "simd/gemm.h"
#include "zeros.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int kTile = 64;

LINNET_INLINE int64_t row_of(const View& x, int64_t b, int64_t t, int64_t h) {
  return b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
}

// Of the rows of one tile of queries. [kTile] each.
template <class T>
struct Lanes {
  T mean[kTile], dbar[kTile], gap[kTile], inverse[kTile], s1[kTile], sh[kTile], s0[kTile], all[kTile], flat[kTile];
};

template <class T>
struct Scratch {
  int64_t K, V, ldk, ldv;
  T *k, *v, *q, *d, *qt, *dt, *means, *st, *xt, *wt, *ot, *dqt, *dk, *dv, *first, *rows;
  Lanes<T>* lanes;
  int64_t bytes;
  Scratch(char* base, const ZerosSoftmaxArgs& args) {
    Arena arena(base);
    K = args.q.size[3];
    V = args.v.size[3];
    ldk = round_up<T>(K);
    ldv = round_up<T>(V);
    for (T** p : {&k, &q, &dk, &means}) *p = arena.take<T>(kTile * ldk);
    for (T** p : {&v, &d, &dv}) *p = arena.take<T>(kTile * ldv);
    for (T** p : {&qt, &dqt}) *p = arena.take<T>(K * kTile);
    for (T** p : {&dt, &ot}) *p = arena.take<T>(V * kTile);
    for (T** p : {&st, &xt, &wt}) *p = arena.take<T>(kTile * kTile);
    rows = arena.take<T>(kTile * (ldk > ldv ? ldk : ldv));
    first = arena.take<T>(ldk);
    lanes = arena.take<Lanes<T>>(1);
    bytes = arena.used();
  }
};

// Workspace: running means of the keys [B, H, T or 1, ldk], then per row (b, h, t) what the backward's key pass needs.
template <class T>
struct Means {
  T* means;
  Lanes<T>* lanes;  // [B, H, tiles]
  char* workers;
  int64_t worker_bytes, mean_rows, tiles, bytes;
  Means(char* base, const ZerosSoftmaxArgs& args, Pass pass, int worker_count) {
    Arena arena(base);
    const int64_t heads = args.q.size[0] * args.q.size[2], tokens = args.q.size[1];
    tiles = divide_up(tokens, kTile);
    mean_rows = args.causal ? tokens : 1;
    means = arena.take<T>(heads * mean_rows * round_up<T>(args.q.size[3]));
    lanes = arena.take<Lanes<T>>(pass == Pass::backward ? heads * tiles : 0);
    worker_bytes = Scratch<T>(nullptr, args).bytes;
    workers = arena.take<char>(worker_bytes * worker_count);
    bytes = arena.used();
  }
};

template <class T>
struct Unit {
  using X = Vec<T>;
  using Vector = typename X::V;
  const ZerosSoftmaxArgs& args;
  const Means<T>& plan;
  const Scratch<T>& s;
  int64_t b, h;

  int64_t tokens() const { return args.q.size[1]; }
  T scale() const { return static_cast<T>(default_scale(args.scale, s.K)); }
  const T* mean_row(int64_t t) const {
    return plan.means + ((b * args.q.size[2] + h) * plan.mean_rows + (args.causal ? t : 0)) * s.ldk;
  }
  void load(const View& x, int64_t at, int rows, int64_t width, T* to, int64_t ld) const {
    if (x.given()) {
      with_type<T>(x, row_of(x, b, at, h),
                   [&](const auto* p) { load_tile<T>(p, x.stride[1], rows, static_cast<int>(width), to, ld); });
    }
    for (int64_t i = x.given() ? rows * ld : 0; i < kTile * ld; ++i) to[i] = 0;
  }
  void load_first() const {
    with_type<T>(args.k, row_of(args.k, b, 0, h),
                 [&](const auto* p) { load_tile<T>(p, 0, 1, static_cast<int>(s.K), s.first, s.ldk); });
  }
  void load_keys(int64_t at, int rows) const {  // minus the first key
    load(args.k, at, rows, s.K, s.k, s.ldk);
    for (int r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < s.ldk; c += X::W)
        X::store(s.k + r * s.ldk + c, X::load(s.k + r * s.ldk + c) - X::load(s.first + c));
    }
  }
  // Running means of the keys, summed in double.
  void make_means() const {
    load_first();
    T* const to = const_cast<T*>(mean_row(0));
    for (int64_t c = 0; c < s.ldk; ++c) {
      double sum = 0;
      for (int64_t t = 0; t < tokens(); ++t) {
        if (c < s.K) {
          const T k = element_at<T>(args.k, row_of(args.k, b, t, h) + c);
          sum += static_cast<double>(k) - static_cast<double>(s.first[c]);
        }
        if (args.causal) to[t * s.ldk + c] = static_cast<T>(sum / static_cast<double>(t + 1));
      }
      if (!args.causal) to[c] = static_cast<T>(sum / static_cast<double>(tokens()));
    }
  }

  // ---- a tile of queries

  void load_queries(int64_t at, int rows) const {
    load(args.q, at, rows, s.K, s.q, s.ldk);
    load_tile_transposed<T>(static_cast<const T*>(s.q), s.ldk, kTile, static_cast<int>(s.K), s.qt, kTile, scale());
  }
  // mean_t of the tile, its gates and 1/n.
  void begin(int64_t at, int rows) const {
    load_first();
    load_queries(at, rows);
    for (int r = 0; r < kTile; ++r) {
      const int64_t t = at + (r < rows ? r : rows - 1);
      const auto number = [&](const View& x) { return x.given() ? element_at<T>(x, row_of(x, b, t, h)) : T(0); };
      Vector sum_of = X::zero();
      const T* const mean = mean_row(t);
      for (int64_t c = 0; c < s.ldk; c += X::W) sum_of = fma(X::load(s.q + r * s.ldk + c), X::load(mean + c), sum_of);
      s.lanes->mean[r] = r < rows ? sum(sum_of) * scale() : T(0);
      s.lanes->inverse[r] = static_cast<T>(1 / static_cast<double>(args.causal ? t + 1 : tokens()));
      s.lanes->s1[r] = number(args.s1);
      s.lanes->sh[r] = number(args.sh);
      s.lanes->s0[r] = number(args.s0);
      s.lanes->dbar[r] = s.lanes->gap[r] = 0;
    }
  }
  int64_t key_end(int64_t at, int rows) const { return args.causal ? at + rows : tokens(); }
  // Which lanes (rows of the tile at `at`) see key j.
  typename X::M seen(int64_t at, int64_t j, int v) const {
    return args.causal ? ~X::prefix(static_cast<int>(larger(0, smaller(kTile, j - at))) - v) : X::prefix(X::W);
  }
  // ST = K QT: scores of the keys that stand in the scratch.
  void scores(int keys) const {
    gemm<T>(keys, kTile, static_cast<int>(s.K), as_is(s.k, s.ldk), s.qt, kTile, s.st, kTile, Store{});
  }
  // delta of key j, and expm1(delta - gap) = n p - 1.
  LINNET_INLINE void orders(int j, int v, Vector* delta, Vector* excess) const {
    *delta = (X::load(s.st + j * kTile + v) - X::load(s.lanes->mean + v)) - X::load(s.lanes->dbar + v);
    *excess = expm1(*delta - X::load(s.lanes->gap + v));
  }
  LINNET_INLINE Vector weight(int v, Vector delta, Vector excess) const {
    const Vector sh = X::load(s.lanes->sh + v), s1 = X::load(s.lanes->s1 + v), s0 = X::load(s.lanes->s0 + v);
    return fma(sh, excess, fma(s1 - sh, delta, s0)) * X::load(s.lanes->inverse + v);
  }
  // Calls f(first key, keys) for the key tiles of a query tile, keys and scores in the scratch.
  template <class F>
  void for_keys(int64_t at, int rows, const F& f) const {
    for (int64_t j0 = 0; j0 < key_end(at, rows); j0 += kTile) {
      const int keys = static_cast<int>(smaller(kTile, tokens() - j0));
      load_keys(j0, keys);
      scores(keys);
      f(j0, keys);
    }
  }

  // Pass 1: dbar and gap.
  void moments(int64_t at, int rows) const {
    T top[kTile], total[kTile], sums[kTile], more[kTile];
    for (int v = 0; v < kTile; ++v) {
      top[v] = kLowest<T>;
      total[v] = sums[v] = more[v] = 0;
    }
    const Vector limit = X::broadcast(16);
    for_keys(at, rows, [&](int64_t j0, int keys) {
      for (int v = 0; v < kTile; v += X::W) {
        const Vector mean = X::load(s.lanes->mean + v), old = X::load(top + v);
        Vector m = old, first = X::zero(), second = X::zero(), l = X::zero();
        for (int j = 0; j < keys; ++j) {
          const Vector e = X::load(s.st + j * kTile + v) - mean;
          m = select(seen(at, j0 + j, v), max(e, m), m);
        }
        for (int j = 0; j < keys; ++j) {
          const Vector e = X::load(s.st + j * kTile + v) - mean, x = min(limit, e);
          const auto mask = seen(at, j0 + j, v);
          first = first + select(mask, e, X::zero());
          second = second + select(mask, expm1(x) - x, X::zero());
          l = l + select(mask, exp(e - m), X::zero());
        }
        X::store(top + v, m);
        X::store(total + v, fma(X::load(total + v), exp(old - m), l));
        X::store(sums + v, X::load(sums + v) + first);
        X::store(more + v, X::load(more + v) + second);
      }
    });
    for (int v = 0; v < kTile; v += X::W) {
      const Vector inverse = X::load(s.lanes->inverse + v), dbar = X::load(sums + v) * inverse, g = X::load(more + v) * inverse;
      // mean(expm1(e - dbar) - (e - dbar)) from mean(expm1(e) - e) = g and mean(e) = dbar
      const Vector small = log1p(fma(expm1(-dbar), g + dbar + X::broadcast(1), g + dbar));
      const Vector m = X::load(top + v), large = (m - dbar) + log(X::load(total + v) * inverse);
      X::store(s.lanes->dbar + v, dbar);
      X::store(s.lanes->gap + v, select(gt(m, X::broadcast(8)), large, small));
    }
  }

  // OT += V^T WT. Causal, and values that are not finite: a lane adds exactly the keys that it sees, since a weight of 0 does
  // not hide a NaN. The bits of finite lanes are the same.
  void read(int64_t at, int64_t j0, int keys) const {
    const int width = static_cast<int>(s.V);
    if (!args.causal || rows_are_finite(s.v, s.ldv, keys, width)) {
      gemm<T>(width, kTile, keys, transposed(s.v, s.ldv), s.wt, kTile, s.ot, kTile, Add{});
      return;
    }
    for (int c = 0; c < width; ++c) {
      for (int v = 0; v < kTile; v += X::W) {
        Vector sum = X::zero();
        for (int j = 0; j < keys; ++j) {
          const Vector more = fma(X::broadcast(s.v[j * s.ldv + c]), X::load(s.wt + j * kTile + v), sum);
          sum = select(seen(at, j0 + j, v), more, sum);
        }
        X::store(s.ot + c * kTile + v, X::load(s.ot + c * kTile + v) + sum);
      }
    }
  }
  void forward(int64_t at, int rows, const View& out) const {
    begin(at, rows);
    moments(at, rows);
    for (int64_t i = 0; i < s.V * kTile; ++i) s.ot[i] = 0;
    for_keys(at, rows, [&](int64_t j0, int keys) {
      load(args.v, j0, keys, s.V, s.v, s.ldv);
      for (int j = 0; j < keys; ++j) {
        for (int v = 0; v < kTile; v += X::W) {
          Vector delta, excess;
          orders(j, v, &delta, &excess);
          X::store(s.wt + j * kTile + v, select(seen(at, j0 + j, v), weight(v, delta, excess), X::zero()));
        }
      }
      read(at, j0, keys);
    });
    with_type<T>(out, row_of(out, b, at, h),
                 [&](auto* p) { store_tile_transposed(s.ot, kTile, rows, static_cast<int>(s.V), p, out.stride[1]); });
  }

  // ---- backward

  void load_gradient(const View& dout, int64_t at, int rows) const {
    load(dout, at, rows, s.V, s.d, s.ldv);
    load_tile_transposed<T>(static_cast<const T*>(s.d), s.ldv, kTile, static_cast<int>(s.V), s.dt, kTile);
  }
  void products(int64_t j0, int keys) const {  // XT = V DT
    load(args.v, j0, keys, s.V, s.v, s.ldv);
    gemm<T>(keys, kTile, static_cast<int>(s.V), as_is(s.v, s.ldv), s.dt, kTile, s.xt, kTile, Store{});
  }
  // The gradient of a score.
  LINNET_INLINE Vector slope(int j, int v, Vector excess) const {
    const Vector x = X::load(s.xt + j * kTile + v), sh = X::load(s.lanes->sh + v), s1 = X::load(s.lanes->s1 + v);
    const Vector inner =
        fma(sh * (excess + X::broadcast(1)), x - X::load(s.lanes->all + v), (s1 - sh) * (x - X::load(s.lanes->flat + v)));
    return inner * X::load(s.lanes->inverse + v);
  }
  void rows_backward(int64_t at, int rows, const ZerosSoftmaxGrads& grads) const {
    begin(at, rows);
    moments(at, rows);
    load_gradient(grads.dout, at, rows);
    T all[kTile] = {}, flat[kTile] = {}, first[kTile] = {}, higher[kTile] = {};
    for_keys(at, rows, [&](int64_t j0, int keys) {
      products(j0, keys);
      for (int v = 0; v < kTile; v += X::W) {
        Vector p = X::zero(), x0 = X::zero(), x1 = X::zero(), xh = X::zero();
        for (int j = 0; j < keys; ++j) {
          Vector delta, excess;
          orders(j, v, &delta, &excess);
          const auto mask = seen(at, j0 + j, v);
          const Vector x = X::load(s.xt + j * kTile + v);
          p = p + select(mask, fma(excess, x, x), X::zero());
          x0 = x0 + select(mask, x, X::zero());
          x1 = x1 + select(mask, delta * x, X::zero());
          xh = xh + select(mask, (excess - delta) * x, X::zero());
        }
        X::store(all + v, X::load(all + v) + p);
        X::store(flat + v, X::load(flat + v) + x0);
        X::store(first + v, X::load(first + v) + x1);
        X::store(higher + v, X::load(higher + v) + xh);
      }
    });
    for (int r = 0; r < kTile; ++r) {
      const T inverse = s.lanes->inverse[r];
      s.lanes->all[r] = all[r] * inverse;
      s.lanes->flat[r] = flat[r] * inverse;
      if (r >= rows) continue;
      const auto put = [&](const View& x, T value) {
        if (x.given()) set_element<T>(x, row_of(x, b, at + r, h), value);
      };
      put(grads.ds1, first[r] * inverse);
      put(grads.dsh, higher[r] * inverse);
      put(grads.ds0, flat[r] * inverse);
    }
    plan.lanes[(b * args.q.size[2] + h) * plan.tiles + at / kTile] = *s.lanes;
    if (!grads.dq.given()) return;
    for (int64_t i = 0; i < s.K * kTile; ++i) s.dqt[i] = 0;
    for_keys(at, rows, [&](int64_t j0, int keys) {
      products(j0, keys);
      for (int j = 0; j < keys; ++j) {
        for (int v = 0; v < kTile; v += X::W) {
          Vector delta, excess;
          orders(j, v, &delta, &excess);
          X::store(s.wt + j * kTile + v, select(seen(at, j0 + j, v), slope(j, v, excess), X::zero()));
        }
      }
      gemm<T>(static_cast<int>(s.K), kTile, keys, transposed(s.k, s.ldk), s.wt, kTile, s.dqt, kTile, Add{});
    });
    T factors[kTile];
    for (T& x : factors) x = scale();
    with_type<T>(grads.dq, row_of(grads.dq, b, at, h), [&](auto* p) {
      store_tile_transposed(s.dqt, kTile, rows, static_cast<int>(s.K), p, grads.dq.stride[1], factors);
    });
  }
  void keys_backward(int64_t j0, int keys, const ZerosSoftmaxGrads& grads) const {
    load_first();
    for (int64_t i = 0; i < kTile * s.ldk; ++i) s.dk[i] = 0;
    for (int64_t i = 0; i < kTile * s.ldv; ++i) s.dv[i] = 0;
    load_keys(j0, keys);
    for (int64_t at = args.causal ? j0 / kTile * kTile : 0; at < tokens(); at += kTile) {
      const int rows = static_cast<int>(smaller(kTile, tokens() - at));
      *s.lanes = plan.lanes[(b * args.q.size[2] + h) * plan.tiles + at / kTile];
      load_queries(at, rows);
      load_gradient(grads.dout, at, rows);
      scores(keys);
      products(j0, keys);
      for (int j = 0; j < keys; ++j) {
        for (int v = 0; v < kTile; v += X::W) {
          Vector delta, excess;
          orders(j, v, &delta, &excess);
          const auto mask = seen(at, j0 + j, v) & X::prefix(rows - v);
          const Vector ds = slope(j, v, excess);
          X::store(s.wt + j * kTile + v, select(mask, weight(v, delta, excess), X::zero()));
          X::store(s.st + j * kTile + v, select(mask, ds, X::zero()));
        }
      }
      gemm<T>(keys, static_cast<int>(s.V), kTile, as_is(s.wt, kTile), s.d, s.ldv, s.dv, s.ldv, Add{});
      gemm<T>(keys, static_cast<int>(s.K), kTile, as_is(s.st, kTile), s.q, s.ldk, s.dk, s.ldk, Add{});
    }
    T factors[kTile];
    for (T& x : factors) x = scale();
    if (grads.dk.given()) {
      with_type<T>(grads.dk, row_of(grads.dk, b, j0, h),
                   [&](auto* p) { store_tile(s.dk, s.ldk, keys, static_cast<int>(s.K), p, grads.dk.stride[1], factors); });
    }
    if (grads.dv.given()) {
      with_type<T>(grads.dv, row_of(grads.dv, b, j0, h),
                   [&](auto* p) { store_tile(s.dv, s.ldv, keys, static_cast<int>(s.V), p, grads.dv.stride[1]); });
    }
  }
};

// Calls f(unit, first row, rows) for every tile of every head, the longest first.
template <class T, class F>
void for_tiles(const ZerosSoftmaxArgs& args, const Means<T>& plan, double flops, const Launch& launch, const F& f) {
  const int64_t heads = args.q.size[0] * args.q.size[2], tokens = args.q.size[1];
  run_tasks(launch, heads * plan.tiles, flops, [&](int64_t task, int worker) {
    const Scratch<T> scratch(plan.workers + worker * plan.worker_bytes, args);
    const int64_t head = task % heads, at = (plan.tiles - 1 - task / heads) * kTile;
    f(Unit<T>{args, plan, scratch, head / args.q.size[2], head % args.q.size[2]}, at,
      static_cast<int>(smaller(kTile, tokens - at)));
  });
}
template <class T>
void make_means(const ZerosSoftmaxArgs& args, const Means<T>& plan, double flops, const Launch& launch) {
  const int64_t heads = args.q.size[0] * args.q.size[2];
  run_tasks(launch, args.q.size[1] > 0 ? heads : 0, flops, [&](int64_t head, int worker) {
    const Scratch<T> scratch(plan.workers + worker * plan.worker_bytes, args);
    Unit<T>{args, plan, scratch, head / args.q.size[2], head % args.q.size[2]}.make_means();
  });
}
LINNET_INLINE double work(const ZerosSoftmaxArgs& args) {
  return 4 * static_cast<double>(args.q.elements() + args.v.elements()) * static_cast<double>(args.q.size[1]);
}

template <class T>
void run_forward(const ZerosSoftmaxArgs& args, const ZerosOut& out, const Launch& launch) {
  const Means<T> plan(launch.workspace, args, Pass::forward, launch.workers);
  make_means(args, plan, work(args), launch);
  for_tiles<T>(args, plan, work(args), launch,
               [&](const Unit<T>& unit, int64_t at, int rows) { unit.forward(at, rows, out.out); });
}
template <class T>
void run_backward(const ZerosSoftmaxArgs& args, const ZerosSoftmaxGrads& grads, const Launch& launch) {
  const Means<T> plan(launch.workspace, args, Pass::backward, launch.workers);
  make_means(args, plan, work(args), launch);
  for_tiles<T>(args, plan, work(args), launch,
               [&](const Unit<T>& unit, int64_t at, int rows) { unit.rows_backward(at, rows, grads); });
  if (!grads.dk.given() && !grads.dv.given()) return;
  for_tiles<T>(args, plan, work(args), launch,
               [&](const Unit<T>& unit, int64_t at, int keys) { unit.keys_backward(at, keys, grads); });
}

}  // namespace

int64_t zeros_softmax_workspace(const ZerosSoftmaxArgs& args, Pass pass, int workers) {
  return args.q.dtype == Dtype::f64 ? Means<double>(nullptr, args, pass, workers).bytes
                                    : Means<float>(nullptr, args, pass, workers).bytes;
}
void zeros_softmax_forward(const ZerosSoftmaxArgs& args, const ZerosOut& out, const Launch& launch) {
  if (args.q.dtype == Dtype::f64) return run_forward<double>(args, out, launch);
  run_forward<float>(args, out, launch);
}
void zeros_softmax_backward(const ZerosSoftmaxArgs& args, const ZerosOut&, const ZerosSoftmaxGrads& grads,
                            const Launch& launch) {
  if (args.q.dtype == Dtype::f64) return run_backward<double>(args, grads, launch);
  run_backward<float>(args, grads, launch);
}

}  // namespace linnet::LINNET_ISA
