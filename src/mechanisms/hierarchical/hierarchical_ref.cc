// The specification of `hierarchical`: the recursion of hierarchical.h as plain loops in double, one head at a time.
//
// A masked token is a leaf of count 0; nodes of count 0 are skipped everywhere. A row without an admissible pair has
// Lambda = -inf and weights 0, and makes g of its parent -inf.
#include <cmath>
#include <vector>

#include "core/half.h"
#include "core/op.h"
#include "hierarchical_tree.h"

namespace linnet::ref {
namespace {

constexpr double kMinusInfinity = -HUGE_VAL;

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}
void add_scaled(double* y, double a, const double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}
void clear(double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = 0;
}

// Softmax in place, -inf is skipped; returns the logsumexp.
double softmax(double* x, int64_t n) {
  double m = kMinusInfinity, sum = 0;
  for (int64_t i = 0; i < n; ++i) m = x[i] > m || std::isnan(x[i]) ? x[i] : m;
  if (m == kMinusInfinity) {
    clear(x, n);
    return kMinusInfinity;
  }
  for (int64_t i = 0; i < n; ++i) sum += x[i] = x[i] == kMinusInfinity ? 0 : std::exp(x[i] - m);
  for (int64_t i = 0; i < n; ++i) x[i] /= sum;
  return m + std::log(sum);
}

// One head of one batch row.
struct Head {
  const HierarchicalArgs& args;
  HierarchicalTree tree;
  int64_t K, V, E, T, N, b = 0, h = 0;
  double scale, largest = 0;
  double rows = 0;                                   // that have something to attend to
  double *q, *k, *v, *pos;                           // [N, K], [N, K], [N, V], [N, E]: means over the leaves
  double *n, *g, *mass;                              // [N]
  double* out;                                       // [N, V]
  double* x;                                         // logits and weights of one row: [N + 1]
  double *dq, *dk, *dv, *dpos, *dg, *dm, *dout, *D;  // backward, alike

  Head(const HierarchicalArgs& a, Arena& arena, bool backward, bool fill) : args(a), tree(hierarchical_tree(a, arena, fill)) {
    K = a.q.size[3], V = a.v.size[3], E = a.pos.given() ? a.pos.size[2] : 0, T = tree.T, N = tree.N;
    scale = a.scale.value_or(1 / std::sqrt(static_cast<double>(K)));
    const auto take = [&](int64_t width) { return arena.take<double>(N * width); };
    q = take(K), k = take(K), v = take(V), pos = take(E), n = take(1), g = take(1), mass = take(1), out = take(V);
    x = arena.take<double>(N + 1);
    if (!backward) return;
    dq = take(K), dk = take(K), dv = take(V), dpos = take(E), dg = take(1), dm = take(1), dout = take(V), D = take(1);
  }

  bool masked(int64_t t) const {
    return args.mask.given() &&
           static_cast<const uint8_t*>(args.mask.data)[b * args.mask.stride[0] + t * args.mask.stride[1]] == 0;
  }
  void load_row(const View& from, int64_t t, int64_t width, double* row) const {
    for (int64_t i = 0; i < width; ++i) {
      row[i] = load_f64(from.data, from.dtype, b * from.stride[0] + t * from.stride[1] + h * from.stride[2] + i);
    }
  }
  void store_row(const View& to, int64_t t, int64_t width, const double* row) const {
    for (int64_t i = 0; to.given() && i < width; ++i) {
      store_f64(to.data, to.dtype, b * to.stride[0] + t * to.stride[1] + h * to.stride[2] + i, row[i]);
    }
  }
  void store_one(const View& to, double value) const {
    if (to.given()) store_f64(to.data, to.dtype, b * to.stride[0] + h * to.stride[1], value);
  }

