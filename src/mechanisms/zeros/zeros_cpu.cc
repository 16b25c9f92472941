// zeros for one instruction set: one walk over the chunks of a head for the forward, two for the backward (zeros_chunk.h).
//
// A unit of work is one head of one batch row, or a long head's chunks for all threads (TogetherWalk). Forward, per chunk of
// 64: A = Q K^T, O = [cp q | c1 q | c0 q] S + (r o A) V, then the write of S [3 K, V]. Backward, forward in time with the
// memory transposed [V, 3 K]: dq, the gates' gradients and the row sums X, Y; backward in time with its gradient [V, 3 K]: dk,
// dv, ds. Nothing is kept between the passes but scalars.
#include "simd/finite.h"
#include "simd/pipeline.h"
#include "zeros_chunk.h"

namespace linnet::LINNET_ISA {
namespace {

// O += A V, A lower triangular. Values that are not finite go row by row, exactly as far as a row sees: a weight of 0 does not
// hide a NaN from an earlier row of the tile.
template <class T>
void read_lower(int rows, int columns, const T* a, const T* v, int64_t ldv, T* o) {
  if (rows_are_finite(v, ldv, rows, columns)) {
    gemm<T>(rows, columns, rows, as_is(a, kZeros), v, ldv, o, ldv, Add{}, DepthTo{1});
    return;
  }
  for (int i = 0; i < rows; ++i) gemm<T>(1, columns, i + 1, as_is(a + i * kZeros, kZeros), v, ldv, o + i * ldv, ldv, Add{});
}

// Memory of a walk: what a chunk leaves for its step and its readers (a slot), what only lives while a worker reads, and what
// belongs to the head. A worker that walks alone has one of each, and its slot's state is the head's.
template <class T>
struct Scratch {
  int64_t K, V, ldk, ldv, block;  // block: columns of one of three transposed states
  // Of a slot:
  T *q, *k, *v, *d;     // rows [C, ldk], [C, ldk], [C, ldv], [C, ldv]
  T* kt;                // [K, C]
  T *wide, *tall;       // [C, 3 block], [3 block, C]: rows scaled for a write, transposed
  T* before;            // [3 block, ldv]: the state that readers see
  double* sums_before;  // [2]
  Row<T>* row;
  // Of a worker:
  T* vt;         // [V, C]
  T* scaled;     // [C, 3 block]: queries scaled for a read
  T* grads;      // [C, 3 block]
  T *a, *e, *w;  // [C, C]
  T *o, *ot;     // [C, ldv or ldk], [V, C]
  // Of the head:
  T* state;
  double* sums;  // [2]: of X and Y, from later rows
  Edge* edges;   // [T]
  T *X, *Y;      // [T]

  explicit Scratch(const ZerosArgs& args)
      : K(args.q.size[3]), V(args.v.size[3]), ldk(round_up<T>(K)), ldv(round_up<T>(V)), block(ldk) {}
  int64_t cut_slot(char* base, bool own_state) {
    Arena arena(base);
    q = arena.take<T>(kZeros * ldk);
    k = arena.take<T>(kZeros * ldk);
    v = arena.take<T>(kZeros * ldv);
    d = arena.take<T>(kZeros * ldv);
    kt = arena.take<T>(K * kZeros);
    wide = arena.take<T>(kZeros * 3 * block);
    tall = arena.take<T>(3 * block * kZeros);
    row = arena.take<Row<T>>(1);
    if (own_state) {
      before = arena.take<T>(3 * block * ldv);
      sums_before = arena.take<double>(2);
    }
    return arena.used();
  }
  int64_t cut_worker(char* base) {
    Arena arena(base);
    vt = arena.take<T>(V * kZeros);
    scaled = arena.take<T>(kZeros * 3 * block);
    grads = arena.take<T>(kZeros * 3 * block);
    a = arena.take<T>(kZeros * kZeros);
    e = arena.take<T>(kZeros * kZeros);
    w = arena.take<T>(kZeros * kZeros);
    o = arena.take<T>(kZeros * (ldk > ldv ? ldk : ldv));
    ot = arena.take<T>(V * kZeros);
    return arena.used();
  }
  int64_t cut_head(char* base, int64_t tokens) {
    Arena arena(base);
    state = arena.take<T>(3 * block * ldv);
    sums = arena.take<double>(2);
    edges = arena.take<Edge>(tokens);
    X = arena.take<T>(tokens);
    Y = arena.take<T>(tokens);
    return arena.used();
  }
  // One worker on its own.
  int64_t cut_alone(char* base, int64_t tokens) {
    int64_t used = cut_slot(base, false);
    used += cut_worker(base == nullptr ? base : base + used);
    used += cut_head(base == nullptr ? base : base + used, tokens);
    before = state;
    sums_before = sums;
    return used;
  }
};

LINNET_INLINE int64_t row_of(const View& x, int64_t b, int64_t t, int64_t h) {
  return b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
}

// Forward; backward forward in time, with dq, the gates' gradients and X, Y; and backward in time with dk, dv, ds.
enum class Walk { forward, rows, keys };

// One head of one batch row.
template <class T>
struct Unit {
  using X = Vec<T>;
  using Vector = typename X::V;
  const ZerosArgs& args;
  const View& out;
  const ZerosGrads& grads;
  const Scratch<T>& s;
  int64_t b, h;
  Edge start = {};  // before the first token: nothing, or what a state holds

