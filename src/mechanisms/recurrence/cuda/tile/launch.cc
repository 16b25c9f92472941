#include "mechanisms/recurrence/cuda/tile/launch.h"

#include "core/cuda/device.h"

namespace linnet::cuda {
namespace {

const char* row_refuses(const Rows& rows, Dtype dtype, const char* type, const char* place) {
  if (rows.data != nullptr && rows.dtype != dtype) return type;
  return is_aligned(rows, dtype) ? nullptr : place;
}

}  // namespace

const char* tiles_refuse(const Engine& e) {
  const Dtype dtype = e.q.dtype;
  if (e.l2_norm) return "it does not normalise q and k (l2_norm)";
  if (e.normalize) return "it does not divide by the sum of weights";
  if (e.write_mask != nullptr || e.out_mask != nullptr) return "it has no masks";
  if (e.out_bias.data != nullptr) return "it adds nothing to its results";
  for (const Rows* rows : {&e.q, &e.k, &e.v, &e.out_source}) {
    if (rows->map != Map::identity) return "it has no feature maps";
  }
  if (e.untiled) return "the walks of this backward run on other kernels";
  if (!is_16_bit(dtype)) return "its tensors are bf16 or f16";
  if (!is_tile_width(e.K) || !is_tile_width(e.V)) return "it takes 64 or 128 channels of keys and of values";
  if (e.N <= 0 || e.T <= 0) return "there are no tokens";
  if (e.scale == 0) return "the scale is 0";
  if (const char* reason = row_refuses(e.q, dtype, "", "rows of q do not lie at multiples of 16 bytes")) return reason;
  if (const char* reason =
          row_refuses(e.k, dtype, "k is not of the type of q", "rows of k do not lie at multiples of 16 bytes")) {
    return reason;
  }
  if (const char* reason =
          row_refuses(e.v, dtype, "v is not of the type of q", "rows of v do not lie at multiples of 16 bytes")) {
    return reason;
  }
  if (e.finish.z.data != nullptr && !is_aligned(e.finish.z, dtype)) return "rows of z do not lie at multiples of 16 bytes";
  if (e.out.data == nullptr && e.saved_transposed) return nullptr;
  return row_refuses(e.out, dtype, "the result is not of the type of q",
                     "rows of the result do not lie at multiples of 16 bytes");
}

const char* tile_refuses(const Engine& e) {
  if (!is_hopper()) return kNeedsHopper;
  if (e.beta.data != nullptr) return "it has no delta rule (beta)";
  if (e.g_width > 1) return "its decays are one for all channels of a head";
  return tiles_refuse(e);
}

int64_t tile_segments(const Engine& e) {
  if (e.T <= kLongest) return 1;
  const int64_t part = segment_tokens(e, e.T), whole = (e.T + part - 1) / part, most = kVeryLong / kSegment;
  return e.offsets != nullptr && part > kSegment && whole < most ? most : whole;  // of one of the packed sequences
}

float* cut_segments(Arena& arena, const Engine& e) {
  const int64_t segments = tile_segments(e);
  if (segments == 1 || !is_tile_width(e.K) || !is_tile_width(e.V)) return nullptr;
  return arena.take<float>((segments - 1) * e.N * e.H * (static_cast<int64_t>(e.K) * e.V + (e.g_width > 1 ? e.g_width : 1)));
}

void run_tile(const Launch& launch, const Engine& e, float* segment_states) {
  Tile tile;
  tile.e = e;
  if (!encode_rows(&tile.q, e, e.q, e.K) || !encode_rows(&tile.k, e, e.k, e.K) || !encode_rows(&tile.v, e, e.v, e.V)) {
    *launch.error = "a tensor has no description for the copy engine";
    return;
  }
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
    tile.states = segment_states;
    tile.decays = segment_states + (segments - 1) * heads * e.K * e.V;
    tile.phase = 1;
    enqueue(launch, kernel, {heads, segments - 1}, tile);
    const int count = static_cast<int>(segments - 1);
    enqueue(launch, {"recurrence/cuda/tile/fold", "fold_segments", 256}, {(heads * e.K * e.V + 255) / 256}, tile.states,
            tile.decays, e, count);
    tile.phase = 2;
  }
  enqueue(launch, kernel, {heads, segments}, tile);
  if (e.final_z.data != nullptr) sum_keys(launch, e);
}

}  // namespace linnet::cuda
