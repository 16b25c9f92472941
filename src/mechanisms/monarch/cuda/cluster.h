// What the copy engine is told of a Monarch call, and the launch of the cluster kernel, for host and device code alike.
#pragma once

#include "core/cuda/driver.h"

namespace linnet::cuda {

// q, k, v: [64 channels, 64 tokens of a block] of (T, H, B); slots: [64 channels, one slot, 64 blocks] of q, of (H, B).
struct MonarchMaps {
  TensorMap q, k, v, slots;
};

// The cluster kernel: blocks of threads of a cluster, threads of a block and their shared memory (7 tiles for each of 4
// warpgroups, entropies, places, barriers).
inline constexpr int kMonarchCluster = 16, kMonarchThreads = 640, kMonarchBytes = 7 * 4 * 8192 + 2048 + 256 + 48 * 8;

}  // namespace linnet::cuda
