// Runs the delta rules on matrix units: forwards, and their gradients.
#pragma once

#include "mechanisms/recurrence/recurrence_delta.h"
#include "mechanisms/recurrence/recurrence_launch.h"

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

// `to` [B, T, heads, width] of 16-bit numbers := from, or zeros where `from` is absent.
void copy_rows(const Launch& launch, const Rows& to, const Rows& from, int64_t B, int64_t T, int64_t heads, int64_t width);

}  // namespace linnet::cuda
