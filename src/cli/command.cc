#include "cli/command.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace linnet::cli {
namespace {

const OptionHelp* find_option(const Command& command, std::string_view name) {
  for (const OptionHelp& option : command.options) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

// Levenshtein distance: insertions, deletions, replacements.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

std::string number(double x) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, x).ptr};
}

template <class T>
Status parse_number(const std::string& command, std::string_view name, const std::string& text, T low, T high, const char* kind,
                    T* value) {
  T x{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
  if (error == std::errc() && end == text.data() + text.size() && x >= low && x <= high) {
    *value = x;
    return {};
  }
  return bad_input(command + ": --" + std::string(name) + " is '" + text + "', expected " + kind + " from " +
                   number(static_cast<double>(low)) + " to " + number(static_cast<double>(high)));
}

}  // namespace

Status Arguments::parse(const Command& command, const std::vector<std::string>& words) {
  command_ = &command;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--") {
      rest_.insert(rest_.end(), words.begin() + static_cast<std::ptrdiff_t>(i) + 1, words.end());
      return {};
    }
    if (word == "-h" || word == "--help") {
      help_ = true;
      continue;
    }
    if (word.size() < 2 || word[0] != '-') {
      rest_.push_back(word);
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(word.rfind("--", 0) == 0 ? 2 : 1, equals == std::string::npos ? equals : equals - 2);
    const OptionHelp* option = word.rfind("--", 0) == 0 ? find_option(command, name) : nullptr;
    if (option == nullptr) {
      std::vector<std::string> names = {"help"};
      for (const OptionHelp& each : command.options) names.push_back(each.name);
      const std::string near = nearest(name, names);
      return bad_input(command.name + ": there is no option " + word.substr(0, equals) +
                       (near.empty() ? "; see linnet " + command.name + " --help" : "; did you mean --" + near + "?"));
    }
    if (option->value.empty()) {
      if (equals != std::string::npos) return bad_input(command.name + ": --" + name + " takes no value");
      given_.emplace_back(name, "");
    } else if (equals != std::string::npos) {
      given_.emplace_back(name, word.substr(equals + 1));
    } else if (i + 1 < words.size()) {
      given_.emplace_back(name, words[++i]);
    } else {
      return bad_input(command.name + ": --" + name + " needs a value, " + option->value);
    }
    if (!option->value.empty() && given_.back().second.empty()) {  // of a variable that is not set
      return bad_input(command.name + ": --" + name + " is empty, expected " + option->value);
    }
  }
  return {};
}

bool Arguments::has(std::string_view name) const {
  return std::any_of(given_.begin(), given_.end(), [&](const auto& pair) { return pair.first == name; });
}

std::string Arguments::text(std::string_view name, std::string_view otherwise) const {
  std::string value(otherwise);
  for (const auto& [given, text] : given_) {
    if (given == name) value = text;
  }
  return value;
}

std::vector<std::string> Arguments::all(std::string_view name) const {
  std::vector<std::string> values;
  for (const auto& [given, text] : given_) {
    if (given == name) values.push_back(text);
  }
  return values;
}

Status Arguments::integer(std::string_view name, int64_t low, int64_t high, int64_t* value) const {
  return has(name) ? parse_number(command_->name, name, text(name), low, high, "a whole number", value) : Status();
}

Status Arguments::real(std::string_view name, double low, double high, double* value) const {
  return has(name) ? parse_number(command_->name, name, text(name), low, high, "a number", value) : Status();
}

Status Arguments::choice(std::string_view name, const std::vector<std::string>& choices, int* index) const {
  if (!has(name)) return {};
  const std::string word = text(name);
  std::string names;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (word == choices[i]) return *index = static_cast<int>(i), Status();
    names += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ") + choices[i];
  }
  return bad_input(command_->name + ": --" + std::string(name) + " is '" + word + "', expected " + names);
}

int fail(const Status& status) {
  std::fprintf(stderr, "linnet: %s\n", status.message().c_str());
  return static_cast<int>(status.code());
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  size_t best_distance = 1 + std::max<size_t>(1, word.size() / 3);  // a third of the letters may be wrong
  for (const std::string& candidate : candidates) {
    const size_t d = distance(word, candidate);
    if (d < best_distance) {
      best_distance = d;
      best = candidate;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string near = nearest(word, candidates);
  return near.empty() ? "" : "; did you mean '" + near + "'?";
}

std::string help_text(const Command& command) {
  std::string text = "linnet " + command.name + ": " + command.summary + "\n\nusage: linnet " + command.name;
  if (!command.usage.empty()) text += " " + command.usage;
  text += "\n\n";
  std::vector<std::pair<std::string, std::string>> rows;
  for (const OptionHelp& option : command.options) {
    rows.emplace_back("--" + option.name + (option.value.empty() ? "" : " " + option.value), option.help);
  }
  rows.emplace_back("--help", "this text");
  size_t width = 0;
  for (const auto& row : rows) width = std::max(width, row.first.size());
  for (const auto& [left, right] : rows) text += "  " + left + std::string(width - left.size() + 2, ' ') + right + "\n";
  if (!command.details.empty()) text += "\n" + command.details + "\n";
  return text;
}

}  // namespace linnet::cli
