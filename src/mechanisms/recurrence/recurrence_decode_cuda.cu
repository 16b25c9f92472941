// One token with the state in place: the state is read and written once, which is all that the time goes to.
//
// 128 threads take 32 columns of one head's state [K, V]; a thread 4 columns of every 16th row. With S' the decayed state,
// u = beta (v - S'^T k) or v, and o = scale (S'^T q + (q . k) u): both reads of the state come from one pass and one barrier.
// f32: S' + k u^T is S + (expm1(g) S + k u^T) for decays near 1.
//
//   decode   a block for 32 columns; all loads issued before the first is used
//   ring     many heads: a block on every multiprocessor walks over heads, two states on their way in and one out by the copy
//            engine; the same sums in the same order
#include "mechanisms/recurrence/recurrence_cuda.h"
#include "mechanisms/recurrence/recurrence_map.cuh"
#include "ptx/numbers.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace linnet::cuda {
namespace {

// What the 128 threads of 32 columns share.
template <int kRows>
struct Columns {
  float q[16 * kRows], k[16 * kRows], decay[16 * kRows], kept[16 * kRows];  // kept: 1 where the decay is a difference, else 0
  float4 from_k[4][8], from_q[4][8];
  float products[4], step;
};

// The token's numbers as they come from memory, those of one thread.
template <int kRows>
struct Token {
  static constexpr int kTurns = (16 * kRows + 127) / 128;
  uint32_t k[kTurns] = {}, q[kTurns] = {}, g[kTurns] = {}, v[4] = {}, z = 0, skip = 0, beta = 0, bias = 0;
  float rate = 0;

  // thread: of the 128; first: the first of their 32 columns.
  __device__ __forceinline__ void ask(const Engine& e, int64_t n, int h, int thread, int first) {
    const int column = first + thread % 8 * 4, own = first + thread;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int c = thread + 128 * i;
      if (c >= e.K) continue;
      k[i] = ptx::ask(e.k.data, e.k.dtype, row_of(e.k, n, 0, h) + c);
      q[i] = ptx::ask(e.q.data, e.q.dtype, row_of(e.q, n, 0, h) + c);
      if (e.g_width != 0) g[i] = ptx::ask(e.g.data, e.g.dtype, row_of(e.g, n, 0, h) + (e.g_width > 1 ? c : 0));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (column < e.V) v[j] = ptx::ask(e.v.data, e.v.dtype, row_of(e.v, n, 0, h) + column + j);
    }
    if (e.beta.data != nullptr) beta = ptx::ask(e.beta.data, e.beta.dtype, row_of(e.beta, n, 0, h));
    if (e.steps.A != nullptr) {
      rate = e.steps.A[h * e.steps.stride_A];
      if (e.steps.bias != nullptr) bias = ptx::ask(e.steps.bias, e.steps.bias_dtype, h * e.steps.stride_bias);
    }
    if (thread >= 32 || own >= e.V) return;
    if (e.finish.z.data != nullptr) z = ptx::ask(e.finish.z.data, e.finish.z.dtype, row_of(e.finish.z, n, 0, h) + own);
    if (e.finish.D != nullptr) skip = ptx::ask(e.finish.D, e.finish.dtype, h * e.finish.stride_h + own * e.finish.stride_v);
  }
};

// The token's rows to shared memory; a barrier must follow.
template <int kRows>
__device__ __forceinline__ void share(const Engine& e, const Token<kRows>& token, int thread, Columns<kRows>& s) {
  float product = 0, delta = 1;
#pragma unroll
  for (int i = 0; i < Token<kRows>::kTurns; ++i) {
    const int c = thread + 128 * i;
    if (c >= 16 * kRows) continue;
    const bool in = c < e.K;
    const float kc = in ? apply(e.k.map, ptx::take(token.k[i], e.k.dtype)) : 0;
    const float qc = in ? apply(e.q.map, ptx::take(token.q[i], e.q.dtype)) : 0;
    float g = in ? ptx::take(token.g[i], e.g.dtype) : 0;
    if (e.steps.A != nullptr) {
      const float size = step_size(e.steps, e.steps.bias != nullptr ? g + ptx::take(token.bias, e.steps.bias_dtype) : g);
      if (i == 0) delta = size;  // one number for all channels: that of channel 0
      g = in ? step_decay(size, token.rate) : 0;
    }
    const bool near = g > kMinusLog2;
    s.q[c] = qc;
    s.k[c] = kc;
    s.decay[c] = near ? expm1f(g) : expf(g);
    s.kept[c] = near ? 1 : 0;
    product = fmaf(qc, kc, product);
  }
  for (int distance = 1; distance < 32; distance *= 2) product += __shfl_xor_sync(0xffffffff, product, distance);
  if (thread % 32 == 0) s.products[thread / 32] = product;
  if (thread == 0) s.step = delta;
}

