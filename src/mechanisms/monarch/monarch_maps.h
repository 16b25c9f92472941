// What the copy engine is told of a Monarch call, for host and device code alike.
#pragma once

#include "core/cuda.h"

namespace linnet::cuda {

// q, k, v: [64 channels, 64 tokens of a block] of (T, H, B); slots: [64 channels, one slot, 64 blocks] of q, of (H, B).
struct MonarchMaps {
  TensorMap q, k, v, slots;
};

}  // namespace linnet::cuda
