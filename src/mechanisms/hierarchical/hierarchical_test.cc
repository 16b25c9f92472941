// hierarchical: agreement with the reference in every implementation and dtype, relations of the mechanism's page, decoding,
// refusals.
#include "hierarchical.h"

#include <gtest/gtest.h>

#include <cmath>
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
    "hierarchical B=2 T=70 H=2 K=16 V=24 pass=bwd",
    "hierarchical B=1 T=70 H=3 K=20 V=13 include_self=1 arity=3 pass=bwd threads=2",
    "hierarchical B=2 T=200 H=2 K=16 V=16 branching=2,4,8 include_self=1 causal=1 tie=prefix pass=bwd",
    "hierarchical B=2 T=90 nodes=130 H=2 K=16 V=16 E=4 with=parent,pos,mask values=mixed,garbage pass=bwd",
    "hierarchical B=1 T=150 H=1 K=8 V=8 arity=200 include_self=1 pass=bwd",
    "hierarchical B=2 T=70 H=2 K=16 V=24 tie=row pass=bwd",
    "hierarchical B=2 T=90 nodes=130 H=2 K=16 V=16 E=4 tie=row include_self=1 with=parent,pos,mask values=mixed,garbage "
    "pass=bwd",
    "hierarchical B=1 T=140 H=2 K=16 V=16 tie=row causal=1 branching=3,5 pass=bwd",
    "hierarchical B=1 T=150 H=1 K=8 V=8 tie=row arity=200 pass=bwd",
    "hierarchical B=2 T=70 H=2 K=16 V=24 tie=prefix causal=1 include_self=1 arity=3 pass=bwd",
    "hierarchical B=2 T=90 nodes=130 H=2 K=16 V=16 E=4 tie=prefix causal=1 include_self=1 with=parent,pos,mask values=garbage "
    "pass=bwd",
    "hierarchical B=1 T=700 nodes=877 H=1 K=16 V=16 E=4 arity=5 with=pos,mask values=garbage pass=bwd threads=2",  // all
                                                                                                                   // threads on
                                                                                                                   // one head
    "hierarchical B=2 T=800 nodes=1300 H=1 K=8 V=24 with=parent include_self=1 pass=bwd threads=3",
    "hierarchical B=1 T=700 H=1 K=16 V=16 tie=row pass=bwd threads=2",
    "hierarchical B=2 T=1 H=2 K=4 V=4 pass=bwd",
    "hierarchical B=2 T=1 nodes=1 H=2 K=4 V=4 E=3 include_self=1 with=parent,pos pass=bwd",
    "hierarchical B=1 T=1 nodes=1 H=3 K=1 V=1 E=96 include_self=1 with=pos pass=bwd seed=752370",
    "hierarchical B=2 T=65 nodes=110 H=1 K=96 V=96 E=96 include_self=1 with=parent,pos pass=bwd seed=125570",  // own logits
    "hierarchical B=1 T=63 nodes=124 H=1 K=64 V=64 E=64 tie=row include_self=1 with=parent,pos pass=bwd seed=786541",
    "hierarchical B=3 T=32 nodes=44 H=1 K=96 V=64 E=31 tie=prefix include_self=1 causal=1 with=parent,pos pass=bwd seed=145746",
    "hierarchical B=1 T=0 H=2 K=4 V=4 pass=bwd",
    "hierarchical B=1 T=40 H=1 K=8 V=8 scale=1000 include_self=1 pass=bwd",
    "hierarchical_decode B=2 T=1 H=2 K=16 V=8 levels=3 width=4",
    "hierarchical_decode B=2 T=5 H=2 K=5 V=7 levels=3 width=64 with=close threads=3 seed=2",
    "hierarchical_decode B=2 T=3 H=2 K=16 V=8 levels=2 width=64 tie=row include_self=0 seed=4",
};

TEST(Hierarchical, AgreesWithTheReference) { check::expect_agreement({std::begin(kLines), std::end(kLines)}); }

