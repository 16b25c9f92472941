// The maps of features.h on rows of dense scratch, forward and backward, for sources compiled per instruction set
// (shared/mapped.h).
#pragma once

#include "features_shape.h"
#include "mechanisms/recurrence/cpu/chunk.h"
#include "mechanisms/shared/mapped.h"
#include "simd/gemm.h"
#include "simd/math.h"
#include "simd/tile.h"
#include "simd/wide.h"

namespace linnet::LINNET_ISA {

// Parameters in T: matrices that take rows of x to rows of y (`in` [K, ldn]) and back (`back` [n, ldk]), one per head or
// shared.
template <class T>
struct FeatureSelf {
  FeaturesShape s;
  bool running = false;
  int64_t n = 0;          // columns of y: R, K (hedgehog_joint) or M
  const T* in = nullptr;  // [heads, K, ldn]
  const T* back = nullptr;
  const T* bias = nullptr;   // [heads, ldn]
  const T* gamma = nullptr;  // [ldk]
  const T* beta = nullptr;
  bool shared = false;              // the matrices serve all heads
  bool exact = false;               // decode: exponents of favor maps in double (see exact_row)
  const T* token_tops = nullptr;    // efficient over tokens: [B, H, ldk], the largest key of a channel
  const T* token_shares = nullptr;  // and 1 / sum_j exp(k_j - top)

