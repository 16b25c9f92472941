// distill on the GPU, in double whatever the type: exponentials magnify the rounding of log features, and the gradients of z
// and alpha are sums that nearly cancel. A block has one row of one head. Keys of earlier chunks (all keys, where it is not
// causal) stand in sums by features (sums.h), those of its own chunk are weighed one by one. What queries give the keys is the
// same backward in time, with lq - log den for logarithms and dout for values.
#include "mechanisms/distill/cuda/features.h"
#include "mechanisms/distill/cuda/rows.cuh"

namespace linnet::cuda {
namespace {

struct Row {
  int64_t row, b, t, h;
  int64_t chunk;        // of the states
  int64_t first, last;  // tokens [first, last) are weighed one by one
  __device__ Row(const DistillSums& s, bool causal, bool keys) : row(blockIdx.x) {
    h = row % s.H, t = row / s.H % s.T, b = row / s.H / s.T;
    chunk = causal ? t / kDistillChunk : distill_chunks(s.T);
    first = keys ? t : chunk * kDistillChunk;
    last = keys ? min(s.T, (chunk + 1) * kDistillChunk) : t + 1;
    if (!causal) first = last = 0;
  }
  __device__ int count() const { return static_cast<int>(last - first); }
  __device__ int64_t near(const DistillSums& s, int64_t i) const { return (b * s.T + first + i) * s.H + h; }
  __device__ int64_t state(const DistillSums& s) const { return (b * s.H + h) * (distill_chunks(s.T) + 1) + chunk; }
};

__device__ bool is_masked(const View& mask, int64_t b, int64_t t) {
  return is_given(mask) && static_cast<const uint8_t*>(mask.data)[place(mask, b, t)] == 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) distill_logs(const __grid_constant__ DistillRows r) {
  const DistillArgs& args = r.args;
  const int64_t M = r.keys.M, W = r.keys.W, K = args.q.size[3];
  const Row at(r.keys, args.causal, false);
  const bool masked = is_masked(args.key_mask, at.b, at.t);
  const double root = sqrt(sqrt(static_cast<double>(K)));
  double square = 0;
  for (int64_t c = 0; c < K; ++c) {
    const double k = get(args.k, at.b, at.t, at.h, c);
    square += k * k;
  }
  const double extra = get_or(0, args.key_logw, at.b, at.t, at.h) - square / (2 * root * root);
  for (int64_t m = threadIdx.x; m < M; m += kThreads) {
    double q = 0, k = 0;
    for (int64_t c = 0; c < K; ++c) {
      const double z = get(args.z, at.h, m, c);
      q += z * get(args.q, at.b, at.t, at.h, c);
      k += z * get(args.k, at.b, at.t, at.h, c);
    }
    const double bias = 0.5 * log(get(args.alpha, at.h, m) / static_cast<double>(M));
    r.lq[at.row * M + m] = r.factor * q / root + bias;
    r.lk[at.row * M + m] = masked ? -INFINITY : k / root + bias + extra;
  }
  for (int64_t e = threadIdx.x; e < W; e += kThreads) {
    r.w[at.row * W + e] = masked ? 0 : e == W - 1 ? 1 : get(args.v, at.b, at.t, at.h, e);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    distill_read(const __grid_constant__ DistillRows r, const __grid_constant__ View out) {
  __shared__ double parts[kThreads], a[kDistillChunk];
  const int64_t M = r.keys.M, W = r.keys.W;
  const Row at(r.keys, r.args.causal, false);
  const double *lq = r.lq + at.row * M, *tops = r.keys.tops + at.state(r.keys) * M;
  const double* S = r.keys.states + at.state(r.keys) * M * W;
  double *x = r.x + at.row * M, *o = r.o + at.row * W;
  double peak = -INFINITY;
  for (int64_t m = threadIdx.x; m < M; m += kThreads) {
    double top = tops[m];
    for (int j = 0; j < at.count(); ++j) top = larger(top, r.lk[at.near(r.keys, j) * M + m]);
    peak = larger(peak, lq[m] + top);
  }
  peak = block_largest(peak, parts);
  for (int64_t m = threadIdx.x; m < M; m += kThreads) x[m] = exp_below(lq[m] + tops[m], peak);
  for (int j = threadIdx.x; j < at.count(); j += kThreads) {
    const double* lk = r.lk + at.near(r.keys, j) * M;
    a[j] = 0;
    for (int64_t m = 0; m < M; ++m) a[j] += exp_below(lq[m] + lk[m], peak);
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < W; e += kThreads) {
    double sum = 0;
    for (int64_t m = 0; m < M; ++m) sum += x[m] * S[m * W + e];
    for (int j = 0; j < at.count(); ++j) sum += a[j] * r.w[at.near(r.keys, j) * W + e];
    o[e] = sum;
  }
  __syncthreads();
  const double den = o[W - 1];
  for (int64_t e = threadIdx.x; e < W - 1; e += kThreads) {
    o[e] = den == 0 ? 0 : o[e] / den;
    if (is_given(out)) put(out, static_cast<float>(o[e]), at.b, at.t, at.h, e);
  }
  if (threadIdx.x == 0) r.logden[at.row] = den == 0 ? -INFINITY : peak + log(den);
}

// dout as the values of sums over queries, and their logarithms.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_given(const __grid_constant__ DistillRows r, const __grid_constant__ DistillRowGrads g,
                  const __grid_constant__ View dout) {
  const int64_t M = r.keys.M, W = r.keys.W;
  const Row at(r.keys, r.args.causal, false);
  const double logden = r.logden[at.row];
  for (int64_t m = threadIdx.x; m < M; m += kThreads) {
    g.l[at.row * M + m] = logden == -INFINITY ? -INFINITY : r.lq[at.row * M + m] - logden;
  }
  for (int64_t e = threadIdx.x; e < W; e += kThreads) {
    double x = 0;
    if (e < W - 1) {
      x = get_or(0, dout, at.b, at.t, at.h, e);
    } else {
      for (int64_t v = 0; v < W - 1; ++v) x += get_or(0, dout, at.b, at.t, at.h, v) * r.o[at.row * W + v];
    }
    g.w[at.row * W + e] = x;
  }
}

// dlq_m = exp(lq_m - log den) sum_j exp(lk_jm) (dout.v_j - dout.out), and dq.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_query_grads(const __grid_constant__ DistillRows r, const __grid_constant__ DistillRowGrads g,
                        const __grid_constant__ View dq) {
  __shared__ double e[kDistillChunk];
  const int64_t M = r.keys.M, W = r.keys.W, V = W - 1, K = r.args.q.size[3];
  const Row at(r.keys, r.args.causal, false);
  const double *l = g.l + at.row * M, *given = g.w + at.row * W, *tops = r.keys.tops + at.state(r.keys) * M;
  const double* S = r.keys.states + at.state(r.keys) * M * W;
  double* dlq = g.dlq + at.row * M;
  int64_t features = 0;  // with one alone every key has the same share for all queries
  for (int64_t m = 0; m < M; ++m) features += get(r.args.alpha, at.h, m) > 0 ? 1 : 0;
  for (int j = threadIdx.x; j < at.count(); j += kThreads) {
    const double* w = r.w + at.near(r.keys, j) * W;
    e[j] = -given[V];
    for (int64_t v = 0; v < V; ++v) e[j] += given[v] * w[v];
  }
  __syncthreads();
  for (int64_t m = threadIdx.x; m < M; m += kThreads) {
    double sum = -given[V] * S[m * W + V];
    for (int64_t v = 0; v < V; ++v) sum += given[v] * S[m * W + v];
    sum *= exp(l[m] + tops[m]);
    for (int j = 0; j < at.count(); ++j) {
      const double lk = r.lk[at.near(r.keys, j) * M + m];
      if (lk != -INFINITY) sum += exp(l[m] + lk) * e[j];
    }
    dlq[m] = features <= 1 ? 0 : sum;
  }
  __syncthreads();
  const double factor = r.factor / sqrt(sqrt(static_cast<double>(K)));
  for (int64_t c = threadIdx.x; is_given(dq) && c < K; c += kThreads) {
    double sum = 0;
    for (int64_t m = 0; m < M; ++m) sum += dlq[m] * get(r.args.z, at.h, m, c);
    put(dq, static_cast<float>(factor * sum), at.b, at.t, at.h, c);
  }
}

// dlk_m = exp(lk_m) sum_i exp(lq_im - log den_i) (dout_i.v - dout_i.out_i), dv, and from dlk the rest.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_key_grads(const __grid_constant__ DistillRows r, const __grid_constant__ DistillRowGrads g,
                      const __grid_constant__ View dk, const __grid_constant__ View dv,
                      const __grid_constant__ View dkey_logw) {
  __shared__ double parts[kThreads], e[kDistillChunk], a[kDistillChunk];
  const int64_t M = r.keys.M, W = r.keys.W, V = W - 1, K = r.args.q.size[3];
  const Row at(r.keys, r.args.causal, true);
  const bool masked = is_masked(r.args.key_mask, at.b, at.t);
  const double *lk = r.lk + at.row * M, *w = r.w + at.row * W, *tops = g.queries.tops + at.state(g.queries) * M;
  const double* R = g.queries.states + at.state(g.queries) * M * W;
  double *x = r.x + at.row * M, *dlk = g.dlk + at.row * M;
  for (int i = threadIdx.x; i < at.count(); i += kThreads) {
    const int64_t row = at.near(g.queries, i);
    e[i] = -g.w[row * W + V];
    a[i] = 0;
    for (int64_t v = 0; v < V; ++v) e[i] += g.w[row * W + v] * w[v];
    for (int64_t m = 0; m < M; ++m) a[i] += exp(lk[m] + g.l[row * M + m]);
  }
  __syncthreads();
  double total = 0;
  for (int64_t m = threadIdx.x; m < M; m += kThreads) {
    double sum = -R[m * W + V];
    for (int64_t v = 0; v < V; ++v) sum += R[m * W + v] * w[v];
    x[m] = exp(lk[m] + tops[m]);
    sum *= x[m];
    for (int i = 0; i < at.count(); ++i) sum += exp(lk[m] + g.l[at.near(g.queries, i) * M + m]) * e[i];
    dlk[m] = masked ? 0 : sum;
    total += dlk[m];
  }
  total = block_sum(total, parts);
  for (int64_t v = threadIdx.x; is_given(dv) && v < V; v += kThreads) {
    double sum = 0;
    for (int64_t m = 0; m < M; ++m) sum += x[m] * R[m * W + v];
    for (int i = 0; i < at.count(); ++i) sum += a[i] * g.w[at.near(g.queries, i) * W + v];
    put(dv, masked ? 0 : static_cast<float>(sum), at.b, at.t, at.h, v);
  }
  if (is_given(dkey_logw) && threadIdx.x == 0) put(dkey_logw, static_cast<float>(total), at.b, at.t, at.h);
  const double root = sqrt(sqrt(static_cast<double>(K)));
  for (int64_t c = threadIdx.x; is_given(dk) && c < K; c += kThreads) {
    double sum = 0;
    for (int64_t m = 0; m < M; ++m) sum += dlk[m] * get(r.args.z, at.h, m, c);
    const double k = masked ? 0 : get(r.args.k, at.b, at.t, at.h, c);
    put(dk, static_cast<float>(sum / root - total * k / (root * root)), at.b, at.t, at.h, c);
  }
}

// dz, and, as column K, dalpha: a block has 32 columns of one feature, its 8 warps take turns at the tokens.
extern "C" __global__ void __launch_bounds__(256)
    distill_features_sum(const __grid_constant__ DistillRows r, const double* dlq, const double* dlk,
                         const __grid_constant__ View dz, const __grid_constant__ View dalpha) {
  __shared__ double sums[8][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t M = r.keys.M, T = r.keys.T, H = r.keys.H, K = r.args.q.size[3], tiles = (K + 32) / 32;
  const int64_t c = blockIdx.x % tiles * 32 + lane, m = blockIdx.x / tiles % M, h = blockIdx.x / tiles / M;
  double sum = 0;
  for (int64_t i = warp; c <= K && i < r.keys.B * T; i += 8) {
    const int64_t b = i / T, t = i % T;
    const double q = dlq[(i * H + h) * M + m], k = dlk[(i * H + h) * M + m];
    if (c == K) {
      sum += q + k;
    } else {
      sum += r.factor * q * get(r.args.q, b, t, h, c);
      if (!is_masked(r.args.key_mask, b, t)) sum += k * get(r.args.k, b, t, h, c);
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || c > K) return;
  for (int i = 1; i < 8; ++i) sum += sums[i][lane];
  if (c == K) {
    if (is_given(dalpha)) put(dalpha, static_cast<float>(0.5 * sum / get(r.args.alpha, h, m)), h, m);
  } else if (is_given(dz)) {
    put(dz, static_cast<float>(sum / sqrt(sqrt(static_cast<double>(K)))), h, m, c);
  }
}

}  // namespace linnet::cuda
