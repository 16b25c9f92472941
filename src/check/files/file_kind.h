// FileKind: vector files that hold no call of an operator: a layer, a task, a piece of theory. A kind says which files are its
// own and checks one of them in one dtype; file_kinds.h lists the kinds. Files of operators need none (vectors.h).
//
//   Status run_mine(const SafetensorsFile& file, Dtype dtype, const Setting& setting, Result* result) {
//     Stored stored(file, result);
//     LINNET_TRY(stored.numbers("Sx", &Sx));                            // an input
//     stored.expect("loss", loss, {6}, rms_gate(dtype, Pass::forward, Against::vectors, false, 0));
//     return stored.finish();                                           // what was neither read nor compared is named
//   }
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "check/check.h"
#include "core/files/safetensors.h"

namespace linnet::check {

struct FileKind {
  std::string name;  // stands where the implementation of an operator stands
  bool (*takes)(std::string_view mechanism, std::string_view operation) = nullptr;
  bool exact_only = false;  // has one answer, in f64: no other dtype is run
  // A failed status: the file cannot be understood; its sentence begins with the path. A check that failed is in the result.
  Status (*run)(const SafetensorsFile& file, Dtype dtype, const Setting& setting, Result* result) = nullptr;
};

// The kind whose file this is; null: a call of an operator.
const FileKind* find_file_kind(std::string_view mechanism, std::string_view operation);

// The tensors and metadata of a file on one side, what was computed on the other.
class Stored {
 public:
  Stored(const SafetensorsFile& file, Result* result) : file_(file), result_(result) {}
  bool has(const std::string& name) const { return file_.has(name); }
  // Inputs. `shape` may be null.
  Status numbers(const std::string& name, std::vector<double>* values, std::vector<int64_t>* shape = nullptr);
  Status integers(const std::string& name, std::vector<int64_t>* values, std::vector<int64_t>* shape = nullptr);
  // The metadata; *value keeps its default when the key is absent.
  Status real(const std::string& key, double* value) const;
  Status integer(const std::string& key, int64_t low, int64_t high, int64_t* value) const;
  // Compares a stored tensor, if there is one; a shape that differs is a failed check. gate 0: equal or not.
  Status expect(const std::string& name, const std::vector<double>& got, const std::vector<int64_t>& shape, double gate,
                Pass pass = Pass::forward);
  Status expect(const std::string& name, const std::vector<int64_t>& got, const std::vector<int64_t>& shape);
  // The same for metadata.
  Status expect_real(const std::string& key, double got, double gate);
  void expect_text(const std::string& key, const std::string& got);
  // Fails when nothing was compared.
  Status finish();
  Status error(const std::string& sentence) const { return bad_input(file_.path() + ": " + sentence); }

 private:
  void add(const std::string& name, Pass pass, Comparison comparison);

  const SafetensorsFile& file_;
  Result* result_;
  std::vector<std::string> used_;
};

}  // namespace linnet::check
