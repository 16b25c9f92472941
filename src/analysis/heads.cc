#include "analysis/heads.h"

#include <algorithm>
#include <cmath>

#include "analysis/linalg.h"
#include "check/random.h"
#include "core/executor.h"
#include "linnet.h"
#include "mechanisms/distill/distill_spectra.h"

namespace linnet::analysis {

namespace {

constexpr int64_t kRankBlock = 512;
constexpr int kPowerSteps = 30;
constexpr double kDofLambda = 0x1p-6, kBalanceRidge = 1e-6;

// Keys of one head of keys, turned: [channel, token], so that a row of scores is a sum of long rows.
struct Keys {
  int64_t T = 0, D = 0;
  std::vector<float> turned;
  // Sums over spans of family^level tokens, [spans, D], level 1 and up.
  std::vector<std::vector<float>> spans;
};

struct Work {
  const HeadTaps* taps;
  bool causal;
  const HeadOptions* options;
  std::vector<Keys> keys;
  std::vector<HeadStatistics>* out;
};

const float* query(const HeadTaps& t, int64_t head, int64_t i) { return t.q.data() + (i * t.heads + head) * t.key; }
const float* key_of(const HeadTaps& t, int64_t head, int64_t j) {
  return t.k.data() + (j * t.kv_heads + head / (t.heads / t.kv_heads)) * t.key;
}
double capped(const HeadTaps& t, double score) { return t.softcap > 0 ? t.softcap * std::tanh(score / t.softcap) : score; }

// Scores of any query against keys begin .. end - 1.
void scores_of(const HeadTaps& t, const Keys& keys, const float* q, int64_t begin, int64_t end, std::vector<float>& s) {
  s.assign(static_cast<size_t>(end - begin), 0);
  for (int64_t c = 0; c < keys.D; ++c) {
    const float* row = keys.turned.data() + c * keys.T + begin;
    const float x = q[c] * static_cast<float>(t.scale);
    for (size_t j = 0; j < s.size(); ++j) s[j] += x * row[j];
  }
  if (t.softcap > 0) {
    for (float& x : s) x = static_cast<float>(capped(t, static_cast<double>(x)));
  }
}

// s becomes weights; the log-normaliser is returned.
double soften(const std::vector<float>& s, std::vector<double>& p) {
  const float top = s.empty() ? 0 : *std::max_element(s.begin(), s.end());
  double total = 0;
  p.resize(s.size());
  for (size_t j = 0; j < s.size(); ++j) total += p[j] = static_cast<double>(std::exp(s[j] - top));
  for (double& x : p) x /= total;
  return std::log(total) + static_cast<double>(top);
}

double log_sum(const std::vector<double>& x) {
  if (x.empty()) return -HUGE_VAL;
  const double top = *std::max_element(x.begin(), x.end());
  double total = 0;
  for (const double each : x) total += std::exp(each - top);
  return top + std::log(total);
}

struct Row {
  int64_t i, first, end;  // the query, the keys it sees
};

// Monarch's log-normaliser of a row, one step, padded behind: every block is seen through the eyes of its own query in the
// row's slot; when causal the row's own block is exact.
double monarch_row(const HeadTaps& t, const Keys& keys, int64_t head, const Row& row, bool causal, std::vector<float>& s,
                   std::vector<double>& p, std::vector<float>& own) {
  const auto block = std::max<int64_t>(1, static_cast<int64_t>(std::sqrt(static_cast<double>(t.tokens))));
  const int64_t slot = row.i % block, mine = row.i / block;
  std::vector<double> logits;
  scores_of(t, keys, query(t, head, row.i), 0, row.end, own);
  const std::vector<float> nothing(static_cast<size_t>(t.key), 0);
  for (int64_t b = 0; b * block < row.end; ++b) {
    const int64_t begin = b * block, end = std::min(begin + block, row.end);
    if (causal && b == mine) {
      for (int64_t j = begin; j < end; ++j) logits.push_back(static_cast<double>(own[static_cast<size_t>(j)]));
      continue;
    }
    scores_of(t, keys, begin + slot < t.tokens ? query(t, head, begin + slot) : nothing.data(), begin, end, s);
    soften(s, p);
    double mean = 0, entropy = 0;
    for (size_t j = 0; j < p.size(); ++j) {
      mean += p[j] * static_cast<double>(own[static_cast<size_t>(begin) + j]);
      if (p[j] > 0) entropy -= p[j] * std::log(p[j]);
    }
    logits.push_back(mean + entropy);
  }
  return log_sum(logits);
}

// The log-normaliser where keys of a sibling span share one weight: spans of family^l tokens, the own token alone.
double tree_row(const HeadTaps& t, const Keys& keys, int64_t head, const Row& row, int64_t family, bool causal) {
  std::vector<double> logits;
  const float* q = query(t, head, row.i);
  int64_t size = 1;  // tokens of a child on this level
  for (size_t level = 0; level == 0 || size < t.tokens; ++level, size *= family) {
    const int64_t parent = row.i / (size * family) * (size * family), mine = row.i / size;
    for (int64_t begin = parent; begin < std::min(parent + size * family, t.tokens); begin += size) {
      const int64_t child = begin / size, count = std::min(size, t.tokens - begin);
      if ((child == mine && level > 0) || (causal && child > mine)) continue;  // the own child is the level below
      const float* sum = level == 0 ? key_of(t, head, begin) : keys.spans[level - 1].data() + child * t.key;
      double dot = 0;
      for (int64_t c = 0; c < t.key; ++c) dot += static_cast<double>(q[c]) * static_cast<double>(sum[c]);
      logits.push_back(t.scale * dot / static_cast<double>(count) + std::log(static_cast<double>(count)));
    }
  }
  return log_sum(logits);
}

double square_root(double x) { return std::sqrt(std::max(x, 0.0)); }
double inverse_root(double x) { return 1 / std::sqrt(std::max(x, 1e-300)); }

// Balancing (docs/mechanisms/distill.md): q' = A (q - q0), k' = A^-1 (k - k0), which leaves softmax as it is but for a weight
// of each key, eta q0.k. Queries and keys of one head, in units in which the score is q.k / sqrt D.
struct Balanced {
  std::vector<double> q, k, weight;  // [rows, D], [T, D], [T]
  double key_condition = 0;
};

Balanced balance(const HeadTaps& t, int64_t head) {
  const int64_t T = t.tokens, D = t.key;
  const double root = std::sqrt(static_cast<double>(D)), factor = t.scale * root;
  Balanced b;
  b.q.resize(static_cast<size_t>(T * D));
  b.k.resize(b.q.size());
  b.weight.resize(static_cast<size_t>(T));
  std::vector<double> q0(static_cast<size_t>(D), 0), k0(q0.size(), 0);
  for (int64_t j = 0; j < T; ++j) {
    for (int64_t c = 0; c < D; ++c) {
      const auto at = static_cast<size_t>(j * D + c), channel = static_cast<size_t>(c);
      q0[channel] += (b.q[at] = factor * static_cast<double>(query(t, head, j)[c])) / static_cast<double>(T);
      k0[channel] += (b.k[at] = static_cast<double>(key_of(t, head, j)[c])) / static_cast<double>(T);
    }
  }
  const auto moments = [&](std::vector<double>& x, const std::vector<double>& mean) {
    Matrix m(D, D);
    for (int64_t j = 0; j < T; ++j) {
      double* row = x.data() + j * D;
      for (int64_t c = 0; c < D; ++c) row[c] -= mean[static_cast<size_t>(c)];
      for (int64_t a = 0; a < D; ++a) {
        for (int64_t c = 0; c <= a; ++c) m(a, c) += row[a] * row[c] / static_cast<double>(T);
      }
    }
    for (int64_t a = 0; a < D; ++a) {
      for (int64_t c = 0; c < a; ++c) m(c, a) = m(a, c);
    }
    return m;
  };
  for (int64_t j = 0; j < T; ++j) {
    double sum = 0;
    for (int64_t c = 0; c < D; ++c) sum += q0[static_cast<size_t>(c)] * b.k[static_cast<size_t>(j * D + c)];
    b.weight[static_cast<size_t>(j)] = sum / root;
  }
  Matrix Sq = moments(b.q, q0), Sk = moments(b.k, k0);
  const Eigen keys = symmetric_eigen(Sk);
  b.key_condition = keys.values.front() > 0 ? std::sqrt(std::max(keys.values.back(), 0.0) / keys.values.front()) : 0;
  Sq = Sq + (kBalanceRidge * std::max(trace(Sq), 1e-300) / static_cast<double>(D)) * identity(D);
  Sk = Sk + (kBalanceRidge * std::max(trace(Sk), 1e-300) / static_cast<double>(D)) * identity(D);
  const Eigen eq = symmetric_eigen(Sq);
  const Matrix up = symmetric_function(eq, square_root), down = symmetric_function(eq, inverse_root);
  const Eigen squared = symmetric_eigen(down * symmetric_function(symmetric_eigen(up * Sk * up), square_root) * down);
  const Matrix A = symmetric_function(squared, square_root), inverse = symmetric_function(squared, inverse_root);
  const auto turn = [&](std::vector<double>& x, const Matrix& m) {
    std::vector<double> row(static_cast<size_t>(D));
    for (int64_t j = 0; j < T; ++j) {
      std::copy_n(x.data() + j * D, D, row.data());
      for (int64_t a = 0; a < D; ++a) {
        double sum = 0;
        for (int64_t c = 0; c < D; ++c) sum += m(a, c) * row[static_cast<size_t>(c)];
        x[static_cast<size_t>(j * D + a)] = sum;
      }
    }
  };
  turn(b.q, A);
  turn(b.k, inverse);
  return b;
}

// Positive random features of balanced keys, turned [M, T], each direction scaled by its largest: exp(log - top). A double
// reaches far enough below that for every row.
struct Features {
  int64_t M = 0;
  std::vector<double> z, keys, top;  // [D, M], [M, T], [M]
};

// z.x D^-1/4 - |x|^2 / (2 sqrt D) of one vector, [M].
void log_features(const double* x, int64_t D, const Features& f, double* out) {
  const double root = std::sqrt(static_cast<double>(D)), quarter = std::sqrt(1 / root);
  double norm = 0;
  std::fill(out, out + f.M, 0.0);
  for (int64_t c = 0; c < D; ++c) {
    norm += x[c] * x[c];
    for (int64_t m = 0; m < f.M; ++m) out[m] += f.z[static_cast<size_t>(c * f.M + m)] * x[c];
  }
  for (int64_t m = 0; m < f.M; ++m) out[m] = quarter * out[m] - norm / (2 * root);
}

Features key_features(const Balanced& b, int64_t T, int64_t D, int64_t M) {
  Features f{M, std::vector<double>(static_cast<size_t>(D * M)), std::vector<double>(static_cast<size_t>(M * T)),
             std::vector<double>(static_cast<size_t>(M), -HUGE_VAL)};
  check::Random random(1, "random features");
  for (double& x : f.z) x = random.normal();
  std::vector<double> logs(static_cast<size_t>(M));
  for (int64_t j = 0; j < T; ++j) {
    log_features(b.k.data() + j * D, D, f, logs.data());
    for (int64_t m = 0; m < M; ++m) {
      const auto at = static_cast<size_t>(m);
      f.keys[static_cast<size_t>(m * T + j)] = logs[at] + b.weight[static_cast<size_t>(j)];
      f.top[at] = std::max(f.top[at], logs[at] + b.weight[static_cast<size_t>(j)]);
    }
  }
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t j = 0; j < T; ++j) {
      double& x = f.keys[static_cast<size_t>(m * T + j)];
      x = std::exp(x - f.top[static_cast<size_t>(m)]);
    }
  }
  return f;
}