  int64_t tokens() const { return args.q.size[1]; }
  Edge left(int64_t at) const { return !args.causal ? s.edges[tokens() - 1] : at == 0 ? start : s.edges[at - 1]; }
  Edge right(int64_t at, int rows) const { return s.edges[at + rows - 1]; }

  void load(const View& x, int64_t at, int rows, int64_t width, T* to, int64_t ld) const {
    with_type<T>(x, row_of(x, b, at, h),
                 [&](const auto* p) { load_tile<T>(p, x.stride[1], rows, static_cast<int>(width), to, ld); });
    for (int64_t i = rows * ld; i < kZeros * ld; ++i) to[i] = 0;
  }
  // A masked key may hold anything: its rows become zeros.
  void load_keys(const View& x, int64_t at, int rows, int64_t width, T* to, int64_t ld) const {
    load(x, at, rows, width, to, ld);
    for (int r = 0; args.key_mask.given() && r < rows; ++r) {
      if (s.row->valid[r] != 0) continue;
      for (int64_t c = 0; c < ld; ++c) to[r * ld + c] = 0;
    }
  }
  // Queries and their gradients; those of a row that reads nothing are zeros.
  void load_readers(const View& x, int64_t at, int rows, int64_t width, T* to, int64_t ld) const {
    load(x, at, rows, width, to, ld);
    for (int r = 0; r < rows; ++r) {
      for (int64_t c = 0; s.row->inverse[r] == 0 && c < ld; ++c) to[r * ld + c] = 0;
    }
  }
  void store(const View& x, int64_t at, int rows, int64_t width, const T* from, int64_t ld) const {
    if (!x.given()) return;
    with_type<T>(x, row_of(x, b, at, h), [&](auto* p) { store_tile(from, ld, rows, static_cast<int>(width), p, x.stride[1]); });
  }
  void store_numbers(const View& x, int64_t at, int rows, const T* from) const {
    for (int r = 0; x.given() && r < rows; ++r) set_element<T>(x, row_of(x, b, at + r, h), from[r]);
  }
  static void transpose(const T* rows, int64_t ld, int64_t width, T* to) {
    load_tile_transposed<T>(rows, ld, kZeros, static_cast<int>(width), to, kZeros);
  }
  // wide = [x * f[0] | x * f[1] | x * f[2]], a factor per row.
  void widen(const T* x, const T* f0, const T* f1, const T* f2) const {
    const T* const f[3] = {f0, f1, f2};
    for (int r = 0; r < kZeros; ++r) {
      for (int n = 0; n < 3; ++n) {
        const Vector factor = X::broadcast(f[n][r]);
        T* const to = s.wide + r * 3 * s.block + n * s.block;
        for (int64_t c = 0; c < s.ldk; c += X::W) X::store(to + c, X::load(x + r * s.ldk + c) * factor);
      }
    }
  }
  // tall = kt * f[0], kt * f[1], kt * f[2] below each other, `step` rows apart, a factor per column.
  void stack(int64_t step, const T* f0, const T* f1, const T* f2) const {
    const T* const f[3] = {f0, f1, f2};
    for (int n = 0; n < 3; ++n) {
      for (int64_t c = 0; c < step; ++c) {
        T* const to = s.tall + (n * step + c) * kZeros;
        for (int i = 0; i < kZeros; i += X::W) {
          X::store(to + i, c < s.K ? X::load(s.kt + c * kZeros + i) * X::load(f[n] + i) : X::zero());
        }
      }
    }
  }
  void begin_walk() const {
    for (int64_t i = 0; i < 3 * s.block * s.ldv; ++i) s.state[i] = 0;
    s.sums[0] = s.sums[1] = 0;
  }
  // What readers see of columns [j0, j1) of the values.
  void keep_state(bool values_in_rows, int64_t j0, int64_t j1) const {
    if (s.before == s.state) return;
    const int64_t rows = values_in_rows ? j1 - j0 : 3 * s.K, ld = values_in_rows ? 3 * s.block : s.ldv;
    const int64_t from = values_in_rows ? j0 * ld : j0, width = values_in_rows ? ld : round_up<T>(j1 - j0);
    for (int64_t r = 0; r < rows; ++r) {
      const T* const row = s.state + from + r * ld;
      T* const to = s.before + from + r * ld;
      for (int64_t c = 0; c < width; c += X::W) X::store(to + c, X::load(row + c));
    }
  }

  // ---- forward

