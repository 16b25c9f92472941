// The walk back of the selective scan (selective_scan_cuda.h). A block has 32 channels, a thread four states of one of them,
// and goes from the last 16 tokens to the first: from the states before them (which a walk has kept) it makes theirs again,
// forwards into shared memory, and then R = J + C dy and what follows from it, backwards. Sums over states are shared by the
// four lanes of a channel, for four tokens at a time; those over channels (dB, dC) by the eight channels of a warp, then added
// over the block's warps, and over blocks by scan_sum_maps, in order. Sums over tokens (dA, dD, ddt_bias) are doubles of a
// thread.
#include "mechanisms/mamba/selective_scan.cuh"

namespace linnet::cuda {
namespace {

constexpr int kRows = static_cast<int>(kScanBackRows), kWide = kScanChannels;
constexpr int kOwn = 4, kLanes = kScanStates / kOwn, kThreads = kWide * kLanes, kWarps = kThreads / 32;
constexpr int W = kWide * kRows / kThreads, kBetween = kWide / W;  // channels of a row that a thread reads, threads of a row

struct BackShared {
  union {
    float4 before[kRows][kThreads];  // a thread's states before each token
    double totals[kRows][kWide];     // at the end
  };
  float4 in[kRows][kLanes], out[kRows][kLanes];                                // B and C
  float2 steps[kWide][kRows + 1];                                              // delta, delta x
  float given[kWide][kRows + 1];                                               // dy
  float parts[kWarps][kRows][2 * kScanStates];                                 // of dB and dC, of a warp's channels
  float y[kRows][kWide + 4], back[kRows][kWide + 4], slope[kRows][kWide + 4];  // C.h, B.R, and sum of rate 2^t h R
  float bias[kWide], skip[kWide];
};
static_assert(sizeof(BackShared) == kScanBackBytes &&
              4 * (kScanBackBytes + 1024) <= 228 * 1024);  // four blocks of a multiprocessor

template <class T>
struct Back {
  static constexpr bool exact = kExact<T>;

  const Scan& s;
  BackShared& m;
  ScanBlock at;
  int row, ch, own, lane;
  float rates[kOwn], J[kOwn], endless = 0;  // NaN where a rate is infinite: so is the slope of its decay
  double dA[kOwn] = {}, dD[W] = {}, dbias[W] = {};
  Channels<T, W> x, dt, z, dout;
  ptx::Piece<T, 4> map;

  __device__ Back(const Scan& scan, BackShared& shared)
      : s(scan),
        m(shared),
        row(threadIdx.x / kBetween),
        ch(threadIdx.x % kBetween * W),
        own(threadIdx.x / kLanes),
        lane(threadIdx.x % kLanes) {}

