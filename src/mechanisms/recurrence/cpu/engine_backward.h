// engine_backward: the gradients of one chunk (engine_chunk.h), given the state before it and the gradient of the state after.
//
//   dN = P^T dO + (K suf) dS_C                      without beta dV = dN
//   Z_i = dN_i - sum_{k > i} A[k, i] beta_k Z_k     dY = dV = beta Z;   dbeta_i = Z_i . res_i
//   dS_0 = diag(pre_C) dS_C + (Q pre)^T dO - (K pre)^T dY
//   dP = tril(dO N^T), dA = -tril(dY N^T, -1);   dQp = dO S_0^T, dKp = -dY S_0^T, dKs = N dS_C^T
//
// No derivative of an inverse is formed. Rows of k stand before rows of q everywhere, so [-dY; dO] meets [k; q] in one product.
// Then to q, k and g by the pairs (i, j), j < i. The gradient of g leaves out the diagonal and the writes that reach the end:
// they carry no decay, and would cancel only in exact arithmetic.
#pragma once

#include "engine_chunk.h"

namespace linnet::LINNET_ISA {

// Scratch of one worker beside ChunkScratch.
template <class T>
struct BackwardScratch {
  T* d2;       // [2 C, ldv]  -dY, then dO from row `rows` on
  T* dn;       // [C, ldv]    dN or Z, at last dV
  T* nt;       // [V, C]      N transposed
  T* d2t;      // [V, 2 C]    d2 transposed
  T* dpa;      // [2 C, C]    dA, then dP from row `rows` on
  T* dkqt;     // [K, 2 C]    dKp, dQp transposed
  T* dkst;     // [K, C]      dKs transposed
  T* dkq;      // [2 C, ldk]  dKp, dQp; at last dk, dq
  T* dks;      // [C, ldk]
  T* upper;    // [C, C]      A with rows times beta
  T* dg;       // [C, ldk]    (scalar: [C])
  T* dbeta;    // [C]
  T* rows;     // [C]
  T* carry;    // [ldk]       rowsum(S_0 dS_C) per channel
  T* decayed;  // channel: [2 C, ldk] rows decayed to the current block
  T* kc;       // channel: [C, ldk]   the column part of dk
  T* block;    // channel: [kBlock + 1, ldk]

  LINNET_INLINE static BackwardScratch cut(Arena& arena, const EngineShape& s) {
    const int64_t ldk = round_up<T>(s.K), ldv = round_up<T>(s.V);
    const bool channel = s.gate == Gate::channel;
    BackwardScratch b;
    b.d2 = arena.take<T>(2 * kChunk * ldv);
    b.dn = arena.take<T>(kChunk * ldv);
    b.nt = arena.take<T>(static_cast<int64_t>(s.V) * kChunk);
    b.d2t = arena.take<T>(static_cast<int64_t>(s.V) * 2 * kChunk);
    b.dpa = arena.take<T>(2 * kChunk * kChunk);
    b.dkqt = arena.take<T>(static_cast<int64_t>(s.K) * 2 * kChunk);
    b.dkst = arena.take<T>(static_cast<int64_t>(s.K) * kChunk);
    b.dkq = arena.take<T>(2 * kChunk * ldk);
    b.dks = arena.take<T>(kChunk * ldk);
    b.upper = arena.take<T>(kChunk * kChunk);
    b.dg = arena.take<T>(kChunk * (channel ? ldk : 1));
    b.dbeta = arena.take<T>(kChunk);
    b.rows = arena.take<T>(kChunk);
    b.carry = arena.take<T>(ldk);
    b.decayed = arena.take<T>(channel ? 2 * kChunk * ldk : 0);
    b.kc = arena.take<T>(channel ? kChunk * ldk : 0);
    b.block = arena.take<T>(channel ? (kBlock + 1) * ldk : 0);
    return b;
  }
};

// The end of a block of the substitution from below: x_r = c_r - acc_r - sum_{s > r} m[s, r] x_s, m = &M[n, n].
template <class T>
struct SubstituteUp {
  const T* m;
  static constexpr bool kReadsC = true;
  template <class E, class V, int R, int N>
  LINNET_INLINE void tile(V (&acc)[R][N], E* c, int64_t ldc, int, int) const {
    using X = Vec<T>;
#pragma GCC unroll 16
    for (int r = R - 1; r >= 0; --r) {
      T* row = c + r * ldc;
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) acc[r][v] = X::load(row + v * X::W) - acc[r][v];
#pragma GCC unroll 16
      for (int s = r + 1; s < R; ++s) {
        const V factor = X::broadcast(-m[s * kChunk + r]);
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) acc[r][v] = fma(factor, acc[s][v], acc[r][v]);
      }
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) X::store(row + v * X::W, acc[r][v]);
    }
  }
};

