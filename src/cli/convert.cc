// linnet convert: a pretrained transformer with cheaper attention, at a known loss.
#include "convert/convert.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "cli/command.h"
#include "cli/print.h"
#include "core/files/json.h"

namespace linnet::cli {

namespace {

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> list;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    if (end > at) list.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return list;
}

Status integers(const char* name, const std::string& text, std::vector<int64_t>& out) {
  for (const std::string& word : split_list(text)) {
    int64_t x = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), x);
    if (error != std::errc() || end != word.data() + word.size() || x < 0) {
      return bad_input(std::string("convert: --") + name + " holds '" + word +
                       "', expected whole numbers with commas between them");
    }
    out.push_back(x);
  }
  return {};
}

// What goes to the fit as it was given.
constexpr const char* kFit[] = {"tokens", "error-tokens", "device",          "dtype",           "seq",
                                "batch",  "finetune",     "finetune-tokens", "mixer-rate",      "other-rate",
                                "long",   "warmup",       "fit-seconds",     "finetune-seconds"};

// 5000, 300k, 20M; what is none is refused by the fit.
double tokens_of(const std::string& text) {
  const char last = text.empty() ? '0' : text.back();
  return std::atof(text.c_str()) * (last == 'k' ? 1e3 : last == 'M' ? 1e6 : last == 'G' ? 1e9 : 1);
}

Status read(const Arguments& args, convert::ConvertOptions& o) {
  if (args.rest().empty()) return bad_input("convert: which model? a folder with config.json and safetensors, or a GGUF file");
  if (args.rest().size() > 1) return bad_input("convert: one model at a time; '" + args.rest()[1] + "' is too much");
  o.model = args.rest()[0];
  o.out = args.text("out");
  o.text = args.text("text");
  o.eval_text = args.text("eval-text");
  o.plan = args.text("plan");
  LINNET_TRY(args.real("budget", 0, 1, &o.budget));
  LINNET_TRY(args.integer("length", 2, int64_t{1} << 40, &o.length));
  LINNET_TRY(args.integer("sinks", 0, 65536, &o.sinks));
  LINNET_TRY(args.integer("seed", 0, INT64_MAX, &o.seed));
  LINNET_TRY(args.integer("threads", 1, 1024, &o.threads));
  LINNET_TRY(args.integer("calibration-tokens", 16, int64_t{1} << 30, &o.calibration_tokens));
  LINNET_TRY(args.integer("plan-tokens", 16, int64_t{1} << 30, &o.plan_tokens));
  LINNET_TRY(args.integer("eval-tokens", 16, int64_t{1} << 30, &o.eval_tokens));
  LINNET_TRY(args.integer("rounds", 0, 10, &o.rounds));
  LINNET_TRY(args.real("keep-recall", -1, 100, &o.keep_recall));
  LINNET_TRY(integers("windows", args.text("windows"), o.windows));
  if (args.has("recall-lengths")) {
    o.recall_lengths.clear();
    LINNET_TRY(integers("recall-lengths", args.text("recall-lengths"), o.recall_lengths));
  }
  const std::string keep = args.text("keep-softmax");
  if (!keep.empty() && keep.find(',') == std::string::npos && keep != "auto") {
    LINNET_TRY(args.integer("keep-softmax", 0, 1000, &o.keep_count));
    if (!args.has("budget")) o.budget = 1;  // the number of layers is the budget
  } else if (keep != "auto") {
    LINNET_TRY(integers("keep-softmax", keep, o.keep));
  }
  LINNET_TRY(args.integer("cache", 1, int64_t{1} << 40, &o.cache));
  for (const int64_t w : o.windows) {
    if (w < 1) return bad_input("convert: a window of 0 keys sees nothing");
  }
  o.mechanisms = split_list(args.text("mechanisms"));
  o.zero_shot = args.has("zero-shot");
  o.dry_run = args.has("dry-run");
  o.keep_work = args.has("keep-work");
  o.baseline = args.has("baseline");
  o.speed = o.recall = !args.has("quick");
  for (const char* name : kFit) {
    if (args.has(name)) o.fit.insert(o.fit.end(), {std::string("--") + name, args.text(name)});
  }
  const double layerwise =
      std::max(args.has("tokens") ? tokens_of(args.text("tokens")) : 1e6, tokens_of(args.text("error-tokens")));
  const double wanted = layerwise + tokens_of(args.text("finetune-tokens"));
  o.fit_tokens = std::clamp<int64_t>(static_cast<int64_t>(std::min(wanted, 1e12)), 4096, int64_t{200} << 20);
  return {};
}

