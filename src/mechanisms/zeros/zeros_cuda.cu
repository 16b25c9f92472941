// The scalars and rows around the walks of zeros_cuda.h.
#include "mechanisms/shared/pieces.cuh"
#include "zeros_cuda.h"

namespace linnet::cuda {
namespace {

__device__ __forceinline__ bool present(const ZerosRows& r, int64_t b, int64_t t) {
  return !is_given(r.args.key_mask) || static_cast<const uint8_t*>(r.args.key_mask.data)[place(r.args.key_mask, b, t)] != 0;
}

// A sum of exponentials in units of the largest.
struct Level {
  double m = -INFINITY, E = 0;
};
__device__ __forceinline__ Level join(const Level& a, const Level& b) {
  if (a.m == -INFINITY) return b;
  if (b.m == -INFINITY) return a;
  const double m = a.m > b.m || a.m != a.m ? a.m : b.m;
  return {m, a.E * exp(a.m - m) + b.E * exp(b.m - m)};
}
template <class T>
__device__ __forceinline__ T from_lane(T x, int lane) {
  return __shfl_sync(0xffffffff, x, lane);
}

struct Row {
  int64_t row, b, t;
  int h, lane;
};
__device__ __forceinline__ bool row_at(const ZerosRows& r, Row* at) {
  at->row = blockIdx.x * 8ll + threadIdx.x / 32;
  at->lane = threadIdx.x % 32;
  at->h = static_cast<int>(at->row % r.H);
  at->t = at->row / r.H % (r.T > 0 ? r.T : 1);
  at->b = at->row / r.H / (r.T > 0 ? r.T : 1);
  return at->row < r.rows;
}

}  // namespace

// A warp has a head, 32 tokens at a time: running largest logit, sums of exponentials, count and mean; not causal: all of them
// first, then the rows.
extern "C" __global__ void __launch_bounds__(32) zeros_scalars(const __grid_constant__ ZerosRows r) {
  const int64_t b = blockIdx.x / r.H;
  const int h = static_cast<int>(blockIdx.x % r.H), lane = threadIdx.x;
  double c = 0;  // the first logit
  for (int64_t t0 = 0, found = 0; t0 < r.T && !found; t0 += 32) {
    const bool there = t0 + lane < r.T && present(r, b, t0 + lane);
    const unsigned any = __ballot_sync(0xffffffff, there);
    if (any == 0) continue;
    found = 1;
    c = get(r.args.s, b, t0 + __ffs(any) - 1, h);
  }
  Level carry;
  double count = 0, sum = 0;
  for (int pass = r.args.causal ? 1 : 0; pass < 2; ++pass) {
    for (int64_t t0 = 0; t0 < r.T; t0 += 32) {
      const int64_t t = t0 + lane;
      const bool in = t < r.T, there = in && present(r, b, t);
      const double s = there ? get(r.args.s, b, t, h) : 0;
      Level own = {there ? s : -INFINITY, there ? 1.0 : 0.0};
      double n = there ? 1 : 0, total = there ? s - c : 0;
      if (pass == 0 || r.args.causal) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const Level before = {__shfl_up_sync(0xffffffff, own.m, step), __shfl_up_sync(0xffffffff, own.E, step)};
          const double n_before = __shfl_up_sync(0xffffffff, n, step), total_before = __shfl_up_sync(0xffffffff, total, step);
          if (lane >= step) own = join(before, own), n += n_before, total += total_before;
        }
        own = join(carry, own);
        n += count;
        total += sum;
      } else {
        own = carry, n = count, total = sum;
      }
      const double last_m = __shfl_up_sync(0xffffffff, own.m, 1), m_before = lane == 0 ? carry.m : last_m;
      if (pass == 1 && in) {
        const int64_t row = (b * r.T + t) * r.H + h;
        const double mean = n == 0 ? 0 : total / n, s1 = get(r.args.s1, b, t, h), sh = get(r.args.sh, b, t, h);
        const double s0 = get_or(0, r.args.s0, b, t, h), B = n == 0 ? 0 : (s1 - sh) / n;
        r.x.A[row] = n == 0 ? 0 : static_cast<float>(sh / own.E);
        r.x.B[row] = static_cast<float>(B);
        r.x.C[row] = n == 0 ? 0 : static_cast<float>((s0 - sh) / n - B * mean);
        r.x.weight[row] = there ? static_cast<float>(exp(s - own.m)) : 0;
        r.x.less[row] = there ? static_cast<float>(s - c) : 0;
        r.x.E[row] = static_cast<float>(own.E);
        r.x.n[row] = static_cast<float>(n);
        r.x.mean[row] = static_cast<float>(mean);
        if (r.x.level != nullptr) r.x.level[row] = n == 0 ? -INFINITY : own.m + log(own.E);
        if (r.decays != nullptr) {
          r.decays[row * 3] = own.m == m_before || m_before == -INFINITY ? 0 : static_cast<float>(m_before - own.m);
          r.decays[row * 3 + 1] = r.decays[row * 3 + 2] = 0;
        }
      }
      if (pass == 0 || r.args.causal) {
        carry = {from_lane(own.m, 31), from_lane(own.E, 31)};
        count = from_lane(n, 31);
        sum = from_lane(total, 31);
      }
    }
  }
}

