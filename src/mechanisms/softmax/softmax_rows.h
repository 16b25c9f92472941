// Few query rows against many keys (decoding): bound by memory, so keys and values are read where they lie, once, for all rows
// of the group; dot products along the channels for the scores, row updates for the values.
//
// Tokens lie Hkv x D elements apart. A task therefore takes several neighbouring heads and walks a few tokens at a time over
// all of them, so that memory sees long streams, and asks for later tokens itself, since a stream ends after a few KB. (One
// core, H 32, D 128, f32: 10 GB/s head by head, 19 over all heads, 24 with prefetch, of 33 for a plain read.)
#pragma once

#include "softmax_tile.h"

namespace linnet::LINNET_ISA {

inline constexpr int kFewRows = 8;      // beyond, the lanes of the tile engine are full enough
inline constexpr int kFewHeads = 32;    // heads of a task, at most
inline constexpr int kAhead = 16;       // tokens that are asked for in advance, into L2
inline constexpr int kScoreTokens = 4;  // tokens of one visit, for the scores
inline constexpr int kValueTokens = 8;  // and for the values, whose sums are loaded and stored at each visit

// Neighbouring heads that a task takes: 16 KB of a token, fewer when there would not be two of the `splits` tasks per worker.
template <class P>
LINNET_INLINE int heads_per_task(const P& problem, int64_t splits, int workers) {
  const int64_t bytes = larger(1, problem.key_width() * dtype_size(problem.k.dtype)), all = problem.key_heads();
  int64_t heads = larger(1, smaller(smaller(kFewHeads, all), 16384 / bytes));
  while (workers > 1 && heads > 1 && divide_up(all, heads) * splits < 2 * workers) heads /= 2;
  return static_cast<int>(heads);
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

// The row kernel's arithmetic in T, whatever type the cache has.
template <class Element>
struct DirectRows {
  using T = Element;
  struct Scratch {
    T *q, *o, *s;        // [heads, rows, ldq], [heads, rows, ldo], [heads, rows, kKeys]
    T *maximum, *total;  // [heads, kLanes]
    int64_t ldq, ldo;
    LINNET_INLINE Scratch(Arena& arena, int64_t K, int64_t V, int heads) : ldq(round_up<T>(K)), ldo(round_up<T>(V)) {
      q = arena.take<T>(heads * kFewRows * ldq);
      o = arena.take<T>(heads * kFewRows * ldo);
      s = arena.take<T>(heads * kFewRows * kKeys);
      maximum = arena.take<T>(heads * kLanes);
      total = arena.take<T>(heads * kLanes);
    }
    // The sums of head h, [rows, round_up(V)].
    LINNET_INLINE const T* result(int h, int rows, int) const { return o + h * rows * ldo; }
  };
  // Calls f(address of element 0) with the tensor's own type.
  template <class F>
  LINNET_INLINE static void with_cache(const View& x, const F& f) {
    with_type<T>(x, 0, f);
  }
  template <class P>
  static void load_queries(const P& problem, const Sequence& seq, int64_t head, int h, int rows, const Scratch& s) {
    problem.template load_rows<T>(problem.q, seq, head, 0, rows, s.q + h * rows * s.ldq, s.ldq,
                                  problem.template query_factor<T>());
  }
  template <class P>
  LINNET_INLINE static void pack_weights(const P&, int, int, const Scratch&) {}

  // s[row + r][j ..] = q . k for the tokens at k[0 .. count).
  template <int R, class S>
  LINNET_INLINE static void scores(const S* const (&k)[kScoreTokens], int count, int K, int row, int j, const Scratch& s, T) {
    using X = Vec<T>;
    using V = typename X::V;
    constexpr int E = kLaneBytes / sizeof(T);
    const T* const q = s.q + row * s.ldq;
    const int whole = K / X::W * X::W;
#pragma GCC unroll 2
    for (int e = 0; e < kScoreTokens; e += E) {
      V acc[R][E] = {};
      for (int c = 0; c < whole; c += X::W) {
        V x[E];
#pragma GCC unroll 4
        for (int n = 0; n < E; ++n) x[n] = X::load(k[e + n] + c);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const V y = X::load(q + r * s.ldq + c);
#pragma GCC unroll 4
          for (int n = 0; n < E; ++n) acc[r][n] = fma(x[n], y, acc[r][n]);
        }
      }
      if (whole < K) {
#pragma GCC unroll 4
        for (int n = 0; n < E; ++n) {
          const V x = X::load(k[e + n] + whole, K - whole);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) acc[r][n] = fma(x, X::load(q + r * s.ldq + whole), acc[r][n]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        T sums[E];
        sum_each(acc[r], sums);
#pragma GCC unroll 4
        for (int n = 0; n < E; ++n) {
          if (e + n < count) s.s[(row + r) * kKeys + j + e + n] = sums[n];
        }
      }
    }
  }

  // o[row + r] += sum_j s[row + r][j ..] v over the tokens at v[0 .. count).
  template <int R, class S>
  LINNET_INLINE static void values(const S* const* v, int count, int width, int row, int j, const Scratch& s) {
    constexpr int W = Vec<T>::W, N = R <= 2 && kVectorBytes == 64 ? 8 : 4;  // up to 16 sums and 8 values in registers
    int c = 0;
    for (; c + N * W <= width; c += N * W) values_part<R, N>(v, count, width, row, j, s, c);
    if (N == 8 && c + 4 * W <= width) {
      values_part<R, 4>(v, count, width, row, j, s, c);
      c += 4 * W;
    }
    for (; c < width; c += W) values_part<R, 1>(v, count, width, row, j, s, c);
  }
  template <int R, int N, class S>
  LINNET_INLINE static void values_part(const S* const* v, int count, int width, int row, int j, const Scratch& s, int c) {
    using X = Vec<T>;
    using V = typename X::V;
    T* const o = s.o + row * s.ldo + c;
    V acc[R][N] = {};  // of the visit: thousands of equal terms in one chain would round the same way each time
    for (int t = 0; t < count; ++t) {
      V x[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) x[n] = N == 1 ? X::load(v[t] + c, width - c) : X::load(v[t] + c + n * X::W);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V weight = X::broadcast(s.s[(row + r) * kKeys + j + t]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[r][n] = fma(weight, x[n], acc[r][n]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) X::store(o + r * s.ldo + n * X::W, X::load(o + r * s.ldo + n * X::W) + acc[r][n]);
    }
  }
};

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
                 T* maximum, T* total, T* o, int64_t ldo, bool (&seen)[kFewRows][kKeys]) {
  using X = Vec<T>;
  using V = typename X::V;
  const int64_t G = problem.group();
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
template <class A, class P>
void few_rows(const P& problem, const Sequence& seq, int64_t head, int heads, int rows, int64_t key_begin, int64_t key_end,
              const typename A::Scratch& s) {
  using T = typename A::T;
  const int K = static_cast<int>(problem.key_width()), width = static_cast<int>(problem.value_width());
  for (int h = 0; h < heads; ++h) A::load_queries(problem, seq, head + h, h, rows, s);
  for (int64_t i = 0; i < heads * rows * s.ldo; ++i) s.o[i] = 0;
  for (int i = 0; i < heads * kLanes; ++i) {
    s.maximum[i] = kLowest<T>;
    s.total[i] = 0;
  }
  // Calls f(addresses, tokens, first token of the visit, head) for every visit of N tokens j0 .. j0+keys-1 of a cache.
  const auto visit = [&]<int N>(const View& x, int64_t j0, int keys, const auto& f) {
    const int64_t step = x.stride[2];
    A::with_cache(x, [&]<class S>(const S* base) {
      for (int j = 0; j < keys; j += N) {
        const int count = keys - j < N ? keys - j : N;
        const S *row[N], *later[N];
        for (int n = 0; n < N; ++n) {
          const int64_t at = j0 + j + (n < count ? n : 0), ahead = at + kAhead;
          row[n] = base + problem.key_offset(x, seq, head, at);
          later[n] = base + problem.key_offset(x, seq, head, ahead < seq.n ? ahead : at);
        }
        for (int h = 0; h < heads; ++h) {
          for (int n = 0; n < N; ++n) {
            for (int c = 0; c < x.size[3]; c += static_cast<int>(64 / sizeof(S)))
              __builtin_prefetch(later[n] + h * step + c, 0, 2);
          }
          const S* at[N];
          for (int n = 0; n < N; ++n) at[n] = row[n] + h * step;
          f(at, count, j, h);
        }
      }
    });
  };
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
    visit.template operator()<kScoreTokens>(problem.k, j0, keys, [&](const auto& k, int count, int j, int h) {
      with_rows(rows, [&]<int R>(int r) {
        A::template scores<R>(k, count, K, h * rows + r, j, s, problem.template query_factor<T>());
      });
    });
    const bool careful = cover == Cover::some || problem.bias.given();
    for (int h = 0; h < heads; ++h) {
      bool seen[kFewRows][kKeys];
      row_weights(problem, seq, head + h, rows, j0, keys, careful, s.s + h * rows * kKeys, s.maximum + h * kLanes,
                  s.total + h * kLanes, s.o + h * rows * s.ldo, s.ldo, seen);
      A::pack_weights(problem, h, rows, s);
      if (!careful) continue;
      A::with_cache(problem.v, [&]<class S>(const S* base) {
        for (int j = 0; j < keys; ++j) {
          const S* const at[1] = {base + problem.key_offset(problem.v, seq, head + h, j0 + j)};
          for (int r = 0; r < rows; ++r) {  // a value that a row does not see may hold anything
            if (seen[r][j]) A::template values<1>(at, 1, width, h * rows + r, j, s);
          }
        }
      });
    }
    if (careful) continue;
    visit.template operator()<kValueTokens>(problem.v, j0, keys, [&](const auto& v, int count, int j, int h) {
      with_rows(rows, [&]<int R>(int r) { A::template values<R>(v, count, width, h * rows + r, j, s); });
    });
  }
}

}  // namespace linnet::LINNET_ISA
