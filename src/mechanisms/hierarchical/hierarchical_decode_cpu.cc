// hierarchical_decode for one instruction set: rows are few and read once, so everything is dot products and row updates. A
// task is one head; what the heads of a batch row share (counts of lists and of leaves) each task follows in a copy of its own,
// and it is written when all are done.
#include "hierarchical.h"
#include "mechanisms/softmax/softmax_strip.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
struct Step {
  int64_t levels, width;
  int64_t* count;            // [levels]
  T *open_n, *list_n;        // [levels], [levels, width]
  T *query, *value, *out;    // [ldk], [ldv], [ldv]
  T* logits;                 // [levels, width] and a vector
  T *n, *g, *lambda, *mass;  // [levels + 1]
  Step(Arena& arena, const HierarchicalDecodeArgs& args) : levels(args.list_count.size[1]), width(args.list_k.size[3]) {
    const int64_t K = round_up<T>(args.q.size[3]), V = round_up<T>(args.v.size[3]);
    count = arena.take<int64_t>(levels);
    open_n = arena.take<T>(levels), list_n = arena.take<T>(levels * width);
    query = arena.take<T>(2 * K), value = arena.take<T>(V), out = arena.take<T>(V);
    logits = arena.take<T>(levels * width + Vec<T>::W);
    n = arena.take<T>(levels + 1), g = arena.take<T>(levels + 1), lambda = arena.take<T>(levels + 1);
    mass = arena.take<T>(levels + 1);
  }

  void begin(const HierarchicalDecodeArgs& args, int64_t b) {
    for (int64_t l = 0; l < levels; ++l) {
      count[l] = index_at(args.list_count, b, l);
      open_n[l] = *args.open_n.template at<T>(b, l);
      for (int64_t i = 0; i < width; ++i) list_n[l * width + i] = *args.list_n.template at<T>(b, l, i);
    }
  }
  // What a token changes that does not depend on the head.
  void advance(int64_t close) {
    for (int64_t l = 0; l < levels; ++l) open_n[l] += 1;
    list_n[close * width + count[close]++] = close == 0 ? T(1) : open_n[close - 1];
    for (int64_t l = 0; l < close; ++l) {
      count[l] = 0;
      open_n[l] = 0;
    }
  }
  void end(const HierarchicalDecodeArgs& args, int64_t b) const {
    for (int64_t l = 0; l < levels; ++l) {
      const int64_t at = b * args.list_count.stride[0] + l * args.list_count.stride[1];
      if (args.list_count.dtype == Dtype::i32) {
        static_cast<int32_t*>(args.list_count.data)[at] = static_cast<int32_t>(count[l]);
      } else {
        static_cast<int64_t*>(args.list_count.data)[at] = count[l];
      }
      *args.open_n.template at<T>(b, l) = open_n[l];
      for (int64_t i = 0; i < width; ++i) *args.list_n.template at<T>(b, l, i) = list_n[l * width + i];
    }
  }
};

template <class T>
LINNET_INLINE T first(typename Vec<T>::V v) {
  T lanes[Vec<T>::W];
  Vec<T>::store(lanes, v);
  return lanes[0];
}
// y += x, exactly n elements of the caller's memory.
template <class T>
void add_exact(T* y, const T* x, int n) {
  using X = Vec<T>;
  for (int c = 0; c < n; c += X::W) X::store(y + c, X::load(y + c, n - c) + X::load(x + c, n - c), n - c);
}
template <class T>
void copy_exact(T* y, const T* x, int n, T a) {
  using X = Vec<T>;
  for (int c = 0; c < n; c += X::W) X::store(y + c, X::load(x + c, n - c) * a, n - c);
}

// Sum of 2^(x - top) over n values; the exponentials stay.
template <class T>
T exponentials(T* x, int64_t n, T top) {
  using X = Vec<T>;
  typename X::V total = X::zero();
  for (int64_t i = 0; i < n; i += X::W) {
    const int lanes = static_cast<int>(smaller(X::W, n - i));
    const typename X::V p = exp2_nonpositive(X::load(x + i, lanes) - X::broadcast(top));
    X::store(x + i, p, lanes);
    total = total + select(X::prefix(lanes), p, X::zero());
  }
  return sum(total);
}

