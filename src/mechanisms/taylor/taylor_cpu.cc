// Taylor attention on the vector units: the walks of shared/mapped.h with the maps of taylor.h.
//
// Gradients of alpha, beta, gamma and const are small remainders of large sums: they take one more walk over the queries, in
// double, and count both sides at once (the parameter stands in phi(q) and in phi(k) alike).
#include "core/half.h"
#include "mechanisms/recurrence/cpu/walk.h"
#include "mechanisms/shared/mapped.h"
#include "simd/math.h"
#include "simd/tile.h"
#include "taylor.h"

namespace linnet::LINNET_ISA {
namespace {

struct Self {
  TaylorMap m;
  View ape;  // qt_layer: added to keys, [T, H, K]
};

template <class T>
LINNET_INLINE T square_sum(const T* x, int n) {
  using X = Vec<T>;
  typename X::V sums = X::zero();
  for (int c = 0; c < n; c += X::W) {
    const typename X::V a = X::load(x + c, n - c);
    sums = fma(a, a, sums);
  }
  return sum(sums);
}
template <class T>
LINNET_INLINE T root_of(T x) {
  return static_cast<T>(__builtin_sqrt(static_cast<double>(x)));
}

// unit(x) = x / (|x| + eps) in two steps, so that the squares neither overflow nor vanish: first x / top.
template <class T>
LINNET_INLINE void unit_row(const T* x, int n, T eps, T* y) {
  using X = Vec<T>;
  typename X::V largest = X::zero();
  for (int c = 0; c < n; c += X::W) largest = max(abs(X::load(x + c, n - c)), largest);
  const T top = highest(largest);
  if (top == 0) {
    for (int c = 0; c < n; ++c) y[c] = 0;
    return;
  }
  const typename X::V inverse = X::broadcast(1 / top);
  for (int c = 0; c < n; c += X::W) X::store(y + c, X::load(x + c, n - c) * inverse, n - c);
  const T norm = root_of(square_sum(y, n));
  const typename X::V factor = X::broadcast(1 / (norm + eps / top));
  for (int c = 0; c < n; c += X::W) X::store(y + c, X::load(y + c, n - c) * factor, n - c);
}
// dx = (dy - x (x.dy) / (|x| (|x| + eps))) / (|x| + eps), 0 for x = 0
template <class T>
LINNET_INLINE void unit_backward(const T* x, const T* dy, int n, T eps, T* dx) {
  using X = Vec<T>;
  typename X::V largest = X::zero();
  for (int c = 0; c < n; c += X::W) largest = max(abs(X::load(x + c, n - c)), largest);
  const T top = highest(largest);
  if (top == 0) {
    for (int c = 0; c < n; ++c) dx[c] = 0;
    return;
  }
  const T inverse = 1 / top;
  typename X::V squares = X::zero(), dots = X::zero();
  for (int c = 0; c < n; c += X::W) {
    const typename X::V a = X::load(x + c, n - c) * X::broadcast(inverse);
    squares = fma(a, a, squares);
    dots = fma(a, X::load(dy + c, n - c), dots);
  }
  const T norm = root_of(sum(squares)), all = norm + eps * inverse;  // both in units of top
  const typename X::V part = X::broadcast(sum(dots) / (norm * all) * inverse), factor = X::broadcast(inverse / all);
  for (int c = 0; c < n; c += X::W) {
    X::store(dx + c, (X::load(dy + c, n - c) - X::load(x + c, n - c) * part) * factor, n - c);
  }
}

template <class T>
LINNET_INLINE const T* moved(const Self& s, const MapRows& at, int r, const T* x, T* row) {
  const int K = static_cast<int>(s.m.K);
  if (!at.key || !s.ape.given()) return x;
  for (int c = 0; c < K; ++c) {
    const double more =
        load_f64(s.ape.data, s.ape.dtype, at.token(r) * s.ape.stride[0] + at.h * s.ape.stride[1] + c * s.ape.stride[2]);
    row[c] = x[c] + static_cast<T>(more);
  }
  return row;
}

template <class T>
void taylor_apply(const void* self, const MapRows& at, const T* x, int64_t ldx, T* f, int64_t ldf, T* scratch) {
  using X = Vec<T>;
  using V = typename X::V;
  const Self& s = *static_cast<const Self*>(self);
  const int K = static_cast<int>(s.m.K);
  const int64_t ldk = round_up<T>(K);
  for (int r = 0; r < at.count; ++r, x += ldx, f += ldf) {
    if (s.m.mode == TaylorMode::exact) {
      const V root = X::broadcast(static_cast<T>(__builtin_sqrt(s.m.scale)));
      const V half = X::broadcast(static_cast<T>(__builtin_sqrt(0.5)));
      T* y = scratch;
      for (int c = 0; c < K; c += X::W) X::store(y + c, X::load(x + c) * root);
      f[0] = 1;
      for (int c = 0; c < K; c += X::W) {
        const V a = X::load(y + c);
        X::store(f + 1 + c, a, K - c);
        X::store(f + 1 + K + c, a * a * half, K - c);
      }
      T* to = f + 1 + 2 * K;
      for (int i = 0; i + 1 < K; to += K - 1 - i, ++i) {
        const V a = X::broadcast(y[i]);
        for (int j = i + 1; j < K; j += X::W) X::store(to + j - i - 1, a * X::load(y + j, K - j), K - j);
      }
    } else if (s.m.mode == TaylorMode::compact) {
      const V half = X::broadcast(static_cast<T>(__builtin_sqrt(0.5) * s.m.alpha));
      const V linear = X::broadcast(static_cast<T>(s.m.beta * __builtin_sqrt(s.m.scale)));
      for (int c = 0; c < K; c += X::W) {
        const V a = X::load(x + c);
        X::store(f + c, a * a * half, K - c);
        X::store(f + K + c, a * linear, K - c);
      }
      f[2 * K] = static_cast<T>(__builtin_sqrt(0.5) * s.m.gamma);
      f[2 * K + 1] = static_cast<T>(__builtin_sqrt(0.5));
    } else {
      const T eps = static_cast<T>(s.m.eps);
      T* x1 = scratch;
      unit_row(moved(s, at, r, x, scratch + ldk), K, eps, x1);
      for (int c = 0; c < K; ++c) x1[c] *= x1[c];
      unit_row(static_cast<const T*>(x1), K, eps, f);
      f[K] = static_cast<T>(s.m.constant);
    }
  }
}

template <class T>
void taylor_backward(const void* self, const MapRows& at, const T* x, int64_t ldx, T* df, int64_t ldf, T* dx, T* dparam,
                     T* scratch) {
  using X = Vec<T>;
  using V = typename X::V;
  const Self& s = *static_cast<const Self*>(self);
  const int K = static_cast<int>(s.m.K);
  const int64_t ldk = round_up<T>(K);
  for (int r = 0; r < at.count; ++r, x += ldx, dx += ldx, df += ldf) {
    if (s.m.mode == TaylorMode::exact) {
      // dx = sqrt(scale) (a + sqrt 2 y b + (U + U^T) y)
      const V root = X::broadcast(static_cast<T>(__builtin_sqrt(s.m.scale)));
      const V twice = X::broadcast(static_cast<T>(__builtin_sqrt(2.0)));
      T* y = scratch;
      T* d = scratch + ldk;
      for (int c = 0; c < K; c += X::W) {
        const V a = X::load(x + c) * root;
        X::store(y + c, a);
        X::store(d + c, fma(twice * a, X::load(df + 1 + K + c, K - c), X::load(df + 1 + c, K - c)));
      }
      const T* from = df + 1 + 2 * K;
      for (int i = 0; i + 1 < K; from += K - 1 - i, ++i) {
        const V a = X::broadcast(y[i]);
        V dot = X::zero();
        for (int j = i + 1; j < K; j += X::W) {
          const V slope = X::load(from + j - i - 1, K - j);
          dot = fma(slope, X::load(y + j, K - j), dot);
          X::store(d + j, fma(slope, a, X::load(d + j, K - j)), K - j);
        }
        d[i] += sum(dot);
      }
      for (int c = 0; c < K; c += X::W) X::store(dx + c, X::load(d + c) * root);
    } else if (s.m.mode == TaylorMode::compact) {
      const double half = __builtin_sqrt(0.5), linear = __builtin_sqrt(s.m.scale);
      const V square = X::broadcast(static_cast<T>(2 * half * s.m.alpha)),
              line = X::broadcast(static_cast<T>(s.m.beta * linear));
      V dalpha = X::zero(), dbeta = X::zero();
      for (int c = 0; c < K; c += X::W) {
        const V a = X::load(x + c), d2 = X::load(df + c, K - c), d1 = X::load(df + K + c, K - c);
        X::store(dx + c, fma(square * a, d2, line * d1));
        dalpha = fma(a * a, d2, dalpha);
        dbeta = fma(a, d1, dbeta);
      }
      if (dparam != nullptr) {
        dparam[0] += sum(dalpha) * static_cast<T>(half);
        dparam[1] += sum(dbeta) * static_cast<T>(linear);
        dparam[2] += df[2 * K] * static_cast<T>(half);
      }
    } else {
      const T eps = static_cast<T>(s.m.eps);
      T *x1 = scratch, *x2 = scratch + ldk, *dx2 = scratch + 2 * ldk, *own = scratch + 3 * ldk;
      const T* row = moved(s, at, r, x, own);
      unit_row(row, K, eps, x1);
      for (int c = 0; c < K; ++c) x2[c] = x1[c] * x1[c];
      unit_backward(static_cast<const T*>(x2), static_cast<const T*>(df), K, eps, dx2);
      for (int c = 0; c < K; ++c) dx2[c] *= 2 * x1[c];
      unit_backward(row, static_cast<const T*>(dx2), K, eps, dx);
      if (dparam == nullptr) continue;
      dparam[0] += df[K];
      for (int c = 0; at.key && s.ape.given() && c < K; ++c) dparam[1 + at.token(r) * K + c] += dx[c];
    }
  }
}

template <class T>
RowMap<T> row_map(const Self& self, int64_t params) {
  RowMap<T> map{
      &self,   static_cast<int>(self.m.K), static_cast<int>(self.m.F), 4 * round_up<T>(self.m.K), params, taylor_apply<T>,
      nullptr, taylor_backward<T>};
  if (self.m.mode == TaylorMode::exact) map.polynomial_scale = self.m.scale;
  return map;
}

template <class Body>
LINNET_INLINE auto by_type(Dtype dtype, const Body& body) {
  return dtype == Dtype::f64 ? body.template operator()<double>() : body.template operator()<float>();
}
LINNET_INLINE double scalar(const View& view) { return load_f64(view.data, view.dtype, 0); }

// `values`: whether the parameters may be read (not while workspace is asked for).
Self self_of(const TaylorExactArgs& args, bool) {
  return {taylor_map(TaylorMode::exact, args.q.size[3], taylor_scale(args.scale, args.q.size[3])), View()};
}
Self self_of(const TaylorCompactArgs& args, bool values) {
  TaylorMap m = taylor_map(TaylorMode::compact, args.q.size[3], taylor_scale(args.scale, args.q.size[3]));
  if (values) {
    m.alpha = scalar(args.alpha);
    m.beta = scalar(args.beta);
    m.gamma = scalar(args.gamma);
  }
  return {m, View()};
}
Self self_of(const TaylorCompactL2Args& args, bool values) {
  TaylorMap m = taylor_map(TaylorMode::compact_l2, args.q.size[3], 1);
  if (values) m.constant = scalar(args.constant);
  m.eps = args.eps;
  return {m, View()};
}

template <class T, class Args>
MappedCall<T> call_of(const Args& args, const Self& self, int64_t params) {
  MappedCall<T> call;
  call.q = args.q;
  call.k = args.k;
  call.v = args.v;
  call.causal = args.causal;
  call.eps = args.eps;
  call.map = row_map<T>(self, params);
  return call;
}
template <class T, class Args>
MappedCall<T> masked_call_of(const Args& args, const Self& self, int64_t params) {
  MappedCall<T> call = call_of<T>(args, self, params);
  call.key_mask = args.key_mask;
  return call;
}

template <class Args>
void forward(const Args& args, const TaylorOut& out, const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    const Self self = self_of(args, true);
    MappedCall<T> call = masked_call_of<T>(args, self, 0);
    call.out = out.out;
    call.den = out.den;
    call.final_state = out.final_state;
    call.final_z = out.final_z;
    mapped_forward(call, launch);
    if (out.phi_q.given()) mapped_features<T>(call.map, args.q, false, nullptr, out.phi_q, launch);
  });
}
// The walk over queries in double that gives the scalars: dparam [2, B, H, 3], of which the first half is used.
template <class Args>
int64_t scalar_bytes(const Args& args, int workers) {
  const Self self = self_of(args, false);
  MappedCall<double> call = masked_call_of<double>(args, self, 3);
  call.queries_only = true;
  Arena arena;
  arena.take<double>(2 * args.q.size[0] * args.q.size[2] * 3);
  return arena.used() + mapped_backward_bytes(call, workers);
}
template <class Args>
int64_t workspace(const Args& args, Pass pass, int workers, bool scalars) {
  return by_type(args.q.dtype, [&]<class T>() {
    const Self self = self_of(args, false);
    const MappedCall<T> call = masked_call_of<T>(args, self, 0);
    if (pass == Pass::forward) {
      const int64_t a = mapped_forward_bytes(call, workers), b = mapped_features_bytes(call.map, workers);
      return a > b ? a : b;
    }
    const int64_t a = mapped_backward_bytes(call, workers), b = scalars ? scalar_bytes(args, workers) : 0;
    return a > b ? a : b;
  });
}
template <class Args, class Grads>
void backward(const Args& args, const TaylorOut& out, const Grads& grads, const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    const Self self = self_of(args, true);
    MappedCall<T> call = masked_call_of<T>(args, self, 0);
    call.out = out.out;
    call.den = out.den;
    call.dout = grads.dout;
    call.dq = grads.dq;
    call.dk = grads.dk;
    call.dv = grads.dv;
    mapped_backward(call, launch);
  });
}
template <class Args>
void scalars_of(const Args& args, const TaylorOut& out, const View& dout, double* sums, const Launch& launch) {
  const Self self = self_of(args, true);
  Arena arena(launch.workspace);
  MappedCall<double> call = masked_call_of<double>(args, self, 3);
  call.out = out.out;
  call.den = out.den;
  call.dout = dout;
  call.wants_params = true;
  call.queries_only = true;
  const int64_t units = args.q.size[0] * args.q.size[2];
  call.dparam = arena.take<double>(2 * units * 3);
  mapped_backward(call, after(launch, arena.used()));
  for (int i = 0; i < 3; ++i) {
    sums[i] = 0;
    for (int64_t u = 0; u < units; ++u) sums[i] += 2 * call.dparam[u * 3 + i];  // and as much through phi(k)
  }
}
void put_scalar(const View& view, double x) {
  if (view.given()) store_f64(view.data, view.dtype, 0, x);
}

