// Runs the delta rules on matrix units: forwards, and their gradients.
#pragma once

#include "mechanisms/recurrence/cuda/delta/delta.h"
#include "mechanisms/recurrence/cuda/launch.h"

namespace linnet::cuda {

struct DeltaScratch {  // delta.h
  char *inverse = nullptr, *inverse_transposed = nullptr;
  char *states = nullptr, *dstates = nullptr, *residuals = nullptr, *adjoints = nullptr;
  float* bounds = nullptr;
  float *maps = nullptr, *dmaps = nullptr;
  int32_t* forgets = nullptr;
};

// Null when its kernels know this type, width and decay; a forward's rows must also be such that the copy engine can address
// them (delta_refuses), a backward copies those that are not.
const char* delta_shape_refuses(const Engine& e);
inline bool is_delta(const Engine& e) { return delta_shape_refuses(e) == nullptr; }
const char* delta_refuses(const Engine& e);
DeltaScratch cut_delta(Arena& arena, const Engine& e, bool gradients);
void run_delta(const Launch& launch, const Engine& e, const DeltaScratch& scratch);

// The gradients of an engine with beta; results that are absent are not wanted. `dout` can be addressed by the copy engine.
struct DeltaGradients {
  Rows dout, dq, dk, dv, dg, dbeta;
  States dfinal, dinitial;
};
void run_delta_gradients(const Launch& launch, const Engine& e, const DeltaGradients& gradients, const DeltaScratch& scratch);

}  // namespace linnet::cuda