// KL of the row that features give against softmax: sum p^ (ln p^ - s) + lse.
double feature_row(const double* q, int64_t T, int64_t D, const Features& f, const Row& row, const std::vector<float>& s,
                   double lse) {
  std::vector<double> own(static_cast<size_t>(f.M)), sums(s.size(), 0);
  log_features(q, D, f, own.data());
  double peak = -HUGE_VAL, total = 0, kl = 0;
  for (size_t m = 0; m < own.size(); ++m) peak = std::max(peak, own[m] += f.top[m]);
  for (size_t m = 0; m < own.size(); ++m) {
    const double x = std::exp(own[m] - peak);
    const double* key = f.keys.data() + static_cast<int64_t>(m) * T + row.first;
    for (size_t j = 0; j < sums.size(); ++j) sums[j] += x * key[j];
  }
  for (const double x : sums) total += x;
  if (!(total > 0)) return NAN;
  for (size_t j = 0; j < sums.size(); ++j) {
    const double p = sums[j] / total;
    if (p > 0) kl += p * (std::log(p) - (static_cast<double>(s[j]) - lse));
  }
  return kl;
}

// Degrees of freedom of the pooled queries and keys.
double degrees_of_freedom(const Balanced& b, int64_t T, int64_t D, int64_t samples) {
  const int64_t half = std::min(T, samples / 2), J = 2 * half;
  std::vector<double> x;
  for (int64_t r = 0; r < half; ++r) {
    const auto at = static_cast<std::ptrdiff_t>((2 * r + 1) * T / (2 * half) * D);
    x.insert(x.end(), b.q.begin() + at, b.q.begin() + at + D);
    x.insert(x.end(), b.k.begin() + at, b.k.begin() + at + D);
  }
  const double lambda = kDofLambda;
  double dof = 0;
  DistillDofArgs args;
  args.x = View::dense(x.data(), Dtype::f64, {J, D});
  args.lambda = View::dense(&lambda, Dtype::f64, {1});
  args.z = View::dense(x.data(), Dtype::f64, {0, D});
  DistillDofOut out;
  out.dof_gauss_mean = View::dense(&dof, Dtype::f64, {1});
  Context context;
  context.executor = &inline_executor();
  std::vector<char> memory(static_cast<size_t>(distill_dof_workspace(args, context)) + 128);
  context.workspace = memory.data();
  context.workspace_bytes = static_cast<int64_t>(memory.size());
  return distill_dof(args, out, context).ok() ? dof : NAN;
}

