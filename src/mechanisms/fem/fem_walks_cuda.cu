// The rows around the walks of fem_read (fem_walks_cuda.h), and prior aft.
#include "fem_walks_cuda.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

__device__ __forceinline__ float relu(float x) { return x <= 0 ? 0 : x; }
__device__ __forceinline__ float softplus(float x) { return relu(x) + log1pf(expf(-fabsf(x))); }
__device__ __forceinline__ bool present(const FemRows& r, int64_t b, int64_t t) {
  return !is_given(r.args.key_mask) || static_cast<const uint8_t*>(r.args.key_mask.data)[place(r.args.key_mask, b, t)] != 0;
}
__device__ __forceinline__ float clip(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }
__device__ __forceinline__ float denominator(FemDenominator rule, float sum, float* slope) {
  *slope = rule == FemDenominator::max && sum < 1e-6f ? 0 : 1;
  if (rule == FemDenominator::plus) return sum + 1e-5f;
  return rule == FemDenominator::max && sum < 1e-6f ? 1e-6f : sum;
}

struct Row {
  int64_t row, b, t;
  int h, lane;
};
__device__ __forceinline__ bool row_at(const FemRows& r, Row* at) {
  at->row = blockIdx.x * 8ll + threadIdx.x / 32;
  at->lane = threadIdx.x % 32;
  at->h = static_cast<int>(at->row % r.H);
  at->t = at->row / r.H % (r.T > 0 ? r.T : 1);
  at->b = at->row / r.H / (r.T > 0 ? r.T : 1);
  return at->row < r.rows;
}
__device__ __forceinline__ float part_at(const FemRows& r, const Row& at, int column) {
  float sum = 0;
  for (int tile = 0; tile < r.tiles; ++tile) sum += r.parts[(at.row * r.tiles + tile) * r.columns + column];
  return sum;
}
__device__ __forceinline__ bool is_small(const FemRows& r, const Row& at, int j) {
  return r.small[(at.b * r.H + at.h) * r.V + j] != 0;
}
__device__ __forceinline__ float2 origin_of(const FemRows& r, const Row& at, int j) {
  const int64_t place = (at.b * r.H + at.h) * r.V + j;
  return {r.origin[place], r.origin[r.B * r.H * r.V + place]};
}
// log of the sum of exponentials over the sum of weights, from the sum that the values make.
__device__ __forceinline__ float tilted(bool small, float sum, float z) {
  return small ? log1pf(z / sum) : logf(z) - logf(sum);
}
// mu and F of a channel to the caller, gated.
__device__ __forceinline__ void finish(const FemRows& r, const Row& at, int j, float mu, float F) {
  const float lam = get(r.args.lam, at.b, at.t, at.h, j), g = get_or(1, r.args.g, at.b, at.t, at.h, j);
  if (is_given(r.out.mu)) put(r.out.mu, mu, at.b, at.t, at.h, j);
  if (is_given(r.out.free)) put(r.out.free, F, at.b, at.t, at.h, j);
  put(r.out.out, g * fmaf(lam, F - mu, mu), at.b, at.t, at.h, j);
}
// The gates of a channel whose mu and F are known; returns dmu and dF.
__device__ __forceinline__ float2 gates(const FemRows& r, const Row& at, int j, float mu, float F) {
  const float lam = get(r.args.lam, at.b, at.t, at.h, j), d = get_or(0, r.grads.dout, at.b, at.t, at.h, j);
  const float gd = d * get_or(1, r.args.g, at.b, at.t, at.h, j);
  if (is_given(r.grads.dg)) put(r.grads.dg, d * fmaf(lam, F - mu, mu), at.b, at.t, at.h, j);
  if (is_given(r.grads.dlam)) put(r.grads.dlam, gd * (F - mu), at.b, at.t, at.h, j);
  return {(1 - lam) * gd, lam * gd};
}

}  // namespace

