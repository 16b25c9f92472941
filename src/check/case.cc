#include "check/case.h"

#include <algorithm>
#include <charconv>

#include "core/letters.h"

namespace linnet::check {
namespace {

std::string joined(const std::vector<std::string>& list) {
  std::string text;
  for (const std::string& item : list) text += (text.empty() ? "" : ",") + item;
  return text;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> words;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (end > 0) words.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return words;
}

template <class T>
bool parse_number(std::string_view text, T* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

bool is_result(const Op& op, std::string_view name) {  // an optional output, or a gradient of either side
  for (const TensorDecl& decl : op.outputs) {
    if (decl.optional && decl.name == name) return true;
    if (decl.differentiable && name == "d" + decl.name) return true;
  }
  for (const TensorDecl& decl : op.inputs) {
    if (decl.differentiable && name == "d" + decl.name) return true;
  }
  return false;
}

// A letter that the line does not give.
int64_t standard_size(std::string_view letter, bool packed) {
  switch (letter_named(letter).counts) {
    case Counts::batch: return packed ? 1 : 2;
    case Counts::tokens: return 40;
    case Counts::heads: return 2;
    default: return 16;
  }
}

}  // namespace

bool contains(const std::vector<std::string>& list, std::string_view item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

bool Case::has_value(std::string_view name) const { return contains(values, name); }

bool is_packed(const Op& op, const std::vector<std::string>& with) {
  return std::any_of(op.inputs.begin(), op.inputs.end(), [&](const TensorDecl& decl) {
    return decl.values == Values::offsets && (!decl.optional || contains(with, decl.name));
  });
}

std::vector<std::string> free_letters(const Op& op, const std::vector<std::string>& with) {
  std::vector<std::string> letters;
  for (const TensorDecl& decl : op.inputs) {
    if (decl.optional && !contains(with, decl.name)) continue;
    for (const std::string& word : split(decl.shape, ' ')) {
      if (word[0] >= '0' && word[0] <= '9') continue;  // a number is no letter
      if (op.find_option(word) != nullptr) continue;   // nor is an option, whose value it is
      const size_t operation = word.find_first_of("+-*/(");
      std::string letter = word;
      if (operation == std::string::npos) {
        const auto by_rule = [&](const LetterRule& rule) { return rule.letter == word; };
        if (std::any_of(op.letters.begin(), op.letters.end(), by_rule)) continue;
      } else if (word.substr(operation) == "+1") {
        letter = word.substr(0, operation);  // offsets [N+1] show N
      } else {
        continue;
      }
      if (!contains(letters, letter)) letters.push_back(letter);
    }
  }
  return letters;
}

std::string to_text(const Case& c) {
  std::string text = c.op->name;
  const auto add = [&](const std::string& name, const std::string& value) { text += " " + name + "=" + value; };
  for (const auto& [letter, value] : c.letters) add(letter, std::to_string(value));
  for (const auto& [name, value] : c.options) add(name, value);
  if (!c.with.empty()) add("with", joined(c.with));
  if (!c.skip.empty()) add("skip", joined(c.skip));
  if (!c.other.empty()) add("other", joined(c.other));
  add("dtype", dtype_name(c.dtype));
  add("pass", c.backward ? "bwd" : "fwd");
  if (!c.impl.empty()) add("impl", c.impl);
  add("threads", std::to_string(c.threads));
  if (c.strided) add("strided", "1");
  if (!c.values.empty()) add("values", joined(c.values));
  add("seed", std::to_string(c.seed));
  return text;
}

Status parse_case(std::string_view text, Case* c) {
  const std::vector<std::string> words = split(text, ' ');
  if (words.empty()) return bad_input("the case is empty, expected an operator and its settings");
  *c = Case();
  c->op = find_op(words[0]);
  if (c->op == nullptr) return bad_input("case: there is no operator '" + words[0] + "'");
  const Op& op = *c->op;
  const std::string prefix = "case " + op.name + ": ";
  std::vector<std::pair<std::string, std::string>> sizes;
  for (size_t i = 1; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    if (equals == std::string::npos) return bad_input(prefix + "'" + words[i] + "' is not of the form name=value");
    const std::string name = words[i].substr(0, equals), value = words[i].substr(equals + 1);
    const auto wrong = [&](const std::string& expected) {
      return bad_input(prefix + name + " is '" + value + "', expected " + expected);
    };
    for (size_t j = 1; j < i; ++j) {
      if (words[j].compare(0, equals + 1, words[i], 0, equals + 1) == 0) return bad_input(prefix + name + " is given twice");
    }
    if (name == "with") {
      c->with = split(value, ',');
      std::erase_if(c->with, [&](const std::string& item) {  // a line of linnet bench asks for outputs, which are all checked
        const TensorDecl* output = op.find_output(item);
        return op.find_input(item) == nullptr && output != nullptr && output->optional;
      });
      for (const std::string& item : c->with) {
        const TensorDecl* decl = op.find_input(item);
        if (decl == nullptr || !decl->optional) return bad_input(prefix + "with: there is no optional input '" + item + "'");
      }
    } else if (name == "skip") {
      c->skip = split(value, ',');
      for (const std::string& item : c->skip) {
        if (!is_result(op, item)) return bad_input(prefix + "skip: there is no optional output or gradient '" + item + "'");
      }
    } else if (name == "other") {
      c->other = split(value, ',');
      for (const std::string& item : c->other) {
        const TensorDecl* decl = op.find_input(item);
        if (decl == nullptr || decl->other_shape.empty()) {
          return bad_input(prefix + "other: there is no input '" + item + "' of two shapes");
        }
      }
    } else if (name == "values") {
      c->values = split(value, ',');
      for (const std::string& item : c->values) {
        if (std::find(std::begin(kValueFlags), std::end(kValueFlags), item) == std::end(kValueFlags)) {
          return wrong("masked, garbage, repeated or mixed");
        }
      }
    } else if (name == "dtype") {
      c->dtype = dtype_from_name(value);
      if (!is_float(c->dtype)) return wrong("f64, f32, bf16 or f16");
    } else if (name == "pass") {
      if (value != "fwd" && value != "bwd" && value != "fwd+bwd") return wrong("fwd or bwd");
      c->backward = value != "fwd";  // fwd+bwd: the word of linnet bench
    } else if (name == "impl") {
      c->impl = value;
    } else if (name == "threads") {
      if (!parse_number(value, &c->threads) || c->threads < 1 || c->threads > 256) return wrong("1 to 256");
    } else if (name == "strided") {
      if (value != "0" && value != "1") return wrong("0 or 1");
      c->strided = value == "1";
    } else if (name == "seed") {
      if (!parse_number(value, &c->seed)) return wrong("a whole number");
    } else if (op.find_option(name) != nullptr) {
      alignas(std::max_align_t) char args[kMaxStruct], out[kMaxStruct], grads[kMaxStruct];
      op.construct(args, out, grads);
      LINNET_TRY(set_option(op, name, value, args));
      c->options.emplace_back(name, value);
    } else if (op.find_input(name) != nullptr && op.find_input(name)->values == Values::lengths) {
      // a count of tokens in a line of linnet bench; a check draws its own
      if (int64_t count = 0; !parse_number(value, &count) || count < 0) return wrong("a whole number of at least 0");
    } else {
      sizes.emplace_back(name, value);
    }
  }
  if (c->backward && !op.differentiable()) return bad_input(prefix + "pass=bwd, but there is no backward");
  for (const std::string& letter : free_letters(op, c->with)) {
    const auto given = std::find_if(sizes.begin(), sizes.end(), [&](const auto& pair) { return pair.first == letter; });
    int64_t value = standard_size(letter, is_packed(op, c->with));
    if (given != sizes.end()) {
      const auto same =
          std::find_if(c->letters.begin(), c->letters.end(), [&](const auto& pair) { return pair.first == given->second; });
      if (same != c->letters.end()) {  // V=K
        value = same->second;
      } else if (!parse_number(given->second, &value) || value < 0 || value > (int64_t{1} << 32)) {
        return bad_input(prefix + letter + " is '" + given->second + "', expected a whole number of at least 0");
      }
      sizes.erase(given);
    }
    c->letters.emplace_back(letter, value);
  }
  if (sizes.empty()) return {};
  return bad_input(prefix + "there is no letter or option '" + sizes.front().first + "' that it could set");
}

}  // namespace linnet::check
