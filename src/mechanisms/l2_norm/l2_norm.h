// l2_norm: each head's row made a vector of length one, as the delta rules want their queries and keys.
//
//   out = x / sqrt(sum x^2 + eps)
#pragma once

#include "../../core/args.h"

namespace linnet {

struct L2NormArgs {
  View x;  // [B, T, H, K]
  double eps = 1e-6;
};
struct L2NormOut {
  View out;  // [B, T, H, K]
};
struct L2NormGrads {
  View dout;  // incoming; absent = zero
  View dx;    // result; absent = not wanted
};
const Op& l2_norm_op();
Status l2_norm(const L2NormArgs& args, const L2NormOut& out, const Context& context);
Status l2_norm_backward(const L2NormArgs& args, const L2NormOut& out, const L2NormGrads& grads, const Context& context);
int64_t l2_norm_workspace(const L2NormArgs& args, Pass pass, const Context& context);

LINNET_KERNELS(l2_norm, L2NormArgs, L2NormOut, L2NormGrads)
LINNET_CUDA_KERNELS(l2_norm, L2NormArgs, L2NormOut, L2NormGrads)

}  // namespace linnet
