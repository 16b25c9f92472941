// zeros: agreement with the reference in every implementation and dtype, the relations and edge cases of its page, refusals.
#include "zeros.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

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
    "zeros B=1 T=1 H=1 K=8 V=8 pass=bwd",
    "zeros B=2 T=63 H=2 K=16 V=24 with=s0 pass=bwd",
    "zeros B=1 T=64 H=2 K=20 V=13 pass=bwd strided=1",
    "zeros B=1 T=65 H=3 K=64 V=64 pass=bwd threads=3",
    "zeros B=2 T=211 H=2 K=17 V=33 with=s0,key_mask values=garbage pass=bwd",
    "zeros B=2 T=130 H=1 K=8 V=72 with=key_mask values=masked,garbage pass=bwd",
    "zeros B=2 T=100 H=2 K=16 V=16 causal=0 with=s0,key_mask values=garbage pass=bwd",
    "zeros B=1 T=600 H=1 K=16 V=16 pass=bwd",
    "zeros B=1 T=600 H=1 K=16 V=16 with=s0 values=repeated pass=bwd",
    "zeros B=1 T=520 H=1 K=16 V=40 with=s0,key_mask values=garbage pass=bwd threads=2",  // all threads on one head
    "zeros B=1 T=770 H=1 K=9 V=72 causal=0 with=s0 pass=bwd threads=3",
    "zeros B=2 T=0 H=2 K=8 V=8 pass=bwd",
    "zeros_decode B=2 T=1 H=3 K=16 V=40",
    "zeros_decode B=1 T=4 H=2 K=9 V=7 with=s0 strided=1",
    "zeros_softmax B=2 T=63 H=2 K=16 V=24 with=s0 pass=bwd",
    "zeros_softmax B=1 T=130 H=2 K=20 V=13 pass=bwd threads=3 strided=1",
    "zeros_softmax B=2 T=70 H=1 K=16 V=72 causal=0 scale=1 pass=bwd",
    "zeros_softmax B=2 T=70 H=1 K=16 V=16 scale=20 pass=bwd",
    "zeros_softmax B=2 T=0 H=2 K=8 V=8 pass=bwd",
};

TEST(Zeros, AgreesWithTheReference) { check::expect_agreement({std::begin(kLines), std::end(kLines)}); }

constexpr int64_t kTokens = 150, kHeads = 2, kWidth = 12;

Tensor unit_rows(uint64_t seed) {
  Tensor x = random_tensor({1, kTokens, kHeads, kWidth}, seed);
  for (int64_t r = 0; r < kTokens * kHeads; ++r) {
    double squares = 0;
    for (int64_t c = 0; c < kWidth; ++c) squares += x.get(r * kWidth + c) * x.get(r * kWidth + c);
    for (int64_t c = 0; c < kWidth; ++c) x.set(r * kWidth + c, x.get(r * kWidth + c) / std::sqrt(squares));
  }
  return x;
}
Tensor numbers(double x) { return constant({1, kTokens, kHeads}, x); }
Tensors call() {
  return {{"q", unit_rows(1)},
          {"k", unit_rows(2)},
          {"v", random_tensor({1, kTokens, kHeads, kWidth}, 3)},
          {"s", random_tensor({1, kTokens, kHeads}, 4)},
          {"s1", numbers(0.7)},
          {"sh", numbers(0.3)},
          {"dout", random_tensor({1, kTokens, kHeads, kWidth}, 5)}};
}
Tensors run(const char* op, Tensors tensors, const Options& options = {}) {
  EXPECT_EQ(invoke(op, options, &tensors), "");
  return tensors;
}

TEST(Zeros, TheFirstRowIsZeroWithoutTheZerothOrder) {
  const Tensors result = run("zeros", call());
  for (int64_t i = 0; i < kHeads * kWidth; ++i) EXPECT_EQ(result.at("out").get(i), 0);
}

TEST(Zeros, AConstantInTheLogitsChangesNothing) {
  const Tensors plain = run("zeros", call());
  for (const double offset : {-1e4, 3000.0}) {
    Tensor s = plain.at("s");
    for (int64_t i = 0; i < s.count(); ++i) s.set(i, s.get(i) + offset);
    const Tensors moved = run("zeros", with(call(), "s", s));
    for (const char* name : {"out", "dq", "dv", "ds"}) EXPECT_LT(rms_error(moved.at(name), plain.at(name)), 1e-9) << name;
  }
}

