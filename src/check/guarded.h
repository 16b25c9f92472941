// Guarded: a tensor in memory that tells when it was touched where it should not be. In front of it, behind it and, in a
// strided view, between its rows and heads lies memory that nobody may write, and whose values spoil every result that reads
// them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "check/random.h"
#include "core/status.h"
#include "core/view.h"

namespace linnet::check {

// How a view lies in memory. The last dimension is always contiguous.
enum class Layout {
  dense,
  padded,      // rows and heads cut out of a wider tensor: every dimension but the first has room in front and behind
  transposed,  // the two dimensions before the last are exchanged in memory, as in [B, H, T, D]
};

// Memory on the GPU that goes with its owner.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  Status allocate(int64_t bytes);
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

class Guarded {
 public:
  Guarded() = default;
  // All elements and all memory around them are NaN (-1 for integers).
  Guarded(const std::vector<int64_t>& size, Dtype dtype, Layout layout, Random& random);

  const View& view() const { return view_; }
  void fill(const std::vector<double>& values);  // in row-major order, rounded to the dtype
  std::vector<double> values() const;
  // Takes the memory as it is now for what it should be.
  void remember() { before_ = memory_; }
  // What was damaged since then: anything for a tensor to be read, anything but its elements for one to be written. Empty:
  // nothing.
  std::string damage(bool may_write) const;

  // The same memory on the GPU, what lies around the tensor included; `view` is the tensor there.
  Status to_device(View* view);
  Status from_device();

 private:
  View view_;
  DeviceMemory device_;
  std::vector<unsigned char> memory_, before_;
};

// Bytes with canaries at both ends: a workspace full of NaN.
class GuardedBytes {
 public:
  explicit GuardedBytes(int64_t bytes);
  void* data() { return memory_.data() + kCanary; }
  bool intact() const;
  Status to_device(void** data);
  Status from_device();

 private:
  DeviceMemory device_;
  static constexpr int64_t kCanary = 65536;  // wide: an overrun is told, and rarely reaches the memory of others
  std::vector<unsigned char> memory_;
};

}  // namespace linnet::check
