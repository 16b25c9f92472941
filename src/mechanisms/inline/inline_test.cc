// inline: agreement with the reference, the relations and edge cases of its page, decode, the residual, refusals.
#include "inline.h"

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

TEST(Inline, AgreesWithTheReference) {
  check::expect_agreement({
      "inline B=2 T=0 S=0 H=2 K=4 V=4 pass=bwd",
      "inline B=1 T=1 S=1 H=1 K=4 V=4 causal=1 pass=bwd",
      "inline B=2 T=31 S=31 H=2 K=16 V=24 causal=1 with=mask values=garbage pass=bwd",
      "inline B=1 T=33 S=33 H=3 K=17 V=5 causal=1 kernel=exp strided=1 threads=3 pass=bwd",
      "inline B=2 T=64 S=97 H=2 K=16 V=16 kernel=relu with=mask values=masked pass=bwd",
      "inline B=1 T=700 S=700 H=1 K=16 V=16 causal=1 kernel=leakyrelu threads=4 pass=bwd",
      "inline B=1 T=700 S=650 H=1 K=8 V=8 threads=4 pass=bwd",
      "inline_residual B=2 H=2 D=12 height=5 width=7 prefix=1 with=mask threads=2 pass=bwd",
      "inline_residual B=3 H=2 D=7 height=4 width=6 with=mask values=masked,garbage pass=bwd",
      "inline_residual B=1 H=1 D=20 height=1 width=9 causal=1 kernel=relu strided=1 pass=bwd",
      "inline_residual B=2 H=2 D=4 height=0 width=3 prefix=2 pass=bwd",
      "inline_decode B=2 T=3 H=2 K=16 V=20 kernel=exp threads=2",
  });
}

Tensors attention(int64_t T, uint64_t seed) {
  return {{"q", random_tensor({1, T, 2, 6}, seed)},
          {"k", random_tensor({1, T, 2, 6}, seed + 1)},
          {"v", random_tensor({1, T, 2, 5}, seed + 2)}};
}

TEST(Inline, Relations) {
  const Tensors x = attention(40, 1);
  for (const char* causal : {"0", "1"}) {
    const Options options = {{"causal", causal}};
    const Tensor out = out_of("inline", x, options);
    // Rows of weights sum to 1; a constant added to keys changes nothing, one added to values comes out.
    EXPECT_LT(rms_error(out_of("inline", with(x, "v", constant({1, 40, 2, 5}, 3)), options), constant({1, 40, 2, 5}, 3)),
              1e-15);
    EXPECT_LT(rms_error(out_of("inline", with(x, "k", mapped(x.at("k"), 1, 100)), options), out), 1e-12);
    EXPECT_LT(rms_error(out_of("inline", with(x, "v", mapped(x.at("v"), 1, 7)), options), mapped(out, 1, 7)), 1e-13);
  }
  // The last row of the causal form sees what every row of the other sees.
  const Tensor causal = out_of("inline", x, {{"causal", "1"}}), whole = out_of("inline", x);
  EXPECT_LT(rms_error(tokens(causal, 39, 40), tokens(whole, 39, 40)), 1e-13);
  // scale 0: mean pooling, so all rows are equal.
  const Tensor mean = out_of("inline", x, {{"scale", "0"}});
  EXPECT_LT(rms_error(tokens(mean, 0, 1), tokens(mean, 20, 21)), 1e-15);
  // One key: its value, whatever q is.
  const Tensors one = attention(1, 9);
  EXPECT_TRUE(out_of("inline", one) == one.at("v"));
}

// softmax(eps q) - inline(eps q) shrinks with eps^2.
TEST(Inline, IsSoftmaxToFirstOrder) {
  const Tensors x = attention(30, 4);
  double last = 0;
  for (const double eps : {1e-2, 1e-3}) {
    const Tensors small = with(x, "q", mapped(x.at("q"), eps, 0));
    const double error = rms_error(out_of("inline", small), out_of("softmax", small));
    if (last > 0) {
      EXPECT_NEAR(last / error, 100, 20);
    }
    last = error;
  }
}

