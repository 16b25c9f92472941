// turned: out = scale X S^T for rows X of value channels and one state of a sequence and head; 64 key channels to a block of 4
// warps. What the gradients of reads and writes are when they are not causal.
#pragma once

#include "mechanisms/recurrence/cuda/general/walk.cuh"

namespace linnet::cuda {
namespace {

template <int kPlanes>
__device__ void turned(const General& g) {
  constexpr int kPanel = general_panel(kPlanes);
  const Engine& e = g.e;
  const Place p = chunk_of(e);
  if (p.rows == 0) return;
  extern __shared__ __align__(16) char memory[];
  char* at = memory;
  const Planes X = cut_planes<kPlanes>(at, 64, kPanel), S = cut_planes<kPlanes>(at, 64, kPanel);
  const int m = threadIdx.x / 32 * 16, column = blockIdx.z * 64, width = min(64, g.Kp - column);
  const Source x = source_of(e.v, p.b, p.first, p.h, g.Vr);
  const int64_t first = ((p.n * e.H + p.h) * g.Kp + column) * g.Vp;
  const Source states = planes_at<kPlanes>(g.states, e.N * e.H * g.Kp * g.Vp, first, g.Vp);
  float acc[8][4] = {};
  for (int panel = 0; panel < g.Vp; panel += kPanel) {
    const int columns = min(kPanel, g.Vp - panel);
    load_tile<kPlanes>(X, x, e.v.data == nullptr ? 0 : p.rows, 64, panel, columns, nullptr);
    load_tile<kPlanes>(S, states, width, 64, panel, columns, nullptr);
    tiles_ready();
    multiply<kPlanes, kPlanes, false, false>(acc, X, m, 0, S, 0, 0, columns / 16);
    tiles_ready();
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = m + lane_row() + 8 * half;
    if (row >= p.rows) continue;
    const int64_t place = row_of(e.out, p.b, p.first + row, p.h);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const int c = column + 8 * tile + lane_column();
      if (c < e.K)
        store_results(e.out, place + c, c + 1 < e.K, e.scale * acc[tile][2 * half], e.scale * acc[tile][2 * half + 1]);
    }
  }
}

}  // namespace
}  // namespace linnet::cuda
