// Weights: the tensors of a model's files, and the parameters of its records bound to them.
//
//   WeightFiles files;
//   LINNET_TRY(WeightFiles::open("model", files));                   // a folder with safetensors, or a GGUF file
//   Weights weights;
//   LINNET_TRY(weights.load(files, description, {&body.record(), &head.record()}, "q8", executor));
//   LINNET_TRY(weights.bind(body));
//
// Matrices that may stay as they lie are bound to the mapped file. Quantised ones (Q8_0, Q4_0, Q4_1) are moved into the panels
// of dense_quantised, which changes no number. Everything else is converted into memory of its own.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/executor.h"
#include "core/files/safetensors_model.h"
#include "core/status.h"
#include "layers/runner.h"
#include "runtime/description.h"
#include "runtime/files/gguf.h"
#include "runtime/files/mapped_file.h"

namespace linnet {

// A tensor in a mapped file.
struct FileTensor {
  std::string name, path;
  std::vector<int64_t> shape;
  GgufType type = GgufType::f32;  // of a safetensors file: f32, f16 or bf16
  bool f64 = false;               // ... or this
  const unsigned char* data = nullptr;
  uint64_t bytes = 0;
  int64_t elements() const;
};

// Rows that the file's tensor has for our `rows`, those of all experts where they lie in one tensor.
int64_t source_rows(const NameRule& rule, int64_t rows);
// Where row r of our `rows` lies in the file's tensor. Permuted heads: pair i of a head lies at 2 i and 2 i + 1 there, at i and
// i + K / 2 here. `expert`: whose rows they are, where experts lie in one tensor.
int64_t source_row(const NameRule& rule, int64_t row, int64_t rows, int64_t expert = 0);

class WeightFiles {
 public:
  static Status open(const std::string& path, WeightFiles& out);
  bool is_gguf() const { return gguf_ != nullptr; }
  const GgufFile* gguf() const { return gguf_.get(); }
  const FileTensor* find(const std::string& name) const;
  const std::map<std::string, FileTensor>& all() const { return tensors_; }
  uint64_t bytes() const;

 private:
  std::unique_ptr<GgufFile> gguf_;
  std::vector<MappedFile> files_;
  std::map<std::string, FileTensor> tensors_;
};

class Weights {
 public:
  // `kind`: f32, bf16, q8, q4 or empty (as in the file).
  Status load(const WeightFiles& files, const Description& d, const std::vector<const layers::Record*>& records,
              const std::string& kind, Executor& executor);
  Status bind(layers::Runner& runner) const;
  bool has(const std::string& name) const { return bound_.count(name) != 0; }
  Status bind(layers::Runner& runner, const std::string& name) const;
  View view(const std::string& name) const;  // absent where there is none, or where it is quantised

  int64_t bytes() const { return bytes_; }
  uint64_t fingerprint() const { return fingerprint_; }
  const std::string& kinds() const { return kinds_; }                     // of the matrices: "q4 + q8"
  const std::vector<std::string>& warnings() const { return warnings_; }  // tensors that nobody reads

 private:
  struct Bound;
  struct Memory {
    std::unique_ptr<char[]> bytes;
    char* at = nullptr;  // on a line of the cache
  };
  Status load_one(const WeightFiles& files, const Description& d, const std::string& prefix, const layers::Parameter& parameter,
                  const std::string& kind, Bound& bound) const;

  std::map<std::string, std::shared_ptr<Bound>> bound_;
  int64_t bytes_ = 0;
  uint64_t fingerprint_ = 0;
  std::string kinds_;
  std::vector<std::string> warnings_;
};

}  // namespace linnet
