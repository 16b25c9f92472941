// gemm_bf16: the small matrix product with bf16 operands and float sums, two terms per lane and instruction (AVX512_BF16,
// vdpbf16ps): twice the multiply-adds of gemm.h per cycle.
//
//   pack_pairs_transposed(q, stride, 64, 64, qt, 64);                        // Q^T: [32 pairs, 64 queries]
//   gemm_pairs(64, 64, 32, as_is(k, ldk), qt, 64, scores, 64, Store{});      // depth 64 = 32 pairs
//
// Operands are arrays of Pair: two neighbours along the depth, the even one in the low half. C[M, N] = epilogue(C, A B) with
// A [M, pairs] read by broadcast with two strides (so the transpose of an array [pairs, M] costs nothing), B [pairs, N] with
// the lanes along N, C float. Rows of B and C are padded to whole vectors (kPadded of gemm.h); an odd depth is padded with a
// zero. Epilogues and bounds are those of gemm.h; depth bounds count terms and are rounded outwards to pairs.
//
// One accumulator per element, pairs ascending, as in gemm.h. The instruction rounds to nearest even whatever MXCSR says, adds
// the odd term first, and flushes subnormals.
//
// For sources that are compiled for it by
//   #pragma GCC target("avx512bf16")
// in a namespace of its own (LINNET_ISA avx512_bf16), chosen at run time (simd_has_bf16_products() of simd.h).
#pragma once

#include "simd/gemm.h"
#include "simd/tile.h"

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
  vu32 index;  // 16-bit lanes 0, 16, 1, 17, ...: cvtne2 leaves the 16 of low first
#pragma GCC unroll 16
  for (uint32_t i = 0; i < 16; ++i) index[i] = i | (i + 16) << 16;
  const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  return reinterpret_cast<vu32>(_mm512_maskz_permutexvar_epi16(~0u, reinterpret_cast<__m512i>(index), both));
}
LINNET_INLINE vf low_halves(vu32 pairs) { return from_bits(pairs << 16); }
LINNET_INLINE vf high_halves(vu32 pairs) { return from_bits(pairs & 0xffff0000u); }
// Lane i: (low[i], high[i]) of 16 bf16 each.
LINNET_INLINE vu32 interleave(vu16 low, vu16 high) {
  return __builtin_convertvector(low, vu32) | __builtin_convertvector(high, vu32) << 16;
}

// ---- the product ----------------------------------------------------------------------------------------------------------

template <class EpilogueType, class BoundsType>
struct PairProduct {
  using Element = float;
  using Epilogue = EpilogueType;
  using Bounds = BoundsType;
  int m, n, k;  // k counts terms
  Left<Pair> a;
  const Pair* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  const Epilogue& epilogue;
  const Bounds& bounds;
};

template <int R, int N, bool kMasked, class Epilogue, class Bounds>
[[gnu::noinline]] void gemm_tile(const PairProduct<Epilogue, Bounds>& p, int i, int j) {
  using X = Vec<float>;
  static_assert(!kMasked);
  const Range range = depth_of_tile<R, N>(p, i, j);
  const int begin = range.begin / 2, end = (range.end + 1) / 2;
  const int64_t row = p.a.row, depth = p.a.depth, ldb = p.ldb;
  const Pair* a = p.a.p + i * row + begin * depth;
  const Pair* b = p.b + j + begin * ldb;
  vf acc[R][N] = {};
  for (int k = begin; k < end; ++k, a += depth, b += ldb) {
    vu32 bv[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) bv[v] = load_pairs(b + v * X::W);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vu32 av = vu32{} + a[r * row].bits;
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) acc[r][v] = dot_pairs(acc[r][v], av, bv[v]);
    }
  }
  finish_tile<false>(p, acc, i, j);
}

