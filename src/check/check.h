// check: runs an implementation against the reference and judges every tensor, for `linnet check` and for the tests.
//
//   Result result;
//   ASSERT_TRUE(run_line("softmax B=2 Tq=65 Tk=65 H=4 Hkv=2 causal=1 dtype=bf16 pass=bwd", &result).ok());
//   EXPECT_TRUE(result.ok()) << result.text();
//
// The implementation runs on the inputs as rounded to the dtype, with a workspace full of NaN and canaries around every buffer;
// the reference runs in f64 on the same rounded inputs, its backward on the results that the implementation saved. A second run
// with another number of threads, and one row of the batch computed alone, must agree bit by bit. In a causal call NaN in one
// token must leave the bits of every earlier row.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "check/case.h"
#include "check/compare.h"
#include "check/execute.h"

namespace linnet::check {

struct TensorResult {
  std::string name;
  Pass pass = Pass::forward;
  Comparison comparison;
};

struct Result {
  std::string what;  // the case's line, or the file
  Dtype dtype = Dtype::none;
  std::string impl;
  std::vector<TensorResult> tensors;
  std::vector<std::string> faults;     // memory damaged, runs that differ
  std::vector<std::string> unchecked;  // tensors of a file that the operator does not know

  bool ok() const;
  std::string text() const;  // what failed, line by line
};

// Whether an implementation refused the call (choose_impl), as opposed to one that was tried and failed.
bool is_refusal(const Status& status);

// A failed status means that the case could not be run; a check that failed is in the result.
Status run_case(const Case& c, Result* result);
Status run_line(std::string_view line, Result* result);

// The pieces, for tests of the engine itself.
Status check_problem(const Problem& problem, const Setting& setting, Result* result);
void judge(const Problem& problem, const Execution& reference, const std::vector<Array>& want, const std::vector<Array>& got,
           Against against, Result* result);

}  // namespace linnet::check
