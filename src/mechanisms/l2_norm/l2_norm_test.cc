// l2_norm: agreement with the reference, rows of length one.
#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

TEST(L2Norm, AgreesWithTheReference) {
  check::expect_agreement({
      "l2_norm B=2 T=65 H=3 K=16 pass=bwd",
      "l2_norm B=1 T=7 H=2 K=33 pass=bwd strided=1 threads=3",
      "l2_norm B=1 T=0 H=2 K=4 pass=bwd",
  });
}

TEST(L2Norm, RowsHaveLengthOneAndZerosStay) {
  check::Tensors x = {{"x", check::random_tensor({1, 4, 2, 9}, 1)}};
  for (int64_t i = 0; i < 9; ++i) x["x"].set(i, 0);
  ASSERT_EQ(check::invoke("l2_norm", {{"eps", "0"}}, &x), "");
  for (int64_t row = 0; row < 8; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < 9; ++i) squares += x["out"].get(row * 9 + i) * x["out"].get(row * 9 + i);
    EXPECT_NEAR(squares, row == 0 ? 0 : 1, 1e-15);
  }
}

}  // namespace
}  // namespace linnet
