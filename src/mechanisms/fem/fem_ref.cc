// The specification of `fem_read`: every row of the prior written out, in double; prior ssm by its recurrence.
#include <cmath>

#include "core/half.h"
#include "core/op.h"
#include "fem.h"

namespace linnet::ref {
namespace {

constexpr double kNone = -HUGE_VAL;  // the logarithm of no weight

double at(const View& x, int64_t b, int64_t t, int64_t h, int64_t c = 0) {
  if (!x.given()) return 0;
  return load_f64(x.data, x.dtype, b * x.stride[0] + t * x.stride[1] + h * x.stride[2] + (x.rank > 3 ? c * x.stride[3] : 0));
}
double at2(const View& x, int64_t i, int64_t j) { return load_f64(x.data, x.dtype, i * x.stride[0] + j * x.stride[1]); }
void put(const View& x, int64_t b, int64_t t, int64_t h, int64_t c, double value) {
  if (!x.given()) return;
  store_f64(x.data, x.dtype, b * x.stride[0] + t * x.stride[1] + h * x.stride[2] + (x.rank > 3 ? c * x.stride[3] : 0), value);
}
double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}
double softplus(double x) { return std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x))); }
double sigmoid(double x) {
  const double e = std::exp(-std::fabs(x));
  return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}
bool present(const View& mask, int64_t b, int64_t i) { return !mask.given() || *mask.at<const uint8_t>(b, i) != 0; }

// One head of one batch row.
struct Head {
  const FemReadArgs& args;
  int64_t b, h, T, K, V, R;
  double *v, *vc, *q, *k, *gate, *lp, *F, *mu, *dmu, *dF, *dvc, *dq, *dk, *da, *e;
  double *state, *y, *dy, *carry, *ssm_sums;

  static int64_t size(const View& x, int d) { return x.given() ? x.size[d] : 0; }
  Head(const FemReadArgs& a, Arena& arena, bool backward)
      : args(a), b(0), h(0), T(a.v.size[1]), K(size(a.q, 3)), V(a.v.size[3]), R(size(a.A, 2)) {
    const bool ssm = a.prior == FemPrior::ssm, aft = a.prior == FemPrior::aft;
    for (double** p : {&v, &vc, &gate, &F, &mu, &dmu, &dF, &dvc}) *p = arena.take<double>(T * V);
    for (double** p : {&q, &k, &dq, &dk}) *p = arena.take<double>(T * K);
    da = arena.take<double>(T + 1);
    e = arena.take<double>(V);
    lp = arena.take<double>(ssm ? 0 : T * (aft ? V : 1));
    state = arena.take<double>(ssm ? (T + 1) * 3 * R : 0);
    y = arena.take<double>(ssm ? T * 3 : 0);
    dy = arena.take<double>(ssm ? T * 3 : 0);
    carry = arena.take<double>(ssm ? 3 * R : 0);
    ssm_sums = arena.take<double>(ssm && backward ? a.A.elements() + a.D.elements() + a.Bm.elements() + a.Cm.elements() : 0);
  }
  double beta(int64_t j) const { return at2(args.beta, h, j); }
  double limit(int64_t j) const { return fem_cap(args.cap) / beta(j); }
  bool seen(int64_t t, int64_t i) const { return (i <= t || !args.causal) && present(args.key_mask, b, i); }
  int64_t end(int64_t t) const { return args.causal ? t + 1 : T; }

