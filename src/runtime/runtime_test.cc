// Models made up here, small and random: blocks in every order, sessions, saved states, hostile folders. Real families are
// compared with transformers in tests/python/test_models.py.
#include "runtime.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/files/file.h"
#include "core/files/safetensors.h"
#include "core/tolerance.h"
#include "layers/record.h"
#include "runtime/config.h"
#include "runtime/description.h"

namespace linnet {
namespace {

// A folder with this config and random weights for every tensor of its records.
std::string make_model(const std::string& name, const std::string& json, uint64_t seed = 1) {
  const std::string folder = testing::TempDir() + "/" + name;
  mkdir(folder.c_str(), 0777);
  EXPECT_TRUE(write_file(folder + "/config.json", json).ok());
  Config config;
  Description d;
  EXPECT_TRUE(Config::parse(json, "config.json", config).ok());
  const Status status = describe_model(config, d);
  EXPECT_TRUE(status.ok()) << status.message();
  layers::Record body, head;
  const Status recorded = record_body(d, &body);
  EXPECT_TRUE(recorded.ok()) << recorded.message();
  EXPECT_TRUE(record_head(d, &head).ok());
  std::vector<std::vector<float>> memory;
  std::vector<SafetensorsTensor> tensors;
  for (const layers::Record* record : {&body, &head}) {
    for (const layers::Parameter& p : record->parameters) {
      bool known = false;
      for (const SafetensorsTensor& t : tensors) known |= t.name == p.name;
      if (known) continue;
      const std::vector<double> values = layers::initial_values(p.init, p.shape, p.name, seed);
      memory.emplace_back(values.begin(), values.end());
      tensors.push_back({p.name, "F32", p.shape, memory.back().data()});
    }
  }
  EXPECT_TRUE(write_safetensors(folder + "/model.safetensors", tensors).ok());
  return folder;
}

std::string linnet_config(const std::string& order, const std::string& layers) {
  return R"({"model_type": "linnet", "vocab_size": 96, "hidden_size": 64, "max_position_embeddings": 512,
             "tie_word_embeddings": true, "linnet": {"order": ")" +
         order + R"(", "layers": )" + layers + "}}";
}
const char* const kSoftmax =
    R"([{"mixer": "softmax_attention", "options": {"heads": 4, "kv_heads": 2}, "intermediate_size": 96, "repeat": 2}])";

std::vector<int32_t> some_tokens(int64_t count, int32_t step = 7) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>((i * i + i * step) % 96));
  return tokens;
}

double largest_difference(const float* a, const float* b, size_t count) {
  double worst = 0, top = 1e-30;
  for (size_t i = 0; i < count; ++i) {
    worst = std::max(worst, static_cast<double>(std::abs(a[i] - b[i])));
    top = std::max(top, static_cast<double>(std::abs(a[i])));
  }
  return worst / top;
}

Model load(const std::string& folder, const ModelOptions& options = {}) {
  Model model;
  const Status status = Model::load(folder, options, model);
  EXPECT_TRUE(status.ok()) << status.message();
  return model;
}

TEST(Model, APromptAtOnceInPiecesAndTokenByToken) {
  for (const char* order : {"pre", "post", "parallel"}) {
    const Model model = load(make_model(std::string("order_") + order, linnet_config(order, kSoftmax)));
    const std::vector<int32_t> tokens = some_tokens(37);
    std::vector<float> all, last, logits;
    ASSERT_TRUE(model.logits(tokens, all).ok());
    const float* expected = all.data() + 36 * 96;
    Session once, pieces, steps;
    ASSERT_TRUE(model.start(once).ok() && model.start(pieces).ok() && model.start(steps).ok());
    ASSERT_TRUE(once.prefill(tokens, last).ok());
    EXPECT_LT(largest_difference(expected, last.data(), 96), 1e-4) << order;
    ASSERT_TRUE(pieces.prefill({tokens.begin(), tokens.begin() + 20}, logits).ok());
    ASSERT_TRUE(pieces.prefill({tokens.begin() + 20, tokens.end()}, logits).ok());
    EXPECT_LT(largest_difference(expected, logits.data(), 96), 1e-4) << order;
    for (const int32_t token : tokens) ASSERT_TRUE(steps.decode(token, logits).ok());
    EXPECT_LT(largest_difference(expected, logits.data(), 96), 1e-4) << order;
    EXPECT_EQ(steps.position(), 37);
    std::vector<float> losses;
    ASSERT_TRUE(model.losses(tokens, losses).ok());
    ASSERT_EQ(losses.size(), 36u);
    double sum = 0;
    for (int j = 0; j < 96; ++j) sum += std::exp(static_cast<double>(all[static_cast<size_t>(j)]));
    EXPECT_NEAR(losses[0], std::log(sum) - all[static_cast<size_t>(tokens[1])], 1e-4);
  }
}

