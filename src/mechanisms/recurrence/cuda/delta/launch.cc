#include "mechanisms/recurrence/cuda/delta/launch.h"

#include "core/cuda/device.h"
#include "mechanisms/recurrence/cuda/tile/launch.h"

namespace linnet::cuda {
namespace {

constexpr const char *kPrepareImage = "recurrence/cuda/delta/prepare", *kWalkImage = "recurrence/cuda/delta/walk_bf16";
const char* walk_image(const Engine& e) { return e.q.dtype == Dtype::bf16 ? kWalkImage : "recurrence/cuda/delta/walk_f16"; }

int64_t segments_of(const Engine& e, int64_t segment = kDeltaSegment) {
  return e.T <= kLongest ? 1 : (e.T + segment - 1) / segment;
}

// Kernels of one kind: for 64 and 128 channels, without and with decays.
using Names = const char* const[2][2];
const char* name_of(const Names& names, const Engine& e) { return names[e.K == 128][e.g_width != 0]; }
constexpr Names kPrepare = {{"prepare_64", "prepare_64_decay"}, {"prepare_128", "prepare_128_decay"}};
constexpr Names kPrepareF16 = {{"prepare_64_f16", "prepare_64_decay_f16"}, {"prepare_128_f16", "prepare_128_decay_f16"}};
constexpr Names kWalks = {{"delta_64", "delta_64_decay"}, {"delta_128", "delta_128_decay"}};
constexpr Names kSummaries = {{"summary_64", "summary_64_decay"}, {"summary_128", "summary_128_decay"}};
constexpr Names kRecords = {{"record_64", "record_64_decay"}, {"record_128", "record_128_decay"}};
constexpr Names kReverse = {{"reverse_64", "reverse_64_decay"}, {"reverse_128", "reverse_128_decay"}};
constexpr Names kGradients = {{"gradients_64", "gradients_64_decay"}, {"gradients_128", "gradients_128_decay"}};

bool fill(const Launch& launch, const Engine& e, const DeltaScratch& scratch, Delta* delta) {
  delta->e = e;
  delta->inverse = scratch.inverse;
  delta->bounds = scratch.bounds;
  delta->maps = scratch.maps;
  delta->forgets = scratch.forgets;
  if (encode_rows(&delta->q, e, e.q, e.K) && encode_rows(&delta->k, e, e.k, e.K) && encode_rows(&delta->v, e, e.v, e.V)) {
    return true;
  }
  *launch.error = "a tensor has no description for the copy engine";
  return false;
}

Kernel walk_kernel(const Engine& e, const char* name) {
  return {walk_image(e), name, delta_threads(e.K, e.q.dtype == Dtype::bf16), delta_shared_bytes(e.K)};
}

// The triangular systems of all chunks, and the states between segments; the phase that is then due.
void prepare(const Launch& launch, Delta& delta, bool early) {
  const Engine& e = delta.e;
  const int64_t segments = segments_of(e, delta.segment), heads = e.N * e.H;
  const char* name = name_of(e.q.dtype == Dtype::bf16 ? kPrepare : kPrepareF16, e);
  enqueue(launch, {kPrepareImage, name, 128, prepare_shared_bytes(e.K)}, {delta_slots(e) * e.H}, delta);
  if (segments == 1) return;
  Delta summary = delta;
  summary.phase = early ? DeltaPhase::early : DeltaPhase::summary;
  if (early) {
    enqueue(launch, walk_kernel(e, "early_128"), {heads, 2 * segments - 3}, summary);
  } else {
    enqueue(launch, walk_kernel(e, name_of(kSummaries, e)), {heads, segments - 1, 2}, summary);
  }
  const int count = static_cast<int>(segments - 1);
  enqueue(launch, {kWalkImage, e.K == 128 ? "fold_128" : "fold_64", 256}, {heads, e.V / kFoldRows}, summary, count);
  delta.phase = early ? DeltaPhase::rest : DeltaPhase::joined;
}

}  // namespace

const char* delta_shape_refuses(const Engine& e) {
  if (e.beta.data == nullptr) return "it has the delta rule alone: there is no beta";
  if (e.g_width > 1) return "its decays are one for all channels of a head";
  if (e.l2_norm) return "it does not normalise q and k (l2_norm)";
  if (!is_16_bit(e.q.dtype)) return "its tensors are bf16 or f16";
  if (e.K != e.V || !is_tile_width(e.K)) return "it takes as many channels of keys as of values, 64 or 128";
  if (e.reverse) return "it runs forwards";
  return e.N > 0 && e.T > 0 ? nullptr : "there are no tokens";
}
const char* delta_refuses(const Engine& e) {
  if (!is_hopper()) return kNeedsHopper;
  const char* reason = delta_shape_refuses(e);
  return reason != nullptr ? reason : tiles_refuse(e);
}

DeltaScratch cut_delta(Arena& arena, const Engine& e, bool gradients) {
  DeltaScratch scratch;
  if (!is_delta(e)) return scratch;
  const int64_t between = (segments_of(e, gradients ? kDeltaSegment : kDeltaEarlySegment) - 1) * e.N * e.H,
                images = delta_slots(e) * e.H;
  scratch.inverse = arena.take<char>(images * kInverseBytes);
  scratch.bounds = arena.take<float>(images);
  scratch.maps = arena.take<float>(between * 2 * e.K * e.K);
  scratch.forgets = arena.take<int32_t>(between);
  if (!gradients) return scratch;
  const int64_t square = images * e.K * e.K * 2, chunk = images * kTileChunk * e.K * 2;
  scratch.inverse_transposed = arena.take<char>(images * kInverseBytes);
  scratch.states = arena.take<char>(square);
  scratch.dstates = arena.take<char>(square);
  scratch.residuals = arena.take<char>(chunk);
  scratch.adjoints = arena.take<char>(chunk);
  if (between > 0) scratch.dmaps = arena.take<float>((between + e.N * e.H) * e.K * e.K);
  return scratch;
}

void run_delta(const Launch& launch, const Engine& e, const DeltaScratch& scratch) {
  Delta delta;
  if (!fill(launch, e, scratch, &delta)) return;
  const bool early = e.g_width == 0 && e.K == 128 && e.T > kLongest;  // with decays most of A and B is forgotten
  if (early) delta.segment = kDeltaEarlySegment;
  prepare(launch, delta, early);
  const int64_t segments = segments_of(e, delta.segment);
  enqueue(launch, walk_kernel(e, name_of(kWalks, e)), {e.N * e.H, early ? segments - 1 : segments}, delta);
}

void run_delta_gradients(const Launch& launch, const Engine& e, const DeltaGradients& gradients, const DeltaScratch& scratch) {
  Delta delta;
  if (!fill(launch, e, scratch, &delta)) return;
  if (!encode_rows(&delta.dout, e, gradients.dout, e.V)) {
    *launch.error = "a tensor has no description for the copy engine";
    return;
  }
  delta.inverse_transposed = scratch.inverse_transposed;
  delta.states = scratch.states;
  delta.dstates = scratch.dstates;
  delta.dmaps = scratch.dmaps;
  delta.residuals = scratch.residuals;
  delta.adjoints = scratch.adjoints;
  delta.dfinal = gradients.dfinal;
  delta.dinitial = gradients.dinitial;
  delta.dq = gradients.dq;
  delta.dk = gradients.dk;
  delta.dv = gradients.dv;
  delta.dg = gradients.dg;
  delta.dbeta = gradients.dbeta;
  prepare(launch, delta, false);
  const int64_t heads = e.N * e.H;
  enqueue(launch, walk_kernel(e, name_of(kRecords, e)), {heads, segments_of(e)}, delta);
  const Kernel reverse = {"recurrence/cuda/delta/reverse", name_of(kReverse, e), delta_threads(e.K, e.q.dtype == Dtype::bf16),
                          reverse_shared_bytes(e.K)};
  const int64_t segments = segments_of(e);
  if (segments > 1) {
    delta.phase = DeltaPhase::summary;
    enqueue(launch, reverse, {heads, segments - 1}, delta);
    const int count = static_cast<int>(segments - 1);
    enqueue(launch, {kWalkImage, e.K == 128 ? "fold_back_128" : "fold_back_64", 256}, {heads, e.V / kFoldRows}, delta, count);
    delta.phase = DeltaPhase::joined;
  }
  enqueue(launch, reverse, {heads, segments}, delta);
  const int64_t chunks = delta_slots(e) * e.H, blocks = multiprocessor_count();
  enqueue(launch, {"recurrence/cuda/delta/gradients", name_of(kGradients, e), 640, gradients_shared_bytes(e.K)},
          {chunks < blocks ? chunks : blocks}, delta);
}

}  // namespace linnet::cuda
