// The two ceilings of a core, per instruction set: arithmetic in registers, and updating memory in place.
#include "bench/ceiling_loops.h"
#include "simd/vec.h"

namespace linnet::LINNET_ISA {

// As many independent chains as the register file holds beside two constants: 2 ports x 4 cycles of latency want at least 8.
template <class T>
static double multiply_add(int64_t iterations) {
  using X = Vec<T>;
  using V = typename X::V;
  constexpr int kChains = kVectorBytes == 64 ? 24 : 12;
  V chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = X::broadcast(static_cast<T>(i));
  const V factor = X::broadcast(static_cast<T>(0.999)),
          term = X::broadcast(static_cast<T>(0.001));  // tends to 1: no subnormals
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) chain[i] = fma(chain[i], factor, term);
  }
  for (int i = 0; i < kChains; ++i) asm volatile("" : : "x"(chain[i]));  // used, so that the loop stays
  return 2.0 * kChains * X::W * static_cast<double>(iterations);
}

#if defined(LINNET_ISA_avx512)
__attribute__((target("avx512bf16"))) static double multiply_add_bf16(int64_t iterations) {
  constexpr int kChains = 24;
  vf chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = Vec<float>::broadcast(static_cast<float>(i));
  const __m512bh one = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80)),
                 small = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3a80));
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) chain[i] = _mm512_dpbf16_ps(chain[i], one, small);
  }
  for (int i = 0; i < kChains; ++i) asm volatile("" : : "x"(chain[i]));
  return 4.0 * kChains * Vec<float>::W * static_cast<double>(iterations);
}
#else
static constexpr double (*multiply_add_bf16)(int64_t) = nullptr;
#endif

static double update_f32(float* x, int64_t count, int64_t rounds) {
  using X = Vec<float>;
  const vf factor = X::broadcast(0.999f), term = X::broadcast(0.001f);
  for (int64_t r = 0; r < rounds; ++r) {
    int64_t i = 0;
    for (; i + 4 * X::W <= count; i += 4 * X::W) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) X::store(x + i + v * X::W, fma(X::load(x + i + v * X::W), factor, term));
    }
    for (; i < count; i += X::W) {
      const int n = static_cast<int>(count - i < X::W ? count - i : X::W);
      X::store(x + i, fma(X::load(x + i, n), factor, term), n);
    }
  }
  return 8.0 * static_cast<double>(count) * static_cast<double>(rounds);
}

extern const CeilingLoops kCeilings;
const CeilingLoops kCeilings = {multiply_add<float>, multiply_add<double>, multiply_add_bf16, update_f32};

}  // namespace linnet::LINNET_ISA
