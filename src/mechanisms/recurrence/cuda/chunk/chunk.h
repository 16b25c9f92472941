// What head.cu is told, and the shapes of its launches, for host and device.
#pragma once

#include "mechanisms/recurrence/cuda/engine.h"

namespace linnet::cuda {

struct Chunks {
  Engine e;
  float* states = nullptr;  // [slots, H, K, V]: what each chunk writes, then the state before it
  float* totals = nullptr;  // [slots, H]: log decay over the chunk
  bool vectors = false;     // rows begin at multiples of 16 bytes
};
// K, V: 64 or 128.
constexpr int chunk_states_bytes(int K, int V) { return 4 * 64 * (K + V + 8); }
constexpr int chunk_outputs_bytes(int K, int V) { return 4 * 64 * (K + 4 + (K + 4 > V ? K + 4 : V) + 68); }

}  // namespace linnet::cuda
