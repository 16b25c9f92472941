// A file of its own, without the tables that only tests link.
#include "simd/simd.h"

namespace linnet {

bool simd_has_bf16_products() {
#if defined(LINNET_HAS_avx512)
  return *isa_missing(Isa::avx512) == '\0' && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace linnet
