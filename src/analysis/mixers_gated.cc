// MetaLA, ZeroS and the priors of free energy mixers as systems.
#include "analysis/mixers_gated.h"

#include <algorithm>

namespace linnet::analysis {
namespace {

// s1, sh and s0 (0 where it is not given) of every row.
struct Orders {
  const double *first = nullptr, *higher = nullptr, *zeroth = nullptr;
  double zero(int64_t t) const { return zeroth == nullptr ? 0 : zeroth[t]; }
};
Status read_orders(const Reader& in, int64_t T, Orders* o) {
  LINNET_TRY(in.get("s1", {&T}, &o->first));
  LINNET_TRY(in.get("sh", {&T}, &o->higher));
  return in.has("s0") ? in.get("s0", {&T}, &o->zeroth) : Status();
}

// The weights of one row from its logits: s1 delta / n + sh (softmax - 1/n - delta/n) + s0 / n.
std::vector<double> zero_sum(const std::vector<double>& logits, double first, double higher, double zeroth) {
  const auto n = static_cast<double>(logits.size());
  const double top = *std::max_element(logits.begin(), logits.end());
  double mean = 0, sum = 0;
  for (const double x : logits) mean += x / n, sum += std::exp(x - top);
  std::vector<double> r;
  for (const double x : logits)
    r.push_back(first * (x - mean) / n + higher * (std::exp(x - top) / sum - (1 + x - mean) / n) + zeroth / n);
  return r;
}

}  // namespace

// S_t = diag(alpha_t) S_{t-1} + (1 - alpha_t) v_t^T, y_t = scale q_t S_t; the augmentation u_t v_t is a skip.
Status build_metala(const Reader& in, System* s, std::vector<double>* out) {
  int64_t T = -1, K = -1, V = -1;
  const double *q = nullptr, *g = nullptr, *v = nullptr, *w = nullptr;
  LINNET_TRY(in.get("q", {&T, &K}, &q));
  LINNET_TRY(in.get("log_alpha", {&T, &K}, &g));
  LINNET_TRY(in.get("v", {&T, &V}, &v));
  double scale = 1 / std::sqrt(static_cast<double>(std::max<int64_t>(K, 1)));
  LINNET_TRY(in.real("scale", &scale));
  const std::string aug = in.word("aug", "none");
  if (aug == "sigmoid") {
    return in.error(
        "its augmentation sigmoid(u v) is not linear in the values, so that no system gives it; aug=linear and none have one");
  }
  if (aug != "linear" && aug != "none") return in.error("aug is '" + aug + "', expected linear or none");
  if (aug == "linear") LINNET_TRY(in.get("w_aug", {&K}, &w));
  start(s, T, K, V, Form::diagonal);
  if (w != nullptr) s->d.assign(static_cast<size_t>(T), 0);
  std::vector<double> state(static_cast<size_t>(K * V), 0);
  out->assign(static_cast<size_t>(T * V), 0);
  for (int64_t t = 0; t < T; ++t) {
    double skip = 0;
    for (int64_t a = 0; a < K; ++a) {
      const auto at = static_cast<size_t>(t * K + a);
      s->L[at] = std::exp(g[at]);
      s->b[at] = -std::expm1(g[at]);
      s->c[at] = scale * q[at];
      if (w != nullptr) skip -= q[at] * w[a] * std::expm1(g[at]);
      for (int64_t j = 0; j < V; ++j) {
        double& x = state[static_cast<size_t>(a * V + j)];
        x = std::exp(g[at]) * x - std::expm1(g[at]) * v[t * V + j];
        (*out)[static_cast<size_t>(t * V + j)] += scale * q[at] * x;
      }
    }
    if (w == nullptr) continue;
    s->d[static_cast<size_t>(t)] = skip;
    for (int64_t j = 0; j < V; ++j) (*out)[static_cast<size_t>(t * V + j)] += skip * v[t * V + j];
  }
  return {};
}

namespace {

// Weights exp(sum of a) phi(q_t).phi(k_i), phi(x) = relu(x) + 1e-6, over their sum.
Status build_fem_keys(const Reader& in, bool gated, System* s, std::vector<double>* out) {
  constexpr double kFeature = 1e-6, kLinear = 1e-6, kGated = 1e-5;  // of phi, the least sum, what is added to it
  Heads h;
  const double* a = nullptr;
  LINNET_TRY(read_heads(in, &h));
  if (gated) LINNET_TRY(in.get("a", {&h.T}, &a));
  start(s, h.T, h.K, h.V, Form::scalar);
  out->assign(static_cast<size_t>(h.T * h.V), 0);
  std::vector<double> z(static_cast<size_t>(h.K), 0);
  double before = 0;
  for (int64_t t = 0; t < h.T; ++t) {
    const double decay = gated ? a[t] : 0;
    double sum = 0;
    for (int64_t c = 0; c < h.K; ++c) {
      const auto at = static_cast<size_t>(t * h.K + c);
      s->b[at] = std::max(h.k[at], 0.0) + kFeature;
      s->c[at] = std::max(h.q[at], 0.0) + kFeature;
      double& each = z[static_cast<size_t>(c)];
      each = std::exp(decay) * each + s->b[at].real();
      sum += s->c[at].real() * each;
    }
    const double log_sum = std::log(gated ? sum + kGated : std::max(sum, kLinear));
    s->log_decay[static_cast<size_t>(t)] = t == 0 ? -HUGE_VAL : decay + before - log_sum;
    s->log_weight[static_cast<size_t>(t)] = -log_sum;
    before = log_sum;
    double passed = 0;  // its own form: every weight by itself
    for (int64_t i = t; i >= 0; --i) {
      double weight = 0;
      for (int64_t c = 0; c < h.K; ++c)
        weight += s->c[static_cast<size_t>(t * h.K + c)].real() * s->b[static_cast<size_t>(i * h.K + c)].real();
      weight *= std::exp(passed - log_sum);
      for (int64_t j = 0; j < h.V; ++j) (*out)[static_cast<size_t>(t * h.V + j)] += weight * h.v[i * h.V + j];
      passed += gated ? a[i] : 0;
    }
  }
  return {};
}

// Per channel: weights exp(k_i) over their sum, times a gate of the query.
Status build_fem_aft(const Reader& in, System* s, std::vector<double>* out) {
  Heads h;
  LINNET_TRY(read_heads(in, &h));
  if (h.K != h.V) return in.error("q has " + std::to_string(h.K) + " channels, expected those of v");
  start(s, h.T, 1, h.V, Form::diagonal, false);
  out->assign(static_cast<size_t>(h.T * h.V), 0);
  std::vector<double> logs(static_cast<size_t>(h.V), -HUGE_VAL);
  for (int64_t t = 0; t < h.T; ++t) {
    double square = 0;
    for (int64_t j = 0; j < h.V; ++j) square += std::pow(softplus(h.q[t * h.V + j]) + 1e-6, 2);
    const double unit = std::sqrt(static_cast<double>(h.V)) / std::max(std::sqrt(square), 1e-5);
    for (int64_t j = 0; j < h.V; ++j) {
      const auto at = static_cast<size_t>(t * h.V + j);
      double& log_sum = logs[static_cast<size_t>(j)];
      const double before = log_sum, key = h.k[at], top = std::max(before, key);
      log_sum = top + std::log(std::exp(before - top) + std::exp(key - top));
      s->L[at] = std::exp(before - log_sum);
      s->b[at] = std::exp(key - log_sum);
      s->c[at] = unit * (softplus(h.q[at]) + 1e-6);
      for (int64_t i = 0; i <= t; ++i) (*out)[at] += s->c[at].real() * std::exp(h.k[i * h.V + j] - log_sum) * h.v[i * h.V + j];
    }
  }
  return {};
}

// Per channel: S6 over what it gives for ones.
Status build_fem_ssm(const Reader& in, System* s, std::vector<double>* out) {
  int64_t T = -1, d = -1, n = -1;
  const double *A = nullptr, *b = nullptr, *c = nullptr, *delta = nullptr, *skip = nullptr, *v = nullptr;
  LINNET_TRY(in.get("A", {&d, &n}, &A));
  LINNET_TRY(in.get("b", {&T, &n}, &b));
  LINNET_TRY(in.get("c", {&T, &n}, &c));
  LINNET_TRY(in.get("delta", {&T, &d}, &delta));
  LINNET_TRY(in.get("v", {&T, &d}, &v));
  LINNET_TRY(in.get("d", {&d}, &skip));
  start(s, T, n, d, Form::diagonal, false);
  s->d.assign(static_cast<size_t>(T * d), 0);
  out->assign(static_cast<size_t>(T * d), 0);
  std::vector<double> state(static_cast<size_t>(d * n), 0), ones(state.size(), 0);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t j = 0; j < d; ++j) {
      const double dt = delta[t * d + j];
      double read = skip[j] * v[t * d + j], sum = skip[j];
      for (int64_t r = 0; r < n; ++r) {
        const auto at = static_cast<size_t>((t * d + j) * n + r), own = static_cast<size_t>(j * n + r);
        s->L[at] = std::exp(dt * A[own]);
        s->b[at] = dt * b[t * n + r];
        state[own] = std::exp(dt * A[own]) * state[own] + dt * b[t * n + r] * v[t * d + j];
        ones[own] = std::exp(dt * A[own]) * ones[own] + dt * b[t * n + r];
        read += c[t * n + r] * state[own];
        sum += c[t * n + r] * ones[own];
      }
      sum = std::max(sum, 1e-6);
      for (int64_t r = 0; r < n; ++r) s->c[static_cast<size_t>((t * d + j) * n + r)] = c[t * n + r] / sum;
      s->d[static_cast<size_t>(t * d + j)] = skip[j] / sum;
      (*out)[static_cast<size_t>(t * d + j)] = read / sum;
    }
  }
  return {};
}

}  // namespace

