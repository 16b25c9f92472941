// Elements of any type as float, and 16-bit packs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/view.h"
#include "ptx/approximate.cuh"

namespace linnet::ptx {

// Element i of an f32, bf16 or f16 array.
__device__ __forceinline__ float load(const void* data, Dtype dtype, int64_t i) {
  if (dtype == Dtype::f32) return static_cast<const float*>(data)[i];
  if (dtype == Dtype::bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
  return __half2float(static_cast<const __half*>(data)[i]);
}
// The same in two steps, so that several are on their way at once: what memory holds, and the number that it means.
__device__ __forceinline__ uint32_t ask(const void* data, Dtype dtype, int64_t i) {
  if (dtype == Dtype::f32) return static_cast<const uint32_t*>(data)[i];
  return static_cast<const uint16_t*>(data)[i];
}
__device__ __forceinline__ float take(uint32_t bits, Dtype dtype) {
  const float f16 = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  return dtype == Dtype::f16 ? f16 : __uint_as_float(dtype == Dtype::f32 ? bits : bits << 16);
}
__device__ __forceinline__ void store(void* data, Dtype dtype, int64_t i, float x) {
  if (dtype == Dtype::f32) {
    static_cast<float*>(data)[i] = x;
  } else if (dtype == Dtype::bf16) {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(x);
  } else {
    static_cast<__half*>(data)[i] = __float2half_rn(x);
  }
}

// The two numbers of pack.
template <bool bf16>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  if constexpr (bf16) return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};  // one instruction each
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

// The bits of x for a tf32 operand, rounded: the instruction cuts off the last 13 of them.
__device__ __forceinline__ uint32_t round_tf32(float x) { return __float_as_uint(x) + 0x1000; }

}  // namespace linnet::ptx