TEST(Session, SeveralInOneCallAndCopies) {
  const Model model = load(make_model("several", linnet_config("pre", kSoftmax)));
  Session a, b, c;
  std::vector<float> la, lb, both, again;
  ASSERT_TRUE(model.start(a).ok() && model.start(b).ok());
  ASSERT_TRUE(a.prefill(some_tokens(9), la).ok());
  ASSERT_TRUE(b.prefill(some_tokens(23, 5), lb).ok());
  Session a2, b2;
  ASSERT_TRUE(a.copy(a2).ok() && b.copy(b2).ok() && a.copy(c).ok());
  ASSERT_TRUE(decode({&a, &b}, {3, 4}, both).ok());
  ASSERT_TRUE(a2.decode(3, la).ok());
  ASSERT_TRUE(b2.decode(4, lb).ok());
  EXPECT_LT(largest_difference(la.data(), both.data(), 96), 1e-5);
  EXPECT_LT(largest_difference(lb.data(), both.data() + 96, 96), 1e-5);
  EXPECT_EQ(c.position(), 9);  // a copy stays where it was
  ASSERT_TRUE(c.decode(3, again).ok());
  EXPECT_EQ(la, again);
  EXPECT_NE(decode({&a, &a}, {1, 2}, both).message().find("given twice"), std::string::npos);
  EXPECT_NE(decode({&a}, {1, 2}, both).message().find("1 sessions and 2 tokens"), std::string::npos);
}

TEST(Session, SavesAndRestores) {
  const std::string folder = make_model("saved", linnet_config("pre", kSoftmax));
  const Model model = load(folder), other = load(make_model("saved_other", linnet_config("pre", kSoftmax), 2));
  Session a, b, wrong;
  std::vector<float> la, lb;
  ASSERT_TRUE(model.start(a).ok() && model.start(b).ok() && other.start(wrong).ok());
  ASSERT_TRUE(a.prefill(some_tokens(31), la).ok());
  const std::string path = testing::TempDir() + "/session.safetensors";
  ASSERT_TRUE(a.save(path).ok());
  const Status status = b.restore(path);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(b.position(), 31);
  ASSERT_TRUE(a.decode(11, la).ok());
  ASSERT_TRUE(b.decode(11, lb).ok());
  EXPECT_EQ(la, lb);
  EXPECT_NE(wrong.restore(path).message().find("session of another model"), std::string::npos);
  EXPECT_NE(b.restore(folder + "/model.safetensors").message().find("no saved session"), std::string::npos);
  EXPECT_EQ(b.position(), 32);  // a refused file changes nothing
}

TEST(Model, ThreadsChangeNothing) {
  const std::string folder = make_model("threads", linnet_config("pre", kSoftmax));
  for (const char* weights : {"f32", "bf16", "q8", "q4"}) {
    std::vector<float> expected;
    for (const int threads : {1, 2, 3}) {
      const Model model = load(folder, {weights, threads});
      std::vector<float> logits;
      ASSERT_TRUE(model.logits(some_tokens(40), logits).ok());
      Session session;
      std::vector<float> last;
      ASSERT_TRUE(model.start(session).ok());
      ASSERT_TRUE(session.prefill(some_tokens(300), last).ok());
      ASSERT_TRUE(session.decode(5, last).ok());
      logits.insert(logits.end(), last.begin(), last.end());
      if (expected.empty()) expected = logits;
      EXPECT_EQ(expected, logits) << weights << " " << threads;
    }
  }
}

TEST(Model, HeldInFewerBitsStaysNear) {
  const std::string folder = make_model("bits", linnet_config("pre", kSoftmax));
  std::vector<float> exact, logits;
  ASSERT_TRUE(load(folder).logits(some_tokens(40), exact).ok());
  const std::pair<const char*, double> cases[] = {{"bf16", 0.02}, {"q8", 0.03}, {"q4", 0.3}};
  for (const auto& [weights, bound] : cases) {
    const Model model = load(folder, {weights});
    EXPECT_NE(model.summary().weights.find(weights), std::string::npos);
    ASSERT_TRUE(model.logits(some_tokens(40), logits).ok());
    const double difference = largest_difference(exact.data(), logits.data(), exact.size());
    EXPECT_LT(difference, bound) << weights;
    EXPECT_GT(difference, 0) << weights;
  }
}

