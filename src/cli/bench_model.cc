// linnet bench MODEL: rates of a whole model, beside llama.cpp and transformers.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "bench/machine.h"
#include "bench/model.h"
#include "cli/model.h"
#include "cli/print.h"
#include "core/cuda/driver.h"
#include "core/files/json.h"
#include "report/text.h"

namespace linnet::cli {
namespace {

using bench::ModelResult;
using bench::ModelWork;

Status wanted_work(const Arguments& args, const Model& model, std::vector<ModelWork>* work) {
  for (const std::string& line : args.all("case")) {  // "prefill 512", "decode 400"
    ModelWork what;
    const size_t space = line.find(' ');
    const std::string kind = line.substr(0, space), count = space == std::string::npos ? "" : line.substr(space + 1);
    char* end = nullptr;
    what.decode = kind == "decode";
    what.tokens = std::strtoll(count.c_str(), &end, 10);
    if ((kind != "decode" && kind != "prefill") || count.empty() || *end != '\0' || what.tokens < 16 ||
        what.tokens > (1 << 24)) {
      return bad_input("bench: --case is '" + line + "', expected 'prefill N' or 'decode N' with N from 16 on");
    }
    work->push_back(what);
  }
  if (work->empty()) *work = bench::usual_work(model.context());
  return work->empty() ? bad_input("bench: the context of " + std::to_string(model.context()) +
                                   " tokens is shorter than every case; --case gives another")
                       : Status{};
}

double rate(const bench::Spread& seconds) { return 1 / seconds.median; }
std::string rate_text(const bench::Spread& seconds) { return report::significant(rate(seconds), 4); }
// "812 to 866": the rates that nine of ten samples reach, and the best one.
std::string range_text(const bench::Spread& s) {
  return report::significant(1 / s.p90, 3) + " to " + report::significant(1 / s.best, 3);
}
std::string ratio_text(const ModelResult& r, const ModelResult::Other& other) {
  return report::significant(other.time.median / r.ours.median, 3);
}

void write(JsonWriter& w, const ModelResult& r) {
  const auto time = [&w](const bench::Spread& s) {
    w.member("tokens_per_second", rate(s)).member("median", s.median).member("min", s.best).member("p90", s.p90);
    w.member("samples", s.calls);
  };
  w.begin_object().member("work", r.what.decode ? "decode" : "prefill").member("tokens", r.what.tokens);
  w.member("linear", r.what.linear);
  time(r.ours);
  w.member("state_bytes", r.state_bytes).key("peers").begin_array();
  for (const ModelResult::Other& other : r.others) {
    w.begin_object().member("name", other.name);
    time(other.time);
    w.member("ratio", other.time.median / r.ours.median).end_object();
  }
  w.end_array().end_object();
}

void print_markdown(const std::vector<ModelResult>& results) {
  std::printf("| work | tokens/s | range | state | peer | its tokens/s | range | ratio |\n|---|---|---|---|---|---|---|---|\n");
  for (const ModelResult& r : results) {
    const std::string own = "| " + r.what.line() + " | " + rate_text(r.ours) + " | " + range_text(r.ours) + " | " +
                            report::bytes_text(static_cast<double>(r.state_bytes)) + " |";
    if (r.others.empty()) std::printf("%s | | | |\n", own.c_str());
    for (const ModelResult::Other& other : r.others) {
      std::printf("%s %s | %s | %s | **%s** |\n", own.c_str(), other.name.c_str(), rate_text(other.time).c_str(),
                  range_text(other.time).c_str(), ratio_text(r, other).c_str());
    }
  }
}

Status run(const Arguments& args) {
  for (const char* name : {"dtype", "impl", "list", "pass"}) {
    if (args.has(name)) return bad_input(std::string("bench: --") + name + " is for operators, not for a model");
  }
  if (args.text("device", "cpu") == "cuda" && args.has("peers")) {
    return bad_input("bench: --peers of a model run on the CPU, not beside --device cuda");
  }
  if (args.rest().size() != 1) return bad_input("bench: a model is measured alone, expected one MODEL");
  const double begin = bench::now();
  Model model;
  LINNET_TRY(load_model("bench", args, model));
  const double loading = bench::now() - begin;
  if (!model.summary().causal) return bad_input("bench: " + model.summary().path + " is no causal model");
  std::vector<ModelWork> work;
  LINNET_TRY(wanted_work(args, model, &work));
  const bench::Machine machine = bench::this_machine();
  const std::string device = args.text("device", "cpu") == "cuda" ? cuda::device_name() + "; " : "";
  int64_t threads = machine.cores;
  LINNET_TRY(args.integer("threads", 1, 1024, &threads));
  bench::ModelSettings settings;
  if (args.has("quick")) settings.seconds = 0.3, settings.rounds = 1;
  LINNET_TRY(args.real("time", 0.001, 3600, &settings.seconds));
  std::unique_ptr<bench::Peer> peer;
  if (args.has("peers")) {
    LINNET_TRY(bench::Peer::start(bench::find_python(args.text("python")), static_cast<int>(threads), &peer));
    settings.peer = peer.get();
  }
  const bench::OtherLoad others;
  const bool json = args.has("json"), markdown = args.has("markdown");
  if (!json) {
    std::printf("%s, weights %s, attention %s, loaded in %s; %s%s, %lld threads; %s, commit %s\n\n",
                model.summary().path.c_str(), model.summary().weights.c_str(), model.summary().attention.c_str(),
                report::time_text(loading).c_str(), device.c_str(), machine.cpu.c_str(), static_cast<long long>(threads),
                bench::today().c_str(), bench::commit().c_str());
    std::fflush(stdout);
  }
  Table table({{"work", Align::left, 34},
               {"tokens/s", Align::right, 8},
               {"range", Align::right, 14},
               {"state", Align::right, 8},
               {"ratio", Align::right, 5},
               {"peer"}});
  std::vector<ModelResult> results;
  std::vector<std::string> notes;
  const auto add = [&](const ModelResult& r) {
    results.push_back(r);
    for (const std::string& note : r.notes) {
      if (std::find(notes.begin(), notes.end(), note) == notes.end()) notes.push_back(note);
    }
    if (json || markdown) return;
    table.stream(stdout, {r.what.line(), rate_text(r.ours), range_text(r.ours),
                          report::bytes_text(static_cast<double>(r.state_bytes)), "", ""});
    for (const ModelResult::Other& other : r.others) {
      table.stream(stdout, {"", rate_text(other.time), range_text(other.time), "", ratio_text(r, other), other.name});
    }
    std::fflush(stdout);
  };
  for (const ModelWork& what : work) {
    ModelResult r;
    LINNET_TRY(measure_model(model, what, settings, &r));
    add(r);
  }
  if (!args.has("case") && device.empty()) {
    std::vector<ModelResult> linear;
    LINNET_TRY(measure_linear(static_cast<int>(threads), settings, &linear));
    for (const ModelResult& r : linear) add(r);
  }
  const double load = others.share(peer != nullptr ? peer->process() : 0);
  if (json) {
    JsonWriter w(2);
    w.begin_object().member("model", model.summary().path).member("weights", model.summary().weights);
    w.member("attention", model.summary().attention).member("load_seconds", loading).member("cpu", machine.cpu);
    w.member("threads", threads).member("date", bench::today()).member("commit", bench::commit());
    w.key("cases").begin_array();
    for (const ModelResult& r : results) write(w, r);
    w.end_array().key("notes").begin_array();
    for (const std::string& note : notes) w.value(note);
    w.end_array().member("other_load", load).end_object();
    std::printf("%s\n", w.text().c_str());
    return {};
  }
  if (markdown) print_markdown(results);
  std::printf(
      "\ntokens/s: of the median; range: what nine of ten samples reach, and the best. state: of one sequence after those "
      "tokens.\n"
      "ratio: a peer's time over ours, above 1 ours is faster; rounds take turns.\n");
  for (const std::string& note : notes) std::printf("%s\n", note.c_str());
  if (load > 0.05) {
    std::printf("Other processes used %s of the machine during the run: these are no figures, quiet it is faster.\n",
                report::percent_text(load).c_str());
  }
  return {};
}

}  // namespace

int model_bench(const Arguments& args) {
  const Status status = run(args);
  return status.ok() ? kDone : fail(status);
}

}  // namespace linnet::cli
