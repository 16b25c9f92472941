// The kernels of ssd_cuda.h: `lanes` threads have a row, W channels at a time. Memory alone bounds them.
#include "mechanisms/mamba/ssd_cuda.h"
#include "mechanisms/recurrence/cuda/map.cuh"
#include "ptx/rows.cuh"

namespace linnet::cuda {
namespace {

constexpr int kThreads = 256;

// W elements as they come from memory.
template <class T, int W>
struct Raw {
  uint4 words;
  __device__ __forceinline__ void load(const Rows& rows, int64_t place, bool in) {
    words = {0, 0, 0, 0};
    const T* at = static_cast<const T*>(rows.data) + place;
    if constexpr (W > 1) {
      if (in) words = ptx::load_once(at);
    } else {
      if (in) words.x = __float_as_uint(static_cast<float>(*at));
    }
  }
  __device__ __forceinline__ void get(float (&x)[W]) const {
    if constexpr (W > 1) {
      ptx::to_floats<T>(words, x);
    } else {
      x[0] = __uint_as_float(words.x);
    }
  }
};

// W floats.
template <int W>
__device__ __forceinline__ void load_floats(const Rows& rows, int64_t place, bool in, float (&x)[W]) {
  const float* at = static_cast<const float*>(rows.data) + place;
  if constexpr (W > 1) {
#pragma unroll
    for (int i = 0; i < W; i += 4) {
      const float4 four = in ? __ldcs(reinterpret_cast<const float4*>(at + i)) : float4{0, 0, 0, 0};
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  } else {
    x[0] = in ? *at : 0;
  }
}

template <class T, int W>
__device__ __forceinline__ void load_row(const Rows& rows, int64_t place, bool in, float (&x)[W]) {
  const T* at = static_cast<const T*>(rows.data) + place;
  if constexpr (W > 1) {
    uint4 raw = {0, 0, 0, 0};
    if (in) raw = ptx::load_once(at);
    ptx::to_floats<T>(raw, x);
  } else {
    x[0] = in ? static_cast<float>(*at) : 0;
  }
}
template <class T, int W>
__device__ __forceinline__ void store_row(const Rows& rows, int64_t place, const float (&x)[W]) {
  T* at = static_cast<T*>(const_cast<void*>(rows.data)) + place;
  if constexpr (W > 1) {
    ptx::store_once(at, ptx::from_floats<T>(x));
  } else {
    *at = static_cast<T>(x[0]);
  }
}

template <class T, int W, int lanes>
__device__ void before(const SsdRows& s) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  if (row >= s.B * s.T * s.H) return;
  const int h = static_cast<int>(row % s.H), lane = threadIdx.x % lanes;
  const int64_t t = row / s.H % s.T, b = row / s.H / s.T;
  const float dt = ptx::load(s.dt.data, s.dt.dtype, row_of(s.dt, b, t, h)) + step_bias(s.steps, h);
  const float delta = step_size(s.steps, dt);
  if (lane == 0 && s.g.data != nullptr) {
    auto* g = static_cast<float*>(const_cast<void*>(s.g.data));
    g[row_of(s.g, b, t, h)] = step_decay(delta, s.steps.A[h * s.steps.stride_A]);
  }
  for (int c = lane * W; c < s.V; c += lanes * W) {
    if (s.v.data != nullptr) {
      float x[W];
      load_row<T, W>(s.x, row_of(s.x, b, t, h) + c, true, x);
#pragma unroll
      for (int i = 0; i < W; ++i) x[i] *= delta;
      store_row<T, W>(s.v, row_of(s.v, b, t, h) + c, x);
    }
    if (s.dy.data == nullptr) continue;
    float d[W], z[W];
    load_row<T, W>(s.dout, row_of(s.dout, b, t, h) + c, s.dout.data != nullptr, d);
    if (s.z.data != nullptr) {
      load_row<T, W>(s.z, row_of(s.z, b, t, h) + c, true, z);
#pragma unroll
      for (int i = 0; i < W; ++i) d[i] *= z[i] * ptx::logistic<sizeof(T) == 2>(z[i]);
    }
    store_row<T, W>(s.dy, row_of(s.dy, b, t, h) + c, d);
  }
}

// dz of W channels of a token, from x and the skip's factors.
template <class T, int W>
__device__ __forceinline__ void store_dz(const SsdRows& s, int64_t b, int64_t t, int h, int c, const float (&x)[W],
                                         const float (&skip)[W]) {
  constexpr bool quick = sizeof(T) == 2;
  float d[W], z[W], y[W];
  load_row<T, W>(s.dout, row_of(s.dout, b, t, h) + c, s.dout.data != nullptr, d);
  load_row<T, W>(s.z, row_of(s.z, b, t, h) + c, true, z);
  load_row<T, W>(s.y, row_of(s.y, b, t, h) + c, true, y);
#pragma unroll
  for (int k = 0; k < W; ++k) {
    const float2 gate = ptx::logistic_pair<quick>(z[k]);
    d[k] *= fmaf(skip[k], x[k], y[k]) * gate.x * fmaf(z[k], gate.y, 1);
  }
  store_row<T, W>(s.dz, row_of(s.dz, b, t, h) + c, d);
}
template <class T, int W, int lanes>
__device__ void gate_rows(const SsdRows& s) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  if (row >= s.B * s.T * s.H) return;
  const int h = static_cast<int>(row % s.H), lane = threadIdx.x % lanes;
  const int64_t t = row / s.H % s.T, b = row / s.H / s.T;
  for (int c = lane * W; c < s.V; c += lanes * W) {
    float x[W], skip[W];
    load_row<T, W>(s.x, row_of(s.x, b, t, h) + c, true, x);
#pragma unroll
    for (int k = 0; k < W; ++k) skip[k] = skip_of(s.skip, h, c + k);
    store_dz<T, W>(s, b, t, h, c, x, skip);
  }
}

// A token's gradient of dt, from dg and dv . x.
template <bool quick>
__device__ __forceinline__ float step_gradient(const StepSizes& steps, float raw, float rate, float dg, float dot) {
  const float soft = quick ? softplus_quick(raw) : softplus(raw);
  const float slope = soft < steps.low || soft > steps.high ? 0 : ptx::logistic<quick>(raw);
  return fmaf(rate, dg, dot) * slope;
}

// Block (part, head): its tokens of the head, kThreads / lanes at once.
template <class T, int W, int lanes, int items>
__device__ void behind(const SsdRows& s) {
  constexpr int kAtOnce = kThreads / lanes;
  constexpr bool quick = sizeof(T) == 2;
  __shared__ float shared[kThreads];
  const int h = blockIdx.y, lane = threadIdx.x % lanes, slot = threadIdx.x / lanes;
  const int64_t tokens = s.B * s.T, share = (tokens + s.parts - 1) / s.parts;
  const int64_t from = blockIdx.x * share, to = min(tokens, from + share);
  const float rate = s.steps.A[h * s.steps.stride_A], bias = step_bias(s.steps, h);
  const Rows& dy_rows = s.dy.data != nullptr ? s.dy : s.dout;
  float dD[items][W], skip[items][W], dA = 0, dbias = 0;
#pragma unroll
  for (int i = 0; i < items; ++i) {
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const int c = (lane + lanes * i) * W + k;
      dD[i][k] = 0;
      skip[i][k] = c < s.V ? skip_of(s.skip, h, c) : 0;
    }
  }
  // A token's numbers and rows, which are on their way while the turn before is worked on.
  struct Asked {
    int64_t b, t;
    uint32_t dt;
    float dg;
    Raw<T, W> x[items], dy[items];
    float dv[items][W];
  };
  const auto ask = [&](int64_t turn, Asked& a) {
    const bool in = turn + slot < to;
    const int64_t token = in ? turn + slot : from;
    a.b = tokens < int64_t{1} << 31 ? static_cast<uint32_t>(token) / static_cast<uint32_t>(s.T) : token / s.T;
    a.t = token - a.b * s.T;
    a.dt = ptx::ask(s.dt.data, s.dt.dtype, row_of(s.dt, a.b, a.t, h));
    a.dg = static_cast<const float*>(s.dg.data)[row_of(s.dg, a.b, a.t, h)];
#pragma unroll
    for (int i = 0; i < items; ++i) {
      const int c = (lane + lanes * i) * W;
      const bool mine = in && c < s.V;
      a.x[i].load(s.x, row_of(s.x, a.b, a.t, h) + c, mine);
      load_floats<W>(s.dv, row_of(s.dv, a.b, a.t, h) + c, mine, a.dv[i]);
      a.dy[i].load(dy_rows, row_of(dy_rows, a.b, a.t, h) + c, mine && dy_rows.data != nullptr);
    }
  };
  Asked next;
  if (from < to) ask(from, next);
  for (int64_t turn = from; turn < to; turn += kAtOnce) {
    const bool in = turn + slot < to;
    const Asked now = next;
    if (turn + kAtOnce < to) ask(turn + kAtOnce, next);
    const int64_t b = now.b, t = now.t;
    const float raw = ptx::take(now.dt, s.dt.dtype) + bias, delta = step_size<quick>(s.steps, raw), dg = now.dg;
    float dot = 0;
#pragma unroll
    for (int i = 0; i < items; ++i) {
      const int c = (lane + lanes * i) * W;
      const bool mine = in && c < s.V;
      float x[W], dv[W], dy[W];
      now.x[i].get(x);
      now.dy[i].get(dy);
      if (s.dz.data != nullptr && mine) store_dz<T, W>(s, b, t, h, c, x, skip[i]);
#pragma unroll
      for (int k = 0; k < W; ++k) {
        dot = fmaf(now.dv[i][k], x[k], dot);
        dD[i][k] = fmaf(dy[k], x[k], dD[i][k]);
        dv[k] = fmaf(skip[i][k], dy[k], delta * now.dv[i][k]);
      }
      if (s.dx.data != nullptr && mine) store_row<T, W>(s.dx, row_of(s.dx, b, t, h) + c, dv);
    }
    dot = ptx::sum_lanes<lanes>(dot);
    const float ddt = step_gradient<quick>(s.steps, raw, rate, dg, dot);
    if (!in || lane != 0) continue;
    dA = fmaf(delta, dg, dA);
    dbias += ddt;
    if (s.ddt.data != nullptr) ptx::store(const_cast<void*>(s.ddt.data), s.ddt.dtype, row_of(s.ddt, b, t, h), ddt);
  }
  const int64_t part = static_cast<int64_t>(h) * s.parts + blockIdx.x;
  const auto add = [&](float x, float* to_sum, bool mine) {  // over the slots, in order
    __syncthreads();
    shared[threadIdx.x] = x;
    __syncthreads();
    if (slot != 0 || !mine) return;
    float sum = 0;
    for (int i = 0; i < kAtOnce; ++i) sum += shared[i * lanes + lane];
    *to_sum = sum;
  };
#pragma unroll
  for (int i = 0; i < items; ++i) {
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const int c = (lane + lanes * i) * W + k;
      add(dD[i][k], s.skip_sums + part * s.V + c, c < s.V);
    }
  }
  add(dA, s.step_sums + 2 * part, lane == 0);
  add(dbias, s.step_sums + 2 * part + 1, lane == 0);
}

}  // namespace

