// distill: agreement with the reference, the relations and edge cases of its page, decode, estimator, allocation, refusals.
#include "distill.h"

#include <gtest/gtest.h>

#include <cmath>

#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

using check::constant;
using check::mapped;
using check::Options;
using check::out_of;
using check::random_tensor;
using check::refusal;
using check::rms_error;
using check::Tensor;
using check::Tensors;
using check::tokens;
using check::with;

TEST(Distill, AgreesWithTheReference) {
  check::expect_agreement({
      "distill B=2 T=0 S=0 H=2 K=4 V=4 M=3 pass=bwd",
      "distill B=1 T=1 S=1 H=1 K=4 V=3 M=5 causal=1 pass=bwd",
      "distill B=2 T=37 S=37 H=2 K=9 V=7 M=12 causal=1 with=key_mask,key_logw values=garbage threads=3 pass=bwd",
      "distill B=1 T=33 S=33 H=2 K=16 V=16 M=8 strided=1 with=key_mask values=masked,mixed pass=bwd",
      "distill_decode B=2 T=3 H=2 K=8 V=12 M=9 with=key_logw threads=2",
      "distill_dof T=17 D=4 N=3 P=5",
      "distill_alloc S=5 H=3 R=17 low=2 high=16 multiple=2 with=spectra,weights",
      "distill_balance E=2 T=9 H=2 K=4 V=3 M=5 window=3",
      "distill_window B=2 T=20 H=3 K=6 V=5 F=4 window=5 sinks=2 pass=bwd",
      "distill_window B=1 T=0 H=2 K=4 V=3 F=2 pass=bwd",
      "distill_window B=1 T=1 H=1 K=4 V=3 F=2 window=3 pass=bwd",
      "distill_window B=1 T=150 H=2 K=9 V=17 F=7 window=1 threads=3 pass=bwd",
      "distill_window B=1 T=131 H=1 K=16 V=8 F=16 window=40 strided=1 values=mixed pass=bwd",
  });
}

Tensors attention(int64_t T, uint64_t seed) {
  Tensor alpha = random_tensor({2, 6}, seed + 4);
  for (int64_t i = 0; i < alpha.count(); ++i) alpha.set(i, 0.1 + std::abs(alpha.get(i)));
  return {{"q", random_tensor({1, T, 2, 4}, seed)},
          {"k", random_tensor({1, T, 2, 4}, seed + 1)},
          {"v", random_tensor({1, T, 2, 5}, seed + 2)},
          {"z", random_tensor({2, 6, 4}, seed + 3)},
          {"alpha", alpha}};
}

TEST(Distill, Relations) {
  Tensors x = attention(40, 1);
  const Options causal = {{"causal", "1"}};
  const Tensor out = out_of("distill", x, causal);
  // All weights of a head times a constant, and a constant log-weight of all keys: no change.
  Tensors scaled = x;
  scaled["alpha"] = mapped(x.at("alpha"), 3, 0);
  scaled.emplace("key_logw", constant({1, 40, 2}, 1.5));
  EXPECT_LT(rms_error(out_of("distill", scaled, causal), out), 1e-13);
  // One token: its value. The last causal row: what every row of the other form sees.
  const Tensors one = attention(1, 7);
  EXPECT_LT(rms_error(out_of("distill", one, causal), one.at("v")), 1e-15);
  EXPECT_LT(rms_error(tokens(out, 39, 40), tokens(out_of("distill", x), 39, 40)), 1e-13);
  // Scores of 1e4 stay finite.
  Tensors large = x;
  large["q"] = mapped(x.at("q"), 100, 0);
  large["k"] = mapped(x.at("k"), 100, 0);
  const Tensor extreme = out_of("distill", large, causal);
  for (int64_t i = 0; i < extreme.count(); ++i) EXPECT_TRUE(std::isfinite(extreme.get(i)));
}

// Many Gaussian directions approach softmax.
TEST(Distill, ManyFeaturesApproachSoftmax) {
  Tensors x = attention(20, 2);
  x["q"] = mapped(x.at("q"), 0.5, 0);
  x["k"] = mapped(x.at("k"), 0.5, 0);
  double last = 1;
  for (const int64_t M : {16, 4096}) {
    x["z"] = random_tensor({2, M, 4}, 11);
    x["alpha"] = constant({2, M}, 1);
    Tensors results = x;
    ASSERT_EQ(check::invoke("distill", {{"causal", "1"}}, &results), "");
    const double error = rms_error(results["out"], results["out_softmax"]);
    EXPECT_LT(error, 0.5 * last);
    EXPECT_GE(results["loss_kl"].get(0), 0);
    last = error;
  }
  EXPECT_LT(last, 0.05);  // 1 / sqrt(4096) times a small factor
}