  void load(int64_t row, int64_t head) {
    b = row;
    h = head;
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t j = 0; j < V; ++j) {
        v[t * V + j] = present(args.key_mask, b, t) ? at(args.v, b, t, h, j) : 0;
        vc[t * V + j] = std::fmax(-limit(j), std::fmin(v[t * V + j], limit(j)));
      }
      const bool features = args.prior == FemPrior::linear || args.prior == FemPrior::gated;
      for (int64_t c = 0; c < K; ++c) {
        q[t * K + c] = at(args.q, b, t, h, c);
        k[t * K + c] = present(args.key_mask, b, t) ? at(args.k, b, t, h, c) : 0;
        if (!features) continue;
        q[t * K + c] = std::fmax(q[t * K + c], 0) + args.feature_eps;
        k[t * K + c] = std::fmax(k[t * K + c], 0) + args.feature_eps;
      }
      if (args.prior != FemPrior::aft) continue;
      double squares = 0;
      for (int64_t j = 0; j < V; ++j) {
        gate[t * V + j] = softplus(q[t * V + j]) + 1e-6;
        squares += gate[t * V + j] * gate[t * V + j];
      }
      for (int64_t j = 0; j < V; ++j)
        gate[t * V + j] *= std::sqrt(static_cast<double>(V)) / std::fmax(std::sqrt(squares), 1e-5);
    }
  }

  struct Row {
    bool empty = true;
    double norm = 0, den = 0, slope = 1;  // slope: of the denominator in the sum of weights
  };
  // lp[i] = log p_t(i); aft: lp[i V + j]
  Row prior(int64_t t) const {
    Row row;
    const int64_t columns = args.prior == FemPrior::aft ? V : 1;
    for (int64_t i = 0; i < T * columns; ++i) lp[i] = kNone;
    double decay = 0, sum = 0;
    for (int64_t i = end(t) - 1; i >= 0; --i) {
      if (seen(t, i)) {
        row.empty = false;
        const double product = args.prior == FemPrior::aft ? 0 : dot(q + t * K, k + i * K, K);
        if (args.prior == FemPrior::softmax) lp[i] = product / std::sqrt(static_cast<double>(K));
        if (args.prior == FemPrior::linear || args.prior == FemPrior::gated) {
          lp[i] = std::log(product) + decay;
          sum += std::exp(lp[i]);
        }
        for (int64_t j = 0; args.prior == FemPrior::aft && j < V; ++j) lp[i * V + j] = k[i * V + j];
      }
      if (args.prior == FemPrior::gated) decay += at(args.a, b, i, h);
    }
    if (row.empty) {
      row.norm = args.prior == FemPrior::softmax ? kNone : 0;
      return row;
    }
    if (args.prior == FemPrior::linear || args.prior == FemPrior::gated) {
      row.norm = row.den = sum;
      const FemDenominator rule = fem_denominator(args.prior, args.denominator);
      if (rule == FemDenominator::plus) row.den = sum + 1e-5;
      if (rule == FemDenominator::max && sum < 1e-6) {
        row.den = 1e-6;
        row.slope = 0;
      }
      for (int64_t i = 0; i < T; ++i) lp[i] -= std::log(row.den);
      return row;
    }
    for (int64_t j = 0; j < columns; ++j) {
      double top = kNone, total = 0;
      for (int64_t i = 0; i < T; ++i) top = std::fmax(top, lp[i * columns + j]);
      for (int64_t i = 0; i < T; ++i) total += std::exp(lp[i * columns + j] - top);
      row.norm = top + std::log(total);
      for (int64_t i = 0; i < T; ++i) lp[i * columns + j] -= row.norm;
      for (int64_t i = 0; columns > 1 && i < T; ++i) lp[i * columns + j] += std::log(gate[t * V + j]);
    }
    if (args.prior == FemPrior::aft && V == 1) {
      for (int64_t i = 0; i < T; ++i) lp[i] += std::log(gate[t]);
    }
    return row;
  }
  double log_p(int64_t i, int64_t j) const { return args.prior == FemPrior::aft ? lp[i * V + j] : lp[i]; }

  // mu and F of row t.
  void read(int64_t t, const Row& row) const {
    for (int64_t j = 0; j < V; ++j) {
      double mean = 0, top = kNone, total = 0;
      for (int64_t i = 0; i < end(t); ++i) {
        const double l = log_p(i, j);
        if (l == kNone) continue;
        mean += std::exp(l) * vc[i * V + j];
        top = std::fmax(top, l + beta(j) * vc[i * V + j]);
      }
      for (int64_t i = 0; i < end(t); ++i) {
        if (log_p(i, j) != kNone) total += std::exp(log_p(i, j) + beta(j) * vc[i * V + j] - top);
      }
      mu[t * V + j] = row.empty ? 0 : mean;
      F[t * V + j] = row.empty || total == 0 ? 0 : (top + std::log(total)) / beta(j);
    }
  }

  // ---- prior ssm, one channel: the recurrence on u = vc, exp(beta vc - M) and 1

  double M(int64_t j) const {
    double top = kNone, least = HUGE_VAL;
    for (int64_t t = 0; t < T; ++t) {
      if (!present(args.key_mask, b, t)) continue;
      top = std::fmax(top, beta(j) * vc[t * V + j]);
      least = std::fmin(least, beta(j) * vc[t * V + j]);
    }
    return fem_shift(top == kNone ? 0 : top, least);
  }
  void inputs(int64_t t, int64_t j, double shift, double (&u)[3]) const {
    const bool there = present(args.key_mask, b, t);
    u[0] = there ? vc[t * V + j] : 0;
    u[1] = there ? std::exp(beta(j) * vc[t * V + j] - shift) : 0;
    u[2] = there ? 1 : 0;
  }
  double rate(int64_t j, int64_t r) const { return at(args.A, h, j, r); }
  double B(int64_t t, int64_t r) const { return at(args.Bm, b, t, r); }
  double C(int64_t t, int64_t r) const { return at(args.Cm, b, t, r); }
  double step(int64_t t, int64_t j) const { return at(args.delta, b, t, h, j); }
  double den_ssm(double sum, double* slope) const {
    const FemDenominator rule = fem_denominator(args.prior, args.denominator);
    *slope = rule == FemDenominator::max && sum < 1e-6 ? 0 : 1;
    if (rule == FemDenominator::plus) return sum + 1e-5;
    return rule == FemDenominator::max && sum < 1e-6 ? 1e-6 : sum;
  }
  void scan(int64_t j) const {  // leaves state [T + 1, R, 3], y [T, 3], mu, F
    const double shift = M(j), diagonal = at2(args.D, h, j);
    bool empty = true;
    for (int64_t i = 0; i < 3 * R; ++i) state[i] = 0;
    for (int64_t t = 0; t < T; ++t) {
      double u[3];
      inputs(t, j, shift, u);
      empty = empty && u[2] == 0;
      for (int m = 0; m < 3; ++m) {
        double sum = diagonal * u[m];
        for (int64_t r = 0; r < R; ++r) {
          const double x = std::exp(step(t, j) * rate(j, r)) * state[(t * R + r) * 3 + m] + step(t, j) * B(t, r) * u[m];
          state[((t + 1) * R + r) * 3 + m] = x;
          sum += C(t, r) * x;
        }
        y[t * 3 + m] = sum;
      }
      double slope;
      const double den = den_ssm(y[t * 3 + 2], &slope);
      mu[t * V + j] = empty || den == 0 ? 0 : y[t * 3] / den;
      F[t * V + j] = empty || den == 0 || y[t * 3 + 1] == 0 ? 0 : (shift + std::log(y[t * 3 + 1] / den)) / beta(j);
    }
  }
};

}  // namespace

