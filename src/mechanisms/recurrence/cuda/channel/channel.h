// What the kernels with a decay per channel are told, and the shapes of their launches, for host and device.
#pragma once

#include "mechanisms/recurrence/cuda/tile/tile.h"

namespace linnet::cuda {

struct ChannelTile {
  TensorMap q, k, v, g;  // [64 channels (g in f32: 32), tokens, panels, heads, batch]
  Engine e;
  bool wide = false;  // g is f32
  // Segments: 0: whole sequences; 1: the states that segments (but the last) leave; 2: everything, from the states before them.
  int32_t phase = 0;
  float* states = nullptr;  // [segments, N, H, K * V], in the order of the registers
  float* decays = nullptr;  // [segments, N, H, K]: what a segment multiplies the state by
  char* kept = nullptr;     // walks without reads: S^T before each chunk as bf16, [chunk, H, tile images of 64 values x K]
};

// The gradients of chunks, from the states before them and the gradients of the states behind them.
struct ChannelGradient {
  TensorMap q[2], k[2], g[2];                            // of 64 key channels each
  TensorMap v, d;                                        // d: of the result
  Engine e;                                              // q, k, v, g, beta, scale, offsets
  Rows dq, dk, dv, dg, dbeta;                            // absent: not wanted; heads as the call's
  const char *states = nullptr, *later = nullptr;        // kept (above): S^T, and the later tokens' gradient of it / scale
  const char *residuals = nullptr, *adjoints = nullptr;  // with beta: N, dY (kda/kda.h)
  const float* records = nullptr;                        // with beta: whether gates range too far, too
  int32_t* exact = nullptr;                              // without: the same, [chunk, H, part]; the first kernel says so
  bool wide = false, dv_pieces = false;                  // dv in bf16, 16 bytes at a time;
  bool pairs = false;                                    // dq, dk, dg two channels at a time
};

// Chunks are numbered through: those of sequence n from channel_chunk(n, ..) on.
constexpr int64_t channel_chunks(bool packed, int64_t N, int64_t T) {
  return packed ? T / kTileChunk + N : N * ((T + kTileChunk - 1) / kTileChunk);
}
constexpr int64_t channel_chunk(bool packed, int64_t T, int64_t n, int64_t begin) {
  return packed ? begin / kTileChunk + n : n * ((T + kTileChunk - 1) / kTileChunk);
}

// A warpgroup for each 64 channels of values, one for each 64 of keys.
constexpr int channel_threads(int K, int V) { return 128 * (K / 64 + V / 64); }
constexpr int channel_shared_bytes(int K, int V) {
  const int stage = (2 * K + V) / 64 * kTileChunk * 128, gates = 2 * K / 64 * kTileChunk * 128, tables = 4 * K * 2 * (4 + 6);
  return 1024 + kTileStages * stage + gates + 2 * kTileChunk * 128 + tables + 1024;
}

// Blocks of a chunk: one for each 64 key channels, without beta one for the values. Two fit in a multiprocessor.
constexpr int gradient_parts(int K, bool beta) { return K / 64 + (beta ? 0 : 1); }
constexpr int gradient_shared_bytes(bool split) { return 115456 + (split ? 2 * kTileChunk * 128 : 0); }
inline constexpr int kExactBlocks = 264;  // that look for chunks whose gates range too far

}  // namespace linnet::cuda