// From the state before to the state behind, and the result. sync: a barrier of the 128 threads.
template <int kRows, class Sync>
__device__ __forceinline__ void update(const Engine& e, int64_t n, int h, int thread, int first, const Token<kRows>& token,
                                       Columns<kRows>& s, float4 (&S)[kRows], const Sync& sync) {
  const int warp = thread / 32, lane = thread % 32;
  const bool corrects = e.beta.data != nullptr;
  float4 read_k = {0, 0, 0, 0}, read_q = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = thread / 8 + 16 * i;
    const float a = s.kept[row] + s.decay[row], ak = a * s.k[row], aq = a * s.q[row];
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
    s.from_k[warp][lane] = read_k;
    s.from_q[warp][lane] = read_q;
  }
  sync();
  const float beta = corrects ? e.beta_factor * ptx::take(token.beta, e.beta.dtype) : 1, step = s.step;
  const auto sum_warps = [](const float4(&parts)[4][8], int c) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += reinterpret_cast<const float*>(parts[i])[c];
    return sum;
  };
  float u[4], v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v[j] = apply(e.v.map, ptx::take(token.v[j], e.v.dtype));
    u[j] = corrects ? beta * (v[j] - sum_warps(s.from_k, lane % 8 * 4 + j)) : step * v[j];
  }
  if (warp == 0) {  // a thread for each column: its value and write stand in the thread that has 4 of them
    float own_u = 0, own_v = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float other_u = __shfl_sync(0xffffffff, u[j], lane / 4), other_v = __shfl_sync(0xffffffff, v[j], lane / 4);
      if (lane % 4 == j) own_u = other_u, own_v = other_v;
    }
    const float qk = s.products[0] + s.products[1] + s.products[2] + s.products[3];
    float o = e.scale * fmaf(qk, own_u, sum_warps(s.from_q, lane));
    if (e.finish.D != nullptr) o = fmaf(ptx::take(token.skip, e.finish.dtype), own_v, o);
    if (e.finish.z.data != nullptr) {
      const float z = ptx::take(token.z, e.finish.z.dtype);
      o *= z * sigmoid(z);
    }
    if (first + lane < e.V) {
      ptx::store(const_cast<void*>(e.out.data), e.out.dtype, row_of(e.out, n, 0, h) + first + lane, o);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = thread / 8 + 16 * i;
    const float a = s.decay[row], one = s.kept[row], kr = s.k[row];
    const auto next = [&](float x, float y) { return fmaf(one, x, fmaf(a, x, kr * y)); };
    S[i] = {next(S[i].x, u[0]), next(S[i].y, u[1]), next(S[i].z, u[2]), next(S[i].w, u[3])};
  }
}

template <int kRows>
__device__ void decode(const Engine& e) {
  __shared__ Columns<kRows> s;
  const int thread = threadIdx.x, first = blockIdx.y * 32, column = first + thread % 8 * 4, h = blockIdx.x % e.H;
  const int64_t n = blockIdx.x / e.H;
  const auto mine = [&](int i) { return column < e.V && thread / 8 + 16 * i < e.K; };
  const float* from = e.initial.data + n * e.initial.stride_n + h * e.initial.stride_h + column;
  float* to = e.final.data + n * e.final.stride_n + h * e.final.stride_h + column;
  float4 S[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = thread / 8 + 16 * i;
    S[i] = mine(i) ? __ldcs(reinterpret_cast<const float4*>(from + row * e.initial.stride_row)) : float4{0, 0, 0, 0};
  }
  Token<kRows> token;
  token.ask(e, n, h, thread, first);
  share(e, token, thread, s);
  __syncthreads();
  update(e, n, h, thread, first, token, s, S, [] { __syncthreads(); });
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = thread / 8 + 16 * i;
    if (mine(i)) __stcs(reinterpret_cast<float4*>(to + row * e.final.stride_row), S[i]);
  }
}

