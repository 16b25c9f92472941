#include "check/guarded.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/cuda/driver.h"
#include "core/half.h"

namespace linnet::check {
namespace {

constexpr int64_t kCanaryBytes = 4096;
constexpr unsigned char kNan = 0xff;     // every float type reads as NaN when all its bits are set
constexpr unsigned char kCanary = 0xa5;  // of a workspace: no kernel writes it by chance

// Calls use(index, offset) for every element, index in row-major order.
template <class Use>
void for_each(const View& view, const Use& use) {
  const int64_t elements = view.elements();
  int64_t at[kMaxRank] = {}, offset = 0;
  for (int64_t index = 0; index < elements; ++index) {
    use(index, offset);
    for (int d = view.rank - 1; d >= 0; --d) {
      offset += view.stride[d];
      if (++at[d] < view.size[d]) break;
      offset -= view.size[d] * view.stride[d];
      at[d] = 0;
    }
  }
}

void store(void* data, Dtype dtype, int64_t index, double x) {
  switch (dtype) {
    case Dtype::i64: static_cast<int64_t*>(data)[index] = static_cast<int64_t>(x); break;
    case Dtype::i32: static_cast<int32_t*>(data)[index] = static_cast<int32_t>(x); break;
    case Dtype::u8: static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(x); break;
    default: store_f64(data, dtype, index, x);
  }
}

}  // namespace

Guarded::Guarded(const std::vector<int64_t>& size, Dtype dtype, Layout layout, Random& random) {
  const int rank = static_cast<int>(size.size());
  int order[kMaxRank];  // from the slowest dimension in memory to the fastest
  for (int i = 0; i < rank; ++i) order[i] = i;
  if (layout == Layout::transposed && rank >= 3) std::swap(order[rank - 3], order[rank - 2]);
  const bool padded = layout == Layout::padded;
  int64_t stride = 1, start = padded ? random.below(4) : 0;
  view_.dtype = dtype;
  view_.rank = rank;
  for (int i = rank - 1; i >= 0; --i) {
    const int d = order[i];
    const int64_t front = padded && i > 0 ? random.below(3) : 0, behind = padded && i > 0 ? random.below(3) : 0;
    view_.size[d] = size[static_cast<size_t>(d)];
    view_.stride[d] = stride;
    start += front * stride;
    stride *= front + view_.size[d] + behind;
  }
  const int64_t element = dtype_size(dtype), bytes = (start + stride) * element + 2 * kCanaryBytes + 64;
  memory_.assign(static_cast<size_t>(bytes), kNan);
  // A dense tensor starts on a cache line; a padded one anywhere its elements may.
  const auto base = reinterpret_cast<uintptr_t>(memory_.data());
  const uintptr_t aligned = (base + 63) / 64 * 64;
  view_.data = memory_.data() + (aligned - base) + kCanaryBytes + start * element;
}

void Guarded::fill(const std::vector<double>& values) {
  for_each(view_, [&](int64_t i, int64_t offset) { store(view_.data, view_.dtype, offset, values[static_cast<size_t>(i)]); });
}

std::vector<double> Guarded::values() const {
  std::vector<double> values(static_cast<size_t>(view_.elements()));
  for_each(view_,
           [&](int64_t i, int64_t offset) { values[static_cast<size_t>(i)] = load_f64(view_.data, view_.dtype, offset); });
  return values;
}

std::string Guarded::damage(bool may_write) const {
  if (!may_write) return memory_ == before_ ? "" : "was changed although it is only read";
  // Put the elements back as they were; then nothing may differ.
  std::vector<unsigned char> now = memory_;
  const auto start = static_cast<const unsigned char*>(view_.data) - memory_.data();
  const int64_t element = dtype_size(view_.dtype);
  for_each(view_, [&](int64_t, int64_t offset) {
    const auto place = static_cast<size_t>(start + offset * element);
    std::memcpy(now.data() + place, before_.data() + place, static_cast<size_t>(element));
  });
  if (now == before_) return "";
  const auto place = std::mismatch(now.begin(), now.end(), before_.begin()).first - now.begin();
  return "was written outside of its elements, " + std::to_string(std::abs(place - start)) + " bytes " +
         (place < start ? "before" : "after") + " its first one";
}

DeviceMemory::~DeviceMemory() { cuda::release(data_); }
Status DeviceMemory::allocate(int64_t bytes) {
  cuda::release(data_);
  data_ = nullptr;
  return cuda::allocate(bytes, &data_);
}

// Memory of the GPU is aligned to 256 bytes, memory_ is not: 64 more, so that the tensor keeps its place in a cache line.
static std::ptrdiff_t shift_of(const std::vector<unsigned char>& memory) {
  return static_cast<std::ptrdiff_t>(reinterpret_cast<uintptr_t>(memory.data()) % 64);
}

Status Guarded::to_device(View* view) {
  const auto bytes = static_cast<int64_t>(memory_.size());
  if (device_.data() == nullptr) LINNET_TRY(device_.allocate(bytes + 64));
  *view = view_;
  view->device = Device::cuda;
  view->data = device_.data() + shift_of(memory_) + (static_cast<unsigned char*>(view_.data) - memory_.data());
  return cuda::copy_to_device(device_.data() + shift_of(memory_), memory_.data(), bytes);
}
Status Guarded::from_device() {
  return cuda::copy_to_host(memory_.data(), device_.data() + shift_of(memory_), static_cast<int64_t>(memory_.size()));
}

Status GuardedBytes::to_device(void** data) {
  const auto bytes = static_cast<int64_t>(memory_.size());
  LINNET_TRY(device_.allocate(bytes));
  *data = device_.data() + kCanary;
  return cuda::copy_to_device(device_.data(), memory_.data(), bytes);
}
Status GuardedBytes::from_device() {
  return cuda::copy_to_host(memory_.data(), device_.data(), static_cast<int64_t>(memory_.size()));
}

GuardedBytes::GuardedBytes(int64_t bytes) : memory_(static_cast<size_t>(bytes + 2 * kCanary), kNan) {
  std::fill_n(memory_.begin(), kCanary, linnet::check::kCanary);
  std::fill_n(memory_.end() - kCanary, kCanary, linnet::check::kCanary);
}

bool GuardedBytes::intact() const {
  const auto is_canary = [](unsigned char byte) { return byte == linnet::check::kCanary; };
  return std::all_of(memory_.begin(), memory_.begin() + kCanary, is_canary) &&
         std::all_of(memory_.end() - kCanary, memory_.end(), is_canary);
}

}  // namespace linnet::check
