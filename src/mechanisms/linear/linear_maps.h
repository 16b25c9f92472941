// The feature maps of linear attention on rows of dense scratch, forward and backward, for sources compiled per instruction
// set.
#pragma once

#include "linear.h"
#include "simd/gemm.h"
#include "simd/math.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

template <class T>
struct Map {
  FeatureMap map;
  int K, F, nu;
  const T* w = nullptr;  // map t2r: [F, ldk] and its transpose [K, ldf]
  const T* wt = nullptr;
  LINNET_INLINE int64_t ldk() const { return round_up<T>(K); }
  LINNET_INLINE int64_t ldf() const { return round_up<T>(F); }
  // Elements of scratch that map_rows and map_rows_backward need besides their arguments: rows of x, and [x, -x] twice.
  LINNET_INLINE int64_t scratch(int rows) const { return rows * ldk() + 4 * ldk() + 2 * round_up<T>(2 * K); }
};

// keep NaN: x86 max returns its second operand then
template <class V>
LINNET_INLINE V rectify(V x) {
  return max(V{}, x);
}

// f[r, c] = fn(x[r, c]), rows of x in the caller's memory; f padded with fn(0).
template <class T, class E, class Fn>
LINNET_INLINE void map_each(const E* x, int64_t stride, int rows, int K, T* f, int64_t ld, Fn fn) {
  using X = Vec<T>;
  for (int r = 0; r < rows; ++r, x += stride, f += ld) {
    int c = 0;
    for (; c + X::W <= K; c += X::W) X::store(f + c, fn(X::load(x + c)));
    if (c < K) X::store(f + c, fn(X::load(x + c, K - c)));
  }
}

// dx[r, c] = fn(x[r, c], df[r, c])
template <class T, class E, class Fn>
LINNET_INLINE void map_each_backward(const E* x, int64_t stride, int rows, int K, const T* df, int64_t ldf, T* dx, int64_t ldx,
                                     Fn fn) {
  using X = Vec<T>;
  for (int r = 0; r < rows; ++r, x += stride, df += ldf, dx += ldx) {
    for (int c = 0; c < K; c += X::W) X::store(dx + c, fn(X::load(x + c, K - c), X::load(df + c)));
  }
}

// r[i] = relu of [x, -x], 2 K elements
template <class T>
LINNET_INLINE void rectify_both(const T* x, int K, T* r) {
  for (int c = 0; c < K; ++c) {
    r[c] = x[c] <= 0 ? T(0) : x[c];
    r[K + c] = x[c] >= 0 ? T(0) : -x[c];
  }
}

template <class T>
LINNET_INLINE T taylor_linear(int K) {
  return static_cast<T>(1 / __builtin_sqrt(__builtin_sqrt(static_cast<double>(K))));
}
template <class T>
LINNET_INLINE T taylor_square(int K, bool diagonal) {
  return static_cast<T>(__builtin_sqrt((diagonal ? 0.5 : 1.0) / static_cast<double>(K)));
}

