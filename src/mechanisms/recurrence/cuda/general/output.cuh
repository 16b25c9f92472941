// output: the reads of a chunk, O = scale (Qp S + P (beta R)), 64 value channels to a block of 4 warps.
#pragma once

#include "mechanisms/recurrence/cuda/general/walk.cuh"

namespace linnet::cuda {
namespace {

template <int kPlanes, bool beta>
__device__ void output(const General& g) {
  constexpr int kPanel = general_panel(kPlanes), kMiddle = general_middle(kPlanes, beta);
  const Engine& e = g.e;
  const Place p = chunk_of(e);
  if (p.rows == 0) return;
  extern __shared__ __align__(16) char memory[];
  char* at = memory;
  float *z = cut_floats(at, 256), *factor = cut_floats(at, 64), *den = cut_floats(at, 3 * 64);
  char* tiles = at;
  const int thread = threadIdx.x, m = thread / 32 * 16, column = blockIdx.z * 64;
  const int64_t states_tile = g.kept_once ? p.n * e.H + p.h : p.tile;
  const Source q = decayed<kPlanes>(g, g.q_read, e.q, p);
  const int64_t states_plane = (g.kept_once ? e.N * e.H : g.tiles) * g.Kp * g.Vp;
  const Source S = planes_at<kPlanes>(g.states, states_plane, states_tile * g.Kp * g.Vp, g.Vp);
  if (thread < 64) {
    factor[thread] = g.factors == nullptr ? 1 : factors_of(g, p, 0)[thread];
  }
  if (e.normalize) {
    for (int c = thread; c < g.Kp; c += blockDim.x) {
      float sum = 0;
#pragma unroll
      for (int i = kPlanes - 1; i >= 0; --i)
        sum += __bfloat162float(static_cast<const bf16*>(S.data)[i * S.plane + static_cast<int64_t>(c) * g.Vp + g.V]);
      z[c] = sum;
    }
  }
  float acc[8][4] = {}, share = 0;
  {
    const Planes Q = cut_planes<kPlanes>(at, 64, kPanel), states = cut_planes<kPlanes>(at, kPanel, 64);
    for (int panel = 0; panel < g.Kp; panel += kPanel) {
      const int width = min(kPanel, g.Kp - panel);
      load_tile<kPlanes>(Q, q, p.rows, 64, panel, width, nullptr);
      Source rows = S;
      rows.data = static_cast<const bf16*>(S.data) + static_cast<int64_t>(panel) * g.Vp;
      load_tile<kPlanes>(states, rows, width, width, column, 64, nullptr);
      tiles_ready();
      multiply<kPlanes, kPlanes, false, true>(acc, Q, m, 0, states, 0, 0, width / 16);
      if (e.normalize) {
        const int row = thread / 2, half = width / 2;
        for (int c = thread % 2 * half; c < thread % 2 * half + half; ++c)
          share = fmaf(get<kPlanes>(Q, row, c), z[panel + c], share);
      }
      tiles_ready();
    }
  }
#pragma unroll
  for (int tile = 0; tile < 8; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[tile][i] *= factor[m + lane_row() + i / 2 * 8];
  }
  share *= factor[thread / 2];
  if (!g.kept_once) {
    at = tiles;
    const Planes P = cut_planes<kMiddle>(at, 64, kPanel), N = cut_planes<kMiddle>(at, kPanel, 64);
    const Source scores = planes_at<kMiddle>(g.scores, g.tiles * 64 * 64, p.tile * 64 * 64, 64);
    Source values = source_of(e.v, p.b, p.first, p.h, g.Vr);
    if constexpr (beta) values = planes_at<kMiddle>(g.residuals, g.tiles * 64 * g.Vp, p.tile * 64 * g.Vp, g.Vp);
    for (int panel = 0; panel < 64; panel += kPanel) {
      load_tile<kMiddle>(P, scores, 64, 64, panel, kPanel, nullptr);
      Source rows = values;
      rows.data = static_cast<const char*>(values.data) + panel * values.stride * (values.dtype == Dtype::f32 ? 4 : 2);
      load_tile<kMiddle>(N, rows, p.rows - panel, kPanel, column, 64, nullptr);
      tiles_ready();
      const int steps = min(kPanel, m + 16 - panel) / 16;
      multiply<kMiddle, kMiddle, false, true>(acc, P, m, 0, N, 0, 0, steps);
      if (e.normalize) {
        const int row = thread / 2, half = kPanel / 2;
        for (int c = thread % 2 * half; c < thread % 2 * half + half; ++c) share += get<kMiddle>(P, row, c);
      }
      tiles_ready();
    }
  }
  if (e.normalize) {
    share += __shfl_xor_sync(0xffffffff, share, 1);
    const int row = thread / 2;
    const float sum = fmaf(e.scale, share, e.eps);
    den[row] = sum;
    if (thread % 2 == 0 && row < p.rows && column == 0 && e.den.data != nullptr)
      ptx::store(const_cast<void*>(e.den.data), e.den.dtype, row_of(e.den, p.b, p.first + row, p.h), sum);
    tiles_ready();
  }
  if (e.out.data == nullptr) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = m + lane_row() + 8 * half;
    if (row >= p.rows) continue;
    const int64_t place = row_of(e.out, p.b, p.first + row, p.h);
    const float unit = e.normalize ? (den[row] == 0 ? 0 : e.scale / den[row]) : e.scale;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const int c = column + 8 * tile + lane_column();
      if (c < g.V) store_results(e.out, place + c, c + 1 < g.V, unit * acc[tile][2 * half], unit * acc[tile][2 * half + 1]);
    }
  }
}

}  // namespace
}  // namespace linnet::cuda
