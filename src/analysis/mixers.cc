#include "analysis/mixers.h"

#include <algorithm>
#include <cmath>

#include "analysis/mixer_reader.h"
#include "analysis/mixers_gated.h"
#include "check/random.h"

namespace linnet::analysis {
namespace {

// ---- normalised kernels: linear attention, Taylor

Status feature_map(const Reader& in, const std::string& feature, double x, double* y) {
  if (feature == "elu1") {
    *y = x > 0 ? x + 1 : std::exp(x);
  } else if (feature == "relu") {
    *y = std::max(x, 0.0);
  } else if (feature == "exp") {
    *y = std::exp(x);
  } else if (feature == "softplus") {
    *y = softplus(x);
  } else if (feature == "sigmoid") {
    *y = sigmoid(x);
  } else if (feature == "silu") {
    *y = x * sigmoid(x);
  } else if (feature == "square") {
    *y = x * x;
  } else if (feature == "identity" || feature == "none") {
    *y = x;
  } else {
    return in.error("feature is '" + feature + "', expected elu1, relu, exp, softplus, sigmoid, silu, square or identity");
  }
  return {};
}

Status mapped_rows(const Reader& in, bool taylor, const double* x, int64_t rows, int64_t K, std::vector<double>* out,
                   int64_t* n) {
  out->clear();
  double scale = taylor ? 1 / std::sqrt(static_cast<double>(K)) : 1, order = 2;
  LINNET_TRY(in.real("scale", &scale));
  LINNET_TRY(in.real("order", &order));
  if (taylor && (order < 0 || order > 8 || order != std::floor(order)))
    return in.error("order is " + in.word("order", "") + ", expected 0 to 8");
  if (!(scale > 0)) return in.error("scale is " + in.word("scale", "") + ", expected a number above 0");
  *n = K;
  if (taylor) {
    double size = 1;
    for (int64_t i = 1; i <= static_cast<int64_t>(order); ++i)
      size = size * static_cast<double>(K + i) / static_cast<double>(i);
    if (size > 1e6) return in.error("its features have " + std::to_string(size) + " entries, expected at most a million");
  }
  const std::string feature = in.word("feature", "elu1");
  std::vector<double> row(static_cast<size_t>(K));
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t c = 0; c < K; ++c) {
      row[static_cast<size_t>(c)] = std::sqrt(scale) * x[t * K + c];
      if (!taylor) LINNET_TRY(feature_map(in, feature, row[static_cast<size_t>(c)], &row[static_cast<size_t>(c)]));
    }
    const std::vector<double> phi = taylor ? taylor_features(row.data(), K, static_cast<int64_t>(order)) : row;
    *n = static_cast<int64_t>(phi.size());
    out->insert(out->end(), phi.begin(), phi.end());
  }
  if (taylor && rows == 0) *n = static_cast<int64_t>(taylor_features(row.data(), K, static_cast<int64_t>(order)).size());
  return {};
}

// L = nu_{t-1} / nu_t, weight 1 / nu_t, nu_t = phi(q_t) . sum phi(k_i). A step with nu = 0 gives 0: it keeps the normaliser of
// the step before and reads nothing.
Status build_normalised(const Reader& in, bool taylor, bool normalise, System* s, std::vector<double>* out) {
  Heads h;
  LINNET_TRY(read_heads(in, &h));
  std::vector<double> fq, fk;
  int64_t n = 0;
  LINNET_TRY(mapped_rows(in, taylor, h.q, h.T, h.K, &fq, &n));
  LINNET_TRY(mapped_rows(in, taylor, h.k, h.T, h.K, &fk, &n));
  start(s, h.T, n, h.V, Form::scalar);
  std::vector<double> z(static_cast<size_t>(n), 0);
  double log_before = 0, sign_before = 0;  // of nu; sign 0: none yet
  for (int64_t t = 0; t < h.T; ++t) {
    const auto at = static_cast<size_t>(t);
    const double *q = fq.data() + t * n, *k = fk.data() + t * n;
    for (int64_t a = 0; a < n; ++a) z[static_cast<size_t>(a)] += k[a];
    double nu = normalise ? dot(q, z.data(), n) : 1;
    for (int64_t a = 0; a < n; ++a) {
      s->b[static_cast<size_t>(t * n + a)] = k[a];
      s->c[static_cast<size_t>(t * n + a)] = nu == 0 ? 0 : q[a];
    }
    if (nu == 0) ++s->restarts;
    double log_nu = nu == 0 ? log_before : std::log(std::abs(nu)), sign = nu == 0 ? sign_before : nu > 0 ? 1 : -1;
    if (sign == 0) sign = 1;  // nothing was normalised yet: any number will do
    if (!normalise) {
      s->log_decay[at] = 0;
    } else if (sign_before == 0) {
      s->log_decay[at] = -HUGE_VAL;
    } else {
      s->log_decay[at] = log_before - log_nu;
      s->decay_sign[at] = sign_before * sign;
    }
    s->log_weight[at] = normalise ? -log_nu : 0;
    s->weight_sign[at] = normalise ? sign : 1;
    log_before = log_nu;
    sign_before = sign;
  }
  out->assign(static_cast<size_t>(h.T * h.V), 0);
  for (int64_t t = 0; t < h.T; ++t) {
    double sum = 0;
    for (int64_t i = 0; i <= t; ++i) {
      const double w = dot(fq.data() + t * n, fk.data() + i * n, n);
      sum += w;
      for (int64_t j = 0; j < h.V; ++j) (*out)[static_cast<size_t>(t * h.V + j)] += w * h.v[i * h.V + j];
    }
    for (int64_t j = 0; j < h.V && normalise; ++j) (*out)[static_cast<size_t>(t * h.V + j)] *= sum == 0 ? 0 : 1 / sum;
  }
  return {};
}

