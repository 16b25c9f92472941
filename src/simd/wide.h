// wide: a vector of floats as two of doubles, and back. One instruction each on avx512, where g++ 12 makes five of
// __builtin_convertvector.
#pragma once

#include "simd/tile.h"

namespace linnet::LINNET_ISA {

struct Wide {
  vd low, high;
};

typedef float vf_half __attribute__((vector_size(kVectorBytes / 2)));

LINNET_INLINE vd widen_half(vf_half v) {
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_cvtps_pd(kAll8, v);
#else
  return __builtin_convertvector(v, vd);
#endif
}
LINNET_INLINE vf_half narrow_half(vd v) {
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_cvtpd_ps(kAll8, v);
#else
  return __builtin_convertvector(v, vf_half);
#endif
}

LINNET_INLINE Wide widen(vf v) {
#if defined(LINNET_ISA_avx512)
  const vf_half low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const vf_half high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(LINNET_ISA_avx2)
  const vf_half low = __builtin_shufflevector(v, v, 0, 1, 2, 3), high = __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  const vf_half low = __builtin_shufflevector(v, v, 0, 1), high = __builtin_shufflevector(v, v, 2, 3);
#endif
  return {widen_half(low), widen_half(high)};
}
LINNET_INLINE vf narrow(const Wide& v) {
  const vf_half low = narrow_half(v.low), high = narrow_half(v.high);
#if defined(LINNET_ISA_avx512) || defined(LINNET_ISA_avx2)
  return concatenate(low, high);
#else
  return __builtin_shufflevector(low, high, 0, 1, 2, 3);
#endif
}

}  // namespace linnet::LINNET_ISA
