// Runs an Engine on the GPU: chooses between the kernels, and asks for the workspace that they need.
#pragma once

#include "core/cuda.h"
#include "mechanisms/recurrence/cuda/engine.h"

namespace linnet::cuda {

inline constexpr int32_t kMaxStepWidth = 256;  // rows of the state that a warp holds in registers

// Rows of a view [B, T, heads, width] in a call of H heads; absent when the view is.
Rows rows_of(const View& view, int64_t H, Map map = Map::identity);
// Rows of a view [B, T, H] (one number each).
Rows scalars_of(const View& view);
States states_of(const View& view);   // [N, H, rows, columns]
States transposed(States states);     // read as [N, H, columns, rows]
States vectors_of(const View& view);  // [N, H, rows] as [N, H, rows, 1]
Rows dense_rows(void* data, int64_t T, int64_t H, int64_t width, Dtype dtype = Dtype::f32);
States dense_states(float* data, int64_t H, int64_t rows, int64_t columns);

// Of the delta rule with a decay per channel (kda/kda.h).
struct KdaScratch {
  char* images = nullptr;
  float *records = nullptr, *maps = nullptr;
  int32_t* forgets = nullptr;
};
// Cuts what run_engine needs from an arena; the same cuts on a null arena tell its size.
struct DeltaScratch {  // delta/delta.h
  char *inverse = nullptr, *inverse_transposed = nullptr;
  char *states = nullptr, *dstates = nullptr, *residuals = nullptr, *adjoints = nullptr;
  float* bounds = nullptr;
  float *maps = nullptr, *dmaps = nullptr;
  int32_t* forgets = nullptr;
};
struct EngineScratch {
  float* segments = nullptr;  // [segments of a sequence, N, H, K, V]: states between segments
  DeltaScratch delta;
  float* chunks = nullptr;  // [slots, H, K, V] and [slots, H]: states between chunks
  KdaScratch kda;
};
EngineScratch cut_engine(Arena& arena, const Engine& engine);
// Enqueues the engine; a failure is in launch.error.
void run_engine(const Launch& launch, const Engine& engine, const EngineScratch& scratch);
// What the tiled kernels need but for the decay: plain 16-bit rows of 64 or 128.
bool has_tiles(const Engine& engine);
// Parts of the longest sequence (kSegment).
int64_t tile_segments(const Engine& engine);
// Whether the tiled kernel (tile/tile.cuh) takes this engine; else the step kernel does.
bool is_tiled(const Engine& engine);

// Rows that the copy engine and 16-byte stores can address, and their description for the copy engine: boxes of a chunk.
bool is_aligned(const Rows& rows, Dtype dtype);
bool encode_rows(TensorMap* map, const Engine& e, const Rows& rows, int32_t width);

// out[.., head, ..] = the sum over its group, in order.
void sum_groups(const Launch& launch, const Rows& out, const Rows& part, int64_t B, int64_t T, int64_t heads, int64_t group,
                int64_t width);
void copy_states(const Launch& launch, const States& to, const States& from, int64_t N, int64_t H, int64_t rows,
                 int64_t columns);

}  // namespace linnet::cuda
