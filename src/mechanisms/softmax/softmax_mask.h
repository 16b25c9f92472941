// Who sees whom, for a query at key position t and keys j of one sequence. Plain numbers: included by every instruction set.
//
//   Mask mask = make_mask(causal, window, prefix, chunk);
//   mask.cover(t0, t1, j0, j1)     all, some or none of the pairs of a tile (both ends inclusive)
//   mask.queries(j)                the positions t that see key j: one span
//   mask.keys(t)                   the keys that t sees: one span, and one more inside the prefix
#pragma once

#include "core/args.h"

namespace linnet {

struct Span {
  int64_t begin, end;  // [begin, end), empty when end <= begin
};

enum class Cover { none, some, all };

struct Mask {
  int64_t left = -1, right = -1;  // -1: unlimited; causal is right = 0
  int64_t prefix = 0, chunk = 0;

  static constexpr int64_t kFar = int64_t{1} << 60;

  LINNET_INLINE bool limits() const { return left >= 0 || right >= 0 || chunk > 0; }
  LINNET_INLINE int64_t block(int64_t x) const { return (x >= 0 ? x / chunk : -((-x + chunk - 1) / chunk)) * chunk; }

  LINNET_INLINE Span queries(int64_t j) const {
    Span t{right >= 0 ? j - right : -kFar, left >= 0 && j >= prefix ? j + left + 1 : kFar};
    if (chunk > 0) {
      const int64_t start = block(j);
      if (start > t.begin) t.begin = start;
      if (start + chunk < t.end) t.end = start + chunk;
    }
    return t;
  }

  struct Keys {
    Span first, rest;  // rest.begin >= first.end
  };
  LINNET_INLINE Keys keys(int64_t t, int64_t n) const {
    Span all{0, right >= 0 && t + right + 1 < n ? t + right + 1 : n};
    if (chunk > 0) {
      const int64_t start = block(t);
      if (start > all.begin) all.begin = start;
      if (start + chunk < all.end) all.end = start + chunk;
    }
    Keys seen{{0, 0}, all};
    if (left >= 0 && t - left > all.begin) {
      seen.rest.begin = t - left;
      seen.first = {all.begin, prefix < seen.rest.begin ? prefix : seen.rest.begin};
      if (seen.first.end > all.end) seen.first.end = all.end;
    }
    return seen;
  }

  // Queries t0 .. t1, keys j0 .. j1, ends included.
  LINNET_INLINE Cover cover(int64_t t0, int64_t t1, int64_t j0, int64_t j1) const {
    bool all = true;
    if (right >= 0) {
      if (j0 > t1 + right) return Cover::none;
      all = all && j1 <= t0 + right;
    }
    if (left >= 0) {
      if (j1 < t0 - left && j0 >= prefix) return Cover::none;
      all = all && (j0 >= t1 - left || j1 < prefix);
    }
    if (chunk > 0) {
      if (j1 < block(t0) || j0 >= block(t1) + chunk) return Cover::none;
      all = all && block(t0) == block(t1) && block(j0) == block(t0) && block(j1) == block(t0);
    }
    return all ? Cover::all : Cover::some;
  }

  // The keys that some query of t0 .. t1 sees lie in `first` or `rest` (which may meet).
  LINNET_INLINE Keys reach(int64_t t0, int64_t t1, int64_t n) const {
    Keys seen = keys(t0, n);
    const Keys last = keys(t1, n);
    if (seen.rest.end < last.rest.end) seen.rest.end = last.rest.end;
    if (last.first.end > seen.first.end) seen.first.end = last.first.end;
    if (last.first.begin < seen.first.begin) seen.first.begin = last.first.begin;
    return seen;
  }
};

LINNET_INLINE Mask make_mask(bool causal, Window window, int64_t prefix, int64_t chunk) {
  return {window.left, causal ? 0 : window.right, prefix, chunk};
}

}  // namespace linnet
