// `hierarchical` on the GPU, all ties, forward and backward (hierarchical.h says how it is laid out).
#include "mechanisms/hierarchical/cuda/hierarchical.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

constexpr double kNone = -INFINITY;

// One head of one batch row, and what a thread of it has: element `at` of [.., width].
struct Head {
  const HierarchicalCall& c;
  int64_t unit, b, h, at;

  __device__ Head(const HierarchicalCall& call, int64_t elements) : c(call) {
    const int64_t i = blockIdx.x * 256ll + threadIdx.x;
    unit = i / elements, at = i % elements;
    b = unit / c.H, h = unit % c.H;
  }
  __device__ Head(const HierarchicalCall& call, int64_t number, int) : c(call), unit(number), at(0) {
    b = unit / c.H, h = unit % c.H;
  }
  __device__ bool inside() const { return unit < c.B * c.H; }

  __device__ bool is_block() const { return c.tie == HierarchicalTie::block; }
  __device__ bool is_prefix() const { return c.tie == HierarchicalTie::prefix; }
  __device__ int64_t rows(int l) const { return is_block() ? c.nodes[l] : c.T; }
  __device__ int64_t node_of(int64_t row, int l) const { return is_block() ? row : row / c.span[l]; }
  // Rows whose nodes are children of node a of level l + 1.
  __device__ int64_t first_row(int64_t a, int l) const { return a * (is_block() ? c.size[l + 1] : c.span[l + 1]); }
  __device__ int64_t last_row(int64_t a, int l) const { return min(first_row(a + 1, l), rows(l)); }

  __device__ float& n(int64_t x, int l) const { return c.n[unit * c.N + c.base[l] + x]; }
  __device__ int64_t inner(int64_t x, int l) const { return unit * c.I + c.base[l] - c.T + x; }
  __device__ int64_t row_at(int l, int64_t row) const { return unit * c.all_rows + c.rows_at[l] + row; }
  __device__ int64_t pair_at(int l, int64_t row, int64_t j) const {
    return unit * c.pairs + c.pairs_at[l] + row * c.size[l + 1] + j;
  }
  __device__ double q(int64_t x, int l, int64_t ch) const {
    return l == 0 ? get(c.q, b, x, h, ch) : c.mean_q[inner(x, l) * c.K + ch];
  }
  __device__ double k(int64_t x, int l, int64_t ch) const {
    return l == 0 ? get(c.k, b, x, h, ch) : c.mean_k[inner(x, l) * c.K + ch];
  }
  __device__ double v(int64_t x, int l, int64_t ch) const {
    return l == 0 ? get(c.v, b, x, h, ch) : c.mean_v[inner(x, l) * c.V + ch];
  }
  __device__ double pos(int64_t x, int l, int64_t e) const { return get(c.pos, c.base[l] + x, h, e); }
  // The query of a row at level l: that of its node, its own, or the mean so far.
  __device__ double query(int64_t row, int l, int64_t ch) const {
    if (is_block()) return q(row, l, ch);
    if (!is_prefix() || l == 0) return q(row, 0, ch);
    return c.sums[(unit * c.T + row) * c.K + ch] / c.count[row_at(l, row)];
  }
  __device__ double dout(int64_t row, int l, int64_t ch) const {
    if (is_block() && l > 0) return c.node_out[inner(row, l) * c.V + ch];
    return get_or(0, c.dout, b, row, h, ch);
  }
  __device__ bool takes_part(int64_t row, int l) const { return (is_block() ? n(row, l) : n(row, 0)) > 0; }
  // The weight of everything below the row's node of level l.
  __device__ double mass(int l, int64_t row) const {
    if (l == c.depth || c.tie == HierarchicalTie::row) return 1;
    return c.mass[row_at(l, row)];
  }
  __device__ double mass_above(int l, int64_t row) const { return mass(l + 1, is_block() ? row / c.size[l + 1] : row); }
  // Whether the pair with its own node stands for what lies below it.
  __device__ bool stands_for_more(int64_t x, int64_t z, int l) const { return x == z && l > 0; }