void print_plan(const convert::ConvertResult& r) {
  Table table(
      {{"layer", Align::right}, {"attention"}, {"cost", Align::right}, {"damage", Align::right}, {"alone", Align::right}});
  for (const convert::PlannedLayer& p : r.layers) {
    const auto shown = [&](double x) { return p.kept.empty() ? number(x, 3) : "-"; };
    table.row({std::to_string(p.layer.index), p.label(), shown(p.cost), shown(p.damage), shown(p.alone)});
  }
  table.print(stdout);
  std::printf("\n%s of the softmax attention's cost at %lld tokens; predicted damage %s (%s)", number(r.cost, 4).c_str(),
              static_cast<long long>(r.length), number(r.predicted, 3).c_str(), r.unit.c_str());
  if (r.measured >= 0) std::printf(", measured together %s", number(r.measured, 3).c_str());
  std::printf("\n");
  if (!r.reliable) std::printf("UNRELIABLE: without a text the plan was made on random inputs\n");
}

// Ctrl-C: every stage that is done lies in the work folder already.
void interrupted(int) {
  constexpr char kSentence[] = "\nlinnet: interrupted; the same command goes on where it was\n";
  if (write(STDERR_FILENO, kSentence, sizeof kSentence - 1) < 0) _exit(kNotPossible);  // nobody listens
  _exit(kNotPossible);
}

int convert_main(const Arguments& args) {
  convert::ConvertOptions options;
  if (const Status status = read(args, options); !status.ok()) return fail(status);
  std::signal(SIGINT, interrupted);
  std::signal(SIGTERM, interrupted);
  std::unique_ptr<Progress> bar;
  std::string current;
  const convert::Told told = [&](const std::string& what, int64_t done, int64_t total) {
    if (what != current) {
      bar.reset();
      if (!is_terminal(stderr)) std::fprintf(stderr, "convert: %s\n", what.c_str());
      bar = std::make_unique<Progress>(what, total);
      current = what;
    }
    bar->at(done);
  };
  convert::ConvertResult result;
  const Status status = convert::convert_model(options, told, result);
  bar.reset();
  if (!status.ok()) return fail(status);
  if (args.has("json")) {
    JsonWriter w(2);
    w.begin_object()
        .member("cost", result.cost)
        .member("length", result.length)
        .member("predicted", result.predicted)
        .member("measured", result.measured);
    w.member("reliable", result.reliable).member("report", result.report).key("layers").begin_array();
    for (const convert::PlannedLayer& p : result.layers) p.layer.write(w);
    std::printf("%s\n", w.end_array().end_object().text().c_str());
    return kDone;
  }
  print_plan(result);
  double seconds = 0;
  for (const auto& stage : result.seconds) seconds += stage.second;
  if (options.dry_run) {
    double measured = 0;
    for (const auto& [name, each] : result.seconds) measured += name == "damage" ? each : 0;
    std::printf(
        "dry run: %s until here; refinement would take about %s more, the evaluation a few minutes; nothing was written\n",
        seconds_text(seconds).c_str(), seconds_text(measured).c_str());
    return kDone;
  }
  std::printf("\n%s\n%s in all; %s is complete, its report: %s\n", result.headline.c_str(), seconds_text(seconds).c_str(),
              options.out.c_str(), result.report.c_str());
  return kDone;
}

}  // namespace

