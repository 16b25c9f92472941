#include "report/matrix.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

#include "report/chart.h"
#include "report/text.h"

namespace linnet::report {
namespace {

std::string pixels(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", x);
  return text;
}

std::string open_svg(double width, double height, const std::string& name) {
  return "<svg viewBox=\"0 0 " + pixels(width) + " " + pixels(height) + "\" role=\"img\" aria-label=\"" + html_escape(name) +
         "\">\n";
}

}  // namespace

std::string draw(const MatrixPicture& p) {
  const int64_t step = std::max<int64_t>(1, (std::max(p.rows, p.cols) + p.cells - 1) / p.cells);
  const int64_t rows = (p.rows + step - 1) / step, cols = (p.cols + step - 1) / step;
  const double size = 480.0 / static_cast<double>(std::max<int64_t>(1, std::max(rows, cols)));
  double most = 0;
  for (int64_t i = 0; i < p.rows * p.cols; ++i) {
    if (std::isfinite(p.values[i])) most = std::max(most, std::abs(p.values[i]));
  }
  std::string svg = open_svg(480, 480, p.name);
  svg += "<rect x=\"0.5\" y=\"0.5\" width=\"479\" height=\"479\" fill=\"none\" class=\"grid\"/>\n";
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      double x = 0;
      for (int64_t i = r * step; i < std::min(p.rows, (r + 1) * step); ++i) {
        for (int64_t j = c * step; j < std::min(p.cols, (c + 1) * step); ++j) {
          if (std::abs(p.values[i * p.cols + j]) > std::abs(x)) x = p.values[i * p.cols + j];
        }
      }
      const double strength = most == 0 ? 0 : std::sqrt(std::abs(x) / most);  // small weights stay visible
      if (strength < 0.02) continue;
      svg += "<rect x=\"" + pixels(static_cast<double>(c) * size) + "\" y=\"" + pixels(static_cast<double>(r) * size) +
             "\" width=\"" + pixels(size) + "\" height=\"" + pixels(size) + "\" class=\"" + (x < 0 ? "fill-c1" : "fill-c0") +
             "\" fill-opacity=\"" + significant(std::min(1.0, strength), 2) + "\"><title>" + std::to_string(r * step) + ", " +
             std::to_string(c * step) + ": " + significant(x, 3) + "</title></rect>\n";
    }
  }
  return svg + "</svg>\n";
}

std::string draw(const PlanePicture& p) {
  double most = 1.05;
  for (const auto& group : p.groups) {
    for (const auto& z : group.second) {
      if (std::isfinite(std::abs(z))) most = std::max({most, std::abs(z.real()) * 1.05, std::abs(z.imag()) * 1.05});
    }
  }
  const auto at = [&](double x) { return 240 + 230 * x / most; };
  std::string svg = open_svg(480, 480 + 18 * static_cast<double>(p.groups.size()), p.name);
  svg +=
      "<line class=\"grid\" x1=\"10\" y1=\"240\" x2=\"470\" y2=\"240\"/>\n<line class=\"grid\" x1=\"240\" y1=\"10\" x2=\"240\" "
      "y2=\"470\"/>\n";
  svg += "<circle cx=\"240\" cy=\"240\" r=\"" + pixels(230 / most) + "\" fill=\"none\" class=\"axis\"/>\n";
  svg += "<text class=\"tick\" x=\"" + pixels(at(1) + 3) + "\" y=\"254\">1</text>\n";
  for (size_t g = 0; g < p.groups.size(); ++g) {
    const auto& points = p.groups[g].second;
    const std::string color = "fill-c" + std::to_string(g % kChartColors);
    std::set<std::pair<int, int>> drawn;  // a thousand equal eigenvalues are one dot
    const size_t step = std::max<size_t>(1, points.size() / PlanePicture::kMost);
    for (size_t i = 0; i < points.size(); i += step) {
      if (!std::isfinite(std::abs(points[i]))) continue;
      const double x = at(points[i].real()), y = at(-points[i].imag());
      if (!drawn.emplace(static_cast<int>(4 * x), static_cast<int>(4 * y)).second) continue;
      svg +=
          "<circle cx=\"" + pixels(x) + "\" cy=\"" + pixels(y) + "\" r=\"3\" fill-opacity=\"0.6\" class=\"" + color + "\"/>\n";
    }
    const double y = 484 + 18 * static_cast<double>(g);
    svg += "<circle cx=\"14\" cy=\"" + pixels(y) + "\" r=\"4\" class=\"" + color + "\"/><text class=\"name\" x=\"24\" y=\"" +
           pixels(y + 4) + "\">" + html_escape(p.groups[g].first) + "</text>\n";
  }
  return svg + "</svg>\n";
}

}  // namespace linnet::report
