// distill_hybrid on the vector units: one task for each row of the batch and head, token by token. A token costs two products
// with z, the scores of its window, one update and one read of the state, which stays in the first cache; scores and log
// features are summed in double, since exponentials magnify their rounding.
#include "core/half.h"
#include "distill.h"
#include "simd/math.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
LINNET_INLINE int64_t padded(int64_t n) {
  return (n + Vec<T>::W - 1) / Vec<T>::W * Vec<T>::W;
}
// Lanes of double sums over rows of T.
template <class T>
LINNET_INLINE double dot(const T* a, const T* b, int64_t n) {
  double lanes[8] = {};
  int64_t c = 0;
  for (; c + 8 <= n; c += 8) {
    for (int64_t j = 0; j < 8; ++j) lanes[j] += static_cast<double>(a[c + j]) * static_cast<double>(b[c + j]);
  }
  for (; c < n; ++c) lanes[0] += static_cast<double>(a[c]) * static_cast<double>(b[c]);
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}
template <class T, class E>
LINNET_INLINE void widen(const E* from, int64_t n, T* to) {
  using X = Vec<T>;
  for (int64_t c = 0; c < n; c += X::W) {
    const int part = static_cast<int>(n - c < X::W ? n - c : X::W);
    X::store(to + c, X::load(from + c, part), part);
  }
}
template <class T>
LINNET_INLINE void add_times(T* to, const T* from, T factor, int64_t n) {
  using X = Vec<T>;
  const typename X::V f = X::broadcast(factor);
  for (int64_t c = 0; c < n; c += X::W) X::store(to + c, X::load(to + c) + f * X::load(from + c));
}
template <class T>
LINNET_INLINE void exponentials(T* x, int64_t n) {  // padded with anything
  using X = Vec<T>;
  for (int64_t c = 0; c < n; c += X::W) X::store(x + c, exp(X::load(x + c)));
}

// One head: its features, its state in units of exp(c), and scratch. Rows of values are padded with zeros.
template <class T>
struct Head {
  int64_t K, V, M, window, sinks, ldk, ldv, ldm;
  T *z, *q, *x, *lq, *weights, *sums, *old, *own;  // z [M, ldk]; weights [sinks + window]
  double* bias;                                    // [M]
  T *state, *n, *c;                                // [M, ldv], [ldm], [ldm]

