#include "analysis/confusion.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace linnet::analysis {
namespace {

// Rows of [T, heads, D] of one head, evenly spaced.
std::vector<std::vector<double>> sampled(const std::vector<float>& x, int64_t T, int64_t heads, int64_t head, int64_t D,
                                         int64_t most) {
  const int64_t count = std::min(T, most);
  std::vector<std::vector<double>> rows;
  for (int64_t r = 0; r < count; ++r) {
    const auto from = x.begin() + ((2 * r + 1) * T / (2 * count) * heads + head) * D;
    rows.emplace_back(from, from + D);
  }
  return rows;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void normalise(std::vector<double>& w) {
  double sum = 0;
  for (const double x : w) sum += x;
  for (double& x : w) x = sum == 0 ? 0 : x / sum;
}

// w of one query over all keys. Keys of linear attention are relu(k), of InLine k less its mean.
std::vector<double> weights(int kind, std::vector<double> q, const std::vector<std::vector<double>>& keys, const HeadTaps& t) {
  const auto n = static_cast<double>(keys.size());
  if (kind == 1) {
    for (double& x : q) x = std::max(x, 0.0);
  }
  std::vector<double> w;
  w.reserve(keys.size());
  for (const std::vector<double>& k : keys) w.push_back(dot(q, k));
  if (kind == 2) {
    for (double& x : w) x = (t.scale * x + 1) / n;
    return w;
  }
  if (kind == 0) {
    double top = -HUGE_VAL;
    for (double& x : w) top = std::max(top, x = t.softcap > 0 ? t.softcap * std::tanh(t.scale * x / t.softcap) : t.scale * x);
    for (double& x : w) x = std::exp(x - top);
  }
  normalise(w);
  return w;
}

}  // namespace

Confusions confusions(const HeadTaps& t, int64_t head, double apart, double alike) {
  Confusions found;
  const std::vector<std::vector<double>> queries = sampled(t.q, t.tokens, t.heads, head, t.key, kConfusedQueries);
  const std::vector<std::vector<double>> plain =
      sampled(t.k, t.tokens, t.kv_heads, head / (t.heads / t.kv_heads), t.key, kConfusedKeys);
  for (int kind = 0; kind < 3; ++kind) {
    std::vector<std::vector<double>> keys = plain;
    for (size_t c = 0; c < static_cast<size_t>(t.key) && kind > 0; ++c) {
      double mean = 0;
      for (const std::vector<double>& k : plain) mean += k[c] / static_cast<double>(plain.size());
      for (std::vector<double>& k : keys) k[c] = kind == 1 ? std::max(k[c], 0.0) : k[c] - mean;
    }
    std::vector<std::vector<double>> rows;
    rows.reserve(queries.size());
    for (const std::vector<double>& q : queries) rows.push_back(weights(kind, q, keys, t));
    found.pairs = 0;
    double margin = HUGE_VAL;
    for (size_t p = 0; p < queries.size(); ++p) {
      for (size_t q = 0; q < p; ++q) {
        double distance = 0, one = 0, two = 0;
        for (size_t c = 0; c < queries[p].size(); ++c) distance += std::pow(queries[p][c] - queries[q][c], 2);
        if (!(std::sqrt(distance) > apart)) continue;
        for (size_t j = 0; j < rows[p].size(); ++j) {
          const double difference = rows[p][j] - rows[q][j];
          one += std::abs(difference);
          two += difference * difference;
        }
        ++found.pairs;
        found.confused[kind] += one < alike;
        margin = std::min(margin, std::sqrt(two / distance));
      }
    }
    found.margin[kind] = found.pairs > 0 ? margin : 0;
  }
  return found;
}

}  // namespace linnet::analysis