Status build_softmax(const Reader& in, System* s, std::vector<double>* out) {
  Heads h;
  LINNET_TRY(read_heads(in, &h));
  double scale = 1 / std::sqrt(static_cast<double>(h.K));
  LINNET_TRY(in.real("scale", &scale));
  start(s, h.T, h.T, h.V, Form::scalar);
  s->cache = true;
  out->assign(static_cast<size_t>(h.T * h.V), 0);
  for (int64_t t = 0; t < h.T; ++t) {
    std::vector<double> w(static_cast<size_t>(t + 1));
    double most = -HUGE_VAL, sum = 0;
    for (int64_t i = 0; i <= t; ++i)
      most = std::max(most, w[static_cast<size_t>(i)] = scale * dot(h.q + t * h.K, h.k + i * h.K, h.K));
    for (double& x : w) sum += x = std::exp(x - most);
    for (int64_t i = 0; i <= t; ++i) {
      s->c[static_cast<size_t>(t * h.T + i)] = w[static_cast<size_t>(i)] / sum;
      for (int64_t j = 0; j < h.V; ++j)
        (*out)[static_cast<size_t>(t * h.V + j)] += w[static_cast<size_t>(i)] / sum * h.v[i * h.V + j];
    }
    s->b[static_cast<size_t>(t * h.T + t)] = 1;
  }
  return {};
}

// ---- scalar decays: normalised attention, retention, SSD, mLSTM

Status build_scalar(const Reader& in, const std::string& mixer, System* s, std::vector<double>* out) {
  Heads h;
  LINNET_TRY(read_heads(in, &h));
  start(s, h.T, h.K, h.V, Form::scalar);
  double scale = 1, key_scale = 1;
  LINNET_TRY(in.real("scale", &scale));
  std::vector<double> divisor(static_cast<size_t>(h.T), 1);
  if (mixer == "normalised") {
    const double* n = nullptr;
    LINNET_TRY(in.get("n", {&h.T}, &n));
    for (int64_t t = 0; t < h.T; ++t) {
      s->log_decay[static_cast<size_t>(t)] = t == 0 ? -HUGE_VAL : n[t - 1] - n[t];
      s->log_weight[static_cast<size_t>(t)] = -n[t];
    }
  } else if (mixer == "retention") {
    double gamma = 0.9;
    const double* log_alpha = nullptr;
    LINNET_TRY(in.real("gamma", &gamma));
    if (gamma < 0) return in.error("gamma is " + in.word("gamma", "") + ", expected at least 0");
    const bool given = in.has("log_alpha"), plain = !given && in.has("alpha");
    if (given || plain) LINNET_TRY(in.get(given ? "log_alpha" : "alpha", {&h.T}, &log_alpha));
    for (int64_t t = 0; t < h.T; ++t) {
      s->log_decay[static_cast<size_t>(t)] = given ? log_alpha[t] : std::log(plain ? log_alpha[t] : gamma);
    }
  } else if (mixer == "ssd") {
    const double *delta = nullptr, *A = nullptr, *d = nullptr;
    int64_t one = 1;
    double decay = -1, skip = 0;  // one number each: tensors, or words
    LINNET_TRY(in.get("delta", {&h.T}, &delta));
    LINNET_TRY(in.real("A", &decay));
    LINNET_TRY(in.real("d", &skip));
    if (in.has("A")) LINNET_TRY(in.rank("A") == 0 ? in.get("A", {}, &A) : in.get("A", {&one}, &A));
    if (in.has("d")) LINNET_TRY(in.rank("d") == 0 ? in.get("d", {}, &d) : in.get("d", {&one}, &d));
    if (A != nullptr) decay = A[0];
    if (d != nullptr) skip = d[0];
    for (int64_t t = 0; t < h.T; ++t) {
      s->log_decay[static_cast<size_t>(t)] = delta[t] * decay;
      s->log_weight[static_cast<size_t>(t)] = std::log(std::abs(delta[t]));
      s->weight_sign[static_cast<size_t>(t)] = delta[t] < 0 ? -1 : 1;
    }
    if (skip != 0) s->d.assign(static_cast<size_t>(h.T), skip);
  } else {  // mlstm
    const double *forget = nullptr, *inp = nullptr;
    LINNET_TRY(in.get("forget", {&h.T}, &forget));
    LINNET_TRY(in.get("inp", {&h.T}, &inp));
    const bool exponential = in.word("forget_gate", "sigmoid") == "exp";
    key_scale = 1 / std::sqrt(static_cast<double>(h.K));
    std::vector<double> norm(static_cast<size_t>(h.K), 0);
    for (int64_t t = 0; t < h.T; ++t) {
      s->log_decay[static_cast<size_t>(t)] = exponential ? forget[t] : -softplus(-forget[t]);
      s->log_weight[static_cast<size_t>(t)] = inp[t];
      for (int64_t a = 0; a < h.K; ++a) {
        double& each = norm[static_cast<size_t>(a)];
        each = std::exp(s->log_decay[static_cast<size_t>(t)]) * each + std::exp(inp[t]) * key_scale * h.k[t * h.K + a];
      }
      divisor[static_cast<size_t>(t)] = std::max(std::abs(dot(h.q + t * h.K, norm.data(), h.K)), 1.0);
    }
  }
  std::vector<double> state(static_cast<size_t>(h.K * h.V), 0);
  out->assign(static_cast<size_t>(h.T * h.V), 0);
  for (int64_t t = 0; t < h.T; ++t) {
    const auto at = static_cast<size_t>(t);
    const double decay = std::exp(s->log_decay[at]), weight = s->weight_sign[at] * std::exp(s->log_weight[at]);
    for (int64_t a = 0; a < h.K; ++a) {
      s->b[static_cast<size_t>(t * h.K + a)] = key_scale * h.k[t * h.K + a];
      s->c[static_cast<size_t>(t * h.K + a)] = scale * h.q[t * h.K + a] / divisor[at];
    }
    if (mixer == "normalised") {  // its own form: exp(-n_t) (q_t . k_i), no state
      for (int64_t i = 0; i <= t; ++i) {
        const double w = scale * weight * dot(h.q + t * h.K, h.k + i * h.K, h.K);
        for (int64_t j = 0; j < h.V; ++j) (*out)[static_cast<size_t>(t * h.V + j)] += w * h.v[i * h.V + j];
      }
      continue;
    }
    for (int64_t j = 0; j < h.V; ++j) {
      double y = s->d.empty() ? 0 : s->d[at] * h.v[t * h.V + j];
      for (int64_t a = 0; a < h.K; ++a) {
        double& x = state[static_cast<size_t>(a * h.V + j)];
        x = decay * x + weight * key_scale * h.k[t * h.K + a] * h.v[t * h.V + j];
        y += scale * h.q[t * h.K + a] / divisor[at] * x;
      }
      (*out)[static_cast<size_t>(t * h.V + j)] = y;
    }
  }
  return {};
}

