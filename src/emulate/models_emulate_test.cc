// Models on the emulated GPU (docs/emulate.md) beside the same models on the CPU: small random ones of several families, with
// every layer as a mixer, weights of every kind: prompts at once and in pieces, decode, sessions that are copied, saved and
// restored.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "runtime.h"
#include "runtime/made_model.h"

namespace linnet {
namespace {

Model load(const std::string& folder, const std::string& device, const std::string& weights = "",
           const std::string& attention = "") {
  Model model;
  const Status status = Model::load(folder, {.weights = weights, .attention = attention, .device = device}, model);
  EXPECT_TRUE(status.ok()) << status.message();
  return model;
}
std::vector<int32_t> some_tokens(int64_t count) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>((i * i + 7 * i) % 61));
  return tokens;
}
double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = 0, top = 1e-30;
  for (size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
    top = std::max(top, std::abs(static_cast<double>(a[i])));
  }
  return worst / top;
}
int32_t best(const std::vector<float>& logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// A prompt, half of it at once and some of it token by token, then greedy text: the same on both.
void expect_same(const Model& cpu, const Model& gpu, double limit) {
  Session there, here;
  std::vector<float> expected, logits;
  ASSERT_TRUE(cpu.start(here).ok());
  const Status started = gpu.start(there);
  ASSERT_TRUE(started.ok()) << started.message();
  const std::vector<int32_t> tokens = some_tokens(30);
  const auto feed = [&](const std::vector<int32_t>& piece) {
    ASSERT_TRUE(here.prefill(piece, expected).ok());
    const Status status = there.prefill(piece, logits);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_LT(difference(expected, logits), limit) << "after " << here.position() << " tokens";
  };
  feed({tokens.begin(), tokens.begin() + 20});
  feed({tokens.begin() + 20, tokens.begin() + 29});
  feed({tokens[29]});
  for (int i = 0; i < 6 && !testing::Test::HasFatalFailure(); ++i) {
    EXPECT_EQ(best(expected), best(logits));
    feed({best(expected)});
  }
}

class EmulatedFamily : public testing::TestWithParam<const char*> {};
TEST_P(EmulatedFamily, gives_the_text_of_the_cpu) {
  const std::string folder = testing::TempDir() + "/gpu_" + GetParam();
  const Status made = made::make(folder, made::config_of(GetParam()));
  ASSERT_TRUE(made.ok()) << made.message();
  expect_same(load(folder, "cpu"), load(folder, "cuda"), 1e-4);
}
INSTANTIATE_TEST_SUITE_P(Families, EmulatedFamily,
                         testing::Values("llama", "qwen3", "gpt2", "gpt_neox", "gemma2", "mistral", "phi"),
                         [](const auto& each) { return std::string(each.param); });

// Every layer that continues a text, in a model of its own.
struct Mixer {
  const char *name, *layer, *options;
};
std::string model_of(const Mixer& mixer) {
  return std::string(R"({"model_type": "linnet", "vocab_size": 96, "hidden_size": 32, "max_position_embeddings": 512,
                         "tie_word_embeddings": true, "linnet": {"order": "pre", "layers": [{"mixer": ")") +
         mixer.layer + R"(", "options": {)" + mixer.options + R"(}, "intermediate_size": 48, "repeat": 2}]}})";
}
class EmulatedLayer : public testing::TestWithParam<Mixer> {};
TEST_P(EmulatedLayer, gives_the_text_of_the_cpu) {
  const std::string folder = testing::TempDir() + "/gpu_" + GetParam().name;
  const Status made = made::make(folder, model_of(GetParam()));
  ASSERT_TRUE(made.ok()) << made.message();
  expect_same(load(folder, "cpu"), load(folder, "cuda"), 1e-4);
}
constexpr Mixer kMixers[] = {
    {"softmax", "softmax_attention", R"("heads": 4, "kv_heads": 2)"},
    {"window", "softmax_attention", R"("heads": 4, "window": [8, 0], "prefix": 2)"},
    {"retention", "retention", R"("heads": 4)"},
    {"simple_gla", "simple_gla", R"("heads": 4)"},
    {"gla", "gated_linear_attention", R"("heads": 4)"},
    {"deltanet", "deltanet", R"("heads": 4)"},
    {"gated_deltanet", "gated_deltanet", R"("heads": 2, "key": 8, "value": 16)"},
    {"kda", "kda", R"("heads": 2)"},
    {"short_conv", "short_conv", ""},
    {"mamba1", "mamba1", ""},
    {"mamba2", "mamba2", ""},
    {"metala", "metala_attention", R"("heads": 4)"},
    {"h3", "h3_mixer", ""},
    {"zeros", "zeros_attention", R"("heads": 4)"},
    {"fem", "free_energy_mixer", R"("heads": 4)"},
    {"fem_linear", "free_energy_mixer", R"("heads": 4, "prior": "linear")"},
    {"linear", "linear_attention", R"("heads": 4)"},
    {"normalised", "normalised_attention", R"("heads": 4)"},
    {"taylor", "taylor_attention", R"("heads": 4)"},
    {"inline_", "inline_attention", R"("heads": 4, "causal": true, "residual": false)"},
    {"hierarchical", "hierarchical_attention", R"("heads": 4)"},
    {"distilled", "distilled_attention", R"("heads": 4, "features": 12)"},
    {"hybrid", "hybrid_attention", R"("heads": 4, "window": 6)"},
    {"terraced", "hybrid_attention", R"("heads": 4, "window": 6, "form": "terraced")"},
    {"exact_hybrid", "converted_attention", R"("heads": 4, "mechanism": "hybrid-exact", "window": 6, "sinks": 2)"},
};
INSTANTIATE_TEST_SUITE_P(Layers, EmulatedLayer, testing::ValuesIn(kMixers),
                         [](const auto& each) { return std::string(each.param.name); });

