#include "mechanisms/recurrence/cuda/chunk/launch.h"

#include "mechanisms/recurrence/cuda/chunk/gradients.h"

namespace linnet::cuda {
namespace {

constexpr int64_t kFewTokens = 32;

const char* shape_refuses(const Engine& e) {
  const bool channels = e.g_width > 1;
  const bool mapped = e.q.map != Map::identity || e.k.map != Map::identity || e.v.map != Map::identity;
  const bool tiles = is_tile_width(e.K) && is_tile_width(e.V) &&
                     (channels ? e.q.dtype == Dtype::bf16 && e.k.dtype == Dtype::bf16 : is_16_bit(e.q.dtype) && !mapped);
  if (e.beta.data != nullptr) return "it has no delta rule (beta)";
  if (e.l2_norm) return "it does not normalise q and k (l2_norm)";
  if (e.normalize) return "it does not divide by the sum of weights";
  if (tiles) return "16-bit tensors of 64 and 128 channels are left to the matrix units";
  if (e.K <= 0 || e.K > 128 || e.V <= 0 || e.V > 128) return "it takes 1 to 128 channels of keys and of values";
  if (e.T < kFewTokens || e.N <= 0) return "fewer than 32 tokens are quicker one by one";
  if (channels && e.reverse) return "its decays per channel run forwards alone";
  if (e.q.dtype == Dtype::none) return "nothing is read";
  return nullptr;
}

bool is_vector(const Rows& rows) {
  const int64_t size = rows.dtype == Dtype::f32 ? 4 : 8;
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride_b % size == 0 && rows.stride_t % size == 0 &&
         rows.stride_h % size == 0;
}

}  // namespace

bool has_chunks(const Engine& e) { return shape_refuses(e) == nullptr; }

const char* chunk_refuses(const Engine& e) {
  if (const char* reason = shape_refuses(e)) return reason;
  if (e.out.data == nullptr) return "nothing is read";
  if (e.g_width > 1) return e.saved == nullptr ? nullptr : "its decays per channel keep no states";
  if (e.q.data == nullptr || e.k.data == nullptr || e.v.data == nullptr) return "it both writes and reads";
  return e.saved == nullptr || saved_dtype(e.v.dtype, e.K, e.V) == Dtype::f32 ? nullptr : "it keeps states in f32";
}

float* cut_chunks(Arena& arena, const Engine& e) {
  if (!has_chunks(e)) return nullptr;
  const int64_t decays = e.g_width > 1 ? e.K : 1;
  return arena.take<float>(saved_slots(e) * e.H * (static_cast<int64_t>(e.K) * e.V + decays));
}

void run_chunks(const Launch& launch, const Engine& e, float* scratch) {
  struct Names {
    const char *image, *fold, *states[2][2], *outputs[2][2];
  };
  static constexpr Names kHead = {
      "recurrence/cuda/chunk/head",
      "fold_chunks",
      {{"chunk_states_64_64", "chunk_states_64_128"}, {"chunk_states_128_64", "chunk_states_128_128"}},
      {{"chunk_outputs_64_64", "chunk_outputs_64_128"}, {"chunk_outputs_128_64", "chunk_outputs_128_128"}}};
  static constexpr Names kChannel = {"recurrence/cuda/chunk/channel",
                                     "fold_channel_chunks",
                                     {{"channel_chunk_states_64_64", "channel_chunk_states_64_128"},
                                      {"channel_chunk_states_128_64", "channel_chunk_states_128_128"}},
                                     {{"channel_chunk_outputs_64_64", "channel_chunk_outputs_64_128"},
                                      {"channel_chunk_outputs_128_64", "channel_chunk_outputs_128_128"}}};
  const bool channels = e.g_width > 1;
  const Names& names = channels ? kChannel : kHead;
  Chunks c;
  c.e = e;
  c.states = !channels && e.saved != nullptr ? static_cast<float*>(e.saved) : scratch;
  c.totals = scratch + saved_slots(e) * e.H * e.K * e.V;
  c.vectors = is_vector(e.q) && is_vector(e.k) && is_vector(e.v) && (channels || is_vector(e.out));
  const bool wide_k = e.K > 64, wide_v = e.V > 64;
  const int K = wide_k ? 128 : 64, V = wide_v ? 128 : 64;
  const Grid grid = {e.N * e.H, (e.T + 63) / 64};
  enqueue(launch, {names.image, names.states[wide_k][wide_v], 256, chunk_states_bytes(K, V)}, grid, c);
  enqueue(launch, {names.image, names.fold, 256}, {(e.N * e.H * e.K * e.V + 255) / 256}, c);
  enqueue(launch, {names.image, names.outputs[wide_k][wide_v], 256, chunk_outputs_bytes(K, V)}, grid, c);
  if (!channels && e.final_z.data != nullptr) sum_keys(launch, e);
}

DeltaChunkScratch cut_delta_chunks(Arena& arena, const Engine& e) {
  const int64_t images = chunk_slots(e) * e.H, state = static_cast<int64_t>(e.K) * e.V;
  DeltaChunkScratch scratch;
  scratch.states = arena.take<float>(images * state);
  scratch.dstates = arena.take<float>(images * state);
  scratch.residuals = arena.take<float>(images * kDeltaChunk * e.V);
  scratch.adjoints = arena.take<float>(images * kDeltaChunk * e.V);
  return scratch;
}

void run_delta_chunks(const Launch& launch, const Engine& e, const DeltaGradients& gradients,
                      const DeltaChunkScratch& scratch) {
  const DeltaChunks chunks = {e, gradients, scratch.states, scratch.dstates, scratch.residuals, scratch.adjoints};
  static constexpr const char* kNames[3][3] = {{"record_64", "reverse_64", "gradients_64"},
                                               {"record_128", "reverse_128", "gradients_128"},
                                               {"record_256", "reverse_256", "gradients_256"}};
  constexpr const char* kImage = "recurrence/cuda/chunk/gradients";
  const int size = e.K <= 64 ? 0 : e.K <= 128 ? 1 : 2, width = 64 << size;
  const int64_t heads = e.N * e.H, columns = (e.V + kDeltaColumns - 1) / kDeltaColumns;
  enqueue(launch, {kImage, kNames[size][0], 256, chunk_walk_bytes(width)}, {heads, columns}, chunks);
  enqueue(launch, {kImage, kNames[size][1], 256, chunk_walk_bytes(width)}, {heads, columns}, chunks);
  enqueue(launch, {kImage, kNames[size][2], 256, chunk_gradients_bytes(width)}, {heads, (e.T + kDeltaChunk - 1) / kDeltaChunk},
          chunks);
}

}  // namespace linnet::cuda
