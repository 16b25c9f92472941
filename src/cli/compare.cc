// linnet compare: all mechanisms on one input.
#include "compare/compare.h"

#include <algorithm>
#include <cstdio>
#include <memory>

#include "bench/machine.h"
#include "cli/command.h"
#include "cli/print.h"
#include "core/files/file.h"
#include "core/files/json.h"
#include "core/isa.h"
#include "report/text.h"

namespace linnet::cli {
namespace {

using compare::VariantResult;

Status read_arguments(const Arguments& args, compare::Input* input, compare::Settings* settings) {
  for (const std::string& word : args.rest()) {
    return bad_input("compare: it takes options only, '" + word + "' was given; --input names a file");
  }
  LINNET_TRY(args.has("input") ? compare::read_input(args.text("input"), input) : compare::read_sample(input));
  if (args.has("layers")) {
    std::vector<std::string> names;
    const std::string text = args.text("layers");
    for (size_t at = 0; at <= text.size();) {
      const size_t end = std::min(text.find(',', at), text.size());
      names.push_back(text.substr(at, end - at));
      at = end + 1;
    }
    LINNET_TRY(compare::choose_layers(names, input));
  }
  if (args.has("causal")) input->causal = true;
  int64_t length = input->T, threads = bench::this_machine().cores;
  LINNET_TRY(args.integer("length", 1, int64_t{1} << 20, &length));
  compare::set_length(length, input);
  LINNET_TRY(args.integer("threads", 1, 1024, &threads));
  settings->threads = static_cast<int>(threads);
  LINNET_TRY(args.integer("longest", 1, int64_t{1} << 24, &settings->longest_length));
  if (args.has("quick")) settings->seconds = 0.01, settings->longest_seconds = 0.05;
  LINNET_TRY(args.real("time", 0.001, 3600, &settings->seconds));
  if (args.has("dtype")) {
    settings->dtype = dtype_from_name(args.text("dtype"));
    if (!is_float(settings->dtype)) {
      return bad_input("compare: --dtype is '" + args.text("dtype") + "', expected f64, f32, bf16 or f16");
    }
  }
  return {};
}

void print_table(const compare::Comparison& c) {
  const int64_t longest = c.lengths.back();
  Table table({{"attention"},
               {"sees"},
               {"error", Align::right},
               {"cosine", Align::right},
               {"time", Align::right},
               {"at " + report::count_text(static_cast<double>(longest)), Align::right},
               {"grows like", Align::right},
               {"GFLOP", Align::right},
               {"workspace", Align::right},
               {"decode state", Align::right}});
  for (const VariantResult& v : c.variants) {
    const bool measured = v.times.back().first == longest;
    std::string state = "-";
    if (v.state_bytes >= 0) state = report::bytes_text(static_cast<double>(v.state_bytes)) + (v.state_grows ? " +" : "  ");
    table.row({v.name, v.causal ? "past" : "all", report::percent_text(v.error), report::significant(v.cosine, 3),
               report::time_text(v.time.median), measured ? report::time_text(v.times.back().second) : "-",
               compare::growth_text(v.exponent), report::significant(v.flops / 1e9, 3),
               report::bytes_text(static_cast<double>(v.workspace_bytes)), state});
  }
  table.print(stdout);
}

void print_json(const compare::Comparison& c) {
  JsonWriter w(2);
  const bench::Machine machine = bench::this_machine();
  w.begin_object().key("machine").begin_object().member("cpu", machine.cpu).member("cores", machine.cores);
  w.member("caches", machine.caches).end_object().member("threads", c.settings.threads).member("date", bench::today());
  w.member("commit", bench::commit()).member("dtype", dtype_name(c.settings.dtype));
  w.key("input").begin_object().member("source", c.input.source).member("B", c.input.B).member("T", c.input.T);
  w.member("H", c.input.H).member("Hkv", c.input.Hkv).member("K", c.input.K).member("V", c.input.V);
  w.member("causal", c.input.causal).key("layers").begin_array();
  for (const compare::Layer& layer : c.input.layers) w.value(layer.name);
  w.end_array().end_object().member("average_error", c.average_error);
  w.member("other_load", c.other_load).key("variants").begin_array();
  for (const VariantResult& v : c.variants) {
    w.begin_object().member("name", v.name).member("operator", v.op->name).member("options", v.options);
    w.member("implementation", v.impl)
        .member("causal", v.causal)
        .member("repeated_heads", v.repeated_heads)
        .member("error", v.error)
        .member("cosine", v.cosine);
    w.key("seconds").begin_object().member("median", v.time.median).member("min", v.time.best);
    w.member("p90", v.time.p90).end_object().member("flops", v.flops).member("workspace_bytes", v.workspace_bytes);
    w.key("state_bytes");
    v.state_bytes < 0 ? w.value(nullptr) : w.value(v.state_bytes);
    w.member("state_grows", v.state_grows).member("growth_exponent", v.exponent).key("times").begin_array();
    for (const auto& [T, seconds] : v.times) w.begin_object().member("T", T).member("seconds", seconds).end_object();
    w.end_array().key("head_errors").begin_array();
    for (const std::vector<double>& layer : v.head_errors) {
      w.begin_array();
      for (const double error : layer) w.value(error);
      w.end_array();
    }
    w.end_array().end_object();
  }
  w.end_array().key("left_out").begin_array();
  for (const std::string& line : c.left_out) w.value(line);
  w.end_array().key("summary").begin_array();
  for (const std::string& sentence : compare::summary(c)) w.value(sentence);
  w.end_array().end_object();
  std::printf("%s\n", w.text().c_str());
}

// Sentences in lines of at most 100 characters.
void print_wrapped(const std::string& text) {
  std::string line;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    if (!line.empty() && line.size() + 1 + (end - at) > 100) {
      std::printf("%s\n", line.c_str());
      line.clear();
    }
    line += (line.empty() ? "" : " ") + text.substr(at, end - at);
    at = end + 1;
  }
  std::printf("%s\n", line.c_str());
}

void print_text(const compare::Comparison& result, int threads) {
  const compare::Input& in = result.input;
  std::printf("%s: q %s, %zu %s, %s; %d %s\n\n", in.source.c_str(), compare::shape_text(in).c_str(), in.layers.size(),
              in.layers.size() == 1 ? "layer" : "layers", in.causal ? "causal" : "every token sees every token", threads,
              threads == 1 ? "thread" : "threads");
  print_table(result);
  std::printf("\n");
  for (const std::string& sentence : compare::summary(result)) print_wrapped("- " + sentence);
  if (result.other_load > 0.05) {
    print_wrapped("- Other processes used " + report::percent_text(result.other_load) +
                  " of the machine meanwhile: quiet, it is faster.");
  }
  for (const std::string& line : result.left_out) std::printf("left out: %s\n", line.c_str());
}

int compare_main(const Arguments& args) {
  compare::Input input;
  compare::Settings settings;
  if (const Status status = read_arguments(args, &input, &settings); !status.ok()) return fail(status);
  const std::string html = args.text("html");
  if (!html.empty()) {  // a place where nothing can be written is told before the work, and nothing stays there after Ctrl-C
    OutputFile tried;
    if (const Status status = OutputFile::create(html, tried); !status.ok()) return fail(status);
  }
  compare::Comparison result;
  {
    std::unique_ptr<Progress> progress;
    settings.progress = [&](int64_t done, int64_t all) {
      if (progress == nullptr) progress = std::make_unique<Progress>("compare", all, "measurements");
      progress->at(done);
    };
    if (const Status status = compare::compare(std::move(input), settings, &result); !status.ok()) return fail(status);
  }
  if (args.has("json")) {
    print_json(result);
  } else {
    print_text(result, settings.threads);
  }
  if (html.empty()) return kDone;
  // After the numbers: a full disk must not take these along.
  if (const Status status = write_file(html, compare::html_page(result)); !status.ok()) return fail(status);
  if (!args.has("json")) std::printf("\nwrote %s\n", html.c_str());
  return kDone;
}

}  // namespace

