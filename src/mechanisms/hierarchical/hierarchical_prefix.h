// tie = prefix: strictly causal. Row i is that of tie = block, causal, on the tree cut behind token i: only what depends on the
// tokens so far of the nodes on its path changes from token to token (sums of queries and of energies), everything else is the
// finished siblings to the left. One token after the other, T depth arity rows in all.
//
// Nodes of a path count from the root (d) where they carry sums, from the leaf (l) in the equations.
#pragma once

#include "hierarchical_family.h"

namespace linnet::LINNET_ISA {

template <class T>
struct PrefixWork {
  int64_t levels;
  int64_t* path;           // [levels]: from the leaf to the root
  int64_t* open;           // [levels]: node whose sums stand at d
  double *sum_q, *sum_dq;  // [levels, ldk]: queries of the open nodes so far; backward: gradients from later tokens
  double *sum_g, *seen;    // [levels]: n Lambda of finished children; tokens so far
  T *mass, *dm;            // [levels]
  double *g, *lambda;      // [T or 1, levels]: as large as logits, and only their differences count
  int* segment;            // [levels + 1]: where the siblings of each l begin in the list
  double* sum_w;           // backward: [N]
  T *dkv, *dpos;           // backward: [N, ldk + ldv], [N, lde]
  bool kept;
  PrefixWork(Arena& arena, const HierarchicalShape<T>& s, int64_t depth, bool backward) : levels(depth + 2), kept(backward) {
    path = arena.take<int64_t>(levels), open = arena.take<int64_t>(levels);
    sum_q = arena.take<double>(levels * s.ldk), sum_dq = arena.take<double>(backward ? levels * s.ldk : 0);
    sum_g = arena.take<double>(levels), seen = arena.take<double>(levels);
    mass = arena.take<T>(levels), dm = arena.take<T>(levels);
    g = arena.take<double>((backward ? s.T_ : 1) * levels), lambda = arena.take<double>((backward ? s.T_ : 1) * levels);
    segment = arena.take<int>(levels + 1);
    sum_w = arena.take<double>(backward ? s.N : 0);
    dkv = arena.take<T>(backward ? s.N * (s.ldk + s.ldv) : 0);
    dpos = arena.take<T>(backward ? s.N * s.lde : 0);
  }
};

// The path of token i and its list: left siblings level by level, the token itself last. Returns the level of the root.
template <class T>
int64_t prefix_list(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const PrefixWork<T>& w, int64_t i) {
  const HierarchicalTree& tree = *head.tree;
  int n = 0;
  int64_t l = 0;
  for (int64_t c = i;; c = tree.parent[c], ++l) {
    w.path[l] = c;
    w.segment[l] = n;
    if (tree.parent[c] == -1) break;
    for (int64_t at = 0; at < tree.slot[c]; ++at) {
      const int64_t z = tree.children(tree.parent[c])[at];
      if (head.n[z] != 0) x.nodes[n++] = z;
    }
  }
  x.nodes[n] = i;
  load_keys(head, x, x.nodes, n + 1, true);
  head.gather(head.args->q, head.q, x.s.ldk, &i, 1, x.qrow, x.s.lda);
  return l;
}

// The query of level l in x.rows: the mean of the queries so far, and the position, ready for logits in base 2.
template <class T>
void prefix_query(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const PrefixWork<T>& w, int64_t l,
                  int64_t d) {
  const auto& s = x.s;
  const double factor = s.scale * kLog2e<double> / w.seen[d];
  const double* const sums = w.sum_q + d * s.ldk;
  for (int64_t c = 0; c < s.ldk; ++c) x.rows[c] = static_cast<T>(sums[c] * factor);
  if (s.E == 0) return;
  head.gather_pos(w.path + l, 1, x.rows + s.ldk, s.lda);
  for (int64_t c = s.ldk; c < s.lda; ++c) x.rows[c] *= kLog2e<T>;
}

// The product of the query in x.rows and key i of the list; lanes are added in double, a logit of 100 is not rounded.
template <class T>
double prefix_logit(const HierarchicalScratch<T>& x, int i) {
  using X = Vec<T>;
  const T* const key = x.kv + i * (x.s.lda + x.s.ldv);
  const int depth = static_cast<int>(x.s.depth);
  typename X::V total = X::zero();
  for (int c = 0; c < depth; c += X::W) total = fma(X::load(x.rows + c, depth - c), X::load(key + c, depth - c), total);
  T lanes[X::W];
  X::store(lanes, total);
  double sum = 0;
  for (const T lane : lanes) sum += static_cast<double>(lane);
  return sum;
}
// Logits of level l's siblings.
template <class T>
void prefix_logits(const HierarchicalScratch<T>& x, const PrefixWork<T>& w, int64_t l) {
  for (int i = w.segment[l]; i < w.segment[l + 1]; ++i) x.logit[i] = prefix_logit(x, i) - static_cast<double>(x.bias[i]);
}

// 2^(logit - shift) of n logits; an exponential per lane.
template <class T>
void prefix_exponentials(const double* logits, int n, double shift, T factor, T* to) {
  using X = Vec<T>;
  for (int i = 0; i < n; i += X::W) {
    T difference[X::W];
    for (int j = 0; j < X::W; ++j) difference[j] = i + j < n ? static_cast<T>(logits[i + j] - shift) : T(0);
    X::store(to + i, exp2_nonpositive(X::load(difference)) * factor, n - i);
  }
}
// log2 of sum_i 2^logit and 2^g; `spare` holds n numbers.
template <class T>
double prefix_normaliser(const double* logits, int n, double g, T* spare) {
  using X = Vec<T>;
  double top = g;
  for (int i = 0; i < n; ++i) top = logits[i] > top || logits[i] != logits[i] ? logits[i] : top;
  prefix_exponentials(logits, n, top, T(1), spare);
  T one[X::W];
  X::store(one, exp2_nonpositive(X::broadcast(static_cast<T>(g - top))));
  T total = one[0];
  for (int i = 0; i < n; ++i) total += spare[i];
  X::store(one, log2_of<T>(X::broadcast(total)));
  return top + static_cast<double>(one[0]);
}
template <class T>
T prefix_exp2(double x) {
  T one[Vec<T>::W];
  Vec<T>::store(one, exp2_nonpositive(Vec<T>::broadcast(static_cast<T>(x))));
  return one[0];
}

// Logits of the list, g and Lambda of every level, masses. Sums of the open nodes include token i.
template <class T>
void prefix_up(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const PrefixWork<T>& w, int64_t root,
               double* g, double* lambda, bool known) {
  const int own = w.segment[root];
  for (int64_t l = 0; l < root; ++l) {
    const int64_t d = root - l;
    if (l == 0 || w.segment[l + 1] > w.segment[l]) prefix_query(head, x, w, l, d);
    if (l == 0) {
      x.logit[own] = prefix_logit(x, own);
      if (!known) g[0] = x.logit[own];
    }
    prefix_logits(x, w, l);
    if (known) continue;
    lambda[l] = prefix_normaliser(x.logit + w.segment[l], w.segment[l + 1] - w.segment[l], g[l], x.strip[0]);
    g[l + 1] = (w.sum_g[d - 1] + w.seen[d] * lambda[l]) / w.seen[d - 1];
  }
  w.mass[root] = 1;
  for (int64_t l = root - 1; l >= 0; --l) w.mass[l] = w.mass[l + 1] * prefix_exp2<T>(g[l] - lambda[l]);
}

// Adds token i to the open nodes; nodes that begin here start from nothing.
template <class T>
void prefix_enter(const HierarchicalScratch<T>& x, const PrefixWork<T>& w, int64_t root) {
  const int64_t ldk = x.s.ldk;
  for (int64_t l = 0; l <= root; ++l) {
    const int64_t d = root - l;
    double* const sums = w.sum_q + d * ldk;
    if (w.open[d] != w.path[l] || l == 0) {
      w.open[d] = w.path[l];
      w.sum_g[d] = w.seen[d] = 0;
      for (int64_t c = 0; c < ldk; ++c) sums[c] = 0;
    }
    w.seen[d] += 1;
    for (int64_t c = 0; c < ldk; ++c) sums[c] += static_cast<double>(x.qrow[c]);
  }
  for (int64_t d = root + 1; d < w.levels; ++d) w.open[d] = -1;
}

// sum_j theta_j (log theta_j - s_j) of the row whose weights stand in strip 0, in natural units. Logits count from the token's
// own: the rounding of sum theta = 1 would be multiplied by their size.
template <class T>
double prefix_divergence(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const PrefixWork<T>& w,
                         int64_t root) {
  const auto& s = x.s;
  const int own = w.segment[root];
  double sum = 0;
  T self = 0;
  for (int64_t c = 0; c < s.ldk; ++c) x.rows[c] = x.qrow[c] * static_cast<T>(s.scale * kLog2e<double>);
  for (int64_t l = 0; l <= root; ++l) {
    if (s.E > 0 && l < root) {
      head.gather_pos(w.path + l, 1, x.rows + s.ldk, s.lda);
      for (int64_t c = s.ldk; c < s.lda; ++c) x.rows[c] *= kLog2e<T>;
    }
    const auto logit = [&](int i) { return dot_rows(x.rows, x.kv + i * (s.lda + s.ldv), static_cast<int>(s.depth)); };
    const auto add = [&](int i, T more) {
      const double p = static_cast<double>(x.strip[0][i]);
      if (p != 0) sum += p * (__builtin_log(p) + static_cast<double>(x.bias[i] - more) * kLn2<double>);
    };
    if (l == 0) {
      self = logit(own);
      add(own, 0);
    }
    for (int i = w.segment[l]; l < root && i < w.segment[l + 1]; ++i) add(i, logit(i) - self);
  }
  return sum - static_cast<double>(self) * kLn2<double>;
}

// The whole head: out (where given), and g and Lambda of every pair when kept. Returns the energy of the last token. With gap:
// the sum over the sampled rows of sum_j theta (log theta - s), which the softmax's log-normaliser turns into the KL
// divergence.
template <class T>
double prefix_forward(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const PrefixWork<T>& w, const View& out,
                      bool with_gap, double* gap) {
  const auto& s = x.s;
  const HierarchicalTree& tree = *head.tree;
  const int64_t wanted = head.args->kl_rows, sampled = wanted == 0 || wanted > tree.T ? tree.T : wanted;
  int64_t next = 0;  // sample
  *gap = 0;
  const int64_t wide = s.lda + s.ldv;
  const int V = static_cast<int>(s.V);
  double energy = -__builtin_inf();
  for (int64_t d = 0; d < w.levels; ++d) w.open[d] = -1;
  for (int64_t i = 0; i < tree.T; ++i) {
    T* const row = x.rows;
    if (head.n[i] != 0) {
      const int64_t root = prefix_list(head, x, w, i), cell = w.kept ? i * w.levels : 0;
      double *const g = w.g + cell, *const lambda = w.lambda + cell;
      T* const p = x.strip[0];
      prefix_enter(x, w, root);
      prefix_up(head, x, w, root, g, lambda, false);
      for (int64_t l = 0; l < root; ++l) {  // nodes that end here are final for their siblings
        const int64_t d = root - l;
        if (w.seen[d] == static_cast<double>(head.n[w.path[l]])) w.sum_g[d - 1] += w.seen[d] * lambda[l];
      }
      energy = g[root] * kLn2<double>;
      if (!out.given()) continue;
      for (int64_t l = 0; l < root; ++l) {
        const int begin = w.segment[l], n = w.segment[l + 1] - begin;
        prefix_exponentials(x.logit + begin, n, lambda[l], w.mass[l + 1], p + begin);
      }
      p[w.segment[root]] = w.mass[0];
      while (next < sampled && next * tree.T / sampled < i) ++next;
      if (with_gap && next * tree.T / sampled == i) *gap += prefix_divergence(head, x, w, root);
      clear_rows(row, s.ldv);
      add_mean(x.kv + s.lda, wide, w.segment[root] + 1, p, s.ldv, row);
    }
    store_children(head, out, static_cast<T*>(nullptr), 0, &i, 1, row, s.ldv, V);
  }
  return energy;
}

// The sums of the open nodes as they stood at token i, walking from the last token to the first.
template <class T>
void prefix_enter_back(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const PrefixWork<T>& w, int64_t root) {
  const auto& s = x.s;
  const HierarchicalTree& tree = *head.tree;
  for (int64_t l = 0; l <= root; ++l) {
    const int64_t d = root - l, node = w.path[l];
    if (w.open[d] == node) continue;
    double *const sums = w.sum_q + d * s.ldk, *const later = w.sum_dq + d * s.ldk;
    w.open[d] = node;
    w.seen[d] = static_cast<double>(head.n[node]);
    for (int64_t c = 0; c < s.ldk; ++c) sums[c] = later[c] = 0;
    for (int64_t t = tree.first[node]; t <= tree.last[node]; ++t) {  // from the start, not by subtraction from above: exact
      head.gather(head.args->q, head.q, s.ldk, &t, 1, x.rows, s.lda);
      for (int64_t c = 0; c < s.ldk; ++c) sums[c] += static_cast<double>(x.rows[c]);
    }
  }
  for (int64_t d = root + 1; d < w.levels; ++d) w.open[d] = -1;
}

template <class T>
void prefix_backward(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const PrefixWork<T>& w,
                     const HierarchicalGrads& grads, double denergy) {
  const auto& s = x.s;
  const HierarchicalTree& tree = *head.tree;
  const int64_t wide = s.lda + s.ldv, both = s.ldk + s.ldv;
  const int V = static_cast<int>(s.V), K = static_cast<int>(s.K), E = static_cast<int>(s.E);
  const T scale = static_cast<T>(s.scale);
  T *const query = x.rows + s.lda, *const dquery = query + s.ldk, *const dout = x.acc;  // rows of x.rows [64, lda + ldv], x.acc
  for (int64_t d = 0; d < w.levels; ++d) w.open[d] = -1;
  for (int64_t i = 0; i < tree.N; ++i) w.sum_w[i] = 0;
  bool last = true;
  for (int64_t i = tree.T - 1; i >= 0; --i) {
    if (head.n[i] == 0) {
      store_children(head, grads.dq, static_cast<T*>(nullptr), 0, &i, 1, dquery, s.ldk, K);  // zeros
      continue;
    }
    const int64_t root = prefix_list(head, x, w, i), cell = i * w.levels;
    double *const g = w.g + cell, *const lambda = w.lambda + cell;
    T *const p = x.strip[0], *const t = x.strip[1];
    const int own = w.segment[root];
    prefix_enter_back(head, x, w, root);
    prefix_up(head, x, w, root, g, lambda, true);
    if (grads.dout.given()) {
      head.gather(grads.dout, static_cast<const T*>(nullptr), 0, &i, 1, dout, s.ldv);
    } else {
      clear_rows(dout, s.ldv);
    }
    for (int at = 0; at <= own; ++at) t[at] = dot_rows(dout, x.kv + at * wide + s.lda, V);
    w.dm[0] = t[own];
    for (int64_t l = 0; l < root; ++l) {
      const int begin = w.segment[l], n = w.segment[l + 1] - begin;
      prefix_exponentials(x.logit + begin, n, lambda[l], T(1), p + begin);
      w.dm[l + 1] = prefix_exp2<T>(g[l] - lambda[l]) * w.dm[l];
      for (int at = begin; at < begin + n; ++at) w.dm[l + 1] += p[at] * t[at];
    }
    double dg = last ? denergy : 0;
    last = false;
    clear_rows(dquery, s.ldk);
    for (int64_t l = root - 1; l >= 0; --l) {
      const int64_t d = root - l, A = w.path[l + 1], c = w.path[l];
      const double share = dg / w.seen[d - 1];
      // Products less the heaviest key's: its own term would otherwise be the difference of two equal numbers.
      const T mu = prefix_exp2<T>(g[l] - lambda[l]);
      T most = mu, common = w.dm[l];
      for (int at = w.segment[l]; at < w.segment[l + 1]; ++at) {
        if (p[at] > most) most = p[at], common = t[at];
      }
      T rest = mu * (w.dm[l] - common);
      for (int at = w.segment[l]; at < w.segment[l + 1]; ++at) rest += p[at] * (t[at] - common);
      double e = w.seen[d] * share - static_cast<double>(w.mass[l + 1] * rest);
      if (w.seen[d] == static_cast<double>(head.n[c]))
        e += w.seen[d] * w.sum_w[A];  // the last token of c speaks for later ones
      w.sum_w[A] += share;
      double *const sums = w.sum_q + d * s.ldk, *const later = w.sum_dq + d * s.ldk;
      if (w.segment[l + 1] > w.segment[l]) {
        for (int64_t q = 0; q < s.ldk; ++q) query[q] = static_cast<T>(sums[q] / w.seen[d]);
        clear_rows(x.rows, s.lda);  // gradient of the mean query
        T* const pos = x.rows + s.ldk;
        for (int at = w.segment[l]; at < w.segment[l + 1]; ++at) {
          const T da = p[at] * (w.mass[l + 1] * (t[at] - common) + static_cast<T>(e));
          const int64_t z = x.nodes[at];
          add_rows(x.kv + at * wide, 0, 1, K, x.rows, 0, da);
          add_rows(query, 0, 1, K, w.dkv + z * both, 0, da * scale);
          add_rows(dout, 0, 1, V, w.dkv + z * both + s.ldk, 0, p[at] * w.mass[l + 1]);
          if (E == 0) continue;
          add_rows(x.kv + at * wide + s.ldk, 0, 1, E, w.dpos + c * s.lde, 0, da);
          head.gather_pos(&c, 1, pos, s.lda);
          add_rows(pos, 0, 1, E, w.dpos + z * s.lde, 0, da);
        }
        for (int64_t q = 0; q < s.ldk; ++q) later[q] += static_cast<double>(x.rows[q] * scale) / w.seen[d];
      }
      dg = static_cast<double>(mu) * (static_cast<double>(w.mass[l + 1] * (w.dm[l] - common)) + e);
      for (int64_t q = 0; q < s.ldk; ++q) dquery[q] += static_cast<T>(later[q]);
    }
    const T self = static_cast<T>(dg);
    add_rows(x.kv + own * wide, 0, 1, K, dquery, 0, self * scale);
    add_rows(x.qrow, 0, 1, K, w.dkv + i * both, 0, self * scale);
    add_rows(dout, 0, 1, V, w.dkv + i * both + s.ldk, 0, w.mass[0]);
    if (E > 0) add_rows(x.kv + own * wide + s.ldk, 0, 1, E, w.dpos + i * s.lde, 0, 2 * self);
    store_children(head, grads.dq, static_cast<T*>(nullptr), 0, &i, 1, dquery, s.ldk, K);
    for (int64_t d = 0; d <= root; ++d) {  // token i leaves
      w.seen[d] -= 1;
      for (int64_t q = 0; q < s.ldk; ++q) w.sum_q[d * s.ldk + q] -= static_cast<double>(x.qrow[q]);
    }
  }
}

}  // namespace linnet::LINNET_ISA
