// print: tables, numbers and progress in a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace linnet::cli {

enum class Align { left, right };

struct Column {
  std::string title;
  Align align = Align::left;
  int width = 0;  // at least; a table that streams needs it
};

// Text in columns. Collect rows and print them all with the widths they need, or stream them one by one with the widths
// declared:
//
//   Table table({{"operator"}, {"ms", Align::right}});
//   table.row({"softmax", number(1.25, 3)});
//   table.print(stdout);
class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  void print(std::FILE* file) const;
  // Prints the titles before the first row, then the row; columns wider than declared push the rest to the right.
  void stream(std::FILE* file, const std::vector<std::string>& cells);

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
  bool streaming_ = false;
};

// "1.25" with that many significant digits, no exponent from 1e-4 to 1e6; "nan", "inf".
std::string number(double x, int digits);
// "1.2e-07".
std::string scientific(double x, int digits = 2);
std::string bytes_text(double bytes);      // "1.5 MiB"
std::string seconds_text(double seconds);  // "12 s", "3 min 5 s"
// The number of columns that text takes in a terminal: its code points.
int text_width(const std::string& text);
bool is_terminal(std::FILE* file);

// One line on stderr, when that is a terminal and the work has taken two seconds: what, how far, rate, time left.
//
//   Progress progress("random cases", 1000);
//   for (...) { progress.at(i); ... progress.clear(); puts(line); }
class Progress {
 public:
  Progress(std::string what, int64_t total, std::string unit = "");
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void at(int64_t done);
  void clear();  // before anything else is printed

 private:
  std::string what_, unit_;
  int64_t total_;
  std::chrono::steady_clock::time_point start_, last_;
  bool terminal_, shown_ = false;
};

}  // namespace linnet::cli
