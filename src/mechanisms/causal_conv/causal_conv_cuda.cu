// The short convolution: memory alone bounds it. A thread has 8 bytes of channels and walks a tile of tokens, the inputs
// before the current one in registers; the next 4 to 8 tokens are on their way into shared memory. W-1 tokens before (and, in
// the backward, behind) each tile are read twice.
//
// Backward: ds_t = dout_t act'(sum_t), dx_t = sum_j w_j ds_{t+W-1-j}: walked forwards, dx W-1 tokens behind ds. The gradients
// of taps and bias are summed by tile, then over the tiles in order (sum_taps): no atomics.
#include "mechanisms/causal_conv/causal_conv_cuda.h"
#include "ptx/copy.cuh"
#include "ptx/rows.cuh"
#include "ptx/sync.cuh"

namespace linnet::cuda {
namespace {

using ptx::kVector;

__device__ int64_t conv_offset(const Conv& c, int64_t n) {  // bounded: they come from the caller's memory, unchecked
  const int64_t x = c.offsets_64 ? static_cast<const int64_t*>(c.offsets)[n] : static_cast<const int32_t*>(c.offsets)[n];
  return x < 0 ? 0 : x > c.T ? c.T : x;
}
struct Span {
  int64_t n, begin, end;  // sequence and its tokens
};
// The sequence of token t of batch row b: the last that begins at or before it.
__device__ Span span_at(const Conv& c, int64_t b, int64_t t) {
  if (c.offsets == nullptr) return {b, 0, c.T};
  int64_t low = 0, high = c.N;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (conv_offset(c, middle) <= t ? low : high) = middle;
  }
  return {low, conv_offset(c, low), conv_offset(c, low + 1)};
}
__device__ __forceinline__ int64_t place(const ConvTensor& x, int64_t i, int64_t j, int64_t k) {
  return i * x.stride[0] + j * x.stride[1] + k * x.stride[2];
}
template <class T>
__device__ __forceinline__ float number(const ConvTensor& x, int64_t i, int64_t j, int64_t k) {
  return static_cast<float>(static_cast<const T*>(x.data)[place(x, i, j, k)]);
}
__device__ __forceinline__ float tap(const Conv& c, int e, int j) {
  return ptx::load(c.weight, c.weight_dtype, e * c.weight_stride[0] + j * c.weight_stride[1]);
}
__device__ __forceinline__ float bias_of(const Conv& c, int e) {
  return c.bias == nullptr ? 0 : ptx::load(c.bias, c.bias_dtype, e * c.bias_stride);
}
// Taps and bias of the channels from e on: all of them on their way before the first is used.
template <int W, int width>
__device__ __forceinline__ void load_taps(const Conv& c, int e, float (&w)[W][width], float (&bias)[width]) {
  uint32_t raw[W][width], raw_bias[width];
  if (c.packed && W == 4 && c.weight_dtype == Dtype::f32) {
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const uint4 taps = __ldg(static_cast<const uint4*>(c.weight) + e + k);
      raw[0][k] = taps.x, raw[1 % W][k] = taps.y, raw[2 % W][k] = taps.z, raw[3 % W][k] = taps.w;
    }
  } else if (c.packed && W == 4) {
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const uint2 taps = __ldg(static_cast<const uint2*>(c.weight) + e + k);
      raw[0][k] = taps.x & 0xffff, raw[1 % W][k] = taps.x >> 16, raw[2 % W][k] = taps.y & 0xffff, raw[3 % W][k] = taps.y >> 16;
    }
  } else {
#pragma unroll
    for (int k = 0; k < width; ++k) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        raw[j][k] = ptx::ask(c.weight, c.weight_dtype, (e + k) * c.weight_stride[0] + j * c.weight_stride[1]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < width; ++k) raw_bias[k] = c.bias == nullptr ? 0 : ptx::ask(c.bias, c.bias_dtype, (e + k) * c.bias_stride);
#pragma unroll
  for (int k = 0; k < width; ++k) {
    bias[k] = ptx::take(raw_bias[k], c.bias_dtype);
#pragma unroll
    for (int j = 0; j < W; ++j) w[j][k] = ptx::take(raw[j][k], c.weight_dtype);
  }
}
template <bool quick>
__device__ __forceinline__ float activate(const Conv& c, float x) {
  return c.silu ? x * ptx::logistic<quick>(x) : x;
}
template <bool quick>
__device__ __forceinline__ float slope(const Conv& c, float x) {
  if (!c.silu) return 1;
  const float2 s = ptx::logistic_pair<quick>(x);
  return s.x * fmaf(x, s.y, 1);
}
// Input at token t of a sequence, which may lie in its state.
template <class T>
__device__ __forceinline__ float input(const Conv& c, const Span& s, int64_t b, int64_t t, int e) {
  if (t >= s.begin) return number<T>(c.x, b, t, e);
  const int64_t j = t - s.begin + c.W - 1;
  return c.state.data == nullptr || j < 0 ? 0 : number<T>(c.state, s.n, e, j);
}