TEST(Distill, DecodeIsTheCausalForm) {
  Tensors x = attention(30, 3);
  const Tensor want = out_of("distill", x, {{"causal", "1"}});
  x.insert({{"state", constant({1, 2, 6, 5}, 0)}, {"n", constant({1, 2, 6}, 0)}, {"c", constant({1, 2, 6}, -HUGE_VAL)}});
  EXPECT_LT(rms_error(out_of("distill_decode", x), want), 1e-13);
}

// Balancing changes no softmax attention: the balanced rows with their log-weights give the teacher's output.
TEST(Distill, BalancingKeepsSoftmax) {
  const Tensors x = attention(25, 4);
  Tensors r = x, again = x;
  ASSERT_EQ(check::invoke("distill_balance", {{"window", "25"}}, &r), "");
  again["q"] = r["q_balanced"];
  again["k"] = r["k_balanced"];
  again["key_logw"] = r["key_logw"];
  ASSERT_EQ(check::invoke("distill", {{"causal", "1"}}, &again), "");
  EXPECT_LT(rms_error(again["out_softmax"], r["out_softmax"]), 1e-12);
  EXPECT_LT(rms_error(r["out_hybrid"], r["out_softmax"]), 1e-13);  // a window that covers everything
}

// A window that covers everything is softmax; without one, hedgehog features alone (from the second token on).
TEST(Distill, WindowsEnds) {
  Tensors x = attention(25, 5);
  for (const char* name : {"z", "alpha"}) x.erase(name);
  x.insert({{"wq", random_tensor({2, 4, 3}, 21)}, {"wk", random_tensor({2, 4, 3}, 22)}, {"window_factor", constant({2}, 0.3)}});
  const Tensors plain = {{"q", x.at("q")}, {"k", x.at("k")}, {"v", x.at("v")}};
  for (const char* out : {"out_sliding", "out_terraced"}) {
    EXPECT_LT(rms_error(out_of("distill_window", x, {{"window", "25"}}, out), out_of("softmax", plain, {{"causal", "1"}})),
              1e-13);
    check::expect_gradients("distill_window", {{"window", "4"}}, x, out);
  }
  x["window_factor"] = constant({2}, -800);  // a window that has no share
  const Tensor far = out_of("distill_window", x, {{"window", "1"}}, "out_sliding");
  for (int64_t c = 0; c < 10; ++c) EXPECT_NEAR(far.get(10 + c), x.at("v").get(c), 1e-13);  // the second token sees the first
}

// Known answers, by the spectrum (J = 40) and by the Cholesky factor (J = 1100): equal samples make a Gram matrix of ones,
// samples far apart the identity.
TEST(Distill, DegreesOfFreedom) {
  for (const int64_t J : {40, 1100}) {
    const double rounding = 0x1p-50 * static_cast<double>(J * J);  // of J - lambda tr(...), where the matrix has rank one
    Tensor far = constant({J, 3}, 0), lambda = constant({1}, 0.25), none = constant({0, 3}, 0);
    for (int64_t i = 0; i < J; ++i) far.set(3 * i, 100.0 * static_cast<double>(i));
    const Tensors same = {{"x", constant({J, 3}, 0)}, {"lambda", lambda}, {"z", none}}, apart = with(same, "x", far);
    EXPECT_NEAR(out_of("distill_dof", same, {}, "dof_softmax_mean").get(0), 1 / 1.25, rounding);
    EXPECT_NEAR(out_of("distill_dof", same, {}, "dof_gauss_trace").get(0), 1 / 1.25, rounding);
    const double n = static_cast<double>(J), each = 1 / n;
    EXPECT_NEAR(out_of("distill_dof", apart, {}, "dof_gauss_mean").get(0), n * each / (each + 0.25), 1e-9);
    EXPECT_NEAR(out_of("distill_dof", apart, {}, "dof_gauss_gram").get(0), n / 1.25, 1e-9 * n);
  }
}

