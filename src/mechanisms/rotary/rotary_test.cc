// rotary: agreement with the reference, gradients, scalings by hand, positions.
#include "rotary.h"

#include "check/agreement.h"
#include "check/named.h"

namespace linnet {
namespace {

TEST(Rotary, AgreesWithTheReference) {
  check::expect_agreement({
      "rotary B=2 T=65 H=3 D=16 pass=bwd",
      "rotary B=2 T=130 H=2 D=64 pairs=interleaved pass=bwd strided=1 threads=3",
      "rotary B=1 T=7 H=2 D=33 dims=20 pass=bwd strided=1",
      "rotary B=1 T=7 H=2 D=30 dims=14 pairs=interleaved pass=bwd offset=100000",
      "rotary B=2 T=9 H=2 D=32 with=positions scaling=linear factor=4 pass=bwd",
      "rotary B=2 T=9 H=2 D=32 with=positions,frequencies pass=bwd",
      "rotary B=1 T=200 H=1 D=64 scaling=llama3 factor=8 theta=500000 original_length=100 pass=bwd",
      "rotary B=1 T=0 H=2 D=4 pass=bwd",
  });
}

TEST(Rotary, Gradients) {
  const check::Tensors x = {{"x", check::random_tensor({1, 3, 2, 6}, 1)}};
  check::expect_gradients("rotary", {{"dims", "4"}, {"offset", "5"}}, x, "out");
  check::expect_gradients("rotary", {{"pairs", "interleaved"}}, x, "out");
}

// Llama 3.1's numbers: factor 8, low 1, high 4, length 8192, theta 500000, 128 channels.
TEST(Rotary, Llama3Frequencies) {
  double row[128] = {};
  RotaryArgs args{.x = View::dense(row, Dtype::f64, {1, 1, 1, 128})};
  args.theta = 500000;
  args.scaling = RotaryScaling::llama3;
  args.factor = 8;
  const auto plain = [](int64_t i) { return std::pow(500000.0, -2.0 * static_cast<double>(i) / 128); };
  EXPECT_EQ(rotary_frequency(args, 0), 1);                                  // 1304 turns
  EXPECT_DOUBLE_EQ(rotary_frequency(args, 28), plain(28));                  // 4.19 turns: above 4
  EXPECT_DOUBLE_EQ(rotary_frequency(args, 63), plain(63) / 8);              // 0.003 turns: below 1
  const double turns = 8192 * plain(32) / (2 * M_PI), s = (turns - 1) / 3;  // 1.84 turns: between
  EXPECT_GT(turns, 1);
  EXPECT_LT(turns, 4);
  EXPECT_DOUBLE_EQ(rotary_frequency(args, 32), ((1 - s) / 8 + s) * plain(32));
}

// A rotation by positions p and q leaves products that depend on p - q alone; lengths stay.
TEST(Rotary, ProductsDependOnDistance) {
  const check::Tensor x = check::random_tensor({1, 1, 1, 8}, 1), y = check::random_tensor({1, 1, 1, 8}, 2);
  const auto product = [&](int p, int q) {
    const check::Tensor a = check::out_of("rotary", {{"x", x}}, {{"offset", std::to_string(p)}});
    const check::Tensor b = check::out_of("rotary", {{"x", y}}, {{"offset", std::to_string(q)}});
    double total = 0;
    for (int64_t i = 0; i < 8; ++i) total += a.get(i) * b.get(i);
    return total;
  };
  EXPECT_NEAR(product(7, 3), product(1007, 1003), 1e-12);
  EXPECT_GT(std::fabs(product(7, 3) - product(8, 3)), 1e-3);
}

TEST(Rotary, Refusals) {
  const check::Tensors x = {{"x", check::random_tensor({1, 1, 1, 7}, 1)}};
  EXPECT_EQ(check::refusal("rotary", x), "rotary: dims is 7, expected an even number of at most 7 (the channels of x)");
  EXPECT_EQ(check::refusal("rotary", x, {{"dims", "8"}}),
            "rotary: dims is 8, expected an even number of at most 7 (the channels of x)");
  EXPECT_EQ(check::refusal("rotary", x, {{"dims", "6"}}), "");
}

}  // namespace
}  // namespace linnet
