// layer_norm: a warp has a row. dx = r (d - mean d - n mean(d n)), d = dout weight, n = (x - mean) r.
//
// The gradients of weight and bias: each warp adds its rows up, in registers where they fit, else in its part of memory;
// shared/pieces.cu adds the warps. No atomics: one order, by the shape alone.
#include "layer_norm_cuda.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

constexpr int kItems = 4;  // pieces of a row that a lane keeps in registers

struct Moments {
  float mean, factor;
};
template <class T>
__device__ __forceinline__ Moments moments_of(const LayerNormRows& r, const T* row, int lane) {
  constexpr int W = ptx::kVector<T>;
  float sum = 0, squares = 0, x[W];
  for (int c = lane * W; c < r.D; c += 32 * W) {
    load_piece<T>(row, c, r.D, r.whole, x);
#pragma unroll
    for (int i = 0; i < W; ++i) sum += x[i];
  }
  const float mean = ptx::sum_lanes<32>(sum) * r.unit;
  for (int c = lane * W; c < r.D; c += 32 * W) {
    load_piece<T>(row, c, r.D, r.whole, x);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const float d = c + i < r.D ? x[i] - mean : 0;
      squares = fmaf(d, d, squares);
    }
  }
  const float variance = fmaf(ptx::sum_lanes<32>(squares), r.unit, r.eps);
  return {mean, variance == 0 ? 0 : 1 / sqrtf(variance)};
}

template <class T>
__device__ __forceinline__ T* row_at(const LayerNormRows& r, const View& view, int64_t row) {
  const int64_t bt = row / r.H;
  return static_cast<T*>(view.data) + place(view, bt / r.T, bt % r.T, row % r.H);
}

template <class T>
__device__ void layer_norm(const LayerNormRows& r) {
  constexpr int W = ptx::kVector<T>;
  const int lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x * 8ll + threadIdx.x / 32;
  if (row >= r.rows) return;
  const T* from = row_at<T>(r, r.x, row);
  T* to = row_at<T>(r, r.out, row);
  const Moments m = moments_of<T>(r, from, lane);
  for (int c = lane * W; c < r.D; c += 32 * W) {
    float x[W], weight[W], bias[W];
    load_piece<T>(from, c, r.D, r.whole, x);
    load_channels<W>(r.weight, c, r.D, 1, weight);
    load_channels<W>(r.bias, c, r.D, 0, bias);
#pragma unroll
    for (int i = 0; i < W; ++i) x[i] = fmaf((x[i] - m.mean) * m.factor, weight[i], bias[i]);
    store_piece<T>(to, c, r.D, r.whole, x);
  }
}

template <class T>
__device__ void layer_norm_back(const LayerNormRows& r) {
  constexpr int W = ptx::kVector<T>;
  const int lane = threadIdx.x % 32;
  const int64_t warp = blockIdx.x * 8ll + threadIdx.x / 32;
  const bool kept = r.D <= kItems * 32 * W;
  float* weight_sums = r.weight_sums == nullptr ? nullptr : r.weight_sums + warp * r.D;
  float* bias_sums = r.bias_sums == nullptr ? nullptr : r.bias_sums + warp * r.D;
  float kept_weight[kItems][W] = {}, kept_bias[kItems][W] = {};
  if (!kept) {
    for (int c = lane * W; c < r.D; c += 32 * W) {
      for (int i = 0; i < W && c + i < r.D; ++i) {
        if (weight_sums != nullptr) weight_sums[c + i] = 0;
        if (bias_sums != nullptr) bias_sums[c + i] = 0;
      }
    }
  }
  for (int64_t row = warp; row < r.rows; row += r.warps) {
    const T* from = row_at<T>(r, r.x, row);
    const T* dfrom = is_given(r.dout) ? row_at<T>(r, r.dout, row) : nullptr;
    const Moments m = moments_of<T>(r, from, lane);
    float sum = 0, dot = 0;
    for (int item = 0, c = lane * W; c < r.D; c += 32 * W, ++item) {
      float x[W], d[W] = {}, weight[W];
      load_piece<T>(from, c, r.D, r.whole, x);
      if (dfrom != nullptr) load_piece<T>(dfrom, c, r.D, r.whole, d);
      load_channels<W>(r.weight, c, r.D, 1, weight);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float n = (x[i] - m.mean) * m.factor, along = c + i < r.D ? d[i] * n : 0;
        sum = fmaf(d[i], weight[i], sum);
        dot = fmaf(along, weight[i], dot);
        if (kept) {
#pragma unroll
          for (int k = 0; k < kItems; ++k) {
            kept_weight[k][i] += k == item ? along : 0;
            kept_bias[k][i] += k == item ? d[i] : 0;
          }
        } else if (c + i < r.D) {
          if (weight_sums != nullptr) weight_sums[c + i] += along;
          if (bias_sums != nullptr) bias_sums[c + i] += d[i];
        }
      }
    }
    sum = ptx::sum_lanes<32>(sum) * r.unit;
    dot = ptx::sum_lanes<32>(dot) * r.unit;
    if (!is_given(r.dx)) continue;
    // dot's exact value leaves unit n . (d - sum - dot n) = dot (eps factor^2); once more with what is left (norm_rows.cu).
    float left = 0;
    for (int c = lane * W; c < r.D; c += 32 * W) {
      float x[W], d[W] = {}, weight[W];
      load_piece<T>(from, c, r.D, r.whole, x);
      if (dfrom != nullptr) load_piece<T>(dfrom, c, r.D, r.whole, d);
      load_channels<W>(r.weight, c, r.D, 1, weight);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float n = (x[i] - m.mean) * m.factor;
        if (c + i < r.D) left = fmaf(fmaf(-dot, n, fmaf(d[i], weight[i], -sum)), n, left);
      }
    }
    const float rest = ptx::sum_lanes<32>(left) * r.unit - dot * r.eps * m.factor * m.factor;
    T* to = row_at<T>(r, r.dx, row);
    for (int c = lane * W; c < r.D; c += 32 * W) {
      float x[W], d[W] = {}, weight[W];
      load_piece<T>(from, c, r.D, r.whole, x);
      if (dfrom != nullptr) load_piece<T>(dfrom, c, r.D, r.whole, d);
      load_channels<W>(r.weight, c, r.D, 1, weight);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float n = (x[i] - m.mean) * m.factor, e = fmaf(-dot, n, fmaf(d[i], weight[i], -sum));
        x[i] = m.factor * fmaf(-rest, n, e);
      }
      store_piece<T>(to, c, r.D, r.whole, x);
    }
  }
  if (!kept) return;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int c = (k * 32 + lane) * W;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      if (c + i >= r.D) continue;
      if (weight_sums != nullptr) weight_sums[c + i] = kept_weight[k][i];
      if (bias_sums != nullptr) bias_sums[c + i] = kept_bias[k][i];
    }
  }
}

}  // namespace

#define LINNET_LAYER_NORM(suffix, T)                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) layer_norm_##suffix(const __grid_constant__ LayerNormRows r) {      \
    layer_norm<T>(r);                                                                                                   \
  }                                                                                                                     \
  extern "C" __global__ void __launch_bounds__(256) layer_norm_back_##suffix(const __grid_constant__ LayerNormRows r) { \
    layer_norm_back<T>(r);                                                                                              \
  }
LINNET_LAYER_NORM(f32, float)
LINNET_LAYER_NORM(bf16, __nv_bfloat16)
LINNET_LAYER_NORM(f16, __half)

}  // namespace linnet::cuda
