// mamba_selective_scan: the S6 scan of Mamba (arXiv 2312.00752): one small diagonal state per channel, whose step size, input
// and output maps depend on the token.
//
//   delta = softplus(dt + dt_bias)
//   h_t[e, n] = exp(delta_te A_en) h_{t-1}[e, n] + delta_te B_t[n] x_te
//   y_te = sum_n C_t[n] h_t[e, n] + D_e x_te,   times z_te sigmoid(z_te) if z is given
//
// As the general recurrence: one head per channel, key width K (the paper's N), value width 1, g = delta A, k = B, v = delta x,
// q = C. Channel e uses group e / (E / G) of B and C.
#pragma once

#include "../../core/args.h"

namespace linnet {

struct SelectiveScanArgs {
  View x;              // [B, T, E]
  View dt;             // [B, T, E], before bias and softplus
  View A;              // [E, K] f32, negative
  View B, C;           // [B, T, G, K], or [B, T, K] for one group
  View D;              // optional [E]: the skip
  View z;              // optional [B, T, E]: the gate
  View dt_bias;        // optional [E]
  View cu_seqlens;     // optional [N+1]: packed sequences (x [total, E] or with B = 1)
  View initial_state;  // optional [N, E, K] f32; N = B unless packed
};
struct SelectiveScanOut {
  View out;          // [B, T, E]
  View final_state;  // [N, E, K] f32
};
struct SelectiveScanGrads {
  View dout, dfinal_state;                                     // incoming; absent = zero
  View dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_state;  // results; absent = not wanted
};
const Op& mamba_selective_scan_op();
Status mamba_selective_scan(const SelectiveScanArgs& args, const SelectiveScanOut& out, const Context& context);
Status mamba_selective_scan_backward(const SelectiveScanArgs& args, const SelectiveScanOut& out,
                                     const SelectiveScanGrads& grads, const Context& context);
int64_t mamba_selective_scan_workspace(const SelectiveScanArgs& args, Pass pass, const Context& context);

// One or few tokens with the state carried in place.
struct SelectiveScanDecodeArgs {
  View x, dt;    // [B, T, E]
  View A;        // [E, K] f32
  View B, C;     // [B, T, G, K] or [B, T, K]
  View D;        // optional [E]
  View z;        // optional [B, T, E]
  View dt_bias;  // optional [E]
  View state;    // [B, E, K] f32: read and overwritten
};
struct SelectiveScanDecodeOut {
  View out;  // [B, T, E]
};
struct SelectiveScanDecodeGrads {};
const Op& mamba_selective_scan_decode_op();
Status mamba_selective_scan_decode(const SelectiveScanDecodeArgs& args, const SelectiveScanDecodeOut& out,
                                   const Context& context);
int64_t mamba_selective_scan_decode_workspace(const SelectiveScanDecodeArgs& args, const Context& context);

LINNET_KERNELS(mamba_selective_scan, SelectiveScanArgs, SelectiveScanOut, SelectiveScanGrads)
LINNET_CUDA_KERNELS(mamba_selective_scan, SelectiveScanArgs, SelectiveScanOut, SelectiveScanGrads)
LINNET_CUDA_KERNELS(mamba_selective_scan_decode, SelectiveScanDecodeArgs, SelectiveScanDecodeOut, SelectiveScanDecodeGrads)
LINNET_KERNELS(mamba_selective_scan_decode, SelectiveScanDecodeArgs, SelectiveScanDecodeOut, SelectiveScanDecodeGrads)

// B and C as [B, T, G, K].
LINNET_INLINE View grouped(const View& view) {
  if (view.rank != 3) return view;
  View four = view;
  four.rank = 4;
  four.size[3] = view.size[2];
  four.stride[3] = view.stride[2];
  four.size[2] = 1;
  four.stride[2] = 0;
  return four;
}

}  // namespace linnet
