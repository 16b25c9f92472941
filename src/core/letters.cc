#include "letters.h"

#include <charconv>

#include "core/call/members.h"
#include "op.h"

namespace linnet {
namespace {

constexpr Letter kLetters[] = {
    {"B", Counts::batch, "batch rows", "batch rows", 2},
    {"T", Counts::tokens, "tokens", "tokens", 16},
    {"Tq", Counts::tokens, "tokens", "queries", 16},
    {"S", Counts::tokens, "tokens", "keys", 16},
    {"Tk", Counts::tokens, "tokens", "keys", 16},
    {"Tg", Counts::tokens, "tokens", "tokens of the gate", 16},
    {"capacity", Counts::tokens, "tokens", "tokens that the cache holds", 32},
    {"H", Counts::heads, "heads", "heads", 4},
    {"Hq", Counts::heads, "heads", "heads of queries", 4},
    {"Hk", Counts::heads, "heads", "heads of keys", 4},
    {"Hv", Counts::heads, "heads", "heads of values", 4},
    {"Hkv", Counts::heads, "heads", "heads of keys", 4},
    {"Hg", Counts::heads, "heads", "heads of the gate", 4},
    {"Hn", Counts::heads, "heads", "", 4},
    {"G", Counts::entries, "entries", "groups of heads", 4},
    {"K", Counts::channels, "channels", "channels of keys", 8},
    {"V", Counts::channels, "channels", "channels of values", 8},
    {"C", Counts::entries, "channels", "channels", 4},
    {"D", Counts::channels, "channels", "", 4},
    {"E", Counts::channels, "entries", "", 4},
    {"I", Counts::channels, "channels", "", 64},
    {"O", Counts::channels, "channels", "", 4},
    {"R", Counts::channels, "rows", "", 4},
    {"W", Counts::entries, "entries", "taps", 4},
    {"side", Counts::entries, "taps", "taps in each direction", 3},
    {"F", Counts::entries, "features", "features", 4},
    {"N", Counts::sequences, "sequences", "sequences", 4},
    {"P", Counts::entries, "pages", "", 4},
    {"panels", Counts::entries, "entries", "", 1},
    {"groups", Counts::entries, "entries", "", 1},
    {"width", Counts::entries, "entries", "", 16},
    {"windows", Counts::entries, "entries", "", 16},
};
constexpr Letter kOther = {"", Counts::entries, "entries", "", 4};

// One walk over a word of a shape:
// expression := term (('+' | '-') term)*;  term := factor (('*' | '//') factor)*;  factor := number | name | max(a,b) | (a)
class Evaluator {
 public:
  Evaluator(std::string_view text, const Op& op, const void* args, const Dims& dims)
      : text_(text), op_(op), args_(args), dims_(dims) {}
  bool run(int64_t* value) { return sum(value) && text_.empty(); }

 private:
  bool take(std::string_view token) {
    if (!same_name(text_.substr(0, token.size()), token)) return false;
    text_.remove_prefix(token.size());
    return true;
  }
  bool sum(int64_t* value) {
    if (!product(value)) return false;
    for (int64_t right; !text_.empty();) {
      const bool plus = take("+");
      if (!plus && !take("-")) return true;
      if (!product(&right)) return false;
      if (plus ? __builtin_add_overflow(*value, right, value) : __builtin_sub_overflow(*value, right, value)) return false;
    }
    return true;
  }
  bool product(int64_t* value) {
    if (!factor(value)) return false;
    for (int64_t right; !text_.empty();) {
      const bool times = take("*");
      if (!times && !take("//")) return true;
      if (!factor(&right) || (!times && right == 0)) return false;
      if (!times) {
        *value /= right;
      } else if (__builtin_mul_overflow(*value, right, value)) {
        return false;
      }
    }
    return true;
  }
  bool factor(int64_t* value) {
    if (take("max(")) {
      int64_t right;
      if (!sum(value) || !take(",") || !sum(&right) || !take(")")) return false;
      *value = *value > right ? *value : right;
      return true;
    }
    if (take("(")) return sum(value) && take(")");
    size_t length = 0;
    while (length < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[length])) || text_[length] == '_')) ++length;
    const std::string_view word = text_.substr(0, length);
    if (word.empty()) return false;
    text_.remove_prefix(length);
    if (word[0] >= '0' && word[0] <= '9') {
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *value);
      return error == std::errc() && end == word.data() + word.size();
    }
    if (const Dims::Entry* entry = dims_.find(word)) {
      *value = entry->value;
      return true;
    }
    if (const OptionDecl* option = op_.find_option(word)) {
      if (option->kind == OptionKind::boolean) return *value = value_at<bool>(args_, option->offset) ? 1 : 0, true;
      if (option->kind == OptionKind::integer) return *value = value_at<int64_t>(args_, option->offset), true;
      if (option->kind == OptionKind::sizes) return *value = value_at<Sizes>(args_, option->offset).count, true;  // how many
      return false;
    }
    for (const LetterRule& rule : op_.letters) {  // a letter that no tensor has shown
      if (!same_name(rule.letter, word)) continue;
      const int32_t choice = rule.by.empty() ? 0 : value_at<int32_t>(args_, op_.find_option(rule.by)->offset);
      for (const auto& [name, expression] : rule.cases) {
        if (rule.by.empty() || name == op_.find_option(rule.by)->choices[static_cast<size_t>(choice)]) {
          return evaluate(expression, op_, args_, dims_, value);
        }
      }
    }
    return false;
  }

  std::string_view text_;
  const Op& op_;
  const void* args_;
  const Dims& dims_;
};

}  // namespace

const Letter& letter_named(std::string_view name) {
  for (const Letter& letter : kLetters) {
    if (same_name(letter.name, name)) return letter;
  }
  return kOther;
}

std::span<const Letter> known_letters() { return kLetters; }

bool is_letter(std::string_view word) {
  for (const char c : word) {
    if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_')) return false;
  }
  return !word.empty();
}

std::string shape_text(std::string_view shape) {
  std::string text = "[";
  const Words words(shape);
  for (int i = 0; i < words.count; ++i) text += (i ? ", " : "") + std::string(words.word[i]);
  return text + "]";
}

const Dims::Entry* Dims::find(std::string_view letter) const {
  for (int i = 0; i < count_; ++i) {
    if (same_name(entries_[i].letter, letter)) return &entries_[i];
  }
  return nullptr;
}
int64_t Dims::operator[](std::string_view letter) const {
  const Entry* entry = find(letter);
  return entry == nullptr ? 0 : entry->value;
}
void Dims::set(std::string_view letter, int64_t value, std::string_view from) {
  if (count_ < kMaxLetters) entries_[count_++] = {letter, value, from};
}

bool evaluate(std::string_view expression, const Op& op, const void* args, const Dims& dims, int64_t* value) {
  if (const Dims::Entry* known = dims.find(expression)) return *value = known->value, true;
  return Evaluator(expression, op, args, dims).run(value);
}

}  // namespace linnet
