// The plain double-precision loop of rms_norm: its specification. A row of zeros with eps = 0 stays zero.
#include <cmath>
#include <vector>

#include "core/element.h"
#include "core/heads.h"
#include "rms_norm.h"

namespace linnet::ref {
namespace {

template <class Body>
void each_row(const View& x, const Body& body) {
  for (int64_t b = 0; b < x.size[0]; ++b) {
    for (int64_t t = 0; t < x.size[1]; ++t) {
      for (int64_t h = 0; h < x.size[2]; ++h) body(b, t, h);
    }
  }
}

double weight_of(const RmsNormArgs& args, int64_t c) {
  return args.weight.given() ? element(args.weight, c) + (args.plus_one ? 1 : 0) : 1;
}
double reciprocal(const RmsNormArgs& args, const View& x, int64_t b, int64_t t, int64_t h) {
  double squares = 0;
  for (int64_t c = 0; c < x.size[3]; ++c) squares += element(x, b, t, h, c) * element(x, b, t, h, c);
  const double mean = squares / static_cast<double>(x.size[3]) + args.eps;
  return mean == 0 ? 0 : 1 / std::sqrt(mean);
}

}  // namespace

void rms_norm_forward(const RmsNormArgs& args, const RmsNormOut& out, const Launch&) {
  const View x = with_heads(args.x), y = with_heads(out.out);
  each_row(x, [&](int64_t b, int64_t t, int64_t h) {
    const double r = reciprocal(args, x, b, t, h);
    for (int64_t c = 0; c < x.size[3]; ++c) set_element(y, r * element(x, b, t, h, c) * weight_of(args, c), b, t, h, c);
  });
}

// d = dout weight:  dx = r d - r^3 mean(x d) x,   dweight = sum over rows of dout r x
void rms_norm_backward(const RmsNormArgs& args, const RmsNormOut&, const RmsNormGrads& grads, const Launch&) {
  const View x = with_heads(args.x), dout = with_heads(grads.dout), dx = with_heads(grads.dx);
  const int64_t D = x.size[3];
  std::vector<double> dweight(static_cast<size_t>(D));
  each_row(x, [&](int64_t b, int64_t t, int64_t h) {
    const double r = reciprocal(args, x, b, t, h);
    double dot = 0;
    for (int64_t c = 0; dout.given() && c < D; ++c) {
      dot += element(x, b, t, h, c) * element(dout, b, t, h, c) * weight_of(args, c);
      dweight[static_cast<size_t>(c)] += element(dout, b, t, h, c) * r * element(x, b, t, h, c);
    }
    for (int64_t c = 0; dx.given() && c < D; ++c) {
      const double d = dout.given() ? element(dout, b, t, h, c) * weight_of(args, c) : 0;
      set_element(dx, r * d - r * r * r * dot / static_cast<double>(D) * element(x, b, t, h, c), b, t, h, c);
    }
  });
  for (int64_t c = 0; grads.dweight.given() && c < D; ++c) set_element(grads.dweight, dweight[static_cast<size_t>(c)], c);
}

int64_t rms_norm_workspace(const RmsNormArgs&, Pass, int) { return 0; }

}  // namespace linnet::ref
