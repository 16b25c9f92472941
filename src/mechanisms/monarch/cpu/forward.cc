// monarch, monarch_tiled and monarch_decode, forward, for one instruction set.
//
// A unit is (batch row, head, tile of queries); its programs are in programs.h. Per unit 2 cols rows (cols (2K + V) +
// rows (K + V)) flops in one step; q is read twice, k and v once, a and y written and read once.
#include "programs.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
struct Forward {
  MonarchPlan plan;
  MonarchScratch<T>* scratch;
  MonarchUnit<T>* units;

  Forward(Arena& arena, const MonarchGrid& g, int workers, bool counting) : plan(monarch_plan(g.B * g.H * g.q_tiles, workers)) {
    scratch = arena.take<MonarchScratch<T>>(workers);
    units = arena.take<MonarchUnit<T>>(plan.memories);
    for (int i = 0; i < workers; ++i) {
      const MonarchScratch<T> cut(arena, g, false);
      if (!counting) scratch[i] = cut;
    }
    for (int64_t i = 0; i < plan.memories; ++i) {
      const MonarchUnit<T> cut(arena, g, 1);
      if (!counting) units[i] = cut;
    }
  }

  template <class For>
  void unit(int64_t index, MonarchUnit<T>& u, const MonarchOut& out, const For& for_items) const {
    const MonarchGrid& g = u.g;
    u.tile = index % g.q_tiles, u.h = index / g.q_tiles % g.H, u.b = index / g.q_tiles / g.H;
    monarch_factors(u, false, scratch, for_items);
    for_items(g.cols, slot_flops(g), [&](int64_t j, int worker) { slot_output(u, scratch[worker], j, out); });
  }
  static int64_t workspace(const MonarchGrid& g, int workers) {
    Arena arena;
    const Forward forward(arena, g, workers, true);
    return arena.used();
  }
  static void run(const MonarchGrid& g, const MonarchOut& out, const Launch& launch) {
    Arena arena(launch.workspace);
    const Forward f(arena, g, launch.workers, false);
    const double flops = block_flops(g) * static_cast<double>(g.rows) + slot_flops(g) * static_cast<double>(g.cols);
    if (f.plan.whole) {
      run_tasks(launch, f.plan.units, flops * static_cast<double>(f.plan.units),
                [&](int64_t task, int worker) { f.unit(task, f.units[worker], out, InThisThread{worker}); });
    } else {
      for (int64_t i = 0; i < f.plan.units; ++i) f.unit(i, f.units[0], out, OnAllThreads{&launch});
    }
  }
};

int64_t forward_workspace(const MonarchGrid& g, int workers) {
  return g.q.dtype == Dtype::f64 ? Forward<double>::workspace(g, workers) : Forward<float>::workspace(g, workers);
}
void forward(const MonarchGrid& g, const MonarchOut& out, const Launch& launch) {
  g.q.dtype == Dtype::f64 ? Forward<double>::run(g, out, launch) : Forward<float>::run(g, out, launch);
}

// ---- decode ----------------------------------------------------------------------------------------------------------------

// The unfinished block as a grid of one block.
MonarchGrid block_grid(const MonarchDecodeArgs& args) {
  MonarchGrid g{};
  g.q = args.q_block, g.k = args.k_block, g.v = args.v_block;
  g.B = args.q.size[0], g.T = g.S = args.q_block.size[1], g.H = args.q.size[2], g.K = args.q.size[3], g.V = args.v.size[3];
  g.rows = 1, g.cols = g.T, g.q_tiles = g.k_tiles = 1, g.steps = 1;
  g.scale = default_scale(args.scale, g.K);
  return g;
}

