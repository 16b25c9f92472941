// One step of H3: both states read and written once, where they lie, the arithmetic in double. The read is a difference of
// products and shows every rounding of its factors, and a step that rounds a drifts (h3.md); in double neither does, at the
// price of two half vectors. The diagonal state keeps its pairs (re, im) side by side: the complex product is one multiply-add
// with the neighbours exchanged.
//
// A task is a few heads: each head is discretised once for all batch rows, and two rows share the loads of its tables. Several
// tokens in one call carry the states in double and round them once.
#include "h3_ssm.h"
#include "simd/math.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

using D = Vec<double>;
constexpr int kAhead = 6;  // batch rows fetched in advance

#if defined(LINNET_ISA_avx512)
LINNET_INLINE vd swap_pairs(vd v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6); }
LINNET_INLINE vd zip_low(vd a, vd b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
LINNET_INLINE vd zip_high(vd a, vd b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#elif defined(LINNET_ISA_avx2)
LINNET_INLINE vd swap_pairs(vd v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2); }
LINNET_INLINE vd zip_low(vd a, vd b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
LINNET_INLINE vd zip_high(vd a, vd b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#else
LINNET_INLINE vd swap_pairs(vd v) { return __builtin_shufflevector(v, v, 1, 0); }
LINNET_INLINE vd zip_low(vd a, vd b) { return __builtin_shufflevector(a, b, 0, 2); }
LINNET_INLINE vd zip_high(vd a, vd b) { return __builtin_shufflevector(a, b, 1, 3); }
#endif

// The first n lanes from and to memory of S, in double.
template <class S>
LINNET_INLINE vd load_wide(const S* p, int64_t n) {
  if constexpr (sizeof(S) == 8) {
    return D::load(p, static_cast<int>(n));
  } else {
    typedef float half __attribute__((vector_size(kVectorBytes / 2)));
    half v = {};
    if (n >= D::W) {
      __builtin_memcpy(&v, p, sizeof v);
    } else {
      for (int64_t i = 0; i < n; ++i) v[i] = p[i];
    }
    return __builtin_convertvector(v, vd);
  }
}
template <class S>
LINNET_INLINE void store_wide(S* p, vd x, int64_t n) {
  if constexpr (sizeof(S) == 8) {
    D::store(p, x, static_cast<int>(n));
  } else {
    typedef float half __attribute__((vector_size(kVectorBytes / 2)));
    const half v = __builtin_convertvector(x, half);
    if (n >= D::W) {
      __builtin_memcpy(p, &v, sizeof v);
    } else {
      for (int64_t i = 0; i < n; ++i) p[i] = v[i];
    }
  }
}

// The discrete parameters of one head, for pairs side by side: X' = same X + (cross swap(X) + bd kv), read c X'.
struct Table {
  double *same, *cross, *bd, *c;  // [ld]
  double *sb, *sc;                // [P, ldr]
  double *sd, d;                  // [P]
  LINNET_INLINE static Table cut(Arena& arena, int64_t P, int64_t ld, int64_t ldr) {
    return {arena.take<double>(ld),      arena.take<double>(ld),      arena.take<double>(ld), arena.take<double>(ld),
            arena.take<double>(P * ldr), arena.take<double>(P * ldr), arena.take<double>(P),  0};
  }
  LINNET_INLINE void set(int64_t m, vd ar, vd ai, vd br, vd bi, vd cr, vd ci) const {
    const auto put = [&](double* to, vd a, vd b) {
      D::store(to + 2 * m, zip_low(a, b));
      D::store(to + 2 * m + D::W, zip_high(a, b));
    };
    put(same, ar, ar);
    put(cross, -ai, ai);
    put(bd, br, bi);
    put(c, 2.0 * cr, -2.0 * ci);
  }
};

struct Sizes {
  int64_t B, tokens, C, H, P, R, M, ld, ldr, heads;
  explicit Sizes(const H3DecodeArgs& args)
      : B(args.q.size[0]),
        tokens(args.q.size[1]),
        C(args.q.size[2]),
        H(args.log_dt.size[0]),
        P(H == 0 ? 0 : C / H),
        R(args.sb.size[1]),
        M(args.imag.size[1]),
        ld(2 * round_up<double>(M)),
        ldr(round_up<double>(R)),
        heads(H >= 512  ? 16
              : H >= 64 ? 4
                        : 1) {}
  int64_t tasks() const { return P == 0 ? 0 : (H + heads - 1) / heads; }
};

// 1 / (1 - z/2) = (1 - z/2)* / |1 - z/2|^2. rows: [6, ld / 2] in double
void discretise(const H3DecodeArgs& args, int64_t h, const Sizes& s, double* rows, const Table& table) {
  const int64_t ldm = s.ld / 2;
  double *re = rows, *im = rows + ldm, *br = rows + 2 * ldm, *bi = rows + 3 * ldm, *cr = rows + 4 * ldm, *ci = rows + 5 * ldm;
  for (int64_t i = 0; i < 6 * ldm; ++i) rows[i] = 0;
  // M numbers of head h, in whatever type they have
  const auto take = [&](const View& view, int64_t side, double* to) {
    const int64_t step = view.stride[1], first = h * view.stride[0] + (view.rank == 3 ? side * view.stride[2] : 0);
    if (view.dtype == Dtype::f32) {
      const float* from = static_cast<const float*>(view.data) + first;
      for (int64_t m = 0; m < s.M; ++m) to[m] = static_cast<double>(from[m * step]);
    } else {
      for (int64_t m = 0; m < s.M; ++m) to[m] = load_f64(view.data, view.dtype, first + m * step);
    }
  };
  take(args.c, 0, cr);
  take(args.c, 1, ci);
  if (args.disc == H3Disc::zoh) {
    for (int64_t m = 0; m < s.M; ++m) {
      const H3Pair p = h3_pair(args, h, m);
      re[m] = p.a.re, im[m] = p.a.im, br[m] = p.bd.re, bi[m] = p.bd.im;
    }
  } else {
    take(args.log_neg_re, 0, re);
    take(args.imag, 0, im);
    take(args.b, 0, br);
    take(args.b, 1, bi);
  }
  const vd dt = D::broadcast(__builtin_exp(element(args.log_dt, h))), one = D::broadcast(1), half = 0.5 * dt;
  for (int64_t m = 0; m < ldm; m += D::W) {
    vd ar = D::load(re + m), ai = D::load(im + m), bdr = D::load(br + m), bdi = D::load(bi + m);
    if (args.disc == H3Disc::bilinear) {
      const vd zr = -half * exp(ar), zi = half * ai, below = one - zr;  // z / 2
      const vd inverse = one / fma(below, below, zi * zi), x = dt * bdr, y = dt * bdi;
      ar = fma(one + zr, below, -(zi * zi)) * inverse;
      ai = 2.0 * zi * inverse;
      bdr = fma(x, below, -(y * zi)) * inverse;
      bdi = fma(y, below, x * zi) * inverse;
    }
    table.set(m, ar, ai, bdr, bdi, D::load(cr + m), D::load(ci + m));
  }
  for (int64_t m = s.M; m < ldm; ++m) {  // log_neg_re 0 is no pair
    for (int64_t i = 2 * m; i < 2 * m + 2; ++i) table.same[i] = table.cross[i] = table.bd[i] = table.c[i] = 0;
  }
}
Table head_table(const H3DecodeArgs& args, int64_t h, const Sizes& s, double* rows, Table table) {
  discretise(args, h, s, rows, table);
  table.d = element(args.d, h);
  const auto filter = [&](const View& view, int64_t c, double* to) {
    if (view.dtype == Dtype::f32) {
      for (int64_t i = 0; i < s.R; i += D::W) D::store(to + i, load_wide(view.at<const float>(c, i), s.R - i));
    } else {
      for (int64_t i = 0; i < s.ldr; ++i) to[i] = i < s.R ? element(view, c, i) : 0;
    }
  };
  for (int64_t p = 0; p < s.P; ++p) {
    filter(args.sb, h * s.P + p, table.sb + p * s.ldr);
    filter(args.sc, h * s.P + p, table.sc + p * s.ldr);
    table.sd[p] = element(args.sd, h * s.P + p);
  }
  return table;
}

// x moves on by one token in place, from its end, so that nothing is read after it was written; returns sc . x.
template <class S>
LINNET_INLINE double shift(const double* sb, const double* sc, int64_t R, double k, S* x) {
  const vd key = D::broadcast(k);
  vd total = D::zero();
  int64_t i = (R - 1) / D::W * D::W;
  for (; i > 0; i -= D::W) {
    const vd next = fma(D::load(sb + i), key, load_wide(x + i - 1, R - i));
    store_wide(x + i, next, R - i);
    total = fma(D::load(sc + i), next, total);
  }
  double first[D::W + 1] = {};
  D::store(first + 1, load_wide(x, R));
  const vd next = fma(D::load(sb), key, D::load(first));
  store_wide(x, next, R);
  return sum(fma(D::load(sc), next, total));
}

// X of N rows moves on by one token; read = 2 Re(c X).
template <int N, class S>
LINNET_INLINE void diagonal(const Table& table, int64_t width, const double* kv, S* const* pairs, double* read) {
  vd total[N] = {}, input[N];
#pragma GCC unroll 2
  for (int j = 0; j < N; ++j) input[j] = D::broadcast(kv[j]);
  const auto step = [&](int64_t i, int64_t lanes) {
    const vd same = D::load(table.same + i), cross = D::load(table.cross + i), bd = D::load(table.bd + i);
    const vd c = D::load(table.c + i);
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) {
      const vd x = load_wide(pairs[j] + i, lanes), next = fma(same, x, fma(cross, swap_pairs(x), bd * input[j]));
      store_wide(pairs[j] + i, next, lanes);
      total[j] = fma(c, next, total[j]);
    }
  };
  int64_t i = 0;
  for (; i + D::W <= width; i += D::W) step(i, D::W);
  if (i < width) step(i, width - i);
#pragma GCC unroll 2
  for (int j = 0; j < N; ++j) read[j] = sum(total[j]);
}

// One token of N batch rows of a head: x[j] [P, ldx], X[j] [P, P, ldX].
template <int N, class S, class E>
LINNET_INLINE void token(const H3DecodeArgs& args, const View& out, const Sizes& s, const Table& table, int64_t b, int64_t t,
                         int64_t h, double* kbar, double* y, S* const* x, const int64_t* ldx, S* const* X, const int64_t* ldX) {
#pragma GCC unroll 2
  for (int j = 0; j < N; ++j) {
    for (int64_t p = 0; p < s.P; ++p) {
      const double k = to_f64(*args.k.at<const E>(b + j, t, h * s.P + p));
      kbar[p * N + j] = table.sd[p] * k + shift(table.sb + p * s.ldr, table.sc + p * s.ldr, s.R, k, x[j] + p * ldx[0]);
      y[p * N + j] = 0;
    }
  }
  for (int64_t p = 0; p < s.P; ++p) {
    for (int64_t r = 0; r < s.P; ++r) {
      double kv[N], read[N];
      S* pairs[N];
#pragma GCC unroll 2
      for (int j = 0; j < N; ++j) {
        kv[j] = kbar[p * N + j] * to_f64(*args.v.at<const E>(b + j, t, h * s.P + r));
        pairs[j] = X[j] + p * ldX[0] + r * ldX[1];
      }
      diagonal<N>(table, 2 * s.M, kv, pairs, read);
#pragma GCC unroll 2
      for (int j = 0; j < N; ++j) {
        y[r * N + j] += to_f64(*args.q.at<const E>(b + j, t, h * s.P + p)) * (read[j] + table.d * kv[j]);
      }
    }
  }
  for (int64_t r = 0; r < s.P; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) *out.at<E>(b + j, t, r * s.H + h) = round_to<E>(y[r * N + j]);
  }
}

struct Scratch {
  double* rows;      // [6, ld / 2]
  double *kbar, *y;  // [P, 2]
  double *x, *X;     // [P, ldr], [P, P, ld]: the states of several tokens
  Table table;
  static Scratch cut(Arena& arena, const Sizes& s, bool carry) {
    Scratch r;
    r.rows = arena.take<double>(3 * s.ld);
    r.kbar = arena.take<double>(2 * s.P);
    r.y = arena.take<double>(2 * s.P);
    r.x = arena.take<double>(carry ? s.P * s.ldr : 0);
    r.X = arena.take<double>(carry ? s.P * s.P * s.ld : 0);
    r.table = Table::cut(arena, s.P, s.ld, s.ldr);
    return r;
  }
};

template <class T, class E>
struct Decode {
  const H3DecodeArgs& args;
  Sizes s;
  bool carry;  // through scratch: several tokens, or pairs that are not neighbours
  explicit Decode(const H3DecodeArgs& a)
      : args(a), s(a), carry(a.q.size[1] > 1 || (a.state_diag.stride[4] != 2 && a.imag.size[1] > 1)) {}
  int64_t worker_bytes() const {
    Arena arena;
    Scratch::cut(arena, s, carry);
    return arena.used();
  }
  void run(const View& out, const Launch& launch) const {
    const int64_t bytes = worker_bytes();
    if (s.tokens == 0) return;
    parallel_near(launch, s.tasks(), [&](int64_t task, int worker) {
      Arena arena(launch.workspace + worker * bytes);
      const Scratch r = Scratch::cut(arena, s, carry);
      for (int64_t h = task * s.heads; h < s.H && h < (task + 1) * s.heads; ++h) {
        const Table table = head_table(args, h, s, r.rows, r.table);
        if (carry) {
          for (int64_t b = 0; b < s.B; ++b) carried(out, r, table, b, h);
          continue;
        }
        int64_t b = 0;
        for (; b + 2 <= s.B; b += 2) in_place<2>(out, r, table, b, h);
        if (b < s.B) in_place<1>(out, r, table, b, h);
      }
    });
  }
  template <int N>
  LINNET_INLINE void in_place(const View& out, const Scratch& r, const Table& table, int64_t b, int64_t h) const {
    const View &shift_state = args.state_shift, &diag = args.state_diag;
    T *x[N], *X[N];
    for (int j = 0; j < N; ++j) {
      x[j] = shift_state.at<T>(b + j, h * s.P, 0);
      X[j] = diag.at<T>(b + j, h, 0, 0, 0, 0);
      if (b + j + kAhead < s.B) {
        const char* next_x = reinterpret_cast<const char*>(shift_state.at<T>(b + j + kAhead, h * s.P, 0));
        const char* next_X = reinterpret_cast<const char*>(diag.at<T>(b + j + kAhead, h, 0, 0, 0, 0));
        for (int64_t i = 0; i < s.R * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(next_x + i, 1);
        for (int64_t i = 0; i < 2 * s.M * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(next_X + i, 1);
      }
    }
    token<N, T, E>(args, out, s, table, b, 0, h, r.kbar, r.y, x, &shift_state.stride[1], X, &diag.stride[2]);
  }
  void carried(const View& out, const Scratch& r, const Table& table, int64_t b, int64_t h) const {
    const View &shift_state = args.state_shift, &diag = args.state_diag;
    const auto each = [&](const auto& use_x, const auto& use_X) {
      for (int64_t p = 0; p < s.P; ++p) {
        T* x = shift_state.at<T>(b, h * s.P + p, 0);
        for (int64_t i = 0; i < s.R; ++i) use_x(x[i], r.x[p * s.ldr + i]);
        for (int64_t slot = 0; slot < s.P; ++slot) {
          T* X = diag.at<T>(b, h, p, slot, 0, 0);
          double* wide = r.X + (p * s.P + slot) * s.ld;
          for (int64_t m = 0; m < s.M; ++m) {
            use_X(X[m * diag.stride[4]], wide[2 * m]);
            use_X(X[m * diag.stride[4] + 1], wide[2 * m + 1]);
          }
        }
      }
    };
    const auto take = [](T& state, double& wide) { wide = static_cast<double>(state); };
    const auto give = [](T& state, double& wide) { state = static_cast<T>(wide); };
    each(take, take);
    const int64_t ldX[2] = {s.P * s.ld, s.ld};
    for (int64_t t = 0; t < s.tokens; ++t) {
      token<1, double, E>(args, out, s, table, b, t, h, r.kbar, r.y, &r.x, &s.ldr, &r.X, ldX);
    }
    each(give, give);
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