  // Means and counts of every node.
  void load() {
    for (int64_t i = 0; i < N; ++i) {
      clear(q + i * K, K), clear(k + i * K, K), clear(v + i * V, V);
      n[i] = 0;
      for (int64_t e = 0; e < E; ++e) {
        pos[i * E + e] = load_f64(args.pos.data, args.pos.dtype, i * args.pos.stride[0] + h * args.pos.stride[1] + e);
      }
    }
    for (int64_t i = 0; i < N; ++i) {
      if (i < T && !masked(i)) {
        n[i] = 1;
        load_row(args.q, i, K, q + i * K), load_row(args.k, i, K, k + i * K), load_row(args.v, i, V, v + i * V);
      }
      for (int64_t c = 0; i >= T && c < tree.family(i); ++c) n[i] += n[tree.children(i)[c]];
      for (int64_t c = 0; i >= T && n[i] > 0 && c < tree.family(i); ++c) {
        const int64_t y = tree.children(i)[c];
        add_scaled(q + i * K, n[y] / n[i], q + y * K, K);
        add_scaled(k + i * K, n[y] / n[i], k + y * K, K);
        add_scaled(v + i * V, n[y] / n[i], v + y * V, V);
      }
    }
  }
  double logit(const double* query, int64_t c, int64_t other) {  // of a query at node c for node `other`
    const double s = scale * dot(query, k + other * K, K) + dot(pos + c * E, pos + other * E, E);
    largest = std::fmax(largest, std::fabs(s));
    return s + std::log(n[other]);
  }
  double self_logit(int64_t i) { return logit(q + i * K, i, i); }

  // ---- tie = block ----------------------------------------------------------------------------------------------------------

