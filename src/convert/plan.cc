#include "convert/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace linnet::convert {

namespace {
constexpr int64_t kSteps = 2000;
constexpr double kChunk = 64;
double real(int64_t x) { return static_cast<double>(x); }
}  // namespace

bool is_trained(const std::string& mechanism) {
  static const char* const kTrained[] = {"gdn", "gla", "hybrid", "hybrid-exact", "distill", "hedgehog", "t2r"};
  return std::find(std::begin(kTrained), std::end(kTrained), mechanism) != std::end(kTrained);
}

double window_cost(int64_t window, int64_t sinks, int64_t length, bool causal) {
  if (window == 0 || window + sinks >= length) return 1;
  return std::min(1.0, (causal ? 2 : 1) * real(window + sinks) / real(length));
}

double monarch_cost(int64_t block, int64_t steps, int64_t length) {
  const double N = real(length), b = block > 0 ? real(block) : std::floor(std::sqrt(N)), M = std::ceil(N / b);
  return M * b * ((real(steps) - 1) * (2 * b + 2 * M) + 3 * b + 2 * M) / (2 * N * N);
}

double hierarchical_cost(int64_t arity, int64_t length) {
  double entries = 1;
  for (int64_t n = length; n > 1; n = (n + arity - 1) / arity) {
    const double families = real((n + arity - 1) / arity), m = real(std::min(arity, n));
    entries += families * m * m;
  }
  return entries * 6 / (4 * real(length) * real(length));  // up 2 K, down 2 K + 2 V against 2 K + 2 V
}

double mechanism_cost(const ConvertedLayer& o, int64_t length, int64_t key, int64_t value, bool causal) {
  const double T = real(length), D = real(key), V = real(value), M = real(o.features);
  const double softmax = (causal ? 1 : 2) * T * (D + V);  // of one token and head
  const double near = o.window > 0 ? window_cost(o.window, o.sinks, length, causal) : 0;
  if (o.mechanism == "softmax") return 1;
  if (o.mechanism == "window") {
    if (o.windows.empty()) return near;
    double total = 0;
    for (size_t h = 0; h < o.windows.size(); ++h) {
      const bool monarch = !o.blocks.empty() && o.blocks[h] > 0;
      total += monarch ? monarch_cost(o.blocks[h], o.updates[h], length) : window_cost(o.windows[h], o.sinks, length, causal);
    }
    return total / real(static_cast<int64_t>(o.windows.size()));
  }
  if (o.mechanism == "distill" || o.mechanism == "t2r" || o.mechanism == "hybrid-exact")
    return (4 * M * D + 4 * M * V + kChunk * (M + V)) / softmax + near;
  if (o.mechanism == "hybrid" || o.mechanism == "hedgehog")
    return (8 * M * D + 8 * M * V + kChunk * (2 * M + V)) / softmax + near;
  if (o.mechanism == "gdn") return (6 * D * V + 2 * kChunk * (D + V)) / softmax + near;
  if (o.mechanism == "gla") return (4 * D * V + kChunk * (D + V)) / softmax + near;
  if (o.mechanism == "monarch") return monarch_cost(o.block, o.steps, length);
  return hierarchical_cost(o.arity, length);
}

double cache_tokens(const ConvertedLayer& o, int64_t length, int64_t heads, int64_t kv_heads, int64_t key, int64_t value) {
  const auto near = [&](int64_t window) { return window == 0 ? real(length) : std::min(real(window + o.sinks), real(length)); };
  if (o.mechanism == "softmax") return real(length);
  if (o.mechanism == "monarch" || o.mechanism == "hierarchical") return 0;
  if (o.mechanism == "window") {
    if (o.windows.empty()) return near(o.window);
    double total = 0;
    for (const int64_t w : o.windows) total += near(w);
    return total / real(static_cast<int64_t>(o.windows.size()));
  }
  const bool recurrent = o.mechanism == "gdn" || o.mechanism == "gla",
             pairs = o.mechanism == "hybrid" || o.mechanism == "hedgehog";
  const double rows = recurrent ? real(key) : (pairs ? 2 : 1) * real(o.features);
  const double width = real(value) + (recurrent ? 0 : pairs || o.mechanism == "t2r" ? 1 : 2);  // beside it sums, and maxima
  return (o.window > 0 ? near(o.window) : 0) + real(heads) * rows * width / (real(kv_heads) * real(key + value));
}

