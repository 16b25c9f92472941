// checkpoint: a converted model written as a folder: config.json with the section "linnet", model.safetensors, and the source's
// tokeniser and other small files.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/status.h"
#include "runtime/layered.h"

namespace linnet::convert {

struct NewTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
};
using NewTensors = std::map<std::string, NewTensor>;  // by their names in the file

struct CheckpointFacts {
  std::string plan_sha256;
  std::map<std::string, std::string> sources;  // file name: SHA-256
  int64_t seed = 0;
};

// The same tensors with other layers: hard links beside another config.json, for a look at parts of a model.
Status link_checkpoint(const std::string& from, const std::vector<ConvertedLayer>& layers, const std::string& to);
// `folder` exists and is empty. Tensors of the source keep name, type and bytes unless `tensors` has one of that name.
Status write_checkpoint(const LayeredModel& source, const std::string& source_path, const std::vector<ConvertedLayer>& layers,
                        const NewTensors& tensors, const CheckpointFacts& facts, const std::string& folder);
// The files whose hashes name a source: weights, config, tokeniser.
std::vector<std::string> source_files(const std::string& path);
// Bytes that the written folder will take.
uint64_t checkpoint_bytes(const LayeredModel& source);
// All to the disk, the folder's entries too.
Status sync_folder(const std::string& folder);

}  // namespace linnet::convert
