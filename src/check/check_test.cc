// The engine is only worth something if it sees what is wrong: implementations of a small operator, each broken in its own way.
#include "check/check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "check/plan.h"
#include "check/poison.h"
#include "check/sample.h"
#include "core/half.h"

namespace linnet::check {
namespace {

// twice: out = factor x, total = sum of x over the last dimension; x [B, T, K].
struct TwiceArgs {
  View x;
  double factor = 2, weight = 1;  // weight does nothing
};
struct TwiceOut {
  View out, total;
};
struct TwiceGrads {
  View dout, dx;
};

enum class Fault {
  none,
  wrong_value,
  forgets_element,
  writes_behind,
  writes_gap,
  changes_input,
  reads_workspace,
  overruns_workspace,
  depends_on_threads,
  depends_on_batch,
  wrong_gradient,
  reads_later,      // a later token times 0
  all_zero,         // with logits of 8000: see declare_twice
  rounds_too_much,  // 2.5e-3: what a matrix unit may cost in bf16, and nothing else
  offset,           // 5e-4 more than it should be
};

void rows(const View& from, const View& to, double factor) {
  for (int64_t b = 0; b < from.size[0]; ++b) {
    for (int64_t t = 0; t < from.size[1]; ++t) {
      for (int64_t c = 0; c < from.size[2]; ++c) {
        const double x = load_f64(from.data, from.dtype, b * from.stride[0] + t * from.stride[1] + c);
        store_f64(to.data, to.dtype, b * to.stride[0] + t * to.stride[1] + c, factor * x);
      }
    }
  }
}

template <Fault fault>
void twice_forward(const TwiceArgs& args, const TwiceOut& out, const Launch& launch) {
  const double error = fault == Fault::wrong_value       ? 1.005
                       : fault == Fault::all_zero        ? 0
                       : fault == Fault::rounds_too_much ? 1.0025
                                                         : 1;
  rows(args.x, out.out, args.factor * error);
  const View& x = args.x;
  if (out.total.given()) {
    for (int64_t b = 0; b < x.size[0]; ++b) {
      for (int64_t t = 0; t < x.size[1]; ++t) {
        double sum = 0;
        for (int64_t c = 0; c < x.size[2]; ++c) sum += load_f64(x.data, x.dtype, b * x.stride[0] + t * x.stride[1] + c);
        store_f64(out.total.data, out.total.dtype, b * out.total.stride[0] + t * out.total.stride[1], sum);
      }
    }
  }
  const double nan = std::nan("");
  double* workspace = reinterpret_cast<double*>(launch.workspace);
  const int64_t last = out.out.size[2] - 1;
  const auto put = [&](const View& view, int64_t place, double value) { store_f64(view.data, view.dtype, place, value); };
  if (fault == Fault::forgets_element) put(out.out, last, nan);
  if (fault == Fault::writes_behind) put(out.out, (out.out.size[0]) * out.out.stride[0], 0);
  if (fault == Fault::writes_gap) put(out.out, last + 1, 0);
  if (fault == Fault::changes_input) put(x, 0, 7);
  if (fault == Fault::reads_workspace) put(out.out, 0, workspace[3]);
  if (fault == Fault::overruns_workspace) workspace[8 + 16] = 1;  // 64 bytes asked for, and up to 128 for the alignment
  if (fault == Fault::depends_on_threads) put(out.out, 0, 2 * load_f64(x.data, x.dtype, 0) * (1 + 1e-15 * launch.workers));
  for (int64_t i = 0; fault == Fault::offset && i < out.out.size[1]; ++i) {
    const int64_t at = i * out.out.stride[1];
    put(out.out, at, load_f64(out.out.data, out.out.dtype, at) + 5e-4);
  }
  for (int64_t i = 0; fault == Fault::reads_later && i + 1 < x.size[1]; ++i) {
    const double later = load_f64(x.data, x.dtype, (i + 1) * x.stride[1]);
    put(out.out, i * out.out.stride[1], load_f64(out.out.data, out.out.dtype, i * out.out.stride[1]) + 0 * later);
  }
  if (fault == Fault::depends_on_batch) put(out.out, 0, 2 * load_f64(x.data, x.dtype, 0) * (1 + 1e-15 * x.size[0]));
}

template <Fault fault>
void twice_backward(const TwiceArgs& args, const TwiceOut&, const TwiceGrads& grads, const Launch&) {
  rows(grads.dout, grads.dx, fault == Fault::wrong_gradient ? 1.5 * args.factor : args.factor);
}

int64_t twice_workspace(const TwiceArgs&, Pass, int) { return 64; }
double huge_logit(const TwiceArgs&) { return 8000; }

template <Fault fault>
Op declare_twice() {
  using A = TwiceArgs;
  using O = TwiceOut;
  using G = TwiceGrads;
  Declare<A, O, G> op("twice", "twice", "doubles");
  op.input("x", &A::x, "B T K", "numbers")
      .grad(&G::dx)
      .output("out", &O::out, "B T K", "twice the numbers")
      .grad(&G::dout)
      .output("total", &O::total, "B T 1", "their sums")
      .element(Element::acc)
      .optional()
      .option("factor", &A::factor, 0, 10, "2")
      .option("weight", &A::weight, 0, 1000, "of nothing")
      .always_causal()
      .template impl<twice_forward<Fault::none>, twice_backward<Fault::none>, twice_workspace>("ref", always_available)
      .template impl<twice_forward<fault>, twice_backward<fault>, twice_workspace>("broken", always_available);
  if (fault == Fault::all_zero) op.template largest_logit<huge_logit>();
  return op;
}

struct Broken {
  const char* name;
  Op op;
  bool strided;
  const char* says;  // in the text of the result; empty: it passes
};

std::vector<Broken> broken_table() {
  return {
      {"none", declare_twice<Fault::none>(), true, ""},
      {"wrong_value", declare_twice<Fault::wrong_value>(), false, "out: rms 5.00e-03 of"},
      {"forgets_element", declare_twice<Fault::forgets_element>(), false, "is nan, expected"},
      {"writes_behind", declare_twice<Fault::writes_behind>(), false, "forward: out was written outside of its elements"},
      {"writes_gap", declare_twice<Fault::writes_gap>(), true, "forward: out was written outside of its elements"},
      {"changes_input", declare_twice<Fault::changes_input>(), false, "forward: x was changed although it is only read"},
      {"reads_workspace", declare_twice<Fault::reads_workspace>(), false, "[0, 0, 0] is nan"},
      {"overruns_workspace", declare_twice<Fault::overruns_workspace>(), false, "the workspace was written outside"},
      {"depends_on_threads", declare_twice<Fault::depends_on_threads>(), false, "out differs between 2 and 1 threads"},
      {"depends_on_batch", declare_twice<Fault::depends_on_batch>(), false,
       "out of batch row 0 differs when it is computed alone"},
      {"wrong_gradient", declare_twice<Fault::wrong_gradient>(), false, "dx: rms 5.00e-01 of"},
      {"reads_later", declare_twice<Fault::reads_later>(), false, "is not finite"},
  };
}

TEST(CheckEngine, SeesEveryFault) {
  for (const Broken& broken : broken_table()) {
    for (const Dtype dtype : {Dtype::f64, Dtype::f32}) {
      if (dtype == Dtype::f32 && std::string(broken.name).rfind("depends_on", 0) == 0) continue;  // a difference below f32
      Case c;
      c.op = &broken.op;
      c.letters = {{"B", 2}, {"T", 5}, {"K", 7}};
      c.dtype = dtype;
      c.backward = true;
      c.impl = "broken";
      c.threads = 2;
      c.strided = broken.strided;
      // A strided view has a gap behind its rows only under some seeds: try several, all of which must pass without a fault.
      bool seen = false;
      for (c.seed = 1; c.seed <= 20; ++c.seed) {
        Result result;
        const Status status = run_case(c, &result);
        ASSERT_TRUE(status.ok()) << status.message();
        seen |= !result.ok() && result.text().find(broken.says) != std::string::npos;
        EXPECT_TRUE(result.ok() || *broken.says != '\0') << result.text();
      }
      EXPECT_EQ(seen, *broken.says != '\0') << broken.name << " " << dtype_name(dtype);
    }
  }
}

// Each gate can fail: errors that it is there for, beside ones that it must let pass.
TEST(CheckEngine, EveryGateCanFail) {
  using Options = std::vector<std::pair<std::string, std::string>>;
  const Options tiny = {{"factor", "1e-06"}}, tiny_weighted = {{"factor", "1e-06"}, {"weight", "1000"}};
  Op rounding = declare_twice<Fault::rounds_too_much>();
  rounding.impls.back().rounding = Rounding::matrix_units;
  const struct {
    const char* name;
    Op op;
    Dtype dtype;
    Options options;
    bool ok;
  } table[] = {
      {"nothing computed, logits of 8000", declare_twice<Fault::all_zero>(), Dtype::bf16, {}, false},
      {"nothing computed, logits of 8000", declare_twice<Fault::all_zero>(), Dtype::f32, {}, false},
      {"2.5e-3 where nothing rounds", declare_twice<Fault::rounds_too_much>(), Dtype::bf16, {}, false},
      {"2.5e-3 where a matrix unit rounds", rounding, Dtype::bf16, {}, true},
      {"small results, right", declare_twice<Fault::none>(), Dtype::bf16, tiny, true},
      {"small results, 5e-4 of the scale", declare_twice<Fault::offset>(), Dtype::bf16, tiny, false},
      {"small results, 5e-4 of the scale", declare_twice<Fault::offset>(), Dtype::f16, tiny, false},
      {"an option of 1000 does not widen it", declare_twice<Fault::offset>(), Dtype::f32, tiny_weighted, false},
  };
  for (const auto& row : table) {
    Case c;
    c.op = &row.op;
    c.letters = {{"B", 2}, {"T", 50}, {"K", 7}};
    c.dtype = row.dtype;
    c.options = row.options;
    c.impl = "broken";
    Result result;
    const Status status = run_case(c, &result);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(result.ok(), row.ok) << row.name << " " << dtype_name(row.dtype) << "\n" << result.text();
  }
}

TEST(Tolerance, GrowsOnlySoFar) {
  const auto gate = [](Dtype dtype, double logit) { return rms_gate(dtype, Pass::forward, Against::reference, false, logit); };
  EXPECT_EQ(gate(Dtype::f32, 32), 2 * gate(Dtype::f32, 0));
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    for (const double logit : {0.0, 100.0, 8000.0, 1e9}) {
      EXPECT_LE(gate(dtype, logit), kLargestRms);
      EXPECT_LE(max_gate(gate(dtype, logit)), kLargestMax);
    }
    EXPECT_LE(cancelled_gate(epsilon(dtype), 1e12), kCancelledMost);
  }
}

TEST(CheckEngine, ShrinksWhileItFails) {
  const Op op = declare_twice<Fault::wrong_value>();
  Case c;
  c.op = &op;
  c.letters = {{"B", 3}, {"T", 129}, {"K", 40}};
  c.impl = "broken";
  c.threads = 7;
  c.strided = true;
  c.backward = true;
  c.values = {"mixed"};
  const auto fails = [](const Case& smaller) {
    Result result;
    return run_case(smaller, &result).ok() && !result.ok();
  };
  EXPECT_EQ(to_text(shrink(c, fails, 100)), "twice B=1 T=1 K=1 dtype=f32 pass=fwd impl=broken threads=1 seed=1");
}

struct Compared {
  const char* name;
  std::vector<double> got, want;
  Dtype stored;
  double scale;
  bool ok;
  const char* note;
};

TEST(Compare, Rules) {
  const double inf = HUGE_VAL, nan = std::nan("");
  const Compared table[] = {
      {"equal", {1, 2, 3}, {1, 2, 3}, Dtype::f32, 3, true, ""},
      {"empty", {}, {}, Dtype::f32, 1, true, ""},
      {"within", {1.0005, 2, 3}, {1, 2, 3}, Dtype::f32, 3, true, ""},
      {"rms beyond", {1.005, 2.005, 3.005}, {1, 2, 3}, Dtype::f32, 3, false, ""},
      {"-inf in place", {1, -inf}, {1, -inf}, Dtype::f32, 1, true, ""},
      {"-inf missing", {1, -1e30}, {1, -inf}, Dtype::f32, 1, false, "[1] is -1e+30, expected -inf"},
      {"+inf for -inf", {1, inf}, {1, -inf}, Dtype::f32, 1, false, "[1] is inf, expected -inf"},
      {"NaN in place", {nan, 1}, {nan, 1}, Dtype::f32, 1, true, ""},
      {"NaN for a number", {nan, 1}, {1, 1}, Dtype::f32, 1, false, "[0] is nan, expected 1"},
      {"a number for NaN", {1, 1}, {nan, 1}, Dtype::f32, 1, false, "[0] is 1, expected nan"},
      {"beyond f16", {inf, 1}, {70000, 1}, Dtype::f16, 1, true, ""},
      {"beyond f16, other sign", {-inf, 1}, {70000, 1}, Dtype::f16, 1, false, "[0] is -inf, expected 70000"},
      {"within f16", {inf, 1}, {60000, 1}, Dtype::f16, 1, false, "[0] is inf, expected 60000"},
      {"beyond f16 in f32", {inf, 1}, {70000, 1}, Dtype::f32, 1, false, "[0] is inf, expected 70000"},
      {"cancelled", {1e-6, 0}, {0, 1e-5}, Dtype::f32, 1, true, "small"},
      {"cancelled, beyond", {1e-4, 0}, {0, 1e-5}, Dtype::f32, 1, false, "small"},
      {"cancelled at scale", {1e-4, 0}, {0, 1e-5}, Dtype::f32, 100, true, "small"},
      {"zero", {0, 0}, {0, 0}, Dtype::f32, 1, true, ""},
      {"not zero", {1, 0}, {0, 0}, Dtype::f32, 1, false, "small"},
  };
  for (const Compared& row : table) {
    const Gate gate = {.rms = 1e-3, .epsilon = 0x1p-20, .scale = row.scale, .stored = row.stored};
    const Comparison c = compare(row.got, row.want, {static_cast<int64_t>(row.want.size())}, gate);
    EXPECT_EQ(c.ok, row.ok) << row.name << ": rms " << c.rms << " max " << c.max << " " << c.note;
    EXPECT_NE(c.note.find(row.note), std::string::npos) << row.name << ": " << c.note;
  }
  // log(1 + x) = x of small x has the rounding of 1.
  const Gate logarithms = {.rms = 1e-6, .epsilon = 0x1p-23, .least = 1};
  EXPECT_TRUE(compare({0.00099}, {0.0009901}, {1}, logarithms).ok);
  EXPECT_FALSE(compare({0.00099}, {0.001}, {1}, logarithms).ok);
  EXPECT_FALSE(compare({0.00099}, {0.0009901}, {1}, {.rms = 1e-6, .epsilon = 0x1p-23}).ok);
  // One element of many: the RMS is within its gate, the largest error is not.
  std::vector<double> want(100'000, 1), got = want;
  got[17] = 1.05;
  const Comparison one = compare(got, want, {100'000}, {.rms = 1e-3, .epsilon = 0x1p-20});
  EXPECT_LT(one.rms, 1e-3);
  EXPECT_FALSE(one.ok);
  EXPECT_GT(one.share(), 1);
}

TEST(CaseLine, RoundTrip) {
  Random random(3, "round trip");
  for (const Op* op : all_ops()) {
    for (int i = 0; i < 20; ++i) {
      Case c, parsed;
      ASSERT_TRUE(sample_case(*op, random, {.cost = {1e6, 1e5}}, &c).ok());
      const std::string line = to_text(c);
      const Status status = parse_case(line, &parsed);
      ASSERT_TRUE(status.ok()) << line << ": " << status.message();
      EXPECT_EQ(to_text(parsed), line);
      Problem first, second;
      ASSERT_TRUE(make_problem(c, &first).ok()) << line;
      ASSERT_TRUE(make_problem(parsed, &second).ok()) << line;
      ASSERT_EQ(first.inputs.size(), second.inputs.size());
      for (size_t k = 0; k < first.inputs.size(); ++k) {
        EXPECT_EQ(first.inputs[k].size, second.inputs[k].size) << line;
        EXPECT_TRUE(std::equal(first.inputs[k].values.begin(), first.inputs[k].values.end(), second.inputs[k].values.begin(),
                               [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }))
            << line << " " << first.inputs[k].name;
      }
    }
  }
}

// Packed calls may leave B out. Then [T, H, K] of a tensor that may also be [B, T, H] has its tokens first: with another
// reading such calls were passed over, or (T = H) the numbers of one head replaced.
TEST(Poison, TokensOfPackedCallsWithoutABatch) {
  for (const char* line : {"gated_delta B=1 T=9 Hq=2 Hk=2 Hv=2 K=4 V=4 N=2 with=cu_seqlens",
                           "gated_delta B=1 T=3 Hq=3 Hk=3 Hv=3 K=4 V=4 N=2 with=cu_seqlens",
                           "mamba_selective_scan B=1 T=3 E=9 K=4 G=3 N=2 with=cu_seqlens"}) {
    bool without_batch = false, with_batch = false;
    for (int seed = 1; seed <= 8; ++seed) {
      Case c;
      ASSERT_TRUE(parse_case(std::string(line) + " seed=" + std::to_string(seed), &c).ok()) << line;
      Problem problem;
      ASSERT_TRUE(make_problem(c, &problem).ok()) << line;
      Poisoned poisoned;
      ASSERT_TRUE(poison(problem, static_cast<uint64_t>(seed), &poisoned)) << line << " seed " << seed;
      const bool batched = problem.inputs[0].size[0] == 1;
      (batched ? with_batch : without_batch) = true;
      int64_t replaced = 0;
      for (const Array& array : poisoned.problem.inputs) {
        for_each(array, array.size.size(), [&](const double& x, const std::vector<int64_t>& at) {
          if (std::isfinite(x)) return;
          ++replaced;
          EXPECT_EQ(at[batched ? 1 : 0], poisoned.token) << line << " " << array.name;
        });
      }
      EXPECT_GT(replaced, 0) << line;
    }
    EXPECT_TRUE(with_batch && without_batch) << line;
  }
}

TEST(CaseLine, BadLines) {
  const struct {
    const char *line, *says;
  } table[] = {
      {"", "the case is empty"},
      {"sofmax", "there is no operator 'sofmax'"},
      {"softmax B", "'B' is not of the form name=value"},
      {"softmax B=two", "B is 'two', expected a whole number"},
      {"softmax B=-1", "B is '-1', expected a whole number"},
      {"softmax B=2 B=2", "B is given twice"},
      {"softmax causal=1 B=2 causal=0", "causal is given twice"},
      {"softmax Z=3", "there is no letter or option 'Z'"},
      {"softmax N=3", "there is no letter or option 'N'"},  // only packed sequences show N
      {"softmax dtype=f8", "dtype is 'f8', expected f64, f32, bf16 or f16"},
      {"softmax dtype=i32", "dtype is 'i32'"},
      {"softmax pass=both", "pass is 'both', expected fwd or bwd"},
      {"softmax_paged pass=bwd", "there is no backward"},
      {"softmax with=q", "there is no optional input 'q'"},
      {"softmax skip=out", "there is no optional output or gradient 'out'"},
      {"softmax values=odd", "values is 'odd', expected masked, garbage, repeated or mixed"},
      {"softmax threads=0", "threads is '0', expected 1 to 256"},
      {"softmax strided=yes", "strided is 'yes', expected 0 or 1"},
      {"softmax seed=-", "seed is '-', expected a whole number"},
      {"softmax causal=maybe", "causal is 'maybe', expected 0 or 1"},
      {"softmax window=4", "window is '4', expected two whole numbers"},
      {"softmax H=3 Hkv=2", "k has 2 heads, expected a divisor of 3"},
      {"softmax with=cu_seqlens_q", "cu_seqlens_q and cu_seqlens_k go together"},
      {"softmax impl=avx9000", "there is no implementation 'avx9000'"},
      {"linear map=t2r", "w is missing; map t2r needs it"},
  };
  for (const auto& row : table) {
    Result result;
    const Status status = run_line(row.line, &result);
    EXPECT_EQ(status.code(), Code::bad_input) << row.line;
    EXPECT_NE(status.message().find(row.says), std::string::npos) << row.line << ": " << status.message();
  }
}

// Every operator accepts enough of what is drawn for it, and the cases stay small.
TEST(Sample, EveryOperator) {
  Random random(5, "operators");
  for (const Op* op : all_ops()) {
    int empty = 0, backward = 0, strided = 0;
    for (int i = 0; i < 400; ++i) {
      Case c;
      const Status status = sample_case(*op, random, {}, &c);
      ASSERT_TRUE(status.ok()) << status.message();
      Cost cost;
      ASSERT_TRUE(accepts(c, &cost).ok()) << to_text(c);
      EXPECT_LE(cost.flops, 2e8) << to_text(c);
      const bool normalised = to_text(c).find(" normalize=1") != std::string::npos;
      EXPECT_FALSE(normalised && contains(c.with, "initial_state") && !contains(c.with, "initial_z")) << to_text(c);
      empty += std::any_of(c.letters.begin(), c.letters.end(), [](const auto& pair) { return pair.second == 0; });
      backward += c.backward;
      strided += c.strided;
    }
    EXPECT_GT(empty, 0) << op->name;
    EXPECT_GT(strided, 0) << op->name;
    EXPECT_EQ(backward > 0, op->differentiable()) << op->name;
  }
}

// Sanitizers take twenty times as long, and what they look for lies in few of an operator's cases.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kCases = 8;
#else
constexpr int kCases = 40;
#endif

// The fast part of `linnet check --random`.
TEST(RandomCases, Pass) {
  for (const Op* op : all_ops()) {
    Random random(12, op->name);  // a stream of its own: a change to one operator leaves the others' cases alone
    for (int i = 0; i < kCases; ++i) {
      Case c;
      Result result;
      ASSERT_TRUE(sample_case(*op, random, {.cost = {4e6, 1e6}}, &c).ok());
      const Status status = run_case(c, &result);
      ASSERT_TRUE(status.ok()) << to_text(c) << ": " << status.message();
      EXPECT_TRUE(result.ok()) << "linnet check --case '" << result.text();
    }
  }
}

}  // namespace
}  // namespace linnet::check
