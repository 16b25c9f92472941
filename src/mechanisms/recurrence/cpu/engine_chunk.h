// engine_chunk: one chunk of the recurrence of engine.h on dense scratch, C tokens at once (docs/notes/recurrence.md).
//
//   G_i = g_1 + ... + g_i;   pre_i = exp(G_i), suf_j = exp(g_{j+1} + ... + g_C), E[i, j] = exp(g_{j+1} + ... + g_i)
//   P = tril((Q K^T) E), A = tril((K K^T) E, -1)
//   res = V - (K pre) S_0 - A N,   N = beta res              (without beta: N = V)
//   O = (Q pre) S_0 + P N
//   S = S_0 + expm1(G_C) S_0 + (K suf)^T N                   (exp(G_C) S_0 + ... where G_C <= -log 2)
//
// Every decay is the exponential of a sum of g over exactly its own interval, or a product of at most four of them: none is a
// quotient or a difference of sums, so -inf forgets exactly and weak decays do not drift.
//
// Per channel (E does not come out of the product): keys are held transposed and decayed to the first row of the current
// block of 4 rows; the scores of a block against all earlier rows are then one product, and only 4 x 4 diagonals go element by
// element.
#pragma once

#include "engine.h"
#include "simd/finite.h"
#include "simd/math.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

inline constexpr int kBlock = 4;  // rows of a diagonal block of per-channel decays

// Scratch of one worker for the forward chunk.
template <class T>
struct ChunkScratch {
  int64_t ldk, ldv;
  T* kq;             // [2 C, ldk]  k, then q from row `rows` on
  T* kqp;            // [2 C, ldk]  the same times pre; without decay kq itself
  T* v;              // [C, ldv]    v, then N
  T* r;              // [2 C, ldv]  (K pre) S_0, then (Q pre) S_0 and at last O from row `rows` on
  T* kt;             // [K, C]      keys transposed, at last times suf
  T *p, *a;          // [C, C]      scores
  T* solve;          // [C, C]      A with columns times beta
  T* g;              // [C, ldk]    (scalar: [C])
  T* beta;           // [C]
  T *pre, *suf;      // scalar: [C]; channel: [C, ldk]
  T* ks;             // channel: [C, ldk] keys times suf
  T* decay;          // scalar: E [C, C]; channel: exp(g) [C, ldk]
  T *factor, *keep;  // [ldk]   S = keep S + (factor S + ...): expm1 and 1, or exp and 0
  T* block;          // [3 kBlock, ldk]  rows of the current block
  T* spare;
  T* shared;
  Ahead* ahead;

  LINNET_INLINE static ChunkScratch cut(Arena& arena, const EngineShape& s, int64_t spare) {
    ChunkScratch c;
    c.ldk = round_up<T>(s.K);
    c.ldv = round_up<T>(s.V);
    const bool gated = s.gate != Gate::none, channel = s.gate == Gate::channel;
    c.kq = arena.take<T>(2 * kChunk * c.ldk);
    c.kqp = gated ? arena.take<T>(2 * kChunk * c.ldk) : c.kq;
    c.v = arena.take<T>(kChunk * c.ldv);
    c.r = arena.take<T>(2 * kChunk * c.ldv);
    c.kt = arena.take<T>(static_cast<int64_t>(s.K) * kChunk);
    c.p = arena.take<T>(kChunk * kChunk);
    c.a = arena.take<T>(kChunk * kChunk);
    c.solve = arena.take<T>(kChunk * kChunk);
    const int64_t gates = kChunk * (channel ? c.ldk : 1);
    c.g = arena.take<T>(gates);
    c.beta = arena.take<T>(kChunk);
    c.pre = arena.take<T>(gates);
    c.suf = arena.take<T>(gates);
    c.ks = arena.take<T>(channel ? gates : 0);
    c.decay = arena.take<T>(kChunk * (channel && c.ldk > kChunk ? c.ldk : kChunk));
    c.factor = arena.take<T>(c.ldk);
    c.keep = arena.take<T>(c.ldk);
    c.block = arena.take<T>(3 * kBlock * c.ldk);
    c.spare = arena.take<T>(spare);
    c.shared = nullptr;
    c.ahead = arena.take<Ahead>(1);
    return c;
  }
  // The same with the scores elsewhere.
  LINNET_INLINE ChunkScratch with_scores(T* p_at, T* solve_at) const {
    ChunkScratch c = *this;
    c.p = p_at;
    c.solve = solve_at;
    return c;
  }
  LINNET_INLINE ChunkTiles<T> tiles(int rows, bool queries, int first, int last) const {
    return {ldk, ldv, queries ? kq + rows * ldk : nullptr, kq, v, g, beta, spare, shared, first, last};
  }
  LINNET_INLINE T* o(int rows) const { return r + rows * ldv; }
};