// f [rows, ldf] = phi(x); x: rows `stride` apart in the caller's memory. The padding of f holds finite numbers.
template <class T, class E>
void map_rows(const Map<T>& m, const E* x, int64_t stride, int rows, T* f, int64_t ldf, T* scratch) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = m.K;
  const V one = X::broadcast(1);
  switch (m.map) {
    case FeatureMap::identity: return map_each(x, stride, rows, K, f, ldf, [](V a) { return a; });
    case FeatureMap::elu1:
      return map_each(x, stride, rows, K, f, ldf, [&](V a) { return select(gt(a, V{}), a + one, exp(min(V{}, a))); });
    case FeatureMap::relu: return map_each(x, stride, rows, K, f, ldf, [](V a) { return rectify(a); });
    case FeatureMap::relu2: return map_each(x, stride, rows, K, f, ldf, [](V a) { return rectify(a) * rectify(a); });
    case FeatureMap::silu: return map_each(x, stride, rows, K, f, ldf, [](V a) { return a * sigmoid(a); });
    case FeatureMap::softplus: return map_each(x, stride, rows, K, f, ldf, [](V a) { return softplus(a); });
    case FeatureMap::exp: return map_each(x, stride, rows, K, f, ldf, [](V a) { return exp(a); });
    case FeatureMap::t2r:
      load_tile<T>(x, stride, rows, K, scratch, m.ldk());
      gemm<T>(rows, m.F, K, as_is(static_cast<const T*>(scratch), m.ldk()), m.wt, m.ldf(), f, ldf, Store{});
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < m.F; c += X::W) X::store(f + r * ldf + c, rectify(X::load(f + r * ldf + c)));
      }
      return;
    default: break;
  }
  for (int r = 0; r < rows; ++r, x += stride, f += ldf) {
    T* row = scratch;
    load_tile<T>(x, stride, 1, K, row, m.ldk());
    if (m.map == FeatureMap::hedgehog) {
      V largest = V{};
      for (int c = 0; c < K; c += X::W) largest = max(abs(X::load(row + c)), largest);
      const V top = X::broadcast(highest(largest));
      V total = V{};
      for (int c = 0; c < K; c += X::W) {
        const V a = X::load(row + c), up = exp(a - top), down = exp(-a - top);
        X::store(row + c, up);
        X::store(row + m.ldk() + c, down);
        total += select(X::prefix(K - c), up + down, V{});
      }
      const V part = X::broadcast(1 / sum(total));
      for (int c = 0; c < K; c += X::W) X::store(f + c, X::load(row + c) * part);
      for (int c = 0; c < K; c += X::W) X::store(f + K + c, X::load(row + m.ldk() + c) * part, K - c);
    } else if (m.map == FeatureMap::taylor2) {
      const V linear = X::broadcast(taylor_linear<T>(K)), off = X::broadcast(taylor_square<T>(K, false));
      f[0] = 1;
      for (int c = 0; c < K; c += X::W) X::store(f + 1 + c, X::load(row + c) * linear, K - c);
      T* at = f + 1 + K;
      for (int i = 0; i < K; ++i) {
        const V factor = X::broadcast(row[i]) * off;
        for (int j = i; j < K; j += X::W) X::store(at + j - i, factor * X::load(row + j, K - j), K - j);
        at[0] = row[i] * row[i] * taylor_square<T>(K, true);
        at += K - i;
      }
    } else {  // dpfp
      T* both = row + m.ldk();
      const int width = 2 * K;
      rectify_both(row, K, both);
      for (int s = 1; s <= m.nu; ++s) {
        T* part = f + (s - 1) * width;
        const int shift = s % width;  // both[i - s], cyclic
        for (int i = 0; i < shift; ++i) part[i] = both[i] * both[i - shift + width];
        for (int i = shift; i < width; ++i) part[i] = both[i] * both[i - shift];
      }
    }
    for (int64_t c = m.F; c < ldf; ++c) f[c] = 0;
  }
}

