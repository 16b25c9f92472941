// Rings: barriers of n buffers that are used in turn. Use number i (0, 1, 2, ...) takes slot i % n and completes phase i / n of
// its barrier; a barrier knows a phase by its parity alone, which these functions keep.
//
//   uint64_t full[3], empty[3];                  // in shared memory
//   producer:  ptx::ring_wait_free(empty, i % 3, i); ...; ptx::barrier_arrive_expect(&full[i % 3], bytes);
//   consumer:  ptx::ring_wait(full, i % 3, i);       ...; ptx::barrier_arrive(&empty[i % 3]);
#pragma once

#include "ptx/sync.cuh"

namespace linnet::ptx {

// Until use i has completed.
template <int n>
__device__ __forceinline__ void ring_wait(uint64_t (&ring)[n], int slot, int i) {
  barrier_wait(&ring[slot], (i / n) & 1);
}
// Until the use before i of the same slot has: at once for the first use of each.
template <int n>
__device__ __forceinline__ void ring_wait_free(uint64_t (&ring)[n], int slot, int i) {
  if (i >= n) barrier_wait(&ring[slot], (i / n - 1) & 1);
}

}  // namespace linnet::ptx
