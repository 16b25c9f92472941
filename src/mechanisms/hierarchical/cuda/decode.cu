// hierarchical_decode on the GPU: a block has a head of a batch row and walks its tokens; sums are doubles. A token that the
// lists have no room for changes nothing, and its output is 0.
#include "mechanisms/hierarchical/cuda/decode.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

constexpr double kNone = -INFINITY;

// The counts of one batch row in memory of this head's.
struct Counts {
  const HierarchicalStep& s;
  int64_t b, unit;
  __device__ int64_t& count(int64_t l) const { return s.count[unit * s.levels + l]; }
  __device__ double& open_n(int64_t l) const { return s.open_n[unit * s.levels + l]; }
  __device__ double& list_n(int64_t l, int64_t i) const { return s.list_n[(unit * s.levels + l) * s.width + i]; }
  __device__ void begin() const {  // one thread
    for (int64_t l = 0; l < s.levels; ++l) {
      count(l) = max(int64_t{0}, min(s.width, get_index(s.args.list_count, place(s.args.list_count, b, l))));
      open_n(l) = get(s.args.open_n, b, l);
      for (int64_t i = 0; i < s.width; ++i) list_n(l, i) = get(s.args.list_n, b, l, i);
    }
  }
  // How many levels end behind the token; -1 where there is no room.
  __device__ int64_t closing(int64_t t, int64_t at) const {
    int64_t levels = 0;
    if (is_given(s.args.close)) {
      levels = get_index(s.args.close, place(s.args.close, b, t));
    } else {
      for (int64_t size = at + 1; levels + 1 < s.levels && size % s.args.arity == 0; size /= s.args.arity) ++levels;
    }
    return levels < 0 || levels >= s.levels || (count(levels) >= s.width) ? -1 : levels;
  }
  __device__ void advance(int64_t close) const {
    for (int64_t l = 0; l < s.levels; ++l) open_n(l) += 1;
    list_n(close, count(close)++) = close == 0 ? 1 : open_n(close - 1);
    for (int64_t l = 0; l < close; ++l) {
      count(l) = 0;
      open_n(l) = 0;
    }
  }
  __device__ double tokens(int64_t l) const { return l == 0 ? 1 : open_n(l - 1) + 1; }  // of the open node below level l
};
__device__ int64_t length_of(const HierarchicalStep& s, int64_t b) {
  return get_index(s.args.lengths, place(s.args.lengths, b));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128) hierarchical_step(const __grid_constant__ HierarchicalStep s) {
  const HierarchicalDecodeArgs& args = s.args;
  const int64_t T = args.q.size[1], H = args.q.size[2], K = args.q.size[3], V = args.v.size[3], L = s.levels;
  const int64_t b = blockIdx.x / H, h = blockIdx.x % H, unit = blockIdx.x;
  const Counts counts{s, b, unit};
  const bool prefix = args.tie == HierarchicalTie::prefix;
  double *const logits = s.logits + unit * L * s.width, *const g = s.g + unit * (L + 1),
                *const lambda = s.lambda + unit * (L + 1), *const mass = s.mass + unit * (L + 1);
  if (threadIdx.x == 0) counts.begin();
  __syncthreads();
  for (int64_t t = 0; t < T; ++t) {
    const int64_t close = counts.closing(t, length_of(s, b) + t);
    if (close < 0) {
      for (int64_t ch = threadIdx.x; ch < V; ch += 128) put(s.out.out, 0, b, t, h, ch);
      continue;
    }
    for (int64_t at = threadIdx.x; at < L * s.width; at += 128) {
      const int64_t l = at / s.width, i = at % s.width;
      if (i >= counts.count(l)) continue;
      const bool pooled = prefix && l > 0;
      double sum = 0;
      for (int64_t ch = 0; ch < K; ++ch) {
        const double q = get(args.q, b, t, h, ch) + (pooled ? static_cast<double>(get(args.sum_q, b, h, l - 1, ch)) : 0);
        sum += q * get(args.list_k, b, h, l, i, ch);
      }
      logits[at] = s.scale * sum / (pooled ? counts.tokens(l) : 1) + log(counts.list_n(l, i));
    }
    if (threadIdx.x == 0) {
      double self = 0;
      for (int64_t ch = 0; ch < K; ++ch) self += static_cast<double>(get(args.q, b, t, h, ch)) * get(args.k, b, t, h, ch);
      g[0] = s.scale * self;
    }
    __syncthreads();
    if (threadIdx.x == 0 && prefix) {
      for (int64_t l = 0; l < L; ++l) {
        double top = g[l], total = 0;
        for (int64_t i = 0; i < counts.count(l); ++i) {
          const double x = logits[l * s.width + i];
          top = x > top || isnan(x) ? x : top;
        }
        const double own = exp(g[l] - top);
        for (int64_t i = 0; i < counts.count(l); ++i) total += logits[l * s.width + i] = exp(logits[l * s.width + i] - top);
        total += own;
        lambda[l] = top + log(total);
        g[l + 1] = (get(args.sum_g, b, h, l) + counts.tokens(l) * lambda[l]) / counts.tokens(l + 1);
        for (int64_t i = 0; i < counts.count(l); ++i) logits[l * s.width + i] /= total;
        mass[l] = own / total;
      }
      double left = 1;
      for (int64_t l = L - 1; l >= 0; --l) {
        for (int64_t i = 0; i < counts.count(l); ++i) logits[l * s.width + i] *= left;
        left *= mass[l];
      }
      mass[0] = left;
    } else if (threadIdx.x == 0) {
      double top = args.include_self ? g[0] : kNone, total = 0;
      for (int64_t l = 0; l < L; ++l) {
        for (int64_t i = 0; i < counts.count(l); ++i) {
          const double x = logits[l * s.width + i];
          top = x > top || isnan(x) ? x : top;
        }
      }
      const double own = args.include_self ? exp(g[0] - top) : 0;
      for (int64_t l = 0; l < L; ++l) {
        for (int64_t i = 0; i < counts.count(l); ++i) total += logits[l * s.width + i] = exp(logits[l * s.width + i] - top);
      }
      total += own;
      for (int64_t l = 0; l < L; ++l) {
        for (int64_t i = 0; i < counts.count(l); ++i) logits[l * s.width + i] /= total;
      }
      mass[0] = total == 0 ? 0 : own / total;
    }
    __syncthreads();
    // The token joins the open nodes; of the node that ends highest its parent keeps the means.
    const double ended = counts.tokens(close);
    const int64_t slot = counts.count(close);
    for (int64_t ch = threadIdx.x; ch < V; ch += 128) {
      const float own = get(args.v, b, t, h, ch);
      double sum = args.include_self ? mass[0] * own : 0;
      for (int64_t l = 0; l < L; ++l) {
        for (int64_t i = 0; i < counts.count(l); ++i) sum += logits[l * s.width + i] * get(args.list_v, b, h, l, i, ch);
      }
      put(s.out.out, static_cast<float>(sum), b, t, h, ch);
      float joined = own;
      for (int64_t l = 0; l < L; ++l) {
        const float with = get(args.sum_v, b, h, l, ch) + own;
        if (l + 1 == close) joined = with;
        put(args.sum_v, l < close ? 0 : with, b, h, l, ch);
      }
      put(args.list_v, static_cast<float>(joined / ended), b, h, close, slot, ch);
    }
    for (int64_t ch = threadIdx.x; ch < K; ch += 128) {
      const float q = get(args.q, b, t, h, ch), k = get(args.k, b, t, h, ch);
      float joined = k;
      for (int64_t l = 0; l < L; ++l) {
        const float with = get(args.sum_k, b, h, l, ch) + k;
        if (l + 1 == close) joined = with;
        put(args.sum_k, l < close ? 0 : with, b, h, l, ch);
        put(args.sum_q, l < close ? 0 : get(args.sum_q, b, h, l, ch) + q, b, h, l, ch);
      }
      put(args.list_k, static_cast<float>(joined / ended), b, h, close, slot, ch);
    }
    if (threadIdx.x == 0) {
      if (prefix) {
        const double before = get(args.sum_g, b, h, close);
        put(args.sum_g, static_cast<float>(before + ended * lambda[close]), b, h, close);
      }
      for (int64_t l = 0; l < close; ++l) put(args.sum_g, 0, b, h, l);
    }
    __syncthreads();
    if (threadIdx.x == 0) counts.advance(close);
    __syncthreads();
  }
}

