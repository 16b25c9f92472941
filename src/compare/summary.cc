#include <algorithm>
#include <cmath>

#include "compare/compare.h"
#include "report/text.h"

namespace linnet::compare {
namespace {

using report::bytes_text;
using report::count_text;
using report::percent_text;
using report::significant;
using report::time_text;

double time_at(const VariantResult& v, int64_t length) {
  for (const auto& [T, seconds] : v.times) {
    if (T == length) return seconds;
  }
  return 0;
}

// "30 times", "1.4 times"
std::string times_text(double factor) { return significant(factor, factor >= 10 ? 3 : 2) + " times"; }

// The length from which `cheap` is faster than `exact` in every measurement; 0: never.
int64_t crossing(const VariantResult& exact, const VariantResult& cheap) {
  int64_t from = 0;
  for (const auto& [T, seconds] : exact.times) {
    const double other = time_at(cheap, T);
    if (other == 0) continue;
    if (other >= seconds) from = 0;
    if (other < seconds && from == 0) from = T;
  }
  return from;
}

}  // namespace

std::vector<std::string> summary(const Comparison& c) {
  std::vector<std::string> text;
  const VariantResult& exact = c.variants.front();
  const int64_t longest = exact.times.back().first;
  std::string first = "Exact softmax attention takes " + time_text(exact.time.median) + " for one layer of " +
                      count_text(static_cast<double>(c.input.T)) + " tokens and grows like " + growth_text(exact.exponent);
  if (longest > c.input.T) {
    first += ": " + time_text(exact.times.back().second) + " at " + count_text(static_cast<double>(longest)) + " tokens";
  }
  text.push_back(first + ".");

  // Cheaper in the long run, by the declared cost; of these the closest and the fastest at the longest length of `exact`.
  const VariantResult *closest = nullptr, *fastest = nullptr, *causal = nullptr;
  for (const VariantResult& v : c.variants) {
    if (v.exponent > exact.exponent - 0.2 || !std::isfinite(v.error)) continue;
    if (v.causal != exact.causal) {
      if (causal == nullptr || v.error < causal->error) causal = &v;
      continue;
    }
    if (closest == nullptr || v.error < closest->error) closest = &v;
    const double mine = time_at(v, longest);
    if (mine > 0 && (fastest == nullptr || mine < time_at(*fastest, longest))) fastest = &v;
  }
  const auto describe = [&](const VariantResult& v) {
    std::string sentence = v.name + ": off by " + percent_text(v.error) + " (cosine " + significant(v.cosine, 3) + ")";
    if (const double mine = time_at(v, longest); mine > 0 && longest > c.input.T) {
      const double factor = exact.times.back().second / mine;
      sentence += ", " + (factor >= 1 ? times_text(factor) + " as fast" : times_text(1 / factor) + " as long") + " at " +
                  count_text(static_cast<double>(longest)) + " tokens";
      const int64_t from = crossing(exact, v);
      if (from > c.input.T) sentence += ", faster from " + count_text(static_cast<double>(from)) + " on";
    }
    return sentence + ".";
  };
  if (closest != nullptr) text.push_back("Of those that grow more slowly the closest is " + describe(*closest));
  if (fastest != nullptr && fastest != closest) text.push_back("The fastest at that length is " + describe(*fastest));

  if (causal != nullptr)
    text.push_back("Of those that see the past alone the closest to softmax that does is " + describe(*causal));

  const auto repeated = std::count_if(c.variants.begin(), c.variants.end(), [](const auto& v) { return v.repeated_heads; });
  if (repeated > 0) {
    text.push_back(std::to_string(repeated) + " of them take no grouped heads: each of the " + std::to_string(c.input.Hkv) +
                   " key heads was repeated for its query heads, and their times, states and workspace are those of " +
                   std::to_string(c.input.H) + ".");
  }

  text.push_back("For scale: the plain average of the values, which looks at nothing, is off by " +
                 percent_text(c.average_error) + ".");

  const VariantResult* small = nullptr;
  for (const VariantResult& v : c.variants) {
    if (v.state_bytes > 0 && !v.state_grows && (small == nullptr || v.state_bytes < small->state_bytes)) small = &v;
  }
  if (small != nullptr && exact.state_bytes > 0 && exact.state_grows) {
    text.push_back("To continue token by token, exact attention keeps " + bytes_text(static_cast<double>(exact.state_bytes)) +
                   " per layer after " + count_text(static_cast<double>(c.input.T)) + " tokens, growing with every token; " +
                   small->name + " keeps " + bytes_text(static_cast<double>(small->state_bytes)) + " at any length.");
  }
  text.push_back(
      "The model was trained with exact attention and nothing was adapted to its replacements: the errors say how much "
      "conversion or training has to make up for, not what a model made for a mechanism reaches.");
  return text;
}

}  // namespace linnet::compare