// ---- decays ---------------------------------------------------------------------------------------------------------------

// S_C = keep S_0 + (factor S_0 + ...) for a sum of log decays over the chunk: expm1 and 1 for decays above a half, else exp and
// 0, both from one range reduction. Returns which decays are above a half.
template <class T>
LINNET_INLINE auto state_factors(typename Vec<T>::V total, T* factor, T* keep) {
  using X = Vec<T>;
  const auto weak = gt(total, X::broadcast(T(-0.69314718)));
  X::store(factor, expm1_or_exp(total, weak));
  X::store(keep, select(weak, X::broadcast(T(1)), X::zero()));
  return weak;
}

// keys: (K pre) too. scores: what the scores need, E.
template <class T>
void scalar_gates(int rows, int K, const ChunkScratch<T>& c, bool keys, bool scores) {
  using X = Vec<T>;
  T total = 0;
  for (int i = 0; i < rows; ++i) c.pre[i] = total += c.g[i];
  for (int64_t j = 0; j < K; j += X::W) state_factors(X::broadcast(total), c.factor + j, c.keep + j);
  total = 0;
  for (int j = rows - 1; j >= 0; --j) {
    c.suf[j] = total;
    total += c.g[j];
  }
  for (int j = 0; j < rows; j += X::W) {
    X::store(c.pre + j, exp(X::load(c.pre + j, rows - j)));
    X::store(c.suf + j, exp(X::load(c.suf + j, rows - j)));
  }
  typename X::V sums[kChunk / X::W] = {};
  for (int i = 0; scores && i < rows; ++i) {
    const typename X::V g = X::broadcast(c.g[i]);
    for (int v = 0; v < kChunk / X::W; ++v) {
      const int j = v * X::W;
      typename X::V e = X::zero();
      if (j <= i) {
        sums[v] = select(X::prefix(i - j), sums[v] + g, X::zero());
        e = select(X::prefix(i + 1 - j), exp(sums[v]), X::zero());
      }
      X::store(c.decay + i * kChunk + j, e);
    }
  }
  for (int row = keys ? 0 : rows; row < 2 * rows; ++row) {  // k and q times pre
    const typename X::V pre = X::broadcast(c.pre[row % rows]);
    for (int64_t j = 0; j < c.ldk; j += X::W) X::store(c.kqp + row * c.ldk + j, pre * X::load(c.kq + row * c.ldk + j));
  }
}

template <class T>
void channel_gates(int rows, const ChunkScratch<T>& c, bool keys, bool scores) {
  using X = Vec<T>;
  for (int64_t j = 0; j < c.ldk; j += X::W) {
    typename X::V total = X::zero();
    for (int i = 0; i < rows; ++i) {
      const int64_t at = i * c.ldk + j;
      const typename X::V g = X::load(c.g + at);
      total += g;
      const typename X::V pre = exp(total);
      X::store(c.pre + at, pre);
      if (scores) X::store(c.decay + at, exp(g));
      if (keys) X::store(c.kqp + at, pre * X::load(c.kq + at));
      X::store(c.kqp + rows * c.ldk + at, pre * X::load(c.kq + rows * c.ldk + at));
    }
    state_factors(total, c.factor + j, c.keep + j);
    total = X::zero();
    for (int i = rows - 1; i >= 0; --i) {
      const int64_t at = i * c.ldk + j;
      const typename X::V suf = exp(total);
      X::store(c.suf + at, suf);
      X::store(c.ks + at, suf * X::load(c.kq + at));
      total += X::load(c.g + at);
    }
  }
}

// ---- scores ---------------------------------------------------------------------------------------------------------------

// Rows i of x: x[i, j] e[i, j] for j < i + offset, 0 beyond. e may be null: 1.
template <class T>
void keep_triangle(int rows, int offset, T* x, const T* e) {
  using X = Vec<T>;
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kChunk; j += X::W) {
      typename X::V kept = X::load(x + i * kChunk + j);
      if (e != nullptr) kept *= X::load(e + i * kChunk + j);
      X::store(x + i * kChunk + j, select(X::prefix(i + offset - j), kept, X::zero()));
    }
  }
}

