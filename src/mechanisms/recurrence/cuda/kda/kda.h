// What the kernels of the delta rule with a decay per channel (KDA) are told, and the shapes of their launches.
//
// Chunks of 64 tokens. What a chunk needs besides the state is prepared for all chunks at once, as images of shared-memory
// tiles: with G the sums of g in the chunk and m its middle row (channel/channel.cuh)
//
//   Q' = Q exp(G - G_m),  K" = K exp(G - G_m),  K' = K exp(G_m - G)                 bf16
//   T = (I + tril(beta K" K'^T, -1))^-1 diag(beta),  P = tril(Q' K'^T)             tf32
//
// and the walk over the chunks is  S' = S exp(G_m),  N = T (V - K" S'),  O = scale (Q' S' + P N),  S = (S' + K'^T N) exp(G_C -
// G_m). A chunk whose gates range too far is walked token by token.
//
// Gradients: Q' has the scale in it, T^T is there too, and P T in bf16 in place of P. The walk keeps S' and N, a reverse walk
//
//   R' = R exp(G_C - G_m),  dY = T^T K' R' + (P T)^T dO,  R = (R' + Q'^T dO - K"^T dY) exp(G_m)
//
// keeps R' and dY (dV); where tokens repeat, T^T takes differences, in which a rounded P would be four times as loud as P T,
// and V - K" S' is small: there K" has what rounding took from it in a tile of its own. The rest is found for all chunks at
// once (channel/gradients.cu). A beta of 0 counts as kKdaLeastBeta there: what is divided by it again must not
// be lost.
#pragma once

#include "mechanisms/recurrence/cuda/channel/channel.h"
#include "ptx/layout.h"

namespace linnet::cuda {

inline constexpr int64_t kKdaSegment = 4096;  // tokens of a segment: a map S -> A S + B with a dense A
// What the last chunks of a segment leave of a state is found first: where it is nothing, A is 0, and B comes from them alone;
// so do gradients from the first ones.
inline constexpr int kKdaProbe = 8;
inline constexpr float kKdaForgotten = 0x1p-40f;

// T, P and T^T are triangular: of 64 x 64 numbers in panels of 32 columns (tile_byte_paired_f32) the quarter that is all zero
// is left out, the first 32 rows of the second panel, of T^T the last of the first.
inline constexpr int kKdaSystem = 12288;
constexpr uint32_t kda_system_byte(uint32_t row, uint32_t column) {
  return ptx::tile_byte_paired_f32(kTileChunk, row, column) - column / 32 * 4096;
}

// Of a chunk and head: Q', K", K'; T, P; factors of the state before and behind it, and whether it is walked token by token.
constexpr int kda_operands(int D) { return 3 * D * 128; }
constexpr int kda_images(int D) { return kda_operands(D) + 2 * kKdaSystem; }
constexpr int kda_record(int D) { return 2 * D + 4; }  // floats

// The same for gradients: Q', K", K'; T, T^T; P T in bf16; the rest of K".
constexpr int kda_low(int D) { return kda_operands(D) + 2 * kKdaSystem + 8192; }
constexpr int kda_back_images(int D) { return kda_low(D) + D * 128; }
inline constexpr float kKdaLeastBeta = 0x1p-40f;

enum class KdaPhase : int32_t { whole, probe, summary, joined };

struct Kda {
  static constexpr int64_t segment = kKdaSegment;
  TensorMap q, k, v, g;
  Engine e;
  bool wide = false;
  KdaPhase phase = KdaPhase::whole;
  bool back = false;         // for gradients
  int32_t image = 0;         // bytes of an image
  char* images = nullptr;    // [chunks, H, image]
  float* records = nullptr;  // [chunks, H, kda_record]
  float* maps = nullptr;     // [segments, N, H, 2, D, D]: B and A of each segment but the last; then S behind it in place of B
  int32_t* forgets = nullptr;  // [segments, 2, N, H]: that A is zero, and not there; that the first chunks forget
  // Gradients: images of tiles [chunks, H].
  TensorMap dout;
  char *states = nullptr, *dstates = nullptr;      // [D / 64][64 values, D]: S'^T, R'^T
  char *residuals = nullptr, *adjoints = nullptr;  // [64 tokens, D]: N, dY
  float* dmaps = nullptr;                          // [segments, N, H, D, D]: R before each segment but the first
  States dfinal, dinitial;
};

constexpr int kda_prepare_bytes(int D) {
  return 1024 + 3 * D * 128 + 2 * kKdaSystem + 8192 + kTileChunk * 68 * 4 + 4 * (4 * D + 64) + 2048;
}
constexpr int kda_walk_bytes(int D) { return 1024 + 2 * (4 * D * 128 + 2 * 16384 + 2048) + 4096; }
constexpr int kda_reverse_bytes(int D) {
  return 1024 + 2 * (3 * D * 128 + kKdaSystem + 8192 + D * 128 + 2048) + D * D * 2 + 1024;
}
constexpr int kda_walk_threads(int D) { return 128 * (1 + D / 64); }

}  // namespace linnet::cuda
