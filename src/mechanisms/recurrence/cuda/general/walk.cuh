// walk: the state over the chunks of a sequence, 32 value channels to a block of 8 warps: a warp has 16 rows of the state, and
// 16 more of keys of more than 128 channels, in registers; tokens by key channels and states pass through shared memory.
#pragma once

#include "mechanisms/recurrence/cuda/general/gates.cuh"

namespace linnet::cuda {
namespace {

// Keys or queries of a chunk with their decays: copies that have them (channels), or rows and factors.
template <int kPlanes>
__device__ __forceinline__ Source decayed(const General& g, const void* copies, const Rows& rows, const Place& p) {
  if (copies == nullptr) return source_of(rows, p.b, p.first, p.h, g.Kr);
  return planes_at<kPlanes>(copies, g.tiles * 64 * g.Kp, p.tile * 64 * g.Kp, g.Kp);
}
// which: 0 of q, 1 of k when it is read against the state, 2 when it is written.
__device__ __forceinline__ const float* factors_of(const General& g, const Place& p, int which) {
  return g.factors == nullptr ? nullptr : g.factors + (which * g.tiles + p.tile) * 64;
}
__device__ __forceinline__ float total_of(const General& g, const Place& p, int row) {
  if (g.totals == nullptr) return 0;
  return g.e.g_width > 1 ? g.totals[p.tile * g.Kp + row] : g.totals[p.tile];
}

// The rows of the state that a warp holds, and their exchange with memory: 16, and 16 more of keys of more than 128 channels.
template <int kParts>
struct Held {
  float x[kParts][4][4];
};
template <int kParts, class Visit>
__device__ __forceinline__ void each_held(int Kp, const Visit& visit) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int first = 16 * (warp + 8 * part);
    if (first >= Kp) continue;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(part, tile, half, first + lane_row() + 8 * half, 8 * tile + lane_column());
      }
    }
  }
}
// A state [K, V] of the caller, with the sums z as its column V.
__device__ __forceinline__ float state_at(const States& s, const States& z, int64_t n, int h, int row, int column, int K,
                                          int V) {
  if (row >= K) return 0;
  if (column < V)
    return s.data == nullptr ? 0 : s.data[n * s.stride_n + h * s.stride_h + row * s.stride_row + column * s.stride_column];
  return column == V && z.data != nullptr ? z.data[n * z.stride_n + h * z.stride_h + row * z.stride_row] : 0;
}
__device__ __forceinline__ void set_state(const States& s, const States& z, int64_t n, int h, int row, int column, int K, int V,
                                          float x) {
  if (row >= K) return;
  if (column < V) {
    if (s.data != nullptr) s.data[n * s.stride_n + h * s.stride_h + row * s.stride_row + column * s.stride_column] = x;
  } else if (column == V && z.data != nullptr) {
    z.data[n * z.stride_n + h * z.stride_h + row * z.stride_row] = x;
  }
}

