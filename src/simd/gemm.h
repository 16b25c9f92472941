// gemm: the small matrix product that every chunked mechanism is made of.
//
//   gemm<float>(64, 64, 128, as_is(q, ldq), kt, 64, scores, 64, Store{});                    // S = Q KT
//   gemm<float>(64, 64, 64, transposed(p, ldp), d_o, 64, dv, 64, Add{});                     // dV += P^T dO
//   gemm<float>(64, 64, 64, as_is(p, ldp), v, 64, o, 64, Add{}, DepthTo{1});                 // O += tril(P) V
//
// C[M, N] = epilogue(C, A B). B [K, N] and C [M, N] are row-major with the lanes along N; A is read one element at a time by
// broadcast with two strides, so a transposed A costs nothing. No packing: at the sizes of a tile all operands lie in L1 or L2
// (copy tiles whose row stride is a large power of two to dense scratch first: src/simd/tile.h).
//
// One accumulator per element, k ascending, one fused multiply-add per term: tile shape, remainder path, bounds and layout
// never change a bit of the result. Only a cut of K into several calls does, so cut by shape alone.
//
// Promises about memory, by name:
//   kPadded   (the default) rows of B may be read and rows of C written up to the next multiple of the lanes (Vec<T>::W), and
//             so may per-column vectors of the epilogue: ldb, ldc >= round_up<T>(N). For scratch.
//   kExact    nothing outside [0, N) is touched; the last vector is masked. For the caller's memory.
//
// Register tiles [rows x vectors]: 6 x 4 (avx512, 24 of 32 registers) and 6 x 2 (avx2 and portable, 12 of 16); docs/simd.md.
#pragma once

#include "simd/vec.h"