// The largest squared singular value of a block of weights, from the vector of ones: P is not negative.
double largest_square(const std::vector<float>& block, int64_t n) {
  std::vector<double> x(static_cast<size_t>(n), 1), y(x.size());
  double top = 0;
  for (int step = 0; step < kPowerSteps; ++step) {
    double length = 0;
    for (const double each : x) length += each * each;
    std::fill(y.begin(), y.end(), 0);
    top = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float* row = block.data() + i * n;
      double sum = 0;
      for (int64_t j = 0; j < n; ++j) sum += static_cast<double>(row[j]) * x[static_cast<size_t>(j)];
      top += sum * sum / length;
      for (int64_t j = 0; j < n; ++j) y[static_cast<size_t>(j)] += static_cast<double>(row[j]) * sum;
    }
    double norm = 0;
    for (const double each : y) norm = std::max(norm, std::abs(each));
    for (size_t j = 0; j < y.size(); ++j) x[j] = y[j] / std::max(norm, 1e-300);
  }
  return top;
}

// exp of the entropy of the eigenvalues of P P^T.
double effective_rank(const std::vector<float>& block, int64_t n) {
  std::vector<double> gram(static_cast<size_t>(n * n), 0), values(static_cast<size_t>(n)), scratch(values.size());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      const float *a = block.data() + i * n, *b = block.data() + j * n;
      float sum[8] = {};
      int64_t c = 0;
      for (; c + 8 <= n; c += 8) {
        for (int64_t e = 0; e < 8; ++e) sum[e] += a[c + e] * b[c + e];
      }
      for (; c < n; ++c) sum[0] += a[c] * b[c];
      double total = 0;
      for (const float each : sum) total += static_cast<double>(each);
      gram[static_cast<size_t>(i * n + j)] = gram[static_cast<size_t>(j * n + i)] = total;
    }
  }
  symmetric_eigenvalues(n, gram.data(), values.data(), scratch.data());
  double sum = 0, entropy = 0;
  for (const double x : values) sum += std::max(x, 0.0);
  for (const double x : values) entropy -= x > 0 ? x / sum * std::log(x / sum) : 0;
  return std::exp(entropy);
}

