// One token with the state in place: the state is read and written once, which is all that the time goes to.
//
// 128 threads take 32 columns of one head's state [K, V]; a thread 4 columns of every 16th row. With S' the decayed state,
// u = beta (v - S'^T k) or v, and o = scale (S'^T q + (q . k) u): both reads of the state come from one pass and one barrier.
// f32: S' + k u^T is S + (expm1(g) S + k u^T) for decays near 1.
//
//   decode.cu   a block for 32 columns; all loads issued before the first is used
//   ring.cu     many heads, on Hopper: blocks stay and walk over heads; the same sums in the same order
#pragma once

#include "mechanisms/recurrence/cuda/decode.h"
#include "mechanisms/recurrence/cuda/engine.h"
#include "mechanisms/recurrence/cuda/map.cuh"
#include "ptx/numbers.cuh"
#include "ptx/sync.cuh"

namespace linnet::cuda {
namespace {

// What a head's token does to K rows and V columns of its state.
template <int K, int V>
struct Head {
  float4 rows[K];  // a k, a q, a or a - 1, and k, a the decay
  float kept[K];   // 1 where rows has a - 1, else 0
  float v[V], gate[V], skip[V];
  float products[4], step, beta;  // q . k in four parts
};
// What the 128 threads of 32 columns have read of the state, by warps.
struct Reads {
  float4 by_k[4][8], by_q[4][8];
};

// The token's numbers as they come from memory, those of one thread of 128; V columns from `first` on.
template <int K, int V>
struct Token {
  static constexpr int kTurns = (K + 127) / 128;
  static_assert(V <= 128);
  uint32_t k[kTurns] = {}, q[kTurns] = {}, g[kTurns] = {}, v = 0, z = 0, skip = 0, beta = 0, bias = 0;
  float rate = 0;

  __device__ __forceinline__ void ask(const Engine& e, int64_t n, int h, int thread, int first) {
    const auto row = [&](const Rows& rows) {
      return n * rows.stride_b + (rows.group == 1 ? h : h / rows.group) * rows.stride_h;
    };
    const int64_t k_row = row(e.k), q_row = row(e.q), g_row = e.g_width != 0 ? row(e.g) : 0;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int c = thread + 128 * i;
      if (c >= e.K) continue;
      k[i] = ptx::ask(e.k.data, e.k.dtype, k_row + c);
      q[i] = ptx::ask(e.q.data, e.q.dtype, q_row + c);
      if (e.g_width != 0) g[i] = ptx::ask(e.g.data, e.g.dtype, g_row + (e.g_width > 1 ? c : 0));
    }
    if (e.beta.data != nullptr) beta = ptx::ask(e.beta.data, e.beta.dtype, row(e.beta));
    if (e.steps.A != nullptr) {
      rate = e.steps.A[h * e.steps.stride_A];
      if (e.steps.bias != nullptr) bias = ptx::ask(e.steps.bias, e.steps.bias_dtype, h * e.steps.stride_bias);
    }
    const int column = first + thread;
    if (thread >= V || column >= e.V) return;
    v = ptx::ask(e.v.data, e.v.dtype, row(e.v) + column);
    if (e.finish.z.data != nullptr) z = ptx::ask(e.finish.z.data, e.finish.z.dtype, row(e.finish.z) + column);
    if (e.finish.D != nullptr) skip = ptx::ask(e.finish.D, e.finish.dtype, h * e.finish.stride_h + column * e.finish.stride_v);
  }

