#include "mechanisms/recurrence/cuda/launch.h"

#include "mechanisms/recurrence/cuda/tile/tile.h"

LINNET_USES_IMAGES(recurrence)

namespace linnet::cuda {
namespace {

constexpr const char* kStepImage = "recurrence/cuda/step";
constexpr const char* kSumsImage = "recurrence/cuda/sums";
constexpr int64_t kMaxBlocks = 4096;  // of the kernels that walk over elements

int64_t blocks_for(int64_t elements) {
  const int64_t blocks = (elements + 255) / 256;
  return blocks < kMaxBlocks ? blocks : kMaxBlocks;
}

}  // namespace

bool is_aligned(const Rows& rows, Dtype dtype) {
  return rows.data != nullptr && rows.dtype == dtype && rows.map == Map::identity &&
         reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride_b % 8 == 0 && rows.stride_t % 8 == 0 &&
         rows.stride_h % 8 == 0 && rows.stride_t >= 0 && rows.stride_b >= 0 && rows.stride_h >= 0;
}

bool encode_rows(TensorMap* map, const Engine& e, const Rows& rows, int32_t width) {
  const auto distance = [](int64_t count, int64_t stride) {  // of a dimension with one entry nobody asks
    return count == 1 || stride == 0 ? uint64_t{128} : static_cast<uint64_t>(stride) * 2;
  };
  const int64_t B = e.offsets == nullptr ? e.N : 1, heads = e.H / rows.group;
  const uint64_t size[5] = {64, static_cast<uint64_t>(e.T), static_cast<uint64_t>(width / 64), static_cast<uint64_t>(heads),
                            static_cast<uint64_t>(B)};
  const uint64_t stride[4] = {distance(e.T, rows.stride_t), 128, distance(heads, rows.stride_h), distance(B, rows.stride_b)};
  const uint32_t box[5] = {64, kTileChunk, static_cast<uint32_t>(width / 64), 1, 1};
  return encode_tensor_map(map, rows.dtype, rows.data, 5, size, stride, box);
}

void run_steps(const Launch& launch, const Engine& e) {
  static constexpr const char* kNames[3][4] = {{"step_4", "step_8", "step_16", "step_32"},
                                               {"step_channel_4", "step_channel_8", "step_channel_16", "step_channel_32"},
                                               {"step_sums_4", "step_sums_8", "step_sums_16", "step_sums_32"}};
  const int size = e.K <= 32 ? 0 : e.K <= 64 ? 1 : e.K <= 128 ? 2 : 3, kind = e.sums ? 2 : e.g_width > 1 ? 1 : 0;
  const int64_t columns = e.V > 0 ? e.V : 1;  // of 16 to a block; without values z is still summed
  enqueue(launch, {kStepImage, kNames[kind][size], 128}, {e.N * e.H, (columns + 15) / 16}, e);
}

Rows rows_of(const View& view, int64_t H, Map map) {
  if (!view.given()) return {};
  const int64_t heads = view.size[2], group = heads > 0 && H > heads ? H / heads : 1;
  return {view.data, view.stride[0], view.stride[1], view.stride[2], static_cast<int32_t>(group), view.dtype, map};
}
Rows scalars_of(const View& view) {
  if (!view.given()) return {};
  return {view.data, view.stride[0], view.stride[1], view.stride[2], 1, view.dtype, Map::identity};
}
States states_of(const View& view) {
  if (!view.given()) return {};
  return {static_cast<float*>(view.data), view.stride[0], view.stride[1], view.stride[2], view.stride[3]};
}
States transposed(States states) {
  return {states.data, states.stride_n, states.stride_h, states.stride_column, states.stride_row};
}
States vectors_of(const View& view) {
  if (!view.given()) return {};
  return {static_cast<float*>(view.data), view.stride[0], view.stride[1], view.stride[2], 0};
}
Rows dense_rows(void* data, int64_t T, int64_t H, int64_t width, Dtype dtype) {
  return {data, T * H * width, H * width, width, 1, dtype, Map::identity};
}
States dense_states(float* data, int64_t H, int64_t rows, int64_t columns) {
  return {data, H * rows * columns, rows * columns, columns, 1};
}

void sum_keys(const Launch& launch, const Engine& e) {
  enqueue(launch, {kSumsImage, "sum_keys", 256}, {e.N * e.H, (e.K + 31) / 32}, e);
}

void sum_groups(const Launch& launch, const Rows& out, const Rows& part, int64_t B, int64_t T, int64_t heads, int64_t group,
                int64_t width) {
  const int counts[4] = {static_cast<int>(part.dtype), static_cast<int>(heads), static_cast<int>(group),
                         static_cast<int>(width)};
  enqueue(launch, {kSumsImage, "sum_groups", 256}, {blocks_for(B * T * heads * width)}, out, part.data, counts[0], B, T,
          counts[1], counts[2], counts[3]);
}

void copy_states(const Launch& launch, const States& to, const States& from, int64_t N, int64_t H, int64_t rows,
                 int64_t columns) {
  if (to.data == nullptr) return;
  const int counts[3] = {static_cast<int>(H), static_cast<int>(rows), static_cast<int>(columns)};
  enqueue(launch, {kSumsImage, "copy_states", 256}, {blocks_for(N * H * rows * columns)}, to, from, N, counts[0], counts[1],
          counts[2]);
}

}  // namespace linnet::cuda