// What the heads of a batch row share; a thread has a batch row.
extern "C" __global__ void __launch_bounds__(32) hierarchical_step_counts(const __grid_constant__ HierarchicalStep s) {
  const HierarchicalDecodeArgs& args = s.args;
  const int64_t b = blockIdx.x * 32ll + threadIdx.x, T = args.q.size[1];
  if (b >= args.q.size[0]) return;
  const Counts counts{s, b, b};
  const int64_t length = length_of(s, b);
  counts.begin();
  for (int64_t t = 0; t < T; ++t) {
    const int64_t close = counts.closing(t, length + t);
    if (close >= 0) counts.advance(close);
  }
  const auto put_index = [](const View& to, int64_t at, int64_t value) {
    if (to.dtype == Dtype::i64) {
      static_cast<int64_t*>(to.data)[at] = value;
    } else {
      static_cast<int32_t*>(to.data)[at] = static_cast<int32_t>(value);
    }
  };
  for (int64_t l = 0; l < s.levels; ++l) {
    put_index(args.list_count, place(args.list_count, b, l), counts.count(l));
    put(args.open_n, static_cast<float>(counts.open_n(l)), b, l);
    for (int64_t i = 0; i < s.width; ++i) put(args.list_n, static_cast<float>(counts.list_n(l, i)), b, l, i);
  }
  put_index(args.lengths, place(args.lengths, b), length + T);
}

}  // namespace linnet::cuda
