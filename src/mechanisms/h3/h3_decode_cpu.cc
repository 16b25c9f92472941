// One step of H3: both states read and written once, where they lie. The diagonal state keeps its pairs (re, im) side by side:
// the complex product is one multiply-add with the neighbours exchanged. a is held in two numbers of T, so that the state does
// not drift (h3.md). The parameters are discretised in every call, in double, once for all batch rows.
#include "h3_ssm.h"
#include "simd/math.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

#if defined(LINNET_ISA_avx512)
LINNET_INLINE vf swap_pairs(vf v) {
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}
LINNET_INLINE vd swap_pairs(vd v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6); }
#elif defined(LINNET_ISA_avx2)
LINNET_INLINE vf swap_pairs(vf v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6); }
LINNET_INLINE vd swap_pairs(vd v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2); }
#else
LINNET_INLINE vf swap_pairs(vf v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2); }
LINNET_INLINE vd swap_pairs(vd v) { return __builtin_shufflevector(v, v, 1, 0); }
#endif

constexpr int64_t kHeads = 16;

// The discrete parameters of one head, for pairs side by side: X' = high X + (cross swap(X) + (low X + (low_cross swap(X) + bd
// kv))).
template <class T>
struct Table {
  T *high, *cross, *low, *low_cross, *bd, *c;  // [ld]
  static Table at(T* base, int64_t ld) { return {base, base + ld, base + 2 * ld, base + 3 * ld, base + 4 * ld, base + 5 * ld}; }
  void set(int64_t m, double ar, double ai, double br, double bi, double cr, double ci) const {
    const T hr = static_cast<T>(ar), hi = static_cast<T>(ai);
    const T lr = static_cast<T>(ar - static_cast<double>(hr)), li = static_cast<T>(ai - static_cast<double>(hi));
    high[2 * m] = high[2 * m + 1] = hr;
    cross[2 * m] = -hi, cross[2 * m + 1] = hi;
    low[2 * m] = low[2 * m + 1] = lr;
    low_cross[2 * m] = -li, low_cross[2 * m + 1] = li;
    bd[2 * m] = static_cast<T>(br), bd[2 * m + 1] = static_cast<T>(bi);
    c[2 * m] = static_cast<T>(2 * cr), c[2 * m + 1] = static_cast<T>(-2 * ci);
  }
  void clear(int64_t ld) const {
    for (int64_t i = 0; i < 6 * ld; ++i) high[i] = 0;
  }
};

// rows: [M] in double
template <class T>
void discretise(const H3DecodeArgs& args, int64_t h, int64_t M, int64_t ld, double* rows, const Table<T>& table) {
  using D = Vec<double>;
  table.clear(ld);
  if (args.disc == H3Disc::zoh) {
    for (int64_t m = 0; m < M; ++m) {
      const H3Pair p = h3_pair(args, h, m);
      table.set(m, p.a.re, p.a.im, p.bd.re, p.bd.im, p.c.re, p.c.im);
    }
    return;
  }
  for (int64_t m = 0; m < M; ++m) rows[m] = element(args.log_neg_re, h, m);
  for (int64_t m = 0; m < M; m += D::W) D::store(rows + m, -exp(D::load(rows + m, static_cast<int>(M - m))));
  const double dt = __builtin_exp(element(args.log_dt, h));
  for (int64_t m = 0; m < M; ++m) {
    const double zr = 0.5 * dt * rows[m], zi = 0.5 * dt * element(args.imag, h, m);  // z / 2
    const double br = dt * element(args.b, h, m, 0), bi = dt * element(args.b, h, m, 1);
    const double inverse = 1 / ((1 - zr) * (1 - zr) + zi * zi);  // 1 / (1 - z/2) = (1 - zr + i zi) inverse
    table.set(m, ((1 + zr) * (1 - zr) - zi * zi) * inverse, 2 * zi * inverse, (br * (1 - zr) - bi * zi) * inverse,
              (bi * (1 - zr) + br * zi) * inverse, element(args.c, h, m, 0), element(args.c, h, m, 1));
  }
}