// Whether a channel of a head has beta vc >= -4 everywhere: then sums are taken of expm1(beta vc), and log1p of them loses
// nothing however small beta is. 32 channels to a block, 8 threads each.
extern "C" __global__ void __launch_bounds__(256) fem_small(const __grid_constant__ FemRows r) {
  __shared__ float lows[8][32], highs[8][32];
  const int64_t b = blockIdx.x / r.H;
  const int h = static_cast<int>(blockIdx.x % r.H), lane = threadIdx.x % 32, slot = threadIdx.x / 32,
            j = blockIdx.y * 32 + lane;
  const float beta = j < r.V ? get(r.args.beta, h, j) : 1;
  float low = INFINITY, high = -INFINITY;
  for (int64_t t = slot; j < r.V && t < r.T; t += 8) {
    if (!present(r, b, t)) continue;
    const float x = beta * clip(get(r.args.v, b, t, h, j), r.cap / beta);
    low = fminf(low, x);
    high = fmaxf(high, x);
  }
  lows[slot][lane] = low;
  highs[slot][lane] = high;
  __syncthreads();
  if (slot != 0 || j >= r.V) return;
  for (int i = 1; i < 8; ++i) low = fminf(low, lows[i][lane]), high = fmaxf(high, highs[i][lane]);
  const int64_t at = (b * r.H + h) * r.V + j;
  const bool small = low >= -4;
  r.small[at] = small ? 1 : 0;
  if (r.origin == nullptr) return;
  float v0 = 0, e0 = small ? 1 : 0;
  if (high >= low && high - low <= 0.1f * fminf(fabsf(low), fabsf(high))) {  // there are keys, and they are almost equal
    int64_t first = 0;
    while (!present(r, b, first)) ++first;
    const float x = clip(get(r.args.v, b, first, h, j), r.cap / beta);
    if (isfinite(x)) v0 = x, e0 = expf(beta * x);
  }
  r.origin[at] = v0;
  r.origin[r.B * r.H * r.V + at] = e0;
}

// phi(q), phi(k) and [vc, exp(beta vc), 1]; keys without weight are zeros.
extern "C" __global__ void __launch_bounds__(256) fem_features(const __grid_constant__ FemRows r) {
  Row at;
  if (!row_at(r, &at)) return;
  const bool there = present(r, at.b, at.t);
  for (int c = at.lane; c < r.padded; c += 32) {
    const bool in = c < r.K;
    r.phi_q[at.row * r.padded + c] = in ? relu(get(r.args.q, at.b, at.t, at.h, c)) + r.eps : 0;
    r.phi_k[at.row * r.padded + c] = in && there ? relu(get(r.args.k, at.b, at.t, at.h, c)) + r.eps : 0;
  }
  for (int j = at.lane; j < r.columns; j += 32) {
    float x = j == 2 * r.V && there ? 1 : 0;
    if (j < 2 * r.V && there) {
      const float beta = get(r.args.beta, at.h, j % r.V), vc = clip(get(r.args.v, at.b, at.t, at.h, j % r.V), r.cap / beta);
      if (r.origin != nullptr) {
        const float2 o = origin_of(r, at, j % r.V);
        x = j < r.V ? vc - o.x : o.y == 0 ? expf(beta * vc) : o.y * expm1f(beta * (vc - o.x));
      } else {
        x = j < r.V ? vc : is_small(r, at, j % r.V) ? expm1f(beta * vc) : expf(beta * vc);
      }
    }
    r.values[at.row * r.columns + j] = x;
  }
}

extern "C" __global__ void __launch_bounds__(256) fem_finish(const __grid_constant__ FemRows r) {
  Row at;
  if (!row_at(r, &at)) return;
  const float sum = part_at(r, at, 2 * r.V);
  float slope;
  const float den = denominator(r.rule, sum, &slope);
  for (int j = at.lane; j < r.V; j += 32) {
    const float beta = get(r.args.beta, at.h, j), z = part_at(r, at, r.V + j);
    const float mu = sum == 0 ? 0 : part_at(r, at, j) / den;
    const bool small = is_small(r, at, j), none = sum == 0 || (!small && z == 0);
    finish(r, at, j, mu, none ? 0 : (tilted(small, sum, z) + (den == sum ? 0 : logf(sum / den))) / beta);
  }
  if (at.lane == 0 && is_given(r.out.norm)) put(r.out.norm, sum, at.b, at.t, at.h);
}

