#include "tasks/listops.h"

#include <algorithm>
#include <unordered_set>

#include "tasks/task.h"

namespace linnet::tasks {
namespace {

constexpr int64_t kMaxNodes = 200'000'000;  // of rejected and accepted trees between two accepted ones

int64_t apply(int64_t op, std::vector<int64_t>::iterator begin, std::vector<int64_t>::iterator end) {
  std::sort(begin, end);
  const auto n = static_cast<size_t>(end - begin);
  if (op == kMin) return *begin;
  if (op == kMax) return *(end - 1);
  if (op == kMed)
    return n % 2 == 1 ? begin[static_cast<std::ptrdiff_t>(n / 2)]
                      : (begin[static_cast<std::ptrdiff_t>(n / 2 - 1)] + begin[static_cast<std::ptrdiff_t>(n / 2)]) / 2;
  int64_t sum = 0;
  for (auto i = begin; i != end; ++i) sum += *i;
  return sum % 10;
}

// Tokens of the tree, or its length alone once it is too long to be kept. The operator of a node is drawn behind its children,
// so its place is filled later.
int64_t draw_tree(Stream& stream, const ListopsLimits& limits, int64_t depth, std::vector<uint8_t>* tokens, int64_t* nodes) {
  if (--*nodes < 0) return 0;
  const double r = depth < limits.max_depth ? stream.uniform() : 1;
  const bool kept = static_cast<int64_t>(tokens->size()) <= limits.max_length;
  if (r > 0.25) {
    const int64_t digit = stream.below(10);
    if (kept) tokens->push_back(static_cast<uint8_t>(kDigit + digit));
    return 1;
  }
  const int64_t count = 2 + stream.below(limits.max_args - 1);
  const size_t place = tokens->size();
  if (kept) tokens->push_back(0);
  int64_t length = 2;
  for (int64_t i = 0; i < count; ++i) length += draw_tree(stream, limits, depth + 1, tokens, nodes);
  const int64_t op = stream.below(4);
  if (kept) (*tokens)[place] = static_cast<uint8_t>(kMin + op);
  if (static_cast<int64_t>(tokens->size()) <= limits.max_length) tokens->push_back(kClose);
  return length;
}

}  // namespace

bool draw_expression(Stream& stream, const ListopsLimits& limits, Expression* expression, int64_t* nodes) {
  expression->tokens.clear();
  const int64_t length = draw_tree(stream, limits, 1, &expression->tokens, nodes);
  return *nodes >= 0 && limits.min_length < length && length < limits.max_length;
}

int64_t Expression::value() const {
  std::vector<int64_t> values, begins, ops;
  for (const uint8_t token : tokens) {
    if (token >= kDigit) {
      values.push_back(token - kDigit);
    } else if (token != kClose) {
      ops.push_back(token);
      begins.push_back(static_cast<int64_t>(values.size()));
    } else {
      const int64_t value = apply(ops.back(), values.begin() + begins.back(), values.end());
      values.resize(static_cast<size_t>(begins.back()));
      values.push_back(value);
      ops.pop_back();
      begins.pop_back();
    }
  }
  return values.empty() ? 0 : values.front();
}

std::string Expression::text() const {
  std::string out;
  for (const uint8_t token : tokens) out += (out.empty() ? "" : " ") + std::string(kListopsTokens[token]);
  return out;
}

// A node with operator o and arguments a, b is ( ( ( o a ) b ) ] ): one "(" for each argument and one for the bracket.
std::string Expression::nested() const {
  std::vector<int64_t> arguments(tokens.size(), 0), open;  // of the operator at each place
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == kClose) {
      open.pop_back();
    } else {
      if (!open.empty()) ++arguments[static_cast<size_t>(open.back())];
      if (tokens[i] < kClose) open.push_back(static_cast<int64_t>(i));
    }
  }
  std::string out;
  const auto put = [&](const char* word) {
    if (!out.empty()) out += ' ';
    out += word;
  };
  int64_t depth = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= kDigit) {
      put(kListopsTokens[tokens[i]]);
    } else if (tokens[i] != kClose) {
      for (int64_t j = 0; j <= arguments[i]; ++j) put("(");
      put(kListopsTokens[tokens[i]]);
      ++depth;
      continue;
    } else {
      put("]");
      put(")");
      --depth;
    }
    if (depth > 0) put(")");  // an argument of the operator around it is complete
  }
  return out;
}

Status parse_expression(std::string_view text, Expression* expression) {
  expression->tokens.clear();
  std::vector<int64_t> arguments;
  int64_t parentheses = 0, finished = 0;
  const auto refuse = [](const std::string& why) { return bad_input("listops: " + why); };
  for (size_t at = 0; at < text.size();) {
    if (text[at] == ' ') {
      ++at;
      continue;
    }
    const size_t end = std::min(text.find(' ', at), text.size());
    const std::string word(text.substr(at, end - at));
    at = end;
    if (word == "(" || word == ")") {
      parentheses += word == "(" ? 1 : -1;
      if (parentheses < 0) return refuse("')' without '('");
      continue;
    }
    int64_t token = kMin;
    while (token < kDigit + 10 && kListopsTokens[token] != word) ++token;
    if (token == kDigit + 10) return refuse("the token '" + word + "' is unknown");
    if (finished > 0) return refuse("'" + word + "' stands behind the end of the expression");
    if (token == kClose) {
      if (arguments.empty()) return refuse("']' without an operator");
      if (arguments.back() == 0) return refuse("an operator has no arguments");
      arguments.pop_back();
    } else if (!arguments.empty()) {
      ++arguments.back();
    }
    if (token < kClose) arguments.push_back(0);
    expression->tokens.push_back(static_cast<uint8_t>(token));
    finished = arguments.empty() ? 1 : 0;
  }
  if (!arguments.empty()) return refuse("an operator is not closed by ']'");
  if (parentheses > 0) return refuse("'(' without ')'");
  if (expression->tokens.empty()) return refuse("the expression is empty");
  return {};
}

