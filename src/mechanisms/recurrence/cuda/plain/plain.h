// The gradients of every recurrence, token by token: what is right for all types, widths and decays, where no faster kernels
// are.
//
// The columns of a state do not meet, forwards or backwards, so a warp takes 4 of them through the whole sequence. From the
// state kept before each chunk of 64 tokens it makes the states of 8 tokens at a time again, and goes back over them:
//
//   R += scale q_t do_t^T,  dq_t = scale S_t do_t,  du_t = R^T k_t,  dk_t = R u_t - S'_t (beta du_t)
//   dv_t = beta du_t,  dbeta_t = du_t . (v_t - S'_t^T k_t),  R' = R - k_t (beta du_t)^T,  dg_t = rowsum(R' S'_t),  R = exp(g_t)
//   R'
//
// (S' the decayed state; without beta u = v, and nothing is taken off). Sums over columns are left by blocks and added after.
#pragma once

#include "mechanisms/recurrence/cuda/launch.h"

namespace linnet::cuda {

inline constexpr int kPlainTokens = 8;  // whose states are kept at a time

// Rows of the state that a lane holds, and the warps of a block.
constexpr int plain_rows(int K) { return K <= 32 ? 4 : K <= 64 ? 8 : K <= 128 ? 16 : 32; }
constexpr int plain_warps(int rows) { return rows == 32 ? 4 : 8; }
constexpr int plain_shared_bytes(int rows) {
  return 4 * (kPlainTokens * plain_warps(rows) * rows * 32 + 64 * plain_warps(rows) * 4 + 64 * 8 * rows);
}
constexpr int64_t plain_blocks(int32_t K, int32_t V) {
  const int columns = 4 * plain_warps(plain_rows(K));
  return V > 0 ? (V + columns - 1) / columns : 1;
}
constexpr int64_t plain_record(int32_t K) { return 3 * static_cast<int64_t>(K) + 1; }  // dq, dk, dg by channel; dbeta

struct Plain {
  Engine e;  // saved: the states
  Rows dout, dv;
  States dfinal, dinitial;
  float* parts = nullptr;             // [blocks, B T, heads, plain_record]
  int32_t first_head = 0, heads = 0;  // of this launch
};

// Adds the parts of blocks and of grouped heads.
struct PlainSums {
  Engine e;
  Rows dq, dk, dg, dbeta;  // whose heads are the result's; absent: not wanted
  int32_t q_heads = 0, k_heads = 0;
  const float* parts = nullptr;
  int32_t blocks = 0, first_head = 0, heads = 0;
};

struct PlainGradients {
  Engine base;
  Rows dout;
  View dq, dk, dv;
  Rows dg, dbeta;  // [B, T, H] or, dg per channel, [B, T, H, K]
  View dg_head;
  States initial, dfinal, dinitial;
};
struct PlainScratch {
  void* states = nullptr;
  float *parts = nullptr, *dv = nullptr, *dg = nullptr;
  int32_t heads = 0;  // at a time
};
PlainScratch cut_plain(Arena& arena, const Engine& base);
void run_plain(const Launch& launch, const PlainGradients& gradients, const PlainScratch& scratch);

}  // namespace linnet::cuda