// C[m, n] = epilogue(C, A B); a: as_is(array [m, pairs], stride) or transposed(array [pairs, m], stride); b: [pairs, n].
template <class Epilogue, class Bounds = Full>
void gemm_pairs(int m, int n, int pairs, Left<Pair> a, const Pair* b, int64_t ldb, float* c, int64_t ldc,
                const Epilogue& epilogue, const Bounds& bounds = Bounds{}) {
  gemm_bands<kPadded>(PairProduct<Epilogue, Bounds>{m, n, 2 * pairs, a, b, ldb, c, ldc, epilogue, bounds});
}

// ---- packing: rows of float or bf16 to pairs --------------------------------------------------------------------------------

// dst[r / 2 * ld + c] = (src[r, c], src[r + 1, c]), rounded; B, or A^T. src: scratch, read up to the next multiple of the
// lanes.
inline void pack_pairs(const float* src, int64_t stride, int rows, int cols, Pair* dst, int64_t ld) {
  using X = Vec<float>;
  for (int r = 0; r < rows; r += 2, src += 2 * stride, dst += ld) {
    const bool odd = r + 1 == rows;
    for (int c = 0; c < cols; c += X::W)
      store_pairs(dst + c, make_pairs(X::load(src + c), odd ? X::zero() : X::load(src + stride + c)));
  }
}

// The same from the caller's bf16: nothing behind column cols is read, and zeros stand there in dst.
inline void pack_pairs(const Bf16* src, int64_t stride, int rows, int cols, Pair* dst, int64_t ld) {
  constexpr int W = Vec<float>::W;
  const auto load = [](const Bf16* p, int n) {
    return reinterpret_cast<vu16>(_mm256_maskz_loadu_epi16(Vec<float>::prefix(n), p));
  };
  for (int r = 0; r < rows; r += 2, src += 2 * stride, dst += ld) {
    const bool odd = r + 1 == rows;
    for (int c = 0; c < cols; c += W)
      store_pairs(dst + c, interleave(load(src + c, cols - c), odd ? vu16{} : load(src + stride + c, cols - c)));
  }
}

// dst[c / 2 * ld + r] = (src[r, c], src[r, c + 1]); B = src^T. src: the caller's bf16; lanes behind the rows become zero.
inline void pack_pairs_transposed(const Bf16* src, int64_t stride, int rows, int cols, Pair* dst, int64_t ld) {
  constexpr int W = Vec<float>::W, E = 4;  // blocks of 16 rows x 4 pairs, as in load_tile_transposed
  for (int r = 0; r < rows; r += W) {
    const int n = rows - r < W ? rows - r : W;
    for (int c = 0; c < cols; c += 2 * E) {
      const Bf16* block = src + r * stride + c;
      int64_t step = stride;
      Bf16 edge[W * 2 * E];
      if (n < W || c + 2 * E > cols) {
        __builtin_memset(edge, 0, sizeof edge);
        for (int i = 0; i < n; ++i)
          for (int j = 0; j < 2 * E && c + j < cols; ++j) edge[i * 2 * E + j] = block[i * stride + j];
        block = edge;
        step = 2 * E;
      }
      vf v[E];
#pragma GCC unroll 4
      for (int q = 0; q < E; ++q) v[q] = gather_pieces<float>(block + q * step, E * step * 2);
      transpose_pieces(v);
#pragma GCC unroll 4
      for (int j = 0; j < E; ++j)
        if (c + 2 * j < cols) store_pairs(dst + (c / 2 + j) * ld + r, bits(v[j]));
    }
  }
}

// dst[r * ld + c / 2] = (src[r, c], src[r, c + 1]), rounded: A as it lies. src: the caller's or scratch.
inline void round_pairs(const float* src, int64_t stride, int rows, int cols, Pair* dst, int64_t ld) {
  for (int r = 0; r < rows; ++r, src += stride, dst += ld) {
    for (int c = 0; c < cols; c += 16) {
      const int n = cols - c < 16 ? cols - c : 16;
      const __m256i h = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(Vec<float>::load(src + c, n)));
      _mm256_mask_storeu_epi32(dst + c / 2, Vec<double>::prefix((n + 1) / 2), h);
    }
  }
}

}  // namespace linnet::LINNET_ISA
