// src/ptx/tma.cuh on the emulated GPU.
#pragma once

#include <cstdint>

#include "ptx/sync.cuh"

namespace linnet::ptx {

inline void load_box(void* to, const void* map, uint64_t* barrier, int x0, int x1, int x2, int x3, int x4) {
  emulate::load_box_later(to, map, barrier, {x0, x1, x2, x3, x4});
}
inline void load_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  emulate::load_bytes_later(to, from, bytes, barrier);
}
inline void store_bytes(void* to, const void* from, uint32_t bytes) { emulate::store_bytes_later(to, from, bytes); }
inline void wait_stores_read() { emulate::finish_stores(); }
inline void wait_stores() { emulate::finish_stores(); }
inline void prefetch_map(const void*) {}

}  // namespace linnet::ptx