Status build_fem(const Reader& in, const std::string& prior, System* s, std::vector<double>* out) {
  if (prior == "aft") return build_fem_aft(in, s, out);
  if (prior == "ssm") return build_fem_ssm(in, s, out);
  return build_fem_keys(in, prior == "gated", s, out);
}

// The states are means: of k v^T under the softmax of the steps' logits, under the logits themselves, and under even weights.
// E_t = sum exp(s_i) makes the first one's decay E_{t-1} / E_t, the number of steps that of the others.
Status build_zeros(const Reader& in, System* s, std::vector<double>* out) {
  Heads h;
  Orders o;
  const double* logit = nullptr;
  LINNET_TRY(read_heads(in, &h));
  LINNET_TRY(in.get("s", {&h.T}, &logit));
  LINNET_TRY(read_orders(in, h.T, &o));
  const int64_t K = h.K, n = 3 * K;
  start(s, h.T, n, h.V, Form::diagonal);
  out->assign(static_cast<size_t>(h.T * h.V), 0);
  double centre = 0, log_sum = 0, mean = 0;  // weights do not change when all logits move: they are counted from their mean
  for (int64_t t = 0; t < h.T; ++t) centre += logit[t] / static_cast<double>(h.T);
  for (int64_t t = 0; t < h.T; ++t) {
    const double count = static_cast<double>(t + 1), kept = static_cast<double>(t) / count, own = logit[t] - centre;
    const double before = log_sum, top = std::max(before, own);
    log_sum = t == 0 ? own : top + std::log(std::exp(before - top) + std::exp(own - top));
    mean = kept * mean + own / count;
    const double decay[3] = {t == 0 ? 0 : std::exp(before - log_sum), kept, kept};
    const double write[3] = {std::exp(own - log_sum), own / count, 1 / count};
    const double slope = o.first[t] - o.higher[t];
    const double read[3] = {o.higher[t], slope, o.zero(t) - o.higher[t] - slope * mean};
    for (int64_t part = 0; part < 3; ++part) {
      for (int64_t a = 0; a < K; ++a) {
        const auto at = static_cast<size_t>(t * n + part * K + a);
        s->L[at] = decay[part];
        s->b[at] = write[part] * h.k[t * K + a];
        s->c[at] = read[part] * h.q[t * K + a];
      }
    }
    const std::vector<double> r = zero_sum({logit, logit + t + 1}, o.first[t], o.higher[t], o.zero(t));
    for (int64_t i = 0; i <= t; ++i) {
      const double weight = r[static_cast<size_t>(i)] * dot(h.q + t * K, h.k + i * K, K);
      for (int64_t j = 0; j < h.V; ++j) (*out)[static_cast<size_t>(t * h.V + j)] += weight * h.v[i * h.V + j];
    }
  }
  return {};
}

