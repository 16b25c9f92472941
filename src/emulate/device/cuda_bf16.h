// bf16 for kernels on the emulated GPU.
#pragma once

#include "core/half.h"

struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) : bits(linnet::round_to_bits16<7>(static_cast<double>(x))) {}
  operator float() const { return linnet::to_f32(linnet::Bf16{bits}); }
};
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
