// linnet report: runs of linnet train side by side, as a table and one page.
#include <cstdio>

#include "cli/command.h"
#include "cli/print.h"
#include "core/file.h"
#include "core/json.h"
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

int report_main(const Arguments& args) {
  if (args.rest().empty()) return fail(bad_input("report: which runs? linnet report RUN ..., folders that linnet train wrote"));
  std::vector<report::TrainingRun> runs;
  for (const std::string& folder : args.rest()) {
    runs.emplace_back();
    if (const Status status = report::read_run(folder, &runs.back()); !status.ok()) return fail(status);
  }
  report::name_runs(&runs);
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
      .summary = "runs of linnet train side by side: table, curves, score against the size of the state; HTML page",
      .usage = "RUN ... [--html FILE]",
      .details =
          "  linnet report runs/mqar-*\n\n"
          "The page needs no other file. It is written to report.html, that of one run into its folder. A run that still "
          "trains\n"
          "is shown as far as it is.",
      .options = {{"html", "FILE", "where the page goes"}, {"json", "", "print JSON"}},
      .run = report_main,
  };
  return command;
}

}  // namespace linnet::cli