template <class T, class E>
LINNET_INLINE typename Vec<T>::V load_parameters(const View& view, int64_t c, int64_t i, int lanes) {
  if (view.dtype != (sizeof(T) == 8 ? Dtype::f64 : Dtype::f32)) return Vec<T>::load(view.at<const E>(c, i), lanes);
  return Vec<T>::load(view.at<const T>(c, i), lanes);
}

template <class T>
struct Scratch {
  T *before, *pairs;  // [R + 1, padded], [ld]
  double *kbar, *y;   // [P]
  static Scratch cut(Arena& arena, int64_t R, int64_t P, int64_t ld) {
    return {arena.take<T>(round_up<T>(R + 1) + Vec<T>::W), arena.take<T>(ld), arena.take<double>(P), arena.take<double>(P)};
  }
};

// A sum of products kept in two numbers: the read of H3 is a difference of products, and shows every rounding of its factors.
template <class T>
struct Sum {
  using X = Vec<T>;
  using V = typename X::V;
  V high = X::zero(), low = X::zero();
  LINNET_INLINE void add(V a, V b) {
    const V product = a * b, next = high + product, part = next - high;
    low = low + (fma(a, b, -product) + ((high - (next - part)) + (product - part)));
    high = next;
  }
  LINNET_INLINE double total() const {
    double result = 0;
    for (int i = 0; i < X::W; ++i) result += static_cast<double>(high[i]) + static_cast<double>(low[i]);
    return result;
  }
};

// x moves on by one token in place; returns kbar.
template <class T, class E>
double shift(const H3DecodeArgs& args, const Scratch<T>& r, int64_t b, int64_t c, int64_t R, T k) {
  using X = Vec<T>;
  T* x = args.state_shift.at<T>(b, c, 0);
  r.before[0] = 0;
  for (int64_t i = 0; i < R; i += X::W) X::store(r.before + 1 + i, X::load(x + i, static_cast<int>(R - i)));
  Sum<T> total;
  for (int64_t i = 0; i < R; i += X::W) {
    const int lanes = static_cast<int>(R - i);
    const typename X::V next = fma(load_parameters<T, E>(args.sb, c, i, lanes), X::broadcast(k), X::load(r.before + i, lanes));
    X::store(x + i, next, lanes);
    total.add(load_parameters<T, E>(args.sc, c, i, lanes), next);
  }
  const double skip = load_f64(args.sd.data, args.sd.dtype, c * args.sd.stride[0]);
  return total.total() + skip * static_cast<double>(k);
}

// X moves on by one token; returns 2 Re(c X).
template <class T>
LINNET_INLINE double diagonal(const Table<T>& table, int64_t width, T kv, T* pairs) {
  using X = Vec<T>;
  using V = typename X::V;
  Sum<T> total;
  const V input = X::broadcast(kv);
  for (int64_t i = 0; i < width; i += X::W) {
    const int lanes = static_cast<int>(width - i);
    const V x = X::load(pairs + i, lanes), other = swap_pairs(x);
    V next = fma(X::load(table.low_cross + i), other, X::load(table.bd + i) * input);
    next = fma(X::load(table.cross + i), other, fma(X::load(table.low + i), x, next));
    next = fma(X::load(table.high + i), x, next);
    X::store(pairs + i, next, lanes);
    total.add(X::load(table.c + i), next);
  }
  return total.total();
}

