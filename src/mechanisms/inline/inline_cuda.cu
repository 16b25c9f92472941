// The rows around the walks of inline_cuda.h.
#include "inline_cuda.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

__device__ __forceinline__ float phi(InlineKernel kernel, float x) {
  switch (kernel) {
    case InlineKernel::identity: return x;
    case InlineKernel::relu: return x <= 0 ? 0 : x;
    case InlineKernel::leakyrelu: return x > 0 ? x : 0.01f * x;
    case InlineKernel::exp:
      return expf(static_cast<float>(kInlineExponent) *
                  (x > static_cast<float>(kInlineLargest) ? static_cast<float>(kInlineLargest) : x));
  }
  return x;
}
__device__ __forceinline__ float slope(InlineKernel kernel, float x) {
  switch (kernel) {
    case InlineKernel::identity: return 1;
    case InlineKernel::relu: return x > 0 ? 1 : 0;
    case InlineKernel::leakyrelu: return x > 0 ? 1 : 0.01f;
    case InlineKernel::exp:
      return x > static_cast<float>(kInlineLargest) ? 0 : static_cast<float>(kInlineExponent) * phi(kernel, x);
  }
  return 1;
}
__device__ __forceinline__ bool takes_part(const InlineRows& r, int64_t b, int64_t t) {
  return !is_given(r.args.mask) || static_cast<const uint8_t*>(r.args.mask.data)[place(r.args.mask, b, t)] != 0;
}

struct Row {
  int64_t row, b, t;
  int h, lane;
};
__device__ __forceinline__ bool row_at(const InlineRows& r, int64_t tokens, Row* at) {
  at->row = blockIdx.x * 8ll + threadIdx.x / 32;
  at->lane = threadIdx.x % 32;
  at->h = static_cast<int>(at->row % r.H);
  at->t = at->row / r.H % (tokens > 0 ? tokens : 1);
  at->b = at->row / r.H / (tokens > 0 ? tokens : 1);
  return at->row < r.B * tokens * r.H;
}
// zv and n that a row reads.
__device__ __forceinline__ const float* sums_of(const InlineRows& r, const Row& at) {
  const int64_t t = r.args.causal ? at.t : 0;
  return r.sums + ((at.b * (r.args.causal ? r.T : 1) + t) * r.H + at.h) * (r.V + 1);
}
__device__ __forceinline__ float part_at(const InlineRows& r, const Row& at, int column) {
  float sum = 0;
  for (int tile = 0; tile < r.tiles; ++tile) sum += r.parts[(at.row * r.tiles + tile) * r.columns + column];
  return sum;
}

}  // namespace

