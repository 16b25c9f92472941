// hierarchical for one instruction set: shares heads or, where there are few, the families of a head out and runs the passes of
// each tie. Families none of which lies below another are independent of each other, so the cut changes no bit.
//
// Block: two passes over the families, 8 (2K + V) flops per token and head and 2 (K + V) for the means; q, k, v are read in
// both.
#include "hierarchical_block.h"
#include "hierarchical_prefix.h"
#include "hierarchical_row.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

// The families of one head, or of one after the other, on one thread or on all.
template <class T>
struct Families {
  const HierarchicalTree& tree;
  const HierarchicalScratch<T>* scratch;  // of every worker
  int worker;                             // of the calling thread
  const Launch* together;                 // null: in the calling thread

  const HierarchicalScratch<T>& own() const { return scratch[worker]; }
  // f(A, scratch) for the families first .. end - 1, which are independent of each other.
  template <class F>
  void each(int64_t first, int64_t end, const F& f) const {
    if (together == nullptr) {
      for (int64_t A = first; A < end; ++A) f(A, own());
      return;
    }
    const int64_t part = divide_up(end - first, 8 * static_cast<int64_t>(together->workers));
    parallel(*together, divide_up(end - first, part), [&](int64_t task, int by) {
      for (int64_t A = first + task * part; A < smaller(first + task * part + part, end); ++A) f(A, scratch[by]);
    });
  }
  template <class F>
  void up(const F& f) const {  // children before parents
    if (together == nullptr) return each(tree.T, tree.N, f);
    for (int64_t first = tree.T, end; first < tree.N; first = end) {
      end = tree.N;
      for (int64_t c = first; c < end; ++c) end = tree.parent[c] == -1 ? end : smaller(end, tree.parent[c]);
      each(first, end, f);
    }
  }
  template <class F>
  void down(const F& f) const {  // parents before children
    if (together == nullptr) {
      for (int64_t A = tree.N - 1; A >= tree.T; --A) f(A, own());
      return;
    }
    for (int64_t end = tree.N, first; end > tree.T; end = first) {
      first = end - 1;
      while (first > tree.T && tree.parent[first - 1] >= end) --first;
      each(first, end, f);
    }
  }
};

