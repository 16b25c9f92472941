// Runs the general engine (general.h).
#pragma once

#include "mechanisms/recurrence/cuda/general/general.h"
#include "mechanisms/recurrence/cuda/launch.h"

namespace linnet::cuda {

// Whether it takes this engine: forwards in time, keys of at most 256 channels, and shared memory for them.
bool is_general(const Engine& engine, bool gradients);
// The same as a reason, null when it does; few tokens go one by one.
const char* general_refuses(const Engine& engine, bool gradients);
// What it needs is cut in the same way for the forward and the gradients of a call.
struct GeneralScratch {
  void *q = nullptr, *k = nullptr, *v = nullptr, *dout = nullptr;  // copies: mapped, masked, aligned, widened
  float *q_norms = nullptr, *k_norms = nullptr;
  General g;                                          // the places of what kernels leave each other
  float *dq = nullptr, *dk = nullptr, *dv = nullptr;  // [B, T, H, channels], before groups are added and maps undone
  float* dg = nullptr;                                // [B, T, H], where g is one number for a head
};
GeneralScratch cut_general(Arena& arena, const Engine& engine, bool gradients);
void run_general(const Launch& launch, const Engine& engine, const GeneralScratch& scratch);

// The gradients; views that are absent are not wanted.
struct GeneralGradients {
  Engine base;     // with initial states and, when normalised, den
  Rows dout, out;  // out: of the forward, when normalised
  View dq, dk, dv;
  Rows dg, dbeta;  // [B, T, H] or, dg per channel, [B, T, H, K]
  View dg_head;
  States dfinal, dinitial, dfinal_z, dinitial_z;
};
void run_general_gradients(const Launch& launch, const GeneralGradients& gradients, const GeneralScratch& scratch);

// Not causal: every query reads the state of all `keys` tokens of k and v; engine.T is the queries'. No decays, no beta.
struct FullScratch {
  void *q = nullptr, *k = nullptr, *v = nullptr, *dout = nullptr;
  General g;
  void *states = nullptr, *later = nullptr;  // [N, H, Kp, Vp]
  float *dq = nullptr, *dk = nullptr, *dv = nullptr;
};
FullScratch cut_full(Arena& arena, const Engine& engine, int64_t keys, bool gradients);
void run_full(const Launch& launch, const Engine& engine, int64_t keys, const FullScratch& scratch);
void run_full_gradients(const Launch& launch, const GeneralGradients& gradients, int64_t keys, const FullScratch& scratch);

}  // namespace linnet::cuda
