// Declarations of operators with a row that needs no Hopper.
#pragma once

#include "core/op.h"
#include "mechanisms/recurrence/cuda/rows.h"

namespace linnet::cuda {

// The same operator, whose general row runs on every GPU that cuda::missing() knows of.
inline Op on_every_gpu(Op op) {
  for (Impl& impl : op.impls) {
    if (impl.name == std::string("cuda.") + row_name(Row::general)) impl.missing = missing;
  }
  return op;
}

}  // namespace linnet::cuda
