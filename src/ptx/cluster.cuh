// Blocks of threads of one cluster: each other's shared memory, one function per instruction.
#pragma once

#include <cstdint>

#include "ptx/sync.cuh"

namespace linnet::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of the cluster; what they wrote before is seen behind it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The place of a shared address of one's own in block `rank`.
__device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// A store that runs by itself and gives its bytes to a barrier of the same block (both from address_in).
__device__ __forceinline__ void send_16(uint32_t to, const uint4& x, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier)
               : "memory");
}
// Says that this thread has read what others may overwrite now. It publishes nothing: a release for the cluster would wait for
// all stores to memory before it.
__device__ __forceinline__ void barrier_arrive_in(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

}  // namespace linnet::ptx
