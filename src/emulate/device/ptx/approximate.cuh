// src/ptx/approximate.cuh on the emulated GPU: rounded results in place of approximate ones; subnormal numbers are 0 as there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace linnet::ptx {

template <bool bf16>
uint32_t pack(float low, float high) {
  constexpr int kMantissa = bf16 ? 7 : 10;
  return round_to_bits16<kMantissa>(static_cast<double>(low)) |
         static_cast<uint32_t>(round_to_bits16<kMantissa>(static_cast<double>(high))) << 16;
}

inline float least(float x, float y) {
  if (x != x || y != y) return __builtin_nanf("");
  return x < y ? x : y;
}

inline float greatest(float x, float y) {
  if (x != x || y != y) return __builtin_nanf("");
  return x < y ? y : x;
}

inline float flush(float x) { return x > -0x1p-126f && x < 0x1p-126f ? 0 * x : x; }
inline float exp2_fast(float x) { return flush(exp2f(flush(x))); }
inline float log2_fast(float x) { return log2f(flush(x)); }
inline float reciprocal_fast(float x) { return flush(1 / flush(x)); }
inline float root_reciprocal_fast(float x) { return flush(rsqrtf(flush(x))); }

}  // namespace linnet::ptx