double fem_read_largest_logit(const FemReadArgs& args) {
  double most = 0;
  const auto meet = [&](double x) {
    if (std::isfinite(x)) most = std::fmax(most, std::fabs(x));
  };
  const int64_t T = args.v.size[1];
  for (int64_t b = 0; b < args.v.size[0]; ++b) {
    for (int64_t h = 0; h < args.v.size[2]; ++h) {
      for (int64_t t = 0; t < T; ++t) {
        if (!present(args.key_mask, b, t)) continue;
        for (int64_t j = 0; j < args.v.size[3]; ++j) {
          meet(std::fmin(std::fabs(at2(args.beta, h, j) * at(args.v, b, t, h, j)), fem_cap(args.cap)));
          if (args.prior == FemPrior::aft) meet(at(args.k, b, t, h, j));
        }
        if (args.prior != FemPrior::softmax) continue;
        for (int64_t i = args.causal ? t : 0; i < T; ++i) {
          double s = 0;
          for (int64_t c = 0; c < args.q.size[3]; ++c) s += at(args.q, b, i, h, c) * at(args.k, b, t, h, c);
          meet(s / std::sqrt(static_cast<double>(args.q.size[3])));
        }
      }
    }
  }
  return most;
}

int64_t fem_read_workspace(const FemReadArgs& args, Pass pass, int) {
  Arena arena;
  Head(args, arena, pass == Pass::backward);
  if (pass == Pass::backward) arena.take<double>(args.beta.elements());
  return arena.used();
}