// ---- gated linear attention and the delta rules: S = gate S, minus beta k k^T S, plus w k v^T

Status build_gated(const Reader& in, const std::string& mixer, System* s, std::vector<double>* out) {
  Heads h;
  LINNET_TRY(read_heads(in, &h));
  const int64_t K = h.K;
  double scale = 1;
  LINNET_TRY(in.real("scale", &scale));
  const bool delta_rule = mixer != "gla";
  const double *beta = nullptr, *alpha = nullptr;
  if (delta_rule) LINNET_TRY(in.get("beta", {&h.T}, &beta));
  const bool logs = in.has("log_alpha");
  const std::string gate = logs ? "log_alpha" : "alpha";
  const bool per_key = in.rank(gate) == 2;
  if (mixer != "delta" || in.has(gate)) {
    if (per_key) {
      LINNET_TRY(in.get(gate, {&h.T, &h.K}, &alpha));
    } else {
      LINNET_TRY(in.get(gate, {&h.T}, &alpha));
    }
  }
  start(s, h.T, K, h.V, delta_rule ? Form::dense : Form::diagonal);
  std::vector<double> state(static_cast<size_t>(K * h.V), 0);
  out->assign(static_cast<size_t>(h.T * h.V), 0);
  for (int64_t t = 0; t < h.T; ++t) {
    const double* k = h.k + t * K;
    const auto gated = [&](int64_t a) {
      if (alpha == nullptr) return 1.0;
      const double x = alpha[per_key ? t * K + a : t];
      return logs ? std::exp(x) : x;
    };
    const double w = delta_rule ? beta[t] : 1;
    for (int64_t a = 0; a < K; ++a) {
      s->b[static_cast<size_t>(t * K + a)] = w * k[a];
      s->c[static_cast<size_t>(t * K + a)] = scale * h.q[t * K + a];
      if (!delta_rule) s->L[static_cast<size_t>(t * K + a)] = gated(a);
      for (int64_t c = 0; c < K && delta_rule; ++c) {  // the decay acts first: (I - beta k k^T) diag(alpha)
        s->L[static_cast<size_t>((t * K + a) * K + c)] = ((a == c ? 1.0 : 0.0) - w * k[a] * k[c]) * gated(c);
      }
    }
    for (int64_t j = 0; j < h.V; ++j) {
      double kept = 0, y = 0;
      for (int64_t a = 0; a < K; ++a) kept += k[a] * (state[static_cast<size_t>(a * h.V + j)] *= gated(a));
      const double write = w * (h.v[t * h.V + j] - (delta_rule ? kept : 0));
      for (int64_t a = 0; a < K; ++a) y += scale * h.q[t * K + a] * (state[static_cast<size_t>(a * h.V + j)] += k[a] * write);
      (*out)[static_cast<size_t>(t * h.V + j)] = y;
    }
  }
  return {};
}

// ---- per channel: S6, RG-LRU, quasi LSTM

Status build_s6(const Reader& in, System* s, std::vector<double>* out) {
  int64_t T = -1, d = -1, n = -1;
  const double *A = nullptr, *b = nullptr, *c = nullptr, *delta = nullptr, *skip = nullptr, *u = nullptr, *gate = nullptr;
  LINNET_TRY(in.get("A", {&d, &n}, &A));
  LINNET_TRY(in.get("b", {&T, &n}, &b));
  LINNET_TRY(in.get("c", {&T, &n}, &c));
  LINNET_TRY(in.get("delta", {&T, &d}, &delta));
  LINNET_TRY(in.get(in.has("u") ? "u" : "v", {&T, &d}, &u));
  if (in.has("d")) LINNET_TRY(in.get("d", {&d}, &skip));
  if (in.has("gate")) LINNET_TRY(in.get("gate", {&T, &d}, &gate));
  start(s, T, n, d, Form::diagonal, false);
  if (skip != nullptr) s->d.assign(static_cast<size_t>(T * d), 0);
  out->assign(static_cast<size_t>(T * d), 0);
  std::vector<double> state(static_cast<size_t>(d * n), 0);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t j = 0; j < d; ++j) {
      const double dt = delta[t * d + j], x = u[t * d + j], read = gate == nullptr ? 1 : gate[t * d + j];
      double y = skip == nullptr ? 0 : skip[j] * x;
      if (skip != nullptr) s->d[static_cast<size_t>(t * d + j)] = read * skip[j];
      for (int64_t a = 0; a < n; ++a) {
        const auto at = static_cast<size_t>((t * d + j) * n + a);
        s->L[at] = std::exp(dt * A[j * n + a]);
        s->b[at] = dt * b[t * n + a];
        s->c[at] = read * c[t * n + a];
        double& h = state[static_cast<size_t>(j * n + a)];
        h = std::exp(dt * A[j * n + a]) * h + dt * b[t * n + a] * x;
        y += c[t * n + a] * h;
      }
      (*out)[static_cast<size_t>(t * d + j)] = read * y;
    }
  }
  return {};
}

// Gates [T, d] of a recurrence with one state per channel.
void build_gates(int64_t T, int64_t d, const std::vector<double>& keep, const std::vector<double>& write,
                 const std::vector<double>& read, const double* u, System* s, std::vector<double>* out) {
  start(s, T, 1, d, Form::diagonal, false);
  out->assign(static_cast<size_t>(T * d), 0);
  std::vector<double> h(static_cast<size_t>(d), 0);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t j = 0; j < d; ++j) {
      const auto at = static_cast<size_t>(t * d + j);
      s->L[at] = keep[at];
      s->b[at] = write[at];
      s->c[at] = read[at];
      h[static_cast<size_t>(j)] = keep[at] * h[static_cast<size_t>(j)] + write[at] * u[at];
      (*out)[at] = read[at] * h[static_cast<size_t>(j)];
    }
  }
}