template <class T>
struct Decode {
  struct Memory {
    MonarchScratch<T> scratch;
    MonarchUnit<T> unit;
    T *q, *out, *logits;
  };
  static Memory cut(Arena& arena, const MonarchGrid& g, int64_t M) {
    return {MonarchScratch<T>(arena, g, false), MonarchUnit<T>(arena, g, 1), arena.take<T>(round_up<T>(g.K)),
            arena.take<T>(round_up<T>(g.V)), arena.take<T>(round_up<T>(M + g.cols))};
  }
  static int64_t bytes(const MonarchDecodeArgs& args) {
    Arena arena;
    cut(arena, block_grid(args), args.a.size[3]);
    return arena.used();
  }

  template <class S>
  LINNET_INLINE static T dot(const T* a, const S* b, int n) {
    using X = Vec<T>;
    typename X::V sum0 = X::zero(), sum1 = X::zero();
    int c = 0;
    for (; c + 2 * X::W <= n; c += 2 * X::W) {
      sum0 = fma(X::load(a + c), X::load(b + c), sum0);
      sum1 = fma(X::load(a + c + X::W), X::load(b + c + X::W), sum1);
    }
    for (; c < n; c += X::W) sum0 = fma(X::load(a + c, n - c), X::load(b + c, n - c), sum0);
    return sum(sum0 + sum1);
  }
  template <class S>
  LINNET_INLINE static void add(T* out, T weight, const S* row, int n) {
    using X = Vec<T>;
    for (int c = 0; c < n; c += X::W) X::store(out + c, fma(X::broadcast(weight), X::load(row + c, n - c), X::load(out + c)));
  }
  LINNET_INLINE static T* state(const View& x, int64_t b, int64_t h, int64_t j) {
    return static_cast<T*>(x.data) + b * x.stride[0] + h * x.stride[1] + j * x.stride[2];
  }

  // One token at place j of block l. Rows are few and each is read once: dot products and row updates.
  template <class S>
  static void token(const MonarchDecodeArgs& args, const MonarchOut& out, Memory& m, int64_t t, int64_t l, int64_t j, S*) {
    using X = Vec<T>;
    MonarchUnit<T>& u = m.unit;
    const int K = static_cast<int>(u.g.K), V = static_cast<int>(u.g.V);
    const auto row = [&](const View& x, int64_t at) { return static_cast<S*>(x.data) + u.offset(x, at); };
    const auto copy = [](S* to, const S* from, int n) { __builtin_memcpy(to, from, sizeof(S) * static_cast<size_t>(n)); };
    copy(row(args.q_block, j), row(args.q, t), K);
    copy(row(args.k_block, j), row(args.k, t), K);
    copy(row(args.v_block, j), row(args.v, t), V);
    load_tile<T>(row(args.q, t), 0, 1, K, m.q, 0, u.factor());
    const T* const a = state(args.a, u.b, u.h, j);
    const T* const c = state(args.c, u.b, u.h, j);
    const T* const y = state(args.y, u.b, u.h, j);
    const int64_t n = l + j + 1;
    T maximum = kLowest<T>, total = 0;
    for (int64_t i = 0; i < n; ++i) {
      m.logits[i] = i < l ? dot(m.q, a + i * args.a.stride[3], K) - c[i * args.c.stride[3]] * kLog2e<T>
                          : dot(m.q, row(args.k_block, i - l), K);
      if (m.logits[i] > maximum) maximum = m.logits[i];
    }
    for (int64_t i = n; i < round_up<T>(n); ++i) m.logits[i] = -kInfinity<T>;
    typename X::V sums = X::zero();
    for (int64_t i = 0; i < n; i += X::W) {
      const typename X::V p = exp2_nonpositive(X::load(m.logits + i) - X::broadcast(maximum));
      X::store(m.logits + i, p);
      sums = sums + p;
    }
    total = sum(sums);
    for (int i = 0; i < round_up<T>(V); ++i) m.out[i] = 0;
    for (int64_t i = 0; i < l; ++i) add(m.out, m.logits[i], y + i * args.y.stride[3], V);
    for (int64_t i = 0; i <= j; ++i) add(m.out, m.logits[l + i], row(args.v_block, i), V);
    const T inverse = 1 / total;
    store_tile<T>(m.out, 0, 1, V, row(out.out, t), 0, &inverse);
    if (!out.lse.given()) return;
    T logarithm[Vec<T>::W];
    X::store(logarithm, log(X::broadcast(total)));
    static_cast<T*>(out.lse.data)[u.offset(out.lse, t)] = maximum * kLn2<T> + logarithm[0];
  }

