// Which chunks of which sequence a block walks: what needs no Hopper of the tiled kernels.
#pragma once

#include "mechanisms/recurrence/cuda/map.cuh"
#include "mechanisms/recurrence/cuda/tile/tile.h"

namespace linnet::cuda {
namespace {

constexpr int C = kTileChunk;

// The chunks that a block walks.
struct Walk {
  int64_t b, begin, length;  // the sequence: batch row, first token, tokens
  int first, count;          // chunk numbers first, first + 1, ... or, in reverse, first, first - 1, ...
  bool starts, ends;         // holds the sequence's first, last chunk in the order of the walk
};

__device__ Walk walk_of(const Engine& e, int64_t n, int segment, bool cut = true) {
  Walk w;
  w.b = n;
  w.begin = 0;
  w.length = e.T;
  if (e.offsets != nullptr) {
    w.b = 0;
    w.begin = offset(e, n);
    const int64_t end = offset(e, n + 1);
    w.length = end > w.begin ? end - w.begin : 0;
  }
  const int chunks = static_cast<int>((w.length + C - 1) / C), part = static_cast<int>(segment_tokens(e, w.length) / C);
  const int segments = !cut || w.length <= kLongest ? 1 : (chunks + part - 1) / part;
  const int from = segments == 1 ? 0 : segment * part, to = segments == 1 ? chunks : min(chunks, from + part);
  w.count = segment < segments ? to - from : 0;
  w.first = e.reverse ? chunks - 1 - from : from;
  w.starts = segment == 0;
  w.ends = segment == segments - 1;
  if (segment >= segments) w.starts = w.ends = false;
  return w;
}

}  // namespace
}  // namespace linnet::cuda
