// ceiling: loops that do nothing but what the machine does best, for `linnet bench`.
#pragma once

#include <cstdint>

#define LINNET_CEILING(isa)                          \
  namespace isa {                                    \
  int64_t fma_loop_f32(int64_t steps, float* sink);  \
  int64_t fma_loop_f64(int64_t steps, double* sink); \
  void update_loop(float* x, int64_t count);         \
  }
namespace linnet {
// fma_loop: fused multiply-adds on registers alone; returns the operations done (multiply and add counted apart).
// update_loop: x[i] = 0.5 x[i] + 1, in place.
LINNET_CEILING(portable)
LINNET_CEILING(avx2)
LINNET_CEILING(avx512)
}  // namespace linnet
#undef LINNET_CEILING
