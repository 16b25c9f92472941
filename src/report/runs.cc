#include "report/runs.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "core/files/file.h"
#include "core/files/json.h"
#include "report/chart.h"
#include "report/page.h"
#include "report/text.h"

namespace linnet::report {
namespace {

constexpr uint64_t kMaxMetrics = uint64_t{1} << 30, kMaxSettings = uint64_t{1} << 20;
constexpr size_t kMostPoints = 40;  // of a curve: each has a mark

double number_of(const JsonValue& value, double otherwise = 0) {
  double x = otherwise;
  return value.number(x) ? x : otherwise;
}

std::string setting_text(const JsonValue& value) {
  if (value.is(JsonValue::Kind::string)) return value.string();
  if (!value.is(JsonValue::Kind::object)) return std::string(value.text());
  std::string text;
  for (JsonItems items(value); items.next();) {
    text += (text.empty() ? "" : " ") + items.key().string() + "=" + setting_text(items.value());
  }
  return text;
}

Status read_settings(const std::string& folder, TrainingRun* run) {
  const std::string path = folder + "/settings.json";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    return bad_input("report: " + folder + " is no run of linnet train: it has no settings.json");
  }
  std::string text;
  LINNET_TRY(read_file(path, kMaxSettings, text));
  JsonValue root;
  LINNET_TRY(parse_json(text, path, {}, root));
  for (JsonItems items(root); items.next();) run->settings[items.key().string()] = setting_text(items.value());
  run->task = run->settings["task"];
  run->layer = run->settings["layer"];
  if (run->task.empty() || run->layer.empty()) return bad_input(path + ": it names no task and no layer");
  return {};
}

void add_line(const JsonValue& line, TrainingRun* run) {
  const std::string split = line.find("split").string();
  const double step = number_of(line.find("step"));
  run->steps = std::max(run->steps, static_cast<int64_t>(step));
  run->seconds = std::max(run->seconds, number_of(line.find("seconds")));
  run->tokens = std::max(run->tokens, number_of(line.find("tokens")));
  for (JsonItems items(line); items.next();) {
    double x;
    if (items.value().number(x)) run->curves[split + " " + items.key().string()].emplace_back(step, x);
  }
  if (split != "valid") return;
  const double value = number_of(line.find(run->score));
  const bool better = !run->evaluated || (run->falls() ? value < run->best : value > run->best);
  if (better) run->best = value;
  run->last = value;
  run->evaluated = true;
  run->parts.clear();
  const JsonValue parts = line.find("parts");
  for (JsonItems items(parts); items.next();) {
    run->parts.emplace_back(items.value().find("part").string(), number_of(items.value().find(run->score)));
  }
}

Status read_metrics(const std::string& folder, TrainingRun* run) {
  const std::string path = folder + "/metrics.jsonl";
  std::string text;
  LINNET_TRY(read_file(path, kMaxMetrics, text));
  size_t number = 0;
  for (size_t at = 0, end = 0; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
    ++number;
    const std::string_view line = std::string_view(text).substr(at, end - at);
    JsonValue root;
    LINNET_TRY(parse_json(line, path + " line " + std::to_string(number), {}, root));
    if (run->score.empty()) {
      run->score = root.has("mse") ? "mse" : root.has("bits_per_byte") ? "bits_per_byte" : "accuracy";
    }
    add_line(root, run);
  }
  if (number == 0) return bad_input("report: " + path + " has no line yet: the run has not begun");
  return {};
}

Status read_result(const std::string& folder, TrainingRun* run) {
  const std::string path = folder + "/result.json";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return {};
  std::string text;
  LINNET_TRY(read_file(path, kMaxSettings, text));
  JsonValue root;
  LINNET_TRY(parse_json(text, path, {}, root));
  run->finished = true;
  run->test = number_of(root.find("test").find(run->score));
  run->parameters = static_cast<int64_t>(number_of(root.find("parameters")));
  run->state_bytes = static_cast<int64_t>(number_of(root.find("state_bytes"), -1));
  run->seconds = number_of(root.find("seconds"));
  run->tokens = number_of(root.find("tokens"));
  run->device = root.find("device").string();
  if (root.find("test").has("parts")) {
    run->parts.clear();
    const JsonValue parts = root.find("test").find("parts");
    for (JsonItems items(parts); items.next();) {
      run->parts.emplace_back(items.value().find("part").string(), number_of(items.value().find(run->score)));
    }
  }
  return {};
}

// Settings that are not the same in all runs.
std::vector<std::string> differing(const std::vector<TrainingRun>& runs) {
  std::set<std::string> names;
  for (const TrainingRun& run : runs) {
    for (const auto& [name, text] : run.settings) {
      const auto first = runs.front().settings.find(name);
      if (first == runs.front().settings.end() || first->second != text) names.insert(name);
    }
  }
  return {names.begin(), names.end()};
}

std::string score_text(const TrainingRun& run, double value) {
  return run.score == "accuracy" ? percent_text(value) : significant(value, 4);
}

std::string score_name(const TrainingRun& run) {
  return run.score == "bits_per_byte" ? "bits per byte" : run.score == "mse" ? "mean squared error" : run.score;
}

ChartLine curve(const TrainingRun& run, int color, const std::vector<std::pair<double, double>>& points) {
  ChartLine line{.label = run.name, .color = color, .shape = color};
  const size_t pieces = std::min(kMostPoints, points.size());
  for (size_t i = 0; i < pieces; ++i) {  // each point the mean of its piece: single steps are noisy
    const size_t begin = i * points.size() / pieces, end = (i + 1) * points.size() / pieces;
    double sum = 0;
    for (size_t j = begin; j < end; ++j) sum += points[j].second;
    const double value = sum / static_cast<double>(end - begin), step = points[end - 1].first;
    line.points.emplace_back(step, value);
    line.titles.push_back(run.name + " at step " + std::to_string(static_cast<int64_t>(step)) + ": " + significant(value, 4));
  }
  return line;
}

std::string curves(const std::vector<TrainingRun>& runs, const std::string& what, const std::string& label) {
  Chart chart;
  chart.name = label + " against steps";
  chart.width = 620;
  chart.height = 400;
  chart.x = {.label = "step", .text = count_text};
  chart.y = {.label = label, .text = [](double x) { return significant(x, 2); }};
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto found = runs[i].curves.find(what);
    if (found != runs[i].curves.end()) chart.lines.push_back(curve(runs[i], static_cast<int>(i), found->second));
  }
  return chart.lines.empty() ? "" : draw(chart);
}

