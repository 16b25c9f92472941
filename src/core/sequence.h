// The sequences of a call: the batch rows, or the runs of tokens that cu_seqlens cuts a single row into.
#pragma once

#include "core/view.h"

namespace linnet {

struct Sequence {
  int64_t b, begin, end;  // batch row, tokens [begin, end)
  LINNET_INLINE int64_t length() const { return end - begin; }
};

LINNET_INLINE int64_t sequence_count(const View& cu_seqlens, int64_t batch) {
  return cu_seqlens.given() ? cu_seqlens.size[0] - 1 : batch;
}
LINNET_INLINE int64_t sequence_offset(const View& cu_seqlens, int64_t n) {
  return cu_seqlens.dtype == Dtype::i32 ? *cu_seqlens.at<const int32_t>(n) : *cu_seqlens.at<const int64_t>(n);
}
LINNET_INLINE Sequence sequence_of(const View& cu_seqlens, int64_t tokens, int64_t n) {
  if (!cu_seqlens.given()) return {n, 0, tokens};
  return {0, sequence_offset(cu_seqlens, n), sequence_offset(cu_seqlens, n + 1)};
}
// The sequence that holds token t of batch row b.
LINNET_INLINE int64_t sequence_at(const View& cu_seqlens, int64_t b, int64_t t) {
  if (!cu_seqlens.given()) return b;
  int64_t low = 0, high = cu_seqlens.size[0] - 1;  // offset(low) <= t < offset(high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (sequence_offset(cu_seqlens, middle) <= t ? low : high) = middle;
  }
  return low;
}

}  // namespace linnet
