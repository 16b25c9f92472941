// linnet bench: how fast the operators are here, against what this machine can do and against what a user would take instead.
#include "bench/bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "bench/machine.h"
#include "cli/command.h"
#include "cli/model.h"
#include "cli/neighbours.h"
#include "cli/print.h"
#include "core/cuda/driver.h"
#include "core/files/json.h"
#include "report/text.h"

namespace linnet::cli {
namespace {

using bench::Case;
using bench::Result;

struct Wanted {
  std::vector<Case> cases;
  bench::Settings settings;
  int64_t threads = 0;
};

Status wanted_operators(const Arguments& args, std::vector<const Op*>* ops) {
  std::vector<std::string> names;
  for (const Op* op : all_ops()) names.push_back(op->name);
  for (const std::string& word : args.rest()) {
    bool found = false;
    for (const Op* op : all_ops()) {  // a mechanism's name stands for all its operators
      if (op->name != word && op->mechanism != word) continue;
      if (std::find(ops->begin(), ops->end(), op) == ops->end()) ops->push_back(op);
      found = true;
    }
    if (!found) return bad_input("bench: there is no operator '" + word + "'" + did_you_mean(word, names));
  }
  if (args.rest().empty()) *ops = all_ops();
  return {};
}

Status wanted_cases(const Arguments& args, std::vector<Case>* cases) {
  std::vector<const Op*> ops;
  LINNET_TRY(wanted_operators(args, &ops));
  Dtype dtype = Dtype::none;
  if (args.has("dtype")) {
    dtype = dtype_from_name(args.text("dtype"));
    if (!is_float(dtype)) {
      return bad_input("bench: --dtype is '" + args.text("dtype") + "', expected f64, f32, bf16 or f16");
    }
  }
  int pass = -1;
  if (args.has("pass")) LINNET_TRY(args.choice("pass", {"fwd", "fwd+bwd", "bwd"}, &pass));
  if (args.has("case")) {
    for (const std::string& line : args.all("case")) {
      std::vector<const Op*> takers = {find_op(line.substr(0, line.find(' ')))};  // a line as it was printed
      if (takers.front() == nullptr) {
        if (args.rest().empty()) return bad_input("bench: --case needs the operator, as its first word or before the options");
        takers.clear();
        for (const std::string& name : args.rest()) {
          const Op* op = find_op(name);  // or else the first operator of the mechanism of that name
          const auto first =
              std::find_if(all_ops().begin(), all_ops().end(), [&](const Op* o) { return o->mechanism == name; });
          takers.push_back(op != nullptr ? op : *first);
        }
      }
      for (const Op* op : takers) {
        std::vector<Case> given;
        LINNET_TRY(bench::parse_cases(*op, line, &given));
        for (Case& c : given) {
          if (dtype != Dtype::none && line.find("dtype=") == std::string::npos) c.dtype = dtype;
          cases->push_back(std::move(c));
        }
      }
    }
    return {};
  }
  const bool on_gpu = args.text("device", "cpu") == "cuda";
  for (const Op* op : ops) {
    for (const std::string& line : on_gpu ? op->gpu_benchmarks : op->benchmarks) {
      std::vector<Case> declared;
      LINNET_TRY(bench::parse_cases(*op, line, &declared));
      for (Case& c : declared) {
        if ((dtype == Dtype::none || c.dtype == dtype) && (pass < 0 || c.backward == (pass > 0)))
          cases->push_back(std::move(c));
      }
    }
  }
  if (cases->empty()) return bad_input("bench: no declared case fits; --list shows all, --case gives another");
  return {};
}

// The first case of each operator and pass: what the declaration holds to be the usual call.
void keep_first(std::vector<Case>* cases) {
  std::vector<Case> kept;
  for (Case& c : *cases) {
    const bool known =
        std::any_of(kept.begin(), kept.end(), [&](const Case& k) { return k.op == c.op && k.backward == c.backward; });
    if (!known) kept.push_back(std::move(c));
  }
  *cases = std::move(kept);
}

Status read_arguments(const Arguments& args, Wanted* wanted) {
  if (args.has("json") && args.has("markdown")) return bad_input("bench: --json and --markdown are two formats, expected one");
  if (args.has("list") && args.has("markdown")) return bad_input("bench: --list prints lines or, with --json, JSON");
  const bool neighbours = args.has("neighbours");
  if (neighbours && args.has("peers"))
    return bad_input("bench: --neighbours are compared with their own case, not with --peers");
  if (neighbours && args.rest().empty() && !args.has("case")) return bad_input("bench: --neighbours of which operator?");
  if (!neighbours && args.has("limit")) return bad_input("bench: --limit is the ratio that --neighbours may have");
  LINNET_TRY(wanted_cases(args, &wanted->cases));
  if (neighbours && !args.has("case")) keep_first(&wanted->cases);
  bench::Settings& settings = wanted->settings;
  settings.impl = args.text("impl");
  const std::string device = args.text("device", "cpu");
  if (device == "cuda") {
    settings.device = Device::cuda;
    if (const std::string reason = cuda::missing(); !reason.empty()) return impossible("bench: " + reason);
  } else if (device != "cpu") {
    return bad_input("bench: --device is '" + device + "', expected cpu or cuda");
  }
  for (const Case& c : wanted->cases) {
    const Impl* impl;
    Context context;
    context.impl = settings.impl.empty() ? nullptr : settings.impl.c_str();
    LINNET_TRY(
        choose_impl(*c.op, c.backward ? Pass::backward : Pass::forward, context, settings.device, nullptr, nullptr, &impl));
  }
  if (args.has("quick") || neighbours) settings.seconds = 0.1, settings.rounds = 3;
  settings.error = !neighbours && !args.has("no-error");  // linnet check is for that
  LINNET_TRY(args.real("time", 0.001, 3600, &settings.seconds));
  // More threads than cores take turns, and one that waits for its turn is measured, not the kernel.
  wanted->threads = bench::this_machine().cores;
  return args.integer("threads", 1, wanted->threads, &wanted->threads);
}

std::string rate(double per_second) { return report::significant(per_second / 1e9, 3); }

std::vector<Column> columns(bool peers) {
  std::vector<Column> all = {{"median", Align::right, 8},  {"min", Align::right, 8},  {"p90", Align::right, 8},
                             {"GFLOP/s", Align::right, 7}, {"GB/s", Align::right, 6}, {"of ceiling", Align::right, 11},
                             {"error", Align::right, 8},   {"extra", Align::right, 9}};
  if (peers) {
    all.push_back({"peer", Align::right, 8});
    all.push_back({"ratio", Align::right, 6});
  }
  all.push_back({"case"});
  return all;
}

std::vector<std::string> cells(const Result& r, bool peers) {
  std::vector<std::string> row = {
      report::time_text(r.ours.median),
      report::time_text(r.ours.best),
      report::time_text(r.ours.p90),
      rate(r.flops / r.ours.median),
      rate(r.bytes / r.ours.median),
      report::percent_text(r.share) + (r.memory_bound ? " mem" : " fma"),
      std::isnan(r.error) ? "- " : report::error_text(r.error) + (r.error_case.empty() ? " " : "*"),
      report::bytes_text(static_cast<double>(r.workspace_bytes)),
  };
  if (peers) {
    row.push_back(r.peer_name.empty() ? "-" : report::time_text(r.peer.median));
    row.push_back(r.peer_name.empty() ? "-" : report::significant(r.ratio, 3));
  }
  row.push_back(r.what.op->name + " " + r.what.line());
  return row;
}

void write_spread(JsonWriter& writer, const char* name, const bench::Spread& s) {
  writer.key(name).begin_object().member("median", s.median).member("min", s.best).member("p90", s.p90);
  writer.member("calls", s.calls).end_object();
}

void write_result(JsonWriter& writer, const Result& r) {
  writer.begin_object().member("operator", r.what.op->name).member("case", r.what.line()).member("implementation", r.impl);
  write_spread(writer, "seconds", r.ours);
  writer.member("flops", r.flops).member("bytes", r.bytes).member("flops_per_second", r.flops / r.ours.median);
  writer.member("bytes_per_second", r.bytes / r.ours.median).member("fma_ceiling", r.fma_ceiling);
  writer.member("update_ceiling", r.update_ceiling).member("nearer_ceiling", r.memory_bound ? "memory" : "fma");
  writer.member("share_of_ceiling", r.share);
  if (!std::isnan(r.error)) {
    writer.member("error", r.error).member("error_case", r.error_case.empty() ? r.what.line() : r.error_case);
  }
  writer.member("tensor_bytes", r.tensor_bytes).member("workspace_bytes", r.workspace_bytes);
  if (!r.peer_name.empty()) {
    writer.member("peer", r.peer_name);
    write_spread(writer, "peer_seconds", r.peer);
    writer.member("ratio", r.ratio);
  }
  writer.end_object();
}

void print_markdown(const std::vector<std::string>& row) {
  std::string line = "|";
  for (const std::string& cell : row) line += " " + cell + " |";
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void print_notes(const std::vector<Result>& results, const bench::Peer* peer) {
  std::printf(
      "\nof ceiling: the least time that the nearer ceiling allows, over the median; fma: fused multiply-adds on registers;\n"
      "mem: updates in place over memory of the tensors' size; both measured between the rounds.\n"
      "error: largest RMS error / RMS reference of all results, against the reference in double on the same inputs;\n"
      "*: on the same case with shorter lengths, where the reference takes less than a second. extra: workspace.\n");
  if (peer == nullptr) return;
  std::printf("peer: %s, rounds in turn with ours on as many threads; ratio: its median over ours, above 1 ours is faster.\n",
              peer->version().c_str());
  std::string last;
  for (const Result& r : results) {
    const std::string line = r.peer_name.empty() ? "" : "  " + r.what.op->name + ": " + r.peer_name;
    if (!line.empty() && line != last) std::printf("%s\n", line.c_str());
    last = line.empty() ? last : line;
  }
}

// Whether the words name a model instead of operators.
bool names_model(const Arguments& args) {
  return !args.rest().empty() && find_op(args.rest().front()) == nullptr && is_model_path(args.rest().front());
}

int bench_main(const Arguments& args) {
  if (names_model(args)) return model_bench(args);
  Wanted wanted;
  if (const Status status = read_arguments(args, &wanted); !status.ok()) return fail(status);
  if (args.has("list") && args.has("json") && !args.has("neighbours")) {
    JsonWriter writer(2);
    writer.begin_object().key("cases").begin_array();
    for (const Case& c : wanted.cases) {
      writer.begin_object().member("operator", c.op->name).member("case", c.line()).end_object();
    }
    writer.end_array().end_object();
    std::printf("%s\n", writer.text().c_str());
    return kDone;
  }
  if (args.has("list") && !args.has("neighbours")) {
    for (const Case& c : wanted.cases) std::printf("%s %s\n", c.op->name.c_str(), c.line().c_str());
    return kDone;
  }
  std::unique_ptr<bench::Peer> peer;
  if (args.has("peers")) {
    const std::string python = bench::find_python(args.text("python"));
    const Status status = bench::Peer::start(python, static_cast<int>(wanted.threads), &peer);
    if (!status.ok()) return fail(status);
    wanted.settings.peer = peer.get();
  }
  const bench::Machine machine = bench::this_machine();
  const bool json = args.has("json"), markdown = args.has("markdown"), peers = peer != nullptr;
  Isa isa;
  if (const Status status = isa_choice(&isa); !status.ok()) return fail(status);
  const bool on_gpu = wanted.settings.device == Device::cuda;
  const std::string heading = (on_gpu ? cuda::device_name() + "; " : "") + machine.cpu + ", " + std::to_string(machine.cores) +
                              " cores (" + machine.caches + "), " + isa_name(isa) + ", " + std::to_string(wanted.threads) +
                              (wanted.threads == 1 ? " thread" : " threads") + "; " + bench::today() + ", commit " +
                              bench::commit() + (peers ? ", " + peer->version() : "");
  if (args.has("neighbours")) {
    return bench_neighbours(args, wanted.cases, static_cast<int>(wanted.threads), wanted.settings, heading);
  }
  if (!json) std::printf("%s\n\n", heading.c_str());

  const bench::OtherLoad others;
  bench::Bench bench(static_cast<int>(wanted.threads), wanted.settings);
  std::vector<Result> results;
  Table table(columns(peers));
  if (markdown) {
    std::vector<std::string> titles, rules;
    for (const Column& column : columns(peers)) {
      titles.push_back(column.title);
      rules.push_back(column.align == Align::right ? "---:" : "---");
    }
    print_markdown(titles);
    print_markdown(rules);
  }
  {
    Progress progress("bench", static_cast<int64_t>(wanted.cases.size()), "cases");
    for (size_t i = 0; i < wanted.cases.size(); ++i) {
      progress.at(static_cast<int64_t>(i));
      Result result;
      const Status status = bench.measure(wanted.cases[i], &result);
      progress.clear();
      if (!status.ok()) return fail(status);
      results.push_back(result);
      if (json) continue;
      markdown ? print_markdown(cells(result, peers)) : table.stream(stdout, cells(result, peers));
      std::fflush(stdout);
    }
  }
  const double load = others.share(peers ? peer->process() : 0);
  if (!json) {
    print_notes(results, peer.get());
    if (load > 0.05) {
      std::printf("Other processes used %s of the machine during the run: quiet, it is faster.\n",
                  report::percent_text(load).c_str());
    }
    return kDone;
  }
  JsonWriter writer(2);
  writer.begin_object().key("machine").begin_object().member("cpu", machine.cpu).member("cores", machine.cores);
  writer.member("caches", machine.caches).member("isa", isa_name(isa)).end_object().member("threads", wanted.threads);
  writer.member("date", bench::today()).member("commit", bench::commit());
  if (peers) writer.member("peers", peer->version());
  writer.member("other_load", load).key("cases").begin_array();
  for (const Result& result : results) write_result(writer, result);
  writer.end_array().end_object();
  std::printf("%s\n", writer.text().c_str());
  return kDone;
}

}  // namespace

const Command& bench_command() {
  static const Command command = {
      .name = "bench",
      .summary = "speed: median and spread, share of the machine's measured ceilings, error, peers beside it",
      .usage = "[OP ... | MODEL] [--peers] [options]",
      .details =
          "OP is an operator or a mechanism (all its operators); without one all are measured. Each has a list of cases\n"
          "(--list); --case measures another one, for example\n\n"
          "  linnet bench softmax --case 'B=1 Tq=4096 Tk=Tq H=8 Hkv=H K=64|128 V=K causal=1 dtype=f32 pass=fwd'\n\n"
          "where a word is a letter of the operator's shapes (linnet info OP), an option, a count of tokens (lengths=4000),\n"
          "with=TENSOR for an optional tensor, dtype or pass; a|b stands for both. A line of linnet check will do: pass=bwd "
          "means\n"
          "fwd+bwd, and what only concerns a check (impl, threads, strided, values, skip, seed) is passed over.\n\n"
          "--neighbours OP changes one thing at a time about the first declared case of each pass (or about --case): options,\n"
          "optional tensors, types, widths, grouped heads, packed sequences, lengths; it prints how much smaller a share of "
          "the\n"
          "ceiling each reaches, worst first, and ends with 1 when one is above --limit.\n\n"
          "--peers runs what a user would take instead (PyTorch) in rounds in turn with ours, with the same number of "
          "threads,\n"
          "in a Python found by --python, LINNET_PYTHON, beside this program, in .venv of the checkout, or python3.\n\n"
          "MODEL is a folder or a GGUF file, as for linnet generate: prefill of 512 and 5,500 tokens, decode behind 400 and "
          "5,500,\n"
          "in tokens per second, with the size of the state, and decode of a small model of linear layers behind 400 and "
          "100,000;\n"
          "--case 'prefill 512' or 'decode 400' measures other lengths. Its peers are llama.cpp (GGUF files alone: the faster "
          "of\n"
          "the packages llama-cpp-python and xllamacpp) and transformers in bf16 with Linnet's attention; what is missing is "
          "named.",
      .options = {{"case", "LINE", "a case of each OP instead of the declared ones; may be given several times"},
                  {"device", "NAME", "cpu or cuda: where the tensors lie, or the model runs (default cpu)"},
                  {"dtype", "NAME", "only cases of this type: f64, f32, bf16, f16"},
                  {"impl", "NAME", "an implementation instead of the best one (linnet info OP)"},
                  {"json", "", "print JSON"},
                  {"limit", "RATIO", "what --neighbours may lose against their case (default 4)"},
                  {"list", "", "print the cases (with --json: as JSON) and stop"},
                  {"markdown", "", "print the table in Markdown"},
                  {"no-error", "", "times alone, no comparison with the reference"},
                  {"neighbours", "", "measure what lies one step beside a case of each OP instead"},
                  {"pass", "NAME", "only cases of this pass: fwd, or fwd+bwd (bwd)"},
                  {"peers", "", "measure what a user would take instead, too"},
                  {"python", "PATH", "the Python that has PyTorch"},
                  {"quick", "", "measure each case for 0.1 s instead of 1 s"},
                  {"threads", "N", "number of threads, at most the machine's cores (the default)"},
                  {"time", "SECONDS", "measure each case for so long"},
                  kWeightsOption,
                  kAttentionOption},
      .run = bench_main,
  };
  return command;
}

}  // namespace linnet::cli
