// linnet bench MODEL: rates of a whole model, beside llama.cpp and transformers.
#include <cstdio>
#include <memory>

#include "bench/machine.h"
#include "bench/model.h"
#include "cli/model.h"
#include "cli/print.h"
#include "core/json.h"
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

void write(JsonWriter& w, const ModelResult& r) {
  const auto time = [&w](const bench::Spread& s) {
    w.member("tokens_per_second", rate(s)).member("median", s.median).member("min", s.best).member("p90", s.p90);
  };
  w.begin_object().member("work", r.what.decode ? "decode" : "prefill").member("tokens", r.what.tokens);
  time(r.ours);
  w.member("state_bytes", r.state_bytes).key("peers").begin_array();
  for (const ModelResult::Other& other : r.others) {
    w.begin_object().member("name", other.name);
    time(other.time);
    w.member("ratio", other.time.median / r.ours.median).end_object();
  }
  w.end_array().end_object();
}

Status run(const Arguments& args) {
  for (const char* name : {"device", "dtype", "impl", "list", "markdown", "pass"}) {
    if (args.has(name)) return bad_input(std::string("bench: --") + name + " is for operators, not for a model");
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
  const bool json = args.has("json");
  if (!json) {
    std::printf("%s, weights %s, loaded in %s; %s, %lld threads; %s, commit %s\n\n", model.summary().path.c_str(),
                model.summary().weights.c_str(), report::time_text(loading).c_str(), machine.cpu.c_str(),
                static_cast<long long>(threads), bench::today().c_str(), bench::commit().c_str());
  }
  Table table({{"work", Align::left, 18},
               {"tokens/s", Align::right, 9},
               {"state", Align::right, 9},
               {"ratio", Align::right, 6},
               {"peer"}});
  JsonWriter w(2);
  w.begin_object().member("model", model.summary().path).member("weights", model.summary().weights);
  w.member("load_seconds", loading).member("threads", threads).member("date", bench::today()).member("commit", bench::commit());
  w.key("cases").begin_array();
  for (const ModelWork& what : work) {
    ModelResult r;
    LINNET_TRY(measure_model(model, what, settings, &r));
    if (json) {
      write(w, r);
      continue;
    }
    table.stream(stdout, {what.line(), report::significant(rate(r.ours), 4),
                          report::bytes_text(static_cast<double>(r.state_bytes)), "", ""});
    for (const ModelResult::Other& other : r.others) {
      table.stream(stdout, {"", report::significant(rate(other.time), 4), "",
                            report::significant(other.time.median / r.ours.median, 3), other.name});
    }
    std::fflush(stdout);
  }
  const double load = others.share(peer != nullptr ? peer->process() : 0);
  w.end_array().member("other_load", load).end_object();
  if (json) {
    std::printf("%s\n", w.text().c_str());
    return {};
  }
  std::printf(
      "\nstate: of one sequence after those tokens. ratio: a peer's time over ours, above 1 ours is faster; rounds take "
      "turns.\n");
  if (load > 0.05) {
    std::printf("Other processes used %s of the machine during the run: quiet, it is faster.\n",
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
