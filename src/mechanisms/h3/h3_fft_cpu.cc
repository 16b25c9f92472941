// The forward of H3 in its FFT form: the long filter by transforms of whole sequences, T log T, one (head, p, r) in each lane
// (h3_fft.h).
//
// A task is a run of batch rows and as many heads as fill the lanes; the filter's transform is made once for all its rows, and
// a row costs two transforms, s = kd * kv. The filter is a product with 64 powers of a, as in the chunked form.
#include "h3_chunk.h"
#include "h3_fft.h"
#include "h3_fft_call.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int n64 = kH3Chunk;
constexpr int64_t kTables = 32;  // parts of the roots' tables
constexpr int64_t kTasks = 8;
constexpr int kBlock = 8;  // tokens of the short filter at a time, a row each

// How heads and slots lie in the lanes: lane l of group g is pair g W + l of the task's heads x P x P.
template <class T>
struct Lanes {
  static constexpr int W = Vec<T>::W;
  int64_t P, h0;
  int count;                   // lanes in use
  int64_t in_p[W], in_r[W];    // channels of the task
  int64_t q[W], v[W], out[W];  // channels of q and k, of v, and of out
  LINNET_INLINE Lanes(const H3Shape& shape, int64_t first_head, int64_t heads, int64_t group) : P(shape.P), h0(first_head) {
    const int64_t first = group * W, all = heads * P * P;
    count = static_cast<int>(all - first < W ? all - first : W);
    for (int l = 0; l < W; ++l) {
      const int64_t e = first + (l < count ? l : 0), h = e / (P * P), p = e / P % P, r = e % P;
      in_p[l] = h * P + p, in_r[l] = h * P + r;
      q[l] = h0 * P + in_p[l], v[l] = h0 * P + in_r[l], out[l] = r * shape.H + h0 + h;
    }
  }
  LINNET_INLINE int head(int l) const { return static_cast<int>(in_p[l] / P); }
};

template <class T>
struct Scratch {
  T *K, *X;                   // transforms
  T *keys, *kbar;             // [pad + T + pad, ldc], [T + pad, ldc]: rows of the task's channels
  T* y;                       // [T, ldc] for P > 1: out, sums over the slots
  T *taps, *shift;            // [R, ldc], [R]: the short filter
  T *rows, *powers, *turned;  // [J, 2 Mp], [64, 2 Mp], [2 Mp, 64]
  T* filter;                  // [J, 64]
  double *power, *product;    // [2 Mp]
  double *sb, *sc, *row;      // [R]
  H3Head head;

  static Scratch cut(Arena& arena, const H3Shape& shape, const Ring<T>& ring, int64_t heads, int64_t pad) {
    Scratch r{};
    const int64_t Mp = round_up<T>(shape.M), ldc = round_up<T>(heads * shape.P), R = shape.R, width = 2 * Mp;
    r.K = arena.take<T>(ring.elements());
    r.X = arena.take<T>(ring.elements());
    r.keys = arena.take<T>((shape.T + 2 * pad) * ldc);
    r.kbar = arena.take<T>((shape.T + pad) * ldc);
    if (shape.P > 1) r.y = arena.take<T>(shape.T * ldc);
    r.taps = arena.take<T>(R * ldc);
    r.shift = arena.take<T>(R);
    r.rows = arena.take<T>(kH3Chunks * width);
    r.powers = arena.take<T>(n64 * width);
    r.turned = arena.take<T>(n64 * width);
    r.filter = arena.take<T>(kH3Window);
    r.power = arena.take<double>(width);
    r.product = arena.take<double>(width);
    r.sb = arena.take<double>(R);
    r.sc = arena.take<double>(R);
    r.row = arena.take<double>(R);
    r.head = H3Head::cut(arena, Mp);
    return r;
  }
};

