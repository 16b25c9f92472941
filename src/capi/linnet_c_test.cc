#include "linnet_c.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "linnet.h"

namespace {

constexpr int64_t kTokens = 199, kHeads = 4, kWidth = 32;  // enough work for several threads
const int64_t kSizes[] = {1, kTokens, kHeads, kWidth};
const int64_t kRows[] = {1, kTokens, kHeads};

std::vector<float> numbers(int seed) {
  std::vector<float> x(kTokens * kHeads * kWidth);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 37 + static_cast<size_t>(seed) * 101) % 97) / 48 - 1;
  return x;
}

linnet_tensor tensor(const char* name, std::vector<float>& data, const int64_t* sizes = kSizes, int rank = 4) {
  return {name, data.data(), LINNET_F32, LINNET_CPU, rank, sizes, nullptr};
}

// A forward and a backward of causal softmax by name; all results one after the other.
std::vector<float> softmax_by_name(const linnet_executor* executor) {
  std::vector<float> q = numbers(1), k = numbers(2), v = numbers(3), dout = numbers(4);
  std::vector<float> out(q.size()), lse(kTokens * kHeads), dq(q.size()), dk(q.size());
  const std::vector<linnet_tensor> tensors = {
      tensor("q", q),       tensor("k", k),   tensor("v", v),  tensor("out", out), tensor("lse", lse, kRows, 3),
      tensor("dout", dout), tensor("dq", dq), tensor("dk", dk)};
  const linnet_option options[] = {{"causal", "true"}, {"window", "20,-1"}, {"scale", "0.25"}};
  char message[256] = "untouched";
  for (const auto& [pass, count] : {std::pair<int, int>{LINNET_FORWARD, 5}, {LINNET_BACKWARD, 8}}) {
    linnet_context context = {executor, nullptr, nullptr, 0};
    EXPECT_EQ(linnet_workspace("softmax", pass, tensors.data(), count, options, 3, &context, &context.workspace_bytes, message,
                               sizeof message),
              LINNET_OK)
        << message;
    std::vector<char> memory(static_cast<size_t>(context.workspace_bytes));
    context.workspace = memory.data();
    EXPECT_EQ(linnet_call("softmax", pass, tensors.data(), count, options, 3, &context, message, sizeof message), LINNET_OK)
        << message;
    EXPECT_STREQ(message, "");
  }
  for (const auto* more : {&lse, &dq, &dk}) out.insert(out.end(), more->begin(), more->end());
  return out;
}

TEST(CHeader, gives_the_bits_of_the_cpp_call) {
  using namespace linnet;
  std::vector<float> q = numbers(1), k = numbers(2), v = numbers(3), dout = numbers(4);
  std::vector<float> out(q.size()), lse(kTokens * kHeads), dq(q.size()), dk(q.size());
  const auto view = [](std::vector<float>& x) { return View::dense(x.data(), Dtype::f32, {1, kTokens, kHeads, kWidth}); };
  const SoftmaxArgs args{
      .q = view(q), .k = view(k), .v = view(v), .scale = 0.25, .causal = true, .window = {.left = 20, .right = -1}};
  const SoftmaxOut results{.out = view(out), .lse = View::dense(lse.data(), Dtype::f32, {1, kTokens, kHeads})};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    std::vector<char> memory(static_cast<size_t>(softmax_workspace(args, pass, {})));
    const Context context{.workspace = memory.data(), .workspace_bytes = static_cast<int64_t>(memory.size())};
    const Status status = pass == Pass::forward
                              ? softmax(args, results, context)
                              : softmax_backward(args, results, {.dout = view(dout), .dq = view(dq), .dk = view(dk)}, context);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  for (const auto* more : {&lse, &dq, &dk}) out.insert(out.end(), more->begin(), more->end());
  EXPECT_EQ(softmax_by_name(nullptr), out);
}

void run_in_turn(void* self, int64_t tasks, void (*task)(void*, int64_t, int), void* context) {
  *static_cast<bool*>(self) = true;
  for (int64_t i = 0; i < tasks; ++i) task(context, i, static_cast<int>(i % 3));
}

