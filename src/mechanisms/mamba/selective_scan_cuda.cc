// The selective scan on the GPU (selective_scan_cuda.cu).
#include "selective_scan_cuda.h"

#include "core/cuda/device.h"
#include "core/sequence.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(mamba)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "mamba/selective_scan_cuda";
constexpr int kForwardThreads = 128, kBackThreads = 64;
constexpr int64_t kForwardSegment = 64;  // tokens
// The backward keeps a segment's states in shared memory: doubles of f32 calls take half as many tokens where a block has
// little.
int back_bytes(Dtype dtype, int64_t tokens) {
  return static_cast<int>(tokens * kScanStates * kBackThreads * (dtype == Dtype::f32 ? 8 : 4));
}
int64_t back_segment(Dtype dtype) { return back_bytes(dtype, 16) <= shared_bytes_of_block() ? 16 : 8; }

Scan scan_of(const SelectiveScanArgs& args, Pass pass, bool raw = false) {
  Scan s;
  s.raw = raw;
  s.args = args;
  s.args.B = grouped(args.B);
  s.args.C = grouped(args.C);
  s.E = static_cast<int32_t>(args.x.size[2]);
  s.K = static_cast<int32_t>(args.A.size[1]);
  s.G = static_cast<int32_t>(s.args.B.size[2]);
  s.per_group = s.G == 0 ? 0 : s.E / s.G;
  s.threads = pass == Pass::forward ? kForwardThreads : kBackThreads;
  s.tiles = static_cast<int32_t>(divide_up(s.K, kScanStates));
  s.segments = {sequence_count(args.cu_seqlens, args.x.size[0]), args.x.size[1],
                pass == Pass::forward ? kForwardSegment : back_segment(args.x.dtype), args.cu_seqlens};
  return s;
}
void use_threads(Scan* s, int threads) {
  s->threads = threads;
  s->blocks_per_group = static_cast<int32_t>(divide_up(s->per_group, threads));
}

// Memory between the kernels; the same cuts on a null arena tell its size.
void cut(Arena& arena, Scan* s, Pass pass) {
  const int64_t slots = slot_count(s->segments), tokens = s->args.x.size[0] * s->segments.T, width = int64_t{s->E} * s->K;
  s->states = arena.take<float>(slots * width);
  s->sums = arena.take<float>(slots * s->E);
  if (s->tiles > 1) s->y = arena.take<float>(s->tiles * tokens * s->E);
  if (pass == Pass::forward) return;
  s->gradients = arena.take<float>(slots * width);
  if (s->tiles > 1) {
    s->dx = arena.take<float>(s->tiles * tokens * s->E);
    s->ddelta = arena.take<float>(s->tiles * tokens * s->E);
  }
  const int64_t warps = divide_up(s->per_group, kBackThreads) * (kBackThreads / 32);
  s->dmaps = arena.take<float>(warps * tokens * s->G * 2 * s->K);
  s->dA = arena.take<float>(slots * width);
  s->dD = arena.take<float>(slots * s->E);
  s->dt_bias = arena.take<float>(s->tiles * slots * s->E);
}

Grid grid_of(const Scan& s) { return {slot_count(s.segments), int64_t{s.G} * s.blocks_per_group, s.tiles}; }
Grid elements_grid(const Scan& s) { return {divide_up(s.args.x.elements(), 256)}; }

// The states before every segment (in reverse: the gradients behind it).
void run_states(const Launch& launch, Scan s, bool reverse, const View& initial, const View& final) {
  s.reverse = reverse;
  s.initial = initial;
  s.final = final;
  use_threads(&s, kForwardThreads);
  const char* name = reverse ? LINNET_BY_TYPE(scan_reverse, s.args.x.dtype) : LINNET_BY_TYPE(scan_states, s.args.x.dtype);
  enqueue(launch, {kImage, name, kForwardThreads}, grid_of(s), s);
  enqueue(launch, {kImage, "scan_fold", 256}, {divide_up(s.segments.N * s.E * s.K, 256)}, s);
}

}  // namespace

