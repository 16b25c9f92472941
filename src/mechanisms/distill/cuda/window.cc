// distill_window on the GPU (window.cu, statistics.cu).
#include "mechanisms/distill/cuda/window.h"

#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(distill)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "distill/cuda/window";
constexpr int kThreads = 128;

int64_t rows_of(const DistillWindowArgs& args) { return args.q.size[0] * args.q.size[1] * args.q.size[2]; }
DistillSums cut_sums(Arena& arena, const DistillWindowArgs& args) {
  return cut_distill_sums(arena, args.q.size[0], args.q.size[1], args.q.size[2], 2 * args.wq.size[2], args.v.size[3] + 1,
                          false);
}

DistillWindowRows cut_rows(Arena& arena, const DistillWindowArgs& args) {
  DistillWindowRows r;
  const int64_t rows = rows_of(args), T = args.q.size[1];
  r.args = args;
  if (args.window > T) r.args.window = T > 0 ? T : 1;
  for (double** x : {&r.fq, &r.fk}) *x = arena.take<double>(rows * 2 * args.wq.size[2]);
  for (double** x : {&r.w, &r.o}) *x = arena.take<double>(rows * (args.v.size[3] + 1));
  r.keys = cut_sums(arena, args);
  r.keys.x = r.fk;
  r.keys.w = r.w;
  return r;
}
DistillWindowRowGrads cut_grads(Arena& arena, const DistillWindowRows& r) {
  DistillWindowRowGrads g;
  const int64_t rows = rows_of(r.args), K = r.args.q.size[3];
  g.w = arena.take<double>(rows * r.keys.W);
  for (double** x : {&g.top, &g.total, &g.factors}) *x = arena.take<double>(rows);
  g.largest = arena.take<int64_t>(rows);
  for (double** x : {&g.dq, &g.dk}) *x = arena.take<double>(rows * K);
  g.dv = arena.take<double>(rows * (r.keys.W - 1));
  for (double** x : {&g.dfq, &g.dfk}) *x = arena.take<double>(rows * r.keys.M);
  g.queries = cut_sums(arena, r.args);
  g.queries.x = r.fq;
  g.queries.w = g.w;
  g.queries.reverse = true;
  return g;
}

}  // namespace

const char* distill_window_refuses(const DistillWindowArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t distill_window_workspace(const DistillWindowArgs& args, Pass pass, int) {
  Arena arena;
  const DistillWindowRows r = cut_rows(arena, args);
  if (pass == Pass::backward) {
    cut_grads(arena, r);
  } else {
    cut_distill_statistics(arena, args);  // which results will be asked for is not known here
  }
  return arena.used();
}
void distill_window_forward(const DistillWindowArgs& args, const DistillWindowOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const DistillWindowRows r = cut_rows(arena, args);
  const bool hybrids = out.out_sliding.given() || out.out_terraced.given();
  if (hybrids || out.fq.given() || out.fk.given()) {
    enqueue(launch, {kImage, "distill_window_features", kThreads}, {rows_of(args)}, r, out.fq, out.fk);
  }
  if (hybrids) run_distill_sums(launch, r.keys);
  for (const bool terraced : {false, true}) {
    const View& to = terraced ? out.out_terraced : out.out_sliding;
    if (to.given()) enqueue(launch, {kImage, "distill_window_read", kThreads}, {rows_of(args)}, r, terraced, to);
  }
  run_distill_statistics(launch, args, out, cut_distill_statistics(arena, args));
}
void distill_window_backward(const DistillWindowArgs& args, const DistillWindowOut&, const DistillWindowGrads& grads,
                             const Launch& launch) {
  Arena arena(launch.workspace);
  const DistillWindowRows r = cut_rows(arena, args);
  const DistillWindowRowGrads g = cut_grads(arena, r);
  const int64_t rows = rows_of(args), H = args.q.size[2], K = args.q.size[3], F = args.wq.size[2];
  enqueue(launch, {kImage, "distill_window_features", kThreads}, {rows}, r, View{}, View{});
  enqueue(launch, {kImage, "distill_window_clear", kThreads}, {rows}, r, g);
  run_distill_sums(launch, r.keys);
  for (const bool terraced : {false, true}) {
    const View& dout = terraced ? grads.dout_terraced : grads.dout_sliding;
    if (!dout.given()) continue;
    enqueue(launch, {kImage, "distill_window_query_grads", kThreads}, {rows}, r, g, terraced, dout);
    run_distill_sums(launch, g.queries);
    enqueue(launch, {kImage, "distill_window_key_grads", kThreads}, {rows}, r, g, terraced);
  }
  enqueue(launch, {kImage, "distill_window_finish", kThreads}, {rows}, r, g, grads.dq, grads.dk, grads.dv);
  for (const bool key : {false, true}) {
    const View& to = key ? grads.dwk : grads.dwq;
    if (to.given()) enqueue(launch, {kImage, "distill_window_maps", 256}, {H * K * divide_up(F, 32)}, r, g, key, to);
  }
  if (grads.dwindow_factor.given())
    enqueue(launch, {kImage, "distill_window_factor", kThreads}, {H}, r, g, grads.dwindow_factor);
}

}  // namespace linnet::cuda
