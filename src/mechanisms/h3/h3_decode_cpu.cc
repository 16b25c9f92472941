// One step of H3: both states read and written once, where they lie. A step that rounds a drifts (h3.md): a - 1 is made in
// double and held in two numbers of T, and X + ((a - 1) X + bd kv) rounds only as the state itself does.
//
// A task is a few heads. Each is discretised once for all batch rows and tokens. Batch rows go four by four (f64: two), which
// share the loads of a head's tables, and inside them the heads as they lie: first x of all heads, then X, so that no X waits
// for a sum over lanes. Rows are often a multiple of 4096 bytes apart, and a load waits for every store in flight whose address
// has the same last 12 bits: all rows are loaded before one is stored, and the next four come when those stores are long done.
//
// Pairs (re, im) are taken apart inside 16 bytes, one shuffle a vector each way, so that the tables of a head are half as long
// as its state. In f32 a vector of X is 6 turns of the multipliers, a vector of x 2.
#include "h3_ssm.h"
#include "simd/math.h"
#include "simd/task.h"
#include "simd/wide.h"

namespace linnet::LINNET_ISA {
namespace {

using D = Vec<double>;
constexpr int kMostHeads = 16;  // of a task
// Batch rows side by side, as many as 16 bytes hold: numbers of a channel for all of them are a piece [kBeside].
template <class T>
constexpr int kBeside = kLaneBytes / sizeof(T);
template <class T>
struct FewOf {
  typedef double V __attribute__((vector_size(sizeof(double) * kBeside<T>)));
};
template <class T>
using Few = typename FewOf<T>::V;

// Each lane takes what the lane below it has; the first takes the last of `before`.
template <class T>
LINNET_INLINE typename Vec<T>::V shift_lanes(typename Vec<T>::V before, typename Vec<T>::V v) {
  constexpr int W = Vec<T>::W;
  typename Vec<T>::I index;
#pragma GCC unroll 16
  for (int l = 0; l < W; ++l) index[l] = W - 1 + l;
  return shuffle(before, v, index);
}

// Two vectors of pairs, taken apart inside each 16 bytes: lane l belongs to pair pair_of(l).
template <class T>
struct Planes {
  using X = Vec<T>;
  using V = typename X::V;
  static constexpr int W = X::W, kEach = kLaneBytes / sizeof(T);  // kEach: 4 floats, 2 doubles
  V re, im;
  static constexpr int pair_of(int l) {
    return l / kEach * kEach / 2 + l % kEach % (kEach / 2) + (l % kEach) / (kEach / 2) * (W / 2);
  }
  LINNET_INLINE static Planes apart(V a, V b) {
    typename X::I even, odd;
#pragma GCC unroll 16
    for (int l = 0; l < W; ++l) {
      even[l] = l / kEach * kEach + l % kEach % (kEach / 2) * 2 + (l % kEach) / (kEach / 2) * W;
      odd[l] = even[l] + 1;
    }
    return {shuffle(a, b, even), shuffle(a, b, odd)};
  }
  // The two vectors again.
  LINNET_INLINE V first() const { return unpack_low(re, im); }
  LINNET_INLINE V second() const { return unpack_high(re, im); }
  // `left` pairs from p on (kCut: fewer than a vector of each part).
  template <bool kCut>
  LINNET_INLINE static Planes load(const T* p, int left) {
    if constexpr (kCut) return apart(X::load(p, 2 * left), X::load(p + W, 2 * left - W));
    return apart(X::load(p), X::load(p + W));
  }
  template <bool kCut>
  LINNET_INLINE void store(T* p, int left) const {
    if constexpr (kCut) {
      X::store(p, first(), 2 * left);
      X::store(p + W, second(), 2 * left - W);
    } else {
      X::store(p, first());
      X::store(p + W, second());
    }
  }
  // Lanes in the order of the pairs, in the order of the lanes.
  LINNET_INLINE static V order(V v) {
    typename X::I index;
#pragma GCC unroll 16
    for (int l = 0; l < W; ++l) index[l] = pair_of(l);
    return shuffle(v, index);
  }
};

// A vector of T in double: two vectors for floats, one for doubles.
LINNET_INLINE void to_double(vf v, vd (&to)[2]) {
  const Wide w = widen(v);
  to[0] = w.low, to[1] = w.high;
}
LINNET_INLINE void to_double(vd v, vd (&to)[1]) { to[0] = v; }
LINNET_INLINE vf from_double(const vd (&from)[2]) { return narrow({from[0], from[1]}); }
LINNET_INLINE vd from_double(const vd (&from)[1]) { return from[0]; }

struct Sizes : H3Shape {
  int64_t ld, ldr, heads, tables;  // M and R padded; heads of a task, of which so many stay discretised
  explicit Sizes(const H3DecodeArgs& args)
      : H3Shape(args),
        ld(round_up<float>(M)),
        ldr(round_up<float>(R)),
        heads(H >= 512  ? kMostHeads
              : H >= 64 ? 4
                        : 1),
        tables(B * T > 1 ? heads : 1) {}
  int64_t tasks() const { return P == 0 ? 0 : (H + heads - 1) / heads; }
};

// One head, lanes in the order of Planes: a - 1 = rise + i turn, each the sum of two rows.
template <class T>
struct Table {
  T *rise[2], *turn[2];  // [ld]
  T* bd[2];              // [ld]: real and imaginary parts
  double* read[2];       // [ld]: 2 Re(c a), -2 Im(c a)
  double* tap;           // [1]: d + 2 Re(c . bd)
  static Table cut(Arena& arena, const Sizes& s) {
    Table r;
    for (auto* rows : {&r.rise, &r.turn, &r.bd}) {
      for (T*& row : *rows) row = arena.take<T>(s.ld);
    }
    for (double*& row : r.read) row = arena.take<double>(s.ld);
    r.tap = arena.take<double>(1);
    return r;
  }
};

template <class T>
struct Scratch {
  T *log_neg_re, *imag, *b, *c;  // [ld], [2 ld]: parameters of one head
  T *sb, *sc;                    // [heads P, ldr]: those of another type than T
  double *shift_tap, *dt;        // [heads P]: sd + sc . sb, [heads]
  T *q, *k, *v, *y;              // [heads P, kBeside]; y [P, heads, kBeside]
  double* kbar;                  // [heads P, kBeside]
  T* X;                          // [2 ld]: pairs that are not neighbours in the caller's memory
  Table<T> table[kMostHeads];
  static Scratch cut(Arena& arena, const Sizes& s) {
    Scratch r;
    for (T** row : {&r.log_neg_re, &r.imag}) *row = arena.take<T>(s.ld);
    for (T** row : {&r.b, &r.c, &r.X}) *row = arena.take<T>(2 * s.ld);
    for (T** rows : {&r.sb, &r.sc}) *rows = arena.take<T>(s.heads * s.P * s.ldr);
    r.shift_tap = arena.take<double>(s.heads * s.P);
    r.dt = arena.take<double>(round_up<float>(s.heads));
    r.kbar = arena.take<double>(s.heads * s.P * kBeside<T>);
    for (T** row : {&r.q, &r.k, &r.v, &r.y}) *row = arena.take<T>(round_up<float>(s.heads) * s.P * kBeside<T>);
    for (int64_t i = 0; i < s.tables; ++i) r.table[i] = Table<T>::cut(arena, s);
    return r;
  }
};

// The sums over the lanes of N vectors, each in the order of sum().
template <class T, int N>
LINNET_INLINE Few<T> sums(const vd (&v)[N]) {
#if defined(LINNET_ISA_avx512) || defined(LINNET_ISA_avx2)
  if constexpr (N == 4) {
    Few<T> h[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
#if defined(LINNET_ISA_avx512)
      h[j] = Few<T>(__builtin_shufflevector(v[j], v[j], 0, 1, 2, 3)) + Few<T>(__builtin_shufflevector(v[j], v[j], 4, 5, 6, 7));
#else
      h[j] = v[j];
#endif
    }
    const Few<T> a = __builtin_shufflevector(h[0], h[1], 0, 1, 4, 5) + __builtin_shufflevector(h[0], h[1], 2, 3, 6, 7);
    const Few<T> b = __builtin_shufflevector(h[2], h[3], 0, 1, 4, 5) + __builtin_shufflevector(h[2], h[3], 2, 3, 6, 7);
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
  }
#endif
  Few<T> r = {};
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) r[j] = sum(v[j]);
  return r;
}

// total + x . y in double
template <class T, int kParts>
LINNET_INLINE vd dot(typename Vec<T>::V x, const vd (&y)[kParts], vd total) {
  vd wide[kParts];
  to_double(x, wide);
#pragma GCC unroll 2
  for (int i = 0; i < kParts; ++i) total = fma(wide[i], y[i], total);
  return total;
}

// x of N rows moves on by one token in place; returns sum_n sc[n] x[n - 1] of x before that. All rows are loaded before one is
// stored. ahead: so much behind them lie the rows that follow, 0: they need not be asked for.
template <int N, class T>
LINNET_INLINE Few<T> shift(const T* sb, const T* sc, int R, Few<T> k, T* const (&x)[N], int64_t ahead) {
  using X = Vec<T>;
  using V = typename X::V;
  V before[N] = {};
  vd total[N] = {};
  const auto step = [&]<bool kCut>(int i) {
    const auto load = [&](const T* p) { return kCut ? X::load(p + i, R - i) : X::load(p + i); };
    const V in = load(sb);
    vd out[X::W / D::W];
    to_double(load(sc), out);
    V now[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) now[j] = load(x[j]);
    if (ahead != 0) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) __builtin_prefetch(x[j] + i + ahead, 0, 2);
    }
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      const V older = shift_lanes<T>(before[j], now[j]), next = fma(in, X::broadcast(static_cast<T>(k[j])), older);
      kCut ? X::store(x[j] + i, next, R - i) : X::store(x[j] + i, next);
      total[j] = dot<T>(older, out, total[j]);
      before[j] = now[j];
    }
  };
  int i = 0;
  for (; i + X::W <= R; i += X::W) step.template operator()<false>(i);
  if (i < R) step.template operator()<true>(i);
  return sums<T>(total);
}

