// The declaration machinery on an operator that has one of everything: each way a call can be wrong and its sentence, shape
// expressions, broadcasting, packing, and the choice of an implementation.
#include "core/op.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "core/isa.h"
#include "mechanisms/recurrence/recurrence.h"

namespace linnet {
namespace {

enum class Width : int32_t { same, wide, counted };

struct ToyArgs {
  View q, k, bias, weight, lengths, starts, cu_seqlens, mask, state;
  Maybe scale;
  bool causal = false;
  Window window;
  int64_t rolls = 1;
  double cap = 0.5;
  Width width = Width::same;
};
struct ToyOut {
  View out, total;
};
struct ToyGrads {
  View dout, dq, dbias;
};

// What the kernel saw, for the tests of normalisation.
ToyArgs seen_args;
ToyGrads seen_grads;

void toy_forward(const ToyArgs& args, const ToyOut&, const Launch&) { seen_args = args; }
void toy_backward(const ToyArgs& args, const ToyOut&, const ToyGrads& grads, const Launch&) {
  seen_args = args;
  seen_grads = grads;
}
int64_t no_workspace(const ToyArgs&, Pass, int) { return 0; }
int64_t some_workspace(const ToyArgs&, Pass, int workers) { return 100 * workers; }
std::string never() { return "it was never built"; }

Status check_toy(const ToyArgs& args, const Dims& dims) {
  if (args.causal && dims["T"] != dims["S"]) return bad_input("toy: causal needs as many keys as queries");
  return {};
}

const Op& toy_op() {
  using A = ToyArgs;
  using O = ToyOut;
  using G = ToyGrads;
  // clang-format off
  static const Op op =
      Declare<A, O, G>("toy", "toy", "one of everything")
          .input("q", &A::q, "B T H K", "queries").grad(&G::dq)
          .input("k", &A::k, "B S Hkv K", "keys")
          .input("bias", &A::bias, "B H T S", "added").element(Element::param).broadcast().optional().grad(&G::dbias)
          .input("weight", &A::weight, "H F", "learned").element(Element::param).optional()
          .input("lengths", &A::lengths, "B", "valid keys").element(Element::index).values(Values::lengths, "S").optional()
          .input("starts", &A::starts, "B", "first key").element(Element::index).values(Values::starts, "S").optional()
          .input("cu_seqlens", &A::cu_seqlens, "N+1", "offsets").element(Element::index).values(Values::offsets, "T").optional()
          .input("mask", &A::mask, "B S", "zeros are dropped").element(Element::mask).optional()
          .input("state", &A::state, "N H F", "carried").element(Element::acc).mutated().optional()
          .output("out", &O::out, "B T H F", "results").grad(&G::dout).saved()
          .output("total", &O::total, "N max(H,Hkv)*2-1", "sums").element(Element::acc).optional()
          .option("scale", &A::scale, -8, 8, "a factor")
          .option("causal", &A::causal, "no later key")
          .option("window", &A::window, "keys seen")
          .option("rolls", &A::rolls, 1, 4, "a count")
          .option("cap", &A::cap, 0, kAnyReal, "a limit")
          .option("width", &A::width, {"same", "wide", "counted"}, "of the results")
          .letter("N", "B")
          .letter_by("F", "width", {{"same", "K"}, {"wide", "(K+1)*2"}, {"counted", "K*rolls//2"}})
          .multiple("H", "Hkv")
          .check<check_toy>()
          .impl<toy_forward, toy_backward, no_workspace>("ref", always_available)
          .impl<toy_forward, nullptr, some_workspace>("portable", isa_available<0>)
          .impl<toy_forward, nullptr, no_workspace>("avx2_never", never);
  // clang-format on
  return op;
}

// A correct call: B 2, T 3, S 4, H 4, Hkv 2, K 6.
struct Toy {
  std::vector<double> memory = std::vector<double>(4096);
  std::vector<int64_t> integers;
  ToyArgs args;
  ToyOut out;
  ToyGrads grads;
  Toy() {
    args.q = dense(Dtype::f32, {2, 3, 4, 6});
    args.k = dense(Dtype::f32, {2, 4, 2, 6});
    out.out = dense(Dtype::f32, {2, 3, 4, 6});
  }
  View dense(Dtype dtype, std::initializer_list<int64_t> sizes) { return View::dense(memory.data(), dtype, sizes); }
  View whole(std::initializer_list<int64_t> values) {
    integers = values;
    return View::dense(integers.data(), Dtype::i64, {static_cast<int64_t>(integers.size())});
  }
  Status run(Pass pass = Pass::forward, const char* impl = "ref") const {
    return linnet::run(toy_op(), pass, &args, &out, &grads, {.executor = &inline_executor(), .impl = impl});
  }
  Status set(const char* option, const char* text) { return set_option(toy_op(), option, text, &args); }
};

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

TEST(OpExpressions, AreEvaluated) {
  ToyArgs args;
  args.rolls = 3;
  Dims dims;
  dims.set("K", 7, "q");
  dims.set("H", 2, "q");
  dims.set("Hkv", 5, "k");
  dims.set("huge", int64_t{1} << 62, "q");
  const struct {
    const char* expression;
    bool known;
    int64_t value;
  } table[] = {
      {"K", true, 7},
      {"12", true, 12},
      {"K+1", true, 8},
      {"1+K*2", true, 15},
      {"(1+K)*2", true, 16},
      {"K*K//2", true, 24},
      {"K-H-1", true, 4},
      {"max(H,Hkv)", true, 5},
      {"max(H*9,K)", true, 18},
      {"max(1,max(2,3))", true, 3},
      {"K*rolls", true, 21},
      {"H*causal", true, 0},
      {"F", true, 7},
      {"F*2", true, 14},
      {"unknown", false, 0},
      {"K//causal", false, 0},
      {"K+", false, 0},
      {"(K", false, 0},
      {"K K", false, 0},
      {"", false, 0},
      {"huge*huge", false, 0},
      {"huge+huge", false, 0},
      {"99999999999999999999", false, 0},
      {"2x", false, 0},
      {"cap", false, 0},
  };
  for (const auto& row : table) {
    int64_t value = -1;
    EXPECT_EQ(evaluate(row.expression, toy_op(), &args, dims, &value), row.known) << row.expression;
    EXPECT_EQ(row.known ? value : 0, row.value) << row.expression;
  }
  args.width = Width::counted;
  int64_t value;
  ASSERT_TRUE(evaluate("F", toy_op(), &args, dims, &value));
  EXPECT_EQ(value, 10);  // 7 * 3 // 2
}

TEST(OpOptions, FromTextAndBack) {
  const struct {
    const char *option, *text, *back;  // back: as printed, or the sentence
    bool ok;
  } table[] = {
      {"scale", "0.25", "0.25", true},
      {"scale", "none", "none", true},
      {"scale", "-8", "-8", true},
      {"scale", "8.5", "toy: scale is 8.5, expected -8 to 8", false},
      {"scale", "1x", "toy: scale is '1x', expected a number or none", false},
      {"causal", "1", "1", true},
      {"causal", "true", "1", true},
      {"causal", "yes", "toy: causal is 'yes', expected 0 or 1", false},
      {"window", "4,-1", "4,-1", true},
      {"window", "4", "toy: window is '4', expected two whole numbers such as 4,-1", false},
      {"window", "4,-2", "toy: window is (4, -2), expected values of at least -1 (-1: unlimited)", false},
      {"rolls", "4", "4", true},
      {"rolls", "4.0", "toy: rolls is '4.0', expected a whole number", false},
      {"rolls", "", "toy: rolls is '', expected a whole number", false},
      {"cap", "1e-3", "0.001", true},
      {"cap", "nan", "toy: cap is nan, expected at least 0", false},
      {"cap", "inf", "toy: cap is inf, expected a finite number", false},
      {"width", "wide", "wide", true},
      {"width", "1", "toy: width is '1', expected one of same, wide, counted", false},
      {"height", "1", "toy: there is no option 'height'", false},
  };
  for (const auto& row : table) {
    Toy toy;
    const Status status = toy.set(row.option, row.text);
    EXPECT_EQ(status.ok(), row.ok) << row.option << "=" << row.text;
    const OptionDecl* option = toy_op().find_option(row.option);
    EXPECT_EQ(row.ok ? option_text(*option, &toy.args) : status.message(), row.back);
  }
}

class Environment {  // set for one scope
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }

 private:
  const char* name_;
};

std::string chosen(const char* impl = nullptr, Pass pass = Pass::forward) {
  const Impl* found;
  const Status status = choose_impl(toy_op(), pass, {.impl = impl}, &found);
  return status.ok() ? found->name : status.message();
}

TEST(OpChoice, BestUsableUnlessForced) {
  EXPECT_EQ(chosen(), "portable");
  EXPECT_EQ(chosen("ref"), "ref");
  EXPECT_EQ(chosen("best"), "toy: there is no implementation 'best', expected one of ref, portable, avx2_never");
  EXPECT_EQ(chosen("avx2_never"), "toy: implementation avx2_never cannot run: it was never built");
  EXPECT_EQ(chosen("portable", Pass::backward), "toy: implementation portable cannot run: there is no backward");
  EXPECT_EQ(chosen(nullptr, Pass::backward), "ref");  // the best that has one
  const struct {
    const char *impl, *isa, *expected;
  } table[] = {
      {"ref", nullptr, "ref"},
      {"toy:ref", nullptr, "ref"},
      {"softmax:ref", nullptr, "portable"},
      {"softmax:ref,toy:ref", nullptr, "ref"},
      {"toys:ref", nullptr, "LINNET_IMPL: there is no operator 'toys'"},
      {"portable,toy:ref", nullptr, "ref"},
      {"toy:fast", nullptr, "toy: there is no implementation 'fast', expected one of ref, portable, avx2_never"},
      {"avx2_never", nullptr, "toy: implementation avx2_never cannot run: it was never built"},
      {"", nullptr, "portable"},
      {nullptr, "portable", "portable"},
      {nullptr, "", "portable"},
      {nullptr, "sse9", "LINNET_ISA is 'sse9', expected portable, avx2 or avx512"},
  };
  for (const auto& row : table) {
    std::vector<Environment*> set;
    if (row.impl != nullptr) set.push_back(new Environment("LINNET_IMPL", row.impl));
    if (row.isa != nullptr) set.push_back(new Environment("LINNET_ISA", row.isa));
    EXPECT_EQ(chosen(), row.expected);
    EXPECT_EQ(chosen("ref"), "ref");  // what the caller names wins
    for (const Environment* each : set) delete each;
  }
}

// Every instruction set that this machine lacks is refused with its reason, every other one limits the choice.
TEST(OpChoice, InstructionSets) {
  for (const Isa isa : kIsas) {
    const Environment set("LINNET_ISA", isa_name(isa));
    Isa choice;
    const Status status = isa_choice(&choice);
    const std::string missing = isa_missing(isa);
    EXPECT_EQ(status.ok(), missing.empty());
    if (missing.empty()) {
      EXPECT_EQ(choice, isa);
    } else {
      EXPECT_EQ(status.code(), Code::impossible);
      EXPECT_EQ(status.message(), "LINNET_ISA=" + std::string(isa_name(isa)) + ": " + missing);
    }
  }
}

TEST(OpWorkspace, IsAskedForInAdvance) {
  Toy toy;
  ThreadPool pool(3);
  Context context = {.executor = &pool, .impl = "portable"};
  int64_t bytes = 0;
  ASSERT_TRUE(workspace_bytes(toy_op(), Pass::forward, &toy.args, context, &bytes).ok());
  EXPECT_EQ(bytes, 3 * 100 + 128);
  Status status = run(toy_op(), Pass::forward, &toy.args, &toy.out, &toy.grads, context);
  EXPECT_EQ(status.message(),
            "toy: the workspace has 0 bytes, expected at least 428 (ask toy_workspace; in C linnet_workspace)");
  std::vector<char> memory(static_cast<size_t>(bytes));
  context.workspace = memory.data();
  context.workspace_bytes = bytes - 1;
  status = run(toy_op(), Pass::forward, &toy.args, &toy.out, &toy.grads, context);
  EXPECT_EQ(status.message(),
            "toy: the workspace has 427 bytes, expected at least 428 (ask toy_workspace; in C linnet_workspace)");
  context.workspace_bytes = bytes;
  EXPECT_TRUE(run(toy_op(), Pass::forward, &toy.args, &toy.out, &toy.grads, context).ok());
  toy.args.k = View();
  EXPECT_EQ(workspace_bytes(toy_op(), Pass::forward, &toy.args, context), 0);
}

// A struct may serve several operators. Each of its members is declared, or declared absent: a gap larger than what aligns the
// next member would be a member that nobody checks.
TEST(AllOps, EveryMemberOfTheirStructsIsDeclared) {
  const auto bytes_of = [](OptionKind kind) -> size_t {
    switch (kind) {
      case OptionKind::real: return sizeof(double);
      case OptionKind::maybe_real: return sizeof(Maybe);
      case OptionKind::integer: return sizeof(int64_t);
      case OptionKind::boolean: return sizeof(bool);
      case OptionKind::choice: return sizeof(int32_t);
      case OptionKind::window: return sizeof(Window);
      case OptionKind::sizes: return sizeof(Sizes);
    }
    return 0;
  };
  const auto expect_covered = [](std::vector<std::pair<size_t, size_t>> members, size_t bytes, const std::string& what) {
    std::sort(members.begin(), members.end());
    size_t end = 0;
    for (const auto& [offset, size] : members) {
      EXPECT_GE(offset, end) << what;
      EXPECT_LT(offset - end, size < 8 ? size : 8) << what << ": bytes " << end << " to " << offset;
      end = offset + size;
    }
    EXPECT_LT(bytes - end, 8) << what << ": bytes " << end << " to " << bytes;
  };
  for (const Op* op : all_ops()) {
    std::vector<std::pair<size_t, size_t>> args, out, grads;
    for (const TensorDecl& decl : op->inputs) args.emplace_back(decl.offset, sizeof(View));
    for (const OptionDecl& option : op->options) args.emplace_back(option.offset, bytes_of(option.kind));
    for (const AbsentDecl& absent : op->absent) args.emplace_back(absent.offset, absent.bytes);
    for (const TensorDecl& decl : op->outputs) out.emplace_back(decl.offset, sizeof(View));
    for (const auto* list : {&op->inputs, &op->outputs}) {
      for (const TensorDecl& decl : *list) {
        if (decl.differentiable) grads.emplace_back(decl.grad_offset, sizeof(View));
      }
    }
    for (const AbsentDecl& absent : op->absent_gradients) grads.emplace_back(absent.offset, absent.bytes);
    expect_covered(args, op->args_bytes, op->name + " arguments");
    expect_covered(out, op->out_bytes, op->name + " results");
    expect_covered(grads, op->grads_bytes, op->name + " gradients");
  }
}

// Members of the shared struct that a member of the family does not have.
TEST(AllOps, UndeclaredMembersAreRefused) {
  std::vector<float> memory(64);
  const auto tensor = [&](std::initializer_list<int64_t> sizes) { return View::dense(memory.data(), Dtype::f32, sizes); };
  RecurrenceArgs args;
  args.q = args.k = args.v = tensor({1, 2, 1, 4});
  args.beta = tensor({1, 2, 1});
  const View out = tensor({1, 2, 1, 4});
  const RecurrenceOut results = {.out = out, .final_state = {}};
  std::vector<char> workspace(1 << 20);
  const Context context = {.workspace = workspace.data(), .workspace_bytes = 1 << 20, .impl = "ref"};
  const auto message = [&](const char* op) {
    return run(*find_op(op), Pass::forward, &args, &results, nullptr, context).message();
  };
  EXPECT_EQ(message("delta"), "");
  EXPECT_EQ(message("decay"), "decay: beta is not an input");
  EXPECT_EQ(message("gla"), "gla: beta is not an input");
  args.g = View::dense(nullptr, Dtype::f32, {3});
  EXPECT_EQ(message("delta"), "delta: g is not an input");
  args.g = tensor({1, 2, 1});
  EXPECT_EQ(message("delta"), "delta: g is not an input");
  EXPECT_EQ(message("gated_delta"), "");
  args.g_head = tensor({1});
  EXPECT_EQ(message("gated_delta"), "gated_delta: g_head is not an input");
  args.g_head = args.beta = View();
  EXPECT_EQ(message("decay"), "");
  args.double_beta = true;
  EXPECT_EQ(message("decay"), "decay: double_beta is not an option");
  args.double_beta = false;
  args.g = View();
  args.beta = tensor({1, 2, 1});
  const RecurrenceGrads grads = {.dout = out, .dg = tensor({1, 2, 1})};
  EXPECT_EQ(run(*find_op("delta"), Pass::backward, &args, &results, &grads, context).message(), "delta: dg is not a gradient");
}

// LINNET_CHECK=1 and check_ranges: values that make sense for no call.
TEST(Ranges, AreToldInASentence) {
  std::vector<float> k(2 * 4, 0.5F), beta(2, 1), g(2, -1), long_k(2 * 4, 2);
  RecurrenceArgs good;
  good.q = good.k = good.v = View::dense(k.data(), Dtype::f32, {1, 2, 1, 4});
  good.beta = View::dense(beta.data(), Dtype::f32, {1, 2, 1});
  good.g = View::dense(g.data(), Dtype::f32, {1, 2, 1});
  const Op& op = *find_op("gated_delta");
  EXPECT_EQ(check_ranges(op, &good).message(), "");
  const auto message = [&](const std::function<void(RecurrenceArgs*)>& change) {
    RecurrenceArgs args = good;
    change(&args);
    return check_ranges(op, &args).message();
  };
  EXPECT_EQ(
      message([&](RecurrenceArgs* a) { a->k.data = long_k.data(); }),
      "gated_delta: k[0][0][0] has norm 4, expected at most 1; divide each row by its norm, or set l2_norm: longer keys let "
      "the state grow without limit");
  EXPECT_EQ(message([&](RecurrenceArgs* a) { a->k.data = long_k.data(), a->l2_norm = true; }), "");
  EXPECT_EQ(
      message([&](RecurrenceArgs* a) { a->g.data = beta.data(), a->beta.data = g.data(); }),
      "gated_delta: g[0][0][0] is 1, expected the natural logarithm of a decay, at most 0; all values lie in [0, 1]: is it the "
      "decay itself? pass its logarithm");
  EXPECT_EQ(message([&](RecurrenceArgs* a) { a->g.data = long_k.data(); }),
            "gated_delta: g[0][0][0] is 2, expected the natural logarithm of a decay, at most 0");
  EXPECT_EQ(message([&](RecurrenceArgs* a) { a->beta.data = g.data(); }),
            "gated_delta: beta[0][0][0] is -1, expected a write strength in [0, 2]; is it the log decay g?");
  EXPECT_EQ(message([&](RecurrenceArgs* a) { a->beta.data = long_k.data(); }), "");
  EXPECT_EQ(message([&](RecurrenceArgs* a) { a->beta.data = long_k.data(), a->double_beta = true; }),
            "gated_delta: beta[0][0][0] is 2, expected a write strength in [0, 1]");
  RecurrenceArgs args = good;
  args.g.data = beta.data();
  std::vector<float> result(2 * 4);
  const RecurrenceOut out = {.out = View::dense(result.data(), Dtype::f32, {1, 2, 1, 4}), .final_state = {}};
  std::vector<char> workspace(1 << 20);
  const auto run_it = [&] {
    return run(op, Pass::forward, &args, &out, nullptr,
               {.workspace = workspace.data(), .workspace_bytes = 1 << 20, .impl = "ref"});
  };
  EXPECT_TRUE(run_it().ok());
  setenv("LINNET_CHECK", "1", 1);
  EXPECT_EQ(run_it().code(), Code::bad_input);
  setenv("LINNET_CHECK", "0", 1);
  EXPECT_TRUE(run_it().ok());
  unsetenv("LINNET_CHECK");
}

// What every declaration has to say: the surfaces are made from it.
TEST(AllOps, DeclarationsAreComplete) {
  for (const Op* op : all_ops()) {
    EXPECT_EQ(find_op(op->name), op);
    const bool elementwise = op->mechanism == "activation";  // one folder and page for activation, glu and add
    EXPECT_TRUE(elementwise || op->name == op->mechanism || op->name.rfind(op->mechanism + "_", 0) == 0) << op->name;
    EXPECT_FALSE(op->summary.empty()) << op->name;
    EXPECT_FALSE(op->equation.empty()) << op->name;
    EXPECT_NE(op->cost, nullptr) << op->name;
    ASSERT_FALSE(op->impls.empty()) << op->name;
    EXPECT_EQ(op->impls.front().name, "ref") << op->name;
    EXPECT_TRUE(op->decode.empty() || find_op(op->decode) != nullptr) << op->name;
    EXPECT_EQ(op->inputs.front().element, Element::io) << op->name;
    for (const auto* list : {&op->inputs, &op->outputs}) {
      for (const TensorDecl& decl : *list) EXPECT_FALSE(decl.doc.empty()) << op->name << " " << decl.name;
    }
    for (const OptionDecl& option : op->options) EXPECT_FALSE(option.doc.empty()) << op->name << " " << option.name;
  }
  EXPECT_EQ(find_op("nothing"), nullptr);
}

}  // namespace
}  // namespace linnet
