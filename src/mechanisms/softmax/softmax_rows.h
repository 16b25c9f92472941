// Few query rows against many keys (decoding): bound by memory, so keys and values are read where they lie, once, for all rows
// of the group; dot products along the channels for the scores, row updates for the values.
//
// Tokens lie Hkv x D elements apart. A task therefore takes several neighbouring heads and walks a few tokens at a time over
// all of them: the hardware then sees a few long streams. (Head by head it sees a new page at every row and reads at a third of
// the speed.)
#pragma once

#include "softmax_tile.h"

namespace linnet::LINNET_ISA {

inline constexpr int kFewRows = 8;    // beyond, the lanes of the tile engine are full enough
inline constexpr int kFewHeads = 32;  // heads of a task, at most
inline constexpr int kAhead = 16;     // tokens that are asked for in advance, into L2

// Neighbouring heads that a task takes: 16 KB of a token, fewer when there would not be two of the `splits` tasks per worker.
template <class P>
LINNET_INLINE int heads_per_task(const P& problem, int64_t splits, int workers) {
  const int64_t bytes = larger(1, problem.key_width() * dtype_size(problem.k.dtype)), all = problem.key_heads();
  int64_t heads = larger(1, smaller(smaller(kFewHeads, all), 16384 / bytes));
  while (heads > 1 && divide_up(all, heads) * splits < 2 * workers) heads /= 2;
  return static_cast<int>(heads);
}

template <class T>
struct RowScratch {
  T *q, *o, *s;        // [heads, rows, round_up(K)], [heads, rows, round_up(V)], [heads, rows, kKeys]
  T *maximum, *total;  // [heads, kLanes]
  LINNET_INLINE RowScratch(Arena& arena, int64_t K, int64_t V, int heads)
      : q(arena.take<T>(heads * kFewRows * round_up<T>(K))),
        o(arena.take<T>(heads * kFewRows * round_up<T>(V))),
        s(arena.take<T>(heads * kFewRows * kKeys)),
        maximum(arena.take<T>(heads * kLanes)),
        total(arena.take<T>(heads * kLanes)) {}
};

template <class S>
LINNET_INLINE void prefetch_row(const S* row, int width) {
  for (int c = 0; c < width; c += static_cast<int>(64 / sizeof(S))) __builtin_prefetch(row + c, 0, 2);
}

// The sum over the lanes of each of E = 16 / sizeof(T) vectors: one transpose inside 16-byte pieces, then the pieces fold.
LINNET_INLINE void sum_each(const vf (&x)[4], float (&sums)[4]) {
  vf v[4] = {x[0], x[1], x[2], x[3]};
  transpose_pieces(v);
  const vf t = (v[0] + v[1]) + (v[2] + v[3]);
  typedef float v4 __attribute__((vector_size(16)));
#if defined(LINNET_ISA_avx512)
  typedef float v8 __attribute__((vector_size(32)));
  const v8 h =
      __builtin_shufflevector(t, t, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(t, t, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(LINNET_ISA_avx2)
  const vf h = t;
#endif
#if defined(LINNET_ISA_avx512) || defined(LINNET_ISA_avx2)
  const v4 all = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
#else
  const v4 all = t;
#endif
  __builtin_memcpy(sums, &all, sizeof all);
}
LINNET_INLINE void sum_each(const vd (&x)[2], double (&sums)[2]) {
  for (int i = 0; i < 2; ++i) sums[i] = sum(x[i]);
}

// s[r][j] = q[r] . k[j] for `count` keys, E keys at a time.
template <int R, class T, class S>
LINNET_INLINE void row_scores(const S* k, int64_t stride, int count, int K, const T* q, int64_t ldq, T* s) {
  using X = Vec<T>;
  using V = typename X::V;
  constexpr int E = kLaneBytes / sizeof(T);
  const int whole = K / X::W * X::W;
  for (int j = 0; j < count; j += E) {
    const S* row[E];
#pragma GCC unroll 4
    for (int n = 0; n < E; ++n) row[n] = k + (j + n < count ? j + n : j) * stride;
    V acc[R][E] = {};
    for (int c = 0; c < whole; c += X::W) {
      V x[E];
#pragma GCC unroll 4
      for (int n = 0; n < E; ++n) x[n] = X::load(row[n] + c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V y = X::load(q + r * ldq + c);
#pragma GCC unroll 4
        for (int n = 0; n < E; ++n) acc[r][n] = fma(x[n], y, acc[r][n]);
      }
    }
    if (whole < K) {
#pragma GCC unroll 4
      for (int n = 0; n < E; ++n) {
        const V x = X::load(row[n] + whole, K - whole);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r][n] = fma(x, X::load(q + r * ldq + whole), acc[r][n]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      T sums[E];
      sum_each(acc[r], sums);
#pragma GCC unroll 4
      for (int n = 0; n < E; ++n) {
        if (j + n < count) s[r * kKeys + j + n] = sums[n];
      }
    }
  }
}

// N vectors of channels from c on: o[r] += sum_j p[r][j] v[j].
template <int R, int N, class T, class S>
LINNET_INLINE void row_values_part(const S* v, int64_t stride, int count, int width, const T* p, T* o, int64_t ldo, int c) {
  using X = Vec<T>;
  using V = typename X::V;
  V acc[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = X::load(o + r * ldo + c + n * X::W);
  }
  for (int j = 0; j < count; ++j) {
    const S* const row = v + j * stride;
    V x[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) x[n] = N == 1 ? X::load(row + c, width - c) : X::load(row + c + n * X::W);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const V weight = X::broadcast(p[r * kKeys + j]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][n] = fma(weight, x[n], acc[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) X::store(o + r * ldo + c + n * X::W, acc[r][n]);
  }
}

// o[r] += sum_j p[r][j] v[j]
template <int R, class T, class S>
LINNET_INLINE void row_values(const S* v, int64_t stride, int count, int width, const T* p, T* o, int64_t ldo) {
  constexpr int W = Vec<T>::W, N = R <= 2 && kVectorBytes == 64 ? 8 : 4;  // up to 16 sums and 8 values in registers
  int c = 0;
  for (; c + N * W <= width; c += N * W) row_values_part<R, N>(v, stride, count, width, p, o, ldo, c);
  if (N == 8 && c + 4 * W <= width) {
    row_values_part<R, 4>(v, stride, count, width, p, o, ldo, c);
    c += 4 * W;
  }
  for (; c < width; c += W) row_values_part<R, 1>(v, stride, count, width, p, o, ldo, c);
}

// Calls f<R>(first row) for up to four rows at a time.
template <class F>
LINNET_INLINE void with_rows(int rows, const F& f) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) f.template operator()<4>(r);
  switch (rows - r) {
    case 1: return f.template operator()<1>(r);
    case 2: return f.template operator()<2>(r);
    case 3: return f.template operator()<3>(r);
    default: return;
  }
}

// The scores of one head and tile of keys become weights; o is rescaled. seen (when careful): which keys each row sees.
template <class T, class P>
void row_weights(const P& problem, const Sequence& seq, int64_t head, int rows, int64_t j0, int keys, bool careful, T* s,
                 T* maximum, T* total, T* o, bool (&seen)[kFewRows][kKeys]) {
  using X = Vec<T>;
  using V = typename X::V;
  const int64_t G = problem.group(), ldo = round_up<T>(problem.value_width());
  const V cap = X::broadcast(static_cast<T>(problem.softcap * kLog2e<double>));
  for (int r = 0; r < rows; ++r) {
    T* const row = s + r * kKeys;
    if (problem.softcap > 0) {
      for (int j = 0; j < keys; j += X::W) X::store(row + j, cap * tanh(X::load(row + j)));
    }
    for (int j = keys; j < kKeys; ++j) row[j] = -kInfinity<T>;
    if (careful) {
      const View& b = problem.bias;
      const Mask::Keys visible = problem.mask.keys(r / G + seq.shift(), seq.n);
      for (int j = 0; j < keys; ++j) {
        const int64_t at = j0 + j;
        seen[r][j] =
            (at >= visible.first.begin && at < visible.first.end) || (at >= visible.rest.begin && at < visible.rest.end);
        if (b.given()) {
          const T x = element_at<T>(b, seq.b * b.stride[0] + (head * G + r % G) * b.stride[1] + (seq.q0 + r / G) * b.stride[2] +
                                           (seq.k0 + at) * b.stride[3]);
          seen[r][j] = seen[r][j] && x != -kInfinity<T>;
          row[j] += x * kLog2e<T>;
        }
        if (!seen[r][j]) row[j] = -kInfinity<T>;
      }
    }
    V top = X::broadcast(maximum[r]);
    for (int j = 0; j < kKeys; j += X::W) top = max(X::load(row + j), top);
    const T m = highest(top), alpha = exp2_nonpositive(X::broadcast(maximum[r] - m))[0];
    V l = X::zero();
    for (int j = 0; j < kKeys; j += X::W) {
      const V p = exp2_nonpositive(X::load(row + j) - m);
      X::store(row + j, p);
      l = l + p;
    }
    maximum[r] = m;
    total[r] = total[r] * alpha + sum(l);
    if (alpha == 1) continue;
    for (int64_t c = 0; c < ldo; c += X::W) X::store(o + r * ldo + c, X::load(o + r * ldo + c) * alpha);
  }
}

// All rows of heads [head, head + heads) of a sequence over keys [key_begin, key_end). Leaves s.o, s.maximum and s.total.
template <class T, class P>
void few_rows(const P& problem, const Sequence& seq, int64_t head, int heads, int rows, int64_t key_begin, int64_t key_end,
              const RowScratch<T>& s) {
  const int64_t ldq = round_up<T>(problem.key_width()), ldo = round_up<T>(problem.value_width());
  const int K = static_cast<int>(problem.key_width()), width = static_cast<int>(problem.value_width());
  for (int h = 0; h < heads; ++h) {
    problem.template load_rows<T>(problem.q, seq, head + h, 0, rows, s.q + h * rows * ldq, ldq,
                                  problem.template query_factor<T>());
  }
  for (int64_t i = 0; i < heads * rows * ldo; ++i) s.o[i] = 0;
  for (int i = 0; i < heads * kLanes; ++i) {
    s.maximum[i] = kLowest<T>;
    s.total[i] = 0;
  }
  const int64_t t0 = seq.shift(), t1 = (rows - 1) / problem.group() + seq.shift();
  const Mask::Keys reach = problem.mask.reach(t0, t1, seq.n);
  for (int64_t j0 = key_begin; j0 < key_end; j0 += kKeys) {
    if (j0 >= reach.rest.end && j0 >= reach.first.end) break;
    if (j0 >= reach.first.end && j0 + kKeys <= reach.rest.begin) {
      j0 = key_begin + (reach.rest.begin - key_begin) / kKeys * kKeys;
      if (j0 >= key_end) break;
    }
    const int keys = static_cast<int>(smaller(kKeys, key_end - j0));
    const Cover cover = problem.mask.cover(t0, t1, j0, j0 + keys - 1);
    if (cover == Cover::none) continue;
    problem.key_runs(problem.k, seq, head, j0, keys, [&](int64_t offset, int first, int run) {
      const int64_t stride = problem.k.stride[1], step = problem.k.stride[2];
      with_type<T>(problem.k, offset, [&](auto* k) {
        constexpr int kTokens = 4;
        for (int j = 0; j < run; j += kTokens) {
          const int count = run - j < kTokens ? run - j : kTokens;
          for (int h = 0; h < heads; ++h) {
            for (int n = 0; n < kTokens; ++n) prefetch_row(k + (j + n + kAhead) * stride + h * step, K);
            with_rows(rows, [&]<int R>(int r) {
              row_scores<R>(k + j * stride + h * step, stride, count, K, s.q + (h * rows + r) * ldq, ldq,
                            s.s + (h * rows + r) * kKeys + first + j);
            });
          }
        }
      });
    });
    const bool careful = cover == Cover::some || problem.bias.given();
    for (int h = 0; h < heads; ++h) {
      bool seen[kFewRows][kKeys];
      T *const weights = s.s + h * rows * kKeys, *const o = s.o + h * rows * ldo;
      row_weights(problem, seq, head + h, rows, j0, keys, careful, weights, s.maximum + h * kLanes, s.total + h * kLanes, o,
                  seen);
      if (!careful) continue;
      problem.key_runs(problem.v, seq, head + h, j0, keys, [&](int64_t offset, int first, int run) {
        const int64_t stride = problem.v.stride[1];
        with_type<T>(problem.v, offset, [&](auto* v) {
          for (int r = 0; r < rows; ++r) {  // a value that a row does not see may hold anything
            for (int j = first; j < first + run; ++j) {
              if (!seen[r][j]) continue;
              row_values<1>(v + (j - first) * stride, stride, 1, width, weights + r * kKeys + j, o + r * ldo, ldo);
            }
          }
        });
      });
    }
    if (careful) continue;
    problem.key_runs(problem.v, seq, head, j0, keys, [&](int64_t offset, int first, int run) {
      const int64_t stride = problem.v.stride[1], step = problem.v.stride[2];
      with_type<T>(problem.v, offset, [&](auto* v) {
        constexpr int kTokens = 8;  // per visit of the sums
        for (int j = 0; j < run; j += kTokens) {
          const int count = run - j < kTokens ? run - j : kTokens;
          for (int h = 0; h < heads; ++h) {
            for (int n = 0; n < kTokens; ++n) prefetch_row(v + (j + n + kAhead) * stride + h * step, width);
            with_rows(rows, [&]<int R>(int r) {
              row_values<R>(v + j * stride + h * step, stride, count, width, s.s + (h * rows + r) * kKeys + first + j,
                            s.o + (h * rows + r) * ldo, ldo);
            });
          }
        }
      });
    });
  }
}

}  // namespace linnet::LINNET_ISA
