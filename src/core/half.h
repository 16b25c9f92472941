// half: the 16-bit floats, one element at a time, exact and without hardware support.
//
//   Bf16 b = round_to<Bf16>(0.1);                 // nearest, ties to even, straight from double
//   double x = to_f64(b);                         // exact: every bf16 and f16 is a float and a double
//   double y = load_f64(view.data, view.dtype, 3) // element 3 of any dtype
//
// For the references, the checks and the files; kernels use src/simd. Rounding goes from double to 16 bits in one step: going
// through float rounds twice, and 1 + 2^-8 + 2^-40 would become the bf16 1 instead of 1 + 2^-7.
// Sources of several instruction sets may include this header (see view.h): functions are always inlined.
#pragma once

#include <cstdint>

#include "core/view.h"

namespace linnet {

struct Bf16 {  // 1 sign, 8 exponent, 7 mantissa bits: the upper half of a float
  uint16_t bits;
};
struct F16 {  // 1 sign, 5 exponent, 10 mantissa bits; largest 65504, smallest normal 2^-14, smallest 2^-24
  uint16_t bits;
};

// The 16-bit pattern nearest to x, ties to even; overflow gives infinity; a NaN stays a (quiet) NaN with its sign and the upper
// bits of its payload, as the hardware conversions do.
template <int kMantissaBits>
LINNET_INLINE constexpr uint16_t round_to_bits16(double x) {
  constexpr int kBias = (1 << (14 - kMantissaBits)) - 1;  // 15 - kMantissaBits exponent bits
  constexpr uint32_t kInfinity = 0x7fffu >> kMantissaBits << kMantissaBits;
  const uint64_t pattern = __builtin_bit_cast(uint64_t, x);
  const uint32_t sign = static_cast<uint32_t>(pattern >> 48) & 0x8000u;
  const uint64_t fraction = pattern & 0xfffffffffffffull;
  const int biased = static_cast<int>(pattern >> 52 & 0x7ff);
  if (biased == 0x7ff && fraction != 0) {
    const uint32_t payload = static_cast<uint32_t>(fraction >> (52 - kMantissaBits));
    return static_cast<uint16_t>(sign | kInfinity | 1u << (kMantissaBits - 1) | payload);
  }
  const int exponent = biased - 1023;
  if (exponent > kBias) return static_cast<uint16_t>(sign | kInfinity);
  // Units of the result's last place: below its smallest normal exponent 1 - kBias the place stays where it is.
  const bool subnormal = exponent < 1 - kBias;
  const int shift = 52 - kMantissaBits + (subnormal ? 1 - kBias - exponent : 0);
  if (shift > 53) return static_cast<uint16_t>(sign);  // below half of the smallest subnormal; so is every subnormal double
  const uint64_t significand = fraction | 1ull << 52;
  const uint64_t rest = significand & ((1ull << shift) - 1), half = 1ull << (shift - 1);
  uint64_t rounded = significand >> shift;
  rounded += rest > half || (rest == half && (rounded & 1));
  // The implicit bit in `rounded` adds one to the exponent field, and so does a carry out of the mantissa, up to infinity.
  if (!subnormal) rounded += static_cast<uint64_t>(exponent + kBias - 1) << kMantissaBits;
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(rounded));
}

LINNET_INLINE constexpr float to_f32(Bf16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }
LINNET_INLINE constexpr float to_f32(F16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 0x1fu, mantissa = x.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa x 2^-24, a normal float
    const uint32_t magnitude = __builtin_bit_cast(uint32_t, static_cast<float>(mantissa) * 0x1p-24f);
    return __builtin_bit_cast(float, sign | magnitude);
  }
  if (exponent == 0x1f) {  // infinity or NaN, made quiet as the hardware does
    return __builtin_bit_cast(float, sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0u));
  }
  return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | mantissa << 13);  // 112 = 127 - 15
}
LINNET_INLINE constexpr float to_f32(float x) { return x; }

LINNET_INLINE constexpr double to_f64(Bf16 x) { return to_f32(x); }
LINNET_INLINE constexpr double to_f64(F16 x) { return to_f32(x); }
LINNET_INLINE constexpr double to_f64(float x) { return x; }
LINNET_INLINE constexpr double to_f64(double x) { return x; }

// round_to<T>(x): x in the storage type T (Bf16, F16, float, double), rounded once. A float argument converts exactly.
template <class T>
LINNET_INLINE constexpr T round_to(double x) {
  return static_cast<T>(x);
}
template <>
LINNET_INLINE constexpr Bf16 round_to<Bf16>(double x) {
  return {round_to_bits16<7>(x)};
}
template <>
LINNET_INLINE constexpr F16 round_to<F16>(double x) {
  return {round_to_bits16<10>(x)};
}

// Element `index` of an array of dtype, as double: exact except for i64 beyond 2^53. The array must be aligned to its element.
LINNET_INLINE double load_f64(const void* data, Dtype dtype, int64_t index) {
  switch (dtype) {
    case Dtype::f64: return static_cast<const double*>(data)[index];
    case Dtype::f32: return static_cast<const float*>(data)[index];
    case Dtype::bf16: return to_f64(static_cast<const Bf16*>(data)[index]);
    case Dtype::f16: return to_f64(static_cast<const F16*>(data)[index]);
    case Dtype::i64: return static_cast<double>(static_cast<const int64_t*>(data)[index]);
    case Dtype::i32: return static_cast<const int32_t*>(data)[index];
    case Dtype::u8: return static_cast<const uint8_t*>(data)[index];
    case Dtype::none: break;
  }
  return 0;
}

// Stores x, rounded once, as element `index` of an array of one of the four float dtypes; arrays of integers are left alone.
LINNET_INLINE void store_f64(void* data, Dtype dtype, int64_t index, double x) {
  switch (dtype) {
    case Dtype::f64: static_cast<double*>(data)[index] = x; break;
    case Dtype::f32: static_cast<float*>(data)[index] = round_to<float>(x); break;
    case Dtype::bf16: static_cast<Bf16*>(data)[index] = round_to<Bf16>(x); break;
    case Dtype::f16: static_cast<F16*>(data)[index] = round_to<F16>(x); break;
    default: break;
  }
}

}  // namespace linnet
