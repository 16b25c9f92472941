// causal_conv: the short depthwise convolution in front of most recurrent mixers: each channel mixes its last W tokens.
//
//   out_t[d] = act(bias[d] + sum_j weight[d, j] x_{t-W+1+j}[d])         the last tap on the current token; act: none or silu
//
// Before the first token of a sequence stand W-1 inputs of the state (zeros when absent); packed sequences do not see each
// other. The state is the last W-1 inputs, the oldest first, so that prefill then decode equals one run bit for bit.
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class ConvActivation : int32_t { none, silu };

struct CausalConvArgs {
  View x;              // [B, T, E]
  View weight;         // [E, W]
  View bias;           // optional [E]
  View cu_seqlens;     // optional [N+1]: packed sequences (x [total, E] or with B = 1)
  View initial_state;  // optional [N, E, W-1]; N = B unless packed
  ConvActivation activation = ConvActivation::silu;
};
struct CausalConvOut {
  View out;          // [B, T, E]
  View final_state;  // [N, E, W-1]
};
struct CausalConvGrads {
  View dout, dfinal_state;                  // incoming; absent = zero
  View dx, dweight, dbias, dinitial_state;  // results; absent = not wanted
};
const Op& causal_conv_op();
Status causal_conv(const CausalConvArgs& args, const CausalConvOut& out, const Context& context);
Status causal_conv_backward(const CausalConvArgs& args, const CausalConvOut& out, const CausalConvGrads& grads,
                            const Context& context);
int64_t causal_conv_workspace(const CausalConvArgs& args, Pass pass, const Context& context);

// One or few tokens with the state carried in place.
struct CausalConvDecodeArgs {
  View x;       // [B, T, E]
  View weight;  // [E, W]
  View bias;    // optional [E]
  View state;   // [B, E, W-1]: read and overwritten
  ConvActivation activation = ConvActivation::silu;
};
struct CausalConvDecodeOut {
  View out;  // [B, T, E]
};
struct CausalConvDecodeGrads {};
const Op& causal_conv_decode_op();
Status causal_conv_decode(const CausalConvDecodeArgs& args, const CausalConvDecodeOut& out, const Context& context);
int64_t causal_conv_decode_workspace(const CausalConvDecodeArgs& args, const Context& context);

LINNET_KERNELS(causal_conv, CausalConvArgs, CausalConvOut, CausalConvGrads)
LINNET_CUDA_KERNELS(causal_conv, CausalConvArgs, CausalConvOut, CausalConvGrads)
LINNET_CUDA_KERNELS(causal_conv_decode, CausalConvDecodeArgs, CausalConvDecodeOut, CausalConvDecodeGrads)
LINNET_KERNELS(causal_conv_decode, CausalConvDecodeArgs, CausalConvDecodeOut, CausalConvDecodeGrads)

}  // namespace linnet
