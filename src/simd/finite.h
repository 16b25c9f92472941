// finite: whether scratch holds NaN or infinity. Causal products ask: a weight of 0 hides a number from an earlier row only if
// the number is finite (0 x NaN is NaN), so what is not finite takes a slower way that reads exactly what a row may see.
#pragma once

#include "simd/vec.h"

namespace linnet::LINNET_ISA {

// Of x [rows, ld], columns [0, cols). One multiply-add per vector: 0 x inf and 0 x NaN are NaN.
template <class T>
LINNET_INLINE bool rows_are_finite(const T* x, int64_t ld, int rows, int cols) {
  using X = Vec<T>;
  typename X::V watch = X::zero();
  for (int r = 0; r < rows; ++r, x += ld) {
    int c = 0;
    for (; c + X::W <= cols; c += X::W) watch = fma(X::load(x + c), X::zero(), watch);
    if (c < cols) watch = fma(X::load(x + c, cols - c), X::zero(), watch);
  }
  return !any(is_nan(watch));
}

}  // namespace linnet::LINNET_ISA
