// MonarchGrid: how the tokens of a call stand in tiles, rows (blocks) and columns (slots); shared by the reference and the
// kernels. The plain form is one tile of M x block.
#pragma once

#include "monarch.h"

namespace linnet {

struct MonarchGrid {
  View q, k, v, mask;
  int64_t B, T, S, H, K, V;
  int64_t rows, cols;        // of a tile
  int64_t q_tiles, k_tiles;  // 0 for no tokens
  int64_t front;             // empty places before the first token
  int64_t steps, group;
  double scale;
  bool causal, masked_queries;  // masked_queries: the mask also tells which queries count for W

  // The token at (tile, row, col), -1 for padding.
  LINNET_INLINE int64_t query(int64_t tile, int64_t row, int64_t col) const {
    const int64_t t = (tile * rows + row) * cols + col - front;
    return t >= 0 && t < T ? t : -1;
  }
  LINNET_INLINE int64_t key(int64_t tile, int64_t row, int64_t col) const {  // any place, masked or not
    const int64_t t = (tile * rows + row) * cols + col - front;
    return t >= 0 && t < S ? t : -1;
  }
  LINNET_INLINE bool mask_at(int64_t b, int64_t t) const {
    return !mask.given() || static_cast<const uint8_t*>(mask.data)[b * mask.stride[0] + t * mask.stride[1]] != 0;
  }
  LINNET_INLINE bool valid_key(int64_t b, int64_t t) const { return t >= 0 && mask_at(b, t); }
  LINNET_INLINE bool valid_query(int64_t b, int64_t t) const { return t >= 0 && (!masked_queries || mask_at(b, t)); }
  LINNET_INLINE bool visible(int64_t q_tile, int64_t k_tile) const { return group == 0 || k_tile / group <= q_tile / group; }
};

LINNET_INLINE int64_t monarch_block(const MonarchArgs& args) {
  if (args.block > 0) return args.block;
  int64_t b = 1;
  while ((b + 1) * (b + 1) <= args.q.size[1]) ++b;
  return b;
}

LINNET_INLINE MonarchGrid monarch_grid(const MonarchArgs& args) {
  MonarchGrid g{};
  g.q = args.q, g.k = args.k, g.v = args.v, g.mask = args.mask;
  g.B = args.q.size[0], g.T = args.q.size[1], g.S = args.k.size[1], g.H = args.q.size[2], g.K = args.q.size[3];
  g.V = args.v.size[3];
  g.cols = monarch_block(args);
  if (g.cols > g.T && g.T > 0) g.cols = g.T;  // one block: what lies behind the last token changes nothing
  g.rows = (g.T + g.cols - 1) / g.cols;
  g.q_tiles = g.k_tiles = g.T > 0 ? 1 : 0;
  g.front = args.pad == MonarchPad::pre ? g.rows * g.cols - g.T : 0;
  g.steps = args.steps;
  g.scale = args.scale.value_or(1 / __builtin_sqrt(static_cast<double>(g.K)));
  g.causal = args.causal, g.masked_queries = true;
  return g;
}

LINNET_INLINE MonarchGrid monarch_grid(const MonarchTiledArgs& args) {
  MonarchGrid g{};
  g.q = args.q, g.k = args.k, g.v = args.v, g.mask = args.mask;
  g.B = args.q.size[0], g.T = args.q.size[1], g.S = args.k.size[1], g.H = args.q.size[2], g.K = args.q.size[3];
  g.V = args.v.size[3];
  g.rows = args.tile_rows, g.cols = args.tile_cols;
  const int64_t longest = g.T > g.S ? g.T : g.S;  // a tile needs no more places than there are tokens
  if (g.cols > longest && longest > 0) g.cols = longest;
  const int64_t enough = (longest + g.cols - 1) / g.cols;
  if (g.rows > enough && enough > 0) g.rows = enough;
  const int64_t tile = g.rows * g.cols;
  g.q_tiles = (g.T + tile - 1) / tile, g.k_tiles = (g.S + tile - 1) / tile;
  g.steps = args.steps, g.group = args.group;
  g.scale = args.scale.value_or(1 / __builtin_sqrt(static_cast<double>(g.K)));
  return g;
}

}  // namespace linnet
