// The plain double-precision loops of activation, glu and add: their specification.
#include <cmath>

#include "activation.h"
#include "activation_kinds.h"
#include "core/element.h"
#include "core/heads.h"

namespace linnet::ref {
namespace {

double sigmoid(double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }

struct Value {
  double y, slope;
};
Value act(Activation kind, double x, double cap) {
  constexpr double kRoot2 = 1.41421356237309504880, kRoot2Pi = 2.50662827463100050242, kRoot2OverPi = 0.79788456080286535588;
  const double s = sigmoid(x);
  switch (kind) {
    case Activation::relu: return {x > 0 ? x : 0, x > 0 ? 1.0 : 0.0};
    case Activation::silu: return {x * s, s * (1 + x * (1 - s))};
    case Activation::gelu: {
      const double phi = 0.5 * std::erfc(-x / kRoot2);
      return {x * phi, phi + x * std::exp(-0.5 * x * x) / kRoot2Pi};
    }
    case Activation::gelu_tanh: {  // (1 + tanh u) / 2 = sigmoid(2 u)
      const double u = kRoot2OverPi * (x + 0.044715 * x * x * x), g = sigmoid(2 * u);
      return {x * g, g + x * g * (1 - g) * 2 * kRoot2OverPi * (1 + 3 * 0.044715 * x * x)};
    }
    case Activation::sigmoid: return {s, s * (1 - s)};
    case Activation::tanh: return {std::tanh(x), 4 * sigmoid(2 * x) * sigmoid(-2 * x)};
    case Activation::softplus: return {std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x))), s};
    case Activation::relu2: return {x > 0 ? x * x : 0, x > 0 ? 2 * x : 0};
    case Activation::elu1: return {x > 0 ? x + 1 : std::exp(x), x > 0 ? 1 : std::exp(x)};
    case Activation::exp: return {std::exp(x), std::exp(x)};
    case Activation::softcap: {
      const double z = x / cap;
      return {cap * std::tanh(z), 4 * sigmoid(2 * z) * sigmoid(-2 * z)};
    }
  }
  return {};
}

template <class Body>
void each_element(const View& x, const Body& body) {
  for (int64_t b = 0; b < x.size[0]; ++b) {
    for (int64_t t = 0; t < x.size[1]; ++t) {
      for (int64_t h = 0; h < x.size[2]; ++h) {
        for (int64_t c = 0; c < x.size[3]; ++c) body(b, t, h, c);
      }
    }
  }
}
void set(const View& view, double x, int64_t b, int64_t t, int64_t h, int64_t c) {
  if (view.given()) set_element(view, x, b, t, h, c);
}
double get(const View& view, int64_t b, int64_t t, int64_t h, int64_t c) {
  return view.given() ? element(view, b, t, h, c) : 0;
}

}  // namespace

void activation_forward(const ActivationArgs& args, const ActivationOut& out, const Launch&) {
  const View x = with_heads(args.x), y = with_heads(out.out);
  each_element(x, [&](auto... at) { set_element(y, act(args.act, element(x, at...), args.cap).y, at...); });
}
void activation_backward(const ActivationArgs& args, const ActivationOut&, const ActivationGrads& grads, const Launch&) {
  const View x = with_heads(args.x), d = with_heads(grads.dout), dx = with_heads(grads.dx);
  each_element(x, [&](auto... at) { set(dx, get(d, at...) * act(args.act, element(x, at...), args.cap).slope, at...); });
}
int64_t activation_workspace(const ActivationArgs&, Pass, int) { return 0; }

void glu_forward(const GluArgs& args, const ActivationOut& out, const Launch&) {
  const View gate = with_heads(args.gate), up = with_heads(args.up), y = with_heads(out.out);
  each_element(gate, [&](auto... at) {
    set_element(y, act(gate_activation(args.act), element(gate, at...), 1).y * element(up, at...), at...);
  });
}
void glu_backward(const GluArgs& args, const ActivationOut&, const GluGrads& grads, const Launch&) {
  const View gate = with_heads(args.gate), up = with_heads(args.up), d = with_heads(grads.dout);
  const View dgate = with_heads(grads.dgate), dup = with_heads(grads.dup);
  each_element(gate, [&](auto... at) {
    const Value value = act(gate_activation(args.act), element(gate, at...), 1);
    set(dgate, get(d, at...) * element(up, at...) * value.slope, at...);
    set(dup, get(d, at...) * value.y, at...);
  });
}
int64_t glu_workspace(const GluArgs&, Pass, int) { return 0; }

void add_forward(const AddArgs& args, const ActivationOut& out, const Launch&) {
  const View x = with_heads(args.x), y = with_heads(args.y), z = with_heads(out.out);
  each_element(x, [&](auto... at) { set_element(z, element(x, at...) + args.scale * element(y, at...), at...); });
}
void add_backward(const AddArgs& args, const ActivationOut&, const AddGrads& grads, const Launch&) {
  const View x = with_heads(args.x), d = with_heads(grads.dout), dx = with_heads(grads.dx), dy = with_heads(grads.dy);
  each_element(x, [&](auto... at) {
    set(dx, get(d, at...), at...);
    set(dy, args.scale * get(d, at...), at...);
  });
}
int64_t add_workspace(const AddArgs&, Pass, int) { return 0; }

}  // namespace linnet::ref
