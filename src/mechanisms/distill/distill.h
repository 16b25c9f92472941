// distill: linear attention whose positive features are learned from a softmax layer, and what chooses their number.
//
//   l(x)_m = D^-1/4 z_m.x - |x|^2 / (2 sqrt D) + (1/2) log(alpha_m / M)
//   log a_ij = logsumexp_m(l(q_i)_m + l(k_j)_m + key_logw_j),   out_i = sum_j a_ij v_j / sum_j a_ij       j <= i when causal
//
// Nishikawa, Higuchi, Suzuki, NeurIPS 2025, arXiv 2507.03340. The estimator of degrees of freedom, allocation, balancing,
// losses, statistics of heads and hybrids with a window: docs/mechanisms/distill.md.
#pragma once

#include "../../core/args.h"

namespace linnet {

struct DistillArgs {
  View q, k, v;   // [B, T, H, K], [B, T, H, K], [B, T, H, V]
  View z;         // [H, M, K] f32: directions
  View alpha;     // [H, M] f32, > 0; 0 switches a feature off
  View key_mask;  // optional [B, T] u8
  View key_logw;  // optional [B, T, H] f32: added to the logarithm of each key's weight
  bool causal = false;
  Maybe scale;  // of the scores; default K^-0.5
};
struct DistillOut {
  View out;                                              // [B, T, H, V]
  View out_softmax;                                      // optional [B, T, H, V]: the teacher's output
  View loss_l2, loss_l2rel, loss_ce, loss_kl, loss_mse;  // optional [H] f32
  View dz_l2, dz_l2rel, dz_ce, dz_mse;                   // optional [H, M, K] f32: gradients of the losses
  View dalpha_l2, dalpha_l2rel, dalpha_ce, dalpha_mse;   // optional [H, M] f32
};
struct DistillGrads {
  View dout, dq, dk, dv, dz, dalpha, dkey_logw;
};
const Op& distill_op();
Status distill(const DistillArgs& args, const DistillOut& out, const Context& context);
Status distill_backward(const DistillArgs& args, const DistillOut& out, const DistillGrads& grads, const Context& context);
int64_t distill_workspace(const DistillArgs& args, Pass pass, const Context& context);

// One or few tokens; per feature the running maximum c of l(k), and S, n in units of exp(c).
struct DistillDecodeArgs {
  View q, k, v;   // [B, T, H, K], [B, T, H, K], [B, T, H, V]
  View z, alpha;  // [H, M, K], [H, M]
  View state;     // [B, H, M, V] f32: read and overwritten
  View n;         // [B, H, M] f32
  View c;         // [B, H, M] f32; -inf at first
  View key_logw;  // optional [B, T, H] f32
  Maybe scale;
};
struct DistillDecodeOut {
  View out;
};
struct DistillDecodeGrads {};
const Op& distill_decode_op();
Status distill_decode(const DistillDecodeArgs& args, const DistillDecodeOut& out, const Context& context);
int64_t distill_decode_workspace(const DistillDecodeArgs& args, const Context& context);

// Degrees of freedom of the kernel exp(x.y / sqrt D) (softmax) or exp(-|x-y|^2 / (2 sqrt D)) (gauss) on samples, in double.
struct DistillDofArgs {
  View x;       // [J, D], J declared as T
  View lambda;  // [N], > 0
  View z;       // [P, D]: candidate directions; P may be 0
  double leverage_lambda = 0.0625;
};
struct DistillDofOut {
  View dof_softmax_mean, dof_softmax_gram, dof_softmax_trace;  // optional [N]
  View dof_gauss_mean, dof_gauss_gram, dof_gauss_trace;
  View eig_softmax_mean, eig_gauss_mean;  // optional [J], descending
  View leverage;                          // optional [P]
  View unresolved;                        // optional [6, N]: 1 where small eigenvalues are lost to rounding, in the order above
};
struct DistillDofGrads {};
const Op& distill_dof_op();
Status distill_dof(const DistillDofArgs& args, const DistillDofOut& out, const Context& context);
int64_t distill_dof_workspace(const DistillDofArgs& args, const Context& context);

// Dimensions per layer under a budget.
struct DistillAllocArgs {
  View dof;                                 // [S, H]: degrees of freedom of each head
  View spectra;                             // optional [S, R]: eigenvalues, descending
  View weights;                             // optional [S]
  double cost = 64;                         // mean dimension per layer
  int64_t low = 0, high = 0, multiple = 1;  // high 0: no limit
  int64_t greedy_total = 0;
};
struct DistillAllocOut {
  View dims, dims_clip, dims_aligned, dims_exact, dims_greedy;  // optional [S] i64
};
struct DistillAllocGrads {};
const Op& distill_alloc_op();
Status distill_alloc(const DistillAllocArgs& args, const DistillAllocOut& out, const Context& context);
int64_t distill_alloc_workspace(const DistillAllocArgs& args, const Context& context);

// The exact symmetries of softmax attention that make its kernel easiest for features, and attention with and without them.
struct DistillBalanceArgs {
  View q, k, v;   // [B, T, H, K], [B, T, H, K], [B, T, H, V]
  View z, alpha;  // [H, M, K], [H, M]
  bool causal = true;
  double ridge = 1e-6;
  int64_t window = 64;  // of out_hybrid, the current key included
};
struct DistillBalanceOut {
  View q_mean, k_mean;           // optional [H, K] f32
  View A;                        // optional [H, K, K] f32
  View q_balanced, k_balanced;   // optional [B, T, H, K] f32
  View key_logw;                 // optional [B, T, H] f32
  View out, out_plain;           // optional [B, T, H, V]: features with and without balancing
  View out_softmax, out_hybrid;  // optional [B, T, H, V]: the teacher, and exact window with balanced features beyond it
};
struct DistillBalanceGrads {};
const Op& distill_balance_op();
Status distill_balance(const DistillBalanceArgs& args, const DistillBalanceOut& out, const Context& context);
int64_t distill_balance_workspace(const DistillBalanceArgs& args, const Context& context);

// Hybrids of a softmax window with hedgehog features, and statistics of causal softmax heads.
struct DistillWindowArgs {
  View q, k, v;        // [B, T, H, K], [B, T, H, K], [B, T, H, V]
  View wq, wk;         // [H, K, F]
  View window_factor;  // [H]
  int64_t window = 64;
  Sizes windows{3, {1, 4, 16}};
  int64_t sinks = 4;
};
struct DistillWindowOut {
  View fq, fk;                                                                                 // optional [B, T, H, 2*F] f32
  View out_sliding, out_terraced;                                                              // optional [B, T, H, V]
  View entropy, entropy_ratio, distance, window_mass, sink_mass, stable_rank, effective_rank;  // optional [H], mass [H, W], f32
  View gate_dt_bias, gate_beta, gate_beta_logit;                                               // optional [H] f32
};
struct DistillWindowGrads {
  View dout_sliding, dout_terraced;
  View dq, dk, dv, dwq, dwk, dwindow_factor;
};
const Op& distill_window_op();
Status distill_window(const DistillWindowArgs& args, const DistillWindowOut& out, const Context& context);
Status distill_window_backward(const DistillWindowArgs& args, const DistillWindowOut& out, const DistillWindowGrads& grads,
                               const Context& context);
int64_t distill_window_workspace(const DistillWindowArgs& args, Pass pass, const Context& context);

// One or few tokens of a hybrid, or a whole prompt. Keys stay in a buffer of 2 window rows while they may be near; what left
// the window stands in sums of features.
enum class DistillForm : int32_t { sliding, terraced };
struct DistillWindowDecodeArgs {
  View q, k, v;         // [B, T, H, K], [B, T, H, K], [B, T, H, V]
  View wq, wk;          // [H, K, F]
  View window_factor;   // [H]
  View k_near, v_near;  // [B, 2 window, H, K], [B, 2 window, H, V]: read and overwritten
  View held;            // [B] i64: rows of them in use
  View state;           // [B, H, 2 F, V] f32
  View n;               // [B, H, 2 F] f32
  int64_t window = 64;
  DistillForm form = DistillForm::sliding;
};
struct DistillWindowDecodeOut {
  View out;
};
struct DistillWindowDecodeGrads {};
const Op& distill_window_decode_op();
Status distill_window_decode(const DistillWindowDecodeArgs& args, const DistillWindowDecodeOut& out, const Context& context);
int64_t distill_window_decode_workspace(const DistillWindowDecodeArgs& args, const Context& context);

// hybrid-exact: the last `window` keys and the first `sinks` keys with their exact scores q.k K^-0.5, the keys between them by
// positive features of balanced queries and keys in the same scale, one normaliser:
//   a_ij = exp(sum_m l(q'_i)_m + l(k'_j)_m + query_logw_i + key_logw_j) summed over the features, l as above
struct DistillHybridArgs {
  View q, k, v;                 // [B, T, H, K], [B, T, H, K], [B, T, H, V]
  View q_balanced, k_balanced;  // [B, T, H, K]: A (q - q0), A^-1 (k - k0)
  View query_logw, key_logw;    // [B, T, H] f32: K^-0.5 (q - q0).k0, K^-0.5 q0.k
  View z, alpha;                // [H, M, K], [H, M]
  int64_t window = 64, sinks = 0;
};
struct DistillHybridOut {
  View out;  // [B, T, H, V]
};
struct DistillHybridGrads {};
const Op& distill_hybrid_op();
Status distill_hybrid(const DistillHybridArgs& args, const DistillHybridOut& out, const Context& context);
int64_t distill_hybrid_workspace(const DistillHybridArgs& args, const Context& context);

// One or few tokens, or a prompt, from a bounded state: the first keys, a buffer of 2 window keys, sums of features of all
// others.
struct DistillHybridDecodeArgs {
  View q, k, v, q_balanced, k_balanced, query_logw, key_logw, z, alpha;
  View k_first, v_first;  // [B, sinks, H, K], [B, sinks, H, V]
  View first;             // [B] i64: how many of them there are
  View k_near, v_near;    // [B, 2 window, H, K], [B, 2 window, H, V]
  View l_near;            // [B, 2 window, H, M] f32: log features of the keys
  View held;              // [B] i64: rows of them in use; at 2 window the older half moves out
  View state, n, c;       // [B, H, M, V], [B, H, M], [B, H, M] f32, as distill_decode has them
  int64_t window = 64, sinks = 0;
};
const Op& distill_hybrid_decode_op();
Status distill_hybrid_decode(const DistillHybridDecodeArgs& args, const DistillHybridOut& out, const Context& context);
int64_t distill_hybrid_decode_workspace(const DistillHybridDecodeArgs& args, const Context& context);

LINNET_KERNELS(distill, DistillArgs, DistillOut, DistillGrads)
LINNET_KERNELS(distill_hybrid, DistillHybridArgs, DistillHybridOut, DistillHybridGrads)
LINNET_KERNELS(distill_hybrid_decode, DistillHybridDecodeArgs, DistillHybridOut, DistillHybridGrads)
LINNET_KERNELS(distill_decode, DistillDecodeArgs, DistillDecodeOut, DistillDecodeGrads)
LINNET_KERNELS(distill_dof, DistillDofArgs, DistillDofOut, DistillDofGrads)
LINNET_KERNELS(distill_alloc, DistillAllocArgs, DistillAllocOut, DistillAllocGrads)
LINNET_KERNELS(distill_balance, DistillBalanceArgs, DistillBalanceOut, DistillBalanceGrads)
LINNET_KERNELS(distill_window, DistillWindowArgs, DistillWindowOut, DistillWindowGrads)
LINNET_KERNELS(distill_window_decode, DistillWindowDecodeArgs, DistillWindowDecodeOut, DistillWindowDecodeGrads)
LINNET_CUDA_KERNELS(distill, DistillArgs, DistillOut, DistillGrads)
LINNET_CUDA_KERNELS(distill_decode, DistillDecodeArgs, DistillDecodeOut, DistillDecodeGrads)
LINNET_CUDA_KERNELS(distill_window, DistillWindowArgs, DistillWindowOut, DistillWindowGrads)
LINNET_CUDA_KERNELS(distill_window_decode, DistillWindowDecodeArgs, DistillWindowDecodeOut, DistillWindowDecodeGrads)
LINNET_CUDA_KERNELS(distill_hybrid, DistillHybridArgs, DistillHybridOut, DistillHybridGrads)
LINNET_CUDA_KERNELS(distill_hybrid_decode, DistillHybridDecodeArgs, DistillHybridOut, DistillHybridGrads)

LINNET_INLINE double distill_scale(const Maybe& scale, int64_t K) {  // what multiplies q, so that its scores have scale K^-0.5
  return scale.given ? scale.value * __builtin_sqrt(static_cast<double>(K)) : 1;
}

// Whether one feature alone of head h counts: every key then has the same share for all queries, which get no gradient.
bool distill_one_feature(const View& alpha, int64_t h);

// distill_window: the first key of row i's window. Sliding: the last `window` keys; terraced: the current and the previous
// block.
LINNET_INLINE constexpr int64_t distill_window_begin(bool terraced, int64_t window, int64_t i) {
  const int64_t begin = terraced ? (i / window - 1) * window : i - window + 1;
  return begin > 0 ? begin : 0;
}
// Rows of distill_window_decode's buffer in use when so many were put into it: whenever 2 window are full, the older half moves
// out for the next one.
LINNET_INLINE int64_t distill_window_held(int64_t window, int64_t rows) {
  return rows <= 2 * window ? rows : window + 1 + (rows - 1) % window;
}
LINNET_INLINE int64_t distill_held_rows(const View& held, int64_t b) {
  return held.dtype == Dtype::i32 ? *held.at<const int32_t>(b) : *held.at<const int64_t>(b);
}
LINNET_INLINE void distill_window_hold(const View& held, int64_t b, int64_t rows) {
  if (held.dtype == Dtype::i32) {
    *held.at<int32_t>(b) = static_cast<int32_t>(rows);
  } else {
    *held.at<int64_t>(b) = rows;
  }
}
inline constexpr int64_t kDistillRankBlock = 512;  // tokens of a block whose ranks are taken
// Starting values of a gated delta rule's gates from the statistics [H] of its heads (docs/mechanisms/distill.md).
void distill_gates(const DistillWindowOut& out, int64_t H, const double* entropy, const double* distance);

// The teacher's output, losses and their gradients of one head; in double, tile-free, one row of scores at a time. Shared by
// the reference and the kernels. scratch: distill_loss_scratch(args) doubles.
void distill_losses(const DistillArgs& args, const DistillOut& out, int64_t h, double* scratch);
int64_t distill_loss_scratch(const DistillArgs& args);
bool distill_wants_losses(const DistillOut& out);

}  // namespace linnet
