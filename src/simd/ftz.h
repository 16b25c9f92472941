// FlushSubnormals: subnormal results and operands count as zero while it lives (FTZ and DAZ), on the calling thread.
//
//   FlushSubnormals flush;     // first line of every task a kernel runs
//
// A product that becomes subnormal costs 33 to 37 ns instead of 0.3 on some machines: one decay step of a 128 x 128 state into
// the subnormal range 39 us instead of 2. Setting and restoring takes about 5 ns. Every thread of a call must do it alike,
// otherwise results depend on who computed them. On other processors than x86 it does nothing.
#pragma once

#include <cstdint>

#include "core/view.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace linnet {

class FlushSubnormals {
 public:
#if defined(__SSE2__)
  LINNET_INLINE FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  LINNET_INLINE ~FlushSubnormals() { _mm_setcsr(saved_); }
#else
  LINNET_INLINE FlushSubnormals() {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr uint32_t kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  uint32_t saved_;
#endif
};

}  // namespace linnet
