// Converted checkpoints of every family: what a section "linnet" does, and what is refused.
#include "runtime/converted.h"

#include <gtest/gtest.h>

#include <cmath>

#include "runtime.h"
#include "runtime/layered.h"
#include "runtime/made_model.h"

namespace linnet {
namespace {

std::string section(const std::string& layers) { return R"("linnet": {"format": 1, "layers": )" + layers + "}"; }

std::string folder_of(const std::string& name) { return testing::TempDir() + "/converted_" + name; }

Model load(const std::string& folder) {
  Model model;
  const Status status = Model::load(folder, {}, model);
  EXPECT_TRUE(status.ok()) << status.message();
  return model;
}

std::vector<int32_t> some_tokens(int64_t count) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>((i * i + 7 * i) % 61));
  return tokens;
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0, top = 1e-30;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    worst = std::max(worst, static_cast<double>(std::abs(a[i] - b[i])));
    top = std::max(top, static_cast<double>(std::abs(a[i])));
  }
  return worst / top;
}

std::vector<float> outputs(const Model& model, int64_t tokens) {
  std::vector<float> out;
  Status status;
  if (model.summary().images) {
    std::vector<float> pixels(3 * 32 * 32);
    for (size_t i = 0; i < pixels.size(); ++i) pixels[i] = std::sin(static_cast<float>(i) * 0.37f);
    status = model.classify(pixels, out);
  } else {
    status = model.summary().causal ? model.logits(some_tokens(tokens), out) : model.hidden(some_tokens(tokens), out);
  }
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

TEST(Converted, AWindowThatCoversEverythingChangesNothingAndASmallOneDoes) {
  for (const char* family : {"llama", "qwen2", "qwen3", "gpt2", "bert", "vit"}) {
    SCOPED_TRACE(family);
    const std::string plain = folder_of(std::string("plain_") + family), wide = folder_of(std::string("wide_") + family),
                      narrow = folder_of(std::string("narrow_") + family);
    ASSERT_TRUE(made::make(plain, made::config_of(family)).ok());
    ASSERT_TRUE(made::make(wide, made::config_of(family, section(R"([{"index": 0, "mechanism": "softmax"},
      {"index": 1, "mechanism": "window", "window": 1000, "sinks": 4}])")))
                    .ok());
    ASSERT_TRUE(
        made::make(
            narrow,
            made::config_of(
                family, section(R"([{"index": 0, "mechanism": "window", "window": 8, "sinks": 1},
      {"index": 2, "mechanism": "window", "windows": )" +
                                std::string(family == std::string("llama") || family[0] == 'q' ? "[5, 0]" : "[5, 0, 9, 3]") +
                                R"(, "sinks": 2}])")))
            .ok());
    const std::vector<float> expected = outputs(load(plain), 100);
    EXPECT_EQ(outputs(load(wide), 100), expected);
    EXPECT_GT(difference(outputs(load(narrow), 100), expected), 1e-4);
  }
}

TEST(Converted, SessionsOfEveryMechanismAreBoundedWhereTheyShouldBe) {
  struct Case {
    const char *name, *layers;
    bool grows;
  };
  const Case cases[] = {
      {"window",
       R"([{"index": 0, "mechanism": "window", "window": 16, "sinks": 2}, {"index": 1, "mechanism": "window", "window": 9},
                     {"index": 2, "mechanism": "window", "window": 1}])",
       false},
      {"windows", R"([{"index": 1, "mechanism": "window", "windows": [16, 0], "sinks": 2}])", true},
      {"gdn", R"([{"index": 0, "mechanism": "gdn"}, {"index": 1, "mechanism": "gdn", "window": 8, "sinks": 1}])", true},
      {"gla", R"([{"index": 0, "mechanism": "gla", "window": 8}])", true},
      {"distill",
       R"([{"index": 0, "mechanism": "distill", "features": 12}, {"index": 1, "mechanism": "distill", "features": 12},
                      {"index": 2, "mechanism": "distill", "features": 12}])",
       false},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const std::string folder = folder_of(std::string("session_") + c.name);
    ASSERT_TRUE(made::make(folder, made::config_of("llama", section(c.layers))).ok());
    const Model model = load(folder);
    EXPECT_EQ(model.summary().state_per_token > 0, c.grows);
    const std::vector<int32_t> tokens = some_tokens(600);
    std::vector<float> all, logits;
    ASSERT_TRUE(model.logits(tokens, all).ok());
    const std::vector<float> expected(all.end() - 257, all.end());
    Session once, mixed;
    ASSERT_TRUE(model.start(once).ok() && model.start(mixed).ok());
    ASSERT_TRUE(once.prefill(tokens, logits).ok());
    EXPECT_LT(difference(expected, logits), 1e-4);
    for (size_t begin = 0; begin < tokens.size();) {  // 1, 2, 3, .. tokens at a time: decode forms and pieces alike
      const size_t end = std::min(tokens.size(), begin + 1 + begin % 11);
      ASSERT_TRUE(
          mixed.prefill({tokens.begin() + static_cast<ptrdiff_t>(begin), tokens.begin() + static_cast<ptrdiff_t>(end)}, logits)
              .ok());
      begin = end;
    }
    EXPECT_LT(difference(expected, logits), 1e-4);
    if (!c.grows) {
      EXPECT_LE(mixed.state_bytes(), model.summary().state_bytes);
    }
    // A session saved in the middle goes on.
    const std::string path = testing::TempDir() + "/converted_session.safetensors";
    Session again;
    std::vector<float> a, b;
    ASSERT_TRUE(model.start(again).ok() && mixed.save(path).ok());
    const Status status = again.restore(path);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(mixed.decode(5, a).ok() && again.decode(5, b).ok());
    EXPECT_EQ(a, b);
  }
}

