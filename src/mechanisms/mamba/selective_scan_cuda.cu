// The selective scan (selective_scan_cuda.h): a thread has a channel and 16 of its states in registers; B and C of 16 tokens
// lie in shared memory. With f32 tensors the states are double, whose decays are 1 + expm1: nothing drifts.
//
// Sums over channels (dB, dC) leave a warp as one number each and are added in order by sum_maps; those over tokens (dA, dD,
// ddt_bias) leave a segment and are added by sum_parts. Backward: the states of a segment's 16 tokens are kept in shared
// memory.
#include "mechanisms/shared/segments.cuh"
#include "selective_scan_cuda.h"

namespace linnet::cuda {
namespace {

constexpr int N = kScanStates, kSpan = 16;

__device__ __forceinline__ float softplus(float x) { return x != x ? x : fmaxf(x, 0) + log1pf(expf(-fabsf(x))); }

template <class T>
struct Channel {
  static constexpr bool exact = sizeof(T) == 4;
  using S = std::conditional_t<exact, double, float>;

  const Scan& s;
  Span at;
  int64_t first, last;
  int e, group, n0, count;
  bool in;
  float rates[N], bias, skip;

  // False: nothing to do for the whole block.
  __device__ bool begin(int64_t slot) {
    group = blockIdx.y / s.blocks_per_group;
    const int within = blockIdx.y % s.blocks_per_group * s.threads + threadIdx.x;
    in = within < s.per_group;
    e = group * s.per_group + (in ? within : 0);
    n0 = blockIdx.z * N;
    count = min(N, s.K - n0);
#pragma unroll
    for (int n = 0; n < N; ++n) rates[n] = n < count ? get(s.args.A, e, n0 + n) * (exact ? 1 : 1.44269504f) : 0;
    bias = get_or(0, s.args.dt_bias, e);
    skip = get_or(0, s.args.D, e);
    if (!s.in_place) return segment_at(s.segments, slot, &at, &first, &last);
    at = {slot, slot, 0, s.segments.T};
    first = 0, last = s.segments.T;
    return true;
  }
  __device__ float read(const View& view, int64_t t) const {
    return static_cast<float>(static_cast<const T*>(view.data)[place(view, at.b, t, e)]);
  }
  __device__ float step(int64_t t) const { return read(s.args.dt, t) + bias; }
  __device__ float gate(int64_t t) const {
    if (!is_given(s.args.z)) return 1;
    const float z = read(s.args.z, t);
    return z * ptx::logistic<false>(z);
  }
  __device__ float dy(int64_t t) const { return is_given(s.grads.dout) ? read(s.grads.dout, t) * gate(t) : 0; }
  // rates are in units of log2 where the quick exponential serves. A step of 0 decays nothing, however fast the rate.
  __device__ S decay(float delta, int n) const {
    if constexpr (exact) {
      const float g = delta == 0 ? 0 : delta * rates[n];
      return g > -0.69f ? 1.0 + static_cast<double>(expm1f(g)) : static_cast<double>(expf(g));
    }
    return ptx::exp2_fast(delta * rates[n]);
  }
  __device__ float rate(int n) const { return exact ? rates[n] : rates[n] * 0.69314718f; }
  // softplus, as exact as the numbers need it
  __device__ float step_of(float x) const {
    if (s.raw) return x;
    if constexpr (exact) return softplus(x);
    const float e = ptx::exp2_fast(-1.44269504f * fabsf(x));  // log(1 + e) by its series where 1 + e would lose e
    const float log_of = e < 0.02f ? e * fmaf(e, fmaf(e, 1 / 3.0f, -0.5f), 1) : 0.69314718f * ptx::log2_fast(1 + e);
    return x != x ? x : fmaxf(x, 0) + log_of;
  }
  // A tensor's tokens t .. t + rows - 1 of the channel, all on their way at once; 0 behind them.
  __device__ void read_span(const View& view, int64_t t, int rows, float (&to)[kSpan]) const {
    const T* from = static_cast<const T*>(view.data) + place(view, at.b, t, e);
#pragma unroll
    for (int r = 0; r < kSpan; ++r) to[r] = r < rows ? static_cast<float>(from[r * view.stride[1]]) : 0;
  }
  // The tokens [t, t + rows) of a map, 16 channels each; by all threads.
  __device__ void load(const View& map, int64_t t, int rows, float (&to)[kSpan][N]) const {
    for (int i = threadIdx.x; i < kSpan * N; i += s.threads) {
      const int r = i / N, n = i % N;
      to[r][n] = r < rows && n < count ? get(map, at.b, t + r, group, n0 + n) : 0;
    }
  }
  __device__ int64_t state_place(int64_t slot, int n) const { return (slot * s.E + e) * s.K + n0 + n; }
};

// A segment alone: its state from zero, or J.
template <class T, bool reverse>
__device__ void scan_states(const Scan& s) {
  using C = Channel<T>;
  using S = typename C::S;
  __shared__ float map[kSpan][N];
  C c{s};
  if (!c.begin(blockIdx.x)) return;
  S h[N] = {};
  float sum = 0;
  const int64_t rows = c.last - c.first;
  for (int64_t done = 0; done < rows; done += kSpan) {
    const int count = static_cast<int>(min(static_cast<int64_t>(kSpan), rows - done));
    const int64_t t0 = reverse ? c.last - done - count : c.first + done;
    __syncthreads();
    c.load(reverse ? s.args.C : s.args.B, t0, count, map);
    __syncthreads();
    if (!c.in) continue;
    float steps[kSpan], inputs[kSpan];
    c.read_span(s.args.dt, t0, count, steps);
    if constexpr (!reverse) c.read_span(s.args.x, t0, count, inputs);
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      const int r = reverse ? kSpan - 1 - i : i;
      if (r >= count) continue;
      const float delta = c.step_of(steps[r] + c.bias), v = reverse ? c.dy(t0 + r) : delta * inputs[r];
      sum += delta;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const S write = static_cast<S>(map[r][n]) * v, a = c.decay(delta, n);
        h[n] = reverse ? a * (h[n] + write) : a * h[n] + write;
      }
    }
  }
  if (!c.in) return;
  float* states = reverse ? s.gradients : s.states;
  for (int n = 0; n < N; ++n) {
    if (n < c.count) states[c.state_place(blockIdx.x, n)] = static_cast<float>(h[n]);
  }
  if (blockIdx.z == 0) s.sums[static_cast<int64_t>(blockIdx.x) * s.E + c.e] = sum;
}

