// Monarch attention on the GPU: what its kernels are told, for host and device code alike (plain data).
//
// A unit is (batch row, head, tile of queries), in this order; units of one call are worked on in chunks. Logits, c and lse are
// in base 2 (log2(e) is folded into the factor), except the lse that the caller gets.
#pragma once

#include <cstdint>

#include "core/view.h"

namespace linnet::cuda {

// A tensor [B, T, H, width] of any type; strides in elements.
struct MonarchRows {
  void* data = nullptr;  // null: absent
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
  Dtype dtype = Dtype::none;
};

struct MonarchProblem {
  MonarchRows q, k, v, out, lse;
  MonarchRows dout, dlse, dq, dk, dv;
  const uint8_t* mask = nullptr;  // [B, S]
  int64_t mask_stride_b = 0, mask_stride_t = 0;
  int64_t first_unit = 0;  // of this chunk
  int32_t T = 0, S = 0, H = 0, K = 0, V = 0;
  int32_t rows = 0, cols = 0, q_tiles = 0, k_tiles = 0, blocks = 0;  // blocks: k_tiles * rows
  int32_t front = 0, group = 0;
  float scale = 1, factor = 1;  // factor = scale * log2(e)
  bool causal = false, masked_queries = false;
  bool out_aligned = true;  // 16-byte stores can write out
};

// What passes between the programs of a chunk of units, in f32: [units, cols, blocks, width], or [units, cols, rows, width] for
// what belongs to queries.
struct MonarchStep {
  float* mean = nullptr;   // K: the queries that make R; the first step takes q itself
  float* a = nullptr;      // K
  float* c = nullptr;      // +inf: the block has no valid key and takes no part
  float* lse_w = nullptr;  // normalisers of W
  float* lse = nullptr;    // of queries: normalisers of L, before the last step (and for gradients)
};
struct MonarchPassing {
  float* y = nullptr;        // V
  float* own = nullptr;      // of queries, V: causal, the attention to the own block
  float* own_lse = nullptr;  // of queries
  float* da = nullptr;       // K
  float* dy = nullptr;       // V
  float* dc = nullptr;       //
  float* dmean = nullptr;    // K
  float* lse_r = nullptr;    // normalisers of R
  float* sums = nullptr;     // sum_i R dR, then dmean.mean
  float* delta = nullptr;    // of queries: dout.out - dlse, then sums of dlog
  float* dq = nullptr;       // of queries, K
  float* dk = nullptr;       // [B, H of the chunk, S, K]: sums over the steps
};

// One call of monarch_decode; states are f32 with strides of (batch row, head, slot, block).
struct MonarchDecodeCall {
  MonarchRows q, k, v, out, lse;
  MonarchRows q_block, k_block, v_block;  // [B, block, H, width]
  float *a = nullptr, *c = nullptr, *y = nullptr;
  int64_t a_stride[4] = {}, c_stride[4] = {}, y_stride[4] = {};
  void* lengths = nullptr;  // [B]
  int64_t lengths_stride = 0, B = 0, T = 0;
  int32_t H = 0, K = 0, V = 0, block = 0, M = 0;
  float factor = 1;
  bool lengths_64 = false;
};

// The tuned forward (tile/tile.cuh) in one step: a ring of chunks of heads, whose a and y stay in the L2 cache.
struct MonarchRing {
  void* ay = nullptr;             // [ring, heads, cols, blocks, 2 * D], D the padded width
  float* lse = nullptr;           // [ring, heads, cols, blocks]: normalisers of R
  uint32_t* counters = nullptr;   // ticket, then per chunk blocks done, then per chunk slots done; zero at the start
  uint32_t units = 0;             // B * H
  int32_t heads = 1, chunks = 1;  // heads of a chunk
  int32_t lag = 1, ring = 1;      // slots of chunk i come behind the blocks of chunk i + lag; chunk i lies at i % ring
};

// What passes between the tuned gradients' launches (tile/gradients.cuh), for a chunk of heads.
struct MonarchSaved {
  void* ay = nullptr;    // [units, cols, blocks, 2 * D], D the padded width: a and y, then e and dy
  float* lse = nullptr;  // [units, cols, blocks]: normalisers of R
  float* dc = nullptr;   // [units, cols, blocks]
};

}  // namespace linnet::cuda