TEST(Converted, BlockByBlockIsTheModel) {
  for (const char* family : {"llama", "gpt2", "bert"}) {
    SCOPED_TRACE(family);
    const std::string folder = folder_of(std::string("layered_") + family);
    ASSERT_TRUE(made::make(folder, made::config_of(family)).ok());
    const Model model = load(folder);
    const LayeredModel parts(model);
    std::vector<float> x, y, expected;
    ASSERT_TRUE(parts.embed(some_tokens(50), x).ok());
    for (int64_t i = 0; i < parts.layers(); ++i) {
      HeadTaps taps;
      ConvertedLayer layer;
      layer.index = i;
      ASSERT_TRUE(parts.block(layer, x, y, nullptr, &taps).ok());
      EXPECT_EQ(taps.q.size(), static_cast<size_t>(50 * parts.heads(i) * parts.key(i)));
      EXPECT_EQ(taps.k.size(), static_cast<size_t>(50 * parts.kv_heads(i) * parts.key(i)));
      x.swap(y);
    }
    ASSERT_TRUE(parts.finish(x).ok());
    ASSERT_TRUE(model.hidden(some_tokens(50), expected).ok());
    EXPECT_EQ(x, expected);
  }
}

// A long text goes through a block in pieces, and behind the model's context where positions are computed.
TEST(Converted, LongTextsInPieces) {
  constexpr int64_t kTokens = 4500;
  std::string config = made::config_of("llama");
  const std::string folder = folder_of("layered_long"), short_folder = folder_of("layered_short");
  ASSERT_TRUE(made::make(short_folder, config).ok());
  const std::string context = "\"max_position_embeddings\": 2048";
  ASSERT_NE(config.find(context), std::string::npos);
  config.replace(config.find(context), context.size(), "\"max_position_embeddings\": 8192");
  ASSERT_TRUE(made::make(folder, config).ok());
  const Model model = load(folder), beyond = load(short_folder);
  std::vector<float> expected;
  ASSERT_TRUE(model.hidden(some_tokens(kTokens), expected).ok());
  for (const Model* each : {&model, &beyond}) {
    const LayeredModel parts(*each);
    EXPECT_TRUE(parts.goes_beyond());
    std::vector<float> x, y;
    ASSERT_TRUE(parts.embed(some_tokens(kTokens), x).ok());
    for (int64_t i = 0; i < parts.layers(); ++i) {
      HeadTaps taps;
      ConvertedLayer layer;
      layer.index = i;
      const Status status = parts.block(layer, x, y, nullptr, &taps);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(taps.q.size(), static_cast<size_t>(kTokens * parts.heads(i) * parts.key(i)));
      EXPECT_EQ(taps.k.size(), static_cast<size_t>(kTokens * parts.kv_heads(i) * parts.key(i)));
      // What the heads were given explains what they gave: the last row of the last head, from its taps.
      const int64_t h = taps.heads - 1, group = h / (taps.heads / taps.kv_heads);
      const float* q = taps.q.data() + ((kTokens - 1) * taps.heads + h) * taps.key;
      double total = 0, read = 0;
      for (int64_t j = 0; j < kTokens; ++j) {
        double score = 0;
        for (int64_t c = 0; c < taps.key; ++c) {
          score += static_cast<double>(q[c]) *
                   static_cast<double>(taps.k[static_cast<size_t>((j * taps.kv_heads + group) * taps.key + c)]);
        }
        const double weight = std::exp(score * taps.scale);
        total += weight;
        read += weight * static_cast<double>(taps.v[static_cast<size_t>((j * taps.kv_heads + group) * taps.value)]);
      }
      EXPECT_NEAR(static_cast<double>(taps.out[static_cast<size_t>(((kTokens - 1) * taps.heads + h) * taps.value)]),
                  read / total, 1e-5);
      x.swap(y);
    }
    ASSERT_TRUE(parts.finish(x).ok());
    EXPECT_LT(difference(x, expected), 1e-4);
  }
  ASSERT_TRUE(made::make(short_folder, made::config_of("gpt2")).ok());
  const Model table = load(short_folder);
  std::vector<float> x;
  EXPECT_FALSE(LayeredModel(table).goes_beyond());
  EXPECT_NE(LayeredModel(table).embed(some_tokens(kTokens), x).message().find("more than the model's context"),
            std::string::npos);
}

