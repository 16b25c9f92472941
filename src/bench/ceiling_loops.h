// The loops whose speed is a core's ceiling, one table per instruction set; ceiling.h measures them.
//
//   const CeilingLoops& c = ceiling_loops(Isa::avx512);
//   const double flops = c.multiply_add_f32(100000);         // time this call: flops / seconds is the peak of one core
//   const double bytes = c.update_f32(buffer, count, 10);    // bytes / seconds is the ceiling of a decode step
//
// Ask only for an instruction set that isa_missing() does not refuse.
#pragma once

#include <cstdint>

#include "core/isa.h"

namespace linnet {

struct CeilingLoops {
  double (*multiply_add_f32)(int64_t iterations);  // register-only fused multiply-adds; returns floating-point operations
  double (*multiply_add_f64)(int64_t iterations);
  double (*multiply_add_bf16)(int64_t iterations);  // bf16 pairs, float sums; call only where simd_has_bf16_products()
  double (*update_f32)(float* x, int64_t count, int64_t rounds);  // x = a x + b, `rounds` times; returns bytes read + written
};
const CeilingLoops& ceiling_loops(Isa isa);

}  // namespace linnet