namespace linnet::LINNET_ISA {

#if defined(LINNET_ISA_avx512)
inline constexpr int kTileRows = 6, kTileVectors = 4;
#else
inline constexpr int kTileRows = 6, kTileVectors = 2;
#endif

enum class Memory { kPadded, kExact };
inline constexpr Memory kPadded = Memory::kPadded, kExact = Memory::kExact;

// The left operand: element (i, k) is p[i * row + k * depth].
template <class T>
struct Left {
  const T* p;
  int64_t row, depth;
};
template <class T>
LINNET_INLINE Left<T> as_is(const T* a, int64_t lda) {  // a: [M, K], rows lda apart
  return {a, lda, 1};
}
template <class T>
LINNET_INLINE Left<T> transposed(const T* a, int64_t lda) {  // a: [K, M], rows lda apart; the product takes a^T
  return {a, 1, lda};
}

// ---- epilogues ------------------------------------------------------------------------------------------------------------
//
// operator()(acc, c, i, j) returns the vector to store at C[i, j .. j + W); c is what stands there now (only when kReadsC).
// An epilogue may instead take the whole register tile and do its own stores (kPadded only):
//   template <class T, class V, int R, int N> void tile(V (&acc)[R][N], T* c, int64_t ldc, int i, int j) const;    c = &C[i, j]

struct Store {  // C = acc
  static constexpr bool kReadsC = false;
  template <class V>
  LINNET_INLINE V operator()(V acc, V, int, int) const {
    return acc;
  }
};
struct Add {  // C = C + acc
  static constexpr bool kReadsC = true;
  template <class V>
  LINNET_INLINE V operator()(V acc, V c, int, int) const {
    return c + acc;
  }
};
template <class T>
struct Scale {  // C = s acc
  T s;
  static constexpr bool kReadsC = false;
  template <class V>
  LINNET_INLINE V operator()(V acc, V, int, int) const {
    return Vec<T>::broadcast(s) * acc;
  }
};
template <class T>
struct ScaleAdd {  // C = s C + acc: one decay for the whole state
  T s;
  static constexpr bool kReadsC = true;
  template <class V>
  LINNET_INLINE V operator()(V acc, V c, int, int) const {
    return fma(Vec<T>::broadcast(s), c, acc);
  }
};
template <class T>
struct LaneScaleAdd {  // C[i, j] = alpha[j] C[i, j] + acc: the rescale of online softmax, queries in the lanes
  const T* alpha;
  static constexpr bool kReadsC = true;
  template <class V>
  LINNET_INLINE V operator()(V acc, V c, int, int j) const {
    return fma(Vec<T>::load(alpha + j), c, acc);
  }
};
template <class T>
struct RowScaleAdd {  // C[i, j] = alpha[i] C[i, j] + acc: one decay per key channel
  const T* alpha;
  static constexpr bool kReadsC = true;
  template <class V>
  LINNET_INLINE V operator()(V acc, V c, int i, int) const {
    return fma(Vec<T>::broadcast(alpha[i]), c, acc);
  }
};
template <class T>
struct RowScale {  // C[i, j] = alpha[i] acc
  const T* alpha;
  static constexpr bool kReadsC = false;
  template <class V>
  LINNET_INLINE V operator()(V acc, V, int i, int) const {
    return Vec<T>::broadcast(alpha[i]) * acc;
  }
};

// ---- bounds: triangular and banded products -------------------------------------------------------------------------------
//
// columns(i0, i1): the columns of C that rows [i0, i1) need; other columns are left alone or get their product, so what reads C
// must not look at them. depth(i0, i1, j0, j1): the terms k that the block [i0, i1) x [j0, j1) needs; left-out terms must be
// zeros (in A or B), those that stay in because a neighbour in the register tile needs them are multiplied: A must really hold
// zeros there. Ranges may reach outside [0, N), [0, K); they are clipped.
struct Range {
  int begin, end;
};
inline constexpr int kUnbounded = 1 << 30;
struct Full {
  static constexpr bool kLimitsColumns = false, kLimitsDepth = false;
  LINNET_INLINE Range columns(int, int) const { return {0, kUnbounded}; }
  LINNET_INLINE Range depth(int, int, int, int) const { return {0, kUnbounded}; }
};
struct ColumnsTo : Full {  // row i needs columns j < i + offset: causal scores, queries in rows, offset 1
  int offset;
  explicit ColumnsTo(int o) : offset(o) {}
  static constexpr bool kLimitsColumns = true;
  LINNET_INLINE Range columns(int, int i1) const { return {0, i1 - 1 + offset}; }
};
struct ColumnsFrom : Full {  // row i needs columns j >= i + offset: causal scores, keys in rows, offset 0
  int offset;
  explicit ColumnsFrom(int o) : offset(o) {}
  static constexpr bool kLimitsColumns = true;
  LINNET_INLINE Range columns(int i0, int) const { return {i0 + offset, kUnbounded}; }
};
struct DepthTo : Full {  // row i needs terms k < i + offset: tril(P) V, offset 1
  int offset;
  explicit DepthTo(int o) : offset(o) {}
  static constexpr bool kLimitsDepth = true;
  LINNET_INLINE Range depth(int, int i1, int, int) const { return {0, i1 - 1 + offset}; }
};
struct DepthFrom : Full {  // row i needs terms k >= i + offset: tril(P)^T dO, offset 0
  int offset;
  explicit DepthFrom(int o) : offset(o) {}
  static constexpr bool kLimitsDepth = true;
  LINNET_INLINE Range depth(int i0, int, int, int) const { return {i0 + offset, kUnbounded}; }
};
struct DepthToLane : Full {  // column j needs terms k < j + offset: V^T ST, queries in the lanes, offset 1
  int offset;
  explicit DepthToLane(int o) : offset(o) {}
  static constexpr bool kLimitsDepth = true;
  LINNET_INLINE Range depth(int, int, int, int j1) const { return {0, j1 - 1 + offset}; }
};

// ---- the kernel -----------------------------------------------------------------------------------------------------------

template <class T, class EpilogueType, class BoundsType>
struct Product {
  using Element = T;
  using Epilogue = EpilogueType;
  using Bounds = BoundsType;
  int m, n, k;
  Left<T> a;
  const T* b;
  int64_t ldb;
  T* c;
  int64_t ldc;
  const Epilogue& epilogue;
  const Bounds& bounds;
};

// The end of a register tile: epilogue and stores.
template <bool kMasked, class P, class V, int R, int N>
LINNET_INLINE void finish_tile(const P& p, V (&acc)[R][N], int i, int j) {
  using T = typename P::Element;
  using X = Vec<T>;
  T* c = p.c + i * p.ldc + j;
  if constexpr (requires { p.epilogue.tile(acc, c, p.ldc, i, j); }) {
    static_assert(!kMasked, "an epilogue over tiles needs padded scratch");
    p.epilogue.tile(acc, c, p.ldc, i, j);
  } else {
    const int lanes = p.n - j;
    const typename X::M mask = X::prefix(lanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, c += p.ldc) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        V old = X::zero();
        if constexpr (P::Epilogue::kReadsC) {
          old = kMasked ? X::load_mask(c, mask, lanes) : X::load(c + v * X::W);
        }
        const V out = p.epilogue(acc[r][v], old, i + r, j + v * X::W);
        if constexpr (kMasked) {
          X::store_mask(c, out, mask, lanes);
        } else {
          X::store(c + v * X::W, out);
        }
      }
    }
  }
}

// The terms k that the block of R rows and N vectors needs.
template <int R, int N, class P>
LINNET_INLINE Range depth_of_tile(const P& p, int i, int j) {
  Range range{0, p.k};
  if constexpr (P::Bounds::kLimitsDepth) {
    constexpr int width = N * Vec<typename P::Element>::W;
    const Range limit = p.bounds.depth(i, i + R, j, j + width < p.n ? j + width : p.n);
    if (limit.begin > range.begin) range.begin = limit.begin;
    if (limit.end < range.end) range.end = limit.end;
  }
  return range;
}