  __device__ double logit(int64_t row, int64_t x, int64_t z, int l) const {
    double s = 0, p = 0;
    for (int64_t ch = 0; ch < c.K; ++ch) s += query(row, l, ch) * k(z, l, ch);
    for (int64_t e = 0; e < c.E; ++e) p += pos(x, l, e) * pos(z, l, e);
    return c.scale * s + p + log(static_cast<double>(n(z, l)));
  }
  // The last token of node x of level l that takes part; there is one.
  __device__ int64_t last_token(int64_t x, int l) const {
    int64_t i = min((x + 1) * c.span[l], c.T) - 1;
    while (i > 0 && n(i, 0) == 0) --i;
    return i;
  }
  __device__ double given_denergy() const { return get_or(0, c.denergy, b, h); }
};

// x becomes its softmax; returns the log of the sum of exponentials.
__device__ double softmax_of(double* x, int64_t count) {
  double top = kNone, sum = 0;
  for (int64_t i = 0; i < count; ++i) top = x[i] > top || isnan(x[i]) ? x[i] : top;
  if (top == kNone) {
    for (int64_t i = 0; i < count; ++i) x[i] = 0;
    return kNone;
  }
  for (int64_t i = 0; i < count; ++i) sum += x[i] = x[i] == kNone ? 0 : exp(x[i] - top);
  for (int64_t i = 0; i < count; ++i) x[i] /= sum;
  return top + log(sum);
}

#define LINNET_KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name

}  // namespace

// ---- forward ---------------------------------------------------------------------------------------------------------------