Status build_rglru(const Reader& in, System* s, std::vector<double>* out) {
  int64_t T = -1, d = -1;
  const double *lam = nullptr, *r = nullptr, *i = nullptr, *u = nullptr;
  double power = 8;
  LINNET_TRY(in.real("power", &power));
  LINNET_TRY(in.get("r_logit", {&T, &d}, &r));
  LINNET_TRY(in.get("i_logit", {&T, &d}, &i));
  LINNET_TRY(in.get("lam", {&d}, &lam));
  LINNET_TRY(in.get(in.has("u") ? "u" : "v", {&T, &d}, &u));
  std::vector<double> keep, write;
  for (int64_t at = 0; at < T * d; ++at) {
    const double log_a = -power * softplus(lam[at % d]) * sigmoid(r[at]);
    keep.push_back(std::exp(log_a));
    write.push_back(std::sqrt(-std::expm1(2 * log_a)) * sigmoid(i[at]));  // 1 - a^2 without cancellation near a = 1
  }
  build_gates(T, d, keep, write, std::vector<double>(keep.size(), 1), u, s, out);
  return {};
}

Status build_lstm(const Reader& in, bool reversed, System* s, std::vector<double>* out) {
  int64_t T = -1, d = -1;
  const double *f = nullptr, *i = nullptr, *o = nullptr, *u = nullptr;
  double power = 1;
  LINNET_TRY(in.real("reverse_power", &power));
  reversed |= !in.word("reverse_power", "").empty();
  LINNET_TRY(in.get("forget", {&T, &d}, &f));
  LINNET_TRY(in.get("inp", {&T, &d}, &i));
  LINNET_TRY(in.get("outp", {&T, &d}, &o));
  LINNET_TRY(in.get(in.has("u") ? "u" : "v", {&T, &d}, &u));
  std::vector<double> keep, write, read;
  for (int64_t at = 0; at < T * d; ++at) {
    keep.push_back(reversed ? std::exp(-power * softplus(f[at])) : sigmoid(f[at]));  // sigmoid(-f)^a = exp(-a softplus(f))
    write.push_back(sigmoid(i[at]));
    read.push_back(sigmoid(o[at]));
  }
  build_gates(T, d, keep, write, read, u, s, out);
  return {};
}

// ---- complex: LRU, H3

// Constant matrices: L = diag(lambda), B = diag(factor) (b_real + i b_imag), C, D.
Status build_constant(const Reader& in, const std::vector<Complex>& lambda, const std::vector<Complex>& factor, System* s,
                      std::vector<double>* out) {
  int64_t N = static_cast<int64_t>(lambda.size()), Du = -1, Dy = -1, T = -1;
  const double *br = nullptr, *bi = nullptr, *cr = nullptr, *ci = nullptr, *d = nullptr, *u = nullptr;
  LINNET_TRY(in.get("b_real", {&N, &Du}, &br));
  LINNET_TRY(in.get("b_imag", {&N, &Du}, &bi));
  LINNET_TRY(in.get("c_real", {&Dy, &N}, &cr));
  LINNET_TRY(in.get("c_imag", {&Dy, &N}, &ci));
  LINNET_TRY(in.get(in.has("u") ? "u" : "v", {&T, &Du}, &u));
  *s = System();
  s->T = T;
  s->n = N;
  s->channels = 1;
  s->complex = s->full = true;
  s->Du = Du;
  s->Dy = Dy;
  s->lambda = lambda;
  for (int64_t i = 0; i < N * Du; ++i) s->B.push_back(factor[static_cast<size_t>(i / Du)] * Complex(br[i], bi[i]));
  for (int64_t i = 0; i < Dy * N; ++i) s->C.emplace_back(cr[i], ci[i]);
  s->D.assign(static_cast<size_t>(Dy * Du), 0);
  if (in.rank("d") == 2) {
    LINNET_TRY(in.get("d", {&Dy, &Du}, &d));
    std::copy(d, d + Dy * Du, s->D.begin());
  } else if (in.has("d")) {
    LINNET_TRY(in.get("d", {&Dy}, &d));
    for (int64_t i = 0; i < std::min(Dy, Du); ++i) s->D[static_cast<size_t>(i * Du + i)] = d[i];
  }
  // By convolution: y_t = sum over lags of Re(C lambda^lag B) u.
  out->assign(static_cast<size_t>(T * Dy), 0);
  for (int64_t lag = 0; lag < T; ++lag) {
    const Matrix g = lag_response(*s, lag);
    for (int64_t t = lag; t < T; ++t) {
      for (int64_t i = 0; i < Dy; ++i) (*out)[static_cast<size_t>(t * Dy + i)] += dot(g.row(i), u + (t - lag) * Du, Du);
    }
  }
  return {};
}

Status build_lru(const Reader& in, System* s, std::vector<double>* out) {
  int64_t N = -1;
  const double *nu = nullptr, *theta = nullptr;
  LINNET_TRY(in.get("nu_log", {&N}, &nu));
  LINNET_TRY(in.get("theta_log", {&N}, &theta));
  std::vector<Complex> lambda, gamma;
  for (int64_t a = 0; a < N; ++a) {
    const double log_size = -std::exp(nu[a]);
    lambda.push_back(std::polar(std::exp(log_size), std::exp(theta[a])));
    gamma.emplace_back(std::sqrt(-std::expm1(2 * log_size)));
  }
  return build_constant(in, lambda, gamma, s, out);
}

// The input map of a mode a (complex, per unit of time) held for dt: B as it is, or by zero-order hold.
Status held(const Reader& in, Complex a, double dt, Complex* factor) {
  const std::string rule = in.word("discretise", "none");
  if (rule != "none" && rule != "zoh") return in.error("discretise is '" + rule + "', expected none or zoh");
  const Complex x = a * dt;
  *factor = rule == "none" ? 1 : std::abs(x) < 1e-4 ? dt * (1.0 + x / 2.0 + x * x / 6.0) : (std::exp(x) - 1.0) / a;
  return {};
}

