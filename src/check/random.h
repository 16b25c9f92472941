// Random: numbers that are the same on every machine for the same seed, so that a printed case reproduces itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace linnet::check {

class Random {
 public:
  // Streams of one seed are independent: Random(7, "q") and Random(7, "k").
  explicit Random(uint64_t seed, std::string_view stream = "") : state_(seed) {
    for (const char c : stream) state_ = mix(state_ ^ static_cast<unsigned char>(c));
    next();
  }
  uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15u); }  // splitmix64
  int64_t below(int64_t n) { return n <= 1 ? 0 : static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // [0, 1)
  bool chance(double p) { return uniform() < p; }
  double normal() {  // Box-Muller, the second of each pair kept
    if (spare_) return spare_ = false, kept_;
    const double radius = std::sqrt(-2 * std::log(1 - uniform())), angle = 2 * M_PI * uniform();
    spare_ = true;
    kept_ = radius * std::sin(angle);
    return radius * std::cos(angle);
  }
  template <class List>
  auto pick(const List& list) {
    return list.begin()[below(static_cast<int64_t>(list.size()))];
  }
  template <class T>
  T pick(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<int64_t>(list.size()))];
  }

 private:
  static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  uint64_t state_;
  double kept_ = 0;
  bool spare_ = false;
};

}  // namespace linnet::check