void fem_read_forward(const FemReadArgs& args, const FemReadOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  Head m(args, arena, false);
  for (int64_t b = 0; b < args.v.size[0]; ++b) {
    for (int64_t h = 0; h < args.v.size[2]; ++h) {
      m.load(b, h);
      if (args.prior == FemPrior::ssm) {
        for (int64_t j = 0; j < m.V; ++j) m.scan(j);
      }
      for (int64_t t = 0; t < m.T; ++t) {
        if (args.prior != FemPrior::ssm) {
          const Head::Row row = m.prior(t);
          m.read(t, row);
          if (args.prior != FemPrior::aft) put(out.norm, b, t, h, 0, row.norm);
        }
        for (int64_t j = 0; j < m.V; ++j) {
          const double mu = m.mu[t * m.V + j], F = m.F[t * m.V + j], lam = at(args.lam, b, t, h, j);
          put(out.mu, b, t, h, j, mu);
          put(out.free, b, t, h, j, F);
          put(out.out, b, t, h, j, (args.g.given() ? at(args.g, b, t, h, j) : 1) * (mu + lam * (F - mu)));
        }
      }
    }
  }
}

void fem_read_backward(const FemReadArgs& args, const FemReadOut&, const FemReadGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  Head m(args, arena, true);
  const int64_t T = m.T, V = m.V, K = m.K, R = m.R, H = args.v.size[2];
  double* const dbeta = arena.take<double>(args.beta.elements());
  for (int64_t i = 0; i < H * V; ++i) dbeta[i] = 0;
  const bool ssm = args.prior == FemPrior::ssm, aft = args.prior == FemPrior::aft, softmax = args.prior == FemPrior::softmax;
  double *const dA = m.ssm_sums, *const dD = dA + H * V * R, *const dB = dD + H * V,
                *const dC = ssm ? dB + args.Bm.elements() : dB;
  for (int64_t i = 0; ssm && i < H * V * (R + 1) + 2 * args.Bm.elements(); ++i) dA[i] = 0;
  for (int64_t b = 0; b < args.v.size[0]; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      m.load(b, h);
      for (int64_t i = 0; i < T * V; ++i) m.dvc[i] = 0;
      for (int64_t i = 0; i < T * K; ++i) m.dq[i] = m.dk[i] = 0;
      for (int64_t i = 0; i <= T; ++i) m.da[i] = 0;
      // The gates of a row whose mu and F are known.
      const auto gates = [&](int64_t t, int64_t j) {
        const double mu = m.mu[t * V + j], F = m.F[t * V + j], lam = at(args.lam, b, t, h, j), d = at(grads.dout, b, t, h, j);
        const double gd = d * (args.g.given() ? at(args.g, b, t, h, j) : 1);
        put(grads.dg, b, t, h, j, d * (mu + lam * (F - mu)));
        put(grads.dlam, b, t, h, j, gd * (F - mu));
        m.dmu[t * V + j] = (1 - lam) * gd;
        m.dF[t * V + j] = lam * gd;
      };
      for (int64_t t = 0; !ssm && t < T; ++t) {
        const Head::Row row = m.prior(t);
        m.read(t, row);
        for (int64_t j = 0; j < V; ++j) gates(t, j);
        if (row.empty) continue;
        const double *const dmu = m.dmu + t * V, *const dF = m.dF + t * V, *const F = m.F + t * V;
        double D = 0;
        for (int64_t j = 0; j < V; ++j) {
          m.e[j] = dmu[j] * m.mu[t * V + j] + dF[j] / m.beta(j);
          D += m.e[j];
        }
        for (int64_t i = 0; i < m.end(t); ++i) {
          if (!m.seen(t, i)) continue;
          double dp = 0;
          for (int64_t j = 0; j < V; ++j) {
            const double lp = m.log_p(i, j), p = std::exp(lp), value = m.vc[i * V + j], beta = m.beta(j);
            const double posterior = lp == kNone ? 0 : std::exp(lp + beta * value - beta * F[j]);
            dp += dmu[j] * value + dF[j] / beta * std::exp(beta * value - beta * F[j]);
            m.dvc[i * V + j] += p * dmu[j] + dF[j] * posterior;
            dbeta[h * V + j] += dF[j] * posterior * value / beta;
            if (aft) m.dk[i * V + j] += p * dmu[j] * value + dF[j] / beta * posterior - p * m.e[j] / m.gate[t * V + j];
          }
          if (aft) continue;
          const double p = std::exp(m.lp[i]);
          if (softmax) {
            const double ds = p == 0 ? 0 : p * (dp - D) / std::sqrt(static_cast<double>(K));
            for (int64_t c = 0; c < K; ++c) {
              m.dq[t * K + c] += ds * m.k[i * K + c];
              m.dk[i * K + c] += ds * m.q[t * K + c];
            }
            continue;
          }
          const double product = dot(m.q + t * K, m.k + i * K, K), decay = p * row.den / product;  // p = decay product / den
          const double dw = (dp - D * row.slope) / row.den, through = dw * p * row.den;
          for (int64_t c = 0; c < K; ++c) {
            m.dq[t * K + c] += dw * decay * m.k[i * K + c];
            m.dk[i * K + c] += dw * decay * m.q[t * K + c];
          }
          m.da[i + 1] += through;  // steps i + 1 .. t
          m.da[t + 1] -= through;
        }
        for (int64_t j = 0; j < V; ++j) dbeta[h * V + j] -= dF[j] * F[j] / m.beta(j);
        if (!aft) continue;
        // gate = x sqrt(V) / |x|, x = softplus(q) + 1e-6
        double squares = 0, mixed = 0;
        for (int64_t j = 0; j < V; ++j) {
          const double x = softplus(m.q[t * V + j]) + 1e-6;
          squares += x * x;
          mixed += m.e[j] / m.gate[t * V + j] * x;
        }
        const double length = std::sqrt(squares), factor = std::sqrt(static_cast<double>(V)) / std::fmax(length, 1e-5);
        for (int64_t j = 0; j < V; ++j) {
          const double x = softplus(m.q[t * V + j]) + 1e-6, less = length > 1e-5 ? x * mixed / squares : 0;
          m.dq[t * V + j] = factor * (m.e[j] / m.gate[t * V + j] - less) * sigmoid(m.q[t * V + j]);
        }
      }
      for (int64_t j = 0; ssm && j < V; ++j) {
        const double shift = m.M(j), beta = m.beta(j), diagonal = at2(args.D, h, j);
        m.scan(j);
        bool empty = true;
        for (int64_t t = 0; t < T; ++t) {
          gates(t, j);
          empty = empty && !present(args.key_mask, b, t);
          double slope, *const dy = m.dy + t * 3, *const y = m.y + t * 3;
          const double den = m.den_ssm(y[2], &slope), dmu = m.dmu[t * V + j], dF = m.dF[t * V + j];
          dy[0] = empty || den == 0 ? 0 : dmu / den;
          dy[1] = empty || y[1] == 0 ? 0 : dF / (beta * y[1]);  // z = y1 / den
          dy[2] = empty || den == 0 ? 0 : -(dmu * m.mu[t * V + j] + dF / beta) / den * slope;
          if (!empty) dbeta[h * V + j] -= dF * m.F[t * V + j] / beta;
        }
        for (int64_t i = 0; i < 3 * R; ++i) m.carry[i] = 0;
        for (int64_t t = T - 1; t >= 0; --t) {
          double u[3], du[3];
          m.inputs(t, j, shift, u);
          const double delta = m.step(t, j);
          double ddelta = 0;
          for (int i = 0; i < 3; ++i) {
            du[i] = diagonal * m.dy[t * 3 + i];
            dD[h * V + j] += u[i] * m.dy[t * 3 + i];
            for (int64_t r = 0; r < R; ++r) {
              const double decay = std::exp(delta * m.rate(j, r)), before = m.state[(t * R + r) * 3 + i];
              const double g = m.carry[r * 3 + i] + m.C(t, r) * m.dy[t * 3 + i];
              dC[(b * T + t) * R + r] += m.state[((t + 1) * R + r) * 3 + i] * m.dy[t * 3 + i];
              dB[(b * T + t) * R + r] += delta * u[i] * g;
              du[i] += delta * m.B(t, r) * g;
              ddelta += g * (m.rate(j, r) * decay * before + m.B(t, r) * u[i]);
              dA[(h * V + j) * R + r] += g * delta * decay * before;
              m.carry[r * 3 + i] = decay * g;
            }
          }
          put(grads.ddelta, b, t, h, j, ddelta);
          m.dvc[t * V + j] = (u[2] == 0 ? 0 : du[0] + beta * u[1] * du[1]);
          dbeta[h * V + j] += m.vc[t * V + j] * u[1] * du[1];
        }
      }
      double sum = 0;
      for (int64_t t = 0; t < T; ++t) {
        sum += m.da[t];
        put(grads.da, b, t, h, 0, sum);
        for (int64_t j = 0; j < V; ++j) {
          const bool clipped = std::fabs(m.v[t * V + j]) > m.limit(j);
          put(grads.dv, b, t, h, j, clipped ? 0 : m.dvc[t * V + j]);
          if (clipped) dbeta[h * V + j] -= m.dvc[t * V + j] * m.vc[t * V + j] / m.beta(j);
        }
        const bool features = args.prior == FemPrior::linear || args.prior == FemPrior::gated;
        for (int64_t c = 0; c < K; ++c) {
          const bool there = present(args.key_mask, b, t);
          put(grads.dq, b, t, h, c, features && !(at(args.q, b, t, h, c) > 0) ? 0 : m.dq[t * K + c]);
          put(grads.dk, b, t, h, c, !there || (features && !(at(args.k, b, t, h, c) > 0)) ? 0 : m.dk[t * K + c]);
        }
      }
    }
  }
  const auto store = [](const View& x, const double* from) {
    for (int64_t i = 0; x.given() && i < x.elements(); ++i) {
      int64_t rest = i, offset = 0;
      for (int d = x.rank - 1; d >= 0; --d) {
        offset += rest % x.size[d] * x.stride[d];
        rest /= x.size[d];
      }
      store_f64(x.data, x.dtype, offset, from[i]);
    }
  };
  store(grads.dbeta, dbeta);
  if (!ssm) return;
  store(grads.dA, dA);
  store(grads.dD, dD);
  store(grads.dBm, dB);
  store(grads.dCm, dC);
}

