// The selective scan on the GPU: what its kernels are told (plain data).
//
// Sequences are cut into segments. A segment's own state from zero and the sum of its steps make the states between segments
// (the decay over a segment is exp(A sum)), from which all segments run at once. Gradients run the same way backwards:
// J = gradient of the state before a token = exp(delta A) (J + C dy).
#pragma once

#include "mechanisms/shared/segments.h"
#include "selective_scan.h"

namespace linnet::cuda {

inline constexpr int kScanStates = 16;  // of a channel that a thread has; wider states are cut into tiles

struct Scan {
  SelectiveScanArgs args;  // B, C as [B, T, G, K]
  SelectiveScanGrads grads;
  View out, initial, final;  // initial, final: [N, E, K]
  Segments segments;
  int32_t E = 0, K = 0, G = 0, per_group = 0, blocks_per_group = 0, tiles = 1, threads = 128;
  bool raw = false;  // dt is the step itself, without softplus
  bool reverse = false;
  bool in_place = false;       // decode: one segment, whose states come from `initial` and go to `final`
  float* states = nullptr;     // [slots, E, K]: of each segment alone, then those before it
  float* sums = nullptr;       // [slots, E]: of the steps
  float* gradients = nullptr;  // [slots, E, K]: J behind each segment
  float* y = nullptr;          // tiles > 1: [tiles, B, T, E] parts of y, of dx and of ddelta
  float *dx = nullptr, *ddelta = nullptr;
  float* dmaps = nullptr;                                  // [warps of a group, B, T, G, 2, K]: parts of dB and dC
  float *dA = nullptr, *dD = nullptr, *dt_bias = nullptr;  // [slots, E K], [slots, E]
};

// The whole scan, for mechanisms with steps of their own (raw).
int64_t scan_workspace(const SelectiveScanArgs& args, Pass pass);
void run_scan(const SelectiveScanArgs& args, const SelectiveScanOut& out, bool raw, const Launch& launch);
void run_scan_backward(const SelectiveScanArgs& args, const SelectiveScanGrads& grads, bool raw, const Launch& launch);

}  // namespace linnet::cuda
