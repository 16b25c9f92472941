#include "check/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "core/half.h"

namespace linnet::check {
namespace {

double largest_finite(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return std::numeric_limits<float>::max();
    case Dtype::bf16: return 0x1.fep127;
    case Dtype::f16: return 65504;
    default: return std::numeric_limits<double>::max();
  }
}

std::string text(double x) {
  if (std::isnan(x)) return "nan";  // printf writes the sign of a NaN too
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.6g", x);
  return buffer;
}

std::string element_text(int64_t index, const std::vector<int64_t>& size, double got, double want) {
  return place_text(index, size) + " is " + text(got) + ", expected " + text(want);
}

// What storing x costs.
double rounding_of(double x, Dtype dtype) {
  if (dtype != Dtype::f16 && dtype != Dtype::bf16) return 0;
  alignas(8) char cell[8];
  store_f64(cell, dtype, 0, x);
  const double error = load_f64(cell, dtype, 0) - x;
  return std::isfinite(error) ? error : 0;
}

double ratio(double error, double reference) { return error == 0 ? 0 : error / reference; }  // x / 0 = inf

}  // namespace

std::string place_text(int64_t index, const std::vector<int64_t>& size) {
  std::string place;
  for (size_t d = size.size(); d-- > 0;) {
    place = std::to_string(index % size[d]) + (place.empty() ? "" : ", ") + place;
    index /= size[d];
  }
  return "[" + place + "]";
}

double Comparison::share() const {
  if (!ok && rms <= rms_gate && max <= max_gate) return HUGE_VAL;  // wrong in kind
  const double a = rms == 0 ? 0 : rms / rms_gate, b = max == 0 ? 0 : max / max_gate;
  return std::max(a, b);
}

Comparison compare(const std::vector<double>& got, const std::vector<double>& want, const std::vector<int64_t>& size,
                   const Gate& gate) {
  Comparison result;
  double error_squares = 0, reference_squares = 0, largest_error = 0, largest_reference = 0, rounding_squares = 0;
  int64_t counted = 0;
  const double range = 0.99 * largest_finite(gate.stored);
  for (size_t i = 0; i < want.size(); ++i) {
    const double w = want[i], g = got[i];
    const bool beyond = std::isfinite(w) && std::abs(w) > range;  // may round to infinity
    if (!std::isfinite(w) || (beyond && !std::isfinite(g))) {
      const bool same = std::isnan(w) ? std::isnan(g) : std::isinf(g) && std::signbit(g) == std::signbit(w);
      if (same) continue;
    }
    if (std::isfinite(w) && std::isfinite(g)) {
      error_squares += (g - w) * (g - w);
      reference_squares += w * w;
      rounding_squares += rounding_of(w, gate.stored) * rounding_of(w, gate.stored);
      largest_error = std::max(largest_error, std::abs(g - w));
      largest_reference = std::max(largest_reference, std::abs(w));
      ++counted;
      continue;
    }
    if (result.ok) result.note = element_text(static_cast<int64_t>(i), size, g, w);
    result.ok = false;
  }
  const double rms_error = counted == 0 ? 0 : std::sqrt(error_squares / static_cast<double>(counted));
  const double rms_reference = counted == 0 ? 0 : std::sqrt(reference_squares / static_cast<double>(counted));
  result.rms = ratio(rms_error, std::max(rms_reference, gate.least));
  result.max = ratio(largest_error, std::max(largest_reference, gate.least));
  // Of few numbers the rounding of the right result to its type alone may exceed the gate.
  const double rounding = counted == 0 ? 0 : std::sqrt(rounding_squares / static_cast<double>(counted));
  result.rms_gate = std::max(gate.rms, kOverRounding * ratio(rounding, std::max(rms_reference, gate.least)));
  result.max_gate = max_gate(gate.rms);
  const bool exact = result.rms <= result.rms_gate && result.max <= result.max_gate;
  if (!exact && largest_reference < kCancelled * gate.scale) {
    result.rms = rms_error / gate.scale;
    result.max = largest_error / gate.scale;
    result.rms_gate = result.max_gate = cancelled_gate(gate.epsilon, gate.terms);
    if (result.note.empty()) result.note = "small: errors relative to the scale " + text(gate.scale);
  }
  result.ok = result.ok && result.rms <= result.rms_gate && result.max <= result.max_gate;
  return result;
}

Comparison compare_exact(const std::vector<double>& got, const std::vector<double>& want, const std::vector<int64_t>& size) {
  Comparison result;
  for (size_t i = 0; i < want.size() && result.ok; ++i) {
    if (got[i] == want[i]) continue;
    result.ok = false;
    result.note = element_text(static_cast<int64_t>(i), size, got[i], want[i]);
  }
  return result;
}

}  // namespace linnet::check