// [A q, B q, C q], [exp(s - m) k, (s - c) k, k] and v.
extern "C" __global__ void __launch_bounds__(256) zeros_features(const __grid_constant__ ZerosRows r) {
  Row at;
  if (!row_at(r, &at)) return;
  const bool there = present(r, at.b, at.t);
  const float q_of[3] = {r.x.A[at.row], r.x.B[at.row], r.x.C[at.row]}, k_of[3] = {r.x.weight[at.row], r.x.less[at.row], 1};
  for (int c = at.lane; c < r.K; c += 32) {
    const float q = get(r.args.q, at.b, at.t, at.h, c), k = there ? get(r.args.k, at.b, at.t, at.h, c) : 0;
    for (int i = 0; i < 3; ++i) {
      r.phi_q[(at.row * 3 + i) * r.K + c] = q_of[i] * q;
      r.phi_k[(at.row * 3 + i) * r.K + c] = k_of[i] * k;
    }
  }
  for (int j = at.lane; j < r.columns; j += 32) {
    r.values[at.row * r.columns + j] = there && j < r.V ? get(r.args.v, at.b, at.t, at.h, j) : 0;
    if (r.gradient != nullptr) {
      r.gradient[at.row * r.columns + j] = j < r.V ? get_or(0, r.grads.dout, at.b, at.t, at.h, j) : 0;
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) zeros_finish(const __grid_constant__ ZerosRows r, bool back) {
  Row at;
  if (!row_at(r, &at)) return;
  const bool there = !back || present(r, at.b, at.t);
  const View& to = back ? r.grads.dv : r.out.out;
  for (int j = at.lane; j < r.V; j += 32) {
    float sum = 0;
    for (int tile = 0; tile < r.tiles; ++tile) sum += r.parts[(at.row * r.tiles + tile) * r.columns + j];
    put(to, there ? sum : 0, at.b, at.t, at.h, j);
  }
}

// dq, dk, the gates, and what ds is made of.
extern "C" __global__ void __launch_bounds__(256) zeros_leave(const __grid_constant__ ZerosRows r) {
  Row at;
  if (!row_at(r, &at)) return;
  const bool there = present(r, at.b, at.t);
  const float q_of[3] = {r.x.A[at.row], r.x.B[at.row], r.x.C[at.row]}, k_of[3] = {r.x.weight[at.row], r.x.less[at.row], 1};
  float q_dot[3] = {}, k_dot[3] = {};
  for (int c = at.lane; c < r.K; c += 32) {
    const float q = get(r.args.q, at.b, at.t, at.h, c), k = there ? get(r.args.k, at.b, at.t, at.h, c) : 0;
    float dq = 0, dk = 0;
    for (int i = 0; i < 3; ++i) {
      float d = 0, e = 0;
      for (int part = 0; part < r.dparts; ++part) {
        d += r.dphi_q[part * r.part_stride + (at.row * 3 + i) * r.K + c];
        e += r.dphi_k[part * r.part_stride + (at.row * 3 + i) * r.K + c];
      }
      dq = fmaf(q_of[i], d, dq);
      dk = fmaf(k_of[i], e, dk);
      q_dot[i] = fmaf(q, d, q_dot[i]);
      k_dot[i] = fmaf(k, e, k_dot[i]);
    }
    if (is_given(r.grads.dq)) put(r.grads.dq, dq, at.b, at.t, at.h, c);
    if (is_given(r.grads.dk)) put(r.grads.dk, there ? dk : 0, at.b, at.t, at.h, c);
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    q_dot[i] = ptx::sum_lanes<32>(q_dot[i]);
    k_dot[i] = ptx::sum_lanes<32>(k_dot[i]);
  }
  if (at.lane != 0) return;
  const float n = r.x.n[at.row], inverse = n == 0 ? 0 : 1 / n;
  const float X = n == 0 ? 0 : q_dot[0] / r.x.E[at.row], Y = q_dot[2] * inverse;
  const float first = (q_dot[1] - r.x.mean[at.row] * q_dot[2]) * inverse;
  r.x.X[at.row] = X;
  r.x.Y[at.row] = Y;
  r.x.key[at.row] = there ? fmaf(k_of[0], k_dot[0], k_dot[1]) : 0;
  if (is_given(r.grads.ds1)) put(r.grads.ds1, first, at.b, at.t, at.h);
  if (is_given(r.grads.dsh)) put(r.grads.dsh, X - first - Y, at.b, at.t, at.h);
  if (is_given(r.grads.ds0)) put(r.grads.ds0, Y, at.b, at.t, at.h);
}

// ds_i = key_i - exp(s_i - level_i) W_i - U_i, W_i = sum_{t >= i} sh_t exp(level_i - level_t) X_t, U_i = sum_{t >= i} B_t Y_t;
// not causal: over all t, whose level is one. A warp has a head, 32 tokens at a time from the end.
extern "C" __global__ void __launch_bounds__(32) zeros_logits(const __grid_constant__ ZerosRows r) {
  const int64_t b = blockIdx.x / r.H;
  const int h = static_cast<int>(blockIdx.x % r.H), lane = threadIdx.x;
  double W = 0, U = 0, level = -INFINITY;  // of the tokens behind
  for (int pass = r.args.causal ? 1 : 0; pass < 2; ++pass) {
    for (int64_t last = r.T; last > 0; last -= 32) {
      const int64_t t = last - 1 - lane, row = (b * r.T + t) * r.H + h;
      const bool in = t >= 0;
      double own = in ? r.x.level[row] : -INFINITY, w = in ? static_cast<double>(get(r.args.sh, b, t, h)) * r.x.X[row] : 0;
      double u = in ? static_cast<double>(r.x.B[row]) * r.x.Y[row] : 0;
      if (pass == 0 || r.args.causal) {
        // Going left levels fall: what is behind is multiplied by exp(own - its level), at most 1.
        double at_level = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const double w_before = __shfl_up_sync(0xffffffff, w, step), l_before = __shfl_up_sync(0xffffffff, at_level, step);
          const double u_before = __shfl_up_sync(0xffffffff, u, step);
          if (lane >= step) {
            w += l_before == -INFINITY || at_level == -INFINITY ? 0 : w_before * exp(at_level - l_before);
            u += u_before;
          }
        }
        w += level == -INFINITY || own == -INFINITY ? 0 : W * exp(own - level);
        u += U;
      } else {
        w = W, u = U;
      }
      if (pass == 1 && in && is_given(r.grads.ds)) {
        const bool there = present(r, b, t);
        const double p = there ? static_cast<double>(r.x.weight[row]) / r.x.E[row] : 0;
        put(r.grads.ds, there ? static_cast<float>(r.x.key[row] - p * w - u) : 0, b, t, h);
      }
      if (pass == 0 || r.args.causal) {
        const int earliest = static_cast<int>(last < 32 ? last : 32) - 1;
        W = from_lane(w, earliest);
        U = from_lane(u, earliest);
        level = from_lane(own, earliest);
      }
    }
  }
}

// ---- decode: the steps of the tokens, then the state

extern "C" __global__ void __launch_bounds__(32) zeros_decode_steps(const __grid_constant__ ZerosDecode d, int64_t heads) {
  const int64_t i = blockIdx.x * 32ll + threadIdx.x, b = i / d.H;
  const int h = static_cast<int>(i % d.H);
  if (i >= heads || d.T == 0) return;
  const auto moment = [&](int j) { return static_cast<double>(get(d.args.moments, b, h, j)); };
  double ell = moment(0) + moment(1), mean = moment(2) + moment(3), n = moment(4);
  for (int64_t t = 0; t < d.T; ++t) {
    const double s = get(d.args.s, b, t, h), N = n + 1, nu = n / N, top = n > 0 ? fmax(ell, s) : s;
    const double next = n > 0 ? top + log(nu * exp(ell - top) + exp(s - top) / N) : s, next_mean = mean * nu + s / N;
    const double lam = n > 0 ? nu * exp(ell - next) : 0, shift = n > 0 ? mean - next_mean : 0;
    float* to = d.steps + ((b * d.T + t) * d.H + h) * 7;
    const double values[7] = {nu, nu * shift, lam, lam - nu, 1 / N, (s - next_mean) / N, expm1(s - next) / N};
    for (int j = 0; j < 7; ++j) to[j] = static_cast<float>(values[j]);
    ell = next, mean = next_mean, n = N;
  }
  const float ell_high = static_cast<float>(ell), mean_high = static_cast<float>(mean);
  const float to[5] = {ell_high, static_cast<float>(ell - ell_high), mean_high, static_cast<float>(mean - mean_high),
                       static_cast<float>(n)};
  for (int j = 0; j < 5; ++j) put(d.args.moments, to[j], b, h, j);
}
// 32 columns of a head to a block, 8 threads each share the rows.
extern "C" __global__ void __launch_bounds__(256) zeros_decode_states(const __grid_constant__ ZerosDecode d) {
  __shared__ float parts[8][32];
  const int64_t b = blockIdx.x / d.H;
  const int h = static_cast<int>(blockIdx.x % d.H), lane = threadIdx.x % 32, slot = threadIdx.x / 32,
            j = blockIdx.y * 32 + lane;
  for (int64_t t = 0; t < d.T; ++t) {
    const float* x = d.steps + ((b * d.T + t) * d.H + h) * 7;
    const float sh = get(d.args.sh, b, t, h), s1 = get(d.args.s1, b, t, h) - sh, s0 = get_or(0, d.args.s0, b, t, h);
    const float v = j < d.V ? get(d.args.v, b, t, h, j) : 0;
    float sum = 0;
    for (int i = slot; j < d.V && i < d.K; i += 8) {
      const float kv = get(d.args.k, b, t, h, i) * v, q = get(d.args.q, b, t, h, i);
      const float r0 = get(d.args.state, b, h, 0, i, j), r1 = get(d.args.state, b, h, 1, i, j),
                  rp = get(d.args.state, b, h, 2, i, j);
      const float n0 = fmaf(x[0], r0, x[4] * kv), n1 = fmaf(x[0], r1, fmaf(x[1], r0, x[5] * kv));
      const float np = fmaf(x[2], rp, fmaf(x[3], r0, x[6] * kv));
      put(d.args.state, n0, b, h, 0, i, j);
      put(d.args.state, n1, b, h, 1, i, j);
      put(d.args.state, np, b, h, 2, i, j);
      sum = fmaf(q, fmaf(sh, np, fmaf(s1, n1, s0 * n0)), sum);
    }
    parts[slot][lane] = sum;
    __syncthreads();
    if (slot == 0 && j < d.V) {
      for (int i = 1; i < 8; ++i) sum += parts[i][lane];
      put(d.out, sum, b, t, h, j);
    }
    __syncthreads();
  }
}

}  // namespace linnet::cuda
