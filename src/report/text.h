// Numbers and names as a reader meets them, in the terminal and in pages.
//
//   time_text(0.00123)  "1.23 ms"     bytes_text(67108864)  "64 MiB"     percent_text(0.0734)  "7.3 %"
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace linnet::report {

std::string significant(double x, int digits);  // 0.00123 with 2 digits: "0.0012"; never an exponent between 1e-5 and 1e7
std::string time_text(double seconds);          // three digits and ns, us, ms or s
std::string bytes_text(double bytes);           // three digits and B, KiB, MiB, GiB
std::string percent_text(double part);          // two digits: "83 %", "7.3 %", "< 0.001 %"
std::string error_text(double error);           // "3.4e-07"
std::string count_text(double count);           // "4096", "64k", "1.5M"
std::string html_escape(std::string_view text);

}  // namespace linnet::report
