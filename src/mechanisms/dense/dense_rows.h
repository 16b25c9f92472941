// Rows of x in the type that the products compute in, and the tasks that both operators cut their outputs into.
#pragma once

#include "dense.h"
#include "simd/math.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {

inline constexpr int kColumns = 64;    // outputs of a panel in scratch
inline constexpr int kDepth = 256;     // terms that one accumulator adds up: with more, f32 sums of I terms would lose digits
inline constexpr int64_t kRows = 384;  // rows of a task: kRows x kDepth of x and the panel share L2

enum class RowRounding { none, bf16, int8, int16 };

// Where row i of x lies, in T.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
};

// Whether x is used as it lies: the type it has, rows at one distance, nothing to round.
template <class T>
LINNET_INLINE bool rows_in_place(const View& x, RowRounding rounding) {
  const bool wide = x.dtype == (sizeof(T) == 8 ? Dtype::f64 : Dtype::f32);
  return wide && rounding == RowRounding::none && (x.size[0] <= 1 || x.stride[0] == x.size[1] * x.stride[1]);
}

LINNET_INLINE vf round_to_bf16(vf v) { return to_vf(from_vf(v, Bf16{}), Bf16{}); }
LINNET_INLINE vd round_to_bf16(vd v) {
  for (int i = 0; i < Vec<double>::W; ++i) v[i] = to_f64(round_to<Bf16>(v[i]));
  return v;
}

// The group of 32 at x as codes in -127..127 and their scale, by the float operations that the reference prescribes.
template <class E>
LINNET_INLINE float group_codes(const E* x, float* codes) {
  using X = Vec<float>;
  vf largest = X::zero();
  for (int c = 0; c < 32; c += X::W) {
    vf v;
    if constexpr (sizeof(E) == 8) {
      for (int i = 0; i < X::W; ++i) v[i] = static_cast<float>(x[c + i]);
    } else {
      v = X::load(x + c);
    }
    X::store(codes + c, v);
    largest = max(abs(v), largest);
  }
  const float most = highest(largest), inverse = most == 0 ? 0 : 127 / most;
  for (int c = 0; c < 32; c += X::W) X::store(codes + c, round(X::load(codes + c) * X::broadcast(inverse)));
  return most * (1.0f / 127);
}

// What codes and scale leave of the group at x, rounded once: where there is no fused multiply-add, the product and the
// difference are exact in double.
template <class E>
LINNET_INLINE void group_rest(const E* x, const float* codes, float scale, float* rest) {
  using X = Vec<float>;
  if constexpr (sizeof(E) == 8 || !kFused) {
    for (int i = 0; i < 32; ++i) {
      const double value = to_f64(round_to<float>(to_f64(x[i])));
      rest[i] = static_cast<float>(value - static_cast<double>(scale) * static_cast<double>(codes[i]));
    }
  } else {
    for (int c = 0; c < 32; c += X::W) X::store(rest + c, fma(X::broadcast(-scale), X::load(codes + c), X::load(x + c)));
  }
}

// Rows of x to scratch [rows, ld], zeros behind the end.
template <class T, class E>
void load_rows(const View& x, RowRounding rounding, T* scratch, int64_t ld, const Launch& launch) {
  using X = Vec<T>;
  const int n = static_cast<int>(x.size[2]);
  const int64_t rows = x.size[0] * x.size[1], each = 16;
  parallel(launch, (rows + each - 1) / each, [&](int64_t task, int) {
    for (int64_t i = task * each; i < task * each + each && i < rows; ++i) {
      const E* from = x.at<const E>(i / x.size[1], i % x.size[1]);
      T* to = scratch + i * ld;
      if (rounding == RowRounding::int8 || rounding == RowRounding::int16) {
        for (int c = 0; c < n; c += 32) {
          float codes[32], rest[32], more[32];
          const float scale = group_codes(from + c, codes);
          for (int k = 0; k < 32; ++k) to[c + k] = static_cast<T>(scale) * static_cast<T>(codes[k]);
          if (rounding == RowRounding::int8) continue;
          group_rest(from + c, codes, scale, rest);
          const T fine = static_cast<T>(group_codes(rest, more));
          for (int k = 0; k < 32; ++k) to[c + k] += fine * static_cast<T>(more[k]);
        }
        continue;
      }
      for (int c = 0; c < n; c += X::W) {
        const typename X::V v = X::load(from + c, n - c);
        X::store(to + c, rounding == RowRounding::bf16 ? round_to_bf16(v) : v);
      }
    }
  });
}

