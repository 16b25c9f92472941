// The sizes of a prepared call of linear or linear_decode, for the reference and the kernels.
#pragma once

#include "core/args.h"
#include "linear.h"

namespace linnet {

struct LinearShape {
  int64_t B, T, S, N;  // batch rows, queries, keys, sequences (B unless packed)
  int64_t H, Hq, Hk, Hv;
  int64_t K, F, V;
  double scale;
  // Normalised with map exp: sums are kept in units of exp(a running maximum per feature), and `den` is a logarithm.
  bool shifted;

  LINNET_INLINE int64_t q_head(int64_t h) const { return h / (H / Hq); }
  LINNET_INLINE int64_t k_head(int64_t h) const { return h / (H / Hk); }
  LINNET_INLINE int64_t v_head(int64_t h) const { return h / (H / Hv); }
};

template <class Args>
LINNET_INLINE LinearShape linear_shape(const Args& args, int64_t sequences) {
  LinearShape s;
  s.B = args.q.size[0];
  s.T = args.q.size[1];
  s.S = args.k.size[1];
  s.N = sequences;
  s.Hq = args.q.size[2];
  s.Hk = args.k.size[2];
  s.Hv = args.v.size[2];
  s.H = s.Hq > s.Hk ? s.Hq : s.Hk;
  s.H = s.H > s.Hv ? s.H : s.Hv;
  s.K = args.q.size[3];
  s.V = args.v.size[3];
  switch (args.map) {
    case FeatureMap::hedgehog: s.F = 2 * s.K; break;
    case FeatureMap::taylor2: s.F = 1 + s.K + s.K * (s.K + 1) / 2; break;
    case FeatureMap::dpfp: s.F = 2 * s.K * args.dpfp_nu; break;
    case FeatureMap::t2r: s.F = args.w.size[1]; break;
    default: s.F = s.K;
  }
  const double plain = args.normalize || s.K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(s.K));
  s.scale = args.scale.value_or(plain);
  s.shifted = args.normalize && args.map == FeatureMap::exp;
  return s;
}
LINNET_INLINE LinearShape linear_shape(const LinearArgs& args) {
  return linear_shape(args, args.cu_seqlens.given() ? args.cu_seqlens.size[0] - 1 : args.q.size[0]);
}
LINNET_INLINE LinearShape linear_shape(const LinearDecodeArgs& args) { return linear_shape(args, args.q.size[0]); }

// The rows of one sequence: batch row b, queries [q0, q1), keys [k0, k1).
struct LinearSequence {
  int64_t b, q0, q1, k0, k1;
};
LINNET_INLINE LinearSequence linear_sequence(const LinearArgs& args, int64_t n) {
  if (!args.cu_seqlens.given()) return {n, 0, args.q.size[1], 0, args.k.size[1]};
  int64_t begin, end;
  if (args.cu_seqlens.dtype == Dtype::i32) {
    begin = *args.cu_seqlens.at<const int32_t>(n);
    end = *args.cu_seqlens.at<const int32_t>(n + 1);
  } else {
    begin = *args.cu_seqlens.at<const int64_t>(n);
    end = *args.cu_seqlens.at<const int64_t>(n + 1);
  }
  return {0, begin, end, begin, end};
}

}  // namespace linnet