// The kBlock rows from n on: scores among themselves, and keys decayed to the last row of the block, in `down` [kBlock, ldk].
template <class T>
void diagonal_scores(int n, int rows, const ChunkScratch<T>& c, const T* zero_row, bool beta, T* down) {
  using X = Vec<T>;
  using V = typename X::V;
  const T *k[kBlock], *q[kBlock], *a[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const bool exists = n + i < rows;
    k[i] = exists ? c.kq + (n + i) * c.ldk : zero_row;
    q[i] = exists ? c.kq + (rows + n + i) * c.ldk : zero_row;
    a[i] = exists ? c.decay + (n + i) * c.ldk : zero_row;
  }
  V scores_q[kBlock][kBlock] = {}, scores_k[kBlock][kBlock] = {};
  for (int64_t x = 0; x < c.ldk; x += X::W) {
#pragma GCC unroll 4
    for (int j = 0; j < kBlock; ++j) {
      V key = X::load(k[j] + x);
      scores_q[j][j] = fma(X::load(q[j] + x), key, scores_q[j][j]);
#pragma GCC unroll 4
      for (int i = j + 1; i < kBlock; ++i) {
        key *= X::load(a[i] + x);
        scores_q[i][j] = fma(X::load(q[i] + x), key, scores_q[i][j]);
        scores_k[i][j] = fma(X::load(k[i] + x), key, scores_k[i][j]);
      }
      X::store(down + j * c.ldk + x, key);
    }
  }
  for (int i = 0; i < kBlock && n + i < rows; ++i) {
    for (int j = 0; j <= i; ++j) {
      c.p[(n + i) * kChunk + n + j] = sum(scores_q[i][j]);
      if (beta && j < i) c.a[(n + i) * kChunk + n + j] = sum(scores_k[i][j]);
    }
  }
}

// P and A with a decay per channel; kt is scratch here, keys decayed to row n in columns below n. queries: P is wanted.
template <class T>
void channel_scores(int rows, int K, const ChunkScratch<T>& c, bool queries, bool beta) {
  using X = Vec<T>;
  T* down = c.block;                   // [kBlock, ldk] keys decayed to the block's last row
  T* left = c.block + kBlock * c.ldk;  // [kBlock, ldk] rows decayed from the block's first row
  T* mid = left + kBlock * c.ldk;      // [ldk]
  T* zero_row = mid + c.ldk;           // [ldk]
  for (int64_t x = 0; x < c.ldk; x += X::W) X::store(zero_row + x, X::zero());
  for (int n = 0; n < rows; n += kBlock) {
    const int count = rows - n < kBlock ? rows - n : kBlock;
    if (n > 0) {
      for (int64_t x = 0; x < c.ldk; x += X::W) {  // the decay from the first row of the block before to this one's
        typename X::V total = X::zero();
        for (int t = n - kBlock + 1; t <= n; ++t) total += X::load(c.g + t * c.ldk + x);
        X::store(mid + x, exp(total));
        const typename X::V a = X::load(c.decay + n * c.ldk + x);
        for (int j = 0; j < kBlock; ++j) X::store(down + j * c.ldk + x, a * X::load(down + j * c.ldk + x));
      }
      for (int x = 0; x < K; ++x) {
        T* row = c.kt + static_cast<int64_t>(x) * kChunk;
        for (int j = 0; j < n - kBlock; j += X::W) X::store(row + j, X::broadcast(mid[x]) * X::load(row + j));
        for (int j = 0; j < kBlock; ++j) row[n - kBlock + j] = down[j * c.ldk + x];
      }
      for (int keys = 0; keys < 2; ++keys) {
        if (keys ? !beta : !queries) continue;
        const T* from = c.kq + ((keys ? 0 : rows) + n) * c.ldk;
        for (int64_t x = 0; x < c.ldk; x += X::W) {
          typename X::V decay = X::broadcast(T(1));
          for (int i = 0; i < count; ++i) {
            if (i > 0) decay *= X::load(c.decay + (n + i) * c.ldk + x);
            X::store(left + i * c.ldk + x, decay * X::load(from + i * c.ldk + x));
          }
        }
        gemm<T>(count, n, K, as_is(left, c.ldk), c.kt, kChunk, (keys ? c.a : c.p) + n * kChunk, kChunk, Store{});
      }
    }
    for (int i = n; i < n + count; ++i) {
      for (int j = n / X::W * X::W; j < kChunk; j += X::W) {
        if (n == 0 || j >= n) {
          X::store(c.p + i * kChunk + j, X::zero());
          X::store(c.a + i * kChunk + j, X::zero());
        } else {
          X::store(c.p + i * kChunk + j, select(X::prefix(n - j), X::load(c.p + i * kChunk + j), X::zero()));
          X::store(c.a + i * kChunk + j, select(X::prefix(n - j), X::load(c.a + i * kChunk + j), X::zero()));
        }
      }
    }
    diagonal_scores(n, rows, c, zero_row, beta, down);
  }
}

