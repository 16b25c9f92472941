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
  run_tasks(launch, tokens == 0 ? 0 : B * H, flops, [&](int64_t task, int worker) {
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
  return workers * (args.q.dtype == Dtype::f64 ? step_bytes<double>(args) : step_bytes<float>(args));
}
void hierarchical_decode_forward(const HierarchicalDecodeArgs& args, const HierarchicalDecodeOut& out, const Launch& launch) {
  args.q.dtype == Dtype::f64 ? run<double>(args, out.out, launch) : run<float>(args, out.out, launch);
}

}  // namespace linnet::LINNET_ISA