TEST(CHeader, executors_never_change_a_bit) {
  const std::vector<float> expected = softmax_by_name(nullptr);
  for (const int threads : {1, 2, 3, 7}) {
    linnet_executor* executor = linnet_threads(threads);
    ASSERT_NE(executor, nullptr);
    EXPECT_EQ(softmax_by_name(executor), expected) << threads << " threads";
    linnet_executor_free(executor);
  }
  bool called = false;
  linnet_executor* own = linnet_executor_new(3, run_in_turn, &called);
  EXPECT_EQ(softmax_by_name(own), expected);
  EXPECT_TRUE(called);
  linnet_executor_free(own);
  EXPECT_EQ(linnet_threads(0), nullptr);
  EXPECT_EQ(linnet_threads(2000), nullptr);
  EXPECT_EQ(linnet_executor_new(0, run_in_turn, &called), nullptr);
  EXPECT_EQ(linnet_executor_new(1, nullptr, &called), nullptr);
  linnet_executor_free(nullptr);
}

TEST(CHeader, is_reentrant) {
  const std::vector<float> expected = softmax_by_name(nullptr);
  std::vector<std::vector<float>> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) threads.emplace_back([&result] { result = softmax_by_name(nullptr); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, expected);
}

TEST(CHeader, tells_the_shape_of_outputs) {
  std::vector<float> q = numbers(1);
  const linnet_tensor tensors[] = {tensor("q", q), tensor("k", q), tensor("v", q)};
  const linnet_option map[] = {{"map", "hedgehog"}};
  int32_t dtype, rank;
  int64_t sizes[LINNET_MAX_RANK];
  char message[256];
  ASSERT_EQ(linnet_output_shape("linear", "final_state", tensors, 3, map, 1, &dtype, &rank, sizes, message, sizeof message),
            LINNET_OK)
      << message;
  EXPECT_EQ(dtype, LINNET_F32);
  ASSERT_EQ(rank, 4);
  EXPECT_EQ(sizes[1], kHeads);
  EXPECT_EQ(sizes[2], 2 * kWidth);
  ASSERT_EQ(linnet_output_shape("linear", "dq", tensors, 3, map, 1, &dtype, &rank, sizes, message, sizeof message), LINNET_OK);
  EXPECT_EQ(sizes[1], kTokens);
  EXPECT_EQ(linnet_output_shape("linear", "nothing", tensors, 3, map, 1, &dtype, &rank, sizes, message, sizeof message),
            LINNET_BAD_INPUT);
}

TEST(CHeader, describes_itself) {
  EXPECT_NE(std::strstr(linnet_describe(), "\"softmax_paged\""), nullptr);
  EXPECT_NE(std::strstr(linnet_describe(), linnet_version()), nullptr);
}

// What is wrong, and the start of the sentence about it.
struct Wrong {
  const char* name;
  void (*spoil)(std::vector<linnet_tensor>& tensors, std::vector<linnet_option>& options);
  int code;
  const char* message;
};
class CHeaderWrong : public testing::TestWithParam<Wrong> {};

TEST_P(CHeaderWrong, is_told_in_a_sentence) {
  std::vector<float> q = numbers(1), out(q.size(), 7);
  std::vector<linnet_tensor> tensors = {tensor("q", q), tensor("k", q), tensor("v", q), tensor("out", out)};
  std::vector<linnet_option> options;
  GetParam().spoil(tensors, options);
  char message[256];
  EXPECT_EQ(linnet_call("softmax", LINNET_FORWARD, tensors.data(), static_cast<int>(tensors.size()), options.data(),
                        static_cast<int>(options.size()), nullptr, message, sizeof message),
            GetParam().code);
  EXPECT_EQ(std::string(message).substr(0, std::strlen(GetParam().message)), GetParam().message);
  EXPECT_EQ(out, std::vector<float>(q.size(), 7));  // nothing written
}

