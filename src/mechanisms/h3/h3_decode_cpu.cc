// One step of H3: both states read and written once, where they lie. The diagonal state keeps its pairs (re, im) side by side:
// a complex product is one multiply-add with the neighbours exchanged. A step that rounds a drifts (h3.md): a - 1 is made in
// double and held in two numbers of T, and X + ((a - 1) X + bd kv) rounds only as the state itself does. What is read is a
// difference of products and shows every rounding of them: it runs in double, from the state before the step,
//
//   kbar = sum_n sc[n + 1] x[n] + (sd + sc . sb) k,   s = 2 Re(c a . X) + (d + 2 Re(c . bd)) kv
//
// A task is a few heads: each head is discretised once for all batch rows and tokens, and four rows share the loads of its
// tables. In f32 a vector of X is 7 multiply-adds and 2 conversions, a vector of x 3 and 2.
#include "h3_ssm.h"
#include "simd/math.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

using D = Vec<double>;
constexpr int kRows = 4;           // batch rows at a time
constexpr int64_t kAhead = kRows;  // batch rows fetched in advance

// Neighbours exchanged; a and b lane by lane in turn, their lower and upper halves.
template <class T>
LINNET_INLINE typename Vec<T>::V swap_pairs(typename Vec<T>::V v) {
  typename Vec<T>::I index;
#pragma GCC unroll 16
  for (int l = 0; l < Vec<T>::W; ++l) index[l] = l ^ 1;
  return __builtin_shuffle(v, index);
}
// Each lane takes what the lane below it has; the first is 0.
template <class T>
LINNET_INLINE typename Vec<T>::V shift_lanes(typename Vec<T>::V v) {
  constexpr int W = Vec<T>::W;
  typename Vec<T>::I index;
#pragma GCC unroll 16
  for (int l = 0; l < W; ++l) index[l] = l == 0 ? W : l - 1;
  return __builtin_shuffle(v, Vec<T>::zero(), index);
}
LINNET_INLINE vd zip(vd a, vd b, int half) {
  typename D::I index;
#pragma GCC unroll 8
  for (int l = 0; l < D::W; ++l) index[l] = (l + half * D::W) / 2 + l % 2 * D::W;
  return __builtin_shuffle(a, b, index);
}

// D::W numbers of T as doubles.
LINNET_INLINE vd widen(const double* p) { return D::load(p); }
LINNET_INLINE vd widen(const float* p) {
  typedef float half __attribute__((vector_size(kVectorBytes / 2)));
  half v;
  __builtin_memcpy(&v, p, sizeof v);
#if defined(LINNET_ISA_avx512)
  return _mm512_maskz_cvtps_pd(kAll8, v);  // one instruction, which g++ 12 makes five of
#else
  return __builtin_convertvector(v, vd);
#endif
}
LINNET_INLINE void narrow(vd x, double* p) { D::store(p, x); }
LINNET_INLINE void narrow(vd x, float* p) {
  typedef float half __attribute__((vector_size(kVectorBytes / 2)));
#if defined(LINNET_ISA_avx512)
  const half v = _mm512_maskz_cvtpd_ps(kAll8, x);
#else
  const half v = __builtin_convertvector(x, half);
#endif
  __builtin_memcpy(p, &v, sizeof v);
}

struct Sizes : H3Shape {
  int64_t ld, ldr, heads;  // 2 M and R padded; heads of a task
  explicit Sizes(const H3DecodeArgs& args)
      : H3Shape(args),
        ld(2 * round_up<double>(M)),
        ldr(round_up<float>(R)),
        heads(H >= 512  ? 16
              : H >= 64 ? 4
                        : 1) {}
  int64_t tasks() const { return P == 0 ? 0 : (H + heads - 1) / heads; }
};