// S4D: each channel has a diagonal system of its own, y = Re(c . h) + d u.
Status build_s4d(const Reader& in, System* s, std::vector<double>* out) {
  int64_t T = -1, d = -1, n = -1;
  const double *ar = nullptr, *ai = nullptr, *br = nullptr, *bi = nullptr, *cr = nullptr, *ci = nullptr, *dt = nullptr,
               *skip = nullptr, *u = nullptr;
  LINNET_TRY(in.get("a_real", {&d, &n}, &ar));
  LINNET_TRY(in.get("a_imag", {&d, &n}, &ai));
  LINNET_TRY(in.get("dt", {&d}, &dt));
  LINNET_TRY(in.get("b_real", {&d, &n}, &br));
  LINNET_TRY(in.get("b_imag", {&d, &n}, &bi));
  LINNET_TRY(in.get("c_real", {&d, &n}, &cr));
  LINNET_TRY(in.get("c_imag", {&d, &n}, &ci));
  LINNET_TRY(in.get(in.has("u") ? "u" : "v", {&T, &d}, &u));
  if (in.has("d")) LINNET_TRY(in.get("d", {&d}, &skip));
  start(s, T, n, d, Form::diagonal, false);
  s->complex = true;
  if (skip != nullptr) s->d.assign(static_cast<size_t>(T * d), 0);
  out->assign(static_cast<size_t>(T * d), 0);
  for (int64_t j = 0; j < d; ++j) {
    std::vector<double> filter(static_cast<size_t>(T), 0);  // its own form: a convolution with Re(sum c lambda^lag b)
    for (int64_t m = 0; m < n; ++m) {
      const auto at = static_cast<size_t>(j * n + m);
      const Complex a(ar[at], ai[at]), c(cr[at], ci[at]), lambda = std::exp(a * dt[j]);
      Complex b;
      LINNET_TRY(held(in, a, dt[j], &b));
      b *= Complex(br[at], bi[at]);
      for (int64_t t = 0; t < T; ++t) {
        const auto to = static_cast<size_t>((t * d + j) * n + m);
        s->L[to] = lambda;
        s->b[to] = b;
        s->c[to] = c;
        filter[static_cast<size_t>(t)] += (c * std::exp(a * (dt[j] * static_cast<double>(t))) * b).real();
      }
    }
    for (int64_t t = 0; t < T; ++t) {
      double y = skip == nullptr ? 0 : skip[j] * u[t * d + j];
      if (skip != nullptr) s->d[static_cast<size_t>(t * d + j)] = skip[j];
      for (int64_t i = 0; i <= t; ++i) y += filter[static_cast<size_t>(t - i)] * u[i * d + j];
      (*out)[static_cast<size_t>(t * d + j)] = y;
    }
  }
  return {};
}

// S5: one diagonal system for all channels, y = Re(C h) + D u.
Status build_s5(const Reader& in, System* s, std::vector<double>* out) {
  int64_t N = -1;
  const double *ar = nullptr, *ai = nullptr, *dt = nullptr;
  LINNET_TRY(in.get("a_real", {&N}, &ar));
  LINNET_TRY(in.get("a_imag", {&N}, &ai));
  LINNET_TRY(in.get("dt", {&N}, &dt));
  std::vector<Complex> lambda, factor(static_cast<size_t>(N));
  for (int64_t a = 0; a < N; ++a) {
    const Complex rate(ar[a], ai[a]);
    lambda.push_back(std::exp(rate * dt[a]));
    LINNET_TRY(held(in, rate, dt[a], &factor[static_cast<size_t>(a)]));
  }
  return build_constant(in, lambda, factor, s, out);
}

// One head without the key filter: y_t = d (q_t . k_t) v_t + sum_i 2 Re(sum_m c_m a_m^(t-i) bd_m) (q_t . k_i) v_i.
Status build_h3(const Reader& in, System* s, std::vector<double>* out) {
  Heads h;
  LINNET_TRY(read_heads(in, &h));
  int64_t M = -1;
  const double* part[6] = {};
  const char* names[6] = {"a_real", "a_imag", "b_real", "b_imag", "c_real", "c_imag"};
  for (int i = 0; i < 6; ++i) LINNET_TRY(in.get(names[i], {&M}, &part[i]));
  double skip = 0;
  LINNET_TRY(in.real("d", &skip));
  start(s, h.T, h.K * M, h.V, Form::diagonal);
  s->complex = true;
  s->d.assign(static_cast<size_t>(h.T), 0);
  const auto mode = [&](int i, int64_t m) { return Complex(part[i][m], part[i + 1][m]); };
  for (int64_t t = 0; t < h.T; ++t) {
    s->d[static_cast<size_t>(t)] = skip * dot(h.q + t * h.K, h.k + t * h.K, h.K);
    for (int64_t p = 0; p < h.K; ++p) {
      for (int64_t m = 0; m < M; ++m) {
        const auto at = static_cast<size_t>((t * h.K + p) * M + m);
        s->L[at] = mode(0, m);
        s->b[at] = mode(2, m) * h.k[t * h.K + p];
        s->c[at] = 2.0 * mode(4, m) * h.q[t * h.K + p];
      }
    }
  }
  out->assign(static_cast<size_t>(h.T * h.V), 0);
  std::vector<double> filter(static_cast<size_t>(h.T), 0);
  for (int64_t lag = 0; lag < h.T; ++lag) {
    for (int64_t m = 0; m < M; ++m) {
      const Complex power = lag == 0 ? 1 : std::pow(mode(0, m), static_cast<double>(lag));
      filter[static_cast<size_t>(lag)] += 2 * (mode(4, m) * power * mode(2, m)).real();
    }
  }
  for (int64_t t = 0; t < h.T; ++t) {
    for (int64_t i = 0; i <= t; ++i) {
      const double w = (filter[static_cast<size_t>(t - i)] + (t == i ? skip : 0)) * dot(h.q + t * h.K, h.k + i * h.K, h.K);
      for (int64_t j = 0; j < h.V; ++j) (*out)[static_cast<size_t>(t * h.V + j)] += w * h.v[i * h.V + j];
    }
  }
  return {};
}

std::string plain_name(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (c != '_' && c != '-' && c != ' ') out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return out;
}

}  // namespace

std::vector<double> taylor_features(const double* x, int64_t width, int64_t order) {
  std::vector<double> features = {1};
  // Index tuples i_1 <= ... <= i_m in lexicographic order; the weight is sqrt(1 / prod c_i!), c_i how often i occurs.
  struct Term {
    double value;
    int64_t last, repeats;
  };
  std::vector<Term> terms = {{1, 0, 0}};
  for (int64_t degree = 1; degree <= order; ++degree) {
    std::vector<Term> next;
    for (const Term& term : terms) {
      for (int64_t i = term.last; i < width; ++i) {
        const int64_t repeats = degree > 1 && i == term.last ? term.repeats + 1 : 1;
        next.push_back({term.value * x[i] / std::sqrt(static_cast<double>(repeats)), i, repeats});
      }
    }
    terms = std::move(next);
    for (const Term& term : terms) features.push_back(term.value);
  }
  return features;
}

