// vec: the vectors of the instruction set this source is compiled for, for kernels (`*_cpu.cc`).
//
//   using X = Vec<float>;                                  // or Vec<double>
//   for (int j = 0; j < n; j += X::W) {
//     X::V v = X::load(x + j, n - j);                      // a tail (n - j < W) reads zeros behind the end
//     X::store(y + j, max(v, X::zero()), n - j);           // and writes nothing there
//   }
//
// vf and vd are GCC vector types: + - * / and comparisons of integers work as they stand. Functions here are what the language
// lacks, free functions over both types, generic code takes its types from Vec<T>:
//
//   Vec<T>::V, M, I, U, W    vector, mask, signed and unsigned integers of the same lanes, number of lanes
//   load, store              from and to T, and for T = float also Bf16 and F16; unaligned; with a count: the first n lanes
//   broadcast, zero, iota    iota: 0, 1, 2, ...
//   prefix(n)                mask of the lanes below n; any int n
//   fma max min abs minus_abs copysign round sqrt      elementwise
//   lt le gt ge eq is_nan select(m, a, b)    masks combine with & | ~
//   any(m) all(m)            of a mask
//   sum highest lowest       over the lanes, always in the same order
//   shuffle(v, i) shuffle(a, b, i)           lanes at the indices i
//   bits, from_bits, to_int, from_int        reinterpretation and conversion
//
// Tiles of memory (transposes, copies with conversion): tile.h. Elementary functions: math.h. Products: gemm.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/half.h"
#include "core/view.h"

#ifndef LINNET_ISA
#error "simd/vec.h is for sources compiled per instruction set (cmake/isa.cmake)"
#endif
#if defined(LINNET_ISA_avx2) || defined(LINNET_ISA_avx512)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace linnet::LINNET_ISA {

#if defined(LINNET_ISA_avx512)
inline constexpr int kVectorBytes = 64;
#elif defined(LINNET_ISA_avx2)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
inline constexpr int kLaneBytes = 16;  // shuffles that stay inside 16 bytes cost one cycle everywhere

typedef float vf __attribute__((vector_size(kVectorBytes)));
typedef double vd __attribute__((vector_size(kVectorBytes)));
typedef int32_t vi32 __attribute__((vector_size(kVectorBytes)));
typedef int64_t vi64 __attribute__((vector_size(kVectorBytes)));
typedef uint32_t vu32 __attribute__((vector_size(kVectorBytes)));
typedef uint64_t vu64 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t vu16 __attribute__((vector_size(kVectorBytes / 2)));  // as many 16-bit floats as vf has lanes

#if defined(LINNET_ISA_avx512)
typedef __mmask16 mf;
typedef __mmask8 md;
// g++ 12 warns of uninitialised values inside its own unmasked intrinsics; with a constant full mask it emits the same
// instruction.
inline constexpr mf kAll16 = 0xffff;
inline constexpr md kAll8 = 0xff;
#else
typedef vi32 mf;  // all ones or all zeros per lane
typedef vi64 md;
#endif

// ---- elementwise, over vf and vd ------------------------------------------------------------------------------------------