  LINNET_INLINE int64_t ldk() const { return round_up<T>(s.K); }
  LINNET_INLINE int64_t ldn() const { return round_up<T>(n); }
  LINNET_INLINE const T* in_of(int64_t h) const { return in + (shared ? 0 : h) * s.K * ldn(); }
  LINNET_INLINE const T* back_of(int64_t h) const { return back + (shared ? 0 : h) * n * ldk(); }
  LINNET_INLINE const T* bias_of(int64_t h) const { return bias + (shared ? 0 : h) * ldn(); }
  // y, dy [C, ldn] and one row of everything
  LINNET_INLINE int64_t scratch() const { return kChunk * (2 * ldn() + ldk()) + 4 * round_up<T>(2 * s.K + 2 * n); }
};

template <class T>
LINNET_INLINE T power_of(int64_t K, double p) {
  return static_cast<T>(__builtin_pow(static_cast<double>(K), p));
}
template <class T>
LINNET_INLINE double top_of(const T* x, int n, T factor) {
  using X = Vec<T>;
  typename X::V top = X::broadcast(static_cast<T>(-__builtin_inf()));
  for (int c = 0; c < n; c += X::W) {
    top = max(select(X::prefix(n - c), X::load(x + c, n - c) * X::broadcast(factor), top), top);
  }
  return static_cast<double>(highest(top));
}
template <class T>
LINNET_INLINE double magnitude_of(const T* x, int n) {
  using X = Vec<T>;
  typename X::V top = X::zero();
  for (int c = 0; c < n; c += X::W) top = max(abs(X::load(x + c, n - c)), top);
  return static_cast<double>(highest(top));
}
template <class T>
LINNET_INLINE T dot_of(const T* a, const T* b, int n) {
  using X = Vec<T>;
  typename X::V sums = X::zero();
  for (int c = 0; c < n; c += X::W) sums = fma(X::load(a + c, n - c), X::load(b + c, n - c), sums);
  return sum(sums);
}
template <class T>
LINNET_INLINE typename Vec<T>::V rectify(typename Vec<T>::V x) {
  return max(typename Vec<T>::V{}, x);  // keeps NaN
}

// f[c] = fn(x[c])
template <class T, class Fn>
LINNET_INLINE void each(const MapRows& at, int n, const T* x, int64_t ldx, T* f, int64_t ldf, Fn fn) {
  using X = Vec<T>;
  for (int r = 0; r < at.count; ++r, x += ldx, f += ldf) {
    for (int c = 0; c < n; c += X::W) X::store(f + c, fn(X::load(x + c)), n - c);
  }
}
template <class T, class Fn>
LINNET_INLINE void each_backward(const MapRows& at, int n, const T* x, int64_t ldx, const T* df, int64_t ldf, T* dx, Fn fn) {
  using X = Vec<T>;
  for (int r = 0; r < at.count; ++r, x += ldx, dx += ldx, df += ldf) {
    for (int c = 0; c < n; c += X::W) X::store(dx + c, fn(X::load(x + c), X::load(df + c, n - c)));
  }
}

// [square a_i^2 ; pair a_i a_j, i < j]
template <class T>
LINNET_INLINE void pack(const T* a, int K, T square, T pair, T* f) {
  using X = Vec<T>;
  for (int c = 0; c < K; c += X::W) {
    const typename X::V x = X::load(a + c, K - c);
    X::store(f + c, x * x * X::broadcast(square), K - c);
  }
  f += K;
  for (int i = 0; i + 1 < K; f += K - 1 - i, ++i) {
    const typename X::V x = X::broadcast(a[i] * pair);
    for (int j = i + 1; j < K; j += X::W) X::store(f + j - i - 1, x * X::load(a + j, K - j), K - j);
  }
}
// da += J^T df of pack
template <class T>
LINNET_INLINE void unpack(const T* a, int K, T square, T pair, const T* df, T* da) {
  using X = Vec<T>;
  using V = typename X::V;
  for (int c = 0; c < K; c += X::W) {
    const V d = X::load(df + c, K - c) * X::broadcast(2 * square);
    X::store(da + c, fma(d, X::load(a + c, K - c), X::load(da + c, K - c)), K - c);
  }
  df += K;
  for (int i = 0; i + 1 < K; df += K - 1 - i, ++i) {
    const V x = X::broadcast(a[i] * pair);
    V dot = X::zero();
    for (int j = i + 1; j < K; j += X::W) {
      const V d = X::load(df + j - i - 1, K - j);
      dot = fma(d, X::load(a + j, K - j), dot);
      X::store(da + j, fma(d, x, X::load(da + j, K - j)), K - j);
    }
    da[i] += sum(dot) * pair;
  }
}

// y [rows, ldn] = x in + bias
template <class T>
void project(const FeatureSelf<T>& m, const MapRows& at, const T* x, int64_t ldx, T* y) {
  using X = Vec<T>;
  gemm<T>(at.count, static_cast<int>(m.n), static_cast<int>(m.s.K), as_is(x, ldx), m.in_of(at.h), m.ldn(), y, m.ldn(), Store{});
  if (m.bias == nullptr) return;
  const T* bias = m.bias_of(at.h);
  for (int r = 0; r < at.count; ++r) {
    for (int64_t c = 0; c < m.ldn(); c += X::W) X::store(y + r * m.ldn() + c, X::load(y + r * m.ldn() + c) + X::load(bias + c));
  }
}
// dx = dy back; dparam: din [K, ldn], dbias [ldn] += theirs
template <class T>
void leave(const FeatureSelf<T>& m, const MapRows& at, const T* x, int64_t ldx, const T* dy, T* dx, T* dparam) {
  using X = Vec<T>;
  const int K = static_cast<int>(m.s.K), n = static_cast<int>(m.n);
  gemm<T>(at.count, K, n, as_is(dy, m.ldn()), m.back_of(at.h), m.ldk(), dx, ldx, Store{});
  if (dparam == nullptr) return;
  gemm<T>(K, n, at.count, transposed(x, ldx), dy, m.ldn(), dparam, m.ldn(), Add{});
  T* dbias = dparam + K * m.ldn();
  for (int r = 0; r < at.count; ++r) {
    for (int c = 0; c < n; c += X::W)
      X::store(dbias + c, X::load(dbias + c, n - c) + X::load(dy + r * m.ldn() + c, n - c), n - c);
  }
}

// softmax(sign y), unclamped
template <class T>
LINNET_INLINE void softmax_row(const T* y, int n, T sign, T* f) {
  using X = Vec<T>;
  using V = typename X::V;
  const V factor = X::broadcast(sign), top = X::broadcast(static_cast<T>(top_of(y, n, sign)));
  V total = X::zero();
  for (int c = 0; c < n; c += X::W) {
    const V e = select(X::prefix(n - c), exp(X::load(y + c, n - c) * factor - top), V{});
    total += e;
    X::store(f + c, e, n - c);
  }
  const V part = X::broadcast(1 / sum(total));
  for (int c = 0; c < n; c += X::W) X::store(f + c, X::load(f + c, n - c) * part, n - c);
}

// favor: what a row's exponents are taken less of, and the factor exp(unit - top) of a query under running maxima.
template <class T>
LINNET_INLINE double query_factor(const MapRows& at, int r) {
  if (at.tops == nullptr) return 1;
  const double top = at.tops[at.token(r)];
  return top == -__builtin_inf() ? 0 : __builtin_exp(at.unit - top);
}

// e [F] = exp(+-p - norm - top), p = w.y of one row
template <class T>
LINNET_INLINE void favor_row(const FeatureSelf<T>& m, const T* p, T norm, T top, T* e) {
  using X = Vec<T>;
  using V = typename X::V;
  const int M = static_cast<int>(m.s.M);
  const V less = X::broadcast(norm);
  for (int c = 0; c < M; c += X::W) {
    const V a = X::load(p + c, M - c);
    X::store(e + c, exp(a - X::broadcast(top) - less), M - c);
    if (m.s.map == FeaturesMap::favor_hyp) X::store(e + M + c, exp(-a - X::broadcast(top) - less), M - c);
  }
}
// The doubles of a vector's worth of T.
template <class T>
LINNET_INLINE typename Vec<double>::V wide(const T* x) {
  using D = Vec<double>;
  if constexpr (sizeof(T) == 8) {
    return D::load(x);
  } else {
    vf_half narrow;
    __builtin_memcpy(&narrow, x, sizeof narrow);
    return widen_half(narrow);
  }
}
// favor_row of one token in double. Its top may be far from the token's own exponents (decode takes it from the caller), and
// exp magnifies what float would lose of 60 or 90; a state of M x V numbers is read beside these M x K products. p: scratch
// [ldn] of doubles.
template <class T>
void exact_row(const FeatureSelf<T>& m, const MapRows& at, const T* x, T* e, double* p) {
  using D = Vec<double>;
  using V = typename D::V;
  const int M = static_cast<int>(m.s.M), K = static_cast<int>(m.s.K);
  const bool both = m.s.map == FeaturesMap::favor_hyp;
  const T* const in = m.in_of(at.h);
  double norm = 0;
  for (int k = 0; k < K; ++k) norm += static_cast<double>(x[k]) * static_cast<double>(x[k]);
  norm /= 2 * __builtin_sqrt(static_cast<double>(K));
  constexpr int kVectors = 4;  // sums at a time: products of one sum wait for each other
  V high = D::broadcast(-__builtin_inf());
  for (int c = 0; c < M; c += kVectors * D::W) {
    V sums[kVectors] = {};
    const int vectors = (M - c + D::W - 1) / D::W < kVectors ? (M - c + D::W - 1) / D::W : kVectors;
    for (int k = 0; k < K; ++k) {
      const V a = D::broadcast(static_cast<double>(x[k]));
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        if (i < vectors) sums[i] = fma(a, wide(in + k * m.ldn() + c + i * D::W), sums[i]);
      }
    }
    for (int i = 0; i < vectors; ++i) {
      D::store(p + c + i * D::W, sums[i]);
      const V own = both ? abs(sums[i]) : sums[i];
      high = select(D::prefix(M - c - i * D::W), max(high, own), high);
    }
  }
  const V less = D::broadcast(norm + (at.key ? at.unit : static_cast<double>(highest(high))));
  for (int c = 0; c < M; c += D::W) {
    const V own = D::load(p + c), plus = exp(own - less), minus = both ? exp(-own - less) : own;
    for (int l = 0; l < D::W && c + l < M; ++l) {
      e[c + l] = static_cast<T>(plus[l]);
      if (both) e[M + c + l] = static_cast<T>(minus[l]);
    }
  }
}
template <class T>
LINNET_INLINE T favor_top(const FeatureSelf<T>& m, const MapRows& at, const T* p) {
  if (at.key) return static_cast<T>(at.unit);
  const int M = static_cast<int>(m.s.M);
  return static_cast<T>(m.s.map == FeaturesMap::favor_hyp ? magnitude_of(p, M) : top_of(p, M, T(1)));
}

