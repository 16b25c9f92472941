// Stream: the random numbers of every task, SplitMix64, so that two implementations draw the same sequences. The order of the
// calls is part of each task's definition.
//
//   Stream stream(7);
//   std::vector<int64_t> keys = stream.distinct(31, 4);            // 4 different numbers below 31
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace linnet::tasks {

class Stream {
 public:
  explicit Stream(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // [0, 1)
  int64_t below(int64_t n) { return static_cast<int64_t>(uniform() * static_cast<double>(n)); }

  // m different numbers of 0 .. n - 1: the first m steps of a Fisher-Yates shuffle. `order` is scratch that keeps its memory.
  void distinct(int64_t n, int64_t m, std::vector<int64_t>* order) {
    order->resize(static_cast<size_t>(n));
    std::iota(order->begin(), order->end(), 0);
    for (int64_t i = 0; i < m; ++i)
      std::swap((*order)[static_cast<size_t>(i)], (*order)[static_cast<size_t>(i + below(n - i))]);
    order->resize(static_cast<size_t>(m));
  }
  std::vector<int64_t> distinct(int64_t n, int64_t m) {
    std::vector<int64_t> order;
    distinct(n, m, &order);
    return order;
  }

 private:
  uint64_t state_;
};

// distinct() in O(m): the numbers 0 .. n - 1 stay in place between calls, and a draw undoes its swaps.
class DistinctDraws {
 public:
  void resize(int64_t n) {
    if (static_cast<int64_t>(order_.size()) == n) return;
    order_.resize(static_cast<size_t>(n));
    std::iota(order_.begin(), order_.end(), 0);
  }
  void draw(Stream& stream, int64_t m, int64_t* out) {
    swapped_.resize(static_cast<size_t>(m));
    const auto n = static_cast<int64_t>(order_.size());
    for (int64_t i = 0; i < m; ++i) {
      const int64_t j = i + stream.below(n - i);
      std::swap(order_[static_cast<size_t>(i)], order_[static_cast<size_t>(j)]);
      swapped_[static_cast<size_t>(i)] = j;
      out[i] = order_[static_cast<size_t>(i)];
    }
    for (int64_t i = 0; i < m; ++i) {
      order_[static_cast<size_t>(i)] = i;
      order_[static_cast<size_t>(swapped_[static_cast<size_t>(i)])] = swapped_[static_cast<size_t>(i)];
    }
  }

 private:
  std::vector<int64_t> order_, swapped_;
};

// Draws of different indices with given weights. A draw is u = uniform() x (sum of the remaining weights, in index order) and
// the first index whose running sum exceeds u. Running sums before the last index drawn do not change, so a draw costs a search
// and the sums behind it instead of all of them, to the same bit.
class WeightedDraws {
 public:
  // Starts anew with these weights and their running sums.
  void reset(const std::vector<double>& weights, const std::vector<double>& sums) {
    weights_.assign(weights.begin(), weights.end());
    sums_.assign(sums.begin(), sums.end());
  }
  int64_t draw(Stream& stream) {
    const double u = stream.uniform() * sums_.back();
    size_t i = static_cast<size_t>(std::upper_bound(sums_.begin(), sums_.end(), u) - sums_.begin());
    i = std::min(i, sums_.size() - 1);  // u rounded up to the sum: then the last index that is left
    while (i > 0 && weights_[i] == 0) --i;
    weights_[i] = 0;
    double sum = i == 0 ? 0 : sums_[i - 1];
    for (size_t j = i; j < sums_.size(); ++j) sums_[j] = sum += weights_[j];
    return static_cast<int64_t>(i);
  }

 private:
  std::vector<double> weights_, sums_;
};

}  // namespace linnet::tasks