namespace {

Status make(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  const ListopsLimits limits = {.max_depth = o.integer("max_depth"),
                                .max_args = o.integer("max_args"),
                                .min_length = o.integer("min_length"),
                                .max_length = o.integer("max_length")};
  const int64_t N = o.integer("examples");
  if (limits.min_length + 2 > limits.max_length) {
    return o.error("min_length is " + std::to_string(limits.min_length) + ", expected at most max_length - 2 (" +
                   std::to_string(limits.max_length - 2) + "): lengths lie strictly between them");
  }
  std::vector<Expression> expressions(static_cast<size_t>(N));
  std::unordered_set<std::string> seen;
  const bool unique = o.flag("unique") && !o.flag("independent");
  std::vector<uint8_t> failed(static_cast<size_t>(N), 0);
  bool stop = false;  // only on the running stream, where it saves the rest of the work
  for_examples(o, N, [&](Stream& stream, int64_t i) {
    if (unique && stop) return;
    Expression& expression = expressions[static_cast<size_t>(i)];
    int64_t nodes = kMaxNodes;
    const auto is_new = [&] { return !unique || seen.emplace(expression.tokens.begin(), expression.tokens.end()).second; };
    while (nodes >= 0 && !(draw_expression(stream, limits, &expression, &nodes) && is_new())) {
    }
    failed[static_cast<size_t>(i)] = nodes < 0 ? 1 : 0;
    if (unique && nodes < 0) stop = true;
  });
  if (std::find(failed.begin(), failed.end(), 1) != failed.end()) {
    return o.error("no" + std::string(unique ? " new" : "") + " expression longer than " + std::to_string(limits.min_length) +
                   " and shorter than " + std::to_string(limits.max_length) + " among 200 million nodes; max_depth is " +
                   std::to_string(limits.max_depth) + ", max_args " + std::to_string(limits.max_args));
  }
  int64_t longest = 0;
  for (const Expression& expression : expressions)
    longest = std::max(longest, static_cast<int64_t>(expression.tokens.size()) + 1);
  TaskTensor ids = integer_tensor("ids", {N, longest}, kPad), value = integer_tensor("value", {N});
  std::vector<uint8_t> text, nested;
  TaskTensor offsets = integer_tensor("offsets", {N + 1}), nested_offsets = integer_tensor("nested_offsets", {N + 1});
  for (int64_t i = 0; i < N; ++i) {
    const Expression& expression = expressions[static_cast<size_t>(i)];
    int64_t* const row = ids.integers.data() + i * longest;
    std::copy(expression.tokens.begin(), expression.tokens.end(), row);
    row[expression.tokens.size()] = kEnd;
    value.integers[static_cast<size_t>(i)] = expression.value();
    if (!o.flag("text")) continue;
    const std::string flat = expression.text(), deep = expression.nested();
    text.insert(text.end(), flat.begin(), flat.end());
    nested.insert(nested.end(), deep.begin(), deep.end());
    offsets.integers[static_cast<size_t>(i + 1)] = static_cast<int64_t>(text.size());
    nested_offsets.integers[static_cast<size_t>(i + 1)] = static_cast<int64_t>(nested.size());
  }
  *tensors = {std::move(ids), std::move(value)};
  if (!o.flag("text")) return {};
  tensors->push_back(byte_tensor("text", {static_cast<int64_t>(text.size())}, text));
  tensors->push_back(std::move(offsets));
  tensors->push_back(byte_tensor("nested", {static_cast<int64_t>(nested.size())}, nested));
  tensors->push_back(std::move(nested_offsets));
  return {};
}

}  // namespace

const Task& listops_task() {
  static const Task task = {
      .name = "listops",
      .summary = "Long Range Arena: the value of nested lists of MIN, MAX, MED and SM",
      .details =
          "Ids: 0 pad, 1 end, 2 [MIN, 3 [MAX, 4 [MED, 5 [SM, 6 ], 7 .. 16 the digits. MED is the median, cut to a whole "
          "number; SM\n"
          "the sum modulo 10. Lengths (tokens without parentheses) lie strictly between min_length and max_length; about 8 % "
          "of\n"
          "the trees do with the defaults. A small version: min_length=5 max_length=60 max_depth=5 max_args=5.",
      .options = drawn_options(64, {integer_option("min_length", 500, 0, 1'000'000, "tokens, at least this many and one"),
                                    integer_option("max_length", 2000, 2, 1'000'000, "tokens, fewer than this"),
                                    integer_option("max_depth", 10, 1, 30, "levels of a tree"),
                                    integer_option("max_args", 10, 2, 100, "arguments of an operator"),
                                    flag_option("unique", true, "no expression twice (on the running stream)"),
                                    flag_option("text", false, "the expressions as text too")}),
      .results = {{"ids", "examples longest", "tokens with the end token, padded with 0"},
                  {"value", "examples", "the class, 0 to 9"},
                  {"text", "bytes", "with text=1: flat notation, one expression after another"},
                  {"offsets", "examples+1", "with text=1: where each begins"},
                  {"nested", "bytes", "with text=1: with parentheses"},
                  {"nested_offsets", "examples+1", "with text=1: where each begins"}},
      .make = make,
  };
  return task;
}

}  // namespace linnet::tasks