  void write(int64_t at, int rows, int64_t j0, int64_t j1) const {  // state [3 K, ldv]; tall and v stand in the slot
    const Step step(left(at), right(at, rows));
    keep_state(false, j0, j1);
    for (int64_t j = j0; j < j1; j += kZeros) {
      const int columns = static_cast<int>(smaller(kZeros, j1 - j));
      gemm<T>(static_cast<int>(3 * s.K), columns, rows, as_is(s.tall, kZeros), s.v + j, s.ldv, s.state + j, s.ldv,
              blend_memory<T, false>(step, s.state + j, s.ldv, s.K));
    }
  }
  void read(int64_t at, int rows) const {
    const Row<T>& row = *s.row;
    load_readers(args.q, at, rows, s.K, s.q, s.ldk);
    const T* const c[3] = {row.cp, row.c1, row.c0};
    for (int r = 0; r < rows; ++r) {
      for (int n = 0; n < 3; ++n) {
        const Vector factor = X::broadcast(c[n][r]);
        T* const to = s.scaled + r * 3 * s.block + n * s.K;
        for (int64_t i = 0; i < s.K; i += X::W)
          X::store(to + i, X::load(s.q + r * s.ldk + i) * factor, static_cast<int>(s.K - i));
      }
    }
    if (args.causal) {
      gemm<T>(rows, rows, static_cast<int>(s.K), as_is(s.q, s.ldk), s.kt, kZeros, s.a, kZeros, Store{}, ColumnsTo{1});
      for (int t = 0; t < rows; ++t) {
        const Vector sh = X::broadcast(row.sh[t] * row.inverse[t]), b1 = X::broadcast((row.s1[t] - row.sh[t]) * row.inverse[t]);
        const Vector b0 = X::broadcast(row.s0[t] * row.inverse[t]);
        for (int i = 0; i < kZeros; i += X::W) {
          T* const place = s.a + t * kZeros + i;
          if (i > t) {
            X::store(place, X::zero());
            continue;
          }
          Vector excess, delta;
          orders(row, t, i, &excess, &delta);
          X::store(place, select(reads(row, t, i), fma(sh, excess, fma(b1, delta, b0)) * X::load(place), X::zero()));
        }
      }
    }
    for (int64_t j = 0; j < s.V; j += kZeros) {
      const int columns = static_cast<int>(smaller(kZeros, s.V - j));
      gemm<T>(rows, columns, static_cast<int>(3 * s.K), as_is(s.scaled, 3 * s.block), s.before + j, s.ldv, s.o + j, s.ldv,
              Store{});
      if (args.causal) {
        read_lower(rows, columns, s.a, s.v + j, s.ldv, s.o + j);
      }
    }
    store(out, at, rows, s.V, s.o, s.ldv);
  }
  void load_row(int64_t at, int rows) const { fill_row<T>(args, b, h, at, rows, s.edges, left(at), right(at, rows), *s.row); }
  void load_pair(int64_t at, int rows) const {  // keys and values
    load_keys(args.k, at, rows, s.K, s.k, s.ldk);
    load_keys(args.v, at, rows, s.V, s.v, s.ldv);
    transpose(s.k, s.ldk, s.K, s.kt);
  }

  // ---- backward, first walk: state [V, 3 block], columns Rp, R1, R0

  void load_gradient(int64_t at, int rows) const {
    if (grads.dout.given()) return load_readers(grads.dout, at, rows, s.V, s.d, s.ldv);
    for (int64_t i = 0; i < kZeros * s.ldv; ++i) s.d[i] = 0;
  }
  void write_transposed(int64_t at, int rows, int64_t j0, int64_t j1) const {
    const int64_t ld = 3 * s.block;
    keep_state(true, j0, j1);
    gemm<T>(static_cast<int>(j1 - j0), static_cast<int>(ld), rows, transposed(s.v + j0, s.ldv), s.wide, ld, s.state + j0 * ld,
            ld, blend_memory<T, true>(Step(left(at), right(at, rows)), s.state + j0 * ld, ld, s.block));
  }
  // A = Q K^T and E = D V^T of the chunk, where row t reads key i.
  void products(int rows) const {
    transpose(s.v, s.ldv, s.V, s.vt);
    gemm<T>(rows, rows, static_cast<int>(s.K), as_is(s.q, s.ldk), s.kt, kZeros, s.a, kZeros, Store{}, ColumnsTo{1});
    gemm<T>(rows, rows, static_cast<int>(s.V), as_is(s.d, s.ldv), s.vt, kZeros, s.e, kZeros, Store{}, ColumnsTo{1});
  }
  void gradient_rows(int64_t at, int rows) const {
    const Row<T>& row = *s.row;
    load_readers(args.q, at, rows, s.K, s.q, s.ldk);
    load_gradient(at, rows);
    gemm<T>(rows, static_cast<int>(3 * s.block), static_cast<int>(s.V), as_is(s.d, s.ldv), s.before, 3 * s.block, s.grads,
            3 * s.block, Store{});
    if (args.causal) products(rows);
    T ds1[kZeros], dsh[kZeros];
    for (int t = 0; t < rows; ++t) {
      const T *const g = s.grads + t * 3 * s.block, *const q = s.q + t * s.ldk;
      const Vector cp = X::broadcast(row.cp[t]), c1 = X::broadcast(row.c1[t]), c0 = X::broadcast(row.c0[t]);
      Vector up = X::zero(), u1 = X::zero(), u0 = X::zero();
      for (int64_t c = 0; c < s.ldk; c += X::W) {
        const Vector x = X::load(q + c), gp = X::load(g + c), g1 = X::load(g + s.block + c), g0 = X::load(g + 2 * s.block + c);
        up = fma(x, gp, up);
        u1 = fma(x, g1, u1);
        u0 = fma(x, g0, u0);
        X::store(s.o + t * s.ldk + c, fma(cp, gp, fma(c1, g1, c0 * g0)));
      }
      const T pastp = sum(up), past1 = sum(u1), past0 = sum(u0);
      T all = (pastp + past0) * row.lam[t], flat = past0 * row.nu[t], first = (past1 + past0 * row.drift[t]) * row.nu[t];
      T higher = fma_scalar(pastp, row.lam[t], past0 * row.gap[t]) - first;
      if (args.causal) {
        Vector sum_p = X::zero(), sum_0 = X::zero(), sum_1 = X::zero(), sum_h = X::zero();
        const Vector inverse = X::broadcast(row.inverse[t]), sh = X::broadcast(row.sh[t] * row.inverse[t]);
        const Vector b1 = X::broadcast((row.s1[t] - row.sh[t]) * row.inverse[t]), b0 = X::broadcast(row.s0[t] * row.inverse[t]);
        for (int i = 0; i < kZeros; i += X::W) {
          T* const place = s.w + t * kZeros + i;
          if (i > t) {
            X::store(place, X::zero());
            continue;
          }
          const auto seen = reads(row, t, i);
          const Vector e = X::load(s.e + t * kZeros + i);
          const Vector x = select(seen, X::load(s.a + t * kZeros + i) * e, X::zero());
          Vector excess, delta;
          orders(row, t, i, &excess, &delta);
          excess = select(seen, excess, X::zero());
          delta = select(seen, delta, X::zero());
          sum_p = fma(excess, x, sum_p) + x;
          sum_0 = sum_0 + x;
          sum_1 = fma(delta, x, sum_1);
          sum_h = fma(excess - delta, x, sum_h);
          X::store(place, select(seen, fma(sh, excess, fma(b1, delta, b0)) * e, X::zero()));
        }
        all += sum(sum_p * inverse);
        flat += sum(sum_0 * inverse);
        first += sum(sum_1 * inverse);
        higher += sum(sum_h * inverse);
      }
      s.X[at + t] = all;
      s.Y[at + t] = flat;
      ds1[t] = first;
      dsh[t] = higher;
    }
    if (args.causal && grads.dq.given()) {
      gemm<T>(rows, static_cast<int>(s.K), rows, as_is(s.w, kZeros), s.k, s.ldk, s.o, s.ldk, Add{}, DepthTo{1});
    }
    store(grads.dq, at, rows, s.K, s.o, s.ldk);
    store_numbers(grads.ds1, at, rows, ds1);
    store_numbers(grads.dsh, at, rows, dsh);
    store_numbers(grads.ds0, at, rows, s.Y + at);
  }
  LINNET_INLINE static T fma_scalar(T x, T y, T z) { return x * y + z; }