// (I + M)^T X = X in place, M strictly lower [rows, C].
template <class T>
void substitute_up(int rows, int width, const T* m, T* x, int64_t ldx) {
  for (int n = (rows - 1) / kTileRows * kTileRows; n >= 0; n -= kTileRows) {
    const int end = n + kTileRows < rows ? n + kTileRows : rows;
    gemm<T>(end - n, width, rows - end, transposed(m + end * kChunk + n, kChunk), x + end * ldx, ldx, x + n * ldx, ldx,
            SubstituteUp<T>{m + n * (kChunk + 1)});
  }
}

// out[i] (+)= x_i . y_i over `width` padded columns.
template <bool kAdd, class T>
void row_dots(int rows, int64_t width, const T* x, const T* y, T* out) {
  using X = Vec<T>;
  for (int i = 0; i < rows; ++i) {
    typename X::V total = X::zero();
    for (int64_t j = 0; j < width; j += X::W) total = fma(X::load(x + i * width + j), X::load(y + i * width + j), total);
    out[i] = kAdd ? out[i] + sum(total) : sum(total);
  }
}

// rowsum(S dS) per channel.
template <class T>
void state_dots(const StateShape<T>& shape, const T* state, const T* dstate, T* out) {
  using X = Vec<T>;
  for (int p = 0; p < shape.panels(); ++p) {
    const int64_t pitch = shape.pitch(p);
    for (int i = 0; i < shape.I; ++i) {
      const int64_t at = shape.panel(p) + i * pitch;
      typename X::V total = X::zero();
      for (int64_t j = 0; j < pitch; j += X::W) total = fma(X::load(state + at + j), X::load(dstate + at + j), total);
      out[i] = p == 0 ? sum(total) : out[i] + sum(total);
    }
  }
}

