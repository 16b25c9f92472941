#include "simd/simd.h"

namespace linnet {

// Defined in simd_ceilings_cpu.cc, once per instruction set.
namespace portable {
extern const Ceilings kCeilings;
}
#if defined(LINNET_HAS_avx2)
namespace avx2 {
extern const Ceilings kCeilings;
}
#endif
#if defined(LINNET_HAS_avx512)
namespace avx512 {
extern const Ceilings kCeilings;
}
#endif

const Ceilings& simd_ceilings(Isa isa) {
  switch (isa) {
#if defined(LINNET_HAS_avx2)
    case Isa::avx2: return avx2::kCeilings;
#endif
#if defined(LINNET_HAS_avx512)
    case Isa::avx512: return avx512::kCeilings;
#endif
    default: return portable::kCeilings;
  }
}

bool simd_has_bf16_products() {
#if defined(LINNET_HAS_avx512)
  return *isa_missing(Isa::avx512) == '\0' && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace linnet
