// fem_read: agreement with the reference in every implementation and dtype, the relations and edge cases of its page, refusals.
#include "fem.h"

#include <gtest/gtest.h>

#include <cmath>

#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

using check::constant;
using check::invoke;
using check::Options;
using check::random_tensor;
using check::rms_error;
using check::Tensor;
using check::Tensors;
using check::with;

const char* const kLines[] = {
    "fem_read B=1 S=1 H=1 V=8 K=16 with=q,k pass=bwd",
    "fem_read B=2 S=63 H=2 V=20 K=40 with=q,k,g pass=bwd",
    "fem_read B=1 S=129 H=2 V=17 K=33 with=q,k,g,key_mask values=garbage pass=bwd threads=3 strided=1",
    "fem_read B=2 S=70 H=2 V=8 K=16 causal=0 cap=0 with=q,k pass=bwd",
    "fem_read B=2 S=70 H=2 V=8 K=16 cap=1 with=q,k,g pass=bwd",
    "fem_read B=2 S=100 H=2 V=20 K=16 prior=linear with=q,k,g,key_mask values=garbage pass=bwd",
    "fem_read B=2 S=70 H=1 V=8 K=12 prior=linear causal=0 with=q,k pass=bwd strided=1",
    "fem_read B=2 S=130 H=2 V=20 K=16 prior=gated with=q,k,a,g,key_mask values=garbage pass=bwd threads=2",
    "fem_read B=2 S=100 H=2 V=20 K=20 prior=aft with=q,k,g,key_mask values=garbage pass=bwd",
    "fem_read B=2 S=70 H=1 V=9 K=9 prior=aft causal=0 cap=0 with=q,k pass=bwd",
    "fem_read B=2 S=100 H=2 V=20 R=5 prior=ssm with=delta,A,Bm,Cm,D,g,key_mask values=garbage pass=bwd threads=3",
    // A later infinity, which the cap makes 1000, leaves the rows before it.
    "fem_read B=1 S=16 H=8 V=12 K=4 prior=linear cap=1000 with=g,q,k pass=bwd seed=630171",
    "fem_read B=1 S=245 H=1 V=64 R=16 prior=ssm cap=1000 with=A,delta,Bm,Cm,D values=masked seed=87957",
    "fem_read B=2 S=0 H=2 V=8 K=8 with=q,k pass=bwd",
    "fem_read B=2 S=0 H=2 V=8 K=8 prior=aft with=q,k pass=bwd",
    "fem_read_decode B=2 T=2 H=2 V=9 K=16 capacity=50 with=q,k,k_cache,v_cache,lengths,g",
    "fem_read_decode B=2 T=1 H=2 V=20 K=16 prior=linear with=q,k,state,shift strided=1",
    "fem_read_decode B=2 T=3 H=2 V=9 K=16 prior=gated with=q,k,a,state,shift,g",
    "fem_read_decode B=2 T=77 H=2 V=9 K=16 prior=gated with=q,k,a,state,shift,g",  // in chunks
    "fem_read_decode B=2 T=8 H=2 V=20 K=5 prior=linear with=q,k,state,shift cap=1 strided=1",
    "fem_read_decode B=2 T=2 H=2 V=9 K=9 prior=aft with=q,k,sums,shift",
    "fem_read_decode B=2 T=2 H=2 V=9 R=5 prior=ssm with=delta,A,Bm,Cm,D,scan,shift",
};

TEST(Fem, AgreesWithTheReference) { check::expect_agreement({std::begin(kLines), std::end(kLines)}); }

constexpr int64_t kTokens = 80, kHeads = 2, kWidth = 6, kRank = 3;

Tensor made(std::vector<int64_t> size, uint64_t seed, double (*f)(double)) {
  Tensor x = random_tensor(std::move(size), seed);
  for (int64_t i = 0; i < x.count(); ++i) x.set(i, f(x.get(i)));
  return x;
}
Tensor rows(double x) { return constant({1, kTokens, kHeads, kWidth}, x); }
Tensors call(const std::string& prior) {
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  Tensors tensors = {{"v", random_tensor({1, kTokens, kHeads, kWidth}, 1)},
                     {"beta", made({kHeads, kWidth}, 2, [](double x) { return std::exp(0.3 * x); })},
                     {"lam", made({1, kTokens, kHeads, kWidth}, 3, sigmoid)},
                     {"dout", random_tensor({1, kTokens, kHeads, kWidth}, 4)}};
  if (prior == "ssm") {
    tensors["delta"] = made({1, kTokens, kHeads, kWidth}, 5, sigmoid);
    tensors["A"] = made({kHeads, kWidth, kRank}, 6, [](double x) { return -std::exp(x); });
    tensors["Bm"] = made({1, kTokens, kRank}, 7, [](double x) { return std::exp(x); });
    tensors["Cm"] = made({1, kTokens, kRank}, 8, [](double x) { return std::exp(x); });
    tensors["D"] = made({kHeads, kWidth}, 9, [](double x) { return std::exp(x); });
    return tensors;
  }
  tensors["q"] = random_tensor({1, kTokens, kHeads, kWidth}, 10);
  tensors["k"] = random_tensor({1, kTokens, kHeads, kWidth}, 11);
  if (prior == "gated") tensors["a"] = made({1, kTokens, kHeads}, 12, [](double x) { return -0.1 * std::fabs(x); });
  return tensors;
}
Tensors run(const std::string& prior, Tensors tensors, Options options = {}, const char* impl = nullptr) {
  options.emplace_back("prior", prior);
  EXPECT_EQ(invoke("fem_read", options, &tensors, impl), "");
  return tensors;
}
const char* const kPriors[] = {"softmax", "linear", "gated", "aft", "ssm"};