// Keys between the first ones and the window are not seen.
void mask(const HeadTaps& t, const Row& row, std::vector<float>& s) {
  if (t.window_left < 0) return;
  for (int64_t j = t.prefix; j < std::min(row.i - t.window_left, row.end); ++j) {
    if (j >= row.first) s[static_cast<size_t>(j - row.first)] = -INFINITY;
  }
}

Row row_of(const Work& w, int64_t i) {
  const HeadTaps& t = *w.taps;
  Row row{i, 0, w.causal ? i + 1 : t.tokens};
  if (t.window_left >= 0 && t.prefix == 0) row.first = std::max<int64_t>(0, i - t.window_left);
  if (t.window_right >= 0) row.end = std::min(row.end, i + t.window_right + 1);
  return row;
}

void add_row(const Work& w, const Row& row, const std::vector<double>& p, HeadStatistics& s) {
  for (int64_t j = row.first; j < row.end; ++j) {
    const double x = p[static_cast<size_t>(j - row.first)];
    const int64_t apart = std::abs(row.i - j);
    if (x > 0) s.entropy -= x * std::log(x);
    s.distance += x * static_cast<double>(apart);
    if (j < w.options->sinks) s.sink_mass += x;
    if (j == 0) s.first_mass += x;
    for (size_t m = 0; m < s.window_mass.size(); ++m) s.window_mass[m] += apart < w.options->windows[m] ? x : 0;
  }
}