  // ---- backward, second walk: its gradient [V, 3 block], columns J0, J1, Jp; backward in time

  void gather(int64_t at, int rows, int64_t j0, int64_t j1) const {  // to the left edge
    const int64_t ld = 3 * s.block;
    keep_state(true, j0, j1);
    gemm<T>(static_cast<int>(j1 - j0), static_cast<int>(ld), rows, transposed(s.d + j0, s.ldv), s.wide, ld, s.state + j0 * ld,
            ld, blend_gradient<T>(Step(left(at), right(at, rows)), s.state + j0 * ld, ld, s.block));
  }
  void gradient_keys(int64_t at, int rows) const {
    const Row<T>& row = *s.row;
    const T uX = static_cast<T>(s.sums_before[0]), uY = static_cast<T>(s.sums_before[1]);
    gemm<T>(rows, static_cast<int>(3 * s.block), static_cast<int>(s.V), as_is(s.v, s.ldv), s.before, 3 * s.block, s.grads,
            3 * s.block, Store{});
    T ds[kZeros] = {};
    const Edge edge = right(at, rows);
    const T inverse = edge.n > 0 ? static_cast<T>(1 / edge.n) : T(0);
    for (int i = 0; i < rows; ++i) {
      const T *const g = s.grads + i * 3 * s.block, *const k = s.k + i * s.ldk;
      const Vector w0 = X::broadcast(row.w0[i]), w1 = X::broadcast(row.w1[i]), wp = X::broadcast(row.wp[i]);
      Vector kp = X::zero(), k1 = X::zero();
      for (int64_t c = 0; c < s.ldk; c += X::W) {
        const Vector x = X::load(k + c), g0 = X::load(g + c), g1 = X::load(g + s.block + c), gp = X::load(g + 2 * s.block + c);
        kp = fma(x, gp, kp);
        k1 = fma(x, g1, k1);
        X::store(s.o + i * s.ldk + c, fma(wp, gp, fma(w1, g1, w0 * g0)));
      }
      const T p = row.wp[i] + row.w0[i];  // p_Ni
      ds[i] = p * (sum(kp) - uX) + inverse * (sum(k1) - uY);
    }
    if (args.causal) {
      products(rows);
      Vector sums[kZeros / X::W];
      for (Vector& x : sums) x = X::zero();
      for (int t = 0; t < rows; ++t) {
        const Vector sh = X::broadcast(row.sh[t] * row.inverse[t]), b1 = X::broadcast((row.s1[t] - row.sh[t]) * row.inverse[t]);
        const Vector b0 = X::broadcast(row.s0[t] * row.inverse[t]), all = X::broadcast(s.X[at + t]),
                     flat = X::broadcast(s.Y[at + t]);
        for (int i = 0; i < kZeros; i += X::W) {
          T *const place = s.w + t * kZeros + i, *const scores = s.a + t * kZeros + i;
          if (i > t) {
            X::store(place, X::zero());
            X::store(scores, X::zero());
            continue;
          }
          const auto seen = reads(row, t, i);
          const Vector a = X::load(scores), e = X::load(s.e + t * kZeros + i), x = a * e;
          Vector excess, delta;
          orders(row, t, i, &excess, &delta);
          const Vector r = fma(sh, excess, fma(b1, delta, b0));
          const Vector slope = fma(sh * (excess + X::broadcast(1)), x - all, b1 * (x - flat));
          sums[i / X::W] = sums[i / X::W] + select(seen, slope, X::zero());
          X::store(place, select(seen, r * e, X::zero()));
          X::store(scores, select(seen, r * a, X::zero()));
        }
      }
      for (int i = 0; i < rows; ++i) ds[i] += sums[i / X::W][i % X::W];
      gemm<T>(rows, static_cast<int>(s.K), rows, transposed(s.w, kZeros), s.q, s.ldk, s.o, s.ldk, Add{}, DepthFrom{0});
    }
    for (int i = 0; i < rows; ++i) {
      if (row.valid[i] != 0) continue;
      ds[i] = 0;
      for (int64_t c = 0; c < s.ldk; ++c) s.o[i * s.ldk + c] = 0;
    }
    store(grads.dk, at, rows, s.K, s.o, s.ldk);
    store_numbers(grads.ds, at, rows, ds);
    if (!grads.dv.given()) return;
    // dv^T [V, C] = J^T (w k)^T, then what rows of the chunk add.
    stack(s.block, row.w0, row.w1, row.wp);
    gemm<T>(static_cast<int>(s.V), kZeros, static_cast<int>(3 * s.block), as_is(s.before, 3 * s.block), s.tall, kZeros, s.ot,
            kZeros, Store{});
    load_tile_transposed<T>(static_cast<const T*>(s.ot), kZeros, static_cast<int>(s.V), kZeros, s.o, s.ldv);
    if (args.causal) {
      gemm<T>(rows, static_cast<int>(s.V), rows, transposed(s.a, kZeros), s.d, s.ldv, s.o, s.ldv, Add{}, DepthFrom{0});
    }
    for (int i = 0; i < rows; ++i) {
      for (int64_t c = 0; row.valid[i] == 0 && c < s.ldv; ++c) s.o[i * s.ldv + c] = 0;
    }
    store(grads.dv, at, rows, s.V, s.o, s.ldv);
  }
  // The sums of X and Y that later rows bring, to the left edge.
  void gather_sums(int64_t at, int rows) const {
    const Row<T>& row = *s.row;
    const Step step(left(at), right(at, rows));
    double x = step.lam * s.sums[0], y = step.nu * s.sums[1];
    for (int t = 0; t < rows; ++t) {
      x += static_cast<double>(row.cp[t]) * static_cast<double>(s.X[at + t]);
      y += static_cast<double>(row.c1[t]) * static_cast<double>(s.Y[at + t]);
    }
    for (int i = 0; i < 2; ++i) s.sums_before[i] = s.sums[i];
    s.sums[0] = x;
    s.sums[1] = y;
  }

