// Rows for kernels that memory alone bounds: 16 bytes of any type as floats, and sums over the threads that share a row.
#pragma once

#include "ptx/copy.cuh"
#include "ptx/numbers.cuh"
#include "ptx/sync.cuh"

namespace linnet::ptx {

// 16 bytes of T: 4 f32, 8 bf16 or 8 f16.
template <class T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <class T>
__device__ __forceinline__ void to_floats(const uint4& raw, float (&x)[kVector<T>]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const float2 two = unpack<std::is_same_v<T, __nv_bfloat16>>(words[i]);
      x[2 * i] = two.x;
      x[2 * i + 1] = two.y;
    }
  }
}
template <class T>
__device__ __forceinline__ uint4 from_floats(const float (&x)[kVector<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(x[i]);
    } else {
      words[i] = pack<std::is_same_v<T, __nv_bfloat16>>(x[2 * i], x[2 * i + 1]);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// As many as `width` of them: 16 or 8 bytes, as they come from memory.
template <class T, int width>
struct Piece {
  static constexpr int kWords = width * static_cast<int>(sizeof(T)) / 4;
  static_assert(kWords == 2 || kWords == 4);
  alignas(4 * kWords) uint32_t words[kWords];

  __device__ __forceinline__ void load(const T* at) {
    if constexpr (kWords == 4) {
      *reinterpret_cast<uint4*>(words) = __ldcs(reinterpret_cast<const uint4*>(at));
    } else {
      *reinterpret_cast<uint2*>(words) = __ldcs(reinterpret_cast<const uint2*>(at));
    }
  }
  // This one in shared memory, by itself (copy.cuh); zeros where nothing is `there`.
  __device__ __forceinline__ void copy(const T* at, bool there) {
    if constexpr (kWords == 4) {
      copy_16(shared_address(words), at, there ? 16 : 0);
    } else {
      copy_8(shared_address(words), at, there ? 8 : 0);
    }
  }
  __device__ __forceinline__ void store(T* at) const {
    if constexpr (kWords == 4) {
      __stcs(reinterpret_cast<uint4*>(at), *reinterpret_cast<const uint4*>(words));
    } else {
      __stcs(reinterpret_cast<uint2*>(at), *reinterpret_cast<const uint2*>(words));
    }
  }
  __device__ __forceinline__ void get(float (&x)[width]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        x[i] = __uint_as_float(words[i]);
      } else {
        const float2 two = unpack<std::is_same_v<T, __nv_bfloat16>>(words[i]);
        x[2 * i] = two.x;
        x[2 * i + 1] = two.y;
      }
    }
  }
  __device__ __forceinline__ void set(const float (&x)[width]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(x[i]);
      } else {
        words[i] = pack<std::is_same_v<T, __nv_bfloat16>>(x[2 * i], x[2 * i + 1]);
      }
    }
  }
};

// Memory that is touched once: the caches need not keep it.
__device__ __forceinline__ uint4 load_once(const void* at) { return __ldcs(static_cast<const uint4*>(at)); }
__device__ __forceinline__ void store_once(void* at, const uint4& raw) { __stcs(static_cast<uint4*>(at), raw); }

// `count` (at most kVector) numbers of type `dtype` from element `place` on, 0 behind them.
template <int count_max>
__device__ __forceinline__ void load_some(const void* data, Dtype dtype, int64_t place, int count, float (&x)[count_max]) {
#pragma unroll
  for (int i = 0; i < count_max; ++i) x[i] = i < count ? load(data, dtype, place + i) : 0;
}

// The sum over `lanes` neighbouring threads (1 to 32, a power of two), known to all of them: always in the same order.
template <int lanes>
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}
// The sum over a block of `threads`; `parts` has threads / 32 floats in shared memory, free again after the next barrier.
template <int threads>
__device__ __forceinline__ float sum_block(float x, float* parts) {
  x = sum_lanes<32>(x);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
#pragma unroll
  for (int i = 1; i < threads / 32; ++i) x += parts[i];
  __syncthreads();
  return x;
}

// sigmoid(x): as exact as f32 can have it, or, `quick`, as 16-bit numbers need it, in 4 instructions; 0 below -87.
template <bool quick>
__device__ __forceinline__ float logistic(float x) {
  if constexpr (quick) return reciprocal_fast(1 + exp2_fast(x * -1.44269504f));
  return 1 / (1 + expf(-x));
}
// sigmoid(x) and sigmoid(-x) = e sigmoid(x) from one e = exp(-x), which is kept finite; so the latter is exact however small.
template <bool quick>
__device__ __forceinline__ float2 logistic_pair(float x) {
  const float e = quick ? exp2_fast(least(x * -1.44269504f, 126.0f)) : expf(least(-x, 87.0f));
  const float s = quick ? reciprocal_fast(1 + e) : 1 / (1 + e);
  return {s, e * s};
}

}  // namespace linnet::ptx
