// The walk of the selective scan (selective_scan_cuda.h). A block has 32 channels, a thread S = 4 or 2 states of one of them.
// 32 tokens at a time: steps and inputs are made by all threads, as rows of channels, and lie in shared memory by channel; the
// states walk; the lanes of a channel share the sums C.h of as many tokens, which go back by row to be gated and stored. The
// next tokens are on their way from memory meanwhile.
//
// Bytes of x, dt, z and out are the least: 8 for a token and channel in 16 bits. What binds is arithmetic: about 8 instructions
// of a state and token, one of them an exponential (16 per clock and multiprocessor): 0.31 ms for 16 x 2048 x 2048 channels of
// 16 states on an H200, 0.13 ms the bytes.
#include "mechanisms/mamba/selective_scan.cuh"

namespace linnet::cuda {
namespace {

constexpr int kRows = static_cast<int>(kScanRows), kWide = kScanChannels;

template <int S>
struct WalkShared {
  static constexpr int kLanes = kScanStates / S;
  float2 steps[kWide][kRows + 2];   // delta and delta x; rows 4 banks apart
  float maps[kRows][kLanes][2][S];  // B and C of a lane's states
  float y[kRows][kWide + 8];        // rows 8 banks apart: a warp writes 4 tokens of 8 channels
  float bias[kWide], skip[kWide];
};

template <class T, int S>
struct Walk {
  static constexpr bool exact = kExact<T>;
  static constexpr int kLanes = kScanStates / S, kThreads = kWide * kLanes, W = kWide * kRows / kThreads;
  static constexpr int kBetween = kWide / W;          // threads of a row
  static constexpr int kMaps = 8 * kRows / kThreads;  // fours of B and C that a thread brings

  const Scan& s;
  WalkShared<S>& m;
  ScanBlock at;
  int row, ch;    // the row of a tile whose channels from ch on this thread reads and writes
  int own, lane;  // the channel whose states it has, and which of them
  float rates[S], h[S], lost[S] = {};
  Channels<T, W> x, dt, z;
  ptx::Piece<T, 4> maps[kMaps];

  __device__ Walk(const Scan& scan, WalkShared<S>& shared)
      : s(scan),
        m(shared),
        row(threadIdx.x / kBetween),
        ch(threadIdx.x % kBetween * W),
        own(threadIdx.x / kLanes),
        lane(threadIdx.x % kLanes) {}

  __device__ bool begin() {
    if (!at.begin(s)) return false;
    for (int i = threadIdx.x; i < kWide; i += kThreads) {
      m.bias[i] = i < at.channels ? get_or(0, s.args.dt_bias, at.e + i) : 0;
      m.skip[i] = i < at.channels ? get_or(0, s.args.D, at.e + i) : 0;
    }
#pragma unroll
    for (int i = 0; i < S; ++i) {
      const int n = lane * S + i;
      const bool in = own < at.channels && n < at.states;
      rates[i] = rate_of(s, at, own, n);
      h[i] = !in                   ? 0
             : s.states != nullptr ? s.states[at.state_place(s, blockIdx.x, own, n)]
                                   : get_or(0, s.initial, at.at.n, at.e + own, at.n0 + n);
    }
    __syncthreads();
    return true;
  }
  __device__ void load(int64_t t0) {
    const int64_t t = t0 + row;
    const bool there = t < at.last;
    x.load(s, at, s.args.x, t, ch, there);
    dt.load(s, at, s.args.dt, t, ch, there);
#pragma unroll
    for (int j = 0; j < kMaps; ++j) {
      const int i = j * kThreads + threadIdx.x, which = i / (4 * kRows), r = i / 4 % kRows;
      load_map<T>(s, at, which == 0 ? s.args.B : s.args.C, t0 + r, i % 4 * 4, t0 + r < at.last, maps[j]);
    }
  }
  // What the walk needs of these tokens. Behind the last one: a step of 0, which leaves the states alone.
  __device__ void prepare(int64_t t0) {
    float steps[W], inputs[W];
    dt.get(steps);
    x.get(inputs);
    const bool there = t0 + row < at.last;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const float d = steps[i] + m.bias[ch + i], delta = !there ? 0 : s.raw ? d : step_of<T>(d);
      m.steps[ch + i][row] = {delta, delta * inputs[i]};
    }
#pragma unroll
    for (int j = 0; j < kMaps; ++j) {
      const int i = j * kThreads + threadIdx.x, which = i / (4 * kRows), r = i / 4 % kRows, four = i % 4;
      float x[4];
      maps[j].get(x);
      if constexpr (S == 4) {
        *reinterpret_cast<float4*>(m.maps[r][four][which]) = {x[0], x[1], x[2], x[3]};
      } else {
        *reinterpret_cast<float2*>(m.maps[r][2 * four][which]) = {x[0], x[1]};
        *reinterpret_cast<float2*>(m.maps[r][2 * four + 1][which]) = {x[2], x[3]};
      }
    }
  }
  __device__ __forceinline__ void read_maps(int t, float (&B)[S], float (&C)[S]) const {
    float all[2 * S];
#pragma unroll
    for (int i = 0; i < 2 * S; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&m.maps[t][lane][0][0] + i);
      all[i] = four.x, all[i + 1] = four.y, all[i + 2] = four.z, all[i + 3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < S; ++i) B[i] = all[i], C[i] = all[S + i];
  }
  __device__ __forceinline__ void step(float delta, float v, const float (&B)[S]) {
#pragma unroll
    for (int i = 0; i < S; ++i) h[i] = Decay<exact>(delta, rates[i]).advance(h[i], B[i] * v, &lost[i]);
  }
  // The sum over this thread's states, pairs first: with those of the other lanes it is the same for any S.
  __device__ __forceinline__ float read(const float (&C)[S]) const {
    float sum = fmaf(C[1], h[1], C[0] * h[0]);
    if constexpr (S == 4) sum += fmaf(C[3], h[3], C[2] * h[2]);
    return sum;
  }
  __device__ void walk() {
#pragma unroll 2
    for (int t0 = 0; t0 < kRows; t0 += kLanes) {
      float sums[kLanes];
#pragma unroll
      for (int t = 0; t < kLanes; t += 2) {
        const float4 two = *reinterpret_cast<const float4*>(&m.steps[own][t0 + t]);
        float B[S], C[S];
        read_maps(t0 + t, B, C);
        step(two.x, two.y, B);
        sums[t] = read(C);
        read_maps(t0 + t + 1, B, C);
        step(two.z, two.w, B);
        sums[t + 1] = read(C);
      }
      share_sums<kLanes, 1>(sums);
      m.y[t0 + share_of<kLanes, 1>()][own] = sums[0];
    }
  }
  __device__ void finish(int64_t t0) const {
    const int64_t t = t0 + row;
    if (t >= at.last) return;
    float y[W], inputs[W];
#pragma unroll
    for (int i = 0; i < W; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&m.y[row][ch + i]);
      y[i] = four.x, y[i + 1] = four.y, y[i + 2] = four.z, y[i + 3] = four.w;
    }
    if (s.y != nullptr) {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        if (ch + i < at.channels) s.y[at.row_place(s, t, ch + i)] = y[i];
      }
      return;
    }
    x.get(inputs);
#pragma unroll
    for (int i = 0; i < W; ++i) y[i] = fmaf(m.skip[ch + i], inputs[i], y[i]);
    if (is_given(s.args.z)) {
      float gates[W];
      z.get(gates);
#pragma unroll
      for (int i = 0; i < W; ++i) y[i] *= gates[i] * ptx::logistic<!exact>(gates[i]);
    }
    Channels<T, W>::store(s, at, s.out, t, ch, y);
  }
  __device__ void store_states(float* to, int64_t slot) const {
#pragma unroll
    for (int i = 0; i < S; ++i) {
      const int n = lane * S + i;
      if (own < at.channels && n < at.states) to[at.state_place(s, slot, own, n)] = h[i];
    }
  }
};

