// The sizes of a prepared call of the recurrence family, for the reference and the kernels.
#pragma once

#include "recurrence.h"

namespace linnet {

inline constexpr double kL2NormEpsilon = 1e-6;

struct RecurrenceShape {
  int64_t B, T, N;  // batch rows, tokens, sequences (B unless packed)
  int64_t H, Hq, Hk, Hv, K, V;
  double scale;
  bool per_channel;  // g has a decay for each key channel

  LINNET_INLINE int64_t q_head(int64_t h) const { return h / (H / Hq); }
  LINNET_INLINE int64_t k_head(int64_t h) const { return h / (H / Hk); }
  LINNET_INLINE int64_t v_head(int64_t h) const { return h / (H / Hv); }
};

template <class Args>
LINNET_INLINE RecurrenceShape recurrence_shape(const Args& args, int64_t sequences) {
  RecurrenceShape s;
  s.B = args.q.size[0];
  s.T = args.q.size[1];
  s.N = sequences;
  s.Hq = args.q.size[2];
  s.Hk = args.k.size[2];
  s.Hv = args.v.size[2];
  s.H = s.Hq > s.Hk ? s.Hq : s.Hk;
  s.H = s.H > s.Hv ? s.H : s.Hv;
  s.K = args.q.size[3];
  s.V = args.v.size[3];
  s.scale = args.scale.value_or(s.K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(s.K)));
  s.per_channel = args.g.given() && args.g.rank == 4;
  return s;
}
LINNET_INLINE RecurrenceShape recurrence_shape(const RecurrenceArgs& args) {
  return recurrence_shape(args, args.cu_seqlens.given() ? args.cu_seqlens.size[0] - 1 : args.q.size[0]);
}
LINNET_INLINE RecurrenceShape recurrence_shape(const RecurrenceDecodeArgs& args) {
  return recurrence_shape(args, args.q.size[0]);
}
LINNET_INLINE RecurrenceShape recurrence_shape(const RecurrenceSegmentsArgs& args) {
  return recurrence_shape(args, args.q.size[0]);
}

// The rows of one sequence: batch row b, tokens [begin, end).
struct RecurrenceSequence {
  int64_t b, begin, end;
};
LINNET_INLINE RecurrenceSequence recurrence_sequence(const RecurrenceArgs& args, int64_t n) {
  const View& cu = args.cu_seqlens;
  if (!cu.given()) return {n, 0, args.q.size[1]};
  if (cu.dtype == Dtype::i32) return {0, *cu.at<const int32_t>(n), *cu.at<const int32_t>(n + 1)};
  return {0, *cu.at<const int64_t>(n), *cu.at<const int64_t>(n + 1)};
}

}  // namespace linnet
