#include "cli/collected.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>

#include "analysis/dsf.h"
#include "analysis/icl_train.h"
#include "analysis/model.h"
#include "convert/convert.h"
#include "core/files/file.h"
#include "core/files/json.h"
#include "report/chart.h"
#include "report/page.h"
#include "report/text.h"

namespace linnet::cli {
namespace {

using namespace report;

constexpr uint64_t kMostBytes = uint64_t{1} << 30;

double real(const JsonValue& v, double otherwise = NAN) {
  double x = otherwise;
  v.number(x);
  return x;
}
int64_t whole(const JsonValue& v) { return static_cast<int64_t>(real(v, 0)); }
std::vector<double> numbers(const JsonValue& list) {
  std::vector<double> out;
  for (JsonItems items(list); items.next();) out.push_back(real(items.value()));
  return out;
}
bool is_file(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

Status icl_result(const JsonValue& json, Collected* out) {
  std::vector<analysis::IclCurve> curves;
  std::vector<analysis::IclMeasured> measured;
  std::vector<int64_t> n;
  for (const double each : numbers(json.find("n"))) n.push_back(static_cast<int64_t>(each));
  for (JsonItems items(json.find("losses")); items.next();) {
    analysis::IclCurve& c = curves.emplace_back();
    c.name = items.key().string();
    c.d = whole(json.find("d"));
    c.n = n;
    c.loss = numbers(items.value());
    if (c.loss.size() != n.size()) return bad_input("its losses of " + c.name + " are not as many as its n");
  }
  for (JsonItems items(json.find("trained")); items.next();) {
    const JsonValue& v = items.value();
    analysis::IclMeasured& m = measured.emplace_back();
    m.name = v.find("formula").string(), m.layer = v.find("layer").string();
    m.d = whole(json.find("d")), m.n = whole(v.find("n")), m.theory = real(v.find("theory")), m.loss = real(v.find("loss"));
    m.deviation = real(v.find("deviation")), m.alignment = real(v.find("step_cosine")),
    m.filter = real(v.find("filter_cosine"), 0);
  }
  if (curves.empty() || curves.front().d < 1) return bad_input("it has no losses");
  const std::string setting = "d " + std::to_string(whole(json.find("d"))) + ", noise " +
                              significant(real(json.find("noise")), 3) + ", drift " + significant(real(json.find("drift")), 3) +
                              ", alpha " + significant(real(json.find("alpha")), 3);
  out->title = "In-context linear estimation";
  out->page = analysis::icl_page(curves, measured, out->title, setting);
  out->summary = std::to_string(curves.size()) + " formulas, " + std::to_string(measured.size()) + " trained layers";
  return {};
}

Status dsf_result(const JsonValue& json, Collected* out) {
  std::vector<analysis::SystemReport> reports;
  std::string names;
  for (JsonItems items(json.find("mixers")); items.next();) {
    const JsonValue& v = items.value();
    analysis::SystemReport& r = reports.emplace_back();
    r.mixer = v.find("mixer").string();
    if (analysis::find_mixer(r.mixer) == nullptr)
      return bad_input("its mixer is '" + r.mixer + "', which this build does not know");
    r.system.T = whole(v.find("tokens")), r.system.n = whole(v.find("state_expansion")),
    r.system.cache = v.find("cache").boolean();
    r.state_size = whole(v.find("state_size")), r.recurrence_error = real(v.find("recurrence_error"));
    r.transfer_error = real(v.find("transfer_error")), r.radius_low = real(v.find("spectral_radius_q10"));
    r.radius_middle = real(v.find("spectral_radius_q50")), r.radius_high = real(v.find("spectral_radius_q90"));
    r.half_life = real(v.find("half_life"), HUGE_VAL), r.growth = v.find("growth").boolean();
    r.mixing_kind = v.find("mixing_kind").string(), r.row_class = v.find("class").string();
    r.effective_rank = real(v.find("effective_rank")), r.semiseparable_rank = whole(v.find("semiseparable_rank"));
    const int64_t size = whole(v.find("mixing_size"));
    r.mixing = analysis::Matrix(size, size, numbers(v.find("mixing")));
    if (static_cast<int64_t>(r.mixing.values.size()) != size * size) return bad_input("its mixing matrix is not square");
    r.eig_real = numbers(v.find("eig_real")), r.eig_imag = numbers(v.find("eig_imag"));
    r.singular_values = numbers(v.find("singular_values")), r.spectral_radius = numbers(v.find("spectral_radius"));
    for (const double each : numbers(v.find("memory_length"))) r.memory_length.push_back(static_cast<int64_t>(each));
    r.entropy = numbers(v.find("entropy")), r.relative_entropy = numbers(v.find("relative_entropy"));
    r.mean_distance = numbers(v.find("mean_distance")), r.local_mass = numbers(v.find("local_mass"));
    r.negative_mass = numbers(v.find("negative_mass"));
    names += (names.empty() ? "" : ", ") + r.mixer;
  }
  if (reports.empty()) return bad_input("it has no mixers");
  out->title = names;
  out->page = analysis::report_page(reports, names);
  out->summary = std::to_string(reports.size()) + " mixers: " + names;
  return {};
}

Status compare_result(const JsonValue& json, Collected* out) {
  const std::string source = json.find("input").find("source").string();
  Chart chart;
  chart.name = "error against time of each variant";
  chart.width = 900, chart.height = 460;
  chart.x = {.label = "time of one call", .log = true, .text = time_text};
  chart.y = {.label = "error relative to softmax", .log = true, .text = percent_text};
  std::vector<std::vector<std::string>> rows;
  for (JsonItems items(json.find("variants")); items.next();) {
    const JsonValue& v = items.value();
    const double seconds = real(v.find("seconds").find("median")), error = real(v.find("error"));
    const std::string name = v.find("name").string();
    const auto i = static_cast<int>(rows.size());
    if (seconds > 0 && error > 0) {
      chart.lines.push_back(
          {.label = name, .color = i, .shape = i, .points = {{seconds, error}}, .titles = {name + ": " + time_text(seconds)}});
    }
    rows.push_back({name, v.find("operator").string(), percent_text(error), significant(real(v.find("cosine")), 4),
                    time_text(seconds),
                    v.find("state_bytes").is(JsonValue::Kind::null) ? "-" : bytes_text(real(v.find("state_bytes")))});
  }
  if (rows.empty()) return bad_input("it has no variants");
  out->title = "Variants on " + source;
  out->page = page_head(out->title) + "<h1>" + html_escape(out->title) + "</h1>\n";
  out->page += "<div class=\"summary\">\n";
  for (JsonItems items(json.find("summary")); items.next();)
    out->page += "<p>" + html_escape(items.value().string()) + "</p>\n";
  out->page += "</div>\n";
  if (!chart.lines.empty()) out->page += panel("Error and time", "Left and low is better.", draw(chart), true);
  out->page +=
      panel("Variants", "", table({"variant", "operator", "error", "cosine", "time", "state"}, rows), true) + page_foot();
  out->summary = std::to_string(rows.size()) + " variants of attention on " + source;
  return {};
}

Status bench_result(const JsonValue& json, Collected* out) {
  HeatStrip strip;
  strip.name = "share of the nearer ceiling";
  strip.text = percent_text;
  strip.groups = {{"share of the nearer ceiling", 1}};
  strip.columns = {"share"};
  strip.left = 520, strip.width = 900;
  std::vector<std::vector<std::string>> rows;
  for (JsonItems items(json.find("cases")); items.next();) {
    const JsonValue& v = items.value();
    const double share = real(v.find("share_of_ceiling"), 0), ratio = real(v.find("ratio"));
    const std::string name = v.find("case").string();
    JsonValue time;
    for (const char* key : {"seconds", "ours", "time"}) {
      if (v.has(key)) time = v.find(key);
    }
    strip.rows.push_back(name.size() > 72 ? name.substr(0, 69) + "..." : name);
    strip.values.push_back({share});
    rows.push_back({name, v.find("implementation").string(), time_text(real(time.find("median"))),
                    significant(real(v.find("flops_per_second"), 0) / 1e9, 3), percent_text(share),
                    error_text(real(v.find("error"), 0)), std::isnan(ratio) ? "-" : significant(ratio, 3)});
  }
  if (rows.empty()) return bad_input("it has no cases");
  const std::string cpu = json.find("machine").find("cpu").string();
  out->title = "Speed on " + cpu;
  out->page =
      page_head(out->title) + "<h1>" + html_escape(out->title) + "</h1>\n<p class=\"lead\">" +
      html_escape(json.find("date").string() + ", commit " + json.find("commit").string() + ", " +
                  std::to_string(whole(json.find("threads"))) + " threads") +
      "</p>\n" +
      panel("Share of the ceiling", "Of the machine's multiply-adds or of its memory, whichever is nearer.", draw(strip),
            true) +
      panel("Cases", "", table({"case", "implementation", "median", "GFLOP/s", "of ceiling", "error", "times the peer"}, rows),
            true) +
      page_foot();
  out->summary = std::to_string(rows.size()) + " cases";
  return {};
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) text.replace(at, from.size(), to);
  return text;
}

}  // namespace

bool is_result(const std::string& path) {
  return (path.ends_with(".json") && !path.ends_with("/result.json")) ||
         (is_file(path + "/report.json") && !is_file(path + "/settings.json"));
}

Status read_result(const std::string& path, Collected* out) {
  const std::string file = path.ends_with(".json") ? path : path + "/report.json";
  std::string text;
  JsonValue json;
  LINNET_TRY(read_file(file, kMostBytes, text));
  LINNET_TRY(parse_json(text, file, {.max_bytes = kMostBytes}, json));
  const std::string kind = json.find("kind").string();
  Status status;
  if (kind == "heads") {
    out->kind = kind, out->title = "Heads of a model";
    out->page = analysis::model_page(json);
    out->summary = "heads of a model on " + std::to_string(whole(json.find("tokens"))) + " tokens";
  } else if (kind == "dsf" || kind == "icl") {
    out->kind = kind;
    status = kind == "dsf" ? dsf_result(json, out) : icl_result(json, out);
  } else if (json.has("variants") && json.has("input")) {
    out->kind = "compare";
    status = compare_result(json, out);
  } else if (json.has("cases") && json.has("machine")) {
    out->kind = "bench";
    status = bench_result(json, out);
  } else if (json.has("evaluation") && json.has("cost")) {
    out->kind = "convert", out->title = "Converted model";
    out->page = convert::report_page(text);
    out->summary = "conversion to " + percent_text(real(json.find("cost"))) + " of softmax attention's cost";
  } else {
    return bad_input(file + ": is no result of linnet analyze, compare, bench or convert: it has none of their members");
  }
  return status.ok() ? status : bad_input(file + ": " + status.message());
}

std::string joined_page(const std::string& title, const std::vector<Collected>& parts) {
  std::string html = page_head("Linnet: " + title) + "<h1>" + html_escape(title) + "</h1>\n<nav aria-label=\"Contents\"><ul>\n";
  for (size_t i = 0; i < parts.size(); ++i)
    html += "<li><a href=\"#part" + std::to_string(i) + "\">" + html_escape(parts[i].title) + "</a></li>\n";
  html += "</ul></nav>\n";
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string& page = parts[i].page;
    const size_t begin = page.find("<main>") + 6, end = page.rfind("</main>");
    std::string body = replaced(replaced(page.substr(begin, end - begin), "<h2>", "<h3>"), "</h2>", "</h3>");
    body = replaced(replaced(body, "<h1>", "<h2>"), "</h1>", "</h2>");
    html += "<section id=\"part" + std::to_string(i) + "\">\n" + body + "</section>\n";
  }
  return html + page_foot();
}

}  // namespace linnet::cli
