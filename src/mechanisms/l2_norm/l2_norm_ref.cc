// The plain double-precision loop of l2_norm: its specification. A row of zeros with eps = 0 stays zero.
#include <cmath>

#include "core/element.h"
#include "l2_norm.h"

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

double reciprocal(const L2NormArgs& args, int64_t b, int64_t t, int64_t h) {
  double squares = args.eps;
  for (int64_t c = 0; c < args.x.size[3]; ++c) squares += element(args.x, b, t, h, c) * element(args.x, b, t, h, c);
  return squares == 0 ? 0 : 1 / std::sqrt(squares);
}

}  // namespace

void l2_norm_forward(const L2NormArgs& args, const L2NormOut& out, const Launch&) {
  each_row(args.x, [&](int64_t b, int64_t t, int64_t h) {
    const double r = reciprocal(args, b, t, h);
    for (int64_t c = 0; c < args.x.size[3]; ++c) set_element(out.out, r * element(args.x, b, t, h, c), b, t, h, c);
  });
}

// dx = r dout - r^3 (x . dout) x
void l2_norm_backward(const L2NormArgs& args, const L2NormOut&, const L2NormGrads& grads, const Launch&) {
  if (!grads.dx.given()) return;
  each_row(args.x, [&](int64_t b, int64_t t, int64_t h) {
    const double r = reciprocal(args, b, t, h);
    double dot = 0;
    for (int64_t c = 0; grads.dout.given() && c < args.x.size[3]; ++c) {
      dot += element(args.x, b, t, h, c) * element(grads.dout, b, t, h, c);
    }
    for (int64_t c = 0; c < args.x.size[3]; ++c) {
      const double d = grads.dout.given() ? element(grads.dout, b, t, h, c) : 0;
      set_element(grads.dx, r * d - r * r * r * dot * element(args.x, b, t, h, c), b, t, h, c);
    }
  });
}

int64_t l2_norm_workspace(const L2NormArgs&, Pass, int) { return 0; }

}  // namespace linnet::ref
