// h3: the H3 mixer (arXiv 2212.14052): keys through a short learned filter, times the values, through a long filter made by a
// diagonal state space model, times the queries.
//
//   x_t[n] = x_{t-1}[n-1] + sb[n] k_t,   kbar_t = sc . x_t + sd k_t                        the shift SSM, per channel
//   X_t = a X_{t-1} + bd kv_t,   s_t = 2 Re(c . X_t) + d kv_t,   kv_t = kbar_t[p] v_t[r]     the diagonal SSM, per head
//   y_t[r] = sum_p q_t[p] s_t[p, r]
//
// with A = -exp(log_neg_re) + i imag, dt = exp(log_dt), z = A dt, and (bilinear) a = (1 + z/2) / (1 - z/2), bd = b dt / (1 -
// z/2) or (zoh) a = exp(z), bd = b (exp(z) - 1) / A. Channel c of q, k, v is head c / P, slot c % P; channel c of out is slot c
// / H, head c % H.
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class H3Disc : int32_t { bilinear, zoh };
enum class H3Form : int32_t { measured, chunk, fft };

struct H3Args {
  View q, k, v;              // [B, T, C]
  View sb, sc;               // [C, R]: shift input and output vectors
  View sd;                   // [C]: shift skip
  View log_dt;               // [H]: log step size
  View log_neg_re;           // [H, M]: log of minus the real part of A
  View imag;                 // [H, M]: imaginary part of A
  View b, c;                 // [H, M, 2]: complex input and output vectors
  View d;                    // [H]: skip
  View cu_seqlens;           // optional [N+1]: packed sequences (q, k, v [total, C] or with B = 1)
  View initial_state_shift;  // optional [N, C, R] f32: x before the first token; N = B unless packed
  View initial_state_diag;   // optional [N, H, P, P, M, 2] f32: X before the first token, [.., key slot, value slot, ..]
  H3Disc disc = H3Disc::bilinear;
  H3Form form = H3Form::measured;  // how the long filter is applied
  int64_t head_dim = 0;            // P; 0: C / H
  int64_t heads = 0;               // H; 0: as log_dt says
};
struct H3Out {
  View out;          // [B, T, C], slot-major
  View taps_shift;   // [C, T]: the short filter
  View taps_diag;    // [H, T]: the long filter, without d
  View state_shift;  // [N, C, R] f32
  View state_diag;   // [N, H, P, P, M, 2] f32
};
struct H3Grads {
  View dout, dstate_shift, dstate_diag;  // incoming; absent = zero
  View dq, dk, dv, dsb, dsc, dsd, dlog_dt, dlog_neg_re, dimag, db, dc, dd, dinitial_state_shift, dinitial_state_diag;
};
const Op& h3_op();
Status h3(const H3Args& args, const H3Out& out, const Context& context);
Status h3_backward(const H3Args& args, const H3Out& out, const H3Grads& grads, const Context& context);
int64_t h3_workspace(const H3Args& args, Pass pass, const Context& context);

// One or few tokens with the states carried in place.
struct H3DecodeArgs {
  View q, k, v;
  View sb, sc, sd, log_dt, log_neg_re, imag, b, c, d;
  View state_shift;  // [B, C, R] f32: read and overwritten
  View state_diag;   // [B, H, P, P, M, 2] f32: read and overwritten
  H3Disc disc = H3Disc::bilinear;
  int64_t head_dim = 0, heads = 0;
};
struct H3DecodeOut {
  View out;  // [B, T, C]
};
struct H3DecodeGrads {};
const Op& h3_decode_op();
Status h3_decode(const H3DecodeArgs& args, const H3DecodeOut& out, const Context& context);
int64_t h3_decode_workspace(const H3DecodeArgs& args, const Context& context);

LINNET_KERNELS(h3, H3Args, H3Out, H3Grads)
LINNET_KERNELS(h3_decode, H3DecodeArgs, H3DecodeOut, H3DecodeGrads)
LINNET_CUDA_KERNELS(h3, H3Args, H3Out, H3Grads)
LINNET_CUDA_KERNELS(h3_decode, H3DecodeArgs, H3DecodeOut, H3DecodeGrads)

}  // namespace linnet