TEST(Zeros, EqualLogitsLeaveTheZerothOrder) {
  const Tensors none = run("zeros", with(call(), "s", numbers(2.5)));
  EXPECT_LT(rms_error(none.at("out"), constant({1, kTokens, kHeads, kWidth}, 0)), 1e-15);
  // o = s0 q H_t / t: linear attention divided by t.
  const Tensors mean = run("zeros", with(with(call(), "s", numbers(2.5)), "s0", numbers(1)));
  const Tensors linear = run("linear", call(), {{"scale", "1"}});
  for (int64_t i = 0; i < mean.at("out").count(); ++i) {
    const double t = static_cast<double>(i / (kHeads * kWidth) + 1);
    EXPECT_NEAR(mean.at("out").get(i), linear.at("out").get(i) / t, 1e-14);
  }
}

TEST(Zeros, AllGatesOpenAreTheSoftmaxOfTheLogits) {
  Tensors tensors = with(with(with(call(), "s1", numbers(1)), "sh", numbers(1)), "s0", numbers(1));
  // A constant direction: the cosine is 1, and o_t = sum e^s v / sum e^s.
  Tensor one({Dtype::f64, {1, kTokens, kHeads, kWidth}});
  for (int64_t r = 0; r < kTokens * kHeads; ++r) one.set(r * kWidth, 1);
  const Tensors result = run("zeros", with(with(tensors, "q", one), "k", one));
  for (int64_t h = 0; h < kHeads; ++h) {
    double weights = 0, sum = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      const double w = std::exp(result.at("s").get(t * kHeads + h));
      weights += w;
      sum += w * result.at("v").get(result.at("v").at(0, t, h, 5));
      EXPECT_NEAR(result.at("out").get(result.at("out").at(0, t, h, 5)), sum / weights, 1e-13);
    }
  }
}

TEST(Zeros, TheQuadraticVariantWithAllGatesOpenIsSoftmax) {
  Tensors tensors = with(with(with(call(), "s1", numbers(1)), "sh", numbers(1)), "s0", numbers(1));
  const Tensors one = run("zeros_softmax", tensors), other = run("softmax", call(), {{"causal", "1"}});
  for (const char* name : {"out", "dq", "dk", "dv"}) EXPECT_LT(rms_error(one.at(name), other.at(name)), 1e-13) << name;
}

TEST(Zeros, AConstantInTheValuesOfTheQuadraticVariantChangesNothing) {
  const Tensors plain = run("zeros_softmax", call());
  Tensor v = plain.at("v");
  for (int64_t i = 0; i < v.count(); ++i) v.set(i, v.get(i) + 5);
  EXPECT_LT(rms_error(run("zeros_softmax", with(call(), "v", v)).at("out"), plain.at("out")), 1e-12);
}

TEST(Zeros, TokenByTokenIsTheWholeSequence) {
  const Tensors whole = run("zeros", with(call(), "s0", random_tensor({1, kTokens, kHeads}, 8)));
  Tensors step = {{"state", Tensor(Dtype::f64, {1, kHeads, 3, kWidth, kWidth})},
                  {"moments", Tensor(Dtype::f64, {1, kHeads, 5})}};
  for (int64_t t = 0; t < kTokens; ++t) {
    for (const char* name : {"q", "k", "v", "s", "s1", "sh", "s0"}) step[name] = check::tokens(whole.at(name), t, t + 1);
    ASSERT_EQ(invoke("zeros_decode", {}, &step), "");
    EXPECT_LT(rms_error(step["out"], check::tokens(whole.at("out"), t, t + 1)), 1e-11) << t;
  }
}

TEST(Zeros, LogitsThatRiseByHundredsStayFinite) {
  Tensor s({Dtype::f64, {1, kTokens, kHeads}});
  for (int64_t i = 0; i < s.count(); ++i) s.set(i, static_cast<double>(i % 7 == 0 ? 1e4 : 200 * (i % 5)));
  const Tensors result = run("zeros", with(call(), "s", s));
  for (const char* name : {"out", "dq", "dk", "dv", "ds"}) {
    for (int64_t i = 0; i < result.at(name).count(); ++i) EXPECT_TRUE(std::isfinite(result.at(name).get(i))) << name;
  }
}

TEST(Zeros, RefusesBadInput) {
  const auto refusal = [](Tensors tensors, const Options& options) { return invoke("zeros", options, &tensors); };
  Tensor s = numbers(0);
  s.set(3, -std::numeric_limits<double>::infinity());
  EXPECT_NE(refusal(with(call(), "s", s), {}).find("s[0][1][1] is -inf, expected a finite number"), std::string::npos);
  EXPECT_NE(refusal(call(), {{"zeroth", "1"}}).find("s0 is missing; zeroth needs it"), std::string::npos);
  EXPECT_NE(refusal(call(), {{"masked", "1"}}).find("key_mask is missing; masked needs it"), std::string::npos);
}

}  // namespace
}  // namespace linnet
