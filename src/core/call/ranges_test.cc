// check_ranges: values that make sense for no call.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "core/op.h"
#include "mechanisms/recurrence/recurrence.h"

namespace linnet {
namespace {

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

}  // namespace
}  // namespace linnet