// dx [rows, ldk] = J(x)^T df; df [rows, ldf] is overwritten. Map t2r: dw [F, ldk] += its part, when not null.
template <class T, class E>
void map_rows_backward(const Map<T>& m, const E* x, int64_t stride, int rows, T* df, int64_t ldf, T* dx, T* dw, T* scratch) {
  using X = Vec<T>;
  using V = typename X::V;
  const int K = m.K;
  const int64_t ldk = m.ldk();
  const V one = X::broadcast(1);
  switch (m.map) {
    case FeatureMap::identity: return map_each_backward(x, stride, rows, K, df, ldf, dx, ldk, [](V, V d) { return d; });
    case FeatureMap::elu1:
      return map_each_backward(x, stride, rows, K, df, ldf, dx, ldk,
                               [&](V a, V d) { return select(gt(a, V{}), d, exp(min(V{}, a)) * d); });
    case FeatureMap::relu:
      return map_each_backward(x, stride, rows, K, df, ldf, dx, ldk, [](V a, V d) { return select(gt(a, V{}), d, V{}); });
    case FeatureMap::relu2:
      return map_each_backward(x, stride, rows, K, df, ldf, dx, ldk, [](V a, V d) { return (rectify(a) + rectify(a)) * d; });
    case FeatureMap::silu:
      return map_each_backward(x, stride, rows, K, df, ldf, dx, ldk,
                               [&](V a, V d) { return sigmoid(a) * fma(a, sigmoid(-a), one) * d; });
    case FeatureMap::softplus:
      return map_each_backward(x, stride, rows, K, df, ldf, dx, ldk, [](V a, V d) { return sigmoid(a) * d; });
    case FeatureMap::exp: return map_each_backward(x, stride, rows, K, df, ldf, dx, ldk, [](V a, V d) { return exp(a) * d; });
    case FeatureMap::t2r: {
      // df of features that are 0 becomes 0; then dx = df w, dw += df^T x.
      load_tile<T>(x, stride, rows, K, scratch, ldk);
      const T* rows_x = scratch;
      T pre[Vec<T>::W];
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < m.F; c += X::W) {
          gemm<T>(1, X::W, K, as_is(rows_x + r * ldk, ldk), m.wt + c, m.ldf(), pre, X::W, Store{});
          X::store(df + r * ldf + c, select(gt(X::load(pre), V{}), X::load(df + r * ldf + c), V{}));
        }
      }
      gemm<T>(rows, K, m.F, as_is(static_cast<const T*>(df), ldf), m.w, ldk, dx, ldk, Store{});
      if (dw != nullptr) gemm<T>(m.F, K, rows, transposed(static_cast<const T*>(df), ldf), rows_x, ldk, dw, ldk, Add{});
      return;
    }
    default: break;
  }
  for (int r = 0; r < rows; ++r, x += stride, df += ldf, dx += ldk) {
    T* row = scratch;
    load_tile<T>(x, stride, 1, K, row, ldk);
    if (m.map == FeatureMap::hedgehog) {
      // dx = up (dup - mean) - down (ddown - mean), mean = phi . dphi
      V largest = V{}, total = V{}, dot = V{};
      T* ups = row + ldk;
      T* downs = row + 2 * ldk;
      for (int c = 0; c < K; c += X::W) largest = max(abs(X::load(row + c)), largest);
      const V top = X::broadcast(highest(largest));
      for (int c = 0; c < K; c += X::W) {
        const V a = X::load(row + c), up = exp(a - top), down = exp(-a - top);
        X::store(ups + c, up);
        X::store(downs + c, down);
        total += select(X::prefix(K - c), up + down, V{});
        dot += up * X::load(df + c, K - c) + down * X::load(df + K + c, K - c);
      }
      const V part = X::broadcast(1 / sum(total)), mean = X::broadcast(sum(dot)) * part;
      for (int c = 0; c < K; c += X::W) {
        const V up = X::load(ups + c) * part, down = X::load(downs + c) * part;
        X::store(dx + c, up * (X::load(df + c, K - c) - mean) - down * (X::load(df + K + c, K - c) - mean));
      }
    } else if (m.map == FeatureMap::taylor2) {
      // Row i of the triangle: dx_i += off sum_j df_ij x_j, dx_j += off df_ij x_i for j > i; the diagonal gives 2 x_i.
      const V linear = X::broadcast(taylor_linear<T>(K)), off = X::broadcast(taylor_square<T>(K, false));
      for (int c = 0; c < K; c += X::W) X::store(dx + c, X::load(df + 1 + c, K - c) * linear);
      const T* at = df + 1 + K;
      for (int i = 0; i < K; ++i) {
        const V factor = X::broadcast(row[i]) * off;
        V dot = V{};
        for (int j = i + 1; j < K; j += X::W) {
          const V slope = X::load(at + j - i, K - j);
          dot = fma(slope, X::load(row + j, K - j), dot);
          X::store(dx + j, fma(slope, factor, X::load(dx + j, K - j)), K - j);
        }
        dx[i] += taylor_square<T>(K, false) * sum(dot) + 2 * taylor_square<T>(K, true) * at[0] * row[i];
        at += K - i;
      }
    } else {  // dpfp
      T* both = row + ldk;
      T* slopes = both + round_up<T>(2 * K);
      const int width = 2 * K;
      rectify_both(row, K, both);
      for (int i = 0; i < width; ++i) slopes[i] = 0;
      for (int s = 1; s <= m.nu; ++s) {
        const T* part = df + (s - 1) * width;
        const int shift = s % width;
        for (int i = 0; i < width; ++i) {
          const int j = i < shift ? i - shift + width : i - shift;
          slopes[i] += part[i] * both[j];
          slopes[j] += part[i] * both[i];
        }
      }
      for (int c = 0; c < K; ++c) dx[c] = row[c] > 0 ? slopes[c] : row[c] < 0 ? -slopes[K + c] : T(0);
    }
  }
}

}  // namespace linnet::LINNET_ISA