// Pairs without decay or with one per head: dq, dk, dg from dP, dA, dQp, dKp, dKs.
template <class T>
void scalar_pairs(const EngineShape& s, int rows, const ChunkScratch<T>& c, const BackwardScratch<T>& b) {
  using X = Vec<T>;
  using V = typename X::V;
  const bool gated = s.gate == Gate::scalar;
  T *dk = b.dkq, *dq = b.dkq + rows * c.ldk, *da = b.dpa, *dp = b.dpa + rows * kChunk;
  if (gated) {
    // Pairs that span t, (i >= t, j < t), from sums over i column by column: nothing is added that is taken away again.
    V columns[kChunk / X::W] = {};
    for (int i = rows - 1; i >= 0; --i) {
      V total = X::zero();
      for (int v = 0; v < kChunk / X::W && v * X::W < i; ++v) {
        const int64_t at = i * kChunk + v * X::W;
        const auto before = X::prefix(i - v * X::W);
        V pair = X::load(dp + at) * X::load(c.p + at);
        if (s.beta) pair = fma(X::load(da + at), X::load(c.a + at), pair);
        columns[v] += select(before, pair, X::zero());
        total += select(before, columns[v], X::zero());
      }
      b.dg[i] = sum(total);
    }
    row_dots<false>(rows, c.ldk, c.kqp + rows * c.ldk, dq, b.rows);
    if (s.beta) row_dots<true>(rows, c.ldk, c.kqp, dk, b.rows);
    T written[kChunk];  // s_j = (k_j suf_j) . dKs_j
    for (int v = 0; v * X::W < rows; ++v) {
      V total = X::zero();
      for (int x = 0; x < s.K; ++x) {
        total = fma(X::load(c.kt + x * kChunk + v * X::W), X::load(b.dkst + x * kChunk + v * X::W), total);
      }
      X::store(written + v * X::W, total);
    }
    double later = 0, dot = 0;
    for (int x = 0; x < s.K; ++x) dot += static_cast<double>(b.carry[x]);
    double across[kChunk];  // writes before t that reach the end, the incoming state among them
    double total = static_cast<double>(c.pre[rows - 1]) * dot;
    for (int t = 0; t < rows; ++t) {
      across[t] = total;
      total += static_cast<double>(written[t]);
    }
    for (int t = rows - 1; t >= 0; --t) {
      later += static_cast<double>(b.rows[t]);
      b.dg[t] = static_cast<T>(static_cast<double>(b.dg[t]) + later + across[t]);
    }
    for (int t = 0; t < rows; t += X::W) {
      const V a = exp(X::load(c.g + t, rows - t));
      X::store(b.dg + t, select(eq(a, X::zero()), X::zero(), X::load(b.dg + t)));
    }
    scale_rows<T>(rows, s.K, c.pre, dq, c.ldk);
    if (s.beta) scale_rows<T>(rows, s.K, c.pre, dk, c.ldk);
    scale_rows<T>(rows, s.K, c.suf, b.dks, c.ldk);
  }
  for (int64_t j = 0; j < rows * c.ldk; j += X::W) {
    X::store(dk + j, s.beta ? X::load(dk + j) + X::load(b.dks + j) : X::load(b.dks + j));
  }
  keep_triangle(rows, 1, dp, gated ? c.decay : nullptr);
  if (s.beta) keep_triangle(rows, 0, da, gated ? c.decay : nullptr);
  gemm<T>(rows, s.K, rows, as_is(dp, kChunk), c.kq, c.ldk, dq, c.ldk, Add{}, DepthTo{1});
  if (s.beta) {
    gemm<T>(rows, s.K, 2 * rows, transposed(da, kChunk), c.kq, c.ldk, dk, c.ldk, Add{});
    gemm<T>(rows, s.K, rows, as_is(da, kChunk), c.kq, c.ldk, dk, c.ldk, Add{}, DepthTo{1});
  } else {
    gemm<T>(rows, s.K, rows, transposed(dp, kChunk), c.kq + rows * c.ldk, c.ldk, dk, c.ldk, Add{}, DepthFrom{0});
  }
}

// The row parts with a decay per channel: dq_i += sum_{j < i} dP[i, j] k_j E[i, j], and dk_i with dA. Rows of keys are held
// decayed to the first row of the block, as in channel_scores.
template <class T>
void channel_row_pairs(const EngineShape& s, int rows, const ChunkScratch<T>& c, const BackwardScratch<T>& b) {
  using X = Vec<T>;
  using V = typename X::V;
  const T* const coefficients[2] = {b.dpa, b.dpa + rows * kChunk};
  T* const results[2] = {b.dkq, b.dkq + rows * c.ldk};
  for (int n = 0; n < rows; n += kBlock) {
    const int count = rows - n < kBlock ? rows - n : kBlock;
    for (int64_t x = 0; n > 0 && x < c.ldk; x += X::W) {
      V total = X::zero(), near = X::load(c.decay + n * c.ldk + x);
      for (int t = n - kBlock + 1; t <= n; ++t) total += X::load(c.g + t * c.ldk + x);
      const V mid = exp(total);
      for (int j = 0; j < n - kBlock; ++j) X::store(b.decayed + j * c.ldk + x, mid * X::load(b.decayed + j * c.ldk + x));
      for (int j = n - 1; j >= n - kBlock; --j) {
        X::store(b.decayed + j * c.ldk + x, near * X::load(c.kq + j * c.ldk + x));
        near *= X::load(c.decay + j * c.ldk + x);
      }
    }
    for (int part = s.beta ? 0 : 1; part < 2; ++part) {
      const T* d = coefficients[part] + n * kChunk;
      T* to = results[part] + n * c.ldk;
      if (n > 0) gemm<T>(count, s.K, n, as_is(d, kChunk), b.decayed, c.ldk, b.block, c.ldk, Store{});
      for (int64_t x = 0; x < c.ldk; x += X::W) {
        V sums[kBlock];
        V decay = X::broadcast(T(1));
        for (int i = 0; i < count; ++i) {
          if (i > 0) decay *= X::load(c.decay + (n + i) * c.ldk + x);
          sums[i] = X::load(to + i * c.ldk + x);
          if (n > 0) sums[i] = fma(decay, X::load(b.block + i * c.ldk + x), sums[i]);
        }
        for (int j = 0; j < count; ++j) {
          V key = X::load(c.kq + (n + j) * c.ldk + x);
          for (int i = j + 1; i < count; ++i) {
            key *= X::load(c.decay + (n + i) * c.ldk + x);
            sums[i] = fma(X::broadcast(d[i * kChunk + n + j]), key, sums[i]);
          }
        }
        for (int i = 0; i < count; ++i) X::store(to + i * c.ldk + x, sums[i]);
      }
    }
  }
}