  // ---- the three walks, cut as simd/pipeline.h says

  void prepare(Walk walk, int64_t at, int rows) const {
    const Row<T>& row = *s.row;
    load_row(at, rows);
    if (walk == Walk::keys) {
      load_readers(args.q, at, rows, s.K, s.q, s.ldk);
      load_gradient(at, rows);
      return widen(s.q, row.c0, row.c1, row.cp);
    }
    load_pair(at, rows);
    if (walk == Walk::forward) return stack(s.K, row.wp, row.w1, row.w0);
    widen(s.k, row.wp, row.w1, row.w0);
  }
  void step(Walk walk, int64_t at, int rows, int64_t j0, int64_t j1) const {
    if (walk == Walk::forward) return write(at, rows, j0, j1);
    if (walk == Walk::rows) return write_transposed(at, rows, j0, j1);
    gather(at, rows, j0, j1);
    if (j0 == 0) gather_sums(at, rows);
  }
  void read(Walk walk, int64_t at, int rows) const {
    if (!args.causal) load_row(at, rows);
    if (walk == Walk::forward) return read(at, rows);
    if (walk == Walk::rows) return gradient_rows(at, rows);
    load_pair(at, rows);
    gradient_keys(at, rows);
  }
};

// Calls f(at, rows) for the chunks in the walk's order.
template <class F>
void for_chunks(Walk walk, int64_t tokens, const F& f) {
  const int64_t chunks = divide_up(tokens, kZeros);
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t at = (walk == Walk::keys ? chunks - 1 - i : i) * kZeros;
    f(at, static_cast<int>(smaller(kZeros, tokens - at)));
  }
}

// One worker, chunk after chunk.
template <class T>
void walk_alone(const Unit<T>& unit, Walk walk) {
  unit.begin_walk();
  for_chunks(walk, unit.tokens(), [&](int64_t at, int rows) {
    unit.prepare(walk, at, rows);
    if (unit.args.causal) unit.read(walk, at, rows);
    unit.step(walk, at, rows, 0, unit.s.V);
  });
  if (unit.args.causal) return;
  for_chunks(walk, unit.tokens(), [&](int64_t at, int rows) { unit.read(walk, at, rows); });
}

// Memory of a call: of each worker alone, or of all on one head.
template <class T>
struct Rooms {
  const ZerosArgs& args;
  int workers;
  bool together;
  int64_t slot, worker, head, bytes;

