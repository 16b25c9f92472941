// Which integer and bf16 dot products this machine has, and the lines of a declaration that add the kernels that use them.
#pragma once

#include <string>

namespace linnet {

// Why this machine cannot run the kernels with bf16 dot products (AVX512_BF16), with integer ones (AVX512_VNNI); empty when it
// can.
std::string dense_bf16_available();
std::string dense_vnni_available();

}  // namespace linnet

#if defined(LINNET_HAS_avx512)
#define LINNET_DENSE_BF16(stem) \
  .impl<avx512_bf16::stem##_forward, nullptr, avx512_bf16::stem##_workspace>("avx512_bf16", dense_bf16_available)
#define LINNET_DENSE_VNNI(stem) \
  .impl<avx512_vnni::stem##_forward, nullptr, avx512_vnni::stem##_workspace>("avx512_vnni", dense_vnni_available)
#else
#define LINNET_DENSE_BF16(stem)
#define LINNET_DENSE_VNNI(stem)
#endif
