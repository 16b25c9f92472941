// MQAR, multi-query associative recall (Zoology, arXiv 2312.04927): K pairs of key and value, then each key once more; the
// label at that position is its value.
#include <cmath>

#include "tasks/task.h"

namespace linnet::tasks {
namespace {

Status make(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  const int64_t V = o.integer("vocab"), T = o.integer("length"), K = o.integer("pairs"), N = o.integer("examples");
  const auto text = [](int64_t x) { return std::to_string(x); };
  if (T % 2 != 0) return o.error("length is " + text(T) + ", expected an even number");
  if (4 * K > T) return o.error("pairs is " + text(K) + ", expected at most a quarter of length (" + text(T / 4) + ")");
  if (V <= T) return o.error("vocab is " + text(V) + ", expected more than length (" + text(T) + ")");
  if (K > V / 2 - 1)
    return o.error("pairs is " + text(K) + ", but vocab " + text(V) + " has only " + text(V / 2 - 1) + " keys");
  if (N > kMaxElements / T) return o.error("examples x length is above 2^34 tokens");

  const int64_t space = (T - 2 * K) / 2;
  std::vector<double> weights(static_cast<size_t>(space));
  double sum = 0;
  for (int64_t i = 0; i < space; ++i) {
    sum += weights[static_cast<size_t>(i)] = std::pow(static_cast<double>(i + 1), o.real("power") - 1);
  }
  for (double& weight : weights) weight /= sum;
  std::vector<double> sums(weights.size());
  std::partial_sum(weights.begin(), weights.end(), sums.begin());

  TaskTensor inputs = integer_tensor("inputs", {N, T}), labels = integer_tensor("labels", {N, T}, kIgnored);
  TaskTensor gaps = integer_tensor("gaps", {N, K});
  const bool filler = o.flag("random_filler");
  for_examples(o, N, [&](Stream& stream, int64_t example) {
    thread_local DistinctDraws keys, values;
    thread_local WeightedDraws draws;
    thread_local std::vector<int64_t> key, value;
    int64_t* const token = inputs.integers.data() + example * T;
    int64_t* const label = labels.integers.data() + example * T;
    key.resize(static_cast<size_t>(K));
    value.resize(static_cast<size_t>(K));
    keys.resize(V / 2 - 1);
    values.resize(V - V / 2);
    keys.draw(stream, K, key.data());
    values.draw(stream, K, value.data());
    draws.reset(weights, sums);
    for (int64_t j = 0; j < K; ++j) {
      token[2 * j] = 1 + key[static_cast<size_t>(j)];
      token[2 * j + 1] = V / 2 + value[static_cast<size_t>(j)];
    }
    for (int64_t j = 0; j < K; ++j) {
      const int64_t gap = draws.draw(stream), at = 2 * K + 2 * gap;
      gaps.integers[static_cast<size_t>(example * K + j)] = gap;
      token[at] = token[2 * j];
      label[at] = token[2 * j + 1];
    }
    if (!filler) return;
    for (int64_t t = 0; t < T; ++t) {
      if (token[t] == 0) token[t] = stream.below(V);
    }
  });
  *tensors = {std::move(inputs), std::move(labels), std::move(gaps)};
  return {};
}

}  // namespace

const Task& mqar_task() {
  static const Task task = {
      .name = "mqar",
      .summary = "multi-query associative recall: pairs of keys and values, then each key once more",
      .details =
          "Keys are 1 .. vocab/2 - 1, values vocab/2 .. vocab - 1, filler 0. The context is k1 v1 k2 v2 ...; behind it each "
          "key is\n"
          "asked once, its label (the value) at the key's own position; all other labels are -100. A small power crowds the\n"
          "queries right behind the context, power 1 spreads them evenly.",
      .options =
          drawn_options(64, {integer_option("vocab", 8192, 4, int64_t{1} << 30, "size of the vocabulary, more than length"),
                             integer_option("length", 64, 0, int64_t{1} << 24, "tokens of a sequence, even"),
                             integer_option("pairs", 4, 0, int64_t{1} << 22, "keys with a value, at most length / 4"),
                             real_option("power", "0.01", 0, 100, "of the weights i^(power - 1) of the gaps"),
                             flag_option("random_filler", false, "random tokens instead of 0 between the queries")}),
      .results = {{"inputs", "examples length", "tokens"},
                  {"labels", "examples length", "the value where a key is asked, -100 elsewhere"},
                  {"gaps", "examples pairs", "where each key is asked: position 2 pairs + 2 gap"}},
      .make = make,
  };
  return task;
}

}  // namespace linnet::tasks