int64_t fem_read_decode_workspace(const FemReadDecodeArgs& args, Pass, int) {
  Arena arena;
  arena.take<double>(args.k_cache.given() ? args.k_cache.size[1] : 0);
  return arena.used();
}

void fem_read_decode_forward(const FemReadDecodeArgs& args, const FemReadDecodeOut& out, const Launch& launch) {
  const int64_t T = args.v.size[1], H = args.v.size[2], V = args.v.size[3], K = args.q.given() ? args.q.size[3] : 0;
  const int64_t R = args.A.given() ? args.A.size[2] : 0;
  double* const weights = Arena(launch.workspace).take<double>(args.k_cache.given() ? args.k_cache.size[1] : 0);
  const bool softmax = args.prior == FemPrior::softmax, aft = args.prior == FemPrior::aft, ssm = args.prior == FemPrior::ssm;
  const auto cell = [](const View& x, int64_t b, int64_t h, int64_t i, int64_t j, int64_t l = 0) {
    return b * x.stride[0] + h * x.stride[1] + i * x.stride[2] + j * x.stride[3] + (x.rank > 4 ? l * x.stride[4] : 0);
  };
  const auto get = [](const View& x, int64_t offset) { return load_f64(x.data, x.dtype, offset); };
  const auto set = [](const View& x, int64_t offset, double value) { store_f64(x.data, x.dtype, offset, value); };
  const auto phi = [&](double x) { return std::fmax(x, 0) + args.feature_eps; };
  const auto normaliser = [&](double sum) {
    const FemDenominator rule = fem_denominator(args.prior, args.denominator);
    if (rule == FemDenominator::plus) return sum + 1e-5;
    return rule == FemDenominator::max ? std::fmax(sum, 1e-6) : sum;
  };
  for (int64_t b = 0; b < args.v.size[0]; ++b) {
    const int64_t length = softmax ? index_value(args.lengths, b) : 0;
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        double squares = 0;
        for (int64_t j = 0; aft && j < V; ++j) {
          const double x = softplus(at(args.q, b, t, h, j)) + 1e-6;
          squares += x * x;
        }
        double top = kNone, total = 0;
        if (softmax) {
          for (int64_t c = 0; c < K; ++c) put(args.k_cache, b, length + t, h, c, at(args.k, b, t, h, c));
          for (int64_t j = 0; j < V; ++j) put(args.v_cache, b, length + t, h, j, at(args.v, b, t, h, j));
          for (int64_t i = 0; i <= length + t; ++i) {
            weights[i] = 0;
            for (int64_t c = 0; c < K; ++c) weights[i] += at(args.q, b, t, h, c) * at(args.k_cache, b, i, h, c);
            weights[i] /= std::sqrt(static_cast<double>(K));
            top = std::fmax(top, weights[i]);
          }
          for (int64_t i = 0; i <= length + t; ++i) total += std::exp(weights[i] - top);
        }
        // linear, gated: the sum of the weights first, whose column is the last
        const double decay = args.a.given() ? std::exp(at(args.a, b, t, h)) : 1;
        double sum = 0;
        for (int64_t c = 0; args.state.given() && c < K; ++c) {
          const double n = decay * get(args.state, cell(args.state, b, h, c, 2 * V)) + phi(at(args.k, b, t, h, c));
          set(args.state, cell(args.state, b, h, c, 2 * V), n);
          sum += phi(at(args.q, b, t, h, c)) * n;
        }
        for (int64_t j = 0; j < V; ++j) {
          const double beta = at2(args.beta, h, j), limit = fem_cap(args.cap) / beta;
          const auto clip = [&](double v) { return std::fmax(-limit, std::fmin(v, limit)); };
          const double vc = clip(at(args.v, b, t, h, j)), lam = at(args.lam, b, t, h, j);
          double mu = 0, F = 0;
          if (softmax) {
            double high = kNone, z = 0;
            for (int64_t i = 0; i <= length + t; ++i) high = std::fmax(high, beta * clip(at(args.v_cache, b, i, h, j)));
            for (int64_t i = 0; i <= length + t; ++i) {
              const double p = std::exp(weights[i] - top) / total, x = clip(at(args.v_cache, b, i, h, j));
              mu += p * x;
              z += p * std::exp(beta * x - high);
            }
            F = (high + std::log(z)) / beta;
          } else {
            const int64_t place = b * args.shift.stride[0] + h * args.shift.stride[1] + j * args.shift.stride[2];
            const double before = get(args.shift, place), shift = std::fmax(before, beta * vc), less = std::exp(before - shift);
            const double u[3] = {vc, std::exp(beta * vc - shift), 1};
            double y[3] = {0, 0, sum}, gate = 1;
            set(args.shift, place, shift);
            if (aft) {
              const auto number = [&](int64_t i) { return cell(args.sums, b, h, i, j); };
              const double k = at(args.k, b, t, h, j), m = get(args.sums, number(3)), high = std::fmax(m, k);
              const double old = std::exp(m - high), w = std::exp(k - high);
              y[2] = get(args.sums, number(0)) * old + w;
              y[0] = get(args.sums, number(1)) * old + w * u[0];
              y[1] = get(args.sums, number(2)) * old * less + w * u[1];
              set(args.sums, number(0), y[2]);
              set(args.sums, number(1), y[0]);
              set(args.sums, number(2), y[1]);
              set(args.sums, number(3), high);
              gate = (softplus(at(args.q, b, t, h, j)) + 1e-6) * std::sqrt(static_cast<double>(V)) /
                     std::fmax(std::sqrt(squares), 1e-5);
            } else if (ssm) {
              const double delta = at(args.delta, b, t, h, j), diagonal = at2(args.D, h, j);
              for (int n = 0; n < 3; ++n) {
                y[n] = diagonal * u[n];
                for (int64_t r = 0; r < R; ++r) {
                  const int64_t place_of = cell(args.scan, b, h, n, r, j);
                  const double x = std::exp(delta * at(args.A, h, j, r)) * get(args.scan, place_of) * (n == 1 ? less : 1) +
                                   delta * at(args.Bm, b, t, r) * u[n];
                  set(args.scan, place_of, x);
                  y[n] += at(args.Cm, b, t, r) * x;
                }
              }
            } else {
              for (int n = 0; n < 2; ++n) {
                for (int64_t c = 0; c < K; ++c) {
                  const int64_t place_of = cell(args.state, b, h, c, n * V + j);
                  const double x = decay * (n == 1 ? less : 1) * get(args.state, place_of) + phi(at(args.k, b, t, h, c)) * u[n];
                  set(args.state, place_of, x);
                  y[n] += phi(at(args.q, b, t, h, c)) * x;
                }
              }
            }
            const double den = normaliser(y[2]);
            mu = gate * y[0] / den;
            F = (shift + std::log(gate * y[1] / den)) / beta;
          }
          put(out.out, b, t, h, j, (args.g.given() ? at(args.g, b, t, h, j) : 1) * (mu + lam * (F - mu)));
        }
      }
    }
    if (!softmax) continue;
    if (args.lengths.dtype == Dtype::i32) {
      *args.lengths.at<int32_t>(b) += static_cast<int32_t>(T);
    } else {
      *args.lengths.at<int64_t>(b) += T;
    }
  }
}

}  // namespace linnet::ref
