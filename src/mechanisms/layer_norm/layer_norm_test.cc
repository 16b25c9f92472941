// layer_norm: agreement with the reference, gradients, rows far from zero.
#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

TEST(LayerNorm, AgreesWithTheReference) {
  check::expect_agreement({
      "layer_norm B=2 T=65 H=3 D=16 with=weight,bias pass=bwd",
      "layer_norm B=2 T=130 D=65 with=weight other=x pass=bwd strided=1 threads=3",
      "layer_norm B=1 T=7 H=2 D=33 with=bias pass=bwd strided=1",
      "layer_norm B=1 T=3 D=768 other=x pass=bwd",
      "layer_norm B=1 T=0 H=2 D=4 with=weight pass=bwd",
  });
}

TEST(LayerNorm, Gradients) {
  const check::Tensors x = {{"x", check::random_tensor({1, 3, 2, 5}, 1)},
                            {"weight", check::random_tensor({5}, 2)},
                            {"bias", check::random_tensor({5}, 3)}};
  check::expect_gradients("layer_norm", {}, x, "out");
  check::expect_gradients("layer_norm", {{"eps", "0.1"}}, x, "out");
}

// A mean a thousand times the deviation costs no digit that f32 holds: x - mean is exact there.
TEST(LayerNorm, LargeMean) {
  check::Tensor x = check::Tensor(Dtype::f32, {1, 1, 64}), exact = check::Tensor(Dtype::f64, {1, 1, 64});
  const check::Tensor noise = check::random_tensor({64}, 4);
  for (int64_t i = 0; i < 64; ++i) {
    x.set(i, 1000 + noise.get(i));
    exact.set(i, x.get(i));
  }
  const check::Tensor got = check::out_of("layer_norm", {{"x", x}}), want = check::out_of("layer_norm", {{"x", exact}});
  for (int64_t i = 0; i < 64; ++i) EXPECT_NEAR(got.get(i), want.get(i), 1e-5);
}

}  // namespace
}  // namespace linnet
