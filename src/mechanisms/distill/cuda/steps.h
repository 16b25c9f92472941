// What the kernels of distill_decode, distill_window_decode and distill_hybrid_decode are told (steps.cu).
#pragma once

#include "mechanisms/distill/distill.h"

namespace linnet::cuda {

struct DistillScratch {                                               // of each head of each batch row
  double *a = nullptr, *f = nullptr, *old = nullptr, *own = nullptr;  // scores of near keys; of features: [width] each
  int64_t keys = 0, width = 0;
};
struct DistillStep {
  DistillDecodeArgs args;
  View out;
  double factor = 1;
  DistillScratch scratch;
};
struct DistillWindowStep {
  DistillWindowDecodeArgs args;
  View out;
  DistillScratch scratch;
};
struct DistillHybridStep {
  DistillHybridDecodeArgs args;
  View out;
  DistillScratch scratch;
};
static_assert(sizeof(DistillHybridStep) <= 4096);

}  // namespace linnet::cuda
