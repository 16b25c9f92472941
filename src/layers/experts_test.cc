// Mixtures of experts against a plain loop in double: types, shapes, weights held in fewer bits, and what must change no bit.
#include "layers/experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/executor.h"
#include "core/half.h"
#include "mechanisms/dense/dense_pack.h"

namespace linnet::layers {
namespace {

constexpr int64_t kExperts = 6, kChannels = 32, kInner = 64;

struct Mixture {
  Runner runner;
  std::vector<std::vector<double>> weights;  // gate, up, down of each expert
};

// Random numbers that f16 and bf16 hold.
std::vector<double> numbers(int64_t count, const std::string& name, double scale) {
  std::vector<double> values = initial_values(normal(scale), {count}, name, 3);
  for (double& x : values) x = to_f64(round_to<Bf16>(x));
  return values;
}

Mixture make(int64_t top, bool normalised, const RunnerOptions& options) {
  Recorder l("mixture");
  const Value x = l.input("x", {kB, kT, kChannels}), w = l.input("weights", {kB, kT, kExperts});
  std::vector<Expert> list;
  for (int64_t e = 0; e < kExperts; ++e) {
    Recorder::Scope scope(l, std::to_string(e));
    list.push_back(
        {l.weight("gate", {kInner, kChannels}), l.weight("up", {kInner, kChannels}), l.weight("down", {kChannels, kInner})});
  }
  l.output(l.experts(x, w, list, top, normalised, "silu"));
  Record record;
  EXPECT_TRUE(l.finish(&record).ok());
  Mixture made;
  for (const Parameter& parameter : record.parameters) {
    EXPECT_TRUE(parameter.dense_only);
    made.weights.push_back(numbers(kInner * kChannels, parameter.name, 0.3));
  }
  EXPECT_TRUE(Runner::make(std::move(record), options, &made.runner).ok());
  for (size_t i = 0; i < made.weights.size(); ++i) {
    EXPECT_TRUE(made.runner.bind_values(made.runner.record().parameters[i].name, made.weights[i]).ok());
  }
  return made;
}

std::vector<double> expected(const Mixture& mixture, const std::vector<double>& x, const std::vector<double>& w, int64_t top,
                             bool normalised) {
  std::vector<double> out(x.size(), 0);
  for (size_t row = 0; row < x.size() / kChannels; ++row) {
    std::vector<size_t> order(kExperts);
    std::iota(order.begin(), order.end(), 0);
    const double* own = w.data() + row * kExperts;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return own[a] > own[b]; });
    double sum = 0;
    for (int64_t i = 0; i < top; ++i) sum += own[order[static_cast<size_t>(i)]];
    for (int64_t i = 0; i < top; ++i) {
      const size_t e = order[static_cast<size_t>(i)];
      const double *gate = mixture.weights[3 * e].data(), *up = mixture.weights[3 * e + 1].data(),
                   *down = mixture.weights[3 * e + 2].data();
      for (int64_t j = 0; j < kInner; ++j) {
        double g = 0, u = 0;
        for (int64_t c = 0; c < kChannels; ++c) {
          g += gate[j * kChannels + c] * x[row * kChannels + static_cast<size_t>(c)];
          u += up[j * kChannels + c] * x[row * kChannels + static_cast<size_t>(c)];
        }
        const double h = g / (1 + std::exp(-g)) * u * own[e] / (normalised ? sum : 1);
        for (int64_t c = 0; c < kChannels; ++c) out[row * kChannels + static_cast<size_t>(c)] += down[c * kInner + j] * h;
      }
    }
  }
  return out;
}

