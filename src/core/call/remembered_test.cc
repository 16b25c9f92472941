#include "core/call/remembered.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "core/call/call.h"

namespace linnet {
namespace {

// One token of decay_decode: B = T = 1, two heads of 4 x 3. Memory of its own, so that every call has other addresses.
struct Step {
  std::vector<float> q = std::vector<float>(8, 0.5f), k = std::vector<float>(8, 0.25f), v = {1, 2, 3, 4, 5, 6};
  std::vector<float> g = {-0.5f, -1}, state = std::vector<float>(24, 1), out = std::vector<float>(6, -1);
  std::vector<char> workspace = std::vector<char>(1 << 16);
  Call call{*find_op("decay_decode")};

  Step() {
    EXPECT_TRUE(call.set("q", View::dense(q.data(), Dtype::f32, {1, 1, 2, 4})).ok());
    EXPECT_TRUE(call.set("k", View::dense(k.data(), Dtype::f32, {1, 1, 2, 4})).ok());
    EXPECT_TRUE(call.set("v", View::dense(v.data(), Dtype::f32, {1, 1, 2, 3})).ok());
    EXPECT_TRUE(call.set("g", View::dense(g.data(), Dtype::f32, {1, 1, 2})).ok());
    EXPECT_TRUE(call.set("state", View::dense(state.data(), Dtype::f32, {1, 2, 4, 3})).ok());
    EXPECT_TRUE(call.set("out", View::dense(out.data(), Dtype::f32, {1, 1, 2, 3})).ok());
  }
  Status run(Executor* executor = &inline_executor()) {
    return call.run(
        Pass::forward,
        {.executor = executor, .workspace = workspace.data(), .workspace_bytes = static_cast<int64_t>(workspace.size())});
  }
};

bool is_remembered(const Step& step) { return Remembered::recall(step.call.op(), step.call.args()) != nullptr; }

TEST(Remembered, a_call_at_other_addresses_is_known_and_gives_the_same) {
  Step first, second;
  ASSERT_TRUE(first.run().ok());
  EXPECT_TRUE(is_remembered(second));
  ASSERT_TRUE(second.run().ok());
  EXPECT_EQ(first.out, second.out);
  EXPECT_EQ(first.state, second.state);
  EXPECT_NE(second.out[0], -1);
  EXPECT_NE(second.state[0], 1);
}

TEST(Remembered, another_shape_or_option_is_another_call) {
  Step known, scaled, strided, narrow;
  ASSERT_TRUE(known.run().ok());
  ASSERT_TRUE(scaled.call.set_option("scale", "2").ok());
  EXPECT_FALSE(is_remembered(scaled));
  ASSERT_TRUE(scaled.run().ok());
  EXPECT_FLOAT_EQ(scaled.out[4], 4 * known.out[4]);  // the default is K^-0.5

  std::vector<float> wide(16, 0.5f);
  View q = View::dense(wide.data(), Dtype::f32, {1, 1, 2, 4});
  q.stride[2] = 8;
  ASSERT_TRUE(strided.call.set("q", q).ok());
  EXPECT_FALSE(is_remembered(strided));
  ASSERT_TRUE(strided.run().ok());
  EXPECT_EQ(strided.out, known.out);

  ASSERT_TRUE(narrow.call.set("state", View::dense(narrow.state.data(), Dtype::f32, {1, 2, 4, 2})).ok());
  EXPECT_EQ(narrow.run().code(), Code::bad_input);
}

TEST(Remembered, what_is_no_part_of_the_shape_is_checked_every_time) {
  Step known, no_data, small_out, no_out, no_workspace, both;
  ASSERT_TRUE(known.run().ok());
  ASSERT_TRUE(no_data.call.set("v", View::dense(nullptr, Dtype::f32, {1, 1, 2, 3})).ok());
  EXPECT_NE(no_data.run().message().find("v has no data"), std::string::npos);
  ASSERT_TRUE(small_out.call.set("out", View::dense(small_out.out.data(), Dtype::f32, {1, 1, 2, 2})).ok());
  EXPECT_NE(small_out.run().message().find("out has shape"), std::string::npos);
  ASSERT_TRUE(no_out.call.set("out", View()).ok());
  EXPECT_NE(no_out.run().message().find("out is missing"), std::string::npos);
  no_workspace.workspace.clear();
  EXPECT_NE(no_workspace.run().message().find("workspace"), std::string::npos);
  ASSERT_TRUE(both.call.set("g_head", View::dense(both.g.data(), Dtype::f32, {2})).ok());
  for (int i = 0; i < 2; ++i) EXPECT_NE(both.run().message().find("g and g_head"), std::string::npos);
  for (const Step* step : {&no_data, &small_out, &no_workspace, &both}) EXPECT_EQ(step->state[0], 1) << "nothing is written";
}

TEST(Remembered, the_environment_still_chooses) {
  Step known, forced;
  ASSERT_TRUE(known.run().ok());
  setenv("LINNET_IMPL", "no_such", 1);
  const Status status = forced.run();
  unsetenv("LINNET_IMPL");
  EXPECT_NE(status.message().find("no_such"), std::string::npos);
}

TEST(Remembered, an_address_between_elements_is_told_every_time) {
  Step known;
  ASSERT_TRUE(known.run().ok());
  for (const bool result : {false, true}) {
    Step odd;
    std::vector<float>& values = result ? odd.out : odd.state;
    View view =
        result ? View::dense(values.data(), Dtype::f32, {1, 1, 2, 3}) : View::dense(values.data(), Dtype::f32, {1, 2, 4, 3});
    view.data = static_cast<char*>(view.data) + 2;
    ASSERT_TRUE(odd.call.set(result ? "out" : "state", view).ok());
    EXPECT_NE(odd.run().message().find("no multiple of 4"), std::string::npos) << result;
  }
}

// The kernel of one call reads its prepared arguments while another call of the same kind begins and ends in the same thread.
TEST(Remembered, a_call_inside_of_a_call_has_its_own_addresses) {
  struct Nesting final : Executor {
    Step inner;
    int workers() const override { return 1; }
    void run(int64_t tasks, Task fn, void* context) override {
      EXPECT_TRUE(inner.run().ok());
      inline_executor().run(tasks, fn, context);
    }
  } nesting;
  Step known, outer;
  ASSERT_TRUE(known.run().ok());
  ASSERT_TRUE(outer.run(&nesting).ok());
  EXPECT_EQ(outer.out, known.out);
  EXPECT_EQ(outer.state, known.state);
  EXPECT_EQ(nesting.inner.state, known.state);
}

TEST(Remembered, values_that_a_check_reads_are_read_every_time) {
  std::vector<float> x(8, 0.5f), out(8);
  std::vector<int32_t> offsets = {0, 1, 2};
  std::vector<char> workspace(1 << 20);
  Call call(*find_op("linear"));
  for (const char* name : {"q", "k", "v"}) {
    ASSERT_TRUE(call.set(name, View::dense(x.data(), Dtype::f32, {2, 1, 4})).ok());
  }
  ASSERT_TRUE(call.set("cu_seqlens", View::dense(offsets.data(), Dtype::i32, {3})).ok());
  ASSERT_TRUE(call.set("out", View::dense(out.data(), Dtype::f32, {2, 1, 4})).ok());
  const Context context{.executor = &inline_executor(), .workspace = workspace.data(), .workspace_bytes = 1 << 20};
  ASSERT_TRUE(call.run(Pass::forward, context).ok());
  offsets[1] = 7;
  EXPECT_EQ(call.run(Pass::forward, context).code(), Code::bad_input);
}

}  // namespace
}  // namespace linnet
