#include "chart.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "text.h"

namespace linnet::report {
namespace {

constexpr double kCharacter = 6.3;  // mean width of a character of the 12 pixel font
constexpr double kTextHeight = 14;

std::string pixels(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", x);
  return text;
}

std::string text_at(double x, double y, const char* style, const char* anchor, const std::string& text) {
  return "<text class=\"" + std::string(style) + "\" x=\"" + pixels(x) + "\" y=\"" + pixels(y) + "\" text-anchor=\"" + anchor +
         "\">" + html_escape(text) + "</text>\n";
}

std::string line_between(double x0, double y0, double x1, double y1, const std::string& style) {
  return "<line class=\"" + style + "\" x1=\"" + pixels(x0) + "\" y1=\"" + pixels(y0) + "\" x2=\"" + pixels(x1) + "\" y2=\"" +
         pixels(y1) + "\"/>\n";
}

std::string color(int index) { return "c" + std::to_string(index % kChartColors); }

// Circle, square, triangle, diamond, triangle downwards, cross; all of about the same area.
std::string mark(double x, double y, int shape, int color_index, const std::string& title) {
  std::string body;
  const auto polygon = [&](std::initializer_list<std::pair<double, double>> corners) {
    body = "<polygon points=\"";
    for (const auto& [dx, dy] : corners) body += pixels(x + dx) + "," + pixels(y + dy) + " ";
    body += "\"";
  };
  switch (shape % kChartShapes) {
    case 0: body = "<circle cx=\"" + pixels(x) + "\" cy=\"" + pixels(y) + "\" r=\"4.5\""; break;
    case 1: polygon({{-4, -4}, {4, -4}, {4, 4}, {-4, 4}}); break;
    case 2: polygon({{0, -5.5}, {5.2, 4}, {-5.2, 4}}); break;
    case 3: polygon({{0, -5.8}, {5.8, 0}, {0, 5.8}, {-5.8, 0}}); break;
    case 4: polygon({{0, 5.5}, {5.2, -4}, {-5.2, -4}}); break;
    default:
      polygon({{-1.7, -5},
               {1.7, -5},
               {1.7, -1.7},
               {5, -1.7},
               {5, 1.7},
               {1.7, 1.7},
               {1.7, 5},
               {-1.7, 5},
               {-1.7, 1.7},
               {-5, 1.7},
               {-5, -1.7},
               {-1.7, -1.7}});
  }
  body += " class=\"mark fill-" + color(color_index) + "\"";
  if (title.empty()) return body + "/>\n";
  const bool circle = shape % kChartShapes == 0;
  return body + "><title>" + html_escape(title) + "</title></" + (circle ? "circle" : "polygon") + ">\n";
}

// Maps data to pixels along one axis.
struct Map {
  bool log = false;
  double low = 0, high = 1;       // data, or log10 of data
  double origin = 0, extent = 1;  // pixels
  double operator()(double x) const { return origin + extent * ((log ? std::log10(x) : x) - low) / (high - low); }
};

std::vector<double> chosen_ticks(const Axis& axis, double low, double high) {
  std::vector<double> ticks;
  if (axis.log) {  // powers of ten, with 2 and 5 between them when few decades are shown
    const bool fine = high - low < 2.5;
    for (int power = static_cast<int>(std::floor(low)); power <= static_cast<int>(std::ceil(high)); ++power) {
      for (const int factor : {1, 2, 5}) {
        const double tick = factor * std::pow(10, power);
        if ((factor == 1 || fine) && std::log10(tick) > low - 1e-9 && std::log10(tick) < high + 1e-9) ticks.push_back(tick);
      }
    }
    return ticks;
  }
  const double raw = (high - low) / 6;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  const double step = power * (raw / power < 1.5 ? 1 : raw / power < 3.5 ? 2 : raw / power < 7.5 ? 5 : 10);
  for (double tick = std::ceil(low / step - 1e-9) * step; tick < high + 1e-9 * step; tick += step) {
    ticks.push_back(std::fabs(tick) < 1e-12 * step ? 0 : tick);
  }
  return ticks;
}

Map fit(const Axis& axis, const std::vector<double>& data, double origin, double extent) {
  Map map{.log = axis.log, .origin = origin, .extent = extent};
  double low = axis.low, high = axis.high;
  if (low == high) {
    low = data.empty() ? 1 : *std::min_element(data.begin(), data.end());
    high = data.empty() ? 1 : *std::max_element(data.begin(), data.end());
    for (const double tick : axis.ticks) {
      low = std::min(low, tick);
      high = std::max(high, tick);
    }
    if (!axis.log && low > 0) low = 0;
  }
  map.low = axis.log ? std::log10(low) : low;
  map.high = axis.log ? std::log10(high) : high;
  if (axis.low == axis.high) {  // air at both ends, except at a zero
    const double air = std::max((map.high - map.low) * 0.06, axis.log ? 0.02 : 1e-9);
    if (axis.log || low < 0) map.low -= air;
    map.high += air;
  }
  return map;
}

struct Box {
  double left, top, right, bottom;
  bool meets(const Box& other) const {
    return left < other.right && other.left < right && top < other.bottom && other.top < bottom;
  }
};

// Labels at the right ends of lines: sorted by height, then pushed apart.
std::string end_labels(const Chart& chart, const Map& mx, const Map& my, const Box& frame) {
  struct Label {
    double x, y, at;
    const ChartLine* line;
  };
  std::vector<Label> labels;
  for (const ChartLine& line : chart.lines) {
    if (line.points.size() < 2 || line.style == ChartStyle::marks) continue;
    const auto& [x, y] = line.points.back();
    labels.push_back({mx(x), my(y), my(y), &line});
  }
  std::sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) { return a.y < b.y; });
  for (int pass = 0; pass < 200; ++pass) {  // neighbours that are too close share the correction
    bool moved = false;
    for (size_t i = 0; i + 1 < labels.size(); ++i) {
      const double gap = labels[i].at + kTextHeight - labels[i + 1].at;
      if (gap <= 0.01) continue;
      labels[i].at -= gap / 2;
      labels[i + 1].at += gap / 2;
      moved = true;
    }
    for (Label& label : labels) label.at = std::clamp(label.at, frame.top + 4, frame.bottom - 2);
    if (!moved) break;
  }
  std::string svg;
  for (const Label& label : labels) {
    const double x = frame.right + 14;
    svg += line_between(label.x + 6, label.y, x - 2, label.at, "lead");
    svg += text_at(x, label.at + 4, ("label text-" + color(label.line->color)).c_str(), "start", label.line->label);
  }
  return svg;
}

