#include "mechanisms/recurrence/cuda/kda/launch.h"

#include "core/cuda/device.h"
#include "mechanisms/recurrence/cuda/channel/launch.h"

namespace linnet::cuda {
namespace {

int64_t segments_of_kda(const Engine& e) { return e.T <= kLongest ? 1 : (e.T + kKdaSegment - 1) / kKdaSegment; }

const char* shape_refuses(const Engine& e) {
  if (e.beta.data == nullptr) return "it has the delta rule alone: there is no beta";
  if (e.g_width <= 1) return "its decays are one for each channel";
  if (e.l2_norm) return "it does not normalise q and k (l2_norm)";
  if (e.q.dtype != Dtype::bf16) return "its tensors are bf16";
  return e.K == e.V && is_tile_width(e.K) ? nullptr : "it takes as many channels of keys as of values, 64 or 128";
}

KdaScratch cut_images(Arena& arena, const Engine& e, int image) {
  KdaScratch scratch;
  const int64_t chunks = channel_chunks(e.offsets != nullptr, e.N, e.T) * e.H;
  scratch.images = arena.take<char>(chunks * image);
  scratch.records = arena.take<float>(chunks * kda_record(e.K));
  scratch.maps = arena.take<float>((segments_of_kda(e) - 1) * e.N * e.H * 2 * e.K * e.K);
  scratch.forgets = arena.take<int32_t>(segments_of_kda(e) > 1 ? segments_of_kda(e) * 2 * e.N * e.H : 0);
  return scratch;
}

bool encode_kda(const Launch& launch, const Engine& e, const KdaScratch& scratch, Kda* t) {
  t->e = e;
  t->wide = e.g.dtype == Dtype::f32;
  t->images = scratch.images;
  t->records = scratch.records;
  t->maps = scratch.maps;
  t->forgets = scratch.forgets;
  if (encode_rows(&t->q, e, e.q, e.K) && encode_rows(&t->k, e, e.k, e.K) && encode_rows(&t->v, e, e.v, e.V) &&
      encode_gates(&t->g, e)) {
    return true;
  }
  *launch.error = "a tensor has no description for the copy engine";
  return false;
}

constexpr const char* kImage = "recurrence/cuda/kda/walk";
Kernel summary_kernel(const Engine& e) {
  return {kImage, e.K == 128 ? "kda_summary_128" : "kda_summary_64", kda_walk_threads(e.K), kda_walk_bytes(e.K)};
}

// What the chunks need, and the states between segments; the phase that is then due.
void prepare(const Launch& launch, Kda& t) {
  const Engine& e = t.e;
  static constexpr const char* kNames[2][2] = {{"kda_prepare_64", "kda_prepare_128"},
                                               {"kda_prepare_back_64", "kda_prepare_back_128"}};
  enqueue(launch, {"recurrence/cuda/kda/prepare", kNames[t.back][e.K == 128], 2 * e.K, kda_prepare_bytes(e.K)},
          {channel_chunks(e.offsets != nullptr, e.N, e.T) * e.H}, t);
  const int64_t segments = segments_of_kda(e);
  if (segments == 1) return;
  t.phase = KdaPhase::probe;
  enqueue(launch, summary_kernel(e), {e.N * e.H, t.back ? segments : segments - 1, t.back ? 3 : 2}, t);
  t.phase = KdaPhase::summary;
  enqueue(launch, summary_kernel(e), {e.N * e.H, segments - 1, 2}, t);
  const int count = static_cast<int>(segments - 1);
  enqueue(launch, {kImage, "kda_fold", 256}, {e.N * e.H, e.V / 8}, t, count);
  t.phase = KdaPhase::joined;
}

}  // namespace

const char* kda_refuses(const Engine& e) {
  if (!is_hopper()) return kNeedsHopper;
  if (const char* reason = shape_refuses(e)) return reason;
  return e.reverse ? "it runs forwards" : channels_refuse(e);
}

KdaScratch cut_kda(Arena& arena, const Engine& e) {
  return shape_refuses(e) == nullptr ? cut_images(arena, e, kda_images(e.K)) : KdaScratch();
}

void run_kda(const Launch& launch, const Engine& e, const KdaScratch& scratch) {
  Kda t;
  t.image = kda_images(e.K);
  if (!encode_kda(launch, e, scratch, &t)) return;
  prepare(launch, t);
  enqueue(launch, {kImage, e.K == 128 ? "kda_128" : "kda_64", kda_walk_threads(e.K), kda_walk_bytes(e.K)},
          {e.N * e.H, segments_of_kda(e)}, t);
}

const char* kda_gradients_refuse(const Engine& e) {
  if (const char* reason = shape_refuses(e)) return reason;
  if (e.k.dtype != Dtype::bf16) return "its tensors are bf16";
  if (e.g.dtype == Dtype::f16) return "its g is bf16 or f32";
  return e.N > 0 && e.T > 0 ? nullptr : "there are no tokens";
}

KdaBackScratch cut_kda_gradients(Arena& arena, const Engine& e) {
  KdaBackScratch scratch;
  scratch.rows = cut_rows(arena, e);
  scratch.kda = cut_images(arena, e, kda_back_images(e.K));
  const int64_t chunks = channel_chunks(e.offsets != nullptr, e.N, e.T) * e.H;
  scratch.states = arena.take<char>(chunks * e.K * e.K * 2);
  scratch.dstates = arena.take<char>(chunks * e.K * e.K * 2);
  scratch.residuals = arena.take<char>(chunks * e.K * 128);
  scratch.adjoints = arena.take<char>(chunks * e.K * 128);
  if (segments_of_kda(e) > 1) scratch.dmaps = arena.take<float>(segments_of_kda(e) * e.N * e.H * e.K * e.K);
  return scratch;
}

void run_kda_gradients(const Launch& launch, const KdaGradients& g, const KdaBackScratch& scratch) {
  Engine base = g.base;
  Rows dout = g.dout;
  align_rows(launch, scratch.rows, &base, &dout);
  base.initial = g.initial;
  Kda t;
  t.back = true;
  t.image = kda_back_images(base.K);
  if (!encode_kda(launch, base, scratch.kda, &t)) return;
  if (!encode_rows(&t.dout, base, dout, base.V)) {
    *launch.error = "a tensor has no description for the copy engine";
    return;
  }
  t.states = scratch.states;
  t.dstates = scratch.dstates;
  t.residuals = scratch.residuals;
  t.adjoints = scratch.adjoints;
  t.dmaps = scratch.dmaps;
  t.dfinal = g.dfinal;
  t.dinitial = g.dinitial;
  prepare(launch, t);
  const bool large = base.K == 128;
  const int64_t heads = base.N * base.H, segments = segments_of_kda(base);
  enqueue(launch, summary_kernel(base), {heads, segments}, t);
  constexpr const char* kReverse = "recurrence/cuda/kda/reverse";
  const Kernel reverse = {kReverse, large ? "kda_reverse_128" : "kda_reverse_64", kda_walk_threads(base.K),
                          kda_reverse_bytes(base.K)};
  if (segments > 1) {
    t.phase = KdaPhase::summary;
    enqueue(launch, reverse, {heads, segments - 1}, t);
    const int count = static_cast<int>(segments);
    enqueue(launch, {kImage, "kda_fold_back", 256}, {heads, base.V / 8}, t, count);
    t.phase = KdaPhase::joined;
  }
  enqueue(launch, reverse, {heads, segments}, t);
  ChannelGradient gradient;
  gradient.states = scratch.states;
  gradient.later = scratch.dstates;
  gradient.residuals = scratch.residuals;
  gradient.adjoints = scratch.adjoints;
  gradient.records = scratch.kda.records;
  gradient.dbeta = g.dbeta;
  run_chunk_gradients(launch, base, dout, scratch.rows, {g.dq, g.dk, g.dv, g.dg}, gradient);
}

}  // namespace linnet::cuda
