#include "core/files/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

namespace linnet {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

constexpr uint64_t kMaxTransfer = uint64_t{1} << 30;  // Linux moves at most 2 GiB - 4 KiB in one call

}  // namespace

InputFile::InputFile(InputFile&& other) noexcept { *this = std::move(other); }

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(size_, other.size_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Status InputFile::open(const std::string& path, InputFile& out) {
  InputFile file;
  file.path_ = path;
  // Not blocking, so that opening a pipe nobody writes to returns and is refused below.
  file.descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.descriptor_ < 0) return bad_input(path + ": cannot be opened: " + reason(errno));
  struct stat info = {};
  if (::fstat(file.descriptor_, &info) != 0) return bad_input(path + ": cannot be examined: " + reason(errno));
  if (!S_ISREG(info.st_mode)) return bad_input(path + ": is " + (S_ISDIR(info.st_mode) ? "a directory" : "not a regular file"));
  file.size_ = static_cast<uint64_t>(info.st_size);
  out = std::move(file);
  return {};
}

Status InputFile::read(uint64_t offset, uint64_t bytes, void* out) const {
  if (offset > size_ || bytes > size_ - offset) {
    return bad_input(path_ + ": has no " + std::to_string(bytes) + " bytes at byte " + std::to_string(offset) + ", only " +
                     std::to_string(size_) + " in all");
  }
  for (char* at = static_cast<char*>(out); bytes > 0;) {
    const ssize_t got = ::pread(descriptor_, at, std::min(bytes, kMaxTransfer), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return bad_input(path_ + ": cannot be read at byte " + std::to_string(offset) + ": " + reason(errno));
    if (got == 0) {
      return bad_input(path_ + ": ends at byte " + std::to_string(offset) + " now, but had " + std::to_string(size_) +
                       " bytes when it was opened");
    }
    at += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return {};
}

OutputFile::~OutputFile() { discard(); }

void OutputFile::discard() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

Status OutputFile::fail(const char* what) {
  const int error = errno;
  discard();
  return bad_input(path_ + ": " + what + ": " + reason(error));
}

Status OutputFile::create(const std::string& path, OutputFile& out) {
  out.discard();
  out.path_ = path;
  struct stat info = {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {  // renaming over /dev/null would replace the device
    return bad_input(path + ": cannot be written: it is " + (S_ISDIR(info.st_mode) ? "a directory" : "not a regular file"));
  }
  static std::atomic<uint32_t> serial{0};
  const std::string temporary = path + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(serial++);
  out.descriptor_ = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);  // the umask decides
  if (out.descriptor_ < 0) return out.fail("cannot be written");
  out.temporary_ = temporary;
  return {};
}

Status OutputFile::write(const void* data, uint64_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t put = ::write(descriptor_, at, std::min(bytes, kMaxTransfer));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return fail("cannot be written");
    at += put;
    bytes -= static_cast<uint64_t>(put);
  }
  return {};
}

Status OutputFile::commit() {
  if (::fsync(descriptor_) != 0) return fail("cannot be written to the disk");
  const int descriptor = std::exchange(descriptor_, -1);
  if (::close(descriptor) != 0) return fail("cannot be written to the disk");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) return fail("cannot be put in place");
  temporary_.clear();
  return {};
}

Status read_file(const std::string& path, uint64_t max_bytes, std::string& out) {
  InputFile file;
  LINNET_TRY(InputFile::open(path, file));
  if (file.size() > max_bytes) {
    return bad_input(path + ": " + std::to_string(file.size()) + " bytes, more than the limit of " + std::to_string(max_bytes));
  }
  std::string content;
  try {
    content.resize(file.size());
  } catch (const std::bad_alloc&) {
    return impossible(path + ": not enough memory for its " + std::to_string(file.size()) + " bytes");
  }
  LINNET_TRY(file.read(0, file.size(), content.data()));
  out = std::move(content);
  return {};
}

Status write_file(const std::string& path, std::string_view content) {
  OutputFile file;
  LINNET_TRY(OutputFile::create(path, file));
  LINNET_TRY(file.write(content.data(), content.size()));
  return file.commit();
}

}  // namespace linnet
