#include "analysis/heads.h"

#include <gtest/gtest.h>

#include <cmath>

#include "analysis/linalg.h"
#include "check/random.h"
#include "core/tolerance.h"

namespace linnet::analysis {
namespace {

HeadTaps random_taps(int64_t T, int64_t heads, int64_t kv, int64_t D, double size) {
  HeadTaps t;
  t.tokens = T, t.heads = heads, t.kv_heads = kv, t.key = t.value = D;
  t.scale = 1 / std::sqrt(static_cast<double>(D));
  check::Random random(5);
  const auto fill = [&](std::vector<float>& x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x.push_back(static_cast<float>(size * random.normal()));
  };
  fill(t.q, T * heads * D), fill(t.k, T * kv * D), fill(t.v, T * kv * D);
  t.out.resize(static_cast<size_t>(T * heads * D));
  return t;
}

// Weights of every row, in double, by the definition.
std::vector<std::vector<double>> weights(const HeadTaps& t, int64_t head, bool causal, std::vector<std::vector<double>>* scores,
                                         std::vector<double>* lse) {
  std::vector<std::vector<double>> p;
  for (int64_t i = 0; i < t.tokens; ++i) {
    std::vector<double> s;
    double total = 0;
    for (int64_t j = 0; j < (causal ? i + 1 : t.tokens); ++j) {
      double dot = 0;
      for (int64_t c = 0; c < t.key; ++c) {
        dot += static_cast<double>(t.q[static_cast<size_t>((i * t.heads + head) * t.key + c)]) *
               static_cast<double>(t.k[static_cast<size_t>((j * t.kv_heads + head / (t.heads / t.kv_heads)) * t.key + c)]);
      }
      s.push_back(t.scale * dot);
      total += std::exp(s.back());
    }
    scores->push_back(s);
    lse->push_back(std::log(total));
    for (double& x : s) x = std::exp(x) / total;
    p.push_back(s);
  }
  return p;
}

// Queries that differ in length alone are one to linear attention, not to softmax and InLine; equal keys tell none apart;
// InLine's margin is at least (scale / N) times the smallest singular value of the centred keys, and reached where d = 1.
TEST(Heads, ConfusedQueries) {
  constexpr int64_t kTokens = 24, kPairs = kTokens * (kTokens - 1) / 2;
  HeadTaps t = random_taps(kTokens, 1, 1, 3, 1);
  const Confusions free = confusions(t, 0, 1e-6, 1e-9);
  EXPECT_EQ(free.pairs, kPairs);
  EXPECT_EQ(free.confused[0] + free.confused[2], 0);  // relu leaves one coordinate of some
  Matrix keys(kTokens, 3);
  for (int64_t c = 0; c < 3; ++c) {
    double mean = 0;
    for (int64_t j = 0; j < kTokens; ++j) mean += static_cast<double>(t.k[static_cast<size_t>(3 * j + c)]) / kTokens;
    for (int64_t j = 0; j < kTokens; ++j) keys(j, c) = static_cast<double>(t.k[static_cast<size_t>(3 * j + c)]) - mean;
  }
  EXPECT_GE(free.margin[2], t.scale / kTokens * singular_values(keys).back() * (1 - kSystemError));
  HeadTaps line = random_taps(kTokens, 1, 1, 1, 1);
  double square = 0, mean = 0;
  for (const float k : line.k) mean += static_cast<double>(k) / kTokens;
  for (const float k : line.k) square += std::pow(static_cast<double>(k) - mean, 2);
  EXPECT_NEAR(confusions(line, 0, 1e-6, 0).margin[2], line.scale / kTokens * std::sqrt(square), kSystemError);
  for (int64_t i = 0; i < kTokens; ++i) {
    for (int64_t c = 0; c < 3; ++c)
      t.q[static_cast<size_t>(3 * i + c)] = static_cast<float>(c + 1) * (1 + static_cast<float>(i) / 8);
  }
  const Confusions scaled = confusions(t, 0, 1e-6, 1e-9);
  EXPECT_EQ(scaled.confused[0], 0);
  EXPECT_EQ(scaled.confused[1], kPairs);
  EXPECT_EQ(scaled.confused[2], 0);
  EXPECT_EQ(confusions(t, 0, 1e6, 1e-9).pairs, 0);  // none is so far from another
  std::fill(t.k.begin(), t.k.end(), 1.F);
  const Confusions blind = confusions(t, 0, 1e-6, 1e-9);
  for (const int64_t count : blind.confused) EXPECT_EQ(count, kPairs);
}

TEST(Heads, StatisticsAreTheirDefinitions) {
  const double near = rms_gate(Dtype::f32, Pass::backward, Against::reference, false, 0);
  for (const bool causal : {true, false}) {
    const HeadTaps t = random_taps(41, 4, 2, 6, 1.2);
    HeadOptions o;
    o.rows = 41, o.windows = {4, 9}, o.spectra = o.cheaper = true, o.family = 3, o.samples = 64;
    std::vector<HeadStatistics> got;
    ASSERT_TRUE(head_statistics(t, 7, causal, o, got).ok());
    ASSERT_EQ(got.size(), 4U);
    for (int64_t h = 0; h < 4; ++h) {
      const HeadStatistics& s = got[static_cast<size_t>(h)];
      std::vector<std::vector<double>> scores;
      std::vector<double> lse;
      const auto p = weights(t, h, causal, &scores, &lse);
      double entropy = 0, distance = 0, first = 0, sinks = 0, window = 0, kl_window = 0, kl_sinks = 0;
      for (int64_t i = 0; i < t.tokens; ++i) {
        double inside = 0, both = 0;
        for (size_t j = 0; j < p[static_cast<size_t>(i)].size(); ++j) {
          const double x = p[static_cast<size_t>(i)][j];
          const auto key = static_cast<int64_t>(j), apart = std::abs(i - static_cast<int64_t>(j));
          entropy -= x * std::log(x) / 41;
          distance += x * static_cast<double>(apart) / 41;
          first += key == 0 ? x / 41 : 0;
          sinks += key < 4 ? x / 41 : 0;
          window += apart < 9 ? x / 41 : 0;
          const bool seen = causal ? key > i - 9 : key >= i - 4 && key <= i + 4;
          inside += seen ? x : 0;
          both += seen || key < 4 ? x : 0;
        }
        kl_window -= std::log(inside) / 41;
        kl_sinks -= std::log(both) / 41;
      }
      EXPECT_EQ(s.layer, 7);
      EXPECT_NEAR(s.entropy, entropy, near * 10);
      EXPECT_NEAR(s.distance, distance, near * 100);
      EXPECT_NEAR(s.first_mass, first, near);
      EXPECT_NEAR(s.sink_mass, sinks, near);
      EXPECT_NEAR(s.window_mass[1], window, near);
      EXPECT_NEAR(s.kl[2], kl_window, near * 10);
      EXPECT_NEAR(s.kl[3], kl_sinks, near * 10);
      EXPECT_GE(s.effective_rank, 1);
      EXPECT_GE(s.effective_rank, s.stable_rank * (1 - near));  // of squared singular values
      EXPECT_GT(s.dof, 1);
      EXPECT_LE(s.dof, 64);
    }
  }
}

// Monarch and the tree by their definitions: the best row of the family has the KL lse - lse of its logits.
TEST(Heads, KlOfStructuredRows) {
  const double near = 10 * rms_gate(Dtype::f32, Pass::backward, Against::reference, false, 0);
  const int64_t T = 23, D = 4, block = 4, family = 3;  // block = floor(sqrt 23)
  const HeadTaps t = random_taps(T, 1, 1, D, 1);
  HeadOptions o;
  o.rows = T, o.windows = {4}, o.cheaper = true, o.family = family;
  for (const bool causal : {true, false}) {
    std::vector<HeadStatistics> got;
    ASSERT_TRUE(head_statistics(t, 0, causal, o, got).ok());
    std::vector<std::vector<double>> full, ignored;
    std::vector<double> lse, other;
    weights(t, 0, false, &full, &other);
    weights(t, 0, causal, &ignored, &lse);
    double monarch = 0, tree = 0;
    for (int64_t i = 0; i < T; ++i) {
      double total = 0;
      for (int64_t b = 0; b * block < (causal ? i + 1 : T); ++b) {
        const int64_t end = std::min(b * block + block, causal ? i + 1 : T);
        if (causal && b == i / block) {
          for (int64_t j = b * block; j < end; ++j) total += std::exp(full[static_cast<size_t>(i)][static_cast<size_t>(j)]);
          continue;
        }
        const int64_t eye = b * block + i % block;  // the query of this slot; a padded one is 0
        double sum = 0, mean = 0, entropy = 0;
        const auto score = [&](int64_t j) { return eye < T ? full[static_cast<size_t>(eye)][static_cast<size_t>(j)] : 0.0; };
        for (int64_t j = b * block; j < end; ++j) sum += std::exp(score(j));
        for (int64_t j = b * block; j < end; ++j) {
          const double r = std::exp(score(j)) / sum;
          mean += r * full[static_cast<size_t>(i)][static_cast<size_t>(j)];
          entropy -= r * std::log(r);
        }
        total += std::exp(mean + entropy);
      }
      monarch += (lse[static_cast<size_t>(i)] - std::log(total)) / static_cast<double>(T);
      // Keys whose lowest common span with i has the same child share the mean of their scores.
      double leaves = 0;
      for (int64_t j = 0; j < (causal ? i + 1 : T); ++j) {
        int64_t size = 1;
        while (j / (size * family) != i / (size * family)) size *= family;
        const int64_t begin = j / size * size, end = std::min(begin + size, T);
        double mean = 0;
        for (int64_t m = begin; m < end; ++m)
          mean += full[static_cast<size_t>(i)][static_cast<size_t>(m)] / static_cast<double>(end - begin);
        leaves += std::exp(mean);
      }
      tree += (lse[static_cast<size_t>(i)] - std::log(leaves)) / static_cast<double>(T);
    }
    EXPECT_NEAR(got[0].kl[3], monarch, near) << causal;
    EXPECT_NEAR(got[0].kl[4], tree, near) << causal;
    EXPECT_GT(got[0].kl[2], 0);  // random features
  }
}

// A window that the head has already; many features come near softmax; one token.
TEST(Heads, SpecialCases) {
  HeadTaps t = random_taps(40, 2, 1, 4, 0.3);
  HeadOptions o;
  o.rows = 40, o.windows = {4}, o.cheaper = o.spectra = true;
  std::vector<HeadStatistics> few, many, windowed;
  ASSERT_TRUE(head_statistics(t, 0, true, o, few).ok());
  o.features = 4096;
  ASSERT_TRUE(head_statistics(t, 0, true, o, many).ok());
  EXPECT_LT(many[0].kl[2], few[0].kl[2]);
  EXPECT_LT(many[0].kl[2], 1e-3);
  o.features = 8;
  t.window_left = 3;
  ASSERT_TRUE(head_statistics(t, 0, true, o, windowed).ok());
  EXPECT_NEAR(windowed[0].window_mass[0], 1, 1e-12);
  EXPECT_TRUE(windowed[0].kl.empty());
  t.prefix = 2;
  ASSERT_TRUE(head_statistics(t, 0, true, o, windowed).ok());
  EXPECT_GT(windowed[0].first_mass, 0.1);
  const HeadTaps one = random_taps(1, 1, 1, 4, 1);
  ASSERT_TRUE(head_statistics(one, 0, true, o, few).ok());
  for (const double kl : few[0].kl) EXPECT_NEAR(kl, 0, 1e-6);
  EXPECT_EQ(few[0].first_mass, 1);
}

TEST(Heads, BrokenActivationsAreNamed) {
  for (const int which : {0, 1, 2}) {
    HeadTaps t = random_taps(10, 2, 2, 4, 1);
    (which == 0 ? t.q : which == 1 ? t.k : t.v)[3 * 8 + 1] = NAN;
    std::vector<HeadStatistics> out;
    const Status status = head_statistics(t, 5, true, {}, out);
    const std::string says = std::string("layer 5: its ") +
                             (which == 0   ? "queries"
                              : which == 1 ? "keys"
                                           : "values") +
                             " are not finite from token 3 on";
    EXPECT_EQ(status.message().rfind(says, 0), 0U) << status.message();
  }
}

}  // namespace
}  // namespace linnet::analysis