// y[t] = sum_l taps[l] x[t - l], rows of ld channels; x has R - 1 rows before it; whole blocks of rows are written. Sixteen
// taps at a time, as the chunked form.
template <class T>
void filter_rows(const T* x, const T* taps, int64_t R, int64_t count, int64_t ld, T* y) {
  using X = Vec<T>;
  for (int64_t c = 0; c < ld; c += X::W) {
    for (int64_t t = 0; t < count; t += kBlock) {
      typename X::V total[kBlock] = {};
      for (int64_t l = 0; l < R;) {
        const int64_t end = l + 16 < R ? l + 16 : R;
        typename X::V part[kBlock] = {};
        for (; l < end; ++l) {
          const typename X::V tap = X::load(taps + l * ld + c);
          const T* from = x + (t - l) * ld + c;
#pragma GCC unroll 8
          for (int i = 0; i < kBlock; ++i) part[i] = fma(tap, X::load(from + i * ld), part[i]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kBlock; ++i) total[i] += part[i];
      }
#pragma GCC unroll 8
      for (int i = 0; i < kBlock; ++i) X::store(y + (t + i) * ld + c, total[i]);
    }
  }
}

template <class T, class E>
struct Form {
  using X = Vec<T>;
  using V = typename X::V;

  const H3Args& args;
  H3Shape shape;
  int64_t Mp, heads, blocks, groups, runs, pad, ldc;
  int64_t n;  // points of a transform

  explicit Form(const H3Args& a) : args(a), shape(a) {
    Mp = round_up<T>(shape.M);
    heads = shape.P * shape.P >= X::W ? 1 : X::W / (shape.P * shape.P);
    if (heads > shape.H) heads = shape.H;
    blocks = (shape.H + heads - 1) / heads;
    groups = (heads * shape.P * shape.P + X::W - 1) / X::W;
    const int64_t wanted = (kTasks + blocks - 1) / blocks;  // tasks enough, and each filter for as many rows as possible
    runs = shape.B < wanted ? shape.B : wanted;
    pad = (shape.R + kBlock) / kBlock * kBlock;
    ldc = round_up<T>(heads * shape.P);
    n = power_of_two_above(shape.T);
  }
  bool one() const { return shape.P == 1; }

  struct Memory {
    Ring<T> ring;
    double *coarse, *fine;
    char* workers;
    int64_t worker_bytes;
  };
  Memory cut(Arena& arena, int workers) const {
    Memory m;
    m.ring = Ring<T>::cut(arena, n);
    m.coarse = arena.take<double>(2 * m.ring.fine_count());
    m.fine = arena.take<double>(2 * m.ring.fine_count());
    Arena own;
    Scratch<T>::cut(own, shape, m.ring, heads, pad);
    m.worker_bytes = own.used();
    m.workers = arena.take<char>(workers * m.worker_bytes);
    return m;
  }
  Memory begin(const Launch& launch) const {
    Arena arena(launch.workspace);
    const Memory m = cut(arena, launch.workers);
    m.ring.begin_tables(m.coarse, m.fine);
    parallel(launch, kTables, [&](int64_t part, int) { m.ring.fill_tables(m.coarse, m.fine, part, kTables); });
    return m;
  }

  // ---- the filter

  // a^j for j < 64; r.power becomes a^64.
  void powers_of(const Scratch<T>& r, const H3Head& head) const {
    const int width = static_cast<int>(2 * Mp);
    one_row(Mp, r.power);
    for (int j = 0; j < n64; ++j) {
      for (int m = 0; m < width; ++m) r.powers[j * width + m] = static_cast<T>(r.power[m]);
      multiply_rows(r.power, head.a, Mp, r.power);
    }
  }
  // The transform of kd / n, d on its first tap, into K: kd[64 i + j] = 2 Re(c bd a^{64 i} . a^j). X holds the taps on the way.
  void filters(const Scratch<T>& r, const Ring<T>& ring, int64_t h0, int64_t count) const {
    const Lanes<T> lanes(shape, h0, count, 0);
    const int64_t ld = round_up<T>(shape.T);
    int before = -1;
    for (int l = 0; l < lanes.count; ++l) {
      T* to = r.X + l * ld;
      if (lanes.head(l) == before) {
        __builtin_memcpy(to, to - ld, static_cast<size_t>(shape.T) * sizeof(T));
      } else {
        before = lanes.head(l);
        filter(r, h0 + before, to);
      }
    }
    constexpr int kSpan = 64;
    T turned[kSpan * X::W];
    for (int64_t t = 0; t < shape.T; t += kSpan) {
      const int span = shape.T - t < kSpan ? static_cast<int>(shape.T - t) : kSpan;
      load_tile_transposed<T>(r.X + t, ld, lanes.count, span, turned, X::W, T(1) / static_cast<T>(n));
      for (int j = 0; j < span; ++j) ring.put(r.K, t + j, X::load(turned + j * X::W));
    }
    ring.clear(r.K, shape.T, n);
    ring.forward(r.K);
  }
  void filter(const Scratch<T>& r, int64_t h, T* to) const {
    const int width = static_cast<int>(2 * Mp);
    H3Head head = r.head;
    head.load(args, h, shape.M, Mp);
    powers_of(r, head);
    load_tile_transposed<T>(r.powers, width, n64, width, r.turned, n64);
    multiply_rows(head.c, head.bd, Mp, r.product);
    for (int64_t t = 0; t < shape.T; t += kH3Window) {
      const int tokens = shape.T - t < kH3Window ? static_cast<int>(shape.T - t) : kH3Window, chunks = (tokens + n64 - 1) / n64;
      for (int i = 0; i < chunks; ++i) {
        for (int64_t m = 0; m < Mp; ++m) {
          r.rows[i * width + m] = static_cast<T>(2 * r.product[m]);
          r.rows[i * width + Mp + m] = static_cast<T>(-2 * r.product[Mp + m]);
        }
        multiply_rows(r.product, r.power, Mp, r.product);
      }
      gemm<T>(chunks, n64, width, as_is(r.rows, width), r.turned, n64, r.filter, n64, Store{});
      __builtin_memcpy(to + t, r.filter, static_cast<size_t>(tokens) * sizeof(T));
    }
    to[0] += static_cast<T>(element(args.d, h));
  }

  // ---- rows

  LINNET_INLINE V gather(const View& view, int64_t b, int64_t t, const int64_t* channel, int count) const {
    if (one()) return X::load(view.at<const E>(b, t, channel[0]), count);
    T row[X::W] = {};
    for (int l = 0; l < count; ++l) row[l] = static_cast<T>(to_f64(*view.at<const E>(b, t, channel[l])));
    return X::load(row);
  }
  LINNET_INLINE V gather(const T* row, const int64_t* channel, int count) const {
    if (one()) return X::load(row);
    T lanes[X::W] = {};
    for (int l = 0; l < count; ++l) lanes[l] = row[channel[l]];
    return X::load(lanes);
  }
  LINNET_INLINE void add(T* row, const int64_t* channel, int count, V x) const {
    for (int l = 0; l < count; ++l) row[channel[l]] += x[l];
  }

  void short_filters(const Scratch<T>& r, int64_t h0, int64_t count) const {
    for (int64_t i = 0; i < shape.R * ldc; ++i) r.taps[i] = 0;
    for (int64_t c = 0; c < count * shape.P; ++c) {
      h3_shift_taps(args, h0 * shape.P + c, shape.R, r.sb, r.sc, r.row, r.shift);
      for (int64_t l = 0; l < shape.R; ++l) r.taps[l * ldc + c] = r.shift[l];
    }
  }
  // keys and kbar of batch row b, zeros around them
  void load_keys(const Scratch<T>& r, int64_t b, int64_t h0, int64_t count) const {
    h3_clear(r.keys, pad * ldc);
    for (int64_t i = 0; i < shape.T * ldc && count * shape.P < ldc; ++i) r.keys[pad * ldc + i] = 0;
    load_tile<T>(args.k.at<const E>(b, 0, h0 * shape.P), args.k.stride[1], static_cast<int>(shape.T),
                 static_cast<int>(count * shape.P), r.keys + pad * ldc, ldc);
    h3_clear(r.keys + (pad + shape.T) * ldc, pad * ldc);
    filter_rows<T>(r.keys + pad * ldc, r.taps, shape.R, shape.T, ldc, r.kbar);
  }
  // The transform of kv into X. A transform would carry what is not finite to earlier tokens too: a lane is zero from there on,
  // and returned is the NaN that belongs there.
  V load_products(const Scratch<T>& r, const Ring<T>& ring, const Lanes<T>& lanes, int64_t b) const {
    V broken = X::zero();
    for (int64_t t = 0; t < shape.T; ++t) {
      const V kv = gather(r.kbar + t * ldc, lanes.in_p, lanes.count) * gather(args.v, b, t, lanes.v, lanes.count);
      broken = fma(kv, X::zero(), broken);
      ring.put(r.X, t, select(is_nan(broken), X::zero(), kv));
    }
    ring.clear(r.X, shape.T, n);
    ring.forward(r.X);
    return broken;
  }
  // s of token t; broken: kv so far, as load_products saw it
  LINNET_INLINE V repeat_break(const Scratch<T>& r, const Lanes<T>& lanes, int64_t b, int64_t t, V* broken) const {
    const V kv = gather(r.kbar + t * ldc, lanes.in_p, lanes.count) * gather(args.v, b, t, lanes.v, lanes.count);
    return *broken = fma(kv, X::zero(), *broken);
  }

  // ---- forward

  void forward(const H3Out& out, const Launch& launch) const {
    const Memory m = begin(launch);
    parallel(launch, runs * blocks, [&](int64_t task, int worker) {
      Arena own(m.workers + worker * m.worker_bytes);
      const Scratch<T> r = Scratch<T>::cut(own, shape, m.ring, heads, pad);
      const int64_t run = task / blocks, h0 = task % blocks * heads, count = shape.H - h0 < heads ? shape.H - h0 : heads;
      filters(r, m.ring, h0, count);
      short_filters(r, h0, count);
      for (int64_t b = run * shape.B / runs; b < (run + 1) * shape.B / runs; ++b) forward_row(r, m.ring, out.out, b, h0, count);
    });
  }
  void forward_row(const Scratch<T>& r, const Ring<T>& ring, const View& out, int64_t b, int64_t h0, int64_t count) const {
    load_keys(r, b, h0, count);
    if (!one()) h3_clear(r.y, shape.T * ldc);
    for (int64_t g = 0; g < groups; ++g) {
      const Lanes<T> lanes(shape, h0, count, g);
      if (lanes.count <= 0) break;
      const bool whole = !any(is_nan(load_products(r, ring, lanes, b)));
      ring.template multiply<false>(r.X, r.K, r.X);
      ring.inverse(r.X);
      V broken = X::zero();
      for (int64_t t = 0; t < shape.T; ++t) {
        V s = ring.get(r.X, t);
        if (!whole) s += repeat_break(r, lanes, b, t, &broken);
        const V y = gather(args.q, b, t, lanes.q, lanes.count) * s;
        if (one()) {
          X::store(out.at<E>(b, t, lanes.out[0]), y, lanes.count);
        } else {
          add(r.y + t * ldc, lanes.in_r, lanes.count, y);
        }
      }
    }
    for (int64_t t = 0; !one() && t < shape.T; ++t) {
      for (int64_t h = 0; h < count; ++h) {
        for (int64_t slot = 0; slot < shape.P; ++slot) {
          *out.at<E>(b, t, slot * shape.H + h0 + h) = round_to<E>(static_cast<double>(r.y[t * ldc + h * shape.P + slot]));
        }
      }
    }
  }
};

}  // namespace

void h3_fft_forward(const H3Args& args, const H3Out& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() { Form<T, E>(args).forward(out, launch); });
}
int64_t h3_fft_workspace(const H3Args& args, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() {
    Arena arena;
    Form<T, E>(args).cut(arena, workers);
    return arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
