// What the kernels of `hierarchical` share: the nodes of one head, and a family as a strip of logits.
//
// Leaves are read where they lie; inner nodes have their means in dense arrays. A query or key row is [x | pos]: the scale and
// log2(e) are folded into both parts of the queries, so that one product gives the logits in base 2. Nodes of count 0 (masked
// leaves, and subtrees of them) are rows of zeros whose bias hides them: what a masked token holds is never read.
#pragma once

#include "hierarchical_tree.h"
#include "mechanisms/softmax/softmax_strip.h"
#include "simd/gemm.h"

namespace linnet::LINNET_ISA {

template <class T>
struct HierarchicalShape {
  int64_t B, T_, H, K, V, E, N, I;    // tokens T_, nodes N, inner nodes I
  int64_t ldk, lde, ldv, lda, depth;  // lda = ldk + lde: width of a key row; depth of the product: without the last padding
  double scale;
  HierarchicalShape(const HierarchicalArgs& args, int64_t nodes)
      : B(args.q.size[0]),
        T_(args.q.size[1]),
        H(args.q.size[2]),
        K(args.q.size[3]),
        V(args.v.size[3]),
        E(args.pos.given() ? args.pos.size[2] : 0),
        N(nodes),
        I(nodes - args.q.size[1]),
        ldk(round_up<T>(K)),
        lde(round_up<T>(E)),
        ldv(round_up<T>(V)),
        lda(ldk + lde),
        depth(E > 0 ? ldk + E : K),
        scale(default_scale(args.scale, K)) {}
};

// One head of one batch row: means, counts and, in base 2, logarithms of counts.
template <class T>
struct HierarchicalHead {
  const HierarchicalArgs* args;
  const HierarchicalTree* tree;
  int64_t b = 0, h = 0;
  T *q, *k, *v;  // [I, ldk], [I, ldk], [I, ldv]
  T *n, *hide;   // [N]: leaves under the node; - log2 of that, inf for none
  // Backward: a leaf's value, which all values lose. Weights of a row sum to 1, so it changes no gradient; without it what the
  // values have in common would cancel between dO.v and its mean only up to its own rounding.
  T* origin;  // [ldv]
  bool centred = false;
  HierarchicalHead(Arena& arena, const HierarchicalShape<T>& s) : args(nullptr), tree(nullptr) {
    q = arena.take<T>(s.I * s.ldk);
    k = arena.take<T>(s.I * s.ldk);
    v = arena.take<T>(s.I * s.ldv);
    n = arena.take<T>(s.N);
    hide = arena.take<T>(s.N);
    origin = arena.take<T>(s.ldv);
  }
  void take_origin() {
    int64_t leaf = 0;
    while (leaf < tree->T && n[leaf] == 0) ++leaf;
    centred = leaf < tree->T;
    if (!centred) return;
    gather(args->v, v, 0, &leaf, 1, origin, 0);
    for (int64_t c = 0; c < round_up<T>(args->v.size[3]); ++c) origin[c] = origin[c] - origin[c] == 0 ? origin[c] : T(0);
  }
  LINNET_INLINE int64_t offset(const View& x, int64_t t) const { return b * x.stride[0] + t * x.stride[1] + h * x.stride[2]; }
  LINNET_INLINE bool masked(int64_t t) const {
    const View& mask = args->mask;
    return mask.given() && static_cast<const uint8_t*>(mask.data)[b * mask.stride[0] + t * mask.stride[1]] == 0;
  }
  void count() {
    using X = Vec<T>;
    const HierarchicalTree& t = *tree;
    for (int64_t i = 0; i < t.T; ++i) {
      const bool out = masked(i);
      n[i] = out ? T(0) : T(1);
      hide[i] = out ? kInfinity<T> : T(0);
    }
    for (int64_t i = t.T; i < t.N; ++i) n[i] = 0;
    for (int64_t i = 0; i + 1 < t.N; ++i) n[t.parent[i]] += n[i];
    for (int64_t i = t.T; i < t.N; i += X::W) {
      const int lanes = static_cast<int>(smaller(X::W, t.N - i));
      X::store(hide + i, log(X::load(n + i, lanes)) * -kLog2e<T>, lanes);
    }
  }