// N = sum_i 1 - E_i ((C + E)^-1)_ii in long double, C the gauss kernel, E_i = lambda J exp(-eta |x_i|^2): the `mean` norm.
double exact_dof(const Tensor& x, double lambda) {
  const int64_t J = x.sizes[0], D = x.sizes[1];
  const long double eta = 1 / std::sqrt(static_cast<long double>(D));
  std::vector<long double> l(static_cast<size_t>(J * J)), E(static_cast<size_t>(J)), column(static_cast<size_t>(J));
  const auto at = [&](int64_t i, int64_t j) -> long double& { return l[static_cast<size_t>(i * J + j)]; };
  for (int64_t i = 0; i < J; ++i) {
    long double norm = 0;
    for (int64_t c = 0; c < D; ++c) norm += static_cast<long double>(x.get(i * D + c)) * x.get(i * D + c);
    E[static_cast<size_t>(i)] = lambda * static_cast<long double>(J) * std::exp(-eta * norm);
    for (int64_t j = 0; j <= i; ++j) {
      long double sum = 0;
      for (int64_t c = 0; c < D; ++c) {
        const long double d = static_cast<long double>(x.get(i * D + c)) - x.get(j * D + c);
        sum += d * d;
      }
      sum = std::exp(-eta * sum / 2) + (i == j ? E[static_cast<size_t>(i)] : 0);
      for (int64_t c = 0; c < j; ++c) sum -= at(i, c) * at(j, c);
      at(i, j) = i == j ? std::sqrt(sum) : sum / at(j, j);
    }
  }
  long double total = 0;
  for (int64_t i = 0; i < J; ++i) {
    long double squares = 0;
    for (int64_t r = i; r < J; ++r) {
      long double sum = r == i ? 1 : 0;
      for (int64_t c = i; c < r; ++c) sum -= at(r, c) * column[static_cast<size_t>(c)];
      column[static_cast<size_t>(r)] = sum / at(r, r);
      squares += column[static_cast<size_t>(r)] * column[static_cast<size_t>(r)];
    }
    total += 1 - E[static_cast<size_t>(i)] * squares;
  }
  return static_cast<double>(total);
}

// Channels of different sizes, as those of trained heads do: the kernel's A is the reference's, and it balances.
TEST(Distill, BalancesChannelsOfOtherSizes) {
  constexpr int64_t kTokens = 200, kWidth = 24;
  Tensor q = random_tensor({1, kTokens, 1, kWidth}, 41), k = random_tensor({1, kTokens, 1, kWidth}, 42);
  for (int64_t i = 0; i < q.count(); ++i) {
    const double size = std::pow(10.0, -static_cast<double>(i % kWidth) / kWidth);
    q.set(i, 3 + 5 * size * q.get(i));
    k.set(i, k.get(i) / size);
  }
  const Tensors given = {{"q", q}, {"k", k}, {"v", q}, {"z", constant({1, 1, kWidth}, 1)}, {"alpha", constant({1, 1}, 1)}};
  Tensors ours = given, reference = given;
  for (const char* name : {"A", "q_balanced", "k_balanced", "key_logw"}) {
    ASSERT_EQ(check::invoked("distill_balance", {}, &ours, nullptr, name).message(), "");
    ASSERT_EQ(check::invoked("distill_balance", {}, &reference, "ref", name).message(), "");
    double error = 0, size = 0;
    for (int64_t i = 0; i < ours[name].count(); ++i) {
      error = std::max(error, std::abs(ours[name].get(i) - reference[name].get(i)));
      size = std::max(size, std::abs(reference[name].get(i)));
    }
    EXPECT_LT(error, 1e-10 * size) << name;
  }
  // The second moments of both sides are equal, up to the ridge.
  for (int64_t c = 0; c < kWidth; ++c) {
    double of_q = 0, of_k = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      of_q += std::pow(ours["q_balanced"].get(t * kWidth + c), 2) / kTokens;
      of_k += std::pow(ours["k_balanced"].get(t * kWidth + c), 2) / kTokens;
    }
    EXPECT_NEAR(of_q / of_k, 1, 1e-3) << c;
  }
}

// One sample of large norm, which all others lean on, costs them no digit: by the reference, and by the factor of many samples.
TEST(Distill, AnOutlierCostsNoDigits) {
  for (const int64_t J : {60, 1100}) {
    constexpr int64_t kWidth = 8;
    Tensor x = check::mapped(random_tensor({J, kWidth}, 31), 1.5, 0);
    for (int64_t c = 0; c < kWidth; ++c) x.set(c, c == 0 ? 11 : 0);  // exp(eta |x|^2) is e^43 there, about e^6 elsewhere
    constexpr double kLambda = 0.01;
    const Tensors given = {{"x", x}, {"lambda", constant({1}, kLambda)}, {"z", constant({0, kWidth}, 0)}};
    const double want = exact_dof(x, kLambda);
    EXPECT_NEAR(out_of("distill_dof", given, {}, "dof_softmax_mean").get(0), want, 1e-10 * want) << J;
    if (J > 100) continue;  // the reference takes a while
    Tensors reference = given;
    ASSERT_EQ(check::invoked("distill_dof", {}, &reference, "ref", "dof_softmax_mean").message(), "");
    EXPECT_NEAR(reference["dof_softmax_mean"].get(0), want, 1e-10 * want) << J;
  }
}

