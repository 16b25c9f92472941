// timing: how long calls take, and how much that varies.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace linnet::bench {

// Seconds since some moment of the past.
inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Spread {
  double best = 0, median = 0, p90 = 0;  // seconds of one call
  int64_t calls = 0;
};
Spread spread(std::vector<double> samples);

// Calls `call` again and again, at least once, until `seconds` have passed; appends the time of each call.
template <class Call>
void sample(double seconds, std::vector<double>* samples, const Call& call) {
  double last = now();
  for (const double end = last + seconds; last < end;) {
    call();
    const double time = now();
    samples->push_back(time - last);
    last = time;
  }
}

}  // namespace linnet::bench
