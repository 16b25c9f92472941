// fem_read with the prior aft: sums of exp(k - m) times vc, exp(beta vc - M) and 1 in every channel, m the running maximum of
// k.
//
// Backward: the rows' logarithms of sums are kept, then sums over later rows, each relative to the row where they stand.
#pragma once

#include "fem_scan.h"

namespace linnet::LINNET_ISA {

struct FemAft : FemHead {
  static int64_t state_size(const FemSizes&) { return 0; }

  // Scratch of one worker.
  struct Rows {
    double *q, *k, *gate;  // one row of each
    double* sums;          // [E | S | Z | m] of ldv each
    double* rows;  // backward: of every token log sum exp(k), log sum exp(k + beta vc - M), gate dmu, dF, dmu mu + dF / beta
    Rows(Arena& arena, const FemSizes& s, Pass pass) {
      for (double** p : {&q, &k, &gate}) *p = arena.take<double>(larger(s.ldk, s.ldv));
      sums = arena.take<double>(4 * s.ldv);
      rows = arena.take<double>(pass == Pass::backward ? s.T * 5 * s.ldv : 0);
    }
  };
  const Rows& w;

  void load_gate(int64_t t) const {  // gate = x sqrt(V) / max(|x|, 1e-5), x = softplus(q) + 1e-6; x stays in w.q
    fem_load(args.q, fem_row(args.q, b, t, h), s.V, w.q);
    Vector squares = X::zero();
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector x = select(X::prefix(static_cast<int>(s.V - c)), softplus(at(w.q + c)) + all(1e-6), X::zero());
      X::store(w.q + c, x);
      squares = fma(x, x, squares);
    }
    const double length = __builtin_sqrt(sum(squares)), factor = gate_factor(length);
    for (int64_t c = 0; c < s.ldv; c += X::W) X::store(w.gate + c, at(w.q + c) * all(factor));
  }
  double gate_factor(double length) const { return __builtin_sqrt(static_cast<double>(s.V)) / (length > 1e-5 ? length : 1e-5); }
  void add(int64_t t) const {
    if (!inputs(t)) return;
    fem_load(args.k, fem_row(args.k, b, t, h), s.V, w.k);
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      double *const e = w.sums + c, *const sum_of = e + s.ldv, *const z = sum_of + s.ldv, *const top = z + s.ldv;
      const Vector k = at(w.k + c), m0 = at(top), m1 = max(k, m0), old = exp(m0 - m1), weight = exp(k - m1);
      X::store(top, m1);
      X::store(e, fma(at(e), old, weight));
      X::store(sum_of, fma(at(sum_of), old, weight * at(m.u + c)));
      X::store(z, fma(at(z), old, weight * at(m.u + s.ldv + c)));
    }
  }
  bool mix() const {  // mu and F of the row whose gate is loaded
    const bool empty = w.sums[0] == 0;
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector e = at(w.sums + c), share = at(w.gate + c) / e;
      X::store(m.mu + c, empty ? X::zero() : at(w.sums + s.ldv + c) * share);
      X::store(m.free + c, empty ? X::zero() : energy(c, at(w.sums + 2 * s.ldv + c) * share));
    }
    return !empty;
  }
  void begin() const {
    clear(w.sums, 3 * s.ldv);
    for (int64_t c = 0; c < s.ldv; ++c) w.sums[3 * s.ldv + c] = kLowest<double>;
    for (int64_t t = 0; !args.causal && t < s.T; ++t) add(t);
  }
  void forward(const FemReadOut& out) const {
    begin();
    for (int64_t t = 0; t < s.T; ++t) {
      if (args.causal) add(t);
      load_gate(t);
      mix();
      m.gates.forward(args, out, b, t, h, s.V, m.mu, m.free);
    }
  }
  void backward(const FemReadGrads& grads) const {
    begin();
    for (int64_t t = 0; t < s.T; ++t) {
      if (args.causal) add(t);
      load_gate(t);
      const bool some = mix();
      m.gates.backward(args, grads, b, t, h, s.V, m.mu, m.free, m.dmu, m.dfree);
      clear_padding();
      double* const row = w.rows + t * 5 * s.ldv;
      Vector squares = X::zero(), mixed = X::zero();
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        const Vector dmu = some ? at(m.dmu + c) : X::zero(), dfree = some ? at(m.dfree + c) : X::zero(), x = at(w.q + c);
        const Vector e = fma(dmu, at(m.mu + c), dfree / at(m.beta + c)), top = at(w.sums + 3 * s.ldv + c);
        X::store(row + c, top + log(at(w.sums + c)));
        X::store(row + s.ldv + c, top + log(max(at(w.sums + 2 * s.ldv + c), all(kSmallest))));
        X::store(row + 2 * s.ldv + c, at(w.gate + c) * dmu);
        X::store(row + 3 * s.ldv + c, dfree);
        X::store(row + 4 * s.ldv + c, e);
        squares = fma(x, x, squares);
        const Vector dgate = select(gt(x, X::zero()), e / at(w.gate + c), X::zero());
        mixed = fma(dgate, x, mixed);
        X::store(m.row + c, dgate);
      }
      if (some) lose_free();
      if (!grads.dq.given()) continue;
      // dx = sqrt(V) / |x| (dgate - x <dgate, x> / |x|^2), dq = dx sigmoid(q); 1 - exp(-softplus(q)) = sigmoid(q)
      const double square = sum(squares), length = __builtin_sqrt(square), factor = gate_factor(length);
      const double less = length > 1e-5 ? sum(mixed) / square : 0;
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        const Vector x = at(w.q + c), dx = all(factor) * (at(m.row + c) - x * all(less));
        X::store(m.row + c, dx * -expm1(all(1e-6) - x));
      }
      fem_store(grads.dq, fem_row(grads.dq, b, t, h), s.V, m.row);
    }
    // Sums over the rows t >= i, each relative to the row where they stand: U = U exp(L_i - L_{i+1}) + row i.
    double *const mean = w.sums, *const tilted = mean + s.ldv, *const energy_of = tilted + s.ldv;
    clear(w.sums, 3 * s.ldv);
    const auto gather_row = [&](int64_t t, bool first) {
      const double *const row = w.rows + t * 5 * s.ldv, *const later = row + 5 * s.ldv;
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        const bool moved = args.causal && !first;
        const Vector f1 = moved ? exp(at(row + c) - at(later + c)) : all(1);
        const Vector f2 = moved ? exp(at(row + s.ldv + c) - at(later + s.ldv + c)) : all(1);
        X::store(mean + c, fma(at(mean + c), f1, at(row + 2 * s.ldv + c)));
        X::store(tilted + c, fma(at(tilted + c), f2, at(row + 3 * s.ldv + c)));
        X::store(energy_of + c, fma(at(energy_of + c), f1, at(row + 4 * s.ldv + c)));
      }
    };
    for (int64_t t = s.T - 1; !args.causal && t >= 0; --t) gather_row(t, true);
    for (int64_t t = s.T - 1; t >= 0; --t) {
      if (args.causal) gather_row(t, t == s.T - 1);
      if (!inputs(t)) {
        no_value(t, grads.dv);
        if (grads.dk.given()) fem_store(grads.dk, fem_row(grads.dk, b, t, h), s.V, m.row);
        continue;
      }
      fem_load(args.k, fem_row(args.k, b, t, h), s.V, w.k);
      const double* const row = w.rows + t * 5 * s.ldv;
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        const Vector k = at(w.k + c), beta = at(m.beta + c), vc = at(m.vc + c), p = exp(k - at(row + c));
        const Vector plain = p * at(mean + c);
        const Vector more = exp(k + (beta * vc - at(m.shift + c)) - at(row + s.ldv + c)) * at(tilted + c);
        X::store(m.g + c, plain);
        X::store(m.g + s.ldv + c, more);
        X::store(m.dmu + c, fma(plain, vc, more / beta) - p * at(energy_of + c));
      }
      if (grads.dk.given()) fem_store(grads.dk, fem_row(grads.dk, b, t, h), s.V, m.dmu);
      finish_value(t, m.g, m.g + s.ldv, grads.dv);
    }
  }
};

}  // namespace linnet::LINNET_ISA
