#include "runtime/tokenizer/wordpiece.h"

#include <algorithm>

#include "runtime/tokenizer/unicode.h"

namespace linnet {

namespace {

bool is_chinese(uint32_t c) {
  return (c >= 0x4e00 && c <= 0x9fff) || (c >= 0x3400 && c <= 0x4dbf) || (c >= 0x20000 && c <= 0x2a6df) ||
         (c >= 0x2a700 && c <= 0x2b81f) || (c >= 0x2b920 && c <= 0x2ceaf) || (c >= 0xf900 && c <= 0xfaff) ||
         (c >= 0x2f800 && c <= 0x2fa1f);
}

}  // namespace

std::string bert_normalize(const BertRules& rules, std::string_view text) {
  const unsigned char* flags = unicode::flags();
  std::string out;
  out.reserve(text.size() + text.size() / 8);
  bool ascii = true;
  for (size_t at = 0; at < text.size();) {
    int bytes;
    const uint32_t c = unicode::decode(text, at, bytes);
    if (rules.clean && (flags[c] & unicode::kRemoved)) {
      // dropped
    } else if (rules.clean && (flags[c] & unicode::kSpace)) {
      out += ' ';
    } else if (c < 0x80) {
      out += rules.lower && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : static_cast<char>(c);
    } else {
      ascii = false;
      const bool apart = rules.chinese && is_chinese(c);
      if (apart) out += ' ';
      out.append(text.substr(at, static_cast<size_t>(bytes)));
      if (apart) out += ' ';
    }
    at += static_cast<size_t>(bytes);
  }
  if (ascii || (!rules.strip_accents && !rules.lower)) return out;
  const std::string source = rules.strip_accents ? unicode::nfd(out) : out;
  out.clear();
  for (size_t at = 0; at < source.size();) {
    int bytes;
    const uint32_t c = unicode::decode(source, at, bytes);
    at += static_cast<size_t>(bytes);
    if (rules.strip_accents && (flags[c] & unicode::kMark)) continue;
    if (rules.lower && c == 0x130) {  // the only code point whose lower case is two
      out += "i\xcc\x87";
    } else {
      unicode::append(out, rules.lower ? unicode::lower(c) : c);
    }
  }
  return out;
}

bool bert_space_at(std::string_view text, size_t at, size_t& next) {
  int bytes;
  const uint32_t c = unicode::decode(text, at, bytes);
  next = at + static_cast<size_t>(bytes);
  return (unicode::flags()[c] & unicode::kSpace) != 0;
}

size_t bert_word_end(std::string_view text, size_t at) {
  const unsigned char* flags = unicode::flags();
  for (size_t i = at; i < text.size();) {
    int bytes;
    const uint32_t c = unicode::decode(text, i, bytes);
    if (flags[c] & unicode::kPunctuation) return i == at ? i + static_cast<size_t>(bytes) : i;
    if (flags[c] & unicode::kSpace) return i;
    i += static_cast<size_t>(bytes);
  }
  return text.size();
}

void WordPiece::add(std::string_view piece, bool continues, int32_t id) {
  (continues ? continue_ : begin_).emplace(piece, id);
  size_t& longest = continues ? longest_continue_ : longest_begin_;
  longest = std::max(longest, piece.size());
}

void WordPiece::encode(std::string_view word, std::vector<int32_t>& out) const {
  const auto is_start = [&](size_t i) { return i == word.size() || (static_cast<unsigned char>(word[i]) & 0xc0) != 0x80; };
  int64_t characters = 0;
  for (size_t i = 0; i < word.size(); ++i) characters += is_start(i);
  const size_t before = out.size();
  bool known = characters <= most_characters;
  std::string piece;
  for (size_t at = 0; known && at < word.size();) {
    const auto& pieces = at == 0 ? begin_ : continue_;
    size_t end = std::min(word.size(), at + (at == 0 ? longest_begin_ : longest_continue_));
    for (; end > at; --end) {
      if (!is_start(end)) continue;
      piece.assign(word.substr(at, end - at));
      if (const auto found = pieces.find(piece); found != pieces.end()) {
        out.push_back(found->second);
        break;
      }
    }
    known = end > at;
    at = end;
  }
  if (known) return;
  out.resize(before);
  if (unknown >= 0) out.push_back(unknown);
}

}  // namespace linnet
