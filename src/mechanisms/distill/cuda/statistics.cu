// Statistics of causal softmax heads on the GPU, in double: a block has one row of one head, and makes its scores twice. Ranks:
// a block has a run of 512 tokens as a sequence of its own, the matrix P P^T of its weights, that matrix in tridiagonal form
// (Householder), and its eigenvalues by bisection, one for each thread.
#include "mechanisms/distill/cuda/rows.cuh"
#include "mechanisms/distill/cuda/window.h"

namespace linnet::cuda {
namespace {

__device__ double score(const DistillWindowArgs& args, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t K = args.q.size[3];
  double sum = 0;
  for (int64_t c = 0; c < K; ++c) sum += static_cast<double>(get(args.q, b, i, h, c)) * get(args.k, b, j, h, c);
  return K == 0 ? 0 : sum / sqrt(static_cast<double>(K));
}
__device__ void put_head(const View& view, double x, int64_t h) {
  if (is_given(view)) put(view, static_cast<float>(x), h);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    distill_statistics_rows(const __grid_constant__ DistillWindowArgs args, const __grid_constant__ DistillStatistics s) {
  __shared__ double parts[kThreads];
  const int64_t T = args.q.size[1], H = args.q.size[2], row = blockIdx.x;
  const int64_t h = row % H, i = row / H % T, b = row / H / T;
  const int count = static_cast<int>(args.windows.count);
  double top = -INFINITY, total = 0, logs = 0, distance = 0, sink = 0, mass[Sizes::kMax] = {};
  for (int64_t j = threadIdx.x; j <= i; j += kThreads) top = larger(top, score(args, b, h, i, j));
  top = block_largest(top, parts);
  for (int64_t j = threadIdx.x; j <= i; j += kThreads) {
    const double less = score(args, b, h, i, j) - top, e = exp(less);
    total += e;
    logs += e * less;
    distance += e * static_cast<double>(i - j);
    if (j < args.sinks) sink += e;
    for (int n = 0; n < count; ++n) mass[n] += i - j < args.windows.value[n] ? e : 0;
  }
  total = block_sum(total, parts);
  const auto tell = [&](int n, double x) {
    x = block_sum(x, parts) / total;
    if (threadIdx.x == 0) s.rows[row * kDistillStatistics + n] = x;
  };
  logs = block_sum(logs, parts);
  if (threadIdx.x == 0) {
    s.rows[row * kDistillStatistics] = log(total) - logs / total;  // -sum p log p, log p = score - log total
    s.rows[row * kDistillStatistics + 1] = log(static_cast<double>(i + 1));
  }
  tell(2, distance);
  tell(3, sink);
  for (int n = 0; n < count; ++n) tell(4 + n, mass[n]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    distill_statistics_heads(const __grid_constant__ DistillWindowArgs args, const __grid_constant__ DistillStatistics s,
                             const __grid_constant__ DistillWindowOut out) {
  __shared__ double parts[kThreads];
  const int64_t H = args.q.size[2], h = blockIdx.x, rows = args.q.size[0] * args.q.size[1];
  const double count = static_cast<double>(max(int64_t{1}, rows));
  const auto mean = [&](int n) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < rows; i += kThreads) sum += s.rows[(i * H + h) * kDistillStatistics + n];
    return block_sum(sum, parts) / count;
  };
  const double entropy = mean(0), uniform = mean(1), distance = mean(2), sink = mean(3);
  if (threadIdx.x == 0) {
    s.entropy[h] = entropy;
    s.distance[h] = distance;
    put_head(out.entropy, entropy, h);
    put_head(out.entropy_ratio, uniform == 0 ? 0 : entropy / uniform, h);
    put_head(out.distance, distance, h);
    put_head(out.sink_mass, sink, h);
  }
  for (int n = 0; is_given(out.window_mass) && n < args.windows.count; ++n) {
    const double mass = mean(4 + n);
    if (threadIdx.x == 0) put(out.window_mass, static_cast<float>(mass), h, n);
  }
}

// Starting values of a gated delta rule's gates, as distill_gates has them.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_gates(int64_t H, const __grid_constant__ DistillStatistics s, const __grid_constant__ DistillWindowOut out) {
  const int64_t h = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (h >= H) return;
  double least = INFINITY, most = -INFINITY;
  for (int64_t i = 0; i < H; ++i) {
    least = min(least, s.entropy[i]);
    most = max(most, s.entropy[i]);
  }
  const double target = min(max(log(2.0) / max(s.distance[h], 0.5), 0.001), 5.0);
  const double beta = 0.3 + 0.4 * (1 - (s.entropy[h] - least) / max(most - least, 1e-3));
  put_head(out.gate_dt_bias, target + log(-expm1(-target)), h);
  put_head(out.gate_beta, beta, h);
  put_head(out.gate_beta_logit, log(beta / (1 - beta)), h);
}

namespace {

// The symmetric a [n, n] becomes tridiagonal: d, and e[i] between i - 1 and i. p: scratch [n].
__device__ void tridiagonal(int64_t n, double* a, double* d, double* e, double* p, double (&parts)[kThreads]) {
  for (int64_t i = n - 1; i > 0; --i) {
    double* u = a + i * n;
    double scale = 0, h = 0, dot = 0;
    for (int64_t k = threadIdx.x; k < i; k += kThreads) scale += fabs(u[k]);
    scale = block_sum(scale, parts);
    if (threadIdx.x == 0) d[i] = u[i];
    if (i == 1 || scale == 0) {
      if (threadIdx.x == 0) e[i] = u[i - 1];
      continue;
    }
    for (int64_t k = threadIdx.x; k < i; k += kThreads) {
      u[k] /= scale;
      h += u[k] * u[k];
    }
    h = block_sum(h, parts);
    const double f = u[i - 1], g = f >= 0 ? -sqrt(h) : sqrt(h);
    __syncthreads();
    h -= f * g;
    if (threadIdx.x == 0) {
      e[i] = scale * g;
      u[i - 1] = f - g;
    }
    __syncthreads();
    for (int64_t k = threadIdx.x; k < i; k += kThreads) {  // by columns, which are rows as well
      double sum = 0;
      for (int64_t j = 0; j < i; ++j) sum += a[j * n + k] * u[j];
      p[k] = sum / h;
      dot += p[k] * u[k];
    }
    const double half = block_sum(dot, parts) / (h + h);
    for (int64_t k = threadIdx.x; k < i; k += kThreads) p[k] -= half * u[k];
    __syncthreads();
    for (int64_t k = threadIdx.x; k < i * i; k += kThreads) {
      const int64_t row = k / i, column = k % i;
      a[row * n + column] -= u[row] * p[column] + p[row] * u[column];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) d[0] = a[0];
  __syncthreads();
}

// How many eigenvalues of a tridiagonal matrix are below x.
__device__ int64_t count_below(int64_t n, const double* d, const double* e, double x) {
  int64_t count = 0;
  double pivot = 1;
  for (int64_t i = 0; i < n; ++i) {
    pivot = d[i] - x - (i == 0 ? 0 : e[i] * e[i] / pivot);
    if (pivot == 0) pivot = -1e-300;
    if (pivot < 0) ++count;
  }
  return count;
}

}  // namespace

// A block takes turns at the tasks, as there is no room for the matrices of all of them.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_ranks(const __grid_constant__ DistillWindowArgs args, const __grid_constant__ DistillStatistics s) {
  __shared__ double parts[kThreads];
  const int64_t T = args.q.size[1], H = args.q.size[2], N = s.N;
  double* weights = s.matrices + blockIdx.x * distill_rank_doubles(N);
  double *gram = weights + N * N, *d = gram + N * N, *e = d + N, *p = e + N;
  for (int64_t task = blockIdx.x; task < args.q.size[0] * H * s.blocks; task += s.tasks) {
    const int64_t begin = task % s.blocks * kDistillRankBlock, h = task / s.blocks % H, b = task / s.blocks / H;
    const int64_t n = min(N, T - begin);
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n * n; i += kThreads) {
      if (i % n <= i / n) weights[i] = score(args, b, h, begin + i / n, begin + i % n);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
      double* row = weights + i * n;
      double top = -INFINITY, sum = 0;
      for (int64_t j = 0; j <= i; ++j) top = larger(top, row[j]);
      for (int64_t j = 0; j <= i; ++j) sum += row[j] = exp(row[j] - top);
      for (int64_t j = 0; j <= i; ++j) row[j] /= sum;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n * n; i += kThreads) {
      const int64_t row = i / n, column = i % n;
      double sum = 0;
      for (int64_t c = 0; c <= min(row, column); ++c) sum += weights[row * n + c] * weights[column * n + c];
      gram[i] = sum;
    }
    __syncthreads();
    double trace = 0, entropy = 0, most = 0;
    for (int64_t i = threadIdx.x; i < n; i += kThreads) trace += gram[i * n + i];
    trace = block_sum(trace, parts);
    tridiagonal(n, gram, d, e, p, parts);
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
      double low = 0, high = 2 * trace;  // none is negative, and they add up to the trace
      for (int step = 0; step < 200; ++step) {
        const double middle = 0.5 * (low + high);
        if (middle == low || middle == high) break;
        (count_below(n, d, e, middle) > i ? high : low) = middle;
      }
      const double share = low / trace;
      if (share > 0) entropy -= share * log(share);
      most = larger(most, low);
    }
    entropy = block_sum(entropy, parts);
    most = block_largest(most, parts);
    if (threadIdx.x != 0) continue;
    s.ranks[task * 2] = trace / most;
    s.ranks[task * 2 + 1] = exp(entropy);
  }
}
// A thread has a head.
extern "C" __global__ void __launch_bounds__(kThreads)
    distill_ranks_heads(const __grid_constant__ DistillWindowArgs args, const __grid_constant__ DistillStatistics s,
                        const __grid_constant__ DistillWindowOut out) {
  const int64_t B = args.q.size[0], H = args.q.size[2], h = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (h >= H) return;
  double stable = 0, effective = 0;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < s.blocks; ++i) {
      stable += s.ranks[((b * H + h) * s.blocks + i) * 2];
      effective += s.ranks[((b * H + h) * s.blocks + i) * 2 + 1];
    }
  }
  const double blocks = static_cast<double>(max(int64_t{1}, B * s.blocks));
  put_head(out.stable_rank, stable / blocks, h);
  put_head(out.effective_rank, effective / blocks, h);
}

}  // namespace linnet::cuda
