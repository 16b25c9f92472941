// The chunked form of H3 on dense scratch: one window of up to 24 chunks of 64 tokens, channel after channel, time contiguous.
//
// With U [J, n] the products kbar v of J chunks of n tokens of one (head, p, r), X the state before each chunk and the powers
// of a as matrices, everything is a product of a [J, .] matrix with one that the head's chunks and slots share:
//
//   increments [J, 2M] = U Win             Win[j] = bd a^{n-1-j}, real parts beside imaginary parts
//   X_{i+1} = a^n X_i + increment_i        in order, a^n in two numbers of T so that it does not drift
//   S [J, n] = X Out + U Taps              Out = 2 Re(c a^{j+1} .), Taps = the triangular Toeplitz matrix of kd, d on its
//   diagonal
//
// and backward the same with the transposed matrices: Y_i = a^n Y_{i+1} + dS_i Cin, dU = Y Wout + dS Taps^T. Powers are built
// in double (arXiv 2212.14052 in f32 loses the phase) and rounded once.
#pragma once

#include "h3_ssm.h"
#include "simd/gemm.h"
#include "simd/task.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

inline constexpr int kH3Chunk = 64;                     // n
inline constexpr int kH3Chunks = 24;                    // J: four register tiles of 6 rows
inline constexpr int kH3Window = kH3Chunk * kH3Chunks;  // tokens
inline constexpr int kH3Channels = 16;                  // of one task: a whole line of f32

LINNET_INLINE int64_t h3_heads_per_task(const H3Shape& s) {
  return s.P == 0 ? 1 : s.P >= kH3Channels ? 1 : kH3Channels / s.P < s.H ? kH3Channels / s.P : s.H;
}
LINNET_INLINE int64_t h3_blocks(const H3Shape& s) {
  return s.P == 0 ? 0 : (s.H + h3_heads_per_task(s) - 1) / h3_heads_per_task(s);
}

// The discrete parameters of one head in double, real parts then imaginary parts, M rounded up to Mp with zeros.
struct H3Head {
  double *a, *bd, *c;  // [2 Mp]
  double d;
  LINNET_INLINE static H3Head cut(Arena& arena, int64_t Mp) {
    return {arena.take<double>(2 * Mp), arena.take<double>(2 * Mp), arena.take<double>(2 * Mp), 0};
  }
  template <class Args>
  void load(const Args& args, int64_t h, int64_t M, int64_t Mp) {
    for (int64_t i = 0; i < 2 * Mp; ++i) a[i] = bd[i] = c[i] = 0;
    for (int64_t m = 0; m < M; ++m) {
      const H3Pair pair = h3_pair(args, h, m);
      a[m] = pair.a.re, a[Mp + m] = pair.a.im;
      bd[m] = pair.bd.re, bd[Mp + m] = pair.bd.im;
      c[m] = pair.c.re, c[Mp + m] = pair.c.im;
    }
    d = element(args.d, h);
  }
};

// z = x y, complex rows [re | im]; z may be x.
LINNET_INLINE void multiply_rows(const double* x, const double* y, int64_t Mp, double* z) {
  for (int64_t m = 0; m < Mp; ++m) {
    const double re = x[m] * y[m] - x[Mp + m] * y[Mp + m], im = x[m] * y[Mp + m] + x[Mp + m] * y[m];
    z[m] = re;
    z[Mp + m] = im;
  }
}
LINNET_INLINE void one_row(int64_t Mp, double* z) {
  for (int64_t m = 0; m < Mp; ++m) {
    z[m] = 1;
    z[Mp + m] = 0;
  }
}

// The matrices of one head.
template <class T>
struct H3Tables {
  T *win, *out, *taps;    // [n, 2 Mp], [2 Mp, n], [n, n]
  T *cin, *wout, *tapst;  // backward: [n, 2 Mp], [2 Mp, n], [n, n]
  T *high, *low;          // [2 Mp]: a^n
  LINNET_INLINE static H3Tables cut(Arena& arena, int64_t Mp, bool backward) {
    constexpr int64_t n = kH3Chunk;
    H3Tables r{};
    r.win = arena.take<T>(n * 2 * Mp);
    r.out = arena.take<T>(n * 2 * Mp);
    r.taps = arena.take<T>(n * n);
    r.high = arena.take<T>(2 * Mp);
    r.low = arena.take<T>(2 * Mp);
    if (!backward) return r;
    r.cin = arena.take<T>(n * 2 * Mp);
    r.wout = arena.take<T>(n * 2 * Mp);
    r.tapst = arena.take<T>(n * n);
    return r;
  }
  // rows: scratch [n, 2 Mp]; power, product: [2 Mp] in double
  void build(const H3Head& head, int64_t Mp, T* rows, double* power, double* product) const {
    constexpr int n = kH3Chunk;
    const int width = static_cast<int>(2 * Mp);
    double kd[n];
    one_row(Mp, power);
    for (int l = 0; l < n; ++l) {  // power = a^l
      multiply_rows(power, head.bd, Mp, product);
      double sum_of = 0;
      for (int64_t m = 0; m < Mp; ++m) sum_of += head.c[m] * product[m] - head.c[Mp + m] * product[Mp + m];
      kd[l] = 2 * sum_of;
      for (int i = 0; i < width; ++i) win[(n - 1 - l) * width + i] = static_cast<T>(product[i]);
      multiply_rows(power, head.a, Mp, power);
      multiply_rows(power, head.c, Mp, product);
      for (int64_t m = 0; m < Mp; ++m) {
        rows[l * width + m] = static_cast<T>(2 * product[m]);
        rows[l * width + Mp + m] = static_cast<T>(-2 * product[Mp + m]);
      }
      if (cin != nullptr) {
        for (int i = 0; i < width; ++i) cin[l * width + i] = static_cast<T>(product[i]);
      }
    }
    load_tile_transposed<T>(rows, width, n, width, out, n);
    for (int i = 0; i < width; ++i) {
      high[i] = static_cast<T>(power[i]);
      low[i] = static_cast<T>(power[i] - static_cast<double>(high[i]));
    }
    kd[0] += head.d;
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j) {
        const T tap = j >= i ? static_cast<T>(kd[j - i]) : T(0);
        taps[i * n + j] = tap;
        if (tapst != nullptr) tapst[j * n + i] = tap;
      }
    }
    if (wout == nullptr) return;
    for (int j = 0; j < n; ++j) {
      for (int64_t m = 0; m < Mp; ++m) {
        rows[j * width + m] = 2 * win[j * width + m];
        rows[j * width + Mp + m] = -2 * win[j * width + Mp + m];
      }
    }
    load_tile_transposed<T>(rows, width, n, width, wout, n);
  }
};

