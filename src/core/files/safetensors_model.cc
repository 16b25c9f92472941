#include "core/files/safetensors_model.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>

#include "core/files/file.h"

namespace linnet {

using Kind = JsonValue::Kind;

Status SafetensorsModel::open(const std::string& directory, SafetensorsModel& out) {
  try {
    SafetensorsModel model;
    LINNET_TRY(model.open_checked(directory));
    out = std::move(model);
    return {};
  } catch (const std::bad_alloc&) {
    return impossible(directory + ": not enough memory for its tensors' names");
  }
}

Status SafetensorsModel::open_checked(const std::string& directory) {
  const std::string single = directory + "/model.safetensors", index = single + ".index.json";
  struct stat info = {};
  if (::stat(single.c_str(), &info) == 0) {
    LINNET_TRY(SafetensorsFile::open(single, files_.emplace_back()));
    return merge();
  }
  if (::stat(index.c_str(), &info) == 0) return open_index(directory, index);
  return bad_input(directory + ": holds neither model.safetensors nor model.safetensors.index.json");
}

// An index may name files in its own directory and nowhere else.
Status SafetensorsModel::open_shard(const std::string& directory, const std::string& index, const std::string& name) {
  const std::string where = index + ": file name " + json_quote_short(name), path = directory + "/" + name;
  if (!name.ends_with(".safetensors")) return bad_input(where + " does not end in .safetensors");
  const bool control = std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  if (control || name.find_first_of("/\\") != name.npos || name.find("..") != name.npos) {
    return bad_input(where + " is not a plain name of a file in the same directory");
  }
  const auto resolve = [](const std::string& link) {
    const std::unique_ptr<char, decltype(&std::free)> real(::realpath(link.c_str(), nullptr), &std::free);
    return std::string(real ? real.get() : "");
  };
  const std::string inside = resolve(directory), file = resolve(path);
  if (file.empty()) return bad_input(where + ": there is no such file");
  if (!file.starts_with(inside == "/" ? inside : inside + "/")) {
    return bad_input(where + " is a link that leaves the directory; put the file itself there");
  }
  return SafetensorsFile::open(path, files_.emplace_back());
}

Status SafetensorsModel::open_index(const std::string& directory, const std::string& index) {
  std::string content;
  JsonValue root;
  LINNET_TRY(read_file(index, kMaxIndexBytes, content));
  LINNET_TRY(parse_json(content, index, {.max_bytes = kMaxIndexBytes}, root));
  const JsonValue map = root.find("weight_map");
  if (!map.is(Kind::object)) return bad_input(index + ": has no weight_map that is an object");

  std::map<std::string, uint32_t> opened;
  std::vector<uint32_t> file_of_member;
  for (JsonItems items(map); items.next();) {
    if (!items.value().is(Kind::string)) {
      return bad_input(index + ": tensor " + json_show_short(items.key()) + " is mapped to " + json_show_short(items.value()) +
                       ", expected a file name");
    }
    const std::string name = items.value().string();
    const auto [place, is_new] = opened.try_emplace(name, static_cast<uint32_t>(files_.size()));
    file_of_member.push_back(place->second);
    if (!is_new) continue;
    LINNET_TRY(open_shard(directory, index, name));
  }
  LINNET_TRY(merge());
  return check_map(root, index, file_of_member);
}

Status SafetensorsModel::merge() {
  for (uint32_t f = 0; f < files_.size(); ++f) {
    for (uint32_t t = 0; t < files_[f].size(); ++t) order_.push_back({f, t});
  }
  std::sort(order_.begin(), order_.end(), [this](const Place& a, const Place& b) {
    const int names = name_value(a).compare(name_value(b));
    return names != 0 ? names < 0 : a.file < b.file;
  });
  for (size_t i = 1; i < order_.size(); ++i) {
    if (name_value(order_[i - 1]).compare(name_value(order_[i])) != 0) continue;
    return bad_input(files_[order_[i].file].path() + ": tensor " + json_show_short(name_value(order_[i])) + ": is also in " +
                     files_[order_[i - 1].file].path());
  }
  return {};
}

Status SafetensorsModel::check_map(const JsonValue& root, const std::string& index,
                                   const std::vector<uint32_t>& file_of_member) {
  std::vector<bool> mapped(order_.size());
  size_t member = 0;
  for (JsonItems items(root.find("weight_map")); items.next(); ++member) {
    const size_t i = lower_bound(items.key().string());
    const uint32_t file = file_of_member[member];
    if (i == order_.size() || name_value(order_[i]).compare(items.key()) != 0 || order_[i].file != file) {
      return bad_input(index + ": tensor " + json_show_short(items.key()) + " is mapped to " + files_[file].path() +
                       ", which does not hold it");
    }
    mapped[i] = true;
  }

  std::vector<size_t> unmapped(files_.size());
  uint64_t total = 0;
  for (size_t i = 0; i < order_.size(); ++i) {
    total += files_[order_[i].file].entry(order_[i].tensor).bytes();
    unmapped[order_[i].file] += !mapped[i];
  }
  for (size_t f = 0; f < files_.size(); ++f) {
    if (unmapped[f] > 0)
      warnings_.push_back(files_[f].path() + ": tensors that the index does not list: " + std::to_string(unmapped[f]));
  }
  int64_t stated = 0;
  const JsonValue total_size = root.find("metadata").find("total_size");
  if (!total_size.is(Kind::null) && (total_size.count(stated) || static_cast<uint64_t>(stated) != total)) {
    warnings_.push_back(index + ": total_size is " + json_show_short(total_size) + ", but the tensors take " +
                        std::to_string(total) + " bytes");
  }
  return {};
}

size_t SafetensorsModel::lower_bound(std::string_view name) const {
  const auto before = [this](const Place& p, std::string_view n) { return name_value(p).compare(n) < 0; };
  return static_cast<size_t>(std::lower_bound(order_.begin(), order_.end(), name, before) - order_.begin());
}

std::vector<std::string> SafetensorsModel::names() const {
  std::vector<std::string> out;
  out.reserve(size());
  for (const Place& p : order_) out.push_back(name_value(p).string());
  return out;
}

const SafetensorsFile* SafetensorsModel::file_of(std::string_view name) const {
  const size_t i = lower_bound(name);
  return i < order_.size() && name_value(order_[i]).equals(name) ? &files_[order_[i].file] : nullptr;
}

}  // namespace linnet