// ---- QT-ViT's module, in double whatever the type: its maps are small, and its constant's gradient cancels

struct Qt {
  double *rows, *den, *dv, *dparam, *norm;  // [B, T, H, K], [B, T, H], [B, T, H, K], [2, B, H, 1 + T K], [B, H, 2, K]
};
Qt cut_qt(Arena& arena, const TaylorQtArgs& args, Pass pass) {
  const int64_t B = args.q.size[0], T = args.q.size[1], H = args.q.size[2], K = args.q.size[3];
  Qt qt{};
  qt.rows = arena.take<double>(B * T * H * K);
  if (pass == Pass::forward) return qt;
  qt.den = arena.take<double>(B * T * H);
  qt.dv = arena.take<double>(B * T * H * K);
  qt.dparam = arena.take<double>(2 * B * H * (1 + T * K));
  qt.norm = arena.take<double>(B * H * 2 * K);
  return qt;
}
Self qt_self(const TaylorQtArgs& args, bool values) {
  TaylorMap m = taylor_map(TaylorMode::compact_l2, args.q.size[3], 1);
  if (values) m.constant = scalar(args.constant);
  m.eps = args.eps;
  return {m, args.ape};
}
LINNET_INLINE double gelu(double x) { return 0.5 * x * __builtin_erfc(-x * __builtin_sqrt(0.5)); }
LINNET_INLINE double gelu_slope(double x) {
  return 0.5 * __builtin_erfc(-x * __builtin_sqrt(0.5)) + x * __builtin_exp(-0.5 * x * x) * 0.39894228040143267794;
}
LINNET_INLINE double channel(const View& view, int64_t c) { return load_f64(view.data, view.dtype, c * view.stride[0]); }
LINNET_INLINE double element(const View& view, int64_t b, int64_t t, int64_t h, int64_t c) {
  return load_f64(view.data, view.dtype, b * view.stride[0] + t * view.stride[1] + h * view.stride[2] + c);
}

}  // namespace

