#include "dense_dots.h"

#include "core/isa.h"

namespace linnet {

std::string dense_bf16_available() {
  const std::string reason = isa_missing(Isa::avx512);
#if defined(__x86_64__)
  if (reason.empty() && __builtin_cpu_supports("avx512bf16") == 0) return "this processor has no AVX512_BF16";
#endif
  return reason;
}
std::string dense_vnni_available() {
  const std::string reason = isa_missing(Isa::avx512);
#if defined(__x86_64__)
  if (reason.empty() && __builtin_cpu_supports("avx512vnni") == 0) return "this processor has no AVX512_VNNI";
#endif
  return reason;
}

}  // namespace linnet
