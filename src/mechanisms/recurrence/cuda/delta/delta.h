// What the kernels of the delta rules are told, and the shapes of their launches, for host and device.
//
// Chunks of 64 tokens. What a chunk needs besides the state is prepared for all chunks at once (recurrence_delta_prepare):
// T = (I + tril(beta K K^T D, -1))^-1 diag(beta), in tf32, as the image of the shared-memory tile that the walk reads. Chunk c
// of sequence n has the slot n * ceil(T / 64) + c, or, where sequences are packed, begin / 64 + n + c: no two share one.
#pragma once

#include "core/cuda/driver.h"
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

// Shared memory of the kernels, which their own structs are compared with at compile time: from a multiple of 1024 on, tiles of
// a chunk's rows and of T or P, what each row has one number of, and a walk with its barriers.
constexpr int kSharedAlign = 1024, kWalkBytes = 256;
constexpr int chunk_bytes(int D) { return kTileChunk * D * 2; }                        // 16-bit rows
constexpr int kPairBytes = kTileChunk * kTileChunk * static_cast<int>(sizeof(float));  // T, P
constexpr int kDecays = 3;                                                             // numbers of a row (Decays)
constexpr int row_bytes(int numbers) {
  return (numbers * kTileChunk + 16) * static_cast<int>(sizeof(float));
}  // and of the chunk

constexpr int delta_shared_bytes(int D) {  // stages of q, k, v; two T; P; gates of two chunks
  return 2 * kSharedAlign + delta_stages(D) * 3 * chunk_bytes(D) + (2 + delta_scores(D)) * kPairBytes +
         2 * row_bytes(4 + kDecays) + kWalkBytes;
}
constexpr int prepare_shared_bytes(int D) {  // k, the system in rows of 68, its numbers
  const int system = kTileChunk * 68 * static_cast<int>(sizeof(float));
  return kSharedAlign + (chunk_bytes(D) + system + row_bytes(2 + kDecays) + kSharedAlign - 1) / kSharedAlign * kSharedAlign;
}
constexpr int reverse_shared_bytes(int D) {  // two stages of q, k, dout; two T^T; P; a chunk and a state on their way to memory
  return 2 * kSharedAlign + 2 * 3 * chunk_bytes(D) + 2 * kInverseBytes + delta_scores(D) * kPairBytes + chunk_bytes(D) +
         D * D * 2 + 2 * row_bytes(3 + kDecays) + kWalkBytes;
}
constexpr int gradients_shared_bytes(int D) {  // eight tiles of rows, two states, dP and dA, gates and dots of two chunks
  const int numbers = 2 * (6 + 8) * kTileChunk * static_cast<int>(sizeof(float));
  return 2 * kSharedAlign + 8 * chunk_bytes(D) + 2 * D * D * 2 + kPairBytes + numbers + 640;
}

}  // namespace linnet::cuda
