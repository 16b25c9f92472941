#include "cli/print.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace linnet::cli {
namespace {

std::string padded(const std::string& text, int width, Align align) {
  const int missing = width - text_width(text);
  if (missing <= 0) return text;
  const std::string space(static_cast<size_t>(missing), ' ');
  return align == Align::left ? text + space : space + text;
}

void print_line(std::FILE* file, const std::vector<std::string>& cells, const std::vector<Column>& columns,
                const std::vector<int>& widths) {
  std::string line;
  for (size_t i = 0; i < columns.size(); ++i) {
    line += (i ? "  " : "") + padded(i < cells.size() ? cells[i] : "", widths[i], columns[i].align);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  std::fprintf(file, "%s\n", line.c_str());
}

template <class... Values>
std::string format(const char* pattern, Values... values) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

}  // namespace

int text_width(const std::string& text) {
  int width = 0;
  for (const char c : text) width += (static_cast<unsigned char>(c) & 0xc0) != 0x80;  // bytes that do not continue a character
  return width;
}

bool is_terminal(std::FILE* file) { return isatty(fileno(file)) != 0; }

void Table::print(std::FILE* file) const {
  std::vector<int> widths;
  std::vector<std::string> titles;
  for (const Column& column : columns_) {
    widths.push_back(std::max(column.width, text_width(column.title)));
    titles.push_back(column.title);
  }
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size() && i < widths.size(); ++i) widths[i] = std::max(widths[i], text_width(row[i]));
  }
  print_line(file, titles, columns_, widths);
  for (const auto& row : rows_) print_line(file, row, columns_, widths);
}

void Table::stream(std::FILE* file, const std::vector<std::string>& cells) {
  std::vector<int> widths;
  std::vector<std::string> titles;
  for (const Column& column : columns_) {
    widths.push_back(std::max(column.width, text_width(column.title)));
    titles.push_back(column.title);
  }
  if (!streaming_) print_line(file, titles, columns_, widths);
  streaming_ = true;
  print_line(file, cells, columns_, widths);
}

std::string number(double x, int digits) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  if (x == 0) return "0";
  const int exponent = static_cast<int>(std::floor(std::log10(std::abs(x))));
  if (exponent < -4 || exponent >= 6) return format("%.*e", digits - 1, x);
  return format("%.*f", std::max(0, digits - 1 - exponent), x);
}

std::string scientific(double x, int digits) { return std::isfinite(x) && x == 0 ? "0" : format("%.*e", digits - 1, x); }

std::string bytes_text(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return number(bytes, bytes >= 1000 ? 4 : 3) + " " + kUnits[unit];
}

std::string seconds_text(double seconds) {
  if (seconds < 0.01) return "0.00 s";
  if (seconds < 60) return number(seconds, seconds < 10 ? 2 : 3) + " s";
  const auto whole = static_cast<long long>(std::llround(seconds));
  if (whole < 3600) return format("%lld min %lld s", whole / 60, whole % 60);
  return format("%lld h %lld min", whole / 3600, whole % 3600 / 60);
}

Progress::Progress(std::string what, int64_t total, std::string unit)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      total_(total),
      start_(std::chrono::steady_clock::now()),
      last_(start_),
      terminal_(is_terminal(stderr)) {}

void Progress::at(int64_t done) {
  if (!terminal_) return;
  const auto now = std::chrono::steady_clock::now();
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  if (elapsed < 2 || (last_ != start_ && now - last_ < std::chrono::milliseconds(200))) return;
  last_ = now;
  shown_ = true;
  const double rate = static_cast<double>(done) / elapsed;
  const std::string unit = unit_.empty() ? "" : " " + unit_;
  std::string line = what_ + ": " + std::to_string(done) + " of " + std::to_string(total_) + unit;
  if (done > 0) {
    line +=
        ", " + number(rate, 3) + unit + "/s, " + seconds_text(std::ceil(static_cast<double>(total_ - done) / rate)) + " left";
  }
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  std::fflush(stderr);
}

void Progress::clear() {
  if (!shown_) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
  shown_ = false;
}

}  // namespace linnet::cli
