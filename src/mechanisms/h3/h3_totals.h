// The parameters' gradients of H3: what tasks leave as sums in double, added up over the runs of sequences in order.
#pragma once

#include "h3_chunk.h"

namespace linnet::LINNET_ISA {

inline constexpr int64_t kH3Runs = 16;  // sequences are summed up in at most so many runs

// Sums of one run and one block of heads: F_a, F_bd, F_c [heads, 2 Mp], dd [heads], dsb, dsc [channels, R], dsd [channels].
struct H3Totals {
  const H3Args& args;
  const H3Grads& grads;
  H3Shape shape;
  int64_t heads, Mp, runs, blocks;  // heads: of a block
  double* totals;                   // [runs, blocks, sums]

  LINNET_INLINE int64_t channels() const { return heads * shape.P; }
  LINNET_INLINE int64_t sums() const { return heads * (6 * Mp + 1) + channels() * (2 * shape.R + 1); }
  LINNET_INLINE int64_t elements() const { return runs * blocks * sums(); }

  // dks [channels, R]: gradients of the short filter; dsb, dsc: what the states add, become sums here. sb, sc: [R]
  void put(int64_t run, int64_t block, const double* F_a, const double* F_bd, const double* F_c, const double* dd,
           const double* dks, double* dsb, double* dsc, double* sb, double* sc) const {
    const int64_t R = shape.R, h0 = block * heads, count = (shape.H - h0 < heads ? shape.H - h0 : heads) * shape.P;
    for (int64_t c = 0; c < count; ++c) {  // dsc[i] += sum_{l<=i} dks_l sb[i-l], dsb[m] += sum_l dks_l sc[m+l]
      const int64_t channel = h0 * shape.P + c;
      for (int64_t j = 0; j < R; ++j) {
        sb[j] = element(args.sb, channel, j);
        sc[j] = element(args.sc, channel, j);
      }
      for (int64_t l = 0; l < R; ++l) {
        const double d = dks[c * R + l];
        for (int64_t j = 0; j + l < R; ++j) {
          dsc[c * R + j + l] += d * sb[j];
          dsb[c * R + j] += d * sc[j + l];
        }
      }
    }
    double* to = totals + (run * blocks + block) * sums();
    const auto copy = [&](const double* from, int64_t number) {
      for (int64_t i = 0; i < number; ++i) *to++ = from[i];
    };
    copy(F_a, heads * 2 * Mp);
    copy(F_bd, heads * 2 * Mp);
    copy(F_c, heads * 2 * Mp);
    copy(dd, heads);
    copy(dsb, channels() * R);
    copy(dsc, channels() * R);
    for (int64_t c = 0; c < channels(); ++c) copy(dks + c * R, 1);  // dsd
  }
  void finish(int64_t block) const {
    const int64_t width = 2 * Mp, R = shape.R, h0 = block * heads;
    const auto total = [&](int64_t at) {
      double all = 0;
      for (int64_t run = 0; run < runs; ++run) all += totals[(run * blocks + block) * sums() + at];
      return all;
    };
    for (int64_t h = 0; h < heads && h0 + h < shape.H; ++h) {
      double dlog_dt = 0;
      for (int64_t p = 0; p < shape.M; ++p) {
        const auto F = [&](int64_t which) {
          const int64_t at = (which * heads + h) * width + p;
          return Complex{total(at), total(at + Mp)};
        };
        double dlog_neg_re, dimag, db[2], dc[2];
        dlog_dt += h3_pair_gradient(h3_pair(args, h0 + h, p), args.disc, F(0), F(1), F(2), &dlog_neg_re, &dimag, db, dc);
        if (grads.dlog_neg_re.given()) set_element(grads.dlog_neg_re, dlog_neg_re, h0 + h, p);
        if (grads.dimag.given()) set_element(grads.dimag, dimag, h0 + h, p);
        for (int64_t side = 0; side < 2; ++side) {
          if (grads.db.given()) set_element(grads.db, db[side], h0 + h, p, side);
          if (grads.dc.given()) set_element(grads.dc, dc[side], h0 + h, p, side);
        }
      }
      if (grads.dlog_dt.given()) set_element(grads.dlog_dt, dlog_dt, h0 + h);
      if (grads.dd.given()) set_element(grads.dd, total(3 * heads * width + h), h0 + h);
    }
    const int64_t first = heads * (3 * width + 1);
    for (int64_t c = 0; c < channels() && h0 * shape.P + c < shape.C; ++c) {
      const int64_t channel = h0 * shape.P + c;
      for (int64_t j = 0; j < R; ++j) {
        if (grads.dsb.given()) set_element(grads.dsb, total(first + c * R + j), channel, j);
        if (grads.dsc.given()) set_element(grads.dsc, total(first + (channels() + c) * R + j), channel, j);
      }
      if (grads.dsd.given()) set_element(grads.dsd, total(first + 2 * channels() * R + c), channel);
    }
  }
};

// to += f x y, complex rows of doubles; x of any type.
template <class S>
LINNET_INLINE void add_product(double f, const S* x, const double* y, int64_t Mp, double* to) {
  for (int64_t m = 0; m < Mp; ++m) {
    const double re = static_cast<double>(x[m]), im = static_cast<double>(x[Mp + m]);
    to[m] += f * (re * y[m] - im * y[Mp + m]);
    to[Mp + m] += f * (re * y[Mp + m] + im * y[m]);
  }
}

}  // namespace linnet::LINNET_ISA
