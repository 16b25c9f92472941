#include "analysis/icl.h"

#include <algorithm>
#include <cmath>

namespace linnet::analysis {
namespace {

double root(double x) { return x > 0 ? std::sqrt(x) : 0; }
double inverse_root(double x) { return x > 0 ? 1 / std::sqrt(x) : 0; }  // the pseudo-inverse on a null space

// M = Sx^1/2 Sb Sx^1/2 with its eigenvectors, and the way back from W~ = Sx^1/2 W Sx^1/2.
struct Whitened {
  Matrix half, inverse_half, M;
  Eigen eigen;
  double tau = 0;
  explicit Whitened(const Prompts& p) {
    const Eigen x = symmetric_eigen(p.Sx);
    half = symmetric_function(x, root);
    inverse_half = symmetric_function(x, inverse_root);
    M = half * p.Sb * half;
    eigen = symmetric_eigen(M);
    for (double& l : eigen.values) l = std::max(l, 0.0);
    tau = trace(M);
  }
  // V diag(f) V^T in the coordinates of W.
  Matrix to_weights(const std::vector<double>& f) const { return inverse_half * in_eigenbasis(f) * inverse_half; }
  Matrix in_eigenbasis(const std::vector<double>& f) const {
    Matrix scaled = eigen.vectors;
    for (int64_t i = 0; i < scaled.rows; ++i) {
      for (int64_t j = 0; j < scaled.cols; ++j) scaled(i, j) *= f[static_cast<size_t>(j)];
    }
    return scaled * transposed(eigen.vectors);
  }
};

struct Moments {
  double a1 = 0, A = 0, B = 0, Kqq = 1;
};
Moments moments(const Matrix& K, const std::vector<double>& omega, double tau, double noise) {
  const auto n = static_cast<int64_t>(omega.size());
  Moments m;
  m.Kqq = K(n, n);
  for (int64_t i = 0; i < n; ++i) {
    const double w = omega[static_cast<size_t>(i)];
    m.a1 += w * K(i, n);
    m.A += w * w * (K(i, i) * tau + noise);
    m.B += w * w * K(i, i);
    for (int64_t j = 0; j < n; ++j) m.B += w * K(i, j) * omega[static_cast<size_t>(j)];
  }
  return m;
}

// Terms a1^2 l^2 / (A + B l) of the explained loss; 0 where nothing is known.
std::vector<double> explained(const std::vector<double>& l, const Moments& m) {
  std::vector<double> terms;
  for (const double each : l) terms.push_back(each == 0 || m.a1 == 0 ? 0 : m.a1 * m.a1 * each * each / (m.A + m.B * each));
  return terms;
}

Moments ordinary(int64_t n, double tau, double noise) {
  const auto N = static_cast<double>(n);
  return {N, N * (tau + noise), N * N + N, 1};
}

}  // namespace

Status check_prompts(const Prompts& p) {
  for (const auto& [name, S] : {std::pair{"Sx", &p.Sx}, std::pair{"Sb", &p.Sb}}) {
    if (S->rows != S->cols) return bad_input(std::string("icl: ") + name + " is not square");
    if (S->rows != p.Sx.rows) {
      return bad_input("icl: Sb has " + std::to_string(S->rows) + " rows, expected " + std::to_string(p.Sx.rows) +
                       " (same as Sx)");
    }
    const Eigen e = symmetric_eigen(*S);
    double size = 0;
    for (const double x : S->values) {
      if (!std::isfinite(x)) return bad_input(std::string("icl: ") + name + " has an entry that is not finite");
      size = std::max(size, std::abs(x));
    }
    for (int64_t i = 0; i < S->rows; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        if (std::abs((*S)(i, j) - (*S)(j, i)) > 1e-9 * size)
          return bad_input(std::string("icl: ") + name + " is not symmetric");
      }
    }
    if (!e.values.empty() && e.values.back() < -1e-9 * size) {
      return bad_input(std::string("icl: ") + name + " has the negative eigenvalue " + std::to_string(e.values.back()) +
                       ", expected a covariance");
    }
  }
  if (!(p.noise >= 0)) return bad_input("icl: noise is " + std::to_string(p.noise) + ", expected a variance");
  return {};
}

Matrix drift_matrix(double rho, int64_t n) {
  Matrix K(n + 1, n + 1);
  for (int64_t i = 0; i <= n; ++i) {
    for (int64_t j = 0; j <= n; ++j) K(i, j) = i == j ? 1 : std::pow(rho, static_cast<double>(std::abs(i - j)));
  }
  return K;
}

