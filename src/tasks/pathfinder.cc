// Pathfinder (Linsley et al.; Long Range Arena): two dots, and whether one dashed curve joins them. The parameters are LRA's;
// the drawing is our own.
#include <cmath>

#include "tasks/task.h"

namespace linnet::tasks {
namespace {

struct Point {
  double x = 0, y = 0;
};
struct Dash {
  Point a, b;
};

double distance(Point p, Point q) { return std::sqrt((p.x - q.x) * (p.x - q.x) + (p.y - q.y) * (p.y - q.y)); }

double distance(Point p, const Dash& d) {
  const double dx = d.b.x - d.a.x, dy = d.b.y - d.a.y, length2 = dx * dx + dy * dy;
  const double s = length2 == 0 ? 0 : std::clamp(((p.x - d.a.x) * dx + (p.y - d.a.y) * dy) / length2, 0.0, 1.0);
  return distance(p, Point{d.a.x + s * dx, d.a.y + s * dy});
}

Point middle(const Dash& d) { return {(d.a.x + d.b.x) / 2, (d.a.y + d.b.y) / 2}; }

// Whether two dashes of length `dash` come nearer than `clear`. Of dashes that are short against the gap kept between them, the
// ends and middles decide.
bool too_near(const Dash& d, const Dash& e, double dash, double clear) {
  const Point m = middle(d), n = middle(e);
  const double dx = m.x - n.x, dy = m.y - n.y;
  if (dx * dx + dy * dy >= (clear + dash) * (clear + dash)) return false;  // most pairs
  return std::min({distance(d.a, e), distance(m, e), distance(d.b, e), distance(e.a, d), distance(e.b, d)}) < clear;
}

struct Drawing {
  int64_t size = 32, dashes = 14, distractors = 5;
  double dash = 2, margin = 1, thickness = 0.5, dot = 1.5, padding = 1, apart = 7;
};

constexpr double kPi = 3.14159265358979323846;
constexpr double kTurn = kPi / 6;  // most that a curve turns between two dashes
constexpr double kClear = 1.9;     // pixels between the middle lines of different dashes
constexpr int kTurnTries = 6, kSnakeTries = 60, kImageTries = 200;

// A curve of `count` dashes that keeps away from `others`; empty after kSnakeTries attempts. Draws: x, y and direction of an
// attempt, then a turn for each try of each dash.
std::vector<Dash> draw_snake(Stream& stream, const Drawing& o, int64_t count, const std::vector<Dash>& others,
                             const Point* away) {
  std::vector<Dash> snake;
  const double low = o.padding, high = static_cast<double>(o.size) - o.padding;
  const auto inside = [&](Point p) { return p.x >= low && p.x <= high && p.y >= low && p.y <= high; };
  const auto clear = [&](const Dash& dash) {
    for (const Dash& other : others) {
      if (too_near(dash, other, o.dash, kClear)) return false;
    }
    for (size_t i = 0; i + 1 < snake.size(); ++i) {  // the dash before is near by construction
      if (too_near(dash, snake[i], o.dash, kClear)) return false;
    }
    return true;
  };
  for (int attempt = 0; attempt < kSnakeTries; ++attempt) {
    snake.clear();
    Point at = {low + stream.uniform() * (high - low), 0};
    at.y = low + stream.uniform() * (high - low);
    double angle = 2 * kPi * stream.uniform();
    if (away != nullptr && distance(at, *away) < o.apart) continue;
    bool stuck = false;
    while (static_cast<int64_t>(snake.size()) < count && !stuck) {
      stuck = true;
      for (int i = 0; i < kTurnTries; ++i) {
        const double turned = angle + kTurn * (2 * stream.uniform() - 1);
        const double c = std::cos(turned), s = std::sin(turned), skip = snake.empty() ? 0 : o.margin;
        const Dash dash = {{at.x + skip * c, at.y + skip * s}, {at.x + (skip + o.dash) * c, at.y + (skip + o.dash) * s}};
        if (!inside(dash.a) || !inside(dash.b) || !clear(dash)) continue;
        snake.push_back(dash);
        at = dash.b;
        angle = turned;
        stuck = false;
        break;
      }
    }
    if (!stuck) return snake;
  }
  return {};
}

// The coverage of the 2 x 2 points of each pixel, times the contrast.
void paint(const Drawing& o, double contrast, const std::vector<Dash>& dashes, const Point* dots, uint8_t* pixels) {
  const int64_t S = o.size;
  std::vector<uint8_t> fine(static_cast<size_t>(4 * S * S), 0);
  const auto mark = [&](double x0, double x1, double y0, double y1, const auto& covers) {
    const auto limit = [&](double x) { return std::clamp<int64_t>(static_cast<int64_t>(std::floor(2 * x)), 0, 2 * S - 1); };
    for (int64_t y = limit(y0); y <= limit(y1); ++y) {
      for (int64_t x = limit(x0); x <= limit(x1); ++x) {
        const Point p = {(static_cast<double>(x) + 0.5) / 2, (static_cast<double>(y) + 0.5) / 2};
        if (covers(p)) fine[static_cast<size_t>(y * 2 * S + x)] = 1;
      }
    }
  };
  for (const Dash& d : dashes) {
    const double t = o.thickness;
    mark(std::min(d.a.x, d.b.x) - t, std::max(d.a.x, d.b.x) + t, std::min(d.a.y, d.b.y) - t, std::max(d.a.y, d.b.y) + t,
         [&](Point p) { return distance(p, d) <= t; });
  }
  for (int i = 0; i < 2; ++i) {
    const Point c = dots[i];
    mark(c.x - o.dot, c.x + o.dot, c.y - o.dot, c.y + o.dot, [&](Point p) { return distance(p, c) <= o.dot; });
  }
  for (int64_t y = 0; y < S; ++y) {
    for (int64_t x = 0; x < S; ++x) {
      const uint8_t* const f = fine.data() + 4 * S * y + 2 * x;
      const int covered = f[0] + f[1] + f[2 * S] + f[2 * S + 1];
      pixels[y * S + x] = static_cast<uint8_t>(std::lround(255 * contrast * covered / 4));
    }
  }
}

// Draws: the class, the contrast, the two curves (again from the first when one does not fit), which end gets a dot where that
// is free, the distractors.
bool draw_image(Stream& stream, const Drawing& o, uint8_t* pixels, int64_t* label) {
  *label = stream.below(2);
  const double contrast = 0.75 + 0.25 * stream.uniform();
  for (int attempt = 0; attempt < kImageTries; ++attempt) {
    std::vector<Dash> all = draw_snake(stream, o, o.dashes, {}, nullptr);
    if (all.empty()) continue;
    const Point start = all.front().a;
    const std::vector<Dash> first = all, second = draw_snake(stream, o, o.dashes, all, &start);
    if (second.empty()) continue;
    all.insert(all.end(), second.begin(), second.end());
    int64_t placed = 0;
    for (; placed < o.distractors; ++placed) {
      const std::vector<Dash> other = draw_snake(stream, o, std::max<int64_t>(1, o.dashes / 3), all, nullptr);
      if (other.empty()) break;
      all.insert(all.end(), other.begin(), other.end());
    }
    if (placed < o.distractors) continue;
    const Point ends[2][2] = {{first.front().a, first.back().b}, {second.front().a, second.back().b}};
    Point dots[2] = {ends[0][0], ends[0][1]};
    if (*label == 0) {
      dots[0] = ends[0][stream.below(2)];
      dots[1] = ends[1][stream.below(2)];
    } else {
      const int64_t which = stream.below(2);
      dots[0] = ends[which][0];
      dots[1] = ends[which][1];
    }
    paint(o, contrast, all, dots, pixels);
    return true;
  }
  return false;
}

Status make(const TaskOptions& o, std::vector<TaskTensor>* tensors) {
  const Drawing drawing = {.size = o.integer("size"), .dashes = o.integer("dashes"), .distractors = o.integer("distractors")};
  const int64_t N = o.integer("examples"), P = drawing.size * drawing.size;
  if (N > kMaxElements / P) return o.error("examples x size x size is above 2^34 pixels");
  TaskTensor pixels = byte_tensor("pixels", {N, P}), labels = integer_tensor("label", {N});
  std::vector<uint8_t> drawn(static_cast<size_t>(N), 0);
  for_examples(o, N, [&](Stream& stream, int64_t i) {
    if (i > 0 && !o.flag("independent") && drawn[0] == 0) return;  // these sizes do not fit: the first image has shown it
    drawn[static_cast<size_t>(i)] =
        draw_image(stream, drawing, pixels.bytes.data() + i * P, &labels.integers[static_cast<size_t>(i)]);
  });
  if (std::find(drawn.begin(), drawn.end(), 0) != drawn.end()) {
    return o.error("two curves of " + std::to_string(drawing.dashes) + " dashes and " + std::to_string(drawing.distractors) +
                   " distractors find no place in " + std::to_string(drawing.size) + " x " + std::to_string(drawing.size) +
                   " pixels; use fewer or a larger size");
  }
  *tensors = {std::move(pixels), std::move(labels)};
  return {};
}

}  // namespace

const Task& pathfinder_task() {
  static const Task task = {
      .name = "pathfinder",
      .summary = "Long Range Arena: do the two dots lie on one dashed curve?",
      .details =
          "Two curves of `dashes` dashes (length 2, thickness 0.5, 1 apart) whose starts are at least 7 apart, short "
          "distractors, a\n"
          "dot of radius 1.5 at both ends of one curve (class 1) or at one end of each (class 0). LRA draws 160,000 for "
          "training at\n"
          "size 32. The pictures are not LRA's own pixel by pixel.",
      .options = drawn_options(64, {integer_option("size", 32, 16, 512, "pixels of a side"),
                                    integer_option("dashes", 14, 1, 100, "of each of the two curves; distractors have a third"),
                                    integer_option("distractors", 5, 0, 100, "curves without a dot")}),
      .results = {{"pixels", "examples size*size", "grey, 0 to 255, row by row"},
                  {"label", "examples", "1: one curve joins the dots"}},
      .make = make,
  };
  return task;
}

}  // namespace linnet::tasks