// The inputs before token t: before[i] is that of t - (W - 1) + i.
template <class T, int W, int width>
__device__ __forceinline__ void look_back(const Conv& c, const Span& s, int64_t b, int64_t t, int e,
                                          float (&before)[W - 1][width]) {
  ptx::Piece<T, width> pieces[W - 1];
#pragma unroll
  for (int i = 0; i < W - 1; ++i) {
    const int64_t at = t - (W - 1) + i;
    if (at >= s.begin) pieces[i].load(static_cast<const T*>(c.x.data) + place(c.x, b, at, e));
  }
#pragma unroll
  for (int i = 0; i < W - 1; ++i) {
    const int64_t at = t - (W - 1) + i;
    if (at >= s.begin) {
      pieces[i].get(before[i]);
    } else {
#pragma unroll
      for (int k = 0; k < width; ++k) before[i][k] = input<T>(c, s, b, at, e + k);
    }
  }
}

// Channels of a thread, 8 bytes: more would leave too few threads, whose taps, inputs and sums fill the registers.
template <class T>
constexpr int kWidth = 8 / static_cast<int>(sizeof(T));
// Tokens come in groups of 4, two groups ahead of the one that is worked on: each thread's own into shared memory, where they
// take no registers.
constexpr int kGroup = 4, kStages = 3;

// spans: of packed sequences.
template <class T, int W, int width, bool spans>
__device__ void convolve(const Conv& c) {
  constexpr bool quick = sizeof(T) == 2;
  __shared__ ptx::Piece<T, width> ring[kStages][kGroup][128];
  const int e = (blockIdx.x * 128 + threadIdx.x) * width;
  const int64_t b = blockIdx.z, from = static_cast<int64_t>(blockIdx.y) * c.tile, to = min(c.T, from + c.tile);
  if (e >= c.E) return;
  float w[W][width], bias[width], before[W - 1][width];
  const int64_t step = c.x.stride[1], out_step = c.out.stride[1];
  const T* const x = static_cast<const T*>(c.x.data) + place(c.x, b, from, e);
  T* out = static_cast<T*>(c.out.data) + place(c.out, b, from, e);
  Span s = spans ? span_at(c, b, from) : Span{b, 0, c.T};
  const int count = static_cast<int>(to - from);
  const T* next = x;
  const auto ask = [&](int stage, int left) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const bool in = i < left;
      ring[stage][i][threadIdx.x].copy(in ? next + i * step : x, in);
    }
    ptx::copy_commit();
    next += kGroup * step;
  };
  for (int i = 0; i < kStages - 1; ++i) ask(i, count - i * kGroup);
  look_back<T, W>(c, s, b, from, e, before);
  load_taps(c, e, w, bias);
  for (int t = 0, stage = 0; t < count; t += kGroup) {
    ptx::copy_wait<kStages - 2>();
    ask(stage == 0 ? kStages - 1 : stage - 1, count - t - (kStages - 1) * kGroup);  // the stage read a group ago
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (t + i >= count) break;
      if (spans && from + t + i >= s.end) {  // the next sequence that has tokens
        s = span_at(c, b, from + t + i);
        look_back<T, W>(c, s, b, from + t + i, e, before);
      }
      float now[width], y[width];
      ring[stage][i][threadIdx.x].get(now);
#pragma unroll
      for (int k = 0; k < width; ++k) {
        float sum = bias[k];
#pragma unroll
        for (int j = 0; j < W - 1; ++j) sum = fmaf(w[j][k], before[j][k], sum);
        y[k] = activate<quick>(c, fmaf(w[W - 1][k], now[k], sum));
#pragma unroll
        for (int j = 0; j + 1 < W - 1; ++j) before[j][k] = before[j + 1][k];
        if (W > 1) before[W - 2][k] = now[k];
      }
      ptx::Piece<T, width> piece;
      piece.set(y);
      piece.store(out + i * out_step);
    }
    out += kGroup * out_step;
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
}

