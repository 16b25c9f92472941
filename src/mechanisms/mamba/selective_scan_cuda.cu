// What surrounds the walks of the selective scan (selective_scan_cuda.h): states between segments, sums of the parts of tiles
// and of blocks, and the step of a decoding call.
#include "mechanisms/mamba/selective_scan.cuh"

namespace linnet::cuda {
namespace {

constexpr int N = kScanStates, kWide = kScanChannels, kSpan = 8;

// A segment alone: its state from zero and the sum of its steps, or J. A warp has 32 channels, a thread all states of one.
template <class T, bool reverse>
__device__ void scan_states(const Scan& s) {
  constexpr bool exact = kExact<T>;
  __shared__ float4 maps[kSpan][N / 4];
  ScanBlock at;
  if (!at.begin(s)) return;
  const int ch = threadIdx.x;
  const bool in = ch < at.channels;
  float rates[N], h[N] = {}, lost[N] = {}, sum = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) rates[n] = rate_of(s, at, ch, n);
  const float bias = in ? get_or(0, s.args.dt_bias, at.e + ch) : 0;
  const auto read = [&](const View& view, int64_t t) { return in ? get(view, at.at.b, t, at.e + ch) : 0; };
  for (int64_t done = 0, rows = at.last - at.first; done < rows; done += kSpan) {
    const int count = static_cast<int>(min(int64_t{kSpan}, rows - done));
    const int64_t t0 = reverse ? at.last - done - count : at.first + done;
    ptx::Piece<T, 4> four;
    load_map<T>(s, at, reverse ? s.args.C : s.args.B, t0 + threadIdx.x / 4, threadIdx.x % 4 * 4,
                static_cast<int>(threadIdx.x) / 4 < count, four);
    float x[4];
    four.get(x);
    __syncwarp();
    maps[threadIdx.x / 4][threadIdx.x % 4] = {x[0], x[1], x[2], x[3]};
    __syncwarp();
    for (int i = 0; i < count; ++i) {
      const int r = reverse ? count - 1 - i : i;
      const float d = read(s.args.dt, t0 + r) + bias, delta = s.raw ? d : step_of<T>(d);
      float v;
      if constexpr (reverse) {
        const float z = is_given(s.args.z) ? read(s.args.z, t0 + r) : 0;
        v = is_given(s.grads.dout) ? read(s.grads.dout, t0 + r) : 0;
        if (is_given(s.args.z)) v *= z * ptx::logistic<!exact>(z);
      } else {
        v = delta * read(s.args.x, t0 + r);
      }
      sum += delta;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float4 some = maps[r][n / 4];
        const float map = n % 4 == 0 ? some.x : n % 4 == 1 ? some.y : n % 4 == 2 ? some.z : some.w;
        const Decay<exact> decay(delta, rates[n]);
        h[n] = reverse ? decay.times(fmaf(map, v, h[n])) : decay.advance(h[n], map * v, &lost[n]);
      }
    }
  }
  float* const states = reverse ? s.gradients : s.states;
  for (int n = 0; n < N; ++n) {
    if (in && n < at.states) states[at.state_place(s, blockIdx.x, ch, n)] = h[n];
  }
  if (in && blockIdx.z == 0) s.sums[static_cast<int64_t>(blockIdx.x) * s.E + at.e + ch] = sum;
}

// Tiles > 1: the parts of y, dx and ddelta are added and finished.
template <class T>
__device__ void scan_combine(const Scan& s, bool back) {
  constexpr bool quick = !kExact<T>;
  const int64_t i = blockIdx.x * 256ll + threadIdx.x, all = s.args.x.size[0] * s.segments.T * s.E;
  if (i >= all) return;
  const int e = static_cast<int>(i % s.E);
  const int64_t t = i / s.E % s.segments.T, b = i / s.E / s.segments.T;
  const auto read = [&](const View& view) {
    return static_cast<float>(static_cast<const T*>(view.data)[place(view, b, t, e)]);
  };
  const auto store = [&](const View& to, float x) {
    if (is_given(to)) static_cast<T*>(to.data)[place(to, b, t, e)] = static_cast<T>(x);
  };
  const auto sum_of = [&](const float* parts) {
    float sum = 0;
    for (int tile = 0; tile < s.tiles; ++tile) sum += parts[tile * all + i];
    return sum;
  };
  const float skip = get_or(0, s.args.D, e), x = read(s.args.x), z = is_given(s.args.z) ? read(s.args.z) : 0;
  const float2 g = ptx::logistic_pair<quick>(z);
  const float gate = is_given(s.args.z) ? z * g.x : 1;
  if (!back) return store(s.out, fmaf(skip, x, sum_of(s.y)) * gate);
  const float given = is_given(s.grads.dout) ? read(s.grads.dout) : 0, d = read(s.args.dt) + get_or(0, s.args.dt_bias, e);
  if (is_given(s.grads.dz)) store(s.grads.dz, given * fmaf(skip, x, sum_of(s.y)) * (g.x * fmaf(z, g.y, 1)));
  store(s.grads.dx, fmaf(skip, given * gate, sum_of(s.dx)));
  store(s.grads.ddt, sum_of(s.ddelta) * (s.raw ? 1 : ptx::logistic<quick>(d)));
}

