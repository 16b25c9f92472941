#include "report/text.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "report/chart.h"

namespace linnet::report {
namespace {

TEST(Text, numbers) {
  const struct {
    std::string got, expected;
  } cases[] = {
      {significant(0, 3), "0"},
      {significant(9.996, 3), "10.0"},
      {significant(0.00123, 2), "0.0012"},
      {significant(123456, 2), "123456"},
      {significant(1e-7, 2), "1.0e-07"},
      {significant(-2.5, 3), "-2.50"},
      {significant(std::nan(""), 3), "nan"},
      {time_text(1.234e-3), "1.23 ms"},
      {time_text(9.9996e-4), "1.00 ms"},
      {time_text(12e-9), "12.0 ns"},
      {time_text(125), "125 s"},
      {bytes_text(0), "0 B"},
      {bytes_text(1536), "1.50 KiB"},
      {bytes_text(67108864), "64 MiB"},
      {percent_text(0.0734), "7.3 %"},
      {percent_text(0.996), "99.6 %"},
      {percent_text(3e-8), "< 0.001 %"},
      {percent_text(0), "0 %"},
      {percent_text(1.25), "125 %"},
      {error_text(3.44e-7), "3.4e-07"},
      {count_text(4096), "4096"},
      {count_text(65536), "64k"},
      {html_escape("a < \"b\" & c"), "a &lt; &quot;b&quot; &amp; c"},
  };
  for (const auto& c : cases) EXPECT_EQ(c.got, c.expected);
}

int count(const std::string& text, const std::string& piece) {
  int n = 0;
  for (size_t at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++n;
  return n;
}

TEST(Chart, every_line_mark_and_label_is_drawn) {
  Chart chart;
  chart.name = "time <b>";
  chart.x = {.label = "tokens", .log = true, .ticks = {256, 512}, .text = count_text};
  chart.y = {.label = "time", .log = true, .text = time_text};
  chart.lines.push_back({.label = "a", .points = {{256, 1e-3}, {512, 4e-3}}});
  chart.levels.emplace_back(2e-3, "a level");
  chart.lines.push_back({.label = "b & c", .color = 1, .points = {{256, 1e-3}}, .titles = {"one <mark>"}});
  const std::string svg = draw(chart);
  EXPECT_EQ(count(svg, "<polyline"), 1);
  EXPECT_EQ(count(svg, "<circle"), 3);
  EXPECT_NE(svg.find("a level"), std::string::npos);
  EXPECT_NE(svg.find("b &amp; c"), std::string::npos);
  EXPECT_NE(svg.find("one &lt;mark&gt;"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(count(svg, "<svg"), count(svg, "</svg>"));
}

TEST(Chart, one_point_and_no_point_give_finite_coordinates) {
  Chart chart;
  chart.x.log = true;
  EXPECT_EQ(draw(chart).find("nan"), std::string::npos);
  chart.lines.push_back({.label = "a", .points = {{3, 0}}});
  EXPECT_EQ(draw(chart).find("nan"), std::string::npos);
  EXPECT_EQ(draw(chart).find("inf"), std::string::npos);
}

TEST(Chart, numbers_that_are_not_finite_have_no_place) {
  const double nan = std::nan(""), infinite = std::numeric_limits<double>::infinity();
  Chart chart;
  chart.lines.push_back({.label = "a", .points = {{1, nan}, {2, 3}, {infinite, 4}}, .titles = {"first", "second", "third"}});
  chart.levels.emplace_back(nan, "a level");
  const std::string svg = draw(chart);
  EXPECT_EQ(count(svg, "<circle"), 1);
  EXPECT_NE(svg.find("second"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  HeatStrip strip;
  strip.rows = strip.columns = {"a"};
  strip.groups = {{"layer", 1}};
  strip.values = {{nan}};
  EXPECT_NE(draw(strip).find("#fde725"), std::string::npos);  // as a large error
}

TEST(HeatStrip, one_cell_per_value) {
  HeatStrip strip;
  strip.rows = {"a", "b"};
  strip.groups = {{"layer 0", 2}, {"layer 1", 1}};
  strip.columns = {"layer 0 head 0", "layer 0 head 1", "layer 1 head 0"};
  strip.values = {{0, 0.5, 1}, {2, 0.1, 0.2}};
  strip.text = percent_text;
  const std::string svg = draw(strip);
  EXPECT_EQ(count(svg, "<title>"), 6);
  EXPECT_NE(svg.find("b, layer 0 head 0: 200 %"), std::string::npos);
}

}  // namespace
}  // namespace linnet::report
