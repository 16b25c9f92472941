// tie = block: the two passes over the tree, and their adjoints (docs/mechanisms/hierarchical.md).
#pragma once

#include "hierarchical_family.h"

namespace linnet::LINNET_ISA {

template <class T>
struct BlockWork {
  double* g;                         // [N]: logits of a hundred, whose differences count: f32 would round each by 4e-6
  T* mass;                           // [N]
  T* out;                            // forward: [I, ldv]
  T *dm, *dg, *dout, *dq, *dk, *dv;  // backward: [N] twice, then [I, ld]
  T* dpos;                           // backward: [N, lde]
  BlockWork(Arena& arena, const HierarchicalShape<T>& s, int64_t, bool backward) {
    const auto take = [&](bool wanted, int64_t count) { return arena.take<T>(wanted ? count : 0); };
    g = arena.take<double>(s.N), mass = take(true, s.N), out = take(!backward, s.I * s.ldv);
    dm = take(backward, s.N), dg = take(backward, s.N);
    dout = take(backward, s.I * s.ldv), dv = take(backward, s.I * s.ldv);
    dq = take(backward, s.I * s.ldk), dk = take(backward, s.I * s.ldk);
    dpos = take(backward, s.N * s.lde);
  }
};

// g and the means of A; its children are done.
template <class T>
void block_up(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const BlockWork<T>& w, int64_t A) {
  const int64_t* const child = head.tree->children(A);
  const int m = static_cast<int>(head.tree->family(A));
  prefetch_children(head, A + 1);
  pool(head, x, A, true);
  w.g[A] = head.n[A] == 0 ? -kInfinity<double> : 0;
  if (head.n[A] == 0) return;
  load_keys(head, x, child, m, false);
  for (int j0 = 0; j0 < m; j0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, m - j0));
    family_weights(head, x, w.g, A, j0, lanes);
    for (int i = 0; i < lanes; ++i) {
      const int64_t c = child[j0 + i];
      const T n = head.n[c], bias = x.bias[j0 + i];
      if (n == 0) continue;
      double lambda = static_cast<double>(x.line[5][i]) + static_cast<double>(x.line[6][i]);
      const T p = x.strip[0][(j0 + i) * kLanes + i] * x.line[1][i];
      if (c >= head.tree->T && p != 0) {  // what the strip's rounding took from g(c)
        const T entry = static_cast<T>(w.g[c] + static_cast<double>(bias)) - bias;
        lambda += static_cast<double>(p) * (w.g[c] - static_cast<double>(entry));
      }
      w.g[A] += static_cast<double>(n) / static_cast<double>(head.n[A]) * lambda;
    }
  }
}

// The diagonal of lanes j0 .. of the strip: inner children's entries are taken out and handed to f(lane, node, entry).
template <class T, class F>
LINNET_INLINE void take_inner_diagonal(const HierarchicalHead<T>& head, T* strip, int64_t A, int j0, int lanes, const F& f) {
  const int64_t* const child = head.tree->children(A);
  for (int i = 0; i < lanes; ++i) {
    if (child[j0 + i] < head.tree->T) continue;
    T& entry = strip[(j0 + i) * kLanes + i];
    f(i, child[j0 + i], entry);
    entry = 0;
  }
}

// O and M of the children of A, out of its leaves.
template <class T>
void block_down(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const BlockWork<T>& w, int64_t A,
                const View& out) {
  using X = Vec<T>;
  const auto& s = x.s;
  const int64_t* const child = head.tree->children(A);
  const int m = static_cast<int>(head.tree->family(A)), V = static_cast<int>(s.V);
  const int64_t wide = s.lda + s.ldv;
  const T* const above = w.out + (A - head.tree->T) * s.ldv;
  const T mass = w.mass[A];
  prefetch_children(head, A - 1);
  load_keys(head, x, child, m, true);
  for (int j0 = 0; j0 < m; j0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, m - j0));
    family_weights(head, x, w.g, A, j0, lanes);
    T* const factor = x.line[1];
    for (int i = 0; i < lanes; ++i) factor[i] *= mass;
    take_inner_diagonal(head, x.strip[0], A, j0, lanes, [&](int i, int64_t c, T p) { w.mass[c] = p * factor[i]; });
    gemm<T>(lanes, V, m, transposed(x.strip[0], kLanes), x.kv + s.lda, wide, x.rows, s.ldv, RowScale<T>{factor});
    for (int i = 0; i < lanes; ++i) {
      for (int c = 0; c < V; c += X::W) {
        X::store(x.rows + i * s.ldv + c, X::load(x.rows + i * s.ldv + c) + X::load(above + c));
      }
    }
    store_children(head, out, w.out, s.ldv, child + j0, lanes, x.rows, s.ldv, V);
  }
}

