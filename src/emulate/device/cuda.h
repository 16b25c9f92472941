// CUDA C++ for g++: what kernels use of it, on the emulated GPU (emulate/machine.h). compile.sh includes it before a source.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "emulate/machine.h"

#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
// __shared__ is left to compile.sh: what has a size becomes a variable of the thread, so that all of an image lies in one place
// and can be spoilt before each block; what has none becomes a pointer.
#define __constant__ static

#define threadIdx (linnet::emulate::self().thread)
#define blockIdx (linnet::emulate::self().block)
#define blockDim (linnet::emulate::self().threads)
#define gridDim (linnet::emulate::self().grid)
inline constexpr int warpSize = 32;

#define LINNET_VECTORS(type, name)                                        \
  struct alignas(2 * sizeof(type)) name##2 {                              \
    type x, y;                                                            \
  };                                                                      \
  struct name##3 {                                                        \
    type x, y, z;                                                         \
  };                                                                      \
  struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name##4 { \
    type x, y, z, w;                                                      \
  };                                                                      \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }        \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
LINNET_VECTORS(float, float)
LINNET_VECTORS(double, double)
LINNET_VECTORS(int, int)
LINNET_VECTORS(unsigned, uint)
LINNET_VECTORS(unsigned short, ushort)
#undef LINNET_VECTORS

// Barriers.
inline void __syncthreads() { linnet::emulate::barrier(0, 0, false); }
inline int __syncthreads_or(int mine) { return linnet::emulate::barrier(0, 0, mine != 0); }
inline int __syncthreads_count(int mine) { return linnet::emulate::barrier_count(mine != 0); }
inline int __syncthreads_and(int mine) { return linnet::emulate::barrier_count(mine == 0) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { linnet::emulate::meet("__syncwarp", mask, {}, nullptr); }
inline void __nanosleep(unsigned) { linnet::emulate::pause(); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline unsigned __activemask() { return 0xffffffffu; }

// Exchanges within a warp.
namespace linnet::emulate {
template <class T>
T exchange(const char* kind, unsigned mask, T x, int from) {
  static_assert(sizeof(T) <= sizeof(Slot) && std::is_trivially_copyable_v<T>);
  Slot mine = {};
  std::memcpy(&mine, &x, sizeof x);
  const Slot* slots = meet(kind, mask, mine, nullptr);
  std::memcpy(&x, &slots[from], sizeof x);
  return x;
}
inline int lane() { return static_cast<int>(self().thread.x % 32); }
inline uint32_t ballot(unsigned mask, bool mine) {
  Slot slot = {};
  slot.word[0] = mine ? 1 : 0;
  const Slot* slots = meet("a vote", mask, slot, nullptr);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (slots[i].word[0] == 1 ? 1u : 0u) << i;
  return bits;
}
}  // namespace linnet::emulate
template <class T>
T __shfl_sync(unsigned mask, T x, int from, int width = 32) {
  const int lane = linnet::emulate::lane();
  return linnet::emulate::exchange("__shfl_sync", mask, x, lane / width * width + (from & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32) {
  const int lane = linnet::emulate::lane(), from = lane ^ bits;
  return linnet::emulate::exchange("__shfl_xor_sync", mask, x, from / width > lane / width ? lane : from);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32) {
  const int lane = linnet::emulate::lane(), from = lane - static_cast<int>(by);
  return linnet::emulate::exchange("__shfl_up_sync", mask, x, from < lane / width * width ? lane : from);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32) {
  const int lane = linnet::emulate::lane(), from = lane + static_cast<int>(by);
  return linnet::emulate::exchange("__shfl_down_sync", mask, x, from >= (lane / width + 1) * width ? lane : from);
}
inline unsigned __ballot_sync(unsigned mask, int mine) { return linnet::emulate::ballot(mask, mine != 0); }
inline int __any_sync(unsigned mask, int mine) { return linnet::emulate::ballot(mask, mine != 0) != 0; }
inline int __all_sync(unsigned mask, int mine) { return linnet::emulate::ballot(mask, mine == 0) == 0; }

// Memory. Threads change places at barriers alone, so that plain updates are atomic.
template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, T x) {
  *at = x;
}
template <class T>
void __stcg(T* at, T x) {
  *at = x;
}
template <class T>
T atomicAdd(T* at, T x) {
  const T before = *at;
  *at += x;
  return before;
}
inline unsigned atomicAdd(unsigned* at, int x) { return atomicAdd(at, static_cast<unsigned>(x)); }
template <class T>
T atomicOr(T* at, T x) {
  const T before = *at;
  *at |= x;
  return before;
}
template <class T>
T atomicMin(T* at, T x) {
  const T before = *at;
  *at = std::min(before, x);
  return before;
}
template <class T>
T atomicMax(T* at, T x) {
  const T before = *at;
  *at = std::max(before, x);
  return before;
}
inline size_t __cvta_generic_to_shared(const void* pointer) { return linnet::emulate::shared_address(pointer); }

// Bits and numbers.
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fadd_rn(float x, float y) {
  volatile float sum = x + y;  // not fused with a product
  return sum;
}
inline float __fmul_rn(float x, float y) {
  volatile float product = x * y;
  return product;
}
inline float rsqrtf(float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline double normcdf(double x) { return 0.5 * std::erfc(-x * M_SQRT1_2); }
inline float normcdff(float x) { return static_cast<float>(0.5 * std::erfc(-static_cast<double>(x) * M_SQRT1_2)); }
inline float __saturatef(float x) { return x > 0 ? std::min(x, 1.0f) : 0; }

// CUDA's min and max of mixed types, and its float overloads of C's functions.
template <class X, class Y>
inline auto min(X x, Y y) {
  using Z = std::common_type_t<X, Y>;
  if constexpr (std::is_floating_point_v<Z>) return static_cast<Z>(std::fmin(static_cast<Z>(x), static_cast<Z>(y)));
  return static_cast<Z>(y) < static_cast<Z>(x) ? static_cast<Z>(y) : static_cast<Z>(x);
}
template <class X, class Y>
inline auto max(X x, Y y) {
  using Z = std::common_type_t<X, Y>;
  if constexpr (std::is_floating_point_v<Z>) return static_cast<Z>(std::fmax(static_cast<Z>(x), static_cast<Z>(y)));
  return static_cast<Z>(x) < static_cast<Z>(y) ? static_cast<Z>(y) : static_cast<Z>(x);
}
using std::isfinite;
using std::isinf;
using std::isnan;

namespace linnet::emulate {
template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(linnet_emulated_shared + kDynamicStart);
}
}  // namespace linnet::emulate

// One thread of a kernel with parameters that lie somewhere.
namespace linnet::emulate {
template <class... Types>
void call(void (*kernel)(Types...), void** parameters) {
  int i = 0;
  std::tuple<std::remove_cv_t<Types>*...> at{static_cast<std::remove_cv_t<Types>*>(parameters[i++])...};
  std::apply([&](auto*... each) { kernel(*each...); }, at);
}
}  // namespace linnet::emulate
