// Widths and defaults of the maps, for the reference and the kernels.
#pragma once

#include "features.h"

namespace linnet {

// What a map needs to know besides its tensors.
struct FeaturesShape {
  FeaturesMap map;
  int64_t B, H, K, F;  // F: without the extra feature of running maxima
  int64_t R;           // columns of w
  int64_t M;           // rows of proj
  Normalizer normalizer;
  double eps;
  double temperature, power, favor_eps;
  int64_t nu;
  double length;     // cosformer: M
  bool over_tokens;  // efficient, not causal: the softmax of keys runs over the tokens

  // Exponents of keys are taken less their top.
  LINNET_INLINE bool has_top() const {
    return map == FeaturesMap::exp || map == FeaturesMap::favor || map == FeaturesMap::favor_hyp ||
           (map == FeaturesMap::efficient && !over_tokens);
  }
};

template <class Args>
LINNET_INLINE FeaturesShape features_shape(const Args& args, int64_t longest, bool causal) {
  FeaturesShape s;
  s.map = args.map;
  s.B = args.q.size[0];
  s.H = args.q.size[2];
  s.K = args.q.size[3];
  s.R = args.w.given() ? args.w.size[args.w.rank - 1] : 0;
  s.M = args.proj.given() ? args.proj.size[0] : 0;
  s.temperature = args.temperature;
  s.power = args.focused_power;
  s.favor_eps = args.favor_eps;
  s.nu = args.dpfp_nu;
  s.length = static_cast<double>(args.max_length > 0 ? args.max_length : longest);
  s.normalizer = Normalizer::add;
  s.eps = 1e-6;
  s.F = s.K;
  s.over_tokens = s.map == FeaturesMap::efficient && !causal;
  switch (s.map) {
    case FeaturesMap::identity:
    case FeaturesMap::cosine: s.normalizer = Normalizer::none; break;
    case FeaturesMap::cosformer:
      s.normalizer = Normalizer::max;
      s.F = 2 * s.K;
      break;
    case FeaturesMap::favor:
    case FeaturesMap::favor_relu: s.F = s.M; break;
    case FeaturesMap::favor_hyp: s.F = 2 * s.M; break;
    case FeaturesMap::hedgehog:
    case FeaturesMap::hedgehog_exp:
      s.F = 2 * s.R;
      s.eps = 1e-12;
      break;
    case FeaturesMap::hedgehog_joint:
      s.F = 2 * s.K;
      s.eps = 1e-12;
      break;
    case FeaturesMap::t2r: s.F = s.R; break;
    case FeaturesMap::rebased:
      s.F = s.K * (s.K + 1) / 2;
      s.eps = 1e-5;
      break;
    case FeaturesMap::dpfp: s.F = 2 * s.K * s.nu; break;
    case FeaturesMap::taylor:
      s.F = 1 + s.K + s.K * (s.K + 1) / 2;
      s.eps = 1e-12;
      break;
    case FeaturesMap::efficient:
      s.temperature = 1;
      if (s.over_tokens) s.normalizer = Normalizer::none;
      break;
    default: break;
  }
  if (args.normalizer != Normalizer::standard) s.normalizer = args.normalizer;
  s.eps = args.eps.value_or(s.eps);
  return s;
}
LINNET_INLINE FeaturesShape features_shape(const FeaturesArgs& args) {
  return features_shape(args, args.q.size[1] > args.k.size[1] ? args.q.size[1] : args.k.size[1], args.causal);
}
LINNET_INLINE FeaturesShape features_shape(const FeaturesDecodeArgs& args) { return features_shape(args, 1, true); }

// What favor adds to each feature of a key, whatever its unit.
LINNET_INLINE double features_floor(const FeaturesShape& s) {
  const bool favor = s.map == FeaturesMap::favor || s.map == FeaturesMap::favor_hyp;
  return favor && s.F > 0 ? s.favor_eps / __builtin_sqrt(static_cast<double>(s.F)) : 0;
}
LINNET_INLINE bool features_running(const FeaturesArgs& args) {
  return args.causal && args.key_top == KeyTop::running && features_shape(args).has_top();
}

inline constexpr double kHedgehogFloor = 1e-12, kFavorReluFloor = 1e-3, kFocusedFloor = 1e-6, kRebasedEps = 1e-5;

}  // namespace linnet
