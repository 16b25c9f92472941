// Rows of strided tensors as doubles, for reference implementations.
#pragma once

#include "core/half.h"
#include "core/view.h"

namespace linnet::ref {

// Row (b, t, h) of a 4-dimensional view, to and from doubles.
inline void load_row(const View& view, int64_t b, int64_t t, int64_t h, double* row) {
  const int64_t offset = b * view.stride[0] + t * view.stride[1] + h * view.stride[2];
  for (int64_t c = 0; c < view.size[3]; ++c) row[c] = load_f64(view.data, view.dtype, offset + c);
}
inline void store_row(const View& view, int64_t b, int64_t t, int64_t h, const double* row) {
  const int64_t offset = b * view.stride[0] + t * view.stride[1] + h * view.stride[2];
  for (int64_t c = 0; c < view.size[3]; ++c) store_f64(view.data, view.dtype, offset + c, row[c]);
}
// Element (i, j, k, l) of a view; trailing indices 0 where it has fewer dimensions.
inline int64_t place(const View& view, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  return i * view.stride[0] + j * view.stride[1] + k * view.stride[2] + l * view.stride[3];
}
inline double get(const View& view, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  return load_f64(view.data, view.dtype, place(view, i, j, k, l));
}
inline void put(const View& view, double x, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  store_f64(view.data, view.dtype, place(view, i, j, k, l), x);
}
inline bool takes_part(const View& mask, int64_t b, int64_t j) { return !mask.given() || *mask.at<const uint8_t>(b, j) != 0; }

}  // namespace linnet::ref
