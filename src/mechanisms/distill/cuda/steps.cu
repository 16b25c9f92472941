// Attention with learned features on the GPU, from a state: a block has a head of a batch row and walks its tokens, one or a
// whole prompt. Sums are doubles, the state is f32. What the heads of a batch row share is written by kernels of its own.
#include "mechanisms/distill/cuda/hedgehog.cuh"
#include "mechanisms/distill/cuda/steps.h"

namespace linnet::cuda {
namespace {

__device__ __forceinline__ void copy_row(const View& from, int64_t b, int64_t t, const View& to, int64_t row, int64_t h) {
  for (int64_t c = threadIdx.x; c < from.size[3]; c += kThreads) put(to, get(from, b, t, h, c), b, row, h, c);
}
__device__ __forceinline__ void put_index(const View& to, int64_t at, int64_t value) {
  if (to.dtype == Dtype::i64) {
    static_cast<int64_t*>(to.data)[at] = value;
  } else {
    static_cast<int32_t*>(to.data)[at] = static_cast<int32_t>(value);
  }
}
__device__ __forceinline__ int64_t rows_in(const View& held, int64_t b, int64_t most) {
  return max(int64_t{0}, min(most, get_index(held, place(held, b))));
}
// The older half of a buffer of 2 window rows makes room.
__device__ void move_up(const View& near, int64_t b, int64_t h, int64_t window) {
  const int64_t width = near.size[3];
  for (int64_t i = threadIdx.x; i < window * width; i += kThreads) {
    put(near, get(near, b, window + i / width, h, i % width), b, i / width, h, i % width);
  }
}
__device__ double dot(const View& x, int64_t b, int64_t t, const View& y, int64_t row, int64_t h) {
  double sum = 0;
  for (int64_t c = 0; c < x.size[3]; ++c) sum += static_cast<double>(get(x, b, t, h, c)) * get(y, b, row, h, c);
  return sum;
}
// K^-1/4 z_m.x + (1/2) log(alpha_m / M), times `factor` where it is x.
__device__ double projection(const View& x, const View& z, const View& alpha, int64_t b, int64_t t, int64_t h, int64_t m,
                             double factor) {
  double sum = 0;
  for (int64_t c = 0; c < x.size[3]; ++c) sum += static_cast<double>(get(z, h, m, c)) * get(x, b, t, h, c);
  return factor * sum / sqrt(sqrt(static_cast<double>(x.size[3]))) +
         0.5 * log(get(alpha, h, m) / static_cast<double>(z.size[1]));
}
__device__ double half_square(const View& x, int64_t b, int64_t t, int64_t h) {
  double sum = 0;
  for (int64_t c = 0; c < x.size[3]; ++c) sum += static_cast<double>(get(x, b, t, h, c)) * get(x, b, t, h, c);
  return sum / (2 * sqrt(static_cast<double>(x.size[3])));
}

struct Scratch {
  double *a, *f, *old, *own;
  __device__ Scratch(const DistillScratch& s, int64_t unit)
      : a(s.a + unit * s.keys), f(s.f + unit * s.width), old(s.old + unit * s.width), own(s.own + unit * s.width) {}
};

// Sums of features take a key with the logarithms l(m) in, in units of exp(c).
template <class L>
__device__ void absorb(const Scratch& x, const View& state, const View& n, const View& c, const View& v, int64_t b, int64_t row,
                       int64_t h, int64_t M, const L& l) {
  for (int64_t m = threadIdx.x; m < M; m += kThreads) {
    const double before = get(c, b, h, m), key = l(m), top = key > before || isnan(key) ? key : before;
    const bool none = top == -INFINITY;
    x.old[m] = none ? 1 : exp(before - top);
    x.own[m] = none ? 0 : exp(key - top);
    put(c, static_cast<float>(top), b, h, m);
    // The state's units are those that c holds.
    const double rounded = none ? 1 : exp(top - static_cast<double>(static_cast<float>(top)));
    x.old[m] *= rounded;
    x.own[m] *= rounded;
    put(n, static_cast<float>(x.old[m] * get(n, b, h, m) + x.own[m]), b, h, m);
  }
  __syncthreads();
  const int64_t V = v.size[3];
  for (int64_t i = threadIdx.x; i < M * V; i += kThreads) {
    const int64_t m = i / V, e = i % V;
    if (x.own[m] == 0 && x.old[m] == 1) continue;
    const double add = x.own[m] == 0 ? 0 : x.own[m] * get(v, b, row, h, e);
    put(state, static_cast<float>(x.old[m] * get(state, b, h, m, e) + add), b, h, m, e);
  }
  __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) distill_step(const __grid_constant__ DistillStep s) {
  const DistillDecodeArgs& args = s.args;
  const int64_t T = args.q.size[1], H = args.q.size[2], V = args.v.size[3], M = args.z.size[1];
  const int64_t b = blockIdx.x / H, h = blockIdx.x % H;
  const Scratch x(s.scratch, blockIdx.x);
  for (int64_t t = 0; t < T; ++t) {
    const double extra = get_or(0, args.key_logw, b, t, h) - half_square(args.k, b, t, h);
    absorb(x, args.state, args.n, args.c, args.v, b, t, h, M,
           [&](int64_t m) { return projection(args.k, args.z, args.alpha, b, t, h, m, 1) + extra; });
    for (int64_t m = threadIdx.x; m < M; m += kThreads) {
      x.f[m] = projection(args.q, args.z, args.alpha, b, t, h, m, s.factor) + get(args.c, b, h, m);
    }
    __syncthreads();
    const double top = largest(x.f, M, -INFINITY);
    __syncthreads();
    exponentials(x.f, M, top);
    __syncthreads();
    double den = 0;
    for (int64_t m = 0; m < M; ++m) den += x.f[m] == 0 ? 0 : x.f[m] * get(args.n, b, h, m);
    for (int64_t e = threadIdx.x; e < V; e += kThreads) {
      double sum = 0;
      for (int64_t m = 0; m < M; ++m) sum += x.f[m] == 0 ? 0 : x.f[m] * get(args.state, b, h, m, e);
      put(s.out, den == 0 ? 0 : static_cast<float>(sum / den), b, t, h, e);
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) distill_window_step(const __grid_constant__ DistillWindowStep s) {
  const DistillWindowDecodeArgs& args = s.args;
  const int64_t T = args.q.size[1], H = args.q.size[2], K = args.q.size[3], V = args.v.size[3], F = args.wq.size[2];
  const int64_t b = blockIdx.x / H, h = blockIdx.x % H, window = args.window;
  const bool terraced = args.form == DistillForm::terraced;
  const double eta = K == 0 ? 1 : 1 / sqrt(static_cast<double>(K)),
               g = 1 / (1 + exp(-static_cast<double>(get(args.window_factor, h))));
  const Scratch x(s.scratch, blockIdx.x);
  const auto begin_of = [&](int64_t i) { return distill_window_begin(terraced, window, i); };
  const auto take_in = [&](int64_t row) {
    hedgehog(args.k_near, args.wk, b, row, h, x.f);
    for (int64_t i = threadIdx.x; i < 2 * F * (V + 1); i += kThreads) {
      const int64_t f = i / (V + 1), e = i % (V + 1);
      if (e == V) {
        put(args.n, static_cast<float>(get(args.n, b, h, f) + x.f[f]), b, h, f);
      } else {
        put(args.state, static_cast<float>(get(args.state, b, h, f, e) + x.f[f] * get(args.v_near, b, row, h, e)), b, h, f, e);
      }
    }
    __syncthreads();
  };
  int64_t held = rows_in(args.held, b, 2 * window), absorbed = held > 0 ? begin_of(held - 1) : 0;
  for (int64_t t = 0; t < T; ++t) {
    if (held == 2 * window) {
      for (; absorbed < window; ++absorbed) take_in(absorbed);
      move_up(args.k_near, b, h, window);
      move_up(args.v_near, b, h, window);
      __syncthreads();
      held = window;
      absorbed = 0;
    }
    copy_row(args.k, b, t, args.k_near, held, h);
    copy_row(args.v, b, t, args.v_near, held, h);
    __syncthreads();
    const int64_t begin = begin_of(held), near = held - begin + 1;
    for (; absorbed < begin; ++absorbed) take_in(absorbed);
    for (int64_t j = threadIdx.x; j < near; j += kThreads) x.a[j] = eta * dot(args.q, b, t, args.k_near, begin + j, h);
    hedgehog(args.q, args.wq, b, t, h, x.f);  // its barriers show the scores too
    const double top = largest(x.a, near, -INFINITY);
    __syncthreads();
    exponentials(x.a, near, top);
    __syncthreads();
    double sum = 0;
    for (int64_t j = 0; j < near; ++j) sum += g * x.a[j];
    for (int64_t f = 0; f < 2 * F; ++f) sum += x.f[f] * get(args.n, b, h, f);
    for (int64_t e = threadIdx.x; e < V; e += kThreads) {
      double total = 0;
      for (int64_t j = 0; j < near; ++j) total += g * x.a[j] * get(args.v_near, b, begin + j, h, e);
      for (int64_t f = 0; f < 2 * F; ++f) total += x.f[f] * get(args.state, b, h, f, e);
      put(s.out, sum == 0 ? 0 : static_cast<float>(total / sum), b, t, h, e);
    }
    __syncthreads();
    ++held;
  }
}
// A thread has a batch row.
extern "C" __global__ void __launch_bounds__(32) distill_window_rows(const __grid_constant__ DistillWindowStep s) {
  const int64_t b = blockIdx.x * 32ll + threadIdx.x, window = s.args.window;
  if (b >= s.args.q.size[0]) return;
  const int64_t rows = rows_in(s.args.held, b, 2 * window) + s.args.q.size[1];
  put_index(s.args.held, place(s.args.held, b), rows <= 2 * window ? rows : window + 1 + (rows - 1) % window);
}

extern "C" __global__ void __launch_bounds__(kThreads) distill_hybrid_step(const __grid_constant__ DistillHybridStep s) {
  const DistillHybridDecodeArgs& args = s.args;
  const int64_t T = args.q.size[1], H = args.q.size[2], K = args.q.size[3], V = args.v.size[3], M = args.z.size[1];
  const int64_t b = blockIdx.x / H, h = blockIdx.x % H, window = args.window;
  const double eta = 1 / sqrt(static_cast<double>(K));
  const Scratch x(s.scratch, blockIdx.x);
  int64_t first = rows_in(args.first, b, args.sinks), held = rows_in(args.held, b, 2 * window);
  for (int64_t t = 0; t < T; ++t) {
    if (first < args.sinks) {
      copy_row(args.k, b, t, args.k_first, first, h);
      copy_row(args.v, b, t, args.v_first, first, h);
      ++first;
      __syncthreads();
    } else {
      if (held == 2 * window) {
        move_up(args.k_near, b, h, window);
        move_up(args.v_near, b, h, window);
        move_up(args.l_near, b, h, window);
        __syncthreads();
        held = window;
      }
      copy_row(args.k, b, t, args.k_near, held, h);
      copy_row(args.v, b, t, args.v_near, held, h);
      const double extra = get(args.key_logw, b, t, h) - half_square(args.k_balanced, b, t, h);
      for (int64_t m = threadIdx.x; m < M; m += kThreads) {
        put(args.l_near, static_cast<float>(projection(args.k_balanced, args.z, args.alpha, b, t, h, m, 1) + extra), b, held, h,
            m);
      }
      __syncthreads();
      const int64_t row = ++held - window - 1;
      if (row >= 0) {
        absorb(x, args.state, args.n, args.c, args.v_near, b, row, h, M,
               [&](int64_t m) { return static_cast<double>(get(args.l_near, b, row, h, m)); });
      }
    }
    const int64_t begin = max(int64_t{0}, held - window), near = first + held - begin;
    for (int64_t j = threadIdx.x; j < near; j += kThreads) {
      x.a[j] = eta * (j < first ? dot(args.q, b, t, args.k_first, j, h) : dot(args.q, b, t, args.k_near, begin + j - first, h));
    }
    const double extra = get(args.query_logw, b, t, h) - half_square(args.q_balanced, b, t, h);
    for (int64_t m = threadIdx.x; m < M; m += kThreads) {
      x.f[m] = projection(args.q_balanced, args.z, args.alpha, b, t, h, m, 1) + extra + get(args.c, b, h, m);
    }
    __syncthreads();
    const double top = largest(x.f, M, largest(x.a, near, -INFINITY));
    __syncthreads();
    exponentials(x.a, near, top);
    exponentials(x.f, M, top);
    __syncthreads();
    double total = 0;
    for (int64_t j = 0; j < near; ++j) total += x.a[j];
    for (int64_t m = 0; m < M; ++m) total += x.f[m] == 0 ? 0 : x.f[m] * get(args.n, b, h, m);
    for (int64_t e = threadIdx.x; e < V; e += kThreads) {
      double sum = 0;
      for (int64_t j = 0; j < near; ++j) {
        if (x.a[j] != 0) {
          sum += x.a[j] * (j < first ? get(args.v_first, b, j, h, e) : get(args.v_near, b, begin + j - first, h, e));
        }
      }
      for (int64_t m = 0; m < M; ++m) sum += x.f[m] == 0 ? 0 : x.f[m] * get(args.state, b, h, m, e);
      put(s.out, total == 0 ? 0 : static_cast<float>(sum / total), b, t, h, e);
    }
    __syncthreads();
  }
}
extern "C" __global__ void __launch_bounds__(32) distill_hybrid_rows(const __grid_constant__ DistillHybridStep s) {
  const DistillHybridDecodeArgs& args = s.args;
  const int64_t b = blockIdx.x * 32ll + threadIdx.x, window = args.window, T = args.q.size[1];
  if (b >= args.q.size[0]) return;
  const int64_t first = rows_in(args.first, b, args.sinks), held = rows_in(args.held, b, 2 * window);
  const int64_t sinks = min(T, args.sinks - first), rows = held + T - sinks;
  put_index(args.first, place(args.first, b), first + sinks);
  put_index(args.held, place(args.held, b), rows <= 2 * window ? rows : window + 1 + (rows - 1) % window);
}

// A state before its first token: zeros, and -inf for the maxima.
extern "C" __global__ void __launch_bounds__(256) distill_clear(float* zeros, int64_t count, float* maxima, int64_t heads) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i < count) zeros[i] = 0;
  if (i < heads) maxima[i] = -INFINITY;
}

}  // namespace linnet::cuda