  // Row c of the family of A: S in x, then weights; returns Lambda.
  double family_row(int64_t A, int64_t at) {
    const int64_t m = tree.family(A), *const child = tree.children(A), c = child[at];
    for (int64_t i = 0; i < m; ++i) {
      const bool seen = n[child[i]] > 0 && !(args.causal && i > at);
      x[i] = i == at ? g[c] : seen ? logit(q + c * K, c, child[i]) : kMinusInfinity;
    }
    return softmax(x, m);
  }
  void up() {
    for (int64_t i = 0; i < T; ++i) g[i] = n[i] > 0 && args.include_self ? self_logit(i) : kMinusInfinity;
    for (int64_t A = T; A < N; ++A) {
      g[A] = n[A] > 0 ? 0 : kMinusInfinity;
      for (int64_t c = 0; c < tree.family(A); ++c) {
        const double count = n[tree.children(A)[c]];
        if (count > 0) g[A] += count / n[A] * family_row(A, c);
      }
    }
  }
  void down() {
    if (N == 0) return;
    mass[N - 1] = 1;
    clear(out + (N - 1) * V, V);
    for (int64_t A = N - 1; A >= T; --A) {
      for (int64_t c = 0; c < tree.family(A); ++c) {
        const int64_t y = tree.children(A)[c];
        for (int64_t i = 0; i < V; ++i) out[y * V + i] = out[A * V + i];
        mass[y] = 0;
        if (n[y] == 0) continue;
        family_row(A, c);
        for (int64_t i = 0; i < tree.family(A); ++i) {
          if (i != c && x[i] != 0) add_scaled(out + y * V, mass[A] * x[i], v + tree.children(A)[i] * V, V);
        }
        mass[y] = mass[A] * x[c];
      }
    }
    for (int64_t i = 0; i < T; ++i) {
      if (n[i] == 0) clear(out + i * V, V);
      if (n[i] > 0 && args.include_self) add_scaled(out + i * V, mass[i], v + i * V, V);
    }
  }
  void block_backward(double denergy) {
    // Pass 1, bottom-up: the adjoint of the downward pass. D holds D_c.
    for (int64_t i = 0; i < T; ++i) dm[i] = args.include_self && n[i] > 0 ? dot(dout + i * V, v + i * V, V) : 0;
    for (int64_t A = T; A < N; ++A) {
      clear(dout + A * V, V);
      dm[A] = 0;
      for (int64_t c = 0; c < tree.family(A); ++c) {
        const int64_t y = tree.children(A)[c];
        if (n[y] == 0) continue;
        family_row(A, c);
        double r = x[c] == 0 ? 0 : x[c] * dm[y];
        for (int64_t i = 0; i < tree.family(A); ++i) {
          if (i != c && x[i] != 0) r += x[i] * dot(dout + y * V, v + tree.children(A)[i] * V, V);
        }
        add_scaled(dout + A * V, 1, dout + y * V, V);
        dm[A] += r;
        D[y] = mass[A] * r;
      }
    }
    // Pass 2, top-down: the adjoint of the upward pass.
    dg[N - 1] = g[N - 1] == kMinusInfinity ? 0 : denergy;
    for (int64_t A = N - 1; A >= T; --A) {
      for (int64_t c = 0; c < tree.family(A); ++c) {
        const int64_t y = tree.children(A)[c];
        const double share = n[A] > 0 ? n[y] / n[A] : 0;
        add_scaled(dq + y * K, share, dq + A * K, K);
        add_scaled(dk + y * K, share, dk + A * K, K);
        add_scaled(dv + y * V, share, dv + A * V, V);
      }
      for (int64_t c = 0; c < tree.family(A); ++c) {
        const int64_t y = tree.children(A)[c];
        dg[y] = 0;
        if (n[y] == 0) continue;
        if (family_row(A, c) == kMinusInfinity) continue;
        const double e = n[y] / n[A] * dg[A] - D[y];
        for (int64_t i = 0; i < tree.family(A); ++i) {
          const int64_t z = tree.children(A)[i];
          if (i == c || x[i] == 0) continue;
          const double ds = x[i] * (mass[A] * dot(dout + y * V, v + z * V, V) + e);
          pair_backward(y, q + y * K, dq + y * K, z, ds);
          add_scaled(dv + z * V, mass[A] * x[i], dout + y * V, V);
        }
        dg[y] = x[c] == 0 ? 0 : x[c] * (mass[A] * dm[y] + e);
      }
    }
    for (int64_t i = 0; i < T; ++i) {
      if (n[i] == 0 || !args.include_self) continue;
      if (dg[i] != 0) pair_backward(i, q + i * K, dq + i * K, i, dg[i]);
      add_scaled(dv + i * V, mass[i], dout + i * V, V);
    }
  }
  // ds: gradient of the logit of a query at node c for node z.
  void pair_backward(int64_t c, const double* query, double* dquery, int64_t z, double ds) const {
    add_scaled(dquery, scale * ds, k + z * K, K);
    add_scaled(dk + z * K, scale * ds, query, K);
    add_scaled(dpos + c * E, ds, pos + z * E, E);
    add_scaled(dpos + z * E, ds, pos + c * E, E);
  }
  // Gradients of the means of inner nodes go down to the leaves.
  void spread(double* d, int64_t width) const {
    for (int64_t A = N - 1; A >= T; --A) {
      for (int64_t c = 0; c < tree.family(A) && n[A] > 0; ++c) {
        const int64_t y = tree.children(A)[c];
        add_scaled(d + y * width, n[y] / n[A], d + A * width, width);
      }
    }
  }

  // ---- tie = row
  // --------------------------------------------------------------------------------------------------------------

