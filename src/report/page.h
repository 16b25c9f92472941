// page: what every page of the project has around its contents: one self-contained HTML file, no script, light and dark as the
// reader's system asks, readable on a narrow screen and in print.
//
//   std::string html = page_head("Linnet: two mixers") + "<h1>Two mixers</h1>" + panel("Spectrum", "What it shows.",
//   draw(chart)) +
//                      page_foot();
#pragma once

#include <string>
#include <vector>

namespace linnet::report {

std::string page_head(const std::string& title);  // up to <main>
std::string page_foot();
// A section with a heading, a sentence and its contents (HTML). `wide`: over all columns, scrolling sideways where it must.
std::string panel(const std::string& heading, const std::string& sentence, const std::string& html, bool wide = false);
// Panels side by side where there is room.
std::string panels(const std::vector<std::string>& list);
// Cells are text, escaped here; the first column is left-aligned.
std::string table(const std::vector<std::string>& heading, const std::vector<std::vector<std::string>>& rows);

}  // namespace linnet::report