// As above for every W and any alignment: a thread has one channel.
template <class T>
__device__ void convolve_any(const Conv& c) {
  const int e = blockIdx.x * 128 + threadIdx.x;
  const int64_t b = blockIdx.z, from = static_cast<int64_t>(blockIdx.y) * c.tile, to = min(c.T, from + c.tile);
  if (e >= c.E) return;
  const float bias = bias_of(c, e);
  Span s = span_at(c, b, from);
  for (int64_t t = from; t < to; ++t) {
    if (t >= s.end) s = span_at(c, b, t);
    float sum = bias;
    for (int j = 0; j < c.W; ++j) sum = fmaf(tap(c, e, j), input<T>(c, s, b, t - c.W + 1 + j, e), sum);
    static_cast<T*>(c.out.data)[place(c.out, b, t, e)] = static_cast<T>(activate<false>(c, sum));
  }
}

// The state behind each sequence.
template <class T>
__device__ void last_inputs(const Conv& c) {
  const int64_t e = blockIdx.x * 128ll + threadIdx.x, n = blockIdx.y;
  if (e >= c.E) return;
  const int64_t begin = c.offsets == nullptr ? 0 : conv_offset(c, n);
  const int64_t end = c.offsets == nullptr ? c.T : max(begin, conv_offset(c, n + 1));
  const Span s = {n, begin, end};
  for (int j = 0; j < c.W - 1; ++j) {
    const float x = input<T>(c, s, c.offsets == nullptr ? n : 0, end - c.W + 1 + j, static_cast<int>(e));
    static_cast<T*>(c.final_state.data)[place(c.final_state, n, e, j)] = static_cast<T>(x);
  }
}

// Few tokens with the state in place: state[j] takes the value of state[j + T], which is still the old one.
template <class T>
__device__ void continue_conv(const Conv& c) {
  const int e = blockIdx.x * 128 + threadIdx.x;
  const int64_t b = blockIdx.y;
  if (e >= c.E) return;
  if (c.T == 1 && c.W == 4) {  // all loads on their way before the first is used
    T* const state = static_cast<T*>(c.state.data) + place(c.state, b, e, 0);
    T before[4];
#pragma unroll
    for (int j = 0; j < 3; ++j) before[j] = state[j * c.state.stride[2]];
    before[3] = static_cast<const T*>(c.x.data)[place(c.x, b, 0, e)];
    float w[4][1], bias[1];
    load_taps(c, e, w, bias);
    float sum = bias[0];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum = fmaf(w[j][0], static_cast<float>(before[j]), sum);
      if (j > 0) state[(j - 1) * c.state.stride[2]] = before[j];
    }
    static_cast<T*>(c.out.data)[place(c.out, b, 0, e)] = static_cast<T>(activate<sizeof(T) == 2>(c, sum));
    return;
  }
  const Span s = {b, 0, c.T};
  const float bias = bias_of(c, e);
  for (int64_t t = 0; t < c.T; ++t) {
    float sum = bias;
    for (int j = 0; j < c.W; ++j) sum = fmaf(tap(c, e, j), input<T>(c, s, b, t - c.W + 1 + j, e), sum);
    static_cast<T*>(c.out.data)[place(c.out, b, t, e)] = static_cast<T>(activate<sizeof(T) == 2>(c, sum));
  }
  for (int j = 0; j < c.W - 1; ++j) {
    const float x = input<T>(c, s, b, c.T - c.W + 1 + j, e);
    static_cast<T*>(c.state.data)[place(c.state, b, e, j)] = static_cast<T>(x);
  }
}