// y of a token, finished: with its skip and gate.
template <class T>
__device__ __forceinline__ void finish(const Scan& s, const Channel<T>& c, int64_t t, float y) {
  static_cast<T*>(s.out.data)[place(s.out, c.at.b, t, c.e)] = static_cast<T>(y);
}

template <class T>
__device__ void scan_outputs(const Scan& s) {
  using C = Channel<T>;
  using S = typename C::S;
  __shared__ float in[kSpan][N], out[kSpan][N];
  C c{s};
  if (!c.begin(blockIdx.x)) return;
  S h[N] = {};
  if (c.in) {
    for (int n = 0; n < N; ++n) {
      if (n >= c.count) break;
      h[n] = s.in_place ? get(s.initial, c.at.n, c.e, c.n0 + n) : s.states[c.state_place(blockIdx.x, n)];
    }
  }
  for (int64_t t0 = c.first; t0 < c.last; t0 += kSpan) {
    const int count = static_cast<int>(min(static_cast<int64_t>(kSpan), c.last - t0));
    __syncthreads();
    c.load(s.args.B, t0, count, in);
    c.load(s.args.C, t0, count, out);
    __syncthreads();
    if (!c.in) continue;
    float steps[kSpan], inputs[kSpan], gates[kSpan];
    c.read_span(s.args.dt, t0, count, steps);
    c.read_span(s.args.x, t0, count, inputs);
    if (is_given(s.args.z)) c.read_span(s.args.z, t0, count, gates);
#pragma unroll
    for (int r = 0; r < kSpan; ++r) {
      const int64_t t = t0 + r;
      if (r >= count) break;
      const float delta = c.step_of(steps[r] + c.bias), v = delta * inputs[r];
      S y = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        h[n] = c.decay(delta, n) * h[n] + static_cast<S>(in[r][n]) * v;
        y += static_cast<S>(out[r][n]) * h[n];
      }
      if (s.y == nullptr) {
        const float gate = is_given(s.args.z) ? gates[r] * ptx::logistic<!C::exact>(gates[r]) : 1;
        finish<T>(s, c, t, fmaf(c.skip, inputs[r], static_cast<float>(y)) * gate);
      } else {
        s.y[((blockIdx.z * s.args.x.size[0] + c.at.b) * s.segments.T + t) * s.E + c.e] = static_cast<float>(y);
      }
    }
  }
  if (!s.in_place || !c.in) return;
  for (int n = 0; n < N; ++n) {
    if (n < c.count) put(s.final, static_cast<float>(h[n]), c.at.n, c.e, c.n0 + n);
  }
}

