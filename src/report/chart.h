// Charts as SVG text, for pages that need no script and no other file.
//
//   Chart chart;
//   chart.x = {.label = "tokens", .log = true, .ticks = {256, 512, 1024}, .text = count_text};
//   chart.y = {.label = "time of one call", .log = true, .text = time_text};
//   chart.lines.push_back({.label = "softmax", .color = 0, .points = {{256, 1e-3}, {512, 4e-3}}});
//   page += draw(chart);
//
// Colours, line and text styles are classes (c0 .. c7, grid, tick, label), so that the page chooses them for light and dark:
// chart_style() is the part of a style sheet they need. Pointing at a mark shows its title.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace linnet::report {

struct Axis {
  std::string label;
  bool log = false;
  std::vector<double> ticks;                // empty: chosen to fit
  std::string (*text)(double x) = nullptr;  // of a tick
  double low = 0, high = 0;                 // equal: from the data
};

inline constexpr int kChartColors = 8, kChartShapes = 6;

// A series of points joined by a line, labelled at its right end. One point alone is a mark with its label beside it.
// `line`: without marks, as a theory is drawn; `marks`: without a line and a label, as what was measured for it.
enum class ChartStyle { joined, line, marks };
struct ChartLine {
  std::string label;
  int color = 0, shape = 0;                       // taken modulo kChartColors, kChartShapes
  std::vector<std::pair<double, double>> points;  // in data units
  std::vector<std::string> titles;                // one per point, or empty
  ChartStyle style = ChartStyle::joined;
};

struct Chart {
  std::string name;  // read aloud instead of the picture
  Axis x, y;
  std::vector<ChartLine> lines;
  std::vector<std::pair<double, std::string>> levels;  // heights that matter: a dashed line with a name
  int width = 760, height = 440;
};
std::string draw(const Chart& chart);

// A table of numbers shown as colours: one row per variant, groups of columns with a heading.
struct HeatStrip {
  std::string name;
  std::vector<std::string> rows;
  std::vector<std::pair<std::string, int>> groups;  // heading, number of columns
  std::vector<std::vector<double>> values;          // [row][column]
  std::vector<std::string> columns;                 // names for the titles
  std::string (*text)(double x) = nullptr;
  double high = 1;  // values from 0 to high; above: the last colour
  int width = 760, left = 170;
};
std::string draw(const HeatStrip& strip);

const char* chart_style();

}  // namespace linnet::report