// -ln of the weight that a window of w keys, and with the first keys beside it, would keep.
void add_windows(const Work& w, const Row& row, const std::vector<double>& p, std::vector<double>& kl) {
  for (size_t m = 0; m < w.options->windows.size(); ++m) {
    const int64_t width = w.options->windows[m];
    const int64_t left = w.causal ? width - 1 : width / 2, right = w.causal ? 0 : (width - 1) / 2;
    double window = 0, both = 0;
    for (int64_t j = row.first; j < row.end; ++j) {
      const double x = p[static_cast<size_t>(j - row.first)];
      const bool inside = j >= row.i - left && j <= row.i + right;
      window += inside ? x : 0;
      both += inside || j < w.options->sinks ? x : 0;
    }
    kl[2 * m] -= std::log(std::max(window, 1e-300));
    kl[2 * m + 1] -= std::log(std::max(both, 1e-300));
  }
}

void measure(const Work& w, int64_t head) {
  const HeadTaps& t = *w.taps;
  const HeadOptions& o = *w.options;
  const Keys& keys = w.keys[static_cast<size_t>(head / (t.heads / t.kv_heads))];
  HeadStatistics& s = (*w.out)[static_cast<size_t>(head)];
  s.window_mass.assign(o.windows.size(), 0);
  Balanced balanced;
  Features features;
  std::vector<float> scores, spare, own;
  std::vector<double> p, other;
  const bool cheaper = o.cheaper && t.window_left < 0 && t.window_right < 0, linear = cheaper && t.softcap == 0;
  if (o.spectra || o.degrees || linear) balanced = balance(t, head);
  if (cheaper) s.kl.assign(cheaper_names(o).size(), 0);
  if (linear) features = key_features(balanced, t.tokens, t.key, o.features);
  const int64_t rows = std::min(o.rows, t.tokens);
  double visible = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const Row row = row_of(w, (2 * r + 1) * t.tokens / (2 * rows));
    scores_of(t, keys, query(t, head, row.i), row.first, row.end, scores);
    mask(t, row, scores);
    const double lse = soften(scores, p);
    add_row(w, row, p, s);
    visible += std::log(static_cast<double>(row.end - row.first));
    if (!cheaper) continue;
    add_windows(w, row, p, s.kl);
    const size_t next = 2 * o.windows.size();
    s.kl[next + 1] += lse - monarch_row(t, keys, head, row, w.causal, spare, other, own);
    if (!linear) {  // a capped score is no product of a query and a mean of keys
      s.kl[next] = s.kl[next + 2] = NAN;
      continue;
    }
    s.kl[next] += feature_row(balanced.q.data() + row.i * t.key, t.tokens, t.key, features, row, scores, lse);
    s.kl[next + 2] += lse - tree_row(t, keys, head, row, o.family, w.causal);
  }
  const double scale = 1 / static_cast<double>(std::max<int64_t>(rows, 1));
  s.entropy_ratio = visible > 0 ? s.entropy / visible : 1;
  for (double* each : {&s.entropy, &s.distance, &s.sink_mass, &s.first_mass}) *each *= scale;
  for (double& mass : s.window_mass) mass *= scale;
  for (double& each : s.kl) each = std::isnan(each) ? NAN : std::max(each * scale, 0.0);

  const int64_t n = std::min(t.tokens, kRankBlock);
  std::vector<float> block(static_cast<size_t>(n * n), 0);
  double square = 0;
  for (int64_t i = 0; i < n; ++i) {
    Row row = row_of(w, i);
    row.end = std::min(row.end, n);
    scores_of(t, keys, query(t, head, i), row.first, row.end, scores);
    mask(t, row, scores);
    soften(scores, p);
    for (size_t j = 0; j < p.size(); ++j) {
      block[static_cast<size_t>(i * n + row.first) + j] = static_cast<float>(p[j]);
      square += p[j] * p[j];
    }
  }
  s.stable_rank = square / std::max(largest_square(block, n), 1e-300);
  if (o.degrees) s.dof = degrees_of_freedom(balanced, t.tokens, t.key, o.samples);
  if (!o.spectra) return;
  s.effective_rank = std::isfinite(s.stable_rank) ? effective_rank(block, n) : NAN;
  s.dof = degrees_of_freedom(balanced, t.tokens, t.key, o.samples);
  s.key_condition = balanced.key_condition;
  s.confusions = confusions(t, head, o.apart, o.alike);
}