double step_loss(const Prompts& p, const Matrix& K, const Matrix& W, const std::vector<double>& omega) {
  const Whitened w(p);
  const Moments m = moments(K, omega, w.tau, p.noise);
  const Matrix V = w.half * W * w.half;
  const Matrix R = m.A * identity(V.rows) + m.B * w.M;
  return p.noise + m.Kqq * w.tau - 2 * m.a1 * trace(V * w.M) + trace(transposed(V) * V * R);
}

double best_step(const Prompts& p, const Matrix& K, const std::vector<double>& omega, Matrix* W) {
  const Whitened w(p);
  const Moments m = moments(K, omega, w.tau, p.noise);
  double loss = p.noise + m.Kqq * w.tau;
  for (const double term : explained(w.eigen.values, m)) loss -= term;
  if (W != nullptr) {
    std::vector<double> f;
    for (const double l : w.eigen.values) f.push_back(l == 0 || m.a1 == 0 ? 0 : m.a1 * l / (m.A + m.B * l));
    *W = w.to_weights(f);
  }
  return loss;
}

double rank_loss(const Prompts& p, int64_t n, int64_t rank, Matrix* W) {
  const Whitened w(p);
  const Moments m = ordinary(n, w.tau, p.noise);
  const std::vector<double> terms = explained(w.eigen.values, m);
  double loss = p.noise + w.tau;
  std::vector<double> f;
  for (size_t i = 0; i < terms.size(); ++i) {
    const double l = w.eigen.values[i];
    const bool kept = static_cast<int64_t>(i) < rank && n > 0;
    if (kept) loss -= terms[i];
    f.push_back(kept && l > 0 ? m.a1 * l / (m.A + m.B * l) : 0);
  }
  if (W != nullptr) *W = w.to_weights(f);
  return loss;
}

double optimal_loss(const Prompts& p, int64_t n, Matrix* W) { return rank_loss(p, n, p.Sx.rows, W); }

double isotropic_loss(int64_t d, int64_t n, double noise) {
  const auto D = static_cast<double>(d), N = static_cast<double>(n);
  return D + noise - N * D / (N + D + 1 + noise);
}

double adapted_loss(const Prompts& p, const Matrix& Sb_new, int64_t n, int64_t rank, Matrix* update) {
  const Prompts next = {p.Sx, Sb_new, p.noise};
  Matrix old_W, new_W;
  optimal_loss(p, n, &old_W);
  double loss = optimal_loss(next, n, &new_W);
  const Whitened w(next);
  const Moments m = ordinary(n, w.tau, p.noise);
  std::vector<double> r, inverse_r;
  for (const double l : w.eigen.values) {
    r.push_back(root(m.A + m.B * l));
    inverse_r.push_back(inverse_root(m.A + m.B * l));
  }
  const Svd svd = singular_value_decomposition(w.half * (new_W - old_W) * w.half * w.in_eigenbasis(r));
  for (size_t i = static_cast<size_t>(std::max<int64_t>(0, rank)); i < svd.values.size(); ++i)
    loss += svd.values[i] * svd.values[i];
  if (update != nullptr) {
    Matrix top = svd.u;
    for (int64_t i = 0; i < top.rows; ++i) {
      for (int64_t j = 0; j < top.cols; ++j) top(i, j) *= j < rank ? svd.values[static_cast<size_t>(j)] : 0;
    }
    *update = w.inverse_half * top * transposed(svd.v) * w.in_eigenbasis(inverse_r) * w.inverse_half;
  }
  return loss;
}

double drift_uniform_loss(int64_t d, int64_t n, double noise, double rho) {
  const Prompts p = {identity(d), identity(d), noise};
  return best_step(p, drift_matrix(rho, n), std::vector<double>(static_cast<size_t>(n), 1), nullptr);
}

double drift_weighted_loss(int64_t d, int64_t n, double noise, double rho, std::vector<double>* omega) {
  const Matrix K = drift_matrix(rho, n);
  Matrix G(n, n);
  std::vector<double> kappa, x;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) G(i, j) = K(i, j);
    G(i, i) += K(i, i) * static_cast<double>(d + 1) + noise;
    kappa.push_back(K(i, n));
  }
  solve(G, kappa, &x);  // positive definite: K is, and the diagonal is at least d + 1
  double explained_part = 0;
  for (size_t i = 0; i < x.size(); ++i) explained_part += kappa[i] * x[i];
  if (omega != nullptr) *omega = x;
  return noise + static_cast<double>(d) * (K(n, n) - explained_part);
}