// M of the inner children of A.
template <class T>
void block_masses(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const BlockWork<T>& w, int64_t A) {
  const int64_t* const child = head.tree->children(A);
  const int m = static_cast<int>(head.tree->family(A));
  bool inner = false;
  for (int i = 0; i < m; ++i) inner |= child[i] >= head.tree->T;
  if (!inner) return;
  load_keys(head, x, child, m, false);
  for (int j0 = 0; j0 < m; j0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, m - j0));
    family_weights(head, x, w.g, A, j0, lanes);
    take_inner_diagonal(head, x.strip[0], A, j0, lanes,
                        [&](int i, int64_t c, T p) { w.mass[c] = p * x.line[1][i] * w.mass[A]; });
  }
}

// strip 1 [m, lanes] = dO_c . rho_v(c'), with dM_c on the diagonal of inner children; rows of dO in x.rows [lanes, ldv].
template <class T>
void value_products(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const BlockWork<T>& w, int64_t A, int j0,
                    int lanes, const View& dout) {
  const auto& s = x.s;
  const int64_t* const child = head.tree->children(A);
  const int m = static_cast<int>(head.tree->family(A)), V = static_cast<int>(s.V);
  const int whole = static_cast<int>(round_up<T>(lanes));
  gather_dout(head, x, dout, w.dout, child + j0, lanes);
  clear_rows(x.rows + lanes * s.ldv, (whole - lanes) * s.ldv);
  load_tile_transposed<T>(x.rows, s.ldv, whole, V, x.qt, kLanes);
  gemm<T>(m, lanes, V, as_is(x.kv + s.lda, s.lda + s.ldv), x.qt, kLanes, x.strip[1], kLanes, Store{});
  for (int i = 0; i < lanes; ++i) {
    if (child[j0 + i] >= head.tree->T) x.strip[1][(j0 + i) * kLanes + i] = w.dm[child[j0 + i]];
  }
}

// Pass 1, bottom-up: dO(A) and dM(A).
template <class T>
void block_backward_up(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const BlockWork<T>& w, int64_t A,
                       const View& dout) {
  using X = Vec<T>;
  const auto& s = x.s;
  const int64_t* const child = head.tree->children(A);
  const int m = static_cast<int>(head.tree->family(A));
  T *const row = w.dout + (A - head.tree->T) * s.ldv, *const ones = x.line[3], *const r = x.line[4];
  clear_rows(row, s.ldv);
  w.dm[A] = 0;
  for (int i = 0; i < kLanes; ++i) ones[i] = 1;
  load_keys(head, x, child, m, true);
  for (int j0 = 0; j0 < m; j0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, m - j0));
    family_weights(head, x, w.g, A, j0, lanes);
    value_products(head, x, w, A, j0, lanes, dout);
    add_mean(x.rows, s.ldv, lanes, ones, s.ldv, row);
    for (int v = 0; v < lanes; v += X::W) {
      typename X::V sum = X::zero();
      for (int i = 0; i < m; ++i) {
        const int64_t at = static_cast<int64_t>(i) * kLanes + v;
        sum = fma(X::load(x.strip[0] + at), X::load(x.strip[1] + at), sum);
      }
      X::store(r + v, sum * X::load(x.line[1] + v));
    }
    for (int i = 0; i < lanes; ++i) {
      if (head.n[child[j0 + i]] != 0) w.dm[A] += r[i];
    }
  }
}