const Command& convert_command() {
  static const Command command = {
      .name = "convert",
      .summary = "a pretrained transformer with cheaper attention, at a known loss; plan, checkpoint and report",
      .usage = "MODEL --out DIR --text FILE [--budget 0.25] [--zero-shot] [OPTION ...]",
      .details =
          "Measures every layer and head on the text, chooses what stands in the place of softmax under the budget, writes a\n"
          "checkpoint that `linnet generate` reads, and evaluates both models with the same code. A run that was stopped goes "
          "on\n"
          "when the same command is given again. docs/convert.md has formats and mechanisms.\n\n"
          "example: linnet convert smollm2.gguf --out fast --budget 0.3 --length 8192 --text text.txt --zero-shot",
      .options =
          {{"out", "DIR", "the folder to be made; DIR.work holds what is under way"},
           {"text", "FILE", "UTF-8 text for measuring, planning and, unless --eval-text is given, evaluating"},
           {"eval-text", "FILE", "another text to evaluate on"},
           {"budget", "X", "share of the softmax attention's cost that may remain, above 0 to 1 (default 0.25)"},
           {"length", "N", "tokens at which cost is counted (default: the context, at most 8192)"},
           {"zero-shot", "", "no training, and no mechanism that needs it"},
           {"mechanisms", "A,B",
            "candidates: softmax, window, monarch, hierarchical; with a fit: gdn, gla, hybrid, hybrid-exact, distill, "
            "hedgehog, t2r"},
           {"windows", "N,M", "windows to choose from (default 64,128,..,2048; encoders 16,32,..)"},
           {"sinks", "N", "first keys that every window sees (default 4)"},
           {"keep-softmax", "N|I,J", "so many layers stay as they are, those that suffer most; or these (one: 'I,')"},
           {"cache", "N", "tokens' worth of cache that each other layer may hold"},
           {"plan", "FILE", "use this plan.json"},
           {"dry-run", "", "print plan, cost and time; write nothing"},
           {"calibration-tokens", "N", "of the statistics (default 4096)"},
           {"plan-tokens", "N", "of the measured damage (default 2048)"},
           {"eval-tokens", "N", "of the evaluation (default 16384)"},
           {"rounds", "N", "of refinement by measuring the plan again (default 1)"},
           {"keep-recall", "X",
            "nats that the loss of passages repeated from far back may rise (default 0.1); -1: plan for the text alone"},
           {"baseline", "",
            "also evaluate at the plan's cost: one window in the least harmed layers, and in evenly spaced ones; LoLCATs', "
            "Liger's and Hedgehog's forms, untrained"},
           {"recall-lengths", "N,M", "tokens at which recall is evaluated (default 512,2048)"},
           {"quick", "", "leave out recall and rates"},
           {"tokens", "N", "of the layerwise fit: 5000, 300k, 20M (default 1M)"},
           {"error-tokens", "N", "of its second pass, on what the converted layers give (default 0)"},
           {"finetune", "KIND", "end to end behind the fit: none, kl, ce, lora (default none)"},
           {"finetune-tokens", "N", "of that"},
           {"device", "NAME", "of the fit: cpu or cuda (default: cuda where there is one)"},
           {"dtype", "NAME", "of the fit's products on a GPU: f32 or bf16"},
           {"seq", "N", "tokens of a sequence of the fit (default 512)"},
           {"batch", "N", "sequences of a step of the fit (default 8)"},
           {"long", "N", "end to end: tokens of the sequences of every fourth step"},
           {"mixer-rate", "X", "end to end: learning rate of gates (default 1e-4)"},
           {"other-rate", "X", "end to end: of the model's own weights (default 1e-5)"},
           {"warmup", "X", "end to end: share in which the rates rise (default 0)"},
           {"fit-seconds", "S", "the layerwise fit takes no longer"},
           {"finetune-seconds", "S", "nor does the end-to-end stage"},
           {"keep-work", "", "keep DIR.work"},
           {"seed", "N", "of random choices (default 0)"},
           {"threads", "N", "default: one per core"},
           {"json", "", "print JSON"}},
      .run = convert_main,
  };
  return command;
}

}  // namespace linnet::cli
