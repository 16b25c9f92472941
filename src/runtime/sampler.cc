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
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  };
  if (options_.repeat_penalty != 1) {
    penalised_.assign(logits, logits + vocabulary);
    const size_t back = std::min(history_.size(), static_cast<size_t>(std::max<int64_t>(options_.repeat_last, 0)));
    std::vector<int32_t> seen(history_.end() - static_cast<ptrdiff_t>(back), history_.end());
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    const float penalty = static_cast<float>(options_.repeat_penalty);
    for (const int32_t id : seen) {
      if (id < 0 || id >= vocabulary) continue;
      float& x = penalised_[static_cast<size_t>(id)];
      x = x > 0 ? x / penalty : x * penalty;
    }
    logits = penalised_.data();
  }
  int64_t best = -1;
  for (int64_t i = 0; i < vocabulary; ++i) {
    if (best < 0 ? !std::isnan(logits[i]) : logits[i] > logits[best]) best = i;
  }
  if (best < 0 || options_.temperature == 0) return static_cast<int32_t>(std::max<int64_t>(best, 0));

  // Relative to the most likely token, which has weight 1. What is below kNothing adds up to less than any draw can tell.
  constexpr double kNothing = -46;  // e^-46 = 1e-20
  candidates_.clear();
  for (int64_t i = 0; i < vocabulary; ++i) {
    const double exponent = (static_cast<double>(logits[i]) - logits[best]) / options_.temperature;
    if (i == best) {  // infinite logits, too
      candidates_.push_back({logits[i], static_cast<int32_t>(i), 1});
    } else if (exponent > kNothing) {
      candidates_.push_back({logits[i], static_cast<int32_t>(i), std::exp(exponent)});
    }
  }
  if (options_.top_k > 0 && options_.top_k < static_cast<int64_t>(candidates_.size())) {
    std::nth_element(candidates_.begin(), candidates_.begin() + (options_.top_k - 1), candidates_.end(), before);
    candidates_.resize(static_cast<size_t>(options_.top_k));
  }
  if (options_.top_p < 1) {  // in order of likelihood, as far as it takes; the sort grows with the part that is kept
    double total = 0, sum = 0;
    for (const Candidate& c : candidates_) total += c.weight;
    size_t kept = 0;
    for (size_t sorted = 0; kept < candidates_.size() && sum < options_.top_p * total; ++kept) {
      if (kept == sorted) {
        sorted = std::min(candidates_.size(), std::max<size_t>(64, 4 * sorted));
        const auto begin = candidates_.begin() + static_cast<ptrdiff_t>(kept);
        std::partial_sort(begin, candidates_.begin() + static_cast<ptrdiff_t>(sorted), candidates_.end(), before);
      }
      sum += candidates_[kept].weight;
    }
    candidates_.resize(std::max<size_t>(kept, 1));
  }
  if (options_.min_p > 0) std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < options_.min_p; });
  double total = 0;
  for (const Candidate& c : candidates_) total += c.weight;
  double left = uniform() * total;
  for (size_t i = 0; i + 1 < candidates_.size(); ++i) {
    if (left < candidates_[i].weight) return candidates_[i].token;
    left -= candidates_[i].weight;
  }
  return candidates_.back().token;
}

}  // namespace linnet
