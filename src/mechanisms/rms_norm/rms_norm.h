// rms_norm: rows divided by the root of their mean square, times a weight for each channel.
//
//   out = x / sqrt(mean x^2 + eps) weight            plus_one: (1 + weight)
//
// Rows are the last dimension of [B, T, D] or, head by head, of [B, T, H, D].
#pragma once

#include "../../core/args.h"

namespace linnet {

struct RmsNormArgs {
  View x;       // [B, T, H, D] or [B, T, D]
  View weight;  // [D]; absent = ones
  double eps = 1e-6;
  bool plus_one = false;
};
struct RmsNormOut {
  View out;  // as x
};
struct RmsNormGrads {
  View dout;         // incoming; absent = zero
  View dx, dweight;  // results; absent = not wanted
};
const Op& rms_norm_op();
Status rms_norm(const RmsNormArgs& args, const RmsNormOut& out, const Context& context);
Status rms_norm_backward(const RmsNormArgs& args, const RmsNormOut& out, const RmsNormGrads& grads, const Context& context);
int64_t rms_norm_workspace(const RmsNormArgs& args, Pass pass, const Context& context);

LINNET_KERNELS(rms_norm, RmsNormArgs, RmsNormOut, RmsNormGrads)
LINNET_CUDA_KERNELS(rms_norm, RmsNormArgs, RmsNormOut, RmsNormGrads)

}  // namespace linnet
