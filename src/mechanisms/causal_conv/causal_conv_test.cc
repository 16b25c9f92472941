// causal_conv: agreement with the reference, states over splits and decoding bit for bit, packing, refusals.
#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

using check::invoke;
using check::random_tensor;
using check::Tensor;
using check::Tensors;
using check::tokens;

TEST(CausalConv, AgreesWithTheReference) {
  check::expect_agreement({
      "causal_conv B=2 T=1 E=5 W=4 pass=bwd with=bias,initial_state",
      "causal_conv B=1 T=130 E=300 W=4 pass=bwd with=bias threads=3",
      "causal_conv B=1 T=65 E=17 W=1 pass=bwd with=initial_state",
      "causal_conv B=1 T=100 E=9 W=4 N=5 pass=bwd with=bias,cu_seqlens,initial_state strided=1",
      "causal_conv B=2 T=3 E=16 W=17 activation=none pass=bwd with=bias,initial_state",
      "causal_conv B=2 T=0 E=8 W=4 pass=bwd with=initial_state",
      "causal_conv_decode B=3 T=1 E=300 W=4 with=bias threads=2",
      "causal_conv_decode B=2 T=40 E=7 W=3 strided=1",
      "causal_conv_decode B=2 T=1 E=0 W=4",
  });
}

TEST(CausalConv, PrefillThenDecodeIsOneRunBitForBit) {
  Tensors whole = {{"x", random_tensor({2, 30, 20}, 1, Dtype::f32)},
                   {"weight", random_tensor({20, 4}, 2, Dtype::f32)},
                   {"bias", random_tensor({20}, 3, Dtype::f32)}};
  ASSERT_EQ(invoke("causal_conv", {}, &whole), "");
  Tensors part = whole;
  part["x"] = tokens(whole["x"], 0, 17);
  ASSERT_EQ(invoke("causal_conv", {}, &part), "");
  EXPECT_EQ(part["out"], tokens(whole["out"], 0, 17));
  Tensors step = {{"weight", whole["weight"]}, {"bias", whole["bias"]}, {"state", part["final_state"]}};
  for (int64_t t = 17; t < 30; ++t) {
    step["x"] = tokens(whole["x"], t, t + 1);
    ASSERT_EQ(invoke("causal_conv_decode", {}, &step), "");
    EXPECT_EQ(step["out"], tokens(whole["out"], t, t + 1)) << t;
  }
  EXPECT_EQ(step["state"], whole["final_state"]);
}

TEST(CausalConv, Refusals) {
  Tensors x = {{"x", random_tensor({1, 5, 4}, 1)}, {"weight", random_tensor({3, 4}, 2)}};
  EXPECT_EQ(invoke("causal_conv", {}, &x).rfind("causal_conv: weight has 3 ", 0), 0U);
  x["weight"] = Tensor(Dtype::f64, {4, 0});
  EXPECT_EQ(invoke("causal_conv", {}, &x), "causal_conv: weight has no taps, expected at least 1");
}

}  // namespace
}  // namespace linnet