// Four neighbouring numbers of a row of `width`, from n on.
template <class T>
__device__ __forceinline__ void read_four(const T* row, int64_t stride, int n, int width, bool whole, float (&x)[4]) {
  if (whole) {
    ptx::Piece<T, 4> four;
    *reinterpret_cast<std::conditional_t<sizeof(T) == 4, uint4, uint2>*>(four.words) =
        *reinterpret_cast<const std::conditional_t<sizeof(T) == 4, uint4, uint2>*>(row + n);
    return four.get(x);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = n + i < width ? static_cast<float>(row[(n + i) * stride]) : 0;
}

// One or few tokens, the state in place: four lanes have a channel, each four neighbours of every 16 of its states.
template <class T>
__device__ void scan_decode(const Scan& s) {
  constexpr bool exact = kExact<T>;
  const int64_t i = (blockIdx.x * 128ll + threadIdx.x) / 4, b = i / s.E;
  const int lane = threadIdx.x % 4, e = static_cast<int>(i % s.E);
  const bool in = b < s.args.x.size[0];
  const int64_t row = in ? b : 0;
  const int group = s.per_group == 0 ? 0 : e / s.per_group;
  const float bias = get_or(0, s.args.dt_bias, e), skip = get_or(0, s.args.D, e);
  const auto read = [&](const View& view, int64_t t) {
    return static_cast<float>(static_cast<const T*>(view.data)[place(view, row, t, e)]);
  };
  const auto map_of = [&](const View& map, int64_t t) { return static_cast<const T*>(map.data) + place(map, row, t, group); };
  float* const state = static_cast<float*>(s.initial.data) + place(s.initial, row, e);
  const float* const rates = static_cast<const float*>(s.args.A.data) + place(s.args.A, e);
  for (int64_t t = 0; t < s.segments.T; ++t) {
    const float x = read(s.args.x, t), d = read(s.args.dt, t) + bias, delta = s.raw ? d : step_of<T>(d);
    float y = 0;
    for (int n = lane * 4; n < s.K; n += N) {
      float h[4], rate[4], in_map[4], out_map[4];
      read_four(state, s.initial.stride[2], n, s.K, s.whole, h);
      read_four(rates, s.args.A.stride[1], n, s.K, s.whole, rate);
      read_four(map_of(s.args.B, t), s.args.B.stride[3], n, s.K, s.whole_maps, in_map);
      read_four(map_of(s.args.C, t), s.args.C.stride[3], n, s.K, s.whole_maps, out_map);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float lost = 0;
        h[i] = Decay<exact>(delta, fmaxf(rate[i] * kLog2e, kFastest)).advance(h[i], in_map[i] * (delta * x), &lost);
        y = fmaf(out_map[i], h[i], y);
      }
      if (!in) continue;
      if (s.whole) {
        *reinterpret_cast<float4*>(state + n) = *reinterpret_cast<const float4*>(h);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (n + i < s.K) state[(n + i) * s.initial.stride[2]] = h[i];
      }
    }
    y = fmaf(skip, x, ptx::sum_lanes<4>(y));
    if (is_given(s.args.z)) {
      const float z = read(s.args.z, t);
      y *= z * ptx::logistic<!exact>(z);
    }
    if (in && lane == 0) static_cast<T*>(s.out.data)[place(s.out, row, t, e)] = static_cast<T>(y);
  }
}

}  // namespace

#define LINNET_SCAN(suffix, T)                                                                                   \
  extern "C" __global__ void __launch_bounds__(kWide) scan_states_##suffix(const __grid_constant__ Scan s) {     \
    scan_states<T, false>(s);                                                                                    \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(kWide) scan_reverse_##suffix(const __grid_constant__ Scan s) {    \
    scan_states<T, true>(s);                                                                                     \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) scan_combine_##suffix(const __grid_constant__ Scan s) {      \
    scan_combine<T>(s, false);                                                                                   \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) scan_combine_back_##suffix(const __grid_constant__ Scan s) { \
    scan_combine<T>(s, true);                                                                                    \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(128) scan_decode_##suffix(const __grid_constant__ Scan s) { scan_decode<T>(s); }
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

// dB and dC: the blocks' parts in order.
extern "C" __global__ void __launch_bounds__(256) scan_sum_maps(const __grid_constant__ Scan s) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x, all = s.args.x.size[0] * s.segments.T * s.G * 2 * s.K;
  if (i >= all) return;
  float sum = 0;
  for (int block = 0; block < s.blocks_per_group; ++block) sum += s.dmaps[block * all + i];
  const int64_t k = i % s.K, row = i / (2 * s.K), g = row % s.G, t = row / s.G % s.segments.T, b = row / s.G / s.segments.T;
  const View& to = i / s.K % 2 == 0 ? s.grads.dB : s.grads.dC;
  if (is_given(to)) put(to, sum, b, t, g, k);
}

}  // namespace linnet::cuda
