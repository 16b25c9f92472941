// taylor: agreement with the reference, the relations of its page, decode, refusals.
#include "taylor.h"

#include <gtest/gtest.h>

#include <cmath>

#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

using check::constant;
using check::mapped;
using check::out_of;
using check::random_tensor;
using check::refusal;
using check::rms_error;
using check::Tensor;
using check::Tensors;
using check::tokens;
using check::with;

TEST(Taylor, AgreesWithTheReference) {
  check::expect_agreement({
      "taylor_exact B=2 T=0 S=0 H=2 K=4 V=4 pass=bwd",
      "taylor_exact B=1 T=1 S=1 H=1 K=1 V=3 causal=1 pass=bwd",
      "taylor_exact B=2 T=33 S=33 H=2 K=16 V=17 causal=1 with=key_mask values=garbage pass=bwd",
      "taylor_exact B=1 T=65 S=97 H=2 K=7 V=16 strided=1 threads=3 pass=bwd",
      "taylor_compact B=2 T=70 S=70 H=2 K=12 V=16 causal=1 threads=2 pass=bwd",
      "taylor_compact B=1 T=20 S=33 H=1 K=16 V=5 with=key_mask values=masked pass=bwd",
      "taylor_compact_l2 B=2 T=64 S=64 H=2 K=16 V=16 causal=1 pass=bwd",
      "taylor_qt_layer B=2 T=25 H=2 K=8 threads=3 pass=bwd",
      "taylor_decode B=2 T=3 H=2 K=8 V=20 mode=exact",
      "taylor_decode B=1 T=2 H=3 K=8 V=4 mode=compact_l2 with=const",
  });
}

Tensors attention(int64_t T, int64_t K, uint64_t seed) {
  return {{"q", random_tensor({1, T, 2, K}, seed)},
          {"k", random_tensor({1, T, 2, K}, seed + 1)},
          {"v", random_tensor({1, T, 2, 5}, seed + 2)}};
}
Tensors with_scalars(Tensors x, double alpha, double beta, double gamma) {
  x.insert({{"alpha", constant({}, alpha)}, {"beta", constant({}, beta)}, {"gamma", constant({}, gamma)}});
  return x;
}

// o_i = sum_j w_ij v_j / sum_j w_ij, pair by pair.
TEST(Taylor, ExactIsThePolynomial) {
  const Tensors x = attention(20, 4, 1);
  const Tensor &q = x.at("q"), &k = x.at("k"), &v = x.at("v");
  for (const bool causal : {false, true}) {
    Tensor want(Dtype::f64, {1, 20, 2, 5});
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 20; ++i) {
        double den = 0, num[5] = {};
        for (int64_t j = 0; j < (causal ? i + 1 : 20); ++j) {
          double s = 0;
          for (int64_t c = 0; c < 4; ++c) s += 0.5 * q.get(q.at(0, i, h, c)) * k.get(k.at(0, j, h, c));
          const double w = 1 + s + s * s / 2;
          den += w;
          for (int64_t c = 0; c < 5; ++c) num[c] += w * v.get(v.at(0, j, h, c));
        }
        for (int64_t c = 0; c < 5; ++c) want.set(want.at(0, i, h, c), num[c] / den);
      }
    }
    EXPECT_LT(rms_error(out_of("taylor_exact", x, {{"causal", causal ? "1" : "0"}}), want), 1e-11);
  }
}

// The difference to softmax is of third order in the logits.
TEST(Taylor, TendsToSoftmax) {
  const Tensors x = attention(30, 8, 2);
  double last = 0;
  for (const char* scale : {"0.02", "0.01"}) {
    const double error =
        rms_error(out_of("taylor_exact", x, {{"scale", scale}, {"eps", "0"}}), out_of("softmax", x, {{"scale", scale}}));
    if (last > 0) {
      EXPECT_NEAR(last / error, 8, 1);
    }
    last = error;
  }
}

TEST(Taylor, CompactRelations) {
  const Tensors x = attention(30, 6, 3);
  // Signs of q do not matter, nor, as released, does its length.
  const Tensors flipped = with(x, "q", mapped(x.at("q"), -1, 0)), longer = with(x, "q", mapped(x.at("q"), 7, 0));
  EXPECT_TRUE(out_of("taylor_compact", with_scalars(flipped, 1, 0, 1)) == out_of("taylor_compact", with_scalars(x, 1, 0, 1)));
  Tensors a = x, b = longer;
  a.emplace("const", constant({}, 1));
  b.emplace("const", constant({}, 1));
  EXPECT_LT(rms_error(out_of("taylor_compact_l2", b), out_of("taylor_compact_l2", a)), 1e-14);
  // One channel, alpha = beta = gamma = 1: the exact weights.
  const Tensors narrow = attention(20, 1, 4);
  EXPECT_LT(rms_error(out_of("taylor_compact", with_scalars(narrow, 1, 1, 1)), out_of("taylor_exact", narrow)), 1e-13);
  // Constant values come back.
  const Tensors same = with(x, "v", constant({1, 30, 2, 5}, 2));
  EXPECT_LT(rms_error(out_of("taylor_exact", same), same.at("v")), 1e-12);
}

TEST(Taylor, DecodeContinues) {
  const Tensors x = attention(40, 5, 5);
  const auto part = [&](int64_t begin, int64_t end) {
    return Tensors{
        {"q", tokens(x.at("q"), begin, end)}, {"k", tokens(x.at("k"), begin, end)}, {"v", tokens(x.at("v"), begin, end)}};
  };
  Tensors state = part(0, 33);
  ASSERT_EQ(check::invoke("taylor_exact", {{"causal", "1"}}, &state), "");
  Tensors rest = part(33, 40);
  rest.insert({{"state", state["final_state"]}, {"z", state["final_z"]}});
  EXPECT_LT(rms_error(out_of("taylor_decode", rest), tokens(out_of("taylor_exact", x, {{"causal", "1"}}), 33, 40)), 1e-12);
}

TEST(Taylor, Refusals) {
  Tensors x = attention(10, 4, 1);
  EXPECT_EQ(refusal("taylor_exact", x, {{"scale", "-1"}}), "taylor_exact: scale is -1, expected at least 0");
  x.insert({{"state", random_tensor({1, 2, 10, 5}, 1)}, {"z", random_tensor({1, 2, 10}, 1)}});
  EXPECT_EQ(refusal("taylor_decode", x, {{"mode", "compact"}}), "taylor_decode: alpha is missing; mode compact needs it");
}

}  // namespace
}  // namespace linnet
