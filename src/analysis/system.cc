#include "analysis/system.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace linnet::analysis {
namespace {

template <class S>
S cast(const Complex& x) {
  if constexpr (std::is_same_v<S, double>) {
    return x.real();
  } else {
    return x;
  }
}
double real(double x) { return x; }
double real(const Complex& x) { return x.real(); }

template <class S>
std::vector<S> converted(const std::vector<Complex>& from) {
  std::vector<S> to(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = cast<S>(from[i]);
  return to;
}

double decay(const System& s, int64_t t) {
  const auto i = static_cast<size_t>(t);
  return s.decay_sign[i] * std::exp(s.log_decay[i]);
}
double weight(const System& s, int64_t t) {
  const auto i = static_cast<size_t>(t);
  return s.weight_sign[i] * std::exp(s.log_weight[i]);
}

template <class S>
std::vector<double> run_as(const System& s, const std::vector<double>& u) {
  const int64_t J = s.channels, n = s.n;
  const std::vector<S> L = converted<S>(s.L), b = converted<S>(s.b), c = converted<S>(s.c);
  std::vector<S> h(static_cast<size_t>(J * n), S(0)), next(static_cast<size_t>(n));
  std::vector<double> y(static_cast<size_t>(s.T * J), 0);
  for (int64_t t = 0; t < s.T; ++t) {
    const double scalar = s.form == Form::scalar ? decay(s, t) : 0, w = s.form == Form::scalar ? weight(s, t) : 1;
    for (int64_t j = 0; j < J; ++j) {
      const int64_t set = t * s.sets() + (s.shared ? 0 : j);
      S* const state = h.data() + j * n;
      const double input = w * u[static_cast<size_t>(t * J + j)];
      if (s.form == Form::dense) {
        const S* const block = L.data() + t * n * n;
        for (int64_t i = 0; i < n; ++i) {
          S sum(0);
          for (int64_t k = 0; k < n; ++k) sum += block[i * n + k] * state[k];
          next[static_cast<size_t>(i)] = sum;
        }
        std::copy(next.begin(), next.end(), state);
      } else if (s.form == Form::diagonal) {
        for (int64_t a = 0; a < n; ++a) state[a] *= L[static_cast<size_t>(set * n + a)];
      } else {
        for (int64_t a = 0; a < n; ++a) state[a] *= scalar;
      }
      S out(0);
      for (int64_t a = 0; a < n; ++a) {
        state[a] += b[static_cast<size_t>(set * n + a)] * input;
        out += c[static_cast<size_t>(set * n + a)] * state[a];
      }
      y[static_cast<size_t>(t * J + j)] =
          real(out) + (s.d.empty() ? 0 : s.d[static_cast<size_t>(set)] * u[static_cast<size_t>(t * J + j)]);
    }
  }
  return y;
}

std::vector<double> run_full(const System& s, const std::vector<double>& u) {
  std::vector<Complex> h(static_cast<size_t>(s.n), 0);
  std::vector<double> y(static_cast<size_t>(s.T * s.Dy), 0);
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t a = 0; a < s.n; ++a) {
      Complex& state = h[static_cast<size_t>(a)];
      state *= s.lambda[static_cast<size_t>(a)];
      for (int64_t j = 0; j < s.Du; ++j) state += s.B[static_cast<size_t>(a * s.Du + j)] * u[static_cast<size_t>(t * s.Du + j)];
    }
    for (int64_t i = 0; i < s.Dy; ++i) {
      Complex sum = 0;
      for (int64_t a = 0; a < s.n; ++a) sum += s.C[static_cast<size_t>(i * s.n + a)] * h[static_cast<size_t>(a)];
      double& out = y[static_cast<size_t>(t * s.Dy + i)] = sum.real();
      for (int64_t j = 0; j < s.Du && !s.D.empty(); ++j) {
        out += s.D[static_cast<size_t>(i * s.Du + j)] * u[static_cast<size_t>(t * s.Du + j)];
      }
    }
  }
  return y;
}

