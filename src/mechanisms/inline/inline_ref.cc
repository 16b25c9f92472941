// The plain double-precision loops of InLine attention: the specification of `inline`, `inline_residual` and `inline_decode`.
//
// Means and co-moments are kept as Welford's recurrence keeps them (n, kbar, vbar, M), so that a common offset of keys or
// values costs no digit. The causal backward uses sums over keys and values less a reference, the mean of the first keys.
#include <cmath>

#include "core/launch.h"
#include "inline.h"
#include "mechanisms/shared/ref_rows.h"

namespace linnet::ref {
namespace {

double phi(InlineKernel kernel, double x) {
  switch (kernel) {
    case InlineKernel::identity: return x;
    case InlineKernel::relu: return x <= 0 ? 0 : x;  // keeps NaN
    case InlineKernel::leakyrelu: return x > 0 ? x : 0.01 * x;
    case InlineKernel::exp: return std::exp(kInlineExponent * (x > kInlineLargest ? kInlineLargest : x));  // keeps NaN
  }
  return x;
}
double phi_slope(InlineKernel kernel, double x) {
  switch (kernel) {
    case InlineKernel::identity: return 1;
    case InlineKernel::relu: return x > 0 ? 1 : 0;
    case InlineKernel::leakyrelu: return x > 0 ? 1 : 0.01;
    case InlineKernel::exp: return x > kInlineLargest ? 0 : kInlineExponent * phi(kernel, x);
  }
  return 1;
}
void map_row(InlineKernel kernel, int64_t n, const double* x, double* f) {
  for (int64_t c = 0; c < n; ++c) f[c] = phi(kernel, x[c]);
}

// The attention of one call; `out` and `dv` may be doubles of the workspace, to which a residual is added.
struct Attention {
  View q, k, v, mask;
  InlineKernel kernel;
  bool causal;
  double scale;
  int64_t B() const { return q.size[0]; }
  int64_t T() const { return q.size[1]; }
  int64_t S() const { return k.size[1]; }
  int64_t H() const { return q.size[2]; }
  int64_t K() const { return q.size[3]; }
  int64_t V() const { return v.size[3]; }
};

struct Scratch {
  double *x, *f, *kbar, *vbar, *row, *grad;  // rows of K or V
  double* M;                                 // [K, V]
  double *dC, *g_sum;
  double *zk, *zv, *k0, *v0, *S;  // causal backward
  double *e, *c, *n;              // [T]
};
Scratch cut(Arena& arena, const Attention& a, bool backward) {
  Scratch s{};
  const int64_t wide = a.K() > a.V() ? a.K() : a.V();
  for (double** row : {&s.x, &s.f, &s.kbar, &s.vbar, &s.row, &s.grad, &s.g_sum, &s.zk, &s.zv, &s.k0, &s.v0}) {
    *row = arena.take<double>(wide);
  }
  s.M = arena.take<double>(a.K() * a.V());
  if (backward) {
    s.dC = arena.take<double>(a.K() * a.V());
    s.S = arena.take<double>(a.K() * a.V());
    for (double** row : {&s.e, &s.c, &s.n}) *row = arena.take<double>(a.T());
  }
  return s;
}

// n, kbar, vbar, M with one more key: f = phi(k), v.
void absorb(int64_t K, int64_t V, const double* f, const double* v, double& n, double* kbar, double* vbar, double* M) {
  n += 1;
  const double share = (n - 1) / n;
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t j = 0; j < V; ++j) M[i * V + j] += share * (f[i] - kbar[i]) * (v[j] - vbar[j]);
  }
  for (int64_t i = 0; i < K; ++i) kbar[i] += (f[i] - kbar[i]) / n;
  for (int64_t j = 0; j < V; ++j) vbar[j] += (v[j] - vbar[j]) / n;
}
// o = vbar + (scale / n) f M, 0 without keys
void read(int64_t K, int64_t V, double scale, const double* f, double n, const double* vbar, const double* M, double* o) {
  for (int64_t j = 0; j < V; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < K; ++i) sum += f[i] * M[i * V + j];
    o[j] = n == 0 ? 0 : vbar[j] + scale / n * sum;
  }
}

