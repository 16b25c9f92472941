// rms_norm: agreement with the reference, gradients, rows of two shapes.
#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

TEST(RmsNorm, AgreesWithTheReference) {
  check::expect_agreement({
      "rms_norm B=2 T=65 H=3 D=16 with=weight pass=bwd",
      "rms_norm B=2 T=130 D=65 with=weight plus_one=1 other=x pass=bwd strided=1 threads=3",
      "rms_norm B=1 T=7 H=2 D=33 pass=bwd strided=1",
      "rms_norm B=1 T=3 D=576 other=x with=weight pass=bwd",
      "rms_norm B=1 T=0 H=2 D=4 with=weight pass=bwd",
  });
}

TEST(RmsNorm, Gradients) {
  const check::Tensors x = {{"x", check::random_tensor({1, 3, 2, 5}, 1)}, {"weight", check::random_tensor({5}, 2)}};
  check::expect_gradients("rms_norm", {}, x, "out");
  check::expect_gradients("rms_norm", {{"plus_one", "1"}, {"eps", "0.1"}}, x, "out");
}

// Three dimensions give the rows of four with one head; a row of zeros with eps 0 stays zero.
TEST(RmsNorm, ShapesAndZeros) {
  check::Tensor rows = check::random_tensor({2, 3, 4}, 1);
  for (int64_t i = 0; i < 4; ++i) rows.set(i, 0);
  check::Tensor heads = rows;
  heads.sizes = {2, 3, 1, 4};
  const check::Tensor a = check::out_of("rms_norm", {{"x", rows}}, {{"eps", "0"}});
  const check::Tensor b = check::out_of("rms_norm", {{"x", heads}}, {{"eps", "0"}});
  EXPECT_EQ(a.sizes, (std::vector<int64_t>{2, 3, 4}));
  EXPECT_EQ(b.sizes, (std::vector<int64_t>{2, 3, 1, 4}));
  for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(a.get(i), b.get(i));
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(a.get(i), 0);
}

}  // namespace
}  // namespace linnet
