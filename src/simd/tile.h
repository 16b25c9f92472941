// tile: between the caller's memory (any float type, strided rows) and dense scratch (T = float or double), with conversion.
//
//   load_tile<float>(k, stride, 64, 80, scratch, 80, 1.0f);               // scratch[r * 80 + c] = k[r * stride + c]
//   load_tile_transposed<float>(q, stride, 50, 64, qt, 64, scale);        // qt[c * 64 + r] = q[r * stride + c] * scale
//   store_tile_transposed<float>(ot, 64, 50, 64, o, stride, factor);      // o[r * stride + c] = ot[c * 64 + r] * factor[r]
//
// Memory of S (Bf16, F16, float; for T = double: double) is touched exactly; scratch rows are padded: loads fill them with
// zeros up to the next multiple of the lanes, so ld >= round_up<T>(length of a scratch row). 16-bit types convert here, once
// per tile: everything after the copy is float. A row stride that is a large power of two makes the rows collide in L1; copying
// also cures that.
#pragma once

#include "simd/vec.h"

namespace linnet::LINNET_ISA {

inline constexpr int kPieces = kVectorBytes / kLaneBytes;  // 16-byte pieces in a vector; E = 16 / sizeof(T) elements each

// ---- rows as they lie -----------------------------------------------------------------------------------------------------

// dst[r * ld + c] = src[r * stride + c] * scale
template <class T, class S>
void load_tile(const S* src, int64_t stride, int rows, int cols, T* dst, int64_t ld, T scale = 1) {
  using X = Vec<T>;
  const typename X::V factor = X::broadcast(scale);
  for (int r = 0; r < rows; ++r, src += stride, dst += ld) {
    int c = 0;
    for (; c + X::W <= cols; c += X::W) X::store(dst + c, X::load(src + c) * factor);
    if (c < cols) X::store(dst + c, X::load(src + c, cols - c) * factor);
  }
}

// dst[r * stride + c] = src[r * ld + c] * scale[r]; scale may be null.
template <class T, class S>
void store_tile(const T* src, int64_t ld, int rows, int cols, S* dst, int64_t stride, const T* scale = nullptr) {
  using X = Vec<T>;
  for (int r = 0; r < rows; ++r, src += ld, dst += stride) {
    const typename X::V factor = X::broadcast(scale ? scale[r] : T(1));
    int c = 0;
    for (; c + X::W <= cols; c += X::W) X::store(dst + c, X::load(src + c) * factor);
    if (c < cols) X::store(dst + c, X::load(src + c) * factor, cols - c);
  }
}

// ---- transposed -----------------------------------------------------------------------------------------------------------
//
// A block is W rows x E columns: E vectors, whose 16-byte piece l comes from row l * E + q. After the transpose inside the
// pieces vector j holds column j of all W rows in order. Two shuffles per vector (one for double), no shuffle across pieces.

template <class S, int N>
struct Piece {  // N elements of S as they lie in memory
  typedef S V __attribute__((vector_size(sizeof(S) * N)));
};
LINNET_INLINE auto concatenate(Piece<float, 4>::V a, Piece<float, 4>::V b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
}
LINNET_INLINE auto concatenate(Piece<double, 2>::V a, Piece<double, 2>::V b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3);
}
LINNET_INLINE auto concatenate(Piece<double, 4>::V a, Piece<double, 4>::V b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
}
LINNET_INLINE auto concatenate(Piece<float, 8>::V a, Piece<float, 8>::V b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
// 8-byte pieces of 16-bit floats travel as doubles.
LINNET_INLINE auto concatenate(double a, double b) { return Piece<double, 2>::V{a, b}; }

// kPieces pieces of 16 bytes, `step` bytes apart, as they lie.
template <class T>
LINNET_INLINE typename Vec<T>::V gather_pieces(const void* p, int64_t step) {
  typename Piece<T, kLaneBytes / sizeof(T)>::V piece[kPieces];
#pragma GCC unroll 4
  for (int l = 0; l < kPieces; ++l) __builtin_memcpy(&piece[l], static_cast<const char*>(p) + l * step, kLaneBytes);
  if constexpr (kPieces == 4) {
    return concatenate(concatenate(piece[0], piece[1]), concatenate(piece[2], piece[3]));
  } else if constexpr (kPieces == 2) {
    return concatenate(piece[0], piece[1]);
  } else {
    return piece[0];
  }
}

// kPieces pieces of E elements, `step` elements apart, converted to T.
template <class T, class S>
LINNET_INLINE typename Vec<T>::V load_pieces(const S* p, int64_t step) {
  if constexpr (sizeof(S) == 2) {
    double piece[kPieces];
#pragma GCC unroll 4
    for (int l = 0; l < kPieces; ++l) __builtin_memcpy(&piece[l], p + l * step, 8);
    vu16 h;
    if constexpr (kPieces == 4) {
      const auto all = concatenate(concatenate(piece[0], piece[1]), concatenate(piece[2], piece[3]));
      __builtin_memcpy(&h, &all, sizeof all);  // not reinterpret_cast: clang compares the sizes in branches not taken, too
    } else if constexpr (kPieces == 2) {
      const auto both = concatenate(piece[0], piece[1]);
      __builtin_memcpy(&h, &both, sizeof both);
    } else {
      __builtin_memcpy(&h, &piece[0], 8);
    }
    return to_vf(h, S{});
  } else {
    static_assert(sizeof(S) == sizeof(T));
    return gather_pieces<T>(p, step * static_cast<int64_t>(sizeof(S)));
  }
}

template <class T, class S>
LINNET_INLINE void store_pieces(S* p, int64_t step, typename Vec<T>::V v) {
  constexpr int bytes = kLaneBytes * sizeof(S) / sizeof(T);
  char all[bytes * kPieces];
  if constexpr (sizeof(S) == 2) {
    const vu16 h = from_vf(v, S{});
    __builtin_memcpy(all, &h, sizeof all);
  } else {
    __builtin_memcpy(all, &v, sizeof all);
  }
#pragma GCC unroll 4
  for (int l = 0; l < kPieces; ++l) __builtin_memcpy(p + l * step, all + l * bytes, bytes);
}

#if defined(LINNET_ISA_avx512)
LINNET_INLINE vf unpack_low(vf a, vf b) { return _mm512_maskz_unpacklo_ps(kAll16, a, b); }
LINNET_INLINE vf unpack_high(vf a, vf b) { return _mm512_maskz_unpackhi_ps(kAll16, a, b); }
LINNET_INLINE vd unpack_low(vd a, vd b) { return _mm512_maskz_unpacklo_pd(kAll8, a, b); }
LINNET_INLINE vd unpack_high(vd a, vd b) { return _mm512_maskz_unpackhi_pd(kAll8, a, b); }
#elif defined(LINNET_ISA_avx2)
LINNET_INLINE vf unpack_low(vf a, vf b) { return _mm256_unpacklo_ps(a, b); }
LINNET_INLINE vf unpack_high(vf a, vf b) { return _mm256_unpackhi_ps(a, b); }
LINNET_INLINE vd unpack_low(vd a, vd b) { return _mm256_unpacklo_pd(a, b); }
LINNET_INLINE vd unpack_high(vd a, vd b) { return _mm256_unpackhi_pd(a, b); }
#else
LINNET_INLINE vf unpack_low(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
LINNET_INLINE vf unpack_high(vf a, vf b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
LINNET_INLINE vd unpack_low(vd a, vd b) { return __builtin_shufflevector(a, b, 0, 2); }
LINNET_INLINE vd unpack_high(vd a, vd b) { return __builtin_shufflevector(a, b, 1, 3); }
#endif

// Transposes inside every 16-byte piece.
LINNET_INLINE void transpose_pieces(vf (&v)[4]) {
  const vd a = reinterpret_cast<vd>(unpack_low(v[0], v[1])), b = reinterpret_cast<vd>(unpack_high(v[0], v[1]));
  const vd c = reinterpret_cast<vd>(unpack_low(v[2], v[3])), d = reinterpret_cast<vd>(unpack_high(v[2], v[3]));
  v[0] = reinterpret_cast<vf>(unpack_low(a, c));
  v[1] = reinterpret_cast<vf>(unpack_high(a, c));
  v[2] = reinterpret_cast<vf>(unpack_low(b, d));
  v[3] = reinterpret_cast<vf>(unpack_high(b, d));
}
LINNET_INLINE void transpose_pieces(vd (&v)[2]) {
  const vd a = v[0], b = v[1];
  v[0] = unpack_low(a, b);
  v[1] = unpack_high(a, b);
}

// dst[c * ld + r] = src[r * stride + c] * scale; dst [cols, ld], lanes r >= rows up to round_up<T>(rows) become zero.
template <class T, class S>
void load_tile_transposed(const S* src, int64_t stride, int rows, int cols, T* dst, int64_t ld, T scale = 1) {
  using X = Vec<T>;
  using V = typename X::V;
  constexpr int W = X::W, E = kLaneBytes / sizeof(T);
  const V factor = X::broadcast(scale);
  for (int r = 0; r < rows; r += W) {
    const int n = rows - r < W ? rows - r : W;
    for (int c = 0; c < cols; c += E) {
      const int m = cols - c < E ? cols - c : E;
      const S* block = src + r * stride + c;
      int64_t step = stride;
      S edge[W * E];
      if (n < W || m < E) {  // stage cut blocks, zeros around them
        __builtin_memset(edge, 0, sizeof edge);
        for (int i = 0; i < n; ++i)
          for (int j = 0; j < m; ++j) edge[i * E + j] = block[i * stride + j];
        block = edge;
        step = E;
      }
      V v[E];
#pragma GCC unroll 4
      for (int q = 0; q < E; ++q) v[q] = load_pieces<T>(block + q * step, E * step);
      transpose_pieces(v);
#pragma GCC unroll 4
      for (int j = 0; j < E; ++j)
        if (j < m) X::store(dst + (c + j) * ld + r, v[j] * factor);
    }
  }
}

// dst[r * stride + c] = src[c * ld + r] * scale[r]; src [cols, ld]; scale (padded, or null) lies along src's lanes.
template <class T, class S>
void store_tile_transposed(const T* src, int64_t ld, int rows, int cols, S* dst, int64_t stride, const T* scale = nullptr) {
  using X = Vec<T>;
  using V = typename X::V;
  constexpr int W = X::W, E = kLaneBytes / sizeof(T);
  for (int r = 0; r < rows; r += W) {
    const int n = rows - r < W ? rows - r : W;
    const V factor = scale ? X::load(scale + r) : X::broadcast(1);
    for (int c = 0; c < cols; c += E) {
      const int m = cols - c < E ? cols - c : E;
      V v[E];
#pragma GCC unroll 4
      for (int j = 0; j < E; ++j) v[j] = j < m ? X::load(src + (c + j) * ld + r) * factor : X::zero();
      transpose_pieces(v);
      S* block = dst + r * stride + c;
      S edge[W * E];
      const bool cut = n < W || m < E;
      S* out = cut ? edge : block;
      const int64_t step = cut ? E : stride;
#pragma GCC unroll 4
      for (int q = 0; q < E; ++q) store_pieces<T>(out + q * step, E * step, v[q]);
      if (cut) {
        for (int i = 0; i < n; ++i)
          for (int j = 0; j < m; ++j) block[i * stride + j] = edge[i * E + j];
      }
    }
  }
}

// ---- the types of a call -------------------------------------------------------------------------------------------------

// Calls body<T, E>() for the element type.
template <class Body>
LINNET_INLINE auto by_dtype(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::f64: return body.template operator()<double, double>();
    case Dtype::bf16: return body.template operator()<float, Bf16>();
    case Dtype::f16: return body.template operator()<float, F16>();
    default: return body.template operator()<float, float>();
  }
}

}  // namespace linnet::LINNET_ISA
