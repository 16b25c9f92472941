#include "simd/simd.h"

namespace linnet {

// Defined in simd_kernels_cpu.cc, once per instruction set. A file of its own: only the tests link these kernels.
namespace portable {
extern const SimdTable kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const SimdTable kTable;
}
namespace avx512 {
extern const SimdTable kTable;
}
#endif

const SimdTable& simd_table(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2: return avx2::kTable;
    case Isa::avx512: return avx512::kTable;
#endif
    default: return portable::kTable;
  }
}

}  // namespace linnet