// The score against bytes of state, a line for each layer.
std::string against_state(const std::vector<TrainingRun>& runs) {
  Chart chart;
  chart.name = score_name(runs.front()) + " against the size of the state";
  chart.width = 900;
  chart.height = 440;
  chart.x = {.label = "state of the whole model, float32", .log = true, .text = bytes_text};
  chart.y = {.label = score_name(runs.front()), .text = [](double x) { return significant(x, 2); }};
  if (runs.front().score == "accuracy") chart.y.high = 1;
  std::map<std::string, size_t> lines;
  for (const TrainingRun& run : runs) {
    if (run.state_bytes <= 0) continue;
    const auto [at, fresh] = lines.try_emplace(run.layer, chart.lines.size());
    if (fresh) {
      const int index = static_cast<int>(chart.lines.size());
      chart.lines.push_back({.label = run.layer, .color = index, .shape = index, .points = {}, .titles = {}});
    }
    chart.lines[at->second].points.emplace_back(static_cast<double>(run.state_bytes), run.result());
  }
  for (ChartLine& line : chart.lines) {
    std::sort(line.points.begin(), line.points.end());
    for (const auto& [bytes, value] : line.points) {
      line.titles.push_back(line.label + ", " + bytes_text(bytes) + ": " + significant(value, 4));
    }
  }
  std::set<double> sizes;
  for (const ChartLine& line : chart.lines) {
    for (const auto& point : line.points) sizes.insert(point.first);
  }
  if (sizes.size() < 2) return "";
  const double octaves = std::log2(*sizes.rbegin() / *sizes.begin());
  const double step = std::exp2(std::ceil(octaves / 8));  // at most nine powers of two
  for (double x = std::exp2(std::floor(std::log2(*sizes.begin()))); x < 2 * *sizes.rbegin(); x *= step) {
    if (x >= *sizes.begin() / 1.2 && x <= *sizes.rbegin() * 1.2) chart.x.ticks.push_back(x);
  }
  return draw(chart);
}