template <class T>
void features_tops(const void* self, const MapRows& at, const T* x, int64_t ldx, double* tops, T* scratch) {
  const FeatureSelf<T>& m = *static_cast<const FeatureSelf<T>*>(self);
  if (m.n == 0) {  // exp, efficient
    for (int r = 0; r < at.count; ++r) {
      tops[r] = top_of(x + r * ldx, static_cast<int>(m.s.K), static_cast<T>(m.s.temperature));
    }
    return;
  }
  project(m, at, x, ldx, scratch);
  const int M = static_cast<int>(m.s.M);
  for (int r = 0; r < at.count; ++r) {
    const T* p = scratch + r * m.ldn();
    tops[r] = m.s.map == FeaturesMap::favor_hyp ? magnitude_of(p, M) : top_of(p, M, T(1));
  }
}

template <class T>
LINNET_INLINE void angle_of(const FeatureSelf<T>& m, const MapRows& at, int r, T* sine, T* cosine) {
  const double angle = 1.57079632679489661923 * static_cast<double>(at.token(r) + 1) / m.s.length;
  *sine = static_cast<T>(__builtin_sin(angle));
  *cosine = static_cast<T>(__builtin_cos(angle));
}

// u = (x - mean) / deviation; returns 1 / deviation
template <class T>
LINNET_INLINE T normalise(const T* x, int K, T* u) {
  using X = Vec<T>;
  using V = typename X::V;
  V sums = X::zero();
  for (int c = 0; c < K; c += X::W) sums += X::load(x + c, K - c);
  const V mean = X::broadcast(sum(sums) / static_cast<T>(K));
  V squares = X::zero();
  for (int c = 0; c < K; c += X::W) {
    const V d = select(X::prefix(K - c), X::load(x + c, K - c) - mean, V{});
    X::store(u + c, d, K - c);
    squares = fma(d, d, squares);
  }
  const double variance = static_cast<double>(sum(squares)) / K + kRebasedEps;
  const T inverse = static_cast<T>(1 / __builtin_sqrt(variance));
  for (int c = 0; c < K; c += X::W) X::store(u + c, X::load(u + c, K - c) * X::broadcast(inverse), K - c);
  return inverse;
}

