// src/ptx/wgmma.cuh on the emulated GPU. Sums are rounded in f32 term by term, where the hardware has its own order.
#pragma once

#include <cstdint>

#include "ptx/fragment.cuh"

namespace linnet::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() { emulate::commit_products(); }
template <int pending>
void wgmma_wait() {
  emulate::wait_products(pending);
}
template <int count>
void hold(float (&)[count]) {}
template <int count>
void hold(uint32_t (&)[count]) {}

namespace emulated {

template <bool bf16>
inline constexpr emulate::ProductType kType = bf16 ? emulate::ProductType::bf16 : emulate::ProductType::f16;

}  // namespace emulated

template <bool bf16, bool transposed, int count>
void wgmma(float (&d)[count], const uint32_t* a, uint64_t b, bool add) {
  emulate::issue_product({d, 2 * count, emulated::kType<bf16>, add, true, false, transposed, {a[0], a[1], a[2], a[3]}, 0, b});
}
template <bool bf16, bool transposed_a, bool transposed_b, int count>
void wgmma_shared(float (&d)[count], uint64_t a, uint64_t b, bool add) {
  emulate::issue_product({d, 2 * count, emulated::kType<bf16>, add, false, transposed_a, transposed_b, {}, a, b});
}
inline void wgmma_tf32(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool add) {
  emulate::issue_product({d, 64, emulate::ProductType::tf32, add, true, false, false, {a0, a1, a2, a3}, 0, b});
}
inline void wgmma_tf32_half(float* d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool add) {
  emulate::issue_product({d, 32, emulate::ProductType::tf32, add, true, false, false, {a0, a1, a2, a3}, 0, b});
}

}  // namespace linnet::ptx
