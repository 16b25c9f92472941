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

// Rows in registers: lanes threads have a row, `items` pieces of 16 bytes each; weights in whole pieces too.
template <int lanes>
__device__ __forceinline__ float sum_row(float x, float* parts) {
  if constexpr (lanes <= 32) return ptx::sum_lanes<lanes>(x);
  return ptx::sum_block<lanes>(x, parts);
}
template <int W>
__device__ __forceinline__ void load_vector(const View& view, int c, float absent, float (&x)[W]) {
  if (!is_given(view)) {
#pragma unroll
    for (int i = 0; i < W; ++i) x[i] = absent;
  } else if (view.dtype == Dtype::f32) {
#pragma unroll
    for (int i = 0; i < W; i += 4) {
      *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(static_cast<const float*>(view.data) + c + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < W; i += 4) {
      const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(view.data) + c + i);
      const bool bf16 = view.dtype == Dtype::bf16;
      const float2 low = bf16 ? ptx::unpack<true>(raw.x) : ptx::unpack<false>(raw.x);
      const float2 high = bf16 ? ptx::unpack<true>(raw.y) : ptx::unpack<false>(raw.y);
      x[i] = low.x, x[i + 1] = low.y, x[i + 2] = high.x, x[i + 3] = high.y;
    }
  }
}

template <class T, int lanes, int items>
struct HeldRow {
  static constexpr int W = ptx::kVector<T>;
  float x[items][W];  // less the mean, times the factor: n

  __device__ void load(const T* from, int lane, int D) {
    uint4 raw[items];
#pragma unroll
    for (int i = 0; i < items; ++i) {
      const int c = (lane + lanes * i) * W;
      raw[i] = c < D ? *reinterpret_cast<const uint4*>(from + c) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < items; ++i) ptx::to_floats<T>(raw[i], x[i]);
  }
  __device__ float normalise(const LayerNormRows& r, int lane, float* parts) {
    float sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < items; ++i) {
#pragma unroll
      for (int c = 0; c < W; ++c) sum += x[i][c];
    }
    const float mean = sum_row<lanes>(sum, parts) * r.unit;
#pragma unroll
    for (int i = 0; i < items; ++i) {
      const bool in = (lane + lanes * i) * W < r.D;
#pragma unroll
      for (int c = 0; c < W; ++c) {
        x[i][c] = in ? x[i][c] - mean : 0;
        squares = fmaf(x[i][c], x[i][c], squares);
      }
    }
    const float variance = fmaf(sum_row<lanes>(squares, parts), r.unit, r.eps);
    const float factor = variance == 0 ? 0 : 1 / sqrtf(variance);
#pragma unroll
    for (int i = 0; i < items; ++i) {
#pragma unroll
      for (int c = 0; c < W; ++c) x[i][c] *= factor;
    }
    return factor;
  }
};

template <class T, int lanes, int items>
__device__ void held(const LayerNormRows& r) {
  constexpr int W = ptx::kVector<T>, kAtOnce = 256 / lanes;
  __shared__ float parts[8];
  const int lane = threadIdx.x % lanes;
  const int64_t row = blockIdx.x * int64_t{kAtOnce} + threadIdx.x / lanes;
  if (row >= r.rows) return;  // whole warps, or the whole block
  HeldRow<T, lanes, items> n;
  n.load(row_at<T>(r, r.x, row), lane, r.D);
  n.normalise(r, lane, parts);
  T* to = row_at<T>(r, r.out, row);
#pragma unroll
  for (int i = 0; i < items; ++i) {
    const int c = (lane + lanes * i) * W;
    if (c >= r.D) continue;
    float weight[W], bias[W];
    load_vector<W>(r.weight, c, 1, weight);
    load_vector<W>(r.bias, c, 0, bias);
#pragma unroll
    for (int k = 0; k < W; ++k) n.x[i][k] = fmaf(n.x[i][k], weight[k], bias[k]);
    *reinterpret_cast<uint4*>(to + c) = ptx::from_floats<T>(n.x[i]);
  }
}

