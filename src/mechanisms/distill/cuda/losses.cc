// The losses of distill on the GPU (losses.cu).
#include "mechanisms/distill/cuda/losses.h"

#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(distill)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "distill/cuda/losses";
constexpr int kThreads = 128;

}  // namespace

DistillLossScratch cut_distill_losses(Arena& arena, const DistillArgs& args) {
  const int64_t rows = distill_rows(args);
  DistillLossScratch s;
  s.teacher = arena.take<double>(rows * args.v.size[3]);
  for (double** x : {&s.norm, &s.top, &s.squares, &s.half}) *x = arena.take<double>(rows);
  s.heads = arena.take<double>(args.q.size[2] * 2);
  s.parts = arena.take<double>(rows * kDistillLosses);
  s.dlk = arena.take<double>(rows * args.z.size[1]);
  return s;
}

void run_distill_losses(const Launch& launch, const DistillRows& r, const DistillOut& out, const DistillLossScratch& s) {
  const int64_t rows = distill_rows(r.args), H = r.args.q.size[2];
  enqueue(launch, {kImage, "distill_teacher", kThreads}, {rows}, r, s, out.out_softmax);
  enqueue(launch, {kImage, "distill_teacher_heads", kThreads}, {H}, r, s);
  const View losses[] = {out.loss_l2, out.loss_l2rel, out.loss_ce, out.loss_kl, out.loss_mse};
  bool wanted = false;
  for (const View& loss : losses) wanted = wanted || loss.given();
  if (wanted) enqueue(launch, {kImage, "distill_loss_rows", kThreads}, {rows}, r, s);
  for (int i = 0; i < kDistillLosses; ++i) {
    if (losses[i].given()) enqueue(launch, {kImage, "distill_loss_sum", kThreads}, {H}, r, s, i, losses[i]);
  }
  const struct {
    DistillLoss loss;
    const View &dz, &dalpha;
  } gradients[] = {{DistillLoss::l2, out.dz_l2, out.dalpha_l2},
                   {DistillLoss::l2rel, out.dz_l2rel, out.dalpha_l2rel},
                   {DistillLoss::ce, out.dz_ce, out.dalpha_ce},
                   {DistillLoss::mse, out.dz_mse, out.dalpha_mse}};
  for (const auto& each : gradients) {
    if (!each.dz.given() && !each.dalpha.given()) continue;
    enqueue(launch, {kImage, "distill_loss_grads", kThreads}, {rows, 2}, r, s, each.loss);
    sum_distill_features(launch, r, r.x, s.dlk, each.dz, each.dalpha);
  }
}

}  // namespace linnet::cuda
