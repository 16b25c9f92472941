#include "mechanisms/recurrence/cuda/launch.h"

#include "mechanisms/recurrence/cuda/channel/launch.h"
#include "mechanisms/recurrence/cuda/chunk/chunk.h"
#include "mechanisms/recurrence/cuda/decode.h"
#include "mechanisms/recurrence/cuda/delta/launch.h"
#include "mechanisms/recurrence/cuda/kda/launch.h"
#include "mechanisms/recurrence/cuda/tile/tile.h"

namespace linnet::cuda {
namespace {

constexpr const char* kStepImage = "recurrence/cuda/step";
constexpr const char* kChunkImage = "recurrence/cuda/chunk/head";
constexpr int64_t kMaxBlocks = 4096;  // of the kernels that walk over elements

int64_t blocks_for(int64_t elements) {
  const int64_t blocks = (elements + 255) / 256;
  return blocks < kMaxBlocks ? blocks : kMaxBlocks;
}

bool is_16_bit(Dtype dtype) { return dtype == Dtype::bf16 || dtype == Dtype::f16; }
bool is_tile_width(int64_t width) { return width == 64 || width == 128; }
}  // namespace

bool is_aligned(const Rows& rows, Dtype dtype) {
  return rows.data != nullptr && rows.dtype == dtype && rows.map == Map::identity &&
         reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride_b % 8 == 0 && rows.stride_t % 8 == 0 &&
         rows.stride_h % 8 == 0 && rows.stride_t >= 0 && rows.stride_b >= 0 && rows.stride_h >= 0;
}

int64_t tile_segments(const Engine& e) {
  if (e.T <= kLongest) return 1;
  const int64_t part = segment_tokens(e, e.T), whole = (e.T + part - 1) / part, most = kVeryLong / kSegment;
  return e.offsets != nullptr && part > kSegment && whole < most ? most : whole;  // of one of the packed sequences
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

bool has_tiles(const Engine& e) {
  const Dtype dtype = e.q.dtype;
  const bool plain = e.write_mask == nullptr && e.out_mask == nullptr && e.out_bias.data == nullptr && !e.normalize &&
                     !e.l2_norm && e.out_source.map == Map::identity;
  return plain && !e.untiled && is_16_bit(dtype) && is_tile_width(e.K) && is_tile_width(e.V) && e.N > 0 && e.T > 0 &&
         e.scale != 0 && (e.finish.z.data == nullptr || is_aligned(e.finish.z, dtype)) && is_aligned(e.q, dtype) &&
         is_aligned(e.k, dtype) && is_aligned(e.v, dtype) &&
         (is_aligned(e.out, dtype) || (e.out.data == nullptr && e.saved_transposed));
}

namespace {

void run_steps(const Launch& launch, const Engine& e) {
  static constexpr const char* kNames[3][4] = {{"step_4", "step_8", "step_16", "step_32"},
                                               {"step_channel_4", "step_channel_8", "step_channel_16", "step_channel_32"},
                                               {"step_sums_4", "step_sums_8", "step_sums_16", "step_sums_32"}};
  const int size = e.K <= 32 ? 0 : e.K <= 64 ? 1 : e.K <= 128 ? 2 : 3, kind = e.sums ? 2 : e.g_width > 1 ? 1 : 0;
  const int64_t columns = e.V > 0 ? e.V : 1;  // of 16 to a block; without values z is still summed
  enqueue(launch, {kStepImage, kNames[kind][size], 128}, {e.N * e.H, (columns + 15) / 16}, e);
}

bool encode_all(const Launch& launch, const Engine& e, Tile* tile) {
  tile->e = e;
  if (encode_rows(&tile->q, e, e.q, e.K) && encode_rows(&tile->k, e, e.k, e.K) && encode_rows(&tile->v, e, e.v, e.V))
    return true;
  *launch.error = "a tensor has no description for the copy engine";
  return false;
}

void run_tiles(const Launch& launch, const Engine& e, const EngineScratch& scratch) {
  Tile tile;
  if (!encode_all(launch, e, &tile)) return;
  const bool bf16 = e.q.dtype == Dtype::bf16, decays = e.g_width != 0;
  const char* image = bf16 ? "recurrence/cuda/tile/forward_bf16" : "recurrence/cuda/tile/forward_f16";
  static constexpr const char* kNames[2][2][2][2] = {
      {{{"tile_f16_64_64", "tile_f16_64_64_decay"}, {"tile_f16_64_128", "tile_f16_64_128_decay"}},
       {{"tile_f16_128_64", "tile_f16_128_64_decay"}, {"tile_f16_128_128", "tile_f16_128_128_decay"}}},
      {{{"tile_bf16_64_64", "tile_bf16_64_64_decay"}, {"tile_bf16_64_128", "tile_bf16_64_128_decay"}},
       {{"tile_bf16_128_64", "tile_bf16_128_64_decay"}, {"tile_bf16_128_128", "tile_bf16_128_128_decay"}}}};
  static constexpr const char* kSteps[2][2][2] = {
      {{"ssd_f16_64_64", "ssd_f16_64_128"}, {"ssd_f16_128_64", "ssd_f16_128_128"}},
      {{"ssd_bf16_64_64", "ssd_bf16_64_128"}, {"ssd_bf16_128_64", "ssd_bf16_128_128"}}};
  static constexpr const char* kBack[2][2][2] = {
      {{"ssd_back_f16_64_64", "ssd_back_f16_64_128"}, {"ssd_back_f16_128_64", "ssd_back_f16_128_128"}},
      {{"ssd_back_bf16_64_64", "ssd_back_bf16_64_128"}, {"ssd_back_bf16_128_64", "ssd_back_bf16_128_128"}}};
  const bool wide_k = e.K == 128, wide_v = e.V == 128, steps = e.steps.A != nullptr, back = e.back.dots != nullptr;
  const char* name = back    ? kBack[bf16][wide_k][wide_v]
                     : steps ? kSteps[bf16][wide_k][wide_v]
                             : kNames[bf16][wide_k][wide_v][decays];
  const Kernel kernel = {back    ? "mamba/ssd_tile_back_cuda"
                         : steps ? "mamba/ssd_tile_cuda"
                                 : image,
                         name, tile_threads(e.V), tile_shared_bytes(e.K, e.V)};
  const int64_t segments = tile_segments(e), heads = e.N * e.H;
  if (segments > 1) {
    tile.states = scratch.segments;
    tile.decays = scratch.segments + (segments - 1) * heads * e.K * e.V;
    tile.phase = 1;
    enqueue(launch, kernel, {heads, segments - 1}, tile);
    const int count = static_cast<int>(segments - 1);
    enqueue(launch, {"recurrence/cuda/tile/fold", "fold_segments", 256}, {(heads * e.K * e.V + 255) / 256}, tile.states,
            tile.decays, e, count);
    tile.phase = 2;
  }
  enqueue(launch, kernel, {heads, segments}, tile);
}

// The chunked kernel on the multiply-add units: what is worth it for this shape, and the calls that it takes.
bool has_chunks(const Engine& e) {
  constexpr int64_t kFewTokens = 32;
  const bool mapped = e.q.map != Map::identity || e.k.map != Map::identity || e.v.map != Map::identity;
  const bool tiles = is_16_bit(e.q.dtype) && is_tile_width(e.K) && is_tile_width(e.V) && !mapped;
  return e.q.dtype != Dtype::none && !tiles && e.K > 0 && e.K <= 128 && e.V > 0 && e.V <= 128 && e.T >= kFewTokens && e.N > 0 &&
         e.g_width <= 1 && e.beta.data == nullptr && !e.normalize && !e.l2_norm;
}
bool is_chunked(const Engine& e) {
  return has_chunks(e) && e.q.data != nullptr && e.k.data != nullptr && e.v.data != nullptr && e.out.data != nullptr &&
         (e.saved == nullptr || saved_dtype(e.v.dtype, e.K, e.V) == Dtype::f32);
}
bool is_vector(const Rows& rows) {
  const int64_t size = rows.dtype == Dtype::f32 ? 4 : 8;
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride_b % size == 0 && rows.stride_t % size == 0 &&
         rows.stride_h % size == 0;
}
void run_chunks(const Launch& launch, const Engine& e, float* scratch) {
  Chunks c;
  c.e = e;
  c.states = e.saved != nullptr ? static_cast<float*>(e.saved) : scratch;
  c.totals = scratch + saved_slots(e) * e.H * e.K * e.V;
  c.vectors = is_vector(e.q) && is_vector(e.k) && is_vector(e.v) && is_vector(e.out);
  static constexpr const char* kStates[2][2] = {{"chunk_states_64_64", "chunk_states_64_128"},
                                                {"chunk_states_128_64", "chunk_states_128_128"}};
  static constexpr const char* kOutputs[2][2] = {{"chunk_outputs_64_64", "chunk_outputs_64_128"},
                                                 {"chunk_outputs_128_64", "chunk_outputs_128_128"}};
  const bool wide_k = e.K > 64, wide_v = e.V > 64;
  const int K = wide_k ? 128 : 64, V = wide_v ? 128 : 64;
  const Grid grid = {e.N * e.H, (e.T + 63) / 64};
  enqueue(launch, {kChunkImage, kStates[wide_k][wide_v], 256, chunk_states_bytes(K, V)}, grid, c);
  enqueue(launch, {kChunkImage, "fold_chunks", 256}, {(e.N * e.H * e.K * e.V + 255) / 256}, c);
  enqueue(launch, {kChunkImage, kOutputs[wide_k][wide_v], 256, chunk_outputs_bytes(K, V)}, grid, c);
}

// The same for decays per channel, forwards alone.
bool has_channel_chunks(const Engine& e) {
  constexpr int64_t kFewTokens = 32;
  const bool tiles = e.q.dtype == Dtype::bf16 && e.k.dtype == Dtype::bf16 && is_tile_width(e.K) && is_tile_width(e.V);
  return e.q.dtype != Dtype::none && !tiles && e.K > 0 && e.K <= 128 && e.V > 0 && e.V <= 128 && e.T >= kFewTokens && e.N > 0 &&
         e.g_width > 1 && e.beta.data == nullptr && !e.normalize && !e.l2_norm && !e.reverse;
}
void run_channel_chunks(const Launch& launch, const Engine& e, float* scratch) {
  Chunks c;
  c.e = e;
  c.states = scratch;
  c.totals = scratch + saved_slots(e) * e.H * e.K * e.V;
  c.vectors = is_vector(e.q) && is_vector(e.k) && is_vector(e.v);
  constexpr const char* kImage = "recurrence/cuda/chunk/channel";
  static constexpr const char* kStates[2][2] = {{"channel_chunk_states_64_64", "channel_chunk_states_64_128"},
                                                {"channel_chunk_states_128_64", "channel_chunk_states_128_128"}};
  static constexpr const char* kOutputs[2][2] = {{"channel_chunk_outputs_64_64", "channel_chunk_outputs_64_128"},
                                                 {"channel_chunk_outputs_128_64", "channel_chunk_outputs_128_128"}};
  const bool wide_k = e.K > 64, wide_v = e.V > 64;
  const int K = wide_k ? 128 : 64, V = wide_v ? 128 : 64;
  const Grid grid = {e.N * e.H, (e.T + 63) / 64};
  enqueue(launch, {kImage, kStates[wide_k][wide_v], 256, chunk_states_bytes(K, V)}, grid, c);
  enqueue(launch, {kImage, "fold_channel_chunks", 256}, {(e.N * e.H * e.K * e.V + 255) / 256}, c);
  enqueue(launch, {kImage, kOutputs[wide_k][wide_v], 256, chunk_outputs_bytes(K, V)}, grid, c);
}

// One token in place, in rows that 16-byte accesses can take.
bool is_decode(const Engine& e) {
  return e.T == 1 && e.N > 0 && e.initial.data != nullptr && e.initial.data == e.final.data && !e.sums && !e.l2_norm &&
         e.out.data != nullptr && e.offsets == nullptr && e.write_mask == nullptr && e.V % 4 == 0 && e.K > 0 && e.V > 0 &&
         reinterpret_cast<uintptr_t>(e.initial.data) % 16 == 0 && e.initial.stride_column == 1 &&
         e.initial.stride_row % 4 == 0 && e.initial.stride_h % 4 == 0 && e.initial.stride_n % 4 == 0;
}
void run_decode(const Launch& launch, const Engine& e) {
  const bool wide = is_tile_width(e.K) && is_tile_width(e.V) && e.initial.stride_row == e.V;
  const DecodeRing ring = wide ? decode_ring(e.K, e.V) : DecodeRing{};
  const int64_t heads = e.N * e.H, blocks = int64_t{cuda::multiprocessor_count()} * ring.blocks;
  if (wide && heads >= 2 * blocks && heads < int64_t{1} << 30) {
    static constexpr const char* kNames[2][2] = {{"ring_64_64", "ring_64_128"}, {"ring_128_64", "ring_128_128"}};
    const Kernel kernel = {"recurrence/cuda/decode", kNames[e.K == 128][e.V == 128], ring.threads, ring.bytes};
    return enqueue(launch, kernel, {blocks}, e);
  }
  const char* name = e.K <= 64 ? "decode_4" : e.K <= 128 ? "decode_8" : "decode_16";
  enqueue(launch, {"recurrence/cuda/decode", name, 128}, {e.N * e.H, (e.V + 31) / 32}, e);
}

}  // namespace

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

bool is_tiled(const Engine& e) { return has_tiles(e) && e.g_width <= 1 && e.beta.data == nullptr; }

EngineScratch cut_engine(Arena& arena, const Engine& e) {
  EngineScratch scratch;
  if (e.beta.data != nullptr) {
    scratch.delta = cut_delta(arena, e, false);
    scratch.kda = cut_kda(arena, e);
    return scratch;
  }
  if (has_chunks(e)) {
    scratch.chunks = arena.take<float>(saved_slots(e) * e.H * (static_cast<int64_t>(e.K) * e.V + 1));
    return scratch;
  }
  if (has_channel_chunks(e)) {
    scratch.chunks = arena.take<float>(saved_slots(e) * e.H * (static_cast<int64_t>(e.K) * e.V + e.K));
    return scratch;
  }
  const int64_t segments = tile_segments(e);
  if (segments == 1 || !is_tile_width(e.K) || !is_tile_width(e.V)) return scratch;
  scratch.segments =
      arena.take<float>((segments - 1) * e.N * e.H * (static_cast<int64_t>(e.K) * e.V + (e.g_width > 1 ? e.g_width : 1)));
  return scratch;
}

void run_engine(const Launch& launch, const Engine& e, const EngineScratch& scratch) {
  if (e.H == 0) return;  // every result is empty
  const bool in_place = e.initial.data != nullptr && e.initial.data == e.final.data;
  if (is_decode(e)) return run_decode(launch, e);
  // The other kernels need scratch, and keep the old state.
  if (in_place && (e.beta.data != nullptr || e.T > kLongest)) return run_steps(launch, e);
  if (has_tiles(e) && is_delta(e)) {
    run_delta(launch, e, scratch.delta);
  } else if (is_kda(e)) {
    run_kda(launch, e, scratch.kda);
  } else if (is_channel(e)) {
    run_channels(launch, e, scratch);
  } else if (is_tiled(e)) {
    run_tiles(launch, e, scratch);
    if (e.final_z.data != nullptr) enqueue(launch, {kStepImage, "sum_keys", 256}, {e.N * e.H, (e.K + 31) / 32}, e);
  } else if (scratch.chunks != nullptr && has_channel_chunks(e) && e.out.data != nullptr && e.saved == nullptr) {
    run_channel_chunks(launch, e, scratch.chunks);
  } else if (scratch.chunks != nullptr && is_chunked(e)) {
    run_chunks(launch, e, scratch.chunks);
    if (e.final_z.data != nullptr) enqueue(launch, {kStepImage, "sum_keys", 256}, {e.N * e.H, (e.K + 31) / 32}, e);
  } else {
    run_steps(launch, e);
  }
}

void sum_groups(const Launch& launch, const Rows& out, const Rows& part, int64_t B, int64_t T, int64_t heads, int64_t group,
                int64_t width) {
  const int counts[4] = {static_cast<int>(part.dtype), static_cast<int>(heads), static_cast<int>(group),
                         static_cast<int>(width)};
  enqueue(launch, {kStepImage, "sum_groups", 256}, {blocks_for(B * T * heads * width)}, out, part.data, counts[0], B, T,
          counts[1], counts[2], counts[3]);
}

void copy_states(const Launch& launch, const States& to, const States& from, int64_t N, int64_t H, int64_t rows,
                 int64_t columns) {
  if (to.data == nullptr) return;
  const int counts[3] = {static_cast<int>(H), static_cast<int>(rows), static_cast<int>(columns)};
  enqueue(launch, {kStepImage, "copy_states", 256}, {blocks_for(N * H * rows * columns)}, to, from, N, counts[0], counts[1],
          counts[2]);
}

}  // namespace linnet::cuda
