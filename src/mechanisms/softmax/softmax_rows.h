// Few query rows against many keys (decoding): bound by memory, so keys and values are read where they lie, once, for all rows
// of the group; dot products along the channels for the scores, row updates for the values.
#pragma once

#include "softmax_tile.h"

namespace linnet::LINNET_ISA {

inline constexpr int kFewRows = 4;  // beyond, the lanes of the tile engine are full enough

template <class T>
struct RowScratch {
  T *q, *o, *s;  // [kFewRows, round_up(K)], [kFewRows, round_up(V)], [kFewRows, kKeys]
  LINNET_INLINE RowScratch(Arena& arena, int64_t K, int64_t V)
      : q(arena.take<T>(kFewRows * round_up<T>(K))),
        o(arena.take<T>(kFewRows * round_up<T>(V))),
        s(arena.take<T>(kFewRows * kKeys)) {}
};

// s[r][j] = q[r] . k[j] for `count` keys; two keys at a time, one accumulator vector for each pair.
template <int R, class T, class S>
LINNET_INLINE void row_scores(const S* k, int64_t stride, int count, int K, const T* q, int64_t ldq, T* s) {
  using X = Vec<T>;
  using V = typename X::V;
  const int whole = K / X::W * X::W;
  constexpr int N = 2;
  for (int j = 0; j < count; j += N) {
    const S* row[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) row[n] = k + (j + n < count ? j + n : j) * stride;
    V acc[N][R] = {};
    for (int c = 0; c < K; c += X::W) {
      V x[N];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) x[n] = c < whole ? X::load(row[n] + c) : X::load(row[n] + c, K - c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V y = X::load(q + r * ldq + c);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) acc[n][r] = fma(x[n], y, acc[n][r]);
      }
    }
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if (j + n < count) s[r * kKeys + j + n] = sum(acc[n][r]);
      }
    }
  }
}

// o[r] += sum_j p[r][j] v[j], four vectors of channels at a time in registers.
template <int R, class T, class S>
LINNET_INLINE void row_values(const S* v, int64_t stride, int count, int width, const T* p, T* o, int64_t ldo) {
  using X = Vec<T>;
  using V = typename X::V;
  int c = 0;
  for (; c + 4 * X::W <= width; c += 4 * X::W) {
    V acc[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) acc[r][n] = X::load(o + r * ldo + c + n * X::W);
    }
    for (int j = 0; j < count; ++j) {
      V x[4];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) x[n] = X::load(v + j * stride + c + n * X::W);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V weight = X::broadcast(p[r * kKeys + j]);
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) acc[r][n] = fma(weight, x[n], acc[r][n]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) X::store(o + r * ldo + c + n * X::W, acc[r][n]);
    }
  }
  for (; c < width; c += X::W) {
    for (int r = 0; r < R; ++r) {
      V acc = X::load(o + r * ldo + c);
      for (int j = 0; j < count; ++j) {
        acc = fma(X::broadcast(p[r * kKeys + j]), X::load(v + j * stride + c, width - c), acc);
      }
      X::store(o + r * ldo + c, acc);
    }
  }
}

template <class F>
LINNET_INLINE void with_rows(int rows, const F& f) {
  switch (rows) {
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    default: return f.template operator()<4>();
  }
}

// Rows 0 .. rows-1 (all of the sequence and key head) over keys [key_begin, key_end). Leaves s.o, maximum and sum.
template <class T, class P>
void few_rows(const P& problem, const Sequence& seq, int64_t head, int rows, int64_t key_begin, int64_t key_end,
              const RowScratch<T>& s, T (&maximum)[kLanes], T (&total)[kLanes]) {
  using X = Vec<T>;
  using V = typename X::V;
  const int64_t G = problem.group(), ldq = round_up<T>(problem.key_width()), ldo = round_up<T>(problem.value_width());
  const int K = static_cast<int>(problem.key_width()), width = static_cast<int>(problem.value_width());
  const V cap = X::broadcast(static_cast<T>(problem.softcap * kLog2e<double>));
  const bool capped = problem.softcap > 0, biased = problem.bias.given();
  problem.template load_rows<T>(problem.q, seq, head, 0, rows, s.q, ldq, problem.template query_factor<T>());
  for (int64_t i = 0; i < rows * ldo; ++i) s.o[i] = 0;
  for (int r = 0; r < kLanes; ++r) {
    maximum[r] = kLowest<T>;
    total[r] = 0;
  }
  const int64_t t0 = seq.shift(), t1 = (rows - 1) / G + seq.shift();
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
      with_type<T>(problem.k, offset, [&](auto* k) {
        with_rows(rows, [&]<int R>() { row_scores<R>(k, problem.k.stride[1], run, K, s.q, ldq, s.s + first); });
      });
    });
    const bool careful = cover == Cover::some || biased;
    bool seen[kFewRows][kKeys];
    for (int r = 0; r < rows; ++r) {
      T* const row = s.s + r * kKeys;
      for (int j = keys; j < kKeys; ++j) row[j] = -kInfinity<T>;
      if (capped) {
        for (int j = 0; j < keys; j += X::W) X::store(row + j, cap * tanh(X::load(row + j)));
        for (int j = keys; j < kKeys; ++j) row[j] = -kInfinity<T>;
      }
      if (careful) {
        const Mask::Keys visible = problem.mask.keys(r / G + seq.shift(), seq.n);
        for (int j = 0; j < keys; ++j) {
          const int64_t at = j0 + j;
          bool see =
              (at >= visible.first.begin && at < visible.first.end) || (at >= visible.rest.begin && at < visible.rest.end);
          if (biased) {
            const View& b = problem.bias;
            const T x = element_at<T>(b, seq.b * b.stride[0] + (head * G + r % G) * b.stride[1] +
                                             (seq.q0 + r / G) * b.stride[2] + (seq.k0 + at) * b.stride[3]);
            see = see && x != -kInfinity<T>;
            row[j] += x * kLog2e<T>;
          }
          seen[r][j] = see;
          if (!see) row[j] = -kInfinity<T>;
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
      for (int64_t c = 0; c < ldo; c += X::W) X::store(s.o + r * ldo + c, X::load(s.o + r * ldo + c) * alpha);
    }
    problem.key_runs(problem.v, seq, head, j0, keys, [&](int64_t offset, int first, int run) {
      with_type<T>(problem.v, offset, [&](auto* v) {
        const int64_t stride = problem.v.stride[1];
        if (!careful) {
          with_rows(rows, [&]<int R>() { row_values<R>(v, stride, run, width, s.s + first, s.o, ldo); });
          return;
        }
        for (int r = 0; r < rows; ++r) {  // a value that a row does not see may hold anything
          for (int j = 0; j < run; ++j) {
            if (seen[r][first + j])
              row_values<1>(v + j * stride, stride, 1, width, s.s + r * kKeys + first + j, s.o + r * ldo, ldo);
          }
        }
      });
    });
  }
}

}  // namespace linnet::LINNET_ISA
