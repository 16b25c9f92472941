// fem_read: the free energy mixer (Lu and Yang 2026, arXiv 2602.07160), a read of values through a log-sum-exp over a prior.
//
//   vc_ij = clip(v_ij, -cap/beta_j, cap/beta_j)
//   mu_tj = sum_i p_t(i) vc_ij                            the ordinary mean under the prior p
//   F_tj  = log( sum_i p_t(i) exp(beta_j vc_ij) ) / beta_j    the free energy: from the mean (beta -> 0) to the maximum
//   o_tj  = g_tj [ (1 - lam_tj) mu_tj + lam_tj F_tj ]
//
// Priors, over the keys i <= t when causal:
//   softmax  p = softmax(q_t.k_i / sqrt(K))
//   linear   w = phi(q_t).phi(k_i), phi(x) = relu(x) + feature_eps;  p = w / max(sum w, 1e-6)
//   gated    w = exp(a_{i+1} + .. + a_t) phi(q_t).phi(k_i);          p = w / (sum w + 1e-5)
//   aft      p_j = gate_tj exp(k_ij) / sum_l exp(k_lj), gate = softplus(q) + 1e-6 scaled to mean square 1 over the head
//   ssm      h_t = exp(delta_tj A_jr) h_{t-1} + delta_tj B_tr u_tj, y = sum_r C_tr h + D_j u; p = weights / max(their sum,
//   1e-6)
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class FemPrior : int32_t { softmax, linear, gated, aft, ssm, delta, zeros };  // the last two have signed weights: refused
enum class FemDenominator : int32_t { automatic, exact, max, plus };               // max(sum, 1e-6), sum + 1e-5

struct FemReadArgs {
  View v;         // [B, T, H, V]
  View beta;      // [H, V], > 0
  View lam;       // [B, T, H, V], in (0, 1)
  View q, k;      // [B, T, H, K]; aft: K = V; ssm: none
  View a;         // gated: [B, T, H], log decay, <= 0
  View delta;     // ssm: [B, T, H, V]
  View A;         // ssm: [H, V, R], < 0
  View Bm, Cm;    // ssm: [B, T, R]
  View D;         // ssm: [H, V]
  View g;         // optional [B, T, H, V]: outer gate; absent: 1
  View key_mask;  // optional [B, T] u8: keys with 0 have no weight
  FemPrior prior = FemPrior::softmax;
  bool causal = true;
  Maybe cap = 40;  // bound on |beta v|; none, 0: no bound
  FemDenominator denominator = FemDenominator::automatic;
  double feature_eps = 1e-6;
  bool masked = false;  // what vector files say about key_mask; 1: it must be given
};
struct FemReadOut {
  View out;   // [B, T, H, V]
  View mu;    // [B, T, H, V] f32: the mean
  View free;  // [B, T, H, V] f32: the free energy
  View norm;  // [B, T, H] f32: softmax: log of the normaliser; linear, gated: the sum of the weights; aft, ssm: [B, T, 0]
};
struct FemReadGrads {
  View dout;                                                       // incoming; absent = zero
  View dv, dbeta, dlam, dq, dk, da, ddelta, dA, dBm, dCm, dD, dg;  // results; absent = not wanted
};
const Op& fem_read_op();
Status fem_read(const FemReadArgs& args, const FemReadOut& out, const Context& context);
// Reads out.mu, out.free and out.norm of the forward.
Status fem_read_backward(const FemReadArgs& args, const FemReadOut& out, const FemReadGrads& grads, const Context& context);
int64_t fem_read_workspace(const FemReadArgs& args, Pass pass, const Context& context);

// One or few tokens with the prior's memory carried in place. Softmax keeps the keys and the values as they are (their
// exponentials are made anew); the others sums over [vc, exp(beta vc - shift), 1], `shift` the running maximum of beta vc.
struct FemReadDecodeArgs {
  View v, beta, lam, q, k, a, delta, A, Bm, Cm, D, g;  // as above, T small
  View k_cache, v_cache;                               // softmax: [B, capacity, H, K], [.., V], written at the new positions
  View lengths;                                        // softmax: [B] i32 or i64: read, then increased by T
  View state;                                          // linear, gated: [B, H, K, 2 V + 1] f32
  View sums;   // aft: [B, H, 4, V] f32: sums of exp(k - m) times 1, vc and exp(beta vc - shift), then m, -inf at first
  View scan;   // ssm: [B, H, 3, R, V] f32: h of vc, of exp(beta vc - shift) and of 1
  View shift;  // all but softmax: [B, H, V] f32, -inf at first
  FemPrior prior = FemPrior::softmax;
  Maybe cap = 40;
  FemDenominator denominator = FemDenominator::automatic;
  double feature_eps = 1e-6;
};
struct FemReadDecodeOut {
  View out;  // [B, T, H, V]
};
struct FemReadDecodeGrads {};
const Op& fem_read_decode_op();
Status fem_read_decode(const FemReadDecodeArgs& args, const FemReadDecodeOut& out, const Context& context);
int64_t fem_read_decode_workspace(const FemReadDecodeArgs& args, const Context& context);

LINNET_KERNELS(fem_read, FemReadArgs, FemReadOut, FemReadGrads)
LINNET_KERNELS(fem_read_decode, FemReadDecodeArgs, FemReadDecodeOut, FemReadDecodeGrads)
LINNET_CUDA_KERNELS(fem_read, FemReadArgs, FemReadOut, FemReadGrads)
LINNET_CUDA_KERNELS(fem_read_decode, FemReadDecodeArgs, FemReadDecodeOut, FemReadDecodeGrads)

namespace ref {
double fem_read_largest_logit(const FemReadArgs& args);
}  // namespace ref

// The shift M of exp(beta v - M) in a channel, from the largest and the smallest beta v: the largest, so that no term is above
// 1, or 600 less where values lie further apart than that. Sums in double then hold terms from e^-700 to e^600, e^109 are left
// for weights and the number of tokens, and a row keeps its digits beside a later value that is up to 1,300 larger.
LINNET_INLINE double fem_shift(double largest, double smallest) {
  constexpr double kHeadroom = 600;
  return largest - smallest > kHeadroom ? largest - kHeadroom : largest;
}
// The bound on |beta v|, or infinity.
LINNET_INLINE double fem_cap(Maybe cap) { return cap.given && cap.value > 0 ? cap.value : __builtin_inf(); }
LINNET_INLINE FemDenominator fem_denominator(FemPrior prior, FemDenominator asked) {
  if (asked != FemDenominator::automatic) return asked;
  switch (prior) {
    case FemPrior::linear:
    case FemPrior::ssm: return FemDenominator::max;
    case FemPrior::gated: return FemDenominator::plus;
    default: return FemDenominator::exact;
  }
}

}  // namespace linnet