  __device__ bool has(int i) const { return own < at.channels && lane * kOwn + i < at.states; }
  __device__ void begin(bool any) {
    if (threadIdx.x < kWide) {
      const int i = threadIdx.x;
      m.bias[i] = i < at.channels ? get_or(0, s.args.dt_bias, at.e + i) : 0;
      m.skip[i] = i < at.channels ? get_or(0, s.args.D, at.e + i) : 0;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int n = lane * kOwn + i;
      rates[i] = rate_of(s, at, own, n);
      if (rates[i] == kFastest) endless = NAN;
      J[i] = !has(i) || !any          ? 0
             : s.gradients != nullptr ? s.gradients[at.state_place(s, blockIdx.x, own, n)]
                                      : get_or(0, s.grads.dfinal_state, at.at.n, at.e + own, at.n0 + n);
    }
    __syncthreads();
  }
  __device__ void load(int64_t t0) {
    const int64_t t = t0 + row;
    const bool there = t < at.last && t >= at.first;
    x.load(s, at, s.args.x, t, ch, there);
    dt.load(s, at, s.args.dt, t, ch, there);
    if (is_given(s.args.z)) z.load(s, at, s.args.z, t, ch, there);
    dout.load(s, at, s.grads.dout, t, ch, there && is_given(s.grads.dout));
    const int i = threadIdx.x % 64, which = threadIdx.x / 64;
    const int64_t token = t0 + i / 4;
    load_map<T>(s, at, which == 0 ? s.args.B : s.args.C, token, i % 4 * 4, token < at.last && token >= at.first, map);
  }
  // Behind the last token: a step of 0 and no gradient, which leave states and J alone.
  __device__ void prepare(int64_t t0) {
    const bool there = t0 + row < at.last;
    float steps[W], inputs[W], given[W], gates[W];
    dt.get(steps);
    x.get(inputs);
    dout.get(given);
    if (is_given(s.args.z)) z.get(gates);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const float d = steps[i] + m.bias[ch + i], delta = !there ? 0 : s.raw ? d : step_of<T>(d);
      const float gate = is_given(s.args.z) ? gates[i] * ptx::logistic<!exact>(gates[i]) : 1;
      m.steps[ch + i][row] = {delta, delta * inputs[i]};
      m.given[ch + i][row] = given[i] * gate;
    }
    float maps[4];
    map.get(maps);
    (threadIdx.x < 64 ? m.in : m.out)[threadIdx.x % 64 / 4][threadIdx.x % 4] = {maps[0], maps[1], maps[2], maps[3]};
  }
  // The states of these tokens, from those before them; the last one stays in h.
  __device__ void walk(int64_t chunk, float (&h)[kOwn]) {
    float lost[kOwn] = {};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) h[i] = has(i) ? s.kept[at.state_place(s, chunk, own, lane * kOwn + i)] : 0;
    const bool reads = is_given(s.grads.dz);
#pragma unroll 1
    for (int t0 = 0; t0 < kRows; t0 += kLanes) {
      float sums[kLanes];
#pragma unroll
      for (int t = 0; t < kLanes; ++t) {
        const float2 step = m.steps[own][t0 + t];
        const float4 B = m.in[t0 + t][lane];
        const float b[kOwn] = {B.x, B.y, B.z, B.w};
        m.before[t0 + t][threadIdx.x] = {h[0], h[1], h[2], h[3]};
#pragma unroll
        for (int i = 0; i < kOwn; ++i) h[i] = Decay<exact>(step.x, rates[i]).advance(h[i], b[i] * step.y, &lost[i]);
        if (!reads) continue;
        const float4 C = m.out[t0 + t][lane];
        sums[t] = fmaf(C.y, h[1], C.x * h[0]) + fmaf(C.w, h[3], C.z * h[2]);
      }
      if (!reads) continue;
      share_sums<kLanes, 1>(sums);
      m.y[t0 + share_of<kLanes, 1>()][own] = sums[0];
    }
  }
  __device__ void walk_back(float (&after)[kOwn]) {
    const int warp = threadIdx.x / 32;
    // dB and dC of this lane's states: which of the eight it has after they are shared by the channels of a warp
    const int share = share_of<32 / kLanes, kLanes>(), column = share / kOwn * kScanStates + lane * kOwn + share % kOwn;
    float part[kOwn] = {};
#pragma unroll 1
    for (int t0 = kRows - kLanes; t0 >= 0; t0 -= kLanes) {
      float back[kLanes], slope[kLanes];
#pragma unroll
      for (int t = kLanes - 1; t >= 0; --t) {
        const float2 step = m.steps[own][t0 + t];
        const float dy = m.given[own][t0 + t];
        const float4 B = m.in[t0 + t][lane], C = m.out[t0 + t][lane], h = m.before[t0 + t][threadIdx.x];
        const float b[kOwn] = {B.x, B.y, B.z, B.w}, c[kOwn] = {C.x, C.y, C.z, C.w}, before[kOwn] = {h.x, h.y, h.z, h.w};
        float maps[2 * kOwn], sum = 0, rise = endless;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const Decay<exact> decay(step.x, rates[i]);
          const float R = fmaf(c[i], dy, J[i]), moved = R * decay.times(before[i]);
          maps[i] = R * step.y;
          maps[kOwn + i] = dy * after[i];
          sum = fmaf(b[i], R, sum);
          rise = fmaf(rates[i], moved, rise);
          part[i] = fmaf(moved, step.x, part[i]);
          J[i] = decay.times(R);
          after[i] = before[i];
        }
        back[t] = sum;
        slope[t] = rise;
        if (s.dmaps == nullptr) continue;
        share_sums<32 / kLanes, kLanes>(maps);
        m.parts[warp][t0 + t][column] = maps[0];
      }
      share_sums<kLanes, 1>(back);
      share_sums<kLanes, 1>(slope);
      const int t = t0 + share_of<kLanes, 1>();
      m.back[t][own] = back[0];
      m.slope[t][own] = slope[0];
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) dA[i] += part[i];
  }
  // dx and ddt (in tiles: their parts), dz, and the block's part of dB and dC.
  __device__ void finish(int64_t t0) {
    const int64_t t = t0 + row;
    if (t < at.last) {
      float steps[W], inputs[W], dx[W], ddt[W];
      dt.get(steps);
      x.get(inputs);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float delta = m.steps[ch + i][row].x, dy = m.given[ch + i][row], back = m.back[row][ch + i];
        const float ddelta = fmaf(kLn2, m.slope[row][ch + i], inputs[i] * back);
        const float rise = s.raw ? 1 : ptx::logistic<!exact>(steps[i] + m.bias[ch + i]);
        dx[i] = delta * back;
        ddt[i] = ddelta;
        dD[i] += dy * inputs[i];
        dbias[i] += ddelta * rise;
        if (s.dx != nullptr) continue;
        dx[i] = fmaf(m.skip[ch + i], dy, dx[i]);
        ddt[i] *= rise;
      }
      if (s.dx == nullptr) {
        if (is_given(s.grads.dx)) Channels<T, W>::store(s, at, s.grads.dx, t, ch, dx);
        if (is_given(s.grads.ddt)) Channels<T, W>::store(s, at, s.grads.ddt, t, ch, ddt);
        if (is_given(s.grads.dz)) store_gate(t, inputs);
      } else {
#pragma unroll
        for (int i = 0; i < W; ++i) {
          if (ch + i >= at.channels) continue;
          s.dx[at.row_place(s, t, ch + i)] = dx[i];
          s.ddelta[at.row_place(s, t, ch + i)] = ddt[i];
          if (is_given(s.grads.dz)) s.y[at.row_place(s, t, ch + i)] = m.y[row][ch + i];
        }
      }
    }
    if (s.dmaps == nullptr) return;
    const int64_t part = blockIdx.y % s.blocks_per_group;