// Pass 2, top-down: gradients of the means of the children of A, of its leaves' q, k, v.
template <class T>
void block_backward_down(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const BlockWork<T>& w, int64_t A,
                         const HierarchicalGrads& grads) {
  using X = Vec<T>;
  using V = typename X::V;
  const auto& s = x.s;
  const HierarchicalTree& tree = *head.tree;
  const int64_t* const child = tree.children(A);
  const int m = static_cast<int>(tree.family(A)), K = static_cast<int>(s.K), width = static_cast<int>(s.V);
  const int64_t wide = s.lda + s.ldv, at = A - tree.T;
  const int depth = static_cast<int>(s.depth);
  const T scale = static_cast<T>(s.scale), mass = w.mass[A];
  T *const e = x.line[3], *const share = x.line[4];
  load_keys(head, x, child, m, true);
  clear_rows(x.acc, m * wide);
  for (int j0 = 0; j0 < m; j0 += kLanes) {
    const int lanes = static_cast<int>(smaller(kLanes, m - j0));
    T *const W = x.strip[0], *const dS = x.strip[1];
    family_weights(head, x, w.g, A, j0, lanes);
    value_products(head, x, w, A, j0, lanes, grads.dout);
    for (int i = 0; i < kLanes; ++i) {
      const T n = i < lanes ? head.n[child[j0 + i]] : T(0);
      share[i] = n == 0 ? T(0) : n / head.n[A];
      e[i] = share[i] * w.dg[A];
      if (n == 0) x.line[1][i] = 0;  // rows of masked nodes weigh nothing
    }
    for (int v = 0; v < lanes; v += X::W) {
      const V inverse = X::load(x.line[1] + v), common = at_heaviest(W, dS, m, v);
      V mean = X::zero();
      for (int i = 0; i < m; ++i) {
        const int64_t cell = static_cast<int64_t>(i) * kLanes + v;
        const V p = X::load(W + cell) * inverse, d = X::load(dS + cell) - common;
        X::store(W + cell, p);
        X::store(dS + cell, d);
        mean = fma(p, d, mean);
      }
      for (int i = 0; i < m; ++i) {
        const int64_t cell = static_cast<int64_t>(i) * kLanes + v;
        X::store(dS + cell, X::load(W + cell) * fma(X::broadcast(mass), X::load(dS + cell) - mean, X::load(e + v)));
      }
    }
    take_inner_diagonal(head, dS, A, j0, lanes, [&](int, int64_t c, T d) { w.dg[c] = d; });
    take_inner_diagonal(head, W, A, j0, lanes, [](int, int64_t, T) {});
    for (int i = 0; i < lanes; ++i) {  // positions of queries count unscaled, their other channels with the scale
      for (int64_t c = 0; c < s.ldk; c += X::W) X::store(x.qrow + i * s.lda + c, X::load(x.qrow + i * s.lda + c) * scale);
      for (int64_t c = 0; c < s.ldv; c += X::W) X::store(x.rows + i * s.ldv + c, X::load(x.rows + i * s.ldv + c) * mass);
    }
    gemm<T>(m, depth, lanes, as_is(dS, kLanes), x.qrow, s.lda, x.acc, wide, Add{});
    gemm<T>(m, width, lanes, as_is(W, kLanes), x.rows, s.ldv, x.acc + s.lda, wide, Add{});
    gemm<T>(lanes, depth, m, transposed(dS, kLanes), x.kv, wide, x.qrow, s.lda, Store{});
    for (int i = 0; i < lanes; ++i) {
      T* const row = x.qrow + i * s.lda;
      if (s.E > 0) add_rows(row + s.ldk, 0, 1, static_cast<int>(s.E), w.dpos + child[j0 + i] * s.lde, 0, T(1));
      for (int64_t c = 0; c < s.ldk; c += X::W) {
        X::store(row + c, fma(X::broadcast(share[i]), X::load(w.dq + at * s.ldk + c), X::load(row + c) * scale));
      }
    }
    store_children(head, grads.dq, w.dq, s.ldk, child + j0, lanes, x.qrow, s.lda, K);
  }
  for (int i = 0; i < m; ++i) {
    T* const row = x.acc + i * wide;
    const T part = head.n[A] == 0 ? T(0) : head.n[child[i]] / head.n[A];
    if (s.E > 0) add_rows(row + s.ldk, 0, 1, static_cast<int>(s.E), w.dpos + child[i] * s.lde, 0, T(1));
    for (int64_t c = 0; c < s.ldk; c += X::W) {
      X::store(row + c, fma(X::broadcast(part), X::load(w.dk + at * s.ldk + c), X::load(row + c)));
    }
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      X::store(row + s.lda + c, fma(X::broadcast(part), X::load(w.dv + at * s.ldv + c), X::load(row + s.lda + c)));
    }
  }
  store_children(head, grads.dk, w.dk, s.ldk, child, m, x.acc, wide, K);
  store_children(head, grads.dv, w.dv, s.ldv, child, m, x.acc + s.lda, wide, width);
}

}  // namespace linnet::LINNET_ISA
