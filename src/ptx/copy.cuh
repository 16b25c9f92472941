// Copies of 16 or 8 bytes from global to shared memory that run by themselves: what rows gathered from anywhere take instead of
// the copy engine's boxes.
#pragma once

#include <cstdint>

namespace linnet::ptx {

// `bytes` (0 or 16) are read, the rest of the 16 is zero; `from` must be an address of the tensor even when nothing is read.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same with 8 bytes for 16.
__device__ __forceinline__ void copy_8(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `pending` committed groups of this thread are unfinished.
template <int pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace linnet::ptx
