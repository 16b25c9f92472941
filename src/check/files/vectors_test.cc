#include "check/files/vectors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/files/safetensors.h"

namespace linnet::check {
namespace {

namespace fs = std::filesystem;
const fs::path kVectors = fs::path(LINNET_SOURCE_DIR) / "tests/vectors";
constexpr Dtype kDtypes[] = {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16};

// Values on the way that a page names and no operator returns.
bool intermediate(std::string_view file, std::string_view tensor) {
  static constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"delta-chunks", " T U W attention new states "},
      {"recurrence-segments", " A0 A1 A2 S0 S1 S2 "},
      {"metala-map", " map "},
      {"h3-heads", " bk bo bq bv layer_out u wk wo wq wv "},
  };
  for (const auto& [stem, names] : kNames) {
    if (file.starts_with(stem) && names.find(" " + std::string(tensor) + " ") != std::string_view::npos) return true;
  }
  return false;
}

// Every file of a mechanism that exists passes in every dtype and in every implementation that runs here.
TEST(Vectors, FilesPass) {
  int checked = 0;
  for (const auto& entry : fs::directory_iterator(kVectors)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::vector<VectorFile> files;
    const Status status = load_vectors(entry.path().string(), &files);
    ASSERT_TRUE(status.ok()) << status.message();
    for (const VectorFile& file : files) {
      if (!file.missing.empty()) continue;
      if (file.kind != nullptr) {
        for (const Dtype dtype : kDtypes) {
          if (file.kind->exact_only && dtype != Dtype::f64) continue;
          Result result;
          const Status ran = run_vectors(file, dtype, {.threads = 2}, &result);
          ASSERT_TRUE(ran.ok()) << ran.message();
          EXPECT_TRUE(result.ok()) << result.text();
          for (const std::string& name : result.unchecked)
            EXPECT_TRUE(intermediate(file.name, name)) << file.name << ": " << name;
          ++checked;
        }
        continue;
      }
      for (const std::string& name : file.unchecked) EXPECT_TRUE(intermediate(file.name, name)) << file.name << ": " << name;
      for (const Impl& impl : file.problem.op->impls) {
        if (!impl.missing().empty()) continue;
        for (const Dtype dtype : kDtypes) {
          Result result;
          const Status ran = run_vectors(file, dtype, {.impl = impl.name, .threads = 2, .device = impl.device}, &result);
          if (impl.device == Device::cuda && is_refusal(ran)) continue;  // its kernels have no f64, among others
          ASSERT_TRUE(ran.ok()) << ran.message();
          EXPECT_TRUE(result.ok()) << result.text();
          EXPECT_EQ(result.tensors.size(),
                    dtype == Dtype::f64 ? file.stored.size() : file.problem.outputs.size() + file.problem.gradients.size());
          ++checked;
        }
      }
    }
  }
  EXPECT_GE(checked, 9 * 4);
}

// The only call of a file.
Status load_vectors(const std::string& path, VectorFile* file) {
  std::vector<VectorFile> files;
  LINNET_TRY(load_vectors(path, &files));
  *file = files.front();
  return {};
}

