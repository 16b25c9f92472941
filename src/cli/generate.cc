// linnet generate: text from a prompt, or a conversation.
#include "runtime/generate.h"

#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "cli/model.h"
#include "cli/print.h"
#include "core/files/json.h"

namespace linnet::cli {

namespace {

std::string rate(int64_t tokens, double seconds) {
  return tokens > 0 && seconds > 0 ? number(static_cast<double>(tokens) / seconds, 4) + " tokens/s" : "-";
}

void print_rates(const Generation& g, const Session& session) {
  std::fprintf(stderr, "\nprompt %lld tokens, %s; decode %zu tokens, %s; state %s after %lld tokens; ended by %s\n",
               static_cast<long long>(g.prompt_tokens), rate(g.prompt_tokens, g.prompt_seconds).c_str(), g.tokens.size(),
               rate(static_cast<int64_t>(g.tokens.size()), g.decode_seconds).c_str(),
               bytes_text(static_cast<double>(session.state_bytes())).c_str(), static_cast<long long>(session.position()),
               g.reason);
}

Status read_options(const Arguments& args, SamplerOptions& sampler, GenerateOptions& options) {
  int64_t seed = 0;
  LINNET_TRY(args.integer("tokens", 0, int64_t{1} << 40, &options.tokens));
  LINNET_TRY(args.real("temperature", 0, 100, &sampler.temperature));
  LINNET_TRY(args.integer("top-k", 0, kMaxVocabulary, &sampler.top_k));
  LINNET_TRY(args.real("top-p", 0, 1, &sampler.top_p));
  LINNET_TRY(args.real("min-p", 0, 1, &sampler.min_p));
  LINNET_TRY(args.real("repeat-penalty", 0, 100, &sampler.repeat_penalty));
  LINNET_TRY(args.integer("seed", 0, INT64_MAX, &seed));
  sampler.seed = static_cast<uint64_t>(seed);
  options.stops = args.all("stop");
  for (const std::string& stop : options.stops) {
    if (stop.empty()) return bad_input("generate: --stop is empty");
  }
  if (args.has("chat") && args.has("json") && !args.has("prompt")) {
    return bad_input("generate: --json needs --prompt: a conversation has no end to report");
  }
  const Status status = check_sampling(sampler);
  return status.ok() ? status : bad_input("generate: " + status.message());
}

Status run(const Arguments& args) {
  SamplerOptions sampling;
  GenerateOptions options;
  LINNET_TRY(read_options(args, sampling, options));
  const bool chatting = args.has("chat"), json = args.has("json");
  std::string prompt = args.text("prompt");
  if (!chatting && !args.has("prompt")) {
    if (isatty(STDIN_FILENO)) return bad_input("generate: which prompt? --prompt TEXT, --chat, or a text on standard input");
    prompt = read_input();
  }
  Model model;
  LINNET_TRY(load_model("generate", args, model));
  if (!model.has_tokenizer()) return bad_input("generate: " + model.summary().path + " has no tokenizer.json");
  Session session;
  LINNET_TRY(model.start(session));
  Sampler sampler(sampling);
  const auto print = [&](const std::string& text) {
    if (!json) {
      std::fputs(text.c_str(), stdout);
      std::fflush(stdout);
    }
    return true;
  };
  ChatTemplate chat;
  if (chatting) {
    LINNET_TRY(model.chat(chat));
    for (const std::string& name : chat.ends()) {
      if (const int32_t id = model.tokenizer().find(name); id >= 0) options.ends.push_back(id);
    }
  }
  const auto speak = [&](const std::vector<int32_t>& ids, Generation& result) {
    Progress progress("prompt", static_cast<int64_t>(ids.size()), "tokens");
    GenerateOptions own = options;
    own.progress = [&progress](int64_t done) { progress.at(done); };
    const auto show = [&](const std::string& text) {
      progress.clear();
      return print(text);
    };
    return generate(model, session, ids, sampler, own, show, result);
  };
  Generation result;
  if (!chatting || args.has("prompt")) {
    const std::vector<int32_t> ids = chatting ? model.tokenizer().encode(chat.begin(args.text("system"), prompt), false)
                                              : model.tokenizer().encode(prompt, {true, false});
    LINNET_TRY(speak(ids, result));
    if (!json) {
      std::printf("\n");
      std::fflush(stdout);
      print_rates(result, session);
      return {};
    }
    JsonWriter w(2);
    w.begin_object().member("text", result.text).member("reason", result.reason).key("tokens").begin_array();
    for (const int32_t token : result.tokens) w.value(token);
    w.end_array().member("prompt_tokens", result.prompt_tokens).member("prompt_seconds", result.prompt_seconds);
    w.member("decode_seconds", result.decode_seconds).member("state_bytes", session.state_bytes()).end_object();
    std::printf("%s\n", w.text().c_str());
    return {};
  }
  const bool terminal = isatty(STDIN_FILENO);
  bool first = true;
  std::string line;
  for (;;) {
    if (terminal) {
      std::fputs("> ", stdout);
      std::fflush(stdout);
    }
    if (!std::getline(std::cin, line)) break;
    if (line.empty()) continue;
    const std::vector<int32_t> ids =
        model.tokenizer().encode(first ? chat.begin(args.text("system"), line) : chat.next(line), false);
    LINNET_TRY(speak(ids, result));
    first = false;
    std::printf("\n");
    print_rates(result, session);
  }
  if (first) return bad_input("generate: the conversation is empty: --chat reads a line for each turn");
  return {};
}

int generate_main(const Arguments& args) {
  const Status status = run(args);
  return status.ok() ? kDone : fail(status);
}

}  // namespace

const Command& generate_command() {
  static const Command command = {
      .name = "generate",
      .summary = "text from a model: continue a prompt, or chat",
      .usage = "MODEL [--prompt TEXT | --chat] [OPTION ...]",
      .details =
          "MODEL is a folder with config.json and safetensors of a family of docs/run-a-model.md, or a GGUF file. Without\n"
          "--prompt and --chat the prompt is read from standard input. The text goes to standard output as it comes, rates\n"
          "and the size of the state to standard error. The same seed gives the same text on any number of threads.\n\n"
          "examples: linnet generate model.gguf --prompt \"The linnet is\" --tokens 40\n"
          "          linnet generate model.gguf --chat --temperature 0.7",
      .options = {{"prompt", "TEXT", "what to continue; with --chat: one question"},
                  {"chat", "", "keep a conversation in the model's own form; one line for each turn"},
                  {"system", "TEXT", "with --chat: the system message (default: the model's)"},
                  {"tokens", "N", "at most so many new tokens (default 256)"},
                  {"temperature", "X", "0 takes the most likely token (default), 1 draws as the model says"},
                  {"top-k", "N", "draw among the N most likely tokens (default 0: all)"},
                  {"top-p", "X", "draw among the tokens that together have probability X (default 1)"},
                  {"min-p", "X", "draw among tokens at least X times as likely as the best (default 0)"},
                  {"repeat-penalty", "X", "divide the logits of the last 64 tokens by X (default 1)"},
                  {"seed", "N", "of the draws (default 0)"},
                  {"stop", "TEXT", "end before this text; may be given again"},
                  kWeightsOption,
                  kAttentionOption,
                  kThreadsOption,
                  kDeviceOption,
                  {"json", "", "print text, tokens and times as JSON"}},
      .run = generate_main,
  };
  return command;
}

}  // namespace linnet::cli
