// Problem: the inputs of one call as numbers, and what should be computed from them. Made from a Case or from a vector file;
// executed in any precision by any implementation.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "check/case.h"
#include "core/call.h"
#include "core/cuda.h"

namespace linnet::check {

// The values of a tensor in row-major order. Doubles hold every dtype exactly (offsets stay below 2^53).
struct Array {
  std::string name;
  std::vector<int64_t> size;
  Dtype dtype = Dtype::f64;  // in which the implementation under test gets it; the values are already rounded to it
  std::vector<double> values;
};

struct Problem {
  const Op* op = nullptr;
  Dtype dtype = Dtype::f64;  // of the call
  std::vector<std::pair<std::string, std::string>> options;
  std::vector<Array> inputs;
  std::vector<Array> incoming;         // gradients of outputs: dout, ...
  std::vector<std::string> outputs;    // to compute in the forward
  std::vector<std::string> gradients;  // to compute in the backward; empty: no backward
};

// The problem a case stands for, with a sentence when the operator refuses it.
Status make_problem(const Case& c, Problem* problem);
// What every implementation says to the call of a case, on the CPU and on a GPU, in the order of Op::impls, forward first.
// Needs neither values nor a GPU: choosing looks at shapes, strides and addresses. strided=1: rows lie between multiples of 16
// bytes.
struct Choice {
  const Impl* impl = nullptr;
  Pass pass = Pass::forward;
  std::string reason;  // why it does not take the call; empty: it does
  bool chosen =
      false;  // the best that takes it on its device, LINNET_IMPL and LINNET_ISA obeyed; whether or not this machine has it
  int64_t workspace = 0;  // bytes, on a GPU
};
Status choices(const Case& c, std::vector<Choice>* list);
// The kernels that the call of a case launches on a GPU, forward and backward, without one: cuda::Recording.
Status launches(const Case& c, std::vector<cuda::Recorded>* list);

// Whether the operator accepts the case, without drawing its values; cost of the passes it runs, when the operator knows it.
Status accepts(const Case& c, Cost* cost);

void round_values(Array* array);  // to array->dtype
const Array* find_array(const std::vector<Array>& arrays, std::string_view name);

// The dimension of an array that counts batch rows, -1 when it has none (or is broadcast over them).
int batch_dimension(const Op& op, const Array& array, int64_t batch);
// Batch row `row` alone: the same problem with B = 1. False when there is nothing to take apart: packed, or B below 2.
bool take_batch_row(const Problem& problem, int64_t row, Problem* alone, int64_t* batch);
Array batch_row(const Array& array, int dimension, int64_t row);

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
