#include "isa.h"

#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace linnet {

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::portable: return "portable";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
  }
  return "";
}

#if defined(__x86_64__)
// __builtin_cpu_supports("f16c") does not compile with clang 14. Asked once: under a hypervisor every cpuid takes 20 us or
// more.
static bool has_f16c() {
  static const bool has = [] {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  }();
  return has;
}
#endif

const char* isa_missing(Isa isa) {
#if defined(LINNET_HAS_portable)
  if (isa == Isa::portable) return "";
#else
  if (isa == Isa::portable) return "this build has no portable kernels (it was made for this machine's instruction set alone)";
#endif
#if !defined(LINNET_HAS_avx2)
  if (isa == Isa::avx2) return "this build has no AVX2 kernels";
#endif
#if !defined(LINNET_HAS_avx512)
  if (isa == Isa::avx512) return "this build has no AVX-512 kernels";
#endif
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (isa == Isa::avx2) return avx2 ? "" : "this machine has no AVX2 with FMA and F16C";
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return avx512 ? "" : "this machine has no AVX-512 (F, DQ, BW, VL)";
#else
  return "this build is not for x86-64";
#endif
}

Status isa_choice(Isa* isa) {
  Isa limit = Isa::avx512;
  if (const char* text = std::getenv("LINNET_ISA"); text != nullptr && *text != '\0') {
    bool known = false;
    for (const Isa candidate : kIsas) {
      if (std::strcmp(text, isa_name(candidate)) != 0) continue;
      known = true;
      limit = candidate;
    }
    if (!known) return bad_input(std::string("LINNET_ISA is '") + text + "', expected portable, avx2 or avx512");
    if (*isa_missing(limit) != '\0') return impossible(std::string("LINNET_ISA=") + text + ": " + isa_missing(limit));
  }
  *isa = Isa::portable;
  for (const Isa candidate : kIsas) {
    if (candidate <= limit && *isa_missing(candidate) == '\0') *isa = candidate;
  }
  return {};
}

}  // namespace linnet