// Where the name of a level stands: above its line, at the right end unless a mark is there.
Box level_name(const Chart& chart, const Map& mx, const Map& my, const Box& frame, double y, const std::string& name) {
  const double width = kCharacter * static_cast<double>(name.size());
  const Box right{frame.right - width - 6, my(y) - 18, frame.right - 6, my(y) - 4};
  for (const ChartLine& line : chart.lines) {
    for (const auto& [px, py] : line.points) {
      if (Box{mx(px) - 7, my(py) - 7, mx(px) + 7, my(py) + 7}.meets(right)) {
        return {frame.left + 8, right.top, frame.left + 8 + width, right.bottom};
      }
    }
  }
  return right;
}

// Labels beside single marks: the first place around the mark that meets no other label and no mark.
std::string mark_labels(const Chart& chart, const Map& mx, const Map& my, const Box& frame) {
  std::vector<Box> taken;
  std::vector<const ChartLine*> marks;
  for (const ChartLine& line : chart.lines) {
    if (line.points.size() != 1 || line.style == ChartStyle::marks) continue;
    const double x = mx(line.points[0].first), y = my(line.points[0].second);
    taken.push_back({x - 6, y - 6, x + 6, y + 6});
    marks.push_back(&line);
  }
  for (const auto& [y, name] : chart.levels) {
    taken.push_back({frame.left, my(y) - 2, frame.right, my(y) + 2});
    taken.push_back(level_name(chart, mx, my, frame, y, name));
  }
  std::sort(marks.begin(), marks.end(),
            [&](const ChartLine* a, const ChartLine* b) { return my(a->points[0].second) < my(b->points[0].second); });
  const Box room{frame.left + 2, frame.top + 2, chart.width - 4.0, frame.bottom - 2};
  std::string svg;
  for (const ChartLine* line : marks) {
    const double x = mx(line->points[0].first), y = my(line->points[0].second);
    const double width = kCharacter * static_cast<double>(line->label.size());
    Box best{x + 9, y - 7, x + 9 + width, y + 7};
    bool found = false;
    for (double away = 9; away < 90 && !found; away += 7) {
      for (const auto& [dx, dy] :
           {std::pair<double, double>{1, 0}, {0, -1}, {0, 1}, {-1, 0}, {0.7, -0.7}, {0.7, 0.7}, {-0.7, -0.7}, {-0.7, 0.7}}) {
        const double cx = x + dx * away, cy = y + dy * (away + 4);
        const double left = dx > 0 ? cx : dx < 0 ? cx - width : cx - width / 2;
        const Box box{left, cy - kTextHeight / 2, left + width, cy + kTextHeight / 2};
        if (box.left < room.left || box.right > room.right || box.top < room.top || box.bottom > room.bottom) continue;
        if (std::any_of(taken.begin(), taken.end(), [&](const Box& other) { return box.meets(other); })) continue;
        best = box;
        found = true;
        break;
      }
    }
    taken.push_back(best);
    const double near_x = std::clamp(x, best.left, best.right), near_y = std::clamp(y, best.top + 3, best.bottom - 3);
    if (std::hypot(near_x - x, near_y - y) > 14) svg += line_between(x, y, near_x, near_y, "lead");
    svg += text_at(best.left, best.bottom - 3, ("label text-" + color(line->color)).c_str(), "start", line->label);
  }
  return svg;
}

