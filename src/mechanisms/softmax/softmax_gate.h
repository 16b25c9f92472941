// Elements of a view in their own type, and the gate that a read may pass through before it is stored (mechanism `gated`).
#pragma once

#include "core/half.h"
#include "mechanisms/gated/gated.h"
#include "simd/math.h"

namespace linnet::LINNET_ISA {

// Calls f(pointer) with the view's data as its own element type. T = double serves f64, T = float the others.
template <class T, class F>
LINNET_INLINE void with_type(const View& view, int64_t offset, const F& f) {
  if constexpr (sizeof(T) == 8) {
    f(static_cast<double*>(view.data) + offset);
  } else {
    switch (view.dtype) {
      case Dtype::bf16: return f(static_cast<Bf16*>(view.data) + offset);
      case Dtype::f16: return f(static_cast<F16*>(view.data) + offset);
      default: return f(static_cast<float*>(view.data) + offset);
    }
  }
}
template <class T>
LINNET_INLINE T element_at(const View& view, int64_t offset) {
  T value = 0;
  with_type<T>(view, offset, [&](auto* p) {
    if constexpr (sizeof(T) == 8) {
      value = *p;
    } else {
      value = to_f32(*p);
    }
  });
  return value;
}
template <class T>
LINNET_INLINE void set_element(const View& view, int64_t offset, T value) {
  with_type<T>(view, offset, [&]<class S>(S* p) { *p = round_to<S>(value); });
}

// act(g), and its derivative. SiLU and its slope are guarded against inf * 0.
template <class V>
LINNET_INLINE V gate_value(GateAct act, V g) {
  using T = decltype(sum(g));
  using X = Vec<T>;
  switch (act) {
    case GateAct::sigmoid: return sigmoid(g);
    case GateAct::ns_sigmoid: return fma(X::broadcast(T(0.5)), sigmoid(g), X::broadcast(T(0.5)));
    case GateAct::silu: return select(eq(g, X::broadcast(static_cast<T>(-__builtin_inf()))), X::zero(), g * sigmoid(g));
    case GateAct::identity: break;
  }
  return g;
}
template <class V>
LINNET_INLINE V gate_slope(GateAct act, V g) {
  using T = decltype(sum(g));
  using X = Vec<T>;
  const V one = X::broadcast(T(1));
  switch (act) {
    case GateAct::sigmoid: return sigmoid(g) * sigmoid(-g);
    case GateAct::ns_sigmoid: return X::broadcast(T(0.5)) * sigmoid(g) * sigmoid(-g);
    case GateAct::silu: {
      const V slope = sigmoid(g) * fma(g, sigmoid(-g), one), infinity = X::broadcast(static_cast<T>(__builtin_inf()));
      return select(eq(g, infinity), one, select(eq(g, -infinity), X::zero(), slope));
    }
    case GateAct::identity: break;
  }
  return one;
}

// A gate on rows: g [B, T, H, V] or, one logit per head, [B, T, H].
struct Gate {
  View g;
  GateAct act = GateAct::sigmoid;
  bool add = false;
};

// to = y gated by the logits at `offset`.
template <class T>
void gate_row(const Gate& gate, int64_t offset, int width, const T* y, T* to) {
  using X = Vec<T>;
  using V = typename X::V;
  const auto apply = [&](V x, V a) { return gate.add ? x + a : x * a; };
  if (gate.g.rank == 3) {
    const V a = gate_value(gate.act, X::broadcast(element_at<T>(gate.g, offset)));
    for (int c = 0; c < width; c += X::W) X::store(to + c, apply(X::load(y + c), a));
    return;
  }
  with_type<T>(gate.g, offset, [&](const auto* g) {
    int c = 0;
    for (; c + X::W <= width; c += X::W) X::store(to + c, apply(X::load(y + c), gate_value(gate.act, X::load(g + c))));
    if (c < width) X::store(to + c, apply(X::load(y + c), gate_value(gate.act, X::load(g + c, width - c))));
  });
}

}  // namespace linnet::LINNET_ISA