// vector: 16 lanes with 16 bytes each, or 32 with two times 16; any: element by element, up to 256 channels.
#define LINNET_SSD_ROWS(name, function, suffix, T)                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads) name##_16_##suffix(const __grid_constant__ SsdRows s) {  \
    function<T, ptx::kVector<T>, 16>(s);                                                                          \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads) name##_32_##suffix(const __grid_constant__ SsdRows s) {  \
    function<T, ptx::kVector<T>, 32>(s);                                                                          \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads) name##_any_##suffix(const __grid_constant__ SsdRows s) { \
    function<T, 1, 32>(s);                                                                                        \
  }
#define LINNET_SSD_BEHIND(suffix, T)                                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads, 2) behind_16_##suffix(const __grid_constant__ SsdRows s) { \
    behind<T, ptx::kVector<T>, 16, 1>(s);                                                                           \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads) behind_32_##suffix(const __grid_constant__ SsdRows s) {    \
    behind<T, ptx::kVector<T>, 32, 2>(s);                                                                           \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads) behind_any_##suffix(const __grid_constant__ SsdRows s) {   \
    behind<T, 1, 32, 8>(s);                                                                                         \
  }
LINNET_SSD_ROWS(before, before, f32, float)
LINNET_SSD_ROWS(before, before, bf16, __nv_bfloat16)
LINNET_SSD_ROWS(before, before, f16, __half)
LINNET_SSD_ROWS(gate, gate_rows, bf16, __nv_bfloat16)
LINNET_SSD_ROWS(gate, gate_rows, f16, __half)
LINNET_SSD_BEHIND(f32, float)
LINNET_SSD_BEHIND(bf16, __nv_bfloat16)
LINNET_SSD_BEHIND(f16, __half)

