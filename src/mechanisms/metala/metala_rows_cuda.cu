// What MetaLA adds to the recurrence on the GPU, row by row: decays and keys before it, the augmentation behind it, and back.
#include "mechanisms/recurrence/cuda/map.cuh"
#include "metala_cuda.h"
#include "ptx/numbers.cuh"

namespace linnet::cuda {
namespace {

__device__ float log_sigmoid(float x) { return fminf(x, 0) - log1pf(expf(-fabsf(x))); }
__device__ float sum_of_warp(float x) {
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}
// Before the floor.
__device__ float raw_decay(const Metala& m, int64_t place) {
  const float x = ptx::load(m.gates.data, m.gates.dtype, place);
  return m.mixer ? log_sigmoid(x) / m.tau : x;
}
__device__ float log_decay(const Metala& m, int64_t place) {
  const float g = raw_decay(m, place);
  return g < m.floor ? m.floor : g;
}

__device__ bool is_masked(const Metala& m, int64_t b, int64_t t) {
  return m.mask != nullptr && m.mask[b * m.mask_stride_b + t * m.mask_stride_t] == 0;
}

// A row of a block's warp: batch row, token, head.
struct Row {
  int64_t b, t, number;
  int h;
};
__device__ Row row_at(const Metala& m, int64_t i) { return {i / m.H / m.T, i / m.H % m.T, i, static_cast<int>(i % m.H)}; }

}  // namespace

// g and k = 1 - exp(g), dense; and v where tokens are masked.
extern "C" __global__ void __launch_bounds__(256) metala_gates(const __grid_constant__ Metala m) {
  const int64_t rows = m.B * m.T * m.H;
  for (int64_t i = blockIdx.x * 8ll + threadIdx.x / 32; i < rows; i += gridDim.x * 8ll) {
    const Row r = row_at(m, i);
    const int64_t from = row_of(m.gates, r.b, r.t, r.h);
    const bool masked = is_masked(m, r.b, r.t);
    for (int c = threadIdx.x % 32; m.mask != nullptr && c < m.V; c += 32) {
      const int64_t v = row_of(m.source_v, r.b, r.t, r.h) + c;
      ptx::store(const_cast<void*>(m.v.data), m.v.dtype, row_of(m.v, r.b, r.t, r.h) + c,
                 masked ? 0 : ptx::load(m.source_v.data, m.source_v.dtype, v));
    }
    for (int c = threadIdx.x % 32; c < m.K; c += 32) {
      const float g = masked && m.skip_masked ? 0 : log_decay(m, from + c);
      m.g[i * m.K + c] = g;
      ptx::store(m.k, m.dtype, i * m.K + c, -expm1f(g));
    }
  }
}

// out += sigmoid(u v) or u v.
extern "C" __global__ void __launch_bounds__(256) metala_finish(const __grid_constant__ Metala m) {
  const int64_t rows = m.B * m.T * m.H;
  const int lane = threadIdx.x % 32;
  for (int64_t i = blockIdx.x * 8ll + threadIdx.x / 32; i < rows; i += gridDim.x * 8ll) {
    const Row r = row_at(m, i);
    const int64_t q = row_of(m.q, r.b, r.t, r.h), v = row_of(m.v, r.b, r.t, r.h), to = row_of(m.out, r.b, r.t, r.h);
    float u = 0;
    for (int c = lane; m.w.data != nullptr && c < m.K; c += 32) {
      const float w = ptx::load(m.w.data, m.w.dtype, r.h * m.w.stride_h + c);
      u = fmaf(ptx::load(m.q.data, m.q.dtype, q + c) * w, -expm1f(m.g[i * m.K + c]), u);
    }
    u = sum_of_warp(u);
    for (int c = lane; c < m.V; c += 32) {
      const float x = u * ptx::load(m.v.data, m.v.dtype, v + c);
      const float add = m.aug == 0 ? sigmoid(x) : x;
      ptx::store(const_cast<void*>(m.out.data), m.out.dtype, to + c, ptx::load(m.out.data, m.out.dtype, to + c) + add);
    }
  }
}

// The gradients of the recurrence (dense, f32) become those of the call. A warp takes the rows of one head in order, so that
// its sums of dw_aug have one order; `parts` [gridDim.y, H, K].
extern "C" __global__ void __launch_bounds__(256) metala_back(const __grid_constant__ Metala m) {
  __shared__ float sums[8][256];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = blockIdx.x;
  const int64_t rows = m.B * m.T, each = (rows + gridDim.y - 1) / gridDim.y;
  const int64_t begin = blockIdx.y * each, end = begin + each < rows ? begin + each : rows;
  float dw[8] = {};
  for (int64_t at = begin + warp; at < end; at += 8) {
    const int64_t b = at / m.T, t = at % m.T, i = at * m.H + h;
    const int64_t q = row_of(m.q, b, t, h), v = row_of(m.v, b, t, h), d = row_of(m.dout, b, t, h);
    const int64_t gate = row_of(m.gates, b, t, h);
    const bool masked = is_masked(m, b, t);
    float u = 0, du = 0;
    if (m.aug != 2) {
      for (int c = lane; m.w.data != nullptr && c < m.K; c += 32) {
        const float w = ptx::load(m.w.data, m.w.dtype, h * m.w.stride_h + c);
        u = fmaf(ptx::load(m.q.data, m.q.dtype, q + c) * w, -expm1f(m.g[i * m.K + c]), u);
      }
      u = sum_of_warp(u);
    }
    for (int c = lane; c < m.V; c += 32) {
      const float x = ptx::load(m.v.data, m.v.dtype, v + c), y = sigmoid(u * x);
      const float in = m.aug != 2 && m.dout.data != nullptr ? ptx::load(m.dout.data, m.dout.dtype, d + c) : 0;
      const float slope = in * (m.aug == 0 ? y * (1 - y) : 1);
      du = fmaf(slope, x, du);
      if (m.to_v.data != nullptr) {
        ptx::store(const_cast<void*>(m.to_v.data), m.to_v.dtype, row_of(m.to_v, b, t, h) + c,
                   masked ? 0 : fmaf(u, slope, m.dv[i * m.V + c]));
      }
    }
    du = sum_of_warp(du);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int c = lane + 32 * j;
      if (c >= m.K) continue;
      const float w = m.w.data != nullptr ? ptx::load(m.w.data, m.w.dtype, h * m.w.stride_h + c) : 0;
      const float g = m.g[i * m.K + c], k = -expm1f(g), x = ptx::load(m.q.data, m.q.dtype, q + c);
      dw[j] = fmaf(du * x, k, dw[j]);
      if (m.to_q.data != nullptr) {
        ptx::store(const_cast<void*>(m.to_q.data), m.to_q.dtype, row_of(m.to_q, b, t, h) + c,
                   fmaf(du * w, k, m.dq[i * m.K + c]));
      }
      if (m.to_gates.data != nullptr) {
        const float dk = fmaf(du * w, x, m.dk[i * m.K + c]), raw = raw_decay(m, gate + c);
        float dg = fmaf(-expf(g), dk, m.dg[i * m.K + c]);
        if (masked && m.skip_masked) {
          dg = 0;
        } else if (m.mixer) {
          dg = raw <= m.floor ? 0 : dg * sigmoid(-ptx::load(m.gates.data, m.gates.dtype, gate + c)) / m.tau;
        } else if (raw < m.floor) {
          dg = 0;
        }
        ptx::store(const_cast<void*>(m.to_gates.data), m.to_gates.dtype, row_of(m.to_gates, b, t, h) + c, dg);
      }
    }
  }
  if (m.parts == nullptr) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) sums[warp][lane + 32 * j] = dw[j];
  __syncthreads();
  for (int c = threadIdx.x; c < m.K; c += 256) {
    float sum = 0;
    for (int j = 0; j < 8; ++j) sum += sums[j][c];
    m.parts[(blockIdx.y * m.H + h) * static_cast<int64_t>(m.K) + c] = sum;
  }
}

// dw_aug: the parts in order.
extern "C" __global__ void __launch_bounds__(256) metala_fold(const __grid_constant__ Metala m, int count) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < static_cast<int64_t>(m.H) * m.K; i += gridDim.x * 256ll) {
    float sum = 0;
    for (int j = 0; j < count; ++j) sum += m.parts[j * static_cast<int64_t>(m.H) * m.K + i];
    ptx::store(const_cast<void*>(m.to_w.data), m.to_w.dtype, i / m.K * m.to_w.stride_h + i % m.K, sum);
  }
}

}  // namespace linnet::cuda