class Written {
 public:
  Written() : path_(fs::temp_directory_path() / ("linnet-vectors-" + std::to_string(getpid()) + ".safetensors")) {}
  ~Written() { fs::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
};

using Metadata = std::vector<std::pair<std::string, std::string>>;

// q, k, v [1, 2, 1, 2] of softmax, with one thing wrong.
TEST(Vectors, BadFiles) {
  const std::vector<double> eight(8, 0.5);
  const std::vector<int64_t> integers(8, 1);
  const std::vector<int64_t> shape = {1, 2, 1, 2};
  const SafetensorsTensor q{"q", "F64", shape, eight.data()}, k{"k", "F64", shape, eight.data()},
      v{"v", "F64", shape, eight.data()};
  const SafetensorsTensor whole_q{"q", "I64", shape, integers.data()}, wide_k{"k", "F64", {1, 1, 1, 4}, eight.data()};
  const SafetensorsTensor float_len{"key_len", "F64", {1}, eight.data()},
      deep{"q", "F64", {1, 1, 1, 1, 1, 1, 1, 1, 2}, eight.data()};
  const Metadata softmax = {{"mechanism", "softmax"}, {"operator", "attention"}};
  const auto with = [](Metadata metadata, const char* key, const char* value) {
    metadata.emplace_back(key, value);
    return metadata;
  };
  const struct {
    std::vector<SafetensorsTensor> tensors;
    Metadata metadata;
    const char* says;
  } table[] = {
      {{q, k, v}, {}, "its metadata has no mechanism"},
      {{q, k, v}, {{"mechanism", "softmax"}}, "its metadata has no operator"},
      {{q, k, v}, with(softmax, "temperature", "2"), "softmax: there is no option 'temperature'"},
      {{q, k, v}, with(softmax, "causal", "2"), "softmax: causal is '2', expected 0 or 1"},
      {{k, v}, softmax, "softmax: q is missing"},
      {{whole_q, k, v}, softmax, "q is I64, expected floats"},
      {{q, k, v, float_len}, softmax, "key_len is F64, expected integers"},
      {{q, wide_k, v}, softmax, "softmax: k has 4 channels"},
      {{deep, k, v}, softmax, "q has rank 9, expected at most 8"},
  };
  for (const auto& row : table) {
    const Written file;
    ASSERT_TRUE(write_safetensors(file.path(), row.tensors, row.metadata).ok());
    VectorFile vectors;
    Result result;
    Status status = load_vectors(file.path(), &vectors);
    if (status.ok()) status = run_vectors(vectors, Dtype::f64, {}, &result);
    EXPECT_EQ(status.code(), Code::bad_input) << row.says;
    EXPECT_NE(status.message().find(row.says), std::string::npos) << status.message();
    EXPECT_EQ(status.message().rfind(file.path() + ": ", 0), 0) << status.message();
  }
  VectorFile vectors;
  EXPECT_EQ(load_vectors("/nonexistent/x.safetensors", &vectors).code(), Code::bad_input);
}

// A stored result that differs fails, a tensor that nobody declares is named, an operator that does not exist is told apart.
TEST(Vectors, WrongResultsFail) {
  VectorFile file;
  ASSERT_TRUE(load_vectors((kVectors / "softmax-full.safetensors").string(), &file).ok());
  Result result;
  for (Array& array : file.stored) {
    const double kept = array.values[5];
    array.values[5] += array.name[0] == 'd' ? 1e-3 : 1e-6;
    ASSERT_TRUE(run_vectors(file, Dtype::f64, {}, &result).ok());
    EXPECT_FALSE(result.ok()) << array.name;
    EXPECT_NE(result.text().find("\n  " + array.name + ": rms"), std::string::npos) << result.text();
    array.values[5] = kept;
  }
  ASSERT_TRUE(run_vectors(file, Dtype::f64, {}, &result).ok());
  EXPECT_TRUE(result.ok());

  const std::vector<double> values(8, 0.5);
  const std::vector<int64_t> shape = {1, 2, 1, 2};
  std::vector<SafetensorsTensor> tensors;
  for (const char* name : {"q", "k", "v", "extra"}) tensors.push_back({name, "F64", shape, values.data()});
  const Written written;
  ASSERT_TRUE(write_safetensors(written.path(), tensors, {{"mechanism", "softmax"}, {"operator", "attention"}}).ok());
  ASSERT_TRUE(load_vectors(written.path(), &file).ok());
  EXPECT_EQ(file.unchecked, std::vector<std::string>{"extra"});
  ASSERT_TRUE(write_safetensors(written.path(), tensors, {{"mechanism", "softmax"}, {"operator", "folded"}}).ok());
  ASSERT_TRUE(load_vectors(written.path(), &file).ok());
  EXPECT_EQ(file.missing, "no operator 'softmax_folded' in this build");
  ASSERT_TRUE(write_safetensors(written.path(), tensors, {{"mechanism", "harmonium"}, {"operator", "attention"}}).ok());
  ASSERT_TRUE(load_vectors(written.path(), &file).ok());
  EXPECT_EQ(file.missing, "no mechanism 'harmonium' in this build");
}

}  // namespace
}  // namespace linnet::check
