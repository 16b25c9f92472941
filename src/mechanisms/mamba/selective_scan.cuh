// What the kernels of the selective scan share: steps and their decays, a block's place, rows of channels, sums over lanes.
#pragma once

#include "mechanisms/mamba/selective_scan_cuda.h"
#include "mechanisms/shared/segments.cuh"

namespace linnet::cuda {
namespace {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f, kFastest = -1e30f;
template <class T>
inline constexpr bool kExact = sizeof(T) == 4;  // f32: nothing may drift, and functions are as exact as f32 can have them

// The decay of one step, 2^t with t = delta rate, the rate in units of log2. Exact: a factor near 1 that is rounded to f32
// drifts with the memory's length, so there it is h + ((2^t - 1) h + b), the bracket first. Up to |t| = 1/2 the range reduction
// has nothing to reduce, and its polynomial is 2^t - 1.
template <bool exact>
struct Decay {
  float value;
  bool near = false;
  __device__ __forceinline__ Decay(float delta, float rate) {
    if constexpr (!exact) {
      value = ptx::exp2_fast(delta * rate);
      return;
    }
    float t = delta * rate;
    t = t < -127 ? -127 : t > 128 ? 128 : t;  // in this order NaN stays
    const float n = rintf(t), f = t - n;
    const float tail = fmaf(
        f, fmaf(f, fmaf(f, fmaf(f, fmaf(f, 0x1.41fbbep-13f, 0x1.5f3e52p-10f), 0x1.3b2d4cp-7f), 0x1.c6aee8p-5f), 0x1.ebfbdcp-3f),
        0x1.62e430p-1f);  // (2^f - 1) / f for |f| <= 1/2: 2^-28.9 (src/simd/math.h)
    near = n == 0;
    value = near ? f * tail : fmaf(f, tail, 1.0f) * __int_as_float(max(0, static_cast<int>(n) + 127) << 23);
    if (t >= 128) value = INFINITY;
  }
  // 2^t h + b. Exact: `lost` is what the sum before it lost, and takes what this one loses.
  __device__ __forceinline__ float advance(float h, float b, float* lost) const {
    if constexpr (!exact) return fmaf(value, h, b);
    const float base = near ? h : 0, step = fmaf(value, h, b) + *lost, sum = base + step;
    *lost = near ? step - (sum - base) : 0;
    return sum;
  }
  __device__ __forceinline__ float times(float h) const {
    if constexpr (!exact) return value * h;
    return fmaf(value, h, near ? h : 0);
  }
};

// softplus, as exact as the numbers need it
template <class T>
__device__ __forceinline__ float step_of(float x) {
  if constexpr (kExact<T>) return x != x ? x : fmaxf(x, 0) + log1pf(expf(-fabsf(x)));
  const float e = ptx::exp2_fast(-kLog2e * fabsf(x));  // log(1 + e) by its series where 1 + e would lose e
  const float log_of = e < 0.02f ? e * fmaf(e, fmaf(e, 1 / 3.0f, -0.5f), 1) : kLn2 * ptx::log2_fast(1 + e);
  return x != x ? x : fmaxf(x, 0) + log_of;
}

// What a block has: 32 channels of a group and 16 of their states, the tokens [first, last) of a sequence.
struct ScanBlock {
  Span at;
  int64_t first = 0, last = 0;
  int group, channel, channels;  // of the group: its first, and how many
  int e;                         // of the first channel, among all
  int n0, states;

  // False: an empty place between segments.
  __device__ bool begin(const Scan& s) {
    group = blockIdx.y / s.blocks_per_group;
    channel = blockIdx.y % s.blocks_per_group * kScanChannels;
    channels = min(kScanChannels, s.per_group - channel);
    e = group * s.per_group + channel;
    n0 = blockIdx.z * kScanStates;
    states = min(kScanStates, s.K - n0);
    if (s.states != nullptr) return segment_at(s.segments, blockIdx.x, &at, &first, &last);
    at = sequence_at(s.segments, blockIdx.x);
    first = at.begin, last = at.end;
    return true;
  }
  __device__ bool is_whole_sequence() const { return first == at.begin && last == at.end; }
  __device__ int64_t state_place(const Scan& s, int64_t slot, int ch, int n) const {
    return (slot * s.E + e + ch) * s.K + n0 + n;
  }
  __device__ int64_t row_place(const Scan& s, int64_t t, int ch) const {  // of parts of y, dx and ddelta
    return ((blockIdx.z * s.args.x.size[0] + at.b) * s.segments.T + t) * s.E + e + ch;
  }
  // The first of the places for the states before every 16 tokens of the sequence.
  __device__ int64_t first_chunk(const Scan& s) const {
    if (is_given(s.segments.offsets)) return at.begin / kScanBackRows + at.n;
    return at.n * ((s.segments.T + kScanBackRows - 1) / kScanBackRows);
  }
};
// In units of log2. Finite: a step of 0 (and there are such behind the last token) decays nothing, however fast the rate.
__device__ __forceinline__ float rate_of(const Scan& s, const ScanBlock& at, int ch, int n) {
  const float rate = ch < at.channels && n < at.states ? get(s.args.A, at.e + ch, at.n0 + n) * kLog2e : 0;
  return rate < kFastest ? kFastest : rate;
}

// W neighbouring channels of one token, as they come from memory.
template <class T, int W>
struct Channels {
  static constexpr int V = W < ptx::kVector<T> ? W : ptx::kVector<T>;
  ptx::Piece<T, V> part[W / V];

