// Every tolerance of the project, once. Tests, `linnet check` and the Python tests read them from here.
//
// Two metrics, both gated: RMS error / RMS reference <= rms, and max error / max reference <= 20 rms, at most one half.
// Low precision is compared with the reference run in double on the inputs as rounded to that type.
#pragma once

#include <cmath>

#include "args.h"

namespace linnet {

enum class Against { reference, vectors };  // the reference of this project, or stored vector files

// What a kernel does with its intermediate values in f16 and bf16. Named per implementation (Impl::rounding).
enum class Rounding {
  none,          // intermediates stay in f32: only the inputs and the result are of the type
  matrix_units,  // weights or states are rounded to the type before they enter a matrix unit
};

inline constexpr double kMaxOverRms = 20;
inline constexpr double kLogits =
    32;  // exponential weights: gates grow by 1 + the largest logit / this, since digits are lost,
inline constexpr double kLargestRms = 0.1;  // but no RMS gate grows beyond this part of the reference, whatever the logits are,
inline constexpr double kLargestMax = 0.5;  // and no gate of the largest error beyond this part of the largest value
// Of a tensor of few numbers the rounding of the exact result to f16 or bf16 may exceed the RMS gate, which is that of many:
// the gate is then this many times that rounding, 5e-4 and 4e-3 at most.
inline constexpr double kOverRounding = 1.05;
inline constexpr double kCancelled = 1e-4;  // a reference everywhere below this part of the call's scale is all cancellation,
inline constexpr double kCancelledEpsilons =
    16;                                         // and passes when its largest error is below this many eps of the type x scale,
inline constexpr double kCancelledTerms = 64;   // times sqrt(terms / this) where an element sums more terms than this,
inline constexpr double kCancelledMost = 1e-4;  // but never when its largest error is above this part of the scale

// The RMS gate. `growing`: a state that only grows (ungated sums). `largest_logit`: of exponential weights, 0 for others.
inline double rms_gate(Dtype dtype, Pass pass, Against against, bool growing, double largest_logit,
                       Rounding rounding = Rounding::none) {
  const bool forward = pass == Pass::forward, rounded = rounding == Rounding::matrix_units;
  double gate = 0;
  switch (dtype) {
    case Dtype::f64: gate = against == Against::vectors ? (forward ? 1e-10 : 1e-7) : (forward ? 1e-12 : 1e-11); break;
    case Dtype::f32: gate = forward ? (growing ? 2e-6 : 1e-6) : 1e-5; break;
    case Dtype::f16: gate = forward ? (rounded ? 5e-4 : 3e-4) : 1.5e-3; break;
    case Dtype::bf16: gate = forward ? (rounded ? 4e-3 : 2.5e-3) : 8e-3; break;
    default: return 0;
  }
  const double grown = gate * (1 + largest_logit / kLogits);
  return grown < kLargestRms ? grown : kLargestRms;
}

// The gate of the largest error. It follows the RMS gate up to half of the largest value: the largest element missing, or of
// the wrong sign, never passes.
inline double max_gate(double rms) {
  const double gate = kMaxOverRms * rms;
  return gate < kLargestMax ? gate : kLargestMax;
}

// The largest error of a tensor that is all cancellation, relative to the call's scale.
inline double cancelled_gate(double epsilon, double terms) {
  const double more = terms > kCancelledTerms ? std::sqrt(terms / kCancelledTerms) : 1;
  const double gate = kCancelledEpsilons * epsilon * more;
  return gate < kCancelledMost ? gate : kCancelledMost;
}

// RMS error of an ungated state after 32,768 tokens in f32, against the sums in double. One token repeated rounds the same way
// every time: chunks of 32 then leave up to 1e-5, and single steps 1e-4 to 3e-4, unless they are compensated.
inline constexpr double kLongChunked = 5e-6, kLongRepeated = 1e-5, kLongSteps = 1e-5, kLongCompensated = 1e-7;

// A mixer's dynamical system against the mixer itself (src/analysis), of max(1, the largest output).
inline constexpr double kSystemError = 1e-10;

// The largest error of the vector functions (src/simd/math.h) in units of the last place, on every instruction set.
struct UlpLimit {
  const char* function;
  double f32, f64;
};
inline constexpr UlpLimit kUlpLimits[] = {
    {"exp", 1.1, 1.1},      {"exp2_nonpositive", 1.3, 1.3}, {"expm1", 1.8, 2.0},    {"log", 0.9, 0.9},
    {"log1p", 1.6, 1.6},    {"sigmoid", 2.5, 2.5},          {"softplus", 1.8, 1.8}, {"tanh", 1.6, 1.6},
    {"sigmoid2", 2.5, 2.5}, {"decay_factor", 1.8, 2.0},     {"exp2", 1.3, 1.3},
};

inline double epsilon(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64: return 0x1p-52;
    case Dtype::f32: return 0x1p-23;
    case Dtype::f16: return 0x1p-10;
    case Dtype::bf16: return 0x1p-7;
    default: return 0;
  }
}

}  // namespace linnet
