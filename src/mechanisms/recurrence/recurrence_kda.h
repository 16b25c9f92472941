// What the kernels of the delta rule with a decay per channel (KDA) are told, and the shapes of their launches.
//
// Chunks of 64 tokens. What a chunk needs besides the state is prepared for all chunks at once, as images of shared-memory
// tiles: with G the sums of g in the chunk and m its middle row (recurrence_channel.cuh)
//
//   Q' = Q exp(G - G_m),  K" = K exp(G - G_m),  K' = K exp(G_m - G)                 bf16
//   T = (I + tril(beta K" K'^T, -1))^-1 diag(beta),  P = tril(Q' K'^T)             tf32
//
// and the walk over the chunks is  S' = S exp(G_m),  N = T (V - K" S'),  O = scale (Q' S' + P N),  S = (S' + K'^T N) exp(G_C -
// G_m). A chunk whose gates range too far is walked token by token.
#pragma once

#include "mechanisms/recurrence/recurrence_channel.h"

namespace linnet::cuda {

inline constexpr int64_t kKdaSegment = 4096;  // tokens of a segment: a map S -> A S + B with a dense A

// Of a chunk and head: Q', K", K'; T, P; factors of the state before and behind it, and whether it is walked token by token.
constexpr int kda_operands(int D) { return 3 * D * 128; }
constexpr int kda_images(int D) { return kda_operands(D) + 2 * 16384; }
constexpr int kda_record(int D) { return 2 * D + 4; }  // floats

enum class KdaPhase : int32_t { whole, summary, joined };

struct Kda {
  TensorMap q, k, v, g;
  Engine e;
  bool wide = false;
  KdaPhase phase = KdaPhase::whole;
  char* images = nullptr;    // [chunks, H, kda_images]
  float* records = nullptr;  // [chunks, H, kda_record]
  float* maps = nullptr;     // [segments, N, H, 2, D, D]: B and A of each segment but the last; then S behind it in place of B
};

constexpr int kda_prepare_bytes(int D) {
  return 1024 + 3 * D * 128 + 2 * 16384 + kTileChunk * 68 * 4 + 4 * (4 * D + 64) + 2048;
}
constexpr int kda_stage(int D) { return kda_images(D) + D * 128 + 2048; }
constexpr int kda_walk_bytes(int D) { return 1024 + 2 * kda_stage(D) + 1024; }
constexpr int kda_walk_threads(int D) { return 128 * (1 + D / 64); }

}  // namespace linnet::cuda
