// fem_read with the prior ssm: a state [3, R, ldv], one slice for each column u of [vc | exp(beta vc - M) | 1].
//
//   h = exp(delta A) h + delta B u,   y = C h + D u
//
// Backward: states kept at every kSegment tokens, then backward in time through the segments.
#pragma once

#include "fem_scan.h"

namespace linnet::LINNET_ISA {

struct FemSsm : FemHead {
  static constexpr int64_t kSegment = 64;  // tokens
  static int64_t state_size(const FemSizes& s) { return 3 * s.R * s.ldv; }
  static int64_t segments(const FemSizes& s) { return (s.T + kSegment - 1) / kSegment; }
  int64_t state_size() const { return state_size(s); }
  int64_t segments() const { return segments(s); }

  // Scratch of one worker.
  struct Rows {
    double *k, *bc;                 // delta; B and C
    double *rates, *diagonal;       // A [R, ldv], D
    double *y, *lanes;              // [3, ldv]; sums of dB and dC, lane by lane
    double *state, *adjoint;        // and its gradient
    double *kept, *segment, *rows;  // backward: states before each segment, of each of its tokens; dy of every token
    double* slopes;                 // gradients of A [R, ldv] and D [ldv]
    Rows(Arena& arena, const FemSizes& s, Pass pass) {
      const bool backward = pass == Pass::backward;
      k = arena.take<double>(larger(s.ldk, s.ldv));
      bc = arena.take<double>(2 * s.R);
      rates = arena.take<double>(s.R * s.ldv);
      diagonal = arena.take<double>(s.ldv);
      y = arena.take<double>(3 * s.ldv);
      lanes = arena.take<double>(2 * s.R * X::W);
      state = arena.take<double>(state_size(s));
      adjoint = arena.take<double>(backward ? state_size(s) : 0);
      kept = arena.take<double>(backward ? segments(s) * state_size(s) : 0);
      segment = arena.take<double>(backward ? (kSegment + 1) * state_size(s) : 0);
      rows = arena.take<double>(backward ? s.T * 3 * s.ldv : 0);
      slopes = arena.take<double>((s.R + 1) * s.ldv);
    }
  };
  const Rows& w;