  Rooms(const ZerosArgs& a, int count) : args(a), workers(count) {
    const int64_t tokens = a.q.size[1];
    Scratch<T> s(a);
    together = prefer_ladder(a.q.size[0] * a.q.size[2], divide_up(tokens, kZeros), count);
    slot = s.cut_slot(nullptr, true);
    worker = s.cut_worker(nullptr);
    head = s.cut_head(nullptr, tokens);
    bytes = together ? head + workers * worker + pipeline_slots(workers) * slot : workers * s.cut_alone(nullptr, tokens);
  }
  Scratch<T> alone(char* base, int index) const {
    Scratch<T> s(args);
    s.cut_alone(base + index * (bytes / workers), args.q.size[1]);
    return s;
  }
  Scratch<T> shared(char* base, int64_t slot_index, int worker_index) const {
    Scratch<T> s(args);
    s.cut_head(base, args.q.size[1]);
    s.cut_worker(base + head + worker_index * worker);
    s.cut_slot(base + head + workers * worker + slot_index * slot, true);
    return s;
  }
};

// All workers on one head (simd/pipeline.h): the state is cut by columns of the values.
template <class T>
struct TogetherWalk {
  const Rooms<T>& rooms;
  const Launch& launch;
  const ZerosArgs& args;
  const View& out;
  const ZerosGrads& grads;
  int64_t b, h;
  Walk walk;
  LogitScan<T>* logits;  // where the scalars are not there yet
  int64_t slices;

  template <class F>
  void with_chunk(int64_t chunk, int64_t slot, int worker, bool last_state, const F& f) const {
    Scratch<T> s = rooms.shared(launch.workspace, slot, worker);
    if (last_state) s.before = s.state, s.sums_before = s.sums;
    const Unit<T> unit{args, out, grads, s, b, h};
    const int64_t tokens = unit.tokens(), at = (walk == Walk::keys ? divide_up(tokens, kZeros) - 1 - chunk : chunk) * kZeros;
    f(unit, at, static_cast<int>(smaller(kZeros, tokens - at)));
  }
  void scan(int64_t first, int64_t end) const {
    if (logits != nullptr) logits->run(first * kZeros, smaller(end * kZeros, args.q.size[1]));
  }
  void prepare(int64_t chunk, int64_t slot, int worker) const {
    with_chunk(chunk, slot, worker, false, [&](const Unit<T>& unit, int64_t at, int rows) { unit.prepare(walk, at, rows); });
  }
  void step(int64_t chunk, int64_t slot, int64_t slice, int worker) const {
    const int64_t vectors = divide_up(args.v.size[3], Vec<T>::W), width = divide_up(vectors, slices) * Vec<T>::W;
    const int64_t j0 = slice * width, j1 = smaller(j0 + width, args.v.size[3]);
    if (j0 >= j1 && slice > 0) return;
    with_chunk(chunk, slot, worker, false,
               [&](const Unit<T>& unit, int64_t at, int rows) { unit.step(walk, at, rows, j0, j1); });
  }
  void read(int64_t chunk, int64_t slot, int worker) const {
    if (!args.causal) return;
    with_chunk(chunk, slot, worker, false, [&](const Unit<T>& unit, int64_t at, int rows) { unit.read(walk, at, rows); });
  }
  void run() const {
    const int64_t chunks = divide_up(args.q.size[1], kZeros);
    with_chunk(0, 0, 0, true, [&](const Unit<T>& unit, int64_t, int) { unit.begin_walk(); });
    pipeline(launch, chunks, slices, *this);
    if (args.causal) return;
    parallel(launch, chunks, [&](int64_t chunk, int worker) {  // there are more slots than workers
      with_chunk(chunk, worker, worker, true, [&](const Unit<T>& unit, int64_t at, int rows) { unit.read(walk, at, rows); });
    });
  }
};

template <class T>
void run_walks(const ZerosArgs& args, const View& out, const ZerosGrads& grads, Pass pass, const Launch& launch) {
  const Rooms<T> rooms(args, launch.workers);
  const int64_t H = args.q.size[2], units = args.q.size[0] * H;
  if (args.q.size[1] == 0) return;
  const bool forward = pass == Pass::forward, keys = !forward && (grads.dk.given() || grads.dv.given() || grads.ds.given());
  const Walk first = forward ? Walk::forward : Walk::rows;
  if (!rooms.together) {
    const double flops = 12 * static_cast<double>(args.q.elements()) * static_cast<double>(args.v.size[3]);
    run_tasks(launch, units, flops, [&](int64_t task, int worker) {
      const Scratch<T> s = rooms.alone(launch.workspace, worker);
      const Unit<T> unit{args, out, grads, s, task / H, task % H};
      LogitScan<T>(args, unit.b, unit.h, s.edges).run_all();
      walk_alone(unit, first);
      if (keys) walk_alone(unit, Walk::keys);
    });
    return;
  }
  for (int64_t i = 0; i < units; ++i) {
    LogitScan<T> logits(args, i / H, i % H, rooms.shared(launch.workspace, 0, 0).edges);
    if (!args.causal) logits.run_all();
    const int64_t slices = larger(1, smaller(launch.workers, args.v.size[3] / Vec<T>::W));
    TogetherWalk<T> walk{rooms, launch, args, out, grads, i / H, i % H, first, args.causal ? &logits : nullptr, slices};
    walk.run();
    walk.walk = Walk::keys;
    walk.logits = nullptr;
    if (keys) walk.run();
  }
}

}  // namespace

