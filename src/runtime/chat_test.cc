// Chat templates, sampling, streaming and Unicode. The tokenisers themselves are compared with the tokenizers package in
// tests/python/test_tokenizer.py.
#include "runtime/chat.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "runtime/sampler.h"
#include "runtime/tokenizer/pretokenize.h"
#include "runtime/tokenizer/unicode.h"

namespace linnet {
namespace {

std::string joined(const std::vector<Tokenizer::Part>& parts) {
  std::string text;
  for (const Tokenizer::Part& part : parts) text += part.text;
  return text;
}

TEST(Chat, WritesEachForm) {
  struct Case {
    const char *mark, *name, *first, *plain, *next;
  };
  const Case cases[] = {
      {"{{'<|im_start|>' + message['role'] + '\n'", "ChatML",
       "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n",
       "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n",
       "<|im_end|>\n<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n"},
      {"'<|start_header_id|>'", "Llama 3",
       "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nQ"
       "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
       "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>"
       "\n\n",
       "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nQ2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"},
      {"'[INST] '", "Llama 2", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST]", "<s>[INST] Q [/INST]",
       " </s><s>[INST] Q2 [/INST]"},
      {"'<|user|>\n' eos_token", "Zephyr", "<|system|>\nS</s>\n<|user|>\nQ</s>\n<|assistant|>\n",
       "<|user|>\nQ</s>\n<|assistant|>\n", "</s>\n<|user|>\nQ2</s>\n<|assistant|>\n"},
      {"'<|user|>\n' '<|end|>'", "Phi", "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\n",
       "<|user|>\nQ<|end|>\n<|assistant|>\n", "<|end|>\n<|user|>\nQ2<|end|>\n<|assistant|>\n"},
      {"'<start_of_turn>'", "Gemma", "<bos><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\n",
       "<bos><start_of_turn>user\nQ<end_of_turn>\n<start_of_turn>model\n",
       "<end_of_turn>\n<start_of_turn>user\nQ2<end_of_turn>\n<start_of_turn>model\n"},
  };
  for (const Case& c : cases) {
    ChatTemplate chat;
    ASSERT_TRUE(ChatTemplate::recognize(c.mark, chat).ok());
    EXPECT_STREQ(chat_form_name(chat.form()), c.name);
    EXPECT_EQ(joined(chat.begin("S", "Q")), c.first);
    EXPECT_EQ(joined(chat.begin("", "Q")), c.plain);
    EXPECT_EQ(joined(chat.next("Q2")), c.next);
    EXPECT_FALSE(chat.ends().empty());
  }
}

TEST(Chat, DefaultSystemMessageAndUnknownTemplate) {
  ChatTemplate chat;
  ASSERT_TRUE(ChatTemplate::recognize("{{ '<|im_start|>system\\nYou are\\nkind<|im_end|>\\n' }}{{'<|im_start|>'}}", chat).ok());
  EXPECT_EQ(chat.default_system(), "You are\nkind");
  ASSERT_TRUE(ChatTemplate::recognize("'<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>'", chat).ok());
  EXPECT_EQ(chat.default_system(), "");
  const Status unknown = ChatTemplate::recognize("{{ '### Human:' }}", chat);
  EXPECT_FALSE(unknown.ok());
  EXPECT_NE(unknown.message().find("none of ChatML"), std::string::npos);
  EXPECT_NE(ChatTemplate::recognize("", chat).message().find("no chat template"), std::string::npos);
}

TEST(Sampler, FollowsItsOptions) {
  const std::vector<float> logits = {0.0f, 3.0f, 2.0f, 3.0f, -1.0f, NAN};
  const int64_t n = static_cast<int64_t>(logits.size());
  const auto draws = [&](SamplerOptions options) {
    Sampler sampler(options);
    std::vector<int> counts(logits.size());
    for (int i = 0; i < 20000; ++i) ++counts[static_cast<size_t>(sampler.next(logits.data(), n))];
    return counts;
  };
  EXPECT_EQ(Sampler({}).next(logits.data(), n), 1);  // equal logits: the smaller number
  const std::vector<int> all = draws({.temperature = 1});
  double total = 0;
  for (const float x : logits) total += std::isnan(x) ? 0 : std::exp(static_cast<double>(x));
  for (size_t i = 0; i < 5; ++i) {
    const double p = std::exp(static_cast<double>(logits[i])) / total;
    EXPECT_NEAR(all[i] / 20000.0, p, 5 * std::sqrt(p / 20000)) << i;
  }
  EXPECT_EQ(all[5], 0);
  EXPECT_EQ(draws({.temperature = 1}), all);  // same seed, same tokens
  EXPECT_NE(draws({.temperature = 1, .seed = 1}), all);
  EXPECT_EQ(draws({.temperature = 1, .top_k = 2})[2], 0);
  EXPECT_EQ(draws({.temperature = 1, .top_p = 0.5})[2], 0);
  EXPECT_GT(draws({.temperature = 1, .top_p = 0.9})[2], 0);
  EXPECT_EQ(draws({.temperature = 1, .min_p = 0.3})[0], 0);
  EXPECT_GT(draws({.temperature = 1, .min_p = 0.3})[2], 0);
  EXPECT_EQ(draws({.temperature = 1, .top_k = 1})[1], 20000);
  const std::vector<float> endless = {1.0f, INFINITY, -INFINITY};
  EXPECT_EQ(Sampler({.temperature = 1}).next(endless.data(), 3), 1);
  const std::vector<float> nothing = {NAN, -INFINITY, -INFINITY};
  EXPECT_EQ(Sampler({.temperature = 1, .top_p = 0.5}).next(nothing.data(), 3), 1);
  Sampler penalised({.repeat_penalty = 2});
  penalised.accept(1);
  EXPECT_EQ(penalised.next(logits.data(), n), 3);
  EXPECT_FALSE(check_sampling(SamplerOptions{.temperature = -1}).ok());
  EXPECT_FALSE(check_sampling(SamplerOptions{.top_p = 0}).ok());
  EXPECT_FALSE(check_sampling(SamplerOptions{.temperature = NAN}).ok());
  EXPECT_TRUE(check_sampling(SamplerOptions{}).ok());
}

// Many tokens, most of them far from likely: the kept ones have their probabilities, whatever the order they are found in.
TEST(Sampler, DrawsFromManyTokens) {
  std::vector<float> logits(5000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = -0.02f * static_cast<float>(i * 2677 % 5000);
  double total = 0, sum = 0, least = 0;
  std::vector<float> sorted = logits;
  std::sort(sorted.rbegin(), sorted.rend());
  for (const float x : sorted) total += std::exp(static_cast<double>(x));
  for (size_t i = 0; sum < 0.9 * total; ++i) sum += std::exp(static_cast<double>(least = sorted[i]));
  Sampler sampler({.temperature = 1, .top_p = 0.9});
  int first = 0;
  for (int i = 0; i < 4000; ++i) {
    const int32_t token = sampler.next(logits.data(), 5000);
    ASSERT_GE(logits[static_cast<size_t>(token)], least);
    first += token == 0;
  }
  EXPECT_NEAR(first / 4000.0, 1 / sum, 5 * std::sqrt(1 / sum / 4000));
}

TEST(Unicode, CompletesAndRepairs) {
  EXPECT_EQ(unicode::incomplete_tail("a\xe4\xb8"), 2u);
  EXPECT_EQ(unicode::incomplete_tail("a\xe4\xb8\xad"), 0u);
  EXPECT_EQ(unicode::incomplete_tail("\xf0\x9f\x98"), 3u);
  EXPECT_EQ(unicode::incomplete_tail("\xff"), 0u);
  EXPECT_EQ(unicode::incomplete_tail("\xed\xa0"), 0u);  // a surrogate: nothing completes it
  EXPECT_EQ(unicode::to_valid_utf8("a\xff"
                                   "b"),
            "a\xef\xbf\xbd"
            "b");
  EXPECT_EQ(unicode::to_valid_utf8("\xe4\xb8"), "\xef\xbf\xbd");
  EXPECT_EQ(unicode::nfc("e\xcc\x81"), "\xc3\xa9");
  EXPECT_EQ(unicode::nfd("\xea\xb0\x81"), "\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8");
  EXPECT_EQ(unicode::nfc("\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8"), "\xea\xb0\x81");
}

TEST(Words, AreThoseOfThePatterns) {
  const auto words = [](WordRule rule, std::string_view text) {
    std::vector<std::string> out;
    for_each_word({rule, false, false}, text, [&](std::string_view word) { out.emplace_back(word); });
    return out;
  };
  using Words = std::vector<std::string>;
  EXPECT_EQ(words(WordRule::gpt2, "it's  1234 'x"), (Words{"it", "'s", " ", " 1234", " '", "x"}));
  EXPECT_EQ(words(WordRule::llama3, "It'S  12345!\n\n x"), (Words{"It", "'S", " ", " ", "123", "45", "!\n\n", " x"}));
  EXPECT_EQ(words(WordRule::qwen2, "12 \n\n\n  y"), (Words{"1", "2", " \n\n\n", " ", " y"}));
}

}  // namespace
}  // namespace linnet
