// in_register: a vector that stays one value. GCC would read memory once for each use of it, or make one instruction of a
// product and the sum behind it.
#pragma once

#include "simd/vec.h"

namespace linnet::LINNET_ISA {

template <class V>
LINNET_INLINE V in_register(V a) {
#if defined(__x86_64__)
  __asm__("" : "+v"(a));
#endif
  return a;
}

}  // namespace linnet::LINNET_ISA
