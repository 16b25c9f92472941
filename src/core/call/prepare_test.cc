// Each way a call can be wrong and its sentence; packing, broadcasting, empty calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "core/call/toy.h"

namespace linnet {
namespace {

struct Wrong {
  const char* name;
  std::function<void(Toy&)> break_it;
  Code code;
  const char* sentence;
  Pass pass = Pass::forward;
};

const Wrong kWrong[] = {
    {"MissingInput", [](Toy& t) { t.args.k = View(); }, Code::bad_input, "toy: k is missing"},
    {"MissingOutput", [](Toy& t) { t.out.out = View(); }, Code::bad_input, "toy: out is missing"},
    {"Cuda", [](Toy& t) { t.args.k.device = Device::cuda; }, Code::bad_input,
     "toy: k is on a CUDA device, expected the CPU (same as q)"},
    {"CudaOutput", [](Toy& t) { t.out.out.device = Device::cuda; }, Code::bad_input,
     "toy: out is on a CUDA device, expected the CPU (same as q)"},
    {"IntegerQueries", [](Toy& t) { t.args.q.dtype = Dtype::i32; }, Code::bad_input,
     "toy: q is i32, expected f64, f32, bf16 or f16"},
    {"OtherDtype", [](Toy& t) { t.args.k.dtype = Dtype::f16; }, Code::bad_input, "toy: k is f16, expected f32 (same as q)"},
    {"ParameterDtype",
     [](Toy& t) {
       t.args.weight = t.dense(Dtype::f64, {4, 6});
     },
     Code::bad_input, "toy: weight is f64, expected f32"},
    {"ParameterDtypeOfHalf",
     [](Toy& t) {
       t.args.q.dtype = t.args.k.dtype = Dtype::bf16;
       t.args.weight = t.dense(Dtype::f16, {4, 6});
     },
     Code::bad_input, "toy: weight is f16, expected bf16 or f32"},
    {"StateDtype",
     [](Toy& t) {
       t.args.state = t.dense(Dtype::f64, {2, 4, 6});
     },
     Code::bad_input, "toy: state is f64, expected f32"},
    {"FloatLengths", [](Toy& t) { t.args.lengths = t.dense(Dtype::f32, {2}); }, Code::bad_input,
     "toy: lengths is f32, expected i32 or i64"},
    {"MaskDtype",
     [](Toy& t) {
       t.args.mask = t.dense(Dtype::f32, {2, 4});
     },
     Code::bad_input, "toy: mask is f32, expected u8"},
    {"OutputDtype", [](Toy& t) { t.out.out.dtype = Dtype::f64; }, Code::bad_input, "toy: out is f64, expected f32"},
    {"Rank", [](Toy& t) { t.args.k.rank = 3; }, Code::bad_input, "toy: k has shape [2, 4, 2], expected [B, S, Hkv, K]"},
    {"RankOfBroadcast",
     [](Toy& t) {
       t.args.bias = t.dense(Dtype::f32, {1, 1, 1, 1, 4});
     },
     Code::bad_input, "toy: bias has rank 5, expected at most 4, broadcastable to [B, H, T, S]"},
    {"Channels",
     [](Toy& t) {
       t.args.k = t.dense(Dtype::f32, {2, 4, 2, 5});
     },
     Code::bad_input, "toy: k has 5 channels in dimension 3 of [B, S, Hkv, K], expected 6 (same as q)"},
    {"NoChannels",
     [](Toy& t) {
       t.args.q = t.dense(Dtype::f32, {2, 4, 2, 0});
     },
     Code::bad_input, "toy: q has 0 channels in dimension 3 of [B, T, H, K], expected at least 1"},
    {"Batch",
     [](Toy& t) {
       t.args.k = t.dense(Dtype::f32, {3, 4, 2, 6});
     },
     Code::bad_input, "toy: k has 3 batch rows in dimension 0 of [B, S, Hkv, K], expected 2 (same as q)"},
    {"Broadcast",
     [](Toy& t) {
       t.args.bias = t.dense(Dtype::f32, {3, 3});
     },
     Code::bad_input, "toy: bias has 3 tokens in dimension 3 of [B, H, T, S], expected 4 (same as k)"},
    {"Multiple",
     [](Toy& t) {
       t.args.k = t.dense(Dtype::f32, {2, 4, 3, 6});
     },
     Code::bad_input, "toy: k has 3 heads, expected a divisor of 4 (the heads of q)"},
    {"ZeroDivisor",
     [](Toy& t) {
       t.args.k = t.dense(Dtype::f32, {2, 4, 0, 6});
     },
     Code::bad_input, "toy: k has 0 heads, expected a divisor of 4"},
    {"RuleByChoice",
     [](Toy& t) {
       t.args.width = Width::wide;
       t.args.weight = t.dense(Dtype::f32, {4, 6});
     },
     Code::bad_input, "toy: weight has 6 features in dimension 1 of [H, F], expected 14"},
    {"OutputShape",
     [](Toy& t) {
       t.out.out = t.dense(Dtype::f32, {2, 3, 4, 5});
     },
     Code::bad_input, "toy: out has shape [2, 3, 4, 5], expected [2, 3, 4, 6]"},
    {"OutputExpression",
     [](Toy& t) {
       t.out.total = t.dense(Dtype::f32, {2, 8});
     },
     Code::bad_input, "toy: total has shape [2, 8], expected [2, 7]"},
    {"NegativeSize", [](Toy& t) { t.args.k.size[1] = -4; }, Code::bad_input, "toy: k has a negative size, [2, -4, 2, 6]"},
    {"HugeSize",
     [](Toy& t) {
       t.args.q.size[0] = 0;
       t.args.q.size[3] = int64_t{1} << 60;
     },
     Code::bad_input, "more than 2^48 elements"},
    {"NoData", [](Toy& t) { t.args.k.data = nullptr; }, Code::bad_input, "toy: k has no data"},
    {"LastStride", [](Toy& t) { t.args.k.stride[3] = 2; }, Code::bad_input,
     "toy: k is not contiguous in its last dimension (stride 2), expected stride 1"},
    {"OutputLastStride", [](Toy& t) { t.out.out.stride[3] = 3; }, Code::bad_input,
     "toy: out is not contiguous in its last dimension (stride 3), expected stride 1"},
    {"WrittenOverlap", [](Toy& t) { t.out.out.stride[1] = 0; }, Code::bad_input,
     "toy: out has stride 0 in dimension 1, but it is written and may not overlap itself"},
    {"WrittenRowsOverlap", [](Toy& t) { t.out.out.stride[2] = 5; }, Code::bad_input,
     "toy: out has stride 5 in dimension 2, but it is written and may not overlap itself"},
    {"WrittenBackwardsOverlap", [](Toy& t) { t.out.out.stride[1] = -23; }, Code::bad_input,
     "toy: out has stride -23 in dimension 1, but it is written and may not overlap itself"},
    {"HugeStride", [](Toy& t) { t.args.k.stride[1] = int64_t{1} << 62; }, Code::bad_input,
     "toy: k has stride 4611686018427387904 in dimension 1, so that it spans more than 2^48 elements"},
    {"SmallestStride", [](Toy& t) { t.args.k.stride[0] = std::numeric_limits<int64_t>::min(); }, Code::bad_input,
     "toy: k has stride -9223372036854775808 in dimension 0, so that it spans more than 2^48 elements"},
    {"Misaligned", [](Toy& t) { t.args.k.data = static_cast<char*>(t.args.k.data) + 2; }, Code::bad_input,
     "toy: k is at an address that is no multiple of 4, the size of f32"},
    {"StateOverlap",
     [](Toy& t) {
       t.args.state = t.dense(Dtype::f32, {2, 4, 6});
       t.args.state.stride[0] = 0;
     },
     Code::bad_input, "toy: state has stride 0 in dimension 0, but it is written"},
    {"LengthTooLong",
     [](Toy& t) {
       t.args.lengths = t.whole({1, 5});
     },
     Code::bad_input, "toy: lengths[1] is 5, expected 0 to 4"},
    {"LengthNegative",
     [](Toy& t) {
       t.args.lengths = t.whole({-1, 2});
     },
     Code::bad_input, "toy: lengths[0] is -1, expected 0 to 4"},
    {"StartTooLarge",
     [](Toy& t) {
       t.args.starts = t.whole({0, 9});
     },
     Code::bad_input, "toy: starts[1] is 9, expected 0 to 4"},
    {"PackedBatch",
     [](Toy& t) {
       t.args.cu_seqlens = t.whole({0, 1, 3});
     },
     Code::bad_input, "toy: packed sequences need one batch row, q has 2"},
    {"RealOption", [](Toy& t) { t.args.cap = -1; }, Code::bad_input, "toy: cap is -1, expected at least 0"},
    {"NanOption", [](Toy& t) { t.args.cap = std::nan(""); }, Code::bad_input, "toy: cap is nan, expected at least 0"},
    {"MaybeOption", [](Toy& t) { t.args.scale = 9; }, Code::bad_input, "toy: scale is 9, expected -8 to 8"},
    {"CountOption", [](Toy& t) { t.args.rolls = 5; }, Code::bad_input, "toy: rolls is 5, expected 1 to 4"},
    {"WindowOption",
     [](Toy& t) {
       t.args.window = {-2, 0};
     },
     Code::bad_input, "toy: window is (-2, 0), expected values of at least -1"},
    {"ChoiceOption", [](Toy& t) { t.args.width = static_cast<Width>(3); }, Code::bad_input, "toy: width is 3, expected 0 to 2"},
    {"OwnCheck", [](Toy& t) { t.args.causal = true; }, Code::bad_input, "toy: causal needs as many keys as queries"},
    {"GradientWithoutInput", [](Toy& t) { t.grads.dbias = t.dense(Dtype::f32, {4}); }, Code::bad_input,
     "toy: dbias is given but bias is not", Pass::backward},
    {"GradientShape",
     [](Toy& t) {
       t.grads.dq = t.dense(Dtype::f32, {2, 3, 4, 7});
     },
     Code::bad_input, "toy: dq has shape [2, 3, 4, 7], expected [2, 3, 4, 6]", Pass::backward},
    {"GradientDtype",
     [](Toy& t) {
       t.grads.dq = t.dense(Dtype::f64, {2, 3, 4, 6});
     },
     Code::bad_input, "toy: dq is f64, expected f32", Pass::backward},
    {"IncomingShape",
     [](Toy& t) {
       t.grads.dout = t.dense(Dtype::f32, {2, 3, 4});
     },
     Code::bad_input, "toy: dout has shape [2, 3, 4], expected [2, 3, 4, 6]", Pass::backward},
    {"SavedMissing", [](Toy& t) { t.out.out = View(); }, Code::bad_input, "toy: out is missing", Pass::backward},
};

class OpWrong : public testing::TestWithParam<Wrong> {};
TEST_P(OpWrong, IsToldInASentence) {
  const Wrong& wrong = GetParam();
  Toy toy;
  ASSERT_TRUE(toy.run(wrong.pass).ok()) << toy.run(wrong.pass).message();
  wrong.break_it(toy);
  const Status status = toy.run(wrong.pass);
  EXPECT_EQ(status.code(), wrong.code) << status.message();
  EXPECT_NE(status.message().find(wrong.sentence), std::string::npos) << status.message();
}
INSTANTIATE_TEST_SUITE_P(all, OpWrong, testing::ValuesIn(kWrong), [](const auto& wrong) { return wrong.param.name; });

// Packed: q [T, H, K], or with B = 1.
struct PackedToy : Toy {
  PackedToy() {
    args.q = dense(Dtype::f32, {5, 4, 6});
    args.k = dense(Dtype::f32, {5, 2, 6});
    out.out = dense(Dtype::f32, {5, 4, 6});
    args.cu_seqlens = whole({0, 2, 2, 5});
  }
};

TEST(OpPacked, BatchDimensionIsAdded) {
  PackedToy toy;
  ASSERT_TRUE(toy.run().ok()) << toy.run().message();
  EXPECT_EQ(seen_args.q.rank, 4);
  EXPECT_EQ(seen_args.q.size[0], 1);
  EXPECT_EQ(seen_args.q.size[1], 5);
  toy.args.state = toy.dense(Dtype::f32, {3, 4, 6});  // N comes from the offsets
  EXPECT_TRUE(toy.run().ok()) << toy.run().message();
  toy.args.q = toy.dense(Dtype::f32, {1, 5, 4, 6});
  toy.args.k = toy.dense(Dtype::f32, {1, 5, 2, 6});
  toy.out.out = toy.dense(Dtype::f32, {1, 5, 4, 6});
  EXPECT_TRUE(toy.run().ok()) << toy.run().message();
}

TEST(OpPacked, BadOffsets) {
  const struct {
    std::vector<int64_t> offsets;
    const char* sentence;
  } table[] = {
      {{}, "toy: cu_seqlens is empty, expected N+1 entries"},
      {{1, 5}, "toy: cu_seqlens starts at 1, expected 0"},
      {{0, 3, 2, 5}, "toy: cu_seqlens decreases from 3 to 2 at entry 2, expected non-decreasing offsets"},
      {{0, 4}, "toy: cu_seqlens ends at 4, expected 5 (the number of tokens)"},
      {{0, 6}, "toy: cu_seqlens ends at 6, expected 5 (the number of tokens)"},
  };
  for (const auto& row : table) {
    PackedToy toy;
    toy.integers = row.offsets;
    toy.integers.push_back(0);  // keeps the pointer of an empty list valid
    toy.args.cu_seqlens = View::dense(toy.integers.data(), Dtype::i64, {static_cast<int64_t>(row.offsets.size())});
    EXPECT_EQ(toy.run().message(), row.sentence);
  }
  PackedToy toy;
  toy.args.state = toy.dense(Dtype::f32, {2, 4, 6});
  EXPECT_EQ(toy.run().message(), "toy: state has 2 sequences in dimension 0 of [N, H, F], expected 3 (same as cu_seqlens)");
}

TEST(OpBroadcast, KernelsSeeTheFullShape) {
  const struct {
    std::vector<int64_t> size;
    int64_t stride[4];
  } table[] = {
      {{4}, {0, 0, 0, 1}},       {{1}, {0, 0, 0, 0}},          {{3, 4}, {0, 0, 4, 1}},         {{3, 1}, {0, 0, 1, 0}},
      {{4, 1, 4}, {0, 4, 0, 1}}, {{2, 1, 1, 1}, {1, 0, 0, 0}}, {{2, 4, 3, 4}, {48, 12, 4, 1}},
  };
  for (const auto& row : table) {
    Toy toy;
    toy.args.bias = View::dense(toy.memory.data(), Dtype::f32, row.size.data(), static_cast<int>(row.size.size()));
    toy.grads.dbias = toy.args.bias;
    ASSERT_TRUE(toy.run(Pass::backward).ok()) << toy.run(Pass::backward).message();
    const int64_t full[] = {2, 4, 3, 4};
    EXPECT_EQ(seen_args.bias.rank, 4);
    EXPECT_EQ(seen_grads.dbias.rank, 4);  // leading dimensions added, sizes as given: sums over the others are the kernel's
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(seen_args.bias.size[i], full[i]);
      EXPECT_EQ(seen_args.bias.stride[i] * (full[i] > 1), row.stride[i]) << testing::PrintToString(row.size) << " " << i;
    }
  }
}

TEST(OpEmpty, IsLegal) {
  Toy toy;
  toy.args.q = View::dense(nullptr, Dtype::f32, {2, 0, 4, 6});
  toy.out.out = View::dense(nullptr, Dtype::f32, {2, 0, 4, 6});
  EXPECT_TRUE(toy.run().ok()) << toy.run().message();
  toy.args.q = View::dense(nullptr, Dtype::f32, {0, 3, 4, 6});
  toy.args.k = View::dense(nullptr, Dtype::f32, {0, 4, 2, 6});
  toy.out.out = View::dense(nullptr, Dtype::f32, {0, 3, 4, 6});
  EXPECT_TRUE(toy.run().ok()) << toy.run().message();
}

}  // namespace
}  // namespace linnet
