// The plain double-precision loop of rms_norm_gated: its specification. A row of zeros with eps = 0 stays zero.
#include <cmath>

#include "core/element.h"
#include "rms_norm_gated.h"

namespace linnet::ref {
namespace {

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }

template <class Body>
void each_row(const View& x, const Body& body) {
  for (int64_t b = 0; b < x.size[0]; ++b) {
    for (int64_t t = 0; t < x.size[1]; ++t) {
      for (int64_t h = 0; h < x.size[2]; ++h) body(b, t, h);
    }
  }
}

struct Row {
  const RmsNormGatedArgs& args;
  int64_t b, t, h;

  double x(int64_t c) const { return element(args.x, b, t, h, c); }
  double weight(int64_t c) const { return args.weight.given() ? element(args.weight, h, c) : 1; }
  double gate(int64_t c) const {
    if (!args.z.given()) return 1;
    const double z = element(args.z, b, t, h, c);
    return args.gate == NormGate::silu ? z * sigmoid(z) : sigmoid(z);
  }
  double gate_slope(int64_t c) const {
    const double z = element(args.z, b, t, h, c), s = sigmoid(z);
    return args.gate == NormGate::silu ? s * (1 + z * (1 - s)) : s * (1 - s);
  }
  double before(int64_t c) const { return args.norm_before_gate ? x(c) : x(c) * gate(c); }  // what is normed
  double after(int64_t c) const { return args.norm_before_gate ? gate(c) : 1; }             // what multiplies the normed row
  double reciprocal() const {
    double squares = 0;
    for (int64_t c = 0; c < args.x.size[3]; ++c) squares += before(c) * before(c);
    const double mean = squares / static_cast<double>(args.x.size[3]) + args.eps;
    return mean == 0 ? 0 : 1 / std::sqrt(mean);
  }
};

}  // namespace

void rms_norm_gated_forward(const RmsNormGatedArgs& args, const RmsNormGatedOut& out, const Launch&) {
  each_row(args.x, [&](int64_t b, int64_t t, int64_t h) {
    const Row row{args, b, t, h};
    const double r = row.reciprocal();
    for (int64_t c = 0; c < args.x.size[3]; ++c) {
      set_element(out.out, row.before(c) * r * row.weight(c) * row.after(c), b, t, h, c);
    }
  });
}

void rms_norm_gated_backward(const RmsNormGatedArgs& args, const RmsNormGatedOut&, const RmsNormGatedGrads& grads,
                             const Launch& launch) {
  const int64_t H = args.x.size[2], V = args.x.size[3];
  Arena arena(launch.workspace);
  double* dweight = arena.take<double>(H * V);
  for (int64_t i = 0; i < H * V; ++i) dweight[i] = 0;
  each_row(args.x, [&](int64_t b, int64_t t, int64_t h) {
    const Row row{args, b, t, h};
    const double r = row.reciprocal();
    const auto dout = [&](int64_t c) { return grads.dout.given() ? element(grads.dout, b, t, h, c) : 0; };
    double dot = 0;
    for (int64_t c = 0; c < V; ++c) {
      dweight[h * V + c] += dout(c) * row.before(c) * r * row.after(c);
      dot += dout(c) * row.weight(c) * row.after(c) * row.before(c);
    }
    for (int64_t c = 0; c < V; ++c) {
      const double u = row.before(c), dn = dout(c) * row.weight(c) * row.after(c);
      const double du = r * dn - r * r * r * dot / static_cast<double>(V) * u;
      if (grads.dx.given()) set_element(grads.dx, args.norm_before_gate ? du : du * row.gate(c), b, t, h, c);
      if (!grads.dz.given()) continue;
      const double dgate = args.norm_before_gate ? dout(c) * u * r * row.weight(c) : du * row.x(c);
      set_element(grads.dz, dgate * row.gate_slope(c), b, t, h, c);
    }
  });
  if (!grads.dweight.given()) return;
  for (int64_t i = 0; i < grads.dweight.size[0]; ++i) {
    for (int64_t j = 0; j < grads.dweight.size[1]; ++j) {
      double sum = 0;  // over what was broadcast
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t c = 0; c < V; ++c) {
          if ((h == i || grads.dweight.size[0] == 1) && (c == j || grads.dweight.size[1] == 1)) sum += dweight[h * V + c];
        }
      }
      set_element(grads.dweight, sum, i, j);
    }
  }
}

int64_t rms_norm_gated_workspace(const RmsNormGatedArgs& args, Pass pass, int) {
  Arena arena;
  if (pass == Pass::backward) arena.take<double>(args.x.size[2] * args.x.size[3]);
  return arena.used();
}

}  // namespace linnet::ref