// r = relu of [x, -x], 2 K elements
template <class T>
LINNET_INLINE void rectify_both(const T* x, int K, T* r) {
  for (int c = 0; c < K; ++c) {
    r[c] = x[c] <= 0 ? T(0) : x[c];
    r[K + c] = x[c] >= 0 ? T(0) : -x[c];
  }
}

// efficient: softmax over the channels of a query (times its factor under running maxima); of keys the softmax over tokens, or
// exp less their top (bounded: the softmax at most 1, where rows of masked keys hold zeros that may lie far above its top).
template <class T>
LINNET_INLINE void efficient_row(const FeatureSelf<T>& m, const MapRows& at, int r, const T* x, T* f, bool bounded) {
  using X = Vec<T>;
  const int K = static_cast<int>(m.s.K);
  if (m.running) f[K] = at.key ? 1 : 0;
  if (!at.key) {
    softmax_row(x, K, T(1), f);
    if (at.tops == nullptr) return;
    const typename X::V factor = X::broadcast(static_cast<T>(query_factor<T>(at, r)));
    for (int c = 0; c < K; c += X::W) X::store(f + c, X::load(f + c, K - c) * factor, K - c);
    return;
  }
  const T* top = m.s.over_tokens ? m.token_tops + (at.b * m.s.H + at.h) * m.ldk() : nullptr;
  const T* share = m.token_shares + (at.b * m.s.H + at.h) * m.ldk();
  const typename X::V unit = X::broadcast(static_cast<T>(at.unit));
  for (int c = 0; c < K; c += X::W) {
    const typename X::V a = X::load(x + c) - (top == nullptr ? unit : X::load(top + c)),
                        e = exp(bounded && top != nullptr ? min(X::zero(), a) : a);
    X::store(f + c, top == nullptr ? e : e * X::load(share + c), K - c);
  }
}

