// The general engine of the recurrence: every option, type and width up to 256, forwards and backwards, in chunks of 64 tokens
// on the matrix units that every GPU since Ampere has (mma.sync). What its kernels are told, for host and device (plain data).
//
// Numbers as sums of bf16 numbers ("planes"), each the rounding of what the ones before leave: 1 for bf16 calls, 2 for f16, 3
// for f32, and products term by term, so that one kernel serves all types, and gates never leave the range of an operand.
//
//   prepare   P = tril(Q K^T decays), the chunk's system L, and either factors of rows or Q, K with their decays in them
//   walk      S over the chunks: Y = V - Kp S, R = Y + L (beta Y), S' = decay S + Ks^T (beta R); keeps S and R
//   output    O = scale (Qp S + P (beta R))
//   reverse   dS over the chunks, backwards: dN = scale P^T dO + Ks dS, Z = dN + L^T (beta dN),
//             dS' = decay dS + scale Qp^T dO - Kp^T (beta Z); keeps dS and Z; dV = beta Z
//   gradients dq, dk, dg, dbeta of a chunk from S, dS, R, Z (recurrence.md, section 6)
//
// Without beta R is V, Z is dN and there is no L. With beta, for M = I + diag(beta) A: L = -A M^-1, strictly lower, so that
// M^-1 = I + diag(beta) L and (I + A diag(beta))^-1 = I + L diag(beta): nothing is divided by beta, which may be 0.
//
// Decays are exact without a quotient: rows i > j whose numbers first differ in bit b are tied by F_b(i) F_b(j), where F_b is
// the decay between the row and the first row of the upper one of two neighbouring blocks of 2^b rows: all sums of g are over
// exactly their interval.
#pragma once

#include "mechanisms/recurrence/cuda/engine.h"

namespace linnet::cuda {

inline constexpr int kGeneralChunk = 64;
inline constexpr int kGeneralColumns = 32;  // value channels of a walk

// Rows of the workspace lie by tiles: (slot of the chunk * H + head) * 64 rows. Slots as in engine.h (saved_slot).
struct General {
  Engine e;                // q, k, v: rows of 16 bytes without maps, of `Kr` and `Vr` channels; out: the result; g, beta
  int32_t Kr = 0, Vr = 0;  // channels that rows have, multiples of 8
  int32_t Kp = 0, Vp = 0;  // channels of states, multiples of 16
  const float* q_norms = nullptr;  // [B, T, heads]: factors of rows (l2_norm)
  const float* k_norms = nullptr;
  // Planes [planes, ...]; `middle` ones where general_middle says how many.
  void* scores = nullptr;    // middle [tiles, 64, 64]: P
  void* system = nullptr;    // middle [tiles, 64, 64]: L
  float* factors = nullptr;  // [3, tiles, 64]: of q, of k when it is read against S, of k when it is written; null: all are 1
  void *q_read = nullptr, *k_read = nullptr, *k_write = nullptr;  // [tiles, 64, Kp]: with their decays; channels
  float* totals = nullptr;                                        // [tiles, 1 or Kp]: the chunk's sum of g
  void *states = nullptr, *dstates = nullptr;                     // [tiles, Kp, Vp]: before the chunk, behind it
  void *residuals = nullptr, *adjoints = nullptr;                 // middle [tiles, 64, Vp]: R, Z
  bool keeps_writes = false;                                      // residuals are beta R, as output reads them
  int64_t tiles = 0;
  // Normalised: out = num / den; den = scale phi(q) . z + eps, z is the state of one more value channel, whose values are 1.
  int32_t V = 0;           // channels of the result
  float write_scale = 1;   // of what walk writes to the state
  bool kept_once = false;  // states is [N, H, Kp, Vp], the same for all chunks, and there are no scores (not causal)
  // Backwards.
  Rows dout;        // rows of 16 bytes, Vr channels
  Rows dq, dk, dv;  // results: of every head; absent: not wanted
  Rows dg, dbeta;
  float* sums = nullptr;    // [3, K / 64, tiles, 64]: what dg is made of when it is one number for a head
  States dfinal, dinitial;  // [N, H, K, V]
  States dfinal_z, dinitial_z;
};

constexpr int general_panel(int planes) { return planes == 1 ? 64 : 32; }
constexpr int general_plane(int rows, int columns) { return rows * (columns + 8) * 2; }  // bytes
constexpr int general_middle(int planes, bool beta) { return planes > 1 ? planes : beta ? 2 : 1; }

constexpr int general_prepare_bytes(int planes, bool channel, bool beta) {
  const int panel = general_panel(planes);
  return 2 * planes * general_plane(64, panel) + (channel ? 3 * 64 * (panel + 1) * 4 : 0) + 14 * 64 * 4 +
         (beta ? 64 * 68 * 4 + (planes == 3 ? 64 * 64 * 8 : 64 * 68 * 4) + 4 * 16 * 20 * 4 : 0);
}
constexpr int general_walk_bytes(int planes, bool beta, int Kp) {
  const int middle = general_middle(planes, beta);
  return planes * general_plane(64, Kp) + (beta ? planes * general_plane(Kp, 32) + middle * general_plane(64, 64) : 0) +
         (beta ? 2 : 1) * middle * general_plane(64, 32) + 4 * 64 * 4;
}
constexpr int general_output_bytes(int planes, bool beta) {
  const int panel = general_panel(planes), middle = general_middle(planes, beta);
  const int first = planes * (general_plane(64, panel) + general_plane(panel, 64));
  const int second = middle * (general_plane(64, panel) + general_plane(panel, 64));
  return (first > second ? first : second) + (256 + 4 * 64) * 4;
}
constexpr int general_turned_bytes(int planes) { return 2 * planes * general_plane(64, general_panel(planes)); }
constexpr int general_reverse_bytes(int planes, bool beta, int Kp) {
  const int middle = general_middle(planes, beta);
  return planes * general_plane(64, Kp) + planes * general_plane(Kp, 32) + middle * general_plane(64, 64) +
         2 * planes * general_plane(64, 32) + (beta ? 2 * middle * general_plane(64, 32) : 0) + 4 * 64 * 4;
}
constexpr int general_gradients_bytes(int planes, bool channel, bool beta) {
  const int panel = general_panel(planes), middle = general_middle(planes, beta);
  const int first =
      planes * (general_plane(64, panel) + 2 * general_plane(64, panel)) + (beta ? 2 : 1) * middle * general_plane(64, panel);
  const int second = (beta ? 2 : 1) * middle * general_plane(64, 64) + 2 * planes * general_plane(64, 64) +
                     (channel ? 64 * 65 * 4 * 2 + 2 * planes * general_plane(64, 64) : 0);
  return (first > second ? first : second) + (12 + 8) * 64 * 4 + 1024;
}

}  // namespace linnet::cuda