void forward(const Attention& a, const View& out, const InlineOut& finals, const Scratch& s) {
  const int64_t K = a.K(), V = a.V();
  for (int64_t b = 0; b < a.B(); ++b) {
    for (int64_t h = 0; h < a.H(); ++h) {
      double n = 0;
      for (int64_t i = 0; i < K; ++i) s.kbar[i] = 0;
      for (int64_t j = 0; j < V; ++j) s.vbar[j] = 0;
      for (int64_t i = 0; i < K * V; ++i) s.M[i] = 0;
      const auto add_key = [&](int64_t j) {
        if (!takes_part(a.mask, b, j)) return;
        load_row(a.k, b, j, h, s.x);
        map_row(a.kernel, K, s.x, s.f);
        load_row(a.v, b, j, h, s.row);
        absorb(K, V, s.f, s.row, n, s.kbar, s.vbar, s.M);
      };
      for (int64_t j = 0; !a.causal && j < a.S(); ++j) add_key(j);
      for (int64_t t = 0; t < a.T(); ++t) {
        if (a.causal) add_key(t);
        load_row(a.q, b, t, h, s.x);
        map_row(a.kernel, K, s.x, s.f);
        read(K, V, a.scale, s.f, n, s.vbar, s.M, s.row);
        store_row(out, b, t, h, s.row);
      }
      if (finals.final_count.given()) put(finals.final_count, n, b, h);
      for (int64_t i = 0; i < K; ++i) {
        if (finals.final_key.given()) put(finals.final_key, s.kbar[i], b, h, i);
        for (int64_t j = 0; finals.final_moment.given() && j < V; ++j) put(finals.final_moment, s.M[i * V + j], b, h, i, j);
      }
      for (int64_t j = 0; finals.final_value.given() && j < V; ++j) put(finals.final_value, s.vbar[j], b, h, j);
    }
  }
}