const std::vector<Mixer>& all_mixers() {
  static const std::vector<Mixer> mixers = {
      {"softmax", "softmax attention, exact on its sequence", "I", "q k v",
       "a cache that grows, normalised by its own sum, no gate"},
      {"taylor", "softmax attention, expanded to an order", "nu_{t-1}/nu_t", "q k v",
       "binom(K + p, p) features, normalised by the query"},
      {"linear", "linear attention, normalised", "nu_{t-1}/nu_t", "q k v", "K features, normalised by the query"},
      {"linear_sum", "linear attention without normaliser", "I", "q k v", "K features, not normalised, never forgets"},
      {"normalised", "normalised attention", "exp(n_{t-1} - n_t)", "q k v n", "K states, normalised by a learned n"},
      {"retention", "retention", "gamma", "q k v", "K states, one constant decay"},
      {"ssd", "Mamba-2's SSD", "exp(dt A)", "b c delta A d u", "K states, one gate that also writes"},
      {"mlstm", "xLSTM's mLSTM", "f", "q k v forget inp", "K states, one gate, exponential input, normalised"},
      {"gla", "gated linear attention", "diag(alpha)", "q k v log_alpha", "K states, a gate per state"},
      {"delta", "the delta rule", "I - beta k k^T", "q k v beta", "K states, replaces what its key held"},
      {"gated_delta", "the gated delta rule", "alpha (I - beta k k^T)", "q k v alpha beta", "K states, replaces and forgets"},
      {"kda", "Kimi delta attention", "(I - beta k k^T) diag(alpha)", "q k v log_alpha beta",
       "K states, replaces, a gate per state"},
      {"s6", "Mamba's selective scan", "diag exp(dt A)", "A b c delta d u gate",
       "n states a channel, a gate per channel that also writes"},
      {"s4d", "S4D, a diagonal state space per channel", "diag exp(dt A), complex",
       "a_real a_imag dt b_real b_imag c_real c_imag d u", "n complex states a channel, constant"},
      {"s5", "S5, one diagonal state space for all channels", "diag exp(dt A), complex",
       "a_real a_imag dt b_real b_imag c_real c_imag d u", "n complex states, constant"},
      {"lru", "the linear recurrent unit", "diag(lambda), complex", "nu_log theta_log b_real b_imag c_real c_imag d u",
       "n complex states, constant"},
      {"rglru", "Griffin's RG-LRU", "diag(a)", "lam r_logit i_logit u", "one state a channel, gated"},
      {"quasi_lstm", "the quasi LSTM", "diag sigmoid(f)", "forget inp outp u", "one state a channel, free gates"},
      {"reversed_lstm", "the quasi LSTM with a reversed gate", "diag sigmoid(-f)^a", "forget inp outp u",
       "one state a channel, S6's gate"},
      {"metala", "MetaLA, whose key is one minus its decay", "diag(alpha)", "q v log_alpha w_aug",
       "K states, a gate per state that also writes"},
      {"zeros", "ZeroS, zero-sum linear attention", "diag(E_{t-1}/E_t, (t-1)/t, (t-1)/t)", "q k v s s1 sh s0",
       "3 K states: weights of the softmax of the steps' logits, of their first order, of none"},
      {"zeros_softmax", "ZeroS on softmax scores, exact on its sequence", "I", "q k v s1 sh s0",
       "a cache that grows, weights that sum to zero"},
      {"fem_linear", "the prior `linear` of a free energy mixer", "nu_{t-1}/nu_t", "q k v",
       "K features, normalised by the query"},
      {"fem_gated", "its prior `gated`", "exp(a) nu_{t-1}/nu_t", "q k v a", "K features, normalised by the query, one gate"},
      {"fem_aft", "its prior `aft`", "diag(E_{t-1}/E_t)", "q k v", "one state a channel, normalised by its own sum"},
      {"fem_ssm", "its prior `ssm`", "diag exp(dt A)", "A b c delta d v", "n states a channel, normalised by what ones give"},
      {"h3", "H3's diagonal filter", "diag(a), complex", "q k v a_real a_imag b_real b_imag c_real c_imag",
       "K M complex states, constant"},
  };
  return mixers;
}

std::vector<std::string> mixer_names() {
  std::vector<std::string> names;
  for (const Mixer& mixer : all_mixers()) names.push_back(mixer.name);
  return names;
}

const Mixer* find_mixer(std::string_view name) {
  static const std::map<std::string, std::string> others = {{"normalized", "normalised"},
                                                            {"decay", "retention"},
                                                            {"retnet", "retention"},
                                                            {"mamba2", "ssd"},
                                                            {"deltanet", "delta"},
                                                            {"gateddeltanet", "gateddelta"},
                                                            {"gdn", "gateddelta"},
                                                            {"mamba", "s6"},
                                                            {"selectivescan", "s6"},
                                                            {"qlstm", "quasilstm"},
                                                            {"lstm", "quasilstm"},
                                                            {"rlstm", "reversedlstm"},
                                                            {"qlstmreversed", "reversedlstm"},
                                                            {"quasilstmreversed", "reversedlstm"},
                                                            {"reversedquasilstm", "reversedlstm"},
                                                            {"lstmreversed", "reversedlstm"},
                                                            {"qlstmreverse", "reversedlstm"},
                                                            {"quasilstmreverse", "reversedlstm"},
                                                            {"linearunnormalised", "linearsum"},
                                                            {"unnormalised", "linearsum"},
                                                            {"scalardecay", "retention"},
                                                            {"zerosattention", "zeros"},
                                                            {"metalaattention", "metala"},
                                                            {"griffin", "rglru"}};
  std::string wanted = plain_name(name);
  if (const auto other = others.find(wanted); other != others.end()) wanted = other->second;
  for (const Mixer& mixer : all_mixers()) {
    if (plain_name(mixer.name) == wanted) return &mixer;
  }
  return nullptr;
}

