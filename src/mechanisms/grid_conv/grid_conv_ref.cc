// The plain double-precision loop of grid_conv: its specification.
#include "core/element.h"
#include "grid_conv.h"

namespace linnet::ref {
namespace {

// Calls body(t, from, i, j) for every token t of the grid and every tap that lies in it.
template <class Body>
void each_tap(const GridConvArgs& args, const Body& body) {
  const int64_t W = args.weight.size[1];
  for (int64_t y = 0; y < args.height; ++y) {
    for (int64_t x = 0; x < args.width; ++x) {
      for (int64_t i = 0; i < W; ++i) {
        for (int64_t j = 0; j < W; ++j) {
          const int64_t v = y + i - W / 2, u = x + j - W / 2;
          if (v < 0 || v >= args.height || u < 0 || u >= args.width) continue;
          body(y * args.width + x, v * args.width + u, i, j);
        }
      }
    }
  }
}

}  // namespace

void grid_conv_forward(const GridConvArgs& args, const GridConvOut& out, const Launch& launch) {
  const int64_t T = args.x.size[1];
  double* sums = reinterpret_cast<double*>(launch.workspace);
  for (int64_t b = 0; b < args.x.size[0]; ++b) {
    for (int64_t c = 0; c < args.x.size[2]; ++c) {
      for (int64_t t = 0; t < T; ++t) sums[t] = args.bias.given() ? element(args.bias, c) : 0;
      each_tap(args, [&](int64_t t, int64_t from, int64_t i, int64_t j) {
        sums[t] += element(args.weight, c, i, j) * element(args.x, b, from, c);
      });
      for (int64_t t = 0; t < T; ++t) set_element(out.out, sums[t], b, t, c);
    }
  }
}

void grid_conv_backward(const GridConvArgs& args, const GridConvOut&, const GridConvGrads& grads, const Launch& launch) {
  const int64_t B = args.x.size[0], T = args.x.size[1], W = args.weight.size[1];
  double *dx = reinterpret_cast<double*>(launch.workspace), *dweight = dx + B * T;
  for (int64_t c = 0; c < args.x.size[2]; ++c) {
    double dbias = 0;
    for (int64_t i = 0; i < B * T; ++i) dx[i] = 0;
    for (int64_t i = 0; i < W * W; ++i) dweight[i] = 0;
    for (int64_t b = 0; grads.dout.given() && b < B; ++b) {
      for (int64_t t = 0; t < T; ++t) dbias += element(grads.dout, b, t, c);
      each_tap(args, [&](int64_t t, int64_t from, int64_t i, int64_t j) {
        const double d = element(grads.dout, b, t, c);
        dx[b * T + from] += d * element(args.weight, c, i, j);
        dweight[i * W + j] += d * element(args.x, b, from, c);
      });
    }
    for (int64_t i = 0; grads.dx.given() && i < B * T; ++i) set_element(grads.dx, dx[i], i / T, i % T, c);
    for (int64_t i = 0; grads.dweight.given() && i < W * W; ++i) set_element(grads.dweight, dweight[i], c, i / W, i % W);
    if (grads.dbias.given()) set_element(grads.dbias, dbias, c);
  }
}

int64_t grid_conv_workspace(const GridConvArgs& args, Pass pass, int) {
  Arena arena;
  arena.take<double>(pass == Pass::forward ? args.x.size[1]
                                           : args.x.size[0] * args.x.size[1] + args.weight.size[1] * args.weight.size[1]);
  return arena.used();
}

}  // namespace linnet::ref
