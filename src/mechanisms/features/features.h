// features: linear attention through the feature maps of the literature, with their parameters, stabilisers and normalisers.
//
//   num_i = sum_j (phi(q_i).phi(k_j)) v_j,   den_i = sum_j phi(q_i).phi(k_j)      j: all keys, or j <= i when causal
//   o_i = num_i / (den_i + eps)  [add]   |   num_i / max(den_i, eps)  [max]   |   num_i  [none]
//
// The maps, their parameters and sources: docs/mechanisms/features.md.
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class Normalizer : int32_t { none, add, max, standard };  // standard: what the map's source uses
enum class KeyTop : int32_t { global, running, given };
enum class FeaturesMap : int32_t {
  identity,
  cosine,
  elu1,
  relu,
  relu2,
  exp,
  focused,
  cosformer,
  favor,
  favor_hyp,
  favor_relu,
  hedgehog,
  hedgehog_exp,
  hedgehog_joint,
  t2r,
  rebased,
  dpfp,
  taylor,
  efficient,
};

struct FeaturesArgs {
  View q;         // [B, T, H, K], before the map
  View k;         // [B, S, H, K]; S = T when causal
  View v;         // [B, S, H, V]
  View key_mask;  // optional [B, S] u8: keys with 0 take no part
  View w;         // [H, K, R] hedgehog, hedgehog_exp, t2r: y = x w_h; [K, K] hedgehog_joint: y = w x
  View b;         // [H, R] t2r; [K] hedgehog_joint
  View scale;     // [H*K] focused
  View proj;      // [M, K] favor, favor_hyp, favor_relu: no gradient
  View gamma;     // [K] rebased
  View beta;      // [K] rebased
  View key_tops;  // [B, H] f32: exp, favor, favor_hyp, efficient with key_top given
  FeaturesMap map = FeaturesMap::elu1;
  bool causal = false;
  Normalizer normalizer = Normalizer::standard;
  Maybe eps;                        // default: what the map's source uses
  KeyTop key_top = KeyTop::global;  // what exp, favor, favor_hyp, efficient (causal) subtract from the exponents of keys
  double temperature = 1;           // map exp: exp(temperature x)
  int64_t dpfp_nu = 1;              // map dpfp: number of rolls
  double focused_power = 3;         // map focused
  double favor_eps = 1e-4;          // maps favor, favor_hyp: added to each feature
  int64_t max_length = 0;           // map cosformer: M; 0: max(T, S)
};
struct FeaturesOut {
  View out;          // [B, T, H, V]
  View den;          // [B, T, H] f32: what num was divided by
  View phi_q;        // optional [B, T, H, F] f32
  View phi_k;        // optional [B, S, H, F] f32
  View final_state;  // optional [B, H, F, V] f32: sum phi(k) v^T, where features_decode continues
  View final_z;      // optional [B, H, F] f32: sum phi(k)
};
struct FeaturesGrads {
  View dout;
  View dq, dk, dv, dw, db, dscale, dgamma, dbeta;
};
const Op& features_op();
Status features(const FeaturesArgs& args, const FeaturesOut& out, const Context& context);
Status features_backward(const FeaturesArgs& args, const FeaturesOut& out, const FeaturesGrads& grads, const Context& context);
int64_t features_workspace(const FeaturesArgs& args, Pass pass, const Context& context);

// One or few tokens with S and z in place. Maps with a top over keys (exp, favor, favor_hyp, efficient): the running one,
// unless it is given. When it grows, S and z are brought to its units; what favor adds to each feature is in no unit, which is
// why the sums of the values are kept too.
struct FeaturesDecodeArgs {
  View q, k, v;  // [B, T, H, K], [B, T, H, K], [B, T, H, V]
  View state;    // [B, H, F, V] f32: read and overwritten
  View z;        // [B, H, F] f32: read and overwritten
  View top;      // [B, H] f32: exp, favor, favor_hyp, efficient: -inf at first; read and overwritten
  View sums;     // [B, H, V + 1] f32: favor, favor_hyp: of v and of 1; read and overwritten
  View w, b, scale, proj, gamma, beta, key_tops;
  FeaturesMap map = FeaturesMap::elu1;
  Normalizer normalizer = Normalizer::standard;
  Maybe eps;
  double temperature = 1;
  int64_t dpfp_nu = 1;
  double focused_power = 3;
  double favor_eps = 1e-4;
  int64_t max_length = 0;  // map cosformer: M, fixed beforehand
  int64_t position = 0;    // map cosformer: tokens before these
};
struct FeaturesDecodeOut {
  View out;  // [B, T, H, V]
};
struct FeaturesDecodeGrads {};
const Op& features_decode_op();
Status features_decode(const FeaturesDecodeArgs& args, const FeaturesDecodeOut& out, const Context& context);
int64_t features_decode_workspace(const FeaturesDecodeArgs& args, const Context& context);

LINNET_KERNELS(features, FeaturesArgs, FeaturesOut, FeaturesGrads)
LINNET_KERNELS(features_decode, FeaturesDecodeArgs, FeaturesDecodeOut, FeaturesDecodeGrads)
LINNET_CUDA_KERNELS(features, FeaturesArgs, FeaturesOut, FeaturesGrads)
LINNET_CUDA_KERNELS(features_decode, FeaturesDecodeArgs, FeaturesDecodeOut, FeaturesDecodeGrads)

}  // namespace linnet
