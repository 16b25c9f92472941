#include "analysis/icl.h"

#include <gtest/gtest.h>

#include <cmath>

#include "analysis/icl_train.h"
#include "check/random.h"

namespace linnet::analysis {
namespace {

Matrix covariance(int64_t d, uint64_t seed) {
  Matrix a(d, d);
  check::Random random(seed);
  for (double& x : a.values) x = random.normal();
  return (1 / static_cast<double>(d)) * (a * transposed(a)) + 0.1 * identity(d);
}

// "Relations" and "Edge cases" of the theory.
TEST(Icl, SpecialCases) {
  const int64_t d = 5;
  const Prompts plain = {identity(d), identity(d), 0.25}, skew = {covariance(d, 1), covariance(d, 2), 0.25};
  double before = HUGE_VAL;
  for (const int64_t n : {0, 1, 3, 20, 200}) {
    const std::vector<double> ones(static_cast<size_t>(n), 1);
    const double isotropic = isotropic_loss(d, n, 0.25);
    EXPECT_NEAR(optimal_loss(plain, n), isotropic, 1e-12);
    EXPECT_NEAR(retrieval_loss(d, n, 0.25, 0), isotropic, 1e-12);
    EXPECT_NEAR(aligned_loss(d, n, 0.25, 0, 1), isotropic, 1e-12);
    EXPECT_NEAR(drift_uniform_loss(d, n, 0.25, 1), isotropic, 1e-12);
    EXPECT_NEAR(drift_weighted_loss(d, n, 0.25, 1), isotropic, 1e-12);
    EXPECT_NEAR(drift_uniform_loss(d, n, 0.25, 0), d + 0.25, 1e-12);
    EXPECT_NEAR(best_step(skew, drift_matrix(1, n), ones, nullptr), optimal_loss(skew, n), 1e-12);
    EXPECT_NEAR(rank_loss(skew, n, d), optimal_loss(skew, n), 1e-12);
    EXPECT_NEAR(rank_loss(skew, n, 0), trace(skew.Sx * skew.Sb) + 0.25, 1e-12);
    EXPECT_LE(drift_weighted_loss(d, n, 0.25, 0.9), drift_uniform_loss(d, n, 0.25, 0.9) + 1e-12);
    EXPECT_LE(optimal_loss(skew, n), before);
    before = optimal_loss(skew, n);
  }
  const double many = 1e6;
  EXPECT_NEAR((isotropic_loss(d, 1'000'000, 0.25) - 0.25) * many / (d * (d + 1.25)), 1, 1e-4);
  EXPECT_NEAR(drift_uniform_loss(5, 20, 0, 0.9), 4.086, 5e-4);
  EXPECT_NEAR(drift_weighted_loss(5, 20, 0, 0.9), 3.468, 5e-4);
  EXPECT_NEAR(isotropic_loss(5, 20, 0), 1.1538, 1e-4);
}

// The formulas' W is a minimum of the general loss, and adapting with full rank is retraining.
TEST(Icl, WeightsAreOptimal) {
  const int64_t d = 4, n = 12;
  const Prompts p = {covariance(d, 3), covariance(d, 4), 0.3};
  const Matrix Sb_new = covariance(d, 5), K = drift_matrix(0.8, n);
  std::vector<double> omega;
  check::Random random(6);
  for (int64_t i = 0; i < n; ++i) omega.push_back(random.normal());
  Matrix W;
  const double loss = best_step(p, K, omega, &W);
  EXPECT_NEAR(step_loss(p, K, W, omega), loss, 1e-12);
  const std::vector<double> ones(static_cast<size_t>(n), 1);
  Matrix full, half, update;
  const double best = optimal_loss(p, n, &full), limited = rank_loss(p, n, 2, &half);
  EXPECT_NEAR(step_loss(p, drift_matrix(1, n), full, ones), best, 1e-12);
  EXPECT_NEAR(step_loss(p, drift_matrix(1, n), half, ones), limited, 1e-12);
  for (int trial = 0; trial < 20; ++trial) {
    Matrix moved = W;
    for (double& x : moved.values) x += 1e-3 * random.normal();
    EXPECT_GT(step_loss(p, K, moved, omega), loss);
  }
  const Prompts next = {p.Sx, Sb_new, p.noise};
  EXPECT_NEAR(adapted_loss(p, Sb_new, n, d), optimal_loss(next, n), 1e-12);
  EXPECT_NEAR(adapted_loss(p, Sb_new, n, 0), step_loss(next, drift_matrix(1, n), full, ones), 1e-12);
  double before = HUGE_VAL;
  for (int64_t r = 0; r <= d; ++r) {
    const double adapted = adapted_loss(p, Sb_new, n, r, &update);
    EXPECT_NEAR(step_loss(next, drift_matrix(1, n), full + update, ones), adapted, 1e-12) << r;
    EXPECT_LE(count_above(singular_values(update), 1e-9), r);
    EXPECT_LE(adapted, before + 1e-12);
    before = adapted;
  }
}

// Every formula against prompts drawn at random, within four standard errors of the sample.
TEST(Icl, Simulation) {
  const int64_t d = 3, n = 8, samples = 200'000;
  const double noise = 0.2;
  check::Random random(7);
  const auto normal = [&](int64_t count) {
    std::vector<double> x(static_cast<size_t>(count));
    for (double& each : x) each = random.normal();
    return x;
  };
  const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  };
  enum Design { plain, drifting, retrieval, aligned };
  const double alpha = 0.6, gamma = aligned_gamma(d, alpha), rho = 0.8;
  for (const Design design : {plain, drifting, retrieval, aligned}) {
    double w = 0, want = 0;
    std::vector<double> omega(static_cast<size_t>(n), 1);
    const Prompts isotropic = {identity(d), identity(d), noise};
    if (design == plain) {
      Matrix W;
      want = optimal_loss(isotropic, n, &W);
      w = W(0, 0);
    } else if (design == drifting) {
      want = drift_weighted_loss(d, n, noise, rho, &omega);
      Matrix W;
      EXPECT_NEAR(best_step(isotropic, drift_matrix(rho, n), omega, &W), want, 1e-12);
      w = W(0, 0);
    } else {
      want = design == retrieval ? retrieval_loss(d, n, noise, alpha, &w) : aligned_loss(d, n, noise, alpha, gamma, &w);
    }
    double sum = 0, squares = 0;
    for (int64_t sample = 0; sample < samples; ++sample) {
      std::vector<double> beta = normal(d), x = normal(d), s(static_cast<size_t>(d), 0);
      const double scale = design == aligned ? gamma : 1;
      for (int64_t i = 0; i < n; ++i) {
        std::vector<double> xi = normal(d);
        for (size_t c = 0; c < xi.size(); ++c) {
          if (design == retrieval) xi[c] = alpha * x[c] + std::sqrt(1 - alpha * alpha) * xi[c];
          if (design == aligned) xi[c] += alpha * beta[c];
        }
        const double yi = scale * dot(xi, beta) + std::sqrt(noise) * random.normal();
        for (size_t c = 0; c < s.size(); ++c) s[c] += omega[static_cast<size_t>(i)] * yi * xi[c];
        if (design == drifting) {
          const std::vector<double> step = normal(d);
          for (size_t c = 0; c < beta.size(); ++c) beta[c] = rho * beta[c] + std::sqrt(1 - rho * rho) * step[c];
        }
      }
      if (design == aligned) {
        for (size_t c = 0; c < x.size(); ++c) x[c] += alpha * beta[c];
      }
      const double error = scale * dot(x, beta) + std::sqrt(noise) * random.normal() - w * dot(x, s);
      sum += error * error;
      squares += error * error * error * error;
    }
    const double mean = sum / samples, deviation = std::sqrt((squares / samples - mean * mean) / samples);
    EXPECT_NEAR(mean, want, 4 * deviation) << design;
  }
}

// Each layer, trained from random weights, reaches its formula; H3 weighs a drifting prompt, attention cannot.
TEST(Icl, TrainedLayersReachTheirFormulas) {
  IclSetting o;
  o.d = 2, o.rank = 1, o.drift = 0.7, o.alpha = 0.4, o.spectrum = 0.5, o.noise = 0.1;
  const IclTraining quick = {.steps = 600, .batch = 128, .tests = 1 << 17, .rate = 0.02};
  double attention = 0, h3 = 0;
  for (const auto& [name, layer] : icl_experiments()) {
    IclMeasured m;
    const Status status = icl_experiment(name, layer, o, 6, quick, &m);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_LT(std::abs(m.off()), kIclAgreement + 4 * m.deviation / m.theory)
        << name << " " << layer << " " << m.loss << " " << m.theory;
    EXPECT_GT(m.alignment, 0.98) << name << " " << layer;
    if (layer == "h3") {
      EXPECT_GT(m.filter, 0.98) << name;
    }
    if (name == "drift_attention") attention = m.loss;
    if (name == "drift_h3") h3 = m.loss;
  }
  EXPECT_LT(h3, attention);
}

TEST(Icl, TrainingRefuses) {
  IclMeasured m;
  const auto says = [&](const IclSetting& o, int64_t n, const IclTraining& t) {
    return icl_experiment("rank", "attention", o, n, t, &m).message();
  };
  EXPECT_EQ(says({}, 4, {.steps = 0}), "icl: steps is 0, expected 1 to 1000000");
  EXPECT_EQ(says({}, 4, {.batch = 1}), "icl: batch is 1, expected 8 to 100000");
  EXPECT_EQ(says({}, 0, {}), "icl: n is 0, expected at least 1 to train on");
  IclSetting none;
  none.rank = 0;
  EXPECT_EQ(says(none, 4, {}), "icl: rank is 0: there is nothing to train");
}

TEST(Icl, BadInput) {
  const Matrix two = identity(2);
  const std::pair<Prompts, const char*> table[] = {
      {{Matrix(2, 3), two, 0}, "icl: Sx is not square"},
      {{two, identity(3), 0}, "icl: Sb has 3 rows, expected 2 (same as Sx)"},
      {{Matrix(2, 2, {1, 0.5, 0, 1}), two, 0}, "icl: Sx is not symmetric"},
      {{two, Matrix(2, 2, {1, 0, 0, -1}), 0}, "icl: Sb has the negative eigenvalue"},
      {{two, two, -1}, "icl: noise is -1"},
  };
  for (const auto& [prompts, says] : table) {
    const Status status = check_prompts(prompts);
    EXPECT_EQ(status.message().rfind(says, 0), 0U) << status.message();
  }
}

}  // namespace
}  // namespace linnet::analysis