void taylor_exact_forward(const TaylorExactArgs& args, const TaylorOut& out, const Launch& launch) {
  forward(args, out, launch);
}
void taylor_exact_backward(const TaylorExactArgs& args, const TaylorOut& out, const TaylorExactGrads& grads,
                           const Launch& launch) {
  backward(args, out, grads, launch);
}
int64_t taylor_exact_workspace(const TaylorExactArgs& args, Pass pass, int workers) {
  return workspace(args, pass, workers, false);
}

void taylor_compact_forward(const TaylorCompactArgs& args, const TaylorOut& out, const Launch& launch) {
  forward(args, out, launch);
}
void taylor_compact_backward(const TaylorCompactArgs& args, const TaylorOut& out, const TaylorCompactGrads& grads,
                             const Launch& launch) {
  backward(args, out, grads, launch);
  if (!grads.dalpha.given() && !grads.dbeta.given() && !grads.dgamma.given()) return;
  double sums[3];
  scalars_of(args, out, grads.dout, sums, launch);
  put_scalar(grads.dalpha, sums[0]);
  put_scalar(grads.dbeta, sums[1]);
  put_scalar(grads.dgamma, sums[2]);
}
int64_t taylor_compact_workspace(const TaylorCompactArgs& args, Pass pass, int workers) {
  return workspace(args, pass, workers, true);
}

