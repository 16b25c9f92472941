#include "bench/ceiling_loops.h"

namespace linnet {

// Defined in ceiling_loops_cpu.cc, once per instruction set.
#if defined(LINNET_HAS_portable)
namespace portable {
extern const CeilingLoops kCeilings;
}
#endif
#if defined(LINNET_HAS_avx2)
namespace avx2 {
extern const CeilingLoops kCeilings;
}
#endif
#if defined(LINNET_HAS_avx512)
namespace avx512 {
extern const CeilingLoops kCeilings;
}
#endif

const CeilingLoops& ceiling_loops(Isa isa) {
  switch (isa) {
#if defined(LINNET_HAS_avx2)
    case Isa::avx2: return avx2::kCeilings;
#endif
#if defined(LINNET_HAS_avx512)
    case Isa::avx512: return avx512::kCeilings;
#endif
#if defined(LINNET_HAS_portable)
    default: return portable::kCeilings;
#else
    default: return LINNET_ONLY::kCeilings;  // this build has one instruction set
#endif
  }
}

}  // namespace linnet