// ddt, and parts of dA and ddt_bias, where the walk of dv has left dv . x. Block (part, head): a thread for each token.
extern "C" __global__ void __launch_bounds__(kThreads) behind_steps(const __grid_constant__ SsdRows s) {
  __shared__ float parts[kThreads / 32];
  const int h = blockIdx.y, pieces = s.V / 16;
  const int64_t tokens = s.B * s.T, share = (tokens + s.parts - 1) / s.parts;
  const int64_t from = blockIdx.x * share, to = min(tokens, from + share);
  const float rate = s.steps.A[h * s.steps.stride_A], bias = step_bias(s.steps, h);
  float dA = 0, dbias = 0;
  for (int64_t token = from + threadIdx.x; token < to; token += kThreads) {
    const int64_t b = tokens < int64_t{1} << 31 ? static_cast<uint32_t>(token) / static_cast<uint32_t>(s.T) : token / s.T;
    const int64_t t = token - b * s.T;
    const float raw = ptx::load(s.dt.data, s.dt.dtype, row_of(s.dt, b, t, h)) + bias;
    const float dg = static_cast<const float*>(s.dg.data)[row_of(s.dg, b, t, h)];
    const float* dots = s.dots + (b * s.H + h) * pieces * s.T + t;
    float dot = 0;
    for (int i = 0; i < pieces; ++i) dot += dots[i * s.T];
    const float ddt = step_gradient<true>(s.steps, raw, rate, dg, dot);
    dA = fmaf(step_size<true>(s.steps, raw), dg, dA);
    dbias += ddt;
    if (s.ddt.data != nullptr) ptx::store(const_cast<void*>(s.ddt.data), s.ddt.dtype, row_of(s.ddt, b, t, h), ddt);
  }
  dA = ptx::sum_block<kThreads>(dA, parts);
  dbias = ptx::sum_block<kThreads>(dbias, parts);
  if (threadIdx.x != 0) return;
  float* sums = s.step_sums + 2 * (static_cast<int64_t>(h) * s.parts + blockIdx.x);
  sums[0] = dA;
  sums[1] = dbias;
}