void taylor_compact_l2_forward(const TaylorCompactL2Args& args, const TaylorOut& out, const Launch& launch) {
  forward(args, out, launch);
}
void taylor_compact_l2_backward(const TaylorCompactL2Args& args, const TaylorOut& out, const TaylorCompactL2Grads& grads,
                                const Launch& launch) {
  backward(args, out, grads, launch);
  if (!grads.dconstant.given()) return;
  double sums[3];
  scalars_of(args, out, grads.dout, sums, launch);
  put_scalar(grads.dconstant, sums[0]);
}
int64_t taylor_compact_l2_workspace(const TaylorCompactL2Args& args, Pass pass, int workers) {
  return workspace(args, pass, workers, true);
}

void taylor_qt_layer_forward(const TaylorQtArgs& args, const TaylorQtOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Qt qt = cut_qt(arena, args, Pass::forward);
  const Self self = qt_self(args, true);
  MappedCall<double> call = call_of<double>(args, self, 0);
  call.out = View::dense(qt.rows, Dtype::f64, args.q.size, 4);
  mapped_forward(call, after(launch, arena.used()));
  const int64_t T = args.q.size[1], H = args.q.size[2], K = args.q.size[3];
  parallel(launch, args.q.size[0] * H, [&](int64_t task, int) {
    const int64_t b = task / H, h = task % H;
    for (int64_t c = 0; c < K; ++c) {
      const double slope = channel(args.bn_weight, c) / __builtin_sqrt(channel(args.bn_var, c) + args.bn_eps);
      const double mean = channel(args.bn_mean, c), bias = channel(args.bn_bias, c);
      for (int64_t t = 0; t < T; ++t) {
        const double y = (element(args.v, b, t, h, c) - mean) * slope + bias;
        store_f64(out.out.data, out.out.dtype, b * out.out.stride[0] + t * out.out.stride[1] + h * out.out.stride[2] + c,
                  qt.rows[((b * T + t) * H + h) * K + c] + gelu(y));
      }
    }
  });
}
void taylor_qt_layer_backward(const TaylorQtArgs& args, const TaylorQtOut&, const TaylorQtGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const Qt qt = cut_qt(arena, args, Pass::backward);
  const int64_t B = args.q.size[0], T = args.q.size[1], H = args.q.size[2], K = args.q.size[3], params = 1 + T * K;
  const Self self = qt_self(args, true);
  MappedCall<double> call = call_of<double>(args, self, params);
  call.out = View::dense(qt.rows, Dtype::f64, args.q.size, 4);
  call.den = View::dense(qt.den, Dtype::f64, args.q.size, 3);
  call.forward_mean = true;  // gradients of q and k are differences G.v - G.out
  const Launch rest = after(launch, arena.used());
  mapped_forward(call, rest);
  call.dout = grads.dout;
  call.dq = grads.dq;
  call.dk = grads.dk;
  call.dv = View::dense(qt.dv, Dtype::f64, args.q.size, 4);
  call.dparam = qt.dparam;
  call.wants_params = grads.dape.given() || grads.dconstant.given();
  mapped_backward(call, rest);
  const double* keys = qt.dparam + B * H * params;  // the keys' half holds dape
  double dconstant = 0;
  for (int64_t u = 0; grads.dconstant.given() && u < B * H; ++u) dconstant += qt.dparam[u * params] + keys[u * params];
  put_scalar(grads.dconstant, dconstant);
  for (int64_t t = 0; grads.dape.given() && t < T; ++t) {
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t c = 0; c < K; ++c) {
        double sum = 0;
        for (int64_t b = 0; b < B; ++b) sum += keys[(b * H + h) * params + 1 + t * K + c];
        store_f64(grads.dape.data, grads.dape.dtype,
                  t * grads.dape.stride[0] + h * grads.dape.stride[1] + c * grads.dape.stride[2], sum);
      }
    }
  }
  parallel(launch, B * H, [&](int64_t task, int) {
    const int64_t b = task / H, h = task % H;
    for (int64_t c = 0; c < K; ++c) {
      const double inverse = 1 / __builtin_sqrt(channel(args.bn_var, c) + args.bn_eps), weight = channel(args.bn_weight, c);
      const double mean = channel(args.bn_mean, c), bias = channel(args.bn_bias, c);
      double dweight = 0, dbias = 0;
      for (int64_t t = 0; t < T; ++t) {
        const double normal = (element(args.v, b, t, h, c) - mean) * inverse;
        const double g = grads.dout.given() ? element(grads.dout, b, t, h, c) : 0;
        const double d = g * gelu_slope(normal * weight + bias);
        dweight += d * normal;
        dbias += d;
        if (grads.dv.given()) {
          store_f64(grads.dv.data, grads.dv.dtype, b * grads.dv.stride[0] + t * grads.dv.stride[1] + h * grads.dv.stride[2] + c,
                    qt.dv[((b * T + t) * H + h) * K + c] + d * weight * inverse);
        }
      }
      qt.norm[(task * 2) * K + c] = dweight;
      qt.norm[(task * 2 + 1) * K + c] = dbias;
    }
  });
  for (int64_t c = 0; c < K; ++c) {
    double dweight = 0, dbias = 0;
    for (int64_t u = 0; u < B * H; ++u) {
      dweight += qt.norm[u * 2 * K + c];
      dbias += qt.norm[(u * 2 + 1) * K + c];
    }
    if (grads.dbn_weight.given())
      store_f64(grads.dbn_weight.data, grads.dbn_weight.dtype, c * grads.dbn_weight.stride[0], dweight);
    if (grads.dbn_bias.given()) store_f64(grads.dbn_bias.data, grads.dbn_bias.dtype, c * grads.dbn_bias.stride[0], dbias);
  }
}
int64_t taylor_qt_layer_workspace(const TaylorQtArgs& args, Pass pass, int workers) {
  Arena arena;
  cut_qt(arena, args, pass);
  const Self self = qt_self(args, false);
  const MappedCall<double> call = call_of<double>(args, self, pass == Pass::forward ? 0 : 1 + args.q.size[1] * args.q.size[3]);
  const int64_t a = mapped_forward_bytes(call, workers), b = pass == Pass::forward ? 0 : mapped_backward_bytes(call, workers);
  return arena.used() + (a > b ? a : b);
}

