// The data of unicode.h, made by tools/make_unicode.py.
#pragma once

#include <cstdint>

namespace linnet::unicode {

struct LowerRun {
  uint32_t first, last, step;
  int32_t delta;
};
struct Decomposition {
  uint32_t point, first, second;  // second is 0 where there is one part
  uint32_t composes;
};

extern const uint32_t kRuns[];
extern const int kRuns_count;
extern const LowerRun kLower[];
extern const int kLower_count;
extern const Decomposition kDecompositions[];
extern const int kDecompositions_count;
extern const uint32_t kClasses[];
extern const int kClasses_count;
extern const uint32_t kClusters[];
extern const int kClusters_count;

}  // namespace linnet::unicode