TEST(Converted, WhatIsRefused) {
  struct Case {
    std::string family, layers, sentence;
  };
  const Case cases[] = {
      {"llama", R"([{"index": 3, "mechanism": "window", "window": 8}])", "has layer 3, the model has 3"},
      {"llama", R"([{"index": 1, "mechanism": "window", "window": 8}, {"index": 1, "mechanism": "softmax"}])",
       "has layer 1 twice"},
      {"llama", R"([{"index": 1, "mechanism": "mamba"}])",
       "the mechanism of layer 1 is \"mamba\", expected one of softmax, window"},
      {"llama", R"([{"index": 1, "mechanism": "window"}])", "window is missing"},
      {"llama", R"([{"index": 1, "mechanism": "window", "window": 0}])", "window is 0, expected 1 to"},
      {"llama", R"([{"index": 1, "mechanism": "window", "windows": [4, 4, 4]}])",
       "windows has 3 entries, expected one for each head of keys, 2"},
      {"bert", R"([{"index": 1, "mechanism": "window", "windows": [4, 4], "blocks": [0, 4]}])",
       "windows, blocks and updates are lists of one length"},
      {"llama", R"([{"index": 1, "mechanism": "window", "windows": [4, 4], "blocks": [0, 4], "updates": [0, 1]}])",
       "Monarch in single heads has no bounded state, expected causal=0"},
      {"llama", R"([{"index": 1, "mechanism": "distill"}])", "features is missing"},
      {"llama", R"([{"index": 1, "mechanism": "gdn"}])", "tensor \"linnet.layers.1.gdn.a_proj.weight\" is missing"},
      {"bert", R"([{"index": 1, "mechanism": "gdn"}])", "gdn sees no later token, expected causal=1"},
      {"llama", R"(7)", "linnet.layers is missing"},
  };
  for (const Case& c : cases) {
    const std::string folder = folder_of("refused");
    ASSERT_TRUE(made::make(folder, made::config_of(c.family)).ok());
    ASSERT_TRUE(write_file(folder + "/config.json", made::config_of(c.family, section(c.layers))).ok());
    Model model;
    const Status status = Model::load(folder, {}, model);
    EXPECT_EQ(status.code(), Code::bad_input) << c.layers;
    EXPECT_NE(status.message().find(c.sentence), std::string::npos) << c.sentence << " | " << status.message();
  }
  const std::string folder = folder_of("format");
  ASSERT_TRUE(made::make(folder, made::config_of("llama")).ok());
  ASSERT_TRUE(write_file(folder + "/config.json", made::config_of("llama", R"("linnet": {"format": 2, "layers": []})")).ok());
  Model model;
  EXPECT_NE(Model::load(folder, {}, model).message().find("linnet.format is 2, expected 1"), std::string::npos);
}

TEST(Converted, AMisshapenParameterIsNamed) {
  const std::string folder = folder_of("shape");
  ASSERT_TRUE(
      made::make(folder, made::config_of("llama", section(R"([{"index": 1, "mechanism": "distill", "features": 12}])"))).ok());
  ASSERT_TRUE(write_file(folder + "/config.json",
                         made::config_of("llama", section(R"([{"index": 1, "mechanism": "distill", "features": 13}])")))
                  .ok());
  Model model;
  const Status status = Model::load(folder, {}, model);
  EXPECT_NE(status.message().find("is [4, 12, 8], expected [4, 13, 8]"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace linnet