  // Calls f(node on the path, sibling or the token itself) for all that token i sees.
  template <class F>
  void for_row(int64_t i, const F& f) const {
    if (args.include_self) f(i, i);
    for (int64_t c = i; tree.parent[c] != -1; c = tree.parent[c]) {
      const int64_t A = tree.parent[c];
      for (int64_t at = 0; at < tree.family(A); ++at) {
        const int64_t z = tree.children(A)[at];
        if (z != c && n[z] > 0 && !(args.causal && at > tree.slot[c])) f(c, z);
      }
    }
  }
  double row_weights(int64_t i, int64_t* count) {
    int64_t m = 0;
    for_row(i, [&](int64_t c, int64_t z) { x[m++] = logit(q + i * K, c, z); });
    *count = m;
    return softmax(x, m);
  }
  double row_forward() {
    double sum = 0;
    rows = 0;
    int64_t count;
    for (int64_t i = 0; i < T; ++i) {
      clear(out + i * V, V);
      if (n[i] == 0) continue;
      const double lse = row_weights(i, &count);
      if (lse != kMinusInfinity) sum += lse, ++rows;
      int64_t m = 0;
      for_row(i, [&](int64_t, int64_t z) { add_scaled(out + i * V, x[m++], v + z * V, V); });
    }
    return rows > 0 ? sum / rows : kMinusInfinity;
  }
  void row_backward(double denergy) {
    int64_t count;
    for (int64_t i = 0; i < T; ++i) {
      if (n[i] == 0 || row_weights(i, &count) == kMinusInfinity) continue;
      double delta = -denergy / rows;
      int64_t m = 0;
      for_row(i, [&](int64_t, int64_t z) { delta += x[m++] * dot(dout + i * V, v + z * V, V); });
      m = 0;
      for_row(i, [&](int64_t c, int64_t z) {
        const double p = x[m++];
        pair_backward(c, q + i * K, dq + i * K, z, p * (dot(dout + i * V, v + z * V, V) - delta));
        add_scaled(dv + z * V, p, dout + i * V, V);
      });
    }
    spread(dk, K), spread(dv, V);
  }

  // ---- tie = prefix
  // -----------------------------------------------------------------------------------------------------------

