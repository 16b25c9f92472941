#include "mechanisms/distill/cuda/sums.h"

#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(distill)

namespace linnet::cuda {

constexpr const char* kImage = "distill/cuda/sums";

DistillSums cut_distill_sums(Arena& arena, int64_t B, int64_t T, int64_t H, int64_t M, int64_t W, bool logarithms) {
  DistillSums s;
  s.B = B, s.T = T, s.H = H, s.M = M, s.W = W;
  const int64_t chunks = distill_chunks(T);
  s.states = arena.take<double>(B * H * (chunks + 1) * M * W);
  if (!logarithms) return s;
  s.own = arena.take<double>(B * H * chunks * M);
  s.tops = arena.take<double>(B * H * (chunks + 1) * M);
  return s;
}

void run_distill_sums(const Launch& launch, const DistillSums& s) {
  const int64_t units = s.B * s.H;
  enqueue(launch, {kImage, "distill_chunk_sums", 128}, {units * distill_chunks(s.T)}, s);
  enqueue(launch, {kImage, "distill_chunk_walk", 128}, {divide_up(units * s.M * s.W, 128)}, s);
}

}  // namespace linnet::cuda
