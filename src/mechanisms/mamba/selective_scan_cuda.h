// The selective scan on the GPU: what its kernels are told (plain data).
//
// A sequence is walked by one block for each 32 channels, from its first token to its last; 4 or 2 of a channel's 16 states lie
// in a thread, which gives the same bits. Only where few channels have many tokens are sequences cut into segments, at places
// that the shape of the call gives: a segment's own state from zero and the sum of its steps make the states between segments
// (the decay over a segment is exp(A sum)), from which all segments run at once. Gradients run the same way backwards:
// J = gradient of the state before a token = exp(delta A) (J + C dy).
#pragma once

#include "mechanisms/shared/segments.h"
#include "selective_scan.h"

namespace linnet::cuda {

inline constexpr int kScanStates = 16;                         // of a channel in one walk; wider states are cut into tiles
inline constexpr int kScanChannels = 32;                       // of a block
inline constexpr int64_t kScanRows = 32, kScanBackRows = 16;   // tokens at a time; the backward keeps the states before each 16
inline constexpr int kScanBackBytes = 56704;                   // of shared memory that a block of the walk back has
inline constexpr int64_t kScanSegment = 2048, kScanFew = 512;  // tokens of a segment where a call has so few channels

struct Scan {
  SelectiveScanArgs args;  // B, C as [B, T, G, K]
  SelectiveScanGrads grads;
  View out, initial, final;  // initial, final: [N, E, K]
  Segments segments;
  int32_t E = 0, K = 0, G = 0, per_group = 0, blocks_per_group = 0, tiles = 1;
  bool raw = false;                        // dt is the step itself, without softplus
  bool reverse = false;                    // of states: J
  bool whole = false, whole_maps = false;  // rows of channels in pieces of 16 bytes; rows of B and C in pieces of four
  float* states = nullptr;                 // several segments: [slots, E, K]: of each segment alone, then those before it
  float* sums = nullptr;                   // [slots, E]: of the steps
  float* gradients = nullptr;              // [slots, E, K]: J behind each segment
  float* kept = nullptr;                   // backward: [chunks, E, K]: the states before every 16 tokens
  float* y = nullptr;                      // tiles > 1: [tiles, B, T, E] parts of y, of dx and of ddelta
  float *dx = nullptr, *ddelta = nullptr;
  float* dmaps = nullptr;                                  // [blocks of a group, B, T, G, 2, K]: parts of dB and dC
  float *dA = nullptr, *dD = nullptr, *dt_bias = nullptr;  // [slots, E K], [slots, E]
};
static_assert(sizeof(Scan) + 8 <= 4096);

// The whole scan, for mechanisms with steps of their own (raw).
int64_t scan_workspace(const SelectiveScanArgs& args, Pass pass);
void run_scan(const SelectiveScanArgs& args, const SelectiveScanOut& out, bool raw, const Launch& launch);
void run_scan_backward(const SelectiveScanArgs& args, const SelectiveScanGrads& grads, bool raw, const Launch& launch);

}  // namespace linnet::cuda