  static void head(const MonarchDecodeArgs& args, const MonarchOut& out, int64_t task, char* memory) {
    Arena arena(memory);
    Memory m = cut(arena, block_grid(args), args.a.size[3]);
    MonarchUnit<T>& u = m.unit;
    u.b = task / u.g.H, u.h = task % u.g.H;
    u.begin();
    const int64_t start = index_at(args.lengths, u.b), block = u.g.cols;
    for (int64_t t = 0; t < args.q.size[1]; ++t) {
      const int64_t l = (start + t) / block, j = (start + t) % block;
      with_type<T>(args.q, 0, [&](auto* x) { token(args, out, m, t, l, j, x); });
      if (j + 1 < block) continue;
      block_program(u, m.scratch, 0, 0, true);
      for (int64_t i = 0; i < block; ++i) {
        const auto copy = [](T* to, const T* from, int64_t n) {
          __builtin_memcpy(to, from, sizeof(T) * static_cast<size_t>(n));
        };
        copy(state(args.a, u.b, u.h, i) + l * args.a.stride[3], u.a + u.cell(i, 0) * u.ldk, u.g.K);
        copy(state(args.y, u.b, u.h, i) + l * args.y.stride[3], u.y + u.cell(i, 0) * u.ldv, u.g.V);
        state(args.c, u.b, u.h, i)[l * args.c.stride[3]] = u.c[u.cell(i, 0)] * kLn2<T>;
      }
    }
  }
};

}  // namespace

int64_t monarch_decode_workspace(const MonarchDecodeArgs& args, Pass, int workers) {
  return workers * (args.q.dtype == Dtype::f64 ? Decode<double>::bytes(args) : Decode<float>::bytes(args));
}
void monarch_decode_forward(const MonarchDecodeArgs& args, const MonarchOut& out, const Launch& launch) {
  const bool wide = args.q.dtype == Dtype::f64;
  const int64_t bytes = wide ? Decode<double>::bytes(args) : Decode<float>::bytes(args), B = args.q.size[0], T = args.q.size[1];
  double rows = 0;
  for (int64_t b = 0; b < B; ++b)
    rows += static_cast<double>(index_at(args.lengths, b) / args.q_block.size[1] + args.q_block.size[1]);
  const double flops = rows * static_cast<double>(args.q.size[2] * T * (args.q.size[3] + args.v.size[3])) * 4;
  run_tasks(launch, T == 0 ? 0 : B * args.q.size[2], flops, [&](int64_t task, int worker) {
    char* const memory = launch.workspace + worker * bytes;
    wide ? Decode<double>::head(args, out, task, memory) : Decode<float>::head(args, out, task, memory);
  });
  for (int64_t b = 0; b < B; ++b) {
    if (args.lengths.dtype == Dtype::i32) {
      static_cast<int32_t*>(args.lengths.data)[b * args.lengths.stride[0]] += static_cast<int32_t>(T);
    } else {
      static_cast<int64_t*>(args.lengths.data)[b * args.lengths.stride[0]] += T;
    }
  }
}

void monarch_forward(const MonarchArgs& args, const MonarchOut& out, const Launch& launch) {
  forward(monarch_grid(args), out, launch);
}
void monarch_tiled_forward(const MonarchTiledArgs& args, const MonarchOut& out, const Launch& launch) {
  forward(monarch_grid(args), out, launch);
}
int64_t monarch_forward_workspace(const MonarchGrid& g, int workers) { return forward_workspace(g, workers); }

}  // namespace linnet::LINNET_ISA
