// The plain double-precision loop of layer_norm: its specification. A constant row with eps = 0 becomes zero.
#include <cmath>
#include <vector>

#include "core/element.h"
#include "core/heads.h"
#include "layer_norm.h"

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

double weight_of(const LayerNormArgs& args, int64_t c) { return args.weight.given() ? element(args.weight, c) : 1; }

// The row without its mean; returns 1 / sqrt(variance + eps).
double center(const LayerNormArgs& args, const View& x, int64_t b, int64_t t, int64_t h, std::vector<double>* row) {
  const double D = static_cast<double>(x.size[3]);
  row->resize(static_cast<size_t>(x.size[3]));
  double mean = 0, variance = 0;
  for (int64_t c = 0; c < x.size[3]; ++c) mean += element(x, b, t, h, c) / D;
  for (int64_t c = 0; c < x.size[3]; ++c) {
    const double centered = (*row)[static_cast<size_t>(c)] = element(x, b, t, h, c) - mean;
    variance += centered * centered / D;
  }
  return variance + args.eps == 0 ? 0 : 1 / std::sqrt(variance + args.eps);
}

}  // namespace

void layer_norm_forward(const LayerNormArgs& args, const LayerNormOut& out, const Launch&) {
  const View x = with_heads(args.x), y = with_heads(out.out);
  std::vector<double> row;
  each_row(x, [&](int64_t b, int64_t t, int64_t h) {
    const double r = center(args, x, b, t, h, &row);
    for (int64_t c = 0; c < x.size[3]; ++c) {
      const double bias = args.bias.given() ? element(args.bias, c) : 0;
      set_element(y, r * row[static_cast<size_t>(c)] * weight_of(args, c) + bias, b, t, h, c);
    }
  });
}

// With n = r (x - mean), d = dout weight:  dx = r (d - mean d - n mean(n d)),  dweight = sum dout n,  dbias = sum dout
void layer_norm_backward(const LayerNormArgs& args, const LayerNormOut&, const LayerNormGrads& grads, const Launch&) {
  const View x = with_heads(args.x), dout = with_heads(grads.dout), dx = with_heads(grads.dx);
  const int64_t D = x.size[3];
  std::vector<double> row, dweight(static_cast<size_t>(D)), dbias(static_cast<size_t>(D));
  each_row(x, [&](int64_t b, int64_t t, int64_t h) {
    const double r = center(args, x, b, t, h, &row);
    double mean = 0, along = 0;
    for (int64_t c = 0; dout.given() && c < D; ++c) {
      const size_t at = static_cast<size_t>(c);
      const double d = element(dout, b, t, h, c), n = r * row[at];
      mean += d * weight_of(args, c) / static_cast<double>(D);
      along += d * weight_of(args, c) * n / static_cast<double>(D);
      dweight[at] += d * n;
      dbias[at] += d;
    }
    for (int64_t c = 0; dx.given() && c < D; ++c) {
      const double d = dout.given() ? element(dout, b, t, h, c) * weight_of(args, c) : 0;
      set_element(dx, r * (d - mean - r * row[static_cast<size_t>(c)] * along), b, t, h, c);
    }
  });
  for (int64_t c = 0; grads.dweight.given() && c < D; ++c) set_element(grads.dweight, dweight[static_cast<size_t>(c)], c);
  for (int64_t c = 0; grads.dbias.given() && c < D; ++c) set_element(grads.dbias, dbias[static_cast<size_t>(c)], c);
}

int64_t layer_norm_workspace(const LayerNormArgs&, Pass, int) { return 0; }

}  // namespace linnet::ref
