// Files: positioned reads of a file whose size is taken once, and writes that appear complete or not at all.
//
//   InputFile in;
//   LINNET_TRY(InputFile::open("model.safetensors", in));
//   LINNET_TRY(in.read(8, header.size(), header.data()));            // all of it, or an error that names the file
//
//   OutputFile out;                                                  // writes beside the target under a temporary name
//   LINNET_TRY(OutputFile::create("report.html", out));
//   LINNET_TRY(out.write(text.data(), text.size()));
//   LINNET_TRY(out.commit());                                        // without it, nothing is left behind
//
// Files are read, not mapped: when another process shortens a mapped file, touching it kills this process, and when it rewrites
// a header that was checked, the check is worth nothing.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.h"

namespace linnet {

class InputFile {
 public:
  InputFile() = default;
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;
  ~InputFile();

  static Status open(const std::string& path, InputFile& out);  // regular files only: a pipe or a device has no size
  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }  // when it was opened
  // May be called from many threads at once.
  Status read(uint64_t offset, uint64_t bytes, void* out) const;

 private:
  std::string path_;
  uint64_t size_ = 0;
  int descriptor_ = -1;
};

class OutputFile {
 public:
  OutputFile() = default;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  static Status create(const std::string& path, OutputFile& out);
  Status write(const void* data, uint64_t bytes);
  Status commit();  // to the disk, then renamed over `path`

 private:
  Status fail(const char* what);
  void discard();

  std::string path_, temporary_;
  int descriptor_ = -1;
};

// The whole of a file that may have at most max_bytes.
Status read_file(const std::string& path, uint64_t max_bytes, std::string& out);
Status write_file(const std::string& path, std::string_view content);

}  // namespace linnet
