// MappedFile: a file whose bytes are read where they lie, so that a model of any size is ready at once and is shared between
// processes that run it.
//
//   MappedFile file;
//   LINNET_TRY(MappedFile::open("model.gguf", file));
//   use(file.data(), file.size());
//
// The size is taken once, from the open descriptor. Only weights are mapped, and readers check every offset against that size;
// who shortens the file while a model runs ends the process, as with every program that maps its data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/status.h"

namespace linnet {

class MappedFile {
 public:
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  static Status open(const std::string& path, MappedFile& out);  // regular files only
  const std::string& path() const { return path_; }
  const unsigned char* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  void close();

  std::string path_;
  const unsigned char* data_ = nullptr;
  uint64_t size_ = 0;
};

// Bytes of a mapped file that are not needed again for now: they leave this process's memory and come back when they are read.
void leave_memory(const void* begin, uint64_t bytes);

}  // namespace linnet
