// Which token stands where in the grid of a Monarch call, on the device.
#pragma once

#include "problem.h"

namespace linnet::cuda {

struct MonarchUnitIndex {
  int b, h, tile;
};
__device__ __forceinline__ MonarchUnitIndex unit_of(const MonarchProblem& g, int64_t local) {
  const int64_t unit = g.first_unit + local;
  return {static_cast<int>(unit / g.q_tiles / g.H), static_cast<int>(unit / g.q_tiles % g.H),
          static_cast<int>(unit % g.q_tiles)};
}
// The token at (row, col) of a tile, -1 for padding; `row` counts from the first tile when tile is 0.
__device__ __forceinline__ int token_at(const MonarchProblem& g, int tokens, int tile, int row, int col) {
  const int64_t t = (static_cast<int64_t>(tile) * g.rows + row) * g.cols + col - g.front;
  return col < g.cols && t >= 0 && t < tokens ? static_cast<int>(t) : -1;
}
__device__ __forceinline__ int query_at(const MonarchProblem& g, int tile, int row, int col) {
  return row < g.rows ? token_at(g, g.T, tile, row, col) : -1;
}
__device__ __forceinline__ bool mask_at(const MonarchProblem& g, int b, int t) {
  return g.mask == nullptr || g.mask[b * g.mask_stride_b + t * g.mask_stride_t] != 0;
}
// The key at place `col` of block p, -1 where there is none or it is masked.
__device__ __forceinline__ int valid_key_at(const MonarchProblem& g, int b, int p, int col) {
  const int t = token_at(g, g.S, 0, p, col);
  return t >= 0 && mask_at(g, b, t) ? t : -1;
}
__device__ __forceinline__ int valid_query_at(const MonarchProblem& g, int b, int tile, int row, int col) {
  const int t = query_at(g, tile, row, col);
  return t >= 0 && (!g.masked_queries || mask_at(g, b, t)) ? t : -1;
}
__device__ __forceinline__ bool is_visible(const MonarchProblem& g, int tile, int p) {
  return g.group == 0 || p / g.rows / g.group <= tile / g.group;
}
__device__ __forceinline__ int64_t offset_of(const MonarchRows& x, int b, int t, int h) {
  return b * x.stride_b + t * x.stride_t + h * x.stride_h;
}

// 8 numbers of 16 bits of a result.
__device__ __forceinline__ void store_row(const MonarchRows& rows, bool aligned, int64_t offset, const uint4& x) {
  uint16_t* const to = static_cast<uint16_t*>(rows.data) + offset;
  if (aligned) {
    __stcs(reinterpret_cast<uint4*>(to), x);
  } else {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
}

}  // namespace linnet::cuda
