#include "cli/neighbours.h"

#include <algorithm>
#include <cstdio>

#include "bench/machine.h"
#include "bench/neighbours.h"
#include "cli/print.h"
#include "core/files/json.h"
#include "report/text.h"

namespace linnet::cli {
namespace {

using bench::Case;
using bench::Neighbour;
using bench::Result;

constexpr double kLimit = 4;

struct Row {
  std::string changed;
  Result result;
  double ratio = 0;  // the base's share of its ceiling over this one's
};
struct Around {
  Result base;
  std::vector<Row> rows;                                     // worst first
  std::vector<std::pair<std::string, std::string>> not_run;  // what was changed, and why it does not run here
};

std::string share_text(const Result& r) { return report::percent_text(r.share) + (r.memory_bound ? " mem" : " fma"); }

void print(const Around& around, bool markdown, double limit) {
  const Result& base = around.base;
  std::printf("%s%s %s\n%s of ceiling, %s, %s\n\n", markdown ? "### " : "", base.what.op->name.c_str(),
              base.what.line().c_str(), share_text(base).c_str(), report::time_text(base.ours.median).c_str(),
              base.impl.c_str());
  const std::vector<Column> columns = {{"ratio", Align::right},
                                       {"median", Align::right},
                                       {"of ceiling", Align::right},
                                       {"implementation", Align::left},
                                       {"changed"}};
  Table table(columns);
  if (markdown) std::printf("| ratio | median | of ceiling | implementation | changed |\n|---:|---:|---:|---|---|\n");
  for (const Row& row : around.rows) {
    const std::string ratio = report::significant(row.ratio, 3) + (row.ratio > limit ? " !" : "");
    const std::string time = report::time_text(row.result.ours.median), share = share_text(row.result);
    if (markdown) {
      std::printf("| %s | %s | %s | %s | %s |\n", ratio.c_str(), time.c_str(), share.c_str(), row.result.impl.c_str(),
                  row.changed.c_str());
    } else {
      table.row({ratio, time, share, row.result.impl, row.changed});
    }
  }
  if (!markdown) table.print(stdout);
  for (const auto& [changed, reason] : around.not_run) {
    std::printf("%snot run: %s: %s\n", markdown ? "\n" : "", changed.c_str(), reason.c_str());
  }
  std::printf("\n");
  std::fflush(stdout);
}

void write(JsonWriter& writer, const Result& r) {
  writer.member("operator", r.what.op->name).member("case", r.what.line()).member("implementation", r.impl);
  writer.member("seconds", r.ours.median).member("share_of_ceiling", r.share);
  writer.member("nearer_ceiling", r.memory_bound ? "memory" : "fma");
}
void write(JsonWriter& writer, const Around& around) {
  writer.begin_object().key("base").begin_object();
  write(writer, around.base);
  writer.end_object().key("neighbours").begin_array();
  for (const Row& row : around.rows) {
    writer.begin_object().member("changed", row.changed).member("ratio", row.ratio);
    write(writer, row.result);
    writer.end_object();
  }
  writer.end_array().key("not_run").begin_array();
  for (const auto& [changed, reason] : around.not_run) {
    writer.begin_object().member("changed", changed).member("reason", reason).end_object();
  }
  writer.end_array().end_object();
}

}  // namespace

int bench_neighbours(const Arguments& args, const std::vector<Case>& bases, int threads, const bench::Settings& settings,
                     const std::string& heading) {
  double limit = kLimit;
  if (const Status status = args.real("limit", 1, 1e6, &limit); !status.ok()) return fail(status);
  const bool json = args.has("json"), markdown = args.has("markdown");
  std::vector<std::vector<Neighbour>> all;
  int64_t total = 0;
  for (const Case& base : bases) {
    all.push_back(neighbours_of(base));
    total += 1 + static_cast<int64_t>(all.back().size());
  }
  if (args.has("list")) {
    for (size_t i = 0; i < bases.size(); ++i) {
      std::printf("%s %s\n", bases[i].op->name.c_str(), bases[i].line().c_str());
      for (const Neighbour& n : all[i])
        std::printf("  %s: %s %s\n", n.changed.c_str(), n.what.op->name.c_str(), n.what.line().c_str());
    }
    return kDone;
  }
  if (!json) std::printf("%s\n\n", heading.c_str());
  bench::Bench bench(threads, settings);
  std::vector<Around> results;
  double worst = 0;
  int64_t done = 0, above = 0;
  Progress progress("neighbours", total, "cases");
  for (size_t i = 0; i < bases.size(); ++i) {
    Around around;
    progress.at(done++);
    if (const Status status = bench.measure(bases[i], &around.base); !status.ok()) return progress.clear(), fail(status);
    for (const Neighbour& n : all[i]) {
      progress.at(done++);
      Row row = {n.changed, {}, 0};
      if (const Status status = bench.measure(n.what, &row.result); !status.ok()) {
        around.not_run.emplace_back(n.changed, status.message());
        continue;
      }
      row.ratio = around.base.share / row.result.share;
      worst = std::max(worst, row.ratio);
      above += row.ratio > limit ? 1 : 0;
      around.rows.push_back(std::move(row));
    }
    std::stable_sort(around.rows.begin(), around.rows.end(), [](const Row& a, const Row& b) { return a.ratio > b.ratio; });
    progress.clear();
    if (!json) print(around, markdown, limit);
    results.push_back(std::move(around));
  }
  const int code = worst > limit ? kCheckFailed : kDone;
  if (!json) {
    std::printf(
        "ratio: the share of the ceiling of the case in the first line over the neighbour's; !: above %s. %lld of %lld are, "
        "the worst %s.\n",
        report::significant(limit, 3).c_str(), static_cast<long long>(above),
        static_cast<long long>(total - static_cast<int64_t>(bases.size())), report::significant(worst, 3).c_str());
    return code;
  }
  JsonWriter writer(2);
  writer.begin_object().member("heading", heading).member("date", bench::today()).member("commit", bench::commit());
  writer.member("limit", limit).member("worst", worst).key("cases").begin_array();
  for (const Around& around : results) write(writer, around);
  writer.end_array().end_object();
  std::printf("%s\n", writer.text().c_str());
  return code;
}

}  // namespace linnet::cli
