#include "bench/cases.h"

#include <algorithm>
#include <charconv>

#include "core/call/call.h"

namespace linnet::bench {
namespace {

constexpr int64_t kLargestLetter = int64_t{1} << 40;
constexpr size_t kMostCases = 1000;

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    if (end > at) parts.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

// Words of a line of linnet check that say how it is checked, not what is computed.
bool is_for_checks(std::string_view key) {
  for (const std::string_view name : {"impl", "threads", "strided", "values", "skip", "seed"}) {
    if (name == key) return true;
  }
  return false;
}

}  // namespace

bool is_length(std::string_view letter) {
  for (const std::string_view name : {"T", "S", "Tq", "Tk", "capacity", "pages"}) {
    if (name == letter) return true;
  }
  return false;
}

std::vector<std::string> letters_of(const Op& op) {
  std::vector<std::string> letters;
  for (const TensorDecl& input : op.inputs) {
    for (size_t at = 0; at < input.shape.size();) {
      size_t end = at;
      while (end < input.shape.size() && is_letter(input.shape[end])) ++end;
      const std::string name = input.shape.substr(at, end - at);
      const bool known = name == "max" || std::find(letters.begin(), letters.end(), name) != letters.end();
      if (!name.empty() && !known) letters.push_back(name);
      at = end + 1;
    }
  }
  return letters;
}

namespace {

Status parse_case(const Op& op, const std::vector<std::pair<std::string, std::string>>& words, Case* result) {
  result->op = &op;
  const std::string name = "bench: " + op.name;
  const std::vector<std::string> letters = letters_of(op);
  Call defaults(op);
  Dims dims;
  for (const auto& [key, text] : words) {
    if (key == "dtype") {
      result->dtype = dtype_from_name(text);
      if (!is_float(result->dtype)) return bad_input(name + ": dtype is '" + text + "', expected f64, f32, bf16 or f16");
      continue;
    }
    if (key == "pass") {
      result->backward = text != "fwd";  // bwd: the word of linnet check
      if (text != "fwd" && text != "fwd+bwd" && text != "bwd")
        return bad_input(name + ": pass is '" + text + "', expected fwd or fwd+bwd");
      if (result->backward && !op.differentiable()) return bad_input(name + " has no backward, expected pass=fwd");
      continue;
    }
    if (is_for_checks(key) && op.find_option(key) == nullptr) continue;
    if (key == "with") {
      for (const std::string& tensor : split(text, ',')) {
        const TensorDecl* input = op.find_input(tensor);
        const TensorDecl* output = op.find_output(tensor);
        if ((input == nullptr || !input->optional) && (output == nullptr || !output->optional)) {
          return bad_input(name + " has no optional tensor '" + tensor + "'");
        }
        result->with.push_back(tensor);
      }
      continue;
    }
    if (key == "other") {
      for (const std::string& tensor : split(text, ',')) {
        const TensorDecl* input = op.find_input(tensor);
        if (input == nullptr || input->other_shape.empty())
          return bad_input(name + " has no input '" + tensor + "' of two shapes");
        result->other.push_back(tensor);
      }
      continue;
    }
    if (op.find_option(key) != nullptr) {
      LINNET_TRY(defaults.set_option(key, text));
      result->options.emplace_back(key, text);
      continue;
    }
    int64_t value = 0;
    const bool count = op.find_input(key) != nullptr && op.find_input(key)->values == Values::lengths;
    if (!count && std::find(letters.begin(), letters.end(), key) == letters.end()) {
      std::string all;
      for (const std::string& letter : letters) all += " " + letter;
      return bad_input(name + " has no letter, option or count of tokens '" + key + "'; its letters are" + all);
    }
    if (!evaluate(text, op, defaults.args(), dims, &value) || value < 0 || value > kLargestLetter) {
      return bad_input(name + ": " + key + " is '" + text + "', expected a whole number or letters given before it");
    }
    if (count) {
      result->counts.emplace_back(key, value);
    } else {
      result->letters.emplace_back(key, value);
      dims.set(*std::find(letters.begin(), letters.end(), key), value, "");
    }
  }
  for (const TensorDecl& input : op.inputs) {
    const bool given = std::find(result->with.begin(), result->with.end(), input.name) != result->with.end();
    if (input.optional && !given) continue;
    for (const std::string& word : split(input.shape, ' ')) {
      int64_t value;
      if (evaluate(word, op, defaults.args(), dims, &value)) continue;
      return bad_input(name + ": the case '" + result->line() + "' does not say " + word + ", which " + input.name + " [" +
                       input.shape + "] needs");
    }
  }
  return {};
}

}  // namespace

int64_t Case::letter(std::string_view name) const {
  for (const auto& [letter, value] : letters) {
    if (letter == name) return value;
  }
  return 0;
}

std::string Case::line() const {
  std::string text;
  for (const auto& [name, value] : letters) text += name + "=" + std::to_string(value) + " ";
  for (const auto& [name, value] : counts) text += name + "=" + std::to_string(value) + " ";
  for (const auto& [name, value] : options) text += name + "=" + value + " ";
  for (size_t i = 0; i < with.size(); ++i) text += (i == 0 ? "with=" : ",") + with[i] + (i + 1 == with.size() ? " " : "");
  for (size_t i = 0; i < other.size(); ++i) text += (i == 0 ? "other=" : ",") + other[i] + (i + 1 == other.size() ? " " : "");
  return text + "dtype=" + dtype_name(dtype) + " pass=" + (backward ? "fwd+bwd" : "fwd");
}

Status parse_cases(const Op& op, std::string_view text, std::vector<Case>* cases) {
  std::vector<std::string> keys;
  std::vector<std::vector<std::string>> values;  // alternatives of each key
  size_t total = 1;
  for (const std::string& word : split(text, ' ')) {
    const size_t equals = word.find('=');
    if (word == op.name && keys.empty()) continue;  // a line as it was printed
    if (equals == std::string::npos || equals == 0) {
      return bad_input("bench: " + op.name + ": '" + word + "' in a case, expected NAME=VALUE");
    }
    keys.push_back(word.substr(0, equals));
    values.push_back(split(std::string_view(word).substr(equals + 1), '|'));
    if (values.back().empty()) return bad_input("bench: " + op.name + ": " + keys.back() + " has no value");
    for (size_t i = 0; i + 1 < keys.size(); ++i) {
      if (keys[i] == keys.back()) return bad_input("bench: " + op.name + ": " + keys.back() + " is given twice in a case");
    }
    total *= values.back().size();
    if (total > kMostCases) return bad_input("bench: " + op.name + ": a case stands for more than 1000 cases");
  }
  for (size_t index = 0; index < total; ++index) {
    std::vector<std::pair<std::string, std::string>> words;
    size_t rest = index;
    for (size_t i = keys.size(); i-- > 0; rest /= values[i].size())
      words.emplace_back(keys[i], values[i][rest % values[i].size()]);
    std::reverse(words.begin(), words.end());
    cases->emplace_back();
    LINNET_TRY(parse_case(op, words, &cases->back()));
  }
  return {};
}

Case shortened(const Case& original, int64_t longest) {
  Case result = original;
  for (int64_t most = longest + 1; most > longest;) {
    most = 0;
    for (const auto& [name, value] : result.letters) most = std::max(most, is_length(name) ? value : 0);
    for (const auto& [name, value] : result.counts) most = std::max(most, value);
    if (most <= longest) break;
    for (auto& [name, value] : result.letters) value = is_length(name) ? std::max<int64_t>(value / 2, 1) : value;
    for (auto& [name, value] : result.counts) value /= 2;
  }
  return result;
}

}  // namespace linnet::bench