TEST(Fem, WithoutTheInnerGateItIsThePriorsMean) {
  for (const char* prior : kPriors) {
    const Tensors result = run(prior, with(call(prior), "lam", rows(0)));
    EXPECT_EQ(rms_error(result.at("out"), result.at("mu")), 0) << prior;
  }
  const Tensors plain = run("softmax", with(call("softmax"), "lam", rows(0)));
  Tensors softmax = call("softmax");
  ASSERT_EQ(invoke("softmax", {{"causal", "1"}}, &softmax), "");
  for (const char* name : {"out", "dq", "dk", "dv"}) EXPECT_LT(rms_error(plain.at(name), softmax.at(name)), 1e-12) << name;
}

TEST(Fem, SmallBetaTendsToTheMeanWithEveryDigit) {
  for (const double beta : {1e-3, 1e-6}) {
    Tensors tensors = with(with(call("softmax"), "lam", rows(1)), "beta", constant({kHeads, kWidth}, beta));
    for (auto& [name, tensor] : tensors) {
      Tensor narrow(Dtype::f32, tensor.sizes);
      for (int64_t i = 0; i < tensor.count(); ++i) narrow.set(i, tensor.get(i));
      tensor = narrow;
    }
    const Tensors result = run("softmax", tensors);
    EXPECT_LT(rms_error(result.at("free"), result.at("mu")), 2e-6 + 3 * beta);  // F - mu = beta var(v) / 2
  }
}

TEST(Fem, LargeBetaTendsToTheRunningMaximum) {
  const Tensors result =
      run("softmax", with(with(call("softmax"), "lam", rows(1)), "beta", constant({kHeads, kWidth}, 200)), {{"cap", "0"}});
  double top[kHeads * kWidth];
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t i = 0; i < kHeads * kWidth; ++i) {
      const double v = result.at("v").get(t * kHeads * kWidth + i);
      top[i] = t == 0 ? v : std::fmax(top[i], v);
      const double F = result.at("free").get(t * kHeads * kWidth + i);
      EXPECT_LE(F, top[i] + 1e-12);
      EXPECT_GT(F, top[i] - 0.06);  // log p / beta
    }
  }
}

TEST(Fem, TheFreeEnergyLiesBetweenMeanAndMaximumAndRisesWithBeta) {
  const Tensors low = run("softmax", call("softmax"));
  Tensor twice = low.at("beta");
  for (int64_t i = 0; i < twice.count(); ++i) twice.set(i, 2 * twice.get(i));
  const Tensors high = run("softmax", with(call("softmax"), "beta", twice));
  for (int64_t i = 0; i < low.at("free").count(); ++i) {
    EXPECT_GE(low.at("free").get(i), low.at("mu").get(i) - 1e-12);
    EXPECT_GE(high.at("free").get(i), low.at("free").get(i) - 1e-12);
  }
}

TEST(Fem, AConstantInTheValuesMovesMeanAndFreeEnergy) {
  for (const char* prior : {"softmax", "linear"}) {
    const Tensors plain = run(prior, call(prior));
    Tensor v = plain.at("v");
    for (int64_t i = 0; i < v.count(); ++i) v.set(i, v.get(i) + 2);
    const Tensors moved = run(prior, with(call(prior), "v", v));
    for (const char* name : {"mu", "free"}) {
      for (int64_t i = 0; i < v.count(); ++i)
        EXPECT_NEAR(moved.at(name).get(i), plain.at(name).get(i) + 2, 1e-9) << prior << name;
    }
  }
}

TEST(Fem, GatedWithoutDecayIsLinear) {
  const Tensors linear = run("linear", call("linear"), {{"denominator", "exact"}});
  const Tensors gated = run("gated", with(call("linear"), "a", constant({1, kTokens, kHeads}, 0)), {{"denominator", "exact"}});
  for (const char* name : {"out", "dq", "dk", "dv", "dbeta"})
    EXPECT_LT(rms_error(gated.at(name), linear.at(name)), 1e-11) << name;
}

TEST(Fem, EqualKeysOfAftAreTheRunningMean) {
  const Tensors result = run("aft", with(with(call("aft"), "k", rows(3)), "q", rows(1)));
  double sum = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    sum += result.at("v").get(t * kHeads * kWidth);
    EXPECT_NEAR(result.at("mu").get(t * kHeads * kWidth), sum / static_cast<double>(t + 1), 1e-13);
  }
}

