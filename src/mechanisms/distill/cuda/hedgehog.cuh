// The hedgehog map of one row by a block, in double.
#pragma once

#include "mechanisms/distill/cuda/rows.cuh"

namespace linnet::cuda {

constexpr double kFloor = 1e-12;

// The largest of x, known to all threads behind it; and x = exp(x - top).
__device__ __forceinline__ double largest(const double* x, int64_t count, double top) {
  for (int64_t i = 0; i < count; ++i) top = larger(top, x[i]);
  return top;
}
__device__ __forceinline__ void exponentials(double* x, int64_t count, double top) {
  for (int64_t i = threadIdx.x; i < count; i += kThreads) x[i] = exp_below(x[i], top);
}

// Both halves, in f [2 F].
__device__ inline void hedgehog(const View& x, const View& w, int64_t b, int64_t t, int64_t h, double* f) {
  const int64_t K = x.size[3], F = w.size[2];
  for (int64_t c = threadIdx.x; c < F; c += kThreads) {
    double y = 0;
    for (int64_t k = 0; k < K; ++k) y += static_cast<double>(get(x, b, t, h, k)) * get(w, h, k, c);
    f[c] = y;
    f[F + c] = -y;
  }
  __syncthreads();
  const double high = largest(f, F, -INFINITY), low = largest(f + F, F, -INFINITY);
  __syncthreads();
  exponentials(f, F, high);
  exponentials(f + F, F, low);
  __syncthreads();
  double up = 0, down = 0;
  for (int64_t c = 0; c < F; ++c) up += f[c], down += f[F + c];
  __syncthreads();
  for (int64_t c = threadIdx.x; c < F; c += kThreads) {
    f[c] = max(f[c] / up, kFloor);
    f[F + c] = max(f[F + c] / down, kFloor);
  }
  __syncthreads();
}

}  // namespace linnet::cuda
