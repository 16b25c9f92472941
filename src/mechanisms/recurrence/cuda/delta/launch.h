// Runs the delta rules on matrix units: forwards, and their gradients.
#pragma once

#include "mechanisms/recurrence/cuda/delta/delta.h"
#include "mechanisms/recurrence/cuda/launch.h"

namespace linnet::cuda {

// Whether its kernels know this type, width and decay; the rows must also be such that the copy engine can address them.
bool is_delta(const Engine& e);
DeltaScratch cut_delta(Arena& arena, const Engine& e, bool gradients);
void run_delta(const Launch& launch, const Engine& e, const DeltaScratch& scratch);

// The gradients of an engine with beta; results that are absent are not wanted. `dout` can be addressed by the copy engine.
struct DeltaGradients {
  Rows dout, dq, dk, dv, dg, dbeta;
  States dfinal, dinitial;
};
void run_delta_gradients(const Launch& launch, const Engine& e, const DeltaGradients& gradients, const DeltaScratch& scratch);

}  // namespace linnet::cuda
