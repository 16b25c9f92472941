// ListOps (Long Range Arena, arXiv 2011.04006): expressions of MIN, MAX, MED and SM over digits, their values and their texts.
//
//   Expression e;
//   LINNET_TRY(parse_expression("[MAX 2 9 [MIN 4 7 ] 0 ]", &e));      // also ( ( ( [MAX 2 ) 9 ) ] ) with parentheses
//   e.value();                                                        // 9
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "tasks/random.h"

namespace linnet::tasks {

enum ListopsToken : int64_t { kPad = 0, kEnd = 1, kMin = 2, kMax = 3, kMed = 4, kSm = 5, kClose = 6, kDigit = 7 };
inline constexpr const char* kListopsTokens[] = {"<pad>", "<eos>", "[MIN", "[MAX", "[MED", "[SM", "]", "0", "1",
                                                 "2",     "3",     "4",    "5",    "6",    "7",   "8", "9"};

// An expression as its tokens in flat notation, operators before their arguments.
struct Expression {
  std::vector<uint8_t> tokens;
  int64_t value() const;
  std::string text() const;    // "[MAX 2 9 ]"
  std::string nested() const;  // "( ( ( [MAX 2 ) 9 ) ] )"
};
// Unbalanced brackets, unknown tokens and operators without arguments are refused.
Status parse_expression(std::string_view text, Expression* expression);

struct ListopsLimits {
  int64_t max_depth = 10, max_args = 10, min_length = 500, max_length = 2000;
};
// One tree of the grammar. False when it is longer than max_length; the stream has then made all its draws nevertheless. *nodes
// counts down and stops a tree that never ends.
bool draw_expression(Stream& stream, const ListopsLimits& limits, Expression* expression, int64_t* nodes);

}  // namespace linnet::tasks
