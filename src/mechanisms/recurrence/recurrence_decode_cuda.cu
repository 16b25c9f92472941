// One token with the state in place: the state is read and written once, which is all that the time goes to.
//
// A block takes 32 columns of one head's state [K, V]; a thread 4 columns of every 16th row, all loads, those of the token's
// rows too, issued before the first is used. With S' the decayed state, u = beta (v - S'^T k) or v, and o = scale (S'^T q + (q
// . k) u): both reads of the state come from one pass and one barrier. f32: S' + k u^T is S + (expm1(g) S + k u^T) for decays
// near 1.
#include "mechanisms/recurrence/recurrence_cuda.h"
#include "mechanisms/recurrence/recurrence_map.cuh"
#include "ptx/numbers.cuh"

namespace linnet::cuda {
namespace {

template <int kRows>
__device__ void decode(const Engine& e) {
  constexpr int kWidth = 16 * kRows;
  __shared__ float q[kWidth], k[kWidth], decay[kWidth], kept[kWidth];  // kept: 1 where the decay is a difference, else 0
  __shared__ float4 from_k[4][8], from_q[4][8];
  __shared__ float products[4], step;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, column = blockIdx.y * 32 + thread % 8 * 4;
  const int h = blockIdx.x % e.H, first = thread / 8;
  const int64_t n = blockIdx.x / e.H;
  const bool mine = column < e.V;
  const float* from = e.initial.data + n * e.initial.stride_n + h * e.initial.stride_h + column;
  float* to = e.final.data + n * e.final.stride_n + h * e.final.stride_h + column;
  float4 S[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + 16 * i;
    S[i] = mine && row < e.K ? __ldcs(reinterpret_cast<const float4*>(from + row * e.initial.stride_row)) : float4{0, 0, 0, 0};
  }
  const bool steps = e.steps.A != nullptr, corrects = e.beta.data != nullptr;
  const int own = blockIdx.y * 32 + lane;  // the first warp's: the column whose result the thread writes
  const bool ends = warp == 0 && own < e.V;
  constexpr int kTurns = (kWidth + 127) / 128;
  uint32_t raw_k[kTurns] = {}, raw_q[kTurns] = {}, raw_g[kTurns] = {}, raw_v[4] = {}, raw_z = 0, raw_skip = 0;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int c = thread + 128 * i;
    if (c >= e.K) continue;
    raw_k[i] = ptx::ask(e.k.data, e.k.dtype, row_of(e.k, n, 0, h) + c);
    raw_q[i] = ptx::ask(e.q.data, e.q.dtype, row_of(e.q, n, 0, h) + c);
    if (e.g_width != 0) raw_g[i] = ptx::ask(e.g.data, e.g.dtype, row_of(e.g, n, 0, h) + (e.g_width > 1 ? c : 0));
  }
  const uint32_t raw_beta = corrects ? ptx::ask(e.beta.data, e.beta.dtype, row_of(e.beta, n, 0, h)) : 0;
  const float rate = steps ? e.steps.A[h * e.steps.stride_A] : 0, bias = steps ? step_bias(e.steps, h) : 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (mine) raw_v[j] = ptx::ask(e.v.data, e.v.dtype, row_of(e.v, n, 0, h) + column + j);
  }
  if (ends && e.finish.z.data != nullptr) {
    raw_z = ptx::ask(e.finish.z.data, e.finish.z.dtype, row_of(e.finish.z, n, 0, h) + own);
  }
  if (ends && e.finish.D != nullptr) {
    raw_skip = ptx::ask(e.finish.D, e.finish.dtype, h * e.finish.stride_h + own * e.finish.stride_v);
  }
  float product = 0, delta = 1;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int c = thread + 128 * i;
    if (c >= kWidth) continue;
    const bool in = c < e.K;
    const float kc = in ? apply(e.k.map, ptx::take(raw_k[i], e.k.dtype)) : 0;
    const float qc = in ? apply(e.q.map, ptx::take(raw_q[i], e.q.dtype)) : 0;
    float g = in ? ptx::take(raw_g[i], e.g.dtype) : 0;
    if (steps) {
      if (i == 0) delta = step_size(e.steps, g + bias);  // one number for all channels: that of channel 0
      g = in ? step_decay(step_size(e.steps, g + bias), rate) : 0;
    }
    const bool near = g > kMinusLog2;
    q[c] = qc;
    k[c] = kc;
    decay[c] = near ? expm1f(g) : expf(g);
    kept[c] = near ? 1 : 0;
    product = fmaf(qc, kc, product);
  }
  for (int distance = 1; distance < 32; distance *= 2) product += __shfl_xor_sync(0xffffffff, product, distance);
  if (lane == 0) products[warp] = product;
  if (thread == 0) step = delta;
  __syncthreads();
  float4 read_k = {0, 0, 0, 0}, read_q = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + 16 * i;
    const float a = kept[row] + decay[row], ak = a * k[row], aq = a * q[row];
    read_k.x = fmaf(ak, S[i].x, read_k.x), read_q.x = fmaf(aq, S[i].x, read_q.x);
    read_k.y = fmaf(ak, S[i].y, read_k.y), read_q.y = fmaf(aq, S[i].y, read_q.y);
    read_k.z = fmaf(ak, S[i].z, read_k.z), read_q.z = fmaf(aq, S[i].z, read_q.z);
    read_k.w = fmaf(ak, S[i].w, read_k.w), read_q.w = fmaf(aq, S[i].w, read_q.w);
  }
  const auto over_rows = [](float x) {
    x += __shfl_xor_sync(0xffffffff, x, 8);
    return x + __shfl_xor_sync(0xffffffff, x, 16);
  };
  const auto over_rows4 = [&](float4 x) { return float4{over_rows(x.x), over_rows(x.y), over_rows(x.z), over_rows(x.w)}; };
  read_k = over_rows4(read_k);
  read_q = over_rows4(read_q);
  if (lane < 8) {
    from_k[warp][lane] = read_k;
    from_q[warp][lane] = read_q;
  }
  __syncthreads();
  const float beta = corrects ? e.beta_factor * ptx::take(raw_beta, e.beta.dtype) : 1;
  const auto sum_warps = [](const float4(&parts)[4][8], int c) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += reinterpret_cast<const float*>(parts[i])[c];
    return sum;
  };
  float u[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float v = apply(e.v.map, ptx::take(raw_v[j], e.v.dtype));
    u[j] = corrects ? beta * (v - sum_warps(from_k, lane % 8 * 4 + j)) : step * v;
  }
  if (warp == 0) {  // a column's value and write stand in the registers of the thread that has its 4 columns
    float mine_u = 0, mine_v = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float other_u = __shfl_sync(0xffffffff, u[j], lane / 4);
      const float other_v = __shfl_sync(0xffffffff, apply(e.v.map, ptx::take(raw_v[j], e.v.dtype)), lane / 4);
      if (lane % 4 == j) mine_u = other_u, mine_v = other_v;
    }
    const float qk = products[0] + products[1] + products[2] + products[3];
    float o = e.scale * fmaf(qk, mine_u, sum_warps(from_q, lane));
    if (e.finish.D != nullptr) o = fmaf(ptx::take(raw_skip, e.finish.dtype), mine_v, o);
    if (e.finish.z.data != nullptr) {
      const float z = ptx::take(raw_z, e.finish.z.dtype);
      o *= z * sigmoid(z);
    }
    if (ends) ptx::store(const_cast<void*>(e.out.data), e.out.dtype, row_of(e.out, n, 0, h) + own, o);
  }
  if (!mine) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + 16 * i;
    if (row >= e.K) continue;
    const float a = decay[row], one = kept[row], kr = k[row];
    const auto next = [&](float x, float y) { return fmaf(one, x, fmaf(a, x, kr * y)); };
    const float4 x = {next(S[i].x, u[0]), next(S[i].y, u[1]), next(S[i].z, u[2]), next(S[i].w, u[3])};
    __stcs(reinterpret_cast<float4*>(to + row * e.final.stride_row), x);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128, 8) decode_4(const __grid_constant__ Engine e) { decode<4>(e); }
extern "C" __global__ void __launch_bounds__(128, 8) decode_8(const __grid_constant__ Engine e) { decode<8>(e); }
extern "C" __global__ void __launch_bounds__(128) decode_16(const __grid_constant__ Engine e) { decode<16>(e); }

}  // namespace linnet::cuda