template <class Args, class Out>
Status call(const Op& op, const Args& args, const Out& out) {
  int64_t bytes = 0;
  const Status status = workspace_bytes(op, Pass::forward, &args, {}, &bytes);
  if (!status.ok()) return status;
  std::vector<char> memory(static_cast<size_t>(bytes));
  return run(op, Pass::forward, &args, &out, nullptr, {.workspace = memory.data(), .workspace_bytes = bytes});
}
Tensor integers(const std::vector<int64_t>& values) {
  Tensor t(Dtype::i64, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) t.set(static_cast<int64_t>(i), static_cast<double>(values[i]));
  return t;
}
double difference(const Tensor& a, const Tensor& b) {
  double most = 0;
  for (int64_t i = 0; i < a.count(); ++i) most = std::max(most, std::abs(a.get(i) - b.get(i)));
  return most;
}

struct Case {
  Tensor q, k, v;
  Case(int64_t T, uint64_t seed)
      : q(random_tensor({1, T, 2, 8}, seed)),
        k(random_tensor({1, T, 2, 8}, seed + 1)),
        v(random_tensor({1, T, 2, 6}, seed + 2)) {}
  Tensor out(HierarchicalArgs options, Tensor* kl = nullptr) const {
    options.q = q.view(), options.k = k.view(), options.v = v.view();
    Tensor result(Dtype::f64, {1, q.sizes[1], 2, v.sizes[3]});
    const Status status =
        call(hierarchical_op(), options, HierarchicalOut{.out = result.view(), .energy = {}, .kl = kl ? kl->view() : View()});
    EXPECT_TRUE(status.ok()) << status.message();
    return result;
  }
};
Sizes sizes(std::initializer_list<int64_t> list) {
  Sizes result;
  for (const int64_t x : list) result.value[result.count++] = x;
  return result;
}

TEST(Hierarchical, AFlatTreeIsSoftmax) {
  const Case c(30, 5);
  for (const bool causal : {false, true}) {
    Tensor exact(Dtype::f64, {1, 30, 2, 6});
    const SoftmaxArgs softmax{.q = c.q.view(), .k = c.k.view(), .v = c.v.view(), .causal = causal};
    ASSERT_TRUE(call(softmax_op(), softmax, SoftmaxOut{.out = exact.view(), .lse = {}}).ok());
    for (const HierarchicalTie tie : {HierarchicalTie::block, HierarchicalTie::row, HierarchicalTie::prefix}) {
      if (tie == (causal ? HierarchicalTie::block : HierarchicalTie::prefix)) continue;
      Tensor kl(Dtype::f64, {1, 2});
      const HierarchicalArgs options{.tie = tie, .include_self = true, .causal = causal, .arity = 30, .kl_rows = 0};
      EXPECT_LT(difference(c.out(options, &kl), exact), 1e-12);
      EXPECT_NEAR(kl.get(0), 0, 1e-12);
    }
  }
}

// The tree of branching 3,3 over 14 tokens, as parents, by levels, and with an inner node above every token.
TEST(Hierarchical, TheSameTreeGivenInFourWays) {
  const Case c(14, 7);
  const Tensor starts = integers({0, 3, 6, 9, 12, 0, 3}), offsets = integers({0, 5, 7});
  std::vector<int64_t> parents, unary;
  for (int64_t i = 0; i < 14; ++i) parents.push_back(14 + i / 3);
  for (int64_t i = 0; i < 5; ++i) parents.push_back(19 + i / 3);
  parents.insert(parents.end(), {21, 21, -1});
  for (int64_t i = 0; i < 14; ++i) unary.push_back(14 + i);
  for (const int64_t p : parents) unary.push_back(p < 0 ? -1 : p + 14);
  const Tensor parent = integers(parents), above = integers(unary);
  for (const HierarchicalTie tie : {HierarchicalTie::block, HierarchicalTie::row, HierarchicalTie::prefix}) {
    const HierarchicalArgs options{.tie = tie, .include_self = true, .causal = tie == HierarchicalTie::prefix};
    HierarchicalArgs factors = options, pointers = options, levels = options, chains = options;
    factors.branching = sizes({3, 3});
    pointers.parent = parent.view();
    levels.level_starts = starts.view(), levels.level_offsets = offsets.view();
    chains.parent = above.view();
    const Tensor want = c.out(factors);
    EXPECT_LT(difference(c.out(pointers), want), 1e-13);
    EXPECT_LT(difference(c.out(levels), want), 1e-13);
    EXPECT_LT(difference(c.out(chains), want), 1e-12);
  }
}

