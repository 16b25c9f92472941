#include "bench/bench.h"

#include <gtest/gtest.h>

#include <cmath>

#include "bench/ceiling_loops.h"
#include "bench/machine.h"
#include "bench/work.h"
#include "core/tolerance.h"
#include "simd/simd.h"

namespace linnet::bench {
namespace {

std::string sentence(const Op& op, const std::string& text) {
  std::vector<Case> cases;
  return parse_cases(op, text, &cases).message();
}

TEST(Cases, alternatives_and_letters) {
  std::vector<Case> cases;
  const Op& op = *find_op("softmax");
  ASSERT_TRUE(parse_cases(op, "B=1 Tq=64 Tk=Tq*2 H=4 Hkv=H K=16|32 V=K causal=1 dtype=f32|bf16 pass=fwd+bwd", &cases).ok());
  ASSERT_EQ(cases.size(), 4u);
  EXPECT_EQ(cases[0].line(), "B=1 Tq=64 Tk=128 H=4 Hkv=4 K=16 V=16 causal=1 dtype=f32 pass=fwd+bwd");
  EXPECT_EQ(cases[3].line(), "B=1 Tq=64 Tk=128 H=4 Hkv=4 K=32 V=32 causal=1 dtype=bf16 pass=fwd+bwd");
  for (const Case& c : cases) {  // a printed line stands for itself
    std::vector<Case> again;
    ASSERT_TRUE(parse_cases(op, op.name + " " + c.line(), &again).ok());
    ASSERT_EQ(again.size(), 1u);
    EXPECT_EQ(again[0].line(), c.line());
  }
}

TEST(Cases, every_declared_line_is_a_case) {
  for (const Op* op : all_ops()) {
    EXPECT_FALSE(op->benchmarks.empty()) << op->name;
    for (const std::string& line : op->benchmarks) EXPECT_EQ(sentence(*op, line), "") << op->name << " " << line;
  }
}

TEST(Cases, wrong_words_are_told) {
  const std::string shape = "B=1 Tq=8 Tk=8 H=1 Hkv=1 K=8 V=8 ";
  const struct {
    std::string text, piece;
  } cases[] = {
      {shape + "dtype=f31", "dtype is 'f31'"},
      {shape + "pass=sideways", "pass is 'sideways'"},
      {shape + "causal", "'causal' in a case, expected NAME=VALUE"},
      {shape + "causal=", "causal has no value"},
      {shape + "causal=2", "causal is '2'"},
      {shape + "Z=3", "no letter, option or count of tokens 'Z'"},
      {shape + "K=8", "K is given twice"},
      {shape + "with=lamp", "no optional tensor 'lamp'"},
      {"B=1 Tq=8 Tk=Q", "Tk is 'Q'"},
      {"B=1 Tq=8 Tk=-1", "Tk is '-1'"},
      {"B=1 Tq=8 Tk=8 H=1 K=8 V=8", "does not say Hkv"},
      {"B=1|2|3|4|5|6|7|8|9|10 Tq=1|2|3|4|5|6|7|8|9|10 Tk=1|2|3|4|5|6|7|8|9|10 H=1|2", "more than 1000 cases"},
  };
  for (const auto& c : cases) EXPECT_NE(sentence(*find_op("softmax"), c.text).find(c.piece), std::string::npos) << c.text;
  EXPECT_NE(sentence(*find_op("linear_decode"), "B=1 pass=fwd+bwd").find("no backward"), std::string::npos);
}

TEST(Cases, shortened_keeps_widths) {
  std::vector<Case> cases;
  ASSERT_TRUE(parse_cases(*find_op("softmax_decode"),
                          "B=2 T=1 H=4 Hkv=2 K=128 V=K capacity=4096 lengths=4000 dtype=f32 pass=fwd", &cases)
                  .ok());
  EXPECT_EQ(shortened(cases[0], 1024).line(), "B=2 T=1 H=4 Hkv=2 K=128 V=128 capacity=1024 lengths=1000 dtype=f32 pass=fwd");
  EXPECT_EQ(shortened(cases[0], 5000).line(), cases[0].line());
}

TEST(Timing, spread) {
  EXPECT_EQ(spread({}).calls, 0);
  const Spread odd = spread({3, 1, 2});
  EXPECT_EQ(odd.median, 2);
  EXPECT_EQ(odd.best, 1);
  EXPECT_EQ(odd.p90, 3);
  EXPECT_EQ(spread({4, 1, 2, 3}).median, 2.5);
  std::vector<double> hundred;
  for (int i = 0; i < 100; ++i) hundred.push_back(i);
  EXPECT_EQ(spread(hundred).p90, 90);
}

// Every operator, small: it runs, its error is that of the type, and so is the work it reports.
TEST(Work, every_operator_runs_and_its_error_is_small) {
  for (const Op* op : all_ops()) {
    for (const std::string& line : op->benchmarks) {
      std::vector<Case> cases;
      ASSERT_TRUE(parse_cases(*op, line, &cases).ok());
      // distill_window: more tokens than its windows hold, inside which the gradients of its features are 0.
      Case c = shortened(cases.back(), op->name == "distill_window" ? 256 : 64);
      for (auto& [letter, value] : c.letters) value = letter == "B" ? std::min<int64_t>(value, 2) : value;
      std::unique_ptr<Work> work, reference;
      Context context;
      ASSERT_TRUE(Work::make(c, context, &work).ok()) << op->name << " " << c.line();
      Case in_double = c;
      in_double.dtype = Dtype::f64;
      context.impl = "ref";
      ASSERT_TRUE(Work::make(in_double, context, &reference).ok());
      reference->take_inputs(*work);
      for (int call = 0; call < 2; ++call) {  // counts that a call changes are put back
        ASSERT_TRUE(work->run().ok()) << op->name << " " << c.line();
        ASSERT_TRUE(reference->run().ok());
      }
      const double error = work->error(*reference);
      const double gate = rms_gate(c.dtype, c.backward ? Pass::backward : Pass::forward, Against::reference, op->growing, 32);
      EXPECT_LT(error, gate) << op->name << " " << c.line();
      EXPECT_GE(error, 0);
      EXPECT_GT(work->forward_cost().flops, 0);
      EXPECT_GT(work->forward_cost().bytes, 0);
      EXPECT_GT(work->tensor_bytes(), 0);
    }
  }
}

TEST(Work, what_does_not_fit_is_refused) {
  std::vector<Case> cases;
  ASSERT_TRUE(parse_cases(*find_op("softmax"), "B=1024 Tq=1048576 Tk=Tq H=1024 Hkv=H K=64 V=K pass=fwd", &cases).ok());
  std::unique_ptr<Work> work;
  const Status status = Work::make(cases[0], {}, &work);
  EXPECT_EQ(status.code(), Code::impossible);
  EXPECT_NE(status.message().find("does not fit into the memory"), std::string::npos);
}

TEST(Work, an_error_is_seen) {
  std::vector<Case> cases;
  ASSERT_TRUE(parse_cases(*find_op("softmax"), "B=1 Tq=8 Tk=8 H=1 Hkv=1 K=8 V=8 dtype=f64 pass=fwd", &cases).ok());
  std::unique_ptr<Work> one, other;
  ASSERT_TRUE(Work::make(cases[0], {}, &one).ok());
  cases[0].options.emplace_back("causal", "1");
  ASSERT_TRUE(Work::make(cases[0], {}, &other).ok());
  ASSERT_TRUE(one->run().ok() && other->run().ok());
  EXPECT_GT(one->error(*other), 0.01);
}

TEST(Bench, a_result_is_complete) {
  std::vector<Case> cases;
  ASSERT_TRUE(
      parse_cases(*find_op("linear"), "B=1 T=32 S=T Hq=2 Hk=Hq Hv=Hq K=16 V=K causal=1 dtype=f32 pass=fwd+bwd", &cases).ok());
  Settings settings;
  settings.seconds = 0.005;
  settings.rounds = 2;
  Bench bench(2, settings);
  Result result;
  ASSERT_TRUE(bench.measure(cases[0], &result).ok());
  EXPECT_GE(result.ours.calls, 2);
  EXPECT_LE(result.ours.best, result.ours.median);
  EXPECT_LE(result.ours.median, result.ours.p90);
  EXPECT_GT(result.share, 0);
  EXPECT_GT(result.fma_ceiling, 0);
  EXPECT_GT(result.update_ceiling, 0);
  EXPECT_LT(result.error, rms_gate(Dtype::f32, Pass::backward, Against::reference, true, 0));
  EXPECT_EQ(result.error_case, "");
}

TEST(Machine, has_a_name_and_a_date) {
  const Machine machine = this_machine();
  EXPECT_FALSE(machine.cpu.empty());
  EXPECT_GE(machine.cores, 1);
  EXPECT_EQ(today().size(), 10u);
  EXPECT_FALSE(commit().empty());
  const OtherLoad others;
  EXPECT_GE(others.share(), 0);
  EXPECT_LE(others.share(), 1);
}

TEST(Peer, a_python_without_torch_is_told) {
  std::unique_ptr<Peer> peer;
  for (const char* python : {"/bin/false", "/nowhere/python"}) {
    const Status status = Peer::start(python, 1, &peer);
    EXPECT_EQ(status.code(), Code::impossible);
    EXPECT_NE(status.message().find("pip install torch"), std::string::npos) << status.message();
  }
}

TEST(CeilingLoops, count_their_work) {
  for (const Isa isa : kIsas) {
    if (*isa_missing(isa) != '\0') continue;
    const CeilingLoops& c = ceiling_loops(isa);
    EXPECT_GT(c.multiply_add_f32(1000), 0);
    EXPECT_EQ(c.multiply_add_f32(2000), 2 * c.multiply_add_f32(1000));
    EXPECT_EQ(c.multiply_add_f64(1000), c.multiply_add_f32(1000) / 2);
    if (isa == Isa::avx512 && simd_has_bf16_products()) {
      EXPECT_EQ(c.multiply_add_bf16(1000), 2 * c.multiply_add_f32(1000));
    }
    std::vector<float> x(1003, 2.0f);  // no multiple of the lanes
    EXPECT_EQ(c.update_f32(x.data(), 1003, 3), 3.0 * 8 * 1003);
    for (const float v : x) EXPECT_NEAR(v, 0.999 * (0.999 * (0.999 * 2 + 0.001) + 0.001) + 0.001, 1e-6);
  }
}

}  // namespace
}  // namespace linnet::bench