template <class T>
void token(const HierarchicalDecodeArgs& args, const View& out, Step<T>& s, int64_t b, int64_t t, int64_t h, int64_t close) {
  using X = Vec<T>;
  const int K = static_cast<int>(args.q.size[3]), V = static_cast<int>(args.v.size[3]);
  const int64_t ldk = round_up<T>(K), levels = s.levels;
  const bool prefix = args.tie == HierarchicalTie::prefix;
  const T factor = static_cast<T>(default_scale(args.scale, K) * kLog2e<double>);
  T *const q = s.query, *const k = s.query + ldk;
  const auto offset = [&](const View& x) { return b * x.stride[0] + t * x.stride[1] + h * x.stride[2]; };
  with_type<T>(args.q, offset(args.q), [&](auto* p) { load_tile<T>(p, 0, 1, K, q, 0); });
  with_type<T>(args.k, offset(args.k), [&](auto* p) { load_tile<T>(p, 0, 1, K, k, 0); });
  with_type<T>(args.v, offset(args.v), [&](auto* p) { load_tile<T>(p, 0, 1, V, s.value, 0); });
  s.g[0] = factor * dot_rows(q, k, K);
  s.n[0] = 1;
  for (int64_t l = 0; l < levels; ++l) s.n[l + 1] = s.open_n[l] + 1;
  T top = args.include_self ? s.g[0] : kLowest<T>;
  for (int64_t l = 0; l < levels; ++l) {
    T* const logits = s.logits + l * s.width;
    const T* const sums = args.sum_q.template at<T>(b, h, l > 0 ? l - 1 : 0);
    const bool pooled = prefix && l > 0;
    T high = kLowest<T>;
    for (int64_t i = 0; i < s.count[l]; ++i) {
      const T* const row = args.list_k.template at<T>(b, h, l, i);
      const T product = pooled ? (dot_rows(sums, row, K) + dot_rows(q, row, K)) / s.n[l] : dot_rows(q, row, K);
      logits[i] = fma(X::broadcast(factor), X::broadcast(product), log2_of<T>(X::broadcast(s.list_n[l * s.width + i])))[0];
      high = logits[i] > high ? logits[i] : high;
    }
    if (!prefix) {
      top = high > top ? high : top;
      continue;
    }
    high = s.g[l] > high ? s.g[l] : high;
    const T own = first<T>(exp2_nonpositive(X::broadcast(s.g[l] - high))), total = exponentials(logits, s.count[l], high) + own;
    s.lambda[l] = high + first<T>(log2_of<T>(X::broadcast(total)));
    s.g[l + 1] = (*args.sum_g.template at<T>(b, h, l) * kLog2e<T> + s.n[l] * s.lambda[l]) / s.n[l + 1];
    for (int64_t i = 0; i < s.count[l]; ++i) logits[i] /= total;
    s.mass[l] = own / total;  // of the level above
  }
  for (int64_t c = 0; c < round_up<T>(V); ++c) s.out[c] = 0;
  T mass = 1;
  if (prefix) {
    for (int64_t l = levels - 1; l >= 0; --l) {
      for (int64_t i = 0; i < s.count[l]; ++i) {
        const T weight = s.logits[l * s.width + i] * mass;
        const T* const row = args.list_v.template at<T>(b, h, l, i);
        for (int c = 0; c < V; c += X::W) {
          X::store(s.out + c, fma(X::broadcast(weight), X::load(row + c, V - c), X::load(s.out + c)));
        }
      }
      mass *= s.mass[l];
    }
  } else {
    T total = args.include_self ? first<T>(exp2_nonpositive(X::broadcast(s.g[0] - top))) : T(0);
    const T own = total;
    for (int64_t l = 0; l < levels; ++l) {
      total += exponentials(s.logits + l * s.width, s.count[l], top);
      for (int64_t i = 0; i < s.count[l]; ++i) {
        const T* const row = args.list_v.template at<T>(b, h, l, i);
        for (int c = 0; c < V; c += X::W) {
          X::store(s.out + c, fma(X::broadcast(s.logits[l * s.width + i]), X::load(row + c, V - c), X::load(s.out + c)));
        }
      }
    }
    const T inverse = total == 0 ? T(0) : 1 / total;
    for (int64_t c = 0; c < round_up<T>(V); ++c) s.out[c] *= inverse;
    mass = own * inverse;
  }
  if (args.include_self) {
    for (int c = 0; c < V; c += X::W) {
      X::store(s.out + c, fma(X::broadcast(mass), X::load(s.value + c), X::load(s.out + c)));
    }
  }
  with_type<T>(out, offset(out), [&](auto* p) { store_tile<T>(s.out, 0, 1, V, p, 0); });
  // The token joins the open nodes; of the node that ends highest its parent keeps the means.
  for (int64_t l = 0; l < levels; ++l) {
    add_exact(args.sum_q.template at<T>(b, h, l), q, K);
    add_exact(args.sum_k.template at<T>(b, h, l), k, K);
    add_exact(args.sum_v.template at<T>(b, h, l), s.value, V);
  }
  T* const list_k = args.list_k.template at<T>(b, h, close, s.count[close]);
  T* const list_v = args.list_v.template at<T>(b, h, close, s.count[close]);
  copy_exact(list_k, close == 0 ? k : args.sum_k.template at<T>(b, h, close - 1), K, 1 / s.n[close]);
  copy_exact(list_v, close == 0 ? s.value : args.sum_v.template at<T>(b, h, close - 1), V, 1 / s.n[close]);
  if (prefix) *args.sum_g.template at<T>(b, h, close) += s.n[close] * s.lambda[close] * kLn2<T>;
  for (int64_t l = 0; l < close; ++l) {
    clear_rows(args.sum_q.template at<T>(b, h, l), K);
    clear_rows(args.sum_k.template at<T>(b, h, l), K);
    clear_rows(args.sum_v.template at<T>(b, h, l), V);
    *args.sum_g.template at<T>(b, h, l) = 0;
  }
}