  template <class Args>
  Head(Arena& arena, const Args& args) {
    K = args.q.size[3], V = args.v.size[3], M = args.z.size[1];
    window = args.window < args.q.size[1] || requires { args.held; }
    ? args.window : args.q.size[1];
    sinks = args.sinks < args.q.size[1] || requires { args.held; }
    ? args.sinks : args.q.size[1];
    ldk = padded<T>(K), ldv = padded<T>(V), ldm = padded<T>(M);
    z = arena.take<T>(M * ldk), q = arena.take<T>(ldk), x = arena.take<T>(ldk), lq = arena.take<T>(ldm);
    weights = arena.take<T>(padded<T>(sinks + window)), sums = arena.take<T>(ldv);
    old = arena.take<T>(ldm), own = arena.take<T>(ldm);
    bias = arena.take<double>(M);
    state = arena.take<T>(M * ldv), n = arena.take<T>(ldm), c = arena.take<T>(ldm);
  }
  void load(const View& directions, const View& alpha, int64_t h) {
    for (int64_t m = 0; m < M; ++m) {
      const int64_t row = h * directions.stride[0] + m * directions.stride[1];
      if (directions.dtype == Dtype::f32 && directions.stride[2] == 1) {
        const float* from = static_cast<const float*>(directions.data) + row;
        for (int64_t i = 0; i < K; ++i) z[m * ldk + i] = static_cast<T>(from[i]);
      } else {
        for (int64_t i = 0; i < K; ++i)
          z[m * ldk + i] = static_cast<T>(load_f64(directions.data, directions.dtype, row + i * directions.stride[2]));
      }
      const double a = load_f64(alpha.data, alpha.dtype, h * alpha.stride[0] + m * alpha.stride[1]);
      bias[m] = 0.5 * __builtin_log(a / static_cast<double>(M));
    }
  }
  void clear() {
    for (int64_t i = 0; i < M * ldv; ++i) state[i] = 0;
    for (int64_t m = 0; m < ldm; ++m) n[m] = 0, c[m] = -__builtin_huge_valf();
  }
  // l(x)_m + weight of the balanced row in x.
  void features(double weight, T* l) const {
    const double root = __builtin_sqrt(static_cast<double>(K)), inverse = 1 / __builtin_sqrt(root);
    const double rest = weight - dot(x, x, K) / (2 * root);
    for (int64_t m = 0; m < M; ++m) l[m] = static_cast<T>(dot(z + m * ldk, x, K) * inverse + rest + bias[m]);
  }
  // A key with log features l leaves the window.
  void absorb(const T* l, const T* v) {
    for (int64_t m = 0; m < ldm; ++m) {
      const bool any = m < M;
      const T top = any && l[m] > c[m] ? l[m] : c[m];
      const bool none = !any || top == -__builtin_huge_valf();
      old[m] = none ? T(0) : c[m] - top;
      own[m] = none ? -__builtin_huge_valf() : l[m] - top;
      c[m] = top;
    }
    exponentials(old, ldm);
    exponentials(own, ldm);
    using X = Vec<T>;
    for (int64_t m = 0; m < M; ++m) {
      n[m] = old[m] * n[m] + own[m];
      T* row = state + m * ldv;
      const typename X::V a = X::broadcast(old[m]), b = X::broadcast(own[m]);
      for (int64_t e = 0; e < ldv; e += X::W) X::store(row + e, a * X::load(row + e) + b * X::load(v + e));
    }
  }
  // The scores of the first keys and of the window stand in weights [exact]; value(j) is the row of values of the j-th.
  template <class Value>
  void read(int64_t exact, const Value& value) {
    T top = -__builtin_huge_valf();
    for (int64_t j = 0; j < exact; ++j) top = weights[j] > top ? weights[j] : top;
    for (int64_t m = 0; m < M; ++m) {
      lq[m] += c[m];
      top = lq[m] > top ? lq[m] : top;
    }
    const bool none = top == -__builtin_huge_valf();
    for (int64_t j = 0; j < exact; ++j) weights[j] = none ? -__builtin_huge_valf() : weights[j] - top;
    for (int64_t m = 0; m < M; ++m) lq[m] = none ? -__builtin_huge_valf() : lq[m] - top;
    exponentials(weights, exact);
    exponentials(lq, M);
    double total = 0;
    for (int64_t e = 0; e < ldv; ++e) sums[e] = 0;
    for (int64_t j = 0; j < exact; ++j) {
      total += static_cast<double>(weights[j]);
      add_times(sums, value(j), weights[j], ldv);
    }
    for (int64_t m = 0; m < M; ++m) {
      if (lq[m] == 0) continue;
      total += static_cast<double>(lq[m]) * static_cast<double>(n[m]);
      add_times(sums, state + m * ldv, lq[m], ldv);
    }
    const T factor = total == 0 ? T(0) : static_cast<T>(1 / total);
    for (int64_t e = 0; e < V; ++e) sums[e] *= factor;
  }
};

// Keys and values of one head as dense rows.
template <class T>
struct Rows {
  T *k, *v, *l;
};

LINNET_INLINE double weight_of(const View& w, int64_t b, int64_t t, int64_t h) {
  return load_f64(w.data, w.dtype, b * w.stride[0] + t * w.stride[1] + h * w.stride[2]);
}

template <class T>
Rows<T> cut_rows(Arena& arena, const Head<T>& head, int64_t rows, bool with_features) {
  return {arena.take<T>(rows * head.ldk), arena.take<T>(rows * head.ldv),
          with_features ? arena.take<T>(rows * head.ldm) : nullptr};
}
template <class T, class E>
void load_row(const View& from, int64_t b, int64_t t, int64_t h, int64_t n, int64_t ld, T* to) {
  for (int64_t c = n / Vec<T>::W * Vec<T>::W; c < ld; ++c) to[c] = 0;
  widen<T, E>(from.at<const E>(b, t, h), n, to);
}

