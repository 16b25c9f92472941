// metala: agreement with the reference and the relations of the page: core and gla, convexity, replacement of a row (C1), any
// attention map (C2), the augmentation, prefill then decode, refusals.
#include <cmath>

#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

using check::constant;
using check::invoke;
using check::random_tensor;
using check::rms_error;
using check::Tensor;
using check::Tensors;
using check::tokens;

TEST(Metala, AgreesWithTheReference) {
  check::expect_agreement({
      "metala_mixer B=2 T=1 H=2 K=8 V=8 pass=bwd with=w_aug,state",
      "metala_mixer B=1 T=97 H=3 K=20 V=33 pass=bwd with=w_aug threads=3",
      "metala_mixer B=1 T=100 H=2 K=16 V=16 N=4 aug=linear tau=1 pass=bwd with=w_aug,cu_seqlens,state strided=1",
      "metala_mixer B=1 T=33 H=2 K=16 V=16 aug=none pass=bwd",
      "metala_mixer B=2 T=0 H=2 K=4 V=4 pass=bwd with=state",
      "metala_mixer B=2 T=70 H=2 K=16 V=20 pass=bwd with=w_aug,mask values=masked,garbage",
      "metala_mixer B=2 T=70 H=2 K=16 V=20 skip_masked=1 pass=bwd with=w_aug,mask,state values=masked,garbage threads=2",
      "metala_mixer_decode B=2 T=3 H=3 K=20 V=40 skip_masked=1 with=w_aug,mask values=masked,garbage",
      "metala_core B=1 T=97 H=3 K=20 V=33 pass=bwd with=state",
      "metala_mixer_decode B=2 T=3 H=3 K=20 V=40 with=w_aug threads=2",
      "metala_mixer_decode B=1 T=1 H=2 K=5 V=7 aug=linear strided=1",
      "metala_mixer_decode B=2 T=2 H=5 K=70 V=128 with=w_aug threads=3",
      "metala_mixer_decode B=2 T=1 H=3 K=64 V=64 with=w_aug,mask threads=2",
      "metala_mixer_decode B=1 T=3 H=3 K=3 V=256 tau=4 with=w_aug",
  });
}

Tensor log_decays(std::vector<int64_t> sizes, uint64_t seed) {
  Tensor g = random_tensor(std::move(sizes), seed);
  for (int64_t i = 0; i < g.count(); ++i) g.set(i, -std::fabs(g.get(i)));
  return g;
}

TEST(Metala, CoreIsGlaWithTiedKeys) {
  Tensors core = {
      {"q", random_tensor({1, 40, 2, 5}, 1)}, {"g", log_decays({1, 40, 2, 5}, 2)}, {"v", random_tensor({1, 40, 2, 7}, 3)}};
  Tensors gla = core;
  gla["k"] = core["g"];
  for (int64_t i = 0; i < gla["k"].count(); ++i) gla["k"].set(i, -std::expm1(core["g"].get(i)));
  ASSERT_EQ(invoke("metala_core", {}, &core), "");
  ASSERT_EQ(invoke("gla", {}, &gla), "");
  EXPECT_LE(rms_error(core["out"], gla["out"]), 1e-13);
}

TEST(Metala, AConstantStateStays) {
  Tensors x = {{"q", random_tensor({1, 70, 2, 5}, 1)},
               {"g", log_decays({1, 70, 2, 5}, 2)},
               {"v", constant({1, 70, 2, 3}, 1)},
               {"state", constant({1, 2, 5, 3}, 1)}};
  ASSERT_EQ(invoke("metala_core", {}, &x), "");
  EXPECT_LE(rms_error(x["final_state"], x["state"]), 1e-13);
}

// Skipped tokens leave the state alone: the others are what they are without them.
TEST(Metala, SkippedTokensAreNotThere) {
  Tensors x = {
      {"q", random_tensor({1, 60, 2, 5}, 1)}, {"a", random_tensor({1, 60, 2, 5}, 2)}, {"v", random_tensor({1, 60, 2, 7}, 3)}};
  Tensors without = x;
  for (const char* name : {"q", "a", "v"}) without[name] = tokens(x[name], 20, 60);
  Tensor mask(Dtype::u8, {1, 60});
  for (int64_t t = 0; t < 60; ++t) mask.set(t, t >= 20);
  x["mask"] = mask;
  ASSERT_EQ(invoke("metala_mixer", {{"skip_masked", "1"}}, &x), "");
  ASSERT_EQ(invoke("metala_mixer", {}, &without), "");
  EXPECT_LE(rms_error(tokens(x["out"], 20, 60), without["out"]), 1e-13);
  EXPECT_LE(rms_error(x["final_state"], without["final_state"]), 1e-13);
}

