// What the kernels of h3 and h3_decode are told (h3_cuda.cu).
#pragma once

#include "mechanisms/h3/h3.h"
#include "mechanisms/shared/strided.h"

namespace linnet::cuda {

struct H3Rows {
  View q, k, v, sb, sc, sd, log_dt, log_neg_re, imag, b, c, d, cu_seqlens;
  View shift_before, diag_before, shift_after, diag_after;  // states, absent or f32
  View out, taps_shift, taps_diag;
  H3Disc disc = H3Disc::bilinear;
  int64_t N = 0;             // sequences
  float* ring = nullptr;     // [N, C, R]: the shift register, element i of token t at (i - t) mod R
  float* kbar = nullptr;     // [B, T, C]
  double* states = nullptr;  // [N, H, P, P, M, 2]
};
// Backward. Parameters of the long filter get their gradients from a walk forward, which carries the derivatives of the states
// beside them, so that no states are kept: with ds the gradient of s, D = dX/da and E = dX/dbd,
//   D_t = a D_{t-1} + X_{t-1},  E_t = a E_{t-1} + kv_t,  F_c = sum ds X,  F_a = c sum ds D,  F_bd = c sum ds E
// and what the gradient of the last state adds to F_a and F_bd. Those of kbar and v come from a walk back.
struct H3Back {
  H3Rows r;
  Strided dout, dshift_after, ddiag_after;
  Strided dq, dk, dv, dshift_before, ddiag_before;
  Strided dlog_dt, dlog_neg_re, dimag, db, dc, dd;
  int64_t state_strides[2][2] = {};                      // of ddiag_after and ddiag_before: the last two of six dimensions
  double* walk = nullptr;                                // [N, H, P, P, M, 12]: X, D, E and the sums F; on the way back: Y
  double* skip = nullptr;                                // [N, H, P, P]: what dd is a sum of
  double* sums = nullptr;                                // [H, M, 6], then [H]
  double* dkbar = nullptr;                               // [B, T, C]
  double* shifts = nullptr;                              // [N, C, R]: the gradient of the shift register
  float *dsb = nullptr, *dsc = nullptr, *dsd = nullptr;  // [N, C, R], [N, C, R], [N, C]
};
static_assert(sizeof(H3Back) + 8 <= 4096);
inline constexpr int kH3Tokens = 16;  // of a state at a time

}  // namespace linnet::cuda