// Scalar decay: c_t . b_i times exp of a difference of running sums. A decay of 0 cuts the sequence; no product crosses it.
Matrix scalar_mixing(const System& s) {
  Matrix m(s.T, s.T);
  std::vector<double> sum(static_cast<size_t>(s.T)), sign(static_cast<size_t>(s.T));
  std::vector<int64_t> piece(static_cast<size_t>(s.T));
  double running = 0, running_sign = 1;
  int64_t pieces = 0;
  for (size_t t = 0; t < sum.size(); ++t) {
    if (std::isinf(s.log_decay[t]) || s.decay_sign[t] == 0) {
      ++pieces;
      running = 0;
      running_sign = 1;
    } else {
      running += s.log_decay[t];
      running_sign *= s.decay_sign[t];
    }
    sum[t] = running;
    sign[t] = running_sign;
    piece[t] = pieces;
  }
  const std::vector<double> b = converted<double>(s.b), c = converted<double>(s.c);
  const bool slots = s.cache;  // b_t is the unit vector of slot t
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t i = t; i >= 0 && piece[static_cast<size_t>(i)] == piece[static_cast<size_t>(t)]; --i) {
      double dot = 0;
      if (slots) {
        dot = c[static_cast<size_t>(t * s.n + i)];
      } else {
        for (int64_t a = 0; a < s.n; ++a) dot += c[static_cast<size_t>(t * s.n + a)] * b[static_cast<size_t>(i * s.n + a)];
      }
      const auto ti = static_cast<size_t>(t), ii = static_cast<size_t>(i);
      const double factor = std::exp(sum[ti] - sum[ii] + s.log_weight[ii]) * sign[ti] * sign[ii] * s.weight_sign[ii];
      m(t, i) = dot == 0 ? 0 : dot * factor;
    }
  }
  return m;
}

// r = c_t, then r = r L_i for i = t, t - 1, ...: m[t, i] = r . b_i.
template <class S>
Matrix walked_mixing(const System& s, int64_t channel) {
  Matrix m(s.T, s.T);
  const int64_t n = s.n, set = s.shared ? 0 : channel, sets = s.sets();
  const std::vector<S> L = converted<S>(s.L), b = converted<S>(s.b), c = converted<S>(s.c);
  std::vector<S> r(static_cast<size_t>(n)), next(static_cast<size_t>(n));
  for (int64_t t = 0; t < s.T; ++t) {
    std::copy(c.begin() + (t * sets + set) * n, c.begin() + (t * sets + set + 1) * n, r.begin());
    for (int64_t i = t; i >= 0; --i) {
      const S* const write = b.data() + (i * sets + set) * n;
      S sum(0);
      for (int64_t a = 0; a < n; ++a) sum += r[static_cast<size_t>(a)] * write[a];
      m(t, i) = real(sum);
      if (i == 0) break;
      if (s.form == Form::diagonal) {
        const S* const gate = L.data() + (i * sets + set) * n;
        for (int64_t a = 0; a < n; ++a) r[static_cast<size_t>(a)] *= gate[a];
        continue;
      }
      const S* const block = L.data() + i * n * n;
      std::fill(next.begin(), next.end(), S(0));
      for (int64_t a = 0; a < n; ++a) {
        const S x = r[static_cast<size_t>(a)];
        for (int64_t k = 0; k < n; ++k) next[static_cast<size_t>(k)] += x * block[a * n + k];
      }
      r.swap(next);
    }
  }
  return m;
}

}  // namespace

std::vector<double> run(const System& s, const std::vector<double>& u) {
  if (s.full) return run_full(s, u);
  return s.complex ? run_as<Complex>(s, u) : run_as<double>(s, u);
}

Matrix channel_mixing(const System& s, int64_t channel) {
  Matrix m = s.form == Form::scalar ? scalar_mixing(s)
             : s.complex            ? walked_mixing<Complex>(s, channel)
                                    : walked_mixing<double>(s, channel);
  for (int64_t t = 0; t < s.T && !s.d.empty(); ++t)
    m(t, t) += s.d[static_cast<size_t>(t * s.sets() + (s.shared ? 0 : channel))];
  return m;
}

Matrix lag_response(const System& s, int64_t lag) {
  Matrix g(s.Dy, s.Du);
  for (int64_t a = 0; a < s.n; ++a) {
    const Complex power = std::pow(s.lambda[static_cast<size_t>(a)], static_cast<double>(lag));
    for (int64_t i = 0; i < s.Dy; ++i) {
      for (int64_t j = 0; j < s.Du; ++j) {
        g(i, j) +=
            (s.C[static_cast<size_t>(i * s.n + a)] * (lag == 0 ? Complex(1) : power) * s.B[static_cast<size_t>(a * s.Du + j)])
                .real();
      }
    }
  }
  for (size_t i = 0; i < g.values.size() && lag == 0 && !s.D.empty(); ++i) g.values[i] += s.D[i];
  return g;
}