const char* mamba_selective_scan_refuses(const SelectiveScanArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t scan_workspace(const SelectiveScanArgs& args, Pass pass) {
  Arena arena;
  Scan s = scan_of(args, pass);
  cut(arena, &s, pass);
  return arena.used();
}
void run_scan(const SelectiveScanArgs& args, const SelectiveScanOut& out, bool raw, const Launch& launch) {
  Arena arena(launch.workspace);
  Scan s = scan_of(args, Pass::forward, raw);
  cut(arena, &s, Pass::forward);
  s.out = out.out;
  run_states(launch, s, false, args.initial_state, out.final_state);
  use_threads(&s, kForwardThreads);
  enqueue(launch, {kImage, LINNET_BY_TYPE(scan_outputs, args.x.dtype), kForwardThreads}, grid_of(s), s);
  if (s.tiles > 1) enqueue(launch, {kImage, LINNET_BY_TYPE(scan_combine, args.x.dtype), 256}, elements_grid(s), s);
}
void run_scan_backward(const SelectiveScanArgs& args, const SelectiveScanGrads& grads, bool raw, const Launch& launch) {
  Arena arena(launch.workspace);
  Scan s = scan_of(args, Pass::backward, raw);
  cut(arena, &s, Pass::backward);
  s.grads = grads;
  s.grads.dB = grouped(grads.dB);
  s.grads.dC = grouped(grads.dC);
  const bool maps = grads.dB.given() || grads.dC.given();
  if (!maps) s.dmaps = nullptr;
  run_states(launch, s, false, args.initial_state, View());
  run_states(launch, s, true, grads.dfinal_state, grads.dinitial_state);
  use_threads(&s, kBackThreads);
  const int bytes = back_bytes(args.x.dtype, s.segments.L);
  enqueue(launch, {kImage, LINNET_BY_TYPE(scan_back, args.x.dtype), kBackThreads, bytes}, grid_of(s), s);
  if (s.tiles > 1) enqueue(launch, {kImage, LINNET_BY_TYPE(scan_combine_back, args.x.dtype), 256}, elements_grid(s), s);
  const int64_t slots = slot_count(s.segments);
  if (maps) {
    const auto warps = static_cast<int32_t>(s.blocks_per_group * (kBackThreads / 32));
    enqueue(launch, {kImage, "scan_sum_maps", 256}, {divide_up(args.x.size[0] * s.segments.T * s.G * 2 * s.K, 256)}, s, warps);
  }
  sum_parts(launch, s.dA, slots, grads.dA);
  sum_parts(launch, s.dD, slots, grads.dD);
  sum_parts(launch, s.dt_bias, s.tiles * slots, grads.ddt_bias);
}

int64_t mamba_selective_scan_workspace(const SelectiveScanArgs& args, Pass pass, int) { return scan_workspace(args, pass); }
void mamba_selective_scan_forward(const SelectiveScanArgs& args, const SelectiveScanOut& out, const Launch& launch) {
  run_scan(args, out, false, launch);
}
void mamba_selective_scan_backward(const SelectiveScanArgs& args, const SelectiveScanOut&, const SelectiveScanGrads& grads,
                                   const Launch& launch) {
  run_scan_backward(args, grads, false, launch);
}

namespace {

Scan decode_of(const SelectiveScanDecodeArgs& args) {
  SelectiveScanArgs call;
  call.x = args.x;
  call.dt = args.dt;
  call.A = args.A;
  call.B = args.B;
  call.C = args.C;
  call.D = args.D;
  call.z = args.z;
  call.dt_bias = args.dt_bias;
  Scan s = scan_of(call, Pass::forward);
  s.in_place = true;
  s.initial = s.final = args.state;
  use_threads(&s, 64);
  return s;
}

}  // namespace

const char* mamba_selective_scan_decode_refuses(const SelectiveScanDecodeArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t mamba_selective_scan_decode_workspace(const SelectiveScanDecodeArgs& args, Pass, int) {
  const int64_t tiles = divide_up(args.A.size[1], kScanStates);
  return tiles > 1 ? tiles * args.x.elements() * static_cast<int64_t>(sizeof(float)) : 0;
}
void mamba_selective_scan_decode_forward(const SelectiveScanDecodeArgs& args, const SelectiveScanDecodeOut& out,
                                         const Launch& launch) {
  Scan s = decode_of(args);
  s.out = out.out;
  if (s.tiles > 1) s.y = reinterpret_cast<float*>(launch.workspace);
  enqueue(launch, {kImage, LINNET_BY_TYPE(scan_outputs, args.x.dtype), s.threads},
          {args.x.size[0], int64_t{s.G} * s.blocks_per_group, s.tiles}, s);
  if (s.tiles > 1) enqueue(launch, {kImage, LINNET_BY_TYPE(scan_combine, args.x.dtype), 256}, elements_grid(s), s);
}

}  // namespace linnet::cuda