#pragma unroll
    for (int i = threadIdx.x; i < kRows * 2 * kScanStates; i += kThreads) {
      const int r = i / (2 * kScanStates), column = i % (2 * kScanStates), n = column % kScanStates;
      float sum = m.parts[0][r][column];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) sum += m.parts[w][r][column];
      if (t0 + r >= at.last || n >= at.states) continue;
      const int64_t place_of = ((part * s.args.x.size[0] + at.at.b) * s.segments.T + t0 + r) * s.G + at.group;
      s.dmaps[(place_of * 2 + column / kScanStates) * s.K + at.n0 + n] = sum;
    }
  }
  __device__ void store_gate(int64_t t, const float (&inputs)[W]) const {
    float given[W], gates[W], dz[W];
    dout.get(given);
    z.get(gates);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const float2 g = ptx::logistic_pair<!exact>(gates[i]);
      dz[i] = given[i] * fmaf(m.skip[ch + i], inputs[i], m.y[row][ch + i]) * (g.x * fmaf(gates[i], g.y, 1));
    }
    Channels<T, W>::store(s, at, s.grads.dz, t, ch, dz);
  }
  // Of the threads that share channels, in order.
  __device__ void store_totals(const double (&mine)[W], float* to) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < W; ++i) m.totals[row][ch + i] = mine[i];
    __syncthreads();
    if (to == nullptr || threadIdx.x >= at.channels) return;
    double sum = 0;
    for (int r = 0; r < kRows; ++r) sum += m.totals[r][threadIdx.x];
    to[at.e + threadIdx.x] = static_cast<float>(sum);
  }
};

template <class T>
__device__ void scan_back(const Scan& s) {
  extern __shared__ __align__(16) char memory[];
  Back<T> w(s, *reinterpret_cast<BackShared*>(memory));
  ScanBlock& at = w.at;
  const bool any = at.begin(s);  // no tokens: its parts of the sums are zeros
  if (!any) at.first = at.last = 0;
  w.begin(any);
  const int64_t chunks = (at.last - at.first + kRows - 1) / kRows;
  const int64_t chunk = at.first_chunk(s) + (at.first - at.at.begin) / kRows;
  if (chunks > 0) w.load(at.first + (chunks - 1) * kRows);
  for (int64_t i = chunks; i-- > 0;) {
    const int64_t t0 = at.first + i * kRows;
    w.prepare(t0);
    __syncthreads();
    float h[kOwn];
    w.walk(chunk + i, h);
    w.walk_back(h);
    __syncthreads();
    w.finish(t0);
    if (i > 0) w.load(t0 - kRows);
  }
  const int64_t slots = s.gradients != nullptr ? slot_count(s.segments) : s.segments.N;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int n = w.lane * kOwn + i;
    if (!w.has(i)) continue;
    if (s.dA != nullptr) s.dA[at.state_place(s, blockIdx.x, w.own, n)] = static_cast<float>(w.dA[i]);
    if (s.gradients == nullptr && is_given(s.grads.dinitial_state)) {
      put(s.grads.dinitial_state, w.J[i], at.at.n, at.e + w.own, at.n0 + n);
    }
  }
  const int64_t channels = static_cast<int64_t>(blockIdx.x) * s.E;
  w.store_totals(w.dD, s.dD != nullptr && blockIdx.z == 0 ? s.dD + channels : nullptr);
  w.store_totals(w.dbias, s.dt_bias == nullptr ? nullptr : s.dt_bias + blockIdx.z * slots * s.E + channels);
}

}  // namespace

#define LINNET_SCAN_BACK(suffix, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, 4) scan_back_##suffix(const __grid_constant__ Scan s) { \
    scan_back<T>(s);                                                                                             \
  }
LINNET_SCAN_BACK(f32, float)
LINNET_SCAN_BACK(bf16, __nv_bfloat16)
LINNET_SCAN_BACK(f16, __half)

}  // namespace linnet::cuda
