// The teacher of distill, its losses and their gradients on the GPU, in double. A block has one row of one head and weighs its
// keys (or, for the gradient of a key, its queries) 128 at a time: nothing of size T x T is kept, and every kernel makes the
// pairs that it needs again.
#include "mechanisms/distill/cuda/losses.h"
#include "mechanisms/distill/cuda/rows.cuh"

namespace linnet::cuda {
namespace {

struct Head {
  const DistillRows& r;
  const DistillLossScratch& s;
  int64_t b, h;

  __device__ int64_t row(int64_t t) const { return (b * r.keys.T + t) * r.keys.H + h; }
  __device__ bool takes_part(int64_t j) const {
    const View& mask = r.args.key_mask;
    return !is_given(mask) || static_cast<const uint8_t*>(mask.data)[place(mask, b, j)] != 0;
  }
  __device__ double score(int64_t i, int64_t j) const {
    const int64_t K = r.args.q.size[3];
    double dot = 0;
    for (int64_t c = 0; c < K; ++c) dot += static_cast<double>(get(r.args.q, b, i, h, c)) * get(r.args.k, b, j, h, c);
    return r.factor * dot / sqrt(static_cast<double>(K)) + get_or(0, r.args.key_logw, b, j, h);
  }
  // log a without what the query's norm takes off it.
  __device__ double log_weight(int64_t i, int64_t j) const {
    const double *lq = r.lq + row(i) * r.keys.M, *lk = r.lk + row(j) * r.keys.M;
    double peak = -INFINITY, sum = 0;
    for (int64_t m = 0; m < r.keys.M; ++m) peak = larger(peak, lq[m] + lk[m]);
    for (int64_t m = 0; m < r.keys.M; ++m) sum += exp(lq[m] + lk[m] - peak);
    return peak + log(sum);
  }
  // The gradient of a loss with respect to log a of a pair, whose value `log_a` is given.
  __device__ double gradient(DistillLoss loss, int64_t i, int64_t j, double log_a) const {
    const double rows = static_cast<double>(r.keys.B * r.keys.T);
    const int64_t at = row(i), V = r.keys.W - 1;
    if (loss == DistillLoss::mse) {
      const double *o = r.o + at * r.keys.W, *v = r.w + row(j) * r.keys.W, *teacher = s.teacher + at * V;
      double dot = 0;
      for (int64_t c = 0; c < V; ++c) dot += (o[c] - teacher[c]) * (v[c] - o[c]);
      return exp(log_a - r.logden[at]) * 2 * dot / (rows * static_cast<double>(V));
    }
    const double score_of = score(i, j);
    if (loss == DistillLoss::ce) return (exp(log_a - r.logden[at]) - exp(score_of - s.norm[at])) / rows;
    const bool relative = loss == DistillLoss::l2rel;
    const double less = relative ? s.heads[2 * h] : 0, student = exp(log_a - s.half[at] - less);
    return 2 * (student - exp(score_of - less)) * student / (relative ? s.heads[2 * h + 1] : rows);
  }
};
__device__ Head head_of(const DistillRows& r, const DistillLossScratch& s) {
  return {r, s, blockIdx.x / r.keys.H / r.keys.T, blockIdx.x % r.keys.H};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    distill_teacher(const __grid_constant__ DistillRows r, const __grid_constant__ DistillLossScratch s,
                    const __grid_constant__ View out) {
  __shared__ double parts[kThreads];
  const Head head = head_of(r, s);
  const int64_t T = r.keys.T, K = r.args.q.size[3], V = r.keys.W - 1, i = blockIdx.x / r.keys.H % T;
  const int64_t row = blockIdx.x, keys = r.args.causal ? i + 1 : T;
  double top = -INFINITY, sum = 0, squares = 0;
  for (int64_t j = threadIdx.x; j < keys; j += kThreads) {
    if (head.takes_part(j)) top = larger(top, head.score(i, j));
  }
  top = block_largest(top, parts);
  for (int64_t v = threadIdx.x; v < V; v += kThreads) s.teacher[row * V + v] = 0;
  for (int64_t first = 0; first < keys; first += kThreads) {
    const int64_t j = first + threadIdx.x;
    const double p = j < keys && head.takes_part(j) ? exp(head.score(i, j) - top) : 0;
    sum += p;
    squares += p * p;
    __syncthreads();
    parts[threadIdx.x] = p;
    __syncthreads();
    for (int64_t v = threadIdx.x; v < V; v += kThreads) {
      double all = s.teacher[row * V + v];
      for (int64_t n = 0; n < min(keys - first, static_cast<int64_t>(kThreads)); ++n) {
        all += parts[n] * r.w[head.row(first + n) * r.keys.W + v];
      }
      s.teacher[row * V + v] = all;
    }
  }
  sum = block_sum(sum, parts);
  squares = block_sum(squares, parts);
  for (int64_t v = threadIdx.x; v < V; v += kThreads) {
    const double x = sum == 0 ? 0 : s.teacher[row * V + v] / sum;
    s.teacher[row * V + v] = x;
    if (is_given(out)) put(out, static_cast<float>(x), head.b, i, head.h, v);
  }
  if (threadIdx.x != 0) return;
  s.top[row] = top;
  s.norm[row] = top + log(sum);
  s.squares[row] = squares;
  double half = 0;
  for (int64_t c = 0; c < K; ++c) {
    const double q = r.factor * get(r.args.q, head.b, i, head.h, c);
    half += q * q;
  }
  s.half[row] = half / (2 * sqrt(static_cast<double>(K)));
}

// The largest score of a head, in whose units l2rel is taken, and the sum of the squared weights there.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_teacher_heads(const __grid_constant__ DistillRows r, const __grid_constant__ DistillLossScratch s) {
  __shared__ double parts[kThreads];
  const int64_t H = r.keys.H, h = blockIdx.x, rows = r.keys.B * r.keys.T;
  double top = -INFINITY, squares = 0;
  for (int64_t i = threadIdx.x; i < rows; i += kThreads) top = larger(top, s.top[i * H + h]);
  top = block_largest(top, parts);
  for (int64_t i = threadIdx.x; i < rows; i += kThreads) {
    squares += exp_below(2 * s.top[i * H + h], 2 * top) * s.squares[i * H + h];
  }
  squares = block_sum(squares, parts);
  if (threadIdx.x != 0) return;
  s.heads[2 * h] = top;
  s.heads[2 * h + 1] = squares;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    distill_loss_rows(const __grid_constant__ DistillRows r, const __grid_constant__ DistillLossScratch s) {
  __shared__ double parts[kThreads];
  const Head head = head_of(r, s);
  const int64_t T = r.keys.T, V = r.keys.W - 1, i = blockIdx.x / r.keys.H % T, row = blockIdx.x;
  const double rows = static_cast<double>(r.keys.B * T), top = s.heads[2 * head.h], squares = s.heads[2 * head.h + 1];
  double sums[kDistillLosses] = {};
  for (int64_t j = threadIdx.x; j < (r.args.causal ? i + 1 : T); j += kThreads) {
    if (!head.takes_part(j)) continue;
    const double score = head.score(i, j), own = head.log_weight(i, j), log_a = own - s.half[row];
    const double d = exp(log_a) - exp(score), relative = exp(log_a - top) - exp(score - top);
    const double log_p = score - s.norm[row], p = exp(log_p), log_student = own - r.logden[row];
    sums[0] += d * d / rows;
    sums[1] += relative * relative / squares;
    sums[2] -= p * log_student / rows;
    if (p > 0) sums[3] += p * (log_p - log_student) / rows;
  }
  for (int64_t v = threadIdx.x; v < V; v += kThreads) {
    const double d = r.o[row * r.keys.W + v] - s.teacher[row * V + v];
    sums[4] += d * d / (rows * static_cast<double>(V));
  }
  for (int n = 0; n < kDistillLosses; ++n) {
    const double sum = block_sum(sums[n], parts);
    if (threadIdx.x == 0) s.parts[row * kDistillLosses + n] = sum;
  }
}
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_loss_sum(const __grid_constant__ DistillRows r, const __grid_constant__ DistillLossScratch s, int which,
                     const __grid_constant__ View loss) {
  __shared__ double parts[kThreads];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < r.keys.B * r.keys.T; i += kThreads) {
    sum += s.parts[(i * r.keys.H + blockIdx.x) * kDistillLosses + which];
  }
  sum = block_sum(sum, parts);
  if (threadIdx.x == 0) put(loss, static_cast<float>(sum), blockIdx.x);
}

// blockIdx.y 0: dlq_im = sum_j g_ij r_ijm; 1: dlk_jm = sum_i g_ij r_ijm; g the gradient of log a, r the share of feature m in
// a.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_loss_grads(const __grid_constant__ DistillRows r, const __grid_constant__ DistillLossScratch s, DistillLoss loss) {
  __shared__ double g[kThreads], log_a[kThreads];
  const Head head = head_of(r, s);
  const bool key = blockIdx.y == 1;
  const int64_t M = r.keys.M, T = r.keys.T, t = blockIdx.x / r.keys.H % T;
  const int64_t begin = key && r.args.causal ? t : 0, end = !key && r.args.causal ? t + 1 : T;
  double* to = (key ? s.dlk : r.x) + blockIdx.x * M;
  const double *own = (key ? r.lk : r.lq) + blockIdx.x * M, *others = key ? r.lq : r.lk;
  for (int64_t m = threadIdx.x; m < M; m += kThreads) to[m] = 0;
  for (int64_t first = begin; first < end; first += kThreads) {
    const int64_t other = first + threadIdx.x, i = key ? other : t, j = key ? t : other;
    const bool here = other < end && head.takes_part(j);
    __syncthreads();
    log_a[threadIdx.x] = here ? head.log_weight(i, j) : 0;
    g[threadIdx.x] = here ? head.gradient(loss, i, j, log_a[threadIdx.x]) : 0;
    __syncthreads();
    for (int64_t m = threadIdx.x; m < M; m += kThreads) {
      double sum = to[m];
      for (int64_t n = 0; n < min(end - first, static_cast<int64_t>(kThreads)); ++n) {
        if (g[n] != 0) sum += g[n] * exp(own[m] + others[head.row(first + n) * M + m] - log_a[n]);
      }
      to[m] = sum;
    }
  }
}

}  // namespace linnet::cuda
