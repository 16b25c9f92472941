// What the kernels of `hierarchical` are told (plain data).
//
// The tree has windows of one size at each level, so that its nodes are numbered level by level and nothing of it needs memory.
// A row is what attends: a node (tie block) or a token (prefix, row), which has a row at every level of its path. The row's
// pairs at level l are the children of the parent of its node there: all logits, weights and their gradients stand in memory,
// and each step is a kernel with a thread for a pair, a row, or a channel. Sums are doubles in one order.
#pragma once

#include "mechanisms/hierarchical/hierarchical.h"
#include "mechanisms/shared/strided.h"

namespace linnet::cuda {

inline constexpr int kHierarchicalLevels = 40;

struct HierarchicalCall {
  Strided q, k, v, pos, mask, out, energy, kl;
  Strided dout, denergy, dq, dk, dv;
  int64_t B = 0, T = 0, H = 0, K = 0, V = 0, E = 0;
  int64_t N = 0, I = 0, pos_nodes = 0;  // nodes, inner ones, those that have a position
  int64_t pairs = 0, all_rows = 0;      // of one head
  int32_t depth = 0;                    // level of the root; tokens are level 0
  HierarchicalTie tie = HierarchicalTie::block;
  bool include_self = false, causal = false;
  double scale = 1;
  int64_t kl_rows = 0;
  int64_t size[kHierarchicalLevels + 1] = {};      // children of a whole node of level l
  int64_t nodes[kHierarchicalLevels + 1] = {};     // nodes of level l
  int64_t base[kHierarchicalLevels + 1] = {};      // the number of the first
  int64_t span[kHierarchicalLevels + 1] = {};      // tokens of a whole node
  int64_t rows_at[kHierarchicalLevels + 1] = {};   // where the rows of level l begin
  int64_t pairs_at[kHierarchicalLevels + 1] = {};  // and their pairs

  // Memory, for each head of each batch row.
  float* n = nullptr;                                              // [N]: tokens under a node that the mask leaves
  double *mean_q = nullptr, *mean_k = nullptr, *mean_v = nullptr;  // [I, K], [I, K], [I, V]
  double *w = nullptr, *ds = nullptr;                              // [pairs]
  double *lambda = nullptr, *g = nullptr, *mass = nullptr;         // [all_rows]
  double* count = nullptr;                                         // [all_rows]: prefix: tokens of the node so far
  double* sums = nullptr;                                          // [T, K]: prefix: sums of queries so far
  double* node_out = nullptr;                                      // [I, V]: block; backward: sums of dout
  double *total = nullptr, *kls = nullptr;                         // [3]: energy, rows, last token; [rows of kl, 2]
  double *r = nullptr, *dg = nullptr;                              // backward: [all_rows]
  double *later = nullptr, *dkv = nullptr, *dquery = nullptr;      // [N], [N, K + V], [N or T, K]
  double* steps = nullptr;                                         // [T, K]: prefix: gradients of means
  float* dpos = nullptr;                                           // [B, pos_nodes, H, E], for all heads
};
static_assert(sizeof(HierarchicalCall) + 8 <= 4096);

}  // namespace linnet::cuda