// ---- a prompt, tie row ---------------------------------------------------------------------------------------------------

// Tokens behind an empty tree, tie row: the operator itself, then the state, which is means and sums of keys and values.
bool may_be_prompt(const HierarchicalDecodeArgs& args) {
  return args.tie == HierarchicalTie::row && !args.close.given() && args.q.size[1] > args.arity;
}
template <class T>
bool is_prompt(const HierarchicalDecodeArgs& args, int64_t b) {
  if (!may_be_prompt(args) || index_at(args.lengths, b) != 0) return false;
  for (int64_t l = 0; l < args.list_count.size[1]; ++l) {
    if (index_at(args.list_count, b, l) != 0 || *args.open_n.template at<T>(b, l) != 0) return false;
  }
  return true;
}
View batch_row(View x, int64_t b) {
  x.data = static_cast<char*>(x.data) + b * x.stride[0] * dtype_size(x.dtype);
  x.size[0] = 1;
  return x;
}
HierarchicalArgs prompt_call(const HierarchicalDecodeArgs& args) {
  HierarchicalArgs call;
  call.q = args.q, call.k = args.k, call.v = args.v;
  call.tie = args.tie, call.include_self = args.include_self, call.causal = true;
  call.scale = args.scale;
  call.arity = args.arity;
  return call;
}
// sum += rows [first, end) of head h; row: scratch
template <class T>
void add_tokens(const View& x, int64_t b, int64_t h, int64_t first, int64_t end, T* sum, T* row) {
  const int width = static_cast<int>(x.size[3]);
  for (int64_t t = first; t < end; ++t) {
    with_type<T>(x, b * x.stride[0] + t * x.stride[1] + h * x.stride[2],
                 [&](auto* p) { load_tile<T>(p, 0, 1, width, row, 0); });
    add_exact(sum, row, width);
  }
}
// Level l's open node holds the tokens behind the last whole window of arity^(l+1), the last level's all of them; its finished
// children are windows of arity^l. Above the first node that holds all tokens nothing has finished, and sums are the same.
template <class T>
void prompt_state(const HierarchicalDecodeArgs& args, Step<T>& s, int64_t b, int64_t h) {
  struct Rows {
    const View &x, &sums, &lists;
  };
  const View none;
  const Rows rows[] = {{args.q, args.sum_q, none}, {args.k, args.sum_k, args.list_k}, {args.v, args.sum_v, args.list_v}};
  const int64_t tokens = args.q.size[1];
  int64_t child = 1;
  bool all = false;  // the level below holds all tokens already
  for (int64_t l = 0; l < s.levels; ++l) {
    const bool last = l + 1 == s.levels || child > tokens / args.arity;
    const int64_t first = last ? 0 : tokens / (child * args.arity) * (child * args.arity);
    s.open_n[l] = static_cast<T>(tokens - first);
    s.count[l] = all ? 0 : (tokens - first) / child;
    for (int64_t i = 0; i < s.count[l]; ++i) s.list_n[l * s.width + i] = static_cast<T>(child);
    for (const Rows& r : rows) {
      const int width = static_cast<int>(r.x.size[3]);
      T* const sum = r.sums.template at<T>(b, h, l);
      if (all) {
        copy_exact(sum, r.sums.template at<T>(b, h, l - 1), width, T(1));
        continue;
      }
      clear_rows(sum, width);
      const int64_t finished = r.lists.given() ? s.count[l] : 0;
      for (int64_t i = 0; i < finished; ++i) {
        T* const mean = r.lists.template at<T>(b, h, l, i);
        clear_rows(mean, width);
        add_tokens<T>(r.x, b, h, first + i * child, first + (i + 1) * child, mean, s.query);
        add_exact(sum, mean, width);
        copy_exact(mean, mean, width, 1 / static_cast<T>(child));
      }
      add_tokens<T>(r.x, b, h, first + finished * child, tokens, sum, s.query);
    }
    all = last;
    child *= last ? 1 : args.arity;
  }
}
template <class T>
void prompt(const HierarchicalDecodeArgs& args, const View& out, const Launch& launch, int64_t b, int64_t bytes) {
  HierarchicalArgs call = prompt_call(args);
  for (View* x : {&call.q, &call.k, &call.v}) *x = batch_row(*x, b);
  hierarchical_forward(call, {.out = batch_row(out, b)}, launch);
  const double flops = static_cast<double>(call.q.elements() + call.k.elements() + call.v.elements());
  run_tasks(launch, args.q.size[2], flops, [&](int64_t h, int worker) {
    Arena arena(launch.workspace + worker * bytes);
    Step<T> step(arena, args);
    prompt_state(args, step, b, h);
  });
}

