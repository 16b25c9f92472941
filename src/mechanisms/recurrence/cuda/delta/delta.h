// What the kernels of the delta rules are told, and the shapes of their launches, for host and device.
//
// Chunks of 64 tokens. What a chunk needs besides the state is prepared for all chunks at once (recurrence_delta_prepare):
// T = (I + tril(beta K K^T D, -1))^-1 diag(beta), in tf32, as the image of the shared-memory tile that the walk reads. Chunk c
// of sequence n has the slot n * ceil(T / 64) + c, or, where sequences are packed, begin / 64 + n + c: no two share one.
#pragma once

#include "core/cuda.h"
#include "mechanisms/recurrence/cuda/engine.h"
#include "mechanisms/recurrence/cuda/tile/tile.h"

namespace linnet::cuda {

// T is lower triangular: panel 0 (columns 0 to 31) of all rows, panel 1 of rows 32 to 63.
inline constexpr int kInversePanel = kTileChunk * 128, kInverseBytes = kInversePanel + kInversePanel / 2;
// Sequences longer than kLongest are cut in segments of this many tokens: each is a map S -> A S + B with a dense A. The other
// number: where the first segment is walked early (DeltaPhase), so that 16 heads of 32768 tokens fill 132 multiprocessors.
inline constexpr int64_t kDeltaSegment = 4096, kDeltaEarlySegment = 57 * kTileChunk;
inline constexpr float kForgotten = -40;  // a state multiplied by less than exp of this is forgotten

inline constexpr int kFoldRows = 16;  // of the states between segments, in one block

constexpr int64_t delta_slots(const Engine& e) {
  return e.offsets != nullptr ? e.T / kTileChunk + e.N + 1 : e.N * ((e.T + kTileChunk - 1) / kTileChunk);
}

// What a walk does: everything; the state a segment leaves, from zero, and what it multiplies a state by; everything from the
// states between segments. Or: the first segment in full, and those summaries of the others; everything of the others.
enum class DeltaPhase : int32_t { whole, summary, joined, early, rest };

struct Delta {
  TensorMap q, k, v;  // [64 channels, tokens, panels, heads, batch]
  TensorMap dout;     // gradients alone
  Engine e;
  char* inverse = nullptr;  // [slots, H, kInverseBytes]
  float* bounds = nullptr;  // [slots, H]: log of what the chunk multiplies the norm of a state by, at most
  DeltaPhase phase = DeltaPhase::whole;
  int64_t segment = kDeltaSegment;
  float* maps =
      nullptr;  // [segments, N, H, 2, D, D]: B^T and A^T of each segment but the last; then S^T after it in place of B^T
  int32_t* forgets = nullptr;  // [segments, N, H]: A is zero, and not there
  // Gradients: what the walks leave for recurrence_delta_gradients, [slots, H] images of tiles in the type of q.
  char* inverse_transposed = nullptr;  // [kInverseBytes]: panel 0 of rows 0 to 31, panel 1 of all rows
  char* states = nullptr;              // [D][D]: S^T before the chunk
  char* dstates = nullptr;             // [D][D]: dS^T after it, in units of unit_of_scale
  char* residuals = nullptr;           // [64][D]: N / beta
  char* adjoints = nullptr;            // [64][D]: dY / beta
  States dfinal, dinitial;             // [N, H, K, V]
  float* dmaps = nullptr;              // [segments, N, H, D, D]: dS^T before each segment but the first, in these units
  Rows dq, dk, dv, dg, dbeta;
};

// 64 channels: two blocks a multiprocessor, which hide each other's waits, of two warpgroups: the auxiliary one is the producer
// too. f16 needs more registers: one block.
constexpr bool delta_pairs(int D, bool bf16) { return D == 64 && bf16; }
constexpr int delta_threads(int D, bool bf16) { return delta_pairs(D, bf16) ? 256 : tile_threads(D); }
constexpr int delta_blocks(int D, bool bf16) { return delta_pairs(D, bf16) ? 2 : 1; }
constexpr int delta_stages(int D) { return D == 64 ? 2 : 3; }
constexpr int delta_scores(int D) { return D == 64 ? 1 : 2; }  // buffers of P
constexpr int delta_shared_bytes(int D) {
  const int stage = 3 * D / 64 * kTileChunk * 128;
  return 2048 + delta_stages(D) * stage + (2 + delta_scores(D)) * 16384 + 2 * 4 * 464 + 256;
}
constexpr int prepare_shared_bytes(int D) {
  return 1024 + (D / 64 * kTileChunk * 128 + kTileChunk * 68 * 4 + 4 * 336 + 1023) / 1024 * 1024;
}

constexpr int reverse_shared_bytes(int D) {
  const int tile = D / 64 * kTileChunk * 128;
  return 2048 + 2 * 3 * tile + 2 * kInverseBytes + delta_scores(D) * 16384 + tile + D * D * 2 + 2 * 4 * 400 + 256;
}
constexpr int gradients_shared_bytes(int D) {
  const int tile = D / 64 * kTileChunk * 128;
  return 2048 + 8 * tile + 2 * D * D * 2 + 2 * 8192 + 4 * 64 * 2 * (6 + 8) + 640;
}

}  // namespace linnet::cuda