int64_t zeros_workspace(const ZerosArgs& args, Pass, int workers) {
  return args.q.dtype == Dtype::f64 ? Rooms<double>(args, workers).bytes : Rooms<float>(args, workers).bytes;
}
void zeros_forward(const ZerosArgs& args, const ZerosOut& out, const Launch& launch) {
  if (args.q.dtype == Dtype::f64) return run_walks<double>(args, out.out, {}, Pass::forward, launch);
  run_walks<float>(args, out.out, {}, Pass::forward, launch);
}
void zeros_backward(const ZerosArgs& args, const ZerosOut& out, const ZerosGrads& grads, const Launch& launch) {
  if (args.q.dtype == Dtype::f64) return run_walks<double>(args, out.out, grads, Pass::backward, launch);
  run_walks<float>(args, out.out, grads, Pass::backward, launch);
}

// ---- decode: a chunk of one token, or a prompt in the forward's chunks

namespace {

inline constexpr int64_t kPrompt = 4;  // more tokens than this are a prompt

ZerosArgs tokens_of(const ZerosDecodeArgs& args) {
  ZerosArgs to;
  to.q = args.q;
  to.k = args.k;
  to.v = args.v;
  to.s = args.s;
  to.s1 = args.s1;
  to.sh = args.sh;
  to.s0 = args.s0;
  to.zeroth = args.zeroth;
  to.causal = true;
  return to;
}

template <class T>
void prompt(const ZerosDecodeArgs& args, const ZerosDecodeOut& out, const Launch& launch) {
  const ZerosArgs tokens = tokens_of(args);
  const int64_t H = args.q.size[2], K = args.q.size[3], V = args.v.size[3], moment = args.moments.stride[2];
  const int64_t bytes = Scratch<T>(tokens).cut_alone(nullptr, args.q.size[1]);
  parallel(launch, args.q.size[0] * H, [&](int64_t task, int worker) {
    const int64_t b = task / H, h = task % H;
    Scratch<T> s(tokens);
    s.cut_alone(launch.workspace + worker * bytes, args.q.size[1]);
    T* const moments = static_cast<T*>(args.moments.data) + b * args.moments.stride[0] + h * args.moments.stride[1];
    const auto pair = [&](int i) {
      return static_cast<double>(moments[i * moment]) + static_cast<double>(moments[(i + 1) * moment]);
    };
    const Unit<T> unit{tokens, out.out, {}, s, b, h, Edge{static_cast<double>(moments[4 * moment]), pair(0), pair(2)}};
    LogitScan<T> logits(tokens, b, h, s.edges);
    if (unit.start.n > 0) logits.begin(unit.start);
    logits.run(0, args.q.size[1]);
    unit.begin_walk();
    const auto each_row = [&](const auto& move) {  // R0, R1, Rp there; Rp, R1, R0 here
      for (int64_t n = 0; n < 3; ++n) {
        for (int64_t i = 0; i < K; ++i) {
          move(static_cast<T*>(args.state.data) + b * args.state.stride[0] + h * args.state.stride[1] +
                   (2 - n) * args.state.stride[2] + i * args.state.stride[3],
               s.state + (n * K + i) * s.ldv);
        }
      }
    };
    const size_t row = static_cast<size_t>(V) * sizeof(T);
    each_row([&](const T* there, T* here) { __builtin_memcpy(here, there, row); });
    for_chunks(Walk::forward, unit.tokens(), [&](int64_t at, int rows) {
      unit.prepare(Walk::forward, at, rows);
      unit.read(Walk::forward, at, rows);
      unit.step(Walk::forward, at, rows, 0, s.V);
    });
    each_row([&](T* there, const T* here) { __builtin_memcpy(there, here, row); });
    const Two<T> ell(logits.edge.ell), mean(logits.edge.mean);
    const T results[5] = {ell.hi, ell.lo, mean.hi, mean.lo, static_cast<T>(logits.edge.n)};
    for (int i = 0; i < 5; ++i) moments[i * moment] = results[i];
  });
}

template <class T>
void decode(const ZerosDecodeArgs& args, const ZerosDecodeOut& out, const Launch& launch) {
  using X = Vec<T>;
  using V = typename X::V;
  const int64_t H = args.q.size[2], K = args.q.size[3], tokens = args.q.size[1];
  const int width = static_cast<int>(args.v.size[3]);
  const int64_t ldk = round_up<T>(K), ldv = round_up<T>(width), bytes = (2 * ldk + 2 * ldv) * static_cast<int64_t>(sizeof(T));
  const double flops = 12 * static_cast<double>(args.q.elements()) * width;
  if (tokens == 0) return;
  run_tasks(launch, args.q.size[0] * H, flops, [&](int64_t task, int worker) {
    const int64_t b = task / H, h = task % H;
    T *const q = reinterpret_cast<T*>(launch.workspace + worker * bytes), *const k = q + ldk, *const v = k + ldk,
             *const o = v + ldv;
    T* const moments = static_cast<T*>(args.moments.data) + b * args.moments.stride[0] + h * args.moments.stride[1];
    const int64_t moment = args.moments.stride[2];
    const auto pair = [&](int i) {
      return static_cast<double>(moments[i * moment]) + static_cast<double>(moments[(i + 1) * moment]);
    };
    Edge edge{static_cast<double>(moments[4 * moment]), pair(0), pair(2)};
    for (int64_t t = 0; t < tokens; ++t) {
      const auto number = [&](const View& x) {
        return x.given() ? static_cast<double>(element_at<T>(x, row_of(x, b, t, h))) : 0.0;
      };
      const auto row = [&](const View& x, int64_t n, T* to) {
        with_type<T>(x, row_of(x, b, t, h), [&](const auto* p) { load_tile<T>(p, 0, 1, static_cast<int>(n), to, n); });
      };
      row(args.q, K, q);
      row(args.k, K, k);
      row(args.v, width, v);
      const double s = number(args.s), s1 = number(args.s1), sh = number(args.sh), s0 = number(args.s0);
      Edge next{edge.n + 1, s, s};
      if (edge.n > 0) {
        const double nu = edge.n / next.n, top = edge.ell > s ? edge.ell : s;
        next.ell = top + __builtin_log(nu * __builtin_exp(edge.ell - top) + __builtin_exp(s - top) / next.n);
        next.mean = edge.mean + (s - edge.mean) / next.n;
      }
      const Step step(edge, next);
      const Factor<T> lam(step.lam), nu(step.nu);
      const T gap = static_cast<T>(step.gap), drift = static_cast<T>(step.nu * step.shift);
      const T wp = static_cast<T>(__builtin_expm1(s - next.ell) / next.n), w1 = static_cast<T>((s - next.mean) / next.n);
      const T w0 = static_cast<T>(1 / next.n);
      const V cp = X::broadcast(static_cast<T>(sh)), c1 = X::broadcast(static_cast<T>(s1 - sh)),
              c0 = X::broadcast(static_cast<T>(s0));
      for (int64_t j = 0; j < ldv; j += X::W) X::store(o + j, X::zero());
      for (int64_t i = 0; i < K; ++i) {
        T* const first =
            static_cast<T*>(args.state.data) + b * args.state.stride[0] + h * args.state.stride[1] + i * args.state.stride[3];
        T *const r1 = first + args.state.stride[2], *const rp = r1 + args.state.stride[2];
        const V ki = X::broadcast(k[i]), qi = X::broadcast(q[i]);
        for (int j = 0; j < width; j += X::W) {
          const int n = width - j;
          const V kv = ki * X::load(v + j), x0 = X::load(first + j, n), x1 = X::load(r1 + j, n), xp = X::load(rp + j, n);
          const V n0 = fma(X::broadcast(nu.keep), x0, fma(X::broadcast(nu.rest), x0, w0 * kv));
          const V n1 = fma(X::broadcast(nu.keep), x1, fma(X::broadcast(nu.rest), x1, fma(X::broadcast(drift), x0, w1 * kv)));
          const V np = fma(X::broadcast(lam.keep), xp, fma(X::broadcast(lam.rest), xp, fma(X::broadcast(gap), x0, wp * kv)));
          X::store(first + j, n0, n);
          X::store(r1 + j, n1, n);
          X::store(rp + j, np, n);
          X::store(o + j, fma(qi, fma(cp, np, fma(c1, n1, c0 * n0)), X::load(o + j)));
        }
      }
      with_type<T>(out.out, row_of(out.out, b, t, h), [&](auto* p) { store_tile(o, ldv, 1, width, p, 0); });
      edge = next;
    }
    const Two<T> ell(edge.ell), mean(edge.mean);
    const T results[5] = {ell.hi, ell.lo, mean.hi, mean.lo, static_cast<T>(edge.n)};
    for (int i = 0; i < 5; ++i) moments[i * moment] = results[i];
  });
}

}  // namespace

int64_t zeros_decode_workspace(const ZerosDecodeArgs& args, Pass, int workers) {
  const bool wide = args.q.dtype == Dtype::f64;
  if (args.q.size[1] > kPrompt) {
    const ZerosArgs tokens = tokens_of(args);
    const int64_t count = args.q.size[1];
    return workers *
           (wide ? Scratch<double>(tokens).cut_alone(nullptr, count) : Scratch<float>(tokens).cut_alone(nullptr, count));
  }
  const int64_t elements = wide ? round_up<double>(args.q.size[3]) + round_up<double>(args.v.size[3])
                                : round_up<float>(args.q.size[3]) + round_up<float>(args.v.size[3]);
  return workers * 2 * elements * (wide ? 8 : 4);
}
void zeros_decode_forward(const ZerosDecodeArgs& args, const ZerosDecodeOut& out, const Launch& launch) {
  if (args.q.size[1] > kPrompt) {
    if (args.q.dtype == Dtype::f64) return prompt<double>(args, out, launch);
    return prompt<float>(args, out, launch);
  }
  if (args.q.dtype == Dtype::f64) return decode<double>(args, out, launch);
  decode<float>(args, out, launch);
}

}  // namespace linnet::LINNET_ISA