std::string parts_table(const std::vector<TrainingRun>& runs) {
  std::vector<std::string> heading = {"run"};
  for (const TrainingRun& run : runs) {
    for (const auto& [label, value] : run.parts) {
      if (std::find(heading.begin() + 1, heading.end(), label) == heading.end()) heading.push_back(label);
    }
  }
  if (heading.size() == 1) return "";
  std::vector<std::vector<std::string>> rows;
  for (const TrainingRun& run : runs) {
    rows.push_back({run.name});
    for (size_t i = 1; i < heading.size(); ++i) {
      std::string cell = "-";
      for (const auto& [label, value] : run.parts) {
        if (label == heading[i]) cell = score_text(run, value);
      }
      rows.back().push_back(cell);
    }
  }
  return table(heading, rows);
}

std::string summary(const std::vector<TrainingRun>& runs) {
  const auto better = [](const TrainingRun& a, const TrainingRun& b) {
    return a.falls() ? a.result() < b.result() : a.result() > b.result();
  };
  std::vector<const TrainingRun*> order;
  for (const TrainingRun& run : runs) {
    if (run.evaluated) order.push_back(&run);
  }
  if (order.empty()) return "";
  std::stable_sort(order.begin(), order.end(), [&](const TrainingRun* a, const TrainingRun* b) { return better(*a, *b); });
  std::string text = order[0]->name + " reaches " + score_name(*order[0]) + " " + score_text(*order[0], order[0]->result());
  for (size_t i = 1; i < order.size(); ++i) {
    text += (i + 1 == order.size() ? " and " : ", ") + order[i]->name + " " + score_text(*order[i], order[i]->result());
  }
  return "<div class=\"summary\">\n<p>" + html_escape(text + ".") + "</p>\n</div>\n";
}

}  // namespace

Status read_run(const std::string& folder, TrainingRun* run) {
  run->folder = folder;
  LINNET_TRY(read_settings(folder, run));
  LINNET_TRY(read_metrics(folder, run));
  return read_result(folder, run);
}

void name_runs(std::vector<TrainingRun>* runs) {
  std::vector<std::string> names = differing(*runs);
  names.erase(std::remove(names.begin(), names.end(), "layer"), names.end());
  const auto distinct = [&] {
    std::set<std::string> seen;
    for (const TrainingRun& run : *runs) seen.insert(run.name);
    return seen.size() == runs->size();
  };
  for (TrainingRun& run : *runs) run.name = run.layer;
  if (distinct()) return;
  if (names.size() <= 2) {
    for (TrainingRun& run : *runs) {
      for (const std::string& name : names) {
        const std::string& text = run.settings[name];  // options stand with their own names
        run.name += " " + (text.find('=') == std::string::npos ? name + "=" + text : text);
      }
    }
  }
  if (distinct()) return;
  for (TrainingRun& run : *runs) {
    run.name = std::filesystem::path(run.folder).lexically_normal().filename().string();
    if (run.name.empty()) run.name = run.folder;
  }
  if (distinct()) return;
  for (TrainingRun& run : *runs) run.name = run.folder;
}

std::vector<std::string> runs_heading(const std::vector<TrainingRun>& runs) {
  const std::string score = runs.empty() ? "score" : score_name(runs.front());
  return {"run", "task", score, "last", "best", "parameters", "state", "steps", "time", "tokens/s"};
}

