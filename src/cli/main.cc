// linnet: the command. One file per subcommand; commands.h lists them.
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>

#include "cli/command.h"
#include "core/log.h"
#include "core/op.h"
#include "core/version.h"

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
      "implementation, LINNET_THREADS=N the number of threads, LINNET_LOG=1 tells on stderr when a call runs on slow "
      "kernels,\nLINNET_CHECK=1 looks at the values of every call\n");
}

// LINNET_ISA and the implementations of LINNET_IMPL are checked where they are used; the rest would be passed over in silence.
Status check_environment() {
  if (const char* text = std::getenv("LINNET_THREADS"); text != nullptr && *text != '\0') {
    int threads = 0;
    const char* end = text + std::strlen(text);
    if (const auto [stop, error] = std::from_chars(text, end, threads);
        error != std::errc() || stop != end || threads < 1 || threads > 1024) {
      return bad_input(std::string("LINNET_THREADS is '") + text + "', expected 1 to 1024");
    }
  }
  std::vector<std::string> names;
  for (const Op* op : all_ops()) names.push_back(op->name);
  for (const auto& [op, impl, everywhere] : forced_impls()) {
    if (everywhere) continue;
    const std::string name(op);
    if (find_op(op) == nullptr) return bad_input("LINNET_IMPL: there is no operator '" + name + "'" + did_you_mean(op, names));
    if (impl.empty()) return bad_input("LINNET_IMPL: '" + name + ":' names no implementation");
  }
  return {};
}

// LINNET_LOG=1: what the library has to say beside its results, on stderr.
void start_log() {
  const char* text = std::getenv("LINNET_LOG");
  if (text == nullptr || std::string_view(text) != "1") return;
  set_log_hook([](const char* sentence, void*) { std::fprintf(stderr, "linnet: %s\n", sentence); }, nullptr);
}

int run(int argc, char** argv) {
  start_log();
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 2 && words[0] == "help") words = {words[1], "--help"};
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
    if (!args.help()) {
      if (const Status status = check_environment(); !status.ok()) return fail(status);
      return command->run(args);
    }
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
    const int code = linnet::cli::run(argc, argv);
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    std::fprintf(stderr, "linnet: the output cannot be written: %s\n", std::strerror(errno));
    return linnet::cli::kNotPossible;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "linnet: not enough memory\n");
    return linnet::cli::kNotPossible;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "linnet: %s\n", error.what());
    return linnet::cli::kNotPossible;
  }
}
