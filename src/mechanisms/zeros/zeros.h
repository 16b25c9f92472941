// zeros: linear-time attention whose weights may be negative and sum to zero (Lu et al. 2025, arXiv 2602.05230).
//
// All sums over the n_t keys that row t reads (1 .. t when causal), which are never a matrix of T x T:
//   mean_t = (1/n) sum_i s_i,   delta_ti = s_i - mean_t,   p_ti = exp(s_i) / sum_j exp(s_j),   eps_ti = p_ti - 1/n - delta_ti/n
//   r_ti = s1_t delta_ti/n + sh_t eps_ti + s0_t/n
//   o_t  = sum_i r_ti <q_t, k_i> v_i
#pragma once

#include "../../core/args.h"

namespace linnet {

struct ZerosArgs {
  View q, k;      // [B, T, H, K], of unit length
  View v;         // [B, T, H, V]
  View s;         // [B, T, H]: the logit of each key
  View s1, sh;    // [B, T, H]: gates of the reading row, in (0, 1)
  View s0;        // optional [B, T, H]: gate of the zeroth order, in (-1, 1); absent: 0
  View key_mask;  // optional [B, T] u8: keys with 0 are not there
  bool causal = true;
  bool zeroth = false, masked = false;  // what vector files say about s0 and key_mask; 1: they must be given
};
struct ZerosOut {
  View out;  // [B, T, H, V]
};
struct ZerosGrads {
  View dout;                           // incoming; absent = zero
  View dq, dk, dv, ds, ds1, dsh, ds0;  // results; absent = not wanted
};
const Op& zeros_op();
Status zeros(const ZerosArgs& args, const ZerosOut& out, const Context& context);
Status zeros_backward(const ZerosArgs& args, const ZerosOut& out, const ZerosGrads& grads, const Context& context);
int64_t zeros_workspace(const ZerosArgs& args, Pass pass, const Context& context);

// One or few tokens with the memory carried in place, in the zero-sum basis:
//   state[0] = R0 = (1/n) sum k v^T,   state[1] = R1 = (1/n) sum (s - mean) k v^T,   state[2] = Rp = sum p k v^T - R0
struct ZerosDecodeArgs {
  View q, k, v, s, s1, sh, s0;  // as above, T small
  View state;                   // [B, H, 3, K, V] f32: read and overwritten
  View moments;  // [B, H, 5] f32: log mean exp(s) and mean(s), each as a sum of two numbers, and n; zeros at first
  bool zeroth = false;
};
struct ZerosDecodeOut {
  View out;  // [B, T, H, V]
};
struct ZerosDecodeGrads {};
const Op& zeros_decode_op();
Status zeros_decode(const ZerosDecodeArgs& args, const ZerosDecodeOut& out, const Context& context);
int64_t zeros_decode_workspace(const ZerosDecodeArgs& args, const Context& context);

// The quadratic variant: s_ti = scale <q_t, k_i>, weights r_ti as above, o_t = sum_i r_ti v_i without the cosine.
struct ZerosSoftmaxArgs {
  View q, k;    // [B, T, H, K]
  View v;       // [B, T, H, V]
  View s1, sh;  // [B, T, H]
  View s0;      // optional [B, T, H]
  Maybe scale;  // default K^-0.5
  bool causal = true;
  bool zeroth = false;
};
struct ZerosSoftmaxGrads {
  View dout;                       // incoming; absent = zero
  View dq, dk, dv, ds1, dsh, ds0;  // results; absent = not wanted
};
const Op& zeros_softmax_op();
Status zeros_softmax(const ZerosSoftmaxArgs& args, const ZerosOut& out, const Context& context);
Status zeros_softmax_backward(const ZerosSoftmaxArgs& args, const ZerosOut& out, const ZerosSoftmaxGrads& grads,
                              const Context& context);
int64_t zeros_softmax_workspace(const ZerosSoftmaxArgs& args, Pass pass, const Context& context);

LINNET_KERNELS(zeros, ZerosArgs, ZerosOut, ZerosGrads)
LINNET_KERNELS(zeros_decode, ZerosDecodeArgs, ZerosDecodeOut, ZerosDecodeGrads)
LINNET_CUDA_KERNELS(zeros, ZerosArgs, ZerosOut, ZerosGrads)
LINNET_CUDA_KERNELS(zeros_decode, ZerosDecodeArgs, ZerosDecodeOut, ZerosDecodeGrads)
LINNET_KERNELS(zeros_softmax, ZerosSoftmaxArgs, ZerosOut, ZerosSoftmaxGrads)

namespace ref {
double zeros_largest_logit(const ZerosArgs& args);
double zeros_softmax_largest_logit(const ZerosSoftmaxArgs& args);
}  // namespace ref

}  // namespace linnet
