// reverse: the gradient of the state over the chunks of a sequence, from the last to the first; as walk.cuh.
#pragma once

#include "mechanisms/recurrence/cuda/general/walk.cuh"

namespace linnet::cuda {
namespace {

template <int kPlanes, bool beta, int kParts>
__device__ void reverse(const General& g) {
  constexpr int kMiddle = general_middle(kPlanes, beta);
  const Engine& e = g.e;
  extern __shared__ __align__(16) char memory[];
  char* at = memory;
  const Planes keys = cut_planes<kPlanes>(at, 64, g.Kp), state = cut_planes<kPlanes>(at, g.Kp, 32);
  const Planes square = cut_planes<kMiddle>(at, 64, 64);  // P, then L
  const Planes dout = cut_planes<kPlanes>(at, 64, 32), decayed_dout = cut_planes<kPlanes>(at, 64, 32);
  Planes scaled = {}, corrected = {};
  if constexpr (beta) {
    scaled = cut_planes<kMiddle>(at, 64, 32);
    corrected = cut_planes<kMiddle>(at, 64, 32);
  }
  float *query = cut_floats(at, 64), *read = cut_floats(at, 64), *write = cut_floats(at, 64), *strength = cut_floats(at, 64);
  const int thread = threadIdx.x, warp = thread / 32, column = blockIdx.y * kGeneralColumns;
  const int m = warp % 4 * 16, n = warp / 4 * 16;
  Place p = sequence_of(e, blockIdx.x);
  const int chunks = static_cast<int>((p.length + 63) / 64);
  Held<kParts> D;
  each_held<kParts>(g.Kp, [&](int part, int tile, int half, int row, int c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      D.x[part][tile][2 * half + i] = state_at(g.dfinal, g.dfinal_z, p.n, p.h, row, column + c + i, e.K, g.V);
    }
  });
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    go_to(p, e, chunk);
    const Source k_write = decayed<kPlanes>(g, g.k_write, e.k, p), k_read = decayed<kPlanes>(g, g.k_read, e.k, p);
    const Source q = decayed<kPlanes>(g, g.q_read, e.q, p);
    const Source d = source_of(g.dout, p.b, p.first, p.h, g.Vr);
    if (thread < 64) {
      const bool there = thread < p.rows;
      query[thread] = g.factors == nullptr ? 1 : factors_of(g, p, 0)[thread];
      read[thread] = g.factors == nullptr ? 1 : factors_of(g, p, 1)[thread];
      write[thread] = g.factors == nullptr ? 1 : factors_of(g, p, 2)[thread];
      strength[thread] = beta && there ? beta_of(g, p, thread) : 0;
    }
    load_tile<kPlanes>(keys, k_write, p.rows, 64, 0, g.Kp, nullptr);
    each_held<kParts>(g.Kp, [&](int part, int tile, int half, int row, int c) {
      const float x = D.x[part][tile][2 * half], y = D.x[part][tile][2 * half + 1];
      if (column + c < g.Vp)
        store_planes<kPlanes>(g.dstates, g.tiles * g.Kp * g.Vp, (p.tile * g.Kp + row) * g.Vp + column + c, x, y);
      put2<kPlanes>(state, row, c, x, y);
    });
    load_tile<kMiddle>(square, planes_at<kMiddle>(g.scores, g.tiles * 64 * 64, p.tile * 64 * 64, 64), 64, 64, 0, 64, nullptr);
    const bool factors = g.factors != nullptr;
    const int rows = g.dout.data == nullptr ? 0 : p.rows;
    load_tile<kPlanes>(dout, d, rows, 64, column, 32, nullptr);
    if (factors) {
      tiles_ready();
      load_tile<kPlanes>(decayed_dout, d, rows, 64, column, 32, query);
    }
    tiles_ready();
    float dN[2][4] = {}, within[2][4] = {};
    multiply<kPlanes, kPlanes, false, true>(dN, keys, m, 0, state, n, 0, g.Kp / 16);
    multiply<kMiddle, kPlanes, true, true>(within, square, m, m, dout, n, m, 4 - m / 16);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dN[tile][i] = fmaf(write[m + lane_row() + i / 2 * 8], dN[tile][i], e.scale * within[tile][i]);
      }
    }
    if constexpr (beta) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = m + lane_row() + 8 * half, c = n + 8 * tile + lane_column();
          put2<kMiddle>(scaled, row, c, strength[row] * dN[tile][2 * half], strength[row] * dN[tile][2 * half + 1]);
        }
      }
      tiles_ready();
      load_tile<kMiddle>(square, planes_at<kMiddle>(g.system, g.tiles * 64 * 64, p.tile * 64 * 64, 64), 64, 64, 0, 64, nullptr);
      if (g.k_write != nullptr) load_tile<kPlanes>(keys, k_read, p.rows, 64, 0, g.Kp, nullptr);
      tiles_ready();
      float sum[2][4] = {};
      multiply<kMiddle, kMiddle, true, true>(sum, square, m, m, scaled, n, m, 4 - m / 16);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dN[tile][i] += sum[tile][i];  // Z
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m + lane_row() + 8 * half, c = n + 8 * tile + lane_column();
        const float x = dN[tile][2 * half], y = dN[tile][2 * half + 1], f = beta ? strength[row] : 1;
        if constexpr (beta) {
          if (column + c < g.Vp)
            store_planes<kMiddle>(g.adjoints, g.tiles * 64 * g.Vp, (p.tile * 64 + row) * g.Vp + column + c, x, y);
          put2<kMiddle>(corrected, row, c, -f * read[row] * x, -f * read[row] * y);
        }
        if (g.dv.data != nullptr && row < p.rows && column + c < g.V) {
          store_results(g.dv, row_of(g.dv, p.b, p.first + row, p.h) + column + c, column + c + 1 < g.V, f * x, f * y);
        }
      }
    }
    float added[kParts][4][4] = {}, from_reads[kParts][4][4] = {};
    if constexpr (beta) {
      tiles_ready();
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int first = 16 * (warp + 8 * part);
        if (first < g.Kp) multiply<kPlanes, kMiddle, true, true>(added[part], keys, first, 0, corrected, 0, 0, 4);
      }
    }
    tiles_ready();
    load_tile<kPlanes>(keys, q, p.rows, 64, 0, g.Kp, nullptr);
    tiles_ready();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int first = 16 * (warp + 8 * part);
      if (first < g.Kp)
        multiply<kPlanes, kPlanes, true, true>(from_reads[part], keys, first, 0, factors ? decayed_dout : dout, 0, 0, 4);
    }
    each_held<kParts>(g.Kp, [&](int part, int tile, int half, int row, int) {
      const float sum = total_of(g, p, row);
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        D.x[part][tile][i] = carry(D.x[part][tile][i], sum, fmaf(e.scale, from_reads[part][tile][i], added[part][tile][i]));
      }
    });
    tiles_ready();
  }
  each_held<kParts>(g.Kp, [&](int part, int tile, int half, int row, int c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      set_state(g.dinitial, g.dinitial_z, p.n, p.h, row, column + c + i, e.K, g.V, D.x[part][tile][2 * half + i]);
    }
  });
}

}  // namespace
}  // namespace linnet::cuda
