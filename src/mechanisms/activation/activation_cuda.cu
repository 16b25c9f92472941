// Elementwise operators: a thread has 16 bytes of each tensor, twice; memory alone bounds them.
#include "activation_cuda.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

// act(x) and its slope; 16-bit results need no more than the quick functions have.
template <Activation act, bool quick>
__device__ __forceinline__ float2 activate(float x, float cap) {
  constexpr float kRoot2OverPi = 0.79788456080286535588f;
  if constexpr (act == Activation::relu) {
    return {x <= 0 ? 0 : x, x > 0 ? 1.0f : 0.0f};
  } else if constexpr (act == Activation::silu) {
    const float2 s = ptx::logistic_pair<quick>(x);
    return {x * s.x, s.x * fmaf(x, s.y, 1)};
  } else if constexpr (act == Activation::gelu) {
    const float phi = normcdff(x);
    return {x * phi,
            fmaf(x * 0.39894228040143267794f, quick ? ptx::exp2_fast(-0.72134752f * x * x) : expf(-0.5f * x * x), phi)};
  } else if constexpr (act == Activation::gelu_tanh) {
    const float z = x * x, u = 2 * kRoot2OverPi * x * fmaf(z, 0.044715f, 1);
    const float2 s = ptx::logistic_pair<quick>(u);
    return {x * s.x, s.x * fmaf(x * s.y, 2 * kRoot2OverPi * fmaf(z, 3 * 0.044715f, 1), 1)};
  } else if constexpr (act == Activation::sigmoid) {
    const float2 s = ptx::logistic_pair<quick>(x);
    return {s.x, s.x * s.y};
  } else if constexpr (act == Activation::tanh) {
    const float2 s = ptx::logistic_pair<quick>(2 * x);
    return {tanhf(x), 4 * s.x * s.y};  // 1 - tanh^2 without cancellation
  } else if constexpr (act == Activation::softplus) {
    const float2 s = ptx::logistic_pair<quick>(x);
    return {x != x ? x : fmaxf(x, 0) + log1pf(expf(-fabsf(x))), s.x};
  } else if constexpr (act == Activation::relu2) {
    const float y = x <= 0 ? 0 : x;
    return {y * y, 2 * y};
  } else if constexpr (act == Activation::elu1) {
    const float e = x > 0 ? 1 : expf(x);
    return {x > 0 ? x + 1 : e, e};
  } else if constexpr (act == Activation::exp) {
    const float e = expf(x);
    return {e, e};
  } else {
    const float z = x / cap;
    const float2 s = ptx::logistic_pair<quick>(2 * z);
    return {cap * tanhf(z), 4 * s.x * s.y};
  }
}

constexpr bool is_back(Elementwise op) {
  return op == Elementwise::activation_back || op == Elementwise::glu_back || op == Elementwise::add_back;
}

// A thread has kPieces pieces, a block's width apart, so that several are on their way.
constexpr int kPieces = 2;

