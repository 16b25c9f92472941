// Where a segment lies (segments.h). Offsets come from the caller's memory on the GPU, unchecked: they are bounded here.
#pragma once

#include "mechanisms/shared/pieces.cuh"
#include "mechanisms/shared/segments.h"

namespace linnet::cuda {

struct Span {
  int64_t n = 0, b = 0, begin = 0, end = 0;  // sequence, batch row, its tokens
};
__device__ __forceinline__ Span sequence_at(const Segments& s, int64_t n) {
  if (!is_given(s.offsets)) return {n, n, 0, s.T};
  const auto offset = [&](int64_t i) { return max(int64_t{0}, min(get_index(s.offsets, i * s.offsets.stride[0]), s.T)); };
  return {n, 0, offset(n), max(offset(n), offset(n + 1))};
}
// The sequence of a slot and the slot's own tokens; false: the slot is empty.
__device__ __forceinline__ bool segment_at(const Segments& s, int64_t slot, Span* sequence, int64_t* first, int64_t* last) {
  if (s.N <= 0) return false;
  int64_t low = 0, high = s.N;  // the last sequence whose first slot is not behind this one
  if (!is_given(s.offsets)) {
    low = slot / ((s.T + s.L - 1) / s.L);
  } else {
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first_slot(s, middle, sequence_at(s, middle).begin) <= slot ? low : high) = middle;
    }
  }
  *sequence = sequence_at(s, low);
  *first = sequence->begin + (slot - first_slot(s, low, sequence->begin)) * s.L;
  *last = min(*first + s.L, sequence->end);
  return *first < *last;
}

}  // namespace linnet::cuda
