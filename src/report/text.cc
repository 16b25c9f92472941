#include "text.h"

#include <cmath>
#include <cstdio>

namespace linnet::report {
namespace {

std::string print(const char* format, int digits, double x) {
  char text[64];
  std::snprintf(text, sizeof text, format, digits, x);
  return text;
}

}  // namespace

std::string significant(double x, int digits) {
  if (!std::isfinite(x)) return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
  if (x == 0) return "0";
  // The power of ten after rounding: 9.996 with 3 digits is 10.0, not 10.00.
  const double power = std::floor(std::log10(std::fabs(x)) + 1e-12);
  const double rounded = std::round(x / std::pow(10, power - digits + 1)) * std::pow(10, power - digits + 1);
  const int magnitude = static_cast<int>(std::floor(std::log10(std::fabs(rounded)) + 1e-12));
  if (magnitude < -5 || magnitude >= 7) return print("%.*e", digits - 1, x);
  const int decimals = digits - 1 - magnitude;
  return print("%.*f", decimals > 0 ? decimals : 0, x);
}

std::string time_text(double seconds) {
  static constexpr struct {
    double unit;
    const char* name;
  } kUnits[] = {{1e-9, " ns"}, {1e-6, " us"}, {1e-3, " ms"}, {1, " s"}};
  for (const auto& u : kUnits) {
    if (seconds < 999.5 * u.unit || u.unit == 1) return significant(seconds / u.unit, 3) + u.name;
  }
  return "";
}

std::string bytes_text(double bytes) {
  static constexpr const char* kNames[] = {" B", " KiB", " MiB", " GiB", " TiB"};
  int unit = 0;
  while (bytes >= 1023.5 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  const bool whole = bytes == std::floor(bytes);
  return (whole ? print("%.*f", 0, bytes) : significant(bytes, 3)) + kNames[unit];
}

std::string percent_text(double part) {
  if (part > 0 && part < 1e-5) return "< 0.001 %";
  return significant(100 * part, part >= 0.995 ? 3 : 2) + " %";
}

std::string error_text(double error) { return error == 0 ? "0" : print("%.*e", 1, error); }

std::string count_text(double count) {
  if (count >= 1e6) return significant(count / 1048576, 3) + "M";
  const double thousands = count / 1024;
  if (count >= 8192 && thousands == std::floor(thousands)) return print("%.*f", 0, thousands) + "k";
  return print("%.*f", 0, count);
}

std::string html_escape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

}  // namespace linnet::report