// Decays and scores of a loaded chunk: pre, suf, factors, kqp, kt = (K suf)^T; scores: P (queries), A and its scaled copy
// (beta).
template <class T>
void chunk_prepare(const EngineShape& s, int rows, const ChunkScratch<T>& c, bool queries, bool scores = true) {
  using X = Vec<T>;
  if (!queries && s.gate != Gate::none) {  // what stands in for q is multiplied by decays
    for (int64_t j = 0; j < rows * c.ldk; j += X::W) X::store(c.kq + rows * c.ldk + j, X::zero());
  }
  if (s.gate == Gate::channel) {
    channel_gates(rows, c, s.beta, scores);
    if (scores) channel_scores(rows, s.K, c, queries, s.beta);
    load_tile_transposed<T>(c.ks, c.ldk, rows, s.K, c.kt, kChunk);
  } else {
    const bool gated = s.gate == Gate::scalar;
    if (gated) scalar_gates(rows, s.K, c, s.beta, scores);
    load_tile_transposed<T>(c.kq, c.ldk, rows, s.K, c.kt, kChunk);
    if (scores && queries) {
      gemm<T>(rows, rows, s.K, as_is(c.kq + rows * c.ldk, c.ldk), c.kt, kChunk, c.p, kChunk, Fetching<Store>{{}, c.ahead},
              ColumnsTo{1});
      keep_triangle(rows, 1, c.p, gated ? c.decay : nullptr);
    }
    if (scores && s.beta) {
      gemm<T>(rows, rows, s.K, as_is(c.kq, c.ldk), c.kt, kChunk, c.a, kChunk, Fetching<Store>{{}, c.ahead}, ColumnsTo{1});
      keep_triangle(rows, 0, c.a, gated ? c.decay : nullptr);
    }
    if (gated) {
      for (int x = 0; x < s.K; ++x) {
        for (int j = 0; j < rows; j += X::W) {
          T* at = c.kt + static_cast<int64_t>(x) * kChunk + j;
          X::store(at, X::load(at) * X::load(c.suf + j));
        }
      }
    }
  }
  for (int i = 0; scores && s.beta && i < rows; ++i) {
    for (int j = 0; j < rows; j += X::W) {
      X::store(c.solve + i * kChunk + j, X::load(c.a + i * kChunk + j) * X::load(c.beta + j, rows - j));
    }
  }
}

// ---- products with the state ----------------------------------------------------------------------------------------------

// S = keep[i] S + (factor[i] S + acc): see state_factors.
template <class T>
struct DecayAdd {
  const T *factor, *keep;
  static constexpr bool kReadsC = true;
  template <class V>
  LINNET_INLINE V operator()(V acc, V c, int i, int) const {
    return fma(Vec<T>::broadcast(keep[i]), c, fma(Vec<T>::broadcast(factor[i]), c, acc));
  }
};

// The end of a block of the substitution: x_r = c_r - acc_r - sum_{s < r} m[r, s] x_s, m = &M[n, n].
template <class T>
struct SubstituteDown {
  const T* m;
  static constexpr bool kReadsC = true;
  template <class E, class V, int R, int N>
  LINNET_INLINE void tile(V (&acc)[R][N], E* c, int64_t ldc, int, int) const {
    using X = Vec<T>;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, c += ldc) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) acc[r][v] = X::load(c + v * X::W) - acc[r][v];