// One head, pairs side by side: X + (rise X + cross swap(X) + bd kv). rise and cross are the sums of two rows.
template <class T>
struct Table {
  T *rise[2], *cross[2], *bd;  // [ld]
  double* read;                // [ld]: 2 Re c a, -2 Im c a
  double tap;                  // d + 2 Re(c . bd)
  T* sb;                       // [P, ldr]
  double *sc, *shift_tap;      // [P, ldr]: sc[n + 1], [P]: sd + sc . sb
  static Table cut(Arena& arena, const Sizes& s) {
    Table r;
    for (T** row : {&r.rise[0], &r.rise[1], &r.cross[0], &r.cross[1], &r.bd}) *row = arena.take<T>(s.ld);
    r.read = arena.take<double>(s.ld);
    r.sb = arena.take<T>(s.P * s.ldr);
    r.sc = arena.take<double>(s.P * s.ldr);
    r.shift_tap = arena.take<double>(s.P);
    return r;
  }
  LINNET_INLINE static void split(vd x, T* const (&rows)[2], int64_t i) {
    narrow(x, rows[0] + i);
    narrow(x - widen(rows[0] + i), rows[1] + i);
  }
};

template <class T>
struct Scratch {
  T *log_neg_re, *imag, *b, *c;  // [ld]: the parameters of one head
  T* sc;                         // [ldr + 1 vector], zeros behind R
  double *kbar, *y;              // [P, rows]
  T* X;                          // [P, P, ld]: pairs that are not neighbours in the caller's memory
  Table<T> table;
  static Scratch cut(Arena& arena, const Sizes& s) {
    Scratch r;
    for (T** row : {&r.log_neg_re, &r.imag, &r.b, &r.c}) *row = arena.take<T>(s.ld);
    r.sc = arena.take<T>(s.ldr + Vec<T>::W);
    r.kbar = arena.take<double>(kRows * s.P);
    r.y = arena.take<double>(kRows * s.P);
    r.X = arena.take<T>(s.P * s.P * s.ld);
    r.table = Table<T>::cut(arena, s);
    return r;
  }
};

// a b + c, rounded alike wherever it is inlined.
LINNET_INLINE double multiply_add(double a, double b, double c) {
  return fma(D::broadcast(a), D::broadcast(b), D::broadcast(c))[0];
}

// total + x . y over a vector of x, in double
template <class T>
LINNET_INLINE vd dot(const T* x, const double* y, vd total) {
#pragma GCC unroll 2
  for (int i = 0; i < Vec<T>::W; i += D::W) total = fma(widen(x + i), D::load(y + i), total);
  return total;
}

// x moves on by one token in place, from its end, so that nothing is read after it was written; returns sum_n sc[n] x[n] of x
// before that.
template <class T>
LINNET_INLINE double shift(const T* sb, const double* sc, int R, T k, T* x) {
  using X = Vec<T>;
  using V = typename X::V;
  const V key = X::broadcast(k);
  vd total = D::zero();
  int i = R / X::W * X::W;
  if (const int lanes = R - i; lanes > 0) {
    T edge[X::W];
    const V cut = X::load(x + i, lanes);
    X::store(edge, cut);
    total = dot(edge, sc + i, total);
    const V before = i > 0 ? X::load(x + i - 1, lanes) : shift_lanes<T>(cut);
    X::store(x + i, fma(X::load(sb + i), key, before), lanes);
  }
  for (i -= X::W; i > 0; i -= X::W) {
    total = dot(x + i, sc + i, total);
    X::store(x + i, fma(X::load(sb + i), key, X::load(x + i - 1)));
  }
  if (i == 0) {
    total = dot(x, sc, total);
    X::store(x, fma(X::load(sb), key, shift_lanes<T>(X::load(x))));
  }
  return sum(total);
}

