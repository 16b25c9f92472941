// What the kernels of fem_read share, for one instruction set: rows of one head as doubles or T, its channels, its gates.
#pragma once

#include "fem.h"
#include "mechanisms/softmax/softmax_problem.h"

namespace linnet::LINNET_ISA {

LINNET_INLINE int64_t fem_row(const View& x, int64_t b, int64_t t, int64_t h) {
  return b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
}
LINNET_INLINE bool fem_present(const View& mask, int64_t b, int64_t t) {
  return !mask.given() || *mask.at<const uint8_t>(b, t) != 0;
}

// Rows of any type as T. Elements behind the row, up to a whole vector, become zeros.
template <class T>
void fem_load(const View& x, int64_t offset, int64_t width, T* to) {
  for (int64_t c = width; c < round_up<T>(width); ++c) to[c] = 0;
  if (x.dtype == Dtype::f64) {
    const double* const p = static_cast<const double*>(x.data) + offset;
    for (int64_t c = 0; c < width; ++c) to[c] = static_cast<T>(p[c]);
    return;
  }
  with_type<float>(x, offset, [&](const auto* p) {
    for (int64_t c = 0; c < width; ++c) to[c] = static_cast<T>(to_f32(p[c]));
  });
}
template <class T>
void fem_store(const View& x, int64_t offset, int64_t width, const T* from) {
  if (!x.given()) return;
  if (x.dtype == Dtype::f64) {
    double* const p = static_cast<double*>(x.data) + offset;
    for (int64_t c = 0; c < width; ++c) p[c] = static_cast<double>(from[c]);
    return;
  }
  with_type<float>(x, offset, [&]<class S>(S* p) {
    for (int64_t c = 0; c < width; ++c) p[c] = round_to<S>(static_cast<double>(from[c]));
  });
}

// The gates of one row, whose mean and free energy are known. [width] each; lam, g, d: scratch.
template <class T>
struct FemGates {
  T *lam, *g, *d;
  LINNET_INLINE FemGates(Arena& arena, int64_t width) {
    const int64_t ld = round_up<T>(width);
    lam = arena.take<T>(ld);
    g = arena.take<T>(ld);
    d = arena.take<T>(ld);
  }
  void load(const FemReadArgs& args, int64_t b, int64_t t, int64_t h, int64_t width) const {
    fem_load(args.lam, fem_row(args.lam, b, t, h), width, lam);
    if (args.g.given()) fem_load(args.g, fem_row(args.g, b, t, h), width, g);
    for (int64_t c = 0; !args.g.given() && c < width; ++c) g[c] = 1;
  }
  void forward(const FemReadArgs& args, const FemReadOut& out, int64_t b, int64_t t, int64_t h, int64_t width, const T* mu,
               const T* free) const {
    load(args, b, t, h, width);
    for (int64_t c = 0; c < width; ++c) d[c] = g[c] * (mu[c] + lam[c] * (free[c] - mu[c]));
    fem_store(out.out, fem_row(out.out, b, t, h), width, d);
    fem_store(out.mu, fem_row(out.mu, b, t, h), width, mu);
    fem_store(out.free, fem_row(out.free, b, t, h), width, free);
  }
  // dF alone.
  void slopes(const FemReadArgs& args, const FemReadGrads& grads, int64_t b, int64_t t, int64_t h, int64_t width,
              T* dfree) const {
    load(args, b, t, h, width);
    if (grads.dout.given()) fem_load(grads.dout, fem_row(grads.dout, b, t, h), width, d);
    for (int64_t c = 0; c < width; ++c) dfree[c] = grads.dout.given() ? lam[c] * g[c] * d[c] : T(0);
  }
  // dmu and dF; stores dlam and dg.
  void backward(const FemReadArgs& args, const FemReadGrads& grads, int64_t b, int64_t t, int64_t h, int64_t width, const T* mu,
                const T* free, T* dmu, T* dfree) const {
    load(args, b, t, h, width);
    if (grads.dout.given()) fem_load(grads.dout, fem_row(grads.dout, b, t, h), width, d);
    for (int64_t c = 0; !grads.dout.given() && c < width; ++c) d[c] = 0;
    for (int64_t c = 0; c < width; ++c) {
      const T gd = g[c] * d[c];
      dmu[c] = (1 - lam[c]) * gd;
      dfree[c] = lam[c] * gd;
      g[c] = d[c] * (mu[c] + lam[c] * (free[c] - mu[c]));
      lam[c] = gd * (free[c] - mu[c]);
    }
    if (grads.dlam.given()) fem_store(grads.dlam, fem_row(grads.dlam, b, t, h), width, lam);
    if (grads.dg.given()) fem_store(grads.dg, fem_row(grads.dg, b, t, h), width, g);
  }
};

// The scans of priors linear, gated, aft and ssm (fem_scan_cpu.cc).
void fem_scan_forward(const FemReadArgs& args, const FemReadOut& out, const Launch& launch);
void fem_scan_backward(const FemReadArgs& args, const FemReadGrads& grads, const Launch& launch);
int64_t fem_scan_workspace(const FemReadArgs& args, Pass pass, int workers);

}  // namespace linnet::LINNET_ISA