// The cache of softmax attention is f32 with f32 matrices and bf16 with smaller ones, unless the caller says otherwise.
TEST(Model, AttentionInFewerBits) {
  const double gate = max_gate(rms_gate(Dtype::bf16, Pass::forward, Against::reference, false, 0, Rounding::matrix_units));
  const std::string folder = make_model("attention", linnet_config("pre", kSoftmax));
  const struct {
    const char *weights, *attention, *held;
  } cases[] = {{"", "", "f32"}, {"", "bf16", "bf16"}, {"q8", "", "bf16"}, {"q8", "f32", "f32"}, {"bf16", "", "bf16"}};
  int64_t wide = 0;
  for (const auto& c : cases) {
    const Model model = load(folder, {.weights = c.weights, .attention = c.attention});
    EXPECT_EQ(model.summary().attention, c.held) << c.weights;
    Session session;
    std::vector<float> all, last;
    ASSERT_TRUE(model.start(session).ok());
    ASSERT_TRUE(session.prefill(some_tokens(37), last).ok());
    ASSERT_TRUE(model.logits(some_tokens(37), all).ok());
    EXPECT_LT(largest_difference(all.data() + 36 * 96, last.data(), 96), gate) << c.weights << " " << c.attention;
    if (wide == 0) wide = session.state_bytes();
    const bool half = c.held == std::string("bf16");
    EXPECT_LE(session.state_bytes(), half ? wide / 2 + 64 : wide) << c.weights << " " << c.attention;
    EXPECT_EQ(model.summary().state_per_token, half ? 2 * 2 * 2 * 16 * 2 : 2 * 2 * 2 * 16 * 4);
  }
}

TEST(Model, WhatItRefuses) {
  const std::string folder = make_model("refused", linnet_config("pre", kSoftmax));
  const Model model = load(folder);
  Session session;
  std::vector<float> logits;
  ASSERT_TRUE(model.start(session).ok());
  EXPECT_NE(session.prefill({}, logits).message().find("the prompt is empty"), std::string::npos);
  EXPECT_NE(session.prefill({96}, logits).message().find("token 96 is none of the model's 96"), std::string::npos);
  EXPECT_NE(session.prefill(some_tokens(513), logits).message().find("513 tokens, more than the model's context of 512"),
            std::string::npos);
  EXPECT_EQ(session.position(), 0);
  Model out;
  struct Case {
    std::string json, sentence;
  };
  const Case cases[] = {
      {"{", "config.json"},
      {R"({"model_type": "mamba9"})", "model_type is \"mamba9\", expected one of llama"},
      {R"({"model_type": "llama", "vocab_size": 96})", "hidden_size is missing"},
      {R"({"model_type": "llama", "vocab_size": 0, "hidden_size": 64})", "vocab_size is 0, expected 1 to"},
      {R"({"model_type": "llama", "vocab_size": 99999999999, "hidden_size": 64})", "vocab_size is 99999999999"},
      {R"({"model_type": "mixtral", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 9})",
       "num_experts_per_tok is 9, expected 1 to 4"},
      {R"({"model_type": "olmoe", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
           "intermediate_size": 96, "clip_qkv": 8})",
       "clip_qkv is given, expected null"},
      {linnet_config("pre", "[]"), "linnet.layers is empty"},
      {linnet_config("sideways", kSoftmax), "order is \"sideways\""},
      {linnet_config("pre", R"([{"mixer": "nothing"}])"), "mixer is \"nothing\", which is no layer"},
      {linnet_config("pre", R"([{"mlp": "moe"}])"), "mlp is \"moe\""},
      {linnet_config("pre", R"([{"options": {"heads": 5}}])"), "heads"},
      {linnet_config("pre", R"([{"options": {"wings": 2}}])"), "wings"},
      {linnet_config("pre", R"([{"options": {"heads": 4}, "repeat": 2}])"), "is [32, 64], expected [64, 64]"},
      {linnet_config("pre", R"([{"options": {"heads": 4, "kv_heads": 2}, "intermediate_size": 96, "repeat": 3}])"),
       "is missing"},
  };
  for (const Case& c : cases) {
    ASSERT_TRUE(write_file(folder + "/config.json", c.json).ok());
    const Status status = Model::load(folder, {}, out);
    EXPECT_EQ(status.code(), Code::bad_input) << c.json;
    EXPECT_NE(status.message().find(c.sentence), std::string::npos) << c.sentence << " | " << status.message();
  }
  EXPECT_NE(Model::load(folder + "/nowhere", {}, out).message().find("no such file"), std::string::npos);
  EXPECT_NE(Model::load(folder, {"q3"}, out).message().find("weights is 'q3'"), std::string::npos);
  EXPECT_NE(Model::load(folder, {.attention = "q8"}, out).message().find("attention is 'q8', expected f32 or bf16"),
            std::string::npos);
}

TEST(Model, ANumberThatIsNotFiniteIsNamed) {
  const std::string folder = make_model("nan", linnet_config("pre", kSoftmax));
  std::string bytes;
  ASSERT_TRUE(read_file(folder + "/model.safetensors", 1 << 24, bytes).ok());
  const float nan = NAN;
  std::memcpy(bytes.data() + bytes.size() - 4, &nan, 4);
  ASSERT_TRUE(write_file(folder + "/model.safetensors", bytes).ok());
  Model out;
  EXPECT_NE(Model::load(folder, {}, out).message().find("holds a value that is not finite"), std::string::npos);
}

}  // namespace
}  // namespace linnet