double retrieval_loss(int64_t d, int64_t n, double noise, double alpha, double* w) {
  const auto D = static_cast<double>(d), N = static_cast<double>(n);
  const double a2 = alpha * alpha, c = 1 - a2, pair = D * (a2 * (D + 1) + 1);
  const double c1 = N * pair;
  const double c2 = N * D * (D + 2) * (a2 * (D + 3) + 1) +
                    N * (N - 1) * (a2 * a2 * D * (D + 2) * (D + 4) + 2 * a2 * c * D * (D + 2) + c * c * D) + noise * N * pair;
  if (w != nullptr) *w = n == 0 ? 0 : c1 / c2;
  return n == 0 ? D + noise : D + noise - c1 * c1 / c2;
}

double retrieval_limit(int64_t d, int64_t n, double noise, double alpha) {
  const auto D = static_cast<double>(d), N = static_cast<double>(n);
  const double kappa = alpha * alpha * D + 1;
  return D + noise - kappa * N * D / (kappa * N + D + noise);
}

double aligned_gamma(int64_t d, double alpha) { return 1 / std::sqrt(alpha * alpha * static_cast<double>(d) + 1); }

namespace {

// A polynomial in b = |beta|^2; its mean replaces b^p by d (d + 2) ... (d + 2p - 2).
using Polynomial = std::vector<double>;
Polynomial times(const Polynomial& p, const Polynomial& q) {
  Polynomial r(p.size() + q.size() - 1, 0);
  for (size_t i = 0; i < p.size(); ++i) {
    for (size_t j = 0; j < q.size(); ++j) r[i + j] += p[i] * q[j];
  }
  return r;
}
double mean(const Polynomial& p, double d) {
  double sum = 0, moment = 1;
  for (size_t i = 0; i < p.size(); ++i) {
    sum += p[i] * moment;
    moment *= d + 2 * static_cast<double>(i);
  }
  return sum;
}

}  // namespace

double aligned_loss(int64_t d, int64_t n, double noise, double alpha, double gamma, double* w) {
  const auto D = static_cast<double>(d), N = static_cast<double>(n);
  const double a2 = alpha * alpha, g2 = gamma * gamma;
  const Polynomial b = {0, 1}, f = {1, a2}, bf = times(b, f);
  const double c1 = g2 * N * mean(times(bf, f), D);
  const double c2 = g2 * (N * mean(times(bf, {2 + D, 6 * a2, a2 * a2}), D) + N * (N - 1) * mean(times(times(bf, f), f), D)) +
                    noise * N * mean({D, 2 * a2, a2 * a2}, D);
  const double whole = g2 * mean(bf, D) + noise;
  if (w != nullptr) *w = n == 0 ? 0 : c1 / c2;
  return n == 0 ? whole : whole - c1 * c1 / c2;
}

double aligned_limit(int64_t d, int64_t n, double noise, double alpha) {
  const auto D = static_cast<double>(d), N = static_cast<double>(n);
  const double k = (alpha * alpha * D + 1) * (alpha * alpha * D + 1);
  return D + noise - k * N * D / (k * N + D + noise);
}

namespace {

std::vector<double> row_times(const double* x, const Matrix& a) {
  std::vector<double> y(static_cast<size_t>(a.cols), 0);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) y[static_cast<size_t>(j)] += x[i] * a(i, j);
  }
  return y;
}
double product(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

double predict_attention(const Matrix& Z, const Matrix& wq, const Matrix& wk, const Matrix& wv,
                         const std::vector<double>& head) {
  const std::vector<double> q = row_times(Z.row(Z.rows - 1), wq);
  double sum = 0;
  for (int64_t i = 0; i + 1 < Z.rows; ++i) sum += product(q, row_times(Z.row(i), wk)) * product(row_times(Z.row(i), wv), head);
  return sum;
}

double predict_h3(const Matrix& Z, const Matrix& wq, const Matrix& wk, const Matrix& wv, const std::vector<double>& head,
                  const std::vector<double>& taps) {
  const std::vector<double> q = row_times(Z.row(Z.rows - 1), wq);
  const int64_t n = Z.rows - 1;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const std::vector<double> k = row_times(Z.row(i), wk), v = row_times(Z.row(i), wv);
    double term = 0;
    for (size_t c = 0; c < q.size(); ++c) term += q[c] * k[c] * v[c] * head[c];
    sum += taps[static_cast<size_t>(n - i)] * term;
  }
  return sum;
}

double predict_step(const Matrix& Z, const Matrix& W, const std::vector<double>& omega) {
  const int64_t d = Z.cols - 1;
  const std::vector<double> xW = row_times(Z.row(Z.rows - 1), W);
  double sum = 0;
  for (int64_t i = 0; i + 1 < Z.rows; ++i) {
    double dot = 0;
    for (int64_t c = 0; c < d; ++c) dot += xW[static_cast<size_t>(c)] * Z(i, c);
    sum += omega[static_cast<size_t>(i)] * dot * Z(i, d);
  }
  return sum;
}

}  // namespace linnet::analysis