Status block_eigenvalues(const System& s, int64_t t, int64_t set, std::vector<Complex>* values) {
  values->assign(static_cast<size_t>(s.n), 0);
  if (s.full) {
    *values = s.lambda;
  } else if (s.form == Form::scalar) {
    values->assign(static_cast<size_t>(s.n), decay(s, t));
  } else if (s.form == Form::diagonal) {
    for (int64_t a = 0; a < s.n; ++a)
      (*values)[static_cast<size_t>(a)] = s.L[static_cast<size_t>((t * s.sets() + set) * s.n + a)];
  } else {
    Matrix block(s.n, s.n);
    for (size_t i = 0; i < block.values.size(); ++i) block.values[i] = s.L[static_cast<size_t>(t * s.n * s.n) + i].real();
    return eigenvalues(std::move(block), values);
  }
  return {};
}

DenseSystem dense(const System& s) {
  const int64_t N = s.states(), Du = s.inputs(), Dy = s.outputs(), T = s.T, n = s.n;
  DenseSystem out;
  out.L.assign(static_cast<size_t>(T * N * N), 0);
  out.B.assign(static_cast<size_t>(T * N * Du), 0);
  out.C.assign(static_cast<size_t>(T * Dy * N), 0);
  out.D.assign(static_cast<size_t>(T * Dy * Du), 0);
  out.transfer.assign(static_cast<size_t>(T * T * Dy * Du), 0);
  for (int64_t t = 0; t < T; ++t) {
    if (s.full) {
      for (int64_t a = 0; a < n; ++a) out.L[static_cast<size_t>((t * N + a) * N + a)] = s.lambda[static_cast<size_t>(a)];
      std::copy(s.B.begin(), s.B.end(), out.B.begin() + t * N * Du);
      std::copy(s.C.begin(), s.C.end(), out.C.begin() + t * Dy * N);
      if (!s.D.empty()) std::copy(s.D.begin(), s.D.end(), out.D.begin() + t * Dy * Du);
      continue;
    }
    for (int64_t j = 0; j < s.channels; ++j) {
      const int64_t set = t * s.sets() + (s.shared ? 0 : j);
      for (int64_t a = 0; a < n; ++a) {
        const int64_t row = j * n + a;
        if (s.form == Form::dense) {
          for (int64_t k = 0; k < n; ++k) {
            out.L[static_cast<size_t>((t * N + row) * N + j * n + k)] = s.L[static_cast<size_t>((t * n + a) * n + k)];
          }
        } else {
          out.L[static_cast<size_t>((t * N + row) * N + row)] =
              s.form == Form::scalar ? Complex(decay(s, t)) : s.L[static_cast<size_t>(set * n + a)];
        }
        out.B[static_cast<size_t>((t * N + row) * Du + j)] =
            s.b[static_cast<size_t>(set * n + a)] * (s.form == Form::scalar ? weight(s, t) : 1.0);
        out.C[static_cast<size_t>((t * Dy + j) * N + row)] = s.c[static_cast<size_t>(set * n + a)];
      }
      if (!s.d.empty()) out.D[static_cast<size_t>((t * Dy + j) * Du + j)] = s.d[static_cast<size_t>(set)];
    }
  }
  const auto put = [&](int64_t t, int64_t i, int64_t y, int64_t u, double x) {
    out.transfer[static_cast<size_t>(((t * T + i) * Dy + y) * Du + u)] = x;
  };
  if (s.full) {
    for (int64_t lag = 0; lag < T; ++lag) {
      const Matrix g = lag_response(s, lag);
      for (int64_t t = lag; t < T; ++t) {
        for (int64_t y = 0; y < Dy; ++y) {
          for (int64_t u = 0; u < Du; ++u) put(t, t - lag, y, u, g(y, u));
        }
      }
    }
    return out;
  }
  Matrix m;
  for (int64_t j = 0; j < s.channels; ++j) {
    if (j == 0 || !s.shared) m = channel_mixing(s, j);
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t i = 0; i <= t; ++i) put(t, i, j, j, m(t, i));
    }
  }
  return out;
}

}  // namespace linnet::analysis