// The sum of each of M values over the warp; afterwards lane i has value i % M in x[0].
template <int M>
__device__ __forceinline__ void scatter_sums(float (&x)[M]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = M / 2; half > 0; half /= 2) {
    const bool upper = (lane & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float give = upper ? x[i] : x[i + half], keep = upper ? x[i + half] : x[i];
      x[i] = keep + __shfl_xor_sync(0xffffffff, give, half);
    }
  }
}

// What a token's ddelta and dx become: dt's gradient, and both results.
template <class T>
__device__ __forceinline__ float finish_back(const Scan& s, const Channel<T>& c, int64_t t, float dx, float ddelta) {
  const float ddt = s.raw ? ddelta : ddelta * ptx::logistic<false>(c.step(t));
  const auto store = [&](const View& to, float x) {
    if (is_given(to)) static_cast<T*>(to.data)[place(to, c.at.b, t, c.e)] = static_cast<T>(x);
  };
  store(s.grads.dx, fmaf(c.skip, c.dy(t), dx));
  store(s.grads.ddt, ddt);
  return ddt;
}
template <class T>
__device__ __forceinline__ void finish_gate(const Scan& s, const Channel<T>& c, int64_t t, float y) {
  if (!is_given(s.grads.dz)) return;
  const float z = c.read(s.args.z, t), d = is_given(s.grads.dout) ? c.read(s.grads.dout, t) : 0;
  const float2 g = ptx::logistic_pair<false>(z);
  const float slope = g.x * fmaf(z, g.y, 1);
  static_cast<T*>(s.grads.dz.data)[place(s.grads.dz, c.at.b, t, c.e)] =
      static_cast<T>(d * fmaf(c.skip, c.read(s.args.x, t), y) * slope);
}