// X of N rows moves on by one token in place, X + ((a - 1) X + bd kv), the bracket first; returns 2 Re(c a . X) of X before
// that.
template <int N, class T>
LINNET_INLINE Few<T> diagonal(const Table<T>& table, int M, Few<T> kv, T* const (&state)[N], int64_t ahead) {
  using X = Vec<T>;
  using V = typename X::V;
  vd total[N] = {};
  const auto step = [&]<bool kCut>(int m) {
    constexpr int kParts = X::W / D::W;
    const int left = kCut ? M - m : X::W;
    vd read[2][kParts];
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) {
      read[0][i] = D::load(table.read[0] + m + i * D::W);
      read[1][i] = D::load(table.read[1] + m + i * D::W);
    }
    Planes<T> x[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) x[j] = Planes<T>::template load<kCut>(state[j] + 2 * m, left);
    if (ahead != 0) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        __builtin_prefetch(state[j] + 2 * m + ahead, 0, 2);
        __builtin_prefetch(state[j] + 2 * m + X::W + ahead, 0, 2);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      const V in = X::broadcast(static_cast<T>(kv[j]));
      total[j] = dot<T>(x[j].im, read[1], dot<T>(x[j].re, read[0], total[j]));
      V re = X::load(table.bd[0] + m) * in, im = X::load(table.bd[1] + m) * in;
#pragma GCC unroll 2
      for (int part = sizeof(T) == 4 ? 1 : 0; part >= 0; --part) {
        const V rise = X::load(table.rise[part] + m), turn = X::load(table.turn[part] + m);
        re = fma(rise, x[j].re, fma(-turn, x[j].im, re));
        im = fma(rise, x[j].im, fma(turn, x[j].re, im));
      }
      const Planes<T> next{x[j].re + re, x[j].im + im};
      next.template store<kCut>(state[j] + 2 * m, left);
    }
  };
  int m = 0;
  for (; m + X::W <= M; m += X::W) step.template operator()<false>(m);
  if (m < M) step.template operator()<true>(m);
  return sums<T>(total);
}

