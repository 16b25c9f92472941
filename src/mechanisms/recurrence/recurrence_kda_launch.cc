#include "mechanisms/recurrence/recurrence_kda_launch.h"

#include "mechanisms/recurrence/recurrence_channel_launch.h"

namespace linnet::cuda {
namespace {

int64_t segments_of_kda(const Engine& e) { return e.T <= kLongest ? 1 : (e.T + kKdaSegment - 1) / kKdaSegment; }

}  // namespace

bool is_kda(const Engine& e) { return e.beta.data != nullptr && e.K == e.V && has_channels(e) && !e.reverse; }

KdaScratch cut_kda(Arena& arena, const Engine& e) {
  KdaScratch scratch;
  if (e.beta.data == nullptr || e.g_width <= 1 || e.q.dtype != Dtype::bf16 || e.K != e.V || (e.K != 64 && e.K != 128))
    return scratch;
  const int64_t chunks = channel_chunks(e.offsets != nullptr, e.N, e.T) * e.H;
  scratch.images = arena.take<char>(chunks * kda_images(e.K));
  scratch.records = arena.take<float>(chunks * kda_record(e.K));
  scratch.maps = arena.take<float>((segments_of_kda(e) - 1) * e.N * e.H * 2 * e.K * e.K);
  return scratch;
}

void run_kda(const Launch& launch, const Engine& e, const KdaScratch& scratch) {
  Kda t;
  t.e = e;
  t.wide = e.g.dtype == Dtype::f32;
  t.images = scratch.images;
  t.records = scratch.records;
  t.maps = scratch.maps;
  if (!encode_rows(&t.q, e, e.q, e.K) || !encode_rows(&t.k, e, e.k, e.K) || !encode_rows(&t.v, e, e.v, e.V) ||
      !encode_gates(&t.g, e)) {
    *launch.error = "a tensor has no description for the copy engine";
    return;
  }
  const bool large = e.K == 128;
  const int64_t heads = e.N * e.H, segments = segments_of_kda(e);
  enqueue(launch,
          {"recurrence_kda_prepare_cuda", large ? "kda_prepare_128" : "kda_prepare_64", 2 * e.K, kda_prepare_bytes(e.K)},
          {channel_chunks(e.offsets != nullptr, e.N, e.T) * e.H}, t);
  constexpr const char* kImage = "recurrence_kda_cuda";
  const int threads = kda_walk_threads(e.K), bytes = kda_walk_bytes(e.K);
  if (segments > 1) {
    t.phase = KdaPhase::summary;
    enqueue(launch, {kImage, large ? "kda_summary_128" : "kda_summary_64", threads, bytes}, {heads, segments - 1, 2}, t);
    const int count = static_cast<int>(segments - 1);
    enqueue(launch, {kImage, "kda_fold", 256}, {heads, e.V / 8}, t, count);
    t.phase = KdaPhase::joined;
  }
  enqueue(launch, {kImage, large ? "kda_128" : "kda_64", threads, bytes}, {heads, segments}, t);
}

}  // namespace linnet::cuda