// The sums of a head over its parts: columns of dD (or all of them in one number), dA, ddt_bias. Block (head, column).
extern "C" __global__ void __launch_bounds__(kThreads)
    sum_heads(const __grid_constant__ SsdRows s, void* dD, int dD_type, int64_t stride_h, int64_t stride_v, int each, float* dA,
              int64_t stride_A, void* dbias, int bias_type, int64_t stride_bias) {
  __shared__ float parts[kThreads / 32];
  const int h = blockIdx.x, column = blockIdx.y, columns = each ? s.V : 1;  // then dA, ddt_bias
  float sum = 0;
  if (column < columns) {
    const int count = each ? 1 : s.V;
    for (int i = threadIdx.x; i < s.skip_parts * count; i += kThreads) {
      sum += s.skip_sums[(static_cast<int64_t>(h) * s.skip_parts + i / count) * s.V + column + i % count];
    }
  } else {
    for (int i = threadIdx.x; i < s.parts; i += kThreads) {
      sum += s.step_sums[2 * (static_cast<int64_t>(h) * s.parts + i) + column - columns];
    }
  }
  sum = ptx::sum_block<kThreads>(sum, parts);
  if (threadIdx.x != 0) return;
  if (column < columns) {
    if (dD != nullptr) ptx::store(dD, static_cast<Dtype>(dD_type), h * stride_h + column * stride_v, sum);
  } else if (column == columns) {
    if (dA != nullptr) dA[h * stride_A] = sum;
  } else if (dbias != nullptr) {
    ptx::store(dbias, static_cast<Dtype>(bias_type), h * stride_bias, sum);
  }
}

}  // namespace linnet::cuda