template <class T, class E>
struct Decode {
  int64_t B, tokens, C, H, P, R, M, ld;
  explicit Decode(const H3DecodeArgs& args)
      : B(args.q.size[0]),
        tokens(args.q.size[1]),
        C(args.q.size[2]),
        H(args.log_dt.size[0]),
        P(H == 0 ? 0 : C / H),
        R(args.sb.size[1]),
        M(args.imag.size[1]),
        ld(round_up<T>(2 * M)) {}
  int64_t worker_bytes() const {
    Arena arena;
    Scratch<T>::cut(arena, R, P, ld);
    arena.take<double>(round_up<double>(M));
    return arena.used();
  }
  int64_t workspace(int workers) const {
    Arena arena;
    arena.take<T>(H * 6 * ld);
    return arena.used() + workers * worker_bytes();
  }
  void run(const H3DecodeArgs& args, const H3DecodeOut& out, const Launch& launch) const {
    Arena all(launch.workspace);
    T* tables = all.take<T>(H * 6 * ld);
    char* workers = launch.workspace + all.used();
    const int64_t bytes = worker_bytes(), blocks = P == 0 ? 0 : (H + kHeads - 1) / kHeads;
    parallel(launch, blocks, [&](int64_t block, int worker) {
      Arena arena(workers + worker * bytes);
      Scratch<T>::cut(arena, R, P, ld);
      double* rows = arena.take<double>(round_up<double>(M));
      for (int64_t h = block * kHeads; h < H && h < (block + 1) * kHeads; ++h) {
        discretise(args, h, M, ld, rows, Table<T>::at(tables + h * 6 * ld, ld));
      }
    });
    parallel_near(launch, B * blocks, [&](int64_t task, int worker) {
      Arena arena(workers + worker * bytes);
      const Scratch<T> r = Scratch<T>::cut(arena, R, P, ld);
      const int64_t b = task / blocks, first = task % blocks * kHeads;
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t h = first; h < H && h < first + kHeads; ++h)
          head(args, out, r, Table<T>::at(tables + h * 6 * ld, ld), b, t, h);
      }
    });
  }
  void head(const H3DecodeArgs& args, const H3DecodeOut& out, const Scratch<T>& r, const Table<T>& table, int64_t b, int64_t t,
            int64_t h) const {
    const double skip = load_f64(args.d.data, args.d.dtype, h * args.d.stride[0]);
    const View& X = args.state_diag;
    for (int64_t p = 0; p < P; ++p) {
      const int64_t c = h * P + p;
      r.kbar[p] = shift<T, E>(args, r, b, c, R, static_cast<T>(to_f64(*args.k.at<const E>(b, t, c))));
      r.y[p] = 0;
    }
    for (int64_t p = 0; p < P; ++p) {
      const double q = to_f64(*args.q.at<const E>(b, t, h * P + p));
      for (int64_t slot = 0; slot < P; ++slot) {
        const double kv = r.kbar[p] * to_f64(*args.v.at<const E>(b, t, h * P + slot));
        T* state = X.at<T>(b, h, p, slot, 0, 0);
        double read;
        if (X.stride[4] == 2 || M == 1) {
          read = diagonal(table, 2 * M, static_cast<T>(kv), state);
        } else {
          for (int64_t m = 0; m < M; ++m) {
            r.pairs[2 * m] = state[m * X.stride[4]];
            r.pairs[2 * m + 1] = state[m * X.stride[4] + 1];
          }
          read = diagonal(table, 2 * M, static_cast<T>(kv), r.pairs);
          for (int64_t m = 0; m < M; ++m) {
            state[m * X.stride[4]] = r.pairs[2 * m];
            state[m * X.stride[4] + 1] = r.pairs[2 * m + 1];
          }
        }
        r.y[slot] += q * (read + skip * kv);
      }
    }
    for (int64_t slot = 0; slot < P; ++slot) *out.out.at<E>(b, t, slot * H + h) = round_to<E>(r.y[slot]);
  }
};

}  // namespace

void h3_decode_forward(const H3DecodeArgs& args, const H3DecodeOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() { Decode<T, E>(args).run(args, out, launch); });
}
int64_t h3_decode_workspace(const H3DecodeArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() { return Decode<T, E>(args).workspace(workers); });
}

}  // namespace linnet::LINNET_ISA