template <class T, int lanes, int items>
__device__ void held_back(const LayerNormRows& r) {
  constexpr int W = ptx::kVector<T>, kAtOnce = 256 / lanes;
  __shared__ float parts[8];
  const int lane = threadIdx.x % lanes;
  const int64_t slot = blockIdx.x * int64_t{kAtOnce} + threadIdx.x / lanes, slots = r.warps;
  float weight[items][W], weight_sums[items][W] = {}, bias_sums[items][W] = {};
#pragma unroll
  for (int i = 0; i < items; ++i) {
    const int c = (lane + lanes * i) * W;
    if (c < r.D) load_vector<W>(r.weight, c, 1, weight[i]);
  }
  for (int64_t row = slot; row < r.rows; row += slots) {
    HeldRow<T, lanes, items> n, d;
    n.load(row_at<T>(r, r.x, row), lane, r.D);
    d.load(is_given(r.dout) ? row_at<T>(r, r.dout, row) : nullptr, lane, is_given(r.dout) ? r.D : 0);
    const float factor = n.normalise(r, lane, parts);
    float sum = 0, dot = 0, left = 0;
#pragma unroll
    for (int i = 0; i < items; ++i) {
      const bool in = (lane + lanes * i) * W < r.D;
#pragma unroll
      for (int c = 0; c < W; ++c) {
        weight_sums[i][c] = fmaf(d.x[i][c], n.x[i][c], weight_sums[i][c]);
        bias_sums[i][c] += d.x[i][c];
        d.x[i][c] = in ? d.x[i][c] * weight[i][c] : 0;
        sum += d.x[i][c];
        dot = fmaf(d.x[i][c], n.x[i][c], dot);
      }
    }
    sum = sum_row<lanes>(sum, parts) * r.unit;
    dot = sum_row<lanes>(dot, parts) * r.unit;
#pragma unroll
    for (int i = 0; i < items; ++i) {
#pragma unroll
      for (int c = 0; c < W; ++c) {
        d.x[i][c] = fmaf(-dot, n.x[i][c], d.x[i][c] - sum);
        left = fmaf(d.x[i][c], n.x[i][c], left);
      }
    }
    const float rest = sum_row<lanes>(left, parts) * r.unit - dot * r.eps * factor * factor;
    if (!is_given(r.dx)) continue;
    T* to = row_at<T>(r, r.dx, row);
#pragma unroll
    for (int i = 0; i < items; ++i) {
      const int at = (lane + lanes * i) * W;
      if (at >= r.D) continue;
#pragma unroll
      for (int c = 0; c < W; ++c) d.x[i][c] = factor * fmaf(-rest, n.x[i][c], d.x[i][c]);
      *reinterpret_cast<uint4*>(to + at) = ptx::from_floats<T>(d.x[i]);
    }
  }
  if (slot >= slots) return;
#pragma unroll
  for (int i = 0; i < items; ++i) {
    const int at = (lane + lanes * i) * W;
#pragma unroll
    for (int c = 0; c < W; ++c) {
      if (at >= r.D) continue;
      if (r.weight_sums != nullptr) r.weight_sums[slot * r.D + at + c] = weight_sums[i][c];
      if (r.bias_sums != nullptr) r.bias_sums[slot * r.D + at + c] = bias_sums[i][c];
    }
  }
}

}  // namespace

#define LINNET_LAYER_NORM_KERNEL(name, body) \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ LayerNormRows r) { body; }
#define LINNET_LAYER_NORM(suffix, T)                                                 \
  LINNET_LAYER_NORM_KERNEL(layer_norm_##suffix, layer_norm<T>(r))                    \
  LINNET_LAYER_NORM_KERNEL(layer_norm_back_##suffix, layer_norm_back<T>(r))          \
  LINNET_LAYER_NORM_KERNEL(layer_norm_short_##suffix, (held<T, 32, 2>(r)))           \
  LINNET_LAYER_NORM_KERNEL(layer_norm_back_short_##suffix, (held_back<T, 32, 2>(r))) \
  LINNET_LAYER_NORM_KERNEL(layer_norm_long_##suffix, (held<T, 256, 2>(r)))           \
  LINNET_LAYER_NORM_KERNEL(layer_norm_back_long_##suffix, (held_back<T, 256, 2>(r)))
LINNET_LAYER_NORM(f32, float)
LINNET_LAYER_NORM(bf16, __nv_bfloat16)
LINNET_LAYER_NORM(f16, __half)

}  // namespace linnet::cuda
