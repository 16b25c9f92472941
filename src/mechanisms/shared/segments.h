// Sequences cut into segments of L tokens, for kernels that scan them in three passes: each segment alone, a fold over the
// segments, and each segment again with what came before it. What the kernels are told (plain data).
#pragma once

#include "core/view.h"

namespace linnet::cuda {

struct Segments {
  int64_t N = 0, T = 0, L = 1;  // sequences, tokens of a batch row, tokens of a segment
  View offsets;                 // cu_seqlens, absent: N batch rows
};
// Places for segments: sequence n that begins at token `begin` has those from first_slot on.
constexpr int64_t slot_count(const Segments& s) {
  return s.offsets.dtype == Dtype::none ? s.N * ((s.T + s.L - 1) / s.L) : s.T / s.L + s.N;
}
constexpr int64_t first_slot(const Segments& s, int64_t n, int64_t begin) {
  return s.offsets.dtype == Dtype::none ? n * ((s.T + s.L - 1) / s.L) : begin / s.L + n;
}

}  // namespace linnet::cuda
