// Instruction sets: which of the compiled variants this machine can run, and the one the user forces with LINNET_ISA.
#pragma once

#include "status.h"

namespace linnet {

enum class Isa { portable = 0, avx2 = 1, avx512 = 2 };
inline constexpr Isa kIsas[] = {Isa::portable, Isa::avx2, Isa::avx512};

const char* isa_name(Isa isa);
// Empty when the machine runs it and this build has it, else the reason why not.
const char* isa_missing(Isa isa);
// The widest usable set, at most LINNET_ISA when that is set; a wrong LINNET_ISA is an error.
Status isa_choice(Isa* isa);

}  // namespace linnet