void backward(const Attention& a, const View& dout, const View& dq, const View& dk, const View& dv, const Scratch& s) {
  const int64_t K = a.K(), V = a.V();
  const auto incoming = [&](int64_t b, int64_t t, int64_t h, double* g) {
    for (int64_t j = 0; j < V; ++j) g[j] = 0;
    if (dout.given()) load_row(dout, b, t, h, g);
  };
  // dx = slope(x) df, of row (b, t, h) of x
  const auto leave = [&](const View& x, const View& dx, int64_t b, int64_t t, int64_t h, double* df) {
    if (!dx.given()) return;
    load_row(x, b, t, h, s.x);
    for (int64_t i = 0; i < K; ++i) df[i] *= phi_slope(a.kernel, s.x[i]);
    store_row(dx, b, t, h, df);
  };
  const auto load_key = [&](int64_t b, int64_t j, int64_t h) {  // f = phi(k) - k0, row = v - v0
    load_row(a.k, b, j, h, s.x);
    map_row(a.kernel, K, s.x, s.f);
    load_row(a.v, b, j, h, s.row);
    for (int64_t i = 0; i < K; ++i) s.f[i] -= s.k0[i];
    for (int64_t i = 0; i < V; ++i) s.row[i] -= s.v0[i];
  };
  const auto absent = [&](int64_t b, int64_t j, int64_t h) {
    for (int64_t i = 0; i < (K > V ? K : V); ++i) s.grad[i] = 0;
    if (dk.given()) store_row(dk, b, j, h, s.grad);
    if (dv.given()) store_row(dv, b, j, h, s.grad);
  };
  for (int64_t b = 0; b < a.B(); ++b) {
    for (int64_t h = 0; h < a.H(); ++h) {
      // The reference k0, v0: means over the keys, causal over the first that takes part.
      double n = 0;
      for (int64_t i = 0; i < K; ++i) s.kbar[i] = 0;
      for (int64_t j = 0; j < V; ++j) s.vbar[j] = 0;
      for (int64_t i = 0; i < K * V; ++i) s.M[i] = 0;
      for (int64_t i = 0; i < K; ++i) s.k0[i] = 0;
      for (int64_t i = 0; i < V; ++i) s.v0[i] = 0;
      for (int64_t j = 0; j < a.S() && (!a.causal || n == 0); ++j) {
        if (!takes_part(a.mask, b, j)) continue;
        load_key(b, j, h);
        absorb(K, V, s.f, s.row, n, s.kbar, s.vbar, s.M);
      }
      for (int64_t i = 0; i < K; ++i) s.k0[i] = s.kbar[i];
      for (int64_t i = 0; i < V; ++i) s.v0[i] = s.vbar[i];
      if (!a.causal) {
        // dphi(q_i) = s G_i C^T; dC = s sum_i phi(q_i)^T G_i; dphi(k_j) = vc_j dC^T / N; dv_j = (kc_j dC + sum_i G_i) / N
        for (int64_t i = 0; i < K * V; ++i) s.dC[i] = 0;
        for (int64_t j = 0; j < V; ++j) s.g_sum[j] = 0;
        for (int64_t t = 0; t < a.T(); ++t) {
          incoming(b, t, h, s.row);
          load_row(a.q, b, t, h, s.x);
          map_row(a.kernel, K, s.x, s.f);
          for (int64_t j = 0; j < V; ++j) s.g_sum[j] += s.row[j];
          for (int64_t i = 0; i < K; ++i) {
            double sum = 0;
            for (int64_t j = 0; j < V; ++j) {
              sum += s.row[j] * s.M[i * V + j];
              s.dC[i * V + j] += a.scale * s.f[i] * s.row[j];
            }
            s.grad[i] = n == 0 ? 0 : a.scale / n * sum;
          }
          leave(a.q, dq, b, t, h, s.grad);
        }
        for (int64_t j = 0; j < a.S(); ++j) {
          if (!takes_part(a.mask, b, j)) {
            absent(b, j, h);
            continue;
          }
          load_key(b, j, h);
          for (int64_t c = 0; c < V; ++c) {
            double sum = s.g_sum[c];
            for (int64_t i = 0; i < K; ++i) sum += s.f[i] * s.dC[i * V + c];
            s.grad[c] = sum / n;
          }
          if (dv.given()) store_row(dv, b, j, h, s.grad);
          for (int64_t i = 0; i < K; ++i) {
            double sum = 0;
            for (int64_t c = 0; c < V; ++c) sum += s.row[c] * s.dC[i * V + c];
            s.grad[i] = sum / n;
          }
          leave(a.k, dk, b, j, h, s.grad);
        }
        continue;
      }
      // Causal: dq_i = (s/n_i) (S_i G_i - e_i zk_i), e_i = G_i.zv_i / n_i, c_i = 1 - (s/n_i) q_i.zk_i.
      n = 0;
      for (int64_t i = 0; i < K; ++i) s.zk[i] = 0;
      for (int64_t j = 0; j < V; ++j) s.zv[j] = 0;
      for (int64_t i = 0; i < K * V; ++i) s.S[i] = 0;
      for (int64_t t = 0; t < a.T(); ++t) {
        if (takes_part(a.mask, b, t)) {
          load_key(b, t, h);
          n += 1;
          for (int64_t i = 0; i < K; ++i) {
            s.zk[i] += s.f[i];
            for (int64_t j = 0; j < V; ++j) s.S[i * V + j] += s.f[i] * s.row[j];
          }
          for (int64_t j = 0; j < V; ++j) s.zv[j] += s.row[j];
        }
        incoming(b, t, h, s.row);
        load_row(a.q, b, t, h, s.x);
        map_row(a.kernel, K, s.x, s.f);
        const double inverse = n == 0 ? 0 : 1 / n;
        double e = 0, dot = 0;
        for (int64_t j = 0; j < V; ++j) e += s.row[j] * s.zv[j] * inverse;
        for (int64_t i = 0; i < K; ++i) {
          double sum = -e * s.zk[i];
          for (int64_t j = 0; j < V; ++j) sum += s.S[i * V + j] * s.row[j];
          s.grad[i] = a.scale * inverse * sum;
          dot += s.f[i] * s.zk[i];
        }
        s.e[t] = e;
        s.c[t] = 1 - a.scale * inverse * dot;
        s.n[t] = inverse;
        leave(a.q, dq, b, t, h, s.grad);
      }
      // Backward in time: D = sum (s/n_i) q_i^T G_i, P = sum (s/n_i) e_i q_i, R = sum c_i G_i / n_i over i >= j.
      double* D = s.dC;
      double* P = s.zk;
      double* R = s.zv;
      for (int64_t i = 0; i < K; ++i) P[i] = 0;
      for (int64_t j = 0; j < V; ++j) R[j] = 0;
      for (int64_t i = 0; i < K * V; ++i) D[i] = 0;
      for (int64_t t = a.T(); t-- > 0;) {
        incoming(b, t, h, s.row);
        load_row(a.q, b, t, h, s.x);
        map_row(a.kernel, K, s.x, s.f);
        const double r = a.scale * s.n[t];
        for (int64_t i = 0; i < K; ++i) {
          P[i] += r * s.e[t] * s.f[i];
          for (int64_t j = 0; j < V; ++j) D[i * V + j] += r * s.f[i] * s.row[j];
        }
        for (int64_t j = 0; j < V; ++j) R[j] += s.c[t] * s.n[t] * s.row[j];
        if (!takes_part(a.mask, b, t)) {
          absent(b, t, h);
          continue;
        }
        load_key(b, t, h);
        for (int64_t j = 0; j < V; ++j) {
          double sum = R[j];
          for (int64_t i = 0; i < K; ++i) sum += s.f[i] * D[i * V + j];
          s.grad[j] = sum;
        }
        if (dv.given()) store_row(dv, b, t, h, s.grad);
        for (int64_t i = 0; i < K; ++i) {
          double sum = -P[i];
          for (int64_t j = 0; j < V; ++j) sum += s.row[j] * D[i * V + j];
          s.grad[i] = sum;
        }
        leave(a.k, dk, b, t, h, s.grad);
      }
    }
  }
}