// state <- a^n state + increment for each row in order (or from the last row to the first); each row becomes the state before.
template <class T>
void h3_scan(const H3Tables<T>& tables, int64_t Mp, T* state, T* rows, int first, int end, int step) {
  using X = Vec<T>;
  using V = typename X::V;
  const int64_t width = 2 * Mp;
  for (int64_t m = 0; m < Mp; m += X::W) {
    V re = X::load(state + m), im = X::load(state + Mp + m);
    const V hr = X::load(tables.high + m), hi = X::load(tables.high + Mp + m);
    const V lr = X::load(tables.low + m), li = X::load(tables.low + Mp + m);
    for (int i = first; i != end; i += step) {
      T* row = rows + i * width + m;
      const V inc_re = X::load(row), inc_im = X::load(row + Mp);
      X::store(row, re);
      X::store(row + Mp, im);
      const V small_re = fma(lr, re, fma(-li, im, inc_re)), small_im = fma(lr, im, fma(li, re, inc_im));
      const V next = fma(hr, re, fma(-hi, im, small_re));
      im = fma(hr, im, fma(hi, re, small_im));
      re = next;
    }
    X::store(state + m, re);
    X::store(state + Mp + m, im);
  }
}

// y[t] = sum_l taps[l] x[t - l] for t in [0, count), count a multiple of 64; x has R - 1 numbers before it. kAhead: x[t + l].
// Sixteen taps at a time: keys that repeat make every y round alike, and short sums round less.
template <class T, bool kAhead>
void h3_filter(const T* x, const T* taps, int64_t R, int count, T* y) {
  using X = Vec<T>;
  constexpr int N = 4;
  for (int t = 0; t < count; t += N * X::W) {
    typename X::V total[N] = {};
    const T* from = x + t;
    for (int64_t l = 0; l < R;) {
      const int64_t end = l + 16 < R ? l + 16 : R;
      typename X::V part[N] = {};
      for (; l < end; ++l, from += kAhead ? 1 : -1) {
        const typename X::V tap = X::broadcast(taps[l]);
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) part[v] = fma(tap, X::load(from + v * X::W), part[v]);
      }
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) total[v] += part[v];
    }
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) X::store(y + t + v * X::W, total[v]);
  }
}

// The short filter of channel c, sd on its first tap: ks_l = sum_i sb[i] sc[i + l]. sb, sc, sums: [R] in double.
template <class T, class Args>
void h3_shift_taps(const Args& args, int64_t c, int64_t R, double* sb, double* sc, double* sums, T* taps) {
  for (int64_t i = 0; i < R; ++i) {
    sb[i] = element(args.sb, c, i);
    sc[i] = element(args.sc, c, i);
    sums[i] = i == 0 ? element(args.sd, c) : 0;
  }
  for (int64_t i = 0; i < R; ++i) {
    for (int64_t l = 0; sb[i] != 0 && l < R - i; ++l) sums[l] += sb[i] * sc[i + l];
  }
  for (int64_t l = 0; l < R; ++l) taps[l] = static_cast<T>(sums[l]);
}

// out = a b, elementwise (kAdd: out += a b)
template <class T, bool kAdd>
LINNET_INLINE void h3_multiply(const T* a, const T* b, int count, T* out) {
  using X = Vec<T>;
  for (int i = 0; i < count; i += X::W) {
    const typename X::V product = X::load(a + i) * X::load(b + i);
    X::store(out + i, kAdd ? fma(X::load(a + i), X::load(b + i), X::load(out + i)) : product);
  }
}

template <class T>
LINNET_INLINE void h3_clear(T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = 0;
}

}  // namespace linnet::LINNET_ISA
