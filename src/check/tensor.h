// Tensor: a dense tensor with its own memory, for tests that write their cases by hand. (Cases in one line: case.h.)
//
//   Tensor q = random_tensor({1, 70, 4, 16}, 7, Dtype::bf16);      // [B, T, H, D], normal values of seed 7
//   Tensor part = tokens(q, 10, 20);                               // [1, 10, 4, 16]
#pragma once

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "check/random.h"
#include "core/half.h"
#include "core/view.h"

namespace linnet::check {

struct Tensor {
  std::vector<int64_t> sizes;
  Dtype dtype = Dtype::none;   // none: absent
  std::vector<double> memory;  // aligned storage for any dtype

  Tensor() = default;
  Tensor(Dtype type, std::vector<int64_t> shape) : sizes(std::move(shape)), dtype(type) {
    memory.assign(static_cast<size_t>(count() * dtype_size(type) / 8 + 1), 0);
  }
  int64_t count() const {
    int64_t n = 1;
    for (const int64_t size : sizes) n *= size;
    return n;
  }
  View view() const {
    return dtype == Dtype::none ? View() : View::dense(memory.data(), dtype, sizes.data(), static_cast<int>(sizes.size()));
  }
  double get(int64_t i) const { return load_f64(memory.data(), dtype, i); }
  void set(int64_t i, double x) {
    switch (dtype) {
      case Dtype::i64: reinterpret_cast<int64_t*>(memory.data())[i] = static_cast<int64_t>(x); break;
      case Dtype::i32: reinterpret_cast<int32_t*>(memory.data())[i] = static_cast<int32_t>(x); break;
      case Dtype::u8: reinterpret_cast<uint8_t*>(memory.data())[i] = static_cast<uint8_t>(x); break;
      default: store_f64(memory.data(), dtype, i, x);
    }
  }
  // The index of (b, t, h, c) in a [B, T, H, D] tensor.
  int64_t at(int64_t b, int64_t t, int64_t h = 0, int64_t c = 0) const {
    return ((b * sizes[1] + t) * sizes[2] + h) * sizes[3] + c;
  }
  // The same shape, type and bits, all NaNs being one.
  bool operator==(const Tensor& other) const {
    if (sizes != other.sizes || dtype != other.dtype) return false;
    for (int64_t i = 0; i < count(); ++i) {
      const double x = get(i), y = other.get(i);
      if (!(x == y && std::signbit(x) == std::signbit(y)) && !(std::isnan(x) && std::isnan(y))) return false;
    }
    return true;
  }
};

inline Tensor random_tensor(std::vector<int64_t> sizes, uint64_t seed, Dtype dtype = Dtype::f64) {
  Tensor t(dtype, std::move(sizes));
  Random random(seed);
  for (int64_t i = 0; i < t.count(); ++i) t.set(i, random.normal());
  return t;
}
inline Tensor constant(std::vector<int64_t> sizes, double x, Dtype dtype = Dtype::f64) {
  Tensor t(dtype, std::move(sizes));
  for (int64_t i = 0; i < t.count(); ++i) t.set(i, x);
  return t;
}
inline Tensor whole_numbers(const std::vector<int64_t>& values, Dtype dtype = Dtype::i64) {
  Tensor t(dtype, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) t.set(static_cast<int64_t>(i), static_cast<double>(values[i]));
  return t;
}
// Entries [begin, end) of the second dimension.
inline Tensor tokens(const Tensor& x, int64_t begin, int64_t end) {
  if (x.dtype == Dtype::none) return x;
  std::vector<int64_t> sizes = x.sizes;
  sizes[1] = end - begin;
  Tensor part(x.dtype, sizes);
  int64_t row = 1;
  for (size_t i = 2; i < sizes.size(); ++i) row *= sizes[i];
  for (int64_t b = 0; b < sizes[0]; ++b) {
    for (int64_t i = 0; i < sizes[1] * row; ++i) part.set(b * sizes[1] * row + i, x.get((b * x.sizes[1] + begin) * row + i));
  }
  return part;
}
// Entry b of the first dimension, which stays with size 1.
inline Tensor entry(const Tensor& x, int64_t b) {
  if (x.dtype == Dtype::none) return x;
  std::vector<int64_t> sizes = x.sizes;
  sizes[0] = 1;
  Tensor part(x.dtype, sizes);
  for (int64_t i = 0; i < part.count(); ++i) part.set(i, x.get(b * part.count() + i));
  return part;
}

inline Tensor mapped(Tensor x, double factor, double offset) {
  for (int64_t i = 0; i < x.count(); ++i) x.set(i, factor * x.get(i) + offset);
  return x;
}

// RMS of the difference over RMS of the reference.
inline double rms_error(const Tensor& got, const Tensor& want) {
  double error = 0, size = 0;
  for (int64_t i = 0; i < want.count(); ++i) {
    error += (got.get(i) - want.get(i)) * (got.get(i) - want.get(i));
    size += want.get(i) * want.get(i);
  }
  return size == 0 ? std::sqrt(error) : std::sqrt(error / size);
}

}  // namespace linnet::check