Status choose(const std::vector<std::vector<LayerOption>>& options, const std::vector<double>& weights, double budget,
              std::vector<size_t>& chosen) {
  double cheapest = 0;
  for (size_t s = 0; s < options.size(); ++s) {
    double least = std::numeric_limits<double>::infinity();
    for (const LayerOption& o : options[s]) least = std::min(least, o.cost);
    cheapest += weights[s] * least;
  }
  if (!(cheapest <= budget * (1 + 1e-12))) {
    return impossible("the budget is " + std::to_string(budget) + " of the attention cost, and the cheapest plan costs " +
                      std::to_string(cheapest));
  }
  const double unit = budget / real(kSteps);
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<double> best(kSteps + 1, kNever);
  best[0] = 0;
  std::vector<std::vector<int32_t>> pick(options.size(), std::vector<int32_t>(kSteps + 1, -1));
  for (size_t s = 0; s < options.size(); ++s) {
    std::vector<double> next(kSteps + 1, kNever);
    for (size_t o = 0; o < options[s].size(); ++o) {
      const double exact = options[s][o].cost * weights[s] / unit;
      const int64_t units = static_cast<int64_t>(std::ceil(exact - 1e-9));
      for (int64_t c = units; c <= kSteps; ++c) {
        const double damage = best[static_cast<size_t>(c - units)] + options[s][o].damage;
        if (damage < next[static_cast<size_t>(c)])
          next[static_cast<size_t>(c)] = damage, pick[s][static_cast<size_t>(c)] = static_cast<int32_t>(o);
      }
    }
    best.swap(next);
  }
  int64_t at = std::min_element(best.begin(), best.end()) - best.begin();  // the first: the smaller cost
  if (best[static_cast<size_t>(at)] == kNever) {
    // Rounded up, the cheapest plan alone does not fit: it is the plan.
    chosen.assign(options.size(), 0);
    for (size_t s = 0; s < options.size(); ++s) {
      for (size_t o = 0; o < options[s].size(); ++o) {
        if (options[s][o].cost < options[s][chosen[s]].cost) chosen[s] = o;
      }
    }
    return {};
  }
  chosen.assign(options.size(), 0);
  for (size_t s = options.size(); s-- > 0;) {
    chosen[s] = static_cast<size_t>(pick[s][static_cast<size_t>(at)]);
    at -= static_cast<int64_t>(std::ceil(options[s][chosen[s]].cost * weights[s] / unit - 1e-9));
  }
  return {};
}

void choose_together(const std::vector<std::vector<LayerOption>>& options, const std::vector<double>& weights, double budget,
                     const std::vector<std::vector<float>>& product, std::vector<size_t>& chosen) {
  const size_t S = options.size();
  std::vector<size_t> first;
  size_t count = 0;
  double spent = 0;
  for (size_t s = 0; s < S; ++s) {
    first.push_back(count), count += options[s].size();
    spent += options[s][chosen[s]].cost * weights[s];
  }
  const auto at = [&](size_t a, size_t b) { return static_cast<double>(product[a][b]); };
  std::vector<double> with(count, 0);  // of each option with all that is chosen
  for (size_t n = 0; n < count; ++n) {
    for (size_t s = 0; s < S; ++s) with[n] += at(n, first[s] + chosen[s]);
  }
  const auto change = [&](size_t s, size_t to) {
    const size_t old = first[s] + chosen[s], next = first[s] + to;
    for (size_t n = 0; n < count; ++n) with[n] += at(n, next) - at(n, old);
    spent += (options[s][to].cost - options[s][chosen[s]].cost) * weights[s];
    chosen[s] = to;
  };
  for (bool better = true; better;) {
    better = false;
    for (size_t a = 0; a < S; ++a) {
      for (size_t b = a + 1; b < S; ++b) {
        // What the two have with all others, without themselves.
        const size_t old_a = first[a] + chosen[a], old_b = first[b] + chosen[b];
        const auto value = [&](size_t x, size_t y) {
          const double rest = with[x] - at(x, old_a) - at(x, old_b) + with[y] - at(y, old_a) - at(y, old_b);
          return at(x, x) + at(y, y) + rest + at(x, y);
        };
        double least = value(old_a, old_b) - 1e-9;
        size_t best_a = chosen[a], best_b = chosen[b];
        for (size_t x = 0; x < options[a].size(); ++x) {
          for (size_t y = 0; y < options[b].size(); ++y) {
            const double cost = spent + (options[a][x].cost - options[a][chosen[a]].cost) * weights[a] +
                                (options[b][y].cost - options[b][chosen[b]].cost) * weights[b];
            if (cost > budget) continue;
            if (const double found = value(first[a] + x, first[b] + y); found < least) least = found, best_a = x, best_b = y;
          }
        }
        if (best_a == chosen[a] && best_b == chosen[b]) continue;
        change(a, best_a), change(b, best_b);
        better = true;
      }
    }
  }
}

std::vector<HeadWindows> combine_heads(const std::vector<std::vector<double>>& error, const std::vector<double>& cost,
                                       size_t most) {
  std::vector<HeadWindows> front = {{}};
  const double share = 1 / real(static_cast<int64_t>(error.size()));
  for (const std::vector<double>& head : error) {
    std::vector<HeadWindows> all;
    for (const HeadWindows& before : front) {
      for (size_t w = 0; w < cost.size(); ++w) {
        all.push_back(before);
        all.back().window.push_back(w);
        all.back().cost += share * cost[w];
        all.back().error += head[w];
      }
    }
    std::stable_sort(all.begin(), all.end(), [](const HeadWindows& a, const HeadWindows& b) {
      return a.cost != b.cost ? a.cost < b.cost : a.error < b.error;
    });
    front.clear();
    for (HeadWindows& each : all) {
      if (front.empty() || each.error < front.back().error) front.push_back(std::move(each));
    }
    while (front.size() > most) {  // the point whose loss costs least in error goes; the ends stay
      size_t worst = 1;
      double least = std::numeric_limits<double>::infinity();
      for (size_t i = 1; i + 1 < front.size(); ++i) {
        const double loss = (front[i].cost - front[i - 1].cost) * (front[i - 1].error - front[i].error);
        if (loss < least) least = loss, worst = i;
      }
      front.erase(front.begin() + static_cast<ptrdiff_t>(worst));
    }
  }
  return front;
}

}  // namespace linnet::convert