// A segment of at most kSpan tokens: its states forwards into shared memory, then backwards.
template <class T>
__device__ void scan_back(const Scan& s) {
  using C = Channel<T>;
  using S = typename C::S;
  extern __shared__ double memory[];  // [kSpan, N, threads]: the states before each token
  __shared__ float in[kSpan][N], out[kSpan][N];
  C c{s};
  const int rows = c.begin(blockIdx.x) ? static_cast<int>(c.last - c.first) : 0;  // none: its parts of the sums are zeros
  c.load(s.args.B, c.first, rows, in);
  c.load(s.args.C, c.first, rows, out);
  __syncthreads();
  S h[N] = {}, J[N] = {};
  float dA[N] = {}, dD = 0, dbias = 0;
  S* kept = reinterpret_cast<S*>(memory);
  for (int n = 0; n < N; ++n) {
    if (!c.in || n >= c.count || rows == 0) break;
    h[n] = s.states[c.state_place(blockIdx.x, n)];
    J[n] = s.gradients[c.state_place(blockIdx.x, n)];
  }
  for (int r = 0; r < rows && c.in; ++r) {
    const int64_t t = c.first + r;
    const float delta = c.step_of(c.step(t)), v = delta * c.read(s.args.x, t);
    S y = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      kept[(r * N + n) * s.threads + threadIdx.x] = h[n];
      h[n] = c.decay(delta, n) * h[n] + static_cast<S>(in[r][n]) * v;
      y += static_cast<S>(out[r][n]) * h[n];
    }
    if (s.y == nullptr) {
      finish_gate(s, c, t, static_cast<float>(y));
    } else {
      s.y[((blockIdx.z * s.args.x.size[0] + c.at.b) * s.segments.T + t) * s.E + c.e] = static_cast<float>(y);
    }
  }
  const int lane = threadIdx.x % 32, warp = blockIdx.y % s.blocks_per_group * (s.threads / 32) + threadIdx.x / 32;
  for (int r = rows; r-- > 0;) {
    const int64_t t = c.first + r;
    float maps[2 * N] = {};
    if (c.in) {
      const float delta = c.step_of(c.step(t)), x = c.read(s.args.x, t), dy = c.dy(t);
      S dx = 0, ddelta = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const S before = kept[(r * N + n) * s.threads + threadIdx.x], a = c.decay(delta, n), b = in[r][n];
        const S R = J[n] + static_cast<S>(out[r][n]) * dy, moved = a * before;
        maps[n] = static_cast<float>(R) * delta * x;
        maps[N + n] = dy * static_cast<float>(moved + b * (delta * x));
        dx += b * R;
        ddelta += R * (static_cast<S>(c.rate(n)) * moved + b * x);
        dA[n] = fmaf(static_cast<float>(R * moved), delta, dA[n]);
        J[n] = a * R;
      }
      dD = fmaf(dy, x, dD);
      if (s.dx == nullptr) {
        dbias += finish_back(s, c, t, static_cast<float>(dx) * delta, static_cast<float>(ddelta));
      } else {
        const int64_t place_of = ((blockIdx.z * s.args.x.size[0] + c.at.b) * s.segments.T + t) * s.E + c.e;
        s.dx[place_of] = static_cast<float>(dx) * delta;
        s.ddelta[place_of] = static_cast<float>(ddelta);
        dbias = fmaf(static_cast<float>(ddelta), ptx::logistic<false>(c.step(t)), dbias);
      }
    }
    if (s.dmaps == nullptr) continue;
    scatter_sums<2 * N>(maps);
    const int n = lane % N;
    if (n < c.count) {
      const int64_t row = ((static_cast<int64_t>(warp) * s.args.x.size[0] + c.at.b) * s.segments.T + t) * s.G + c.group;
      s.dmaps[(row * 2 + lane / N) * s.K + c.n0 + n] = maps[0];
    }
  }
  if (!c.in) return;
  for (int n = 0; n < N; ++n) {
    if (n < c.count && s.dA != nullptr) s.dA[c.state_place(blockIdx.x, n)] = dA[n];
  }
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * s.E + c.e;
  if (s.dD != nullptr && blockIdx.z == 0) s.dD[channel] = dD;
  if (s.dt_bias != nullptr) s.dt_bias[static_cast<int64_t>(blockIdx.z) * slot_count(s.segments) * s.E + channel] = dbias;
}

