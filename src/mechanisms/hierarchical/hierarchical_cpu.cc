// hierarchical for one instruction set: shares the heads out and runs the passes of each tie.
//
// Block: two passes over the families, 8 (2K + V) flops per token and head and 2 (K + V) for the means; q, k, v are read in
// both.
#include "hierarchical_block.h"
#include "hierarchical_prefix.h"
#include "hierarchical_row.h"

namespace linnet::LINNET_ISA {
namespace {

// Memory of a call: the tree, and per worker scratch and a run of heads.
template <class T, class Work>
struct Rooms {
  HierarchicalTree tree;
  HierarchicalShape<T> shape;
  HierarchicalRuns runs;
  int64_t longest;  // rows of a strip
  HierarchicalScratch<T>* scratch;
  HierarchicalHead<T>* heads;
  Work* works;

  Rooms(Arena& arena, const HierarchicalArgs& args, int workers, bool backward, bool counting)
      : tree(hierarchical_tree(args, arena, !counting, true)), shape(args, tree.N) {
    const HierarchicalWidths widths = hierarchical_widths(args);
    const bool block = args.tie == HierarchicalTie::block;
    // Positions are shared by the batch: their gradient adds up its rows in order, one task per head.
    const int64_t rows = backward && args.pos.given() ? 1 : shape.B;
    runs = block && !backward ? hierarchical_runs(rows, shape.H, workers) : HierarchicalRuns{1, shape.H, rows * shape.H};
    longest = larger(1, block ? widths.family : widths.list + 1);
    const int64_t slots = workers * runs.heads;
    scratch = arena.take<HierarchicalScratch<T>>(workers);
    heads = arena.take<HierarchicalHead<T>>(slots);
    works = arena.take<Work>(slots);
    for (int i = 0; i < workers; ++i) {
      const HierarchicalScratch<T> cut(arena, shape, longest, backward);
      if (!counting) scratch[i] = cut;
    }
    for (int64_t i = 0; i < slots; ++i) {
      HierarchicalHead<T> head(arena, shape);
      const Work work(arena, shape, widths.depth, backward);
      if (counting) continue;
      head.args = &args;
      head.tree = &tree;
      heads[i] = head;
      works[i] = work;
    }
  }
  static int64_t bytes(const HierarchicalArgs& args, int workers, bool backward) {
    Arena arena;
    const Rooms rooms(arena, args, workers, backward, true);
    return arena.used();
  }
  double flops() const {
    return static_cast<double>(shape.B * shape.H * shape.T_) * static_cast<double>(50 * (shape.K + shape.V));
  }
};

template <class T>
void store_scalar(const View& to, int64_t b, int64_t h, double value) {
  if (to.given()) static_cast<T*>(to.data)[b * to.stride[0] + h * to.stride[1]] = static_cast<T>(value);
}

// ---- the gap to softmax

// The log-normaliser (natural) of row i of the softmax that is approximated. Logits by the same product as in families: where
// the tie changes nothing, both have the same bits.
template <class T>
double flat_normaliser(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, int64_t rows, int64_t i) {
  const HierarchicalTree& tree = *head.tree;
  const auto& s = x.s;
  const int64_t end = head.args->causal ? i + 1 : tree.T;
  double top = -__builtin_inf(), total = 0;
  load_queries(head, x, &i, 1);
  for (int64_t j0 = 0; j0 < end; j0 += rows) {
    const int n = static_cast<int>(smaller(rows, end - j0));
    for (int j = 0; j < n; ++j) x.nodes[j] = j0 + j;
    head.gather(head.args->k, head.k, s.ldk, x.nodes, n, x.kv, s.ldk);
    gemm<T>(n, 1, static_cast<int>(s.K), as_is(x.kv, s.ldk), x.qt, kLanes, x.strip[0], kLanes, Store{});
    for (int64_t j = j0; j < j0 + n; ++j) {
      if (head.n[j] == 0 || (j == i && !head.args->include_self)) continue;
      double logit = static_cast<double>(x.strip[0][(j - j0) * kLanes]);
      if (s.E > 0) {  // positions of the ancestors below the lowest common one
        int64_t path = i, other = j;
        while (i != j && tree.parent[path] != tree.parent[other]) {
          int64_t& lower = tree.parent[path] < tree.parent[other] ? path : other;
          lower = tree.parent[lower];
        }
        head.gather_pos(&path, 1, x.rows, s.lda);
        head.gather_pos(&other, 1, x.qrow, s.lda);
        logit += static_cast<double>(dot_rows(x.rows, x.qrow, static_cast<int>(s.E))) * kLog2e<double>;
      }
      if (logit > top) {
        total = total * __builtin_exp2(top - logit) + 1;
        top = logit;
      } else {
        total += __builtin_exp2(logit - top);
      }
    }
  }
  return total == 0 ? -__builtin_inf() : top * kLn2<double> + __builtin_log(total);
}

// Rows of the tie that have something to attend to, and the mean of their log-normalisers.
struct Rows {
  double count, energy;
};

// Calls f(row) for the rows that kl looks at; returns how many.
template <class T, class F>
double for_sampled(const HierarchicalHead<T>& head, const F& f) {
  const int64_t leaves = head.tree->T, wanted = head.args->kl_rows, rows = wanted == 0 || wanted > leaves ? leaves : wanted;
  double seen = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t i = r * leaves / rows;
    if (head.n[i] != 0 && f(i)) seen += 1;
  }
  return seen;
}

// Mean over rows of KL: log-normalisers of the softmax less those of the tied rows.
template <class T>
double gap(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, int64_t longest, const Rows& tied) {
  double sum = 0;
  const double seen = for_sampled(head, [&](int64_t i) {
    const double lse = flat_normaliser(head, x, smaller(kLanes, longest), i);
    if (lse == -__builtin_inf()) return false;
    sum += lse;
    return true;
  });
  return seen == 0 || tied.count == 0 ? 0 : sum / seen - tied.energy;
}

// ---- forward

template <class T, class Work, class Run>
void for_runs(const Rooms<T, Work>& m, const Launch& launch, const Run& run) {
  run_tasks(launch, m.runs.tasks, m.flops(), [&](int64_t task, int worker) {
    const int64_t first = task % m.runs.count * m.runs.heads, count = smaller(m.runs.heads, m.shape.H - first);
    run(task / m.runs.count, first, count, m.scratch[worker], m.heads + worker * m.runs.heads, m.works + worker * m.runs.heads);
  });
}

template <class T, class Work>
void pool_all(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const Work&, bool queries) {
  for (int64_t A = head.tree->T; A < head.tree->N; ++A) pool(head, x, A, queries);
}

template <class T>
void forward_runs(const Rooms<T, BlockWork<T>>& m, const HierarchicalOut& out, const Launch& launch) {
  for_runs(m, launch,
           [&](int64_t b, int64_t first, int64_t count, const auto& x, HierarchicalHead<T>* heads, BlockWork<T>* works) {
             const int64_t N = m.tree.N, leaves = m.tree.T;
             for (int64_t i = 0; i < count; ++i) {
               heads[i].b = b, heads[i].h = first + i;
               heads[i].count();
             }
             for (int64_t A = leaves; A < N; ++A) {
               for (int64_t i = 0; i < count; ++i) block_up(heads[i], x, works[i], A);
             }
             for (int64_t i = 0; i < count && N > 0; ++i) {
               works[i].mass[N - 1] = 1;
               clear_rows(works[i].out + (m.shape.I - 1) * m.shape.ldv, m.shape.ldv);
             }
             for (int64_t A = N - 1; A >= leaves; --A) {
               for (int64_t i = 0; i < count; ++i) block_down(heads[i], x, works[i], A, out.out);
             }
             for (int64_t i = 0; i < count; ++i) {
               const double energy = N == 0 ? -__builtin_inf() : works[i].g[N - 1] * kLn2<double>;
               const Rows rows{energy == -__builtin_inf() ? 0 : static_cast<double>(heads[i].n[N - 1]), energy};
               store_scalar<T>(out.energy, b, first + i, energy);
               if (out.kl.given()) store_scalar<T>(out.kl, b, first + i, gap(heads[i], x, m.longest, rows));
             }
           });
}

template <class T>
Rows row_all(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const View& out) {
  Rows rows{0, 0};
  for (int64_t A = head.tree->T; A < head.tree->N; ++A) rows.energy += row_forward(head, x, A, out, &rows.count);
  rows.energy = rows.count == 0 ? -__builtin_inf() : rows.energy / rows.count;
  return rows;
}

template <class T>
void forward_runs(const Rooms<T, RowWork<T>>& m, const HierarchicalOut& out, const Launch& launch) {
  for_runs(m, launch, [&](int64_t b, int64_t h, int64_t, const auto& x, HierarchicalHead<T>* head, RowWork<T>* work) {
    head->b = b, head->h = h;
    head->count();
    pool_all(*head, x, *work, false);
    const Rows rows = row_all(*head, x, out.out);
    store_scalar<T>(out.energy, b, h, rows.energy);
    if (out.kl.given()) store_scalar<T>(out.kl, b, h, gap(*head, x, m.longest, rows));
  });
}

template <class T>
void forward_runs(const Rooms<T, PrefixWork<T>>& m, const HierarchicalOut& out, const Launch& launch) {
  for_runs(m, launch, [&](int64_t b, int64_t h, int64_t, const auto& x, HierarchicalHead<T>* head, PrefixWork<T>* work) {
    head->b = b, head->h = h;
    head->count();
    pool_all(*head, x, *work, false);
    double gap = 0;  // less the softmax's log-normalisers
    const double energy = prefix_forward(*head, x, *work, out.out, out.kl.given(), &gap);
    store_scalar<T>(out.energy, b, h, energy);
    if (!out.kl.given()) return;
    const double seen = for_sampled(*head, [&](int64_t i) {
      gap += flat_normaliser(*head, x, smaller(kLanes, m.longest), i);
      return true;
    });
    store_scalar<T>(out.kl, b, h, seen == 0 ? 0 : gap / seen);
  });
}

// ---- backward

template <class T>
void backward_head(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const BlockWork<T>& w,
                   const HierarchicalGrads& grads, double denergy) {
  const int64_t N = head.tree->N, leaves = head.tree->T, root = N - 1 - leaves;
  const auto& s = x.s;
  for (int64_t A = leaves; A < N; ++A) block_up(head, x, w, A);
  w.mass[N - 1] = 1;
  for (int64_t A = N - 1; A >= leaves; --A) block_masses(head, x, w, A);
  for (int64_t A = leaves; A < N; ++A) block_backward_up(head, x, w, A, grads.dout);
  w.dg[N - 1] = w.g[N - 1] == -kInfinity<double> ? T(0) : static_cast<T>(denergy);
  clear_rows(w.dq + root * s.ldk, s.ldk);
  clear_rows(w.dk + root * s.ldk, s.ldk);
  clear_rows(w.dv + root * s.ldv, s.ldv);
  for (int64_t A = N - 1; A >= leaves; --A) block_backward_down(head, x, w, A, grads);
}
template <class T>
void backward_head(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const RowWork<T>& w,
                   const HierarchicalGrads& grads, double denergy) {
  clear_rows(w.dkv, head.tree->N * (x.s.ldk + x.s.ldv));
  pool_all(head, x, w, false);
  double share = 0;
  if (denergy != 0) {
    const Rows rows = row_all(head, x, View());
    share = rows.count == 0 ? 0 : denergy / rows.count;
  }
  for (int64_t A = head.tree->T; A < head.tree->N; ++A) row_backward(head, x, w, A, grads, static_cast<T>(share));
  spread_down(head, x.s, w.dkv, grads);
}
template <class T>
void backward_head(const HierarchicalHead<T>& head, const HierarchicalScratch<T>& x, const PrefixWork<T>& w,
                   const HierarchicalGrads& grads, double denergy) {
  clear_rows(w.dkv, head.tree->N * (x.s.ldk + x.s.ldv));
  pool_all(head, x, w, false);
  double unused;
  prefix_forward(head, x, w, View(), false, &unused);
  prefix_backward(head, x, w, grads, denergy);
  spread_down(head, x.s, w.dkv, grads);
}

// Batch rows of a head one after the other when positions have a gradient, which adds them up.
template <class T, class Work>
void backward(const HierarchicalArgs& args, const HierarchicalGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const Rooms<T, Work> m(arena, args, launch.workers, true, false);
  const auto& s = m.shape;
  const int64_t batch = args.pos.given() ? s.B : 1;
  for_runs(m, launch, [&](int64_t b0, int64_t h, int64_t, const auto& x, HierarchicalHead<T>* head, Work* work) {
    head->h = h;
    clear_rows(work->dpos, s.N * s.lde);
    for (int64_t b = b0; b < b0 + batch && s.N > 0; ++b) {
      head->b = b;
      head->count();
      head->take_origin();
      double denergy = 0;
      if (grads.denergy.given()) {
        const View& d = grads.denergy;
        denergy = static_cast<double>(static_cast<T*>(d.data)[b * d.stride[0] + h * d.stride[1]]);
      }
      backward_head(*head, x, *work, grads, denergy);
    }
    for (int64_t i = 0; grads.dpos.given() && i < grads.dpos.size[0]; ++i) {
      with_type<T>(grads.dpos, i * grads.dpos.stride[0] + h * grads.dpos.stride[1],
                   [&](auto* p) { store_tile<T>(work->dpos + i * s.lde, 0, 1, static_cast<int>(s.E), p, 0); });
    }
  });
}

// f.template operator()<T, Work>() for the call's type and tie.
template <class F>
auto by_tie(const HierarchicalArgs& args, const F& f) {
  const bool wide = args.q.dtype == Dtype::f64;
  switch (args.tie) {
    case HierarchicalTie::prefix:
      return wide ? f.template operator()<double, PrefixWork<double>>() : f.template operator()<float, PrefixWork<float>>();
    case HierarchicalTie::row:
      return wide ? f.template operator()<double, RowWork<double>>() : f.template operator()<float, RowWork<float>>();
    default:
      return wide ? f.template operator()<double, BlockWork<double>>() : f.template operator()<float, BlockWork<float>>();
  }
}

}  // namespace

int64_t hierarchical_workspace(const HierarchicalArgs& args, Pass pass, int workers) {
  return by_tie(args, [&]<class T, class Work>() { return Rooms<T, Work>::bytes(args, workers, pass == Pass::backward); });
}
void hierarchical_forward(const HierarchicalArgs& args, const HierarchicalOut& out, const Launch& launch) {
  by_tie(args, [&]<class T, class Work>() {
    Arena arena(launch.workspace);
    const Rooms<T, Work> m(arena, args, launch.workers, false, false);
    forward_runs(m, out, launch);
  });
}
void hierarchical_backward(const HierarchicalArgs& args, const HierarchicalOut&, const HierarchicalGrads& grads,
                           const Launch& launch) {
  by_tie(args, [&]<class T, class Work>() { backward<T, Work>(args, grads, launch); });
}

}  // namespace linnet::LINNET_ISA
