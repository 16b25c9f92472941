// What the walks of fem_read over a head's tokens share (fem_scan_linear.h, fem_scan_aft.h, fem_scan_ssm.h): channels in the
// lanes, all in double, so that sums that only grow lose nothing and exp(beta v) needs one fixed shift M per channel
// (fem_shift).
//
// Every walk carries three sums over the keys, those of its weights times u = [vc | exp(beta vc - M) | 1]: the mean mu, the
// free energy F and the denominator follow from them.
#pragma once

#include "fem_rows.h"
#include "simd/gemm.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {

struct FemSizes {
  int64_t B, T, H, V, K, R;
  int64_t ldv, ldk;  // a row of V or K channels in whole vectors
  int64_t ldj;       // u: [vc | exp | 1]
  explicit FemSizes(const FemReadArgs& args) {
    B = args.v.size[0];
    T = args.v.size[1];
    H = args.v.size[2];
    V = args.v.size[3];
    K = args.q.given() ? args.q.size[3] : 0;
    R = args.A.given() ? args.A.size[2] : 0;
    ldv = round_up<double>(V);
    ldk = round_up<double>(K);
    ldj = 2 * ldv + Vec<double>::W;
  }
};

// Rows of one worker: one for each channel, the last two for each column of u.
struct FemChannels {
  double *beta, *limit, *shift;  // beta, the bound on |v|, M
  double *v, *vc;                // a value as it is and within its bound
  double *mu, *free, *dmu, *dfree, *dbeta;
  double *u, *row, *g;
  FemGates<double> gates;
  FemChannels(Arena& arena, const FemSizes& s) : gates(arena, s.V) {
    for (double** p : {&beta, &limit, &shift, &v, &vc, &mu, &free, &dmu, &dfree, &dbeta}) *p = arena.take<double>(s.ldv);
    for (double** p : {&u, &row, &g}) *p = arena.take<double>(s.ldj);
  }
};

// One head: its values, and what becomes of them behind the three sums.
struct FemHead {
  using X = Vec<double>;
  using Vector = X::V;
  static constexpr double kSmallest = 0x1p-1022;

  const FemReadArgs& args;
  const FemSizes& s;
  const FemChannels& m;
  int64_t b, h;

  LINNET_INLINE static Vector at(const double* p) { return X::load(p); }
  LINNET_INLINE static Vector all(double x) { return X::broadcast(x); }
  static double number(const View& x, int64_t offset) { return load_f64(x.data, x.dtype, offset); }

  bool present(int64_t t) const { return fem_present(args.key_mask, b, t); }

  // beta, the bound on |v|, and M: fem_shift of the values, or the largest of them and of `before`, to which a memory is kept.
  void channels(const double* before = nullptr) const {
    for (int64_t j = 0; j < s.ldv; ++j) {
      m.beta[j] = j < s.V ? number(args.beta, h * args.beta.stride[0] + j * args.beta.stride[1]) : 1;
      m.limit[j] = fem_cap(args.cap) / m.beta[j];
      m.shift[j] = before == nullptr ? -kInfinity<double> : before[j];
      m.row[j] = kInfinity<double>;  // the smallest
      m.dbeta[j] = 0;
    }
    for (int64_t t = 0; t < s.T; ++t) {
      if (!present(t)) continue;
      values(t);
      for (int64_t c = 0; c < s.ldv; c += X::W) {  // an infinite value leaves the others their shift
        const Vector e = at(m.beta + c) * at(m.vc + c), high = at(m.shift + c), least = at(m.row + c);
        X::store(m.shift + c, select(lt(e, all(kInfinity<double>)), max(e, high), high));
        X::store(m.row + c, select(lt(all(-kInfinity<double>), e), min(e, least), least));
      }
    }
    for (int64_t j = 0; j < s.ldv; ++j) {
      if (m.shift[j] == -kInfinity<double>) m.shift[j] = 0;
      if (before == nullptr) m.shift[j] = fem_shift(m.shift[j], m.row[j]);
    }
  }
  void values(int64_t t) const {
    fem_load(args.v, fem_row(args.v, b, t, h), s.V, m.v);
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector limit = at(m.limit + c);
      X::store(m.vc + c, max(-limit, min(limit, at(m.v + c))));
    }
  }
  // u = [vc | exp(beta vc - M) | 1] of a key that is there, zeros otherwise.
  bool inputs(int64_t t) const {
    const bool there = present(t);
    if (there) values(t);
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const auto inside = X::prefix(static_cast<int>(there ? s.V - c : 0));
      X::store(m.u + c, select(inside, at(m.vc + c), X::zero()));
      X::store(m.u + s.ldv + c, select(inside, exp(at(m.beta + c) * at(m.vc + c) - at(m.shift + c)), X::zero()));
    }
    X::store(m.u + 2 * s.ldv, select(X::prefix(1), all(there ? 1 : 0), X::zero()));
    return there;
  }
  // F from z relative to M.
  Vector energy(int64_t c, Vector z) const { return (at(m.shift + c) + log(max(z, all(kSmallest)))) / at(m.beta + c); }

  double denominator(double sum, double* slope) const {
    const FemDenominator rule = fem_denominator(args.prior, args.denominator);
    const bool bound = rule == FemDenominator::max && sum < 1e-6;
    *slope = bound ? 0 : 1;
    return bound ? 1e-6 : rule == FemDenominator::plus ? sum + 1e-5 : sum;
  }
  // dv of key t from the gradients of vc, `plain` through the mean and `tilted` through the free energy; its part of dbeta.
  void finish_value(int64_t t, const double* plain, const double* tilted, const View& dv) const {
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector whole = at(plain + c) + at(tilted + c), clipped = at(m.vc + c), beta = at(m.beta + c);
      const auto inside = le(abs(at(m.v + c)), at(m.limit + c));
      const Vector more = at(tilted + c) * clipped - select(inside, X::zero(), whole * clipped);
      X::store(m.dbeta + c, at(m.dbeta + c) + more / beta);
      X::store(m.row + c, select(inside, whole, X::zero()));
    }
    if (dv.given()) fem_store(dv, fem_row(dv, b, t, h), s.V, m.row);
  }
  void no_value(int64_t t, const View& dv) const {
    for (int64_t c = 0; c < s.ldv; ++c) m.row[c] = 0;
    if (dv.given()) fem_store(dv, fem_row(dv, b, t, h), s.V, m.row);
  }
  void lose_free() const {  // dbeta -= dF F / beta
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      X::store(m.dbeta + c, at(m.dbeta + c) - at(m.dfree + c) * at(m.free + c) / at(m.beta + c));
    }
  }
  void clear(double* x, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) x[i] = 0;
  }
  void clear_padding() const {  // the gates fill V channels; the vectors behind them must be harmless
    for (int64_t j = s.V; j < s.ldv; ++j) m.dmu[j] = m.dfree[j] = 0;
  }
};

}  // namespace linnet::LINNET_ISA