// Dark violet over green to yellow, readable without colour by its lightness: no error is dark, a large one bright.
std::string heat_color(double part) {
  static constexpr double kStops[][3] = {{0x2a, 0x18, 0x5c}, {0x3b, 0x4b, 0x8a}, {0x2a, 0x78, 0x8e},
                                         {0x22, 0xa8, 0x84}, {0x7a, 0xd1, 0x51}, {0xfd, 0xe7, 0x25}};
  constexpr int kLast = 5;
  const double at = (std::isnan(part) ? 1 : std::clamp(part, 0.0, 1.0)) * kLast;
  const int i = std::min(static_cast<int>(at), kLast - 1);
  char text[16];
  int rgb[3];
  for (int c = 0; c < 3; ++c)
    rgb[c] = static_cast<int>(std::lround(kStops[i][c] + (at - i) * (kStops[i + 1][c] - kStops[i][c])));
  std::snprintf(text, sizeof text, "#%02x%02x%02x", rgb[0], rgb[1], rgb[2]);
  return text;
}

std::string open_svg(int width, int height, const std::string& name) {
  return "<svg viewBox=\"0 0 " + std::to_string(width) + " " + std::to_string(height) + "\" role=\"img\" aria-label=\"" +
         html_escape(name) + "\" xmlns=\"http://www.w3.org/2000/svg\">\n";
}

}  // namespace

