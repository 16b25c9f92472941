// rms_norm_gated: agreement with the reference, the two orders without a gate, the gate alone.
#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

using check::invoke;
using check::random_tensor;
using check::Tensors;

TEST(RmsNormGated, AgreesWithTheReference) {
  check::expect_agreement({
      "rms_norm_gated B=2 T=65 H=3 V=16 pass=bwd with=z,weight",
      "rms_norm_gated B=1 T=70 H=2 V=33 norm_before_gate=1 gate=sigmoid pass=bwd with=z,weight strided=1 threads=3",
      "rms_norm_gated B=1 T=9 H=4 V=24 gate=sigmoid pass=bwd with=z",
      "rms_norm_gated B=1 T=9 H=4 V=24 pass=bwd with=weight",
      "rms_norm_gated B=1 T=0 H=2 V=4 pass=bwd with=z,weight",
  });
}

TEST(RmsNormGated, OrderMattersOnlyWithAGate) {
  Tensors x = {{"x", random_tensor({1, 5, 2, 6}, 1)}, {"weight", random_tensor({6}, 2)}};
  Tensors y = x;
  ASSERT_EQ(invoke("rms_norm_gated", {}, &x), "");
  ASSERT_EQ(invoke("rms_norm_gated", {{"norm_before_gate", "1"}}, &y), "");
  EXPECT_EQ(x["out"], y["out"]);
  // A gate of one factor per row disappears in the norm when it comes first (eps = 0).
  Tensors z = x;
  z["z"] = check::constant({1, 5, 2, 6}, 3);
  Tensors plain = x;
  ASSERT_EQ(invoke("rms_norm_gated", {{"eps", "0"}}, &z), "");
  ASSERT_EQ(invoke("rms_norm_gated", {{"eps", "0"}}, &plain), "");
  EXPECT_LE(check::rms_error(z["out"], plain["out"]), 1e-14);
}

}  // namespace
}  // namespace linnet