std::vector<std::string> runs_row(const TrainingRun& run) {
  return {run.name,
          run.task,
          run.finished ? score_text(run, run.test) : "running",
          run.evaluated ? score_text(run, run.last) : "-",
          run.evaluated ? score_text(run, run.best) : "-",
          run.parameters > 0 ? std::to_string(run.parameters) : "-",
          run.state_bytes >= 0 ? bytes_text(static_cast<double>(run.state_bytes)) : "-",
          std::to_string(run.steps),
          time_text(run.seconds),
          run.seconds > 0 ? significant(run.tokens / run.seconds, 3) : "-"};
}

std::string runs_page(const std::vector<TrainingRun>& runs) {
  const TrainingRun& first = runs.front();
  const bool one_task = std::all_of(runs.begin(), runs.end(), [&](const TrainingRun& run) { return run.task == first.task; });
  const std::string title =
      one_task
          ? first.task + (runs.size() == 1 ? ": " + first.layer : ": " + std::to_string(runs.size()) + " runs side by side")
          : std::to_string(runs.size()) + " runs side by side";
  std::set<std::string> devices;
  for (const TrainingRun& run : runs) {
    if (!run.device.empty()) devices.insert(run.device);
  }
  std::string where;
  for (const std::string& device : devices) where += (where.empty() ? "" : "; ") + device;
  std::string html = page_head("Linnet: " + title) + "<h1>" + html_escape(title) + "</h1>\n<p class=\"lead\">" +
                     html_escape("trained by linnet train" + (where.empty() ? "" : " on " + where)) + "</p>\n";
  if (one_task) html += summary(runs);
  std::vector<std::vector<std::string>> rows;
  for (const TrainingRun& run : runs) rows.push_back(runs_row(run));
  html += panel("All runs",
                "The score on the test split with the last weights; last and best are on the validation split. State: what the "
                "whole model keeps to decode after one sequence.",
                table(runs_heading(runs), rows), true);
  std::vector<std::string> list;
  const std::string loss = first.falls() ? first.score : "loss";
  if (const std::string picture = curves(runs, "valid " + first.score, score_name(first)); !picture.empty()) {
    list.push_back(panel("Validation", "Sequences that training never sees.", picture));
  }
  if (const std::string picture = curves(runs, "train " + loss, loss == "loss" ? "loss" : score_name(first));
      !picture.empty()) {
    list.push_back(panel("Training", "Of the batches, each mark the mean of a piece of the curve.", picture));
  }
  html += panels(list);
  if (const std::string picture = one_task ? against_state(runs) : ""; !picture.empty()) {
    html += panel("What a state of so many bytes is worth", "Further left at the same height: less memory for the same answer.",
                  picture, true);
  }
  if (const std::string parts = parts_table(runs); !parts.empty()) {
    html += panel("Part by part", "The score on each part of the mixture.", parts, true);
  }
  if (const std::vector<std::string> names = differing(runs); !names.empty()) {
    std::vector<std::string> heading = {"run"};
    heading.insert(heading.end(), names.begin(), names.end());
    std::vector<std::vector<std::string>> table_rows;
    for (const TrainingRun& run : runs) {
      table_rows.push_back({run.name});
      for (const std::string& name : names) {
        const auto found = run.settings.find(name);
        table_rows.back().push_back(found == run.settings.end() ? "-" : found->second);
      }
    }
    html += panel("What differs", "Settings that are not the same in all runs.", table(heading, table_rows), true);
  }
  std::string shared;
  const std::vector<std::string> names = differing(runs);
  for (const auto& [name, text] : first.settings) {
    if (text.empty() || std::find(names.begin(), names.end(), name) != names.end()) continue;
    shared += (shared.empty() ? "" : ", ") + name + " " + text;
  }
  return html + "<dl class=\"notes\"><dt>" + (runs.size() == 1 ? "Settings" : "Settings of all runs") + "</dt><dd>" +
         html_escape(shared) + "</dd></dl>\n" + page_foot();
}

}  // namespace linnet::report
