// Statistics of the heads of distill_window on the GPU (statistics.cu).
#include "mechanisms/distill/cuda/window.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(distill)

namespace linnet::cuda {

constexpr const char* kImage = "distill/cuda/statistics";
constexpr int kThreads = 128;

DistillStatistics cut_distill_statistics(Arena& arena, const DistillWindowArgs& args) {
  DistillStatistics s;
  const int64_t B = args.q.size[0], T = args.q.size[1], H = args.q.size[2];
  s.blocks = divide_up(T, kDistillRankBlock);
  s.N = T < kDistillRankBlock ? T : kDistillRankBlock;
  const int64_t tasks = B * H * s.blocks;
  s.tasks = tasks < kDistillRankTasks ? tasks : kDistillRankTasks;
  s.rows = arena.take<double>(B * T * H * kDistillStatistics);
  s.entropy = arena.take<double>(H);
  s.distance = arena.take<double>(H);
  s.ranks = arena.take<double>(tasks * 2);
  s.matrices = arena.take<double>(s.tasks * distill_rank_doubles(s.N));
  return s;
}

void run_distill_statistics(const Launch& launch, const DistillWindowArgs& args, const DistillWindowOut& out,
                            const DistillStatistics& s) {
  const int64_t B = args.q.size[0], T = args.q.size[1], H = args.q.size[2];
  const bool gates = out.gate_dt_bias.given() || out.gate_beta.given() || out.gate_beta_logit.given();
  if (gates || out.entropy.given() || out.entropy_ratio.given() || out.distance.given() || out.window_mass.given() ||
      out.sink_mass.given()) {
    enqueue(launch, {kImage, "distill_statistics_rows", kThreads}, {B * T * H}, args, s);
    enqueue(launch, {kImage, "distill_statistics_heads", kThreads}, {H}, args, s, out);
  }
  if (gates) enqueue(launch, {kImage, "distill_gates", kThreads}, {divide_up(H, kThreads)}, H, s, out);
  if (out.stable_rank.given() || out.effective_rank.given()) {
    enqueue(launch, {kImage, "distill_ranks", kThreads}, {s.tasks}, args, s);
    enqueue(launch, {kImage, "distill_ranks_heads", kThreads}, {divide_up(H, kThreads)}, args, s, out);
  }
}

}  // namespace linnet::cuda