// Weights of every kind; attention in bf16, whose roundings differ from one tile to another; sessions side by side, copied,
// saved and restored; an encoder; what is refused.
struct Kind {
  const char *name, *weights, *attention;
  double limit;
};
class EmulatedWeights : public testing::TestWithParam<Kind> {};
TEST_P(EmulatedWeights, give_the_text_of_the_cpu) {
  const auto& [name, weights, attention, limit] = GetParam();
  const std::string folder = testing::TempDir() + "/gpu_" + name;
  ASSERT_TRUE(made::make(folder, made::config_of("llama")).ok());
  expect_same(load(folder, "cpu", weights, attention), load(folder, "cuda", weights, attention), limit);
}
INSTANTIATE_TEST_SUITE_P(Kinds, EmulatedWeights,
                         testing::Values(Kind{"f32", "f32", "f32", 1e-4}, Kind{"bf16", "bf16", "f32", 1e-4},
                                         Kind{"q8", "q8", "f32", 1e-4}, Kind{"q4", "q4", "f32", 1e-4},
                                         Kind{"narrow", "bf16", "bf16", 2e-2}),
                         [](const auto& each) { return std::string(each.param.name); });

TEST(EmulatedSession, is_copied_saved_and_restored) {
  const std::string folder = testing::TempDir() + "/gpu_session", file = testing::TempDir() + "/gpu_session.state";
  ASSERT_TRUE(made::make(folder, made::config_of("llama")).ok());
  const Model cpu = load(folder, "cpu"), gpu = load(folder, "cuda");
  Session first, second, copy, restored, elsewhere;
  std::vector<float> logits, again, both, one;
  ASSERT_TRUE(gpu.start(first).ok() && gpu.start(second).ok() && gpu.start(restored).ok() && cpu.start(elsewhere).ok());
  ASSERT_TRUE(first.prefill(some_tokens(300), logits).ok());  // more than a state's first room
  ASSERT_TRUE(second.prefill(some_tokens(9), one).ok());
  ASSERT_TRUE(first.copy(copy).ok() && first.save(file).ok() && restored.restore(file).ok() && elsewhere.restore(file).ok());
  ASSERT_TRUE(decode({&first, &second}, {3, 4}, both).ok());
  for (Session* each : {&copy, &restored}) {
    ASSERT_TRUE(each->decode(3, again).ok());
    EXPECT_LT(difference({both.begin(), both.begin() + 257}, again), 1e-5);
  }
  ASSERT_TRUE(elsewhere.decode(3, again).ok());  // a session of the GPU goes on on the CPU
  EXPECT_LT(difference({both.begin(), both.begin() + 257}, again), 1e-4);
}

TEST(EmulatedModel, embeds_and_refuses_with_a_sentence) {
  const std::string folder = testing::TempDir() + "/gpu_bert";
  ASSERT_TRUE(made::make(folder, made::config_of("bert")).ok());
  std::vector<float> here, there;
  ASSERT_TRUE(load(folder, "cpu").embed(some_tokens(12), here).ok());
  ASSERT_TRUE(load(folder, "cuda").embed(some_tokens(12), there).ok());
  EXPECT_LT(difference(here, there), 1e-4);
  Model model;
  EXPECT_NE(Model::load(folder, {.device = "tpu"}, model).message().find("expected cpu or cuda"), std::string::npos);
  const std::string mixture = testing::TempDir() + "/gpu_mixtral";
  ASSERT_TRUE(made::make(mixture, made::config_of("mixtral")).ok());
  const Status refused = Model::load(mixture, {.device = "cuda"}, model);
  EXPECT_NE(refused.message().find("a mixture of experts, which runs on the CPU alone so far"), std::string::npos)
      << refused.message();
}

}  // namespace
}  // namespace linnet
