// Runs a recurrence without beta, with no decay or one for all channels of a head, on tiles of the matrix units (tile.cuh).
#pragma once

#include "mechanisms/recurrence/cuda/launch.h"
#include "mechanisms/recurrence/cuda/tile/tile.h"

namespace linnet::cuda {

// What every kernel on matrix units needs: null when the engine has plain 16-bit rows of 64 or 128 channels, else the reason.
const char* tiles_refuse(const Engine& engine);
inline bool has_tiles(const Engine& engine) { return tiles_refuse(engine) == nullptr; }
// Null when the kernel of tile.cuh takes this engine.
const char* tile_refuses(const Engine& engine);
inline bool is_tiled(const Engine& engine) { return tile_refuses(engine) == nullptr; }

// Parts of the longest sequence (kSegment).
int64_t tile_segments(const Engine& engine);
// [segments of a sequence, N, H, K, V] and their decays: states between segments. Null where no sequence is cut.
float* cut_segments(Arena& arena, const Engine& engine);
void run_tile(const Launch& launch, const Engine& engine, float* segments);

}  // namespace linnet::cuda