  // To shared memory, by the 128 threads; a barrier must follow.
  __device__ __forceinline__ void share(const Engine& e, int thread, Head<K, V>& s) const {
    float product = 0, delta = 1;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int c = thread + 128 * i;
      if (c >= K) continue;
      const bool in = c < e.K;
      const float kc = in ? apply(e.k.map, ptx::take(k[i], e.k.dtype)) : 0;
      const float qc = in ? apply(e.q.map, ptx::take(q[i], e.q.dtype)) : 0;
      float log = in ? ptx::take(g[i], e.g.dtype) : 0;
      if (e.steps.A != nullptr) {
        const float size = step_size(e.steps, e.steps.bias != nullptr ? log + ptx::take(bias, e.steps.bias_dtype) : log);
        if (i == 0) delta = size;  // one number for all channels: that of channel 0
        log = in ? step_decay(size, rate) : 0;
      }
      const bool near = log > kMinusLog2;
      const float decay = near ? expm1f(log) : expf(log), kept = near ? 1 : 0, a = kept + decay;
      s.rows[c] = {a * kc, a * qc, decay, kc};
      s.kept[c] = kept;
      product = fmaf(qc, kc, product);
    }
    for (int distance = 1; distance < 32; distance *= 2) product += __shfl_xor_sync(0xffffffff, product, distance);
    if (thread % 32 == 0) s.products[thread / 32] = product;
    if (thread == 0) {
      s.step = delta;
      s.beta = e.beta.data != nullptr ? e.beta_factor * ptx::take(beta, e.beta.dtype) : 1;
    }
    if (thread >= V) return;
    s.v[thread] = apply(e.v.map, ptx::take(v, e.v.dtype));
    if (e.finish.z.data != nullptr) {
      const float x = ptx::take(z, e.finish.z.dtype);
      s.gate[thread] = x * sigmoid(x);
    }
    if (e.finish.D != nullptr) s.skip[thread] = ptx::take(skip, e.finish.dtype);
  }
};

// From the state before to the state behind, and the result, of the 32 columns from `first` on; in the head's numbers these
// begin at `offset`. sync: a barrier of the 128 threads.
template <int kRows, int V, class Sync>
__device__ __forceinline__ void update(const Engine& e, int64_t n, int h, int thread, int first, int offset,
                                       const Head<16 * kRows, V>& s, Reads& reads, float4 (&S)[kRows], const Sync& sync) {
  const int warp = thread / 32, lane = thread % 32;
  const bool corrects = e.beta.data != nullptr;
  const auto over_rows = [](float x) {
    x += __shfl_xor_sync(0xffffffff, x, 8);
    return x + __shfl_xor_sync(0xffffffff, x, 16);
  };
  const auto over_rows4 = [&](float4 x) { return float4{over_rows(x.x), over_rows(x.y), over_rows(x.z), over_rows(x.w)}; };
  // The state read with the rows' numbers `factor`, by this warp.
  const auto read = [&](float4(&parts)[8], const auto& factor) {
    float4 sum = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float a = factor(s.rows[thread / 8 + 16 * i]);
      sum.x = fmaf(a, S[i].x, sum.x), sum.y = fmaf(a, S[i].y, sum.y);
      sum.z = fmaf(a, S[i].z, sum.z), sum.w = fmaf(a, S[i].w, sum.w);
    }
    sum = over_rows4(sum);
    if (lane < 8) parts[lane] = sum;
  };
  read(reads.by_q[warp], [](const auto& row) { return row.y; });
  if (corrects) read(reads.by_k[warp], [](const auto& row) { return row.x; });
  sync();
  const auto sum_warps = [](const float4(&parts)[4][8], int c) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += reinterpret_cast<const float*>(parts[i])[c];
    return sum;
  };
  const float beta = s.beta, step = s.step;
  const auto written = [&](int c) {  // u
    return corrects ? beta * (s.v[offset + c] - sum_warps(reads.by_k, c)) : step * s.v[offset + c];
  };
  if (warp == 0 && first + lane < e.V) {  // a thread for each column
    const float qk = s.products[0] + s.products[1] + s.products[2] + s.products[3];
    float o = e.scale * fmaf(qk, written(lane), sum_warps(reads.by_q, lane));
    if (e.finish.D != nullptr) o = fmaf(s.skip[offset + lane], s.v[offset + lane], o);
    if (e.finish.z.data != nullptr) o *= s.gate[offset + lane];
    ptx::store(const_cast<void*>(e.out.data), e.out.dtype, row_of(e.out, n, 0, h) + first + lane, o);
  }
  float u[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) u[j] = written(lane % 8 * 4 + j);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = thread / 8 + 16 * i;
    const float a = s.rows[row].z, one = s.kept[row], kr = s.rows[row].w;
    const auto next = [&](float x, float y) { return fmaf(one, x, fmaf(a, x, kr * y)); };
    S[i] = {next(S[i].x, u[0]), next(S[i].y, u[1]), next(S[i].z, u[2]), next(S[i].w, u[3])};
  }
}

}  // namespace
}  // namespace linnet::cuda