// The scores belong to the reader too: a cache, as softmax has.
Status build_zeros_softmax(const Reader& in, System* s, std::vector<double>* out) {
  Heads h;
  Orders o;
  LINNET_TRY(read_heads(in, &h));
  LINNET_TRY(read_orders(in, h.T, &o));
  double scale = 1 / std::sqrt(static_cast<double>(std::max<int64_t>(h.K, 1)));
  LINNET_TRY(in.real("scale", &scale));
  start(s, h.T, h.T, h.V, Form::scalar);
  s->cache = true;
  out->assign(static_cast<size_t>(h.T * h.V), 0);
  for (int64_t t = 0; t < h.T; ++t) {
    std::vector<double> scores;
    for (int64_t i = 0; i <= t; ++i) scores.push_back(scale * dot(h.q + t * h.K, h.k + i * h.K, h.K));
    const std::vector<double> r = zero_sum(scores, o.first[t], o.higher[t], o.zero(t));
    for (int64_t i = 0; i <= t; ++i) {
      s->c[static_cast<size_t>(t * h.T + i)] = r[static_cast<size_t>(i)];
      for (int64_t j = 0; j < h.V; ++j)
        (*out)[static_cast<size_t>(t * h.V + j)] += r[static_cast<size_t>(i)] * h.v[i * h.V + j];
    }
    s->b[static_cast<size_t>(t * h.T + t)] = 1;
  }
  return {};
}

}  // namespace linnet::analysis
