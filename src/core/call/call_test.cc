#include "core/call/call.h"

#include <gtest/gtest.h>

#include <vector>

namespace linnet {
namespace {

// out = factor x + y, y optional; y counts twice when `twice`.
struct SumArgs {
  View x, y;
  double factor = 1;
  bool twice = false;
};
struct SumOut {
  View out, count;
};
struct SumGrads {
  View dout, dx, dy;
};

void sum_forward(const SumArgs& args, const SumOut& out, const Launch&) {
  const int64_t n = args.x.elements();
  for (int64_t i = 0; i < n; ++i) {
    double sum = args.factor * args.x.at<double>()[i];
    if (args.y.given()) sum += (args.twice ? 2 : 1) * args.y.at<double>()[i];
    out.out.at<double>()[i] = sum;
  }
  if (out.count.given()) *out.count.at<double>() = static_cast<double>(n);
}
void sum_backward(const SumArgs& args, const SumOut&, const SumGrads& grads, const Launch&) {
  for (int64_t i = 0; i < args.x.elements(); ++i) {
    if (grads.dx.given()) grads.dx.at<double>()[i] = args.factor * grads.dout.at<double>()[i];
    if (grads.dy.given()) grads.dy.at<double>()[i] = (args.twice ? 2 : 1) * grads.dout.at<double>()[i];
  }
}
int64_t sum_workspace(const SumArgs& args, Pass pass, int) { return pass == Pass::forward ? 8 * args.x.elements() : 0; }

const Op& sum_op() {
  static const Op op = Declare<SumArgs, SumOut, SumGrads>("sum", "sum", "adds")
                           .input("x", &SumArgs::x, "B T", "first")
                           .grad(&SumGrads::dx)
                           .input("y", &SumArgs::y, "B T", "second")
                           .optional()
                           .grad(&SumGrads::dy)
                           .output("out", &SumOut::out, "B T", "the sum")
                           .grad(&SumGrads::dout)
                           .output("count", &SumOut::count, "1", "number of elements")
                           .element(Element::acc)
                           .optional()
                           .option("factor", &SumArgs::factor, -4, 4, "of x")
                           .option("twice", &SumArgs::twice, "y counts twice")
                           .impl<sum_forward, sum_backward, sum_workspace>("ref", always_available);
  return op;
}

TEST(Call, runs_forward_and_backward_by_name) {
  const double x[] = {1, 2, 3}, y[] = {10, 20, 30}, dout[] = {1, 1, 2};
  double out[3], count, dy[3];
  Call call(sum_op());
  ASSERT_TRUE(call.set("x", View::dense(x, Dtype::f64, {1, 3})).ok());
  ASSERT_TRUE(call.set("y", View::dense(y, Dtype::f64, {1, 3})).ok());
  ASSERT_TRUE(call.set_option("factor", "-2").ok());
  ASSERT_TRUE(call.set_option("twice", "true").ok());
  ASSERT_TRUE(call.prepare().ok());
  EXPECT_EQ(call.dims()["T"], 3);
  for (const auto& [name, data] : {std::pair<const char*, double*>{"out", out}, {"count", &count}}) {
    View view;
    ASSERT_TRUE(call.output_view(name, &view).ok());
    view.data = data;
    ASSERT_TRUE(call.set(name, view).ok());
  }
  int64_t bytes;
  ASSERT_TRUE(call.workspace(Pass::forward, {}, &bytes).ok());
  std::string memory(static_cast<size_t>(bytes), '\0');
  const Status status = call.run(Pass::forward, {.workspace = memory.data(), .workspace_bytes = bytes});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(out[0], 18);
  EXPECT_EQ(out[2], 54);
  EXPECT_EQ(count, 3);

  View view;
  ASSERT_TRUE(call.output_view("dy", &view).ok());
  EXPECT_EQ(view.rank, 2);
  EXPECT_EQ(view.size[1], 3);
  view.data = dy;
  ASSERT_TRUE(call.set("dy", view).ok());
  ASSERT_TRUE(call.set("dout", View::dense(dout, Dtype::f64, {1, 3})).ok());
  ASSERT_TRUE(call.run(Pass::backward, {}).ok());
  EXPECT_EQ(dy[2], 4);
}

TEST(Call, says_what_is_wrong) {
  const double x[] = {1, 2, 3};
  const View view = View::dense(x, Dtype::f64, {1, 3});
  View out;
  Call call(sum_op());
  EXPECT_EQ(call.set("z", view).message(), "sum: there is no tensor 'z', expected one of x, y, out, count, dx, dy, dout");
  EXPECT_EQ(call.set("dcount", view).code(), Code::bad_input);  // count has no gradient
  EXPECT_EQ(call.set_option("gain", "1").code(), Code::bad_input);
  EXPECT_EQ(call.prepare().message(), "sum: x is missing");
  EXPECT_EQ(call.output_view("out", &out).message(), "sum: the shape of out is known after prepare()");
  ASSERT_TRUE(call.set("x", view).ok());
  ASSERT_TRUE(call.prepare().ok());
  EXPECT_TRUE(call.output_view("out", &out).ok());
  EXPECT_EQ(call.output_view("dy", &out).message(), "sum: dy has no shape, y is not given");
  EXPECT_EQ(call.output_view("x", &out).code(), Code::bad_input);  // an input
  EXPECT_EQ(call.set_option("factor", "5").message(), "sum: factor is 5, expected -4 to 4");
  ASSERT_TRUE(call.set_option("factor", "3").ok());
  EXPECT_EQ(call.output_view("out", &out).code(), Code::bad_input);  // changed since prepare()
}

TEST(Call, refuses_to_write_where_elements_overlap) {
  const double x[] = {1, 2, 3};
  double out[3] = {};
  Call call(sum_op());
  ASSERT_TRUE(call.set("x", View::dense(x, Dtype::f64, {3, 1})).ok());
  View view = View::dense(out, Dtype::f64, {3, 1});
  view.stride[0] = 0;
  ASSERT_TRUE(call.set("out", view).ok());
  EXPECT_EQ(call.run(Pass::forward, {}).message(),
            "sum: out has stride 0 in dimension 0, but it is written and may not overlap itself");
}

// Offsets of packed sequences say how many there are, although N also has a rule (N = B) for calls without them.
TEST(Call, takes_the_number_of_sequences_from_the_offsets) {
  const std::vector<float> q(6 * 2 * 4);
  const int32_t offsets[] = {0, 1, 1, 6};
  for (const int64_t leading : {0, 1}) {
    Call call(*find_op("linear"));
    const View rows =
        leading == 1 ? View::dense(q.data(), Dtype::f32, {1, 6, 2, 4}) : View::dense(q.data(), Dtype::f32, {6, 2, 4});
    for (const char* name : {"q", "k", "v"}) ASSERT_TRUE(call.set(name, rows).ok());
    ASSERT_TRUE(call.set("cu_seqlens", View::dense(offsets, Dtype::i32, {4})).ok());
    const Status status = call.prepare();
    ASSERT_TRUE(status.ok()) << status.message();
    View state;
    ASSERT_TRUE(call.output_view("final_state", &state).ok());
    EXPECT_EQ(state.size[0], 3);
  }
}

TEST(Call, tells_what_was_set) {
  const double x[] = {1};
  Call call(sum_op());
  View view;
  ASSERT_TRUE(call.get("x", &view).ok());
  EXPECT_FALSE(view.given());
  ASSERT_TRUE(call.set("x", View::dense(x, Dtype::f64, {1, 1})).ok());
  const Call copy = call;
  ASSERT_TRUE(copy.get("x", &view).ok());
  EXPECT_EQ(view.data, x);
}

}  // namespace
}  // namespace linnet
