// Causal convolutions in n log n, a channel in each lane: no shuffle anywhere, and rows of the caller's memory are rows here.
//
// Only the first n of the 2 n products of two real sequences of n tokens are wanted. In the ring x^n = i the product is (first
// half) + i (second half), so one complex transform of n points does what a real one of 2 n points would: weigh x_j by theta^j,
// theta = e^{i pi / 2n}; transform; multiply point by point; transform back; the real part of z_j theta^-j is the answer. The
// points stay in the order in which the forward leaves them (bits reversed), which a product does not mind.
//
// Radix 4, depth first: a block that fits the cache is finished before the next is touched. Roots are products of two entries
// of small tables in double, rounded once.
#pragma once

#include "core/launch.h"
#include "simd/vec.h"

namespace linnet::LINNET_ISA {

LINNET_INLINE int64_t power_of_two_above(int64_t count) {
  int64_t n = 1;
  while (n < count) n *= 2;
  return n;
}

template <class T>
struct Ring {
  using X = Vec<T>;
  using V = typename X::V;
  static constexpr int kRow = 2 * X::W;                         // a point: real parts, imaginary parts
  static constexpr int64_t kLeaf = 16384 / (2 * kVectorBytes);  // points that lie in half of L1

  int64_t n;   // points, a power of two
  T* roots;    // for each size m = n, n / 4, ... > 4: [m / 4, 6], w^j, w^2j, w^3j with w = e^{-2 pi i / m}
  T* weights;  // [n, 2]: theta^j

  LINNET_INLINE static Ring cut(Arena& arena, int64_t n) { return {n, arena.take<T>(2 * n), arena.take<T>(2 * n)}; }
  LINNET_INLINE int64_t elements() const { return n * kRow; }

  // Part `part` of `parts` of the tables. coarse, fine: [fine_count(), 2], made by begin_tables.
  LINNET_INLINE int64_t fine_count() const {
    int64_t count = 1;
    while (count * count < 4 * n) count *= 2;
    return count;
  }
  void begin_tables(double* coarse, double* fine) const {
    const int64_t count = fine_count();
    const double unit = 1.57079632679489661923 / static_cast<double>(n);  // pi / 2n: 4 n of them are a turn
    for (int64_t k = 0; k < count; ++k) {
      const double low = unit * static_cast<double>(k), high = unit * static_cast<double>(k * count);
      fine[2 * k] = __builtin_cos(low), fine[2 * k + 1] = __builtin_sin(low);
      coarse[2 * k] = __builtin_cos(high), coarse[2 * k + 1] = __builtin_sin(high);
    }
  }
  void fill_tables(const double* coarse, const double* fine, int64_t part, int64_t parts) const {
    const int64_t count = fine_count();
    const auto turn = [&](int64_t k, T* to, double sign) {  // e^{i sign k pi / 2n}
      const double *a = coarse + 2 * (k / count), *b = fine + 2 * (k % count);
      to[0] = static_cast<T>(a[0] * b[0] - a[1] * b[1]);
      to[1] = static_cast<T>(sign * (a[0] * b[1] + a[1] * b[0]));
    };
    for (int64_t j = part * n / parts; j < (part + 1) * n / parts; ++j) turn(j, weights + 2 * j, 1);
    T* level = roots;
    for (int64_t m = n; m > 4; level += 6 * (m / 4), m /= 4) {
      const int64_t q = m / 4, step = 4 * n / m;
      for (int64_t j = part * q / parts; j < (part + 1) * q / parts; ++j) {
        for (int64_t k = 1; k <= 3; ++k) turn(k * j * step, level + 6 * j + 2 * (k - 1), -1);
      }
    }
  }

  // ---- passes: quarters of m points, in the order 0, 2, 1, 3 of k mod 4

