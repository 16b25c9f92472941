#include "convert/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "core/files/file.h"
#include "core/files/json.h"
#include "core/files/safetensors_model.h"
#include "runtime/files/gguf_config.h"
#include "runtime/files/mapped_file.h"

namespace linnet::convert {

namespace fs = std::filesystem;

namespace {

constexpr uint64_t kMaxConfigBytes = uint64_t{16} << 20, kMaxSideBytes = uint64_t{64} << 20;

// The source's fields and the section, whatever was there before.
std::string with_section(const JsonValue& root, const std::string& section) {
  std::string text = "{\n";
  for (JsonItems items(root); items.next();) {
    if (items.key().equals("linnet")) continue;
    text += "  " + std::string(items.key().text()) + ": " + std::string(items.value().text()) + ",\n";
  }
  return text + "  \"linnet\": " + section + "\n}\n";
}

std::string section_text(const std::vector<ConvertedLayer>& layers, const CheckpointFacts& facts) {
  JsonWriter w;
  w.begin_object().member("format", 1).key("layers").begin_array();
  for (const ConvertedLayer& layer : layers) {
    if (layer.mechanism != "softmax") layer.write(w);
  }
  w.end_array().member("plan_sha256", facts.plan_sha256).key("source").begin_object();
  for (const auto& [file, hash] : facts.sources) w.member(file, hash);
  w.end_object().member("seed", facts.seed).end_object();
  return w.text();
}

bool is_side_file(const fs::path& path) {
  const std::string name = path.filename().string(), end = path.extension().string();
  if (name == "config.json" || name.ends_with(".safetensors.index.json") || name.starts_with("report.")) return false;
  return end == ".json" || end == ".txt" || end == ".jinja" || end == ".model";
}

Status copy_side_files(const std::string& from, const std::string& to) {
  std::error_code error;
  for (fs::recursive_directory_iterator it(from, error), end; !error && it != end; it.increment(error)) {
    if (it.depth() > 1) {
      it.disable_recursion_pending();
      continue;
    }
    if (!it->is_regular_file(error) || !is_side_file(it->path())) continue;
    const fs::path relative = fs::relative(it->path(), from, error), target = fs::path(to) / relative;
    fs::create_directories(target.parent_path(), error);
    std::string text;
    LINNET_TRY(read_file(it->path().string(), kMaxSideBytes, text));
    LINNET_TRY(write_file(target.string(), text));
  }
  return {};
}

Status write_folder(const std::string& source, const NewTensors& added, const std::string& folder) {
  SafetensorsModel model;
  LINNET_TRY(SafetensorsModel::open(source, model));
  std::vector<MappedFile> mapped(model.files().size());
  std::vector<SafetensorsTensor> tensors;
  for (size_t f = 0; f < mapped.size(); ++f) {
    const SafetensorsFile& file = model.files()[f];
    LINNET_TRY(MappedFile::open(file.path(), mapped[f]));
    uint64_t header = 0;
    if (mapped[f].size() < 8) return bad_input(file.path() + ": changed while it was read");
    std::memcpy(&header, mapped[f].data(), 8);
    for (size_t i = 0; i < file.size(); ++i) {
      const SafetensorsEntry entry = file.entry(i);
      if (header > mapped[f].size() - 8 || entry.end > mapped[f].size() - 8 - header) {
        return bad_input(file.path() + ": changed while it was read");
      }
      if (entry.name.rfind("linnet.layers.", 0) == 0 && added.count(entry.name) == 0) continue;  // of an older conversion
      const auto own = added.find(entry.name);
      if (own == added.end()) {
        tensors.push_back({entry.name, entry.dtype, entry.shape, mapped[f].data() + 8 + header + entry.begin});
      }
    }
  }
  for (const auto& [name, t] : added) tensors.push_back({name, "F32", t.shape, t.values.data()});
  return write_safetensors(folder + "/model.safetensors", tensors);
}

// Tensors of a GGUF file under the names, orders and shapes of the family's safetensors files.
Status write_gguf(const LayeredModel& source, const Description& d, const NewTensors& added, const std::string& folder) {
  struct Joined {
    std::vector<int64_t> shape;
    std::vector<float> values;
    const float* in_place = nullptr;
  };
  std::map<std::string, Joined> all;
  for (const auto& [name, shape] : source.tensors()) {
    std::string theirs;
    const NameRule* rule = find_name(d, name, &theirs);
    const View view = source.weight(name);
    if (rule == nullptr || !view.given() || view.dtype != Dtype::f32)
      return bad_input(d.family + ": " + name + " cannot be written");
    theirs = d.prefixes.front() + theirs;
    const float* from = static_cast<const float*>(view.data);
    const bool turned = rule->transposed && shape.size() == 2;
    Joined& t = all[theirs];
    t.shape = shape;
    t.shape[0] *= rule->parts;
    if (turned) std::swap(t.shape[0], t.shape[1]);
    if (!turned && rule->parts == 1) {
      t.in_place = from;
      continue;
    }
    const int64_t rows = shape[0], columns = view.elements() / rows;
    t.values.resize(static_cast<size_t>(view.elements() * rule->parts));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t row = rule->part * rows + r, at = turned ? c * rows * rule->parts + row : row * columns + c;
        t.values[static_cast<size_t>(at)] = from[r * columns + c];
      }
    }
  }
  std::vector<SafetensorsTensor> tensors;
  for (const auto& [name, t] : all) {
    if (added.count(name) == 0) tensors.push_back({name, "F32", t.shape, t.in_place != nullptr ? t.in_place : t.values.data()});
  }
  for (const auto& [name, t] : added) tensors.push_back({name, "F32", t.shape, t.values.data()});
  return write_safetensors(folder + "/model.safetensors", tensors);
}

}  // namespace