// The column part: kc_j = sum_{i > j} (dP[i, j] q_i + dA[i, j] k_i) E[i, j]. Later rows are held decayed from the last row of
// the block, blocks from the last to the first.
template <class T>
void channel_column_pairs(const EngineShape& s, int rows, const ChunkScratch<T>& c, const BackwardScratch<T>& b) {
  using X = Vec<T>;
  using V = typename X::V;
  const T *da = b.dpa, *dp = b.dpa + rows * kChunk;
  const T *k = c.kq, *q = c.kq + rows * c.ldk;
  T *k_later = b.decayed, *q_later = b.decayed + rows * c.ldk;
  for (int n = (rows - 1) / kBlock * kBlock; n >= 0; n -= kBlock) {
    const int end = n + kBlock < rows ? n + kBlock : rows, count = end - n, later = rows - end;
    if (later > 0) {
      const int fresh = end + kBlock < rows ? end + kBlock : rows;  // rows [end, fresh) join
      for (int64_t x = 0; x < c.ldk; x += X::W) {
        V total = X::zero(), near = X::broadcast(T(1));
        for (int i = end; i < fresh; ++i) {
          const int64_t at = i * c.ldk + x;
          total += X::load(c.g + at);
          near *= X::load(c.decay + at);
          X::store(q_later + at, near * X::load(q + at));
          if (s.beta) X::store(k_later + at, near * X::load(k + at));
        }
        const V mid = exp(total);
        for (int i = fresh; i < rows; ++i) {
          const int64_t at = i * c.ldk + x;
          X::store(q_later + at, mid * X::load(q_later + at));
          if (s.beta) X::store(k_later + at, mid * X::load(k_later + at));
        }
      }
      gemm<T>(count, s.K, later, transposed(dp + end * kChunk + n, kChunk), q_later + end * c.ldk, c.ldk, b.block, c.ldk,
              Store{});
      if (s.beta) {
        gemm<T>(count, s.K, later, transposed(da + end * kChunk + n, kChunk), k_later + end * c.ldk, c.ldk, b.block, c.ldk,
                Add{});
      }
    }
    for (int64_t x = 0; x < c.ldk; x += X::W) {
      V decay = X::broadcast(T(1));
      for (int j = count - 1; j >= 0; --j) {
        V total = later > 0 ? decay * X::load(b.block + j * c.ldk + x) : X::zero();
        V e = X::broadcast(T(1));
        for (int i = j + 1; i < count; ++i) {
          const int64_t at = (n + i) * c.ldk + x, pair = (n + i) * kChunk + n + j;
          e *= X::load(c.decay + at);
          V row = X::broadcast(dp[pair]) * X::load(q + at);
          if (s.beta) row = fma(X::broadcast(da[pair]), X::load(k + at), row);
          total = fma(e, row, total);
        }
        X::store(b.kc + (n + j) * c.ldk + x, total);
        decay *= X::load(c.decay + (n + j) * c.ldk + x);
      }
    }
  }
}

