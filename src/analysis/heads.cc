#include "analysis/heads.h"

#include <algorithm>
#include <cmath>

#include "core/executor.h"

namespace linnet::analysis {

namespace {

constexpr int64_t kRankBlock = 512;
constexpr int kPowerSteps = 30;

struct Work {
  const HeadTaps* taps;
  bool causal;
  const HeadOptions* options;
  std::vector<HeadStatistics>* out;
};

// The weights of query i over keys 0 .. n - 1.
void weights_of(const HeadTaps& t, int64_t head, int64_t i, int64_t n, std::vector<double>& p) {
  const int64_t kv = head / (t.heads / t.kv_heads);
  const float* q = t.q.data() + (i * t.heads + head) * t.key;
  p.resize(static_cast<size_t>(n));
  double top = -INFINITY;
  for (int64_t j = 0; j < n; ++j) {
    const float* k = t.k.data() + (j * t.kv_heads + kv) * t.key;
    float sum = 0;
    for (int64_t c = 0; c < t.key; ++c) sum += q[c] * k[c];
    p[static_cast<size_t>(j)] = static_cast<double>(sum) * t.scale;
    if (t.softcap > 0) p[static_cast<size_t>(j)] = t.softcap * std::tanh(p[static_cast<size_t>(j)] / t.softcap);
    top = std::max(top, p[static_cast<size_t>(j)]);
  }
  double total = 0;
  for (double& x : p) total += x = std::exp(x - top);
  for (double& x : p) x /= total;
}

void measure(const Work& w, int64_t head) {
  const HeadTaps& t = *w.taps;
  HeadStatistics& s = (*w.out)[static_cast<size_t>(head)];
  s.window_mass.assign(w.options->windows.size(), 0);
  std::vector<double> p;
  const int64_t rows = std::min(w.options->rows, t.tokens);
  double keys = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t i = (2 * r + 1) * t.tokens / (2 * rows), n = w.causal ? i + 1 : t.tokens;
    weights_of(t, head, i, n, p);
    for (int64_t j = 0; j < n; ++j) {
      const double x = p[static_cast<size_t>(j)];
      const int64_t apart = std::abs(i - j);
      if (x > 0) s.entropy -= x * std::log(x);
      s.distance += x * static_cast<double>(apart);
      if (j < w.options->sinks) s.sink_mass += x;
      for (size_t m = 0; m < s.window_mass.size(); ++m) s.window_mass[m] += apart < w.options->windows[m] ? x : 0;
    }
    keys += std::log(static_cast<double>(n));
  }
  const double scale = 1 / static_cast<double>(std::max<int64_t>(rows, 1));
  s.entropy_ratio = keys > 0 ? s.entropy / keys : 1;
  s.entropy *= scale, s.distance *= scale, s.sink_mass *= scale;
  for (double& mass : s.window_mass) mass *= scale;

  const int64_t n = std::min(t.tokens, kRankBlock);
  std::vector<float> block(static_cast<size_t>(n * n), 0);
  double square = 0;
  for (int64_t i = 0; i < n; ++i) {
    weights_of(t, head, i, w.causal ? i + 1 : n, p);
    for (size_t j = 0; j < p.size(); ++j) {
      block[static_cast<size_t>(i * n) + j] = static_cast<float>(p[j]);
      square += p[j] * p[j];
    }
  }
  std::vector<double> x(static_cast<size_t>(n), 1), y(x.size());
  double top = 0;
  for (int step = 0; step < kPowerSteps; ++step) {  // of P^T P, from the vector of ones: P is not negative
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
  s.stable_rank = square / std::max(top, 1e-300);
}

}  // namespace

Status head_statistics(const HeadTaps& taps, int64_t layer, bool causal, const HeadOptions& options,
                       std::vector<HeadStatistics>& out) {
  out.assign(static_cast<size_t>(taps.heads), {});
  Work work{&taps, causal, &options, &out};
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