const Command& compare_command() {
  static const Command command = {
      .name = "compare",
      .summary = "all mechanisms on one input: error against softmax, time, memory, state; table and HTML page",
      .usage = "[--input FILE] [--html FILE] [options]",
      .details =
          "Every variant that the mechanisms declare computes attention on the same q, k, v, and its output is compared with\n"
          "exact softmax attention of the same kind (sees: all tokens, or the past alone) in double precision. What an\n"
          "operator needs beside them is made up, as the page says: gates, decays, random directions.\n\n"
          "Without --input the built-in sample is taken: three layers of a sentence transformer on English text. A file is\n"
          "safetensors with NAME.q, NAME.k, NAME.v for each layer, [B, T, H, D]; its metadata may say scale and causal.\n\n"
          "time and decode state are for one layer; + means that the state grows with every token.",
      .options = {{"causal", "", "a token sees no later one; default: what the input says"},
                  {"dtype", "NAME", "compute in f64, f32 (default), bf16 or f16"},
                  {"html", "FILE", "write one self-contained page with plots"},
                  {"input", "FILE", "q, k, v of one or more layers"},
                  {"json", "", "print JSON"},
                  {"layers", "A,B", "only these layers"},
                  {"length", "N", "the first N tokens, the input repeated when it is shorter"},
                  {"longest", "N", "measure times up to N tokens; default 16384"},
                  {"quick", "", "measure for 0.01 s a variant, and no call of more than 0.05 s"},
                  {"threads", "N", "number of threads; default: all cores"},
                  {"time", "SECONDS", "measure each variant at each length for so long; default 0.05"}},
      .run = compare_main,
  };
  return command;
}

}  // namespace linnet::cli