// One rounding where the instruction set has it (avx2, avx512); the portable build rounds twice.
LINNET_INLINE vf fma(vf a, vf b, vf c) {
#if defined(LINNET_ISA_avx512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(LINNET_ISA_avx2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
LINNET_INLINE vd fma(vd a, vd b, vd c) {
#if defined(LINNET_ISA_avx512)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(LINNET_ISA_avx2)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

// a > b ? a : b: a NaN on either side gives b, so max(limit, x) keeps a NaN of x.
LINNET_INLINE vf max(vf a, vf b) {
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_max_ps(kAll16, a, b);
#elif defined(LINNET_ISA_avx2)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
LINNET_INLINE vd max(vd a, vd b) {
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_max_pd(kAll8, a, b);
#elif defined(LINNET_ISA_avx2)
  return _mm256_max_pd(a, b);
#elif defined(__SSE2__)
  return _mm_max_pd(a, b);
#else
  return a > b ? a : b;
#endif
}
// a < b ? a : b: a NaN on either side gives b.
LINNET_INLINE vf min(vf a, vf b) {
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_min_ps(kAll16, a, b);
#elif defined(LINNET_ISA_avx2)
  return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
LINNET_INLINE vd min(vd a, vd b) {
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_min_pd(kAll8, a, b);
#elif defined(LINNET_ISA_avx2)
  return _mm256_min_pd(a, b);
#elif defined(__SSE2__)
  return _mm_min_pd(a, b);
#else
  return a < b ? a : b;
#endif
}

LINNET_INLINE vf sqrt(vf a) {
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_sqrt_ps(kAll16, a);
#elif defined(LINNET_ISA_avx2)
  return _mm256_sqrt_ps(a);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(a);
#else
  for (int i = 0; i < kVectorBytes / 4; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
#endif
}
LINNET_INLINE vd sqrt(vd a) {
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_sqrt_pd(kAll8, a);
#elif defined(LINNET_ISA_avx2)
  return _mm256_sqrt_pd(a);
#elif defined(__SSE2__)
  return _mm_sqrt_pd(a);
#else
  for (int i = 0; i < kVectorBytes / 8; ++i) a[i] = __builtin_sqrt(a[i]);
  return a;
#endif
}

LINNET_INLINE vu32 bits(vf a) { return reinterpret_cast<vu32>(a); }
LINNET_INLINE vu64 bits(vd a) { return reinterpret_cast<vu64>(a); }
LINNET_INLINE vf from_bits(vu32 a) { return reinterpret_cast<vf>(a); }
LINNET_INLINE vd from_bits(vu64 a) { return reinterpret_cast<vd>(a); }

LINNET_INLINE vf abs(vf a) { return from_bits(bits(a) & 0x7fffffffu); }
LINNET_INLINE vd abs(vd a) { return from_bits(bits(a) & 0x7fffffffffffffffull); }
LINNET_INLINE vf minus_abs(vf a) { return from_bits(bits(a) | 0x80000000u); }  // one instruction, -abs(a) two
LINNET_INLINE vd minus_abs(vd a) { return from_bits(bits(a) | 0x8000000000000000ull); }
LINNET_INLINE vf copysign(vf magnitude, vf sign) {
  return from_bits((bits(magnitude) & 0x7fffffffu) | (bits(sign) & 0x80000000u));
}
LINNET_INLINE vd copysign(vd magnitude, vd sign) {
  return from_bits((bits(magnitude) & 0x7fffffffffffffffull) | (bits(sign) & 0x8000000000000000ull));
}

// ---- masks ----------------------------------------------------------------------------------------------------------------

#if defined(LINNET_ISA_avx512)
LINNET_INLINE mf lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
LINNET_INLINE mf le(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
LINNET_INLINE mf eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
LINNET_INLINE mf is_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
LINNET_INLINE md lt(vd a, vd b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ); }
LINNET_INLINE md le(vd a, vd b) { return _mm512_cmp_pd_mask(a, b, _CMP_LE_OQ); }
LINNET_INLINE md eq(vd a, vd b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
LINNET_INLINE md is_nan(vd a) { return _mm512_cmp_pd_mask(a, a, _CMP_UNORD_Q); }
LINNET_INLINE vf select(mf m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
LINNET_INLINE vd select(md m, vd a, vd b) { return _mm512_mask_blend_pd(m, b, a); }
LINNET_INLINE bool any(mf m) { return m != 0; }
LINNET_INLINE bool any(md m) { return m != 0; }
LINNET_INLINE bool all(mf m) { return m == 0xffff; }
LINNET_INLINE bool all(md m) { return m == 0xff; }
#else
LINNET_INLINE mf lt(vf a, vf b) { return a < b; }
LINNET_INLINE mf le(vf a, vf b) { return a <= b; }
LINNET_INLINE mf eq(vf a, vf b) { return a == b; }
LINNET_INLINE mf is_nan(vf a) { return a != a; }
LINNET_INLINE md lt(vd a, vd b) { return a < b; }
LINNET_INLINE md le(vd a, vd b) { return a <= b; }
LINNET_INLINE md eq(vd a, vd b) { return a == b; }
LINNET_INLINE md is_nan(vd a) { return a != a; }
#if defined(LINNET_ISA_avx2)
LINNET_INLINE vf select(mf m, vf a, vf b) { return _mm256_blendv_ps(b, a, reinterpret_cast<vf>(m)); }
LINNET_INLINE vd select(md m, vd a, vd b) { return _mm256_blendv_pd(b, a, reinterpret_cast<vd>(m)); }
LINNET_INLINE bool any(mf m) { return _mm256_movemask_ps(reinterpret_cast<vf>(m)) != 0; }
LINNET_INLINE bool any(md m) { return _mm256_movemask_pd(reinterpret_cast<vd>(m)) != 0; }
LINNET_INLINE bool all(mf m) { return _mm256_movemask_ps(reinterpret_cast<vf>(m)) == 0xff; }
LINNET_INLINE bool all(md m) { return _mm256_movemask_pd(reinterpret_cast<vd>(m)) == 0xf; }
#else
LINNET_INLINE vf select(mf m, vf a, vf b) {
  const vu32 mask = reinterpret_cast<vu32>(m);
  return from_bits((mask & bits(a)) | (~mask & bits(b)));
}
LINNET_INLINE vd select(md m, vd a, vd b) {
  const vu64 mask = reinterpret_cast<vu64>(m);
  return from_bits((mask & bits(a)) | (~mask & bits(b)));
}
LINNET_INLINE bool any(mf m) {
  const vi64 halves = reinterpret_cast<vi64>(m);
  return (halves[0] | halves[1]) != 0;
}
LINNET_INLINE bool any(md m) { return (m[0] | m[1]) != 0; }
LINNET_INLINE bool all(mf m) {
  const vi64 halves = reinterpret_cast<vi64>(m);
  return (halves[0] & halves[1]) == -1;
}
LINNET_INLINE bool all(md m) { return (m[0] & m[1]) == -1; }
#endif
#endif
LINNET_INLINE mf gt(vf a, vf b) { return lt(b, a); }
LINNET_INLINE mf ge(vf a, vf b) { return le(b, a); }
LINNET_INLINE md gt(vd a, vd b) { return lt(b, a); }
LINNET_INLINE md ge(vd a, vd b) { return le(b, a); }

// ---- integers -------------------------------------------------------------------------------------------------------------

inline constexpr float kRoundMagic = 0x1.8p23f;    // x + magic - magic rounds |x| <= 2^22 to an integer, ties to even
inline constexpr double kRoundMagic64 = 0x1.8p52;  // |x| <= 2^51

// To the nearest integer, ties to even. |x| below 2^31 (vf), 2^51 (vd); anything else gives an unspecified integer.
LINNET_INLINE vi32 to_int(vf a) {
#if defined(LINNET_ISA_avx512)
  return reinterpret_cast<vi32>(_mm512_maskz_cvtps_epi32(kAll16, a));
#elif defined(LINNET_ISA_avx2)
  return reinterpret_cast<vi32>(_mm256_cvtps_epi32(a));
#elif defined(__SSE2__)
  return reinterpret_cast<vi32>(_mm_cvtps_epi32(a));
#else
  vi32 r;
  for (int i = 0; i < kVectorBytes / 4; ++i) r[i] = static_cast<int32_t>(__builtin_rintf(a[i]));
  return r;
#endif
}
LINNET_INLINE vi64 to_int(vd a) {
  const vd magic = vd{} + kRoundMagic64;
  return reinterpret_cast<vi64>(a + magic) - reinterpret_cast<vi64>(magic);
}
// Exact below 2^24 (vf); |a| < 2^51 (vd).
LINNET_INLINE vf from_int(vi32 a) { return __builtin_convertvector(a, vf); }
LINNET_INLINE vd from_int(vi64 a) {
  const vd magic = vd{} + kRoundMagic64;
  return reinterpret_cast<vd>(a + reinterpret_cast<vi64>(magic)) - magic;
}

// To the nearest integer, ties to even, as a float; any x; the sign of zero and NaN are kept.
LINNET_INLINE vf round(vf a) {
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_roundscale_ps(kAll16, a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(LINNET_ISA_avx2)
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf magic = vf{} + 0x1p23f, size = abs(a);
  return select(lt(size, magic), copysign(size + magic - magic, a), a);
#endif
}
LINNET_INLINE vd round(vd a) {
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_roundscale_pd(kAll8, a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(LINNET_ISA_avx2)
  return _mm256_round_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vd magic = vd{} + 0x1p52, size = abs(a);
  return select(lt(size, magic), copysign(size + magic - magic, a), a);
#endif
}

// ---- over the lanes -------------------------------------------------------------------------------------------------------

// Folds the upper half onto the lower until one lane is left: the same order every time. Among NaNs `highest` and `lowest` may
// return either operand.
struct FoldSum {
  template <class A>
  LINNET_INLINE A operator()(A a, A b) const {
    return a + b;
  }
};
struct FoldHighest {
  template <class A>
  LINNET_INLINE A operator()(A a, A b) const {
    return a > b ? a : b;
  }
};
struct FoldLowest {
  template <class A>
  LINNET_INLINE A operator()(A a, A b) const {
    return a < b ? a : b;
  }
};
template <class Op>
LINNET_INLINE float fold(vf v, Op op) {
  typedef float v4 __attribute__((vector_size(16)));
#if defined(LINNET_ISA_avx512)
  typedef float v8 __attribute__((vector_size(32)));
  const v8 h = op(v8(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7)),
                  v8(__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)));
#elif defined(LINNET_ISA_avx2)
  const vf h = v;
#endif
#if defined(LINNET_ISA_avx512) || defined(LINNET_ISA_avx2)
  const v4 q = op(v4(__builtin_shufflevector(h, h, 0, 1, 2, 3)), v4(__builtin_shufflevector(h, h, 4, 5, 6, 7)));
#else
  const v4 q = v;
#endif
  const v4 p = op(q, v4(__builtin_shufflevector(q, q, 2, 3, 2, 3)));
  return op(p, v4(__builtin_shufflevector(p, p, 1, 1, 1, 1)))[0];
}
template <class Op>
LINNET_INLINE double fold(vd v, Op op) {
  typedef double v2 __attribute__((vector_size(16)));
#if defined(LINNET_ISA_avx512)
  typedef double v4 __attribute__((vector_size(32)));
  const v4 h = op(v4(__builtin_shufflevector(v, v, 0, 1, 2, 3)), v4(__builtin_shufflevector(v, v, 4, 5, 6, 7)));
#elif defined(LINNET_ISA_avx2)
  const vd h = v;
#endif
#if defined(LINNET_ISA_avx512) || defined(LINNET_ISA_avx2)
  const v2 p = op(v2(__builtin_shufflevector(h, h, 0, 1)), v2(__builtin_shufflevector(h, h, 2, 3)));
#else
  const v2 p = v;
#endif
  return op(p, v2(__builtin_shufflevector(p, p, 1, 1)))[0];
}
template <class V>
LINNET_INLINE auto sum(V v) {
  return fold(v, FoldSum{});
}
template <class V>
LINNET_INLINE auto highest(V v) {
  return fold(v, FoldHighest{});
}
template <class V>
LINNET_INLINE auto lowest(V v) {
  return fold(v, FoldLowest{});
}

// ---- 16-bit floats --------------------------------------------------------------------------------------------------------

LINNET_INLINE vf to_vf(vu16 h, Bf16) { return from_bits(__builtin_convertvector(h, vu32) << 16); }

// Nearest, ties to even; a NaN stays one with its sign and upper payload bits.
LINNET_INLINE vu16 from_vf(vf a, Bf16) {
  const vu32 u = bits(a);
  const vu32 rounded = (u + (0x7fffu + ((u >> 16) & 1u))) >> 16, quiet = (u >> 16) | 0x40u;
  return __builtin_convertvector(bits(select(is_nan(a), from_bits(quiet), from_bits(rounded))), vu16);
}

// Exact, subnormals too (whatever FTZ and DAZ say); a NaN becomes quiet.
LINNET_INLINE vf to_vf(vu16 h, F16) {
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_cvtph_ps(kAll16, reinterpret_cast<__m256i>(h));
#elif defined(LINNET_ISA_avx2)
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(h));
#else
  const vu32 u = __builtin_convertvector(h, vu32), magnitude = (u & 0x7fffu) << 13;  // exponent field in place, bias still 15
  const vf normal = from_bits(magnitude + (112u << 23));                             // 112 = 127 - 15
  const vf subnormal = from_bits(magnitude + (113u << 23)) - 0x1p-14f;  // 2^-14 (1 + m/1024) - 2^-14, between normal floats
  const vi32 size = reinterpret_cast<vi32>(magnitude);                  // below 2^31, and SSE2 compares signed integers only
  const vu32 quiet = reinterpret_cast<vu32>(size > (0x1f << 23)) & 0x400000u;
  const vf special = from_bits(magnitude | (0xffu << 23) | quiet);
  vf r = select(size < (1 << 23), subnormal, normal);
  r = select(size >= (0x1f << 23), special, r);
  return from_bits(bits(r) | ((u & 0x8000u) << 16));
#endif
}

// Nearest, ties to even, subnormals too; above 65520 infinity; a NaN stays one with its sign and upper payload bits.
LINNET_INLINE vu16 from_vf(vf a, F16) {
#if defined(LINNET_ISA_avx512)
  return reinterpret_cast<vu16>(_mm512_maskz_cvtps_ph(kAll16, a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(LINNET_ISA_avx2)
  return reinterpret_cast<vu16>(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const vu32 u = bits(a) & 0x7fffffffu;
  const vi32 size = reinterpret_cast<vi32>(u);
  const vu32 normal = (u + (0xfffu + ((u >> 13) & 1u)) - (112u << 23)) >> 13;  // a carry runs into the exponent, up to infinity
  const vu32 subnormal = bits(from_bits(u) + 0.5f) - 0x3f000000u;              // the last place of 0.5f is 2^-24
  const vf special = select(is_nan(a), from_bits((u >> 13 & 0x3ffu) | 0x7e00u), from_bits(vu32{} + 0x7c00u));
  vf r = select(size < (113 << 23), from_bits(subnormal), from_bits(normal));
  r = select(size >= (143 << 23), special, r);  // 143 = 127 + 16: 65536 and above
  return __builtin_convertvector(bits(r) | ((bits(a) >> 16) & 0x8000u), vu16);
#endif
}

// ---- Vec<T>: lanes, memory ------------------------------------------------------------------------------------------------

template <class T>
struct Vec;

template <>
struct Vec<float> {
  using V = vf;
  using M = mf;
  using I = vi32;
  using U = vu32;
  static constexpr int W = kVectorBytes / 4;

  LINNET_INLINE static V zero() { return V{}; }
  LINNET_INLINE static V broadcast(float a) { return a - V{}; }  // not V{} + a: 0 + -0 is 0
  LINNET_INLINE static V iota() {
    V v;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) v[i] = static_cast<float>(i);
    return v;
  }
  LINNET_INLINE static M prefix(int n) {
#if defined(LINNET_ISA_avx512)
    return static_cast<M>((1u << (n < 0 ? 0 : n > W ? W : n)) - 1u);
#else
    vi32 index;
#pragma GCC unroll 8
    for (int i = 0; i < W; ++i) index[i] = i;
    return index < vi32{} + n;
#endif
  }

  LINNET_INLINE static V load(const float* p) {
    typedef vf unaligned __attribute__((aligned(4), may_alias));
    return *reinterpret_cast<const unaligned*>(p);
  }
  LINNET_INLINE static void store(float* p, V v) {
    typedef vf unaligned __attribute__((aligned(4), may_alias));
    *reinterpret_cast<unaligned*>(p) = v;
  }
  // The first n lanes; n <= 0 touches nothing, n >= W everything. Lanes that are not read are zero.
  LINNET_INLINE static V load(const float* p, int n) {
    if (n >= W) return load(p);
    if (n <= 0) return zero();
    return load_mask(p, prefix(n), n);
  }
  LINNET_INLINE static void store(float* p, V v, int n) {
    if (n >= W) return store(p, v);
    if (n > 0) store_mask(p, v, prefix(n), n);
  }
  // For loops that reuse the mask: m == prefix(n), 0 < n <= W.
  LINNET_INLINE static V load_mask(const float* p, M m, int n) {
#if defined(LINNET_ISA_avx512)
    (void)n;
    return _mm512_maskz_loadu_ps(m, p);
#elif defined(LINNET_ISA_avx2)
    (void)n;
    return _mm256_maskload_ps(p, reinterpret_cast<__m256i>(m));
#else
    (void)m;
    V v{};
    __builtin_memcpy(&v, p, sizeof(float) * static_cast<size_t>(n));
    return v;
#endif
  }
  LINNET_INLINE static void store_mask(float* p, V v, M m, int n) {
#if defined(LINNET_ISA_avx512)
    (void)n;
    _mm512_mask_storeu_ps(p, m, v);
#elif defined(LINNET_ISA_avx2)
    (void)n;
    _mm256_maskstore_ps(p, reinterpret_cast<__m256i>(m), v);
#else
    (void)m;
    __builtin_memcpy(p, &v, sizeof(float) * static_cast<size_t>(n));
#endif
  }

  // 16-bit floats: H is Bf16 or F16.
  template <class H>
  LINNET_INLINE static V load(const H* p) {
    static_assert(sizeof(H) == 2);
    vu16 h;
    __builtin_memcpy(&h, p, sizeof h);
    return to_vf(h, H{});
  }
  template <class H>
  LINNET_INLINE static void store(H* p, V v) {
    static_assert(sizeof(H) == 2);
    const vu16 h = from_vf(v, H{});
    __builtin_memcpy(p, &h, sizeof h);
  }
  template <class H>
  LINNET_INLINE static V load(const H* p, int n) {
    if (n >= W) return load(p);
    if (n <= 0) return zero();
#if defined(LINNET_ISA_avx512)
    const vu16 h = reinterpret_cast<vu16>(_mm256_maskz_loadu_epi16(prefix(n), p));
#else
    vu16 h{};
    __builtin_memcpy(&h, p, sizeof(H) * static_cast<size_t>(n));
#endif
    return to_vf(h, H{});
  }
  template <class H>
  LINNET_INLINE static void store(H* p, V v, int n) {
    if (n >= W) return store(p, v);
    if (n <= 0) return;
    const vu16 h = from_vf(v, H{});
#if defined(LINNET_ISA_avx512)
    _mm256_mask_storeu_epi16(p, prefix(n), reinterpret_cast<__m256i>(h));
#else
    __builtin_memcpy(p, &h, sizeof(H) * static_cast<size_t>(n));
#endif
  }
};

template <>
struct Vec<double> {
  using V = vd;
  using M = md;
  using I = vi64;
  using U = vu64;
  static constexpr int W = kVectorBytes / 8;

  LINNET_INLINE static V zero() { return V{}; }
  LINNET_INLINE static V broadcast(double a) { return a - V{}; }
  LINNET_INLINE static V iota() {
    V v;
#pragma GCC unroll 8
    for (int i = 0; i < W; ++i) v[i] = static_cast<double>(i);
    return v;
  }
  LINNET_INLINE static M prefix(int n) {
#if defined(LINNET_ISA_avx512)
    return static_cast<M>((1u << (n < 0 ? 0 : n > W ? W : n)) - 1u);
#else
    vi64 index;
#pragma GCC unroll 4
    for (int i = 0; i < W; ++i) index[i] = i;
    return index < vi64{} + static_cast<int64_t>(n);
#endif
  }

  LINNET_INLINE static V load(const double* p) {
    typedef vd unaligned __attribute__((aligned(8), may_alias));
    return *reinterpret_cast<const unaligned*>(p);
  }
  LINNET_INLINE static void store(double* p, V v) {
    typedef vd unaligned __attribute__((aligned(8), may_alias));
    *reinterpret_cast<unaligned*>(p) = v;
  }
  LINNET_INLINE static V load(const double* p, int n) {
    if (n >= W) return load(p);
    if (n <= 0) return zero();
    return load_mask(p, prefix(n), n);
  }
  LINNET_INLINE static void store(double* p, V v, int n) {
    if (n >= W) return store(p, v);
    if (n > 0) store_mask(p, v, prefix(n), n);
  }
  LINNET_INLINE static V load_mask(const double* p, M m, int n) {
#if defined(LINNET_ISA_avx512)
    (void)n;
    return _mm512_maskz_loadu_pd(m, p);
#elif defined(LINNET_ISA_avx2)
    (void)n;
    return _mm256_maskload_pd(p, reinterpret_cast<__m256i>(m));
#else
    (void)m;
    V v{};
    __builtin_memcpy(&v, p, sizeof(double) * static_cast<size_t>(n));
    return v;
#endif
  }
  LINNET_INLINE static void store_mask(double* p, V v, M m, int n) {
#if defined(LINNET_ISA_avx512)
    (void)n;
    _mm512_mask_storeu_pd(p, m, v);
#elif defined(LINNET_ISA_avx2)
    (void)n;
    _mm256_maskstore_pd(p, reinterpret_cast<__m256i>(m), v);
#else
    (void)m;
    __builtin_memcpy(p, &v, sizeof(double) * static_cast<size_t>(n));
#endif
  }
};

// Lane l is v[index[l]]; of two vectors b's lanes follow a's. Indices known to the compiler cost one instruction. clang takes
// indices as template arguments only: what it reads here is right, but slow.
template <class V, class I>
LINNET_INLINE V shuffle(V a, V b, I index) {
#if defined(__clang__)
  constexpr int lanes = sizeof(V) / sizeof(a[0]);
  V r{};
  for (int l = 0; l < lanes; ++l) r[l] = index[l] < lanes ? a[index[l]] : b[index[l] - lanes];
  return r;
#else
  return __builtin_shuffle(a, b, index);
#endif
}
template <class V, class I>
LINNET_INLINE V shuffle(V v, I index) {
#if defined(__clang__)
  return shuffle(v, v, index);
#else
  return __builtin_shuffle(v, index);
#endif
}

// Lengths of padded scratch: the next multiple of the lanes.
template <class T>
LINNET_INLINE constexpr int64_t round_up(int64_t n) {
  return (n + Vec<T>::W - 1) / Vec<T>::W * Vec<T>::W;
}

}  // namespace linnet::LINNET_ISA
