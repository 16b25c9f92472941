// Checks that softmax shares with mechanisms built on it.
#pragma once

#include <string>

#include "core/op.h"
#include "softmax.h"

namespace linnet {

// Room for the new tokens, and a start that is not behind the end.
Status check_softmax_cache(const char* op, const SoftmaxDecodeArgs& args, const Dims& dims);
// Why this machine cannot run the kernels with bf16 dot products; empty when it can.
std::string bf16_dots_available();

}  // namespace linnet

// The line of a declaration that adds the kernels with bf16 dot products, where the build has them.
#if defined(LINNET_HAS_avx512)
#define LINNET_BF16_IMPL(stem, backward)                                                                          \
  .impl<avx512_bf16::stem##_forward, backward, avx512_bf16::stem##_workspace>("avx512_bf16", bf16_dots_available) \
      .rounds_intermediates()
#else
#define LINNET_BF16_IMPL(stem, backward)
#endif