const Mixer* guess_mixer(std::string_view name, const MixerInputs& x) {
  if (const Mixer* mixer = find_mixer(name); mixer != nullptr) return mixer;
  const auto has = [&](const char* tensor) { return x.tensors.count(tensor) > 0; };
  const auto rank = [&](const char* tensor) { return has(tensor) ? x.tensors.at(tensor).shape.size() : 0; };
  if (has("nu_log")) return find_mixer("lru");
  if (has("dt") && has("a_real")) return find_mixer(rank("a_real") == 2 ? "s4d" : "s5");
  if (has("lam")) return find_mixer("rglru");
  if (has("outp")) return find_mixer(x.words.count("reverse_power") > 0 ? "reversed_lstm" : "quasi_lstm");
  if (has("delta")) return find_mixer(rank("delta") == 2 ? "s6" : "ssd");
  if (has("n")) return find_mixer("normalised");
  if (has("sh")) return find_mixer(has("s") ? "zeros" : "zeros_softmax");
  const size_t gate = std::max(rank("log_alpha"), rank("alpha"));
  if (has("beta")) return find_mixer(gate == 2 ? "kda" : gate == 1 ? "gated_delta" : "delta");
  if (gate == 2) return find_mixer("gla");
  if (gate == 1) return find_mixer("retention");
  if (x.words.count("order") > 0) return find_mixer("taylor");
  return nullptr;
}

const Array& system_input(const MixerInputs& inputs) {
  static const Array none;
  for (const char* name : {"u", "v"}) {
    if (const auto found = inputs.tensors.find(name); found != inputs.tensors.end()) return found->second;
  }
  return none;
}

Status build_system(std::string_view name, const MixerInputs& inputs, System* system, std::vector<double>* out) {
  const Mixer* mixer = find_mixer(name);
  if (mixer == nullptr) {
    std::string names;
    for (const std::string& each : mixer_names()) names += (names.empty() ? "" : ", ") + each;
    return bad_input("dsf: there is no mixer '" + std::string(name) + "'; there are " + names);
  }
  const Reader in(mixer->name, inputs);
  const std::string& which = mixer->name;
  if (which == "softmax") return build_softmax(in, system, out);
  if (which == "taylor") return build_normalised(in, true, true, system, out);
  if (which == "linear") return build_normalised(in, false, true, system, out);
  if (which == "linear_sum") return build_normalised(in, false, false, system, out);
  if (which == "gla" || which == "delta" || which == "gated_delta" || which == "kda")
    return build_gated(in, which, system, out);
  if (which == "s6") return build_s6(in, system, out);
  if (which == "s4d") return build_s4d(in, system, out);
  if (which == "s5") return build_s5(in, system, out);
  if (which == "lru") return build_lru(in, system, out);
  if (which == "rglru") return build_rglru(in, system, out);
  if (which == "quasi_lstm" || which == "reversed_lstm") return build_lstm(in, which == "reversed_lstm", system, out);
  if (which == "h3") return build_h3(in, system, out);
  if (which == "metala") return build_metala(in, system, out);
  if (which.rfind("fem_", 0) == 0) return build_fem(in, which.substr(4), system, out);
  if (which == "zeros") return build_zeros(in, system, out);
  if (which == "zeros_softmax") return build_zeros_softmax(in, system, out);
  return build_scalar(in, which, system, out);
}

Status query_weights(std::string_view name, const MixerInputs& inputs, const std::vector<double>& query,
                     std::vector<double>* weights) {
  const Mixer* mixer = find_mixer(name);
  const bool softmax = mixer != nullptr && mixer->name == "softmax", taylor = mixer != nullptr && mixer->name == "taylor";
  if (!softmax && !taylor && (mixer == nullptr || mixer->name != "linear")) {
    return bad_input("dsf: " + std::string(name) +
                     " has no map from a query to weights of all keys; softmax, linear and taylor have");
  }
  const Reader in(mixer->name, inputs);
  int64_t T = -1, K = static_cast<int64_t>(query.size()), n = 0;
  const double* k = nullptr;
  LINNET_TRY(in.get("k", {&T, &K}, &k));
  weights->assign(static_cast<size_t>(T), 0);
  double scale = 1 / std::sqrt(static_cast<double>(K)), most = -HUGE_VAL, sum = 0;
  if (softmax) {
    LINNET_TRY(in.real("scale", &scale));
    for (int64_t i = 0; i < T; ++i)
      most = std::max(most, (*weights)[static_cast<size_t>(i)] = scale * dot(query.data(), k + i * K, K));
    for (double& w : *weights) sum += w = std::exp(w - most);
  } else {
    std::vector<double> fq, fk;
    LINNET_TRY(mapped_rows(in, taylor, query.data(), 1, K, &fq, &n));
    LINNET_TRY(mapped_rows(in, taylor, k, T, K, &fk, &n));
    for (int64_t i = 0; i < T; ++i) sum += (*weights)[static_cast<size_t>(i)] = dot(fq.data(), fk.data() + i * n, n);
  }
  for (double& w : *weights) w = sum == 0 ? 0 : w / sum;
  return {};
}