template <class Args>
Attention attention_of(const Args& args) {
  return {args.q, args.k, args.v, args.mask, args.kernel, args.causal, inline_scale(args.scale, args.q.size[3])};
}

// ---- the residual

double gelu(double x) { return 0.5 * x * std::erfc(-x * std::sqrt(0.5)); }
double gelu_slope(double x) {
  return 0.5 * std::erfc(-x * std::sqrt(0.5)) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * 3.14159265358979323846);
}

struct Residual {
  Attention a;
  int64_t D, height, width, prefix;
  double *pre, *r, *dr, *dpre;  // [D], [D, 9], [D, 9], [D]
  double* rows;                 // [B, T, H, D] out or dv before rounding
  Scratch s;
  View rows_view() const {
    View view = a.q;
    return View::dense(rows, Dtype::f64, view.size, 4);
  }
  // Calls use(y, x, tap, ty, tx) for every pair of grid positions.
  template <class Use>
  void pairs(const Use& use) const {
    for (int64_t y = 0; y < height; ++y) {
      for (int64_t x = 0; x < width; ++x) {
        for (int64_t tap = 0; tap < 9; ++tap) {
          const int64_t ty = y + tap / 3 - 1, tx = x + tap % 3 - 1;
          if (ty >= 0 && ty < height && tx >= 0 && tx < width) use(prefix + y * width + x, tap, prefix + ty * width + tx);
        }
      }
    }
  }
  // r = w2 gelu(w1 pooled + b1) + b2
  void coefficients(const InlineResidualArgs& args, int64_t b, int64_t h) const {
    for (int64_t i = 0; i < D; ++i) {
      pre[i] = get(args.b1, h, i);
      for (int64_t c = 0; c < D; ++c) pre[i] += get(args.w1, h, i, c) * get(args.pooled, b, h, c);
    }
    for (int64_t i = 0; i < 9 * D; ++i) {
      r[i] = get(args.b2, h, i);
      for (int64_t c = 0; c < D; ++c) r[i] += get(args.w2, h, i, c) * gelu(pre[c]);
    }
  }
};
Residual cut_residual(Arena& arena, const InlineResidualArgs& args, bool backward) {
  Residual x{};
  x.a = attention_of(args);
  x.D = args.q.size[3];
  x.height = args.height;
  x.width = args.width;
  x.prefix = args.prefix;
  x.pre = arena.take<double>(x.D);
  x.r = arena.take<double>(9 * x.D);
  x.dr = arena.take<double>(9 * x.D);
  x.dpre = arena.take<double>(x.D);
  x.rows = arena.take<double>(args.q.elements());
  x.s = cut(arena, x.a, backward);
  return x;
}

}  // namespace