template <class T, int S>
__device__ void scan_walk(const Scan& s) {
  using W = Walk<T, S>;
  __shared__ __align__(16) WalkShared<S> shared;
  W w(s, shared);
  if (!w.begin()) return;
  w.load(w.at.first);
  for (int64_t t0 = w.at.first; t0 < w.at.last; t0 += kRows) {
    w.prepare(t0);
    __syncthreads();
    const auto x = w.x;  // of these tokens: finish() needs them
    if (is_given(s.args.z)) w.z.load(s, w.at, s.args.z, t0 + w.row, w.ch, t0 + w.row < w.at.last);
    w.load(t0 + kRows);
    w.walk();
    __syncthreads();
    const auto next = w.x;
    w.x = x;
    w.finish(t0);
    w.x = next;
  }
  if (!is_given(s.final) || s.states != nullptr) return;
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const int n = w.lane * S + i;
    if (w.own < w.at.channels && n < w.at.states) put(s.final, w.h[i], w.at.at.n, w.at.e + w.own, w.at.n0 + n);
  }
}

// The states before every 16 tokens, for the backward.
template <class T>
__device__ void scan_keep(const Scan& s) {
  using W = Walk<T, 4>;
  constexpr int kChunk = static_cast<int>(kScanBackRows);
  __shared__ __align__(16) WalkShared<4> shared;
  W w(s, shared);
  if (!w.begin()) return;
  int64_t chunk = w.at.first_chunk(s) + (w.at.first - w.at.at.begin) / kChunk;
  w.load(w.at.first);
  for (int64_t t0 = w.at.first; t0 < w.at.last; t0 += kRows) {
    w.prepare(t0);
    __syncthreads();
    w.load(t0 + kRows);
    for (int half = 0; half < kRows && t0 + half < w.at.last; half += kChunk) {
      w.store_states(s.kept, chunk++);
#pragma unroll 4
      for (int t = half; t < half + kChunk; t += 2) {
        const float4 two = *reinterpret_cast<const float4*>(&shared.steps[w.own][t]);
        float B[4], C[4];
        w.read_maps(t, B, C);
        w.step(two.x, two.y, B);
        w.read_maps(t + 1, B, C);
        w.step(two.z, two.w, B);
      }
    }
    __syncthreads();
  }
}

}  // namespace

#define LINNET_SCAN_WALK(suffix, T)                                                                           \
  extern "C" __global__ void __launch_bounds__(128, 6) scan_walk_4_##suffix(const __grid_constant__ Scan s) { \
    scan_walk<T, 4>(s);                                                                                       \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256, 4) scan_walk_2_##suffix(const __grid_constant__ Scan s) { \
    scan_walk<T, 2>(s);                                                                                       \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(128, 6) scan_keep_##suffix(const __grid_constant__ Scan s) { scan_keep<T>(s); }
LINNET_SCAN_WALK(f32, float)
LINNET_SCAN_WALK(bf16, __nv_bfloat16)
LINNET_SCAN_WALK(f16, __half)

}  // namespace linnet::cuda
