// tie = row: queries are not pooled. The leaves of one family share all siblings further up, so their keys are one list:
// siblings of the ancestors first, then the family itself.
#pragma once

#include "hierarchical_family.h"
#include "simd/finite.h"

namespace linnet::LINNET_ISA {

template <class T>
struct RowWork {
  double *energy, *count;  // [I]: sum of the log-normalisers of a family's leaves, and how many there are
  T* dkv;                  // backward: [N, ldk + ldv]
  T* dpos;                 // backward: [N, lde]
  RowWork(Arena& arena, const HierarchicalShape<T>& s, int64_t, bool backward) {
    energy = arena.take<double>(s.I), count = arena.take<double>(s.I);
    dkv = arena.take<T>(backward ? s.N * (s.ldk + s.ldv) : 0);
    dpos = arena.take<T>(backward ? s.N * s.lde : 0);
  }
};

// f(ancestor or A, its sibling, row) for the upper rows of the list.
template <class T, class F>
LINNET_INLINE void for_upper(const HierarchicalHead<T>& head, int64_t A, const F& f) {
  const HierarchicalTree& tree = *head.tree;
  int i = 0;
  for (int64_t c = A; tree.parent[c] != -1; c = tree.parent[c]) {
    const int64_t above = tree.parent[c], end = head.args->causal ? tree.slot[c] : tree.family(above);
    for (int64_t at = 0; at < end; ++at) {
      const int64_t z = tree.children(above)[at];
      if (z != c && head.n[z] != 0) f(c, z, i++);
    }
  }
}

// Fills x.nodes and loads keys, values and bias of the list of A; returns its length, `upper` of it siblings of ancestors.
template <class T>
int row_list(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, int64_t A, int* upper) {
  const HierarchicalTree& tree = *head.tree;
  const auto& s = x.s;
  const int64_t wide = s.lda + s.ldv;
  int n = 0;
  for_upper(head, A, [&](int64_t, int64_t z, int i) {
    x.nodes[i] = z;
    n = i + 1;
  });
  *upper = n;
  for (int64_t i = 0; i < tree.family(A); ++i) x.nodes[n++] = tree.children(A)[i];
  load_keys(head, x, x.nodes, n, true);
  if (s.E == 0) return n;
  // Further up it is the ancestor's position that counts: one number for all lanes, in the bias.
  for_upper(head, A, [&](int64_t c, int64_t, int i) {
    head.gather_pos(&c, 1, x.qrow, s.lda);
    x.bias[i] -= dot_rows(x.qrow, x.kv + i * wide + s.ldk, static_cast<int>(s.E)) * kLog2e<T>;
    clear_rows(x.kv + i * wide + s.ldk, s.lde);
  });
  return n;
}
// The next leaves of A from slot `from` on, at most 64, as lanes: nodes and slots; returns where to go on.
template <class T>
int64_t row_lanes(const HierarchicalHead<T>& head, int64_t A, int64_t from, int64_t* nodes, int64_t* slots, int* lanes) {
  const HierarchicalTree& tree = *head.tree;
  *lanes = 0;
  for (; from < tree.family(A) && *lanes < kLanes; ++from) {
    const int64_t c = tree.children(A)[from];
    if (c >= tree.T) continue;
    nodes[*lanes] = c;
    slots[(*lanes)++] = from;
  }
  return from;
}

// Weights of the lanes in strip 0 (not yet divided), line[0] + line[5] the log-normaliser in base 2, line[1] 1 / sum.
template <class T>
void row_weights(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, int n, int upper, const int64_t* nodes,
                 const int64_t* slots, int lanes) {
  using X = Vec<T>;
  load_queries(head, x, nodes, lanes);
  gemm<T>(n, lanes, static_cast<int>(x.s.depth), as_is(x.kv, x.s.lda + x.s.ldv), x.qt, kLanes, x.strip[0], kLanes, Store{});
  T* const limit = x.line[2];
  for (int i = 0; i < kLanes; ++i) limit[i] = i < lanes ? static_cast<T>(upper + slots[i] + 1) : T(0);
  for (int i = 0; i < lanes && !head.args->include_self; ++i) x.strip[0][(upper + slots[i]) * kLanes + i] = -kInfinity<T>;
  strip_softmax<T>(x.strip[0], n, lanes, x.bias, head.args->causal ? limit : nullptr, nullptr, x.line[0], x.line[1], nullptr);
  for (int v = 0; v < lanes; v += X::W) {
    const typename X::V l = X::load(x.line[1] + v);
    X::store(x.line[5] + v, log2_of<T>(l));
    X::store(x.line[1] + v, select(eq(l, X::zero()), X::zero(), X::broadcast(1) / l));
  }
}

// What the lanes read, in x.rows [lanes, ldv]. Causal, and values that are not finite: a lane takes exactly the rows that it
// sees, since a weight of 0 does not hide a NaN. The bits of finite lanes are the same.
template <class T>
void row_read(const HierarchicalScratch<T>& x, int n, int upper, const int64_t* slots, int lanes, bool causal) {
  const auto& s = x.s;
  const T* const values = x.kv + s.lda;
  const int64_t wide = s.lda + s.ldv;
  const int V = static_cast<int>(s.V);
  if (!causal || rows_are_finite(values, wide, n, V)) {
    gemm<T>(lanes, V, n, transposed(x.strip[0], kLanes), values, wide, x.rows, s.ldv, RowScale<T>{x.line[1]});
    return;
  }
  for (int i = 0; i < lanes; ++i) {
    gemm<T>(1, V, upper + static_cast<int>(slots[i]) + 1, transposed(x.strip[0] + i, kLanes), values, wide, x.rows + i * s.ldv,
            s.ldv, RowScale<T>{x.line[1] + i});
  }
}

// out of the leaves of A (where given); returns the sum of the log-normalisers of those that see something, and counts them.
template <class T>
double row_forward(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, int64_t A, const View& out,
                   double* count) {
  const auto& s = x.s;
  int upper = 0, lanes = 0;
  int64_t nodes[kLanes], slots[kLanes];
  double sum = 0;
  int64_t next = row_lanes(head, A, 0, nodes, slots, &lanes);
  if (lanes == 0) return 0;
  const int n = row_list(head, x, A, &upper), V = static_cast<int>(s.V);
  for (; lanes > 0; next = row_lanes(head, A, next, nodes, slots, &lanes)) {
    row_weights(head, x, n, upper, nodes, slots, lanes);
    if (out.given()) row_read(x, n, upper, slots, lanes, head.args->causal);
    store_children(head, out, static_cast<T*>(nullptr), 0, nodes, lanes, x.rows, s.ldv, V);
    for (int i = 0; i < lanes; ++i) {
      if (head.n[nodes[i]] == 0 || x.line[5][i] == -kInfinity<T>) continue;
      sum += (static_cast<double>(x.line[0][i]) + static_cast<double>(x.line[5][i])) * kLn2<double>;
      *count += 1;
    }
  }
  return sum;
}

// Gradients of the leaves of A: dq is done, what goes to keys, values and positions is added to their nodes. denergy: per row.
template <class T>
void row_backward(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const RowWork<T>& w, int64_t A,
                  const HierarchicalGrads& grads, T denergy) {
  using X = Vec<T>;
  using V = typename X::V;
  const auto& s = x.s;
  int upper = 0, lanes = 0;
  int64_t nodes[kLanes], slots[kLanes];
  int64_t next = row_lanes(head, A, 0, nodes, slots, &lanes);
  if (lanes == 0) return;
  const int n = row_list(head, x, A, &upper), width = static_cast<int>(s.V), K = static_cast<int>(s.K);
  const int depth = static_cast<int>(s.depth);
  const int64_t wide = s.lda + s.ldv, both = s.ldk + s.ldv;
  const T scale = static_cast<T>(s.scale);
  clear_rows(x.acc, n * wide);
  for (; lanes > 0; next = row_lanes(head, A, next, nodes, slots, &lanes)) {
    T *const P = x.strip[0], *const dS = x.strip[1];
    row_weights(head, x, n, upper, nodes, slots, lanes);
    const int whole = static_cast<int>(round_up<T>(lanes));
    gather_dout(head, x, grads.dout, static_cast<const T*>(nullptr), nodes, lanes);
    clear_rows(x.rows + lanes * s.ldv, (whole - lanes) * s.ldv);
    load_tile_transposed<T>(x.rows, s.ldv, whole, width, x.qt, kLanes);
    gemm<T>(n, lanes, width, as_is(x.kv + s.lda, wide), x.qt, kLanes, dS, kLanes, Store{});
    for (int i = 0; i < kLanes; ++i) {
      if (i >= lanes || head.n[nodes[i]] == 0) x.line[1][i] = 0;
    }
    for (int v = 0; v < lanes; v += X::W) {
      const V inverse = X::load(x.line[1] + v);
      const V common = at_heaviest(P, dS, n, v);
      V delta = X::broadcast(-denergy);
      for (int i = 0; i < n; ++i) {
        const int64_t at = static_cast<int64_t>(i) * kLanes + v;
        const V p = X::load(P + at) * inverse, d = X::load(dS + at) - common;
        X::store(P + at, p);
        X::store(dS + at, d);
        delta = fma(p, d, delta);
      }
      X::store(x.line[3] + v, delta);
    }
    through_softmax(P, dS, n, lanes, x.line[3]);
    for (int i = 0; i < lanes; ++i) {
      for (int64_t c = 0; c < s.ldk; c += X::W) X::store(x.qrow + i * s.lda + c, X::load(x.qrow + i * s.lda + c) * scale);
    }
    gemm<T>(n, depth, lanes, as_is(dS, kLanes), x.qrow, s.lda, x.acc, wide, Add{});
    gemm<T>(n, width, lanes, as_is(P, kLanes), x.rows, s.ldv, x.acc + s.lda, wide, Add{});
    gemm<T>(lanes, depth, n, transposed(dS, kLanes), x.kv, wide, x.qrow, s.lda, Store{});
    for (int i = 0; i < lanes; ++i) {
      T* const row = x.qrow + i * s.lda;
      if (s.E > 0) add_rows(row + s.ldk, 0, 1, static_cast<int>(s.E), w.dpos + nodes[i] * s.lde, 0, T(1));
      for (int64_t c = 0; c < s.ldk; c += X::W) X::store(row + c, X::load(row + c) * scale);
    }
    store_children(head, grads.dq, static_cast<T*>(nullptr), 0, nodes, lanes, x.qrow, s.lda, K);
    if (s.E == 0) continue;
    for_upper(head, A, [&](int64_t c, int64_t z, int i) {
      V total = X::zero();
      for (int v = 0; v < lanes; v += X::W) total = total + X::load(dS + i * kLanes + v, lanes - v);
      const T ds = sum(total);
      head.gather_pos(&z, 1, x.qrow, s.lda);
      add_rows(x.qrow, 0, 1, static_cast<int>(s.E), w.dpos + c * s.lde, 0, ds);
      head.gather_pos(&c, 1, x.qrow, s.lda);
      add_rows(x.qrow, 0, 1, static_cast<int>(s.E), w.dpos + z * s.lde, 0, ds);
    });
  }
  for (int i = 0; i < n; ++i) {
    T* const to = w.dkv + x.nodes[i] * both;
    add_rows(x.acc + i * wide, 0, 1, K, to, 0, T(1));
    add_rows(x.acc + i * wide + s.lda, 0, 1, width, to + s.ldk, 0, T(1));
    if (s.E > 0 && i >= upper) {
      add_rows(x.acc + i * wide + s.ldk, 0, 1, static_cast<int>(s.E), w.dpos + x.nodes[i] * s.lde, 0, T(1));
    }
  }
}

// Gradients of the means go down to the leaves, which are stored.
template <class T>
void spread_down(const HierarchicalHead<T>& head, const HierarchicalShape<T>& s, T* dkv, const HierarchicalGrads& grads) {
  const HierarchicalTree& tree = *head.tree;
  const int64_t both = s.ldk + s.ldv;
  for (int64_t A = tree.N - 1; A >= tree.T; --A) {
    for (int64_t i = 0; i < tree.family(A); ++i) {
      const int64_t c = tree.children(A)[i];
      if (head.n[c] == 0) continue;
      add_rows(dkv + A * both, 0, 1, static_cast<int>(both), dkv + c * both, 0, head.n[c] / head.n[A]);
    }
  }
  for (int64_t t = 0; t < tree.T; ++t) {
    store_children(head, grads.dk, static_cast<T*>(nullptr), 0, &t, 1, dkv + t * both, both, static_cast<int>(s.K));
    store_children(head, grads.dv, static_cast<T*>(nullptr), 0, &t, 1, dkv + t * both + s.ldk, both, static_cast<int>(s.V));
  }
}

}  // namespace linnet::LINNET_ISA
