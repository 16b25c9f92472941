// Elementwise maps, and where the rows of a call lie; for the recurrence's kernels.
#pragma once

#include "mechanisms/recurrence/cuda/engine.h"
#include "ptx/numbers.cuh"

namespace linnet::cuda {

inline constexpr float kMinusLog2 = -0.6931472f;

__device__ inline float sigmoid(float x) { return x >= 0 ? 1 / (1 + expf(-x)) : expf(x) / (1 + expf(x)); }

__device__ inline float apply(Map map, float x) {
  switch (map) {
    case Map::identity: break;
    case Map::elu1: return x > 0 ? x + 1 : expf(x);
    case Map::relu: return x <= 0 ? 0 : x;
    case Map::relu2: return x <= 0 ? 0 : x * x;
    case Map::silu: return x * sigmoid(x);
    case Map::softplus: return fmaxf(x, 0) + log1pf(expf(-fabsf(x)));
    case Map::exp: return expf(x);
  }
  return x;
}
__device__ inline float derivative(Map map, float x) {
  switch (map) {
    case Map::identity: break;
    case Map::elu1: return x > 0 ? 1 : expf(x);
    case Map::relu: return x > 0 ? 1 : 0;
    case Map::relu2: return x > 0 ? 2 * x : 0;
    case Map::silu: return sigmoid(x) * (1 + x * sigmoid(-x));
    case Map::softplus: return sigmoid(x);
    case Map::exp: return expf(x);
  }
  return 1;
}

__device__ inline float softplus(float x) { return fmaxf(x, 0) + log1pf(expf(-fabsf(x))); }
__device__ inline float step_bias(const StepSizes& s, int h) {
  return s.bias == nullptr ? 0 : ptx::load(s.bias, s.bias_dtype, h * s.stride_bias);
}
// To 1e-6 of itself, for 16-bit numbers; log(1 + e) by its series where 1 + e would lose e.
__device__ inline float softplus_quick(float x) {
  const float e = __expf(-fabsf(x));
  return fmaxf(x, 0) + (e < 0.02f ? e * fmaf(e, fmaf(e, 1 / 3.0f, -0.5f), 1) : __logf(1 + e));
}
template <bool quick = false>
__device__ inline float step_size(const StepSizes& s, float biased) {
  return fminf(fmaxf(quick ? softplus_quick(biased) : softplus(biased), s.low), s.high);
}
// The log decay of a step; a step of 0 decays nothing, however fast the rate.
__device__ inline float step_decay(float delta, float A) { return delta == 0 ? 0 : delta * A; }
__device__ inline float skip_of(const Finish& f, int h, int column) {
  return f.D == nullptr ? 0 : ptx::load(f.D, f.dtype, h * f.stride_h + column * f.stride_v);
}

// Offsets come from the caller's memory on the GPU, unchecked: they are bounded here.
__device__ inline int64_t offset(const Engine& e, int64_t n) {
  const int64_t x = e.offsets_64 ? static_cast<const int64_t*>(e.offsets)[n] : static_cast<const int32_t*>(e.offsets)[n];
  return x < 0 ? 0 : x > e.T ? e.T : x;
}

__device__ inline int64_t row_of(const Rows& rows, int64_t b, int64_t t, int h) {
  return b * rows.stride_b + t * rows.stride_t + h / rows.group * rows.stride_h;
}

// x[i] = row[i] for i < count, else 0. One branch on the type for all of them, so that the loads overlap.
template <int kRows>
__device__ __forceinline__ void load_numbers(const Rows& rows, int64_t place, int count, float (&x)[kRows]) {
  const auto load = [&](const auto* data) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = i < count ? static_cast<float>(data[place + i]) : 0;
  };
  if (rows.dtype == Dtype::f32) {
    load(static_cast<const float*>(rows.data));
  } else if (rows.dtype == Dtype::bf16) {
    load(static_cast<const __nv_bfloat16*>(rows.data));
  } else {
    load(static_cast<const __half*>(rows.data));
  }
}

}  // namespace linnet::cuda
