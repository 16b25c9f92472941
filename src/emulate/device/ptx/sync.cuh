// src/ptx/sync.cuh on the emulated GPU, without what Hopper alone has.
#pragma once

#include <cstdint>

namespace linnet::ptx {

inline uint32_t shared_address(const void* pointer) { return emulate::shared_address(pointer); }

template <class T>
T& shared_as(char* memory) {
  return *reinterpret_cast<T*>(memory + (-shared_address(memory) & 1023));
}

template <int id, int threads>
void group_sync() {
  emulate::barrier(id, threads, false);
}
template <int id, int threads>
bool group_any(bool mine) {
  return emulate::barrier(id, threads, mine);
}

}  // namespace linnet::ptx