// One token, 4 taps, states [B, E, 3] side by side: a thread has 16 bytes of channels, whose state is 48 bytes.
template <class T>
__device__ void continue_vectors(const Conv& c) {
  constexpr int width = kVector<T>;
  const int e = (blockIdx.x * 128 + threadIdx.x) * width;
  const int64_t b = blockIdx.y;
  if (e >= c.E) return;
  uint4* const state = reinterpret_cast<uint4*>(static_cast<T*>(c.state.data) + place(c.state, b, e, 0));
  ptx::Piece<T, width> piece;
  uint4 raw[3];
  piece.load(static_cast<const T*>(c.x.data) + place(c.x, b, 0, e));
#pragma unroll
  for (int i = 0; i < 3; ++i) raw[i] = ptx::load_once(state + i);
  float w[4][width], bias[width], before[3 * width], now[width];
  load_taps(c, e, w, bias);
#pragma unroll
  for (int i = 0; i < 3; ++i) ptx::to_floats<T>(raw[i], *reinterpret_cast<float(*)[width]>(before + i * width));
  piece.get(now);
  float y[width];
#pragma unroll
  for (int k = 0; k < width; ++k) {
    float sum = bias[k];
#pragma unroll
    for (int j = 0; j < 3; ++j) sum = fmaf(w[j][k], before[3 * k + j], sum);
    y[k] = activate<sizeof(T) == 2>(c, fmaf(w[3][k], now[k], sum));
    before[3 * k] = before[3 * k + 1];
    before[3 * k + 1] = before[3 * k + 2];
    before[3 * k + 2] = now[k];
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    ptx::store_once(state + i, ptx::from_floats<T>(*reinterpret_cast<const float(*)[width]>(before + i * width)));
  }
  piece.set(y);
  piece.store(static_cast<T*>(c.out.data) + place(c.out, b, 0, e));
}

// The gradient of dfinal_state at token t of a sequence.
template <class T>
__device__ __forceinline__ float from_final(const Conv& c, const Span& s, int64_t t, int e) {
  const int64_t j = t - (s.end - c.W + 1);
  return c.dfinal_state.data == nullptr || j < 0 || j >= c.W - 1 ? 0 : number<T>(c.dfinal_state, s.n, e, j);
}

template <class T, int W, bool spans>
__device__ void convolve_back(const Conv& c) {
  constexpr int width = kWidth<T>;
  constexpr bool quick = sizeof(T) == 2;
  __shared__ ptx::Piece<T, width> ring[kStages][kGroup][2][128];
  const int e = (blockIdx.x * 128 + threadIdx.x) * width;
  const int64_t b = blockIdx.z, from = static_cast<int64_t>(blockIdx.y) * c.tile, to = min(c.T, from + c.tile);
  if (e >= c.E) return;
  const int64_t last = min(c.T, to + W - 1);
  const int own = static_cast<int>(to - from), count = static_cast<int>(last - from);  // tokens of the tile, and those read
  const T* const x = static_cast<const T*>(c.x.data) + place(c.x, b, from, e);
  const T* const dout = static_cast<const T*>(c.dout.data) + place(c.dout, b, from, e);
  T* const dx = static_cast<T*>(c.dx.data) + place(c.dx, b, from, e);
  const T *next_x = x, *next_dout = dout;
  const auto ask = [&](int stage, int left) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const bool in = i < left;
      ring[stage][i][0][threadIdx.x].copy(in ? next_x + i * c.x.stride[1] : x, in);
      if (c.dout.data != nullptr) ring[stage][i][1][threadIdx.x].copy(in ? next_dout + i * c.dout.stride[1] : dout, in);
    }
    ptx::copy_commit();
    next_x += kGroup * c.x.stride[1], next_dout += kGroup * c.dout.stride[1];
  };
  for (int i = 0; i < kStages - 1; ++i) ask(i, count - i * kGroup);
  float w[W][width], bias[width], before[W - 1][width], ds[W - 1][width], sums[W + 1][width];
  load_taps(c, e, w, bias);
