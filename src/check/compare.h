// compare: the two metrics of the project, RMS error / RMS reference and largest error / largest reference, and the rules
// around them. The numbers stand in core/tolerance.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/tolerance.h"

namespace linnet::check {

struct Gate {
  double rms = 0;             // rms_gate(...)
  double epsilon = 0;         // of the call's dtype
  double scale = 1;           // the largest magnitude among the call's inputs and incoming gradients, at least 1
  double least = 0;           // logarithms: errors are relative to at least 1, since log(1 + x) has the rounding of 1
  double terms = 1;           // multiply-adds for one element: the rounding of a sum that cancels grows with their root
  Dtype stored = Dtype::f64;  // type of the tensor: values beyond its range become infinite, and each is rounded to it
};

struct Comparison {
  double rms = 0, max = 0;            // errors as gated
  double rms_gate = 0, max_gate = 0;  // what they may be
  bool ok = true;
  std::string note;  // the first element that is wrong in kind, or why other gates hold
  // The larger of the errors as a share of its gate: above 1 is a failure.
  double share() const;
};

// A reference that is -inf, +inf or NaN must be met exactly and in place. A reference that is everywhere small against the
// call's scale is all cancellation: its errors are then relative to the scale.
Comparison compare(const std::vector<double>& got, const std::vector<double>& want, const std::vector<int64_t>& size,
                   const Gate& gate);
// Integers: equal or not.
Comparison compare_exact(const std::vector<double>& got, const std::vector<double>& want, const std::vector<int64_t>& size);

// "[1, 5, 0]": the place of element `index` in row-major order.
std::string place_text(int64_t index, const std::vector<int64_t>& size);

}  // namespace linnet::check
