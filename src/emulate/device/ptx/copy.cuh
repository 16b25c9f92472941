// src/ptx/copy.cuh on the emulated GPU: nothing arrives before it is waited for.
#pragma once

#include <cstdint>

namespace linnet::ptx {

inline void copy_16(uint32_t to, const void* from, uint32_t bytes) { emulate::copy_later(to, from, bytes, 16); }
inline void copy_8(uint32_t to, const void* from, uint32_t bytes) { emulate::copy_later(to, from, bytes, 8); }
inline void copy_commit() { emulate::commit_copies(); }
template <int pending>
void copy_wait() {
  emulate::wait_copies(pending);
}

}  // namespace linnet::ptx