TEST(Distill, AllocationSumsToTheBudget) {
  Tensor dof = random_tensor({12, 4}, 5);
  for (int64_t i = 0; i < dof.count(); ++i) dof.set(i, 1 + 10 * std::abs(dof.get(i)));
  const Tensor dims = out_of("distill_alloc", {{"dof", dof}},
                             {{"cost", "64"}, {"low", "16"}, {"high", "128"}, {"multiple", "16"}}, "dims_exact");
  double total = 0;
  for (int64_t s = 0; s < 12; ++s) total += dims.get(s);
  EXPECT_EQ(total, 12 * 64);
  EXPECT_EQ(refusal("distill_alloc", {{"dof", dof}}, {{"low", "32"}, {"high", "16"}}),
            "distill_alloc: low is 32, expected at most high, 16");
}

TEST(Distill, Refusals) {
  Tensors x = attention(10, 1);
  const Tensor none = constant({2, 4, 0}, 0);
  EXPECT_EQ(
      refusal("distill_window",
              {{"q", x["q"]}, {"k", x["k"]}, {"v", x["v"]}, {"wq", none}, {"wk", none}, {"window_factor", constant({2}, 0)}}),
      "distill_window: wq has 0 columns, expected at least 1");
  x["z"] = random_tensor({2, 6, 3}, 1);
  EXPECT_EQ(refusal("distill", x), "distill: z has 3 channels in dimension 2 of [H, M, K], expected 4 (same as q)");
  EXPECT_EQ(refusal("distill_dof", {{"x", constant({0, 3}, 0)}, {"lambda", constant({1}, 1)}, {"z", constant({0, 3}, 0)}}),
            "distill_dof: x has 0 samples, expected at least 1");
  const auto dof = [](double sample, double lambda) {
    return refusal("distill_dof",
                   {{"x", constant({2, 3}, sample)}, {"lambda", constant({1}, lambda)}, {"z", constant({0, 3}, 0)}});
  };
  EXPECT_EQ(dof(1, 0), "distill_dof: lambda[0] is 0, expected a number above 0");
  EXPECT_EQ(dof(1, -2), "distill_dof: lambda[0] is -2, expected a number above 0");
  EXPECT_EQ(dof(std::nan(""), 1), "distill_dof: x[0][0] is nan, expected a finite number");
  EXPECT_EQ(dof(HUGE_VAL, 1), "distill_dof: x[0][0] is inf, expected a finite number");
  x = attention(10, 1);
  x["alpha"].set(3, -0.5);
  EXPECT_EQ(refusal("distill", x), "distill: alpha[0][3] is -0.5, expected a number that is at least 0");
  x["alpha"].set(3, std::nan(""));
  EXPECT_EQ(refusal("distill", x), "distill: alpha[0][3] is nan, expected a number that is at least 0");
  for (int64_t m = 0; m < 6; ++m) x["alpha"].set(6 + m, 0);
  x["alpha"].set(3, 1);
  EXPECT_EQ(refusal("distill", x), "distill: alpha[1] is 0 everywhere, expected a number above 0");
  EXPECT_EQ(refusal("distill_alloc", {{"dof", constant({2, 3}, 0)}}),
            "distill_alloc: dof[0] is 0 everywhere, expected a number above 0");
}

// A feature whose weight is 0 is not there, whatever its direction, and has no gradient.
TEST(Distill, WeightsOfZeroSwitchFeaturesOff) {
  Tensors x = attention(20, 3), fewer = x;
  for (int64_t h = 0; h < 2; ++h) x["alpha"].set(h * 6 + 5, 0);
  fewer["z"] = Tensor(Dtype::f64, {2, 5, 4});
  fewer["alpha"] = Tensor(Dtype::f64, {2, 5});
  for (int64_t i = 0; i < 10; ++i) {
    fewer["alpha"].set(i, x["alpha"].get(i / 5 * 6 + i % 5));
    for (int64_t c = 0; c < 4; ++c) fewer["z"].set(i * 4 + c, x["z"].get((i / 5 * 6 + i % 5) * 4 + c));
  }
  for (const char* causal : {"0", "1"}) {
    EXPECT_LT(rms_error(out_of("distill", x, {{"causal", causal}}), out_of("distill", fewer, {{"causal", causal}})), 1e-14);
  }
}

}  // namespace
}  // namespace linnet
