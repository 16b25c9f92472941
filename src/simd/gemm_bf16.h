// gemm_bf16: the small matrix product with bf16 operands and float sums, two terms per lane and instruction (AVX512_BF16,
// vdpbf16ps): twice the multiply-adds of gemm.h per cycle.
//
//   gemm_pairs(64, 64, 32, as_is(k, ldk), qt, 64, scores, 64, Store{});      // depth 64 = 32 pairs
//
// Operands are arrays of Pair: two neighbours along the depth, the even one in the low half. C[M, N] = epilogue(C, A B) with
// A [M, pairs] read by broadcast with two strides (so the transpose of an array [pairs, M] costs nothing), B [pairs, N] with
// the lanes along N, C float. Rows of B and C are padded to whole vectors (kPadded of gemm.h); an odd depth is padded with a
// zero.
//
// One accumulator per element, pairs ascending, as in gemm.h. The instruction rounds to nearest even whatever MXCSR says, adds
// the odd term first, and flushes subnormals.
//
// For sources that are compiled for it by
//   #pragma GCC target("avx512bf16")
// in a namespace of its own (LINNET_ISA avx512_bf16), chosen at run time.
#pragma once

#include "simd/gemm.h"

namespace linnet::LINNET_ISA {

struct Pair {
  uint32_t bits;
};

LINNET_INLINE vf dot_pairs(vf sum, vu32 a, vu32 b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
LINNET_INLINE vu32 load_pairs(const Pair* p) {
  vu32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
LINNET_INLINE void store_pairs(Pair* p, vu32 v) { __builtin_memcpy(p, &v, sizeof v); }

// Lane i: (low[i], high[i]), rounded to bf16.
LINNET_INLINE vu32 make_pairs(vf low, vf high) {
  const vu32 l = __builtin_convertvector(reinterpret_cast<vu16>(_mm512_cvtneps_pbh(low)), vu32);
  const vu32 h = __builtin_convertvector(reinterpret_cast<vu16>(_mm512_cvtneps_pbh(high)), vu32);
  return l | h << 16;
}
// Lane i: (low[i], high[i]) of 16 bf16 each.
LINNET_INLINE vu32 interleave(vu16 low, vu16 high) {
  return __builtin_convertvector(low, vu32) | __builtin_convertvector(high, vu32) << 16;
}

template <int R, int N, class Epilogue>
[[gnu::noinline]] void pairs_tile(int pairs, Left<Pair> a, const Pair* b, int64_t ldb, float* c, int64_t ldc,
                                  const Epilogue& epilogue, int i, int j) {
  using X = Vec<float>;
  const int64_t row = a.row;
  const Pair* left = a.p + i * row;
  b += j;
  vf acc[R][N] = {};
  for (int k = 0; k < pairs; ++k, left += a.depth, b += ldb) {
    vu32 bv[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) bv[v] = load_pairs(b + v * X::W);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vu32 av = vu32{} + left[r * row].bits;
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) acc[r][v] = dot_pairs(acc[r][v], av, bv[v]);
    }
  }
  c += i * ldc + j;
  if constexpr (requires { epilogue.tile(acc, c, ldc, i, j); }) {
    epilogue.tile(acc, c, ldc, i, j);
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, c += ldc) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        vf old = X::zero();
        if constexpr (Epilogue::kReadsC) old = X::load(c + v * X::W);
        X::store(c + v * X::W, epilogue(acc[r][v], old, i + r, j + v * X::W));
      }
    }
  }
}

template <int R, class Epilogue>
LINNET_INLINE void pairs_band(int n, int pairs, Left<Pair> a, const Pair* b, int64_t ldb, float* c, int64_t ldc,
                              const Epilogue& epilogue, int begin, int end) {
  constexpr int W = Vec<float>::W;
  const int whole = (n + W - 1) / W * W;
  int j = 0;
  for (; j + 4 * W <= whole; j += 4 * W)
    for (int i = begin; i < end; i += R) pairs_tile<R, 4>(pairs, a, b, ldb, c, ldc, epilogue, i, j);
  if (j + 2 * W <= whole) {
    for (int i = begin; i < end; i += R) pairs_tile<R, 2>(pairs, a, b, ldb, c, ldc, epilogue, i, j);
    j += 2 * W;
  }
  if (j < whole)
    for (int i = begin; i < end; i += R) pairs_tile<R, 1>(pairs, a, b, ldb, c, ldc, epilogue, i, j);
}

// C[m, n] = epilogue(C, A B); a: as_is(array [m, pairs], stride) or transposed(array [pairs, m], stride); b: [pairs, n].
template <class Epilogue>
void gemm_pairs(int m, int n, int pairs, Left<Pair> a, const Pair* b, int64_t ldb, float* c, int64_t ldc,
                const Epilogue& epilogue) {
  const int full = m / 6 * 6;
  if (full > 0) pairs_band<6>(n, pairs, a, b, ldb, c, ldc, epilogue, 0, full);
  switch (m - full) {
    case 5: return pairs_band<5>(n, pairs, a, b, ldb, c, ldc, epilogue, full, m);
    case 4: return pairs_band<4>(n, pairs, a, b, ldb, c, ldc, epilogue, full, m);
    case 3: return pairs_band<3>(n, pairs, a, b, ldb, c, ldc, epilogue, full, m);
    case 2: return pairs_band<2>(n, pairs, a, b, ldb, c, ldc, epilogue, full, m);
    case 1: return pairs_band<1>(n, pairs, a, b, ldb, c, ldc, epilogue, full, m);
    default: return;
  }
}

}  // namespace linnet::LINNET_ISA