// alpha = 0 on one channel and 1 elsewhere replaces that row of the state by v and keeps the others.
TEST(Metala, OneRowIsReplaced) {
  Tensors x = {{"q", random_tensor({1, 1, 1, 4}, 1)},
               {"a", constant({1, 1, 1, 4}, 1e30)},
               {"v", random_tensor({1, 1, 1, 3}, 2)},
               {"state", random_tensor({1, 1, 4, 3}, 3)}};
  x["a"].set(0, -1e30);
  ASSERT_EQ(invoke("metala_mixer", {}, &x), "");
  for (int64_t i = 0; i < 12; ++i) EXPECT_NEAR(x["final_state"].get(i), i < 3 ? x["v"].get(i) : x["state"].get(i), 1e-15);
}

// The constructive proof of C2: any causal stochastic map with Dk = T.
TEST(Metala, AnyMapIsReached) {
  constexpr int64_t T = 9;
  Tensor map = random_tensor({T, T}, 5);
  Tensors x = {{"q", constant({1, T, 1, T}, 0)}, {"g", constant({1, T, 1, T}, 0)}, {"v", random_tensor({1, T, 1, 4}, 6)}};
  for (int64_t t = 0; t < T; ++t) {
    double sum = 0, before = 0;
    for (int64_t s = 0; s <= t; ++s) sum += map.get(t * T + s) * map.get(t * T + s);
    x["q"].set(t * T + t, 1);
    for (int64_t s = 0; s <= t; ++s) {
      const double p = map.get(t * T + s) * map.get(t * T + s) / sum;
      map.set(t * T + s, p);
      x["g"].set(s * T + t, std::log(before / (before + p)));
      before += p;
    }
  }
  ASSERT_EQ(invoke("metala_core", {{"scale", "1"}}, &x), "");
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t j = 0; j < 4; ++j) {
      double want = 0;
      for (int64_t s = 0; s <= t; ++s) want += map.get(t * T + s) * x["v"].get(s * 4 + j);
      EXPECT_NEAR(x["out"].get(t * 4 + j), want, 1e-13);
    }
  }
}

TEST(Metala, WithoutWeightsTheAugmentationIsAHalf) {
  Tensors x = {
      {"q", random_tensor({1, 20, 2, 4}, 1)}, {"a", random_tensor({1, 20, 2, 4}, 2)}, {"v", random_tensor({1, 20, 2, 3}, 3)}};
  Tensors none = x;
  x["w_aug"] = constant({2, 4}, 0);
  ASSERT_EQ(invoke("metala_mixer", {}, &x), "");
  ASSERT_EQ(invoke("metala_mixer", {{"aug", "none"}}, &none), "");
  for (int64_t i = 0; i < x["out"].count(); ++i) EXPECT_NEAR(x["out"].get(i), none["out"].get(i) + 0.5, 1e-15);
  EXPECT_EQ(x["final_state"], none["final_state"]);
}

TEST(Metala, PrefillThenDecodeIsOneRun) {
  Tensors whole = {{"q", random_tensor({2, 40, 2, 5}, 1)},
                   {"a", random_tensor({2, 40, 2, 5}, 2)},
                   {"v", random_tensor({2, 40, 2, 6}, 3)},
                   {"w_aug", random_tensor({2, 5}, 4)}};
  ASSERT_EQ(invoke("metala_mixer", {}, &whole), "");
  Tensors part = whole;
  for (const char* name : {"q", "a", "v"}) part[name] = tokens(whole[name], 0, 33);
  ASSERT_EQ(invoke("metala_mixer", {}, &part), "");
  Tensors step = {{"w_aug", whole["w_aug"]}, {"state", part["final_state"]}};
  for (int64_t t = 33; t < 40; ++t) {
    for (const char* name : {"q", "a", "v"}) step[name] = tokens(whole[name], t, t + 1);
    ASSERT_EQ(invoke("metala_mixer_decode", {}, &step), "");
    EXPECT_LE(rms_error(step["out"], tokens(whole["out"], t, t + 1)), 1e-13) << t;
  }
  EXPECT_LE(rms_error(step["state"], whole["final_state"]), 1e-13);
}

TEST(Metala, Refusals) {
  Tensors x = {
      {"q", random_tensor({1, 4, 2, 4}, 1)}, {"a", random_tensor({1, 4, 2, 4}, 2)}, {"v", random_tensor({1, 4, 2, 3}, 3)}};
  EXPECT_EQ(invoke("metala_mixer", {{"tau", "0"}}, &x), "metala_mixer: tau is 0.000000, expected a positive number");
  EXPECT_EQ(invoke("metala_mixer", {{"floor", "0"}}, &x), "metala_mixer: floor is 0.000000, expected a negative number");
}

}  // namespace
}  // namespace linnet