// The gradients of the sums M, Z of what is left of the values, and of the sum of weights n (v0, e0 what they lost, o = den -
// slope n): [dmu / den, d2 / den, dmu (v0 o - slope M) / den^2 + d2 (e0 o - slope Z) / den^2], d2 = dF / (beta exp(beta F)).
extern "C" __global__ void __launch_bounds__(256) fem_gradient(const __grid_constant__ FemRows r) {
  Row at;
  if (!row_at(r, &at)) return;
  const float sum = part_at(r, at, 2 * r.V);
  float slope, dot = 0;
  const float den = denominator(r.rule, sum, &slope), inverse = sum == 0 ? 0 : 1 / den;
  const float gap = slope == 0 ? den : r.rule == FemDenominator::plus ? 1e-5f : 0;
  float* to = r.gradient + at.row * r.columns;
  for (int j = at.lane; j < r.V; j += 32) {
    const float beta = get(r.args.beta, at.h, j), mu = get(r.out.mu, at.b, at.t, at.h, j),
                F = get(r.out.free, at.b, at.t, at.h, j);
    const float2 d = gates(r, at, j, mu, F), o = origin_of(r, at, j);
    const float d2 = d.y / beta * expf(-beta * F) * inverse, d1 = d.x * inverse;
    to[j] = d1;
    to[r.V + j] = d2;
    dot += d1 * fmaf(o.x, gap, -slope * part_at(r, at, j)) + d2 * fmaf(o.y, gap, -slope * part_at(r, at, r.V + j));
    if (r.dbeta != nullptr) r.dbeta[at.row * r.V + j] = sum == 0 ? 0 : -d.y * F / beta;
  }
  dot = ptx::sum_lanes<32>(dot);
  for (int j = 2 * r.V + at.lane; j < r.columns; j += 32) to[j] = j == 2 * r.V ? dot * inverse : 0;
}

// What the walks leave, back to the caller.
extern "C" __global__ void __launch_bounds__(256) fem_leave(const __grid_constant__ FemRows r) {
  Row at;
  if (!row_at(r, &at)) return;
  const bool there = present(r, at.b, at.t);
  const auto sum_of = [&](const float* dphi, int c) {
    float sum = 0;
    for (int i = 0; i < r.dparts; ++i) sum += dphi[i * r.part_stride + at.row * r.padded + c];
    return sum;
  };
  double step = 0;
  for (int c = at.lane; c < r.K; c += 32) {
    const float dq = sum_of(r.dphi_q, c), dk = sum_of(r.dphi_k, c);
    step += static_cast<double>(r.phi_q[at.row * r.padded + c]) * dq - static_cast<double>(r.phi_k[at.row * r.padded + c]) * dk;
    if (is_given(r.grads.dq)) {
      put(r.grads.dq, get(r.args.q, at.b, at.t, at.h, c) > 0 ? dq : 0, at.b, at.t, at.h, c);
    }
    if (is_given(r.grads.dk)) {
      put(r.grads.dk, there && get(r.args.k, at.b, at.t, at.h, c) > 0 ? dk : 0, at.b, at.t, at.h, c);
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) step += __shfl_xor_sync(0xffffffff, step, lanes);
  if (at.lane == 0 && r.steps != nullptr) r.steps[at.row] = step;
  for (int j = at.lane; j < r.V; j += 32) {
    const float beta = get(r.args.beta, at.h, j), v = there ? get(r.args.v, at.b, at.t, at.h, j) : 0, limit = r.cap / beta;
    const float vc = clip(v, limit), tilt = there ? expf(beta * vc) * part_at(r, at, r.V + j) : 0;
    const float dvc = there ? fmaf(beta, tilt, part_at(r, at, j)) : 0;
    const bool clipped = fabsf(v) > limit;
    if (is_given(r.grads.dv)) put(r.grads.dv, clipped ? 0 : dvc, at.b, at.t, at.h, j);
    if (r.dbeta != nullptr) r.dbeta[at.row * r.V + j] += vc * tilt - (clipped ? dvc * vc / beta : 0);
  }
}

// da_t = the sum of the steps from t on: a warp has a head, 32 tokens at a time from the end.
extern "C" __global__ void __launch_bounds__(32) fem_decays(const __grid_constant__ FemRows r) {
  const int64_t b = blockIdx.x / r.H;
  const int h = static_cast<int>(blockIdx.x % r.H), lane = threadIdx.x;
  double carry = 0;
  for (int64_t last = r.T; last > 0; last -= 32) {
    const int64_t t = last - 1 - lane;
    double x = t >= 0 ? r.steps[(b * r.T + t) * r.H + h] : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double before = __shfl_up_sync(0xffffffff, x, step);
      if (lane >= step) x += before;
    }
    x += carry;
    if (t >= 0) put(r.grads.da, static_cast<float>(x), b, t, h);
    carry = __shfl_sync(0xffffffff, x, 31);
  }
}