// Memory of a call: the tree, and per worker scratch and a run of heads; of all workers one run of heads when they work
// together.
template <class T, class Work>
struct Rooms {
  HierarchicalTree tree;
  HierarchicalShape<T> shape;
  HierarchicalRuns runs;
  bool together;
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
    together = args.tie != HierarchicalTie::prefix && prefer_ladder(rows * shape.H, shape.T_ / kLanes, workers);
    const bool side_by_side = block && !backward;
    runs =
        side_by_side ? hierarchical_runs(rows, shape.H, together ? 1 : workers) : HierarchicalRuns{1, shape.H, rows * shape.H};
    longest = larger(1, block ? widths.family : widths.list + 1);
    const int64_t slots = (together ? 1 : workers) * runs.heads;
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
      T product = x.strip[0][(j - j0) * kLanes];
      if (s.E > 0) {  // positions of the ancestors below the lowest common one: the product of a family goes on like this
        int64_t path = i, other = j;
        while (i != j && tree.parent[path] != tree.parent[other]) {
          int64_t& lower = tree.parent[path] < tree.parent[other] ? path : other;
          lower = tree.parent[lower];
        }
        head.gather_pos(&path, 1, x.rows, s.lda);
        head.gather_pos(&other, 1, x.qrow, s.lda);
        // By vectors of one number: the compiler may part a scalar sum's products from its additions, and rounds twice then.
        using X = Vec<T>;
        typename X::V sum = X::broadcast(product);
        for (int64_t c = 0; c < s.E; ++c) sum = fma(X::broadcast(x.qrow[c]), X::broadcast(x.rows[c] * kLog2e<T>), sum);
        X::store(x.line[0], sum);
        product = x.line[0][0];
      }
      const double logit = static_cast<double>(product);
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

// run(batch row, first head, heads, families, their memories)
template <class T, class Work, class Run>
void for_runs(const Rooms<T, Work>& m, const Launch& launch, const Run& run) {
  const auto one = [&](int64_t task, int worker) {
    const int64_t first = task % m.runs.count * m.runs.heads, count = smaller(m.runs.heads, m.shape.H - first);
    const int64_t slot = m.together ? 0 : worker * m.runs.heads;
    run(task / m.runs.count, first, count, Families<T>{m.tree, m.scratch, worker, m.together ? &launch : nullptr},
        m.heads + slot, m.works + slot);
  };
  if (!m.together) return run_tasks(launch, m.runs.tasks, m.flops(), one);
  const FlushSubnormals flush;
  for (int64_t task = 0; task < m.runs.tasks; ++task) one(task, 0);
}

template <class T>
void pool_all(const HierarchicalHead<T>& head, const Families<T>& families, bool queries) {
  families.up([&](int64_t A, const HierarchicalScratch<T>& x) { pool(head, x, A, queries); });
}

template <class T>
void forward_runs(const Rooms<T, BlockWork<T>>& m, const HierarchicalOut& out, const Launch& launch) {
  using Scratch = HierarchicalScratch<T>;
  for_runs(m, launch,
           [&](int64_t b, int64_t first, int64_t count, const auto& families, HierarchicalHead<T>* heads, BlockWork<T>* works) {
             const int64_t N = m.tree.N;
             for (int64_t i = 0; i < count; ++i) {
               heads[i].b = b, heads[i].h = first + i;
               heads[i].count();
             }
             families.up([&](int64_t A, const Scratch& x) {
               for (int64_t i = 0; i < count; ++i) block_up(heads[i], x, works[i], A);
             });
             for (int64_t i = 0; i < count && N > 0; ++i) {
               works[i].mass[N - 1] = 1;
               clear_rows(works[i].out + (m.shape.I - 1) * m.shape.ldv, m.shape.ldv);
             }
             families.down([&](int64_t A, const Scratch& x) {
               for (int64_t i = 0; i < count; ++i) block_down(heads[i], x, works[i], A, out.out);
             });
             for (int64_t i = 0; i < count; ++i) {
               const double energy = N == 0 ? -__builtin_inf() : works[i].g[N - 1] * kLn2<double>;
               const Rows rows{energy == -__builtin_inf() ? 0 : static_cast<double>(heads[i].n[N - 1]), energy};
               store_scalar<T>(out.energy, b, first + i, energy);
               if (out.kl.given()) store_scalar<T>(out.kl, b, first + i, gap(heads[i], families.own(), m.longest, rows));
             }
           });
}

template <class T>
Rows row_all(const HierarchicalHead<T>& head, const Families<T>& families, const RowWork<T>& w, const View& out) {
  const HierarchicalTree& tree = families.tree;
  families.each(tree.T, tree.N, [&](int64_t A, const HierarchicalScratch<T>& x) {
    w.count[A - tree.T] = 0;
    w.energy[A - tree.T] = row_forward(head, x, A, out, &w.count[A - tree.T]);
  });
  Rows rows{0, 0};
  for (int64_t i = 0; i < tree.inner(); ++i) rows.count += w.count[i], rows.energy += w.energy[i];
  rows.energy = rows.count == 0 ? -__builtin_inf() : rows.energy / rows.count;
  return rows;
}

template <class T>
void forward_runs(const Rooms<T, RowWork<T>>& m, const HierarchicalOut& out, const Launch& launch) {
  for_runs(m, launch, [&](int64_t b, int64_t h, int64_t, const auto& families, HierarchicalHead<T>* head, RowWork<T>* work) {
    head->b = b, head->h = h;
    head->count();
    pool_all(*head, families, false);
    const Rows rows = row_all(*head, families, *work, out.out);
    store_scalar<T>(out.energy, b, h, rows.energy);
    if (out.kl.given()) store_scalar<T>(out.kl, b, h, gap(*head, families.own(), m.longest, rows));
  });
}

template <class T>
void forward_runs(const Rooms<T, PrefixWork<T>>& m, const HierarchicalOut& out, const Launch& launch) {
  for_runs(m, launch, [&](int64_t b, int64_t h, int64_t, const auto& families, HierarchicalHead<T>* head, PrefixWork<T>* work) {
    const HierarchicalScratch<T>& x = families.own();
    head->b = b, head->h = h;
    head->count();
    pool_all(*head, families, false);
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
void backward_head(const HierarchicalHead<T>& head, const Families<T>& families, const BlockWork<T>& w,
                   const HierarchicalGrads& grads, double denergy) {
  using Scratch = HierarchicalScratch<T>;
  const int64_t N = head.tree->N, root = N - 1 - head.tree->T;
  const auto& s = families.own().s;
  families.up([&](int64_t A, const Scratch& x) { block_up(head, x, w, A); });
  w.mass[N - 1] = 1;
  families.down([&](int64_t A, const Scratch& x) { block_masses(head, x, w, A); });
  families.up([&](int64_t A, const Scratch& x) { block_backward_up(head, x, w, A, grads.dout); });
  w.dg[N - 1] = w.g[N - 1] == -kInfinity<double> ? T(0) : static_cast<T>(denergy);
  clear_rows(w.dq + root * s.ldk, s.ldk);
  clear_rows(w.dk + root * s.ldk, s.ldk);
  clear_rows(w.dv + root * s.ldv, s.ldv);
  families.down([&](int64_t A, const Scratch& x) { block_backward_down(head, x, w, A, grads); });
}
// Families add to the keys of their ancestors' siblings: one after the other.
template <class T>
void backward_head(const HierarchicalHead<T>& head, const Families<T>& families, const RowWork<T>& w,
                   const HierarchicalGrads& grads, double denergy) {
  const HierarchicalScratch<T>& x = families.own();
  clear_rows(w.dkv, head.tree->N * (x.s.ldk + x.s.ldv));
  pool_all(head, families, false);
  double share = 0;
  if (denergy != 0) {
    const Rows rows = row_all(head, families, w, View());
    share = rows.count == 0 ? 0 : denergy / rows.count;
  }
  for (int64_t A = head.tree->T; A < head.tree->N; ++A) row_backward(head, x, w, A, grads, static_cast<T>(share));
  spread_down(head, x.s, w.dkv, grads);
}
template <class T>
void backward_head(const HierarchicalHead<T>& head, const Families<T>& families, const PrefixWork<T>& w,
                   const HierarchicalGrads& grads, double denergy) {
  const HierarchicalScratch<T>& x = families.own();
  clear_rows(w.dkv, head.tree->N * (x.s.ldk + x.s.ldv));
  pool_all(head, families, false);
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
  for_runs(m, launch, [&](int64_t b0, int64_t h, int64_t, const auto& families, HierarchicalHead<T>* head, Work* work) {
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
      backward_head(*head, families, *work, grads, denergy);
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
