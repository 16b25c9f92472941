// Pictures of matrices and of numbers in the plane, as SVG text: no script, colours by class (chart.h has the style sheet).
#pragma once

#include <complex>
#include <cstdint>
#include <string>
#include <vector>

namespace linnet::report {

// A matrix as squares: the stronger the larger, one colour for each sign. Larger ones than `cells` a side are shown by the
// entry of the largest magnitude in each square of entries.
struct MatrixPicture {
  std::string name;  // read aloud instead of the picture
  int64_t rows = 0, cols = 0;
  const double* values = nullptr;  // row-major
  int64_t cells = 48;
};
std::string draw(const MatrixPicture& picture);

// Points in the complex plane with the unit circle. At most `kMost` of each group are drawn, evenly taken.
struct PlanePicture {
  std::string name;
  std::vector<std::pair<std::string, std::vector<std::complex<double>>>> groups;
  static constexpr size_t kMost = 1500;
};
std::string draw(const PlanePicture& picture);

}  // namespace linnet::report