template <class T, class E>
struct Decode {
  using X = Vec<T>;
  using V = typename X::V;

  const H3DecodeArgs& args;
  Sizes s;
  bool apart;  // pairs are not neighbours
  bool far;    // no cache holds the states from call to call
  explicit Decode(const H3DecodeArgs& a)
      : args(a),
        s(a),
        apart(a.state_diag.stride[4] != 2 && a.imag.size[1] > 1),
        far((a.state_shift.elements() + a.state_diag.elements()) * static_cast<int64_t>(sizeof(T)) > kBeyondCaches) {}
  int64_t worker_bytes() const {
    Arena arena;
    Scratch<T>::cut(arena, s);
    return arena.used();
  }

  // A parameter has the type of the call or T. Row `at` where it lies, or its `count` numbers converted.
  LINNET_INLINE bool is_real(const View& view) const { return sizeof(E) == sizeof(T) || view.dtype != args.q.dtype; }
  LINNET_INLINE const T* row(const View& view, int64_t at, int64_t count, T* copy) const {
    if (is_real(view)) return view.at<const T>(at);
    load_tile<T>(view.at<const E>(at), 0, 1, static_cast<int>(count), copy, 0);
    return copy;
  }
  const T* pairs(const View& view, int64_t h, T* copy) const {
    if (view.stride[1] == 2 || s.M == 1) return row(view, h, 2 * s.M, copy);
    for (int64_t i = 0; i < 2 * s.M; ++i) copy[i] = static_cast<T>(element(view, h, i / 2, i % 2));
    return copy;
  }
  struct Rows {
    const T* data;
    int64_t pitch;
  };
  Rows rows(const View& view, int64_t first, int64_t count, T* copy) const {
    if (is_real(view)) return {view.at<const T>(first), view.stride[0]};
    load_tile<T>(view.at<const E>(first), view.stride[0], static_cast<int>(count), static_cast<int>(s.R), copy, s.ldr);
    return {copy, s.ldr};
  }

