// The pages of `linnet analyze`.
#include "report/page.h"

#include <algorithm>
#include <cmath>

#include "analysis/dsf.h"
#include "analysis/icl_train.h"
#include "report/chart.h"
#include "report/matrix.h"
#include "report/text.h"

namespace linnet::analysis {
namespace {

using report::significant;

constexpr size_t kMostPoints = 40;  // of a line: each has a mark

report::ChartLine line_of(const std::string& label, int color, const std::vector<double>& values, double first) {
  report::ChartLine line{.label = label, .color = color, .shape = color};
  const size_t step = std::max<size_t>(1, (values.size() + kMostPoints - 1) / kMostPoints);
  for (size_t i = 0; i < values.size(); i += step) {
    if (!std::isfinite(values[i])) continue;
    line.points.emplace_back(first + static_cast<double>(i), values[i]);
    line.titles.push_back(label + " at " + std::to_string(static_cast<int64_t>(first) + static_cast<int64_t>(i)) + ": " +
                          significant(values[i], 3));
  }
  return line;
}

std::string rows_chart(const std::vector<SystemReport>& reports, const std::string& what, const std::string& unit,
                       std::vector<double> (*values)(const SystemReport&)) {
  report::Chart chart;
  chart.name = what + " of each token";
  chart.width = 620;
  chart.height = 380;
  chart.x = {.label = "token", .text = report::count_text};
  chart.y = {.label = unit, .text = [](double x) { return significant(x, 2); }};
  for (size_t i = 0; i < reports.size(); ++i) {
    chart.lines.push_back(line_of(reports[i].mixer, static_cast<int>(i), values(reports[i]), 1));
  }
  return report::draw(chart);
}

std::string half_life_text(double x) {
  if (std::isinf(x)) return "never";
  if (x < 0) return "grows";
  return significant(x, 3) + " tokens";
}

double mean(const std::vector<double>& x) {
  double sum = 0;
  for (const double each : x) sum += each;
  return x.empty() ? 0 : sum / static_cast<double>(x.size());
}

}  // namespace

std::vector<std::string> report_heading() {
  return {"mixer",          "states",  "n",          "eigenvalues",   "half life", "memory", "semiseparable rank",
          "effective rank", "entropy", "local mass", "negative mass", "class",     "error"};
}

std::vector<std::string> report_row(const SystemReport& r) {
  std::vector<double> memory(r.memory_length.begin(), r.memory_length.end());
  return {r.mixer,
          std::to_string(r.state_size) + (r.system.cache ? " (grows)" : ""),
          std::to_string(r.system.n),
          significant(r.radius_low, 3) + " to " + significant(r.radius_high, 3) + (r.growth ? ", growth" : ""),
          half_life_text(r.half_life),
          significant(mean(memory), 3),
          std::to_string(r.semiseparable_rank),
          significant(r.effective_rank, 3),
          significant(mean(r.relative_entropy), 2),
          significant(mean(r.local_mass), 2),
          significant(mean(r.negative_mass), 2),
          r.row_class,
          report::error_text(std::max(r.recurrence_error, r.transfer_error))};
}

std::vector<std::string> differences(const SystemReport& a, const SystemReport& b) {
  const Mixer &x = *find_mixer(a.mixer), &y = *find_mixer(b.mixer);
  std::vector<std::string> lines;
  lines.push_back("L_t is " + x.form + " in " + a.mixer + ", " + y.form + " in " + b.mixer + ".");
  lines.push_back("State: " + a.mixer + " has " + x.separates + "; " + b.mixer + " has " + y.separates + ".");
  lines.push_back("State expansion n: " + std::to_string(a.system.n) + " against " + std::to_string(b.system.n) +
                  "; every block of what " + a.mixer + " mixes has rank at most " + std::to_string(a.semiseparable_rank) +
                  ", of " + b.mixer + " " + std::to_string(b.semiseparable_rank) + ".");
  lines.push_back("Normalisation: the rows of " + a.mixer + " are " + a.row_class + ", those of " + b.mixer + " " +
                  b.row_class + ".");
  lines.push_back("Recurrence: the middle half life is " + half_life_text(a.half_life) + " in " + a.mixer + ", " +
                  half_life_text(b.half_life) + " in " + b.mixer +
                  (a.growth != b.growth ? "; only " + (a.growth ? a.mixer : b.mixer) + " has eigenvalues above 1" : "") + ".");
  if (a.mixing.rows == b.mixing.rows && a.mixing.rows > 0) {
    const double size = frobenius(b.mixing), difference = frobenius(a.mixing - b.mixing);
    lines.push_back("Their mixing matrices differ by " + report::percent_text(size == 0 ? 0 : difference / size) +
                    " of that of " + b.mixer + " (Frobenius norms).");
  }
  return lines;
}

std::string report_page(const std::vector<SystemReport>& reports, const std::string& title) {
  using namespace report;
  std::string html = page_head("Linnet: " + title) + "<h1>" + html_escape(title) + "</h1>\n<p class=\"lead\">" +
                     html_escape(std::to_string(reports.size()) + (reports.size() == 1 ? " mixer" : " mixers") +
                                 " as dynamical systems: h = L h + B u, y = C h + D u, " +
                                 std::to_string(reports.empty() ? 0 : reports.front().system.T) + " tokens") +
                     "</p>\n";
  if (reports.size() == 2) {
    html += "<div class=\"summary\">\n";
    for (const std::string& line : differences(reports[0], reports[1])) html += "<p>" + html_escape(line) + "</p>\n";
    html += "</div>\n";
  }
  std::vector<std::vector<std::string>> rows;
  for (const SystemReport& r : reports) rows.push_back(report_row(r));
  html += panel(
      "All numbers",
      "Entropy, local and negative mass are means over tokens, entropy relative to that of an even row; memory: inputs that "
      "carry 99 % of a row; error: the system against the mixer's own output.",
      table(report_heading(), rows), true);
  std::vector<std::string> list;
  for (const SystemReport& r : reports) {
    list.push_back(panel("What " + r.mixer + " mixes",
                         r.mixing_kind == "scalar" ? "Weight of each input (column) in each output (row); blue is negative."
                         : r.mixing_kind == "channelwise"
                             ? "Channel 0: weight of each input (column) in each output (row); blue is negative."
                             : "Size of each input's (column) effect on each output (row).",
                         draw(MatrixPicture{.name = "mixing matrix of " + r.mixer,
                                            .rows = r.mixing.rows,
                                            .cols = r.mixing.cols,
                                            .values = r.mixing.values.data()})));
  }
  html += panels(list);
  PlanePicture plane{.name = "eigenvalues of L in the complex plane", .groups = {}};
  Chart spectrum;
  spectrum.name = "singular values of the mixing matrices";
  spectrum.width = 620;
  spectrum.height = 480;
  spectrum.x = {.label = "index", .text = count_text};
  spectrum.y = {.label = "singular value, of the largest", .log = true, .text = error_text};
  for (size_t i = 0; i < reports.size(); ++i) {
    const SystemReport& r = reports[i];
    std::vector<std::complex<double>> z;
    for (size_t j = 0; j < r.eig_real.size(); ++j) z.emplace_back(r.eig_real[j], r.eig_imag[j]);
    plane.groups.emplace_back(r.mixer, z);
    std::vector<double> values;
    for (const double x : r.singular_values) {
      if (x > 1e-16 * r.singular_values.front()) values.push_back(x / r.singular_values.front());
    }
    spectrum.lines.push_back(line_of(r.mixer, static_cast<int>(i), values, 1));
  }
  html += panels({panel("Eigenvalues", "Of L at every token, with the unit circle: outside it a state grows.", draw(plane)),
                  panel("Spectrum", "A steep fall means that few patterns are mixed.", draw(spectrum))});
  html += panels(
      {panel("Memory", "Most recent inputs that carry 99 % of a row.",
             rows_chart(
                 reports, "memory length", "inputs",
                 [](const SystemReport& r) { return std::vector<double>(r.memory_length.begin(), r.memory_length.end()); })),
       panel("Entropy", "Of a row's weights, in nats.",
             rows_chart(reports, "entropy", "nats", [](const SystemReport& r) { return r.entropy; })),
       panel("Distance", "Mean distance of what a row reads.",
             rows_chart(reports, "mean distance", "tokens", [](const SystemReport& r) { return r.mean_distance; })),
       panel("Decay", "Spectral radius of L.",
             rows_chart(reports, "spectral radius", "radius", [](const SystemReport& r) { return r.spectral_radius; }))});
  return html + page_foot();
}

std::string icl_page(const std::vector<IclCurve>& curves, const std::vector<IclMeasured>& measured, const std::string& title,
                     const std::string& setting) {
  using namespace report;
  Chart chart;
  chart.name = "loss against the number of examples";
  chart.width = 900;
  chart.height = 480;
  chart.x = {.label = "examples in the prompt, n", .text = count_text};
  chart.y = {.label = "loss / d", .text = [](double x) { return significant(x, 2); }};
  std::vector<std::string> heading = {"n"};
  std::vector<std::vector<std::string>> rows, trained;
  double worst = 0;
  for (size_t i = 0; i < curves.size(); ++i) {
    const IclCurve& c = curves[i];
    const auto d = static_cast<double>(c.d);
    heading.push_back(c.name);
    ChartLine line{.label = c.name, .color = static_cast<int>(i), .shape = static_cast<int>(i)};
    if (!measured.empty()) line.style = ChartStyle::line;
    for (size_t j = 0; j < c.n.size(); ++j) {
      line.points.emplace_back(static_cast<double>(c.n[j]), c.loss[j] / d);
      line.titles.push_back(c.name + " at n = " + std::to_string(c.n[j]) + ": loss " + significant(c.loss[j], 4));
      if (rows.size() <= j) rows.push_back({std::to_string(c.n[j])});
      rows[j].push_back(significant(c.loss[j], 5));
    }
    chart.lines.push_back(std::move(line));
    for (const char* layer : {"attention", "h3"}) {
      ChartLine points{.label = c.name, .color = static_cast<int>(i), .shape = layer[0] == 'h', .style = ChartStyle::marks};
      for (const IclMeasured& m : measured) {
        if (m.name != c.name || m.layer != layer) continue;
        points.points.emplace_back(static_cast<double>(m.n), m.loss / d);
        points.titles.push_back(m.name + ", trained " + layer + " at n = " + std::to_string(m.n) + ": loss " +
                                significant(m.loss, 4) + ", theory " + significant(m.theory, 4));
      }
      if (!points.points.empty()) chart.lines.push_back(std::move(points));
    }
  }
  for (const IclMeasured& m : measured) {
    worst = std::max(worst, std::abs(m.off()));
    trained.push_back({m.name + ", " + m.layer, std::to_string(m.n), significant(m.theory, 5), significant(m.loss, 5),
                       significant(m.deviation, 2), significant(100 * m.off(), 2) + " %", significant(m.alignment, 4),
                       m.layer == "h3" ? significant(m.filter, 4) : "-"});
  }
  std::string html = page_head("Linnet: " + title) + "<h1>" + html_escape(title) + "</h1>\n<p class=\"lead\">" +
                     html_escape(setting) + "</p>\n";
  if (!measured.empty()) {
    html += "<div class=\"summary\">\n<p>" +
            html_escape("Of " + std::to_string(measured.size()) + " trained layers the furthest is " + percent_text(worst) +
                        " off its theory.") +
            "</p>\n</div>\n";
  }
  html += panel(measured.empty() ? "Theory" : "Theory and experiment",
                measured.empty() ? "The loss that one layer reaches at best: one preconditioned gradient step on the prompt."
                                 : "Lines: the loss that one layer reaches at best. Marks: layers trained from random weights, "
                                   "circles attention, squares H3.",
                draw(chart), true);
  if (!trained.empty()) {
    html += panel(
        "Trained layers", "Cosines: of the learned step W and of H3's filter with those of the closed form.",
        table({"formula, layer", "n", "theory", "trained", "standard error", "off", "cosine of W", "of the filter"}, trained),
        true);
  }
  return html + panel("All numbers", "Losses, label noise included.", table(heading, rows), true) + page_foot();
}

}  // namespace linnet::analysis
