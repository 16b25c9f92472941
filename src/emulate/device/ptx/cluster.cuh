// src/ptx/cluster.cuh for the emulated GPU, which has no clusters: sources compile, and their kernels say so.
#pragma once

#include <cstdint>

#include "ptx/sync.cuh"

namespace linnet::ptx {

inline uint32_t cluster_rank() { emulate::fail("there are no clusters of blocks here"); }
inline void cluster_sync() { emulate::fail("there are no clusters of blocks here"); }
inline uint32_t address_in(uint32_t, uint32_t) { emulate::fail("there are no clusters of blocks here"); }
inline void send_16(uint32_t, const uint4&, uint32_t) { emulate::fail("there are no clusters of blocks here"); }
inline void barrier_arrive_in(uint32_t) { emulate::fail("there are no clusters of blocks here"); }

}  // namespace linnet::ptx