template <class T>
void features_apply(const void* self, const MapRows& at, const T* x, int64_t ldx, T* f, int64_t ldf, T* scratch) {
  using X = Vec<T>;
  using V = typename X::V;
  const FeatureSelf<T>& m = *static_cast<const FeatureSelf<T>*>(self);
  const int K = static_cast<int>(m.s.K), n = static_cast<int>(m.n);
  const V one = X::broadcast(1);
  T* y = scratch;                           // [C, ldn]
  T* row = scratch + kChunk * 2 * m.ldn();  // [C, ldk]
  switch (m.s.map) {
    case FeaturesMap::identity:
    case FeaturesMap::focused: return each(at, K, x, ldx, f, ldf, [](V a) { return a; });
    case FeaturesMap::elu1:
      return each(at, K, x, ldx, f, ldf, [&](V a) { return select(gt(a, V{}), a + one, exp(min(V{}, a))); });
    case FeaturesMap::relu: return each(at, K, x, ldx, f, ldf, [](V a) { return rectify<T>(a); });
    case FeaturesMap::relu2: return each(at, K, x, ldx, f, ldf, [](V a) { return rectify<T>(a) * rectify<T>(a); });
    case FeaturesMap::hedgehog:
    case FeaturesMap::hedgehog_exp:
    case FeaturesMap::hedgehog_joint:
    case FeaturesMap::t2r:
    case FeaturesMap::favor:
    case FeaturesMap::favor_hyp:
    case FeaturesMap::favor_relu: project(m, at, x, ldx, y); break;
    default: break;
  }
  const V floor_of = X::broadcast(static_cast<T>(kHedgehogFloor));
  for (int r = 0; r < at.count; ++r, x += ldx, f += ldf, y += m.ldn()) {
    switch (m.s.map) {
      case FeaturesMap::cosine: {
        const T top = static_cast<T>(magnitude_of(x, K));
        const V whole = X::broadcast(top == 0 ? T(1) : top);  // a division: one channel is then 1 or -1, and its gradient 0
        for (int c = 0; c < K; c += X::W) X::store(f + c, X::load(x + c) / whole, K - c);
        const T square = dot_of(f, f, K),
                part = square == 0 ? T(0) : static_cast<T>(1 / __builtin_sqrt(static_cast<double>(square)));
        for (int c = 0; c < K; c += X::W) X::store(f + c, X::load(f + c, K - c) * X::broadcast(part), K - c);
        break;
      }
      case FeaturesMap::exp: {
        const T t = static_cast<T>(m.s.temperature);
        const V less = X::broadcast(static_cast<T>(at.key ? at.unit : top_of(x, K, t)));
        const V factor = X::broadcast(at.key ? T(1) : static_cast<T>(query_factor<T>(at, r)));
        for (int c = 0; c < K; c += X::W) X::store(f + c, exp(X::load(x + c) * X::broadcast(t) - less) * factor, K - c);
        if (m.running) f[K] = at.key ? 1 : 0;
        break;
      }
      case FeaturesMap::cosformer: {
        T sine, cosine;
        angle_of(m, at, r, &sine, &cosine);
        for (int c = 0; c < K; c += X::W) {
          const V a = rectify<T>(X::load(x + c));
          X::store(f + c, a * X::broadcast(sine), K - c);
          X::store(f + K + c, a * X::broadcast(cosine), K - c);
        }
        break;
      }
      case FeaturesMap::favor:
      case FeaturesMap::favor_hyp: {
        const int F = static_cast<int>(m.s.F);
        const T norm = dot_of(x, x, K) * power_of<T>(K, -0.5) / 2,
                g = static_cast<T>(1 / __builtin_sqrt(static_cast<double>(F)));
        if (m.exact) {
          exact_row(m, at, x, f, reinterpret_cast<double*>(scratch + kChunk * m.ldn()));
        } else {
          favor_row(m, static_cast<const T*>(y), norm, favor_top(m, at, static_cast<const T*>(y)), f);
        }
        const T more = static_cast<T>(m.running && at.key ? 0 : m.s.favor_eps);
        const T factor = at.key ? T(1) : static_cast<T>(query_factor<T>(at, r));
        V total = X::zero();
        for (int c = 0; c < F; c += X::W) {
          const V plain = select(X::prefix(F - c), (X::load(f + c, F - c) + X::broadcast(more)) * X::broadcast(g), V{});
          total += plain;
          X::store(f + c, plain * X::broadcast(factor), F - c);
        }
        // A query that has seen no key has no top: all its weights are 0.
        if (m.running)
          f[F] = at.key                                                    ? T(1)
                 : factor == 0 && at.tops[at.token(r)] == -__builtin_inf() ? T(0)
                                                                           : g * static_cast<T>(m.s.favor_eps) * sum(total);
        break;
      }
      case FeaturesMap::favor_relu:
        for (int c = 0; c < n; c += X::W) {
          X::store(f + c, rectify<T>(X::load(y + c)) + X::broadcast(static_cast<T>(kFavorReluFloor)), n - c);
        }
        break;
      case FeaturesMap::hedgehog:
        softmax_row(static_cast<const T*>(y), n, T(1), f);
        softmax_row(static_cast<const T*>(y), n, T(-1), f + n);
        for (int c = 0; c < 2 * n; c += X::W) X::store(f + c, max(floor_of, X::load(f + c, 2 * n - c)), 2 * n - c);
        break;
      case FeaturesMap::hedgehog_exp: {
        const V high = X::broadcast(static_cast<T>(top_of(static_cast<const T*>(y), n, T(1))));
        const V low = X::broadcast(static_cast<T>(-top_of(static_cast<const T*>(y), n, T(-1))));
        for (int c = 0; c < n; c += X::W) {
          const V a = X::load(y + c);
          X::store(f + c, max(floor_of, exp(a - high)), n - c);
          X::store(f + n + c, max(floor_of, exp(low - a)), n - c);
        }
        break;
      }
      case FeaturesMap::hedgehog_joint: {
        const V top = X::broadcast(static_cast<T>(magnitude_of(static_cast<const T*>(y), K))), two = X::broadcast(2);
        V total = X::zero();
        for (int c = 0; c < K; c += X::W) {
          const V a = X::load(y + c), up = exp(two * (a - top)), down = exp(two * (-a - top));
          X::store(f + c, up, K - c);
          X::store(row + c, down);
          total += select(X::prefix(K - c), up + down, V{});
        }
        const V part = X::broadcast(1 / sum(total));
        for (int c = 0; c < K; c += X::W) X::store(f + K + c, X::load(row + c) * part, K - c);
        for (int c = 0; c < K; c += X::W) X::store(f + c, X::load(f + c, K - c) * part, K - c);
        break;
      }
      case FeaturesMap::t2r:
        for (int c = 0; c < n; c += X::W) X::store(f + c, rectify<T>(X::load(y + c)), n - c);
        break;
      case FeaturesMap::rebased:
        normalise(x, K, row);
        for (int c = 0; c < K; c += X::W)
          X::store(row + c, fma(X::load(row + c, K - c), X::load(m.gamma + c), X::load(m.beta + c)));
        pack(static_cast<const T*>(row), K, power_of<T>(K, -0.5), static_cast<T>(__builtin_sqrt(2.0 / K)), f);
        break;
      case FeaturesMap::dpfp: {
        T* both = scratch + kChunk * (2 * m.ldn() + m.ldk());
        const int width = 2 * K;
        rectify_both(x, K, both);
        for (int s = 1; s <= m.s.nu; ++s) {
          T* part = f + (s - 1) * width;
          const int shift = s % width;
          for (int i = 0; i < shift; ++i) part[i] = both[i] * both[i - shift + width];
          for (int i = shift; i < width; ++i) part[i] = both[i] * both[i - shift];
        }
        break;
      }
      case FeaturesMap::taylor: {
        const V root = X::broadcast(power_of<T>(K, -0.25));
        f[0] = 1;
        for (int c = 0; c < K; c += X::W) {
          X::store(row + c, X::load(x + c) * root);
          X::store(f + 1 + c, X::load(row + c), K - c);
        }
        pack(static_cast<const T*>(row), K, static_cast<T>(__builtin_sqrt(0.5)), T(1), f + 1 + K);
        break;
      }
      case FeaturesMap::efficient: efficient_row(m, at, r, x, f, false); break;
      default: break;
    }
  }
}

