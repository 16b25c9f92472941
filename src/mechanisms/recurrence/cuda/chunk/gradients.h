// The gradients of a recurrence in f32 on the multiply-add units: any type, keys of up to 256 channels, values of any width,
// with or without beta, no decay or one per head. What the kernels of delta/delta.h and the walks of
// tile/gradients.h do not take.
#pragma once

#include "mechanisms/recurrence/cuda/delta/launch.h"

namespace linnet::cuda {

inline constexpr int kDeltaChunk = 32, kDeltaColumns = 32;  // tokens of a chunk; value channels of a walk

// The place of a chunk: sequence n begins at token `begin` of its batch row. No two share one.
constexpr int64_t chunk_slot(const Engine& e, int64_t n, int64_t begin, int64_t chunk) {
  return e.offsets == nullptr ? n * ((e.T + kDeltaChunk - 1) / kDeltaChunk) + chunk : begin / kDeltaChunk + n + chunk;
}
constexpr int64_t chunk_slots(const Engine& e) {
  return e.offsets == nullptr ? e.N * ((e.T + kDeltaChunk - 1) / kDeltaChunk) : e.T / kDeltaChunk + e.N + 1;
}

struct DeltaChunks {
  Engine e;
  DeltaGradients d;
  // What the walks leave for the gradients, of every slot and head.
  float *states = nullptr, *dstates = nullptr;      // [V, K]: S^T before the chunk, dS^T after it
  float *residuals = nullptr, *adjoints = nullptr;  // [32, V]: N / beta, dY / beta
};
constexpr int chunk_walk_bytes(int K) {
  return static_cast<int>(sizeof(float)) * (3 * 32 * (K + 1) + 4 * 32 * 33 + 4 * 32 + 4) + 8 * 32;
}
constexpr int chunk_gradients_bytes(int K) {
  return static_cast<int>(sizeof(float)) * (3 * 32 * (K + 1) + 5 * 32 * 33 + 16 * 32 + 16) + 8 * 32;
}

struct DeltaChunkScratch {
  float *states = nullptr, *dstates = nullptr, *residuals = nullptr, *adjoints = nullptr;
};
DeltaChunkScratch cut_delta_chunks(Arena& arena, const Engine& e);
void run_delta_chunks(const Launch& launch, const Engine& e, const DeltaGradients& gradients, const DeltaChunkScratch& scratch);

}  // namespace linnet::cuda