  // Rows of nodes: a leaf's from x, an inner node's from `inner` [I, ld_inner]; zeros for count 0.
  void gather(const View& x, const T* inner, int64_t ld_inner, const int64_t* nodes, int count, T* dst, int64_t ld) const {
    const int width = static_cast<int>(x.size[3]);
    const int64_t leaves = tree->T;
    for (int i = 0; i < count;) {
      const int64_t node = nodes[i];
      int run = 1;
      if (n[node] == 0) {
        for (int64_t c = 0; c < round_up<T>(width); ++c) dst[i * ld + c] = 0;
      } else if (node >= leaves) {
        load_tile<T>(inner + (node - leaves) * ld_inner, ld_inner, 1, width, dst + i * ld, ld);
      } else {
        while (i + run < count && nodes[i + run] == node + run && node + run < leaves && n[node + run] != 0) ++run;
        with_type<T>(x, offset(x, node), [&](auto* p) { load_tile<T>(p, x.stride[1], run, width, dst + i * ld, ld); });
      }
      i += run;
    }
  }
  void gather_pos(const int64_t* nodes, int count, T* dst, int64_t ld) const {
    const View& pos = args->pos;
    if (!pos.given()) return;
    for (int i = 0; i < count; ++i) {
      with_type<T>(pos, nodes[i] * pos.stride[0] + h * pos.stride[1],
                   [&](auto* p) { load_tile<T>(p, 0, 1, static_cast<int>(pos.size[2]), dst + i * ld, ld); });
    }
  }
};

template <class T>
struct HierarchicalScratch {
  HierarchicalShape<T> s;
  T* kv;           // [rows, lda + ldv]: keys, positions and values
  T* qrow;         // [64, lda]
  T* qt;           // [max(depth, V), 64]
  T* rows;         // [64, lda + ldv]
  T* strip[2];     // [rows, 64]
  T* acc;          // backward: [rows, lda + ldv]
  T* bias;         // [rows]
  double* logit;   // [rows]: prefix
  T* line[8];      // [64]
  int64_t* nodes;  // [rows]
  HierarchicalScratch(Arena& arena, const HierarchicalShape<T>& shape, int64_t longest, bool backward) : s(shape) {
    const int64_t wide = s.lda + s.ldv;
    kv = arena.take<T>(longest * wide);
    qrow = arena.take<T>(kLanes * s.lda);
    qt = arena.take<T>(larger(s.lda, s.V) * kLanes);
    rows = arena.take<T>(kLanes * wide);
    for (int i = 0; i < 2; ++i) strip[i] = arena.take<T>(i == 0 || backward ? longest * kLanes : 0);
    acc = arena.take<T>(backward ? longest * wide : 0);
    bias = arena.take<T>(longest);
    logit = arena.take<double>(longest);
    for (T*& x : line) x = arena.take<T>(kLanes);
    nodes = arena.take<int64_t>(longest);
  }
};

// The keys of a list of nodes (and their values) with bias; queries of up to 64 nodes as lanes.
template <class T>
void load_keys(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const int64_t* nodes, int n, bool values) {
  const auto& s = x.s;
  const int64_t wide = s.lda + s.ldv;
  head.gather(head.args->k, head.k, s.ldk, nodes, n, x.kv, wide);
  head.gather_pos(nodes, n, x.kv + s.ldk, wide);
  if (values) head.gather(head.args->v, head.v, s.ldv, nodes, n, x.kv + s.lda, wide);
  for (int i = 0; values && head.centred && i < n; ++i)
    add_rows(head.origin, 0, 1, static_cast<int>(s.V), x.kv + s.lda + i * wide, 0, T(-1));
  for (int i = 0; i < n; ++i) x.bias[i] = head.hide[nodes[i]];
}
template <class T>
void load_queries(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const int64_t* nodes, int lanes) {
  const auto& s = x.s;
  head.gather(head.args->q, head.q, s.ldk, nodes, lanes, x.qrow, s.lda);
  head.gather_pos(nodes, lanes, x.qrow + s.ldk, s.lda);
  // Whole vectors of rows, zeros behind the last: cut blocks of small families would go one element at a time.
  const int whole = static_cast<int>(round_up<T>(lanes));
  clear_rows(x.qrow + lanes * s.lda, (whole - lanes) * s.lda);
  load_tile_transposed<T>(x.qrow, s.lda, whole, static_cast<int>(s.K), x.qt, kLanes, static_cast<T>(s.scale * kLog2e<double>));
  if (s.E == 0) return;
  clear_rows(x.qt + s.K * kLanes, (s.ldk - s.K) * kLanes);
  load_tile_transposed<T>(x.qrow + s.ldk, s.lda, whole, static_cast<int>(s.E), x.qt + s.ldk * kLanes, kLanes, kLog2e<T>);
}

// Children j0 .. j0+lanes of A as queries over all its children, whose keys stand in x.kv: exponentials in strip 0; afterwards
// line[0] holds Lambda, line[1] 1 / sum, line[5] + line[6] Lambda unrounded. g: inner energies of the nodes.
template <class T>
void family_weights(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const double* g, int64_t A, int j0,
                    int lanes) {
  using X = Vec<T>;
  const HierarchicalTree& tree = *head.tree;
  const int64_t* const child = tree.children(A);
  const int m = static_cast<int>(tree.family(A));
  T* const strip = x.strip[0];
  load_queries(head, x, child + j0, lanes);
  gemm<T>(m, lanes, static_cast<int>(x.s.depth), as_is(x.kv, x.s.lda + x.s.ldv), x.qt, kLanes, strip, kLanes, Store{});
  for (int i = 0; i < lanes; ++i) {
    const int64_t c = child[j0 + i];
    T& own = strip[(j0 + i) * kLanes + i];
    if (c >= tree.T) {
      own = head.n[c] == 0 ? T(0) : static_cast<T>(g[c] + static_cast<double>(x.bias[j0 + i]));
    } else if (!head.args->include_self) {
      own = -kInfinity<T>;
    }
  }
  T* const limit = x.line[2];
  for (int i = 0; i < kLanes; ++i) limit[i] = static_cast<T>(j0 + i + 1);
  strip_softmax<T>(strip, m, lanes, x.bias, head.args->causal ? limit : nullptr, nullptr, x.line[0], x.line[1], nullptr);
  for (int v = 0; v < lanes; v += X::W) {
    const typename X::V l = X::load(x.line[1] + v), top = X::load(x.line[0] + v), more = log2_of<T>(l);
    X::store(x.line[5] + v, top);
    X::store(x.line[6] + v, more);
    X::store(x.line[0] + v, top + more);
    X::store(x.line[1] + v, select(eq(l, X::zero()), X::zero(), X::broadcast(1) / l));
  }
}

// Of n rows of `values`, per lane, the one where P is largest. Taken from all of them it leaves the gradient of a softmax, and
// the heaviest key, whose own term would otherwise be the difference of two equal numbers, has a zero there.
template <class T>
LINNET_INLINE typename Vec<T>::V at_heaviest(const T* P, const T* values, int n, int v) {
  using X = Vec<T>;
  typename X::V most = X::load(P + v), common = X::load(values + v);
  for (int64_t at = kLanes + v; at < static_cast<int64_t>(n) * kLanes; at += kLanes) {
    const typename X::V p = X::load(P + at);
    common = select(gt(p, most), X::load(values + at), common);
    most = max(p, most);
  }
  return common;
}

// Starts fetching the leaves of the family that comes next; small families only, whose rows are too short for the hardware.
template <class T>
void prefetch_children(const HierarchicalHead<T>& head, int64_t A) {
  const HierarchicalTree& tree = *head.tree;
  if (A < tree.T || A >= tree.N || tree.family(A) > 16) return;
  for (int64_t i = 0; i < tree.family(A); ++i) {
    const int64_t leaf = tree.children(A)[i];
    if (leaf >= tree.T) return;
    const View* const tensors[] = {&head.args->q, &head.args->k, &head.args->v};
    for (const View* x : tensors) {
      const char* const row = static_cast<const char*>(x->data) + head.offset(*x, leaf) * dtype_size(x->dtype);
      for (int64_t byte = 0; byte < x->size[3] * dtype_size(x->dtype); byte += 64) __builtin_prefetch(row + byte);
    }
  }
}

// dst += sum_i share[i] row i
template <class T>
void add_mean(const T* rows, int64_t ld, int count, const T* share, int64_t width, T* dst) {
  using X = Vec<T>;
  for (int64_t c = 0; c < width; c += X::W) {
    typename X::V sum = X::load(dst + c);
    for (int i = 0; i < count; ++i) sum = fma(X::broadcast(share[i]), X::load(rows + i * ld + c), sum);
    X::store(dst + c, sum);
  }
}

// The means of every inner node, keys and values, and queries where they are pooled; children before parents.
template <class T>
void pool(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, int64_t A, bool queries) {
  const auto& s = x.s;
  const int64_t* const child = head.tree->children(A);
  const int m = static_cast<int>(head.tree->family(A));
  const int64_t at = A - head.tree->T, wide = s.lda + s.ldv;
  clear_rows(head.k + at * s.ldk, s.ldk);
  clear_rows(head.v + at * s.ldv, s.ldv);
  if (queries) clear_rows(head.q + at * s.ldk, s.ldk);
  if (head.n[A] == 0) return;
  for (int i0 = 0; i0 < m; i0 += kLanes) {
    const int n = static_cast<int>(smaller(kLanes, m - i0));
    T* const share = x.line[7];
    for (int i = 0; i < n; ++i) share[i] = head.n[child[i0 + i]] / head.n[A];
    head.gather(head.args->k, head.k, s.ldk, child + i0, n, x.rows, wide);
    add_mean(x.rows, wide, n, share, s.ldk, head.k + at * s.ldk);
    head.gather(head.args->v, head.v, s.ldv, child + i0, n, x.rows, wide);
    add_mean(x.rows, wide, n, share, s.ldv, head.v + at * s.ldv);
    if (!queries) continue;
    head.gather(head.args->q, head.q, s.ldk, child + i0, n, x.rows, wide);
    add_mean(x.rows, wide, n, share, s.ldk, head.q + at * s.ldk);
  }
}

// Rows of consecutive children: leaves to a tensor of the caller (where there is one), inner nodes to `inner`; masked leaves
// get 0.
template <class T>
void store_children(const HierarchicalHead<T>& head, const View& to, T* inner, int64_t ld_inner, const int64_t* nodes,
                    int count, const T* rows, int64_t ld, int width) {
  const int64_t leaves = head.tree->T;
  for (int i = 0; i < count;) {
    const int64_t node = nodes[i];
    int run = 1;
    if (node >= leaves) {
      for (int c = 0; c < width; ++c) inner[(node - leaves) * ld_inner + c] = rows[i * ld + c];
    } else if (to.given()) {
      while (i + run < count && nodes[i + run] == node + run && node + run < leaves) ++run;
      with_type<T>(to, head.offset(to, node), [&](auto* p) {
        store_tile<T>(rows + i * ld, ld, run, width, p, to.stride[1]);
        for (int r = 0; r < run; ++r) {
          if (head.n[node + r] != 0) continue;
          for (int c = 0; c < width; ++c) p[r * to.stride[1] + c] = {};
        }
      });
    }
    i += run;
  }
}

// Rows of dO: dout of the leaves (zeros when there is none), sums of inner nodes.
template <class T>
void gather_dout(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const View& dout, const T* inner,
                 const int64_t* nodes, int count) {
  if (dout.given()) return head.gather(dout, inner, x.s.ldv, nodes, count, x.rows, x.s.ldv);
  for (int i = 0; i < count; ++i) {
    clear_rows(x.rows + i * x.s.ldv, x.s.ldv);
    if (nodes[i] >= head.tree->T) head.gather(head.args->v, inner, x.s.ldv, nodes + i, 1, x.rows + i * x.s.ldv, x.s.ldv);
  }
}

// How heads are shared out. A task takes a run of heads of one batch row: neighbouring heads lie side by side in memory, so
// they walk the tree together. Heads are independent: the cut changes no bit.
struct HierarchicalRuns {
  int64_t heads, count;  // heads of a run; runs of a batch row
  int64_t tasks;
};
LINNET_INLINE HierarchicalRuns hierarchical_runs(int64_t B, int64_t H, int workers) {
  if (B == 0 || H == 0) return {0, 0, 0};
  const int64_t per_row = divide_up(workers, B), heads = larger(1, smaller(8, H / smaller(per_row, H)));
  return {heads, divide_up(H, heads), B * divide_up(H, heads)};
}

}  // namespace linnet::LINNET_ISA