// C[i .. i + R, j .. j + N vectors). Masked: one vector (N == 1) of which the first n - j lanes exist.
template <int R, int N, bool kMasked, class T, class Epilogue, class Bounds>
[[gnu::noinline]] void gemm_tile(const Product<T, Epilogue, Bounds>& p, int i, int j) {
  using X = Vec<T>;
  using V = typename X::V;
  static_assert(!kMasked || N == 1);
  const int lanes = p.n - j;
  const typename X::M mask = X::prefix(lanes);
  const Range range = depth_of_tile<R, N>(p, i, j);
  const int64_t row = p.a.row, depth = p.a.depth, ldb = p.ldb;
  const T* a = p.a.p + i * row + range.begin * depth;
  const T* b = p.b + j + range.begin * ldb;
  V acc[R][N] = {};
  for (int k = range.begin; k < range.end; ++k, a += depth, b += ldb) {
    V bv[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) bv[v] = kMasked ? X::load_mask(b, mask, lanes) : X::load(b + v * X::W);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const V av = X::broadcast(a[r * row]);
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) acc[r][v] = fma(av, bv[v], acc[r][v]);
    }
  }
  finish_tile<kMasked>(p, acc, i, j);
}

// R rows of a panel of N vectors. Under column bounds only the half of a wide panel that the rows need.
template <int R, int N, bool kMasked, class P>
LINNET_INLINE void gemm_rows(const P& p, int i, int j) {
  if constexpr (P::Bounds::kLimitsColumns) {
    constexpr int half = N / 2 * Vec<typename P::Element>::W, width = N * Vec<typename P::Element>::W;
    const Range range = p.bounds.columns(i, i + R);
    if (range.end <= j || range.begin >= j + width) return;
    if constexpr (N >= 2) {  // 6 x 1 on half of the columns: 2 to 3 % of a linear chunk at width 64 (Zen 4)
      if (range.end <= j + half) return gemm_rows<R, N / 2, kMasked>(p, i, j);
      if (range.begin >= j + half) return gemm_rows<R, N / 2, kMasked>(p, i, j + half);
    }
  }
  gemm_tile<R, N, kMasked>(p, i, j);
}

// Rows [begin, end) in tiles of R rows, in panels of N vectors and narrower ones for the rest. Panels outside, rows inside: the
// panel [k, N vectors] of B stays in L1.
template <int R, int N, Memory kMemory, class P>
LINNET_INLINE void gemm_band(const P& p, int begin, int end) {
  constexpr int W = Vec<typename P::Element>::W;
  const int whole = kMemory == kExact ? p.n / W * W : (p.n + W - 1) / W * W;
  int j = 0;
  for (; j + N * W <= whole; j += N * W)
    for (int i = begin; i < end; i += R) gemm_rows<R, N, false>(p, i, j);
  if constexpr (N > 4) {
    if (j + 4 * W <= whole) {
      for (int i = begin; i < end; i += R) gemm_rows<R, 4, false>(p, i, j);
      j += 4 * W;
    }
  }
  if constexpr (N > 2) {
    if (j + 2 * W <= whole) {
      for (int i = begin; i < end; i += R) gemm_rows<R, 2, false>(p, i, j);
      j += 2 * W;
    }
  }
  if (j < whole) {
    for (int i = begin; i < end; i += R) gemm_rows<R, 1, false>(p, i, j);
    j += W;
  }
  if constexpr (kMemory == kExact) {
    if (j < p.n)
      for (int i = begin; i < end; i += R) gemm_rows<R, 1, true>(p, i, j);
  }
}

template <Memory kMemory, class P>
LINNET_INLINE void gemm_bands(const P& p) {
  const int full = p.m / kTileRows * kTileRows;
  if (full > 0) gemm_band<kTileRows, kTileVectors, kMemory>(p, 0, full);
  // Each remainder has a tile of its own. Few rows take more columns: 4 cycles of latency x 2 ports want 8 accumulators.
  switch (p.m - full) {
    case 5: return gemm_band<5, kTileVectors, kMemory>(p, full, p.m);
    case 4: return gemm_band<4, kTileVectors, kMemory>(p, full, p.m);
    case 3: return gemm_band<3, 2 * kTileVectors, kMemory>(p, full, p.m);
    case 2: return gemm_band<2, 2 * kTileVectors, kMemory>(p, full, p.m);
    case 1: return gemm_band<1, 8, kMemory>(p, full, p.m);
    default: return;
  }
}

// C[m, n] = epilogue(C, A B); a: as_is(pointer, stride) or transposed(pointer, stride); b: [k, n], rows ldb apart. C must
// overlap neither. m, n, k may be 0; with k == 0 the accumulators are 0.
template <class T, Memory kMemory = kPadded, class Epilogue, class Bounds = Full>
void gemm(int m, int n, int k, Left<T> a, const T* b, int64_t ldb, T* c, int64_t ldc, const Epilogue& epilogue,
          const Bounds& bounds = Bounds{}) {
  gemm_bands<kMemory>(Product<T, Epilogue, Bounds>{m, n, k, a, b, ldb, c, ldc, epilogue, bounds});
}

}  // namespace linnet::LINNET_ISA