template <class T, class E>
int64_t forward_bytes(const DistillHybridArgs& args) {
  Arena arena;
  const Head<T> head(arena, args);
  cut_rows(arena, head, args.q.size[1], false);
  arena.take<T>(head.ldm);
  return arena.used();
}
template <class T, class E>
void forward(const DistillHybridArgs& args, const DistillHybridOut& out, const Launch& launch) {
  const int64_t length = args.q.size[1], H = args.q.size[2], each = forward_bytes<T, E>(args);
  parallel(launch, args.q.size[0] * H, [&](int64_t task, int worker) {
    const int64_t b = task / H, h = task % H;
    Arena arena(launch.workspace + worker * each);
    Head<T> head(arena, args);
    const Rows<T> rows = cut_rows(arena, head, length, false);
    T* l = arena.template take<T>(head.ldm);
    head.load(args.z, args.alpha, h);
    head.clear();
    const double scale = 1 / __builtin_sqrt(static_cast<double>(head.K));
    for (int64_t t = 0; t < length; ++t) {
      load_row<T, E>(args.k, b, t, h, head.K, head.ldk, rows.k + t * head.ldk);
      load_row<T, E>(args.v, b, t, h, head.V, head.ldv, rows.v + t * head.ldv);
      if (const int64_t gone = t - head.window; gone >= head.sinks) {
        load_row<T, E>(args.k_balanced, b, gone, h, head.K, head.ldk, head.x);
        head.features(weight_of(args.key_logw, b, gone, h), l);
        head.absorb(l, rows.v + gone * head.ldv);
      }
      load_row<T, E>(args.q, b, t, h, head.K, head.ldk, head.q);
      load_row<T, E>(args.q_balanced, b, t, h, head.K, head.ldk, head.x);
      head.features(weight_of(args.query_logw, b, t, h), head.lq);
      const int64_t begin = t - head.window + 1 > 0 ? t - head.window + 1 : 0, firsts = head.sinks < begin ? head.sinks : begin;
      const auto place = [&](int64_t j) { return j < firsts ? j : begin + j - firsts; };
      const int64_t exact = firsts + t + 1 - begin;
      for (int64_t j = 0; j < exact; ++j)
        head.weights[j] = static_cast<T>(dot(head.q, rows.k + place(j) * head.ldk, head.K) * scale);
      head.read(exact, [&](int64_t j) { return rows.v + place(j) * head.ldv; });
      E* to = out.out.at<E>(b, t, h);
      using X = Vec<T>;
      for (int64_t e = 0; e < head.V; e += X::W)
        X::store(to + e, X::load(head.sums + e), static_cast<int>(head.V - e < X::W ? head.V - e : X::W));
    }
  });
}

