// H3 on the GPU: the recurrent form of h3.h. The long filter forgets slowly, so its states and factors are doubles.
//
//   h3_shift      a thread has a channel of a sequence: the short filter, kbar
//   h3_diagonal   a block has a head and value slot of a sequence, a thread one or more key slots: 16 tokens of each state at a
//                 time, so that states pass through memory once for them; y is summed over the block in order
//   h3_taps       a thread has a tap of both filters
#include "mechanisms/h3/h3_cuda.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

struct Span {
  int64_t b, begin, length;
};
__device__ __forceinline__ Span span_of(const H3Rows& r, int64_t n) {
  const int64_t T = r.q.size[1];
  if (!is_given(r.cu_seqlens)) return {n, 0, T};
  const int64_t begin = max(int64_t{0}, min(T, get_index(r.cu_seqlens, n * r.cu_seqlens.stride[0])));
  const int64_t end = max(begin, min(T, get_index(r.cu_seqlens, (n + 1) * r.cu_seqlens.stride[0])));
  return {0, begin, end - begin};
}

struct Complex {
  double re, im;
};
__device__ __forceinline__ Complex times(Complex x, Complex y) {
  return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}
__device__ __forceinline__ Complex over(Complex x, Complex y) {
  const double norm = y.re * y.re + y.im * y.im;
  return {(x.re * y.re + x.im * y.im) / norm, (x.im * y.re - x.re * y.im) / norm};
}
struct Pair {
  Complex a, bd, c;
};
__device__ Pair pair_of(const H3Rows& r, int64_t h, int64_t m) {
  const Complex A = {-exp(static_cast<double>(get(r.log_neg_re, h, m))), get(r.imag, h, m)};
  const Complex b = {get(r.b, h, m, 0), get(r.b, h, m, 1)};
  const double dt = exp(static_cast<double>(get(r.log_dt, h)));
  const Complex z = {A.re * dt, A.im * dt};
  Pair p;
  p.c = {get(r.c, h, m, 0), get(r.c, h, m, 1)};
  if (r.disc == H3Disc::bilinear) {
    const Complex below = {1 - 0.5 * z.re, -0.5 * z.im};
    p.a = over({1 + 0.5 * z.re, 0.5 * z.im}, below);
    p.bd = over({dt * b.re, dt * b.im}, below);
  } else {  // e^z - 1 without cancelling
    const double half = sin(z.im / 2);
    const Complex rise = {expm1(z.re) * cos(z.im) - 2 * half * half, exp(z.re) * sin(z.im)};
    p.a = {1 + rise.re, rise.im};
    p.bd = over(times(b, rise), A);
  }
  return p;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128) h3_shift(const __grid_constant__ H3Rows r) {
  const int64_t C = r.q.size[2], R = r.sb.size[1], at = blockIdx.x * 128ll + threadIdx.x, n = at / C, c = at % C;
  if (n >= r.N) return;
  const Span span = span_of(r, n);
  float* const ring = r.ring + at * R;
  for (int64_t i = 0; i < R; ++i) ring[i] = is_given(r.shift_before) ? get(r.shift_before, n, c, i) : 0;
  const float skip = get(r.sd, c);
  int64_t top = 0;  // where element 0 of the token before lies
  for (int64_t t = 0; t < span.length; ++t) {
    const float k = get(r.k, span.b, span.begin + t, c);
    double sum = static_cast<double>(skip) * k;
    top = top == 0 ? R - 1 : top - 1;
    for (int64_t i = 0; i < R; ++i) {
      float& x = ring[top + i < R ? top + i : top + i - R];
      x = fmaf(get(r.sb, c, i), k, i == 0 ? 0 : x);
      sum += static_cast<double>(get(r.sc, c, i)) * x;
    }
    r.kbar[(span.b * r.q.size[1] + span.begin + t) * C + c] = static_cast<float>(sum);
  }
  if (!is_given(r.shift_after)) return;
  for (int64_t i = 0; i < R; ++i) put(r.shift_after, ring[top + i < R ? top + i : top + i - R], n, c, i);
}