// KL(row) <= KL(block), and kl is what the definition says: v = identity gives the tied matrix.
TEST(Hierarchical, TheGapIsTheDivergenceOfTheMatrix) {
  const int64_t T = 16;
  Case c(T, 9);
  c.v = Tensor(Dtype::f64, {1, T, 2, T});
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t h = 0; h < 2; ++h) c.v.set(c.v.at(0, t, h, t), 1);
  }
  double last = 0;
  for (const HierarchicalTie tie : {HierarchicalTie::row, HierarchicalTie::block}) {
    Tensor kl(Dtype::f64, {1, 2});
    const Tensor theta = c.out({.tie = tie, .include_self = true, .arity = 2, .kl_rows = 0}, &kl);
    double sum = 0;
    for (int64_t i = 0; i < T; ++i) {
      std::vector<double> s;
      double total = 0;
      for (int64_t j = 0; j < T; ++j) {
        double dot = 0;
        for (int64_t e = 0; e < 8; ++e) dot += c.q.get(c.q.at(0, i, 0, e)) * c.k.get(c.k.at(0, j, 0, e));
        s.push_back(dot / std::sqrt(8.0));
        total += std::exp(s.back());
      }
      for (int64_t j = 0; j < T; ++j) {
        const double p = theta.get(theta.at(0, i, 0, j));
        sum += p * (std::log(p) - s[static_cast<size_t>(j)] + std::log(total));
      }
    }
    EXPECT_NEAR(kl.get(0), sum / static_cast<double>(T), 1e-12);
    EXPECT_GE(kl.get(0), last);
    last = kl.get(0);
  }
}

TEST(Hierarchical, DecodingIsThePrefixForm) {
  const int64_t T = 40, levels = 4, width = 6;
  const Case c(T, 17);
  for (const HierarchicalTie tie : {HierarchicalTie::prefix, HierarchicalTie::row}) {
    const Tensor whole = c.out({.tie = tie, .include_self = true, .causal = true, .arity = 3});
    const Tensor list_k(Dtype::f64, {1, 2, levels, width, 8}), list_v(Dtype::f64, {1, 2, levels, width, 6});
    const Tensor list_n(Dtype::f64, {1, levels, width}), count(Dtype::i64, {1, levels}), lengths(Dtype::i64, {1});
    const Tensor sum_q(Dtype::f64, {1, 2, levels, 8}), sum_k(Dtype::f64, {1, 2, levels, 8}),
        sum_v(Dtype::f64, {1, 2, levels, 6});
    const Tensor sum_g(Dtype::f64, {1, 2, levels}), open(Dtype::f64, {1, levels});
    for (const auto& [begin, end] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {1, 2}, {2, 9}, {9, 28}, {28, 29}, {29, T}}) {
      const Tensor q = check::tokens(c.q, begin, end), k = check::tokens(c.k, begin, end), v = check::tokens(c.v, begin, end);
      Tensor part(Dtype::f64, {1, end - begin, 2, 6});
      const HierarchicalDecodeArgs args{.q = q.view(),
                                        .k = k.view(),
                                        .v = v.view(),
                                        .list_k = list_k.view(),
                                        .list_v = list_v.view(),
                                        .list_n = list_n.view(),
                                        .list_count = count.view(),
                                        .sum_q = sum_q.view(),
                                        .sum_k = sum_k.view(),
                                        .sum_v = sum_v.view(),
                                        .sum_g = sum_g.view(),
                                        .open_n = open.view(),
                                        .lengths = lengths.view(),
                                        .close = {},
                                        .tie = tie,
                                        .arity = 3};
      const Status status = call(hierarchical_decode_op(), args, HierarchicalDecodeOut{.out = part.view()});
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_LT(difference(part, check::tokens(whole, begin, end)), 1e-12) << begin;
    }
  }
}

