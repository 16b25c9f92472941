// grid_conv: a depthwise convolution on a grid of tokens: each channel mixes the W x W tokens around its own.
//
//   out[y, x, c] = bias[c] + sum_{i,j} weight[c, i, j] x[y + i - W/2, x + j - W/2, c]         zeros outside the grid
//
// Tokens lie row by row, t = y width + x. W is odd. QT-ViT's second scale is one of 5 x 5.
#pragma once

#include "../../core/args.h"

namespace linnet {

struct GridConvArgs {
  View x;       // [B, T, E], T = height * width
  View weight;  // [E, W, W]
  View bias;    // optional [E]
  int64_t height = 1, width = 1;
};
struct GridConvOut {
  View out;  // [B, T, E]
};
struct GridConvGrads {
  View dout, dx, dweight, dbias;
};
const Op& grid_conv_op();
Status grid_conv(const GridConvArgs& args, const GridConvOut& out, const Context& context);
Status grid_conv_backward(const GridConvArgs& args, const GridConvOut& out, const GridConvGrads& grads, const Context& context);
int64_t grid_conv_workspace(const GridConvArgs& args, Pass pass, const Context& context);

LINNET_KERNELS(grid_conv, GridConvArgs, GridConvOut, GridConvGrads)
LINNET_CUDA_KERNELS(grid_conv, GridConvArgs, GridConvOut, GridConvGrads)

}  // namespace linnet