std::vector<std::string> source_files(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {path};
  std::vector<std::string> list;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    const bool wanted = name == "config.json" || name == "tokenizer.json" || name.ends_with(".safetensors") ||
                        name.ends_with(".safetensors.index.json");
    if (entry.is_regular_file(error) && wanted) list.push_back(entry.path().string());
  }
  std::sort(list.begin(), list.end());
  return list;
}

uint64_t checkpoint_bytes(const LayeredModel& source) {
  uint64_t bytes = uint64_t{64} << 20;
  if (!source.files().is_gguf()) return bytes + source.files().bytes();
  for (const auto& [name, shape] : source.tensors()) {
    uint64_t count = 4;
    for (const int64_t size : shape) count *= static_cast<uint64_t>(size);
    bytes += count;
  }
  return bytes;
}

Status sync_folder(const std::string& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0 || fsync(descriptor) != 0) {
    if (descriptor >= 0) close(descriptor);
    return impossible(folder + ": cannot be written to the disk: " + std::strerror(errno));
  }
  close(descriptor);
  return {};
}

Status write_checkpoint(const LayeredModel& source, const std::string& source_path, const std::vector<ConvertedLayer>& layers,
                        const NewTensors& tensors, const CheckpointFacts& facts, const std::string& folder) {
  std::string text;
  const bool gguf = source.files().is_gguf();
  if (gguf) {
    LINNET_TRY(gguf_config(*source.files().gguf(), text));
  } else {
    LINNET_TRY(read_file(source_path + "/config.json", kMaxConfigBytes, text));
  }
  JsonValue root;
  LINNET_TRY(parse_json(text, source_path, {}, root));
  LINNET_TRY(write_file(folder + "/config.json", with_section(root, section_text(layers, facts))));
  if (gguf) {
    std::string tokenizer, config;
    LINNET_TRY(gguf_tokenizer(*source.files().gguf(), tokenizer, config));
    LINNET_TRY(write_file(folder + "/tokenizer.json", tokenizer));
    LINNET_TRY(write_file(folder + "/tokenizer_config.json", config));
    Config parsed(root, source_path);
    Description d;
    LINNET_TRY(describe_model(parsed, d));
    JsonWriter w(2);
    w.begin_object();
    int64_t end = 0;
    if (source.files().gguf()->find("tokenizer.ggml.eos_token_id").integer(end)) w.member("eos_token_id", end);
    LINNET_TRY(write_file(folder + "/generation_config.json", w.end_object().text()));
    LINNET_TRY(write_gguf(source, d, tensors, folder));
  } else {
    LINNET_TRY(copy_side_files(source_path, folder));
    LINNET_TRY(write_folder(source_path, tensors, folder));
  }
  return sync_folder(folder);
}

Status link_checkpoint(const std::string& from, const std::vector<ConvertedLayer>& layers, const std::string& to) {
  std::error_code error;
  fs::remove_all(to, error);
  if (!fs::create_directory(to, error)) return impossible(to + ": cannot be made: " + error.message());
  for (fs::directory_iterator it(from, error), end; !error && it != end; it.increment(error)) {
    const fs::path name = it->path().filename();
    if (it->is_regular_file(error) && name != "config.json") fs::create_hard_link(it->path(), fs::path(to) / name, error);
  }
  if (error) return impossible(to + ": cannot be made: " + error.message());
  std::string text;
  JsonValue root;
  LINNET_TRY(read_file(from + "/config.json", kMaxConfigBytes, text));
  LINNET_TRY(parse_json(text, from, {}, root));
  return write_file(to + "/config.json", with_section(root, section_text(layers, {})));
}

}  // namespace linnet::convert
