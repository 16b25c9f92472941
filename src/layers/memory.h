// Memory of a runner, on the CPU or the GPU, and dense tensors between it and the host.
#pragma once

#include <map>
#include <memory>
#include <utility>

#include "../core/status.h"
#include "../core/view.h"

namespace linnet::layers {

inline constexpr int64_t kAlign = 128;
inline int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
inline int64_t bytes_of(const View& view) { return view.elements() * dtype_size(view.dtype); }
inline char* at(const View& view, int64_t elements) {
  return static_cast<char*>(view.data) + elements * dtype_size(view.dtype);
}

// At multiples of kAlign bytes; not cleared.
Status take_memory(Device device, int64_t bytes, std::shared_ptr<char>* memory);
// Bytes of a dense tensor from the host to where it lies, and back; the latter waits for what the GPU still does.
Status put_bytes(const View& to, const void* from);
Status get_bytes(const View& from, void* to);
Status move_bytes(Device device, void* to, const void* from, int64_t bytes);  // which may overlap

// Weights on the GPU by their address on the host: runners that share weights share their copies.
struct Uploads {
  std::map<std::pair<const void*, int64_t>, std::shared_ptr<char>> copies;
  // The view of a dense tensor's copy.
  Status upload(const View& host, View* device);
};

}  // namespace linnet::layers