std::vector<double> run(Mixture& mixture, const std::vector<double>& x, const std::vector<double>& w, int64_t batch,
                        int threads = 2) {
  const int64_t tokens = static_cast<int64_t>(x.size()) / kChannels / std::max<int64_t>(batch, 1);
  ThreadPool pool(threads);
  std::vector<double> out(x.size(), NAN);
  const Status status =
      mixture.runner.run({View::dense(x.data(), Dtype::f64, {batch, tokens, kChannels}),
                          View::dense(w.data(), Dtype::f64, {batch, tokens, kExperts})},
                         View::dense(out.data(), Dtype::f64, {batch, tokens, kChannels}), {}, {.executor = &pool});
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

double difference(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = 0, top = 1e-30;
  for (size_t i = 0; i < a.size(); ++i) {
    worst = std::isnan(b[i]) ? HUGE_VAL : std::max(worst, std::abs(a[i] - b[i]));
    top = std::max(top, std::abs(a[i]));
  }
  return worst / top;
}

std::vector<double> shares(int64_t rows) {
  std::vector<double> w = numbers(rows * kExperts, "weights", 1);
  for (double& each : w) each = to_f64(round_to<Bf16>(std::exp(each)));
  return w;
}

TEST(Experts, TheChosenOnesTimesTheirWeights) {
  const std::pair<Dtype, double> types[] = {{Dtype::f64, 1e-13}, {Dtype::f32, 2e-6}, {Dtype::f16, 4e-3}, {Dtype::bf16, 3e-2}};
  const std::pair<int64_t, int64_t> shapes[] = {{1, 0}, {1, 1}, {3, 1}, {1, 5}, {1, 67}, {2, 19}};
  for (const auto& [dtype, gate] : types) {
    for (const int64_t top : {1, 2, 6}) {
      for (const bool normalised : {false, true}) {
        Mixture mixture = make(top, normalised, {.activations = dtype});
        for (const auto& [batch, tokens] : shapes) {
          const std::vector<double> x = numbers(batch * tokens * kChannels, "x", 1), w = shares(batch * tokens);
          EXPECT_LT(difference(expected(mixture, x, w, top, normalised), run(mixture, x, w, batch)), gate)
              << dtype_name(dtype) << " top " << top << " rows " << batch << " x " << tokens;
        }
      }
    }
  }
}

TEST(Experts, WeightsInFewerBits) {
  Mixture mixture = make(2, true, {});
  struct Packed {
    std::vector<uint8_t> codes;
    std::vector<F16> scale, offset;
  };
  std::vector<Packed> memory(mixture.weights.size());
  std::vector<std::vector<float>> floats;
  for (size_t i = 3; i < mixture.weights.size(); ++i) {  // the first expert stays in f32; the others have 8 bits, or 4
    const QuantisedBits bits = i % 2 == 0 ? QuantisedBits::eight : QuantisedBits::four;
    const Parameter& parameter = mixture.runner.record().parameters[i];
    const int64_t outputs = parameter.shape[0], panels = dense_panels(outputs), groups = parameter.shape[1] / kGroup;
    Packed& p = memory[i];
    p.codes.resize(static_cast<size_t>(panels * groups * dense_block_bytes(bits)));
    p.scale.resize(static_cast<size_t>(panels * groups * kPanel));
    p.offset.resize(p.scale.size());
    floats.emplace_back(mixture.weights[i].begin(), mixture.weights[i].end());
    Quantised packed;
    packed.bits = bits == QuantisedBits::eight ? 8 : 4;
    packed.codes = View::dense(p.codes.data(), Dtype::u8, {panels, groups, dense_block_bytes(bits)});
    packed.scale = View::dense(p.scale.data(), Dtype::f16, {panels, groups, kPanel});
    packed.offset = View::dense(p.offset.data(), Dtype::f16, {panels, groups, kPanel});
    ASSERT_TRUE(dense_quantise(View::dense(floats.back().data(), Dtype::f32, {outputs, parameter.shape[1]}), bits, packed.codes,
                               packed.scale, packed.offset)
                    .ok());
    for (int64_t o = 0; o < outputs; ++o) {
      for (int64_t c = 0; c < parameter.shape[1]; ++c) {
        mixture.weights[i][static_cast<size_t>(o * parameter.shape[1] + c)] =
            dense_weight(bits, packed.codes, packed.scale, packed.offset, o, c);
      }
    }
    ASSERT_TRUE(mixture.runner.bind(parameter.name, packed).ok());
  }
  for (const int64_t tokens : {1, 40}) {
    const std::vector<double> x = numbers(tokens * kChannels, "x", 1), w = shares(tokens);
    EXPECT_LT(difference(expected(mixture, x, w, 2, true), run(mixture, x, w, 1)), 2e-6) << tokens;
  }
}

TEST(Experts, NeighboursAndThreadsChangeNoBit) {
  Mixture mixture = make(2, true, {});
  const std::vector<double> x = numbers(9 * kChannels, "x", 1), w = shares(9);
  const std::vector<double> together = run(mixture, x, w, 9), prompt = run(mixture, x, w, 1);
  for (const int threads : {1, 3}) {
    EXPECT_EQ(together, run(mixture, x, w, 9, threads));
    EXPECT_EQ(prompt, run(mixture, x, w, 1, threads));
  }
  for (int64_t row = 0; row < 9; ++row) {  // one token each, decoded beside the others and alone
    const std::vector<double> alone = run(mixture, {x.begin() + row * kChannels, x.begin() + (row + 1) * kChannels},
                                          {w.begin() + row * kExperts, w.begin() + (row + 1) * kExperts}, 1);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + row * kChannels)) << row;
  }
}

TEST(Experts, WhatIsRefused) {
  const auto refused = [](int64_t top, int64_t inner, const std::string& sentence) {
    Recorder l("mixture");
    const Value x = l.input("x", {kB, kT, 8}), w = l.input("weights", {kB, kT, 2});
    const auto expert = [&](const std::string& name, int64_t size) {
      return Expert{l.weight(name + "gate", {size, 8}), l.weight(name + "up", {size, 8}), l.weight(name + "down", {8, size})};
    };
    l.output(l.experts(x, w, {expert("a", 16), expert("b", inner)}, top, false, "silu"));
    Record record;
    EXPECT_NE(l.finish(&record).message().find(sentence), std::string::npos) << sentence;
  };
  refused(3, 16, "for 2 experts, of which each token runs 3");
  refused(0, 16, "of which each token runs 0");
  refused(1, 24, "expert 1 has other shapes than the first one");
}

}  // namespace
}  // namespace linnet::layers