// X of N rows moves on by one token; read = 2 Re(c a X) of X before that.
template <int N, class T>
LINNET_INLINE void diagonal(const Table<T>& table, int width, const double* kv, T* const* pairs, double* read) {
  using X = Vec<T>;
  using V = typename X::V;
  vd total[N] = {};
  const auto step = [&]<bool kCut>(int i) {
    const V rise = X::load(table.rise[0] + i), cross = X::load(table.cross[0] + i), bd = X::load(table.bd + i);
    const V rise_low = X::load(table.rise[1] + i), cross_low = X::load(table.cross[1] + i);
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      T* at = pairs[j] + i;
      const V x = kCut ? X::load(at, width - i) : X::load(at), turned = swap_pairs<T>(x);
      if constexpr (kCut) {
        T edge[X::W];
        X::store(edge, x);
        total[j] = dot(edge, table.read + i, total[j]);
      } else {
        total[j] = dot(at, table.read + i, total[j]);
      }
      V rest = bd * X::broadcast(static_cast<T>(kv[j]));
      if constexpr (sizeof(T) == 4) rest = fma(rise_low, x, fma(cross_low, turned, rest));
      const V next = x + fma(rise, x, fma(cross, turned, rest));
      if constexpr (kCut) {
        X::store(at, next, width - i);
      } else {
        X::store(at, next);
      }
    }
  };
  int i = 0;
  for (; i + X::W <= width; i += X::W) step.template operator()<false>(i);
  if (i < width) step.template operator()<true>(i);
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) read[j] = sum(total[j]);
}

template <class T, class E>
struct Decode {
  using X = Vec<T>;
  using V = typename X::V;

  const H3DecodeArgs& args;
  Sizes s;
  bool apart;  // pairs are not neighbours
  explicit Decode(const H3DecodeArgs& a) : args(a), s(a), apart(a.state_diag.stride[4] != 2 && a.imag.size[1] > 1) {}
  int64_t worker_bytes() const {
    Arena arena;
    Scratch<T>::cut(arena, s);
    return arena.used();
  }

  // Numbers of one row of a parameter, which has the type of the call or T.
  LINNET_INLINE void load_row(const View& view, int64_t row, int64_t count, T* to) const {
    const int64_t at = row * view.stride[0];
    if (view.dtype == args.q.dtype) {
      load_tile<T>(static_cast<const E*>(view.data) + at, 0, 1, static_cast<int>(count), to, 0);
    } else {
      load_tile<T>(static_cast<const T*>(view.data) + at, 0, 1, static_cast<int>(count), to, 0);
    }
  }
  void load_pairs(const View& view, int64_t h, T* to) const {
    if (view.stride[1] == 2 || s.M == 1) return load_row(view, h, 2 * s.M, to);
    for (int64_t i = 0; i < 2 * s.M; ++i) to[i] = static_cast<T>(element(view, h, i / 2, i % 2));
  }

