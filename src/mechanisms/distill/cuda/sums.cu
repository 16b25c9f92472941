#include "mechanisms/distill/cuda/rows.cuh"
#include "mechanisms/distill/cuda/sums.h"

namespace linnet::cuda {

// A block has the tokens of one chunk of one head; its sums stand in the chunk's place of the states.
extern "C" __global__ void __launch_bounds__(kThreads) distill_chunk_sums(const __grid_constant__ DistillSums s) {
  const int64_t chunks = distill_chunks(s.T), chunk = blockIdx.x % chunks, unit = blockIdx.x / chunks;
  const int64_t b = unit / s.H, h = unit % s.H, begin = chunk * kDistillChunk, end = min(s.T, begin + kDistillChunk);
  const auto row = [&](int64_t t) { return (b * s.T + t) * s.H + h; };
  if (s.l != nullptr) {
    for (int64_t m = threadIdx.x; m < s.M; m += kThreads) {
      double top = -INFINITY;
      for (int64_t t = begin; t < end; ++t) top = larger(top, s.l[row(t) * s.M + m]);
      s.own[(unit * chunks + chunk) * s.M + m] = top;
      for (int64_t t = begin; t < end; ++t) s.x[row(t) * s.M + m] = exp_below(s.l[row(t) * s.M + m], top);
    }
    __syncthreads();
  }
  double* to = s.states + (unit * (chunks + 1) + chunk) * s.M * s.W;
  for (int64_t i = threadIdx.x; i < s.M * s.W; i += kThreads) {
    double sum = 0;
    for (int64_t t = begin; t < end; ++t) sum += s.x[row(t) * s.M + i / s.W] * s.w[row(t) * s.W + i % s.W];
    to[i] = sum;
  }
}

// A thread has one number of the state, and turns each chunk's sum into that of the chunks before it.
extern "C" __global__ void __launch_bounds__(kThreads) distill_chunk_walk(const __grid_constant__ DistillSums s) {
  const int64_t each = s.M * s.W, i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= s.B * s.H * each) return;
  const int64_t unit = i / each, m = i % each / s.W, chunks = distill_chunks(s.T);
  double* state = s.states + unit * (chunks + 1) * each + i % each;
  double* tops = s.l == nullptr ? nullptr : s.tops + unit * (chunks + 1) * s.M + m;
  const bool tells = tops != nullptr && i % s.W == 0;
  double sum = 0, top = -INFINITY;
  for (int64_t n = 0; n < chunks; ++n) {
    const int64_t chunk = s.reverse ? chunks - 1 - n : n;
    const double add = state[chunk * each];
    state[chunk * each] = sum;
    if (tells) tops[chunk * s.M] = top;
    if (tops == nullptr) {
      sum += add;
      continue;
    }
    const double own = s.own[(unit * chunks + chunk) * s.M + m], next = larger(top, own);
    sum = sum * exp_below(top, next) + add * exp_below(own, next);
    top = next;
  }
  state[chunks * each] = sum;
  if (tells) tops[chunks * s.M] = top;
}

}  // namespace linnet::cuda
