// Results of other commands as parts of one page: what `linnet report` was given besides runs of linnet train.
#pragma once

#include <string>
#include <vector>

#include "core/status.h"

namespace linnet::cli {

struct Collected {
  std::string kind, title;  // heads, dsf, icl, compare, bench, convert; what the page's list of contents calls it
  std::string page;         // a whole page of its own
  std::string summary;      // one line of the table
};

// Whether a path is such a result: a JSON file, or a folder that linnet convert wrote.
bool is_result(const std::string& path);
Status read_result(const std::string& path, Collected* result);

// One page from the bodies of several: headings one level down, a list of contents before them.
std::string joined_page(const std::string& title, const std::vector<Collected>& parts);

}  // namespace linnet::cli
