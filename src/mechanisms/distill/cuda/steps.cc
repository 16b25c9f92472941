// distill_decode, distill_window_decode, distill_hybrid_decode and, from an empty state, distill_hybrid on the GPU.
#include "mechanisms/distill/cuda/steps.h"

#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(distill)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "distill/cuda/steps";

DistillScratch cut(Arena& arena, int64_t units, int64_t keys, int64_t width) {
  DistillScratch s;
  s.keys = keys;
  s.width = width;
  s.a = arena.take<double>(units * keys);
  s.f = arena.take<double>(units * width);
  s.old = arena.take<double>(units * width);
  s.own = arena.take<double>(units * width);
  return s;
}
template <class Args>
int64_t units_of(const Args& args) {
  return args.q.size[0] * args.q.size[2];
}
DistillScratch scratch_of(Arena& arena, const DistillDecodeArgs& args) { return cut(arena, units_of(args), 0, args.z.size[1]); }
DistillScratch scratch_of(Arena& arena, const DistillWindowDecodeArgs& args) {
  return cut(arena, units_of(args), 2 * args.window, 2 * args.wq.size[2]);
}
DistillScratch scratch_of(Arena& arena, const DistillHybridDecodeArgs& args) {
  return cut(arena, units_of(args), args.sinks + args.window, args.z.size[1]);
}
template <class Args>
int64_t bytes_of(const Args& args) {
  Arena arena;
  scratch_of(arena, args);
  return arena.used();
}

void run_hybrid(const Launch& launch, const DistillHybridStep& s) {
  enqueue(launch, {kImage, "distill_hybrid_step", 128}, {units_of(s.args)}, s);
  enqueue(launch, {kImage, "distill_hybrid_rows", 32}, {divide_up(s.args.q.size[0], 32)}, s);
}

}  // namespace

const char* distill_decode_refuses(const DistillDecodeArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t distill_decode_workspace(const DistillDecodeArgs& args, Pass, int) { return bytes_of(args); }
void distill_decode_forward(const DistillDecodeArgs& args, const DistillDecodeOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const DistillStep s{args, out.out, distill_scale(args.scale, args.q.size[3]), scratch_of(arena, args)};
  enqueue(launch, {kImage, "distill_step", 128}, {units_of(args)}, s);
}

const char* distill_window_decode_refuses(const DistillWindowDecodeArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t distill_window_decode_workspace(const DistillWindowDecodeArgs& args, Pass, int) { return bytes_of(args); }
void distill_window_decode_forward(const DistillWindowDecodeArgs& args, const DistillWindowDecodeOut& out,
                                   const Launch& launch) {
  Arena arena(launch.workspace);
  const DistillWindowStep s{args, out.out, scratch_of(arena, args)};
  enqueue(launch, {kImage, "distill_window_step", 128}, {units_of(args)}, s);
  enqueue(launch, {kImage, "distill_window_rows", 32}, {divide_up(args.q.size[0], 32)}, s);
}

const char* distill_hybrid_decode_refuses(const DistillHybridDecodeArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t distill_hybrid_decode_workspace(const DistillHybridDecodeArgs& args, Pass, int) { return bytes_of(args); }
void distill_hybrid_decode_forward(const DistillHybridDecodeArgs& args, const DistillHybridOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  run_hybrid(launch, {args, out.out, scratch_of(arena, args)});
}

namespace {

// A state in the workspace, for a sequence from its beginning.
struct Fresh {
  DistillHybridDecodeArgs args;
  float *zeros = nullptr, *maxima = nullptr;
  int64_t count = 0, heads = 0;
};
Fresh fresh_state(Arena& arena, const DistillHybridArgs& args) {
  Fresh fresh;
  DistillHybridDecodeArgs& to = fresh.args;
  to.q = args.q, to.k = args.k, to.v = args.v, to.q_balanced = args.q_balanced, to.k_balanced = args.k_balanced;
  to.query_logw = args.query_logw, to.key_logw = args.key_logw, to.z = args.z, to.alpha = args.alpha;
  to.sinks = args.sinks;
  const int64_t B = args.q.size[0], T = args.q.size[1], H = args.q.size[2], K = args.q.size[3], V = args.v.size[3];
  const int64_t M = args.z.size[1];
  to.window = args.window < T ? args.window : (T > 0 ? T : 1);  // no more can be near
  const auto rows = [&](int64_t count, int64_t width, Dtype dtype) {
    return View::dense(arena.take<char>(B * count * H * width * dtype_size(dtype)), dtype, {B, count, H, width});
  };
  to.k_first = rows(args.sinks, K, args.k.dtype);
  to.v_first = rows(args.sinks, V, args.v.dtype);
  to.k_near = rows(2 * to.window, K, args.k.dtype);
  to.v_near = rows(2 * to.window, V, args.v.dtype);
  to.l_near = rows(2 * to.window, M, Dtype::f32);
  fresh.count = B * H * M * (V + 1) + 4 * B;
  fresh.heads = B * H * M;
  fresh.zeros = arena.take<float>(fresh.count);
  fresh.maxima = arena.take<float>(fresh.heads);
  to.held = View::dense(fresh.zeros, Dtype::i64, {B});
  to.first = View::dense(fresh.zeros + 2 * B, Dtype::i64, {B});
  to.state = View::dense(fresh.zeros + 4 * B, Dtype::f32, {B, H, M, V});
  to.n = View::dense(fresh.zeros + 4 * B + B * H * M * V, Dtype::f32, {B, H, M});
  to.c = View::dense(fresh.maxima, Dtype::f32, {B, H, M});
  return fresh;
}

}  // namespace

const char* distill_hybrid_refuses(const DistillHybridArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t distill_hybrid_workspace(const DistillHybridArgs& args, Pass, int) {
  Arena arena;
  scratch_of(arena, fresh_state(arena, args).args);
  return arena.used();
}
void distill_hybrid_forward(const DistillHybridArgs& args, const DistillHybridOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Fresh fresh = fresh_state(arena, args);
  enqueue(launch, {kImage, "distill_clear", 256}, {divide_up(fresh.count, 256)}, fresh.zeros, fresh.count, fresh.maxima,
          fresh.heads);
  run_hybrid(launch, {fresh.args, out.out, scratch_of(arena, fresh.args)});
}

}  // namespace linnet::cuda