// Pairs with a decay per channel: dq, dk, dg.
template <class T>
void channel_pairs(const EngineShape& s, int rows, const ChunkScratch<T>& c, const BackwardScratch<T>& b) {
  using X = Vec<T>;
  using V = typename X::V;
  T *dk = b.dkq, *dq = b.dkq + rows * c.ldk;
  const T *k = c.kq, *q = c.kq + rows * c.ldk, *dp = b.dpa + rows * kChunk;
  for (int64_t j = 0; j < rows * c.ldk; j += X::W) {
    X::store(dq + j, X::load(c.pre + j) * X::load(dq + j));
    X::store(dk + j, s.beta ? X::load(c.pre + j) * X::load(dk + j) : X::zero());
  }
  channel_row_pairs(s, rows, c, b);
  channel_column_pairs(s, rows, c, b);
  for (int64_t x = 0; x < c.ldk; x += X::W) {
    V total = X::zero();
    for (int i = rows - 1; i >= 0; --i) {
      const int64_t at = i * c.ldk + x;
      total += fma(X::load(q + at), X::load(dq + at), X::load(k + at) * (X::load(dk + at) - X::load(b.kc + at)));
      X::store(b.dg + at, total);
    }
    total = X::load(c.pre + (rows - 1) * c.ldk + x) * X::load(b.carry + x, s.K - static_cast<int>(x));
    for (int i = 0; i < rows; ++i) {
      const int64_t at = i * c.ldk + x;
      const V written = X::load(c.suf + at) * X::load(b.dks + at), diagonal = X::broadcast(dp[i * kChunk + i]);
      const V dg = X::load(b.dg + at) + total;
      X::store(b.dg + at, select(eq(X::load(c.decay + at), X::zero()), X::zero(), dg));
      total = fma(X::load(k + at), written, total);
      X::store(dk + at, X::load(dk + at) + X::load(b.kc + at) + fma(diagonal, X::load(q + at), written));
      X::store(dq + at, fma(diagonal, X::load(k + at), X::load(dq + at)));
    }
  }
}

// Of a loaded and prepared chunk, dO in b.d2 from row `rows` on, dS_C in dstate: columns [first, last) of dN = dV, with beta of
// Z, in z [rows, ldv].
template <class T>
void chunk_dvalues(const EngineShape& s, int rows, const StateShape<T>& shape, const T* dstate, const ChunkScratch<T>& c,
                   const BackwardScratch<T>& b, T* z, int first, int last) {
  using X = Vec<T>;
  for (int j = first, end; j < last; j = end) {
    const int p = j / kPanel;
    end = (p + 1) * kPanel < last ? (p + 1) * kPanel : last;
    gemm<T>(rows, end - j, s.K, transposed(c.kt, kChunk), dstate + shape.panel(p) + j % kPanel, shape.pitch(p), z + j, c.ldv,
            Fetching<Store>{{}, c.ahead});
    gemm<T>(rows, end - j, rows, transposed(c.p, kChunk), b.d2 + rows * c.ldv + j, c.ldv, z + j, c.ldv,
            Fetching<Add>{{}, c.ahead}, DepthFrom{0});
  }
  if (!s.beta) return;
  for (int i = 0; i < rows; ++i) {
    const typename X::V beta = X::broadcast(c.beta[i]);
    for (int j = 0; j < rows; j += X::W) X::store(b.upper + i * kChunk + j, beta * X::load(c.a + i * kChunk + j));
  }
  substitute_up(rows, last - first, b.upper, z + first, c.ldv);
}

// With beta, from Z: columns [first, last) of dV = dY, in b.dn, and of -dY, in b.d2. All columns: dbeta too. res: as
// chunk_columns kept it.
template <class T>
void chunk_dwrites(const EngineShape& s, int rows, const T* z, const T* res, const ChunkScratch<T>& c,
                   const BackwardScratch<T>& b, int first, int last) {
  using X = Vec<T>;
  if (last - first == s.V) row_dots<false>(rows, c.ldv, z, res, b.dbeta);
  for (int i = 0; i < rows; ++i) {
    const typename X::V beta = X::broadcast(c.beta[i]);
    for (int64_t j = i * c.ldv + first; j < i * c.ldv + last; j += X::W) {
      const typename X::V dv = beta * X::load(z + j);
      X::store(b.dn + j, dv);
      X::store(b.d2 + j, -dv);
    }
  }
}

