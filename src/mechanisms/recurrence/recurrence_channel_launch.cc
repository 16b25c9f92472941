#include "mechanisms/recurrence/recurrence_channel_launch.h"

#include "mechanisms/recurrence/recurrence_delta_launch.h"

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
bool has_channels(const Engine& e) { return e.g_width > 1 && e.q.dtype == Dtype::bf16 && has_tiles(e) && has_gate_rows(e.g); }

namespace {

constexpr const char* kImage = "recurrence_channel_cuda";

void refuse(const Launch& launch) { *launch.error = "a tensor has no description for the copy engine"; }

// A walk over whole sequences or, where they are long, over their segments: without reads when nothing is read, and then what
// it keeps of every chunk is the point.
void walk_channels(const Launch& launch, const Engine& e, const EngineScratch& scratch, char* kept) {
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
    tile.states = scratch.segments;
    tile.decays = scratch.segments + (segments - 1) * heads * e.K * e.V;
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

bool is_channel(const Engine& e) { return has_channels(e) && e.beta.data == nullptr && !e.reverse; }
void run_channels(const Launch& launch, const Engine& e, const EngineScratch& scratch) {
  walk_channels(launch, e, scratch, nullptr);
}

bool has_channel_gradients(const Engine& e) {
  const auto fits = [](int32_t width) { return width == 64 || width == 128; };
  return e.g_width > 1 && e.beta.data == nullptr && e.q.dtype == Dtype::bf16 && e.k.dtype == Dtype::bf16 && fits(e.K) &&
         fits(e.V) && e.N > 0 && e.T > 0;
}

ChannelScratch cut_channel_gradients(Arena& arena, const Engine& e) {
  ChannelScratch scratch;
  if (!has_channel_gradients(e)) return scratch;
  const bool packed = e.offsets != nullptr;
  const int64_t tokens = (packed ? 1 : e.N) * e.T;
  const auto copy = [&](const Rows& rows, int64_t width) {
    return is_aligned(rows, rows.dtype) ? nullptr : arena.take<uint16_t>(tokens * (e.H / rows.group) * width);
  };
  scratch.q = copy(e.q, e.K);
  scratch.k = copy(e.k, e.K);
  scratch.v = copy(e.v, e.V);
  if (!has_gate_rows(e.g)) scratch.g = arena.take<uint16_t>(tokens * e.H * e.K * dtype_size(e.g.dtype) / 2);
  scratch.dout = arena.take<uint16_t>(tokens * e.H * e.V);  // whose view is not known yet
  if (e.q.group > 1) scratch.dq = arena.take<float>(tokens * e.H * e.K);
  if (e.k.group > 1) scratch.dk = arena.take<float>(tokens * e.H * e.K);
  if (e.v.group > 1) scratch.dv = arena.take<float>(tokens * e.H * e.V);
  const int64_t chunks = channel_chunks(packed, e.N, e.T) * e.H;
  scratch.states = arena.take<char>(chunks * e.K * e.V * 2);
  scratch.later = arena.take<char>(chunks * e.K * e.V * 2);
  scratch.exact = arena.take<int32_t>(chunks);
  scratch.engine = cut_engine(arena, e);
  return scratch;
}

void run_channel_gradients(const Launch& launch, const ChannelGradients& g, const ChannelScratch& scratch) {
  Engine base = g.base;
  if (base.N == 0 || base.T == 0) return copy_states(launch, g.dinitial, g.dfinal, base.N, base.H, base.K, base.V);
  const bool packed = base.offsets != nullptr;
  const int64_t B = packed ? 1 : base.N;
  const auto copied = [&](const Rows& from, uint16_t* to, int64_t width) {
    const int64_t heads = base.H / from.group;
    const Rows rows = {to, base.T * heads * width, heads * width, width, from.group, Dtype::bf16, Map::identity};
    copy_rows(launch, rows, from, B, base.T, heads, width);
    return rows;
  };
  if (scratch.q != nullptr) base.q = copied(base.q, scratch.q, base.K);
  if (scratch.k != nullptr) base.k = copied(base.k, scratch.k, base.K);
  if (scratch.v != nullptr) base.v = copied(base.v, scratch.v, base.V);
  if (scratch.g != nullptr) {
    const int64_t parts = dtype_size(base.g.dtype) / 2;  // f32 as pairs of 16 bits
    const Rows bits = {base.g.data, base.g.stride_b * parts, base.g.stride_t * parts, base.g.stride_h * parts, 1, Dtype::bf16};
    copied(bits, scratch.g, base.K * parts);
    base.g = {scratch.g, base.T * base.H * base.K, static_cast<int64_t>(base.H) * base.K, base.K, 1, base.g.dtype};
  }
  Rows dout = g.dout;
  dout.group = 1;
  if (!is_aligned(dout, Dtype::bf16)) dout = copied(dout, scratch.dout, base.V);

  Engine forwards = base;
  forwards.initial = g.initial;
  walk_channels(launch, forwards, scratch.engine, scratch.states);
  // In reverse: the later tokens' gradient of the state, in units of the scale.
  Engine backwards = base;
  backwards.k = base.q;
  backwards.v = dout;
  backwards.reverse = true;
  backwards.initial = g.dfinal;
  backwards.in_factor = 1 / base.scale;
  backwards.final = g.dinitial;
  backwards.out_factor = base.scale;
  walk_channels(launch, backwards, scratch.engine, scratch.later);

  ChannelGradient t;
  t.e = base;
  t.wide = base.g.dtype == Dtype::f32;
  t.states = scratch.states;
  t.later = scratch.later;
  t.exact = scratch.exact;
  const auto rows = [&](const View& view, float* parts, int32_t width) {
    if (!view.given()) return Rows();
    return parts == nullptr ? rows_of(view, base.H) : dense_rows(parts, base.T, base.H, width);
  };
  t.dq = rows(g.dq, scratch.dq, base.K);
  t.dk = rows(g.dk, scratch.dk, base.K);
  t.dv = rows(g.dv, scratch.dv, base.V);
  t.dv_pieces = is_aligned(t.dv, Dtype::bf16);
  t.dg = rows_of(g.dg, base.H);
  if (!encode_rows(&t.q, base, base.q, base.K) || !encode_rows(&t.k, base, base.k, base.K) ||
      !encode_rows(&t.v, base, base.v, base.V) || !encode_rows(&t.d, base, dout, base.V) || !encode_gates(&t.g, base)) {
    return refuse(launch);
  }
  // All chunks, but those whose gates range too far; then these.
  static constexpr const char* kNames[2][2][2] = {
      {{"channel_gradient_64_64", "channel_gradient_64_128"}, {"channel_gradient_128_64", "channel_gradient_128_128"}},
      {{"channel_exact_64_64", "channel_exact_64_128"}, {"channel_exact_128_64", "channel_exact_128_128"}}};
  for (const auto& names : kNames) {
    enqueue(
        launch,
        {"recurrence_channel_backward_cuda", names[base.K == 128][base.V == 128], 512, gradient_shared_bytes(base.K, base.V)},
        {channel_chunks(packed, base.N, base.T) * base.H}, t);
  }
  const auto add = [&](const View& view, float* parts, int32_t width) {
    if (!view.given() || parts == nullptr) return;
    const int64_t heads = view.size[2];
    sum_groups(launch, rows_of(view, heads), dense_rows(parts, base.T, base.H, width), B, base.T, heads, base.H / heads, width);
  };
  add(g.dq, scratch.dq, base.K);
  add(g.dk, scratch.dk, base.K);
  add(g.dv, scratch.dv, base.V);
}

}  // namespace linnet::cuda