// ---- aft: a thread has a channel of a head and walks over the tokens, with sums in units of exp(m), m the largest key so far.

namespace {

struct Sums {
  float m = -INFINITY, n = 0, mean = 0, tilt = 0;
  __device__ void add(float k, float vc, float x) {
    const float high = k > m || k != k ? k : m, old = m == -INFINITY ? 0 : expf(m - high), w = expf(k - high);
    n = fmaf(n, old, w);
    mean = fmaf(mean, old, w * vc);
    tilt = fmaf(tilt, old, w * x);
    m = high;
  }
};
// gate = x sqrt(V) / |x|, x = softplus(q) + 1e-6: its factor and the length, for all channels of a token; by the whole block,
// one token after the other.
__device__ __forceinline__ float token_length(const FemRows& r, int64_t b, int64_t t, int h, float* parts) {
  float square = 0;
  for (int j = threadIdx.x; j < r.V; j += 128) {
    const float x = softplus(get(r.args.q, b, t, h, j)) + 1e-6f;
    square = fmaf(x, x, square);
  }
  return sqrtf(ptx::sum_block<128>(square, parts));
}

}  // namespace

// A block has a head; its threads walk over the channels in turns of 128.
extern "C" __global__ void __launch_bounds__(128) fem_aft(const __grid_constant__ FemRows r, bool back) {
  __shared__ float parts[4];
  const int64_t b = blockIdx.x / r.H;
  const int h = static_cast<int>(blockIdx.x % r.H);
  for (int j0 = 0; j0 < r.V; j0 += 128) {
    const int j = j0 + threadIdx.x;
    const bool in = j < r.V;
    const float beta = in ? get(r.args.beta, h, j) : 1, limit = r.cap / beta;
    const bool small = in && r.small[(b * r.H + h) * r.V + j] != 0;
    Sums sums;
    const auto add = [&](int64_t t) {
      if (!in || !present(r, b, t)) return;
      const float vc = clip(get(r.args.v, b, t, h, j), limit);
      sums.add(get(r.args.k, b, t, h, j), vc, small ? expm1f(beta * vc) : expf(beta * vc));
    };
    for (int64_t t = 0; !r.args.causal && t < r.T; ++t) add(t);
    for (int64_t t = 0; t < r.T; ++t) {
      if (r.args.causal) add(t);
      const Row at = {(b * r.T + t) * r.H + h, b, t, h, 0};
      if (back) {
        if (in) r.levels[at.row * r.V + j] = sums.n == 0 ? -INFINITY : sums.m + logf(sums.n);
        continue;
      }
      const float factor = sqrtf(static_cast<float>(r.V)) / fmaxf(token_length(r, b, t, h, parts), 1e-5f);
      if (!in) continue;
      const float gate = (softplus(get(r.args.q, b, t, h, j)) + 1e-6f) * factor;
      const float mu = sums.n == 0 ? 0 : gate * sums.mean / sums.n;
      const bool none = sums.n == 0 || (!small && sums.tilt == 0);
      finish(r, at, j, mu, none ? 0 : (logf(gate) + tilted(small, sums.n, sums.tilt)) / beta);
    }
    if (!back) continue;
    // Backward in time: U = sum of gate exp(level_i - level_t) [dmu, d2, e / gate], in units of the level of the key's own row.
    float U[3] = {}, level = 0;
    const auto take = [&](int64_t t) {
      const Row at = {(b * r.T + t) * r.H + h, b, t, h, 0};
      const float length = token_length(r, b, t, h, parts), factor = sqrtf(static_cast<float>(r.V)) / fmaxf(length, 1e-5f);
      const float own = in ? r.levels[at.row * r.V + j] : -INFINITY;
      const bool empty = own == -INFINITY;
      float e = 0, x = 0, gate = 1, mu = 0, F = 0;
      float2 d = {0, 0};
      if (in) {
        x = softplus(get(r.args.q, b, t, h, j)) + 1e-6f;
        gate = x * factor;
        mu = get(r.out.mu, b, t, h, j), F = get(r.out.free, b, t, h, j);
        d = gates(r, at, j, mu, F);
        e = empty ? 0 : fmaf(d.x, mu, d.y / beta);
        if (r.dbeta != nullptr) r.dbeta[at.row * r.V + j] = empty ? 0 : -d.y * F / beta;
      }
      // dq of the token needs sums over all its channels: kept for fem_aft_queries
      if (in && is_given(r.grads.dq)) r.gradient[at.row * r.V + j] = e / gate;
      if (in && !empty) {
        const float moved = level == 0 && U[2] == 0 && U[0] == 0 && U[1] == 0 ? 0 : expf(own - level);
        U[0] = fmaf(U[0], moved, gate * d.x);
        U[1] = fmaf(U[1], moved, gate * (d.y / beta) * expf(-beta * F));
        U[2] = fmaf(U[2], moved, e);
        level = own;
      }
    };
    const auto give = [&](int64_t t) {
      if (!in) return;
      const Row at = {(b * r.T + t) * r.H + h, b, t, h, 0};
      const bool there = present(r, b, t);
      const float v = there ? get(r.args.v, b, t, h, j) : 0, vc = clip(v, limit), X = expf(beta * vc);
      const float p = there ? expf(get(r.args.k, b, t, h, j) - level) : 0;
      const float tilt = p * X * U[1], dvc = fmaf(p, U[0], beta * tilt);
      const bool clipped = fabsf(v) > limit;
      if (is_given(r.grads.dv)) put(r.grads.dv, clipped || !there ? 0 : dvc, b, t, h, j);
      if (is_given(r.grads.dk)) put(r.grads.dk, there ? p * (U[0] * vc + U[1] * X - U[2]) : 0, b, t, h, j);
      if (r.dbeta != nullptr && there) r.dbeta[at.row * r.V + j] += vc * tilt - (clipped ? dvc * vc / beta : 0);
    };
    for (int64_t t = r.T; t-- > 0;) {
      take(t);
      if (r.args.causal) give(t);
    }
    for (int64_t t = r.T; !r.args.causal && t-- > 0;) give(t);
  }
}