  void begin() const {
    clear(w.state, state_size());
    for (int64_t r = 0; r < s.R; ++r) {
      for (int64_t j = 0; j < s.ldv; ++j) {
        const int64_t place = h * args.A.stride[0] + j * args.A.stride[1] + r * args.A.stride[2];
        w.rates[r * s.ldv + j] = j < s.V ? number(args.A, place) : 0;
      }
    }
    for (int64_t j = 0; j < s.ldv; ++j) {
      w.diagonal[j] = j < s.V ? number(args.D, h * args.D.stride[0] + j * args.D.stride[1]) : 0;
    }
  }
  bool load_step(int64_t t) const {  // delta in w.k, B and C in w.bc, u
    fem_load(args.delta, fem_row(args.delta, b, t, h), s.V, w.k);
    for (int64_t r = 0; r < s.R; ++r) {
      w.bc[r] = number(args.Bm, b * args.Bm.stride[0] + t * args.Bm.stride[1] + r * args.Bm.stride[2]);
      w.bc[s.R + r] = number(args.Cm, b * args.Cm.stride[0] + t * args.Cm.stride[1] + r * args.Cm.stride[2]);
    }
    return inputs(t);
  }
  Vector input(int n, int64_t c) const { return n < 2 ? at(m.u + n * s.ldv + c) : all(m.u[2 * s.ldv]); }
  void step(int64_t t, double* state) const {  // h and y [3, ldv]
    load_step(t);
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector delta = at(w.k + c);
      for (int n = 0; n < 3; ++n) X::store(w.y + n * s.ldv + c, at(w.diagonal + c) * input(n, c));
      for (int64_t r = 0; r < s.R; ++r) {
        const Vector f = exp(delta * at(w.rates + r * s.ldv + c)), more = delta * all(w.bc[r]), read_of = all(w.bc[s.R + r]);
        for (int n = 0; n < 3; ++n) {
          double *const x = state + (n * s.R + r) * s.ldv + c, *const y = w.y + n * s.ldv + c;
          const Vector next = fma(f, at(x), more * input(n, c));
          X::store(x, next);
          X::store(y, fma(read_of, next, at(y)));
        }
      }
    }
  }
  // mu and F from y; the denominators go to m.g, 0 where nothing is seen, their slopes to m.g + ldv.
  void mix() const {
    const FemDenominator rule = fem_denominator(args.prior, args.denominator);
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector weights = at(w.y + 2 * s.ldv + c);
      const auto none = eq(weights, X::zero()), bound = lt(weights, all(rule == FemDenominator::max ? 1e-6 : -1));
      const Vector den = rule == FemDenominator::plus ? weights + all(1e-5) : select(bound, all(1e-6), weights);
      X::store(m.mu + c, select(none, X::zero(), at(w.y + c) / den));
      X::store(m.free + c, select(none, X::zero(), energy(c, at(w.y + s.ldv + c) / den)));
      X::store(m.g + c, select(none, X::zero(), den));
      X::store(m.g + s.ldv + c, select(bound, X::zero(), all(1)));
    }
  }
  void forward(const FemReadOut& out) const {
    begin();
    for (int64_t t = 0; t < s.T; ++t) {
      step(t, w.state);
      mix();
      m.gates.forward(args, out, b, t, h, s.V, m.mu, m.free);
    }
  }
  void backward(const FemReadGrads& grads, double* dA, double* dD, double* dB, double* dC) const {
    begin();
    const size_t bytes = static_cast<size_t>(state_size()) * 8;
    for (int64_t t = 0; t < s.T; ++t) {
      if (t % kSegment == 0) __builtin_memcpy(w.kept + t / kSegment * state_size(), w.state, bytes);
      step(t, w.state);
      mix();
      m.gates.backward(args, grads, b, t, h, s.V, m.mu, m.free, m.dmu, m.dfree);
      clear_padding();
      double* const dy = w.rows + t * 3 * s.ldv;
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        const Vector den = at(m.g + c), dmu = at(m.dmu + c), dfree = at(m.dfree + c) / at(m.beta + c);
        const auto some = gt(den, X::zero());
        const Vector z = max(at(w.y + s.ldv + c), all(kSmallest));
        X::store(dy + c, select(some, dmu / den, X::zero()));
        X::store(dy + s.ldv + c, select(some, dfree / z, X::zero()));
        X::store(dy + 2 * s.ldv + c, select(some, -fma(dmu, at(m.mu + c), dfree) * at(m.g + s.ldv + c) / den, X::zero()));
        X::store(m.dfree + c, select(some, at(m.dfree + c), X::zero()));
      }
      lose_free();
    }
    double *const slopes = w.slopes, *const slope = slopes + s.R * s.ldv;  // of A [R, ldv], of D [ldv]
    clear(slopes, (s.R + 1) * s.ldv);
    clear(w.adjoint, state_size());
    for (int64_t first = (segments() - 1) * kSegment; first >= 0; first -= kSegment) {
      const int64_t end = smaller(first + kSegment, s.T);
      __builtin_memcpy(w.segment, w.kept + first / kSegment * state_size(), bytes);
      for (int64_t t = first; t < end; ++t) {
        double* const next = w.segment + (t + 1 - first) * state_size();
        __builtin_memcpy(next, next - state_size(), bytes);
        step(t, next);
      }
      for (int64_t t = end - 1; t >= first; --t) {
        const double *const before = w.segment + (t - first) * state_size(), *const after = before + state_size();
        const double* const dy = w.rows + t * 3 * s.ldv;
        const bool there = load_step(t);
        clear(w.lanes, 2 * s.R * X::W);
        for (int64_t c = 0; c < s.ldv; c += X::W) {
          const Vector delta = at(w.k + c);
          Vector du[3], ddelta = X::zero(), through = X::zero();
          for (int n = 0; n < 3; ++n) {
            du[n] = at(w.diagonal + c) * at(dy + n * s.ldv + c);
            through = fma(input(n, c), at(dy + n * s.ldv + c), through);
          }
          X::store(slope + c, at(slope + c) + through);
          for (int64_t r = 0; r < s.R; ++r) {
            const Vector rate = at(w.rates + r * s.ldv + c), f = exp(delta * rate), B = all(w.bc[r]), C = all(w.bc[s.R + r]);
            Vector reads = X::zero(), writes = X::zero(), decays = X::zero();
            for (int n = 0; n < 3; ++n) {
              const int64_t place = (n * s.R + r) * s.ldv + c;
              const Vector d = at(dy + n * s.ldv + c), g = fma(C, d, at(w.adjoint + place)), u = input(n, c);
              reads = fma(at(after + place), d, reads);
              writes = fma(u, g, writes);
              decays = fma(g, f * at(before + place), decays);
              du[n] = fma(delta * B, g, du[n]);
              X::store(w.adjoint + place, f * g);
            }
            ddelta = fma(rate, decays, fma(B, writes, ddelta));
            double *const a = slopes + r * s.ldv + c, *const lane = w.lanes + 2 * r * X::W;
            X::store(a, fma(delta, decays, at(a)));
            X::store(lane, fma(delta, writes, at(lane)));
            X::store(lane + X::W, at(lane + X::W) + reads);
          }
          X::store(m.dmu + c, ddelta);
          X::store(m.g + c, du[0]);
          X::store(m.g + s.ldv + c, at(m.beta + c) * at(m.u + s.ldv + c) * du[1]);
        }
        for (int64_t r = 0; r < s.R; ++r) {
          dB[t * s.R + r] = sum(at(w.lanes + 2 * r * X::W));
          dC[t * s.R + r] = sum(at(w.lanes + (2 * r + 1) * X::W));
        }
        if (grads.ddelta.given()) fem_store(grads.ddelta, fem_row(grads.ddelta, b, t, h), s.V, m.dmu);
        if (there) {
          finish_value(t, m.g, m.g + s.ldv, grads.dv);
        } else {
          no_value(t, grads.dv);
        }
      }
    }
    for (int64_t j = 0; j < s.V; ++j) {
      dD[j] = slope[j];
      for (int64_t r = 0; r < s.R; ++r) dA[j * s.R + r] = slopes[r * s.ldv + j];
    }
  }
};

}  // namespace linnet::LINNET_ISA
