// What the kernels of distill's rows share: a block has one row of one head, in double.
#pragma once

#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {

constexpr int kThreads = 128;

// The larger; NaN where one of them is.
__device__ __forceinline__ double larger(double x, double y) { return y > x || isnan(y) ? y : x; }
// exp(x - top) for x of at most top; 0 where there is nothing.
__device__ __forceinline__ double exp_below(double x, double top) { return x == -INFINITY ? 0 : exp(x - top); }

// Over the threads of a block, in one order; every thread learns it.
template <class Fold>
__device__ double over_block(double x, double (&parts)[kThreads], const Fold& fold) {
  __syncthreads();  // what was there has been read
  parts[threadIdx.x] = x;
  __syncthreads();
  double all = parts[0];
  for (int i = 1; i < kThreads; ++i) all = fold(all, parts[i]);
  return all;
}
__device__ __forceinline__ double block_sum(double x, double (&parts)[kThreads]) {
  return over_block(x, parts, [](double a, double b) { return a + b; });
}
__device__ __forceinline__ double block_largest(double x, double (&parts)[kThreads]) { return over_block(x, parts, larger); }

}  // namespace linnet::cuda