template <class T, Elementwise op, Activation act>
__device__ __forceinline__ void elements(const Elements& e) {
  constexpr int W = ptx::kVector<T>;
  constexpr bool quick = sizeof(T) == 2, two = op != Elementwise::activation && op != Elementwise::activation_back;
  constexpr bool gates = op == Elementwise::glu || op == Elementwise::glu_back, adds = op == Elementwise::add;
  float x[kPieces][W], y[kPieces][W], d[kPieces][W];
  int64_t b[kPieces] = {}, t[kPieces] = {}, base[kPieces] = {};
  int h[kPieces] = {}, c[kPieces] = {};
  bool in[kPieces];
  const bool whole = e.dense || e.whole;
  const auto address = [&](const View& view, int i) {
    return static_cast<T*>(view.data) + (e.dense ? base[i] : place(view, b[i], t[i], h[i]));
  };
  const auto read = [&](const View& view, int i, float(&to)[W]) {
    if (is_given(view)) {
      load_piece<T>(address(view, i), c[i], e.D, whole, to);
    } else {
#pragma unroll
      for (int k = 0; k < W; ++k) to[k] = 0;
    }
  };
  const auto write = [&](const View& view, int i, const float(&from)[W]) {
    if (is_given(view)) store_piece<T>(address(view, i), c[i], e.D, whole, from);
  };
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t piece = (blockIdx.x * int64_t{kPieces} + i) * 256 + threadIdx.x;
    in[i] = piece < e.pieces;
    base[i] = piece * W;
    if (!in[i]) continue;
    if (!e.dense) {
      const int64_t row = piece / e.per_row;
      c[i] = static_cast<int>(piece % e.per_row) * W;
      h[i] = static_cast<int>(row % e.H);
      t[i] = row / e.H % e.T;
      b[i] = row / e.H / e.T;
    }
    if constexpr (op != Elementwise::add_back) read(e.x, i, x[i]);
    if constexpr (gates || adds) read(e.y, i, y[i]);
    if constexpr (is_back(op)) read(e.dout, i, d[i]);
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (!in[i]) continue;
    float first[W], second[W];
#pragma unroll
    for (int k = 0; k < W; ++k) {
      if constexpr (op == Elementwise::add) {
        first[k] = fmaf(e.scale, y[i][k], x[i][k]);
      } else if constexpr (op == Elementwise::add_back) {
        first[k] = d[i][k];
        second[k] = e.scale * d[i][k];
      } else {
        const float2 a = activate<act, quick>(x[i][k], e.cap);
        if constexpr (op == Elementwise::activation) first[k] = a.x;
        if constexpr (op == Elementwise::activation_back) first[k] = d[i][k] * a.y;
        if constexpr (op == Elementwise::glu) first[k] = a.x * y[i][k];
        if constexpr (op == Elementwise::glu_back) {
          first[k] = d[i][k] * y[i][k] * a.y;
          second[k] = d[i][k] * a.x;
        }
      }
    }
    write(is_back(op) ? e.dx : e.out, i, first);
    if constexpr (is_back(op) && two) write(e.dy, i, second);
  }
}

template <class T, Elementwise op>
__device__ void activations(const Elements& e) {
  switch (e.act) {
#define LINNET_ACTIVATION(kind) \
  case Activation::kind: return elements<T, op, Activation::kind>(e);
    LINNET_ACTIVATION(relu)
    LINNET_ACTIVATION(silu)
    LINNET_ACTIVATION(gelu)
    LINNET_ACTIVATION(gelu_tanh)
    LINNET_ACTIVATION(sigmoid)
    default: break;
  }
  if constexpr (op == Elementwise::activation || op == Elementwise::activation_back) {
    switch (e.act) {
      LINNET_ACTIVATION(tanh)
      LINNET_ACTIVATION(softplus)
      LINNET_ACTIVATION(relu2)
      LINNET_ACTIVATION(elu1)
      LINNET_ACTIVATION(exp)
      LINNET_ACTIVATION(softcap)
      default: break;
    }
  }
#undef LINNET_ACTIVATION
}

}  // namespace

#define LINNET_ELEMENTS_KERNEL(name, body) \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Elements e) { body; }
#define LINNET_ELEMENTS(suffix, T)                                                                    \
  LINNET_ELEMENTS_KERNEL(activation_##suffix, (activations<T, Elementwise::activation>(e)))           \
  LINNET_ELEMENTS_KERNEL(activation_back_##suffix, (activations<T, Elementwise::activation_back>(e))) \
  LINNET_ELEMENTS_KERNEL(glu_##suffix, (activations<T, Elementwise::glu>(e)))                         \
  LINNET_ELEMENTS_KERNEL(glu_back_##suffix, (activations<T, Elementwise::glu_back>(e)))               \
  LINNET_ELEMENTS_KERNEL(add_##suffix, (elements<T, Elementwise::add, Activation::relu>(e)))          \
  LINNET_ELEMENTS_KERNEL(add_back_##suffix, (elements<T, Elementwise::add_back, Activation::relu>(e)))
LINNET_ELEMENTS(f32, float)
LINNET_ELEMENTS(bf16, __nv_bfloat16)
LINNET_ELEMENTS(f16, __half)

}  // namespace linnet::cuda
