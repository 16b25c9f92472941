// The hybrids of distill_window and their gradients on the GPU, in double: gradients of the maps and of the window's logit are
// sums that nearly cancel. A block has one row of one head. Keys that left the window stand in sums of features before each
// chunk (sums.h); the few between the chunk and the window, and the window, are weighed 128 at a time. What queries give the
// keys is the same backward in time.
#include "mechanisms/distill/cuda/hedgehog.cuh"
#include "mechanisms/distill/cuda/window.h"

namespace linnet::cuda {
namespace {

struct Row {
  const DistillWindowRows& r;
  int64_t row, b, t, h;
  __device__ explicit Row(const DistillWindowRows& rows) : r(rows), row(blockIdx.x) {
    const DistillSums& s = r.keys;
    h = row % s.H, t = row / s.H % s.T, b = row / s.H / s.T;
  }
  __device__ int64_t other(int64_t i) const { return (b * r.keys.T + i) * r.keys.H + h; }
  __device__ const double* state(const DistillSums& s, int64_t chunk) const {
    return s.states + ((b * s.H + h) * (distill_chunks(s.T) + 1) + chunk) * s.M * s.W;
  }
  __device__ double scale() const {
    const int64_t K = r.args.q.size[3];
    return K == 0 ? 1 : 1 / sqrt(static_cast<double>(K));
  }
  __device__ double score(int64_t i, int64_t j) const {
    double sum = 0;
    for (int64_t c = 0; c < r.args.q.size[3]; ++c) {
      sum += static_cast<double>(get(r.args.q, b, i, h, c)) * get(r.args.k, b, j, h, c);
    }
    return scale() * sum;
  }
  __device__ double far(int64_t i, int64_t j) const {  // the weight of a key that left the window
    const double *fq = r.fq + other(i) * r.keys.M, *fk = r.fk + other(j) * r.keys.M;
    double sum = 0;
    for (int64_t f = 0; f < r.keys.M; ++f) sum += fq[f] * fk[f];
    return sum;
  }
  __device__ double share() const { return 1 / (1 + exp(-static_cast<double>(get(r.args.window_factor, h)))); }
};

// The largest score of keys [begin, t], and its first key.
__device__ double largest_score(const Row& at, int64_t begin, double (&parts)[kThreads], int64_t* key) {
  double top = -INFINITY;
  int64_t first = at.t + 1;
  for (int64_t j = begin + threadIdx.x; j <= at.t; j += kThreads) {
    const double score = at.score(at.t, j);
    if (score > top || isnan(score)) top = score, first = j;
  }
  const double all = block_largest(top, parts);
  const double mine = top == all ? -static_cast<double>(first) : -INFINITY;
  const double found = block_largest(mine, parts);
  *key = found == -INFINITY || -found > static_cast<double>(at.t) ? begin : static_cast<int64_t>(-found);
  return all;
}

// The weights of keys [first, first + 128) for row t, in a: near ones, and those of the chunk in which the window begins.
__device__ void weigh_keys(const Row& at, int64_t begin, int64_t first, double top, double share, double (&a)[kThreads]) {
  const int64_t j = first + threadIdx.x;
  __syncthreads();
  if (j <= at.t) a[threadIdx.x] = j < begin ? at.far(at.t, j) : share * exp(at.score(at.t, j) - top);
  __syncthreads();
}
__device__ int tile(int64_t first, int64_t end) { return static_cast<int>(min(end - first, static_cast<int64_t>(kThreads))); }

// The row's output, in o, its denominator behind it.
__device__ void read(const Row& at, int64_t begin, double top, double (&a)[kThreads]) {
  const DistillSums& s = at.r.keys;
  const int64_t chunk = begin / kDistillChunk;
  const double *S = at.state(s, chunk), *fq = at.r.fq + at.row * s.M, share = at.share();
  double* o = at.r.o + at.row * s.W;
  for (int64_t e = threadIdx.x; e < s.W; e += kThreads) {
    double sum = 0;
    for (int64_t f = 0; f < s.M; ++f) sum += fq[f] * S[f * s.W + e];
    o[e] = sum;
  }
  for (int64_t first = chunk * kDistillChunk; first <= at.t; first += kThreads) {
    weigh_keys(at, begin, first, top, share, a);
    for (int64_t e = threadIdx.x; e < s.W; e += kThreads) {
      double sum = o[e];
      for (int n = 0; n < tile(first, at.t + 1); ++n) sum += a[n] * at.r.w[at.other(first + n) * s.W + e];
      o[e] = sum;
    }
  }
  __syncthreads();
  const double den = o[s.W - 1];
  for (int64_t e = threadIdx.x; e < s.W - 1; e += kThreads) o[e] = den == 0 ? 0 : o[e] / den;
  __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    distill_window_features(const __grid_constant__ DistillWindowRows r, const __grid_constant__ View fq,
                            const __grid_constant__ View fk) {
  const Row at(r);
  const int64_t M = r.keys.M, W = r.keys.W;
  hedgehog(r.args.q, r.args.wq, at.b, at.t, at.h, r.fq + at.row * M);
  hedgehog(r.args.k, r.args.wk, at.b, at.t, at.h, r.fk + at.row * M);
  for (int64_t f = threadIdx.x; f < M; f += kThreads) {
    if (is_given(fq)) put(fq, static_cast<float>(r.fq[at.row * M + f]), at.b, at.t, at.h, f);
    if (is_given(fk)) put(fk, static_cast<float>(r.fk[at.row * M + f]), at.b, at.t, at.h, f);
  }
  for (int64_t e = threadIdx.x; e < W; e += kThreads) {
    r.w[at.row * W + e] = e == W - 1 ? 1 : get(r.args.v, at.b, at.t, at.h, e);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    distill_window_read(const __grid_constant__ DistillWindowRows r, bool terraced, const __grid_constant__ View out) {
  __shared__ double a[kThreads];
  const Row at(r);
  const int64_t begin = distill_window_begin(terraced, r.args.window, at.t), W = r.keys.W;
  int64_t key = 0;
  read(at, begin, largest_score(at, begin, a, &key), a);
  for (int64_t e = threadIdx.x; e < W - 1; e += kThreads) {
    put(out, static_cast<float>(r.o[at.row * W + e]), at.b, at.t, at.h, e);
  }
}

// The gradients are sums over the two forms.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_window_clear(const __grid_constant__ DistillWindowRows r, const __grid_constant__ DistillWindowRowGrads g) {
  const int64_t row = blockIdx.x, K = r.args.q.size[3], V = r.keys.W - 1, M = r.keys.M;
  for (int64_t c = threadIdx.x; c < K; c += kThreads) g.dq[row * K + c] = g.dk[row * K + c] = 0;
  for (int64_t v = threadIdx.x; v < V; v += kThreads) g.dv[row * V + v] = 0;
  for (int64_t f = threadIdx.x; f < M; f += kThreads) g.dfq[row * M + f] = g.dfk[row * M + f] = 0;
  if (threadIdx.x == 0) g.factors[row] = 0;
}

// What a row gets. With e_j = dout.(v_j - out) / den the gradient of a_j: near keys have a = g exp(s - top), so ds = a e, and
// the largest score gets what the shift by it takes off all of them.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_window_query_grads(const __grid_constant__ DistillWindowRows r, const __grid_constant__ DistillWindowRowGrads g,
                               bool terraced, const __grid_constant__ View dout) {
  __shared__ double a[kThreads], d[kThreads];
  const Row at(r);
  const int64_t begin = distill_window_begin(terraced, r.args.window, at.t), chunk = begin / kDistillChunk;
  const int64_t M = r.keys.M, W = r.keys.W, V = W - 1, K = r.args.q.size[3];
  int64_t key = 0;
  const double top = largest_score(at, begin, a, &key), share = at.share(), scale = at.scale();
  read(at, begin, top, a);
  const double *o = r.o + at.row * W, *S = at.state(r.keys, chunk), inverse = o[V] == 0 ? 0 : 1 / o[V];
  double *w = g.w + at.row * W, *dfq = g.dfq + at.row * M, *dq = g.dq + at.row * K;
  for (int64_t e = threadIdx.x; e < W; e += kThreads) {
    double x = 0;
    if (e < V) {
      x = get(dout, at.b, at.t, at.h, e);
    } else {
      for (int64_t v = 0; v < V; ++v) x -= get(dout, at.b, at.t, at.h, v) * o[v];
    }
    w[e] = inverse == 0 ? 0 : x * inverse;
  }
  __syncthreads();
  for (int64_t f = threadIdx.x; f < M; f += kThreads) {
    double sum = dfq[f];
    for (int64_t e = 0; e < W; ++e) sum += w[e] * S[f * W + e];
    dfq[f] = sum;
  }
  double total = 0;
  for (int64_t first = chunk * kDistillChunk; first <= at.t; first += kThreads) {
    weigh_keys(at, begin, first, top, share, a);
    const int64_t j = first + threadIdx.x;
    const int count = tile(first, at.t + 1), far = static_cast<int>(min(max(begin - first, int64_t{0}), int64_t{count}));
    if (j <= at.t) {
      double e = 0;
      for (int64_t v = 0; v < W; ++v) e += w[v] * r.w[at.other(j) * W + v];
      d[threadIdx.x] = j < begin ? e : a[threadIdx.x] * e;
      if (j >= begin) total += d[threadIdx.x];
    }
    __syncthreads();
    for (int64_t f = threadIdx.x; f < M; f += kThreads) {
      double sum = dfq[f];
      for (int n = 0; n < far; ++n) sum += d[n] * r.fk[at.other(first + n) * M + f];
      dfq[f] = sum;
    }
    for (int64_t c = threadIdx.x; c < K; c += kThreads) {
      double sum = 0;
      for (int n = far; n < count; ++n) sum += d[n] * get(r.args.k, at.b, first + n, at.h, c);
      dq[c] += scale * sum;
    }
    __syncthreads();
  }
  total = block_sum(total, a);
  for (int64_t c = threadIdx.x; c < K; c += kThreads) dq[c] -= scale * total * get(r.args.k, at.b, key, at.h, c);
  if (threadIdx.x != 0) return;
  g.top[at.row] = top;
  g.largest[at.row] = key;
  g.total[at.row] = total;
  g.factors[at.row] += total;
}

// What a key gets from the rows that see it near, from t on, and from those behind them.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_window_key_grads(const __grid_constant__ DistillWindowRows r, const __grid_constant__ DistillWindowRowGrads g,
                             bool terraced) {
  __shared__ double a[kThreads], d[kThreads];
  const Row at(r);
  const int64_t M = r.keys.M, W = r.keys.W, V = W - 1, K = r.args.q.size[3], T = r.keys.T, window = r.args.window;
  const int64_t left = terraced ? (at.t / window + 2) * window : at.t + window;  // the first row whose window it left
  const int64_t chunk = left / kDistillChunk, end = left >= T ? T : min(T, (chunk + 1) * kDistillChunk);
  const double *w = r.w + at.row * W, *fk = r.fk + at.row * M, share = at.share(), scale = at.scale();
  double *dfk = g.dfk + at.row * M, *dk = g.dk + at.row * K, *dv = g.dv + at.row * V;
  if (left < T) {
    const double* R = at.state(g.queries, chunk);
    for (int64_t f = threadIdx.x; f < M; f += kThreads) {
      double sum = dfk[f];
      for (int64_t e = 0; e < W; ++e) sum += R[f * W + e] * w[e];
      dfk[f] = sum;
    }
    for (int64_t v = threadIdx.x; v < V; v += kThreads) {
      double sum = dv[v];
      for (int64_t f = 0; f < M; ++f) sum += fk[f] * R[f * W + v];
      dv[v] = sum;
    }
  }
  for (int64_t first = at.t; first < end; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const int count = tile(first, end), near = static_cast<int>(min(max(left - first, int64_t{0}), int64_t{count}));
    __syncthreads();
    if (i < end) {
      const int64_t row = at.other(i);
      double e = 0;
      for (int64_t v = 0; v < W; ++v) e += g.w[row * W + v] * w[v];
      if (i < left) {
        a[threadIdx.x] = share * exp(at.score(i, at.t) - g.top[row]);
        d[threadIdx.x] = a[threadIdx.x] * e - (g.largest[row] == at.t ? g.total[row] : 0);
      } else {
        a[threadIdx.x] = at.far(i, at.t);
        d[threadIdx.x] = e;
      }
    }
    __syncthreads();
    for (int64_t v = threadIdx.x; v < V; v += kThreads) {
      double sum = dv[v];
      for (int n = 0; n < count; ++n) sum += a[n] * g.w[at.other(first + n) * W + v];
      dv[v] = sum;
    }
    for (int64_t c = threadIdx.x; c < K; c += kThreads) {
      double sum = 0;
      for (int n = 0; n < near; ++n) sum += d[n] * get(r.args.q, at.b, first + n, at.h, c);
      dk[c] += scale * sum;
    }
    for (int64_t f = threadIdx.x; f < M; f += kThreads) {
      double sum = dfk[f];
      for (int n = near; n < count; ++n) sum += d[n] * r.fq[at.other(first + n) * M + f];
      dfk[f] = sum;
    }
  }
}

// Gradients of the features through their map; dfq and dfk keep those of its products in their first half.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_window_finish(const __grid_constant__ DistillWindowRows r, const __grid_constant__ DistillWindowRowGrads g,
                          const __grid_constant__ View dq, const __grid_constant__ View dk, const __grid_constant__ View dv) {
  __shared__ double parts[kThreads];
  const Row at(r);
  const int64_t M = r.keys.M, F = M / 2, V = r.keys.W - 1, K = r.args.q.size[3];
  for (const bool key : {false, true}) {
    const double *f = (key ? r.fk : r.fq) + at.row * M, *dx = (key ? g.dk : g.dq) + at.row * K;
    double* df = (key ? g.dfk : g.dfq) + at.row * M;
    const View &to = key ? dk : dq, &map = key ? r.args.wk : r.args.wq;
    double up = 0, down = 0;
    for (int64_t c = threadIdx.x; c < F; c += kThreads) {  // the floor passes nothing
      if (f[c] > kFloor) up += f[c] * df[c];
      if (f[F + c] > kFloor) down += f[F + c] * df[F + c];
    }
    up = block_sum(up, parts);
    down = block_sum(down, parts);
    for (int64_t c = threadIdx.x; c < F; c += kThreads) {
      const double high = f[c] > kFloor ? f[c] * (df[c] - up) : 0, low = f[F + c] > kFloor ? f[F + c] * (df[F + c] - down) : 0;
      df[c] = high - low;
    }
    __syncthreads();
    for (int64_t c = threadIdx.x; is_given(to) && c < K; c += kThreads) {
      double sum = dx[c];
      for (int64_t n = 0; n < F; ++n) sum += df[n] * get(map, at.h, c, n);
      put(to, static_cast<float>(sum), at.b, at.t, at.h, c);
    }
  }
  for (int64_t v = threadIdx.x; is_given(dv) && v < V; v += kThreads) {
    put(dv, static_cast<float>(g.dv[at.row * V + v]), at.b, at.t, at.h, v);
  }
}

// A block has 32 columns of one row of a map, its 8 warps take turns at the tokens.
extern "C" __global__ void __launch_bounds__(256)
    distill_window_maps(const __grid_constant__ DistillWindowRows r, const __grid_constant__ DistillWindowRowGrads g, bool key,
                        const __grid_constant__ View to) {
  __shared__ double sums[8][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t M = r.keys.M, F = M / 2, T = r.keys.T, H = r.keys.H, K = r.args.q.size[3], tiles = (F + 31) / 32;
  const int64_t c = blockIdx.x % tiles * 32 + lane, k = blockIdx.x / tiles % K, h = blockIdx.x / tiles / K;
  const double* df = key ? g.dfk : g.dfq;
  const View& x = key ? r.args.k : r.args.q;
  double sum = 0;
  for (int64_t i = warp; c < F && i < r.keys.B * T; i += 8) sum += df[(i * H + h) * M + c] * get(x, i / T, i % T, h, k);
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || c >= F) return;
  for (int i = 1; i < 8; ++i) sum += sums[i][lane];
  put(to, static_cast<float>(sum), h, k, c);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    distill_window_factor(const __grid_constant__ DistillWindowRows r, const __grid_constant__ DistillWindowRowGrads g,
                          const __grid_constant__ View to) {
  __shared__ double parts[kThreads];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < r.keys.B * r.keys.T; i += kThreads) sum += g.factors[i * r.keys.H + blockIdx.x];
  sum = block_sum(sum, parts);
  const double rest = 1 / (1 + exp(static_cast<double>(get(r.args.window_factor, blockIdx.x))));  // 1 - g
  if (threadIdx.x == 0) put(to, static_cast<float>(rest * sum), blockIdx.x);
}

}  // namespace linnet::cuda