void inline_forward(const InlineArgs& args, const InlineOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Attention a = attention_of(args);
  const Scratch s = cut(arena, a, false);
  forward(a, out.out, out, s);
}
void inline_backward(const InlineArgs& args, const InlineOut&, const InlineGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const Attention a = attention_of(args);
  const Scratch s = cut(arena, a, true);
  backward(a, grads.dout, grads.dq, grads.dk, grads.dv, s);
}
int64_t inline_workspace(const InlineArgs& args, Pass pass, int) {
  Arena arena;
  cut(arena, attention_of(args), pass == Pass::backward);
  return arena.used();
}

void inline_residual_forward(const InlineResidualArgs& args, const InlineResidualOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Residual x = cut_residual(arena, args, false);
  const View rows = x.rows_view();
  forward(x.a, rows, InlineOut(), x.s);
  for (int64_t b = 0; b < x.a.B(); ++b) {
    for (int64_t h = 0; h < x.a.H(); ++h) {
      x.coefficients(args, b, h);
      for (int64_t i = 0; out.r.given() && i < 9 * x.D; ++i) put(out.r, x.r[i], b, h, i / 9, i % 9);
      x.pairs([&](int64_t to, int64_t tap, int64_t from) {
        if (!takes_part(args.mask, b, from)) return;
        for (int64_t c = 0; c < x.D; ++c) *rows.at<double>(b, to, h, c) += x.r[c * 9 + tap] * get(args.v, b, from, h, c);
      });
    }
  }
  for (int64_t b = 0; b < x.a.B(); ++b) {
    for (int64_t t = 0; t < x.a.T(); ++t) {
      for (int64_t h = 0; h < x.a.H(); ++h) store_row(out.out, b, t, h, rows.at<double>(b, t, h));
    }
  }
}

