#include "report/page.h"

#include "report/chart.h"
#include "report/text.h"

namespace linnet::report {
namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c1917; --muted: #78716c; --grid: #e7e5e4; --panel: #fafaf9;
        --accent: #c2410c; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #171614; --ink: #e7e5e4; --muted: #a8a29e; --grid: #33302c; --panel: #1f1d1a; --accent: #fb923c; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 0 0 4px; }
p { margin: 0 0 10px; }
.lead { color: var(--muted); margin-bottom: 22px; }
.summary { border-left: 3px solid var(--accent); padding: 2px 0 2px 18px; margin: 0 0 30px; max-width: 860px; }
.summary p:last-child { margin: 0; color: var(--muted); }
.panels { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 22px; margin-bottom: 22px; }
@media (max-width: 940px) { .panels { grid-template-columns: minmax(0, 1fr); } }
.panel { background: var(--panel); border: 1px solid var(--grid); border-radius: 10px; padding: 18px 18px 12px; }
.panel p { color: var(--muted); font-size: 14px; }
.wide { margin-bottom: 22px; overflow-x: auto; }
.wide svg { min-width: 700px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--muted); border-bottom: 1px solid var(--muted); padding: 6px 10px;
     vertical-align: bottom; }
td { text-align: right; border-bottom: 1px solid var(--grid); padding: 6px 10px; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 4px; }
td small { color: var(--muted); }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 8px; }
.notes { font-size: 14px; color: var(--muted); max-width: 860px; margin-top: 28px; }
.notes dt { color: var(--ink); font-weight: 600; }
.notes dd { margin: 0 0 8px; }
.wide:focus-visible, a:focus-visible, summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 0 0 24px; padding: 0; font-size: 14px; }
a { color: var(--accent); }
tbody th { text-align: left; font-weight: 400; color: var(--ink); border-bottom: 1px solid var(--grid); white-space: nowrap; }
details { margin-top: 8px; } summary { cursor: pointer; color: var(--muted); font-size: 14px; }
sup { font-size: 0.7em; line-height: 0; }
code { font-family: ui-monospace, monospace; font-size: 0.92em; }
@media print {
  :root { color-scheme: light; --paper: #ffffff; --ink: #1c1917; --muted: #57534e; --grid: #d6d3d1; --panel: #ffffff; }
  .wide { overflow: visible; } .wide svg { min-width: 0; } table { font-size: 9px; } th, td { padding: 2px 4px; } nav { display: none; }
}
@media print { main { max-width: none; padding: 0; } .panel { break-inside: avoid; border-color: #bbb; } }
)";

}  // namespace

std::string page_head(const std::string& title) {
  return "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
         html_escape(title) + "</title>\n<style>" + kStyle + chart_style() + "</style>\n</head>\n<body>\n<main>\n";
}

std::string page_foot() { return "</main>\n</body>\n</html>\n"; }

std::string panel(const std::string& heading, const std::string& sentence, const std::string& html, bool wide) {
  // What scrolls sideways can be reached and scrolled by the keyboard.
  const std::string region = wide ? " wide\" tabindex=\"0\" role=\"region\" aria-label=\"" + html_escape(heading) : "";
  return "<section class=\"panel" + region + "\">\n<h2>" + html_escape(heading) + "</h2>\n" +
         (sentence.empty() ? "" : "<p>" + html_escape(sentence) + "</p>\n") + html + "</section>\n";
}

std::string panels(const std::vector<std::string>& list) {
  std::string html = "<div class=\"panels\">\n";
  for (const std::string& each : list) html += each;
  return html + "</div>\n";
}

std::string table(const std::vector<std::string>& heading, const std::vector<std::vector<std::string>>& rows) {
  std::string html = "<table>\n<thead><tr>";
  for (const std::string& cell : heading) html += "<th scope=\"col\">" + html_escape(cell) + "</th>";
  html += "</tr></thead>\n<tbody>\n";
  for (const std::vector<std::string>& row : rows) {
    html += "<tr>";
    for (size_t i = 0; i < row.size(); ++i) {
      html += (i == 0 ? "<th scope=\"row\">" : "<td>") + html_escape(row[i]) + (i == 0 ? "</th>" : "</td>");
    }
    html += "</tr>\n";
  }
  return html + "</tbody>\n</table>\n";
}

}  // namespace linnet::report