template <int kPlanes, bool beta, int kParts>
__device__ void walk(const General& g) {
  constexpr int kMiddle = general_middle(kPlanes, beta);
  const Engine& e = g.e;
  const int64_t states_plane = (g.kept_once ? e.N * e.H : g.tiles) * g.Kp * g.Vp;
  extern __shared__ __align__(16) char memory[];
  char* at = memory;
  const Planes keys = cut_planes<kPlanes>(at, 64, g.Kp);
  Planes state = {}, system = {}, scaled = {};
  if constexpr (beta) {
    state = cut_planes<kPlanes>(at, g.Kp, 32);
    system = cut_planes<kMiddle>(at, 64, 64);
    scaled = cut_planes<kMiddle>(at, 64, 32);
  }
  const Planes writes = cut_planes<kMiddle>(at, 64, 32);
  float *read = cut_floats(at, 64), *write = cut_floats(at, 64), *strength = cut_floats(at, 64);
  const int thread = threadIdx.x, warp = thread / 32, column = blockIdx.y * kGeneralColumns;
  const int m = warp % 4 * 16, n = warp / 4 * 16;  // of what has tokens for rows
  Place p = sequence_of(e, blockIdx.x);
  const int chunks = static_cast<int>((p.length + 63) / 64);
  Held<kParts> S;
  each_held<kParts>(g.Kp, [&](int part, int tile, int half, int row, int c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      S.x[part][tile][2 * half + i] = state_at(e.initial, e.initial_z, p.n, p.h, row, column + c + i, e.K, g.V);
    }
  });
  for (int chunk = 0; chunk < chunks; ++chunk) {
    go_to(p, e, chunk);
    const Source k_read = decayed<kPlanes>(g, g.k_read, e.k, p), k_write = decayed<kPlanes>(g, g.k_write, e.k, p);
    const Source v = source_of(e.v, p.b, p.first, p.h, g.Vr);
    if (thread < 64) {
      const bool there = thread < p.rows;
      read[thread] = g.factors == nullptr ? 1 : factors_of(g, p, 1)[thread];
      write[thread] = g.factors == nullptr ? 1 : factors_of(g, p, 2)[thread];
      strength[thread] = beta && there ? beta_of(g, p, thread) : 0;
    }
    load_tile<kPlanes>(keys, beta ? k_read : k_write, p.rows, 64, 0, g.Kp, nullptr);
    each_held<kParts>(g.Kp, [&](int part, int tile, int half, int row, int c) {
      const float x = S.x[part][tile][2 * half], y = S.x[part][tile][2 * half + 1];
      if (g.states != nullptr && !g.kept_once && column + c < g.Vp)
        store_planes<kPlanes>(g.states, states_plane, (p.tile * g.Kp + row) * g.Vp + column + c, x, y);
      if constexpr (beta) put2<kPlanes>(state, row, c, x, y);
    });
    if constexpr (beta) {
      load_tile<kMiddle>(system, planes_at<kMiddle>(g.system, g.tiles * 64 * 64, p.tile * 64 * 64, 64), 64, 64, 0, 64, nullptr);
      tiles_ready();
      float Y[2][4] = {};
      multiply<kPlanes, kPlanes, false, true>(Y, keys, m, 0, state, n, 0, g.Kp / 16);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = m + lane_row() + 8 * half, c = n + 8 * tile + lane_column();
          const float2 value = row < p.rows ? load_2(v, row, column + c) : float2{0, 0};
          float &x = Y[tile][2 * half], &y = Y[tile][2 * half + 1];
          x = value.x - read[row] * x;
          y = value.y - read[row] * y;
          put2<kMiddle>(scaled, row, c, strength[row] * x, strength[row] * y);
        }
      }
      tiles_ready();
      float R[2][4] = {};
      multiply<kMiddle, kMiddle, false, true>(R, system, m, 0, scaled, n, 0, m / 16 + 1);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = m + lane_row() + 8 * half, c = n + 8 * tile + lane_column();
          const float x = Y[tile][2 * half] + R[tile][2 * half], y = Y[tile][2 * half + 1] + R[tile][2 * half + 1];
          const float kept = g.keeps_writes ? strength[row] : 1, f = strength[row] * write[row];
          if (column + c < g.Vp)
            store_planes<kMiddle>(g.residuals, g.tiles * 64 * g.Vp, (p.tile * 64 + row) * g.Vp + column + c, kept * x,
                                  kept * y);
          put2<kMiddle>(writes, row, c, f * x, f * y);
        }
      }
      if (g.k_write != nullptr) {  // its copies differ
        tiles_ready();
        load_tile<kPlanes>(keys, k_write, p.rows, 64, 0, g.Kp, nullptr);
      }
    } else {
      if (g.factors != nullptr) tiles_ready();
      load_tile<kMiddle>(writes, v, p.rows, 64, column, 32, g.factors == nullptr ? nullptr : write);
    }
    tiles_ready();
    float added[kParts][4][4] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int first = 16 * (warp + 8 * part);
      if (first < g.Kp) multiply<kPlanes, kMiddle, true, true>(added[part], keys, first, 0, writes, 0, 0, 4);
    }
    each_held<kParts>(g.Kp, [&](int part, int tile, int half, int row, int) {
      const float sum = total_of(g, p, row);
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        S.x[part][tile][i] = carry(S.x[part][tile][i], sum, g.write_scale * added[part][tile][i]);
      }
    });
    tiles_ready();
  }
  each_held<kParts>(g.Kp, [&](int part, int tile, int half, int row, int c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      set_state(e.final, e.final_z, p.n, p.h, row, column + c + i, e.K, g.V, S.x[part][tile][2 * half + i]);
    }
    if (g.kept_once && g.states != nullptr && column + c < g.Vp) {
      store_planes<kPlanes>(g.states, states_plane, ((p.n * e.H + p.h) * g.Kp + row) * g.Vp + column + c,
                            S.x[part][tile][2 * half], S.x[part][tile][2 * half + 1]);
    }
  });
}

}  // namespace
}  // namespace linnet::cuda