const int64_t kHuge[] = {int64_t{1} << 40, int64_t{1} << 40, 2, 8};
using Tensors = std::vector<linnet_tensor>;
using Options = std::vector<linnet_option>;
const Wrong kWrong[] = {
    Wrong{"unknown_tensor", [](Tensors& t, Options&) { t[0].name = "Q"; }, LINNET_BAD_INPUT,
          "softmax: there is no tensor 'Q', expected one of q, k, v, bias"},
    Wrong{"twice", [](Tensors& t, Options&) { t[1].name = "q"; }, LINNET_BAD_INPUT, "softmax: q is given twice"},
    Wrong{"no_name", [](Tensors& t, Options&) { t[2].name = nullptr; }, LINNET_BAD_INPUT, "softmax: tensor 2 has no name"},
    Wrong{"dtype", [](Tensors& t, Options&) { t[0].dtype = 9; }, LINNET_BAD_INPUT,
          "softmax: q has dtype 9, expected LINNET_F64 (1) to LINNET_U8 (7)"},
    Wrong{"device", [](Tensors& t, Options&) { t[0].device = 5; }, LINNET_BAD_INPUT,
          "softmax: q has device 5, expected LINNET_CPU (0) or LINNET_CUDA (1)"},
    Wrong{"cuda", [](Tensors& t, Options&) { t[0].device = LINNET_CUDA; }, LINNET_BAD_INPUT,
          "softmax: k is on the CPU, expected a CUDA device (same as q"},
    Wrong{"rank", [](Tensors& t, Options&) { t[0].rank = 9; }, LINNET_BAD_INPUT, "softmax: q has rank 9, expected 0 to 8"},
    Wrong{"negative_rank", [](Tensors& t, Options&) { t[0].rank = -1; }, LINNET_BAD_INPUT, "softmax: q has rank -1"},
    Wrong{"no_sizes", [](Tensors& t, Options&) { t[0].sizes = nullptr; }, LINNET_BAD_INPUT, "softmax: q has no sizes"},
    Wrong{"huge", [](Tensors& t, Options&) { t[0].sizes = kHuge; }, LINNET_BAD_INPUT,
          "softmax: q has more elements than 64 bits can count"},
    Wrong{"no_data", [](Tensors& t, Options&) { t[0].data = nullptr; }, LINNET_BAD_INPUT, "softmax: q has no data"},
    Wrong{"missing", [](Tensors& t, Options&) { t.erase(t.begin() + 1); }, LINNET_BAD_INPUT, "softmax: k is missing"},
    Wrong{"no_output", [](Tensors& t, Options&) { t.pop_back(); }, LINNET_BAD_INPUT, "softmax: out is missing"},
    Wrong{"unknown_option",
          [](Tensors&, Options& o) {
            o.push_back({"casual", "true"});
          },
          LINNET_BAD_INPUT, "softmax: there is no option 'casual'"},
    Wrong{"option_text",
          [](Tensors&, Options& o) {
            o.push_back({"causal", "perhaps"});
          },
          LINNET_BAD_INPUT, "softmax: causal is 'perhaps'"},
    Wrong{"option_null",
          [](Tensors&, Options& o) {
            o.push_back({"causal", nullptr});
          },
          LINNET_BAD_INPUT, "softmax: option causal has no text"},
    Wrong{"option_no_name",
          [](Tensors&, Options& o) {
            o.push_back({nullptr, "1"});
          },
          LINNET_BAD_INPUT, "softmax: option 0 has no name"},
    Wrong{"option_twice",
          [](Tensors&, Options& o) {
            o = {{"chunk", "1"}, {"chunk", "2"}};
          },
          LINNET_BAD_INPUT, "softmax: chunk is given twice"}};
INSTANTIATE_TEST_SUITE_P(all, CHeaderWrong, testing::ValuesIn(kWrong), [](const auto& wrong) { return wrong.param.name; });

TEST(CHeader, survives_null_and_nonsense) {
  char message[8];
  EXPECT_EQ(linnet_call(nullptr, 0, nullptr, 0, nullptr, 0, nullptr, message, sizeof message), LINNET_BAD_INPUT);
  EXPECT_STREQ(message, "the ope");  // cut to the buffer, with its end
  EXPECT_EQ(linnet_call("nothing", 0, nullptr, 0, nullptr, 0, nullptr, nullptr, 0), LINNET_BAD_INPUT);
  EXPECT_EQ(linnet_call("softmax", 2, nullptr, 0, nullptr, 0, nullptr, nullptr, 0), LINNET_BAD_INPUT);
  EXPECT_EQ(linnet_call("softmax", 0, nullptr, 3, nullptr, 0, nullptr, nullptr, 0), LINNET_BAD_INPUT);
  EXPECT_EQ(linnet_call("softmax", 0, nullptr, 0, nullptr, -1, nullptr, nullptr, 0), LINNET_BAD_INPUT);
  EXPECT_EQ(linnet_workspace("softmax", 0, nullptr, 0, nullptr, 0, nullptr, nullptr, nullptr, 0), LINNET_BAD_INPUT);
  EXPECT_EQ(linnet_output_shape("softmax", nullptr, nullptr, 0, nullptr, 0, nullptr, nullptr, nullptr, nullptr, 0),
            LINNET_BAD_INPUT);
  linnet_context context = {nullptr, "fastest", nullptr, 0};
  std::vector<float> q = numbers(1), out = q;
  const linnet_tensor tensors[] = {tensor("q", q), tensor("k", q), tensor("v", q), tensor("out", out)};
  char text[256];
  EXPECT_EQ(linnet_call("softmax", 0, tensors, 4, nullptr, 0, &context, text, sizeof text), LINNET_BAD_INPUT);
  EXPECT_EQ(std::string(text).substr(0, 49), "softmax: there is no implementation 'fastest', ex");
  EXPECT_EQ(linnet_call("softmx", 0, tensors, 4, nullptr, 0, nullptr, text, sizeof text), LINNET_BAD_INPUT);
  EXPECT_STREQ(text, "there is no operator 'softmx'; linnet_describe() has them all");
}

