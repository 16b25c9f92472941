// Conversion of small random models of every family: plans, budgets, written checkpoints, resuming, what is refused.
#include "convert/convert.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "convert/sha256.h"
#include "core/files/file.h"
#include "core/files/json.h"
#include "runtime/made_model.h"

namespace linnet::convert {
namespace {

namespace fs = std::filesystem;

std::string folder_of(const std::string& name) { return testing::TempDir() + "/convert_test_" + name; }

void clear(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  fs::remove_all(path + ".work", error);
}

std::string text_file() {
  const std::string path = folder_of("text.txt");
  std::string text;
  uint64_t x = 1;
  for (int document = 0; document < 60; ++document) {
    for (int word = 0; word < 120; ++word) {
      x = x * 6364136223846793005ull + 1442695040888963407ull;
      for (uint64_t i = 0; i < 2 + (x >> 33) % 6; ++i) text += static_cast<char>('a' + (x >> (5 * i + 3)) % 26);
      text += word % 12 == 11 ? ".\n" : " ";
    }
    text += "\n";
  }
  EXPECT_TRUE(write_file(path, text).ok());
  return path;
}

ConvertOptions options_of(const std::string& family, const std::string& name) {
  const std::string model = folder_of("model_" + family);
  EXPECT_TRUE(made::make(model, made::config_of(family)).ok());
  ConvertOptions o;
  o.model = model;
  o.out = folder_of(name);
  o.text = family == "vit" ? "" : text_file();
  o.length = 256;
  o.calibration_tokens = o.plan_tokens = 256;
  o.eval_tokens = 512;
  o.windows = {8, 16, 32, 64};
  o.sinks = 2;
  o.zero_shot = true;
  o.speed = false;
  clear(o.out);
  return o;
}

Status run(const ConvertOptions& o, ConvertResult& r) { return convert_model(o, {}, r); }

std::vector<float> outputs(const std::string& path) {
  Model model;
  const Status status = Model::load(path, {"f32", 1}, model);
  EXPECT_TRUE(status.ok()) << status.message();
  std::vector<float> out;
  if (!status.ok()) return out;
  std::vector<int32_t> tokens;
  for (int i = 0; i < 100; ++i) tokens.push_back((i * i + 3 * i) % 60);
  std::vector<float> pixels(3 * 32 * 32, 0.3f);
  EXPECT_TRUE((model.summary().images ? model.classify(pixels, out) : model.hidden(tokens, out)).ok());
  return out;
}

TEST(Sha256, KnownTexts) {
  EXPECT_EQ(sha256_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_of(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Plan, KnapsackAgainstAllCombinations) {
  uint64_t x = 5;
  const auto unit = [&] {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(x >> 11) / 9007199254740992.0;
  };
  for (int trial = 0; trial < 20; ++trial) {
    std::vector<std::vector<LayerOption>> all(5);
    const std::vector<double> weights = {0.1, 0.3, 0.2, 0.25, 0.15};
    for (auto& list : all) {
      for (int o = 0; o < 4; ++o) {
        LayerOption option;
        option.cost = o == 0 ? 1 : 0.05 + 0.5 * unit();
        option.damage = o == 0 ? 0 : unit();
        list.push_back(option);
      }
    }
    double best = INFINITY;
    for (int code = 0; code < 1024; ++code) {
      double cost = 0, damage = 0;
      for (size_t s = 0; s < 5; ++s) {
        const LayerOption& o = all[s][static_cast<size_t>(code >> (2 * s) & 3)];
        cost += o.cost * weights[s], damage += o.damage;
      }
      if (cost <= 0.6) best = std::min(best, damage);
    }
    std::vector<size_t> chosen;
    ASSERT_TRUE(choose(all, weights, 0.6, chosen).ok());
    double cost = 0, damage = 0;
    for (size_t s = 0; s < 5; ++s) cost += all[s][chosen[s]].cost * weights[s], damage += all[s][chosen[s]].damage;
    EXPECT_LE(cost, 0.6 + 1e-12);
    EXPECT_LE(damage, best + 0.1);  // costs are rounded up to 1/2000 of the budget
    EXPECT_GE(damage, best - 1e-12);
    const Status none = choose(all, weights, 0.01, chosen);
    EXPECT_EQ(none.code(), Code::impossible);
    EXPECT_NE(none.message().find("the cheapest plan costs"), std::string::npos);
  }
}

TEST(Plan, HeadsAreCombined) {
  // Head 0 needs its long window, head 1 does not.
  const auto front = combine_heads({{5, 0.1}, {0.01, 0.001}}, {0.1, 1}, 10);
  ASSERT_EQ(front.size(), 3u);
  EXPECT_EQ(front[0].window, (std::vector<size_t>{0, 0}));
  EXPECT_EQ(front[1].window, (std::vector<size_t>{1, 0}));
  EXPECT_EQ(front[2].window, (std::vector<size_t>{1, 1}));
  EXPECT_NEAR(front[1].cost, 0.55, 1e-12);
  EXPECT_EQ(window_cost(512, 4, 8192, true), 2.0 * 516 / 8192);
  EXPECT_EQ(window_cost(512, 4, 512, true), 1);
}

TEST(Plan, WhatCancelsIsChosenTogether) {
  // Two heads, each with softmax and two kinds of the same cost and damage: one that pushes left, one that pushes right.
  const std::vector<float> push = {0, 1, -1};
  std::vector<std::vector<LayerOption>> options(2, std::vector<LayerOption>(3));
  std::vector<std::vector<float>> product(6, std::vector<float>(6));
  for (std::vector<LayerOption>& list : options) {
    list[0].cost = 1;
    list[1].cost = list[2].cost = 0.2, list[1].damage = list[2].damage = 1;
  }
  for (size_t a = 0; a < 6; ++a) {
    for (size_t b = 0; b < 6; ++b) product[a][b] = push[a % 3] * push[b % 3];
  }
  std::vector<size_t> chosen;
  ASSERT_TRUE(choose(options, {0.5, 0.5}, 0.5, chosen).ok());
  EXPECT_EQ(chosen, (std::vector<size_t>{1, 1}));
  choose_together(options, {0.5, 0.5}, 0.5, product, chosen);
  EXPECT_EQ(chosen[0] + chosen[1], 3u);  // one of each
  choose_together(options, {0.5, 0.5}, 1, product, chosen);
  EXPECT_EQ(chosen, (std::vector<size_t>{0, 0}));
}

TEST(Plan, HeadsOfSeveralKindsCostWhatEachCosts) {
  ConvertedLayer layer;
  layer.mechanism = "window", layer.windows = {0, 64, 0, 0}, layer.sinks = 4;
  layer.blocks = {0, 0, 16, 8}, layer.updates = {0, 0, 1, 2};
  EXPECT_NEAR(mechanism_cost(layer, 512, 32, 32, false),
              (1 + window_cost(64, 4, 512, false) + monarch_cost(16, 1, 512) + monarch_cost(8, 2, 512)) / 4, 1e-12);
  EXPECT_EQ(layer.label(), "window all/64/monarch 16 x 1/monarch 8 x 2 + 4");
}

TEST(Data, RepeatedPassagesStandAtTheEnd) {
  std::vector<int32_t> text(2000);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<int32_t>(i);
  const Sample sample = repeated_passages(text, 1024);
  ASSERT_EQ(sample.tokens.size(), 1024u);
  EXPECT_EQ(sample.from, 1024 - 4 * 48);
  for (int64_t i = 0; i < 4; ++i) {  // at 5, 25, 45 and 65 % of the text before them
    const int32_t first = sample.tokens[static_cast<size_t>(sample.from + 48 * i)];
    EXPECT_EQ(first, sample.from * (4 * i + 1) / 20);
    EXPECT_EQ(sample.tokens[static_cast<size_t>(sample.from + 48 * i + 47)], first + 47);
  }
  EXPECT_TRUE(repeated_passages(text, 100).tokens.empty());  // too short to be far
}

TEST(Plan, TrainedMechanisms) {
  for (const char* name : {"gdn", "gla", "hybrid", "hybrid-exact", "distill", "hedgehog", "t2r"})
    EXPECT_TRUE(is_trained(name)) << name;
  for (const char* name : {"softmax", "window", "monarch", "hierarchical"}) EXPECT_FALSE(is_trained(name)) << name;
}

TEST(Convert, EveryFamilyWithinItsBudgetAndReadable) {
  for (const char* family : {"llama",    "qwen2",      "qwen3",   "gpt2",       "bert",    "vit",       "mistral",
                             "smollm3",  "phi3",       "olmo2",   "gemma",      "gemma2",  "gpt_neox",  "phi",
                             "stablelm", "starcoder2", "roberta", "distilbert", "mixtral", "qwen2_moe", "granitemoeshared"}) {
    SCOPED_TRACE(family);
    ConvertOptions o = options_of(family, std::string("out_") + family);
    if (std::string(family) == "vit") o.length = 0, o.windows = {4, 8, 16};
    o.budget = 0.4;
    o.recall = false;
    ConvertResult r;
    const Status status = run(o, r);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_LE(r.cost, 0.4);
    EXPECT_EQ(r.reliable, std::string(family) != "vit");
    EXPECT_FALSE(fs::exists(o.out + ".work"));
    for (const char* file : {"config.json", "model.safetensors", "report.md", "report.json", "report.html"})
      EXPECT_TRUE(fs::exists(o.out + "/" + file)) << file;
    EXPECT_NE(outputs(o.out), outputs(o.model));
    std::string text;
    JsonValue report;
    ASSERT_TRUE(read_file(o.out + "/report.json", 1 << 24, text).ok());
    ASSERT_TRUE(parse_json(text, "report.json", {}, report).ok());
    EXPECT_TRUE(report.find("evaluation").find("identity").find("identical").boolean());
    // A conversion of the conversion keeps what is there.
    ConvertOptions again = o;
    again.model = o.out;
    again.out = folder_of(std::string("again_") + family);
    clear(again.out);
    again.budget = 1;
    ConvertResult r2;
    const Status second = run(again, r2);
    if (!second.ok()) {  // nothing is left to be converted
      EXPECT_EQ(second.code(), Code::impossible);
      EXPECT_NE(second.message().find("has no softmax attention layer"), std::string::npos) << second.message();
    } else {
      ASSERT_TRUE(second.ok()) << second.message();
      EXPECT_EQ(outputs(again.out), outputs(o.out));
    }
  }
}

TEST(Convert, ABudgetOfOneKeepsEveryNumber) {
  for (const char* family : {"llama", "gpt2", "bert"}) {
    ConvertOptions o = options_of(family, std::string("one_") + family);
    o.budget = 1;
    o.recall = false;
    ConvertResult r;
    const Status status = run(o, r);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(r.cost, 1);
    EXPECT_EQ(outputs(o.out), outputs(o.model)) << family;
  }
}

TEST(Convert, GoesOnWhereItWasKilled) {
  ConvertOptions o = options_of("llama", "straight");
  o.budget = 0.4;
  o.recall = false;
  ConvertResult expected;
  ASSERT_TRUE(run(o, expected).ok());
  const std::vector<float> numbers = outputs(o.out);
  // Killed at the first, the second, .. report of progress: in every stage.
  int kills = 0;
  for (int stop = 1; stop < 200; stop += 3) {
    o.out = folder_of("killed");
    if (stop == 1) clear(o.out);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int told = 0;
      ConvertResult r;
      const Status status = convert_model(
          o,
          [&](const std::string&, int64_t, int64_t) {
            if (++told == stop) kill(getpid(), SIGKILL);
          },
          r);
      _exit(status.ok() ? 0 : 9);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) {
      ++kills;
      EXPECT_FALSE(fs::exists(o.out));
      continue;
    }
    ASSERT_EQ(WEXITSTATUS(status), 0);
    break;
  }
  EXPECT_GT(kills, 3);
  EXPECT_EQ(outputs(o.out), numbers);
  EXPECT_FALSE(fs::exists(o.out + ".work"));
}

// A number of layers stays, whatever the budget; the others hold no more than the cache that was given.
TEST(Convert, LayersStayByNumber) {
  struct Case {
    int64_t keep, cache;
  };
  for (const Case& c : {Case{0, 40}, Case{1, 24}, Case{2, 0}, Case{3, 24}}) {
    SCOPED_TRACE(c.keep);
    ConvertOptions o = options_of("llama", "counted");
    o.keep_count = c.keep, o.cache = c.cache, o.budget = 1;
    ConvertResult r;
    const Status status = run(o, r);
    ASSERT_TRUE(status.ok()) << status.message();
    int64_t kept = 0;
    for (const PlannedLayer& p : r.layers) {
      kept += p.layer.mechanism == "softmax";
      if (p.layer.mechanism == "softmax" || c.cache == 0) continue;
      EXPECT_LE(cache_tokens(p.layer, r.length, 4, 2, 16, 16), static_cast<double>(c.cache)) << p.layer.label();
    }
    EXPECT_EQ(kept, c.keep);
  }
}

TEST(Plan, CacheOfMechanismsInTokens) {
  ConvertedLayer layer;
  EXPECT_EQ(cache_tokens(layer, 8192, 9, 3, 64, 64), 8192);
  layer.mechanism = "window", layer.window = 508, layer.sinks = 4;
  EXPECT_EQ(cache_tokens(layer, 8192, 9, 3, 64, 64), 512);
  layer.windows = {1020, 252, 252};
  EXPECT_EQ(cache_tokens(layer, 8192, 9, 3, 64, 64), 512);
  layer.windows = {0, 252, 252};
  EXPECT_EQ(cache_tokens(layer, 8192, 9, 3, 64, 64), (8192 + 2 * 256) / 3.0);
  layer = {};
  layer.mechanism = "gdn", layer.window = 60, layer.sinks = 4;
  EXPECT_EQ(cache_tokens(layer, 8192, 9, 3, 64, 64), 64 + 96);  // 3 states of 64 x 64 for the keys and values of one head
  layer.mechanism = "hedgehog", layer.window = layer.sinks = 0, layer.features = 32;
  EXPECT_EQ(cache_tokens(layer, 8192, 9, 3, 64, 64), 3 * 64 * 65 / 128.0);
}

TEST(Convert, WhatIsRefused) {
  struct Case {
    const char* name;
    void (*change)(ConvertOptions&);
    Code code;
    const char* sentence;
  };
  const Case cases[] = {
      {"budget 0", [](ConvertOptions& o) { o.budget = 0; }, Code::bad_input, "budget is 0, expected above 0 to 1"},
      {"budget too small", [](ConvertOptions& o) { o.budget = 0.001; }, Code::impossible, "the cheapest plan costs"},
      {"no out", [](ConvertOptions& o) { o.out = ""; }, Code::bad_input, "where to?"},
      {"out exists", [](ConvertOptions& o) { fs::create_directory(o.out); }, Code::bad_input, "exists already"},
      {"no parent", [](ConvertOptions& o) { o.out = "/nowhere/at/all"; }, Code::bad_input, "no such folder"},
      {"no model", [](ConvertOptions& o) { o.model += "x"; }, Code::bad_input, "no such file or folder"},
      {"no text", [](ConvertOptions& o) { o.text += "x"; }, Code::bad_input, "text.txtx"},
      {"same text", [](ConvertOptions& o) { o.eval_text = o.text; }, Code::bad_input, "the same bytes"},
      {"mechanism", [](ConvertOptions& o) { o.mechanisms = {"mamba"}; }, Code::bad_input, "there is no mechanism 'mamba'"},
      {"trained", [](ConvertOptions& o) { o.mechanisms = {"gdn"}; }, Code::bad_input, "has parameters to be trained"},
      {"keep", [](ConvertOptions& o) { o.keep = {7}; }, Code::bad_input, "--keep-softmax has layer 7, the model has 3"},
      {"too many kept", [](ConvertOptions& o) { o.keep_count = 4; }, Code::bad_input,
       "--keep-softmax is 4, the model has 3 layers"},
      {"encoding",
       [](ConvertOptions& o) {
         o.text = folder_of("latin.txt");
         EXPECT_TRUE(write_file(o.text, std::string(3000, 'a') + "\xe9t\xe9 " + std::string(3000, 'b')).ok());
       },
       Code::bad_input, "is not UTF-8 at byte 3000"},
      {"short text",
       [](ConvertOptions& o) {
         o.text = folder_of("short.txt");
         EXPECT_TRUE(write_file(o.text, "a\n\nb\n\nc\n\nd\n\ne\n\nf\n\n").ok());
       },
       Code::bad_input, "too short"},
      {"no tokenizer", [](ConvertOptions& o) { fs::remove(o.model + "/tokenizer.json"); }, Code::bad_input,
       "has no tokenizer.json"},
      {"unknown family",
       [](ConvertOptions& o) { EXPECT_TRUE(write_file(o.model + "/config.json", R"({"model_type": "rwkv9"})").ok()); },
       Code::bad_input, "model_type is \"rwkv9\""},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    ConvertOptions o = options_of("llama", "refused");
    c.change(o);
    ConvertResult r;
    const bool there = fs::exists(o.out);
    const Status status = run(o, r);
    EXPECT_EQ(status.code(), c.code) << status.message();
    EXPECT_NE(status.message().find(c.sentence), std::string::npos) << status.message();
    EXPECT_EQ(fs::exists(o.out), there);
  }
  // Other options than those of the folder that is under way.
  ConvertOptions o = options_of("llama", "other");
  fs::create_directory(o.out + ".work");
  ASSERT_TRUE(write_file(o.out + ".work/state.json", "{}").ok());
  ConvertResult r;
  EXPECT_NE(run(o, r).message().find("belongs to a conversion with other options"), std::string::npos);
}

// The fit is another program's: here it is one that hands the initial values back.
TEST(Convert, ATrainedMechanismThroughAFit) {
  ConvertOptions o = options_of("llama", "fitted");
  o.zero_shot = false;
  o.recall = false;
  o.length = 1024;
  o.budget = 0.5;
  o.mechanisms = {"gdn", "softmax"};
  const std::string python = folder_of("python.sh");
  ASSERT_TRUE(write_file(python, "#!/bin/sh\n[ \"$3\" = fit ] && cp \"$5/initial.safetensors\" \"$5/fit.safetensors\"\n").ok());
  fs::permissions(python, fs::perms::owner_all);
  setenv("LINNET_PYTHON", python.c_str(), 1);
  ConvertResult r;
  const Status status = run(o, r);
  unsetenv("LINNET_PYTHON");
  ASSERT_TRUE(status.ok()) << status.message();
  int converted = 0;
  for (const PlannedLayer& p : r.layers) converted += p.layer.mechanism == "gdn";
  EXPECT_GT(converted, 0);
  EXPECT_NE(outputs(o.out), outputs(o.model));
}

// Windows have nothing to train: no Python is asked for.
TEST(Convert, NoFitWhereNothingIsTrained) {
  ConvertOptions o = options_of("llama", "unfitted");
  o.zero_shot = false;
  o.recall = false;
  o.budget = 0.5;
  setenv("LINNET_PYTHON", "/nowhere/python", 1);
  ConvertResult r;
  const Status status = run(o, r);
  o.out = folder_of("finetuned");
  clear(o.out);
  o.fit = {"--finetune", "kl", "--finetune-tokens", "1000"};
  const Status asked = run(o, r);
  unsetenv("LINNET_PYTHON");
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_NE(asked.message().find("/nowhere/python: cannot be started"), std::string::npos) << asked.message();
  clear(o.out);
}

TEST(Convert, ADryRunWritesNothing) {
  ConvertOptions o = options_of("llama", "dry");
  o.budget = 0.4;
  o.dry_run = true;
  ConvertResult r;
  ASSERT_TRUE(run(o, r).ok());
  EXPECT_EQ(r.layers.size(), 3u);
  EXPECT_LE(r.cost, 0.4);
  EXPECT_FALSE(fs::exists(o.out));
  EXPECT_FALSE(fs::exists(o.out + ".work"));
}

TEST(Convert, PartsOfATextShareNothing) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += "document " + std::to_string(i) + "\n\n";
  TextParts p;
  ASSERT_TRUE(split_text(text, true, true, p).ok());
  EXPECT_EQ(p.calibration + p.plan + p.fit + p.evaluation, text);
  EXPECT_EQ(p.plan.substr(0, 9), "document ");
  EXPECT_EQ(p.evaluation.substr(0, 9), "document ");
  TextParts q;  // beside a fit the other parts have no more than they need
  ASSERT_TRUE(split_text(text, true, true, q, 100).ok());
  EXPECT_EQ(q.calibration + q.plan + q.fit + q.evaluation, text);
  EXPECT_LT(q.calibration.size() + q.plan.size() + q.evaluation.size(), 400u);
}

}  // namespace
}  // namespace linnet::convert