  // Values of a pair (token i, node on its path), at i * (depth + 1) + level.
  struct Pairs {
    double *g, *lambda, *mass, *count;  // [T, depth + 1]
    double* mean;                       // [T, depth + 1, K]: rq
    double *sum_q, *sum_g, *seen;       // [N, K], [N], [N]: of the tokens so far
    double *dm, *r;                     // [depth + 1]
    double *sum_w, *sum_dq;             // [N], [N, K]: of later tokens
    int64_t levels;
    Pairs(const Head& d, Arena& arena, bool backward) {
      levels = hierarchical_widths(d.args).depth + 1;
      const int64_t cells = d.T * levels;
      g = arena.take<double>(cells), lambda = arena.take<double>(cells), mass = arena.take<double>(cells);
      count = arena.take<double>(cells), mean = arena.take<double>(cells * d.K);
      sum_q = arena.take<double>(d.N * d.K), sum_g = arena.take<double>(d.N), seen = arena.take<double>(d.N);
      dm = arena.take<double>(levels), r = arena.take<double>(levels);
      sum_w = arena.take<double>(backward ? d.N : 0), sum_dq = arena.take<double>(backward ? d.N * d.K : 0);
    }
  };
  // Weights of the left siblings of node c in x, their number returned; the last entry is that of c itself.
  int64_t prefix_row(int64_t c, const double* mean, double g_of_c, double* lambda) {
    const int64_t A = tree.parent[c];
    int64_t m = 0;
    for (int64_t at = 0; at < tree.slot[c]; ++at) {
      const int64_t z = tree.children(A)[at];
      if (n[z] > 0) x[m++] = logit(mean, c, z);
    }
    x[m] = g_of_c;
    *lambda = softmax(x, m + 1);
    return m;
  }
  template <class F>
  void for_left(int64_t c, const F& f) const {
    int64_t m = 0;
    for (int64_t at = 0; at < tree.slot[c]; ++at) {
      const int64_t z = tree.children(tree.parent[c])[at];
      if (n[z] > 0) f(z, m++);
    }
  }
  double prefix_forward(const Pairs& p) {
    const int64_t levels = p.levels;
    double energy = kMinusInfinity;
    clear(p.sum_q, N * K), clear(p.sum_g, N), clear(p.seen, N);
    for (int64_t i = 0; i < T; ++i) {
      clear(out + i * V, V);
      if (n[i] == 0) continue;
      const int64_t at = i * levels;
      int64_t l = 0;
      p.g[at] = self_logit(i);
      for (int64_t c = i;; c = tree.parent[c], ++l) {
        add_scaled(p.sum_q + c * K, 1, q + i * K, K);
        p.count[at + l] = ++p.seen[c];
        for (int64_t e = 0; e < K; ++e) p.mean[(at + l) * K + e] = p.sum_q[c * K + e] / p.seen[c];
        if (l > 0) {
          p.g[at + l] = (p.sum_g[c] + p.count[at + l - 1] * p.lambda[at + l - 1]) / p.count[at + l];
        }
        if (tree.parent[c] == -1) break;
        prefix_row(c, p.mean + (at + l) * K, p.g[at + l], &p.lambda[at + l]);
      }
      energy = p.g[at + l];
      for (int64_t c = i, level = 0; tree.parent[c] != -1;
           c = tree.parent[c], ++level) {  // c ends here: final for its siblings
        if (p.seen[c] == n[c]) p.sum_g[tree.parent[c]] += n[c] * p.lambda[at + level];
      }
      p.mass[at + l] = 1;
      std::vector<int64_t> path;
      for (int64_t c = i; tree.parent[c] != -1; c = tree.parent[c]) path.push_back(c);
      for (--l; l >= 0; --l) {
        const int64_t c = path[static_cast<size_t>(l)];
        double lambda;
        const int64_t m = prefix_row(c, p.mean + (at + l) * K, p.g[at + l], &lambda);
        for_left(c, [&](int64_t z, int64_t s) { add_scaled(out + i * V, p.mass[at + l + 1] * x[s], v + z * V, V); });
        p.mass[at + l] = p.mass[at + l + 1] * x[m];
      }
      add_scaled(out + i * V, p.mass[at], v + i * V, V);
    }
    return energy;
  }
  void prefix_backward(const Pairs& p, double denergy) {
    const int64_t levels = p.levels;
    clear(p.sum_w, N), clear(p.sum_dq, N * K), clear(p.seen, N);
    bool last = true;
    for (int64_t i = T - 1; i >= 0; --i) {
      if (n[i] == 0) continue;
      const int64_t at = i * levels;
      const double* const d = dout + i * V;
      std::vector<int64_t> path;
      for (int64_t c = i; c != -1; c = tree.parent[c]) path.push_back(c);
      const auto L = static_cast<int64_t>(path.size()) - 1;
      p.dm[0] = dot(d, v + i * V, V);
      double lambda;
      for (int64_t l = 0; l < L; ++l) {
        const int64_t m = prefix_row(path[static_cast<size_t>(l)], p.mean + (at + l) * K, p.g[at + l], &lambda);
        p.r[l] = x[m] * p.dm[l];
        for_left(path[static_cast<size_t>(l)], [&](int64_t z, int64_t s) { p.r[l] += x[s] * dot(d, v + z * V, V); });
        p.dm[l + 1] = p.r[l];
      }
      double dg_above = last ? denergy : 0;  // dg of level l + 1
      last = false;
      double* const dquery = dq + i * K;
      for (int64_t l = L; l >= 0; --l) {
        const int64_t c = path[static_cast<size_t>(l)];
        double dg_here = dg_above;
        if (l < L) {
          const int64_t A = tree.parent[c];
          const double w = dg_above / p.count[at + l + 1];
          double e = p.count[at + l] * w - p.mass[at + l + 1] * p.r[l];
          if (p.count[at + l] == n[c]) e += n[c] * p.sum_w[A];  // the last leaf of c speaks for all later tokens of A
          p.sum_w[A] += w;
          const int64_t m = prefix_row(c, p.mean + (at + l) * K, p.g[at + l], &lambda);
          std::vector<double> dmean(static_cast<size_t>(K));
          for_left(c, [&](int64_t z, int64_t s) {
            const double da = x[s] * (p.mass[at + l + 1] * dot(d, v + z * V, V) + e);
            pair_backward(c, p.mean + (at + l) * K, dmean.data(), z, da);
            add_scaled(dv + z * V, p.mass[at + l + 1] * x[s], d, V);
          });
          add_scaled(p.sum_dq + c * K, 1 / p.count[at + l], dmean.data(), K);
          dg_here = x[m] * (p.mass[at + l + 1] * p.dm[l] + e);
          dg_above = dg_here;
        }
        add_scaled(dquery, 1, p.sum_dq + c * K, K);
      }
      pair_backward(i, q + i * K, dquery, i, dg_above);
      add_scaled(dv + i * V, p.mass[at], d, V);
    }
    spread(dk, K), spread(dv, V);
  }

