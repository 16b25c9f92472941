// Every tolerance of the project, once. Tests, `linnet check` and the Python tests read them from here.
//
// Two metrics, both gated: RMS error / RMS reference <= rms, and max error / max reference <= 20 rms.
// Low precision is compared with the reference run in double on the inputs as rounded to that type.
#pragma once

#include "args.h"

namespace linnet {

enum class Against { reference, vectors };  // the reference of this project, or stored vector files

inline constexpr double kMaxOverRms = 20;
inline constexpr double kCancelled = 1e-4;  // a reference everywhere below this part of the call's scale is all cancellation,
inline constexpr double kCancelledEpsilons =
    16;                                        // and passes when its largest error is below this many eps of the type x scale,
inline constexpr double kCancelledTerms = 64;  // times sqrt(terms / this) where an element sums more terms than this

// The RMS gate. `growing`: a state that only grows (ungated sums). `largest_logit`: of exponential weights, 0 for others.
inline double rms_gate(Dtype dtype, Pass pass, Against against, bool growing, double largest_logit) {
  const bool forward = pass == Pass::forward;
  double gate = 0;
  switch (dtype) {
    case Dtype::f64: gate = against == Against::vectors ? (forward ? 1e-10 : 1e-7) : (forward ? 1e-12 : 1e-11); break;
    case Dtype::f32: gate = forward ? (growing ? 2e-6 : 1e-6) : 1e-5; break;
    case Dtype::f16: gate = forward ? 5e-4 : 1.5e-3; break;  // 3e-4 where no matrix unit rounds intermediates
    case Dtype::bf16: gate = forward ? 4e-3 : 8e-3; break;   // 2.5e-3 likewise
    default: return 0;
  }
  return gate * (1 + largest_logit / 32);
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
