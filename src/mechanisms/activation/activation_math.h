// The activations over vectors: value, or value and slope.
#pragma once

#include "activation_kinds.h"
#include "simd/math.h"

namespace linnet::LINNET_ISA {

// (1 + erf(x / sqrt 2)) / 2. float: Abramowitz and Stegun 7.1.26, largest error 7.5e-8; double: the C library, lane by lane.
LINNET_INLINE vf normal_cdf(vf x) {
  const vf a = abs(x) * 0x1.6a09e6p-1f, t = 1.0f / fma(a, vf{} + 0.3275911f, vf{} + 1.0f);
  vf q = vf{} + 1.061405429f;
  q = fma(q, t, vf{} - 1.453152027f);
  q = fma(q, t, vf{} + 1.421413741f);
  q = fma(q, t, vf{} - 0.284496736f);
  q = fma(q, t, vf{} + 0.254829592f);
  const vf tail = 0.5f * q * t * exp(-(a * a));
  return select(lt(x, vf{}), tail, 1.0f - tail);
}
LINNET_INLINE vd normal_cdf(vd x) {
  for (int i = 0; i < Vec<double>::W; ++i) x[i] = 0.5 * __builtin_erfc(x[i] * -0x1.6a09e667f3bcdp-1);
  return x;
}

template <Activation kAct, bool kSlope, class V>
LINNET_INLINE V activate(V x, typename Real<V>::T cap, decltype(V{}) * slope) {
  using T = typename Real<V>::T;
  const V one = splat<V>(T(1)), zero = V{};
  (void)cap;
  if constexpr (kAct == Activation::relu) {
    if constexpr (kSlope) *slope = select(gt(x, zero), one, zero);
    return max(x, zero);
  } else if constexpr (kAct == Activation::silu) {
    const V s = sigmoid(x);
    if constexpr (kSlope) *slope = s * fma(x, one - s, one);
    return x * s;
  } else if constexpr (kAct == Activation::gelu) {
    const V phi = normal_cdf(x);
    if constexpr (kSlope) *slope = fma(x * T(0.39894228040143267794), exp(x * x * T(-0.5)), phi);
    return x * phi;
  } else if constexpr (kAct == Activation::gelu_tanh) {
    const V z = x * x, g = sigmoid(x * fma(z, splat<V>(T(2 * 0.79788456080286535588 * 0.044715)),
                                           splat<V>(T(2 * 0.79788456080286535588))));
    if constexpr (kSlope) {
      const V du = fma(z, splat<V>(T(6 * 0.79788456080286535588 * 0.044715)), splat<V>(T(2 * 0.79788456080286535588)));
      *slope = g * fma(x * (one - g), du, one);
    }
    return x * g;
  } else if constexpr (kAct == Activation::sigmoid) {
    const V s = sigmoid(x);
    if constexpr (kSlope) *slope = s * (one - s);
    return s;
  } else if constexpr (kAct == Activation::tanh) {
    if constexpr (kSlope) *slope = T(4) * sigmoid(x + x) * sigmoid(-(x + x));  // 1 - tanh^2 without cancellation
    return tanh(x);
  } else if constexpr (kAct == Activation::softplus) {
    if constexpr (kSlope) *slope = sigmoid(x);
    return softplus(x);
  } else if constexpr (kAct == Activation::relu2) {
    const V y = max(x, zero);
    if constexpr (kSlope) *slope = y + y;
    return y * y;
  } else if constexpr (kAct == Activation::elu1) {
    const V e = exp(x);
    if constexpr (kSlope) *slope = select(gt(x, zero), one, e);
    return select(gt(x, zero), x + one, e);
  } else if constexpr (kAct == Activation::exp) {
    const V e = exp(x);
    if constexpr (kSlope) *slope = e;
    return e;
  } else {
    const V z = x / splat<V>(cap);
    if constexpr (kSlope) *slope = T(4) * sigmoid(z + z) * sigmoid(-(z + z));
    return splat<V>(cap) * tanh(z);
  }
}

// Calls body<kAct>() for the activation.
template <class Body>
LINNET_INLINE void by_activation(Activation act, const Body& body) {
  switch (act) {
    case Activation::relu: return body.template operator()<Activation::relu>();
    case Activation::silu: return body.template operator()<Activation::silu>();
    case Activation::gelu: return body.template operator()<Activation::gelu>();
    case Activation::gelu_tanh: return body.template operator()<Activation::gelu_tanh>();
    case Activation::sigmoid: return body.template operator()<Activation::sigmoid>();
    case Activation::tanh: return body.template operator()<Activation::tanh>();
    case Activation::softplus: return body.template operator()<Activation::softplus>();
    case Activation::relu2: return body.template operator()<Activation::relu2>();
    case Activation::elu1: return body.template operator()<Activation::elu1>();
    case Activation::exp: return body.template operator()<Activation::exp>();
    case Activation::softcap: return body.template operator()<Activation::softcap>();
  }
}
template <class Body>
LINNET_INLINE void by_gate(GluActivation act, const Body& body) {
  switch (act) {
    case GluActivation::silu: return body.template operator()<Activation::silu>();
    case GluActivation::gelu: return body.template operator()<Activation::gelu>();
    case GluActivation::gelu_tanh: return body.template operator()<Activation::gelu_tanh>();
    case GluActivation::sigmoid: return body.template operator()<Activation::sigmoid>();
    case GluActivation::relu: return body.template operator()<Activation::relu>();
  }
}

}  // namespace linnet::LINNET_ISA