// dq of aft: dx = factor (de - x <de, x> / |x|^2), de = e / gate; a warp has a row.
extern "C" __global__ void __launch_bounds__(256) fem_aft_queries(const __grid_constant__ FemRows r) {
  Row at;
  if (!row_at(r, &at)) return;
  float square = 0, mixed = 0;
  for (int j = at.lane; j < r.V; j += 32) {
    const float x = softplus(get(r.args.q, at.b, at.t, at.h, j)) + 1e-6f;
    square = fmaf(x, x, square);
    mixed = fmaf(r.gradient[at.row * r.V + j], x, mixed);
  }
  square = ptx::sum_lanes<32>(square);
  mixed = ptx::sum_lanes<32>(mixed);
  const float length = sqrtf(square), factor = sqrtf(static_cast<float>(r.V)) / fmaxf(length, 1e-5f);
  for (int j = at.lane; j < r.V; j += 32) {
    const float q = get(r.args.q, at.b, at.t, at.h, j), x = softplus(q) + 1e-6f, less = length > 1e-5f ? x * mixed / square : 0;
    put(r.grads.dq, factor * (r.gradient[at.row * r.V + j] - less) * ptx::logistic<false>(q), at.b, at.t, at.h, j);
  }
}

// ---- ssm: a thread has a channel of a token