TEST(CHeader, cost_of_a_call) {
  std::vector<float> q = numbers(1);
  const linnet_tensor tensors[] = {tensor("q", q), tensor("k", q), tensor("v", q)};
  char text[256];
  double flops[2] = {}, bytes[2] = {};
  for (const int pass : {LINNET_FORWARD, LINNET_BACKWARD}) {
    ASSERT_EQ(linnet_cost("softmax", pass, tensors, 3, nullptr, 0, &flops[pass], &bytes[pass], text, sizeof text), LINNET_OK)
        << text;
  }
  const double products = 4.0 * kTokens * kTokens * kHeads * kWidth;  // q k^T and the weights times v
  EXPECT_GE(flops[0], products);
  EXPECT_LE(flops[0], 1.5 * products);
  EXPECT_GT(flops[1], 2 * flops[0]);
  EXPECT_GE(bytes[0], 4.0 * sizeof(float) * static_cast<double>(q.size()));
  EXPECT_EQ(linnet_cost("softmax", 0, tensors, 2, nullptr, 0, flops, bytes, text, sizeof text), LINNET_BAD_INPUT);
  EXPECT_STREQ(text, "softmax: v is missing");
  EXPECT_EQ(linnet_cost("softmax", 0, tensors, 3, nullptr, 0, nullptr, bytes, text, sizeof text), LINNET_BAD_INPUT);
}

TEST(CHeader, tasks_by_name) {
  char message[256];
  linnet_task* task = nullptr;
  const linnet_option options[] = {{"examples", "3"}, {"length", "32"}, {"vocab", "64"}};
  ASSERT_EQ(linnet_task_make("mqar", options, 3, &task, message, sizeof message), LINNET_OK) << message;
  linnet_tensor inputs = {}, labels = {};
  ASSERT_EQ(linnet_task_tensor(task, 0, &inputs), LINNET_OK);
  ASSERT_EQ(linnet_task_tensor(task, 1, &labels), LINNET_OK);
  EXPECT_STREQ(inputs.name, "inputs");
  EXPECT_EQ(inputs.dtype, LINNET_I64);
  ASSERT_EQ(inputs.rank, 2);
  EXPECT_EQ(inputs.sizes[0], 3);
  EXPECT_EQ(inputs.sizes[1], 32);
  EXPECT_EQ(static_cast<const int64_t*>(labels.data)[0], -100);
  EXPECT_EQ(linnet_task_tensor(task, 3, &labels), LINNET_BAD_INPUT);
  EXPECT_EQ(linnet_task_tensor(task, -1, &labels), LINNET_BAD_INPUT);
  linnet_task_free(task);
  linnet_task_free(nullptr);
  EXPECT_NE(std::string(linnet_describe_tasks()).find("\"name\":\"pathfinder\""), std::string::npos);
  const linnet_option odd[] = {{"length", "33"}};
  EXPECT_EQ(linnet_task_make("mqar", odd, 1, &task, message, sizeof message), LINNET_BAD_INPUT);
  EXPECT_STREQ(message, "mqar: length is 33, expected an even number");
  EXPECT_EQ(task, nullptr);
  EXPECT_EQ(linnet_task_make("mqar", nullptr, 2, &task, message, sizeof message), LINNET_BAD_INPUT);
  EXPECT_EQ(linnet_task_make(nullptr, nullptr, 0, &task, nullptr, 0), LINNET_BAD_INPUT);
}

}  // namespace
