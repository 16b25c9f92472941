// monarch: agreement with the reference in every implementation and dtype, the relations of the mechanism's page, decoding,
// refusals.
#include "monarch.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "check/agreement.h"
#include "check/check.h"
#include "check/tensor.h"
#include "core/op.h"
#include "mechanisms/softmax/softmax.h"

namespace linnet {
namespace {

using check::random_tensor;
using check::Tensor;

const char* const kLines[] = {
    "monarch B=2 T=64 S=64 H=2 K=16 V=24 pass=bwd",
    "monarch B=1 T=197 S=197 H=2 K=20 V=13 block=14 pad=pre steps=2 scale=0.2 pass=bwd",
    "monarch B=2 T=90 S=90 H=1 K=16 V=16 block=9 steps=3 scale=0.1 with=mask values=garbage,masked pass=bwd",
    "monarch B=1 T=300 S=300 H=1 K=16 V=16 block=130 pass=bwd threads=3",
    "monarch B=1 T=150 S=150 H=1 K=16 V=16 block=1 steps=2 scale=0.1 pass=bwd",
    "monarch B=1 T=150 S=150 H=2 K=16 V=8 block=2 pass=bwd",
    "monarch B=1 T=201 S=201 H=2 K=16 V=8 block=12 causal=1 pass=bwd threads=2",
    "monarch B=1 T=700 S=700 H=1 K=8 V=8 block=5 causal=1 pass=bwd",
    "monarch B=1 T=100 S=100 H=1 K=8 V=8 block=70 causal=1 pass=bwd",
    "monarch B=1 T=100 S=100 H=1 K=8 V=8 scale=1000 pass=bwd",
    // One visible key: no query has a gradient.
    "monarch B=2 T=1 S=1 H=4 K=31 V=31 scale=1000 causal=1 skip=dlse pass=bwd seed=566139",
    "monarch B=12 T=1 S=1 H=2 K=24 V=16 block=16 scale=1000 causal=1 skip=dlse pass=bwd seed=821873",
    // Logits of hundreds and thousands in two steps, and one weight of nearly 1 in every row.
    "monarch B=2 T=20 S=20 H=4 K=5 V=128 steps=2 pad=pre scale=1000 pass=bwd threads=7 seed=296001",
    "monarch B=2 T=63 S=63 H=2 K=128 V=128 pad=pre scale=1000 skip=dlse,dk pass=bwd strided=1 values=mixed seed=532710",
    "monarch_tiled B=3 T=128 S=128 H=4 K=32 V=96 tile_rows=101 tile_cols=4 steps=2 group=2 scale=20 values=garbage seed=256386",
    "monarch B=1 T=1 S=1 H=1 K=4 V=4 pass=bwd",
    "monarch B=1 T=0 S=0 H=2 K=4 V=4 steps=2 pass=bwd",
    "monarch B=0 T=9 S=9 H=2 K=4 V=4 pass=bwd",
    "monarch_tiled B=1 T=50 S=70 H=2 K=16 V=8 tile_rows=3 tile_cols=4 pass=bwd",
    "monarch_tiled B=1 T=60 S=70 H=2 K=16 V=8 tile_rows=3 tile_cols=4 group=2 steps=2 scale=0.2 with=mask values=garbage "
    "pass=bwd",
    "monarch_tiled B=1 T=9 S=70 H=1 K=16 V=8 tile_rows=100 tile_cols=7 pass=bwd",
    "monarch_tiled B=1 T=0 S=7 H=1 K=4 V=4 tile_cols=2 pass=bwd",
    "monarch_decode B=2 T=1 H=2 K=16 V=8 block=4 M=5",
    "monarch_decode B=1 T=8 H=3 K=5 V=7 block=3 M=9 threads=2 seed=3",
};

TEST(Monarch, AgreesWithTheReference) { check::expect_agreement({std::begin(kLines), std::end(kLines)}); }

template <class Args, class Out>
Status call(const Op& op, const Args& args, const Out& out) {
  int64_t bytes = 0;
  const Status status = workspace_bytes(op, Pass::forward, &args, {}, &bytes);
  if (!status.ok()) return status;
  std::vector<char> memory(static_cast<size_t>(bytes));
  return run(op, Pass::forward, &args, &out, nullptr, {.workspace = memory.data(), .workspace_bytes = bytes});
}

struct Case {
  Tensor q, k, v, mask;
  Case(int64_t T, uint64_t seed)
      : q(random_tensor({1, T, 2, 8}, seed)),
        k(random_tensor({1, T, 2, 8}, seed + 1)),
        v(random_tensor({1, T, 2, 6}, seed + 2)) {}
  Tensor out(MonarchArgs options, Tensor* lse = nullptr) const {
    options.q = q.view(), options.k = k.view(), options.v = v.view(), options.mask = mask.view();
    Tensor result(Dtype::f64, {1, q.sizes[1], 2, 6});
    const Status status = call(monarch_op(), options, MonarchOut{.out = result.view(), .lse = lse ? lse->view() : View()});
    EXPECT_TRUE(status.ok()) << status.message();
    return result;
  }
  Tensor exact(bool causal, Tensor* lse = nullptr) const {
    Tensor result(Dtype::f64, {1, q.sizes[1], 2, 6});
    const SoftmaxArgs args{.q = q.view(), .k = k.view(), .v = v.view(), .causal = causal};
    EXPECT_TRUE(call(softmax_op(), args, SoftmaxOut{.out = result.view(), .lse = lse ? lse->view() : View()}).ok());
    return result;
  }
};
double difference(const Tensor& a, const Tensor& b) {
  double most = 0;
  for (int64_t i = 0; i < a.count(); ++i) most = std::max(most, std::abs(a.get(i) - b.get(i)));
  return most;
}

TEST(Monarch, IsSoftmaxWhereOneFactorIsTrivial) {
  const Case c(37, 5);
  EXPECT_LT(difference(c.out({.block = 1, .steps = 2}), c.exact(false)), 1e-12);
  EXPECT_LT(difference(c.out({.block = 37, .steps = 3}), c.exact(false)), 1e-12);
  EXPECT_LT(difference(c.out({.block = 100}), c.exact(false)), 1e-12);
  EXPECT_LT(difference(c.out({.block = 40, .causal = true}), c.exact(true)), 1e-12);
}

TEST(Monarch, OneStepIsExactWhenQueriesDependOnTheSlotOnly) {
  Case c(36, 9);
  for (int64_t t = 6; t < 36; ++t) {
    for (int64_t i = 0; i < 16; ++i) c.q.set(t * 16 + i, c.q.get(t % 6 * 16 + i));
  }
  EXPECT_LT(difference(c.out({.block = 6}), c.exact(false)), 1e-12);
}

TEST(Monarch, TheNormaliserIsALowerBound) {
  const Case c(50, 11);
  Tensor bound(Dtype::f64, {1, 50, 2}), exact(Dtype::f64, {1, 50, 2});
  for (const bool causal : {false, true}) {
    c.out({.block = 7, .causal = causal}, &bound);
    c.exact(causal, &exact);
    for (int64_t i = 0; i < bound.count(); ++i) EXPECT_LE(bound.get(i), exact.get(i) + 1e-12);
  }
}

TEST(Monarch, BlocksOfMaskedTokensChangeNothing) {
  const Case c(24, 13);
  Case longer(24 + 12, 13);
  longer.mask = Tensor(Dtype::u8, {1, 36});
  for (int64_t t = 0; t < 36; ++t) {
    longer.mask.set(t, t < 24 ? 1 : 0);
    for (int64_t i = 0; i < 16; ++i) {
      longer.q.set(t * 16 + i, t < 24 ? c.q.get(t * 16 + i) : 0.5);
      longer.k.set(t * 16 + i, t < 24 ? c.k.get(t * 16 + i) : std::numeric_limits<double>::quiet_NaN());
    }
    for (int64_t i = 0; i < 12; ++i)
      longer.v.set(t * 12 + i, t < 24 ? c.v.get(t * 12 + i) : std::numeric_limits<double>::infinity());
  }
  for (const int64_t steps : {1, 3}) {
    const Tensor want = c.out({.block = 6, .steps = steps}), got = longer.out({.block = 6, .steps = steps});
    for (int64_t i = 0; i < want.count(); ++i) ASSERT_NEAR(got.get(i), want.get(i), 1e-12) << steps << " " << i;
  }
}

TEST(Monarch, DecodingIsTheCausalForm) {
  const int64_t T = 23, block = 4, M = 6;
  const Case c(T, 17);
  const Tensor whole = c.out({.block = block, .causal = true});
  const Tensor q_block(Dtype::f64, {1, block, 2, 8}), k_block(Dtype::f64, {1, block, 2, 8}),
      v_block(Dtype::f64, {1, block, 2, 6});
  const Tensor a(Dtype::f64, {1, 2, block, M, 8}), y(Dtype::f64, {1, 2, block, M, 6}), e(Dtype::f64, {1, 2, block, M});
  const Tensor lengths(Dtype::i64, {1});
  for (const auto& [begin, end] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {1, 2}, {2, 9}, {9, 12}, {12, 13}, {13, T}}) {
    const Tensor q = check::tokens(c.q, begin, end), k = check::tokens(c.k, begin, end), v = check::tokens(c.v, begin, end);
    Tensor part(Dtype::f64, {1, end - begin, 2, 6});
    const MonarchDecodeArgs args{.q = q.view(),
                                 .k = k.view(),
                                 .v = v.view(),
                                 .q_block = q_block.view(),
                                 .k_block = k_block.view(),
                                 .v_block = v_block.view(),
                                 .a = a.view(),
                                 .c = e.view(),
                                 .y = y.view(),
                                 .lengths = lengths.view()};
    ASSERT_TRUE(call(monarch_decode_op(), args, MonarchOut{.out = part.view()}).ok());
    EXPECT_LT(difference(part, check::tokens(whole, begin, end)), 1e-12) << begin;
  }
}

TEST(Monarch, RefusesInOneSentence) {
  const struct {
    const char *line, *says;
  } table[] = {
      {"monarch T=6 S=5", "monarch: k has 5 tokens, expected 6 (same as q"},
      {"monarch T=6 S=6 block=0", "monarch: block is 0, expected at least 1"},
      {"monarch T=6 S=6 steps=0", "monarch: steps is 0, expected 1 to 1000"},
      {"monarch T=6 S=6 causal=1 steps=2", "monarch: steps is 2, expected 1 when causal"},
      {"monarch T=6 S=6 causal=1 pad=pre", "monarch: pad is pre, expected post when causal"},
      {"monarch T=6 S=6 causal=1 with=mask", "monarch: mask is given, but the causal form has no mask"},
      {"monarch_tiled T=6 S=6 tile_rows=0", "monarch_tiled: tile_rows is 0, expected at least 1"},
      {"monarch_tiled T=6 S=6 causal=1", "monarch_tiled: causal is 1, expected 0"},
      {"monarch_decode T=9 block=2 M=2", "no room for 9 more"},
  };
  for (const auto& row : table) {
    check::Result result;
    const Status status = check::run_line(row.line, &result);
    EXPECT_EQ(status.code(), Code::bad_input) << row.line;
    EXPECT_NE(status.message().find(row.says), std::string::npos) << row.line << ": " << status.message();
  }
  Case c(6, 3);
  c.mask = random_tensor({1, 6}, 2, Dtype::f32);
  Tensor result(Dtype::f64, {1, 6, 2, 6});
  const MonarchArgs args{.q = c.q.view(), .k = c.k.view(), .v = c.v.view(), .mask = c.mask.view()};
  EXPECT_EQ(call(monarch_op(), args, MonarchOut{.out = result.view()}).message(), "monarch: mask is f32, expected u8");
}

}  // namespace
}  // namespace linnet
