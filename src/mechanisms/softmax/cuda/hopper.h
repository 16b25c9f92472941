// The tiles of hopper.cu; for host and device.
#pragma once

#include "core/cuda/driver.h"

namespace linnet::cuda {

inline constexpr int kHopperRows = 128, kHopperKeys = 128;

struct HopperMaps {
  TensorMap q, k, v;
};
// Bytes of shared memory: queries, two stages of keys and values, a copy of values for each consumer, barriers, and what aligns
// them.
constexpr int hopper_shared(int D) { return 7 * 128 * D * 2 + 1280 + 1024; }

}  // namespace linnet::cuda
