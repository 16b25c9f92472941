// One token of every head, the state in place (decode.cuh); for host and device.
#pragma once

#include "mechanisms/recurrence/cuda/engine.h"

namespace linnet::cuda {

struct DecodeRing {
  int blocks;   // that a multiprocessor has at a time
  int stages;   // states that a block holds
  int threads;  // 4 for a column of the state, 128 for the token's numbers, a warp that asks for states
  int bytes;    // of shared memory: the states; for two heads the token's numbers and what has been read; barriers
};
// K, V: 64 or 128.
constexpr DecodeRing decode_ring(int K, int V) {
  const int blocks = K == 64 && V == 64 ? 3 : K == 128 && V == 64 ? 2 : 1, stages = K == 128 ? 3 : V == 64 ? 4 : 6;
  return {blocks, stages, 4 * V + 160, 2048 + stages * K * V * 4 + 2 * (20 * K + 12 * V + 32 + V / 32 * 1024)};
}

// Null when the kernels take the engine: one token in place, in rows that 16-byte accesses can take.
const char* decode_refuses(const Engine& engine);
void run_decode(const Launch& launch, const Engine& engine);

}  // namespace linnet::cuda
