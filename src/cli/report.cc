// linnet report: runs of linnet train side by side, and results of analyze, compare, bench and convert, as one page.
#include <cstdio>

#include "cli/collected.h"
#include "cli/command.h"
#include "cli/print.h"
#include "core/files/file.h"
#include "core/files/json.h"
#include "report/runs.h"

namespace linnet::cli {
namespace {

void print_json(const std::vector<report::TrainingRun>& runs) {
  JsonWriter w(2);
  w.begin_object().key("runs").begin_array();
  for (const report::TrainingRun& run : runs) {
    w.begin_object().member("folder", run.folder).member("name", run.name).member("task", run.task).member("layer", run.layer);
    w.member("finished", run.finished).member("score", run.score).key("test");
    run.finished ? w.value(run.test) : w.value(nullptr);
    w.key("last");
    run.evaluated ? w.value(run.last) : w.value(nullptr);
    w.key("best");
    run.evaluated ? w.value(run.best) : w.value(nullptr);
    w.member("parameters", run.parameters).key("state_bytes");
    run.state_bytes >= 0 ? w.value(run.state_bytes) : w.value(nullptr);
    w.member("steps", run.steps).member("seconds", run.seconds).member("tokens", run.tokens).key("parts").begin_array();
    for (const auto& [label, value] : run.parts) w.begin_object().member("part", label).member("value", value).end_object();
    w.end_array().end_object();
  }
  std::printf("%s\n", w.end_array().end_object().text().c_str());
}

// Results of other commands, with a page of the runs among them where there are any.
int report_results(const Arguments& args, const std::vector<report::TrainingRun>& runs, std::vector<Collected> parts) {
  if (!runs.empty()) {
    parts.insert(parts.begin(), {.kind = "train",
                                 .title = "Training",
                                 .page = report::runs_page(runs),
                                 .summary = std::to_string(runs.size()) + " runs of linnet train"});
  }
  const std::string html = args.text("html", "report.html");
  if (args.has("json")) {
    JsonWriter w(2);
    w.begin_object().key("parts").begin_array();
    for (const Collected& part : parts)
      w.begin_object().member("kind", part.kind).member("title", part.title).member("summary", part.summary).end_object();
    std::printf("%s\n", w.end_array().end_object().text().c_str());
  } else {
    Table table({{"kind"}, {"what"}});
    for (const Collected& part : parts) table.row({part.kind, part.summary});
    table.print(stdout);
  }
  const std::string page = parts.size() == 1 ? parts.front().page : joined_page("Report", parts);
  if (const Status status = write_file(html, page); !status.ok()) return fail(status);
  if (!args.has("json")) std::printf("\nwrote %s\n", html.c_str());
  return kDone;
}

int report_main(const Arguments& args) {
  if (args.rest().empty())
    return fail(
        bad_input("report: which runs? linnet report PATH ..., folders that linnet train or convert wrote, or JSON of analyze, "
                  "compare, bench"));
  std::vector<report::TrainingRun> runs;
  std::vector<Collected> parts;
  for (const std::string& path : args.rest()) {
    const Status status =
        is_result(path) ? read_result(path, &parts.emplace_back()) : report::read_run(path, &runs.emplace_back());
    if (!status.ok()) return fail(status);
  }
  report::name_runs(&runs);
  if (!parts.empty()) return report_results(args, runs, std::move(parts));
  const std::string html = args.text("html", runs.size() == 1 ? runs.front().folder + "/report.html" : "report.html");
  if (args.has("json")) {
    print_json(runs);
  } else {
    std::vector<Column> columns;
    for (const std::string& name : report::runs_heading(runs)) {
      columns.push_back({name, columns.size() < 2 ? Align::left : Align::right});
    }
    Table table(columns);
    for (const report::TrainingRun& run : runs) table.row(report::runs_row(run));
    table.print(stdout);
  }
  if (const Status status = write_file(html, report::runs_page(runs)); !status.ok()) return fail(status);
  if (!args.has("json")) std::printf("\nwrote %s\n", html.c_str());
  return kDone;
}

}  // namespace

const Command& report_command() {
  static const Command command = {
      .name = "report",
      .summary = "one page from runs of linnet train and results of analyze, compare, bench and convert",
      .usage = "PATH ... [--html FILE]",
      .details =
          "  linnet report runs/mqar-*\n"
          "  linnet analyze model.gguf --text text.txt --json > heads.json\n"
          "  linnet report heads.json icl.json converted/ --html report.html\n\n"
          "The page needs no other file. It is written to report.html, that of one run into its folder. A run that still "
          "trains\n"
          "is shown as far as it is.",
      .options = {{"html", "FILE", "where the page goes"}, {"json", "", "print JSON"}},
      .run = report_main,
  };
  return command;
}

}  // namespace linnet::cli