// k0, v0: means over the first 64 tokens' keys that take part, causal the first of them; a block has a head.
extern "C" __global__ void __launch_bounds__(128) inline_means(const __grid_constant__ InlineRows r) {
  const int64_t b = blockIdx.x / r.H;
  const int h = static_cast<int>(blockIdx.x % r.H);
  for (int i = threadIdx.x; i < r.K + r.V; i += 128) {
    float sum = 0, count = 0;
    for (int64_t s = 0; s < min(r.S, int64_t{64}) && !(r.args.causal && count > 0); ++s) {
      if (!takes_part(r, b, s)) continue;
      sum += i < r.K ? phi(r.args.kernel, get(r.args.k, b, s, h, i)) : get(r.args.v, b, s, h, i - r.K);
      count += 1;
    }
    const float value = count == 0 ? 0 : sum / count, mean = isfinite(value) ? value : 0;
    if (i < r.K) {
      r.k0[(b * r.H + h) * r.K + i] = mean;
    } else {
      r.v0[(b * r.H + h) * r.V + i - r.K] = mean;
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) inline_queries(const __grid_constant__ InlineRows r) {
  Row at;
  if (!row_at(r, r.T, &at)) return;
  for (int c = at.lane; c < r.padded; c += 32) {
    r.phi_q[at.row * r.padded + c] = c < r.K ? r.scale * phi(r.args.kernel, get(r.args.q, at.b, at.t, at.h, c)) : 0;
  }
}
extern "C" __global__ void __launch_bounds__(256) inline_keys(const __grid_constant__ InlineRows r) {
  Row at;
  if (!row_at(r, r.S, &at)) return;
  const bool part = takes_part(r, at.b, at.t);
  const int64_t head = at.b * r.H + at.h;
  for (int c = at.lane; c < r.padded; c += 32) {
    r.phi_k[at.row * r.padded + c] =
        part && c < r.K ? phi(r.args.kernel, get(r.args.k, at.b, at.t, at.h, c)) - r.k0[head * r.K + c] : 0;
  }
  for (int j = at.lane; j < r.columns; j += 32) {
    r.values[at.row * r.columns + j] = !part || j > r.V ? 0
                                       : j == r.V       ? 1
                                                        : get(r.args.v, at.b, at.t, at.h, j) - r.v0[head * r.V + j];
  }
}

// Running sums over the tokens of a column: of the values (with their ones) forwards into `sums`, or of `back` backwards in
// place; not causal: the total alone, in the first row. A thread has a column of a head.
extern "C" __global__ void __launch_bounds__(128) inline_sums(const __grid_constant__ InlineRows r, bool back) {
  const int width = back ? r.V : r.V + 1;
  const int64_t i = blockIdx.x * 128ll + threadIdx.x, b = i / width / r.H, tokens = back ? r.T : r.S;
  const int j = static_cast<int>(i % width), h = static_cast<int>(i / width % r.H);
  if (b >= r.B) return;
  double sum = 0;
  for (int64_t step = 0; step < tokens; ++step) {
    const int64_t t = back ? tokens - 1 - step : step, row = (b * tokens + t) * r.H + h;
    sum += back ? r.back[row * r.V + j] : r.values[row * r.columns + j];
    if (r.args.causal) (back ? r.back[row * r.V + j] : r.sums[row * (r.V + 1) + j]) = static_cast<float>(sum);
  }
  if (r.args.causal) return;
  if (back) {
    if (tokens > 0) r.back[(b * tokens * r.H + h) * r.V + j] = static_cast<float>(sum);
  } else {
    r.sums[(b * r.H + h) * (r.V + 1) + j] = static_cast<float>(sum);
  }
}

extern "C" __global__ void __launch_bounds__(256) inline_finish(const __grid_constant__ InlineRows r) {
  Row at;
  if (!row_at(r, r.T, &at)) return;
  const float* sums = sums_of(r, at);
  const float n = sums[r.V], inverse = n == 0 ? 0 : 1 / n, rest = 1 - part_at(r, at, r.V) * inverse;
  for (int j = at.lane; j < r.V; j += 32) {
    const float o = fmaf(rest, sums[j], part_at(r, at, j)) * inverse + r.v0[(at.b * r.H + at.h) * r.V + j];
    put(r.out.out, n == 0 ? 0 : o, at.b, at.t, at.h, j);
  }
}

// g = [G / n | -e / n], e = G.zv / n; back = c G / n.
extern "C" __global__ void __launch_bounds__(256) inline_gradient(const __grid_constant__ InlineRows r) {
  Row at;
  if (!row_at(r, r.T, &at)) return;
  const float* sums = sums_of(r, at);
  const float n = sums[r.V], inverse = n == 0 ? 0 : 1 / n, c = 1 - part_at(r, at, r.V) * inverse;
  float dot = 0;
  for (int j = at.lane; j < r.columns; j += 32) {
    const float g = j < r.V ? get_or(0, r.grads.dout, at.b, at.t, at.h, j) * inverse : 0;
    if (j < r.V) {
      dot = fmaf(g, sums[j], dot);
      r.back[at.row * r.V + j] = c * g;
    }
    if (j != r.V) r.gradient[at.row * r.columns + j] = g;
  }
  dot = ptx::sum_lanes<32>(dot);
  if (at.lane == 0) r.gradient[at.row * r.columns + r.V] = -dot * inverse;
}

extern "C" __global__ void __launch_bounds__(256) inline_leave(const __grid_constant__ InlineRows r, bool key) {
  Row at;
  if (!row_at(r, key ? r.S : r.T, &at)) return;
  const bool part = !key || takes_part(r, at.b, at.t);
  const View &x = key ? r.args.k : r.args.q, &dx = key ? r.grads.dk : r.grads.dq;
  const float* dphi = key ? r.dphi_k : r.dphi_q;
  for (int c = at.lane; c < r.K && is_given(dx); c += 32) {
    float sum = 0;
    for (int i = 0; i < r.dparts; ++i) sum += dphi[i * (key ? r.k_stride : r.q_stride) + at.row * r.padded + c];
    const float d = part ? sum * (key ? 1 : r.scale) * slope(r.args.kernel, get(x, at.b, at.t, at.h, c)) : 0;
    put(dx, d, at.b, at.t, at.h, c);
  }
  if (!key || !is_given(r.grads.dv)) return;
  const int64_t from = ((at.b * r.T + (r.args.causal ? at.t : 0)) * r.H + at.h) * r.V;
  for (int j = at.lane; j < r.V; j += 32) {
    put(r.grads.dv, part ? part_at(r, at, j) + (r.T > 0 ? r.back[from + j] : 0) : 0, at.b, at.t, at.h, j);
  }
}

// final_moment = S - zk zv^T / n, and the means; a warp has a row of the state.
extern "C" __global__ void __launch_bounds__(256) inline_states(const __grid_constant__ InlineRows r) {
  const int64_t row = blockIdx.x * 8ll + threadIdx.x / 32, b = row / r.K / r.H;
  const int lane = threadIdx.x % 32, f = static_cast<int>(row % r.K), h = static_cast<int>(row / r.K % r.H);
  if (row >= r.B * r.H * r.K) return;
  const float* from = r.state + (((b * r.H + h) * r.tiles + f / r.tile) * r.tile + f % r.tile) * r.columns;
  const int64_t last = r.args.causal ? r.T - 1 : 0;
  const float* sums = r.sums + ((b * (r.args.causal ? r.T : 1) + last) * r.H + h) * (r.V + 1);
  const bool any = r.S > 0;
  const float n = any ? sums[r.V] : 0, inverse = n == 0 ? 0 : 1 / n, zk = any ? from[r.V] : 0;
  for (int j = lane; j < r.V; j += 32) {
    const float zv = any ? sums[j] : 0;
    if (is_given(r.out.final_moment)) put(r.out.final_moment, any ? from[j] - zk * inverse * zv : 0, b, h, f, j);
    if (f == 0 && is_given(r.out.final_value)) {
      put(r.out.final_value, n == 0 ? 0 : fmaf(zv, inverse, r.v0[(b * r.H + h) * r.V + j]), b, h, j);
    }
  }
  if (lane != 0) return;
  if (is_given(r.out.final_key)) put(r.out.final_key, n == 0 ? 0 : fmaf(zk, inverse, r.k0[(b * r.H + h) * r.K + f]), b, h, f);
  if (f == 0 && is_given(r.out.final_count)) put(r.out.final_count, n, b, h);
}

// ---- decode: the keys less their running mean first, a block has a head; then the moments, 32 columns to a block

extern "C" __global__ void __launch_bounds__(128) inline_decode_keys(const __grid_constant__ InlineDecode d) {
  const int64_t b = blockIdx.x / d.H;
  const int h = static_cast<int>(blockIdx.x % d.H);
  float n = get(d.args.count, b, h);
  __syncthreads();
  for (int64_t t = 0; t < d.T; ++t) {
    const int64_t row = (b * d.T + t) * d.H + h;
    n += 1;
    for (int c = threadIdx.x; c < d.K; c += 128) {
      const float less = phi(d.args.kernel, get(d.args.k, b, t, h, c)) - get(d.args.key, b, h, c);
      d.keys[row * d.K + c] = less;
      d.queries[row * d.K + c] = d.scale / n * phi(d.args.kernel, get(d.args.q, b, t, h, c));
      put(d.args.key, get(d.args.key, b, h, c) + less / n, b, h, c);
    }
    if (threadIdx.x == 0) d.counts[row] = n;
  }
  if (threadIdx.x == 0) put(d.args.count, n, b, h);
}
extern "C" __global__ void __launch_bounds__(256) inline_decode_moments(const __grid_constant__ InlineDecode d) {
  __shared__ float parts[8][32];
  const int64_t b = blockIdx.x / d.H;
  const int h = static_cast<int>(blockIdx.x % d.H), lane = threadIdx.x % 32, slot = threadIdx.x / 32,
            j = blockIdx.y * 32 + lane;
  float mean = j < d.V ? get(d.args.value, b, h, j) : 0;
  __syncthreads();
  for (int64_t t = 0; t < d.T; ++t) {
    const int64_t row = (b * d.T + t) * d.H + h;
    const float n = d.counts[row], less = j < d.V ? get(d.args.v, b, t, h, j) - mean : 0, share = (n - 1) / n * less;
    float sum = 0;
    for (int c = slot; j < d.V && c < d.K; c += 8) {
      const float x = fmaf(d.keys[row * d.K + c], share, get(d.args.moment, b, h, c, j));
      put(d.args.moment, x, b, h, c, j);
      sum = fmaf(d.queries[row * d.K + c], x, sum);
    }
    mean += less / n;
    parts[slot][lane] = sum;
    __syncthreads();
    if (slot == 0 && j < d.V) {
      for (int i = 1; i < 8; ++i) sum += parts[i][lane];
      put(d.out, mean + sum, b, t, h, j);
    }
    __syncthreads();
  }
  if (slot == 0 && j < d.V) put(d.args.value, mean, b, h, j);
}

}  // namespace linnet::cuda