  // a - 1 = A w and bd = b w with w = dt / (1 - z/2) (bilinear). Lanes behind the last pair have b = c = 0, and X = 0 there.
  void discretise(int64_t h, Scratch<T>& r) const {
    Table<T>& table = r.table;
    for (T* row : {r.log_neg_re, r.imag, r.b, r.c}) {
      for (int64_t i = 0; i < s.ld; i += X::W) X::store(row + i, X::zero());
    }
    load_row(args.log_neg_re, h, s.M, r.log_neg_re);
    load_row(args.imag, h, s.M, r.imag);
    load_pairs(args.b, h, r.b);
    load_pairs(args.c, h, r.c);
    if (args.disc == H3Disc::zoh) return discretise_zoh(h, r);
    for (int64_t m = 0; 2 * m < s.ld; m += X::W) X::store(r.log_neg_re + m, exp(X::load(r.log_neg_re + m)));
    const vd dt = D::broadcast(__builtin_exp(element(args.log_dt, h))), one = D::broadcast(1), half = 0.5 * dt;
    vd signs, tap = D::zero();
#pragma GCC unroll 8
    for (int l = 0; l < D::W; ++l) signs[l] = l % 2 == 0 ? 2 : -2;
    for (int64_t m = 0; 2 * m < s.ld; m += D::W) {
      const vd re = -widen(r.log_neg_re + m), im = widen(r.imag + m), zi = half * im, below = one - half * re;
      const vd scale = dt / fma(below, below, zi * zi), wr = below * scale, wi = zi * scale;
      const vd ar = fma(re, wr, -(im * wi)), ai = fma(re, wi, im * wr);  // a - 1
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {
        const int64_t i = 2 * m + side * D::W;
        const vd rise = zip(ar, ar, side), cross = zip(-ai, ai, side), b = widen(r.b + i), c = widen(r.c + i) * signs;
        const vd bd = fma(b, zip(wr, wr, side), swap_pairs<double>(b) * zip(-wi, wi, side));
        Table<T>::split(rise, table.rise, i);
        Table<T>::split(cross, table.cross, i);
        narrow(bd, table.bd + i);
        // 2 Re(c a X) = 2 Re c a re - 2 Im c a im; c = (2 Re c, -2 Im c): the product with a, conjugated
        D::store(table.read + i, fma(c, one + rise, swap_pairs<double>(c) * -cross));
        tap = fma(c, bd, tap);
      }
    }
    table.tap = element(args.d, h) + sum(tap);
  }
  void discretise_zoh(int64_t h, Scratch<T>& r) const {
    r.table.tap = element(args.d, h);
    for (int64_t m = 0; m < s.ld / 2; ++m) {
      const H3Pair p = m < s.M ? h3_pair(args, h, m) : H3Pair{};
      const auto put = [&](T* const(&rows)[2], int64_t i, double x) {
        rows[0][i] = static_cast<T>(x);
        rows[1][i] = static_cast<T>(x - static_cast<double>(rows[0][i]));
      };
      for (int side = 0; side < 2; ++side) {
        put(r.table.rise, 2 * m + side, p.a.re - 1);
        put(r.table.cross, 2 * m + side, side == 0 ? -p.a.im : p.a.im);
        r.table.bd[2 * m + side] = static_cast<T>(side == 0 ? p.bd.re : p.bd.im);
      }
      const Complex ca = p.c * p.a;
      r.table.read[2 * m] = 2 * ca.re, r.table.read[2 * m + 1] = -2 * ca.im;
      r.table.tap += 2 * (p.c * p.bd).re;
    }
  }
  void head_table(int64_t h, Scratch<T>& r) const {
    discretise(h, r);
    for (int64_t i = 0; i < s.ldr + X::W; i += X::W) X::store(r.sc + i, X::zero());
    for (int64_t p = 0; p < s.P; ++p) {
      T* sb = r.table.sb + p * s.ldr;
      double* sc = r.table.sc + p * s.ldr;
      load_row(args.sb, h * s.P + p, s.R, sb);
      load_row(args.sc, h * s.P + p, s.R, r.sc);
      vd tap = D::zero();
      for (int64_t i = 0; i < round_up<T>(s.R); i += D::W) {
        tap = fma(widen(sb + i), widen(r.sc + i), tap);
        D::store(sc + i, widen(r.sc + i + 1));
      }
      r.table.shift_tap[p] = element(args.sd, h * s.P + p) + sum(tap);
    }
  }

