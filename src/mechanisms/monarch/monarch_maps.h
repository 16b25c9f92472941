// What the copy engine is told of a Monarch call, for host and device code alike.
#pragma once

#include "core/cuda.h"

namespace linnet::cuda {

// [64 channels, 64 tokens of a block] of (T, H, B).
struct MonarchMaps {
  TensorMap q, k, v;
};

}  // namespace linnet::cuda