extern "C" __global__ void __launch_bounds__(256)
    fem_scan_inputs(const __grid_constant__ FemRows r, const __grid_constant__ FemScan s, int R) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x, E = int64_t{r.H} * r.V, all = r.B * r.T * E;
  if (i < E) {
    s.skip[i] = get(r.args.D, i / r.V, i % r.V);
    for (int k = 0; k < R; ++k) s.rates[i * R + k] = get(r.args.A, i / r.V, i % r.V, k);
  }
  if (i < r.B * r.T * R) {
    const int64_t b = i / R / r.T, t = i / R % r.T;
    for (int n = 0; n < 3; ++n) {
      s.in[n * r.B * r.T * R + i] = get(r.args.Bm, b, t, i % R);
      s.out[n * r.B * r.T * R + i] = get(r.args.Cm, b, t, i % R);
    }
  }
  if (i >= all) return;
  const int j = static_cast<int>(i % r.V), h = static_cast<int>(i / r.V % r.H);
  const Row at = {i / r.V, i / E / r.T, i / E % r.T, h, 0};
  const bool there = present(r, at.b, at.t);
  const float beta = get(r.args.beta, h, j), vc = there ? clip(get(r.args.v, at.b, at.t, h, j), r.cap / beta) : 0;
  const float u[3] = {vc, is_small(r, at, j) ? expm1f(beta * vc) : expf(beta * vc), 1},
              delta = get(r.args.delta, at.b, at.t, h, j);
  for (int n = 0; n < 3; ++n) {
    s.x[n * all + i] = there ? u[n] : 0;
    s.steps[n * all + i] = delta;
  }
}
extern "C" __global__ void __launch_bounds__(256)
    fem_scan_finish(const __grid_constant__ FemRows r, const __grid_constant__ FemScan s, bool back) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x, E = int64_t{r.H} * r.V, all = r.B * r.T * E;
  if (i >= all) return;
  const int j = static_cast<int>(i % r.V), h = static_cast<int>(i / r.V % r.H);
  const Row at = {i / r.V, i / E / r.T, i / E % r.T, h, 0};
  const float beta = get(r.args.beta, h, j), sum = s.y[2 * all + i], z = s.y[all + i];
  const bool small = is_small(r, at, j), none = sum == 0 || (!small && z == 0);
  float slope;
  const float den = denominator(r.rule, sum, &slope);
  const float mu = sum == 0 || den == 0 ? 0 : s.y[i] / den;
  const float F = none ? 0 : (tilted(small, sum, z) + (den == sum ? 0 : logf(sum / den))) / beta;
  if (!back) return finish(r, at, j, mu, F);
  const float2 d = gates(r, at, j, mu, F);
  const float whole = small ? sum + z : z, tilt = none || whole == 0 ? 0 : d.y / (beta * whole);
  const float less = sum == 0 ? 0 : -(d.x * mu + d.y / beta) / den * slope;
  s.dy[i] = sum == 0 ? 0 : d.x / den;
  s.dy[all + i] = tilt;
  s.dy[2 * all + i] = !small ? less : den == sum && sum != 0 ? (d.y / beta * expm1f(-beta * F) - d.x * mu) / den : less + tilt;
  r.dbeta[i] = sum == 0 ? 0 : -d.y * F / beta;
}
extern "C" __global__ void __launch_bounds__(256)
    fem_scan_leave(const __grid_constant__ FemRows r, const __grid_constant__ FemScan s, int R) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x, E = int64_t{r.H} * r.V, all = r.B * r.T * E, maps = r.B * r.T * R;
  if (i < maps) {
    const int64_t b = i / R / r.T, t = i / R % r.T;
    if (is_given(r.grads.dBm)) put(r.grads.dBm, s.din[i] + s.din[maps + i] + s.din[2 * maps + i], b, t, i % R);
    if (is_given(r.grads.dCm)) put(r.grads.dCm, s.dout[i] + s.dout[maps + i] + s.dout[2 * maps + i], b, t, i % R);
  }
  if (i >= all) return;
  const int j = static_cast<int>(i % r.V), h = static_cast<int>(i / r.V % r.H);
  const int64_t b = i / E / r.T, t = i / E % r.T;
  const bool there = present(r, b, t);
  if (is_given(r.grads.ddelta)) put(r.grads.ddelta, s.dsteps[i] + s.dsteps[all + i] + s.dsteps[2 * all + i], b, t, h, j);
  const float beta = get(r.args.beta, h, j), limit = r.cap / beta, v = there ? get(r.args.v, b, t, h, j) : 0,
              vc = clip(v, limit);
  const float tilt = there ? expf(beta * vc) * s.dx[all + i] : 0, dvc = there ? fmaf(beta, tilt, s.dx[i]) : 0;
  const bool clipped = fabsf(v) > limit;
  if (is_given(r.grads.dv)) put(r.grads.dv, clipped ? 0 : dvc, b, t, h, j);
  r.dbeta[i] += vc * tilt - (clipped ? dvc * vc / beta : 0);
}

