// execute(): one problem through one implementation, in guarded memory.
#pragma once

#include <string>
#include <vector>

#include "check/problem.h"

namespace linnet::check {

// How to execute a problem.
struct Setting {
  bool as_reference = false;  // all floats in f64
  // The backward of the reference reads these results of the forward instead of its own: what an implementation saves is
  // rounded to its dtype, and that alone can cost more than the gate (one visible key: a gradient that cancels but for `out`).
  const std::vector<Array>* saved = nullptr;
  std::string impl;  // empty: the best on the device
  int threads = 1;
  bool strided = false;
  uint64_t seed = 1;  // of the strides
  Device device = Device::cpu;
};

struct Execution {
  std::vector<Array> results;       // outputs, overwritten inputs, gradients
  std::vector<std::string> faults;  // memory that was touched and should not have been
  double largest_logit = 0;         // of a reference run with exponential weights
  double flops[2] = {};             // of forward and backward, where the operator knows it
  std::string impl;                 // that ran
};

Status execute(const Problem& problem, const Setting& setting, Execution* execution);

}  // namespace linnet::check
