// Strips: softmax over a list of keys that is not long, 64 queries in the lanes, the keys in the rows, all rows held at once.
//
//   gemm<T>(n, lanes, K, as_is(k, ldk), qt, kLanes, strip, kLanes, Store{});             // logits in base 2, [n, 64]
//   strip_softmax<T>(strip, n, lanes, bias, limit, start, maximum, total, products);     // exponentials, down the rows
//
// For mechanisms made of many small softmaxes (monarch, hierarchical), where a running maximum gains nothing.
#pragma once

#include "softmax_problem.h"  // with_type, run_tasks, constants

namespace linnet::LINNET_ISA {

// Softmax down the rows of N vectors of a strip, after subtracting bias[row] where given; entries above the lane's limit (row
// >= limit[lane]) do not count. start: one more logit per lane. Leaves exponentials, the maximum, their sum and, less the
// maximum, sum p (x - maximum): an entropy is a small difference of large logits otherwise.
template <class T, int N>
LINNET_INLINE void column_softmax(T* strip, int n, const T* bias, const T* limit, const T* start, T* maximum, T* total,
                                  T* products) {
  using X = Vec<T>;
  using V = typename X::V;
  const V hidden = X::broadcast(-kInfinity<T>);
  V m[N], l[N], e[N];
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v) {
    m[v] = start == nullptr ? X::broadcast(kLowest<T>) : X::load(start + v * X::W);
    l[v] = e[v] = X::zero();
  }
  for (int i = 0; i < n; ++i) {
    T* const row = strip + i * kLanes;
    const V shift = X::broadcast(bias == nullptr ? T(0) : bias[i]);
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      V x = X::load(row + v * X::W) - shift;
      if (limit != nullptr) x = select(lt(X::broadcast(static_cast<T>(i)), X::load(limit + v * X::W)), x, hidden);
      X::store(row + v * X::W, x);
      m[v] = max(x, m[v]);
    }
  }
  for (int i = 0; i < n; ++i) {
    T* const row = strip + i * kLanes;
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      const V x = X::load(row + v * X::W) - m[v], p = exp2_nonpositive(x);
      X::store(row + v * X::W, p);
      l[v] = l[v] + p;
      if (products != nullptr) e[v] = fma(p, x, e[v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v) {
    X::store(maximum + v * X::W, m[v]);
    X::store(total + v * X::W, l[v]);
    if (products != nullptr) X::store(products + v * X::W, e[v]);
  }
}
template <class T>
[[gnu::noinline]] void strip_softmax(T* strip, int n, int lanes, const T* bias, const T* limit, const T* start, T* maximum,
                                     T* total, T* products) {
  using X = Vec<T>;
  const auto from = [](auto* p, int v) { return p == nullptr ? p : p + v; };
  int v = 0;
  for (; v + 4 * X::W <= round_up<T>(lanes); v += 4 * X::W) {
    column_softmax<T, 4>(strip + v, n, bias, from(limit, v), from(start, v), maximum + v, total + v, from(products, v));
  }
  for (; v < lanes; v += X::W) {
    column_softmax<T, 1>(strip + v, n, bias, from(limit, v), from(start, v), maximum + v, total + v, from(products, v));
  }
}

// log2 of sums that are normal numbers.
template <class T>
LINNET_INLINE typename Vec<T>::V log2_of(typename Vec<T>::V x) {
  return log(x) * kLog2e<T>;
}

// d = p (d - delta[lane])
template <class T>
void through_softmax(const T* p, T* d, int n, int lanes, const T* delta) {
  using X = Vec<T>;
  for (int i = 0; i < n; ++i) {
    for (int v = 0; v < lanes; v += X::W) {
      T* const at = d + i * kLanes + v;
      X::store(at, X::load(p + i * kLanes + v) * (X::load(at) - X::load(delta + v)));
    }
  }
}
// Rows of dense scratch.
template <class T>
LINNET_INLINE T dot_rows(const T* a, const T* b, int n) {
  using X = Vec<T>;
  typename X::V total = X::zero();
  for (int c = 0; c < n; c += X::W) total = fma(X::load(a + c, n - c), X::load(b + c, n - c), total);
  return sum(total);
}
template <class T>
void add_rows(const T* src, int64_t lds, int rows, int width, T* dst, int64_t ldd, T scale) {
  using X = Vec<T>;
  for (int i = 0; i < rows; ++i) {
    for (int c = 0; c < width; c += X::W) {
      X::store(dst + i * ldd + c, fma(X::broadcast(scale), X::load(src + i * lds + c), X::load(dst + i * ldd + c)));
    }
  }
}
template <class T>
void clear_rows(T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = 0;
}

}  // namespace linnet::LINNET_ISA
