// Letters: what the sizes in declared shapes count, and the small language in which shapes are written.
//
// A shape is a row of words, "B T H*normalize N+1". A word is a letter, or an expression of letters, options and numbers with
// + - * // max(a,b). evaluate() of op.h gives its value in a call; this file holds what a letter means in every operator.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "view.h"

namespace linnet {

enum class Counts { batch, tokens, heads, channels, sequences, entries };

struct Letter {
  std::string_view name;
  Counts counts;             // what random cases draw it as
  std::string_view noun;     // its units in a sentence: "k has 96 channels"
  std::string_view meaning;  // in a listing: "heads of keys"; empty where operators differ: the lines of their tensors say it
  int example;               // its size in an example of the documentation
};

// What a letter means; one that is not in the list counts entries.
const Letter& letter_named(std::string_view name);
std::span<const Letter> known_letters();  // in the order of a listing

// Names and letters are short: a loop costs less than a call of memcmp, and every call of an operator compares dozens.
inline bool same_name(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

// "B T H K" -> its words.
struct Words {
  std::string_view word[kMaxRank];
  int count = 0;
  explicit Words(std::string_view shape) {
    for (size_t begin = 0, end = 0; begin < shape.size(); begin = ++end) {  // every call comes here: no library call per letter
      while (end < shape.size() && shape[end] != ' ') ++end;
      word[count++] = shape.substr(begin, end - begin);
    }
  }
  const std::string_view* begin() const { return word; }
  const std::string_view* end() const { return word + count; }
};

bool is_letter(std::string_view word);           // no expression, no number
std::string shape_text(std::string_view shape);  // "B T H K" -> "[B, T, H, K]"

}  // namespace linnet
