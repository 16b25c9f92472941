// f16 for kernels on the emulated GPU.
#pragma once

#include "core/half.h"

struct __half {
  unsigned short bits;
  __half() = default;
  explicit __half(float x) : bits(linnet::round_to_bits16<10>(static_cast<double>(x))) {}
  operator float() const { return linnet::to_f32(linnet::F16{bits}); }
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half __float2half(float x) { return __float2half_rn(x); }
inline __half __ushort_as_half(unsigned short bits) { return __builtin_bit_cast(__half, bits); }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