// Scratch of a call: rows of x, and for each worker a panel of weights and the sums of a task.
template <class T>
struct Scratch {
  T* rows;
  T* panel;  // [workers, kDepth, kColumns]
  T* sums;   // [workers, kRows, kColumns]
  int64_t ld;
  static Scratch cut(Arena& arena, const View& x, RowRounding rounding, int workers) {
    Scratch s;
    const int64_t rows = x.size[0] * x.size[1];
    s.ld = (x.size[2] + 15) / 16 * 16;
    s.rows = arena.take<T>(rows_in_place<T>(x, rounding) ? 0 : rows * s.ld);
    s.panel = arena.take<T>(workers * kDepth * kColumns);
    s.sums = arena.take<T>(workers * (rows < kRows ? rows : kRows) * kColumns);
    return s;
  }
};

template <class T>
Rows<T> rows_of(const View& x, RowRounding rounding, const Scratch<T>& scratch, const Launch& launch) {
  if (rows_in_place<T>(x, rounding)) return {static_cast<const T*>(x.data), x.stride[1]};
  by_dtype(x.dtype, [&]<class U, class E>() {
    if constexpr (sizeof(U) == sizeof(T)) load_rows<T, E>(x, rounding, scratch.rows, scratch.ld, launch);
  });
  return {scratch.rows, scratch.ld};
}

// A parameter of any float type, from its column c.
template <class T>
LINNET_INLINE typename Vec<T>::V load_weights(const View& view, int64_t at, int n) {
  using X = Vec<T>;
  if constexpr (sizeof(T) == 8) {
    return X::load(static_cast<const double*>(view.data) + at, n);
  } else {
    if (view.dtype == Dtype::bf16) return X::load(static_cast<const Bf16*>(view.data) + at, n);
    if (view.dtype == Dtype::f16) return X::load(static_cast<const F16*>(view.data) + at, n);
    return X::load(static_cast<const float*>(view.data) + at, n);
  }
}

// sums[q] = sum over the lanes of acc[q * kStep], q < 4: transposed inside the 16-byte pieces and added, then the pieces.
template <int kStep, class T>
LINNET_INLINE void sum_four(const typename Vec<T>::V* acc, T* sums) {
  if constexpr (sizeof(T) == 4) {
    vf v[4] = {acc[0], acc[kStep], acc[2 * kStep], acc[3 * kStep]};
    transpose_pieces(v);
    const vf all = (v[0] + v[1]) + (v[2] + v[3]);
    float lanes[Vec<float>::W];
    Vec<float>::store(lanes, all);
    for (int q = 0; q < 4; ++q) {
      float total = lanes[q];
      for (int piece = 1; piece < kPieces; ++piece) total += lanes[4 * piece + q];
      sums[q] = total;
    }
  } else {
    for (int q = 0; q < 4; ++q) sums[q] = sum(acc[q * kStep]);
  }
}

// One row of sums plus bias to the result's row.
template <class T, class E>
LINNET_INLINE void store_row(const T* sums, const View& bias, int64_t column, int n, E* out) {
  using X = Vec<T>;
  for (int c = 0; c < n; c += X::W) {
    typename X::V v = X::load(sums + c);
    if (bias.given()) v = v + load_weights<T>(bias, column + c, n - c);
    X::store(out + c, v, n - c);
  }
}

}  // namespace linnet::LINNET_ISA