void inline_residual_backward(const InlineResidualArgs& args, const InlineResidualOut&, const InlineResidualGrads& grads,
                              const Launch& launch) {
  Arena arena(launch.workspace);
  const Residual x = cut_residual(arena, args, true);
  const View rows = x.rows_view();
  const int64_t D = x.D;
  backward(x.a, grads.dout, grads.dq, grads.dk, rows, x.s);
  const auto add = [](const View& view, double value, bool first, int64_t i, int64_t j, int64_t k = 0) {
    if (view.given()) put(view, (first ? 0 : get(view, i, j, k)) + value, i, j, k);
  };
  // Parameters' gradients are sums over the batch: one head after the other, batch rows inside, in doubles.
  for (int64_t h = 0; h < x.a.H(); ++h) {
    for (int64_t b = 0; b < x.a.B(); ++b) {
      x.coefficients(args, b, h);
      for (int64_t i = 0; i < 9 * D; ++i) x.dr[i] = 0;
      x.pairs([&](int64_t to, int64_t tap, int64_t from) {
        if (!takes_part(args.mask, b, from)) return;
        for (int64_t c = 0; grads.dout.given() && c < D; ++c) {
          const double g = get(grads.dout, b, to, h, c);
          x.dr[c * 9 + tap] += g * get(args.v, b, from, h, c);
          *rows.at<double>(b, from, h, c) += x.r[c * 9 + tap] * g;
        }
      });
      for (int64_t c = 0; c < D; ++c) x.dpre[c] = 0;
      for (int64_t i = 0; i < 9 * D; ++i) {
        for (int64_t c = 0; c < D; ++c) x.dpre[c] += get(args.w2, h, i, c) * x.dr[i];
      }
      for (int64_t c = 0; c < D; ++c) x.dpre[c] *= gelu_slope(x.pre[c]);
      for (int64_t c = 0; grads.dpooled.given() && c < D; ++c) {
        double sum = 0;
        for (int64_t i = 0; i < D; ++i) sum += get(args.w1, h, i, c) * x.dpre[i];
        put(grads.dpooled, sum, b, h, c);
      }
      for (int64_t i = 0; i < D; ++i) {
        add(grads.db1, x.dpre[i], b == 0, h, i);
        for (int64_t c = 0; c < D; ++c) add(grads.dw1, x.dpre[i] * get(args.pooled, b, h, c), b == 0, h, i, c);
      }
      for (int64_t i = 0; i < 9 * D; ++i) {
        add(grads.db2, x.dr[i], b == 0, h, i);
        for (int64_t c = 0; c < D; ++c) add(grads.dw2, x.dr[i] * gelu(x.pre[c]), b == 0, h, i, c);
      }
    }
    if (x.a.B() > 0) continue;
    for (int64_t i = 0; i < 9 * D; ++i) {
      add(grads.db2, 0, true, h, i);
      for (int64_t c = 0; c < D; ++c) add(grads.dw2, 0, true, h, i, c);
    }
    for (int64_t i = 0; i < D; ++i) {
      add(grads.db1, 0, true, h, i);
      for (int64_t c = 0; c < D; ++c) add(grads.dw1, 0, true, h, i, c);
    }
  }
  for (int64_t b = 0; grads.dv.given() && b < x.a.B(); ++b) {
    for (int64_t t = 0; t < x.a.T(); ++t) {
      for (int64_t h = 0; h < x.a.H(); ++h) store_row(grads.dv, b, t, h, rows.at<double>(b, t, h));
    }
  }
}
int64_t inline_residual_workspace(const InlineResidualArgs& args, Pass pass, int) {
  Arena arena;
  cut_residual(arena, args, pass == Pass::backward);
  return arena.used();
}

void inline_decode_forward(const InlineDecodeArgs& args, const InlineDecodeOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  Attention a{args.q, args.k, args.v, View(), args.kernel, true, inline_scale(args.scale, args.q.size[3])};
  const Scratch s = cut(arena, a, false);
  const int64_t K = a.K(), V = a.V();
  for (int64_t b = 0; b < a.B(); ++b) {
    for (int64_t h = 0; h < a.H(); ++h) {
      double n = get(args.count, b, h);
      for (int64_t i = 0; i < K; ++i) s.kbar[i] = get(args.key, b, h, i);
      for (int64_t j = 0; j < V; ++j) s.vbar[j] = get(args.value, b, h, j);
      for (int64_t i = 0; i < K * V; ++i) s.M[i] = get(args.moment, b, h, i / V, i % V);
      for (int64_t t = 0; t < a.T(); ++t) {
        load_row(args.k, b, t, h, s.x);
        map_row(a.kernel, K, s.x, s.f);
        load_row(args.v, b, t, h, s.row);
        absorb(K, V, s.f, s.row, n, s.kbar, s.vbar, s.M);
        load_row(args.q, b, t, h, s.x);
        map_row(a.kernel, K, s.x, s.f);
        read(K, V, a.scale, s.f, n, s.vbar, s.M, s.row);
        store_row(out.out, b, t, h, s.row);
      }
      put(args.count, n, b, h);
      for (int64_t i = 0; i < K; ++i) put(args.key, s.kbar[i], b, h, i);
      for (int64_t j = 0; j < V; ++j) put(args.value, s.vbar[j], b, h, j);
      for (int64_t i = 0; i < K * V; ++i) put(args.moment, s.M[i], b, h, i / V, i % V);
    }
  }
}
int64_t inline_decode_workspace(const InlineDecodeArgs& args, Pass, int) {
  Arena arena;
  cut(arena, {args.q, args.k, args.v, View(), args.kernel, true, 1}, false);
  return arena.used();
}

}  // namespace linnet::ref
