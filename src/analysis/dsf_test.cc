#include "analysis/dsf.h"

#include <gtest/gtest.h>

#include <cmath>

#include "check/named.h"
#include "check/random.h"

namespace linnet::analysis {
namespace {

MixerInputs drawn(const std::string& mixer, const MixerSize& size, uint64_t seed = 1) {
  MixerInputs x;
  EXPECT_TRUE(random_inputs(mixer, size, seed, &x).ok());
  return x;
}

SystemReport analysed(const std::string& mixer, const MixerInputs& inputs) {
  SystemReport r;
  const Status status = analyse(mixer, inputs, {}, &r);
  EXPECT_TRUE(status.ok()) << mixer << ": " << status.message();
  return r;
}

double apart(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double most = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

// Every mixer's system reproduces the mixer, by the recurrence and by the transfer; the ranks obey the state expansion (fact
// 2).
TEST(Dsf, SystemsReproduceTheirMixers) {
  for (const Mixer& mixer : all_mixers()) {
    for (const MixerSize size :
         {MixerSize{33, 5, 3}, MixerSize{1, 2, 1}, MixerSize{2, 1, 2}, MixerSize{64, 4, 1}, MixerSize{0, 3, 2}}) {
      const SystemReport r = analysed(mixer.name, drawn(mixer.name, size));
      EXPECT_TRUE(r.ok()) << mixer.name << " T=" << size.tokens << " " << r.recurrence_error << " " << r.transfer_error;
      EXPECT_LE(r.semiseparable_rank, r.system.n * (r.system.complex ? 2 : 1) * (r.mixing_kind == "norms" ? 1000 : 1))
          << mixer.name;
      EXPECT_EQ(r.memory_length.size(), static_cast<size_t>(size.tokens)) << mixer.name;
      for (int64_t t = 0; t < size.tokens; ++t) {
        EXPECT_LE(r.memory_length[static_cast<size_t>(t)], t + 1);
        EXPECT_LE(r.entropy[static_cast<size_t>(t)], std::log(static_cast<double>(t + 1)) + 1e-12);
      }
      if (size.tokens == 1) {
        EXPECT_EQ(r.rank, 1) << mixer.name;
        EXPECT_EQ(r.semiseparable_rank, 0);
      }
    }
  }
}

// Fact 1: softmax needs a state of every size: the strictly lower blocks of exp(q k^T) have full rank, a finite expansion has
// not; the expansion converges like max|s|^(p+1) / (p+1)!.
TEST(Dsf, SoftmaxHasNoFiniteState) {
  MixerInputs x = drawn("softmax", {12, 2, 3});
  const SystemReport softmax = analysed("softmax", x);
  EXPECT_EQ(softmax.semiseparable_rank, 6);
  const SystemReport linear = analysed("linear", x);
  EXPECT_EQ(linear.semiseparable_rank, 2);
  double largest = 0;
  const Array &q = x.tensors["q"], &k = x.tensors["k"];
  for (int64_t t = 0; t < 12; ++t) {
    for (int64_t i = 0; i <= t; ++i) {
      double score = 0;
      for (int64_t a = 0; a < 2; ++a)
        score += q.values[static_cast<size_t>(2 * t + a)] * k.values[static_cast<size_t>(2 * i + a)];
      largest = std::max(largest, std::abs(score) / std::sqrt(2.0));
    }
  }
  double factorial = 1;
  for (int order = 1; order <= 8; ++order) {
    factorial *= order;
    x.words["order"] = std::to_string(order);
    const SystemReport taylor = analysed("taylor", x);
    EXPECT_EQ(taylor.system.n, (order + 1) * (order + 2) / 2);
    if (order < 4 || order % 2 == 1) continue;  // odd orders may divide by something near 0
    const double bound = std::pow(largest, order + 1) / (factorial * (order + 1)) * std::exp(2 * largest);
    EXPECT_LT(apart(taylor.mixing.values, softmax.mixing.values), 4 * bound) << order;
  }
}

TEST(Dsf, TaylorFeaturesAreTheExpansion) {
  const double x[] = {0.3, -1.2, 0.7}, y[] = {1.1, 0.4, -0.5}, s = 0.3 * 1.1 - 1.2 * 0.4 - 0.7 * 0.5;
  double want = 0, term = 1;
  for (int64_t order = 0; order <= 6; ++order) {
    want += term;
    term *= s / static_cast<double>(order + 1);
    const std::vector<double> a = taylor_features(x, 3, order), b = taylor_features(y, 3, order);
    double got = 0;
    for (size_t i = 0; i < a.size(); ++i) got += a[i] * b[i];
    EXPECT_NEAR(got, want, 1e-14) << order;
  }
  const std::vector<double> order2 = taylor_features(x, 3, 2);  // 1; x0 x1 x2; x0^2 x0x1 x0x2 x1^2 ...
  EXPECT_NEAR(order2[4], 0.09 / std::sqrt(2.0), 1e-15);
  EXPECT_NEAR(order2[5], 0.3 * -1.2, 1e-15);
}

// Fact 3: the reversed gate is S6's: exp(-a softplus(x)) = sigmoid(-x)^a.
TEST(Dsf, SelectiveGateIsAReversedSigmoid) {
  MixerInputs x = drawn("reversed_lstm", {20, 1, 3});
  x.words["reverse_power"] = "1.7";
  const SystemReport r = analysed("reversed_lstm", x);
  for (size_t i = 0; i < r.system.L.size(); ++i) {
    const double f = x.tensors["forget"].values[i];
    EXPECT_NEAR(r.system.L[i].real(), std::pow(1 / (1 + std::exp(f)), 1.7), 1e-14);
  }
}

// Fact 4: a scalar decay is a normalisation, and linear attention's normaliser is a decay that may exceed 1.
TEST(Dsf, ScalarDecayIsNormalisation) {
  MixerInputs x = drawn("retention", {24, 3, 2});
  x.words["gamma"] = "0.83";
  const SystemReport decay = analysed("retention", x);
  MixerInputs y = x;
  Array& n = y.tensors["n"];
  n.shape = {24};
  for (int64_t t = 0; t < 24; ++t) {
    n.values.push_back(-static_cast<double>(t + 1) * std::log(0.83));
    for (int64_t a = 0; a < 3; ++a) y.tensors["k"].values[static_cast<size_t>(3 * t + a)] *= std::exp(n.values.back());
  }
  EXPECT_LT(apart(analysed("normalised", y).mixing.values, decay.mixing.values), 1e-12);
  bool above = false;
  for (uint64_t seed = 1; seed < 5; ++seed) above |= analysed("linear", drawn("linear", {24, 3, 2}, seed)).growth;
  EXPECT_TRUE(above);
}

// Fact 5: S6 with one decay for all states and channels is Mamba-2's SSD.
TEST(Dsf, SharedS6IsSsd) {
  MixerInputs ssd = drawn("ssd", {24, 4, 3}), s6 = ssd;
  s6.tensors["A"] = {{3, 4}, std::vector<double>(12, -1)};
  s6.tensors["d"] = {{3}, std::vector<double>(3, 1)};
  Array& delta = s6.tensors["delta"];
  delta = {{24, 3}, {}};
  for (const double dt : ssd.tensors["delta"].values) delta.values.insert(delta.values.end(), 3, dt);
  const SystemReport a = analysed("ssd", ssd), b = analysed("s6", s6);
  EXPECT_EQ(b.mixing_kind, "scalar");
  EXPECT_LT(apart(a.mixing.values, b.mixing.values), 1e-13);
  EXPECT_LT(apart(a.out, b.out), 1e-13);
}

// Relations: alpha = 1 is the plain sum, beta = 0 writes nothing, a gate that is one number is retention; equal mixers have
// equal reports.
TEST(Dsf, Relations) {
  MixerInputs x = drawn("gla", {24, 3, 2});
  x.words["feature"] = "identity";
  std::fill(x.tensors["log_alpha"].values.begin(), x.tensors["log_alpha"].values.end(), 0.0);
  const SystemReport gla = analysed("gla", x), sum = analysed("linear_sum", x);
  EXPECT_LT(apart(gla.mixing.values, sum.mixing.values), 1e-13);
  EXPECT_EQ(gla.row_class, sum.row_class);
  EXPECT_EQ(gla.rank, sum.rank);
  EXPECT_LT(apart(gla.entropy, sum.entropy), 1e-12);
  MixerInputs gated = drawn("gated_delta", {24, 3, 2}), kda = gated;
  kda.tensors["log_alpha"] = {{24, 3}, {}};
  for (const double alpha : gated.tensors["alpha"].values) {
    kda.tensors["log_alpha"].values.insert(kda.tensors["log_alpha"].values.end(), 3, std::log(alpha));
  }
  kda.tensors.erase("alpha");
  EXPECT_LT(apart(analysed("gated_delta", gated).mixing.values, analysed("kda", kda).mixing.values), 1e-13);
  MixerInputs reflect = drawn("delta", {10, 3, 2});  // beta |k|^2 = 2: eigenvalue -1, radius 1
  std::fill(reflect.tensors["beta"].values.begin(), reflect.tensors["beta"].values.end(), 2.0);
  const SystemReport r = analysed("delta", reflect);
  EXPECT_NEAR(r.radius_middle, 1, 1e-12);
  EXPECT_NEAR(*std::min_element(r.eig_real.begin(), r.eig_real.end()), -1, 1e-12);
  EXPECT_FALSE(r.growth);
}

// Long spans: 600 tokens whose normaliser runs over e^1200 neither overflow nor lose the mixer.
TEST(Dsf, LongSpansStayInLogarithms) {
  MixerInputs x = drawn("normalised", {600, 2, 1});
  for (size_t t = 0; t < 600; ++t) x.tensors["n"].values[t] = 2 * static_cast<double>(t) - 600;
  SystemReport r;
  ASSERT_TRUE(analyse("normalised", x, {.ranks = false}, &r).ok());
  for (const double m : r.mixing.values) EXPECT_TRUE(std::isfinite(m));
}

TEST(Dsf, RowClasses) {
  const struct {
    std::vector<double> m;
    const char* kind;
  } table[] = {{{1, 0, 0.5, 0.5}, "convex"},
               {{1, 0, 1.5, -0.5}, "affine"},
               {{0, 0, 0.5, -0.5}, "zero-sum"},
               {{1, 0, 3, 4}, "nonnegative"},
               {{1, 0, -3, 1}, "signed"}};
  for (const auto& row : table) {
    SystemReport r;
    describe_mixing(Matrix(2, 2, row.m), {.window = 1}, &r);
    EXPECT_EQ(r.row_class, row.kind);
    EXPECT_NEAR(r.local_mass[1], std::abs(row.m[3]) / (std::abs(row.m[2]) + std::abs(row.m[3])), 1e-15);
  }
}

// Injectivity: softmax tells all queries apart, relu features forget their size, three keys on a line leave rank 1.
TEST(Dsf, Injectivity) {
  MixerInputs x = drawn("linear", {16, 4, 2});
  Injectivity softmax, relu;
  ASSERT_TRUE(injectivity("softmax", x, &softmax).ok());
  EXPECT_EQ(softmax.collisions, 0);
  EXPECT_EQ(softmax.pairs, 16 * 15 / 2);
  EXPECT_TRUE(softmax.same_factors.empty());
  EXPECT_EQ(softmax.jacobian_rank, 4);
  x.words["feature"] = "relu";
  ASSERT_TRUE(injectivity("linear", x, &relu).ok());
  EXPECT_EQ(relu.same_factors, (std::vector<double>{0.5, 2}));
  EXPECT_LT(relu.jacobian_rank, 4);
  EXPECT_FALSE(injectivity("gla", x, &relu).ok());
}

// The library's own operators, in f64, give what the systems give.
TEST(Dsf, AgreesWithTheOperators) {
  const MixerSize size = {40, 6, 5};
  const struct {
    const char *mixer, *op;
    check::Options options;
    std::vector<std::pair<const char*, const char*>> tensors;  // of the operator, of the mixer
  } table[] = {
      {"softmax", "softmax", {{"causal", "1"}}, {{"q", "q"}, {"k", "k"}, {"v", "v"}}},
      {"linear",
       "linear",
       {{"causal", "1"}, {"normalize", "1"}, {"map", "elu1"}, {"eps", "0"}},
       {{"q", "q"}, {"k", "k"}, {"v", "v"}}},
      {"gla", "gla", {{"scale", "1"}}, {{"q", "q"}, {"k", "k"}, {"v", "v"}, {"g", "log_alpha"}}},
      {"delta", "delta", {{"scale", "1"}}, {{"q", "q"}, {"k", "k"}, {"v", "v"}, {"beta", "beta"}}},
      {"kda", "gated_delta", {{"scale", "1"}}, {{"q", "q"}, {"k", "k"}, {"v", "v"}, {"g", "log_alpha"}, {"beta", "beta"}}},
      {"zeros",
       "zeros",
       {{"causal", "1"}, {"zeroth", "1"}},
       {{"q", "q"}, {"k", "k"}, {"v", "v"}, {"s", "s"}, {"s1", "s1"}, {"sh", "sh"}, {"s0", "s0"}}},
      {"zeros_softmax",
       "zeros_softmax",
       {{"causal", "1"}, {"zeroth", "1"}},
       {{"q", "q"}, {"k", "k"}, {"v", "v"}, {"s1", "s1"}, {"sh", "sh"}, {"s0", "s0"}}},
  };
  for (const auto& row : table) {
    const MixerInputs x = drawn(row.mixer, size);
    const SystemReport r = analysed(row.mixer, x);
    check::Tensors tensors;
    for (const auto& [name, own] : row.tensors) {
      const Array& from = x.tensors.at(own);
      std::vector<int64_t> shape = {1, from.shape[0], 1};
      if (from.shape.size() == 2) shape.push_back(from.shape[1]);
      check::Tensor& to = tensors[name] = check::Tensor(Dtype::f64, shape);
      for (size_t i = 0; i < from.values.size(); ++i) to.set(static_cast<int64_t>(i), from.values[i]);
    }
    const check::Tensor out = check::out_of(row.op, tensors, row.options);
    double most = 0;
    for (size_t i = 0; i < r.out.size(); ++i) most = std::max(most, std::abs(out.get(static_cast<int64_t>(i)) - r.out[i]));
    EXPECT_LT(most, 1e-11) << row.mixer;
  }
}

// A normaliser stands for one real decay above 0; everything else is told why not.
TEST(Dsf, NormaliserOfADecay) {
  MixerInputs x = drawn("retention", {6, 3, 2});
  x.words["gamma"] = "0.5";
  std::vector<double> n;
  const SystemReport decay = analysed("retention", x);
  ASSERT_TRUE(normaliser_of("retention", decay.system, &n).ok());
  for (size_t t = 0; t < n.size(); ++t) EXPECT_NEAR(n[t], static_cast<double>(t) * std::log(2.0), 1e-14);
  const std::pair<const char*, const char*> table[] = {
      {"lru", "dsf: lru: its eigenvalues are complex, but a normaliser"},
      {"h3", "dsf: h3: its eigenvalues are complex, but a normaliser"},
      {"s4d", "dsf: s4d: its eigenvalues are complex, but a normaliser"},
      {"s5", "dsf: s5: its eigenvalues are complex, but a normaliser"},
      {"gla", "dsf: gla: its L_t is no single number"},
      {"delta", "dsf: delta: its L_t is no single number"},
      {"softmax", "dsf: softmax: its L_t is no single number"},
  };
  for (const auto& [mixer, says] : table) {
    const Status status = normaliser_of(mixer, analysed(mixer, drawn(mixer, {6, 3, 2})).system, &n);
    EXPECT_EQ(status.message().rfind(says, 0), 0U) << status.message();
  }
  x.words["gamma"] = "0";
  EXPECT_EQ(normaliser_of("retention", analysed("retention", x).system, &n).message(),
            "dsf: retention: its decay at token 1 is 0, but a normaliser n_t = -sum log a_t wants decays above 0");
}

// A normaliser of 0: such a token reads nothing, and the tokens behind it are as if nothing had happened.
TEST(Dsf, ZeroNormaliser) {
  MixerInputs x = drawn("linear", {6, 2, 2});
  x.words["feature"] = "relu";
  for (double& k : x.tensors["k"].values) k = std::abs(k);
  for (double& q : x.tensors["q"].values) q = std::abs(q);
  const SystemReport before = analysed("linear", x);
  for (size_t a = 4; a < 6; ++a) x.tensors["q"].values[a] = -1;  // token 2 sees no key
  const SystemReport after = analysed("linear", x);
  EXPECT_TRUE(after.ok());
  EXPECT_EQ(after.system.restarts, 1);
  for (size_t j = 0; j < after.out.size(); ++j) EXPECT_NEAR(after.out[j], j / 2 == 2 ? 0 : before.out[j], 1e-12) << j;
}

// S4D by zero-order hold against small steps of the differential equation; S5 with one channel is S4D with one.
TEST(Dsf, DiagonalStateSpaces) {
  MixerInputs x = drawn("s4d", {12, 3, 1}), y = x;
  for (const char* name : {"a_real", "a_imag"}) y.tensors[name].shape = {3};
  y.tensors["dt"] = {{3}, std::vector<double>(3, x.tensors["dt"].values[0])};
  for (const char* name : {"b_real", "b_imag"}) y.tensors[name].shape = {3, 1};
  for (const char* name : {"c_real", "c_imag"}) y.tensors[name].shape = {1, 3};
  EXPECT_LT(apart(analysed("s4d", x).out, analysed("s5", y).out), 1e-12);
  EXPECT_EQ(guess_mixer("", x)->name, "s4d");
  EXPECT_EQ(guess_mixer("", y)->name, "s5");
  x.tensors["dt"].values[0] = 0.2;
  const std::vector<double> held = analysed("s4d", x).out, &u = x.tensors["u"].values;
  const auto mode = [&](const char* name, size_t m) {
    return Complex(x.tensors[std::string(name) + "_real"].values[m], x.tensors[std::string(name) + "_imag"].values[m]);
  };
  std::vector<Complex> h(3, 0);
  constexpr int kSteps = 20'000;
  for (size_t t = 0; t < u.size(); ++t) {
    double sum = x.tensors["d"].values[0] * u[t];
    for (size_t m = 0; m < h.size(); ++m) {
      for (int i = 0; i < kSteps; ++i) h[m] += 0.2 / kSteps * (mode("a", m) * h[m] + mode("b", m) * u[t]);
      sum += (mode("c", m) * h[m]).real();
    }
    EXPECT_NEAR(sum, held[t], 1e-2 * (1 + std::abs(sum)));
  }
  x.words["discretise"] = "bilinear";
  SystemReport r;
  EXPECT_EQ(analyse("s4d", x, {}, &r).message(), "dsf: s4d: discretise is 'bilinear', expected none or zoh");
}

TEST(Dsf, BadInput) {
  const auto refusal = [](const std::string& mixer, const MixerInputs& x) {
    SystemReport r;
    return analyse(mixer, x, {}, &r).message();
  };
  MixerInputs x = drawn("gla", {8, 3, 2});
  EXPECT_EQ(refusal("lstmm", x).rfind("dsf: there is no mixer 'lstmm'; there are softmax, ", 0), 0U);
  EXPECT_EQ(refusal("normalised", x), "dsf: normalised: it needs a tensor n");
  x.tensors["k"].shape = {4, 6};
  EXPECT_EQ(refusal("gla", x), "dsf: gla: k has size 4 in dimension 0, expected 8");
  x = drawn("gla", {8, 3, 2});
  x.tensors["v"].values[3] = std::nan("");
  EXPECT_EQ(refusal("gla", x), "dsf: gla: v[3] is not finite");
  x = drawn("linear", {8, 3, 2});
  x.words["feature"] = "cosine";
  EXPECT_EQ(refusal("linear", x).rfind("dsf: linear: feature is 'cosine', expected elu1, ", 0), 0U);
  x.words = {{"order", "2.5"}};
  EXPECT_EQ(refusal("taylor", x), "dsf: taylor: order is 2.5, expected 0 to 8");
  EXPECT_EQ(refusal("linear_sum", drawn("linear_sum", {2049, 1, 1})),
            "dsf: linear_sum: the sequence has 2049 tokens, expected at most 2048: take a part of it");
}

}  // namespace
}  // namespace linnet::analysis