  // sb . sc of a channel
  LINNET_INLINE double product(const T* sb, const T* sc) const {
    vd total = D::zero(), out[X::W / D::W];
    for (int64_t i = 0; i < s.R; i += X::W) {
      const int lanes = static_cast<int>(s.R - i);
      to_double(X::load(sc + i, lanes), out);
      total = dot<T>(X::load(sb + i, lanes), out, total);
    }
    return sum(total);
  }
  void discretise(int64_t h, double dt, const Scratch<T>& r, const Table<T>& table) const {
    *table.tap = element(args.d, h);
    if (args.disc == H3Disc::zoh) return zoh(h, table);
    bilinear(h, dt, r, table);
  }
  // a - 1 = A w and bd = b w with w = dt / (1 - z/2), z = A dt. Lanes behind the last pair have b = c = 0, and X = 0 there.
  void bilinear(int64_t h, double dt, const Scratch<T>& r, const Table<T>& table) const {
    constexpr int kParts = X::W / D::W;
    const T *b = pairs(args.b, h, r.b), *c = pairs(args.c, h, r.c);
    const T *log_neg_re = row(args.log_neg_re, h, s.M, r.log_neg_re), *imag = row(args.imag, h, s.M, r.imag);
    const vd step = D::broadcast(dt), one = D::broadcast(1), two = D::broadcast(2), half = 0.5 * step;
    vd tap = D::zero();
    for (int64_t m = 0; m < s.M; m += X::W) {
      const int lanes = static_cast<int>(s.M - m);
      const Planes<T> in = Planes<T>::template load<true>(b + 2 * m, lanes),
                      out = Planes<T>::template load<true>(c + 2 * m, lanes);
      vd re[kParts], im[kParts], br[kParts], bi[kParts], cr[kParts], ci[kParts];
      to_double(Planes<T>::order(exp(X::load(log_neg_re + m, lanes))), re);  // minus the real part
      to_double(Planes<T>::order(X::load(imag + m, lanes)), im);
      to_double(in.re, br), to_double(in.im, bi), to_double(out.re, cr), to_double(out.im, ci);
#pragma GCC unroll 2
      for (int i = 0; i < kParts; ++i) {
        const vd zi = half * im[i], below = fma(half, re[i], one), scale = step / fma(below, below, zi * zi);
        const vd wr = below * scale, wi = zi * scale, rise = fma(-re[i], wr, -(im[i] * wi));
        im[i] = fma(im[i], wr, -(re[i] * wi));
        re[i] = rise;
        const vd real = fma(br[i], wr, -(bi[i] * wi)), imaginary = fma(br[i], wi, bi[i] * wr);
        cr[i] *= two, ci[i] *= two;
        tap = fma(cr[i], real, fma(-ci[i], imaginary, tap));
        br[i] = real, bi[i] = imaginary;
        const vd a = one + rise;
        D::store(table.read[0] + m + i * D::W, fma(cr[i], a, -(ci[i] * im[i])));
        D::store(table.read[1] + m + i * D::W, fma(-cr[i], im[i], -(ci[i] * a)));
      }
      put(re, table.rise, m);
      put(im, table.turn, m);
      X::store(table.bd[0] + m, from_double(br));
      X::store(table.bd[1] + m, from_double(bi));
    }
    *table.tap += sum(tap);
  }
  template <int kParts>
  LINNET_INLINE static void put(vd (&x)[kParts], T* const (&rows)[2], int64_t m) {
    const V high = from_double(x);
    X::store(rows[0] + m, high);
    if constexpr (sizeof(T) == 4) {
      vd back[kParts];
      to_double(high, back);
#pragma GCC unroll 2
      for (int i = 0; i < kParts; ++i) x[i] -= back[i];
      X::store(rows[1] + m, from_double(x));
    }
  }
  void zoh(int64_t h, const Table<T>& table) const {
    for (int64_t i = 0; i < s.ld; ++i) {
      const int64_t m = i / X::W * X::W + Planes<T>::pair_of(static_cast<int>(i % X::W));
      const H3Pair p = m < s.M ? h3_pair(args, h, m) : H3Pair{};
      const auto split = [&](T* const(&rows)[2], double x) {
        rows[0][i] = static_cast<T>(x);
        rows[1][i] = static_cast<T>(x - static_cast<double>(rows[0][i]));
      };
      split(table.rise, p.a.re - 1);
      split(table.turn, p.a.im);
      table.bd[0][i] = static_cast<T>(p.bd.re);
      table.bd[1][i] = static_cast<T>(p.bd.im);
      const Complex ca = p.c * p.a;
      table.read[0][i] = 2 * ca.re, table.read[1][i] = -2 * ca.im;
      *table.tap += 2 * (p.c * p.bd).re;
    }
  }