// Tiles > 1: the parts of y, dx and ddelta are added and finished.
template <class T>
__device__ void scan_combine(const Scan& s, bool back) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x, all = s.args.x.size[0] * s.segments.T * s.E;
  if (i >= all) return;
  Channel<T> c{s};
  c.e = static_cast<int>(i % s.E);
  const int64_t t = i / s.E % s.segments.T;
  c.at.b = i / s.E / s.segments.T;
  c.bias = get_or(0, s.args.dt_bias, c.e);
  c.skip = get_or(0, s.args.D, c.e);
  float y = 0, dx = 0, ddelta = 0;
  for (int tile = 0; tile < s.tiles; ++tile) {
    y += s.y[tile * all + i];
    if (back) dx += s.dx[tile * all + i], ddelta += s.ddelta[tile * all + i];
  }
  if (back) {
    finish_gate(s, c, t, y);
    finish_back(s, c, t, dx, ddelta);
  } else {
    finish<T>(s, c, t, fmaf(c.skip, c.read(s.args.x, t), y) * c.gate(t));
  }
}

}  // namespace

#define LINNET_SCAN_KERNEL(name, T, threads, body) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Scan s) { body; }
#define LINNET_SCAN(suffix, T)                                                 \
  LINNET_SCAN_KERNEL(scan_states_##suffix, T, 128, (scan_states<T, false>(s))) \
  LINNET_SCAN_KERNEL(scan_reverse_##suffix, T, 128, (scan_states<T, true>(s))) \
  LINNET_SCAN_KERNEL(scan_outputs_##suffix, T, 128, scan_outputs<T>(s))        \
  LINNET_SCAN_KERNEL(scan_back_##suffix, T, 64, scan_back<T>(s))               \
  LINNET_SCAN_KERNEL(scan_combine_##suffix, T, 256, scan_combine<T>(s, false)) \
  LINNET_SCAN_KERNEL(scan_combine_back_##suffix, T, 256, scan_combine<T>(s, true))
LINNET_SCAN(f32, float)
LINNET_SCAN(bf16, __nv_bfloat16)
LINNET_SCAN(f16, __half)

// The states between segments: each place's own becomes the one before it (in reverse: behind it).
extern "C" __global__ void __launch_bounds__(256) scan_fold(const __grid_constant__ Scan s) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x, width = static_cast<int64_t>(s.E) * s.K, n = i / width;
  if (n >= s.segments.N) return;
  const int e = static_cast<int>(i % width / s.K), k = static_cast<int>(i % s.K);
  const Span at = sequence_at(s.segments, n);
  const int64_t slot = first_slot(s.segments, n, at.begin), count = (at.end - at.begin + s.segments.L - 1) / s.segments.L;
  const float rate = get(s.args.A, e, k);
  float* states = s.reverse ? s.gradients : s.states;
  double state = get_or(0, s.initial, n, e, k);
  for (int64_t j = 0; j < count; ++j) {
    const int64_t at_slot = slot + (s.reverse ? count - 1 - j : j), to = at_slot * width + static_cast<int64_t>(e) * s.K + k;
    const float own = states[to], sum = s.sums[at_slot * s.E + e], g = sum == 0 ? 0 : sum * rate;
    states[to] = static_cast<float>(state);
    state = state + (expm1f(g) * state + own);
  }
  if (is_given(s.final)) put(s.final, static_cast<float>(state), n, e, k);
}

// dB and dC: the warps' parts in order.
extern "C" __global__ void __launch_bounds__(256) scan_sum_maps(const __grid_constant__ Scan s, int warps) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x, all = s.args.x.size[0] * s.segments.T * s.G * 2 * s.K;
  if (i >= all) return;
  float sum = 0;
  for (int w = 0; w < warps; ++w) sum += s.dmaps[w * all + i];
  const int64_t k = i % s.K, row = i / (2 * s.K), g = row % s.G, t = row / s.G % s.segments.T, b = row / s.G / s.segments.T;
  const View& to = i / s.K % 2 == 0 ? s.grads.dB : s.grads.dC;
  if (is_given(to)) put(to, sum, b, t, g, k);
}

}  // namespace linnet::cuda
