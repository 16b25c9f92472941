// confusion: whether different queries of a head get different weights (docs/mechanisms/inline.md, injectivity), under softmax,
// linear attention (relu) and InLine (identity) on the same queries and keys, all keys seen.
//
//   confused  pairs of queries further apart than `apart` (2-norm) whose weights differ by less than `alike` (1-norm)
//   margin    the smallest |w(p) - w(q)|_2 / |p - q|_2 over those pairs
#pragma once

#include <cstdint>

#include "runtime/layered.h"

namespace linnet::analysis {

inline constexpr int64_t kConfusedQueries = 64, kConfusedKeys = 512;  // at most, evenly spaced in the text
inline constexpr const char* kConfusedBy[] = {"softmax", "linear", "inline"};

struct Confusions {
  int64_t pairs = 0;
  int64_t confused[3] = {};  // in the order of kConfusedBy
  double margin[3] = {};     // 0 where there is no pair
};

Confusions confusions(const HeadTaps& taps, int64_t head, double apart, double alike);

}  // namespace linnet::analysis
