#include "runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

namespace linnet {

Status check_sampling(const SamplerOptions& o) {
  const auto refuse = [](const char* name, double value, const char* expected) {
    return bad_input(std::string(name) + " is " + std::to_string(value) + ", expected " + expected);
  };
  if (!(o.temperature >= 0 && o.temperature <= 100)) return refuse("temperature", o.temperature, "0 to 100");
  if (o.top_k < 0) return refuse("top_k", static_cast<double>(o.top_k), "0 (all) or more");
  if (!(o.top_p > 0 && o.top_p <= 1)) return refuse("top_p", o.top_p, "more than 0, at most 1");
  if (!(o.min_p >= 0 && o.min_p <= 1)) return refuse("min_p", o.min_p, "0 to 1");
  if (!(o.repeat_penalty > 0 && o.repeat_penalty <= 100))
    return refuse("repeat_penalty", o.repeat_penalty, "more than 0, at most 100");
  return {};
}

double Sampler::uniform() {  // splitmix64
  uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return static_cast<double>((z ^ z >> 31) >> 11) * 0x1p-53;
}

int32_t Sampler::next(const float* logits, int64_t vocabulary) {
  candidates_.clear();
  candidates_.reserve(static_cast<size_t>(vocabulary));
  for (int64_t i = 0; i < vocabulary; ++i) candidates_.emplace_back(logits[i], static_cast<int32_t>(i));
  if (options_.repeat_penalty != 1) {
    const size_t back = std::min(history_.size(), static_cast<size_t>(std::max<int64_t>(options_.repeat_last, 0)));
    std::vector<int32_t> seen(history_.end() - static_cast<ptrdiff_t>(back), history_.end());
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    const float penalty = static_cast<float>(options_.repeat_penalty);
    for (const int32_t id : seen) {
      if (id < 0 || id >= vocabulary) continue;
      float& x = candidates_[static_cast<size_t>(id)].first;
      x = x > 0 ? x / penalty : x * penalty;
    }
  }
  candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), [](const auto& c) { return std::isnan(c.first); }),
                    candidates_.end());
  if (candidates_.empty()) return 0;
  const auto before = [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; };
  if (options_.temperature == 0) return std::min_element(candidates_.begin(), candidates_.end(), before)->second;

  if (options_.top_k > 0 && options_.top_k < static_cast<int64_t>(candidates_.size())) {
    std::nth_element(candidates_.begin(), candidates_.begin() + (options_.top_k - 1), candidates_.end(), before);
    candidates_.resize(static_cast<size_t>(options_.top_k));
  }
  std::sort(candidates_.begin(), candidates_.end(), before);
  std::vector<double> weight(candidates_.size());
  double total = 0;
  for (size_t i = 0; i < weight.size(); ++i) {
    total += weight[i] = std::exp((static_cast<double>(candidates_[i].first) - candidates_[0].first) / options_.temperature);
  }
  size_t kept = weight.size();
  if (options_.top_p < 1) {
    double sum = 0;
    for (kept = 0; kept < weight.size() && sum < options_.top_p * total; ++kept) sum += weight[kept];
  }
  while (kept > 1 && weight[kept - 1] < options_.min_p) --kept;  // weight[0] is 1
  total = 0;
  for (size_t i = 0; i < kept; ++i) total += weight[i];
  double left = uniform() * total;
  for (size_t i = 0; i + 1 < kept; ++i) {
    if (left < weight[i]) return candidates_[i].second;
    left -= weight[i];
  }
  return candidates_[kept - 1].second;
}

}  // namespace linnet
