// What the kernels with a decay per channel are told, and the shapes of their launches, for host and device.
#pragma once

#include "mechanisms/recurrence/recurrence_tile.h"

namespace linnet::cuda {

struct ChannelTile {
  TensorMap q, k, v, g;  // [64 channels (g in f32: 32), tokens, panels, heads, batch]
  Engine e;
  bool wide = false;  // g is f32
  // Segments: 0: whole sequences; 1: the states that segments (but the last) leave; 2: everything, from the states before them.
  int32_t phase = 0;
  float* states = nullptr;  // [segments, N, H, K * V], in the order of the registers
  float* decays = nullptr;  // [segments, N, H, K]: what a segment multiplies the state by
};

// A warpgroup for each 64 channels of values, one for each 64 of keys.
constexpr int channel_threads(int K, int V) { return 128 * (K / 64 + V / 64); }
constexpr int channel_shared_bytes(int K, int V) {
  const int stage = (2 * K + V) / 64 * kTileChunk * 128, gates = 2 * K / 64 * kTileChunk * 128, tables = 4 * K * 2 * (4 + 6);
  return 1024 + kTileStages * stage + gates + 2 * kTileChunk * 128 + tables + 1024;
}

}  // namespace linnet::cuda
