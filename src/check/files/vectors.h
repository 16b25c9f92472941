// vectors: files that hold the inputs, results and gradients of one call in float64 (tests/vectors/README.md), checked in any
// dtype: f64 against the stored tensors, the others against the reference in double on the rounded inputs.
#pragma once

#include <string>
#include <vector>

#include "check/files/file_kind.h"

namespace linnet::check {

struct VectorFile {
  std::string path, name;              // name: without folders; of a file of many calls with that of the call
  std::string missing;                 // why it cannot be checked in this build, in words; empty: it can
  const FileKind* kind = nullptr;      // of a file that holds no call: what follows is empty
  Problem problem;                     // in f64
  std::vector<Array> stored;           // results to compare with
  std::vector<std::string> unchecked;  // tensors that the operator does not declare
};

// The calls that a file holds: one, or one per feature map. A failed status says what is wrong with the file. A mechanism that
// this build lacks is no failure: see `missing`.
Status load_vectors(const std::string& path, std::vector<VectorFile>* files);
Status run_vectors(const VectorFile& file, Dtype dtype, const Setting& setting, Result* result);

}  // namespace linnet::check
