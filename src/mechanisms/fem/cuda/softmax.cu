// Around the softmax read of fem_read: the widened values, mean and free energy, and their gradients. Memory bounds all of it.
#include "mechanisms/fem/cuda/softmax.h"
#include "mechanisms/softmax/cuda/attend.cuh"

namespace linnet::cuda {
namespace {

constexpr float kExcess = 0.5f, kLarge = 40, kRange = 80;

__device__ __forceinline__ int64_t at(const AttendRows& x, int64_t b, int64_t t, int64_t h) {
  return b * x.stride_b + t * x.stride_t + h * x.stride_h;
}
__device__ __forceinline__ float number(const AttendRows& x, int64_t place, float absent) {
  return x.data != nullptr ? ptx::load(x.data, x.dtype, place) : absent;
}
__device__ __forceinline__ void put(const AttendRows& x, int64_t place, float value) {
  if (x.data != nullptr) ptx::store(x.data, x.dtype, place, value);
}
__device__ __forceinline__ bool present(const FemCall& p, int64_t b, int64_t t) {
  if (p.lengths.data != nullptr) return t < index_of(p.lengths, b);
  return p.mask == nullptr || p.mask[b * p.mask_stride[0] + t * p.mask_stride[1]] != 0;
}
struct Channel {
  float beta, limit, shift;
  bool small, excess;  // excess: small too
};
__device__ __forceinline__ Channel channel(const FemCall& p, int64_t b, int64_t h, int64_t j) {
  const float beta = ptx::load(p.beta.data, p.beta.dtype, h * p.beta.stride[0] + j * p.beta.stride[1]);
  const FemForm form = p.channels[(b * p.H + h) * p.V + j];
  return {beta, p.cap / beta, form.shift, form.form != 0, form.form == 2};
}

}  // namespace

// Grid: heads, 32 channels; 8 tokens at a time.
extern "C" __global__ void __launch_bounds__(256) fem_channels(const __grid_constant__ FemCall p) {
  __shared__ float lows[8][32], highs[8][32];
  const int64_t b = blockIdx.x / p.H, h = blockIdx.x % p.H;
  const int c = threadIdx.x % 32, group = threadIdx.x / 32, j = blockIdx.y * 32 + c;
  float low = infinity(), high = -infinity();
  for (int64_t t = group; t < p.S; t += 8) {
    if (j >= p.V || !present(p, b, t)) continue;
    const float v = ptx::load(p.v.data, p.v.dtype, at(p.v, b, t, h) + j);
    low = fminf(low, v);
    high = fmaxf(high, v);
  }
  lows[group][c] = low;
  highs[group][c] = high;
  __syncthreads();
  if (group != 0 || j >= p.V) return;
  for (int i = 1; i < 8; ++i) {
    low = fminf(low, lows[i][c]);
    high = fmaxf(high, highs[i][c]);
  }
  const float beta = ptx::load(p.beta.data, p.beta.dtype, h * p.beta.stride[0] + j * p.beta.stride[1]), limit = p.cap / beta;
  const float lowest = beta * fmaxf(low, -limit), highest = beta * fminf(high, limit), middle = (lowest + highest) / 2;
  const bool small = lowest >= p.small && highest <= kLarge, excess = lowest >= -kExcess && highest <= kExcess;
  p.channels[(b * p.H + h) * p.V + j] = {!small && middle - middle == 0 ? middle : 0.0f, excess ? 2 : small ? 1 : 0};
}

// A thread for each number.
extern "C" __global__ void __launch_bounds__(256) fem_widen(const __grid_constant__ FemCall p) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (p.bias != nullptr && i < p.B * p.S) p.bias[i] = present(p, i / p.S, i % p.S) ? 0 : -infinity();
  if (i >= p.B * p.S * p.H * p.V) return;
  const int64_t j = i % p.V, h = i / p.V % p.H, t = i / p.V / p.H % p.S, b = i / p.V / p.H / p.S;
  float vc = 0, x = 0;
  if (present(p, b, t)) {
    const Channel one = channel(p, b, h, j);
    const float v = ptx::load(p.v.data, p.v.dtype, at(p.v, b, t, h) + j);
    vc = v > one.limit ? one.limit : v < -one.limit ? -one.limit : v;
    x = one.excess  ? excess(one.beta * vc) / one.beta
        : one.small ? expm1f(one.beta * vc) / one.beta
                    : expf(one.beta * vc - one.shift);
  }
  const int64_t to = at(p.wide, b, t, h) + j;
  put(p.wide, to, vc);
  put(p.wide, to + p.V, x);
}

extern "C" __global__ void __launch_bounds__(256) fem_clean_keys(const __grid_constant__ FemCall p) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= p.B * p.S * p.H * p.K) return;
  const int64_t c = i % p.K, h = i / p.K % p.H, t = i / p.K / p.H % p.S, b = i / p.K / p.H / p.S;
  put(p.clean_k, at(p.clean_k, b, t, h) + c, present(p, b, t) ? number(p.k, at(p.k, b, t, h) + c, 0) : 0);
}

extern "C" __global__ void __launch_bounds__(256) fem_finish(const __grid_constant__ FemCall p) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= p.B * p.T * p.H * p.V) return;
  const int64_t j = i % p.V, h = i / p.V % p.H, t = i / p.V / p.H % p.T, b = i / p.V / p.H / p.T;
  const Channel one = channel(p, b, h, j);
  const bool empty = static_cast<const float*>(p.lse.data)[at(p.lse, b, t, h)] == -infinity();
  const int64_t from = at(p.read, b, t, h) + j;
  const float mean = number(p.read, from, 0), y = number(p.read, from + p.V, 0), u = one.beta * (mean + y);
  const float energy = one.excess  ? mean + (y + (log1pf(u) - u) / one.beta)
                       : one.small ? log1pf(one.beta * y) / one.beta
                                   : (one.shift + logf(fmaxf(y, 1.17549435e-38f))) / one.beta;
  const float mu = empty ? 0 : mean, free = empty ? 0 : energy;
  const float lam = number(p.lam, at(p.lam, b, t, h) + j, 0), g = number(p.g, at(p.g, b, t, h) + j, 1);
  put(p.mu, at(p.mu, b, t, h) + j, mu);
  put(p.free, at(p.free, b, t, h) + j, free);
  put(p.out, at(p.out, b, t, h) + j, g * fmaf(lam, free - mu, mu));
}