TEST(Fem, TheFirstTokenIsItsValue) {
  const Tensors result = run("softmax", call("softmax"));
  for (int64_t i = 0; i < kHeads * kWidth; ++i) EXPECT_NEAR(result.at("out").get(i), result.at("v").get(i), 1e-15);
}

// Without a cap, or with a large one, values may span more than exp() holds: rows before a later, larger value keep their
// digits.
TEST(Fem, AWideRangeOfValuesIsExact) {
  for (const char* prior : kPriors) {
    Tensors tensors = with(call(prior), "beta", constant({kHeads, kWidth}, 1));
    for (int64_t i = 0; i < tensors["v"].count(); ++i) {
      tensors["v"].set(i, static_cast<double>(i / (kHeads * kWidth)) * 15 - 600 + tensors["v"].get(i));
    }
    for (auto& [name, tensor] : tensors) {
      Tensor narrow(Dtype::f32, tensor.sizes);
      for (int64_t i = 0; i < tensor.count(); ++i) narrow.set(i, tensor.get(i));
      tensor = narrow;
    }
    for (const char* cap : {"0", "1000"}) {
      const Tensors got = run(prior, tensors, {{"cap", cap}}), want = run(prior, tensors, {{"cap", cap}}, "ref");
      for (const char* name : {"out", "mu", "free", "dq", "dv", "dbeta"}) {
        if (got.count(name) == 0) continue;  // the prior ssm has no queries
        for (int64_t i = 0; i < got.at(name).count(); ++i) ASSERT_TRUE(std::isfinite(got.at(name).get(i))) << prior << name;
        EXPECT_LT(rms_error(got.at(name), want.at(name)), 1e-5) << prior << " " << name << " cap=" << cap;
      }
    }
  }
}

TEST(Fem, TokenByTokenIsTheWholeSequence) {
  const double none = -HUGE_VAL;
  for (const char* prior : kPriors) {
    const Tensors whole = run(prior, call(prior));
    Tensors step = {{"beta", whole.at("beta")}};
    for (const char* name : {"A", "D"}) {
      if (whole.count(name) > 0) step[name] = whole.at(name);
    }
    const std::string kind = prior;
    if (kind == "softmax") {
      step["k_cache"] = step["v_cache"] = Tensor(Dtype::f64, {1, kTokens, kHeads, kWidth});
      step["lengths"] = check::whole_numbers({0});
    } else {
      step["shift"] = constant({1, kHeads, kWidth}, none);
      if (kind == "linear" || kind == "gated") step["state"] = Tensor(Dtype::f64, {1, kHeads, kWidth, 2 * kWidth + 1});
      if (kind == "ssm") step["scan"] = Tensor(Dtype::f64, {1, kHeads, 3, kRank, kWidth});
      if (kind == "aft") {
        step["sums"] = Tensor(Dtype::f64, {1, kHeads, 4, kWidth});
        for (int64_t i = 0; i < kHeads * kWidth; ++i) step["sums"].set((i / kWidth * 4 + 3) * kWidth + i % kWidth, none);
      }
    }
    for (int64_t t = 0; t < kTokens; ++t) {
      for (const char* name : {"v", "lam", "q", "k", "a", "delta", "Bm", "Cm"}) {
        if (whole.count(name) > 0) step[name] = check::tokens(whole.at(name), t, t + 1);
      }
      ASSERT_EQ(invoke("fem_read_decode", {{"prior", prior}}, &step), "");
      EXPECT_LT(rms_error(step["out"], check::tokens(whole.at("out"), t, t + 1)), 1e-11) << prior << " " << t;
    }
  }
}

TEST(Fem, RefusesBadInput) {
  const auto refusal = [](Tensors tensors, const Options& options) { return invoke("fem_read", options, &tensors); };
  for (const char* prior : {"delta", "zeros"}) {
    EXPECT_NE(refusal(call("softmax"), {{"prior", prior}}).find("has weights of both signs"), std::string::npos) << prior;
  }
  Tensor beta = constant({kHeads, kWidth}, 1);
  beta.set(7, 0);
  EXPECT_NE(refusal(with(call("softmax"), "beta", beta), {}).find("beta[1][1] is 0, expected a number above 0"),
            std::string::npos);
  EXPECT_NE(refusal(call("softmax"), {{"prior", "gated"}}).find("a is missing; prior gated needs it"), std::string::npos);
  EXPECT_NE(refusal(call("gated"), {}).find("a is given, expected none with prior softmax"), std::string::npos);
  EXPECT_NE(refusal(call("gated"), {{"prior", "gated"}, {"causal", "0"}}).find("causal is 0, expected 1"), std::string::npos);
  EXPECT_NE(refusal(call("softmax"), {{"denominator", "plus 1e-5"}}).find("expected denominator exact"), std::string::npos);
  EXPECT_NE(refusal(call("softmax"), {{"masked", "1"}}).find("key_mask is missing; masked needs it"), std::string::npos);
}

}  // namespace
}  // namespace linnet