Status random_inputs(std::string_view name, const MixerSize& size, uint64_t seed, MixerInputs* inputs) {
  const Mixer* mixer = find_mixer(name);
  if (mixer == nullptr) {
    System system;
    std::vector<double> out;
    return build_system(name, *inputs, &system, &out);  // its sentence
  }
  check::Random random(seed, "dsf " + mixer->name);
  const int64_t T = size.tokens, K = size.keys, V = size.values;
  const auto add = [&](const char* tensor, std::vector<int64_t> shape, const auto& draw) {
    Array& array = inputs->tensors[tensor];
    int64_t count = 1;
    for (const int64_t each : shape) count *= each;
    array.shape = std::move(shape);
    array.values.clear();
    for (int64_t i = 0; i < count; ++i) array.values.push_back(draw(i));
  };
  const auto normal = [&](int64_t) { return random.normal(); };
  const auto log_gate = [&](int64_t) { return -softplus(-(2 + random.normal())) / 4; };
  const auto logit = [&](int64_t) { return 1 + random.normal(); };
  const std::string& which = mixer->name;
  if (which == "s6" || which == "ssd") {
    add("b", {T, K}, normal);
    add("c", {T, K}, normal);
    add("u", {T, V}, normal);
    if (which == "s6") {
      add("A", {V, K}, [&](int64_t i) { return -static_cast<double>(i % K + 1); });
      add("delta", {T, V}, [&](int64_t) { return softplus(random.normal() - 2); });
      add("d", {V}, [](int64_t) { return 1.0; });
    } else {
      add("A", {1}, [](int64_t) { return -1.0; });
      add("delta", {T}, [&](int64_t) { return softplus(random.normal() - 2); });
      add("d", {1}, [](int64_t) { return 1.0; });
    }
    return {};
  }
  if (which == "lru") {
    add("nu_log", {K},
        [&](int64_t) { return std::log(-0.5 * std::log(0.81 + 0.18 * random.uniform())); });  // |lambda| 0.9 to 0.995
    add("theta_log", {K}, [&](int64_t) { return std::log(0.01 + 0.6 * random.uniform()); });
    for (const char* tensor : {"b_real", "b_imag"})
      add(tensor, {K, V}, [&](int64_t) { return random.normal() / std::sqrt(2.0 * static_cast<double>(V)); });
    for (const char* tensor : {"c_real", "c_imag"})
      add(tensor, {V, K}, [&](int64_t) { return random.normal() / std::sqrt(static_cast<double>(K)); });
    add("d", {V}, normal);
    add("u", {T, V}, normal);
    return {};
  }
  if (which == "s4d" || which == "s5") {  // S4D-Lin: rates -1/2 + i pi m
    const int64_t B = which == "s4d" ? V : K;
    const std::vector<int64_t> modes = which == "s4d" ? std::vector<int64_t>{V, K} : std::vector<int64_t>{K};
    add("a_real", modes, [](int64_t) { return -0.5; });
    add("a_imag", modes, [&](int64_t i) { return M_PI * static_cast<double>(i % K); });
    add("dt", {B}, [&](int64_t) { return std::exp(std::log(0.001) + random.uniform() * std::log(100.0)); });
    const std::vector<int64_t> into = which == "s4d" ? modes : std::vector<int64_t>{K, V},
                               from = which == "s4d" ? modes : std::vector<int64_t>{V, K};
    for (const char* tensor : {"b_real", "b_imag"})
      add(tensor, into, [&](int64_t) { return random.normal() / std::sqrt(2.0); });
    for (const char* tensor : {"c_real", "c_imag"})
      add(tensor, from, [&](int64_t) { return random.normal() / std::sqrt(2.0); });
    add("d", {V}, normal);
    add("u", {T, V}, normal);
    inputs->words["discretise"] = "zoh";
    return {};
  }
  if (which == "rglru") {
    add("lam", {V}, [&](int64_t) { return std::log(std::expm1(-std::log(0.9 + 0.099 * random.uniform()) / 8)); });
    add("r_logit", {T, V}, normal);
    add("i_logit", {T, V}, normal);
    add("u", {T, V}, normal);
    return {};
  }
  if (which == "quasi_lstm" || which == "reversed_lstm") {
    add("forget", {T, V}, logit);
    add("inp", {T, V}, normal);
    add("outp", {T, V}, normal);
    add("u", {T, V}, normal);
    return {};
  }
  if (which == "fem_ssm") {
    for (const char* tensor : {"b", "c"}) add(tensor, {T, K}, [&](int64_t) { return softplus(random.normal()); });
    add("A", {V, K}, [&](int64_t) { return -softplus(random.normal() - 1); });
    add("delta", {T, V}, [&](int64_t) { return sigmoid(random.normal()); });
    add("d", {V}, [](int64_t) { return 1.3; });
    add("v", {T, V}, normal);
    return {};
  }
  const int64_t wide = which == "fem_aft" ? V : K;
  add("q", {T, wide}, normal);
  add("k", {T, wide}, normal);
  add("v", {T, V}, normal);
  if (which == "fem_gated") add("a", {T}, log_gate);
  if (which == "normalised") {
    double n = 0;
    add("n", {T}, [&](int64_t) { return n += 0.1 * random.normal() + 0.05; });
  }
  if (which == "delta" || which == "gated_delta" || which == "kda") {
    Array& k = inputs->tensors["k"];  // unit keys, as the layers have them
    for (int64_t t = 0; t < T; ++t) {
      const double length = std::sqrt(dot(k.values.data() + t * K, k.values.data() + t * K, K));
      for (int64_t a = 0; a < K; ++a) k.values[static_cast<size_t>(t * K + a)] /= length;
    }
    add("beta", {T}, [&](int64_t) { return sigmoid(random.normal()); });
  }
  if (which == "gated_delta") add("alpha", {T}, [&](int64_t i) { return std::exp(log_gate(i)); });
  if (which == "gla" || which == "kda" || which == "metala") add("log_alpha", {T, K}, log_gate);
  if (which == "metala") {
    add("w_aug", {K}, normal);
    inputs->words["aug"] = "linear";
  }
  if (which == "zeros" || which == "zeros_softmax") {
    if (which == "zeros") add("s", {T}, normal);
    for (const char* tensor : {"s1", "sh"}) add(tensor, {T}, [&](int64_t) { return sigmoid(random.normal()); });
    add("s0", {T}, [&](int64_t) { return std::tanh(random.normal()); });
  }
  if (which == "mlstm") {
    add("forget", {T}, [&](int64_t) { return 3 + random.normal(); });
    add("inp", {T}, normal);
  }
  if (which == "h3") {
    constexpr int64_t kModes = 4;
    std::vector<Complex> a;
    for (int64_t m = 0; m < kModes; ++m) a.push_back(std::polar(0.9 + 0.099 * random.uniform(), 0.5 * static_cast<double>(m)));
    add("a_real", {kModes}, [&](int64_t i) { return a[static_cast<size_t>(i)].real(); });
    add("a_imag", {kModes}, [&](int64_t i) { return a[static_cast<size_t>(i)].imag(); });
    for (const char* tensor : {"b_real", "b_imag", "c_real", "c_imag"})
      add(tensor, {kModes}, [&](int64_t) { return 0.3 * random.normal(); });
    inputs->words["d"] = "1";
  }
  return {};
}

}  // namespace linnet::analysis
