// The selective scan on the GPU (selective_scan_cuda.h, *_cuda.cu).
#include "selective_scan_cuda.h"

#include "core/sequence.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(mamba)

namespace linnet::cuda {
namespace {

constexpr const char *kImage = "mamba/selective_scan_cuda", *kWalk = "mamba/selective_scan_walk_cuda",
                     *kBack = "mamba/selective_scan_back_cuda";
constexpr int kThreads = kScanChannels * kScanStates / 4;  // four states a thread
constexpr int64_t kFewWarps = 2048;  // of a walk with four states a thread: fewer leave the GPU idle, and two are taken

// Whether rows of four states can be read at once.
bool has_whole_states(const View& view, int64_t K) {
  if (!view.given()) return true;
  const int64_t bytes = 4 * dtype_size(view.dtype);
  bool whole = K % 4 == 0 && reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0;
  for (int i = 0; i + 1 < view.rank; ++i) whole = whole && (view.size[i] <= 1 || view.stride[i] % 4 == 0);
  return whole && view.stride[view.rank - 1] == 1;
}

Scan scan_of(const SelectiveScanArgs& args, bool raw = false) {
  Scan s;
  s.raw = raw;
  s.args = args;
  s.args.B = grouped(args.B);
  s.args.C = grouped(args.C);
  s.E = static_cast<int32_t>(args.x.size[2]);
  s.K = static_cast<int32_t>(args.A.size[1]);
  s.G = static_cast<int32_t>(s.args.B.size[2]);
  s.per_group = s.G == 0 ? 0 : s.E / s.G;
  s.blocks_per_group = static_cast<int32_t>(divide_up(s.per_group, kScanChannels));
  s.tiles = static_cast<int32_t>(divide_up(s.K, kScanStates));
  const int64_t T = args.x.size[1];
  const bool few = s.E <= kScanFew && T > kScanSegment;
  s.segments = {sequence_count(args.cu_seqlens, args.x.size[0]), T, few ? kScanSegment : T > 0 ? T : 1, args.cu_seqlens};
  s.whole_maps = has_whole_states(s.args.B, s.K) && has_whole_states(s.args.C, s.K);
  return s;
}
bool has_segments(const Scan& s) { return s.segments.L < s.segments.T; }
int64_t places(const Scan& s) { return has_segments(s) ? slot_count(s.segments) : s.segments.N; }
int64_t chunks_of(const Scan& s) {
  Segments chunks = s.segments;
  chunks.L = kScanBackRows;
  return slot_count(chunks);
}
bool has_whole_channels(const Scan& s, std::initializer_list<const View*> views) {
  bool whole = s.per_group % (kVectorBytes / dtype_size(s.args.x.dtype)) == 0;
  for (const View* view : views) whole = whole && has_whole_rows(*view);
  return whole;
}

// Memory between the kernels; the same cuts on a null arena tell its size.
void cut(Arena& arena, Scan* s, Pass pass) {
  const int64_t slots = places(*s), tokens = s->args.x.size[0] * s->segments.T, width = int64_t{s->E} * s->K;
  if (has_segments(*s)) {
    s->states = arena.take<float>(slots * width);
    s->sums = arena.take<float>(slots * s->E);
  }
  if (s->tiles > 1) s->y = arena.take<float>(s->tiles * tokens * s->E);
  if (pass == Pass::forward) return;
  if (has_segments(*s)) s->gradients = arena.take<float>(slots * width);
  if (s->tiles > 1) {
    s->dx = arena.take<float>(s->tiles * tokens * s->E);
    s->ddelta = arena.take<float>(s->tiles * tokens * s->E);
  }
  s->kept = arena.take<float>(chunks_of(*s) * width);
  s->dmaps = arena.take<float>(s->blocks_per_group * tokens * s->G * 2 * s->K);
  s->dA = arena.take<float>(slots * width);
  s->dD = arena.take<float>(slots * s->E);
  s->dt_bias = arena.take<float>(s->tiles * slots * s->E);
}

Grid grid_of(const Scan& s) { return {places(s), int64_t{s.G} * s.blocks_per_group, s.tiles}; }
Grid elements_grid(const Scan& s) { return {divide_up(s.args.x.elements(), 256)}; }

// The states before every segment (in reverse: the gradients behind it).
void run_states(const Launch& launch, Scan s, bool reverse, const View& initial, const View& final) {
  if (!has_segments(s)) return;
  s.reverse = reverse;
  s.initial = initial;
  s.final = final;
  const char* name = reverse ? LINNET_BY_TYPE(scan_reverse, s.args.x.dtype) : LINNET_BY_TYPE(scan_states, s.args.x.dtype);
  enqueue(launch, {kImage, name, kScanChannels}, grid_of(s), s);
  enqueue(launch, {kImage, "scan_fold", 256}, {divide_up(s.segments.N * s.E * s.K, 256)}, s);
}

}  // namespace

const char* mamba_selective_scan_refuses(const SelectiveScanArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t scan_workspace(const SelectiveScanArgs& args, Pass pass) {
  Arena arena;
  Scan s = scan_of(args);
  cut(arena, &s, pass);
  return arena.used();
}
void run_scan(const SelectiveScanArgs& args, const SelectiveScanOut& out, bool raw, const Launch& launch) {
  Arena arena(launch.workspace);
  Scan s = scan_of(args, raw);
  cut(arena, &s, Pass::forward);
  s.out = out.out;
  s.whole = has_whole_channels(s, {&args.x, &args.dt, &args.z, &out.out});
  run_states(launch, s, false, args.initial_state, out.final_state);
  s.initial = args.initial_state;
  s.final = out.final_state;
  const Grid grid = grid_of(s);
  const bool few = grid.x * grid.y * grid.z * (kThreads / 32) < kFewWarps;  // the same bits
  if (few) {
    enqueue(launch, {kWalk, LINNET_BY_TYPE(scan_walk_2, args.x.dtype), 2 * kThreads}, grid, s);
  } else {
    enqueue(launch, {kWalk, LINNET_BY_TYPE(scan_walk_4, args.x.dtype), kThreads}, grid, s);
  }
  if (s.tiles > 1) enqueue(launch, {kImage, LINNET_BY_TYPE(scan_combine, args.x.dtype), 256}, elements_grid(s), s);
}
void run_scan_backward(const SelectiveScanArgs& args, const SelectiveScanGrads& grads, bool raw, const Launch& launch) {
  Arena arena(launch.workspace);
  Scan s = scan_of(args, raw);
  cut(arena, &s, Pass::backward);
  s.grads = grads;
  s.grads.dB = grouped(grads.dB);
  s.grads.dC = grouped(grads.dC);
  s.whole = has_whole_channels(s, {&args.x, &args.dt, &args.z, &grads.dout, &grads.dx, &grads.ddt, &grads.dz});
  const bool maps = grads.dB.given() || grads.dC.given();
  if (!maps) s.dmaps = nullptr;
  run_states(launch, s, false, args.initial_state, View());
  run_states(launch, s, true, grads.dfinal_state, grads.dinitial_state);
  s.initial = args.initial_state;
  enqueue(launch, {kWalk, LINNET_BY_TYPE(scan_keep, args.x.dtype), kThreads}, grid_of(s), s);
  enqueue(launch, {kBack, LINNET_BY_TYPE(scan_back, args.x.dtype), kThreads, kScanBackBytes}, grid_of(s), s);
  if (s.tiles > 1) enqueue(launch, {kImage, LINNET_BY_TYPE(scan_combine_back, args.x.dtype), 256}, elements_grid(s), s);
  if (maps) {
    enqueue(launch, {kImage, "scan_sum_maps", 256}, {divide_up(args.x.size[0] * s.segments.T * s.G * 2 * s.K, 256)}, s);
  }
  sum_parts(launch, s.dA, places(s), grads.dA);
  sum_parts(launch, s.dD, places(s), grads.dD);
  sum_parts(launch, s.dt_bias, s.tiles * places(s), grads.ddt_bias);
}

int64_t mamba_selective_scan_workspace(const SelectiveScanArgs& args, Pass pass, int) { return scan_workspace(args, pass); }
void mamba_selective_scan_forward(const SelectiveScanArgs& args, const SelectiveScanOut& out, const Launch& launch) {
  run_scan(args, out, false, launch);
}
void mamba_selective_scan_backward(const SelectiveScanArgs& args, const SelectiveScanOut&, const SelectiveScanGrads& grads,
                                   const Launch& launch) {
  run_scan_backward(args, grads, false, launch);
}

const char* mamba_selective_scan_decode_refuses(const SelectiveScanDecodeArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t mamba_selective_scan_decode_workspace(const SelectiveScanDecodeArgs&, Pass, int) { return 0; }
void mamba_selective_scan_decode_forward(const SelectiveScanDecodeArgs& args, const SelectiveScanDecodeOut& out,
                                         const Launch& launch) {
  SelectiveScanArgs call;
  call.x = args.x;
  call.dt = args.dt;
  call.A = args.A;
  call.B = args.B;
  call.C = args.C;
  call.D = args.D;
  call.z = args.z;
  call.dt_bias = args.dt_bias;
  Scan s = scan_of(call);
  s.out = out.out;
  s.initial = args.state;
  s.whole = has_whole_states(args.state, s.K) && has_whole_states(args.A, s.K);
  const int64_t channels = args.x.size[0] * args.x.size[2];
  enqueue(launch, {kImage, LINNET_BY_TYPE(scan_decode, args.x.dtype), 128}, {divide_up(channels, 32)}, s);
}

}  // namespace linnet::cuda
