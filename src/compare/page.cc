// The page of `linnet compare`: HTML with inline SVG, no script, no other file; light and dark as the reader's system asks.
#include "report/page.h"

#include <algorithm>
#include <cmath>

#include "bench/machine.h"
#include "compare/compare.h"
#include "core/isa.h"
#include "core/version.h"
#include "report/chart.h"
#include "report/text.h"

namespace linnet::compare {
namespace {

using report::html_escape;

// Each mechanism has a colour, each of its variants a shape.
struct Look {
  int color, shape;
};
std::vector<Look> looks(const Comparison& c) {
  std::vector<std::string> mechanisms;
  std::vector<int> count;
  std::vector<Look> list;
  for (const VariantResult& v : c.variants) {
    const size_t i = static_cast<size_t>(std::find(mechanisms.begin(), mechanisms.end(), v.op->mechanism) - mechanisms.begin());
    if (i == mechanisms.size()) {
      mechanisms.push_back(v.op->mechanism);
      count.push_back(0);
    }
    list.push_back({static_cast<int>(i), count[i]++});
  }
  return list;
}

// The closest variant of each mechanism: what the plots have room for.
std::vector<size_t> closest_of_each(const Comparison& c) {
  std::vector<size_t> list;
  for (size_t i = 0; i < c.variants.size(); ++i) {
    const auto same = std::find_if(list.begin(), list.end(),
                                   [&](size_t j) { return c.variants[j].op->mechanism == c.variants[i].op->mechanism; });
    if (same == list.end()) {
      list.push_back(i);
    } else if (*same != 0 && !(c.variants[i].error >= c.variants[*same].error)) {  // 0: exact softmax itself
      *same = i;
    }
  }
  return list;
}

// Text with T^2 as it is written in print.
std::string with_powers(const std::string& text) {
  std::string html = html_escape(text);
  for (size_t at = html.find("T^"); at != std::string::npos; at = html.find("T^", at + 1)) {
    size_t end = html.find_first_not_of("0123456789.", at + 2);
    if (end == std::string::npos) end = html.size();
    while (html[end - 1] == '.') --end;  // the end of a sentence
    html = html.substr(0, at + 1) + "<sup>" + html.substr(at + 2, end - at - 2) + "</sup>" + html.substr(end);
  }
  return html;
}

std::string tokens_text(int64_t length) { return report::count_text(static_cast<double>(length)); }

std::string scatter(const Comparison& c, const std::vector<Look>& look) {
  report::Chart chart;
  chart.name = "error against time of one call";
  chart.width = 620;
  chart.height = 440;
  chart.x = {.label = "time of one layer, " + tokens_text(c.input.T) + " tokens", .log = true, .text = report::time_text};
  chart.y = {.label = "error against exact softmax", .text = report::percent_text};
  chart.levels.emplace_back(c.average_error, "the plain average of the values");
  for (const size_t i : closest_of_each(c)) {
    const VariantResult& v = c.variants[i];
    chart.lines.push_back({.label = v.name,
                           .color = look[i].color,
                           .shape = look[i].shape,
                           .points = {{v.time.median, v.error}},
                           .titles = {v.name + ": error " + report::percent_text(v.error) + ", cosine " +
                                      report::significant(v.cosine, 3) + ", " + report::time_text(v.time.median)}});
  }
  return draw(chart);
}

std::string growth(const Comparison& c, const std::vector<Look>& look) {
  report::Chart chart;
  chart.name = "time of one call against the length";
  chart.width = 620;
  chart.height = 440;
  chart.x = {.label = "tokens", .log = true, .text = report::count_text};
  for (const int64_t T : c.lengths) chart.x.ticks.push_back(static_cast<double>(T));
  chart.y = {.label = "time of one layer", .log = true, .text = report::time_text};
  for (const size_t i : closest_of_each(c)) {
    const VariantResult& v = c.variants[i];
    report::ChartLine line{.label = v.name, .color = look[i].color, .shape = look[i].shape};
    for (const auto& [T, seconds] : v.times) {
      line.points.emplace_back(static_cast<double>(T), seconds);
      line.titles.push_back(v.name + " at " + tokens_text(T) + " tokens: " + report::time_text(seconds));
    }
    chart.lines.push_back(std::move(line));
  }
  return draw(chart);
}

std::string heads(const Comparison& c) {
  report::HeatStrip strip;
  strip.name = "error of each head";
  strip.width = 1100;
  strip.left = 190;
  strip.text = report::percent_text;
  for (const Layer& layer : c.input.layers) {
    strip.groups.emplace_back(layer.name, static_cast<int>(c.input.H));
    for (int64_t h = 0; h < c.input.H; ++h) strip.columns.push_back(layer.name + " head " + std::to_string(h));
  }
  for (const VariantResult& v : c.variants) {
    strip.rows.push_back(v.name);
    strip.values.emplace_back();
    for (const std::vector<double>& layer : v.head_errors) {
      strip.values.back().insert(strip.values.back().end(), layer.begin(), layer.end());
    }
  }
  return draw(strip);
}

std::string table(const Comparison& c, const std::vector<Look>& look) {
  const int64_t longest = c.lengths.back();
  std::string html = "<table>\n<tr><th>attention</th><th>sees</th><th>error</th><th>cosine</th><th>time, " +
                     tokens_text(c.input.T) + " tokens</th><th>time, " + tokens_text(longest) +
                     " tokens</th><th>operations grow like</th><th>GFLOP</th><th>workspace</th><th>decode state</th></tr>\n";
  for (size_t i = 0; i < c.variants.size(); ++i) {
    const VariantResult& v = c.variants[i];
    const bool measured = v.times.back().first == longest;
    std::string state = "-";
    if (v.state_bytes >= 0) {
      state = report::bytes_text(static_cast<double>(v.state_bytes)) + (v.state_grows ? " <small>grows</small>" : "");
    }
    html += "<tr><td><span class=\"dot\" style=\"background: var(--c" + std::to_string(look[i].color % report::kChartColors) +
            ")\"></span>" + html_escape(v.name) + (v.options.empty() ? "" : " <small>" + html_escape(v.options) + "</small>") +
            "</td><td>" + (v.causal ? "past" : "all") + "</td><td>" + report::percent_text(v.error) + "</td><td>" +
            report::significant(v.cosine, 3) + "</td><td>" + report::time_text(v.time.median) + "</td><td>" +
            (measured ? report::time_text(v.times.back().second) : "-") + "</td><td>" + with_powers(growth_text(v.exponent)) +
            "</td><td>" + report::significant(v.flops / 1e9, 3) + "</td><td>" +
            report::bytes_text(static_cast<double>(v.workspace_bytes)) + "</td><td>" + state + "</td></tr>\n";
  }
  return html + "</table>\n";
}

std::string notes(const Comparison& c) {
  const bench::Machine machine = bench::this_machine();
  Isa isa = Isa::portable;
  (void)isa_choice(&isa);
  const auto item = [](const std::string& name, const std::string& text) {
    return "<dt>" + name + "</dt><dd>" + html_escape(text) + "</dd>\n";
  };
  std::string html = "<dl class=\"notes\">\n";
  html += item("Input", c.input.source + (c.input.description.empty() ? "" : "; " + c.input.description) + "; q " +
                            shape_text(c.input) + " in " + std::to_string(c.input.layers.size()) +
                            (c.input.layers.size() == 1 ? " layer" : " layers") +
                            (c.input.causal ? "; causal" : "; every token sees every token"));
  html += item("Error",
               "RMS of the difference to exact softmax attention that sees as much (all tokens, or the past), in double "
               "precision, over the RMS of the latter, all layers together; cosine: mean over tokens and heads. Each variant "
               "computes in " +
                   std::string(dtype_name(c.settings.dtype)) + ".");
  html += item("Time", "median of repeated calls in rounds over all variants, one layer a call, " +
                           std::to_string(c.settings.threads) + (c.settings.threads == 1 ? " thread" : " threads") +
                           "; longer inputs repeat the tokens of the first layer. A call of more than " +
                           report::time_text(c.settings.longest_seconds) + " is not measured." +
                           (c.other_load > 0.05 ? " Other processes used " + report::percent_text(c.other_load) +
                                                      " of the machine meanwhile: quiet, it is faster."
                                                : ""));
  html += item("Memory",
               "workspace: what a call needs beyond inputs and outputs. Decode state: what continues one sequence "
               "token by token, per layer, after as many tokens as the input has.");
  html += item("Machine", machine.cpu + ", " + std::to_string(machine.cores) + " cores (" + machine.caches + "), " +
                              isa_name(isa) + "; " + bench::today() + "; linnet " LINNET_VERSION ", commit " + bench::commit());
  for (const std::string& line : c.left_out) html += item("Left out", line);
  return html + "</dl>\n";
}

}  // namespace

std::string html_page(const Comparison& c) {
  const std::vector<Look> look = looks(c);
  std::string html = report::page_head("Linnet: attention compared");
  html += "<h1>Attention, compared on one input</h1>\n<p class=\"lead\">" +
          html_escape(std::to_string(c.variants.size()) + " ways to compute attention on " + c.input.source + ": " +
                      std::to_string(c.input.layers.size()) + (c.input.layers.size() == 1 ? " layer, " : " layers, ") +
                      tokens_text(c.input.T) + " tokens, " + std::to_string(c.input.H) + " heads of width " +
                      std::to_string(c.input.K)) +
          "</p>\n<div class=\"summary\">\n";
  for (const std::string& sentence : summary(c)) html += "<p>" + with_powers(sentence) + "</p>\n";
  html +=
      "</div>\n<div class=\"panels\">\n<section class=\"panel\">\n<h2>What accuracy costs</h2>\n"
      "<p>Lower left is better. Each mark is the closest variant of one mechanism; all of them are in the table.</p>\n" +
      scatter(c, look) +
      "</section>\n<section class=\"panel\">\n<h2>How time grows with length</h2>\n"
      "<p>Both axes logarithmic: a slope of one is linear, of two quadratic.</p>\n" +
      growth(c, look) +
      "</section>\n</div>\n<section class=\"panel wide\">\n<h2>Where it goes wrong</h2>\n"
      "<p>Error of each head of each layer; point at a cell for its number.</p>\n" +
      heads(c) + "</section>\n<section class=\"panel wide\">\n<h2>All numbers</h2>\n" + table(c, look) + "</section>\n" +
      notes(c) + report::page_foot();
  return html;
}

}  // namespace linnet::compare
