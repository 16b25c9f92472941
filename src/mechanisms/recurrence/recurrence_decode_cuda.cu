// One token with the state in place: the state is read and written once, which is all that the time goes to.
//
// A block takes 32 columns of one head's state [K, V]; a thread 4 columns of every 16th row, all loads issued before the first
// is used. With S' the decayed state, u = beta (v - S'^T k) or v, and o = scale (S'^T q + (q . k) u): both reads of the state
// come from one pass and one barrier. f32: S' + k u^T is S + (expm1(g) S + k u^T) for decays near 1.
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
  __shared__ float products[4];
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
  const bool steps = e.steps.A != nullptr;
  const float delta =
      steps ? step_size(e.steps, ptx::load(e.g.data, e.g.dtype, row_of(e.g, n, 0, h)) + step_bias(e.steps, h)) : 1;
  float product = 0;
  for (int c = thread; c < kWidth; c += 128) {
    const bool in = c < e.K;
    const float kc = in ? apply(e.k.map, ptx::load(e.k.data, e.k.dtype, row_of(e.k, n, 0, h) + c)) : 0;
    const float qc = in ? apply(e.q.map, ptx::load(e.q.data, e.q.dtype, row_of(e.q, n, 0, h) + c)) : 0;
    float g = e.g_width == 0 || !in ? 0 : ptx::load(e.g.data, e.g.dtype, row_of(e.g, n, 0, h) + (e.g_width > 1 ? c : 0));
    if (steps) g = in ? step_decay(delta, e.steps.A[h * e.steps.stride_A]) : 0;
    const bool near = g > kMinusLog2;
    q[c] = qc;
    k[c] = kc;
    decay[c] = near ? expm1f(g) : expf(g);
    kept[c] = near ? 1 : 0;
    product = fmaf(qc, kc, product);
  }
  for (int step = 1; step < 32; step *= 2) product += __shfl_xor_sync(0xffffffff, product, step);
  if (lane == 0) products[warp] = product;
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
  if (!mine) return;
  const float qk = products[0] + products[1] + products[2] + products[3];
  const bool corrects = e.beta.data != nullptr;
  const float beta = corrects ? e.beta_factor * ptx::load(e.beta.data, e.beta.dtype, row_of(e.beta, n, 0, h)) : 1;
  float u[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float rk = 0, rq = 0;
    for (int i = 0; i < 4; ++i) {
      rk += reinterpret_cast<const float*>(&from_k[i][lane % 8])[j];
      rq += reinterpret_cast<const float*>(&from_q[i][lane % 8])[j];
    }
    const float v = apply(e.v.map, ptx::load(e.v.data, e.v.dtype, row_of(e.v, n, 0, h) + column + j));
    u[j] = corrects ? beta * (v - rk) : delta * v;
    if (thread < 8) {
      float o = fmaf(skip_of(e.finish, h, column + j), v, e.scale * fmaf(qk, u[j], rq));
      if (e.finish.z.data != nullptr) {
        const float z = ptx::load(e.finish.z.data, e.finish.z.dtype, row_of(e.finish.z, n, 0, h) + column + j);
        o *= z * sigmoid(z);
      }
      ptx::store(const_cast<void*>(e.out.data), e.out.dtype, row_of(e.out, n, 0, h) + column + j, o);
    }
  }
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

extern "C" __global__ void __launch_bounds__(128) decode_4(const __grid_constant__ Engine e) { decode<4>(e); }
extern "C" __global__ void __launch_bounds__(128) decode_8(const __grid_constant__ Engine e) { decode<8>(e); }
extern "C" __global__ void __launch_bounds__(128) decode_16(const __grid_constant__ Engine e) { decode<16>(e); }

}  // namespace linnet::cuda
