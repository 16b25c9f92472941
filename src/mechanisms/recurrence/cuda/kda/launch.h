// Runs the delta rule with a decay per channel on matrix units.
#pragma once

#include "mechanisms/recurrence/cuda/channel/launch.h"
#include "mechanisms/recurrence/cuda/kda/kda.h"
#include "mechanisms/recurrence/cuda/launch.h"

namespace linnet::cuda {

struct KdaScratch {
  char* images = nullptr;
  float *records = nullptr, *maps = nullptr;
  int32_t* forgets = nullptr;
};

// bf16; K = V of 64 or 128; beta, and a decay per channel as bf16 or f32 in rows of 16 bytes.
const char* kda_refuses(const Engine& engine);
KdaScratch cut_kda(Arena& arena, const Engine& engine);
void run_kda(const Launch& launch, const Engine& engine, const KdaScratch& scratch);

// Its gradients. Views that are absent are not wanted.
struct KdaGradients {
  Engine base;
  Rows dout;
  View dq, dk, dv, dg;
  Rows dbeta;
  States initial, dfinal, dinitial;
};
struct KdaBackScratch {
  ChannelRows rows;
  KdaScratch kda;
  char *states = nullptr, *dstates = nullptr, *residuals = nullptr, *adjoints = nullptr;
  float* dmaps = nullptr;
};
const char* kda_gradients_refuse(const Engine& base);
inline bool has_kda_gradients(const Engine& base) { return kda_gradients_refuse(base) == nullptr; }
KdaBackScratch cut_kda_gradients(Arena& arena, const Engine& base);
void run_kda_gradients(const Launch& launch, const KdaGradients& gradients, const KdaBackScratch& scratch);

}  // namespace linnet::cuda