template <class T>
int64_t step_bytes(const HierarchicalDecodeArgs& args) {
  Arena arena;
  const Step<T> step(arena, args);
  return arena.used();
}

template <class T>
void run(const HierarchicalDecodeArgs& args, const View& out, const Launch& launch) {
  const int64_t B = args.q.size[0], tokens = args.q.size[1], H = args.q.size[2], bytes = step_bytes<T>(args);
  const double rows = static_cast<double>(args.list_count.size[1] * (args.list_k.size[3] + 4));
  const double flops = static_cast<double>(B * tokens * H * (args.q.size[3] + args.v.size[3])) * rows * 2;
  for (int64_t b = 0; b < B; ++b) {
    if (is_prompt<T>(args, b)) prompt<T>(args, out, launch, b, bytes);
  }
  run_tasks(launch, tokens == 0 ? 0 : B * H, flops, [&](int64_t task, int worker) {
    if (is_prompt<T>(args, task / H)) return;
    Arena arena(launch.workspace + worker * bytes);
    Step<T> step(arena, args);
    const int64_t b = task / H, length = index_at(args.lengths, b);
    step.begin(args, b);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t close = hierarchical_closing(args, b, t, length + t);
      token(args, out, step, b, t, task % H, close);
      step.advance(close);
    }
  });
  for (int64_t b = 0; b < B; ++b) {
    Arena arena(launch.workspace);
    Step<T> step(arena, args);
    const int64_t length = index_at(args.lengths, b);
    step.begin(args, b);
    for (int64_t t = 0; t < tokens; ++t) step.advance(hierarchical_closing(args, b, t, length + t));
    step.end(args, b);
    if (args.lengths.dtype == Dtype::i32) {
      static_cast<int32_t*>(args.lengths.data)[b * args.lengths.stride[0]] += static_cast<int32_t>(tokens);
    } else {
      static_cast<int64_t*>(args.lengths.data)[b * args.lengths.stride[0]] += tokens;
    }
  }
}

}  // namespace

int64_t hierarchical_decode_workspace(const HierarchicalDecodeArgs& args, Pass, int workers) {
  const int64_t steps = workers * (args.q.dtype == Dtype::f64 ? step_bytes<double>(args) : step_bytes<float>(args));
  return may_be_prompt(args) ? larger(steps, hierarchical_workspace(prompt_call(args), Pass::forward, workers)) : steps;
}
void hierarchical_decode_forward(const HierarchicalDecodeArgs& args, const HierarchicalDecodeOut& out, const Launch& launch) {
  args.q.dtype == Dtype::f64 ? run<double>(args, out.out, launch) : run<float>(args, out.out, launch);
}

}  // namespace linnet::LINNET_ISA
