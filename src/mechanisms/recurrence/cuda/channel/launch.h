// Runs the recurrence with a decay per channel on matrix units, forwards and its gradients.
#pragma once

#include "mechanisms/recurrence/cuda/channel/channel.h"
#include "mechanisms/recurrence/cuda/launch.h"

namespace linnet::cuda {

// Null for rows that the kernels with a decay per channel take; and their gates' description.
const char* channels_refuse(const Engine& engine);
bool encode_gates(TensorMap* map, const Engine& engine);
// bf16, whose exponents are those of f32; K and V of 64 or 128; g as bf16 or f32 in rows of 16 bytes; no beta.
const char* channel_refuses(const Engine& engine);
void run_channels(const Launch& launch, const Engine& engine, float* segments);

// The gradients of such a call. Views that are absent are not wanted.
struct ChannelGradients {
  Engine base;
  Rows dout;
  View dq, dk, dv, dg;
  States initial, dfinal, dinitial;
};
// Rows of a gradient call as the tiles take them: copies where those of the call are not aligned, and results of every head
// before groups are added.
struct ChannelRows {
  uint16_t *q = nullptr, *k = nullptr, *v = nullptr, *g = nullptr, *dout = nullptr;
  float *dq = nullptr, *dk = nullptr, *dv = nullptr;
};
ChannelRows cut_rows(Arena& arena, const Engine& base);
// Makes the copies; base and dout are then theirs.
void align_rows(const Launch& launch, const ChannelRows& rows, Engine* base, Rows* dout);

// The gradients of all chunks: `t` has what was kept and the results that are no rows of heads, `results` the others.
struct ChannelResults {
  View dq, dk, dv, dg;
};
void run_chunk_gradients(const Launch& launch, const Engine& base, const Rows& dout, const ChannelRows& rows,
                         const ChannelResults& results, ChannelGradient t);

struct ChannelScratch {
  ChannelRows rows;
  char *states = nullptr, *later = nullptr;  // kept states
  int32_t* exact = nullptr;
  float* segments = nullptr;
};
const char* channel_gradients_refuse(const Engine& base);
inline bool has_channel_gradients(const Engine& base) { return channel_gradients_refuse(base) == nullptr; }
ChannelScratch cut_channel_gradients(Arena& arena, const Engine& base);
void run_channel_gradients(const Launch& launch, const ChannelGradients& gradients, const ChannelScratch& scratch);

}  // namespace linnet::cuda
