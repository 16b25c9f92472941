#include "layers/memory.h"

#include <cstring>
#include <new>

#include "core/cuda/driver.h"

namespace linnet::layers {

Status take_memory(Device device, int64_t bytes, std::shared_ptr<char>* memory) {
  if (device == Device::cpu) {
    *memory =
        std::shared_ptr<char>(static_cast<char*>(::operator new(static_cast<size_t>(bytes) + 1, std::align_val_t(kAlign))),
                              [](char* p) { ::operator delete(p, std::align_val_t(kAlign)); });
    return {};
  }
  void* data = nullptr;
  LINNET_TRY(cuda::allocate(bytes, &data));
  *memory = std::shared_ptr<char>(static_cast<char*>(data), [](char* p) { cuda::release(p); });
  return {};
}

Status put_bytes(const View& to, const void* from) {
  if (to.device == Device::cuda) return cuda::copy_to_device(to.data, from, bytes_of(to));
  std::memcpy(to.data, from, static_cast<size_t>(bytes_of(to)));
  return {};
}

Status get_bytes(const View& from, void* to) {
  if (from.device == Device::cuda) return cuda::copy_to_host(to, from.data, bytes_of(from));
  std::memcpy(to, from.data, static_cast<size_t>(bytes_of(from)));
  return {};
}

Status move_bytes(Device device, void* to, const void* from, int64_t bytes) {
  if (device == Device::cpu) {
    std::memmove(to, from, static_cast<size_t>(bytes));
    return {};
  }
  std::shared_ptr<char> between;
  LINNET_TRY(take_memory(device, bytes, &between));
  LINNET_TRY(cuda::copy_on_device(between.get(), from, bytes));
  LINNET_TRY(cuda::copy_on_device(to, between.get(), bytes));
  return cuda::synchronize();
}

Status Uploads::upload(const View& host, View* device) {
  std::shared_ptr<char>& copy = copies[{host.data, bytes_of(host)}];
  *device = View::dense(nullptr, host.dtype, host.size, host.rank);
  device->device = Device::cuda;
  const bool fresh = copy == nullptr;
  if (fresh) LINNET_TRY(take_memory(Device::cuda, bytes_of(host), &copy));
  device->data = copy.get();
  return fresh ? put_bytes(*device, host.data) : Status();
}

}  // namespace linnet::layers