Keys turned_keys(const HeadTaps& t, int64_t kv, int64_t family) {
  Keys keys{t.tokens, t.key, std::vector<float>(static_cast<size_t>(t.tokens * t.key)), {}};
  for (int64_t j = 0; j < t.tokens; ++j) {
    const float* k = t.k.data() + (j * t.kv_heads + kv) * t.key;
    for (int64_t c = 0; c < t.key; ++c) keys.turned[static_cast<size_t>(c * t.tokens + j)] = k[c];
  }
  for (int64_t size = family; family > 1 && size < t.tokens; size *= family) {
    std::vector<float>& sums = keys.spans.emplace_back(static_cast<size_t>((t.tokens + size - 1) / size * t.key), 0.F);
    for (int64_t j = 0; j < t.tokens; ++j) {
      const float* k = t.k.data() + (j * t.kv_heads + kv) * t.key;
      for (int64_t c = 0; c < t.key; ++c) sums[static_cast<size_t>(j / size * t.key + c)] += k[c];
    }
  }
  return keys;
}

}  // namespace

std::vector<std::string> cheaper_names(const HeadOptions& options) {
  std::vector<std::string> names;
  for (const int64_t w : options.windows) {
    names.push_back("window_" + std::to_string(w));
    names.push_back(names.back() + "+sinks");
  }
  names.push_back("features_" + std::to_string(options.features));
  names.insert(names.end(), {"monarch", "hierarchical"});
  return names;
}

Status head_statistics(const HeadTaps& taps, int64_t layer, bool causal, const HeadOptions& options,
                       std::vector<HeadStatistics>& out) {
  out.assign(static_cast<size_t>(taps.heads), {});
  for (const auto& [name, values] : {std::pair{"queries", &taps.q}, std::pair{"keys", &taps.k}, std::pair{"values", &taps.v}}) {
    for (size_t i = 0; i < values->size(); ++i) {
      if (std::isfinite((*values)[i])) continue;
      const auto token = static_cast<int64_t>(i) / std::max<int64_t>(1, static_cast<int64_t>(values->size()) / taps.tokens);
      return bad_input("layer " + std::to_string(layer) + ": its " + name + " are not finite from token " +
                       std::to_string(token) + " on; the model's activations are broken there");
    }
  }
  Work work{&taps, causal, &options, {}, &out};
  for (int64_t kv = 0; kv < taps.kv_heads; ++kv)
    work.keys.push_back(turned_keys(taps, kv, options.cheaper ? options.family : 0));
  default_executor().run(
      taps.heads, [](void* context, int64_t head, int) { measure(*static_cast<const Work*>(context), head); }, &work);
  for (int64_t h = 0; h < taps.heads; ++h) {
    HeadStatistics& s = out[static_cast<size_t>(h)];
    s.layer = layer;
    s.head = h;
    if (!std::isfinite(s.entropy) || !std::isfinite(s.stable_rank)) {
      return bad_input("layer " + std::to_string(layer) + ", head " + std::to_string(h) +
                       ": the attention weights are not finite; the model's activations are broken there");
    }
  }
  return {};
}

}  // namespace linnet::analysis