// ---- decode

namespace {

__device__ __forceinline__ void finish_decode(const FemDecode& d, int64_t b, int64_t t, int h, int j, float mu, float F) {
  const float lam = get(d.args.lam, b, t, h, j), g = get_or(1, d.args.g, b, t, h, j);
  put(d.out, g * fmaf(lam, F - mu, mu), b, t, h, j);
}
__device__ __forceinline__ float phi(const FemDecode& d, const View& x, int64_t b, int64_t t, int h, int c) {
  return relu(get(x, b, t, h, c)) + d.eps;
}

}  // namespace

// linear, gated: the sums of the weights first, a warp has a head.
extern "C" __global__ void __launch_bounds__(32) fem_decode_sums(const __grid_constant__ FemDecode d) {
  const int64_t b = blockIdx.x / d.H;
  const int h = static_cast<int>(blockIdx.x % d.H);
  for (int64_t t = 0; t < d.T; ++t) {
    const float decay = is_given(d.args.a) ? expf(get(d.args.a, b, t, h)) : 1;
    float sum = 0;
    for (int c = threadIdx.x; c < d.K; c += 32) {
      const float n = fmaf(decay, get(d.args.state, b, h, c, 2 * d.V), phi(d, d.args.k, b, t, h, c));
      put(d.args.state, n, b, h, c, 2 * d.V);
      sum = fmaf(phi(d, d.args.q, b, t, h, c), n, sum);
    }
    sum = ptx::sum_lanes<32>(sum);
    if (threadIdx.x == 0) d.sums[(b * d.T + t) * d.H + h] = sum;
  }
}

