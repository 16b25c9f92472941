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
  // after(unit): what else becomes of a unit's factors.
  template <class After>
  static void run(const MonarchGrid& g, const MonarchOut& out, const Launch& launch, const After& after) {
    Arena arena(launch.workspace);
    const Forward f(arena, g, launch.workers, false);
    const double flops = block_flops(g) * static_cast<double>(g.rows) + slot_flops(g) * static_cast<double>(g.cols);
    if (f.plan.whole) {
      run_tasks(launch, f.plan.units, flops * static_cast<double>(f.plan.units), [&](int64_t task, int worker) {
        f.unit(task, f.units[worker], out, InThisThread{worker});
        after(f.units[worker]);
      });
    } else {
      for (int64_t i = 0; i < f.plan.units; ++i) {
        f.unit(i, f.units[0], out, OnAllThreads{&launch});
        after(f.units[0]);
      }
    }
  }
};

int64_t forward_workspace(const MonarchGrid& g, int workers) {
  return g.q.dtype == Dtype::f64 ? Forward<double>::workspace(g, workers) : Forward<float>::workspace(g, workers);
}
void forward(const MonarchGrid& g, const MonarchOut& out, const Launch& launch) {
  g.q.dtype == Dtype::f64 ? Forward<double>::run(g, out, launch, [](const MonarchUnit<double>&) {})
                          : Forward<float>::run(g, out, launch, [](const MonarchUnit<float>&) {});
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

// The new tokens as a call of the operator, when none came before them and they fill a block.
MonarchGrid prompt_grid(const MonarchDecodeArgs& args) {
  MonarchArgs call;
  call.q = args.q, call.k = args.k, call.v = args.v;
  call.block = args.q_block.size[1];
  call.scale = args.scale;
  call.causal = true;
  return monarch_grid(call);
}
bool may_be_prompt(const MonarchDecodeArgs& args) { return args.q.size[1] > args.q_block.size[1]; }
bool is_prompt(const MonarchDecodeArgs& args, int64_t b) { return may_be_prompt(args) && index_at(args.lengths, b) == 0; }
View batch_row(View x, int64_t b) {
  if (!x.given()) return x;
  x.data = static_cast<char*>(x.data) + b * x.stride[0] * dtype_size(x.dtype);
  x.size[0] = 1;
  return x;
}
MonarchDecodeArgs batch_row(MonarchDecodeArgs args, int64_t b) {
  for (View* x : {&args.q, &args.k, &args.v, &args.q_block, &args.k_block, &args.v_block, &args.a, &args.c, &args.y})
    *x = batch_row(*x, b);
  return args;
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

  // Block l of the state from cells (slot, p) of a unit.
  static void keep_block(const MonarchDecodeArgs& args, const MonarchUnit<T>& u, int64_t p, int64_t l) {
    const auto copy = [](T* to, const T* from, int64_t n) { __builtin_memcpy(to, from, sizeof(T) * static_cast<size_t>(n)); };
    for (int64_t i = 0; i < u.g.cols; ++i) {
      copy(state(args.a, u.b, u.h, i) + l * args.a.stride[3], u.a + u.cell(i, p) * u.ldk, u.g.K);
      copy(state(args.y, u.b, u.h, i) + l * args.y.stride[3], u.y + u.cell(i, p) * u.ldv, u.g.V);
      state(args.c, u.b, u.h, i)[l * args.c.stride[3]] = u.c[u.cell(i, p)] * kLn2<T>;
    }
  }

  // A prompt from its first token on: the blocks of the operator itself, whose factors are the state.
  static void prompt(const MonarchDecodeArgs& args, const MonarchOut& out, const Launch& launch) {
    const int64_t tokens = args.q.size[1], block = args.q_block.size[1], whole = tokens / block;
    Forward<T>::run(prompt_grid(args), out, launch, [&](const MonarchUnit<T>& u) {
      for (int64_t p = 0; p < whole; ++p) keep_block(args, u, p, p);
      const auto rest = [&](const View& from, const View& to) {
        with_type<T>(from, 0, [&](auto* x) {
          for (int64_t i = 0; i < block; ++i) {  // the last token of each slot
            const int64_t t = whole * block + i < tokens ? whole * block + i : (whole - 1) * block + i;
            auto* row = static_cast<decltype(x)>(to.data) + u.offset(to, i);
            __builtin_memcpy(row, x + u.offset(from, t), sizeof(*x) * static_cast<size_t>(from.size[3]));
          }
        });
      };
      rest(args.q, args.q_block);
      rest(args.k, args.k_block);
      rest(args.v, args.v_block);
    });
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
      keep_block(args, u, 0, l);
    }
  }
};

}  // namespace

int64_t monarch_decode_workspace(const MonarchDecodeArgs& args, Pass, int workers) {
  const int64_t each = args.q.dtype == Dtype::f64 ? Decode<double>::bytes(args) : Decode<float>::bytes(args);
  return may_be_prompt(args) ? larger(workers * each, forward_workspace(prompt_grid(args), workers)) : workers * each;
}
void monarch_decode_forward(const MonarchDecodeArgs& args, const MonarchOut& out, const Launch& launch) {
  const bool wide = args.q.dtype == Dtype::f64;
  const int64_t bytes = wide ? Decode<double>::bytes(args) : Decode<float>::bytes(args), B = args.q.size[0], T = args.q.size[1];
  double rows = 0;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t blocks = index_at(args.lengths, b) / args.q_block.size[1];
    rows += static_cast<double>(blocks + args.q_block.size[1]);
  }
  const double flops = rows * static_cast<double>(args.q.size[2] * T * (args.q.size[3] + args.v.size[3])) * 4;
  for (int64_t b = 0; b < B; ++b) {
    if (!is_prompt(args, b)) continue;
    const MonarchDecodeArgs row = batch_row(args, b);
    const MonarchOut to{.out = batch_row(out.out, b), .lse = batch_row(out.lse, b)};
    wide ? Decode<double>::prompt(row, to, launch) : Decode<float>::prompt(row, to, launch);
  }
  run_tasks(launch, T == 0 ? 0 : B * args.q.size[2], flops, [&](int64_t task, int worker) {
    if (is_prompt(args, task / args.q.size[2])) return;
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
