// The gate of `gated` alone: out = y act(g) or y + act(g), its gradients, and gates shared by all heads. Memory bounds it.
#include "mechanisms/gated/cuda/gates.h"
#include "mechanisms/softmax/cuda/attend.cuh"

namespace linnet::cuda {
namespace {

struct Token {
  int64_t b, t, h;
};
__device__ __forceinline__ int64_t place(const AttendRows& x, const Token& at) {
  return at.b * x.stride_b + at.t * x.stride_t + at.h * x.stride_h;
}
__device__ __forceinline__ float logit_of(const Gates& p, Token at, int64_t h, int c) {
  at.h = h;
  return ptx::load(p.g.data, p.g.dtype, place(p.g, at) + (p.per_head ? 0 : c));
}
// The mean over heads of the activated gates.
__device__ __forceinline__ float shared_gate(const Gates& p, const Token& at, int c) {
  float sum = 0;
  for (int64_t h = 0; h < p.H; ++h) sum += gate_value(p.act, logit_of(p, at, h, c));
  return sum / static_cast<float>(p.H);
}
// The gradient of an activated gate a: dout, or dout y.
__device__ __forceinline__ float inner(const Gates& p, Token at, int64_t h, int c, float a) {
  at.h = h;
  const float d = p.dout.data != nullptr ? ptx::load(p.dout.data, p.dout.dtype, place(p.dout, at) + c) : 0;
  if (p.adds || d == 0) return d;  // what lies behind a zero gradient may hold anything
  if (p.y.data != nullptr) return d * ptx::load(p.y.data, p.y.dtype, place(p.y, at) + c);
  return a == 0 ? 0 : d * ptx::load(p.out.data, p.out.dtype, place(p.out, at) + c) / a;
}

}  // namespace

// A thread for each number of [B, T, width], or of [B, T].
extern "C" __global__ void __launch_bounds__(256) share_gates(const __grid_constant__ Gates p) {
  const int width = p.per_head ? 1 : p.width;
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= p.B * p.T * width) return;
  const Token at = {i / width / p.T, i / width % p.T, 0};
  p.shared[i] = shared_gate(p, at, static_cast<int>(i % width));
}

extern "C" __global__ void __launch_bounds__(256) gate_rows(const __grid_constant__ Gates p) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= p.B * p.T * p.H * p.width) return;
  const int c = static_cast<int>(i % p.width);
  const int64_t row = i / p.width;
  const Token at = {row / p.H / p.T, row / p.H % p.T, row % p.H};
  const float a = p.is_shared ? p.shared[(at.b * p.T + at.t) * (p.per_head ? 1 : p.width) + (p.per_head ? 0 : c)]
                              : gate_value(p.act, logit_of(p, at, at.h, c));
  const float y = ptx::load(p.y.data, p.y.dtype, place(p.y, at) + c);
  ptx::store(p.out.data, p.out.dtype, place(p.out, at) + c, p.adds ? y + a : y * a);
}

// A warp for each row. dg = act'(g) times the gradient of the gate; from a sigmoid's output alone, dout out sigmoid(-g).
extern "C" __global__ void __launch_bounds__(256) gate_gradients(const __grid_constant__ Gates p) {
  const int64_t row = blockIdx.x * 8ll + threadIdx.x / 32;
  if (row >= p.B * p.T * p.H) return;
  const int lane = threadIdx.x % 32;
  const Token at = {row / p.H / p.T, row / p.H % p.T, row % p.H};
  const bool direct = p.y.data == nullptr && !p.is_shared && p.act == AttendAct::sigmoid;
  float delta = 0, total = 0;
  for (int c = lane; c < p.width; c += 32) {
    const float g = logit_of(p, at, at.h, c);
    const float a = p.is_shared ? shared_gate(p, at, c) : gate_value(p.act, g);
    const float d = p.dout.data != nullptr ? ptx::load(p.dout.data, p.dout.dtype, place(p.dout, at) + c) : 0;
    float dg;
    if (direct) {
      dg = d == 0 ? 0 : d * ptx::load(p.out.data, p.out.dtype, place(p.out, at) + c) * ptx::logistic_pair<false>(g).y;
    } else {
      float da = 0;
      if (p.is_shared) {
        for (int64_t h = 0; h < p.H; ++h) da += inner(p, at, h, c, a);
        da /= static_cast<float>(p.H);
      } else {
        da = inner(p, at, at.h, c, a);
      }
      dg = da * gate_slope(p.act, g);
    }
    total += dg;
    if (p.dg.data != nullptr && !p.per_head) ptx::store(p.dg.data, p.dg.dtype, place(p.dg, at) + c, dg);
    const float dy = p.adds ? d : d * a;
    if (p.dy.data != nullptr) ptx::store(p.dy.data, p.dy.dtype, place(p.dy, at) + c, dy);
    if (p.delta.data != nullptr) {
      // dy is rounded: delta takes what was stored, so that dP - delta keeps its digits.
      const float out = ptx::load(p.out.data, p.out.dtype, place(p.out, at) + c);
      const float kept = p.dy.dtype == Dtype::f32 ? d : a == 0 ? 0 : ptx::load(p.dy.data, p.dy.dtype, place(p.dy, at) + c) / a;
      delta = fmaf(kept, out, delta);
    }
  }
  total = ptx::sum_lanes<32>(total);
  delta = ptx::sum_lanes<32>(delta);
  if (lane != 0) return;
  if (p.dg.data != nullptr && p.per_head) ptx::store(p.dg.data, p.dg.dtype, place(p.dg, at), total);
  if (p.delta.data != nullptr) {
    const float dlse = p.dlse.data != nullptr ? static_cast<const float*>(p.dlse.data)[place(p.dlse, at)] : 0;
    static_cast<float*>(p.delta.data)[place(p.delta, at)] = delta - dlse;
  }
}

}  // namespace linnet::cuda