  __device__ __forceinline__ void load(const Scan& s, const ScanBlock& at, const View& view, int64_t t, int ch, bool there) {
    const T* row = static_cast<const T*>(view.data) + place(view, at.at.b, t, at.e + ch);
#pragma unroll
    for (int p = 0; p < W / V; ++p) {
      if (there && s.whole && ch + p * V < at.channels) {
        part[p].load(row + p * V);
        continue;
      }
      float x[V];
#pragma unroll
      for (int i = 0; i < V; ++i)
        x[i] = there && !s.whole && ch + p * V + i < at.channels ? static_cast<float>(row[p * V + i]) : 0;
      part[p].set(x);
    }
  }
  __device__ __forceinline__ void get(float (&x)[W]) const {
#pragma unroll
    for (int p = 0; p < W / V; ++p) {
      float some[V];
      part[p].get(some);
#pragma unroll
      for (int i = 0; i < V; ++i) x[p * V + i] = some[i];
    }
  }
  __device__ __forceinline__ static void store(const Scan& s, const ScanBlock& at, const View& view, int64_t t, int ch,
                                               const float (&x)[W]) {
    T* row = static_cast<T*>(view.data) + place(view, at.at.b, t, at.e + ch);
#pragma unroll
    for (int p = 0; p < W / V; ++p) {
      float some[V];
#pragma unroll
      for (int i = 0; i < V; ++i) some[i] = x[p * V + i];
      if (s.whole) {
        Channels<T, V> piece;
        piece.part[0].set(some);
        if (ch + p * V < at.channels) piece.part[0].store(row + p * V);
        continue;
      }
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (ch + p * V + i < at.channels) row[p * V + i] = static_cast<T>(some[i]);
      }
    }
  }
};

// Four neighbouring states of a row of B or C, as they come from memory.
template <class T>
__device__ __forceinline__ void load_map(const Scan& s, const ScanBlock& at, const View& map, int64_t t, int n, bool there,
                                         ptx::Piece<T, 4>& four) {
  there = there && n < at.states;
  const T* row = static_cast<const T*>(map.data) + place(map, at.at.b, t, at.group, at.n0 + n);
  if (there && s.whole_maps) return four.load(row);
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = there && n + i < at.states ? static_cast<float>(row[i * map.stride[3]]) : 0;
  four.set(x);
}

// The sums over `lanes` neighbouring threads (apart by `step`) of as many values each, or of M times as many: afterwards x[0]
// to x[M - 1] are those of the values i + M sums_of_lane(). Pairs of neighbours first, the same order for any number of lanes.
template <int lanes, int step, int count>
__device__ __forceinline__ void share_sums(float (&x)[count]) {
  int left = count;
#pragma unroll
  for (int mask = 1; mask < lanes; mask *= 2) {
    const bool upper = (threadIdx.x & (mask * step)) != 0;
    left /= 2;
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      if (i >= left) continue;
      const float give = upper ? x[i] : x[i + left], keep = upper ? x[i + left] : x[i];
      x[i] = keep + __shfl_xor_sync(0xffffffff, give, mask * step);
    }
  }
}
// Which of `lanes` shares this thread has then: the lanes' number, its bits in reverse.
template <int lanes, int step>
__device__ __forceinline__ int share_of() {
  int share = 0;
#pragma unroll
  for (int mask = 1; mask < lanes; mask *= 2) share = share * 2 + ((threadIdx.x & (mask * step)) != 0 ? 1 : 0);
  return share;
}

}  // namespace
}  // namespace linnet::cuda
