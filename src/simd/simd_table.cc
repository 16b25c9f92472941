#include "simd/simd.h"

namespace linnet {

// Defined in simd_kernels_cpu.cc, once per instruction set. A file of its own: only the tests link these kernels.
#if defined(LINNET_HAS_portable)
namespace portable {
extern const SimdTable kTable;
}
#endif
#if defined(LINNET_HAS_avx2)
namespace avx2 {
extern const SimdTable kTable;
}
#endif
#if defined(LINNET_HAS_avx512)
namespace avx512 {
extern const SimdTable kTable;
}
namespace avx512_bf16 {
extern const PairFunctions kPairs;  // in pairs_kernels_cpu.cc
}
#endif

const SimdTable& simd_table(Isa isa) {
  switch (isa) {
#if defined(LINNET_HAS_avx2)
    case Isa::avx2: return avx2::kTable;
#endif
#if defined(LINNET_HAS_avx512)
    case Isa::avx512: return avx512::kTable;
#endif
#if defined(LINNET_HAS_portable)
    default: return portable::kTable;
#else
    default: return LINNET_ONLY::kTable;  // this build has one instruction set
#endif
  }
}

const PairFunctions* simd_pairs() {
#if defined(LINNET_HAS_avx512)
  if (simd_has_bf16_products()) return &avx512_bf16::kPairs;
#endif
  return nullptr;
}

}  // namespace linnet