  struct Point {
    V re, im;
    LINNET_INLINE static Point load(const T* x) { return {X::load(x), X::load(x + X::W)}; }
    LINNET_INLINE void store(T* x) const {
      X::store(x, re);
      X::store(x + X::W, im);
    }
    LINNET_INLINE Point operator+(Point o) const { return {re + o.re, im + o.im}; }
    LINNET_INLINE Point operator-(Point o) const { return {re - o.re, im - o.im}; }
    LINNET_INLINE Point times(V wr, V wi) const { return {fma(re, wr, -(im * wi)), fma(re, wi, im * wr)}; }
    LINNET_INLINE Point times_conjugate(V wr, V wi) const { return {fma(re, wr, im * wi), fma(im, wr, -(re * wi))}; }
  };
  static void down(T* x, int64_t m, const T* w) {
    const int64_t q = m / 4 * kRow;
    for (int64_t j = 0; j < m / 4; ++j, x += kRow, w += 6) {
      const Point x0 = Point::load(x), x1 = Point::load(x + q), x2 = Point::load(x + 2 * q), x3 = Point::load(x + 3 * q);
      const Point a0 = x0 + x2, a1 = x0 - x2, a2 = x1 + x3, d = x1 - x3;
      const Point y1 = {a1.re + d.im, a1.im - d.re}, y3 = {a1.re - d.im, a1.im + d.re};  // a1 -+ i d
      (a0 + a2).store(x);
      (a0 - a2).times(X::broadcast(w[2]), X::broadcast(w[3])).store(x + q);
      y1.times(X::broadcast(w[0]), X::broadcast(w[1])).store(x + 2 * q);
      y3.times(X::broadcast(w[4]), X::broadcast(w[5])).store(x + 3 * q);
    }
  }
  static void up(T* x, int64_t m, const T* w) {
    const int64_t q = m / 4 * kRow;
    for (int64_t j = 0; j < m / 4; ++j, x += kRow, w += 6) {
      const Point b0 = Point::load(x), b2 = Point::load(x + q).times_conjugate(X::broadcast(w[2]), X::broadcast(w[3]));
      const Point b1 = Point::load(x + 2 * q).times_conjugate(X::broadcast(w[0]), X::broadcast(w[1]));
      const Point b3 = Point::load(x + 3 * q).times_conjugate(X::broadcast(w[4]), X::broadcast(w[5]));
      join(b0, b1, b2, b3, x, q);
    }
  }
  LINNET_INLINE static void join(Point b0, Point b1, Point b2, Point b3, T* x, int64_t q) {
    const Point s0 = b0 + b2, s1 = b0 - b2, s2 = b1 + b3, d = b1 - b3;
    (s0 + s2).store(x);
    (s0 - s2).store(x + 2 * q);
    Point{s1.re - d.im, s1.im + d.re}.store(x + q);  // s1 + i d
    Point{s1.re + d.im, s1.im - d.re}.store(x + 3 * q);
  }
  // Blocks of 4 or 2 points: roots are 1.
  static void down_last(T* x, int64_t m, int64_t size) {
    for (int64_t b = 0; b < m; b += size, x += size * kRow) {
      const Point x0 = Point::load(x), x1 = Point::load(x + kRow);
      if (size == 2) {
        (x0 + x1).store(x);
        (x0 - x1).store(x + kRow);
        continue;
      }
      const Point x2 = Point::load(x + 2 * kRow), x3 = Point::load(x + 3 * kRow);
      const Point a0 = x0 + x2, a1 = x0 - x2, a2 = x1 + x3, d = x1 - x3;
      (a0 + a2).store(x);
      (a0 - a2).store(x + kRow);
      Point{a1.re + d.im, a1.im - d.re}.store(x + 2 * kRow);
      Point{a1.re - d.im, a1.im + d.re}.store(x + 3 * kRow);
    }
  }
  static void up_last(T* x, int64_t m, int64_t size) {
    for (int64_t b = 0; b < m; b += size, x += size * kRow) {
      const Point x0 = Point::load(x), x1 = Point::load(x + kRow);
      if (size == 2) {
        (x0 + x1).store(x);
        (x0 - x1).store(x + kRow);
        continue;
      }
      join(x0, Point::load(x + 2 * kRow), x1, Point::load(x + 3 * kRow), x, kRow);
    }
  }
  // x: m points; w: their roots
  static void forward(T* x, int64_t m, const T* w) {
    if (m > kLeaf) {
      down(x, m, w);
      for (int64_t i = 0; i < 4; ++i) forward(x + i * (m / 4) * kRow, m / 4, w + 6 * (m / 4));
      return;
    }
    int64_t size = m;
    for (; size > 4; w += 6 * (size / 4), size /= 4) {
      for (int64_t b = 0; b < m; b += size) down(x + b * kRow, size, w);
    }
    if (size > 1) down_last(x, m, size);
  }
  static void inverse(T* x, int64_t m, const T* w) {
    if (m > kLeaf) {
      for (int64_t i = 0; i < 4; ++i) inverse(x + i * (m / 4) * kRow, m / 4, w + 6 * (m / 4));
      up(x, m, w);
      return;
    }
    int64_t size = m;
    for (; size > 4; size /= 4) w += 6 * (size / 4);
    if (size > 1) up_last(x, m, size);
    for (size *= 4; size <= m && size > 4; size *= 4) {
      w -= 6 * (size / 4);
      for (int64_t b = 0; b < m; b += size) up(x + b * kRow, size, w);
    }
  }

  // ---- what convolutions are made of

  // Point j of a real row.
  LINNET_INLINE void put(T* x, int64_t j, V row) const {
    X::store(x + j * kRow, row * X::broadcast(weights[2 * j]));
    X::store(x + j * kRow + X::W, row * X::broadcast(weights[2 * j + 1]));
  }
  LINNET_INLINE void clear(T* x, int64_t first, int64_t end) const {
    for (int64_t i = first * kRow; i < end * kRow; i += X::W) X::store(x + i, X::zero());
  }
  LINNET_INLINE V get(const T* x, int64_t j) const {
    return fma(X::load(x + j * kRow), X::broadcast(weights[2 * j]),
               X::load(x + j * kRow + X::W) * X::broadcast(weights[2 * j + 1]));
  }
  void forward(T* x) const { forward(x, n, roots); }
  void inverse(T* x) const { inverse(x, n, roots); }
  // z = x y; z may be x. kAdd: z += x y
  template <bool kAdd>
  void multiply(const T* x, const T* y, T* z) const {
    for (int64_t i = 0; i < elements(); i += kRow) {
      const Point a = Point::load(x + i), product = a.times(X::load(y + i), X::load(y + i + X::W));
      (kAdd ? Point::load(z + i) + product : product).store(z + i);
    }
  }
};

}  // namespace linnet::LINNET_ISA