std::string draw(const Chart& given) {
  Chart chart = given;  // without what has no place: numbers that are not finite
  for (ChartLine& line : chart.lines) {
    for (size_t i = line.points.size(); i-- > 0;) {
      if (std::isfinite(line.points[i].first) && std::isfinite(line.points[i].second)) continue;
      line.points.erase(line.points.begin() + static_cast<std::ptrdiff_t>(i));
      if (i < line.titles.size()) line.titles.erase(line.titles.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  chart.levels.erase(
      std::remove_if(chart.levels.begin(), chart.levels.end(), [](const auto& level) { return !std::isfinite(level.first); }),
      chart.levels.end());
  constexpr double kLeft = 78, kTop = 14, kBottom = 52;
  double right = 20;  // lines have their labels beside the frame, marks inside
  for (const ChartLine& line : chart.lines) {
    if (line.points.size() > 1 && line.style != ChartStyle::marks)
      right = std::max(right, 26 + kCharacter * static_cast<double>(line.label.size()));
  }
  const Box frame{kLeft, kTop, chart.width - right, chart.height - kBottom};
  std::vector<double> xs, ys;
  for (const ChartLine& line : chart.lines) {
    for (const auto& [x, y] : line.points) {
      xs.push_back(x);
      ys.push_back(y);
    }
  }
  const Map mx = fit(chart.x, xs, frame.left, frame.right - frame.left);
  for (const auto& [y, name] : chart.levels) ys.push_back(y);
  const Map my = fit(chart.y, ys, frame.bottom, frame.top - frame.bottom);
  std::string svg = open_svg(chart.width, chart.height, chart.name);

  const auto shown = [](const Axis& axis, double x) { return axis.text == nullptr ? significant(x, 3) : axis.text(x); };
  for (const double tick : chart.y.ticks.empty() ? chosen_ticks(chart.y, my.low, my.high) : chart.y.ticks) {
    svg += line_between(frame.left, my(tick), frame.right, my(tick), "grid");
    svg += text_at(frame.left - 8, my(tick) + 4, "tick", "end", shown(chart.y, tick));
  }
  for (const double tick : chart.x.ticks.empty() ? chosen_ticks(chart.x, mx.low, mx.high) : chart.x.ticks) {
    svg += line_between(mx(tick), frame.top, mx(tick), frame.bottom, "grid");
    svg += text_at(mx(tick), frame.bottom + 18, "tick", "middle", shown(chart.x, tick));
  }
  svg += line_between(frame.left, frame.bottom, frame.right, frame.bottom, "axis");
  svg += line_between(frame.left, frame.top, frame.left, frame.bottom, "axis");
  svg += text_at((frame.left + frame.right) / 2, chart.height - 10, "name", "middle", chart.x.label);
  svg += "<text class=\"name\" text-anchor=\"middle\" transform=\"translate(14 " + pixels((frame.top + frame.bottom) / 2) +
         ") rotate(-90)\">" + html_escape(chart.y.label) + "</text>\n";

  for (const auto& [y, name] : chart.levels) {
    svg += line_between(frame.left, my(y), frame.right, my(y), "level");
    const Box box = level_name(chart, mx, my, frame, y, name);
    svg += text_at(box.left, box.bottom - 2, "tick", "start", name);
  }
  svg += end_labels(chart, mx, my, frame);
  for (const ChartLine& line : chart.lines) {
    if (line.points.size() < 2 || line.style == ChartStyle::marks) continue;
    svg += "<polyline class=\"line dash" + std::to_string(line.shape % kChartShapes) + " stroke-" + color(line.color) +
           "\" points=\"";
    for (const auto& [x, y] : line.points) svg += pixels(mx(x)) + "," + pixels(my(y)) + " ";
    svg += "\"/>\n";
  }
  const std::string labels = mark_labels(chart, mx, my, frame);
  for (const ChartLine& line : chart.lines) {
    for (size_t i = 0; i < line.points.size() && (line.style != ChartStyle::line || line.points.size() == 1); ++i) {
      svg += mark(mx(line.points[i].first), my(line.points[i].second), line.shape, line.color,
                  i < line.titles.size() ? line.titles[i] : "");
    }
  }
  return svg + labels + "</svg>\n";
}

std::string draw(const HeatStrip& strip) {
  constexpr double kTop = 24, kRow = 20, kGap = 10, kLegend = 46;
  int columns = 0;
  for (const auto& [name, count] : strip.groups) columns += count;
  const double cell =
      (strip.width - strip.left - 4 - kGap * static_cast<double>(strip.groups.size() - 1)) / std::max(columns, 1);
  const double bottom = kTop + kRow * static_cast<double>(strip.rows.size());
  std::string svg = open_svg(strip.width, static_cast<int>(bottom + kLegend), strip.name);
  const auto shown = [&](double x) { return strip.text == nullptr ? significant(x, 2) : strip.text(x); };

  for (size_t r = 0; r < strip.rows.size(); ++r) {
    const double y = kTop + kRow * static_cast<double>(r);
    svg += text_at(strip.left - 10, y + 14, "label", "end", strip.rows[r]);
    double x = strip.left;
    size_t column = 0;
    for (const auto& [name, count] : strip.groups) {
      if (r == 0) svg += text_at(x + cell * count / 2, kTop - 9, "name", "middle", name);
      for (int i = 0; i < count; ++i, ++column, x += cell) {
        const double value = strip.values[r][column];
        svg += "<rect x=\"" + pixels(x) + "\" y=\"" + pixels(y) + "\" width=\"" + pixels(cell - 1) + "\" height=\"" +
               pixels(kRow - 2) + "\" rx=\"2\" fill=\"" + heat_color(value / strip.high) + "\"><title>" +
               html_escape(strip.rows[r] + ", " + strip.columns[column] + ": " + shown(value)) + "</title></rect>\n";
      }
      x += kGap;
    }
  }
  constexpr int kSteps = 60;
  const double scale_width = 240, y = bottom + 12;
  for (int i = 0; i < kSteps; ++i) {
    svg += "<rect x=\"" + pixels(strip.left + scale_width * i / kSteps) + "\" y=\"" + pixels(y) + "\" width=\"" +
           pixels(scale_width / kSteps + 0.5) + "\" height=\"10\" fill=\"" + heat_color((i + 0.5) / kSteps) + "\"/>\n";
  }
  svg += text_at(strip.left, y + 25, "tick", "start", shown(0));
  svg += text_at(strip.left + scale_width, y + 25, "tick", "end", shown(strip.high) + " or more");
  return svg + "</svg>\n";
}

const char* chart_style() {
  return R"(svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .axis { stroke: var(--muted); stroke-width: 1; }
svg .lead { stroke: var(--muted); stroke-width: 0.7; opacity: 0.6; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .dash1 { stroke-dasharray: 7 3; } svg .dash2 { stroke-dasharray: 2 3; } svg .dash3 { stroke-dasharray: 9 3 2 3; }
svg .dash4 { stroke-dasharray: 4 4; } svg .dash5 { stroke-dasharray: 12 4; }
svg .level { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 5 4; }
svg .mark { stroke: var(--paper); stroke-width: 1; }
svg .tick { fill: var(--muted); }
svg .name { fill: var(--ink); }
svg .label { fill: var(--ink); }
:root { --c0: #c2410c; --c1: #1d4ed8; --c2: #047857; --c3: #7e22ce; --c4: #b45309; --c5: #0e7490; --c6: #be185d; --c7: #4d7c0f; }
@media (prefers-color-scheme: dark) {
  :root { --c0: #fb923c; --c1: #7aa2f7; --c2: #34d399; --c3: #c084fc; --c4: #fbbf24; --c5: #22d3ee; --c6: #f472b6; --c7: #a3e635; }
}
.stroke-c0 { stroke: var(--c0); } .fill-c0 { fill: var(--c0); } svg .text-c0 { fill: var(--c0); }
.stroke-c1 { stroke: var(--c1); } .fill-c1 { fill: var(--c1); } svg .text-c1 { fill: var(--c1); }
.stroke-c2 { stroke: var(--c2); } .fill-c2 { fill: var(--c2); } svg .text-c2 { fill: var(--c2); }
.stroke-c3 { stroke: var(--c3); } .fill-c3 { fill: var(--c3); } svg .text-c3 { fill: var(--c3); }
.stroke-c4 { stroke: var(--c4); } .fill-c4 { fill: var(--c4); } svg .text-c4 { fill: var(--c4); }
.stroke-c5 { stroke: var(--c5); } .fill-c5 { fill: var(--c5); } svg .text-c5 { fill: var(--c5); }
.stroke-c6 { stroke: var(--c6); } .fill-c6 { fill: var(--c6); } svg .text-c6 { fill: var(--c6); }
.stroke-c7 { stroke: var(--c7); } .fill-c7 { fill: var(--c7); } svg .text-c7 { fill: var(--c7); }
)";
}

}  // namespace linnet::report
