// The segments of a long sequence in the delta rules, each of which has a length of its own (Delta, Kda).
#pragma once

#include "mechanisms/recurrence/recurrence_tile.cuh"

namespace linnet::cuda {
namespace {

// The chunks of a segment; cut: whether the sequence is cut at all where it is long.
template <class Rule>
__device__ inline Walk segment_of(const Rule& rule, int64_t n, int segment, bool cut = true) {
  Walk w = walk_of(rule.e, n, 0, false);
  const int chunks = w.count, part = static_cast<int>(rule.segment / C);
  const int segments = !cut || w.length <= kLongest ? 1 : (chunks + part - 1) / part;
  if (segments > 1) {
    w.first = segment * part;
    w.count = min(chunks, w.first + part) - w.first;
  }
  if (segment >= segments) w.count = 0;
  w.starts = segment == 0;
  w.ends = segment == segments - 1;
  return w;
}

}  // namespace
}  // namespace linnet::cuda
