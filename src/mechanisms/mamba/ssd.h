// mamba_ssd: the state space dual of Mamba-2 (arXiv 2405.21060): one matrix state per head with one decay per head and token.
//
//   delta = clamp(softplus(dt + dt_bias), dt_min, dt_max)
//   S_t = exp(delta_t A) S_{t-1} + B_t (delta_t x_t)^T
//   y_t = S_t^T C_t + D x_t,   times z_t sigmoid(z_t) if z is given
//
// It is `recurrence` with q = C, k = B, v = delta x, g = delta A and scale 1; head h uses group h / (H / G) of B and C. States
// are [K, V], K the paper's N and V its P (the official layout is the transposed one).
#pragma once

#include "../../core/args.h"

namespace linnet {

struct SsdArgs {
  View x;              // [B, T, H, V]
  View dt;             // [B, T, H], before bias and softplus
  View A;              // [H] f32, negative
  View B, C;           // [B, T, G, K]
  View D;              // optional [H] or [H, V]: the skip
  View z;              // optional [B, T, H, V]: the gate
  View dt_bias;        // optional [H]
  View cu_seqlens;     // optional [N+1]: packed sequences (x [total, H, V] or with B = 1)
  View initial_state;  // optional [N, H, K, V] f32; N = B unless packed
  double dt_min = 0;   // limits of delta
  Maybe dt_max;        // none: no limit
};
struct SsdOut {
  View out;          // [B, T, H, V]
  View final_state;  // [N, H, K, V] f32
};
struct SsdGrads {
  View dout, dfinal_state;                                     // incoming; absent = zero
  View dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_state;  // results; absent = not wanted
};
const Op& mamba_ssd_op();
Status mamba_ssd(const SsdArgs& args, const SsdOut& out, const Context& context);
Status mamba_ssd_backward(const SsdArgs& args, const SsdOut& out, const SsdGrads& grads, const Context& context);
int64_t mamba_ssd_workspace(const SsdArgs& args, Pass pass, const Context& context);

// One or few tokens with the state carried in place.
struct SsdDecodeArgs {
  View x, dt, A, B, C, D, z, dt_bias;
  View state;  // [B, H, K, V] f32: read and overwritten
  double dt_min = 0;
  Maybe dt_max;
};
struct SsdDecodeOut {
  View out;  // [B, T, H, V]
};
struct SsdDecodeGrads {};
const Op& mamba_ssd_decode_op();
Status mamba_ssd_decode(const SsdDecodeArgs& args, const SsdDecodeOut& out, const Context& context);
int64_t mamba_ssd_decode_workspace(const SsdDecodeArgs& args, const Context& context);

LINNET_KERNELS(mamba_ssd, SsdArgs, SsdOut, SsdGrads)
LINNET_KERNELS(mamba_ssd_decode, SsdDecodeArgs, SsdDecodeOut, SsdDecodeGrads)

}  // namespace linnet
