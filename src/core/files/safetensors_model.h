// A model directory: `model.safetensors`, or shards listed by `model.safetensors.index.json`.
//
//   SafetensorsModel model;
//   LINNET_TRY(SafetensorsModel::open("gpt2", model));
//   if (const SafetensorsFile* file = model.file_of("wte.weight")) LINNET_TRY(file->read_f64("wte.weight", values));
//
// The index is {"metadata": {"total_size": n}, "weight_map": {tensor: file}}. It may name only plain files of its own
// directory; every tensor it maps must be in that file, and no tensor in two files. The index itself has at most
// kMaxIndexBytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/files/safetensors.h"
#include "core/status.h"

namespace linnet {

inline constexpr uint64_t kMaxIndexBytes = uint64_t{16} << 20;

class SafetensorsModel {
 public:
  static Status open(const std::string& directory, SafetensorsModel& out);
  size_t size() const { return order_.size(); }
  std::vector<std::string> names() const;  // sorted by bytes
  const std::vector<SafetensorsFile>& files() const { return files_; }
  // The file that holds the tensor, for find() and read_*(); null when none does.
  const SafetensorsFile* file_of(std::string_view name) const;
  const std::vector<std::string>& warnings() const { return warnings_; }  // what is odd but does no harm

 private:
  struct Place {
    uint32_t file, tensor;
  };
  Status open_checked(const std::string& directory);
  Status open_index(const std::string& directory, const std::string& index);
  Status open_shard(const std::string& directory, const std::string& index, const std::string& name);
  Status check_map(const JsonValue& root, const std::string& index, const std::vector<uint32_t>& file_of_member);
  JsonValue name_value(const Place& p) const { return files_[p.file].name_value(p.tensor); }
  size_t lower_bound(std::string_view name) const;
  Status merge();  // fills order_

  std::vector<SafetensorsFile> files_;
  std::vector<Place> order_;  // of all tensors, sorted by name
  std::vector<std::string> warnings_;
};

}  // namespace linnet