// A warp for each row: gradients of the gates, of the widened read (rounded to its type, from which delta is made, so that
// dP - delta keeps its digits), and delta.
extern "C" __global__ void __launch_bounds__(256) fem_row_gradients(const __grid_constant__ FemCall p) {
  const int64_t row = blockIdx.x * 8ll + threadIdx.x / 32;
  if (row >= p.B * p.T * p.H) return;
  const int64_t h = row % p.H, t = row / p.H % p.T, b = row / p.H / p.T;
  const bool empty = static_cast<const float*>(p.lse.data)[at(p.lse, b, t, h)] == -infinity();
  float delta = 0;
  for (int j = threadIdx.x % 32; j < p.V; j += 32) {
    const Channel one = channel(p, b, h, j);
    const float mu = number(p.mu, at(p.mu, b, t, h) + j, 0), free = number(p.free, at(p.free, b, t, h) + j, 0);
    const float lam = number(p.lam, at(p.lam, b, t, h) + j, 0), g = number(p.g, at(p.g, b, t, h) + j, 1);
    const float d = number(p.dout, at(p.dout, b, t, h) + j, 0), gd = g * d;
    put(p.dg, at(p.dg, b, t, h) + j, d * fmaf(lam, free - mu, mu));
    put(p.dlam, at(p.dlam, b, t, h) + j, gd * (free - mu));
    const float dmu = (1 - lam) * gd, dfree = lam * gd, x = one.beta * free;
    const float inner = expf(fminf(kRange, one.shift - x)), d2 = (one.small ? dfree : dfree / one.beta) * inner;
    const int64_t to = at(p.dread, b, t, h) + j;
    put(p.dread, to, empty ? 0 : one.excess ? dmu + d2 : dmu);
    put(p.dread, to + p.V, empty ? 0 : d2);
    const float y = one.excess ? excess(x) / one.beta + (free - mu) : one.small ? expm1f(x) / one.beta : expf(x - one.shift);
    delta = fmaf(number(p.dread, to, 0), mu, fmaf(number(p.dread, to + p.V, 0), y, delta));
  }
  delta = ptx::sum_lanes<32>(delta);
  if (threadIdx.x % 32 == 0) static_cast<float*>(p.delta.data)[at(p.delta, b, t, h)] = empty ? 0 : delta;
}

// Grid: heads, 32 channels; 8 tokens at a time. dv, and beta dbeta of the head, summed in a fixed order.
extern "C" __global__ void __launch_bounds__(256) fem_value_gradients(const __grid_constant__ FemCall p) {
  __shared__ double sums[8][32];
  const int64_t b = blockIdx.x / p.H, h = blockIdx.x % p.H;
  const int c = threadIdx.x % 32, group = threadIdx.x / 32, j = blockIdx.y * 32 + c;
  double sum = 0;
  if (j < p.V) {
    const Channel one = channel(p, b, h, j);
    for (int64_t t = group; t < p.S; t += 8) {
      const bool there = present(p, b, t);
      float second = 0, whole = 0, vc = 0, v = 0;
      if (there) {
        v = ptx::load(p.v.data, p.v.dtype, at(p.v, b, t, h) + j);
        vc = v > one.limit ? one.limit : v < -one.limit ? -one.limit : v;
        const float z = one.beta * vc, slope = one.small ? expf(z) : one.beta * expf(z - one.shift);
        const float dx = number(p.dwide, at(p.dwide, b, t, h) + j + p.V, 0);
        second = slope * dx;
        whole = fmaf(one.excess ? expm1f(z) : slope, dx, number(p.dwide, at(p.dwide, b, t, h) + j, 0));
      }
      const bool inside = fabsf(v) <= one.limit;
      put(p.dv, at(p.dv, b, t, h) + j, inside ? whole : 0);
      const float lam = number(p.lam, at(p.lam, b, t, h) + j, 0), g = number(p.g, at(p.g, b, t, h) + j, 1);
      const float dfree = lam * g * number(p.dout, at(p.dout, b, t, h) + j, 0);
      const float free = number(p.free, at(p.free, b, t, h) + j, 0);
      sum += static_cast<double>(vc) * second - static_cast<double>(dfree) * free -
             (inside ? 0.0 : static_cast<double>(whole) * vc);
    }
    sum /= one.beta;
  }
  sums[group][c] = sum;
  __syncthreads();
  if (group != 0 || j >= p.V) return;
  for (int i = 1; i < 8; ++i) sum += sums[i][c];
  if (p.dbeta_parts != nullptr) p.dbeta_parts[(b * p.H + h) * p.V + j] = sum;
}

extern "C" __global__ void __launch_bounds__(256) fem_beta_gradient(const __grid_constant__ FemCall p) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x, count = int64_t{p.H} * p.V;
  if (i >= count) return;
  double sum = 0;
  for (int64_t b = 0; b < p.B; ++b) sum += p.dbeta_parts[b * count + i];
  ptx::store(p.dbeta.data, p.dbeta.dtype, i / p.V * p.dbeta.stride[0] + i % p.V * p.dbeta.stride[1], static_cast<float>(sum));
}

}  // namespace linnet::cuda