  LINNET_INLINE static double number(const View& view, int64_t b, int64_t t, int64_t c) {
    return to_f64(*view.at<const E>(b, t, c));
  }
  // One token of batch rows [b, b + N) of a head: x[j] [P, ldx], X[j] [P, P, ldX].
  template <int N>
  LINNET_INLINE void token(const View& out, const Scratch<T>& r, int64_t b, int64_t t, int64_t h, T* const* x, int64_t ldx,
                           T* const* state, const int64_t* ldX) const {
    const Table<T>& table = r.table;
    for (int64_t p = 0; p < s.P; ++p) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        const double k = number(args.k, b + j, t, h * s.P + p);
        const double read =
            shift(table.sb + p * s.ldr, table.sc + p * s.ldr, static_cast<int>(s.R), static_cast<T>(k), x[j] + p * ldx);
        r.kbar[p * N + j] = multiply_add(table.shift_tap[p], k, read);
        r.y[p * N + j] = 0;
      }
    }
    for (int64_t p = 0; p < s.P; ++p) {
      for (int64_t slot = 0; slot < s.P; ++slot) {
        double kv[N], read[N];
        T* pairs[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
          kv[j] = r.kbar[p * N + j] * number(args.v, b + j, t, h * s.P + slot);
          pairs[j] = state[j] + p * ldX[0] + slot * ldX[1];
        }
        diagonal<N>(table, static_cast<int>(2 * s.M), kv, pairs, read);
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
          const double q = number(args.q, b + j, t, h * s.P + p);
          r.y[slot * N + j] = multiply_add(q, multiply_add(table.tap, kv[j], read[j]), r.y[slot * N + j]);
        }
      }
    }
    for (int64_t slot = 0; slot < s.P; ++slot) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        *out.at<E>(b + j, t, slot * s.H + h) = round_to<E>(r.y[slot * N + j]);
      }
    }
  }
  template <int N>
  void rows(const View& out, const Scratch<T>& r, int64_t b, int64_t h) const {
    const View &shifts = args.state_shift, &diag = args.state_diag;
    T *x[N], *state[N];
    for (int j = 0; j < N; ++j) {
      x[j] = shifts.at<T>(b + j, h * s.P, 0);
      state[j] = diag.at<T>(b + j, h, 0, 0, 0, 0);
      if (b + j + kAhead < s.B) {
        fetch(shifts.at<T>(b + j + kAhead, h * s.P, 0), s.R);
        fetch(diag.at<T>(b + j + kAhead, h, 0, 0, 0, 0), 2 * s.M);
      }
    }
    for (int64_t t = 0; t < s.T; ++t) token<N>(out, r, b, t, h, x, shifts.stride[1], state, &diag.stride[2]);
  }
  LINNET_INLINE static void fetch(const T* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + i, 1);
  }
  // A row whose pairs are apart: through scratch.
  void row_apart(const View& out, const Scratch<T>& r, int64_t b, int64_t h) const {
    const int64_t ldX[2] = {s.P * s.ld, s.ld};
    const auto each = [&](const auto& use) {
      for (int64_t i = 0; i < s.P * s.P * s.M; ++i) {
        const int64_t p = i / (s.P * s.M), slot = i / s.M % s.P, m = i % s.M;
        for (int64_t side = 0; side < 2; ++side) {
          use(*args.state_diag.at<T>(b, h, p, slot, m, side), r.X[p * ldX[0] + slot * ldX[1] + 2 * m + side]);
        }
      }
    };
    T* x = args.state_shift.at<T>(b, h * s.P, 0);
    each([](T& state, T& dense) { dense = state; });
    for (int64_t t = 0; t < s.T; ++t) token<1>(out, r, b, t, h, &x, args.state_shift.stride[1], &r.X, ldX);
    each([](T& state, T& dense) { state = dense; });
  }

  void run(const View& out, const Launch& launch) const {
    const int64_t bytes = worker_bytes();
    if (s.T == 0) return;
    parallel_near(launch, s.tasks(), [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * bytes);
      Scratch<T> r = Scratch<T>::cut(arena, s);
      for (int64_t h = task * s.heads; h < s.H && h < (task + 1) * s.heads; ++h) {
        head_table(h, r);
        int64_t b = 0;
        for (; !apart && b + kRows <= s.B; b += kRows) rows<kRows>(out, r, b, h);
        for (; !apart && b < s.B; ++b) rows<1>(out, r, b, h);
        for (; b < s.B; ++b) row_apart(out, r, b, h);
      }
    });
  }
};

}  // namespace

void h3_decode_forward(const H3DecodeArgs& args, const H3DecodeOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() { Decode<T, E>(args).run(out.out, launch); });
}
int64_t h3_decode_workspace(const H3DecodeArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() { return workers * Decode<T, E>(args).worker_bytes(); });
}

}  // namespace linnet::LINNET_ISA