  // Pairs that are not neighbours: use(state, dense) for all of them.
  template <class Use>
  void each_pair(T* state, T* dense, const Use& use) const {
    for (int64_t i = 0; i < 2 * s.M; ++i) use(state[i / 2 * args.state_diag.stride[4] + i % 2], dense[i]);
  }

  // Numbers of N batch rows, `stride` apart, for `count` channels: to [count, kBeside] and back.
  template <int N>
  LINNET_INLINE static void load_rows(const E* from, int64_t stride, int64_t count, T* to) {
    constexpr int kEach = kBeside<T>;
    for (int64_t c = 0; c < count; c += X::W) {
      V v[kEach] = {};
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) v[j] = X::load(from + j * stride + c, static_cast<int>(count - c));
      transpose_pieces(v);
#pragma GCC unroll 4
      for (int j = 0; j < kEach; ++j) store_pieces<T>(to + (c + j) * kEach, kEach * kEach, v[j]);
    }
  }
  template <int N>
  LINNET_INLINE static void store_rows(const T* from, int64_t count, E* to, int64_t stride) {
    constexpr int kEach = kBeside<T>;
    for (int64_t c = 0; c < count; c += X::W) {
      V v[kEach];
#pragma GCC unroll 4
      for (int j = 0; j < kEach; ++j) v[j] = load_pieces<T>(from + (c + j) * kEach, kEach * kEach);
      transpose_pieces(v);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) X::store(to + j * stride + c, v[j], static_cast<int>(count - c));
    }
  }
  LINNET_INLINE static Few<T> few(const T* p) {
    typename Piece<T, kBeside<T>>::V v;
    __builtin_memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, Few<T>);
  }
  LINNET_INLINE static void put_few(T* p, Few<T> v) {
    const auto narrowed = __builtin_convertvector(v, typename Piece<T, kBeside<T>>::V);
    __builtin_memcpy(p, &narrowed, sizeof narrowed);
  }

  // One token of batch rows [b, b + N) of heads [first, first + heads).
  template <int N>
  void token(const View& out, const Scratch<T>& r, const Rows& sb, const Rows& sc, int64_t b, int64_t t, int64_t first,
             int64_t heads) const {
    constexpr int kEach = kBeside<T>;
    const View &shifts = args.state_shift, &diag = args.state_diag;
    const int64_t channels = heads * s.P, begin = first * s.P;
    load_rows<N>(args.q.at<const E>(b, t, begin), args.q.stride[0], channels, r.q);
    load_rows<N>(args.k.at<const E>(b, t, begin), args.k.stride[0], channels, r.k);
    load_rows<N>(args.v.at<const E>(b, t, begin), args.v.stride[0], channels, r.v);
    T* x[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) x[j] = shifts.at<T>(b + j, begin, 0);
    for (int64_t c = 0; c < channels; ++c) {
      const Few<T> k = few(r.k + c * kEach);
      const Few<T> read =
          shift<N>(sb.data + c * sb.pitch, sc.data + c * sc.pitch, static_cast<int>(s.R), k, x, far ? N * shifts.stride[0] : 0);
      const Few<T> kbar = r.shift_tap[c] * k + read;
      __builtin_memcpy(r.kbar + c * kEach, &kbar, sizeof kbar);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) x[j] += shifts.stride[1];
    }
    for (int64_t i = 0; i < heads; ++i) {
      const Table<T>& table = r.table[s.tables > 1 ? i : 0];
      if (b == 0 && t == 0) discretise(first + i, r.dt[i], r, table);
      for (int64_t slot = 0; slot < s.P; ++slot) {
        const Few<T> v = few(r.v + (i * s.P + slot) * kEach);
        Few<T> y = {};
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) x[j] = diag.at<T>(b + j, first + i, 0, slot, 0, 0);
        for (int64_t p = 0; p < s.P; ++p) {
          Few<T> kv;
          __builtin_memcpy(&kv, r.kbar + (i * s.P + p) * kEach, sizeof kv);
          kv *= v;
          const Few<T> read = apart ? diagonal_apart<N>(table, r.X, kv, x)
                                    : diagonal<N>(table, static_cast<int>(s.M), kv, x, far ? N * diag.stride[0] : 0);
          y += few(r.q + (i * s.P + p) * kEach) * (*table.tap * kv + read);
#pragma GCC unroll 4
          for (int j = 0; j < N; ++j) x[j] += diag.stride[2];
        }
        put_few(r.y + (slot * heads + i) * kEach, y);
      }
    }
    for (int64_t slot = 0; slot < s.P; ++slot) {
      store_rows<N>(r.y + slot * heads * kEach, heads, out.at<E>(b, t, slot * s.H + first), out.stride[0]);
    }
  }
  template <int N>
  Few<T> diagonal_apart(const Table<T>& table, T* dense, Few<T> kv, T* const (&state)[N]) const {
    Few<T> read = {};
    for (int j = 0; j < N; ++j) {
      T* one[1] = {dense};
      each_pair(state[j], dense, [](T& from, T& to) { to = from; });
      read[j] = diagonal<1>(table, static_cast<int>(s.M), Few<T>{kv[j]}, one, 0)[0];
      each_pair(state[j], dense, [](T& to, T& from) { to = from; });
    }
    return read;
  }

  void run(const View& out, const Launch& launch) const {
    const int64_t bytes = worker_bytes();
    parallel_near(launch, s.T == 0 ? 0 : s.tasks(), [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * bytes);
      const Scratch<T> r = Scratch<T>::cut(arena, s);
      const int64_t first = task * s.heads, heads = first + s.heads < s.H ? s.heads : s.H - first;
      const Rows sb = rows(args.sb, first * s.P, heads * s.P, r.sb), sc = rows(args.sc, first * s.P, heads * s.P, r.sc);
      for (int64_t c = 0; c < heads * s.P; ++c) {
        r.shift_tap[c] = element(args.sd, first * s.P + c) + product(sb.data + c * sb.pitch, sc.data + c * sc.pitch);
      }
      for (int64_t i = 0; i < heads; ++i) r.dt[i] = element(args.log_dt, first + i);
      for (int64_t i = 0; i < heads; i += D::W) D::store(r.dt + i, exp(D::load(r.dt + i)));
      int64_t b = 0;
      for (; b + kBeside<T> <= s.B; b += kBeside<T>) {
        for (int64_t t = 0; t < s.T; ++t) token<kBeside<T>>(out, r, sb, sc, b, t, first, heads);
      }
      for (; b < s.B; ++b) {
        for (int64_t t = 0; t < s.T; ++t) token<1>(out, r, sb, sc, b, t, first, heads);
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
