#include "bench/timing.h"

#include <algorithm>

namespace linnet::bench {

Spread spread(std::vector<double> samples) {
  Spread s;
  s.calls = static_cast<int64_t>(samples.size());
  if (samples.empty()) return s;
  std::sort(samples.begin(), samples.end());
  const size_t n = samples.size();
  s.best = samples.front();
  s.median = n % 2 == 1 ? samples[n / 2] : (samples[n / 2 - 1] + samples[n / 2]) / 2;
  s.p90 = samples[std::min(n - 1, (9 * n) / 10)];
  return s;
}

}  // namespace linnet::bench
