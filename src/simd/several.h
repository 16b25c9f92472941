// several: N vectors side by side, for the elementary functions of math.h.
//
//   Several<vf, 4> x = ...;
//   x = softplus(x);             // as four calls, but each step of all four before the next step
//
// An elementary function is a chain of 20 to 50 instructions of 4 cycles each, and the schedulers of a core hold some 100: of
// calls one behind the other it works on two or three. Side by side it works on all.
#pragma once

#include "simd/vec.h"

namespace linnet::LINNET_ISA {

template <class V, int N>
struct Several {
  V at[N];
};

// {f(a.at[0], b.at[0], ...), ...}
template <class F, class V, int N, class... More>
LINNET_INLINE auto each(const F& f, const Several<V, N>& a, const More&... more) {
  Several<decltype(f(a.at[0], more.at[0]...)), N> result;
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) result.at[i] = f(a.at[i], more.at[i]...);
  return result;
}

// The first n elements, zeros behind them; and back.
template <class T, int N, class E>
LINNET_INLINE Several<typename Vec<T>::V, N> load_several(const E* p, int n) {
  Several<typename Vec<T>::V, N> result;
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) result.at[i] = Vec<T>::load(p + i * Vec<T>::W, n - i * Vec<T>::W);
  return result;
}
template <class T, int N, class E>
LINNET_INLINE void store_several(E* p, const Several<typename Vec<T>::V, N>& a, int n) {
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) Vec<T>::store(p + i * Vec<T>::W, a.at[i], n - i * Vec<T>::W);
}

#define LINNET_SEVERAL_OPERATOR(op)                                                         \
  template <class V, int N>                                                                 \
  LINNET_INLINE Several<V, N> operator op(const Several<V, N>& a, const Several<V, N>& b) { \
    return each([](V x, V y) { return x op y; }, a, b);                                     \
  }                                                                                         \
  template <class V, int N>                                                                 \
  LINNET_INLINE Several<V, N> operator op(const Several<V, N>& a, decltype(V{}[0] + 0) b) { \
    return each([b](V x) { return x op b; }, a);                                            \
  }                                                                                         \
  template <class V, int N>                                                                 \
  LINNET_INLINE Several<V, N> operator op(decltype(V{}[0] + 0) a, const Several<V, N>& b) { \
    return each([a](V x) { return a op x; }, b);                                            \
  }
LINNET_SEVERAL_OPERATOR(+)
LINNET_SEVERAL_OPERATOR(-)
LINNET_SEVERAL_OPERATOR(*)
LINNET_SEVERAL_OPERATOR(/)
#undef LINNET_SEVERAL_OPERATOR

template <class V, int N>
LINNET_INLINE Several<V, N> operator-(const Several<V, N>& a) {
  return each([](V x) { return -x; }, a);
}
template <class U, int N>
LINNET_INLINE Several<U, N> operator<<(const Several<U, N>& a, int places) {
  return each([places](U x) { return x << places; }, a);
}
template <class V, int N>
LINNET_INLINE Several<V, N> fma(const Several<V, N>& a, const Several<V, N>& b, const Several<V, N>& c) {
  return each([](V x, V y, V z) { return fma(x, y, z); }, a, b, c);
}
template <class V, int N>
LINNET_INLINE Several<V, N> max(const Several<V, N>& a, const Several<V, N>& b) {
  return each([](V x, V y) { return max(x, y); }, a, b);
}
template <class V, int N>
LINNET_INLINE Several<V, N> minus_abs(const Several<V, N>& a) {
  return each([](V x) { return minus_abs(x); }, a);
}
template <class V, int N>
LINNET_INLINE auto bits(const Several<V, N>& a) {
  return each([](V x) { return bits(x); }, a);
}
template <class U, int N>
LINNET_INLINE auto from_bits(const Several<U, N>& a) {
  return each([](U x) { return from_bits(x); }, a);
}
template <class V, int N>
LINNET_INLINE auto lt(const Several<V, N>& a, const Several<V, N>& b) {
  return each([](V x, V y) { return lt(x, y); }, a, b);
}
template <class V, int N>
LINNET_INLINE auto gt(const Several<V, N>& a, const Several<V, N>& b) {
  return lt(b, a);
}
template <class M, int N>
LINNET_INLINE bool any(const Several<M, N>& m) {
  bool result = false;
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) result |= any(m.at[i]);
  return result;
}
template <class M, class V, int N>
LINNET_INLINE Several<V, N> select(const Several<M, N>& m, const Several<V, N>& a, const Several<V, N>& b) {
  return each([](M mask, V x, V y) { return select(mask, x, y); }, m, a, b);
}
template <class V, int N>
LINNET_INLINE auto sum(const Several<V, N>& a) {
  V total = a.at[0];
#pragma GCC unroll 8
  for (int i = 1; i < N; ++i) total = total + a.at[i];
  return sum(total);
}

}  // namespace linnet::LINNET_ISA
