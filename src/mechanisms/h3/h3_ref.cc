// The plain double-precision loop of H3 in its recurrent form: the specification of `h3` and `h3_decode`. One sequence and head
// at a time; the backward is the adjoint walk of both state spaces from the last token to the first, with all states kept.
#include "core/element.h"
#include "core/sequence.h"
#include "h3_ssm.h"

namespace linnet::ref {
namespace {

struct Scratch {
  H3Pair* pairs;                     // [M]
  double *x, *kbar;                  // [T + 1, R] states of one channel, [P, T]
  Complex* X;                        // [T + 1, M] states of one (p, r)
  double *y, *dq, *dk, *dv, *dkbar;  // [P, T]
  double* G;                         // [R]
  double* sums;                      // dsb [C, R], dsc [C, R], dsd [C], dd [H]
  Complex* F_all;                    // [H, 3, M]

  static Scratch cut(Arena& arena, const H3Shape& s, bool backward) {
    Scratch r{};
    r.pairs = arena.take<H3Pair>(s.M);
    r.x = arena.take<double>((s.T + 1) * s.R);
    r.X = arena.take<Complex>((s.T + 1) * s.M);
    r.kbar = arena.take<double>(s.P * s.T);
    r.y = arena.take<double>(s.P * s.T);
    if (!backward) return r;
    r.dq = arena.take<double>(s.P * s.T);
    r.dk = arena.take<double>(s.P * s.T);
    r.dv = arena.take<double>(s.P * s.T);
    r.dkbar = arena.take<double>(s.P * s.T);
    r.G = arena.take<double>(s.R);
    r.sums = arena.take<double>(2 * s.C * s.R + s.C + s.H);
    r.F_all = arena.take<Complex>(s.H * 3 * s.M);
    return r;
  }
};

// Channel c of one sequence: states x after each token into r.x [L + 1, R], kbar. state: x before the first token, or absent.
template <class Args>
void shift(const Args& args, const H3Shape& s, const Sequence& at, const View& state, int64_t n, int64_t c, double* x,
           double* kbar) {
  for (int64_t i = 0; i < s.R; ++i) x[i] = state.given() ? element(state, n, c, i) : 0;
  for (int64_t t = 0; t < at.length(); ++t, x += s.R) {
    const double k = element(args.k, at.b, at.begin + t, c);
    double sum = element(args.sd, c) * k;
    for (int64_t i = 0; i < s.R; ++i) {
      x[s.R + i] = (i > 0 ? x[i - 1] : 0) + element(args.sb, c, i) * k;
      sum += element(args.sc, c, i) * x[s.R + i];
    }
    kbar[t] = sum;
  }
}

// States X of one (p, r) after each token into X [L + 1, M], and s_t.
template <class Args, class Use>
void diagonal(const Args& args, const H3Shape& s, const Sequence& at, const View& state, int64_t n, int64_t h, int64_t p,
              int64_t r, const H3Pair* pairs, const double* kbar, Complex* X, const Use& use) {
  for (int64_t m = 0; m < s.M; ++m) {
    X[m] = {};
    if (state.given()) X[m] = {element(state, n, h, p, r, m, 0), element(state, n, h, p, r, m, 1)};
  }
  for (int64_t t = 0; t < at.length(); ++t, X += s.M) {
    const double kv = kbar[t] * element(args.v, at.b, at.begin + t, h * s.P + r);
    double sum = element(args.d, h) * kv;
    for (int64_t m = 0; m < s.M; ++m) {
      X[s.M + m] = pairs[m].a * X[m] + kv * pairs[m].bd;
      sum += 2 * (pairs[m].c * X[s.M + m]).re;
    }
    use(t, kv, sum);
  }
}

template <class Args>
void forward(const Args& args, const H3Shape& s, const Scratch& r, const Sequence& at, int64_t n, const View& shift_before,
             const View& diag_before, const View& out, const View& shift_after, const View& diag_after) {
  for (int64_t h = 0; h < s.H; ++h) {
    for (int64_t m = 0; m < s.M; ++m) r.pairs[m] = h3_pair(args, h, m);
    for (int64_t i = 0; i < s.P * s.T; ++i) r.y[i] = 0;
    for (int64_t p = 0; p < s.P; ++p) {
      const int64_t c = h * s.P + p;
      shift(args, s, at, shift_before, n, c, r.x, r.kbar);
      for (int64_t i = 0; shift_after.given() && i < s.R; ++i) {
        set_element(shift_after, r.x[at.length() * s.R + i], n, c, i);
      }
      for (int64_t slot = 0; slot < s.P; ++slot) {
        diagonal(args, s, at, diag_before, n, h, p, slot, r.pairs, r.kbar, r.X,
                 [&](int64_t t, double, double sum) { r.y[slot * s.T + t] += element(args.q, at.b, at.begin + t, c) * sum; });
        for (int64_t m = 0; diag_after.given() && m < s.M; ++m) {
          const Complex X = r.X[at.length() * s.M + m];
          set_element(diag_after, X.re, n, h, p, slot, m, 0);
          set_element(diag_after, X.im, n, h, p, slot, m, 1);
        }
      }
    }
    for (int64_t slot = 0; slot < s.P; ++slot) {
      for (int64_t t = 0; t < at.length(); ++t) set_element(out, r.y[slot * s.T + t], at.b, at.begin + t, slot * s.H + h);
    }
  }
}

void taps(const H3Args& args, const H3Shape& s, const Scratch& r, const H3Out& out) {
  for (int64_t c = 0; out.taps_shift.given() && c < s.C; ++c) {
    for (int64_t l = 0; l < s.T; ++l) {
      double sum = 0;
      for (int64_t i = 0; i + l < s.R; ++i) sum += element(args.sb, c, i) * element(args.sc, c, i + l);
      set_element(out.taps_shift, sum, c, l);
    }
  }
  for (int64_t h = 0; out.taps_diag.given() && h < s.H; ++h) {
    for (int64_t m = 0; m < s.M; ++m) {
      r.pairs[m] = h3_pair(args, h, m);
      r.X[m] = r.pairs[m].c * r.pairs[m].bd;
    }
    for (int64_t l = 0; l < s.T; ++l) {
      double sum = 0;
      for (int64_t m = 0; m < s.M; ++m) {
        sum += 2 * r.X[m].re;
        r.X[m] = r.X[m] * r.pairs[m].a;
      }
      set_element(out.taps_diag, sum, h, l);
    }
  }
}

void store_rows(const View& view, const Sequence& at, const H3Shape& s, int64_t h, const double* rows) {
  for (int64_t p = 0; view.given() && p < s.P; ++p) {
    for (int64_t t = 0; t < at.length(); ++t) set_element(view, rows[p * s.T + t], at.b, at.begin + t, h * s.P + p);
  }
}

}  // namespace

void h3_forward(const H3Args& args, const H3Out& out, const Launch& launch) {
  const H3Shape s(args);
  Arena arena(launch.workspace);
  const Scratch r = Scratch::cut(arena, s, false);
  for (int64_t n = 0; n < sequence_count(args.cu_seqlens, s.B); ++n) {
    forward(args, s, r, sequence_of(args.cu_seqlens, s.T, n), n, args.initial_state_shift, args.initial_state_diag, out.out,
            out.state_shift, out.state_diag);
  }
  taps(args, s, r, out);
}

void h3_backward(const H3Args& args, const H3Out&, const H3Grads& grads, const Launch& launch) {
  const H3Shape s(args);
  Arena arena(launch.workspace);
  const Scratch r = Scratch::cut(arena, s, true);
  double *dsb = r.sums, *dsc = dsb + s.C * s.R, *dsd = dsc + s.C * s.R, *dd = dsd + s.C;
  for (int64_t i = 0; i < 2 * s.C * s.R + s.C + s.H; ++i) r.sums[i] = 0;
  for (int64_t i = 0; i < s.H * 3 * s.M; ++i) r.F_all[i] = {};
  for (int64_t n = 0; n < sequence_count(args.cu_seqlens, s.B); ++n) {
    const Sequence at = sequence_of(args.cu_seqlens, s.T, n);
    const int64_t L = at.length();
    for (int64_t h = 0; h < s.H; ++h) {
      Complex *F_a = r.F_all + h * 3 * s.M, *F_bd = F_a + s.M, *F_c = F_bd + s.M;
      for (int64_t m = 0; m < s.M; ++m) r.pairs[m] = h3_pair(args, h, m);
      for (int64_t i = 0; i < s.P * s.T; ++i) r.dq[i] = r.dv[i] = r.dkbar[i] = 0;
      const auto dy = [&](int64_t slot, int64_t t) {
        return grads.dout.given() ? element(grads.dout, at.b, at.begin + t, slot * s.H + h) : 0;
      };
      for (int64_t p = 0; p < s.P; ++p) {
        const int64_t c = h * s.P + p;
        shift(args, s, at, args.initial_state_shift, n, c, r.x, r.kbar);
        for (int64_t slot = 0; slot < s.P; ++slot) {
          diagonal(args, s, at, args.initial_state_diag, n, h, p, slot, r.pairs, r.kbar, r.X,
                   [&](int64_t t, double, double sum) { r.dq[p * s.T + t] += sum * dy(slot, t); });
          for (int64_t m = 0; m < s.M; ++m) {
            Complex Y;
            if (grads.dstate_diag.given()) {
              Y = {0.5 * element(grads.dstate_diag, n, h, p, slot, m, 0),
                   -0.5 * element(grads.dstate_diag, n, h, p, slot, m, 1)};
            }
            for (int64_t t = L; t-- > 0;) {
              const double v = element(args.v, at.b, at.begin + t, h * s.P + slot), kbar = r.kbar[t];
              const double ds = element(args.q, at.b, at.begin + t, c) * dy(slot, t);
              const Complex before = r.X[t * s.M + m], after = r.X[(t + 1) * s.M + m];
              Y = Y + ds * r.pairs[m].c;
              F_c[m] = F_c[m] + ds * after;
              F_bd[m] = F_bd[m] + kbar * v * Y;
              F_a[m] = F_a[m] + before * Y;
              double dkv = 2 * (r.pairs[m].bd * Y).re;
              if (m == 0) {
                dkv += element(args.d, h) * ds;
                dd[h] += kbar * v * ds;
              }
              r.dkbar[p * s.T + t] += dkv * v;
              r.dv[slot * s.T + t] += dkv * kbar;
              Y = r.pairs[m].a * Y;
            }
            if (grads.dinitial_state_diag.given()) {
              set_element(grads.dinitial_state_diag, 2 * Y.re, n, h, p, slot, m, 0);
              set_element(grads.dinitial_state_diag, -2 * Y.im, n, h, p, slot, m, 1);
            }
          }
        }
        // The shift SSM, x_t still in r.x; G = gradient of x_t.
        double* G = r.G;
        for (int64_t i = 0; i < s.R; ++i) G[i] = grads.dstate_shift.given() ? element(grads.dstate_shift, n, c, i) : 0;
        for (int64_t t = L; t-- > 0;) {
          const double k = element(args.k, at.b, at.begin + t, c), dkbar = r.dkbar[p * s.T + t];
          double dk = element(args.sd, c) * dkbar;
          dsd[c] += k * dkbar;
          for (int64_t i = 0; i < s.R; ++i) {
            G[i] += element(args.sc, c, i) * dkbar;
            dsc[c * s.R + i] += r.x[(t + 1) * s.R + i] * dkbar;
            dsb[c * s.R + i] += G[i] * k;
            dk += element(args.sb, c, i) * G[i];
          }
          r.dk[p * s.T + t] = dk;
          for (int64_t i = 0; i < s.R; ++i) G[i] = i + 1 < s.R ? G[i + 1] : 0;
        }
        for (int64_t i = 0; grads.dinitial_state_shift.given() && i < s.R; ++i) {
          set_element(grads.dinitial_state_shift, G[i], n, c, i);
        }
      }
      store_rows(grads.dq, at, s, h, r.dq);
      store_rows(grads.dk, at, s, h, r.dk);
      store_rows(grads.dv, at, s, h, r.dv);
    }
  }
  for (int64_t c = 0; c < s.C; ++c) {
    if (grads.dsd.given()) set_element(grads.dsd, dsd[c], c);
    for (int64_t i = 0; i < s.R; ++i) {
      if (grads.dsb.given()) set_element(grads.dsb, dsb[c * s.R + i], c, i);
      if (grads.dsc.given()) set_element(grads.dsc, dsc[c * s.R + i], c, i);
    }
  }
  for (int64_t h = 0; h < s.H; ++h) {
    double dlog_dt = 0;
    for (int64_t m = 0; m < s.M; ++m) {
      const Complex* F = r.F_all + h * 3 * s.M + m;
      double dlog_neg_re, dimag, db[2], dc[2];
      dlog_dt += h3_pair_gradient(h3_pair(args, h, m), args.disc, F[0], F[s.M], F[2 * s.M], &dlog_neg_re, &dimag, db, dc);
      if (grads.dlog_neg_re.given()) set_element(grads.dlog_neg_re, dlog_neg_re, h, m);
      if (grads.dimag.given()) set_element(grads.dimag, dimag, h, m);
      for (int64_t part = 0; part < 2; ++part) {
        if (grads.db.given()) set_element(grads.db, db[part], h, m, part);
        if (grads.dc.given()) set_element(grads.dc, dc[part], h, m, part);
      }
    }
    if (grads.dlog_dt.given()) set_element(grads.dlog_dt, dlog_dt, h);
    if (grads.dd.given()) set_element(grads.dd, dd[h], h);
  }
}

int64_t h3_workspace(const H3Args& args, Pass pass, int) {
  Arena arena;
  Scratch::cut(arena, H3Shape(args), pass == Pass::backward);
  return arena.used();
}

void h3_decode_forward(const H3DecodeArgs& args, const H3DecodeOut& out, const Launch& launch) {
  const H3Shape s(args);
  Arena arena(launch.workspace);
  const Scratch r = Scratch::cut(arena, s, false);
  for (int64_t b = 0; b < s.B; ++b) {
    forward(args, s, r, {b, 0, s.T}, b, args.state_shift, args.state_diag, out.out, args.state_shift, args.state_diag);
  }
}

int64_t h3_decode_workspace(const H3DecodeArgs& args, Pass, int) {
  Arena arena;
  Scratch::cut(arena, H3Shape(args), false);
  return arena.used();
}

}  // namespace linnet::ref