#pragma unroll
  for (int k = 0; k < width; ++k) {
    sums[W][k] = 0;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      sums[j][k] = 0;
      if (j < W - 1) ds[j][k] = 0;
    }
  }
  Span s = spans ? span_at(c, b, from) : Span{b, 0, c.T};
  look_back<T, W>(c, s, b, from, e, before);
  // dx of token t - (W - 1) of the tile, from ds of t - (W - 1) .. t; `owner`: the sequence that token lies in.
  const auto finish = [&](int t, const Span& owner, const float(&now)[width]) {
    const int at = t - (W - 1);
    if (at < 0 || at >= own || (spans && from + at < owner.begin) || c.dx.data == nullptr) return;
    float y[width];
#pragma unroll
    for (int k = 0; k < width; ++k) {
      float sum = w[0][k] * now[k];
#pragma unroll
      for (int j = 0; j < W - 1; ++j) sum = fmaf(w[W - 1 - j][k], ds[j][k], sum);
      y[k] = sum;
    }
    if (c.dfinal_state.data != nullptr && from + at >= owner.end - W + 1) {
#pragma unroll
      for (int k = 0; k < width; ++k) y[k] += from_final<T>(c, owner, from + at, e + k);
    }
    ptx::Piece<T, width> piece;
    piece.set(y);
    piece.store(dx + at * c.dx.stride[1]);
  };
  const auto shift = [&](const float(&now)[width]) {
#pragma unroll
    for (int k = 0; k < width; ++k) {
#pragma unroll
      for (int j = 0; j + 1 < W - 1; ++j) ds[j][k] = ds[j + 1][k];
      if (W > 1) ds[W - 2][k] = now[k];
    }
  };
  const auto close = [&](const Span& owner) {  // behind a sequence come no more gradients
    float none[width] = {};
    for (int i = 0; i < W - 1; ++i) {
      finish(static_cast<int>(owner.end - from) + i, owner, none);
      shift(none);
    }
  };
  for (int t = 0, stage = 0; t < count; t += kGroup) {
    ptx::copy_wait<kStages - 2>();
    ask(stage == 0 ? kStages - 1 : stage - 1, count - t - (kStages - 1) * kGroup);  // the stage read a group ago
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (t + i >= count) break;
      if (spans && from + t + i >= s.end) {
        close(s);
        s = span_at(c, b, from + t + i);
        look_back<T, W>(c, s, b, from + t + i, e, before);
      }
      float now[width], d[width] = {};
      ring[stage][i][0][threadIdx.x].get(now);
      if (c.dout.data != nullptr) ring[stage][i][1][threadIdx.x].get(d);
#pragma unroll
      for (int k = 0; k < width; ++k) {
        float sum = bias[k];
#pragma unroll
        for (int j = 0; j < W - 1; ++j) sum = fmaf(w[j][k], before[j][k], sum);
        d[k] *= slope<quick>(c, fmaf(w[W - 1][k], now[k], sum));
        if (t + i < own) {
#pragma unroll
          for (int j = 0; j < W - 1; ++j) sums[j][k] = fmaf(d[k], before[j][k], sums[j][k]);
          sums[W - 1][k] = fmaf(d[k], now[k], sums[W - 1][k]);
          sums[W][k] += d[k];
        }
#pragma unroll
        for (int j = 0; j + 1 < W - 1; ++j) before[j][k] = before[j + 1][k];
        if (W > 1) before[W - 2][k] = now[k];
      }
      finish(t + i, s, d);
      shift(d);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  if (last == c.T) close(s);
  if (c.sums == nullptr) return;
  float* parts = c.sums + (blockIdx.z * gridDim.y + blockIdx.y) * static_cast<int64_t>(W + 1) * c.E + e;
#pragma unroll
  for (int j = 0; j <= W; ++j) {
#pragma unroll
    for (int k = 0; k < width; k += 2) {
      *reinterpret_cast<float2*>(parts + j * static_cast<int64_t>(c.E) + k) = float2{sums[j][k], sums[j][k + 1]};
    }
  }
}

template <class T>
__device__ float source(const Conv& c, const Span& s, int64_t b, int64_t t, int e) {  // ds_t
  if (t < s.begin || t >= s.end || c.dout.data == nullptr) return 0;
  float sum = bias_of(c, e);
  for (int j = 0; j < c.W; ++j) sum = fmaf(tap(c, e, j), input<T>(c, s, b, t - c.W + 1 + j, e), sum);
  return number<T>(c.dout, b, t, e) * slope<false>(c, sum);
}
template <class T>
__device__ void convolve_back_any(const Conv& c) {
  const int e = blockIdx.x * 128 + threadIdx.x;
  const int64_t b = blockIdx.z, from = static_cast<int64_t>(blockIdx.y) * c.tile, to = min(c.T, from + c.tile);
  if (e >= c.E) return;
  Span s = span_at(c, b, from);
  for (int64_t t = from; t < to && c.dx.data != nullptr; ++t) {
    if (t >= s.end) s = span_at(c, b, t);
    float sum = from_final<T>(c, s, t, e);
    for (int j = 0; j < c.W; ++j) sum = fmaf(tap(c, e, j), source<T>(c, s, b, t + c.W - 1 - j, e), sum);
    static_cast<T*>(c.dx.data)[place(c.dx, b, t, e)] = static_cast<T>(sum);
  }
  if (c.sums == nullptr) return;
  float* parts = c.sums + (blockIdx.z * gridDim.y + blockIdx.y) * static_cast<int64_t>(c.W + 1) * c.E + e;
  for (int j = 0; j <= c.W; ++j) {
    float sum = 0;
    s = span_at(c, b, from);
    for (int64_t t = from; t < to; ++t) {
      if (t >= s.end) s = span_at(c, b, t);
      sum = fmaf(source<T>(c, s, b, t, e), j == c.W ? 1 : input<T>(c, s, b, t - c.W + 1 + j, e), sum);
    }
    parts[j * static_cast<int64_t>(c.E)] = sum;
  }
}