LINNET_KERNEL(hierarchical_leaves)(const __grid_constant__ HierarchicalCall c) {
  const Head d(c, c.T);
  if (!d.inside()) return;
  const bool out = is_given(c.mask) && static_cast<const uint8_t*>(c.mask.data)[place(c.mask, d.b, d.at)] == 0;
  d.n(d.at, 0) = out ? 0 : 1;
  if (d.is_prefix()) c.count[d.row_at(0, d.at)] = 1;
}
// Means of the nodes of level l >= 1: a thread has a channel of the queries, keys or values, the last one the count.
LINNET_KERNEL(hierarchical_pool)(const __grid_constant__ HierarchicalCall c, int l) {
  const int64_t wide = 2 * c.K + c.V + 1;
  const Head d(c, c.nodes[l] * wide);
  if (!d.inside()) return;
  const int64_t x = d.at / wide, ch = d.at % wide, first = x * c.size[l], last = min(first + c.size[l], c.nodes[l - 1]);
  double tokens = 0, sum = 0;
  for (int64_t y = first; y < last; ++y) tokens += d.n(y, l - 1);
  if (ch == wide - 1) {
    d.n(x, l) = static_cast<float>(tokens);
    return;
  }
  for (int64_t y = first; y < last; ++y) {
    const double count = d.n(y, l - 1);
    if (count == 0) continue;
    const double value = ch < c.K       ? c.tie == HierarchicalTie::row ? 0 : d.q(y, l - 1, ch)
                               : ch < 2 * c.K ? d.k(y, l - 1, ch - c.K)
                                        : d.v(y, l - 1, ch - 2 * c.K);
    sum += count / tokens * value;
  }
  if (ch < c.K) {
    if (c.tie != HierarchicalTie::row) c.mean_q[d.inner(x, l) * c.K + ch] = sum;
  } else if (ch < 2 * c.K) {
    c.mean_k[d.inner(x, l) * c.K + ch - c.K] = sum;
  } else {
    c.mean_v[d.inner(x, l) * c.V + ch - 2 * c.K] = sum;
  }
}
// prefix: sums of the queries of a token's node of level l up to the token, from those of level l - 1.
LINNET_KERNEL(hierarchical_sums)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, c.T * c.K);
  if (!d.inside()) return;
  const int64_t i = d.at / c.K, ch = d.at % c.K;
  double& sum = c.sums[(d.unit * c.T + i) * c.K + ch];
  if (l == 0) {
    sum = d.n(i, 0) > 0 ? d.q(i, 0, ch) : 0;
    return;
  }
  const int64_t x = i / c.span[l - 1];
  for (int64_t y = x / c.size[l] * c.size[l]; y < x; ++y) {
    if (d.n(y, l - 1) > 0) sum += d.n(y, l - 1) * d.q(y, l - 1, ch);
  }
}
LINNET_KERNEL(hierarchical_logits)(const __grid_constant__ HierarchicalCall c, int l) {
  const int64_t size = c.size[l + 1];
  const bool block = c.tie == HierarchicalTie::block;
  const Head d(c, (block ? c.nodes[l] : c.T) * size);
  if (!d.inside()) return;
  const int64_t row = d.at / size, j = d.at % size, x = d.node_of(row, l), z = x / size * size + j;
  double s = kNone;
  if (z < c.nodes[l] && d.takes_part(row, l) && d.n(z, l) > 0 && !(c.causal && z > x)) {
    if (d.stands_for_more(x, z, l)) {
      s = c.tie == HierarchicalTie::row ? kNone : c.g[d.row_at(l, row)];
    } else if (x != z || c.include_self) {
      s = d.logit(row, x, z, l);
    }
  }
  c.w[d.pair_at(l, row, j)] = s;
}
// Weights of the rows of level l, and g of the rows of level l + 1 in the kernel behind it.
LINNET_KERNEL(hierarchical_softmax)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, c.tie == HierarchicalTie::block ? c.nodes[l] : c.T);
  if (!d.inside()) return;
  c.lambda[d.row_at(l, d.at)] = softmax_of(c.w + d.pair_at(l, d.at, 0), c.size[l + 1]);
}
LINNET_KERNEL(hierarchical_raise)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, c.tie == HierarchicalTie::block ? c.nodes[l] : c.T);
  if (!d.inside()) return;
  const int64_t row = d.at;
  double g = kNone;
  if (d.takes_part(row, l)) {
    double sum = 0, tokens = 0;
    if (d.is_block()) {
      for (int64_t y = row * c.size[l]; y < min((row + 1) * c.size[l], c.nodes[l - 1]); ++y) {
        const double count = d.n(y, l - 1);
        if (count > 0) sum += count * c.lambda[d.row_at(l - 1, y)], tokens += count;
      }
    } else {
      const int64_t x = row / c.span[l - 1];
      tokens = c.count[d.row_at(l - 1, row)];
      sum = tokens * c.lambda[d.row_at(l - 1, row)];
      for (int64_t y = x / c.size[l] * c.size[l]; y < x; ++y) {
        const double count = d.n(y, l - 1);
        if (count > 0) sum += count * c.lambda[d.row_at(l - 1, d.last_token(y, l - 1))], tokens += count;
      }
      c.count[d.row_at(l, row)] = tokens;
    }
    g = sum / tokens;
  }
  c.g[d.row_at(l, row)] = g;
}
// row: one softmax over all levels.
LINNET_KERNEL(hierarchical_row_softmax)(const __grid_constant__ HierarchicalCall c) {
  const Head d(c, c.T);
  if (!d.inside()) return;
  double top = kNone, sum = 0;
  for (int l = 0; l < c.depth; ++l) {
    const double* x = c.w + d.pair_at(l, d.at, 0);
    for (int64_t j = 0; j < c.size[l + 1]; ++j) top = x[j] > top || isnan(x[j]) ? x[j] : top;
  }
  for (int l = 0; l < c.depth; ++l) {
    double* x = c.w + d.pair_at(l, d.at, 0);
    for (int64_t j = 0; j < c.size[l + 1]; ++j) sum += x[j] = x[j] == kNone ? 0 : exp(x[j] - top);
  }
  for (int l = 0; l < c.depth && top != kNone; ++l) {
    double* x = c.w + d.pair_at(l, d.at, 0);
    for (int64_t j = 0; j < c.size[l + 1]; ++j) x[j] /= sum;
  }
  c.lambda[d.row_at(0, d.at)] = top == kNone ? kNone : top + log(sum);
}
// prefix: what is left for each level of a token's path.
LINNET_KERNEL(hierarchical_masses)(const __grid_constant__ HierarchicalCall c) {
  const Head d(c, c.T);
  if (!d.inside()) return;
  double mass = 1;
  for (int l = c.depth - 1; l >= 0; --l) {
    mass *= c.w[d.pair_at(l, d.at, d.at / c.span[l] % c.size[l + 1])];
    c.mass[d.row_at(l, d.at)] = mass;
  }
}
LINNET_KERNEL(hierarchical_out)(const __grid_constant__ HierarchicalCall c) {
  const Head d(c, c.T * c.V);
  if (!d.inside()) return;
  const int64_t i = d.at / c.V, ch = d.at % c.V;
  double out = 0;
  for (int l = 0; l < c.depth && d.n(i, 0) > 0; ++l) {
    const int64_t x = i / c.span[l], first = x / c.size[l + 1] * c.size[l + 1];
    const double* w = c.w + d.pair_at(l, i, 0);
    double sum = 0;
    for (int64_t j = 0; j < c.size[l + 1]; ++j) {
      if (w[j] != 0 && !d.stands_for_more(x, first + j, l)) sum += w[j] * d.v(first + j, l, ch);
    }
    out += d.mass_above(l, i) * sum;
  }
  put(c.out, static_cast<float>(out), d.b, i, d.h, ch);
}
// block: outputs and masses of the nodes of level l from those of their parents; of the tokens to the caller.
LINNET_KERNEL(hierarchical_down)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, c.nodes[l] * c.V);
  if (!d.inside()) return;
  const int64_t x = d.at / c.V, ch = d.at % c.V, a = x / c.size[l + 1], first = a * c.size[l + 1];
  const bool there = d.n(x, l) > 0;
  const double above = d.mass(l + 1, a);
  const double* w = c.w + d.pair_at(l, x, 0);
  double sum = 0;
  for (int64_t j = 0; j < c.size[l + 1] && there; ++j) {
    if (w[j] != 0 && !d.stands_for_more(x, first + j, l)) sum += w[j] * d.v(first + j, l, ch);
  }
  sum = above * sum + (l + 1 == c.depth ? 0 : c.node_out[d.inner(a, l + 1) * c.V + ch]);
  if (ch == 0) c.mass[d.row_at(l, x)] = there ? above * w[x - first] : 0;
  if (l > 0) {
    c.node_out[d.inner(x, l) * c.V + ch] = sum;
  } else if (is_given(c.out)) {
    put(c.out, there ? static_cast<float>(sum) : 0, d.b, x, d.h, ch);
  }
}
// The same without values, for the backward.
LINNET_KERNEL(hierarchical_down_masses)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, c.nodes[l]);
  if (!d.inside()) return;
  const int64_t a = d.at / c.size[l + 1];
  c.mass[d.row_at(l, d.at)] = d.mass(l + 1, a) * c.w[d.pair_at(l, d.at, d.at - a * c.size[l + 1])];
}
// A block has a head: energy, rows that have something to attend to, the last token.
LINNET_KERNEL(hierarchical_total)(const __grid_constant__ HierarchicalCall c) {
  __shared__ double sums[256];
  __shared__ double counts[256];
  __shared__ double lasts[256];
  const Head d(c, blockIdx.x, 0);
  double sum = 0, count = 0, last = -1;
  for (int64_t i = threadIdx.x; i < c.T; i += 256) {
    if (d.n(i, 0) == 0) continue;
    last = static_cast<double>(i);
    if (c.tie != HierarchicalTie::row) continue;
    const double lse = c.lambda[d.row_at(0, i)];
    if (lse != kNone) sum += lse, count += 1;
  }
  sums[threadIdx.x] = sum;
  counts[threadIdx.x] = count;
  lasts[threadIdx.x] = last;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < 256; ++i) sum += sums[i], count += counts[i], last = max(last, lasts[i]);
  double energy = kNone;
  if (c.tie == HierarchicalTie::row) {
    if (count > 0) energy = sum / count;
  } else if (last >= 0) {
    energy = c.g[d.row_at(c.depth, d.is_block() ? 0 : static_cast<int64_t>(last))];
  }
  double* const total = c.total + 3 * d.unit;
  total[0] = energy, total[1] = count, total[2] = last;
  if (is_given(c.energy)) put(c.energy, static_cast<float>(energy), d.b, d.h);
}
// A block has a row of kl: the log-normaliser of softmax and, for prefix, the divergence itself.
LINNET_KERNEL(hierarchical_kl)(const __grid_constant__ HierarchicalCall c) {
  __shared__ double parts[256];
  const Head d(c, blockIdx.x / c.kl_rows, 0);
  const int64_t i = blockIdx.x % c.kl_rows * c.T / c.kl_rows;
  const auto level_of = [&](int64_t j) {  // where the paths of i and j have one parent
    int l = 0;
    while (j != i && i / c.span[l + 1] != j / c.span[l + 1]) ++l;
    return l;
  };
  const auto logit = [&](int64_t j) {
    if (d.n(i, 0) == 0 || d.n(j, 0) == 0 || (i == j && !c.include_self) || (c.causal && j > i)) return kNone;
    const int l = level_of(j);
    double s = 0, p = 0;
    for (int64_t ch = 0; ch < c.K; ++ch) s += d.q(i, 0, ch) * d.k(j, 0, ch);
    for (int64_t e = 0; e < c.E; ++e) p += d.pos(i / c.span[l], l, e) * d.pos(j / c.span[l], l, e);
    return c.scale * s + p;
  };
  const auto over_threads = [&](double mine, bool largest) {
    parts[threadIdx.x] = mine;
    __syncthreads();
    double all = parts[0];
    for (int t = 1; t < 256; ++t) all = largest ? (parts[t] > all || isnan(parts[t]) ? parts[t] : all) : all + parts[t];
    __syncthreads();
    return all;
  };
  double top = kNone, sum = 0, cross = 0;
  for (int64_t j = threadIdx.x; j < c.T; j += 256) {
    const double s = logit(j);
    top = s > top || isnan(s) ? s : top;
  }
  top = over_threads(top, true);
  const bool seen = top != kNone;
  for (int64_t j = threadIdx.x; j < c.T && seen; j += 256) {
    const double s = logit(j);
    if (s == kNone) continue;
    sum += exp(s - top);
    if (!d.is_prefix()) continue;
    const int l = level_of(j);
    const int64_t z = j / c.span[l];
    const double theta = d.mass_above(l, i) * c.w[d.pair_at(l, i, z % c.size[l + 1])] / d.n(z, l);
    if (theta > 0) cross += theta * (log(theta) - (s - top));
  }
  sum = over_threads(sum, false);
  cross = over_threads(cross, false);
  if (threadIdx.x > 0) return;
  c.kls[2 * blockIdx.x] = seen ? log(sum) + (d.is_prefix() ? cross : top) : 0;
  c.kls[2 * blockIdx.x + 1] = seen ? 1 : 0;
}
LINNET_KERNEL(hierarchical_kl_mean)(const __grid_constant__ HierarchicalCall c) {
  const Head d(c, 1);
  if (!d.inside()) return;
  double sum = 0, seen = 0;
  for (int64_t r = 0; r < c.kl_rows; ++r) {
    sum += c.kls[2 * (d.unit * c.kl_rows + r)];
    seen += c.kls[2 * (d.unit * c.kl_rows + r) + 1];
  }
  const double energy = c.total[3 * d.unit];
  const double kl = seen == 0 || energy == kNone ? 0 : d.is_prefix() ? sum / seen : sum / seen - energy;
  put(c.kl, static_cast<float>(kl), d.b, d.h);
}

