// linnet: the command. One file per subcommand; commands.h lists them.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>

#include "cli/command.h"

namespace linnet::cli {

#define LINNET_COMMAND(name) const Command& name##_command();
#include "cli/commands.h"
#undef LINNET_COMMAND

namespace {

const std::vector<const Command*>& all_commands() {
  static const std::vector<const Command*> commands = {
#define LINNET_COMMAND(name) &name##_command(),
#include "cli/commands.h"
#undef LINNET_COMMAND
  };
  return commands;
}

void print_help() {
  std::printf("linnet %s: attention from softmax to linear\n\nusage: linnet COMMAND [ARGUMENT ...]\n\n", LINNET_VERSION);
  size_t width = 0;
  for (const Command* command : all_commands()) width = std::max(width, command->name.size());
  for (const Command* command : all_commands()) {
    std::printf("  %-*s  %s\n", static_cast<int>(width), command->name.c_str(), command->summary.c_str());
  }
  std::printf("\n  linnet COMMAND --help   options and examples\n  linnet --version        the version\n");
  std::printf(
      "\nexit codes: 0 done and within tolerance, 1 done but a check failed, 2 bad input, 3 not possible here\n"
      "environment: LINNET_ISA=portable|avx2|avx512 limits the instruction set, LINNET_IMPL=OP:IMPL,... or IMPL chooses an\n"
      "implementation, LINNET_THREADS=N the number of threads\n");
}

int run(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty()) {
    print_help();
    return kBadInput;
  }
  if (words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    print_help();
    return kDone;
  }
  if (words[0] == "--version") {
    std::printf("linnet %s\n", LINNET_VERSION);
    return kDone;
  }
  std::vector<std::string> names;
  for (const Command* command : all_commands()) {
    names.push_back(command->name);
    if (command->name != words[0]) continue;
    Arguments args;
    if (const Status status = args.parse(*command, {words.begin() + 1, words.end()}); !status.ok()) return fail(status);
    if (!args.help()) return command->run(args);
    std::fputs(help_text(*command).c_str(), stdout);
    return kDone;
  }
  const std::string hint = did_you_mean(words[0], names);
  return fail(bad_input("there is no command '" + words[0] + "'" + (hint.empty() ? "; see linnet --help" : hint)));
}

}  // namespace
}  // namespace linnet::cli

int main(int argc, char** argv) {
  // The library does not throw; memory may still run out under a huge case.
  try {
    return linnet::cli::run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "linnet: not enough memory\n");
    return linnet::cli::kNotPossible;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "linnet: %s\n", error.what());
    return linnet::cli::kNotPossible;
  }
}
