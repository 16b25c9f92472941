// pretokenize: cuts a text into the words that byte-pair encoding works on. The cuts are those of the published regular
// expressions, matched by hand; the texts are valid UTF-8.
//
//   gpt2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   llama3  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//   qwen2   the same with \p{N} for \p{N}{1,3}
// Digits may be cut off one by one before that (smollm).
#pragma once

#include <string_view>

#include "../../core/status.h"

namespace linnet {

enum class WordRule { gpt2, llama3, qwen2 };

struct Pretokenizer {
  WordRule rule = WordRule::gpt2;
  bool single_digits = false;  // first cut at every digit, then apply the rule to each part
  bool prefix_space = false;   // a text that does not begin with a space gets one
};

// The end of the word that begins at text[at]; at < text.size().
size_t word_end(WordRule rule, std::string_view text, size_t at);
// The end of the part without digits that begins at text[at], or of the single digit there.
size_t digits_end(std::string_view text, size_t at);

// Calls use(word) for each word of the text, in order. prefix_space is the caller's to add.
template <class Use>
void for_each_word(const Pretokenizer& rules, std::string_view text, const Use& use) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = rules.single_digits ? digits_end(text, begin) : text.size();
    const std::string_view part = text.substr(begin, end - begin);
    for (size_t at = 0; at < part.size();) {
      const size_t next = word_end(rules.rule, part, at);
      use(part.substr(at, next - at));
      at = next;
    }
    begin = end;
  }
}

// The rule of a published regular expression; a sentence when it is none of them.
Status word_rule_of_pattern(std::string_view pattern, WordRule& out);
std::string_view pattern_of(WordRule rule);

}  // namespace linnet