template <class T, class E>
int64_t decode_bytes(const DistillHybridDecodeArgs& args) {
  Arena arena;
  const Head<T> head(arena, args);
  cut_rows(arena, head, args.sinks, false);
  cut_rows(arena, head, 2 * args.window, true);
  return arena.used();
}
template <class T, class E>
void decode(const DistillHybridDecodeArgs& args, const DistillHybridOut& out, const Launch& launch) {
  using X = Vec<T>;
  const int64_t B = args.q.size[0], length = args.q.size[1], H = args.q.size[2], each = decode_bytes<T, E>(args);
  const int64_t window = args.window, room = 2 * window;
  const auto store_row = [](const T* from, int64_t n, E* to) {
    for (int64_t c = 0; c < n; c += X::W) X::store(to + c, X::load(from + c), static_cast<int>(n - c < X::W ? n - c : X::W));
  };
  parallel(launch, B * H, [&](int64_t task, int worker) {
    const int64_t b = task / H, h = task % H;
    Arena arena(launch.workspace + worker * each);
    Head<T> head(arena, args);
    const Rows<T> firsts = cut_rows(arena, head, args.sinks, false), near = cut_rows(arena, head, room, true);
    head.load(args.z, args.alpha, h);
    int64_t first = distill_held_rows(args.first, b), held = distill_held_rows(args.held, b);
    for (int64_t j = 0; j < first; ++j) {
      load_row<T, E>(args.k_first, b, j, h, head.K, head.ldk, firsts.k + j * head.ldk);
      load_row<T, E>(args.v_first, b, j, h, head.V, head.ldv, firsts.v + j * head.ldv);
    }
    // Rows that left the window were added to the state; they are not read again.
    int64_t changed = held, stored = 0;  // rows from here on are new; rows up to here were, before the older half moved out
    const int64_t needed = held > window ? held - window : 0;
    for (int64_t j = needed; j < held; ++j) {
      load_row<T, E>(args.k_near, b, j, h, head.K, head.ldk, near.k + j * head.ldk);
      load_row<T, E>(args.v_near, b, j, h, head.V, head.ldv, near.v + j * head.ldv);
      load_row<T, T>(args.l_near, b, j, h, head.M, head.ldm, near.l + j * head.ldm);
    }
    for (int64_t m = 0; m < head.M; ++m) {
      const T* row = args.state.at<const T>(b, h, m);
      for (int64_t e = 0; e < head.ldv; ++e) head.state[m * head.ldv + e] = e < head.V ? row[e] : T(0);
    }
    for (int64_t m = 0; m < head.ldm; ++m) {
      head.n[m] = m < head.M ? *args.n.at<const T>(b, h, m) : T(0);
      head.c[m] = m < head.M ? *args.c.at<const T>(b, h, m) : -__builtin_huge_valf();
    }
    const double scale = 1 / __builtin_sqrt(static_cast<double>(head.K));
    for (int64_t t = 0; t < length; ++t) {
      if (first < args.sinks) {
        load_row<T, E>(args.k, b, t, h, head.K, head.ldk, firsts.k + first * head.ldk);
        load_row<T, E>(args.v, b, t, h, head.V, head.ldv, firsts.v + first * head.ldv);
        store_row(firsts.k + first * head.ldk, head.K, args.k_first.at<E>(b, first, h));
        store_row(firsts.v + first * head.ldv, head.V, args.v_first.at<E>(b, first, h));
        ++first;
      } else {
        if (held == room) {
          __builtin_memcpy(near.k, near.k + window * head.ldk, static_cast<size_t>(window * head.ldk) * sizeof(T));
          __builtin_memcpy(near.v, near.v + window * head.ldv, static_cast<size_t>(window * head.ldv) * sizeof(T));
          __builtin_memcpy(near.l, near.l + window * head.ldm, static_cast<size_t>(window * head.ldm) * sizeof(T));
          held = window;
          changed = 0, stored = room;
        }
        load_row<T, E>(args.k, b, t, h, head.K, head.ldk, near.k + held * head.ldk);
        load_row<T, E>(args.v, b, t, h, head.V, head.ldv, near.v + held * head.ldv);
        load_row<T, E>(args.k_balanced, b, t, h, head.K, head.ldk, head.x);
        head.features(weight_of(args.key_logw, b, t, h), near.l + held * head.ldm);
        if (++held > window) {
          const int64_t gone = held - window - 1;
          head.absorb(near.l + gone * head.ldm, near.v + gone * head.ldv);
        }
      }
      load_row<T, E>(args.q, b, t, h, head.K, head.ldk, head.q);
      load_row<T, E>(args.q_balanced, b, t, h, head.K, head.ldk, head.x);
      head.features(weight_of(args.query_logw, b, t, h), head.lq);
      const int64_t begin = held > window ? held - window : 0, exact = first + held - begin;
      const auto key = [&](int64_t j) { return j < first ? firsts.k + j * head.ldk : near.k + (begin + j - first) * head.ldk; };
      for (int64_t j = 0; j < exact; ++j) head.weights[j] = static_cast<T>(dot(head.q, key(j), head.K) * scale);
      head.read(exact,
                [&](int64_t j) { return j < first ? firsts.v + j * head.ldv : near.v + (begin + j - first) * head.ldv; });
      store_row(head.sums, head.V, out.out.at<E>(b, t, h));
    }
    for (int64_t j = changed; j < (held > stored ? held : stored); ++j) {
      store_row(near.k + j * head.ldk, head.K, args.k_near.at<E>(b, j, h));
      store_row(near.v + j * head.ldv, head.V, args.v_near.at<E>(b, j, h));
      for (int64_t m = 0; m < head.M; ++m) args.l_near.at<T>(b, j, h)[m] = near.l[j * head.ldm + m];
    }
    for (int64_t m = 0; m < head.M; ++m) {
      T* row = args.state.at<T>(b, h, m);
      for (int64_t e = 0; e < head.V; ++e) row[e] = head.state[m * head.ldv + e];
      *args.n.at<T>(b, h, m) = head.n[m];
      *args.c.at<T>(b, h, m) = head.c[m];
    }
  });
  for (int64_t b = 0; b < B; ++b) {
    const int64_t first = distill_held_rows(args.first, b), taken = args.sinks - first < length ? args.sinks - first : length;
    distill_window_hold(args.first, b, first + taken);
    distill_window_hold(args.held, b, distill_window_held(window, distill_held_rows(args.held, b) + length - taken));
  }
}

}  // namespace

void distill_hybrid_forward(const DistillHybridArgs& args, const DistillHybridOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() { forward<T, E>(args, out, launch); });
}
int64_t distill_hybrid_workspace(const DistillHybridArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() { return workers * forward_bytes<T, E>(args); });
}
void distill_hybrid_decode_forward(const DistillHybridDecodeArgs& args, const DistillHybridOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() { decode<T, E>(args, out, launch); });
}
int64_t distill_hybrid_decode_workspace(const DistillHybridDecodeArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() { return workers * decode_bytes<T, E>(args); });
}

}  // namespace linnet::LINNET_ISA