// ---- backward --------------------------------------------------------------------------------------------------------------

// ds becomes dout . v of each pair of level l.
LINNET_KERNEL(hierarchical_reads)(const __grid_constant__ HierarchicalCall c, int l) {
  const int64_t size = c.size[l + 1];
  const Head d(c, (c.tie == HierarchicalTie::block ? c.nodes[l] : c.T) * size);
  if (!d.inside()) return;
  const int64_t row = d.at / size, j = d.at % size, x = d.node_of(row, l), z = x / size * size + j;
  double sum = 0;
  if (c.w[d.pair_at(l, row, j)] != 0 && !d.stands_for_more(x, z, l)) {
    for (int64_t ch = 0; ch < c.V; ++ch) sum += d.dout(row, l, ch) * d.v(z, l, ch);
  }
  c.ds[d.pair_at(l, row, j)] = sum;
}
// block: r of the rows of level l: what their weights return, that of their own node included.
LINNET_KERNEL(hierarchical_returns)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, c.nodes[l]);
  if (!d.inside()) return;
  const int64_t own = d.at % c.size[l + 1];
  const double *const w = c.w + d.pair_at(l, d.at, 0), *const t = c.ds + d.pair_at(l, d.at, 0);
  double sum = 0;
  for (int64_t j = 0; j < c.size[l + 1]; ++j) {
    if (w[j] == 0) continue;
    if (j != own || l == 0) {
      sum += w[j] * t[j];
    } else {  // dm of the node: the sum of r over its children
      double dm = 0;
      for (int64_t y = d.at * c.size[l]; y < min((d.at + 1) * c.size[l], c.nodes[l - 1]); ++y) {
        if (d.n(y, l - 1) > 0) dm += c.r[d.row_at(l - 1, y)];
      }
      c.dg[d.row_at(l, d.at)] = dm;
      sum += w[j] * dm;
    }
  }
  c.r[d.row_at(l, d.at)] = sum;
}
// block: sums of dout over the tokens of the nodes of level l >= 1.
LINNET_KERNEL(hierarchical_pool_dout)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, c.nodes[l] * c.V);
  if (!d.inside()) return;
  const int64_t x = d.at / c.V, ch = d.at % c.V;
  double sum = 0;
  for (int64_t y = x * c.size[l]; y < min((x + 1) * c.size[l], c.nodes[l - 1]); ++y) {
    if (d.n(y, l - 1) > 0) sum += d.dout(y, l - 1, ch);
  }
  c.node_out[d.inner(x, l) * c.V + ch] = sum;
}
// prefix, row: the same for all levels of a token.
LINNET_KERNEL(hierarchical_token_returns)(const __grid_constant__ HierarchicalCall c) {
  const Head d(c, c.T);
  if (!d.inside()) return;
  double r = 0;
  for (int l = 0; l < c.depth; ++l) {
    const int64_t own = d.at / c.span[l] % c.size[l + 1];
    const double *const w = c.w + d.pair_at(l, d.at, 0), *const t = c.ds + d.pair_at(l, d.at, 0);
    double sum = 0;
    for (int64_t j = 0; j < c.size[l + 1]; ++j) {
      if (w[j] != 0) sum += w[j] * (d.is_prefix() && l > 0 && j == own ? r : t[j]);
    }
    r = d.is_prefix() ? sum : r + sum;
    c.r[d.row_at(l, d.at)] = r;
  }
  if (d.is_prefix()) {
    c.dg[d.row_at(c.depth, d.at)] = static_cast<double>(d.at) == c.total[3 * d.unit + 2] ? d.given_denergy() : 0;
    return;
  }
  const double rows = c.total[3 * d.unit + 1], delta = rows > 0 ? r - d.given_denergy() / rows : r;
  for (int l = 0; l < c.depth; ++l) {
    const double* const w = c.w + d.pair_at(l, d.at, 0);
    double* const ds = c.ds + d.pair_at(l, d.at, 0);
    for (int64_t j = 0; j < c.size[l + 1]; ++j) ds[j] = w[j] == 0 ? 0 : w[j] * (ds[j] - delta);
  }
}
// prefix: sums over the tokens of the nodes of level l of dg / count of the level above.
LINNET_KERNEL(hierarchical_later)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, c.nodes[l]);
  if (!d.inside()) return;
  double sum = 0;
  for (int64_t i = d.at * c.span[l]; i < min((d.at + 1) * c.span[l], c.T); ++i) {
    if (d.n(i, 0) > 0) sum += c.dg[d.row_at(l + 1, i)] / c.count[d.row_at(l + 1, i)];
  }
  c.later[d.unit * c.N + c.base[l] + d.at] = sum;
}
// block, prefix: ds of the pairs of level l from dg of the level above; and dg of the rows.
LINNET_KERNEL(hierarchical_slopes)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, c.tie == HierarchicalTie::block ? c.nodes[l] : c.T);
  if (!d.inside()) return;
  const int64_t row = d.at, x = d.node_of(row, l), a = x / c.size[l + 1], own = x - a * c.size[l + 1], at = d.row_at(l, row);
  const double* const w = c.w + d.pair_at(l, row, 0);
  double* const ds = c.ds + d.pair_at(l, row, 0);
  if (!d.takes_part(row, l) || c.lambda[at] == kNone) {
    for (int64_t j = 0; j < c.size[l + 1]; ++j) ds[j] = 0;
    c.dg[at] = 0;
    return;
  }
  const double above = d.mass_above(l, row), tokens = d.n(x, l);
  double e, below;
  if (d.is_block()) {
    double dg = 0;
    if (l + 1 < c.depth) {
      dg = c.dg[d.row_at(l + 1, a)];
    } else if (c.total[3 * d.unit] != kNone) {
      dg = d.given_denergy();
    }
    e = tokens / d.n(a, l + 1) * dg - above * c.r[at];
    below = c.dg[at];  // dm, which `returns` left there
  } else {
    const double count = c.count[at];
    e = count * c.dg[d.row_at(l + 1, row)] / c.count[d.row_at(l + 1, row)] - above * c.r[at];
    if (count == tokens) {  // the last token of the node speaks for all later tokens of the parent
      double later = 0;
      for (int64_t y = x + 1; y < min((a + 1) * c.size[l + 1], c.nodes[l]); ++y) {
        later += c.later[d.unit * c.N + c.base[l] + y];
      }
      e += tokens * later;
    }
    below = l == 0 ? 0 : c.r[d.row_at(l - 1, row)];
  }
  for (int64_t j = 0; j < c.size[l + 1]; ++j) {
    if (l > 0 && j == own) continue;
    ds[j] = w[j] == 0 ? 0 : w[j] * (above * ds[j] + e);
  }
  if (l > 0) {
    ds[own] = 0;
    c.dg[at] = w[own] == 0 ? 0 : w[own] * (above * below + e);
  }
}
// dk and dv of the nodes of level l: sums over the rows that see them.
LINNET_KERNEL(hierarchical_gather)(const __grid_constant__ HierarchicalCall c, int l) {
  const int64_t wide = c.K + c.V;
  const Head d(c, c.nodes[l] * wide);
  if (!d.inside()) return;
  const int64_t z = d.at / wide, ch = d.at % wide, a = z / c.size[l + 1], j = z - a * c.size[l + 1];
  const double* const from = ch < c.K ? c.ds : c.w;
  double sum = 0;
  for (int64_t row = d.first_row(a, l); row < d.last_row(a, l); ++row) {
    const double weight = from[d.pair_at(l, row, j)];
    if (weight == 0) continue;
    if (ch < c.K) {
      sum += c.scale * weight * d.query(row, l, ch);
    } else if (!d.stands_for_more(d.node_of(row, l), z, l)) {
      sum += d.mass_above(l, row) * weight * d.dout(row, l, ch - c.K);
    }
  }
  c.dkv[(d.unit * c.N + c.base[l] + z) * wide + ch] = sum;
}
// Gradients of means go down to the nodes of level l; those of tokens to the caller.
LINNET_KERNEL(hierarchical_spread)(const __grid_constant__ HierarchicalCall c, int l) {
  const int64_t wide = c.K + c.V;
  const Head d(c, c.nodes[l] * wide);
  if (!d.inside()) return;
  const int64_t z = d.at / wide, ch = d.at % wide, a = z / c.size[l + 1];
  double& sum = c.dkv[(d.unit * c.N + c.base[l] + z) * wide + ch];
  const double count = d.n(z, l);
  if (l + 1 < c.depth && count > 0) {
    sum += count / d.n(a, l + 1) * c.dkv[(d.unit * c.N + c.base[l + 1] + a) * wide + ch];
  }
  if (l > 0) return;
  const float value = count > 0 ? static_cast<float>(sum) : 0;
  if (ch < c.K) {
    if (is_given(c.dk)) put(c.dk, value, d.b, z, d.h, ch);
  } else if (is_given(c.dv)) {
    put(c.dv, value, d.b, z, d.h, ch - c.K);
  }
}
// dq. block: of the nodes of level l. row: of tokens, all levels (l = 0). prefix: of the means of level l.
LINNET_KERNEL(hierarchical_queries)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, (c.tie == HierarchicalTie::block ? c.nodes[l] : c.T) * c.K);
  if (!d.inside()) return;
  const int64_t row = d.at / c.K, ch = d.at % c.K;
  const int levels = c.tie == HierarchicalTie::row ? c.depth : l + 1;
  double sum = 0;
  for (int level = l; level < levels && d.takes_part(row, l); ++level) {
    const int64_t first = d.node_of(row, level) / c.size[level + 1] * c.size[level + 1];
    const double* const ds = c.ds + d.pair_at(level, row, 0);
    for (int64_t j = 0; j < c.size[level + 1]; ++j) {
      if (ds[j] != 0) sum += c.scale * ds[j] * d.k(first + j, level, ch);
    }
  }
  if (d.is_prefix()) {
    c.steps[(d.unit * c.T + row) * c.K + ch] = d.takes_part(row, l) ? sum / c.count[d.row_at(l, row)] : 0;
    return;
  }
  if (d.is_block()) {
    const int64_t a = row / c.size[l + 1];
    if (l + 1 < c.depth && d.n(row, l) > 0) {
      sum += d.n(row, l) / d.n(a, l + 1) * c.dquery[(d.unit * c.N + c.base[l + 1] + a) * c.K + ch];
    }
    if (l > 0) {
      c.dquery[(d.unit * c.N + c.base[l] + row) * c.K + ch] = sum;
      return;
    }
  }
  put(c.dq, static_cast<float>(sum), d.b, row, d.h, ch);
}
// prefix: a query is part of the means of its node from its token on.
LINNET_KERNEL(hierarchical_suffix)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, c.nodes[l] * c.K);
  if (!d.inside()) return;
  const int64_t x = d.at / c.K, ch = d.at % c.K, first = x * c.span[l];
  double sum = 0;
  for (int64_t i = min(first + c.span[l], c.T) - 1; i >= first; --i) {
    const int64_t at = (d.unit * c.T + i) * c.K + ch;
    sum += c.steps[at];
    const double dq = (l == 0 ? 0 : c.dquery[at]) + sum;
    c.dquery[at] = dq;
    if (l + 1 == c.depth) put(c.dq, d.n(i, 0) > 0 ? static_cast<float>(dq) : 0, d.b, i, d.h, ch);
  }
}
// Of one head; the sum over the batch is another kernel's.
LINNET_KERNEL(hierarchical_positions)(const __grid_constant__ HierarchicalCall c, int l) {
  const Head d(c, c.nodes[l] * c.E);
  if (!d.inside()) return;
  const int64_t z = d.at / c.E, e = d.at % c.E;
  double sum = 0;
  if (l < c.depth) {
    const int64_t size = c.size[l + 1], a = z / size, own = z - a * size;
    for (int64_t row = d.first_row(a, l); row < d.last_row(a, l); ++row) {
      const double key = c.ds[d.pair_at(l, row, own)];
      const int64_t x = d.node_of(row, l);
      if (key != 0) sum += key * d.pos(x, l, e);
      for (int64_t j = 0; x == z && j < size; ++j) {
        const double query = c.ds[d.pair_at(l, row, j)];
        if (query != 0) sum += query * d.pos(a * size + j, l, e);
      }
    }
  }
  if (c.base[l] + z >= c.pos_nodes) return;
  c.dpos[((d.b * c.pos_nodes + c.base[l] + z) * c.H + d.h) * c.E + e] = static_cast<float>(sum);
}

}  // namespace linnet::cuda