template <class T>
void features_backward_rows(const void* self, const MapRows& at, const T* x, int64_t ldx, T* df, int64_t ldf, T* dx, T* dparam,
                            T* scratch) {
  using X = Vec<T>;
  using V = typename X::V;
  const FeatureSelf<T>& m = *static_cast<const FeatureSelf<T>*>(self);
  const int K = static_cast<int>(m.s.K), n = static_cast<int>(m.n);
  T* ys = scratch;                          // [C, ldn]
  T* dys = scratch + kChunk * m.ldn();      // [C, ldn]
  T* row = scratch + kChunk * 2 * m.ldn();  // [C, ldk]
  T* more = row + kChunk * m.ldk();         // four rows of 2 K + 2 n
  const int64_t wide = round_up<T>(2 * K + 2 * n);
  switch (m.s.map) {
    case FeaturesMap::identity:
    case FeaturesMap::focused: return each_backward(at, K, x, ldx, df, ldf, dx, [](V, V d) { return d; });
    case FeaturesMap::elu1:
      return each_backward(at, K, x, ldx, df, ldf, dx, [](V a, V d) { return select(gt(a, V{}), d, exp(min(V{}, a)) * d); });
    case FeaturesMap::relu:
      return each_backward(at, K, x, ldx, df, ldf, dx, [](V a, V d) { return select(gt(a, V{}), d, V{}); });
    case FeaturesMap::relu2:
      return each_backward(at, K, x, ldx, df, ldf, dx, [](V a, V d) { return (rectify<T>(a) + rectify<T>(a)) * d; });
    case FeaturesMap::hedgehog:
    case FeaturesMap::hedgehog_exp:
    case FeaturesMap::hedgehog_joint:
    case FeaturesMap::t2r:
    case FeaturesMap::favor:
    case FeaturesMap::favor_hyp:
    case FeaturesMap::favor_relu: project(m, at, x, ldx, ys); break;
    default: break;
  }
  const V floor_of = X::broadcast(static_cast<T>(kHedgehogFloor));
  const T* first_x = x;
  T* first_dx = dx;
  const T* y = ys;
  T* dy = dys;
  for (int r = 0; r < at.count; ++r, x += ldx, dx += ldx, df += ldf, y += m.ldn(), dy += m.ldn()) {
    switch (m.s.map) {
      case FeaturesMap::cosine: {
        const T top = static_cast<T>(magnitude_of(x, K)), inverse = top == 0 ? T(0) : 1 / top;
        const V whole = X::broadcast(top == 0 ? T(1) : top);
        for (int c = 0; c < K; c += X::W) X::store(row + c, X::load(x + c) / whole);
        const T square = dot_of(static_cast<const T*>(row), static_cast<const T*>(row), K);
        const T part = square == 0 ? T(0) : static_cast<T>(1 / __builtin_sqrt(static_cast<double>(square)));
        const V dot = X::broadcast(dot_of(static_cast<const T*>(row), static_cast<const T*>(df), K) * part * part);
        for (int c = 0; c < K; c += X::W) {
          X::store(dx + c, (X::load(df + c, K - c) - X::load(row + c) * dot) * X::broadcast(part * inverse));
        }
        break;
      }
      case FeaturesMap::exp: {
        const T t = static_cast<T>(m.s.temperature);
        const V less = X::broadcast(static_cast<T>(at.key ? at.unit : top_of(x, K, t)));
        const V factor = X::broadcast(t * (at.key ? T(1) : static_cast<T>(query_factor<T>(at, r))));
        for (int c = 0; c < K; c += X::W) {
          X::store(dx + c, exp(X::load(x + c) * X::broadcast(t) - less) * factor * X::load(df + c, K - c));
        }
        break;
      }
      case FeaturesMap::cosformer: {
        T sine, cosine;
        angle_of(m, at, r, &sine, &cosine);
        for (int c = 0; c < K; c += X::W) {
          const V d = fma(X::load(df + c, K - c), X::broadcast(sine), X::load(df + K + c, K - c) * X::broadcast(cosine));
          X::store(dx + c, select(gt(X::load(x + c), V{}), d, V{}));
        }
        break;
      }
      case FeaturesMap::favor:
      case FeaturesMap::favor_hyp: {
        // dl_r = g e_r df_r; dp = dl, minus that of -w; row = -sum(dl) y, to which the product is added below
        const int F = static_cast<int>(m.s.F), M = static_cast<int>(m.s.M);
        const T norm = dot_of(x, x, K) * power_of<T>(K, -0.5) / 2,
                g = static_cast<T>(1 / __builtin_sqrt(static_cast<double>(F)));
        favor_row(m, y, norm, favor_top(m, at, y), more);
        const double own = at.key ? 1 : query_factor<T>(at, r);
        const T factor = static_cast<T>(own);
        const bool unseen = !at.key && at.tops != nullptr && at.tops[at.token(r)] == -__builtin_inf();
        const T last = m.running && !at.key && !unseen ? static_cast<T>(m.s.favor_eps) * g * df[F] : T(0);
        V total = X::zero();
        for (int c = 0; c < M; c += X::W) {
          const auto slope = [&](int from) {
            const V d = fma(X::load(df + from + c, M - c), X::broadcast(factor), X::broadcast(last));
            return select(X::prefix(M - c), X::load(more + from + c, M - c) * X::broadcast(g) * d, V{});
          };
          V up = slope(0);
          total += up;
          if (m.s.map == FeaturesMap::favor_hyp) {
            const V down = slope(M);
            total += down;
            up = up - down;
          }
          X::store(dy + c, up);
        }
        const V less = X::broadcast(-sum(total) * power_of<T>(K, -0.5));
        for (int c = 0; c < K; c += X::W) X::store(row + r * m.ldk() + c, X::load(x + c) * less);
        break;
      }
      case FeaturesMap::favor_relu:
        for (int c = 0; c < n; c += X::W) {
          X::store(dy + c, select(gt(X::load(y + c), V{}), X::load(df + c, n - c), V{}));
        }
        break;
      case FeaturesMap::hedgehog:
        for (int half = 0; half < 2; ++half) {
          const V sign = X::broadcast(half == 0 ? 1 : -1);
          const T* d = df + half * n;
          softmax_row(y, n, half == 0 ? T(1) : T(-1), more);
          V dot = X::zero();
          for (int c = 0; c < n; c += X::W) {
            const V a = X::load(more + c, n - c);
            dot = fma(a, select(gt(a, floor_of), X::load(d + c, n - c), V{}), dot);
          }
          const V mean = X::broadcast(sum(dot));
          for (int c = 0; c < n; c += X::W) {
            const V a = X::load(more + c, n - c),
                    part = sign * a * (select(gt(a, floor_of), X::load(d + c, n - c), V{}) - mean);
            X::store(dy + c, half == 0 ? part : X::load(dy + c) + part);
          }
        }
        break;
      case FeaturesMap::hedgehog_exp: {
        int high = 0, low = 0;  // the first extreme channel takes the gradient of the shift
        for (int c = 1; c < n; ++c) {
          high = y[c] > y[high] ? c : high;
          low = y[c] < y[low] ? c : low;
        }
        const V top = X::broadcast(y[high]), bottom = X::broadcast(y[low]);
        V up_sum = X::zero(), down_sum = X::zero();
        for (int c = 0; c < n; c += X::W) {
          const V a = X::load(y + c), up = exp(a - top), down = exp(bottom - a);
          const V d = select(gt(up, floor_of), up * X::load(df + c, n - c), V{});
          const V e = select(gt(down, floor_of), down * X::load(df + n + c, n - c), V{});
          X::store(dy + c, d - e);
          up_sum += select(X::prefix(n - c), d, V{});
          down_sum += select(X::prefix(n - c), e, V{});
        }
        dy[high] -= sum(up_sum);
        dy[low] += sum(down_sum);
        break;
      }
      case FeaturesMap::hedgehog_joint: {
        const V top = X::broadcast(static_cast<T>(magnitude_of(y, K))), two = X::broadcast(2);
        T* ups = more;
        T* downs = more + wide;
        V total = X::zero(), dot = X::zero();
        for (int c = 0; c < K; c += X::W) {
          const V a = X::load(y + c), up = exp(two * (a - top)), down = exp(two * (-a - top));
          X::store(ups + c, up);
          X::store(downs + c, down);
          total += select(X::prefix(K - c), up + down, V{});
          dot += up * X::load(df + c, K - c) + down * X::load(df + K + c, K - c);
        }
        const V part = X::broadcast(1 / sum(total)), mean = X::broadcast(sum(dot)) * part;
        for (int c = 0; c < K; c += X::W) {
          const V up = X::load(ups + c) * part, down = X::load(downs + c) * part;
          X::store(dy + c, two * (up * (X::load(df + c, K - c) - mean) - down * (X::load(df + K + c, K - c) - mean)));
        }
        break;
      }
      case FeaturesMap::t2r:
        for (int c = 0; c < n; c += X::W) {
          X::store(dy + c, select(gt(X::load(y + c), V{}), X::load(df + c, n - c), V{}));
        }
        break;
      case FeaturesMap::rebased: {
        T *u = more, *a = more + wide, *da = more + 2 * wide;
        const T inverse = normalise(x, K, u), count = static_cast<T>(K);
        for (int c = 0; c < K; c += X::W) {
          X::store(a + c, fma(X::load(u + c, K - c), X::load(m.gamma + c), X::load(m.beta + c)));
          X::store(da + c, V{});
        }
        unpack(static_cast<const T*>(a), K, power_of<T>(K, -0.5), static_cast<T>(__builtin_sqrt(2.0 / K)),
               static_cast<const T*>(df), da);
        V mean = X::zero(), dot = X::zero();
        for (int c = 0; c < K; c += X::W) {
          const V d = X::load(da + c, K - c), normal = X::load(u + c, K - c);
          if (dparam != nullptr) {
            X::store(dparam + c, fma(d, normal, X::load(dparam + c)));
            X::store(dparam + m.ldk() + c, X::load(dparam + m.ldk() + c) + d);
          }
          const V own = d * X::load(m.gamma + c);
          X::store(da + c, own);
          mean += own;
          dot = fma(own, normal, dot);
        }
        const V less = X::broadcast(sum(mean) / count), along = X::broadcast(sum(dot) / count);
        for (int c = 0; c < K; c += X::W) {
          X::store(dx + c, (X::load(da + c) - less - X::load(u + c, K - c) * along) * X::broadcast(inverse));
        }
        break;
      }
      case FeaturesMap::dpfp: {
        T* both = more;
        T* slopes = more + wide;
        const int width = 2 * K;
        rectify_both(x, K, both);
        for (int i = 0; i < width; ++i) slopes[i] = 0;
        for (int s = 1; s <= m.s.nu; ++s) {
          const T* part = df + (s - 1) * width;
          const int shift = s % width;
          for (int i = 0; i < width; ++i) {
            const int j = i < shift ? i - shift + width : i - shift;
            slopes[i] += part[i] * both[j];
            slopes[j] += part[i] * both[i];
          }
        }
        for (int c = 0; c < K; ++c) dx[c] = x[c] > 0 ? slopes[c] : x[c] < 0 ? -slopes[K + c] : T(0);
        break;
      }
      case FeaturesMap::taylor: {
        const V root = X::broadcast(power_of<T>(K, -0.25));
        T *a = more, *da = more + wide;
        for (int c = 0; c < K; c += X::W) {
          X::store(a + c, X::load(x + c) * root);
          X::store(da + c, X::load(df + 1 + c, K - c));
        }
        unpack(static_cast<const T*>(a), K, static_cast<T>(__builtin_sqrt(0.5)), T(1), static_cast<const T*>(df + 1 + K), da);
        for (int c = 0; c < K; c += X::W) X::store(dx + c, X::load(da + c) * root);
        break;
      }
      case FeaturesMap::efficient: {
        efficient_row(m, at, r, x, more, true);
        V dot = X::zero();
        for (int c = 0; !at.key && c < K; c += X::W) dot = fma(X::load(more + c, K - c), X::load(df + c, K - c), dot);
        // A query's features sum to its factor, so that the mean of df under their softmax is dot over it.
        const T factor = at.key || at.tops == nullptr ? T(1) : static_cast<T>(query_factor<T>(at, r));
        const V mean = X::broadcast(factor == 0 ? T(0) : sum(dot) / factor);
        for (int c = 0; c < K; c += X::W) {
          const V d = X::load(more + c, K - c) * (X::load(df + c, K - c) - mean);
          X::store(dx + c, d);
          if (at.key && m.s.over_tokens && dparam != nullptr) X::store(dparam + c, X::load(dparam + c) + d);
        }
        break;
      }
      default: break;
    }
  }
  if (m.n == 0) return;
  leave(m, at, first_x, ldx, static_cast<const T*>(dys), first_dx, m.s.M > 0 ? nullptr : dparam);
  if (m.s.map != FeaturesMap::favor && m.s.map != FeaturesMap::favor_hyp) return;
  for (int r = 0; r < at.count; ++r) {
    for (int c = 0; c < K; c += X::W)
      X::store(first_dx + r * ldx + c, X::load(first_dx + r * ldx + c) + X::load(row + r * m.ldk() + c));
  }
}

}  // namespace linnet::LINNET_ISA