constexpr int kStages = 3;
template <int kRows, int kGroups>
struct Ring {
  alignas(1024) float4 states[kStages][16 * kRows][8 * kGroups];
  Columns<kRows> columns[kGroups];
  uint64_t full[kStages];
};

// K = 16 kRows, V = 32 kGroups, states side by side: 128 kGroups threads.
template <int kRows, int kGroups>
__device__ void ring(const Engine& e) {
  extern __shared__ char memory[];
  using Memory = Ring<kRows, kGroups>;
  auto& s = ptx::shared_as<Memory>(memory);
  constexpr uint32_t kBytes = sizeof(s.states[0]);
  static_assert(sizeof(Memory) + 1024 <= decode_ring_bytes(16 * kRows, 32 * kGroups));
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, heads = static_cast<int>(e.N) * e.H;
  const int count = (heads - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const auto head = [&](int i) { return static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x); };
  const auto state = [&](int i) { return e.final.data + head(i) / e.H * e.final.stride_n + head(i) % e.H * e.final.stride_h; };
  const auto load = [&](int i) {
    ptx::barrier_arrive_expect(&s.full[i % kStages], kBytes);
    ptx::load_bytes(s.states[i % kStages], state(i), kBytes, &s.full[i % kStages]);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) ptx::barrier_init(&s.full[i], 1);
    ptx::barrier_init_fence();
    for (int i = 0; i < kStages - 1 && i < count; ++i) load(i);
  }
  const auto sync = [&] {
    if (group == 0) ptx::group_sync<1, 128>();
    if (group == 1) ptx::group_sync<2, 128>();
    if (group == 2) ptx::group_sync<3, 128>();
    if (group == 3) ptx::group_sync<4, 128>();
  };
  Token<kRows> next;
  if (count > 0) next.ask(e, head(0) / e.H, head(0) % e.H, thread, 32 * group);
  __syncthreads();
  for (int i = 0; i < count; ++i) {
    const Token<kRows> token = next;
    const int stage = i % kStages, h = head(i) % e.H;
    const int64_t n = head(i) / e.H;
    if (i + 1 < count) next.ask(e, head(i + 1) / e.H, head(i + 1) % e.H, thread, 32 * group);
    share(e, token, thread, s.columns[group]);
    sync();
    ptx::barrier_wait(&s.full[stage], i / kStages & 1);
    float4 S[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) S[j] = s.states[stage][thread / 8 + 16 * j][8 * group + thread % 8];
    update(e, n, h, thread, 32 * group, token, s.columns[group], S, sync);
#pragma unroll
    for (int j = 0; j < kRows; ++j) s.states[stage][thread / 8 + 16 * j][8 * group + thread % 8] = S[j];
    ptx::fence_async_shared();
    __syncthreads();
    if (threadIdx.x != 0) continue;
    // The stage of the state before this one is free when its way out has been read.
    ptx::wait_stores_read();
    if (i + kStages - 1 < count) load(i + kStages - 1);
    ptx::store_bytes(state(i), s.states[stage], kBytes);
  }
  if (threadIdx.x == 0) ptx::wait_stores();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128, 8) decode_4(const __grid_constant__ Engine e) { decode<4>(e); }
extern "C" __global__ void __launch_bounds__(128, 7) decode_8(const __grid_constant__ Engine e) { decode<8>(e); }
extern "C" __global__ void __launch_bounds__(128) decode_16(const __grid_constant__ Engine e) { decode<16>(e); }
extern "C" __global__ void __launch_bounds__(256, 4) ring_64_64(const __grid_constant__ Engine e) { ring<4, 2>(e); }
extern "C" __global__ void __launch_bounds__(512, 2) ring_64_128(const __grid_constant__ Engine e) { ring<4, 4>(e); }
extern "C" __global__ void __launch_bounds__(256, 2) ring_128_64(const __grid_constant__ Engine e) { ring<8, 2>(e); }
extern "C" __global__ void __launch_bounds__(512, 1) ring_128_128(const __grid_constant__ Engine e) { ring<8, 4>(e); }

}  // namespace linnet::cuda
