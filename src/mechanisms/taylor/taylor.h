// taylor: attention whose weights are second-order Taylor polynomials, in linear time: exactly, through packed features
// (Based), and compact, with the squares alone (QT-ViT, as in the paper and as released).
//
//   exact       w = 1 + s + s^2 / 2,  s = scale q.k          phi = [1; y; y_i^2 / sqrt 2; y_i y_j, i < j],  y = sqrt(scale) x
//   compact     w = (alpha^2 sum_d q_d^2 k_d^2 + 2 beta^2 s + gamma^2 + 1) / 2
//                                          phi = [alpha x^2; beta sqrt(2 scale) x; gamma; 1] / sqrt 2
//   compact_l2  w = u(q).u(k) + c^2,  u(x) = unit(unit(x)^2)  phi = [u; c]
//   o_i = sum_j w_ij v_j / (sum_j w_ij + eps),  j: all keys, or j <= i when causal
//
// Xu et al., NeurIPS 2024 (QT-ViT); Arora et al. 2024, arXiv 2402.18668 (Based). docs/mechanisms/taylor.md.
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class TaylorMode : int32_t { exact, compact, compact_l2 };

struct TaylorExactArgs {
  View q, k, v;   // [B, T, H, K], [B, S, H, K], [B, S, H, V]; S = T when causal
  View key_mask;  // optional [B, S] u8
  bool causal = false;
  Maybe scale;  // default K^-0.5
  double eps = 1e-12;
};
struct TaylorOut {
  View out;          // [B, T, H, V]
  View den;          // [B, T, H] f32
  View phi_q;        // optional [B, T, H, F] f32
  View final_state;  // optional [B, H, F, V] f32
  View final_z;      // optional [B, H, F] f32
};
struct TaylorExactGrads {
  View dout, dq, dk, dv;
};
const Op& taylor_exact_op();
Status taylor_exact(const TaylorExactArgs& args, const TaylorOut& out, const Context& context);
Status taylor_exact_backward(const TaylorExactArgs& args, const TaylorOut& out, const TaylorExactGrads& grads,
                             const Context& context);
int64_t taylor_exact_workspace(const TaylorExactArgs& args, Pass pass, const Context& context);

struct TaylorCompactArgs {
  View q, k, v, key_mask;
  View alpha, beta, gamma;  // []
  bool causal = false;
  Maybe scale;
  double eps = 1e-12;
};
struct TaylorCompactGrads {
  View dout, dq, dk, dv, dalpha, dbeta, dgamma;
};
const Op& taylor_compact_op();
Status taylor_compact(const TaylorCompactArgs& args, const TaylorOut& out, const Context& context);
Status taylor_compact_backward(const TaylorCompactArgs& args, const TaylorOut& out, const TaylorCompactGrads& grads,
                               const Context& context);
int64_t taylor_compact_workspace(const TaylorCompactArgs& args, Pass pass, const Context& context);

struct TaylorCompactL2Args {
  View q, k, v, key_mask;
  View constant;  // [], `const` of the paper's code
  bool causal = false;
  double eps = 1e-15;
};
struct TaylorCompactL2Grads {
  View dout, dq, dk, dv, dconstant;
};
const Op& taylor_compact_l2_op();
Status taylor_compact_l2(const TaylorCompactL2Args& args, const TaylorOut& out, const Context& context);
Status taylor_compact_l2_backward(const TaylorCompactL2Args& args, const TaylorOut& out, const TaylorCompactL2Grads& grads,
                                  const Context& context);
int64_t taylor_compact_l2_workspace(const TaylorCompactL2Args& args, Pass pass, const Context& context);

// QT-ViT's attention module between its convolutions: compact_l2 with keys k + ape, plus gelu of the batch-normalised values.
struct TaylorQtArgs {
  View q, k, v;                              // [B, T, H, K]
  View ape;                                  // [T, H, K]
  View constant;                             // []
  View bn_weight, bn_bias, bn_mean, bn_var;  // [K]
  bool causal = false;
  double eps = 1e-15, bn_eps = 1e-5;
};
struct TaylorQtOut {
  View out;  // [B, T, H, K]
};
struct TaylorQtGrads {
  View dout, dq, dk, dv, dape, dconstant, dbn_weight, dbn_bias;
};
const Op& taylor_qt_layer_op();
Status taylor_qt_layer(const TaylorQtArgs& args, const TaylorQtOut& out, const Context& context);
Status taylor_qt_layer_backward(const TaylorQtArgs& args, const TaylorQtOut& out, const TaylorQtGrads& grads,
                                const Context& context);
int64_t taylor_qt_layer_workspace(const TaylorQtArgs& args, Pass pass, const Context& context);

// One or few tokens with the sums in place.
struct TaylorDecodeArgs {
  View q, k, v;             // [B, T, H, K], [B, T, H, K], [B, T, H, V]
  View state, z;            // [B, H, F, V], [B, H, F] f32: read and overwritten
  View alpha, beta, gamma;  // [] compact
  View constant;            // [] compact_l2
  TaylorMode mode = TaylorMode::exact;
  Maybe scale;
  Maybe eps;  // default 1e-12, compact_l2 1e-15
};
struct TaylorDecodeOut {
  View out;
};
struct TaylorDecodeGrads {};
const Op& taylor_decode_op();
Status taylor_decode(const TaylorDecodeArgs& args, const TaylorDecodeOut& out, const Context& context);
int64_t taylor_decode_workspace(const TaylorDecodeArgs& args, const Context& context);

LINNET_KERNELS(taylor_exact, TaylorExactArgs, TaylorOut, TaylorExactGrads)
LINNET_KERNELS(taylor_compact, TaylorCompactArgs, TaylorOut, TaylorCompactGrads)
LINNET_KERNELS(taylor_compact_l2, TaylorCompactL2Args, TaylorOut, TaylorCompactL2Grads)
LINNET_KERNELS(taylor_qt_layer, TaylorQtArgs, TaylorQtOut, TaylorQtGrads)
LINNET_KERNELS(taylor_decode, TaylorDecodeArgs, TaylorDecodeOut, TaylorDecodeGrads)

LINNET_CUDA_KERNELS(taylor_exact, TaylorExactArgs, TaylorOut, TaylorExactGrads)
LINNET_CUDA_KERNELS(taylor_compact, TaylorCompactArgs, TaylorOut, TaylorCompactGrads)
LINNET_CUDA_KERNELS(taylor_compact_l2, TaylorCompactL2Args, TaylorOut, TaylorCompactL2Grads)
LINNET_CUDA_KERNELS(taylor_qt_layer, TaylorQtArgs, TaylorQtOut, TaylorQtGrads)
LINNET_CUDA_KERNELS(taylor_decode, TaylorDecodeArgs, TaylorDecodeOut, TaylorDecodeGrads)

// What a map of this family is made of.
struct TaylorMap {
  TaylorMode mode;
  int64_t K, F;
  double scale, alpha, beta, gamma, constant, eps;
};
LINNET_INLINE TaylorMap taylor_map(TaylorMode mode, int64_t K, double scale) {
  const int64_t F = mode == TaylorMode::exact ? 1 + K + K * (K + 1) / 2 : mode == TaylorMode::compact ? 2 * K + 2 : K + 1;
  return {mode, K, F, scale, 1, 0, 1, 1, 1e-15};
}
LINNET_INLINE double taylor_scale(const Maybe& scale, int64_t K) {
  return scale.value_or(K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(K)));
}

}  // namespace linnet
