// Elementwise operators: a thread has 16 bytes of each tensor; memory alone bounds them.
#include "activation_cuda.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

// act(x) and its slope.
__device__ __forceinline__ float2 activate(Activation act, float x, float cap) {
  constexpr float kRoot2OverPi = 0.79788456080286535588f;
  switch (act) {
    case Activation::relu: return {x <= 0 ? 0 : x, x > 0 ? 1.0f : 0.0f};
    case Activation::silu: {
      const float2 s = ptx::logistic_pair<false>(x);
      return {x * s.x, s.x * fmaf(x, s.y, 1)};
    }
    case Activation::gelu: {
      const float phi = normcdff(x);
      return {x * phi, fmaf(x * 0.39894228040143267794f, expf(-0.5f * x * x), phi)};
    }
    case Activation::gelu_tanh: {
      const float z = x * x, u = 2 * kRoot2OverPi * x * fmaf(z, 0.044715f, 1);
      const float2 s = ptx::logistic_pair<false>(u);
      return {x * s.x, s.x * fmaf(x * s.y, 2 * kRoot2OverPi * fmaf(z, 3 * 0.044715f, 1), 1)};
    }
    case Activation::sigmoid: {
      const float2 s = ptx::logistic_pair<false>(x);
      return {s.x, s.x * s.y};
    }
    case Activation::tanh: {
      const float2 s = ptx::logistic_pair<false>(2 * x);
      return {tanhf(x), 4 * s.x * s.y};  // 1 - tanh^2 without cancellation
    }
    case Activation::softplus: {
      const float2 s = ptx::logistic_pair<false>(x);
      return {x != x ? x : fmaxf(x, 0) + log1pf(expf(-fabsf(x))), s.x};
    }
    case Activation::relu2: {
      const float y = x <= 0 ? 0 : x;
      return {y * y, 2 * y};
    }
    case Activation::elu1: {
      const float e = x > 0 ? 1 : expf(x);
      return {x > 0 ? x + 1 : e, e};
    }
    case Activation::exp: {
      const float e = expf(x);
      return {e, e};
    }
    case Activation::softcap: {
      const float z = x / cap;
      const float2 s = ptx::logistic_pair<false>(2 * z);
      return {cap * tanhf(z), 4 * s.x * s.y};
    }
  }
  return {x, 1};
}

template <class T>
__device__ void elements(const Elements& e) {
  constexpr int W = ptx::kVector<T>;
  const int64_t piece = blockIdx.x * 256ll + threadIdx.x;
  if (piece >= e.pieces) return;
  int64_t b = 0, t = 0;
  int h = 0, c = 0, width = e.D;
  int64_t base = piece * W;
  if (!e.dense) {
    const int64_t row = piece / e.per_row;
    c = static_cast<int>(piece % e.per_row) * W;
    h = static_cast<int>(row % e.H);
    t = row / e.H % e.T;
    b = row / e.H / e.T;
  }
  const auto address = [&](const View& view) { return static_cast<T*>(view.data) + (e.dense ? base : place(view, b, t, h)); };
  const bool whole = e.dense || e.whole;
  const auto read = [&](const View& view, float(&to)[W]) {
    if (is_given(view)) {
      load_piece<T>(address(view), c, width, whole, to);
    } else {
#pragma unroll
      for (int i = 0; i < W; ++i) to[i] = 0;
    }
  };
  const auto write = [&](const View& view, const float(&from)[W]) {
    if (is_given(view)) store_piece<T>(address(view), c, width, whole, from);
  };
  float x[W], y[W], d[W], first[W], second[W];
  if (e.op != Elementwise::add_back) read(e.x, x);
  if (e.op == Elementwise::glu || e.op == Elementwise::glu_back || e.op == Elementwise::add) read(e.y, y);
  if (e.op == Elementwise::activation_back || e.op == Elementwise::glu_back || e.op == Elementwise::add_back) read(e.dout, d);
#pragma unroll
  for (int i = 0; i < W; ++i) {
    switch (e.op) {
      case Elementwise::activation: first[i] = activate(e.act, x[i], e.cap).x; break;
      case Elementwise::activation_back: first[i] = d[i] * activate(e.act, x[i], e.cap).y; break;
      case Elementwise::glu: first[i] = activate(e.act, x[i], 1).x * y[i]; break;
      case Elementwise::glu_back: {
        const float2 a = activate(e.act, x[i], 1);
        first[i] = d[i] * y[i] * a.y;
        second[i] = d[i] * a.x;
        break;
      }
      case Elementwise::add: first[i] = fmaf(e.scale, y[i], x[i]); break;
      case Elementwise::add_back:
        first[i] = d[i];
        second[i] = e.scale * d[i];
        break;
    }
  }
  if (e.op == Elementwise::activation || e.op == Elementwise::glu || e.op == Elementwise::add) {
    write(e.out, first);
  } else {
    write(e.dx, first);
    if (e.op != Elementwise::activation_back) write(e.dy, second);
  }
}

}  // namespace

#define LINNET_ELEMENTS(suffix, T) \
  extern "C" __global__ void __launch_bounds__(256) elements_##suffix(const __grid_constant__ Elements e) { elements<T>(e); }
LINNET_ELEMENTS(f32, float)
LINNET_ELEMENTS(bf16, __nv_bfloat16)
LINNET_ELEMENTS(f16, __half)

}  // namespace linnet::cuda
