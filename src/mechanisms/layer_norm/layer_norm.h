// layer_norm: rows made of mean 0 and variance 1, times a weight, plus a bias for each channel.
//
//   out = (x - mean x) / sqrt(mean (x - mean x)^2 + eps) weight + bias
//
// Rows are the last dimension of [B, T, D] or, head by head, of [B, T, H, D].
#pragma once

#include "../../core/args.h"

namespace linnet {

struct LayerNormArgs {
  View x;       // [B, T, H, D] or [B, T, D]
  View weight;  // [D]; absent = ones
  View bias;    // [D]; absent = zeros
  double eps = 1e-5;
};
struct LayerNormOut {
  View out;  // as x
};
struct LayerNormGrads {
  View dout;                // incoming; absent = zero
  View dx, dweight, dbias;  // results; absent = not wanted
};
const Op& layer_norm_op();
Status layer_norm(const LayerNormArgs& args, const LayerNormOut& out, const Context& context);
Status layer_norm_backward(const LayerNormArgs& args, const LayerNormOut& out, const LayerNormGrads& grads,
                           const Context& context);
int64_t layer_norm_workspace(const LayerNormArgs& args, Pass pass, const Context& context);

LINNET_KERNELS(layer_norm, LayerNormArgs, LayerNormOut, LayerNormGrads)
LINNET_CUDA_KERNELS(layer_norm, LayerNormArgs, LayerNormOut, LayerNormGrads)

}  // namespace linnet
