// Problem: the inputs of one call as numbers, and what should be computed from them. Made from a Case (draw.h) or from a
// vector file; executed in any precision by any implementation (execute.h).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "check/case.h"
#include "core/call/call.h"

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

void round_values(Array* array);  // to array->dtype
const Array* find_array(const std::vector<Array>& arrays, std::string_view name);
int64_t product(const std::vector<int64_t>& size, size_t from = 0);  // of the sizes from this dimension on
std::vector<std::string> words_of(const std::string& shape);         // of a declared shape

// Calls use(value, at) for each element, `at` its coordinates by the `rank` words of the declared shape: -1 for leading
// dimensions that the array does not have.
template <class AnyArray, class Use>
void for_each(AnyArray& array, size_t rank, const Use& use) {
  const size_t missing = rank - array.size.size();
  std::vector<int64_t> at(rank, -1);
  for (size_t i = 0; i < array.values.size(); ++i) {
    auto rest = static_cast<int64_t>(i);
    for (size_t d = array.size.size(); d-- > 0;) {
      at[d + missing] = rest % array.size[d];
      rest /= array.size[d];
    }
    use(array.values[i], at);
  }
}

// The dimension of an array that counts batch rows, -1 when it has none (or is broadcast over them).
int batch_dimension(const Op& op, const Array& array, int64_t batch);
// Batch row `row` alone: the same problem with B = 1. False when there is nothing to take apart: packed, or B below 2.
bool take_batch_row(const Problem& problem, int64_t row, Problem* alone, int64_t* batch);
Array batch_row(const Array& array, int dimension, int64_t row);

}  // namespace linnet::check