#pragma GCC unroll 16
      for (int s = 0; s < r; ++s) {
        const V factor = X::broadcast(-m[r * kChunk + s]);
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) acc[r][v] = fma(factor, acc[s][v], acc[r][v]);
      }
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) X::store(c + v * X::W, acc[r][v]);
    }
  }
};

// (I + M) X = X in place, M strictly lower [rows, C]: columns [j, j + width) of x.
template <class T>
void substitute_down(int rows, int width, const T* m, T* x, int64_t ldx) {
  for (int n = 0; n < rows; n += kTileRows) {
    const int count = rows - n < kTileRows ? rows - n : kTileRows;
    gemm<T>(count, width, n, as_is(m + n * kChunk, kChunk), x, ldx, x + n * ldx, ldx, SubstituteDown<T>{m + n * (kChunk + 1)});
  }
}

// x = beta x, row by row; padded columns too.
template <class T>
void scale_rows(int rows, int width, const T* scale, T* x, int64_t ldx) {
  using X = Vec<T>;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < width; j += X::W) X::store(x + i * ldx + j, X::broadcast(scale[i]) * X::load(x + i * ldx + j));
  }
}

// O += P N, P lower triangular. Where N is not finite, rows are multiplied one by one with exactly the writes that they see: in
// a tile of rows a weight of 0 would carry a NaN to earlier ones. The bits of finite rows are the same.
template <class T>
void read_written(int rows, int width, const T* p, const T* n, int64_t ld, T* o, Ahead* ahead) {
  if (rows_are_finite(n, ld, rows, width)) {
    gemm<T>(rows, width, rows, as_is(p, kChunk), n, ld, o, ld, Fetching<Add>{{}, ahead}, DepthTo{1});
    return;
  }
  for (int i = 0; i < rows; ++i) gemm<T>(1, width, i + 1, as_is(p + i * kChunk, kChunk), n, ld, o + i * ld, ld, Add{});
}

// Columns [first, last) (whole vectors, unless the last are meant): reads, corrects, writes the state. queries: O too. res:
// where V - K S - A N is kept [C, ldv] for the backward (beta), or null. Any cut of the columns gives the same bits. ready():
// is called before the scores are read.
template <class T, class ScoresReady = Ready>
void chunk_columns(const EngineShape& s, int rows, const StateShape<T>& shape, T* state, const ChunkScratch<T>& c, int first,
                   int last, bool queries, T* res, const ScoresReady& ready = {}) {
  using X = Vec<T>;
  T* o = c.o(rows);
  for (int j = first, end; j < last; j = end) {
    const int p = j / kPanel;
    end = (p + 1) * kPanel < last ? (p + 1) * kPanel : last;
    T* panel = state + shape.panel(p) + j % kPanel;
    const int64_t pitch = shape.pitch(p), padded = round_up<T>(end - j);
    const int width = end - j;
    T* v = c.v + j;
    const int from = s.beta ? 0 : rows, to = queries ? 2 * rows : rows;
    if (from < to) {
      gemm<T>(to - from, width, s.K, as_is(c.kqp + from * c.ldk, c.ldk), panel, pitch, c.r + from * c.ldv + j, c.ldv,
              Fetching<Store>{{}, c.ahead});
    }
    ready();
    if (s.beta) {
      for (int i = 0; i < rows; ++i) {
        for (int64_t x = 0; x < padded; x += X::W) {
          X::store(v + i * c.ldv + x, X::load(v + i * c.ldv + x) - X::load(c.r + i * c.ldv + j + x));
        }
      }
      substitute_down(rows, width, c.solve, v, c.ldv);
      for (int i = 0; res != nullptr && i < rows; ++i) {
        for (int64_t x = 0; x < padded; x += X::W) X::store(res + i * c.ldv + j + x, X::load(v + i * c.ldv + x));
      }
      scale_rows(rows, width, c.beta, v, c.ldv);
    }
    if (queries) read_written(rows, width, c.p, v, c.ldv, o + j, c.ahead);
    if (s.gate == Gate::none) {
      gemm<T>(s.K, width, rows, as_is(c.kt, kChunk), v, c.ldv, panel, pitch, Fetching<Add>{{}, c.ahead});
    } else {
      gemm<T>(s.K, width, rows, as_is(c.kt, kChunk), v, c.ldv, panel, pitch,
              Fetching<DecayAdd<T>>{{c.factor, c.keep}, c.ahead});
    }
  }
}

}  // namespace linnet::LINNET_ISA
