// inline: injective linear attention (InLine): the mean over keys is subtracted instead of divided out, so that different
// queries keep different weights; with a local 3 x 3 residual whose coefficients come from the mean token.
//
//   w_ij = (scale / n) (phi(q_i).phi(k_j) - mean_l phi(q_i).phi(k_l)) + 1 / n,   o_i = sum_j w_ij v_j
//        = vbar + scale phi(q_i) C,   C = (1 / n) sum_j (phi(k_j) - kbar)^T (v_j - vbar)
//
// Sums run over the n keys that take part: all, or j <= i when causal; a row without any is 0. Han et al., NeurIPS 2024, arXiv
// 2412.06590; causal form and statistics: docs/mechanisms/inline.md.
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class InlineKernel : int32_t { identity, relu, leakyrelu, exp };

struct InlineArgs {
  View q;     // [B, T, H, K], before the kernel
  View k;     // [B, S, H, K]; S = T when causal
  View v;     // [B, S, H, V]
  View mask;  // optional [B, S] u8: keys with 0 take no part
  InlineKernel kernel = InlineKernel::identity;
  bool causal = false;
  Maybe scale;  // default K^-0.5
};
struct InlineOut {
  View out;           // [B, T, H, V]
  View final_moment;  // optional [B, H, K, V] f32: sum_j (phi(k_j) - kbar)^T (v_j - vbar)
  View final_key;     // optional [B, H, K] f32: kbar
  View final_value;   // optional [B, H, V] f32: vbar
  View final_count;   // optional [B, H] f32: n
};
struct InlineGrads {
  View dout, dq, dk, dv;
};
const Op& inline_op();
Status inline_attention(const InlineArgs& args, const InlineOut& out, const Context& context);
Status inline_backward(const InlineArgs& args, const InlineOut& out, const InlineGrads& grads, const Context& context);
int64_t inline_workspace(const InlineArgs& args, Pass pass, const Context& context);

// Attention and the local residual: r = w2 gelu(w1 pooled + b1) + b2 per head, its 9 D entries channel * 9 + tap; the token at
// grid position (y, x), t = prefix + y width + x, receives sum_{dy,dx} r[c, (dy + 1) 3 + dx + 1] v[y + dy, x + dx, c].
struct InlineResidualArgs {
  View q, k, v;  // [B, T, H, D]
  View mask;
  View pooled;  // [B, H, D]: mean token of the layer's input, in heads
  View w1, b1;  // [H, D, D] (out, in), [H, D]
  View w2, b2;  // [H, 9*D, D], [H, 9*D]
  InlineKernel kernel = InlineKernel::identity;
  bool causal = false;
  Maybe scale;
  int64_t height = 1, width = 1;  // of the grid; T = prefix + height * width
  int64_t prefix = 0;             // tokens before the grid, which neither give nor receive
};
struct InlineResidualOut {
  View out;  // [B, T, H, D]
  View r;    // optional [B, H, D, 9] f32
};
struct InlineResidualGrads {
  View dout, dq, dk, dv, dpooled, dw1, db1, dw2, db2;
};
const Op& inline_residual_op();
Status inline_residual(const InlineResidualArgs& args, const InlineResidualOut& out, const Context& context);
Status inline_residual_backward(const InlineResidualArgs& args, const InlineResidualOut& out, const InlineResidualGrads& grads,
                                const Context& context);
int64_t inline_residual_workspace(const InlineResidualArgs& args, Pass pass, const Context& context);

// One or few tokens of the causal form; the statistics are read and overwritten.
struct InlineDecodeArgs {
  View q, k, v;  // [B, T, H, K], [B, T, H, K], [B, T, H, V]
  View moment;   // [B, H, K, V] f32
  View key;      // [B, H, K] f32: kbar
  View value;    // [B, H, V] f32: vbar
  View count;    // [B, H] f32
  InlineKernel kernel = InlineKernel::identity;
  Maybe scale;
};
struct InlineDecodeOut {
  View out;  // [B, T, H, V]
};
struct InlineDecodeGrads {};
const Op& inline_decode_op();
Status inline_decode(const InlineDecodeArgs& args, const InlineDecodeOut& out, const Context& context);
int64_t inline_decode_workspace(const InlineDecodeArgs& args, const Context& context);

LINNET_KERNELS(inline, InlineArgs, InlineOut, InlineGrads)
LINNET_KERNELS(inline_residual, InlineResidualArgs, InlineResidualOut, InlineResidualGrads)
LINNET_CUDA_KERNELS(inline_residual, InlineResidualArgs, InlineResidualOut, InlineResidualGrads)
LINNET_KERNELS(inline_decode, InlineDecodeArgs, InlineDecodeOut, InlineDecodeGrads)
LINNET_CUDA_KERNELS(inline, InlineArgs, InlineOut, InlineGrads)
LINNET_CUDA_KERNELS(inline_decode, InlineDecodeArgs, InlineDecodeOut, InlineDecodeGrads)

inline constexpr double kInlineExponent = 0.2, kInlineLargest = 200;  // kernel exp: exp(0.2 min(x, 200))

// The default scale, Dk^-0.5.
LINNET_INLINE double inline_scale(const Maybe& scale, int64_t K) {
  return scale.value_or(K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(K)));
}

}  // namespace linnet
