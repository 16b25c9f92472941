#include "mechanisms/recurrence/cuda/channel/launch.h"

#include <algorithm>

#include "core/cuda/device.h"
#include "mechanisms/recurrence/cuda/tile/launch.h"
#include "mechanisms/shared/copy_rows.h"

namespace linnet::cuda {

bool encode_gates(TensorMap* map, const Engine& e) {
  Rows bits = e.g;  // f32 as pairs of 16 bits
  const int64_t parts = e.g.dtype == Dtype::f32 ? 2 : 1;
  bits.stride_b *= parts;
  bits.stride_t *= parts;
  bits.stride_h *= parts;
  bits.dtype = Dtype::bf16;
  return encode_rows(map, e, bits, static_cast<int32_t>(parts) * e.K);
}

bool has_gate_rows(const Rows& g) {
  const int64_t piece = g.dtype == Dtype::f32 ? 4 : 8;
  return reinterpret_cast<uintptr_t>(g.data) % 16 == 0 && g.stride_b % piece == 0 && g.stride_t % piece == 0 &&
         g.stride_h % piece == 0 && g.stride_b >= 0 && g.stride_t > 0 && g.stride_h > 0;
}
const char* channels_refuse(const Engine& e) {
  if (e.g_width <= 1) return "its decays are one for each channel";
  if (e.q.dtype != Dtype::bf16) return "its tensors are bf16";
  if (const char* reason = tiles_refuse(e)) return reason;
  return has_gate_rows(e.g) ? nullptr : "rows of g do not lie at multiples of 16 bytes";
}

namespace {

constexpr const char* kImage = "recurrence/cuda/channel/forward";

Rows result_rows(const Engine& base, const View& view, float* parts, int32_t width) {
  if (!view.given()) return {};
  return parts == nullptr ? rows_of(view, base.H) : dense_rows(parts, base.T, base.H, width);
}
void add_groups(const Launch& launch, const Engine& base, const View& view, float* parts, int32_t width) {
  if (!view.given() || parts == nullptr) return;
  const int64_t heads = view.size[2];
  sum_groups(launch, rows_of(view, heads), dense_rows(parts, base.T, base.H, width), base.offsets != nullptr ? 1 : base.N,
             base.T, heads, base.H / heads, width);
}

void refuse(const Launch& launch) { *launch.error = "a tensor has no description for the copy engine"; }

// A walk over whole sequences or, where they are long, over their segments: without reads when nothing is read, and then what
// it keeps of every chunk is the point.
void walk_channels(const Launch& launch, const Engine& e, float* segment_states, char* kept) {
  const bool reads = kept == nullptr;
  ChannelTile tile;
  tile.e = e;
  tile.wide = e.g.dtype == Dtype::f32;
  if (!encode_rows(&tile.q, e, reads ? e.q : e.k, e.K) || !encode_rows(&tile.k, e, e.k, e.K) ||
      !encode_rows(&tile.v, e, e.v, e.V) || !encode_gates(&tile.g, e)) {
    return refuse(launch);
  }
  static constexpr const char* kReads[2][2] = {{"channel_64_64", "channel_64_128"}, {"channel_128_64", "channel_128_128"}};
  static constexpr const char* kStates[2][2] = {{"channel_64_64_states", "channel_64_128_states"},
                                                {"channel_128_64_states", "channel_128_128_states"}};
  const int threads = channel_threads(e.K, e.V), bytes = channel_shared_bytes(e.K, e.V);
  const Kernel states = {kImage, kStates[e.K == 128][e.V == 128], threads, bytes};
  const int64_t segments = tile_segments(e), heads = e.N * e.H;
  if (segments > 1) {
    tile.states = segment_states;
    tile.decays = segment_states + (segments - 1) * heads * e.K * e.V;
    tile.phase = 1;
    enqueue(launch, states, {heads, segments - 1}, tile);
    const int count = static_cast<int>(segments - 1);
    enqueue(launch, {kImage, "fold_channel_segments", 256}, {(heads * e.K * e.V + 255) / 256}, tile.states, tile.decays, e,
            count);
    tile.phase = 2;
  }
  tile.kept = kept;
  enqueue(launch, reads ? Kernel{kImage, kReads[e.K == 128][e.V == 128], threads, bytes} : states, {heads, segments}, tile);
}

}  // namespace

const char* channel_refuses(const Engine& e) {
  if (!is_hopper()) return kNeedsHopper;
  if (e.beta.data != nullptr) return "it has no delta rule (beta)";
  if (e.reverse) return "it runs forwards";
  return channels_refuse(e);
}
void run_channels(const Launch& launch, const Engine& e, float* segments) { walk_channels(launch, e, segments, nullptr); }

const char* channel_gradients_refuse(const Engine& e) {
  if (e.beta.data != nullptr) return "it has no delta rule (beta)";
  if (e.g_width <= 1) return "its decays are one for each channel";
  if (e.q.dtype != Dtype::bf16 || e.k.dtype != Dtype::bf16) return "its tensors are bf16";
  if (!is_tile_width(e.K) || !is_tile_width(e.V)) return "it takes 64 or 128 channels of keys and of values";
  return e.N > 0 && e.T > 0 ? nullptr : "there are no tokens";
}

ChannelRows cut_rows(Arena& arena, const Engine& e) {
  ChannelRows rows;
  const int64_t tokens = (e.offsets != nullptr ? 1 : e.N) * e.T;
  const auto copy = [&](const Rows& from, int64_t width) {
    return is_aligned(from, from.dtype) ? nullptr : arena.take<uint16_t>(tokens * (e.H / from.group) * width);
  };
  rows.q = copy(e.q, e.K);
  rows.k = copy(e.k, e.K);
  rows.v = copy(e.v, e.V);
  if (!has_gate_rows(e.g)) rows.g = arena.take<uint16_t>(tokens * e.H * e.K * dtype_size(e.g.dtype) / 2);
  rows.dout = arena.take<uint16_t>(tokens * e.H * e.V);  // whose view is not known yet
  if (e.q.group > 1) rows.dq = arena.take<float>(tokens * e.H * e.K);
  if (e.k.group > 1) rows.dk = arena.take<float>(tokens * e.H * e.K);
  if (e.v.group > 1) rows.dv = arena.take<float>(tokens * e.H * e.V);
  return rows;
}

void align_rows(const Launch& launch, const ChannelRows& rows, Engine* base, Rows* dout) {
  Engine& e = *base;
  const auto copied = [&](const Rows& from, uint16_t* to, int64_t width) {
    const int64_t heads = e.H / from.group;
    const Rows copy = {to, e.T * heads * width, heads * width, width, from.group, Dtype::bf16, Map::identity};
    copy_rows(launch, copy, from, e.offsets != nullptr ? 1 : e.N, e.T, heads, width);
    return copy;
  };
  if (rows.q != nullptr) e.q = copied(e.q, rows.q, e.K);
  if (rows.k != nullptr) e.k = copied(e.k, rows.k, e.K);
  if (rows.v != nullptr) e.v = copied(e.v, rows.v, e.V);
  if (rows.g != nullptr) {
    const int64_t parts = dtype_size(e.g.dtype) / 2;  // f32 as pairs of 16 bits
    const Rows bits = {e.g.data, e.g.stride_b * parts, e.g.stride_t * parts, e.g.stride_h * parts, 1, Dtype::bf16};
    copied(bits, rows.g, e.K * parts);
    e.g = {rows.g, e.T * e.H * e.K, static_cast<int64_t>(e.H) * e.K, e.K, 1, e.g.dtype};
  }
  dout->group = 1;
  if (!is_aligned(*dout, Dtype::bf16)) *dout = copied(*dout, rows.dout, e.V);
}

ChannelScratch cut_channel_gradients(Arena& arena, const Engine& e) {
  ChannelScratch scratch;
  if (!has_channel_gradients(e)) return scratch;
  scratch.rows = cut_rows(arena, e);
  const int64_t chunks = channel_chunks(e.offsets != nullptr, e.N, e.T) * e.H;
  scratch.states = arena.take<char>(chunks * e.K * e.V * 2);
  scratch.later = arena.take<char>(chunks * e.K * e.V * 2);
  scratch.exact = arena.take<int32_t>(chunks * gradient_parts(e.K, false));
  scratch.segments = cut_segments(arena, e);
  return scratch;
}

void run_channel_gradients(const Launch& launch, const ChannelGradients& g, const ChannelScratch& scratch) {
  Engine base = g.base;
  if (base.N == 0 || base.T == 0) return copy_states(launch, g.dinitial, g.dfinal, base.N, base.H, base.K, base.V);
  Rows dout = g.dout;
  align_rows(launch, scratch.rows, &base, &dout);

  Engine forwards = base;
  forwards.initial = g.initial;
  walk_channels(launch, forwards, scratch.segments, scratch.states);
  // In reverse: the later tokens' gradient of the state, in units of the scale.
  Engine backwards = base;
  backwards.k = base.q;
  backwards.v = dout;
  backwards.reverse = true;
  backwards.initial = g.dfinal;
  backwards.in_factor = 1 / base.scale;
  backwards.final = g.dinitial;
  backwards.out_factor = base.scale;
  walk_channels(launch, backwards, scratch.segments, scratch.later);

  ChannelGradient t;
  t.states = scratch.states;
  t.later = scratch.later;
  t.exact = scratch.exact;
  run_chunk_gradients(launch, base, dout, scratch.rows, {g.dq, g.dk, g.dv, g.dg}, t);
}

void run_chunk_gradients(const Launch& launch, const Engine& base, const Rows& dout, const ChannelRows& rows,
                         const ChannelResults& results, ChannelGradient t) {
  t.e = base;
  t.wide = base.g.dtype == Dtype::f32;
  t.dq = result_rows(base, results.dq, rows.dq, base.K);
  t.dk = result_rows(base, results.dk, rows.dk, base.K);
  t.dv = result_rows(base, results.dv, rows.dv, base.V);
  t.dv_pieces = is_aligned(t.dv, Dtype::bf16);
  t.dg = rows_of(results.dg, base.H);
  const auto in_pairs = [](const Rows& x) {
    return (reinterpret_cast<uintptr_t>(x.data) % (2 * dtype_size(x.dtype)) | (x.stride_b | x.stride_t | x.stride_h) % 2) == 0;
  };
  t.pairs = true;
  for (const Rows* x : {&t.dq, &t.dk, &t.dg}) t.pairs = t.pairs && (x->data == nullptr || in_pairs(*x));
  bool encoded = encode_rows(&t.v, base, base.v, base.V) && encode_rows(&t.d, base, dout, base.V);
  for (int i = 0; i < base.K / 64; ++i) {
    Engine panel = base;
    panel.K = 64;
    for (Rows* from : {&panel.q, &panel.k, &panel.g}) {
      from->data = static_cast<const char*>(from->data) + i * 64 * dtype_size(from->dtype);
    }
    encoded = encoded && encode_rows(&t.q[i], panel, panel.q, 64) && encode_rows(&t.k[i], panel, panel.k, 64) &&
              encode_gates(&t.g[i], panel);
  }
  if (!encoded) return refuse(launch);
  // All chunks, but those whose gates range too far; then these.
  static constexpr const char* kNames[2][2][2] = {
      {{"channel_gradient_64_64", "channel_gradient_64_128"}, {"channel_gradient_128_64", "channel_gradient_128_128"}},
      {{"channel_exact_64_64", "channel_exact_64_128"}, {"channel_exact_128_64", "channel_exact_128_128"}}};
  static constexpr const char* kBeta[2][2] = {{"kda_gradient_64", "kda_gradient_128"}, {"kda_exact_64", "kda_exact_128"}};
  const bool beta = base.beta.data != nullptr, wide_k = base.K == 128, wide_v = base.V == 128;
  const int64_t blocks = channel_chunks(base.offsets != nullptr, base.N, base.T) * base.H * gradient_parts(base.K, beta);
  for (const bool split : {false, true}) {
    const char* name = beta ? kBeta[split][wide_k] : kNames[split][wide_k][wide_v];
    enqueue(launch, {"recurrence/cuda/channel/gradients", name, 256, gradient_shared_bytes(split)},
            {split ? std::min<int64_t>(blocks, kExactBlocks) : blocks}, t);
  }
  add_groups(launch, base, results.dq, rows.dq, base.K);
  add_groups(launch, base, results.dk, rows.dk, base.K);
  add_groups(launch, base, results.dv, rows.dv, base.V);
}

}  // namespace linnet::cuda
