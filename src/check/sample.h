// sample: random cases of an operator, drawn from its declaration, and a failing one made smaller.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "check/case.h"
#include "check/random.h"

namespace linnet::check {

struct Sampling {
  std::vector<Dtype> dtypes = {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16};
  std::vector<std::string> impls;        // empty: each that runs here, the reference rarely
  int threads = 0;                       // 0: 1, 2, 3, 4, 7, 8 or 16
  bool forward = true, backward = true;  // passes to draw
  Cost cost = {2e7, 4e6};                // of a usual case; one in twenty may have ten times that
};

// Sizes favour the edges: 0, 1, around 16, 32, 64 and 128, primes, sometimes thousands. The operator accepts what is returned;
// a failed status says that nothing it accepts was found.
Status sample_case(const Op& op, Random& random, const Sampling& sampling, Case* c);

// The smallest case found that still fails: extras dropped, then sizes reduced, at most `tries` runs of `fails`.
Case shrink(const Case& c, const std::function<bool(const Case&)>& fails, int tries);

}  // namespace linnet::check
