// What launches of the recurrence's kernels share: where rows and states lie, and the small kernels around the large ones.
#pragma once

#include "core/cuda/driver.h"
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

constexpr bool is_16_bit(Dtype dtype) { return dtype == Dtype::bf16 || dtype == Dtype::f16; }
constexpr bool is_tile_width(int64_t width) { return width == 64 || width == 128; }
// Rows that the copy engine and 16-byte stores can address, and their description for the copy engine: boxes of a chunk.
bool is_aligned(const Rows& rows, Dtype dtype);
bool encode_rows(TensorMap* map, const Engine& e, const Rows& rows, int32_t width);

// out[.., head, ..] = the sum over its group, in order.
void sum_groups(const Launch& launch, const Rows& out, const Rows& part, int64_t B, int64_t T, int64_t heads, int64_t group,
                int64_t width);
// final_z = the sums of the keys.
void sum_keys(const Launch& launch, const Engine& engine);
// The kernels that go token by token.
void run_steps(const Launch& launch, const Engine& engine);
void copy_states(const Launch& launch, const States& to, const States& from, int64_t N, int64_t H, int64_t rows,
                 int64_t columns);

}  // namespace linnet::cuda