  // ---- the gap to softmax
  // -----------------------------------------------------------------------------------------------------

  // The logit of token j in row i of the softmax that is approximated; the positions are those below the lowest common
  // ancestor.
  double flat_logit(int64_t i, int64_t j) const {
    int64_t a = i, c = j;
    while (i != j && tree.parent[a] != tree.parent[c]) {
      int64_t& lower = tree.parent[a] < tree.parent[c] ? a : c;
      lower = tree.parent[lower];
    }
    return scale * dot(q + i * K, k + j * K, K) + dot(pos + a * E, pos + c * E, E);
  }
  // Row i of tie = prefix for each token, in the first T of theta [N].
  void prefix_theta(int64_t i, const Pairs& p, double* theta) {
    clear(theta, N);
    theta[i] = p.mass[i * p.levels];
    int64_t l = 0;
    for (int64_t c = i; tree.parent[c] != -1; c = tree.parent[c], ++l) {
      double lambda;
      const int64_t pair = i * p.levels + l;
      prefix_row(c, p.mean + pair * K, p.g[pair], &lambda);
      for_left(c, [&](int64_t z, int64_t s) { theta[z] = p.mass[pair + 1] * x[s] / n[z]; });
    }
    for (int64_t z = N - 2; z >= 0; --z) theta[z] += theta[tree.parent[z]];  // every leaf under a node gets the node's weight
  }
  // Mean over rows of KL(theta_i || softmax_i), from evenly spaced ones. Block and row: log-normaliser of the softmax less that
  // of the tied rows, which the energy is the mean of; prefix: straight from the definition.
  double gap(const Pairs* p, double energy) {
    std::vector<double> theta(static_cast<size_t>(N)), s(static_cast<size_t>(T));
    const bool prefix = args.tie == HierarchicalTie::prefix;
    const int64_t looked_at = args.kl_rows == 0 || args.kl_rows > T ? T : args.kl_rows;
    double sum = 0, seen = 0;
    for (int64_t r = 0; r < looked_at; ++r) {
      const int64_t i = r * T / looked_at;
      if (n[i] == 0) continue;
      double m = kMinusInfinity, total = 0;
      for (int64_t j = 0; j < T; ++j) {
        const bool visible = n[j] > 0 && (i != j || args.include_self) && !(args.causal && j > i);
        s[static_cast<size_t>(j)] = visible ? flat_logit(i, j) : kMinusInfinity;
        m = std::fmax(m, s[static_cast<size_t>(j)]);
      }
      if (m == kMinusInfinity) continue;
      ++seen;
      for (const double logit : s) total += std::exp(logit - m);
      sum += std::log(total) + (prefix ? 0 : m);  // prefix: logits count from m
      if (prefix) prefix_theta(i, *p, theta.data());
      for (int64_t j = 0; prefix && j < T; ++j) {
        const double weight = theta[static_cast<size_t>(j)];
        if (weight > 0 && n[j] > 0) sum += weight * (std::log(weight) - (s[static_cast<size_t>(j)] - m));
      }
    }
    if (seen == 0 || energy == kMinusInfinity) return 0;
    return prefix ? sum / seen : sum / seen - energy;
  }
};

void run_forward(Head& head, const Head::Pairs* pairs, double* energy) {
  head.load();
  switch (head.args.tie) {
    case HierarchicalTie::block:
      head.up();
      head.down();
      *energy = head.N > 0 ? head.g[head.N - 1] : kMinusInfinity;
      break;
    case HierarchicalTie::prefix: *energy = head.prefix_forward(*pairs); break;
    case HierarchicalTie::row: *energy = head.row_forward(); break;
  }
}

int64_t forward(const HierarchicalArgs& args, const HierarchicalOut* out, char* workspace, double* largest) {
  Arena arena(workspace);
  Head head(args, arena, false, workspace != nullptr);
  const bool prefix = args.tie == HierarchicalTie::prefix;
  Arena none;
  const Head::Pairs pairs(head, prefix ? arena : none, false);
  if (workspace == nullptr) return arena.used();
  for (head.b = 0; head.b < args.q.size[0]; ++head.b) {
    for (head.h = 0; head.h < args.q.size[2]; ++head.h) {
      double energy;
      run_forward(head, &pairs, &energy);
      if (out == nullptr) continue;
      for (int64_t t = 0; t < head.T; ++t) head.store_row(out->out, t, head.V, head.out + t * head.V);
      head.store_one(out->energy, energy);
      if (out->kl.given()) head.store_one(out->kl, head.gap(&pairs, energy));
    }
  }
  if (largest != nullptr) *largest = head.largest;
  return 0;
}

int64_t backward(const HierarchicalArgs& args, const HierarchicalGrads& grads, char* workspace) {
  Arena arena(workspace);
  Head d(args, arena, true, workspace != nullptr);
  const bool prefix = args.tie == HierarchicalTie::prefix;
  Arena none;
  const Head::Pairs pairs(d, prefix ? arena : none, true);
  if (workspace == nullptr) return arena.used();
  for (d.h = 0; d.h < args.q.size[2]; ++d.h) {
    clear(d.dpos, d.N * d.E);
    for (d.b = 0; d.b < args.q.size[0]; ++d.b) {
      double energy;
      run_forward(d, &pairs, &energy);
      clear(d.dq, d.N * d.K), clear(d.dk, d.N * d.K), clear(d.dv, d.N * d.V), clear(d.D, d.N);
      for (int64_t t = 0; t < d.T; ++t) {
        clear(d.dout + t * d.V, d.V);
        if (grads.dout.given() && d.n[t] > 0) d.load_row(grads.dout, t, d.V, d.dout + t * d.V);
      }
      double denergy = 0;
      if (grads.denergy.given() && energy != kMinusInfinity) {
        denergy =
            load_f64(grads.denergy.data, grads.denergy.dtype, d.b * grads.denergy.stride[0] + d.h * grads.denergy.stride[1]);
      }
      if (d.N == 0) continue;
      switch (args.tie) {
        case HierarchicalTie::block: d.block_backward(denergy); break;
        case HierarchicalTie::prefix: d.prefix_backward(pairs, denergy); break;
        case HierarchicalTie::row: d.row_backward(denergy); break;
      }
      for (int64_t t = 0; t < d.T; ++t) {
        d.store_row(grads.dq, t, d.K, d.dq + t * d.K);
        d.store_row(grads.dk, t, d.K, d.dk + t * d.K);
        d.store_row(grads.dv, t, d.V, d.dv + t * d.V);
      }
    }
    for (int64_t i = 0; grads.dpos.given() && i < d.N * d.E; ++i) {
      store_f64(grads.dpos.data, grads.dpos.dtype, i / d.E * grads.dpos.stride[0] + d.h * grads.dpos.stride[1] + i % d.E,
                d.dpos[i]);
    }
  }
  return 0;
}

}  // namespace

int64_t hierarchical_workspace(const HierarchicalArgs& args, Pass pass, int) {
  return pass == Pass::forward ? forward(args, nullptr, nullptr, nullptr) : backward(args, {}, nullptr);
}
void hierarchical_forward(const HierarchicalArgs& args, const HierarchicalOut& out, const Launch& launch) {
  forward(args, &out, launch.workspace, nullptr);
}
void hierarchical_backward(const HierarchicalArgs& args, const HierarchicalOut&, const HierarchicalGrads& grads,
                           const Launch& launch) {
  backward(args, grads, launch.workspace);
}
double hierarchical_largest_logit(const HierarchicalArgs& args) {
  std::vector<char> memory(static_cast<size_t>(forward(args, nullptr, nullptr, nullptr)) + 128);
  double largest = 0;
  forward(args, nullptr, memory.data(), &largest);
  return largest;
}

}  // namespace linnet::ref
