// command: what a subcommand of `linnet` is made of: a declaration of its options, from which parsing and --help follow, and a
// function that runs it.
//
//   int list_main(const Arguments& args);                    // returns the exit code
//   const Command& list_command() {
//     static const Command command = {.name = "list", .summary = "operators, ...", .usage = "[OP ...]",
//                                     .options = {{"json", "", "print JSON"}}, .run = list_main};
//     return command;
//   }
//
// A new subcommand is one file with such a function and one line in commands.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace linnet::cli {

// Exit codes of every subcommand.
inline constexpr int kDone = 0;         // done and within tolerance
inline constexpr int kCheckFailed = 1;  // done, but a check failed
inline constexpr int kBadInput = 2;     // with one sentence on stderr
inline constexpr int kNotPossible = 3;  // not possible here: the sentence says what is missing

struct OptionHelp {
  std::string name;   // dtype, given as --dtype
  std::string value;  // what follows it in the help (NAME, N); empty: a switch
  std::string help;
};

class Arguments;

struct Command {
  std::string name, summary;
  std::string usage;                // the arguments after the name
  std::string details;              // paragraphs of --help below the options
  std::vector<OptionHelp> options;  // without --help, which every command has
  int (*run)(const Arguments& args) = nullptr;
};

// The words after the subcommand's name, taken apart by its declaration: --name value, --name=value, switches, and the rest. An
// option that is given twice counts once, the last time; `all` sees every one.
class Arguments {
 public:
  Status parse(const Command& command, const std::vector<std::string>& words);
  bool help() const { return help_; }
  const std::vector<std::string>& rest() const { return rest_; }

  bool has(std::string_view name) const;
  std::string text(std::string_view name, std::string_view otherwise = "") const;
  std::vector<std::string> all(std::string_view name) const;
  // A whole number in [low, high]; *value keeps its default when the option is absent.
  Status integer(std::string_view name, int64_t low, int64_t high, int64_t* value) const;
  Status real(std::string_view name, double low, double high, double* value) const;
  // One of `choices`, by its index.
  Status choice(std::string_view name, const std::vector<std::string>& choices, int* index) const;

 private:
  const Command* command_ = nullptr;
  std::vector<std::pair<std::string, std::string>> given_;
  std::vector<std::string> rest_;
  bool help_ = false;
};

// Prints the sentence of a failed status on stderr and returns its exit code.
int fail(const Status& status);

// The candidate that differs from `word` in few letters, empty when none is near: for "did you mean".
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);
// "; did you mean 'softmax'?", or nothing.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

std::string help_text(const Command& command);

}  // namespace linnet::cli