namespace {
template <class T>
MappedDecode<T> decode_of(const TaylorDecodeArgs& args, const Self& self) {
  MappedDecode<T> call;
  call.q = args.q;
  call.k = args.k;
  call.v = args.v;
  call.state = args.state;
  call.z = args.z;
  call.eps = self.m.eps;
  call.map = row_map<T>(self, 0);
  return call;
}
Self decode_self(const TaylorDecodeArgs& args, bool values) {
  Self self{taylor_map(args.mode, args.q.size[3], taylor_scale(args.scale, args.q.size[3])), View()};
  self.m.eps = args.eps.value_or(args.mode == TaylorMode::compact_l2 ? 1e-15 : 1e-12);
  if (!values) return self;
  if (args.mode == TaylorMode::compact) {
    self.m.alpha = scalar(args.alpha);
    self.m.beta = scalar(args.beta);
    self.m.gamma = scalar(args.gamma);
  }
  if (args.mode == TaylorMode::compact_l2) self.m.constant = scalar(args.constant);
  return self;
}
}  // namespace

void taylor_decode_forward(const TaylorDecodeArgs& args, const TaylorDecodeOut& out, const Launch& launch) {
  by_type(args.q.dtype, [&]<class T>() {
    const Self self = decode_self(args, true);
    MappedDecode<T> call = decode_of<T>(args, self);
    call.out = out.out;
    mapped_decode(call, launch);
  });
}
int64_t taylor_decode_workspace(const TaylorDecodeArgs& args, Pass, int workers) {
  return by_type(args.q.dtype, [&]<class T>() {
    const Self self = decode_self(args, false);
    return mapped_decode_bytes(decode_of<T>(args, self), workers);
  });
}

}  // namespace linnet::LINNET_ISA