extern "C" __global__ void __launch_bounds__(128) h3_diagonal(const __grid_constant__ H3Rows r) {
  __shared__ double sums[4][kH3Tokens];
  const int64_t T = r.q.size[1], C = r.q.size[2], H = r.log_dt.size[0], P = C / H, M = r.imag.size[1];
  const int64_t slot = blockIdx.x % P, h = blockIdx.x / P % H, n = blockIdx.x / P / H;
  const Span span = span_of(r, n);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const double skip = get(r.d, h);
  const auto state = [&](int64_t p, int64_t m) { return r.states + ((((n * H + h) * P + p) * P + slot) * M + m) * 2; };
  for (int64_t p = threadIdx.x; p < P; p += 128) {
    for (int64_t m = 0; m < M; ++m) {
      for (int i = 0; i < 2; ++i) state(p, m)[i] = is_given(r.diag_before) ? get(r.diag_before, n, h, p, slot, m, i) : 0;
    }
  }
  for (int64_t first = 0; first < span.length; first += kH3Tokens) {
    const int count = static_cast<int>(min(int64_t{kH3Tokens}, span.length - first));
    double y[kH3Tokens] = {};
    for (int64_t p = threadIdx.x; p < P; p += 128) {
      const int64_t c = h * P + p;
      double kv[kH3Tokens], s[kH3Tokens];
#pragma unroll
      for (int i = 0; i < kH3Tokens; ++i) {
        const int64_t t = span.begin + first + i;
        kv[i] = i < count ? static_cast<double>(r.kbar[(span.b * T + t) * C + c]) * get(r.v, span.b, t, h * P + slot) : 0;
        s[i] = skip * kv[i];
      }
      for (int64_t m = 0; m < M; ++m) {
        const Pair pair = pair_of(r, h, m);
        Complex X = {state(p, m)[0], state(p, m)[1]};
#pragma unroll
        for (int i = 0; i < kH3Tokens; ++i) {
          if (i >= count) continue;
          X = times(pair.a, X);
          X = {X.re + kv[i] * pair.bd.re, X.im + kv[i] * pair.bd.im};
          s[i] += 2 * (pair.c.re * X.re - pair.c.im * X.im);
        }
        state(p, m)[0] = X.re;
        state(p, m)[1] = X.im;
      }
#pragma unroll
      for (int i = 0; i < kH3Tokens; ++i) {
        if (i < count) y[i] += static_cast<double>(get(r.q, span.b, span.begin + first + i, c)) * s[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kH3Tokens; ++i) {
      for (int step = 1; step < 32; step *= 2) y[i] += __shfl_xor_sync(0xffffffffu, y[i], step);
      if (lane == 0) sums[warp][i] = y[i];
    }
    __syncthreads();
    if (threadIdx.x < count) {
      const double sum = sums[0][threadIdx.x] + sums[1][threadIdx.x] + sums[2][threadIdx.x] + sums[3][threadIdx.x];
      put(r.out, static_cast<float>(sum), span.b, span.begin + first + threadIdx.x, slot * H + h);
    }
    __syncthreads();
  }
  if (!is_given(r.diag_after)) return;
  for (int64_t p = threadIdx.x; p < P; p += 128) {
    for (int64_t m = 0; m < M; ++m) {
      for (int i = 0; i < 2; ++i) put(r.diag_after, static_cast<float>(state(p, m)[i]), n, h, p, slot, m, i);
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) h3_taps(const __grid_constant__ H3Rows r) {
  const int64_t T = r.q.size[1], C = r.q.size[2], H = r.log_dt.size[0], R = r.sb.size[1], M = r.imag.size[1];
  const int64_t at = blockIdx.x * 128ll + threadIdx.x, l = at % T, row = at / T;
  if (row >= C + H) return;
  double sum = 0;
  if (row < C) {
    if (!is_given(r.taps_shift)) return;
    for (int64_t i = 0; i + l < R; ++i) sum += static_cast<double>(get(r.sb, row, i)) * get(r.sc, row, i + l);
    put(r.taps_shift, static_cast<float>(sum), row, l);
    return;
  }
  if (!is_given(r.taps_diag)) return;
  for (int64_t m = 0; m < M; ++m) {
    const Pair p = pair_of(r, row - C, m);
    Complex power = {1, 0}, base = p.a;
    for (int64_t left = l; left > 0; left /= 2) {
      if (left % 2 == 1) power = times(power, base);
      base = times(base, base);
    }
    sum += 2 * times(times(p.c, p.bd), power).re;
  }
  put(r.taps_diag, static_cast<float>(sum), row - C, l);
}

// ---- backward --------------------------------------------------------------------------------------------------------------

namespace {

// An element of a state [N, H, P, P, M, 2].
__device__ __forceinline__ int64_t state_place(const Strided& state, const int64_t (&last)[2], int64_t n, int64_t h, int64_t p,
                                               int64_t slot, int64_t m, int i) {
  return place(state, n, h, p, slot) + m * last[0] + i * last[1];
}
// Half of the gradient of a last state, as a holomorphic one.
__device__ __forceinline__ Complex end_of(const H3Back& g, int64_t n, int64_t h, int64_t p, int64_t slot, int64_t m) {
  if (!is_given(g.ddiag_after)) return {0, 0};
  const auto one = [&](int i) {
    return ptx::load(g.ddiag_after.data, g.ddiag_after.dtype,
                     state_place(g.ddiag_after, g.state_strides[0], n, h, p, slot, m, i));
  };
  return {0.5 * one(0), -0.5 * one(1)};
}
// The sum of `mine` over the block's 128 threads, in one order.
__device__ double over_block(double mine, double* parts) {
  for (int step = 1; step < 32; step *= 2) mine += __shfl_xor_sync(0xffffffffu, mine, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  __syncthreads();
  return parts[0] + parts[1] + parts[2] + parts[3];
}

}  // namespace

// A block has a key slot of a head of a sequence, a thread value slots: dq, and the sums that the long filter's gradients are.
extern "C" __global__ void __launch_bounds__(128) h3_walk(const __grid_constant__ H3Back g) {
  __shared__ double parts[4];
  const H3Rows& r = g.r;
  const int64_t T = r.q.size[1], C = r.q.size[2], H = r.log_dt.size[0], P = C / H, M = r.imag.size[1];
  const int64_t p = blockIdx.x % P, h = blockIdx.x / P % H, n = blockIdx.x / P / H, c = h * P + p;
  const Span span = span_of(r, n);
  const double skip = get(r.d, h);
  const auto memory = [&](int64_t slot, int64_t m) { return g.walk + ((((n * H + h) * P + p) * P + slot) * M + m) * 12; };
  const auto total = [&](int64_t slot) -> double& { return g.skip[((n * H + h) * P + p) * P + slot]; };
  for (int64_t slot = threadIdx.x; slot < P; slot += 128) {
    total(slot) = 0;
    for (int64_t m = 0; m < M; ++m) {
      for (int i = 0; i < 12; ++i) {
        memory(slot, m)[i] = i < 2 && is_given(r.diag_before) ? get(r.diag_before, n, h, p, slot, m, i) : 0;
      }
    }
  }
  for (int64_t first = 0; first < span.length; first += kH3Tokens) {
    const int count = static_cast<int>(min(int64_t{kH3Tokens}, span.length - first));
    double dq[kH3Tokens] = {};
    for (int64_t slot = threadIdx.x; slot < P; slot += 128) {
      double kv[kH3Tokens], ds[kH3Tokens], s[kH3Tokens], dy[kH3Tokens];
#pragma unroll
      for (int i = 0; i < kH3Tokens; ++i) {
        const int64_t t = span.begin + first + i;
        const bool in = i < count;
        kv[i] = in ? static_cast<double>(r.kbar[(span.b * T + t) * C + c]) * get(r.v, span.b, t, h * P + slot) : 0;
        dy[i] = in ? get_or(0, g.dout, span.b, t, slot * H + h) : 0;
        ds[i] = in ? get(r.q, span.b, t, c) * dy[i] : 0;
        s[i] = skip * kv[i];
        total(slot) += kv[i] * ds[i];
      }
      for (int64_t m = 0; m < M; ++m) {
        const Pair pair = pair_of(r, h, m);
        double* const at = memory(slot, m);
        Complex X = {at[0], at[1]}, D = {at[2], at[3]}, E = {at[4], at[5]};
        Complex Fa = {at[6], at[7]}, Fb = {at[8], at[9]}, Fc = {at[10], at[11]};
#pragma unroll
        for (int i = 0; i < kH3Tokens; ++i) {
          if (i >= count) continue;
          D = times(pair.a, D);
          D = {D.re + X.re, D.im + X.im};
          X = times(pair.a, X);
          X = {X.re + kv[i] * pair.bd.re, X.im + kv[i] * pair.bd.im};
          E = times(pair.a, E);
          E.re += kv[i];
          s[i] += 2 * (pair.c.re * X.re - pair.c.im * X.im);
          Fa = {Fa.re + ds[i] * D.re, Fa.im + ds[i] * D.im};
          Fb = {Fb.re + ds[i] * E.re, Fb.im + ds[i] * E.im};
          Fc = {Fc.re + ds[i] * X.re, Fc.im + ds[i] * X.im};
        }
        const double all[12] = {X.re, X.im, D.re, D.im, E.re, E.im, Fa.re, Fa.im, Fb.re, Fb.im, Fc.re, Fc.im};
        for (int i = 0; i < 12; ++i) at[i] = all[i];
      }
#pragma unroll
      for (int i = 0; i < kH3Tokens; ++i) dq[i] += s[i] * dy[i];
    }
#pragma unroll
    for (int i = 0; i < kH3Tokens; ++i) {
      const double sum = over_block(dq[i], parts);
      if (i < count && threadIdx.x == 0 && is_given(g.dq)) {
        put(g.dq, static_cast<float>(sum), span.b, span.begin + first + i, c);
      }
    }
  }
  for (int64_t slot = threadIdx.x; slot < P; slot += 128) {
    for (int64_t m = 0; m < M; ++m) {
      double* const at = memory(slot, m);
      const Complex c_of = pair_of(r, h, m).c, end = end_of(g, n, h, p, slot, m);
      for (int which = 0; which < 2; ++which) {  // F_a, F_bd
        const Complex sum = times(c_of, {at[6 + 2 * which], at[7 + 2 * which]});
        const Complex last = times(end, {at[2 + 2 * which], at[3 + 2 * which]});
        at[6 + 2 * which] = sum.re + last.re;
        at[7 + 2 * which] = sum.im + last.im;
      }
    }
  }
}

// A block has a pair of a head (sums of F), or, behind those, a head (dd).
extern "C" __global__ void __launch_bounds__(128) h3_sums(const __grid_constant__ H3Back g) {
  __shared__ double parts[4];
  const H3Rows& r = g.r;
  const int64_t H = r.log_dt.size[0], P = r.q.size[2] / H, M = r.imag.size[1];
  const bool pairs = blockIdx.x < H * M;
  const int64_t h = pairs ? blockIdx.x / M : blockIdx.x - H * M, m = pairs ? blockIdx.x % M : 0;
  double sum[6] = {};
  for (int64_t i = threadIdx.x; i < r.N * P * P; i += 128) {
    const int64_t at = (i / (P * P) * H + h) * P * P + i % (P * P);
    if (pairs) {
      for (int k = 0; k < 6; ++k) sum[k] += g.walk[(at * M + m) * 12 + 6 + k];
    } else {
      sum[0] += g.skip[at];
    }
  }
  for (int k = 0; k < (pairs ? 6 : 1); ++k) {
    const double all = over_block(sum[k], parts);
    if (threadIdx.x == 0) g.sums[pairs ? (h * M + m) * 6 + k : H * M * 6 + h] = all;
  }
}

// A thread has a head: gradients of the long filter's parameters (h3_ssm.h has the formulas).
extern "C" __global__ void __launch_bounds__(128) h3_parameters(const __grid_constant__ H3Back g) {
  const H3Rows& r = g.r;
  const int64_t H = r.log_dt.size[0], M = r.imag.size[1], h = blockIdx.x * 128ll + threadIdx.x;
  if (h >= H) return;
  const double dt = exp(static_cast<double>(get(r.log_dt, h)));
  double dlog_dt = 0;
  for (int64_t m = 0; m < M; ++m) {
    const double* const F = g.sums + (h * M + m) * 6;
    const Complex F_a = {F[0], F[1]}, F_bd = {F[2], F[3]}, F_c = {F[4], F[5]};
    const Complex A = {-exp(static_cast<double>(get(r.log_neg_re, h, m))), get(r.imag, h, m)};
    const Complex b = {get(r.b, h, m, 0), get(r.b, h, m, 1)}, z = {A.re * dt, A.im * dt};
    const auto sum = [](Complex x, Complex y) { return Complex{x.re + y.re, x.im + y.im}; };
    const auto scaled = [](double s, Complex x) { return Complex{s * x.re, s * x.im}; };
    Complex F_A, F_b, F_dt;
    if (r.disc == H3Disc::bilinear) {
      const Complex below = {1 - 0.5 * z.re, -0.5 * z.im}, da = over({1, 0}, times(below, below));
      const Complex dbd = scaled(0.5 * dt, times(b, da));
      F_A = scaled(dt, sum(times(F_a, da), times(F_bd, dbd)));
      F_b = times(F_bd, over({dt, 0}, below));
      F_dt = sum(times(F_a, times(A, da)), times(F_bd, sum(times(A, dbd), over(b, below))));
    } else {
      const double half = sin(z.im / 2);
      const Complex rise = {expm1(z.re) * cos(z.im) - 2 * half * half, exp(z.re) * sin(z.im)}, a = {1 + rise.re, rise.im};
      const Complex inner = sum(scaled(dt, times(a, A)), scaled(-1, rise));
      F_A = sum(scaled(dt, times(F_a, a)), times(F_bd, over(times(b, inner), times(A, A))));
      F_b = times(F_bd, over(rise, A));
      F_dt = sum(times(F_a, times(A, a)), times(F_bd, times(b, a)));
    }
    dlog_dt += 2 * dt * F_dt.re;
    if (is_given(g.dlog_neg_re)) put(g.dlog_neg_re, static_cast<float>(A.re * 2 * F_A.re), h, m);
    if (is_given(g.dimag)) put(g.dimag, static_cast<float>(-2 * F_A.im), h, m);
    if (is_given(g.db)) {
      put(g.db, static_cast<float>(2 * F_b.re), h, m, 0);
      put(g.db, static_cast<float>(-2 * F_b.im), h, m, 1);
    }
    if (is_given(g.dc)) {
      put(g.dc, static_cast<float>(2 * F_c.re), h, m, 0);
      put(g.dc, static_cast<float>(-2 * F_c.im), h, m, 1);
    }
  }
  if (is_given(g.dlog_dt)) put(g.dlog_dt, static_cast<float>(dlog_dt), h);
  if (is_given(g.dd)) put(g.dd, static_cast<float>(g.sums[H * M * 6 + h]), h);
}

// The walk back. by_value: a block has a value slot and sums over key slots, dv; else the other way, dkbar and the first
// state's gradient.
extern "C" __global__ void __launch_bounds__(128) h3_walk_back(const __grid_constant__ H3Back g, bool by_value) {
  __shared__ double parts[4];
  const H3Rows& r = g.r;
  const int64_t T = r.q.size[1], C = r.q.size[2], H = r.log_dt.size[0], P = C / H, M = r.imag.size[1];
  const int64_t fixed = blockIdx.x % P, h = blockIdx.x / P % H, n = blockIdx.x / P / H;
  const Span span = span_of(r, n);
  const double skip = get(r.d, h);
  const auto memory = [&](int64_t p, int64_t slot, int64_t m) {
    return g.walk + ((((n * H + h) * P + p) * P + slot) * M + m) * 12;
  };
  for (int64_t other = threadIdx.x; other < P; other += 128) {
    const int64_t p = by_value ? other : fixed, slot = by_value ? fixed : other;
    for (int64_t m = 0; m < M; ++m) {
      const Complex end = end_of(g, n, h, p, slot, m);
      memory(p, slot, m)[0] = end.re;
      memory(p, slot, m)[1] = end.im;
    }
  }
  for (int64_t last = span.length; last > 0; last -= kH3Tokens) {
    const int count = static_cast<int>(min(int64_t{kH3Tokens}, last));
    double result[kH3Tokens] = {};  // of token last - 1 - i
    for (int64_t other = threadIdx.x; other < P; other += 128) {
      const int64_t p = by_value ? other : fixed, slot = by_value ? fixed : other;
      double ds[kH3Tokens], dkv[kH3Tokens];
#pragma unroll
      for (int i = 0; i < kH3Tokens; ++i) {
        const int64_t t = span.begin + last - 1 - i;
        ds[i] =
            i < count ? static_cast<double>(get(r.q, span.b, t, h * P + p)) * get_or(0, g.dout, span.b, t, slot * H + h) : 0;
        dkv[i] = skip * ds[i];
      }
      for (int64_t m = 0; m < M; ++m) {
        const Pair pair = pair_of(r, h, m);
        double* const at = memory(p, slot, m);
        Complex Y = {at[0], at[1]};
#pragma unroll
        for (int i = 0; i < kH3Tokens; ++i) {
          if (i >= count) continue;
          Y = {Y.re + ds[i] * pair.c.re, Y.im + ds[i] * pair.c.im};
          dkv[i] += 2 * (pair.bd.re * Y.re - pair.bd.im * Y.im);
          Y = times(pair.a, Y);
        }
        at[0] = Y.re;
        at[1] = Y.im;
      }
#pragma unroll
      for (int i = 0; i < kH3Tokens; ++i) {
        const int64_t t = span.begin + last - 1 - i;
        if (i >= count) continue;
        const double factor = by_value ? r.kbar[(span.b * T + t) * C + h * P + p] : get(r.v, span.b, t, h * P + slot);
        result[i] += dkv[i] * factor;
      }
    }
#pragma unroll
    for (int i = 0; i < kH3Tokens; ++i) {
      const double sum = over_block(result[i], parts);
      if (i >= count || threadIdx.x != 0) continue;
      const int64_t t = span.begin + last - 1 - i;
      if (!by_value) {
        g.dkbar[(span.b * T + t) * C + h * P + fixed] = sum;
      } else if (is_given(g.dv)) {
        put(g.dv, static_cast<float>(sum), span.b, t, h * P + fixed);
      }
    }
  }
  if (by_value || !is_given(g.ddiag_before)) return;
  for (int64_t slot = threadIdx.x; slot < P; slot += 128) {
    for (int64_t m = 0; m < M; ++m) {
      const double* const at = memory(fixed, slot, m);
      for (int i = 0; i < 2; ++i) {
        ptx::store(g.ddiag_before.data, g.ddiag_before.dtype,
                   state_place(g.ddiag_before, g.state_strides[1], n, h, fixed, slot, m, i),
                   static_cast<float>(i == 0 ? 2 * at[0] : -2 * at[1]));
      }
    }
  }
}

// A thread has a channel of a sequence: forward for dsc and dsd, back for dk and dsb.
extern "C" __global__ void __launch_bounds__(128) h3_shift_back(const __grid_constant__ H3Back g) {
  const H3Rows& r = g.r;
  const int64_t T = r.q.size[1], C = r.q.size[2], R = r.sb.size[1], at = blockIdx.x * 128ll + threadIdx.x, n = at / C,
                c = at % C;
  if (n >= r.N) return;
  const Span span = span_of(r, n);
  float *const ring = r.ring + at * R, *const dsb = g.dsb + at * R, *const dsc = g.dsc + at * R;
  double* const G = g.shifts + at * R;
  for (int64_t i = 0; i < R; ++i) {
    ring[i] = is_given(r.shift_before) ? get(r.shift_before, n, c, i) : 0;
    G[i] = 0;
  }
  const auto dkbar = [&](int64_t t) { return g.dkbar[(span.b * T + span.begin + t) * C + c]; };
  int64_t top = 0;
  double dsd = 0;
  for (int64_t t = 0; t < span.length; ++t) {  // G holds dsc
    const float k = get(r.k, span.b, span.begin + t, c);
    top = top == 0 ? R - 1 : top - 1;
    dsd += k * dkbar(t);
    for (int64_t i = 0; i < R; ++i) {
      float& x = ring[top + i < R ? top + i : top + i - R];
      x = fmaf(get(r.sb, c, i), k, i == 0 ? 0 : x);
      G[i] += x * dkbar(t);
    }
  }
  g.dsd[at] = static_cast<float>(dsd);
  for (int64_t i = 0; i < R; ++i) {
    dsc[i] = static_cast<float>(G[i]);
    G[i] = is_given(g.dshift_after) ? get(g.dshift_after, n, c, i) : 0;
    ring[i] = 0;
  }
  for (int64_t t = span.length - 1; t >= 0; --t) {  // dsb in f32 with what it lost beside it, in the ring
    const float k = get(r.k, span.b, span.begin + t, c);
    double dk = get(r.sd, c) * dkbar(t);
    for (int64_t i = 0; i < R; ++i) {
      G[i] += get(r.sc, c, i) * dkbar(t);
      dk += get(r.sb, c, i) * G[i];
      const double sum = (t == span.length - 1 ? 0.0 : static_cast<double>(dsb[i]) + ring[i]) + G[i] * k;
      dsb[i] = static_cast<float>(sum);
      ring[i] = static_cast<float>(sum - dsb[i]);
    }
    if (is_given(g.dk)) put(g.dk, static_cast<float>(dk), span.b, span.begin + t, c);
    for (int64_t i = 0; i < R; ++i) G[i] = i + 1 < R ? G[i + 1] : 0;
  }
  for (int64_t i = 0; i < R; ++i) {
    if (span.length == 0) dsb[i] = 0;
    if (is_given(g.dshift_before)) put(g.dshift_before, static_cast<float>(G[i]), n, c, i);
  }
}

}  // namespace linnet::cuda