// The gradient of the state before each sequence: position p < 0 reaches tokens 0 .. p + W - 1; what no token read passes on.
template <class T>
__device__ void first_inputs_back(const Conv& c) {
  const int64_t e = blockIdx.x * 128ll + threadIdx.x, n = blockIdx.y;
  if (e >= c.E) return;
  const int64_t begin = c.offsets == nullptr ? 0 : conv_offset(c, n);
  const int64_t end = c.offsets == nullptr ? c.T : max(begin, conv_offset(c, n + 1));
  const Span s = {n, begin, end};
  for (int i = 0; i < c.W - 1; ++i) {
    const int64_t at = begin - (c.W - 1) + i;
    float sum = from_final<T>(c, s, at, static_cast<int>(e));
    for (int j = 0; j < c.W; ++j) {
      sum = fmaf(tap(c, static_cast<int>(e), j),
                 source<T>(c, s, c.offsets == nullptr ? n : 0, at + c.W - 1 - j, static_cast<int>(e)), sum);
    }
    static_cast<T*>(c.dinitial_state.data)[place(c.dinitial_state, n, e, i)] = static_cast<T>(sum);
  }
}

}  // namespace

#define LINNET_CONV(name, function) \
  extern "C" __global__ void __launch_bounds__(128) name(const __grid_constant__ Conv c) { function(c); }
#define LINNET_CONV_FAST(name, function, blocks) \
  extern "C" __global__ void __launch_bounds__(128, blocks) name(const __grid_constant__ Conv c) { function(c); }
#define LINNET_CONVS(suffix, T)                                              \
  LINNET_CONV_FAST(convolve_##suffix, (convolve<T, 4, kWidth<T>, false>), 7) \
  LINNET_CONV(convolve_packed_##suffix, (convolve<T, 4, kWidth<T>, true>))   \
  LINNET_CONV(convolve_any_##suffix, convolve_any<T>)                        \
  LINNET_CONV_FAST(convolve_back_##suffix, (convolve_back<T, 4, false>), 4)  \
  LINNET_CONV(convolve_back_packed_##suffix, (convolve_back<T, 4, true>))    \
  LINNET_CONV(convolve_back_any_##suffix, convolve_back_any<T>)              \
  LINNET_CONV(last_inputs_##suffix, last_inputs<T>)                          \
  LINNET_CONV(first_inputs_back_##suffix, first_inputs_back<T>)              \
  LINNET_CONV(continue_##suffix, continue_conv<T>)                           \
  LINNET_CONV(continue_vectors_##suffix, continue_vectors<T>)
LINNET_CONVS(f32, float)
LINNET_CONVS(bf16, __nv_bfloat16)
LINNET_CONVS(f16, __half)

// Parts of the gradients of taps and bias over the tiles: 8 warps have every 8th tile each, in order.
extern "C" __global__ void __launch_bounds__(256)
    sum_taps(const float* sums, int64_t tiles, int E, int W, void* dweight, int weight_type, int64_t stride_e, int64_t stride_w,
             void* dbias, int bias_type, int64_t bias_stride) {
  __shared__ float parts[8][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = blockIdx.x * 32 + lane, j = blockIdx.y;
  float sum = 0;
  for (int64_t i = warp; i < tiles && e < E; i += 8) sum += sums[(i * (W + 1) + j) * E + e];
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || e >= E) return;
  sum = parts[0][lane];
  for (int i = 1; i < 8; ++i) sum += parts[i][lane];
  if (j < W) {
    if (dweight != nullptr) ptx::store(dweight, static_cast<Dtype>(weight_type), e * stride_e + j * stride_w, sum);
  } else if (dbias != nullptr) {
    ptx::store(dbias, static_cast<Dtype>(bias_type), e * bias_stride, sum);
  }
}

}  // namespace linnet::cuda