// Every prior: 32 channels of a head to a block, 8 threads each share the rows of the state.
extern "C" __global__ void __launch_bounds__(256) fem_decode(const __grid_constant__ FemDecode d) {
  __shared__ float parts[3][8][32];
  __shared__ float lengths[8];
  const int64_t b = blockIdx.x / d.H;
  const int h = static_cast<int>(blockIdx.x % d.H), lane = threadIdx.x % 32, slot = threadIdx.x / 32,
            j = blockIdx.y * 32 + lane;
  const bool in = j < d.V, aft = d.args.prior == FemPrior::aft, ssm = d.args.prior == FemPrior::ssm;
  const float beta = in ? get(d.args.beta, h, j) : 1;
  for (int64_t t = 0; t < d.T; ++t) {
    const float vc = in ? clip(get(d.args.v, b, t, h, j), d.cap / beta) : 0;
    const float before = in ? get(d.args.shift, b, h, j) : 0, shift = fmaxf(before, beta * vc);
    const float less = before == -INFINITY ? 0 : expf(before - shift), u[3] = {vc, expf(beta * vc - shift), 1};
    float y[3] = {}, gate = 1;
    __syncthreads();  // everybody has read the shift
    if (aft) {
      float square = 0;
      for (int c = threadIdx.x; c < d.V; c += 256) {
        const float x = softplus(get(d.args.q, b, t, h, c)) + 1e-6f;
        square = fmaf(x, x, square);
      }
      const float length = sqrtf(ptx::sum_block<256>(square, lengths));
      if (in && slot == 0) {
        const float k = get(d.args.k, b, t, h, j), m = get(d.args.sums, b, h, 3, j), high = fmaxf(m, k);
        const float old = m == -INFINITY ? 0 : expf(m - high), w = expf(k - high);
        y[2] = get(d.args.sums, b, h, 0, j) * old + w;
        y[0] = get(d.args.sums, b, h, 1, j) * old + w * u[0];
        y[1] = get(d.args.sums, b, h, 2, j) * old * less + w * u[1];
        put(d.args.sums, y[2], b, h, 0, j);
        put(d.args.sums, y[0], b, h, 1, j);
        put(d.args.sums, y[1], b, h, 2, j);
        put(d.args.sums, high, b, h, 3, j);
        gate = (softplus(get(d.args.q, b, t, h, j)) + 1e-6f) * sqrtf(static_cast<float>(d.V)) / fmaxf(length, 1e-5f);
      }
    } else if (ssm) {
      const float delta = in ? get(d.args.delta, b, t, h, j) : 0;
      for (int i = slot; in && i < d.R; i += 8) {
        const float decay = expf(delta * get(d.args.A, h, j, i)), write = delta * get(d.args.Bm, b, t, i);
        for (int n = 0; n < 3; ++n) {
          const float x = fmaf(decay * (n == 1 ? less : 1), get(d.args.scan, b, h, n, i, j), write * u[n]);
          put(d.args.scan, x, b, h, n, i, j);
          y[n] = fmaf(get(d.args.Cm, b, t, i), x, y[n]);
        }
      }
    } else {
      const float decay = is_given(d.args.a) ? expf(get(d.args.a, b, t, h)) : 1;
      for (int c = slot; in && c < d.K; c += 8) {
        const float key = phi(d, d.args.k, b, t, h, c), query = phi(d, d.args.q, b, t, h, c);
        for (int n = 0; n < 2; ++n) {
          const float x = fmaf(decay * (n == 1 ? less : 1), get(d.args.state, b, h, c, n * d.V + j), key * u[n]);
          put(d.args.state, x, b, h, c, n * d.V + j);
          y[n] = fmaf(query, x, y[n]);
        }
      }
    }
    for (int n = 0; n < 3; ++n) parts[n][slot][lane] = y[n];
    __syncthreads();
    if (in && slot == 0) {
      put(d.args.shift, shift, b, h, j);
      for (int n = 0; n < 3; ++n) {
        for (int i = 1; i < 8; ++i) y[n] += parts[n][i][lane];
      }
      const float own = ssm ? get(d.args.D, h, j) : 0;
      for (int n = 0; ssm && n < 3; ++n) y[n] = fmaf(own, u[n], y[n]);
      if (!aft && !ssm) y[2] = d.sums[(b * d.T + t) * d.H + h];
      float slope;
      const float den = denominator(d.rule, y[2], &slope);
      finish_decode(d, b, t, h, j, gate * y[0] / den, (shift + logf(gate * y[1]) - logf(den)) / beta);
    }
    __syncthreads();
  }
}

}  // namespace linnet::cuda