TEST(Hierarchical, BadTreesAreNamed) {
  const Case c(3, 3);
  const struct {
    std::vector<int64_t> parent;
    const char* says;
  } table[] = {
      {{3, 3, 4, 4, -1, -1}, "parent[4] is -1, but only the last node, 5, may be the root: an orphan"},
      {{3, 3, 4, 3, -1}, "parent[3] is 3, expected a larger number than the node's own"},  // a cycle of one
      {{4, 4, 3, 4, 3}, "parent[4] is 3, expected -1: the last node is the root"},         // a cycle of two
      {{3, 2, 3, -1}, "parent[1] is 2, expected an inner node, 3 to 3"},
      {{3, 9, 3, -1}, "parent[1] is 9, expected an inner node, 3 to 3"},
      {{4, 4, 4, 4, -1}, "the inner node 3 has no children"},
      {{-1, 1}, "parent has 2 nodes, expected at least 4 for 3 tokens"},
  };
  Tensor result(Dtype::f64, {1, 3, 2, 6});
  for (const auto& row : table) {
    const Tensor parent = integers(row.parent);
    const HierarchicalArgs args{.q = c.q.view(), .k = c.k.view(), .v = c.v.view(), .parent = parent.view()};
    const Status status = call(hierarchical_op(), args, HierarchicalOut{.out = result.view(), .energy = {}, .kl = {}});
    EXPECT_NE(status.message().find(row.says), std::string::npos) << status.message();
  }
  const Tensor starts = integers({0, 2, 1, 0}), offsets = integers({0, 3, 4});
  HierarchicalArgs args{.q = c.q.view(), .k = c.k.view(), .v = c.v.view(), .level_starts = starts.view()};
  const auto message = [&] {
    return call(hierarchical_op(), args, HierarchicalOut{.out = result.view(), .energy = {}, .kl = {}}).message();
  };
  EXPECT_EQ(message(), "hierarchical: level_starts and level_offsets go together, only one is given");
  args.level_offsets = offsets.view();
  EXPECT_EQ(message(), "hierarchical: level_starts[2] is 1, expected ascending starts below 3 in level 0");
  const Tensor mixed = integers({3, 4, 3, 4, -1});
  args = {.q = c.q.view(), .k = c.k.view(), .v = c.v.view(), .parent = mixed.view(), .tie = HierarchicalTie::prefix};
  args.include_self = args.causal = true;
  EXPECT_EQ(message(), "hierarchical: the node 3 covers 2 tokens between 0 and 2, expected consecutive ones when causal");
}

TEST(Hierarchical, RefusesInOneSentence) {
  const struct {
    const char *line, *says;
  } table[] = {
      {"hierarchical T=6 tie=prefix include_self=1", "tie is prefix, which needs causal"},
      {"hierarchical T=6 causal=1 include_self=1",
       "tie is block, expected prefix (the same, strictly causal) or row when causal"},
      {"hierarchical T=6 causal=1 tie=prefix", "tie prefix needs include_self"},
      {"hierarchical T=6 arity=1", "arity is 1, expected at least 2"},
      {"hierarchical T=6 branching=2,0", "branching is 0, expected at least 1"},
      {"hierarchical T=6 branching=2,x", "branching is '2,x', expected whole numbers such as 2,4,8"},
      {"hierarchical T=6 nodes=9 with=pos", "pos has 9 nodes, expected 7 (those of the tree)"},
      {"hierarchical_decode tie=block", "tie is block, expected prefix or row"},
      {"hierarchical_decode T=40 levels=1 width=3", "holds 3 nodes, no room for another"},
  };
  for (const auto& row : table) {
    check::Result result;
    const Status status = check::run_line(row.line, &result);
    EXPECT_EQ(status.code(), Code::bad_input) << row.line;
    EXPECT_NE(status.message().find(row.says), std::string::npos) << row.line << ": " << status.message();
  }
}

}  // namespace
}  // namespace linnet
