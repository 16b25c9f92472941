// The gradients of a recurrence without beta, with no decay or one for all channels of a head, on the GPU.
//
// dq, dk and dv are walks of the engine (engine.h). The gradient of g is a sum over the pairs (i, j) of a read and a
// write with t between them; the decay alone ties them, so no pair may be counted and taken off again across chunks:
//
//   dg_t = sum_{i >= t} (rows_i - columns_i + reads_i) + sum_{j < t} writes_j + exp(G_C) <S_0, dS_C>      sums inside a chunk
//   W_ij = scale (dout_i . v_j) (q_i . k_j) exp(G_i - G_j), j < i;   rows_i = sum_j W_ij,   columns_j = sum_i W_ij
//   reads_i = scale exp(G_i) q_i . S_0 dout_i,   writes_j = exp(G_C - G_j) k_j . dS_C v_j
//
// S_0, the state before a chunk, and dS_C, the gradient of the state behind it, are kept by walks. bf16, queries and keys with
// the same heads: a walk forwards that only keeps, and that of dv; then one kernel has dq, dk and dg of whole chunks, and adds
// the heads of a group (whole.cu). Else the walks of dq and dk keep them, and then one block has dg of one
// chunk of a head (gradients.cu).
#pragma once

#include "mechanisms/recurrence/cuda/rows.h"

namespace linnet::cuda {

struct Gradients {
  Engine base;  // the forward's q, k, v, g
  Rows dout;
  View dq, dk, dv;  // [B, T, heads, width]: results; absent: not wanted
  Rows dg;          // [B, T, H]; absent: not wanted
  View dg_head;     // [H]
  States initial, dfinal, dinitial;
  Finish skip = {};  // what the walk of dv ends with (mamba_ssd)
  StepGradients back = {};
};

struct GradientScratch {
  void* parts = nullptr;  // [B, T, H, max(K, V)]: a gradient before its heads are added, or whose view cannot take its rows
  void* saved[2] = {};    // S_0, dS_C / scale
  float* units[2] = {};
  float* dg = nullptr;  // [B, T, H], where g is one number for a head
  EngineScratch engine;
};
// `grouped`: some tensor has fewer heads than the call.
GradientScratch cut_gradients(Arena& arena, const Engine& base, bool grouped);
// Whether all of it runs on the tiled kernels, which alone take a base with step sizes.
bool is_tiled(const Gradients& gradients, const GradientScratch& scratch);
void run_gradients(const Launch& launch, const Gradients& gradients, const GradientScratch& scratch);

// What the kernels of dg are told.
struct Pairs {
  TensorMap q, k, v, dout;  // tiled only
  Engine e;                 // the forward's; out is dout
  Rows dg;
  const void* saved[2] = {};
  const float* units[2] = {};
  Rows dq, dk;         // whole.cu alone; absent: not wanted
  int32_t chunks = 0;  // of all sequences and groups of heads
};
constexpr int whole_shared_bytes(int K, int V) {
  return 1024 + 2 * (2 * K + 2 * V) / 64 * 64 * 128 + 4 * K * V + 64 * 128 + (2 * K / 16 * 2 + 2 * 10 + 10) * 64 * 4 + 1024;
}
constexpr int pairs_shared_bytes(int K, int V) { return 1024 + (2 * K + 2 * V) / 64 * 64 * 128 + 8192; }

}  // namespace linnet::cuda
