#include "runtime/tokenizer/pretokenize.h"

#include <string>

#include "core/files/json.h"
#include "runtime/tokenizer/unicode.h"

namespace linnet {

namespace {

using unicode::kDigit, unicode::kLetter, unicode::kNumber, unicode::kSpace;
constexpr const char* kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

class Text {
 public:
  explicit Text(std::string_view text) : text_(text), flags_(unicode::flags()) {}
  // Letter, number, space bits of the code point at `at`, and where the next one begins.
  int kind(size_t at, size_t& next) const {
    const unsigned char b = static_cast<unsigned char>(text_[at]);
    if (b < 0x80) return next = at + 1, flags_[b] & kMask;
    int bytes;
    const uint32_t point = unicode::decode(text_, at, bytes);
    next = at + static_cast<size_t>(bytes);
    return flags_[point] & kMask;
  }
  // The end of the run of code points of exactly this kind.
  size_t run(size_t at, int wanted) const {
    for (size_t next; at < text_.size() && kind(at, next) == wanted;) at = next;
    return at;
  }
  size_t size() const { return text_.size(); }
  char operator[](size_t i) const { return text_[i]; }
  bool is_break(size_t i) const { return text_[i] == '\r' || text_[i] == '\n'; }

 private:
  static constexpr int kMask = kLetter | kNumber | kSpace;
  std::string_view text_;
  const unsigned char* flags_;
};

// The end of 's 't 're 've 'm 'll 'd at text[at], or `at`.
size_t contraction(const Text& text, size_t at, bool any_case) {
  if (text[at] != '\'' || at + 1 >= text.size()) return at;
  const auto letter = [&](size_t i) -> char {
    if (i >= text.size()) return 0;
    const char c = text[i];
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  };
  const char a = letter(at + 1), b = letter(at + 2);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return at + 2;
  // U+017F, the long s, is an s to a comparison that ignores case.
  if (any_case && a == '\xc5' && b == '\xbf') return at + 3;
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return at + 3;
  return at;
}

// \s+(?!\S)|\s+ : a run of spaces leaves its last one to the word behind it.
size_t spaces(const Text& text, size_t at, size_t end) {
  if (end == text.size()) return end;
  size_t last = at, next;
  for (size_t i = at; i < end; i = next) {
    text.kind(i, next);
    last = i;
  }
  return last > at ? last : end;
}

size_t gpt2_end(const Text& text, size_t at) {
  if (const size_t end = contraction(text, at, false); end > at) return end;
  size_t begin = at, next;
  int kind = text.kind(at, next);
  if (text[at] == ' ' && next < text.size()) {
    size_t after;
    if (const int second = text.kind(next, after); !(second & kSpace)) {
      kind = second;
      begin = next;
    }
  }
  if (kind & kSpace) return spaces(text, at, text.run(at, kSpace));
  return text.run(begin, kind);
}

size_t llama3_end(const Text& text, size_t at, int most_digits) {
  if (const size_t end = contraction(text, at, true); end > at) return end;
  size_t next, after;
  const int kind = text.kind(at, next);
  if (kind & kLetter) return text.run(next, kLetter);
  if (kind & kNumber) {
    for (int i = 1; i < most_digits && next < text.size() && (text.kind(next, after) & kNumber); ++i) next = after;
    return next;
  }
  if (!text.is_break(at) && next < text.size() && (text.kind(next, after) & kLetter)) return text.run(next, kLetter);
  const bool space = text[at] == ' ' && next < text.size() && text.kind(next, after) == 0;
  if (kind == 0 || space) {
    size_t end = text.run(space ? next : at, 0);
    while (end < text.size() && text.is_break(end)) ++end;
    return end;
  }
  const size_t end = text.run(at, kSpace);
  for (size_t i = end; i > at; --i) {  // \s*[\r\n]+ : up to the last break
    if (text.is_break(i - 1)) return i;
  }
  return spaces(text, at, end);
}

}  // namespace

size_t word_end(WordRule rule, std::string_view text, size_t at) {
  switch (rule) {
    case WordRule::gpt2: return gpt2_end(Text(text), at);
    case WordRule::llama3: return llama3_end(Text(text), at, 3);
    case WordRule::qwen2: return llama3_end(Text(text), at, 1);
  }
  return text.size();
}

size_t digits_end(std::string_view text, size_t at) {
  const unsigned char* flags = unicode::flags();
  for (size_t i = at; i < text.size();) {
    int bytes;
    const uint32_t point = unicode::decode(text, i, bytes);
    if (flags[point] & kDigit) return i == at ? i + static_cast<size_t>(bytes) : i;
    i += static_cast<size_t>(bytes);
  }
  return text.size();
}

Status word_rule_of_pattern(std::string_view pattern, WordRule& out) {
  if (pattern == kGpt2) return out = WordRule::gpt2, Status();
  if (pattern == kLlama3) return out = WordRule::llama3, Status();
  if (pattern == kQwen2) return out = WordRule::qwen2, Status();
  return bad_input("the pre-tokeniser splits by " + json_quote_short(pattern) +
                   ", which is not supported; known are the patterns of GPT-2, Llama 3 and Qwen2");
}

std::string_view pattern_of(WordRule rule) {
  return rule == WordRule::gpt2 ? kGpt2 : rule == WordRule::llama3 ? kLlama3 : kQwen2;
}

}  // namespace linnet