// Then columns [first, last) of dstate: dS_0 from dS_C.
template <class T>
void chunk_dstate(const EngineShape& s, int rows, const StateShape<T>& shape, T* dstate, const ChunkScratch<T>& c,
                  const BackwardScratch<T>& b, int first, int last) {
  const int from = s.beta ? 0 : rows, both = 2 * rows - from;
  for (int j = first, end; j < last; j = end) {
    const int p = j / kPanel;
    end = (p + 1) * kPanel < last ? (p + 1) * kPanel : last;
    const Left<T> left = transposed(c.kqp + from * c.ldk, c.ldk);
    const T* d2 = b.d2 + from * c.ldv + j;
    T* panel = dstate + shape.panel(p) + j % kPanel;
    if (s.gate == Gate::none) {
      gemm<T>(s.K, end - j, both, left, d2, c.ldv, panel, shape.pitch(p), Fetching<Add>{{}, c.ahead});
    } else {
      gemm<T>(s.K, end - j, both, left, d2, c.ldv, panel, shape.pitch(p), Fetching<DecayAdd<T>>{{c.factor, c.keep}, c.ahead});
    }
  }
}

// And all the rest, after these. state: S_0; dstate: dS_C. Leaves dk, dq in b.dkq, dV in b.dn, dg, dbeta.
template <class T>
void chunk_gradients(const EngineShape& s, int rows, const StateShape<T>& shape, const T* state, const T* dstate, const T* res,
                     const ChunkScratch<T>& c, const BackwardScratch<T>& b) {
  using X = Vec<T>;
  if (s.beta) {
    for (int i = 0; i < rows; ++i) {
      const typename X::V beta = X::broadcast(c.beta[i]);
      for (int64_t j = 0; j < c.ldv; j += X::W) X::store(c.v + i * c.ldv + j, beta * X::load(res + i * c.ldv + j));
    }
  }
  load_tile_transposed<T>(c.v, c.ldv, rows, s.V, b.nt, kChunk);
  const int from = s.beta ? 0 : rows, both = 2 * rows - from;
  const T* d2 = b.d2 + from * c.ldv;
  load_tile_transposed<T>(d2, c.ldv, both, s.V, b.d2t, 2 * kChunk);
  gemm<T>(both, rows, s.V, as_is(d2, c.ldv), b.nt, kChunk, b.dpa + from * kChunk, kChunk, Fetching<Store>{{}, c.ahead});
  for (int p = 0; p < shape.panels(); ++p) {
    const int j = p * kPanel, width = shape.columns(p);
    const int64_t pitch = shape.pitch(p);
    const T *before = state + shape.panel(p), *after = dstate + shape.panel(p);
    if (p == 0) {
      gemm<T>(s.K, both, width, as_is(before, pitch), b.d2t, 2 * kChunk, b.dkqt, 2 * kChunk, Fetching<Store>{{}, c.ahead});
      gemm<T>(s.K, rows, width, as_is(after, pitch), b.nt, kChunk, b.dkst, kChunk, Fetching<Store>{{}, c.ahead});
    } else {
      gemm<T>(s.K, both, width, as_is(before, pitch), b.d2t + j * 2 * kChunk, 2 * kChunk, b.dkqt, 2 * kChunk,
              Fetching<Add>{{}, c.ahead});
      gemm<T>(s.K, rows, width, as_is(after, pitch), b.nt + j * kChunk, kChunk, b.dkst, kChunk, Fetching<Add>{{}, c.ahead});
    }
  }
  if (s.gate != Gate::none) state_dots(shape, state, dstate, b.carry);
  if (s.K < c.ldk) {
    for (int64_t i = 0; i < 2 * rows * c.ldk; i += X::W) X::store(b.dkq + i, X::zero());
    for (int64_t i = 0; i < rows * c.ldk; i += X::W) X::store(b.dks + i, X::zero());
  }
  store_tile_transposed<T>(b.dkqt, 2 * kChunk, both, s.K, b.dkq + from * c.ldk, c.ldk);
  store_tile_transposed<T>(b.dkst, kChunk, rows, s.K, b.dks, c.ldk);
  if (s.gate == Gate::channel) {
    channel_pairs(s, rows, c, b);
  } else {
    scalar_pairs(s, rows, c, b);
  }
}

}  // namespace linnet::LINNET_ISA
