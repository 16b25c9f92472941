// distill on the GPU (features.cu, losses.cu).
#include "mechanisms/distill/cuda/features.h"

#include "mechanisms/distill/cuda/losses.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(distill)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "distill/cuda/features";
constexpr int kThreads = 128;

DistillRowGrads cut_grads(Arena& arena, const DistillRows& r) {
  DistillRowGrads g;
  const int64_t rows = distill_rows(r.args);
  g.l = arena.take<double>(rows * r.keys.M);
  g.w = arena.take<double>(rows * r.keys.W);
  g.dlq = arena.take<double>(rows * r.keys.M);
  g.dlk = arena.take<double>(rows * r.keys.M);
  g.queries = cut_distill_sums(arena, r.keys.B, r.keys.T, r.keys.H, r.keys.M, r.keys.W, true);
  g.queries.l = g.l;
  g.queries.x = r.x;
  g.queries.w = g.w;
  g.queries.reverse = true;
  return g;
}

// Log features, the sums of keys and the rows' results.
void attend(const Launch& launch, const DistillRows& r, const View& out) {
  const int64_t rows = distill_rows(r.args);
  enqueue(launch, {kImage, "distill_logs", kThreads}, {rows}, r);
  run_distill_sums(launch, r.keys);
  enqueue(launch, {kImage, "distill_read", kThreads}, {rows}, r, out);
}

}  // namespace

DistillRows cut_distill_rows(Arena& arena, const DistillArgs& args) {
  DistillRows r;
  const int64_t M = args.z.size[1], W = args.v.size[3] + 1, rows = distill_rows(args);
  r.args = args;
  r.factor = distill_scale(args.scale, args.q.size[3]);
  r.lq = arena.take<double>(rows * M);
  r.lk = arena.take<double>(rows * M);
  r.x = arena.take<double>(rows * M);
  r.w = arena.take<double>(rows * W);
  r.o = arena.take<double>(rows * W);
  r.logden = arena.take<double>(rows);
  r.keys = cut_distill_sums(arena, args.q.size[0], args.q.size[1], args.q.size[2], M, W, true);
  r.keys.l = r.lk;
  r.keys.x = r.x;
  r.keys.w = r.w;
  return r;
}

void sum_distill_features(const Launch& launch, const DistillRows& rows, const double* dlq, const double* dlk, const View& dz,
                          const View& dalpha) {
  if (!dz.given() && !dalpha.given()) return;
  const int64_t H = rows.args.z.size[0], M = rows.args.z.size[1], columns = rows.args.z.size[2] + 1;
  enqueue(launch, {kImage, "distill_features_sum", 256}, {H * M * divide_up(columns, 32)}, rows, dlq, dlk, dz, dalpha);
}

const char* distill_refuses(const DistillArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t distill_workspace(const DistillArgs& args, Pass pass, int) {
  Arena arena;
  const DistillRows r = cut_distill_rows(arena, args);
  if (pass == Pass::backward) {
    cut_grads(arena, r);
  } else {
    cut_distill_losses(arena, args);  // which results will be asked for is not known here
  }
  return arena.used();
}
void distill_forward(const DistillArgs& args, const DistillOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const DistillRows r = cut_distill_rows(arena, args);
  attend(launch, r, out.out);
  if (distill_wants_losses(out)) run_distill_losses(launch, r, out, cut_distill_losses(arena, args));
}
void distill_backward(const DistillArgs& args, const DistillOut&, const DistillGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const DistillRows r = cut_distill_rows(arena, args);
  const DistillRowGrads g = cut_grads(arena, r);
  const int64_t rows = distill_rows(args);
  attend(launch, r, {});
  enqueue(launch, {kImage, "distill_given", kThreads}, {rows}, r, g, grads.dout);
  enqueue(launch, {kImage, "distill_query_grads", kThreads}, {rows}, r, g, grads.dq);
  run_distill_sums(launch, g.queries);
  enqueue(launch, {kImage, "distill_key_grads", kThreads}, {rows}, r, g, grads.dk, grads.dv, grads.dkey_logw);
  sum_distill_features(launch, r, g.dlq, g.dlk, grads.dz, grads.dalpha);
}

}  // namespace linnet::cuda
