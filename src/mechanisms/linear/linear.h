// linear: attention whose weights are inner products of feature maps, so that the sum over keys is a state of fixed size.
//
//   S_t = S_{t-1} + phi(k_t) v_t^T,   z_t = z_{t-1} + phi(k_t)
//   o_t = scale S_t^T phi(q_t),       divided by den_t = scale phi(q_t).z_t + eps when normalised
//
// Katharopoulos et al. 2020 (arXiv 2006.16236); chunked as in docs/notes/recurrence.md. Not causal: S and z over all keys
// first. Heads: H = max(Hq, Hk, Hv); each of the three divides H, and head h uses query head h / (H / Hq), and so on.
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class FeatureMap : int32_t { identity, elu1, relu, relu2, silu, softplus, exp, hedgehog, taylor2, dpfp, t2r };

struct LinearArgs {
  View q;              // [B, T, Hq, K], before the map
  View k;              // [B, S, Hk, K]; S = T when causal
  View v;              // [B, S, Hv, V]
  View w;              // [Hq, R, K], map t2r only (Hk = Hq): phi(x) = relu(w x), F = R
  View key_mask;       // optional [B, S] u8: keys with 0 are dropped from the sums
  View cu_seqlens;     // optional [N+1]: packed sequences (q, k, v [total, H, .] or with B = 1)
  View initial_state;  // optional [N, H, F, V] f32; N = B unless packed
  View initial_z;      // optional [N, H, F] f32
  FeatureMap map = FeatureMap::identity;
  bool causal = true;
  bool normalize = false;
  Maybe scale;                // default 1 when normalised, K^-0.5 otherwise
  double eps = 1e-6;          // added to the scaled sum
  int64_t dpfp_nu = 1;        // map dpfp: number of rolls
  bool allow_signed = false;  // normalise although the map (identity, silu) can make the denominator zero
};
struct LinearOut {
  View out;          // [B, T, H, V]
  View final_state;  // [N, H, F, V] f32: S after the last key, the initial state included
  View final_z;      // [N, H, F] f32
  View den;          // [B, T, H] f32 when normalised, else [B, T, 0]; map exp: the logarithm, which cannot overflow
};
struct LinearGrads {
  View dout, dfinal_state, dfinal_z;                // incoming; absent = zero
  View dq, dk, dv, dw, dinitial_state, dinitial_z;  // results; absent = not wanted
};

const Op& linear_op();
Status linear(const LinearArgs& args, const LinearOut& out, const Context& context);
// Reads out.out and out.den of the forward when normalised.
Status linear_backward(const LinearArgs& args, const LinearOut& out, const LinearGrads& grads, const Context& context);
int64_t linear_workspace(const LinearArgs& args, Pass pass, const Context& context);

// One or few tokens with the state carried in place.
struct LinearDecodeArgs {
  View q;             // [B, T, Hq, K]
  View k;             // [B, T, Hk, K]
  View v;             // [B, T, Hv, V]
  View state;         // [B, H, F, V] f32: read and overwritten
  View z;             // [B, H, F] f32: read and overwritten; required when normalised
  View compensation;  // optional [B, H, F, V] f32, zeros at first: what rounding took from `state`, for very long decoding
  View w;             // [Hq, R, K], map t2r only
  FeatureMap map = FeatureMap::identity;
  bool normalize = false;
  Maybe scale;
  double eps = 1e-6;
  int64_t dpfp_nu = 1;
  bool allow_signed = false;
};
struct LinearDecodeOut {
  View out;  // [B, T, H, V]
};
struct LinearDecodeGrads {};
const Op& linear_decode_op();
Status linear_decode(const LinearDecodeArgs& args, const LinearDecodeOut& out, const Context& context);
int64_t linear_decode_workspace(const LinearDecodeArgs& args, const Context& context);

LINNET_KERNELS(linear, LinearArgs, LinearOut, LinearGrads)
LINNET_KERNELS(linear_decode, LinearDecodeArgs, LinearDecodeOut, LinearDecodeGrads)

}  // namespace linnet
