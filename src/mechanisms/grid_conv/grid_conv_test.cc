// grid_conv: agreement with the reference, its edges, refusals.
#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

using check::invoke;
using check::out_of;
using check::random_tensor;
using check::Tensor;
using check::Tensors;

TEST(GridConv, AgreesWithTheReference) {
  check::expect_agreement({
      "grid_conv B=2 E=5 side=5 height=3 width=4 pass=bwd with=bias",
      "grid_conv B=1 E=70 side=3 height=9 width=13 pass=bwd with=bias threads=3",
      "grid_conv B=3 E=16 side=5 height=1 width=1 pass=bwd strided=1",
      "grid_conv B=2 E=33 side=7 height=2 width=9 pass=bwd with=bias strided=1 threads=2",
      "grid_conv B=1 E=130 side=1 height=4 width=6 pass=bwd",
      "grid_conv B=2 E=8 side=3 height=0 width=7 pass=bwd with=bias",
      "grid_conv B=2 E=0 side=5 height=2 width=3 pass=bwd",
  });
}

// One tap that is 1 moves the grid; what comes from outside is 0.
TEST(GridConv, OneTapMovesTheGrid) {
  const Tensor x = random_tensor({1, 12, 1}, 1);
  for (const auto& [tap, dy, dx] : {std::array<int, 3>{4, 0, 0}, {0, -1, -1}, {5, 0, 1}, {7, 1, 0}}) {
    Tensor weight(Dtype::f64, {1, 3, 3});
    weight.set(tap, 1);
    const Tensor out = out_of("grid_conv", {{"x", x}, {"weight", weight}}, {{"height", "3"}, {"width", "4"}});
    for (int y = 0; y < 3; ++y) {
      for (int u = 0; u < 4; ++u) {
        const int v = y + dy, w = u + dx;
        const bool inside = v >= 0 && v < 3 && w >= 0 && w < 4;
        EXPECT_EQ(out.get(y * 4 + u), inside ? x.get(v * 4 + w) : 0) << tap << ' ' << y << ' ' << u;
      }
    }
  }
}

TEST(GridConv, Refusals) {
  Tensors x = {{"x", random_tensor({1, 6, 4}, 1)}, {"weight", random_tensor({4, 3, 3}, 2)}};
  EXPECT_EQ(invoke("grid_conv", {{"height", "2"}, {"width", "4"}}, &x),
            "grid_conv: x has 6 tokens in dimension 1 of [B, T, E], expected 8");
  x["weight"] = random_tensor({4, 2, 2}, 2);
  EXPECT_EQ(invoke("grid_conv", {{"height", "2"}, {"width", "3"}}, &x),
            "grid_conv: weight has 2 taps in each direction, expected an odd number");
  x["weight"] = random_tensor({4, 3, 5}, 2);
  EXPECT_EQ(invoke("grid_conv", {{"height", "2"}, {"width", "3"}}, &x).rfind("grid_conv: weight has 5 ", 0), 0U);
}

}  // namespace
}  // namespace linnet
