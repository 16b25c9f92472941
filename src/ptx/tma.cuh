// The tensor memory accelerator: boxes of a tensor into shared memory, one instruction each.
#pragma once

#include <cstdint>

#include "ptx/sync.cuh"

namespace linnet::ptx {

// The box at (x0, ..., x4), x0 the fastest; `barrier` gets its bytes, those outside of the tensor included.
__device__ __forceinline__ void load_box(void* to, const void* map, uint64_t* barrier, int x0, int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace linnet::ptx
