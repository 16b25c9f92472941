#include "simd/ceiling.h"
#include "simd/vec.h"

namespace linnet::LINNET_ISA {
namespace {

// 12 chains: 2 ports x 4 cycles of latency need 8, 5 cycles need 10.
template <class T>
int64_t fma_loop(int64_t steps, T* sink) {
  using X = Vec<T>;
  constexpr int kChains = 12;
  const typename X::V a = X::broadcast(static_cast<T>(0.5)), b = X::broadcast(*sink);
  typename X::V acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = X::broadcast(static_cast<T>(i));
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      acc[i] = fma(acc[i], a, b);
    }
  }
  typename X::V sum = X::zero();
  for (int i = 0; i < kChains; ++i) sum = sum + acc[i];
  X::store(sink, sum, 1);
  return 2 * kChains * X::W * steps;
}

}  // namespace

int64_t fma_loop_f32(int64_t steps, float* sink) { return fma_loop<float>(steps, sink); }
int64_t fma_loop_f64(int64_t steps, double* sink) { return fma_loop<double>(steps, sink); }

void update_loop(float* x, int64_t count) {
  using X = Vec<float>;
  const X::V half = X::broadcast(0.5f), one = X::broadcast(1.0f);
  int64_t i = 0;
  for (; i + 4 * X::W <= count; i += 4 * X::W) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) X::store(x + i + v * X::W, fma(half, X::load(x + i + v * X::W), one));
  }
}

}  // namespace linnet::LINNET_ISA
