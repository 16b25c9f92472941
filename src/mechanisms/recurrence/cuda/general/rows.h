// Rows before and behind the general engine: what its row kernels are told (plain data).
#pragma once

#include "mechanisms/recurrence/cuda/engine.h"

namespace linnet::cuda {

// to[b, t, head, 0 .. width) = the map of from's channels, then a 1 (`ones`), then zeros; zeros where the mask is 0.
struct CopyRows {
  Rows from, to;  // of heads: group 1
  int64_t B = 0, T = 0;
  int32_t heads = 0, channels = 0, width = 0;
  bool ones = false;
  const uint8_t* mask = nullptr;  // [B, T]
  int64_t mask_stride_b = 0;
  // Gradients of a normalised result: dout / den, then -(out . dout) / den.
  Rows out, den;
};
// Rows of at most 128 channels for a kernel of another width, and back: to[b, t, head, 0 .. width) = from's channels, then
// zeros; mapped, or normed (x / sqrt(x.x + 1e-6)), or, where a source x is given, as the gradient of that, for the norm
// r^3 (1e-6 d + x.x d - x (x.d)); zeros where the mask is 0.
struct FitRows {
  Rows from, to, source;          // of heads: group 1
  const uint8_t* mask = nullptr;  // [B, T]
  int64_t mask_stride_b = 0;
  int64_t B = 0, T = 0;
  int32_t heads = 0, channels = 0, width = 0;
  bool l2_norm = false;
};
// norms[b, t, head] = 1 / sqrt(sum x^2 + 1e-6)
struct NormOfRows {
  Rows from;
  float* norms = nullptr;
  int64_t B = 0, T = 0;
  int32_t heads = 0, channels = 0;
};
// result[b, t, head] = the gradient before map and norm, from the sum of a group's parts [B, T, H, channels].
struct FinishRows {
  const float* parts = nullptr;
  Rows result, source;  // of heads: group 1; source: what the map and the norm were applied to
  const float* norms = nullptr;
  int64_t B = 0, T = 0;
  int32_t heads = 0, group = 1, channels = 0;
  const uint8_t* mask = nullptr;
  int64_t mask_stride_b = 0;
  States bias;  // added first: [N, H, channels]; the sequence by offsets
  const void* offsets = nullptr;
  bool offsets_64 = false;
  int64_t N = 0;
};

}  // namespace linnet::cuda
