// What the kernels of hierarchical_decode are told (plain data).
#pragma once

#include "mechanisms/hierarchical/hierarchical.h"

namespace linnet::cuda {

struct HierarchicalStep {
  HierarchicalDecodeArgs args;
  HierarchicalDecodeOut out;
  double scale = 1;
  int64_t levels = 0, width = 0;
  // For each head of each batch row; the counts are those of the batch row, followed by each head for itself.
  int64_t* count = nullptr;                                 // [levels]
  double *open_n = nullptr, *list_n = nullptr;              // [levels], [levels, width]
  double* logits = nullptr;                                 // [levels, width]: then weights
  double *g = nullptr, *lambda = nullptr, *mass = nullptr;  // [levels + 1]
};
static_assert(sizeof(HierarchicalStep) <= 4096);

}  // namespace linnet::cuda
