// linnet eval: perplexity of a text, and recall.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "cli/model.h"
#include "cli/print.h"
#include "core/files/file.h"
#include "core/files/json.h"
#include "runtime/evaluate.h"

namespace linnet::cli {

namespace {

constexpr uint64_t kMaxTextBytes = uint64_t{4} << 30;

Status run(const Arguments& args) {
  const bool recall = args.has("recall");
  if (!recall && !args.has("text")) return bad_input("eval: which text? --text FILE, or --recall");
  TextOptions options;
  options.length = 0;
  int64_t trials = 10, seed = 0;
  LINNET_TRY(args.integer("length", 2, int64_t{1} << 40, &options.length));
  LINNET_TRY(args.integer("stride", 1, int64_t{1} << 40, &options.stride));
  LINNET_TRY(args.integer("tokens", 2, int64_t{1} << 40, &options.limit));
  LINNET_TRY(args.integer("trials", 1, 10000, &trials));
  LINNET_TRY(args.integer("seed", 0, INT64_MAX, &seed));
  std::string text;
  if (args.has("text")) LINNET_TRY(read_file(args.text("text"), kMaxTextBytes, text));
  Model model;
  LINNET_TRY(load_model("eval", args, model));
  if (!model.summary().causal)
    return bad_input("eval: " + model.summary().family + " predicts no next token; linnet embed uses it");
  if (options.length == 0) options.length = std::min<int64_t>(1024, model.context());

  TextScore score;
  if (args.has("text")) {
    std::unique_ptr<Progress> bar;
    const auto progressed = [&](int64_t done, int64_t total) {
      if (!bar) bar = std::make_unique<Progress>("eval", total, "tokens");
      bar->at(done);
    };
    LINNET_TRY(score_text(model, text, options, progressed, score));
  }
  std::vector<RecallScore> recalls;
  if (recall) {
    std::vector<int64_t> lengths;
    for (int64_t length = 256; length <= std::min<int64_t>(model.context(), 4096); length *= 2) lengths.push_back(length);
    if (args.has("length")) lengths = {options.length};
    if (lengths.empty()) lengths = {model.context()};
    std::unique_ptr<Progress> bar;
    const auto progressed = [&](int64_t done, int64_t total) {
      if (!bar) bar = std::make_unique<Progress>("recall", total, "prompts");
      bar->at(done);
    };
    LINNET_TRY(score_recall(model, lengths, trials, static_cast<uint64_t>(seed), progressed, recalls));
  }

  if (args.has("json")) {
    JsonWriter w(2);
    w.begin_object().member("model", model.summary().path).member("weights", model.summary().weights);
    if (args.has("text")) {
      w.key("text")
          .begin_object()
          .member("tokens", score.tokens)
          .member("scored", score.scored)
          .member("windows", score.windows);
      w.member("length", options.length).member("stride", options.stride > 0 ? options.stride : options.length);
      w.member("loss", score.loss).member("perplexity", score.perplexity).member("bits_per_byte", score.bits_per_byte);
      w.member("seconds", score.seconds).key("positions").begin_array();
      for (const LossBucket& b : score.buckets) {
        w.begin_object()
            .member("first", b.first)
            .member("last", b.last)
            .member("tokens", b.tokens)
            .member("loss", b.loss)
            .end_object();
      }
      w.end_array().end_object();
    }
    if (recall) {
      w.key("recall").begin_array();
      for (const RecallScore& r : recalls) {
        w.begin_object().member("task", r.task).member("length", r.length).member("trials", r.trials).member("right", r.right);
        w.end_object();
      }
      w.end_array();
    }
    w.end_object();
    std::printf("%s\n", w.text().c_str());
    return {};
  }
  if (args.has("text")) {
    std::printf("perplexity %s, %s bits per byte, loss %s nats\n", number(score.perplexity, 6).c_str(),
                number(score.bits_per_byte, 5).c_str(), number(score.loss, 6).c_str());
    std::printf("%lld of %lld tokens scored in %lld windows of %lld, %s tokens/s, weights %s\n\n",
                static_cast<long long>(score.scored), static_cast<long long>(score.tokens),
                static_cast<long long>(score.windows), static_cast<long long>(options.length),
                number(static_cast<double>(score.scored) / score.seconds, 4).c_str(), model.summary().weights.c_str());
    Table table({{"position"}, {"tokens", Align::right}, {"loss", Align::right}, {"perplexity", Align::right}});
    for (const LossBucket& b : score.buckets) {
      if (b.tokens == 0) continue;
      table.row({std::to_string(b.first) + "-" + std::to_string(b.last), std::to_string(b.tokens), number(b.loss, 5),
                 number(std::exp(b.loss), 5)});
    }
    table.print(stdout);
  }
  if (recall) {
    if (args.has("text")) std::printf("\n");
    Table table({{"recall"}, {"length", Align::right}, {"right", Align::right}, {"of", Align::right}});
    for (const RecallScore& r : recalls) {
      table.row({r.task, std::to_string(r.length), std::to_string(r.right), std::to_string(r.trials)});
    }
    table.print(stdout);
  }
  return {};
}

int eval_main(const Arguments& args) {
  const Status status = run(args);
  return status.ok() ? kDone : fail(status);
}

}  // namespace

const Command& eval_command() {
  static const Command command = {
      .name = "eval",
      .summary = "a model's perplexity on a text, and whether it recalls what it was told",
      .usage = "MODEL [--text FILE] [--recall] [OPTION ...]",
      .details =
          "The text is cut in windows of --length tokens, each --stride behind the last; every token is scored once, in the "
          "first\n"
          "window that holds it. --recall hides a pass key in text, and a number among name = number lines.\n\n"
          "example: linnet eval model.gguf --text wiki.test.raw --length 2048 --stride 1024",
      .options = {{"text", "FILE", "a UTF-8 text"},
                  {"length", "N", "tokens of a window (default 1024, at most the context); with --recall: the only length"},
                  {"stride", "N", "tokens from one window to the next (default: length)"},
                  {"tokens", "N", "only the first N tokens of the text"},
                  {"recall", "", "pass keys and associative recall at several lengths"},
                  {"trials", "N", "of each recall task and length (default 10)"},
                  {"seed", "N", "of the recall tasks (default 0)"},
                  kWeightsOption,
                  kAttentionOption,
                  kThreadsOption,
                  kDeviceOption,
                  {"json", "", "print JSON"}},
      .run = eval_main,
  };
  return command;
}

}  // namespace linnet::cli
