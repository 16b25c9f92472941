// What tile.cuh is told, and the shapes of its launch, for host and device.
#pragma once

#include "core/cuda/driver.h"
#include "mechanisms/recurrence/cuda/engine.h"

namespace linnet::cuda {

inline constexpr int kTileChunk = 64, kTileStages = 3;
// Sequences longer than kLongest are cut in segments, so that few heads fill the machine too: by their own length alone, so
// that no bit depends on what else is in the batch.
inline constexpr int64_t kLongest = 8192, kSegment = 2048;
// Tokens of a segment. Long ones, where there is no or one decay per head: then 16 heads are one wave of blocks.
inline constexpr int64_t kVeryLong = 32768;
constexpr int64_t segment_tokens(const Engine& e, int64_t length) {
  return e.g_width <= 1 && length >= kVeryLong ? 2 * kSegment : kSegment;
}

struct Tile {
  TensorMap q, k, v;  // [64 channels, tokens, panels, heads, batch]
  Engine e;
  // Segments: 0: whole sequences; 1: the states that segments (but the last) leave; 2: everything, from the states before them.
  int32_t phase = 0;
  float* states = nullptr;  // [segments, N, H, K * V], in the order of the registers
  float* decays = nullptr;  // [segments, N, H]: what a segment multiplies the state by
};

constexpr int tile_threads(int V) { return 128 * (2 + V / 64); }
constexpr int tile_shared_bytes(int K, int V) {
  const int stage = (2 * K + V) / 64 * kTileChunk * 128;
  return 1024 + kTileStages * stage + 2 * kTileChunk * 128 + 2 * (V / 64) * kTileChunk * 128 + 2 * 4 * 400 + 1024;
}

}  // namespace linnet::cuda
