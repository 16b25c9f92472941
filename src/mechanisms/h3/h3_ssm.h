// What the reference and the kernels of H3 share: its sizes, and the diagonal SSM's discretisation and gradient in double. The
// page's formulas; complex gradients are holomorphic, F_x with d/dRe x = 2 Re F_x and d/dIm x = -2 Im F_x.
#pragma once

#include "core/element.h"
#include "h3.h"

namespace linnet {

struct H3Shape {
  int64_t B, T, C, H, P, R, M;
  template <class Args>
  LINNET_INLINE explicit H3Shape(const Args& args)
      : B(args.q.size[0]),
        T(args.q.size[1]),
        C(args.q.size[2]),
        H(args.log_dt.size[0]),
        P(H == 0 ? 0 : C / H),
        R(args.sb.size[1]),
        M(args.imag.size[1]) {}
};

struct Complex {
  double re = 0, im = 0;
};
LINNET_INLINE Complex operator+(Complex x, Complex y) { return {x.re + y.re, x.im + y.im}; }
LINNET_INLINE Complex operator-(Complex x, Complex y) { return {x.re - y.re, x.im - y.im}; }
LINNET_INLINE Complex operator*(Complex x, Complex y) { return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re}; }
LINNET_INLINE Complex operator*(double x, Complex y) { return {x * y.re, x * y.im}; }
LINNET_INLINE Complex operator/(Complex x, Complex y) {
  const double norm = y.re * y.re + y.im * y.im;
  return {(x.re * y.re + x.im * y.im) / norm, (x.im * y.re - x.re * y.im) / norm};
}

// One pair of one head.
struct H3Pair {
  Complex A, b, c;  // continuous
  double dt;
  Complex a, bd;  // discrete
};

// e^z - 1 without cancellation: (e^x - 1) cos y - 2 sin^2(y/2) + i e^x sin y
LINNET_INLINE Complex complex_expm1(Complex z) {
  const double half = __builtin_sin(z.im / 2);
  return {__builtin_expm1(z.re) * __builtin_cos(z.im) - 2 * half * half, __builtin_exp(z.re) * __builtin_sin(z.im)};
}

template <class Args>
LINNET_INLINE H3Pair h3_pair(const Args& args, int64_t h, int64_t m) {
  H3Pair p;
  p.A = {-__builtin_exp(element(args.log_neg_re, h, m)), element(args.imag, h, m)};
  p.b = {element(args.b, h, m, 0), element(args.b, h, m, 1)};
  p.c = {element(args.c, h, m, 0), element(args.c, h, m, 1)};
  p.dt = __builtin_exp(element(args.log_dt, h));
  const Complex one{1, 0}, z = p.dt * p.A;
  if (args.disc == H3Disc::bilinear) {
    const Complex below = one - 0.5 * z;
    p.a = (one + 0.5 * z) / below;
    p.bd = p.dt * p.b / below;
  } else {
    const Complex rise = complex_expm1(z);
    p.a = one + rise;
    p.bd = p.b * rise / p.A;
  }
  return p;
}

// From F_a, F_bd, F_c of a pair to the gradients of its parameters; returns the share of dlog_dt.
LINNET_INLINE double h3_pair_gradient(const H3Pair& p, H3Disc disc, Complex F_a, Complex F_bd, Complex F_c, double* dlog_neg_re,
                                      double* dimag, double* db, double* dc) {
  const Complex one{1, 0}, z = p.dt * p.A;
  Complex F_A, F_b, F_dt;
  if (disc == H3Disc::bilinear) {
    const Complex below = one - 0.5 * z, da_dz = one / (below * below), dbd_dz = 0.5 * p.dt * p.b * da_dz;
    F_A = p.dt * (F_a * da_dz + F_bd * dbd_dz);
    F_b = F_bd * (p.dt * one / below);
    F_dt = F_a * p.A * da_dz + F_bd * (p.A * dbd_dz + p.b / below);
  } else {
    const Complex rise = complex_expm1(z);
    F_A = F_a * (p.dt * p.a) + F_bd * (p.b * (p.dt * p.a * p.A - rise) / (p.A * p.A));
    F_b = F_bd * (rise / p.A);
    F_dt = F_a * p.A * p.a + F_bd * p.b * p.a;
  }
  *dlog_neg_re = p.A.re * 2 * F_A.re;  // dRe A / dlog_neg_re = Re A
  *dimag = -2 * F_A.im;
  db[0] = 2 * F_b.re;
  db[1] = -2 * F_b.im;
  dc[0] = 2 * F_c.re;
  dc[1] = -2 * F_c.im;
  return 2 * p.dt * F_dt.re;
}

}  // namespace linnet