// Keys and values on an offset of 1000: the centred form loses nothing against the inputs as rounded.
TEST(Inline, OffsetsCostNothing) {
  Tensors wide, narrow;
  for (const auto& [name, tensor] : attention(256, 2)) {
    Tensor f32(Dtype::f32, tensor.sizes);
    for (int64_t i = 0; i < f32.count(); ++i) f32.set(i, tensor.get(i) + (name == "q" ? 0 : 1000));
    Tensor f64(Dtype::f64, tensor.sizes);
    for (int64_t i = 0; i < f64.count(); ++i) f64.set(i, f32.get(i));
    narrow.emplace(name, f32);
    wide.emplace(name, f64);
  }
  for (const char* causal : {"0", "1"}) {
    const Tensor got = out_of("inline", narrow, {{"causal", causal}}), want = out_of("inline", wide, {{"causal", causal}});
    for (int64_t i = 0; i < want.count(); ++i) EXPECT_LE(std::abs(got.get(i) - want.get(i)), 0x1p-14) << i;  // one ulp of 1000
  }
}

TEST(Inline, DecodeContinues) {
  const Tensors x = attention(50, 3);
  const auto part = [&](int64_t begin, int64_t end) {
    return Tensors{
        {"q", tokens(x.at("q"), begin, end)}, {"k", tokens(x.at("k"), begin, end)}, {"v", tokens(x.at("v"), begin, end)}};
  };
  Tensors state = part(0, 33);
  ASSERT_EQ(check::invoke("inline", {{"causal", "1"}}, &state), "");
  Tensors rest = part(33, 50);
  rest.insert({{"moment", state["final_moment"]},
               {"key", state["final_key"]},
               {"value", state["final_value"]},
               {"count", state["final_count"]}});
  EXPECT_LT(rms_error(out_of("inline_decode", rest), tokens(out_of("inline", x, {{"causal", "1"}}), 33, 50)), 1e-13);
}

// Coefficients that are the centre tap alone add that multiple of v.
TEST(Inline, ResidualCentreTap) {
  const Tensor x = random_tensor({2, 12, 2, 4}, 5);
  Tensor b2 = constant({2, 36}, 0);
  for (int64_t i = 4; i < 72; i += 9) b2.set(i, 0.5);
  const Tensors inputs = {{"q", x},
                          {"k", random_tensor({2, 12, 2, 4}, 6)},
                          {"v", x},
                          {"pooled", random_tensor({2, 2, 4}, 7)},
                          {"w1", random_tensor({2, 4, 4}, 8)},
                          {"b1", constant({2, 4}, 0)},
                          {"w2", constant({2, 36, 4}, 0)},
                          {"b2", b2}};
  Tensor want = out_of("inline", inputs);
  for (int64_t i = 0; i < want.count(); ++i) want.set(i, want.get(i) + 0.5 * x.get(i));
  EXPECT_LT(rms_error(out_of("inline_residual", inputs, {{"height", "3"}, {"width", "4"}}), want), 1e-15);
  EXPECT_EQ(refusal("inline_residual", inputs, {{"height", "3"}, {"width", "5"}}),
            "inline_residual: q has 12 tokens in dimension 1 of [B, T, H, D], expected 15");
}

TEST(Inline, Refusals) {
  Tensors x = attention(10, 1);
  x.emplace("mask", random_tensor({1, 10}, 1));
  EXPECT_EQ(refusal("inline", x), "inline: mask is f64, expected u8");
  x.erase("mask");
  x["k"] = random_tensor({1, 9, 2, 6}, 1);
  x["v"] = random_tensor({1, 9, 2, 5}, 1);
  EXPECT_EQ(refusal("inline", x, {{"causal", "1"}}), "inline: k has 9 tokens, expected 10 (same as q) when causal");
}

}  // namespace
}  // namespace linnet
