// The causal Monarch form token by token: a block of threads per (batch row, head).
//
// A token reads the representatives of its slot and the keys of the unfinished block once; when it fills the block, the
// representatives of all slots are made, a warp per slot. Sums run in the order of the rows.
#include "problem.h"
#include "ptx/numbers.cuh"

namespace linnet::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr float kLog2e = 1.4426950f, kLn2 = 0.69314718f, kInfinity = __builtin_huge_valf();

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, by));
  return x;
}

struct Decode {
  const MonarchDecodeCall& g;
  int64_t b, h;
  int lane, warp;
  float* weights;  // [M + block]
  float* lines;    // [warps][block]

  __device__ __forceinline__ int64_t at(const MonarchRows& x, int64_t t) const {
    return b * x.stride_b + t * x.stride_t + h * x.stride_h;
  }
  __device__ __forceinline__ float dot(const MonarchRows& x, int64_t x_at, const void* y, Dtype y_type, int64_t y_at) const {
    float sum = 0;
    for (int c = lane; c < g.K; c += 32) sum = fmaf(ptx::load(x.data, x.dtype, x_at + c), ptx::load(y, y_type, y_at + c), sum);
    return warp_sum(sum);
  }
  __device__ __forceinline__ int64_t state(const int64_t (&stride)[4], int64_t slot, int64_t k) const {
    return b * stride[0] + h * stride[1] + slot * stride[2] + k * stride[3];
  }

  __device__ __forceinline__ void token(int64_t t, int l, int j) const {
    __syncthreads();
    for (int c = threadIdx.x; c < g.K; c += kThreads) {
      ptx::store(g.q_block.data, g.q.dtype, at(g.q_block, j) + c, ptx::load(g.q.data, g.q.dtype, at(g.q, t) + c));
      ptx::store(g.k_block.data, g.q.dtype, at(g.k_block, j) + c, ptx::load(g.k.data, g.q.dtype, at(g.k, t) + c));
    }
    for (int c = threadIdx.x; c < g.V; c += kThreads) {
      ptx::store(g.v_block.data, g.q.dtype, at(g.v_block, j) + c, ptx::load(g.v.data, g.q.dtype, at(g.v, t) + c));
    }
    __syncthreads();
    const int n = l + j + 1;
    for (int i = warp; i < n; i += kWarps) {
      float logit;
      if (i < l) {
        logit =
            dot(g.q, at(g.q, t), g.a, Dtype::f32, state(g.a_stride, j, i)) * g.factor - g.c[state(g.c_stride, j, i)] * kLog2e;
      } else {
        logit = dot(g.q, at(g.q, t), g.k_block.data, g.q.dtype, at(g.k_block, i - l)) * g.factor;
      }
      if (lane == 0) weights[i] = logit;
    }
    __syncthreads();
    float m = -kInfinity, total = 0;
    for (int i = lane; i < n; i += 32) m = fmaxf(m, weights[i]);
    m = warp_max(m);
    for (int i = lane; i < n; i += 32) total += exp2f(weights[i] - m);
    total = warp_sum(total);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kThreads) weights[i] = exp2f(weights[i] - m) / total;
    __syncthreads();
    for (int c = threadIdx.x; c < g.V; c += kThreads) {
      float sum = 0;
#pragma unroll 8
      for (int i = 0; i < l; ++i) sum = fmaf(weights[i], g.y[state(g.y_stride, j, i) + c], sum);
#pragma unroll 8
      for (int i = 0; i <= j; ++i) {
        sum = fmaf(weights[l + i], ptx::load(g.v_block.data, g.q.dtype, at(g.v_block, i) + c), sum);
      }
      ptx::store(g.out.data, g.out.dtype, at(g.out, t) + c, sum);
    }
    if (g.lse.data != nullptr && threadIdx.x == 0) static_cast<float*>(g.lse.data)[at(g.lse, t)] = (m + log2f(total)) * kLn2;
  }

  // The block is full: its representatives.
  __device__ __forceinline__ void finish(int l) const {
    float* const z = lines + warp * g.block;
    for (int slot = warp; slot < g.block; slot += kWarps) {
      for (int i = 0; i < g.block; ++i) {
        const float logit = dot(g.q_block, at(g.q_block, slot), g.k_block.data, g.q.dtype, at(g.k_block, i)) * g.factor;
        if (lane == 0) z[i] = logit;
      }
      __syncwarp();
      float m = -kInfinity, total = 0, products = 0;
      for (int i = lane; i < g.block; i += 32) m = fmaxf(m, z[i]);
      m = warp_max(m);
      for (int i = lane; i < g.block; i += 32) total += exp2f(z[i] - m);
      total = warp_sum(total);
      for (int i = lane; i < g.block; i += 32) {
        const float r = exp2f(z[i] - m) / total;  // distances to the largest logit: they round less than the logits do
        products = fmaf(r, z[i] - m, products);
        z[i] = r;
      }
      products = warp_sum(products);
      __syncwarp();
      if (lane == 0) g.c[state(g.c_stride, slot, l)] = (products - log2f(total)) * kLn2;
      for (int c = lane; c < g.K; c += 32) {
        float sum = 0;
        for (int i = 0; i < g.block; ++i) sum = fmaf(z[i], ptx::load(g.k_block.data, g.q.dtype, at(g.k_block, i) + c), sum);
        g.a[state(g.a_stride, slot, l) + c] = sum;
      }
      for (int c = lane; c < g.V; c += 32) {
        float sum = 0;
        for (int i = 0; i < g.block; ++i) sum = fmaf(z[i], ptx::load(g.v_block.data, g.q.dtype, at(g.v_block, i) + c), sum);
        g.y[state(g.y_stride, slot, l) + c] = sum;
      }
      __syncwarp();
    }
  }
};

__device__ __forceinline__ int64_t length_of(const MonarchDecodeCall& g, int64_t b) {
  const int64_t at = b * g.lengths_stride;
  return g.lengths_64 ? static_cast<const int64_t*>(g.lengths)[at] : static_cast<const int32_t*>(g.lengths)[at];
}
// Tokens that the state has no room for are left alone.
__device__ __forceinline__ bool has_room(const MonarchDecodeCall& g, int64_t length) {
  return length >= 0 && length + g.T <= static_cast<int64_t>(g.block) * g.M;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) decode(const __grid_constant__ MonarchDecodeCall g) {
  extern __shared__ __align__(16) char memory[];
  float* const weights = reinterpret_cast<float*>(memory);
  const Decode d = {
      g,       blockIdx.x / g.H,       blockIdx.x % g.H, static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x / 32),
      weights, weights + g.M + g.block};
  const int64_t length = length_of(g, d.b);
  if (!has_room(g, length)) return;
  for (int64_t t = 0; t < g.T; ++t) {
    const int l = static_cast<int>((length + t) / g.block), j = static_cast<int>((length + t) % g.block);
    d.token(t, l, j);
    if (j + 1 == g.block) d.finish(l);
  }
}
extern "C" __global__ void __launch_bounds__(256) decode_lengths(const __grid_constant__ MonarchDecodeCall g) {
  for (int64_t b = threadIdx.x; b < g.B; b += 256) {
    const int64_t length = length_of(g, b), at = b * g.lengths_stride;
    if (!has_room(g, length)) continue;
    if (g.lengths_64) {
      static_cast<int64_t*>(g.lengths)[at] = length + g.T;
    } else {
      static_cast<int32_t*>(g.lengths)[at] = static_cast<int32_t>(length + g.T);
    }
  }
}

}  // namespace linnet::cuda
