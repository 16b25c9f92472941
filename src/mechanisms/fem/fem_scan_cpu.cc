// fem_read with the priors linear, gated, aft and ssm, for one instruction set: a walk over a head's tokens, channels in the
// lanes, all in double, so that sums that only grow lose nothing and exp(beta v) needs one fixed shift M per channel.
//
//   linear, gated  S = exp(a) S + phi(k) [vc | exp(beta vc - M) | 1]^T,   [mu den | z den | sum w] = phi(q) S, in chunks of 32
//   aft            sums of exp(k - m) times vc, exp(beta vc - M) and 1, m the running maximum of k
//   ssm            h = exp(delta A) h + delta B u, y = C h + D u on the same three u
//
// Backward: the walk again, states kept at every kSegment tokens, then backward in time through the segments.
#include "fem_rows.h"
#include "simd/gemm.h"
#include "simd/tile.h"

namespace linnet::LINNET_ISA {
namespace {

using X = Vec<double>;
using Vector = X::V;
constexpr int64_t kSegment = 64;  // aft and ssm
constexpr int kStep = 32;         // linear and gated: tokens of a chunk
constexpr double kSmallest = 0x1p-1022;

LINNET_INLINE Vector at(const double* p) { return X::load(p); }
LINNET_INLINE Vector all(double x) { return X::broadcast(x); }

struct Sizes {
  int64_t B, T, H, V, K, R, ldv, ldk, ldj;  // ldj: columns [vc | exp | 1] of a state
  bool linear, aft, ssm;
  explicit Sizes(const FemReadArgs& args) {
    B = args.v.size[0];
    T = args.v.size[1];
    H = args.v.size[2];
    V = args.v.size[3];
    K = args.q.given() ? args.q.size[3] : 0;
    R = args.A.given() ? args.A.size[2] : 0;
    ldv = round_up<double>(V);
    ldk = round_up<double>(K);
    ldj = 2 * ldv + X::W;
    aft = args.prior == FemPrior::aft;
    ssm = args.prior == FemPrior::ssm;
    linear = !aft && !ssm;
  }
  int64_t segments() const { return (T + kSegment - 1) / kSegment; }
  int64_t state() const { return linear ? K * ldj : ssm ? 3 * R * ldv : 0; }
};

// Scratch of one worker.
struct Scratch {
  double *beta, *limit, *shift, *v, *vc, *u, *mu, *free, *dmu, *dfree, *gate, *q, *k, *row, *g, *dbeta;
  double *Q, *Kf, *U, *O, *dx, *P, *W, *E, *turned, *c, *ones, *da;  // linear, gated: rows of a chunk
  double *sums, *state, *adjoint, *kept, *segment, *rows, *bc, *rates, *diagonal, *y, *slopes, *lanes;
  FemGates<double> gates;
  int64_t bytes;
  Scratch(char* base, const Sizes& s, Pass pass) : Scratch(Arena(base), s, pass) {}

 private:
  Scratch(Arena arena, const Sizes& s, Pass pass) : gates(arena, s.V) {
    const bool backward = pass == Pass::backward;
    for (double** p : {&beta, &limit, &shift, &v, &vc, &mu, &free, &dmu, &dfree, &gate, &dbeta}) *p = arena.take<double>(s.ldv);
    for (double** p : {&u, &row, &g}) *p = arena.take<double>(s.ldj);
    for (double** p : {&q, &k}) *p = arena.take<double>(s.ldk > s.ldv ? s.ldk : s.ldv);
    sums = arena.take<double>(4 * s.ldv);
    state = arena.take<double>(s.state());
    adjoint = arena.take<double>(backward ? s.state() : 0);
    kept = arena.take<double>(backward ? (s.linear ? (s.T + kStep - 1) / kStep : s.segments()) * s.state() : 0);
    segment = arena.take<double>(backward && !s.linear ? (kSegment + 1) * s.state() : 0);
    const int64_t chunk = s.linear ? kStep : 0;
    for (double** p : {&Q, &Kf, &dx}) *p = arena.take<double>(chunk * s.ldk);
    for (double** p : {&U, &O}) *p = arena.take<double>(chunk * s.ldj);
    for (double** p : {&P, &W, &E}) *p = arena.take<double>(chunk * chunk);
    for (double** p : {&c, &ones}) *p = arena.take<double>(chunk);
    turned = arena.take<double>(s.linear ? larger(s.ldj, s.ldk) * larger(kStep, s.ldk) : 0);
    da = arena.take<double>(backward && s.linear ? s.T : 0);
    rows = arena.take<double>(backward ? s.T * (s.linear ? s.ldj : s.aft ? 5 * s.ldv : 3 * s.ldv) : 0);
    bc = arena.take<double>(2 * s.R);
    rates = arena.take<double>(s.R * s.ldv);
    diagonal = arena.take<double>(s.ldv);
    y = arena.take<double>(3 * s.ldv);
    slopes = arena.take<double>((s.R + 1) * s.ldv);
    lanes = arena.take<double>(2 * s.R * X::W);
    bytes = arena.used();
  }
};

// Gradients that several units add to, per unit: added up in order at the end.
struct Partial {
  double *dbeta, *dA, *dD, *dB, *dC;  // [B, H, V], [B, H, V, R], [B, H, V], [B, H, T, R] twice
  char* workers;
  int64_t worker_bytes, bytes;
  Partial(char* base, const Sizes& s, Pass pass, int worker_count) {
    Arena arena(base);
    const bool backward = pass == Pass::backward;
    const int64_t heads = backward ? s.B * s.H : 0, ssm = s.ssm ? heads : 0;
    dbeta = arena.take<double>(heads * s.V);
    dA = arena.take<double>(ssm * s.V * s.R);
    dD = arena.take<double>(ssm * s.V);
    dB = arena.take<double>(ssm * s.T * s.R);
    dC = arena.take<double>(ssm * s.T * s.R);
    worker_bytes = Scratch(nullptr, s, pass).bytes;
    workers = arena.take<char>(worker_bytes * worker_count);
    bytes = arena.used();
  }
};

double number(const View& x, int64_t offset) { return load_f64(x.data, x.dtype, offset); }

struct Unit {
  const FemReadArgs& args;
  const Sizes& s;
  const Scratch& m;
  int64_t b, h;

  bool present(int64_t t) const { return fem_present(args.key_mask, b, t); }

  // beta, the bound on |v|, and M, the largest beta vc.
  void channels() const {
    for (int64_t j = 0; j < s.ldv; ++j) {
      m.beta[j] = j < s.V ? number(args.beta, h * args.beta.stride[0] + j * args.beta.stride[1]) : 1;
      m.limit[j] = fem_cap(args.cap) / m.beta[j];
      m.shift[j] = -kInfinity<double>;
      m.dbeta[j] = 0;
    }
    for (int i = 0; s.linear && i < kStep; ++i) m.ones[i] = 1;
    for (int64_t t = 0; t < s.T; ++t) {
      if (!present(t)) continue;
      values(t);
      for (int64_t c = 0; c < s.ldv; c += X::W) {  // an infinite value leaves the others their shift
        const Vector e = at(m.beta + c) * at(m.vc + c), before = at(m.shift + c);
        X::store(m.shift + c, select(lt(e, all(kInfinity<double>)), max(e, before), before));
      }
    }
    for (int64_t j = 0; j < s.ldv; ++j) m.shift[j] = m.shift[j] == -kInfinity<double> ? 0 : m.shift[j];
  }
  void values(int64_t t) const {
    fem_load(args.v, fem_row(args.v, b, t, h), s.V, m.v);
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector limit = at(m.limit + c);
      X::store(m.vc + c, max(-limit, min(limit, at(m.v + c))));
    }
  }
  // u = [vc | exp(beta vc - M) | 1] of a key that is there, zeros otherwise.
  bool inputs(int64_t t) const {
    const bool there = present(t);
    if (there) values(t);
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const auto inside = X::prefix(static_cast<int>(there ? s.V - c : 0));
      X::store(m.u + c, select(inside, at(m.vc + c), X::zero()));
      X::store(m.u + s.ldv + c, select(inside, exp(at(m.beta + c) * at(m.vc + c) - at(m.shift + c)), X::zero()));
    }
    X::store(m.u + 2 * s.ldv, select(X::prefix(1), all(there ? 1 : 0), X::zero()));
    return there;
  }
  // F from z relative to M.
  Vector energy(int64_t c, Vector z) const { return (at(m.shift + c) + log(max(z, all(kSmallest)))) / at(m.beta + c); }

  double denominator(double sum, double* slope) const {
    const FemDenominator rule = fem_denominator(args.prior, args.denominator);
    const bool bound = rule == FemDenominator::max && sum < 1e-6;
    *slope = bound ? 0 : 1;
    return bound ? 1e-6 : rule == FemDenominator::plus ? sum + 1e-5 : sum;
  }
  // dv of key t from the gradients of vc, `plain` through the mean and `tilted` through the free energy; its part of dbeta.
  void finish_value(int64_t t, const double* plain, const double* tilted, const View& dv) const {
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector whole = at(plain + c) + at(tilted + c), clipped = at(m.vc + c), beta = at(m.beta + c);
      const auto inside = le(abs(at(m.v + c)), at(m.limit + c));
      const Vector more = at(tilted + c) * clipped - select(inside, X::zero(), whole * clipped);
      X::store(m.dbeta + c, at(m.dbeta + c) + more / beta);
      X::store(m.row + c, select(inside, whole, X::zero()));
    }
    if (dv.given()) fem_store(dv, fem_row(dv, b, t, h), s.V, m.row);
  }
  void no_value(int64_t t, const View& dv) const {
    for (int64_t c = 0; c < s.ldv; ++c) m.row[c] = 0;
    if (dv.given()) fem_store(dv, fem_row(dv, b, t, h), s.V, m.row);
  }
  void lose_free(int64_t) const {  // dbeta -= dF F / beta
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      X::store(m.dbeta + c, at(m.dbeta + c) - at(m.dfree + c) * at(m.free + c) / at(m.beta + c));
    }
  }
  void clear(double* x, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) x[i] = 0;
  }
  void clear_padding() const {  // the gates fill V channels; the vectors behind them must be harmless
    for (int64_t j = s.V; j < s.ldv; ++j) m.dmu[j] = m.dfree[j] = 0;
  }

  // ---- linear and gated: state [K, ldj]

  void features(const View& x, int64_t t, double* to) const {
    fem_load(x, fem_row(x, b, t, h), s.K, to);
    for (int64_t c = 0; c < s.K; ++c) to[c] = (to[c] > 0 ? to[c] : 0) + args.feature_eps;
  }
  double decay(int64_t t) const {
    return args.a.given() ? __builtin_exp(number(args.a, b * args.a.stride[0] + t * args.a.stride[1] + h * args.a.stride[2]))
                          : 1;
  }
  // Chunk [first, first + n): phi(q), phi(k) and u of its tokens; cumulative decays. Keys that are not there are rows of zeros.
  //
  //   O = c Q S + (E o Q K^T) U,   S' = c_last S + (e K)^T U        c_i: decays up to row i; E_ij: those of j+1 .. i, e =
  //   E_last
  void load_chunk(int64_t first, int n) const {
    for (int i = 0; i < n; ++i) {
      const int64_t t = first + i;
      const double a = decay(t);
      features(args.q, t, m.Q + i * s.ldk);
      if (inputs(t)) {
        features(args.k, t, m.Kf + i * s.ldk);
      } else {
        clear(m.Kf + i * s.ldk, s.ldk);
      }
      __builtin_memcpy(m.U + i * s.ldj, m.u, static_cast<size_t>(s.ldj) * 8);
      m.c[i] = a * (i == 0 ? 1 : m.c[i - 1]);
      for (int j = 0; j < kStep; ++j) m.E[i * kStep + j] = j < i ? a * m.E[(i - 1) * kStep + j] : j == i ? 1 : 0;
    }
  }
  const double* ends(int n) const { return m.E + (n - 1) * kStep; }  // e
  // to = E o (A B^T), rows of A and B of `width`, lower triangle.
  void lower(int n, const double* A, const double* B, int64_t ld, int width, double* to) const {
    load_tile_transposed<double>(B, ld, n, width, m.turned, kStep);
    gemm<double>(n, n, width, as_is(A, ld), m.turned, kStep, to, kStep, Store{});
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < kStep; ++j) to[i * kStep + j] = j <= i ? to[i * kStep + j] * m.E[i * kStep + j] : 0;
    }
  }
  void read_chunk(int n, const double* state) const {  // m.O
    const int K = static_cast<int>(s.K), J = static_cast<int>(s.ldj);
    if (!args.causal) return gemm<double>(n, J, K, as_is(m.Q, s.ldk), state, s.ldj, m.O, s.ldj, Store{});
    gemm<double>(n, J, K, as_is(m.Q, s.ldk), state, s.ldj, m.O, s.ldj, RowScale<double>{m.c});
    lower(n, m.Q, m.Kf, s.ldk, K, m.P);
    for (int i = 0; i < n; ++i) {  // to the diagonal alone: a value that is not a number reaches no earlier row
      gemm<double>(1, J, i + 1, as_is(m.P + i * kStep, kStep), m.U, s.ldj, m.O + i * s.ldj, s.ldj, Add{});
    }
  }
  // state = last state + rows^T values, the rows times `factor`
  void write_chunk(int n, double last, double* rows, const double* factor, const double* values, double* state) const {
    for (int64_t i = 0; last != 1 && i < s.state(); i += X::W) X::store(state + i, at(state + i) * all(last));
    for (int i = 0; i < n; ++i) {
      for (int64_t c = 0; factor[i] != 1 && c < s.ldk; c += X::W)
        X::store(rows + i * s.ldk + c, at(rows + i * s.ldk + c) * all(factor[i]));
    }
    gemm<double>(static_cast<int>(s.K), static_cast<int>(s.ldj), n, transposed(rows, s.ldk), values, s.ldj, state, s.ldj,
                 Add{});
  }
  void write_keys(int n) const {
    write_chunk(n, args.causal ? m.c[n - 1] : 1, m.Kf, args.causal ? ends(n) : m.ones, m.U, m.state);
  }
  // mu and F of row = phi(q) S; returns the denominator, 0 where nothing is seen.
  double means(const double* row, double* slope) const {
    const double total = row[2 * s.ldv], den = total == 0 ? 0 : denominator(total, slope);
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector inverse = all(den == 0 ? 0 : 1 / den);
      X::store(m.mu + c, at(row + c) * inverse);
      X::store(m.free + c, den == 0 ? X::zero() : energy(c, at(row + s.ldv + c) * inverse));
    }
    return den;
  }
  // Calls f(first token, tokens) for every chunk, forward in time.
  template <class F>
  void each_chunk(const F& f) const {
    for (int64_t first = 0; first < s.T; first += kStep) {
      const int n = static_cast<int>(smaller(kStep, s.T - first));
      load_chunk(first, n);
      f(first, n);
    }
  }
  void linear_forward(const FemReadOut& out) const {
    clear(m.state, s.state());
    if (!args.causal) each_chunk([&](int64_t, int n) { write_keys(n); });
    each_chunk([&](int64_t first, int n) {
      read_chunk(n, m.state);
      for (int i = 0; i < n; ++i) {
        double slope;
        means(m.O + i * s.ldj, &slope);
        if (out.norm.given()) {
          store_f64(out.norm.data, out.norm.dtype, fem_row(out.norm, b, first + i, h), m.O[i * s.ldj + 2 * s.ldv]);
        }
        m.gates.forward(args, out, b, first + i, h, s.V, m.mu, m.free);
      }
      if (args.causal) write_keys(n);
    });
  }
  // The gradient of row = phi(q) S: [dmu / den | d2 / den | -(dmu mu + dF / beta) slope / den].
  void row_gradient(int64_t t, const double* row, const FemReadGrads& grads, double* g) const {
    double slope = 0;
    const double den = means(row, &slope);
    m.gates.backward(args, grads, b, t, h, s.V, m.mu, m.free, m.dmu, m.dfree);
    clear_padding();
    if (den == 0) return clear(g, s.ldj);
    Vector through = X::zero();
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector dfree = at(m.dfree + c) / at(m.beta + c), z = max(at(row + s.ldv + c), all(kSmallest));
      X::store(g + c, at(m.dmu + c) / all(den));
      X::store(g + s.ldv + c, select(X::prefix(static_cast<int>(s.V - c)), dfree / z, X::zero()));
      through = through + at(m.dmu + c) * at(m.mu + c) + dfree;
    }
    clear(g + 2 * s.ldv, X::W);
    g[2 * s.ldv] = -sum(through) * slope / den;
    lose_free(t);
  }
  // Rows of gradients of phi(x), through phi, to dx.
  void store_inputs(const View& x, const View& dx, int64_t first, int n, bool keys) const {
    for (int i = 0; dx.given() && i < n; ++i) {
      const bool there = !keys || present(first + i);
      if (there) fem_load(x, fem_row(x, b, first + i, h), s.K, m.q);
      for (int64_t c = 0; c < s.K; ++c) m.k[c] = there && m.q[c] > 0 ? m.dx[i * s.ldk + c] : 0;
      fem_store(dx, fem_row(dx, b, first + i, h), s.K, m.k);
    }
  }
  // dx = factor (A state^T) for rows of A [n, ldj]
  void through_state(int n, const double* A, const double* state, const double* factor) const {
    load_tile_transposed<double>(state, s.ldj, static_cast<int>(s.K), static_cast<int>(s.ldj), m.turned, s.ldk);
    gemm<double>(n, static_cast<int>(s.K), static_cast<int>(s.ldj), as_is(A, s.ldj), m.turned, s.ldk, m.dx, s.ldk,
                 RowScale<double>{factor});
  }
  // Gradients of the rows of a chunk in G, dq, and what the chunk's own pairs and its rows on older keys give to da:
  // da_l = sum over t >= l > i of w_ti dw_ti.
  void queries_back(int64_t first, int n, const FemReadGrads& grads) const {
    const int K = static_cast<int>(s.K);
    double* const G = m.rows + first * s.ldj;
    read_chunk(n, m.state);
    for (int i = 0; i < n; ++i) row_gradient(first + i, m.O + i * s.ldj, grads, G + i * s.ldj);
    through_state(n, G, m.state, args.causal ? m.c : m.ones);
    double* const da = m.da + first;
    double older = 0;
    for (int i = n - 1; args.causal && i >= 0; --i) {
      for (int64_t c = 0; c < s.K; ++c) older += m.Q[i * s.ldk + c] * m.dx[i * s.ldk + c];
      da[i] = older;
    }
    if (args.causal) {
      lower(n, G, m.U, s.ldj, static_cast<int>(s.ldj), m.W);
      gemm<double>(n, K, n, as_is(m.W, kStep), m.Kf, s.ldk, m.dx, s.ldk, Add{});
      for (int i = 0; i < n; ++i) {
        double run = 0;
        for (int l = 0; l <= i; ++l) {
          da[l] += run;
          // both triangles carry E: once is enough
          run += m.E[i * kStep + l] == 0 ? 0 : m.P[i * kStep + l] * m.W[i * kStep + l] / m.E[i * kStep + l];
        }
      }
    }
    store_inputs(args.q, grads.dq, first, n, false);
  }
  // dk, dv of a chunk from its own rows and, in m.adjoint, all later ones; then its rows join them.
  void keys_back(int64_t first, int n, const double* before, const FemReadGrads& grads) const {
    const int K = static_cast<int>(s.K), J = static_cast<int>(s.ldj);
    const double* const G = m.rows + first * s.ldj;
    const double* const e = args.causal ? ends(n) : m.ones;
    through_state(n, m.U, m.adjoint, e);
    if (grads.da.given()) {
      double both = 0, run = 0;  // older keys with later rows, and this chunk's older keys with them
      for (int64_t i = 0; i < s.state(); ++i) both += before[i] * m.adjoint[i];
      both *= m.c[n - 1];
      for (int l = 0; l < n; ++l) {
        const double a = m.da[first + l] + both + run;
        store_f64(grads.da.data, grads.da.dtype, fem_row(grads.da, b, first + l, h), decay(first + l) == 0 ? 0 : a);
        for (int64_t c = 0; c < s.K; ++c) run += m.Kf[l * s.ldk + c] * m.dx[l * s.ldk + c];
      }
    }
    gemm<double>(n, J, K, as_is(m.Kf, s.ldk), m.adjoint, s.ldj, m.O, s.ldj, RowScale<double>{e});
    if (args.causal) {
      lower(n, G, m.U, s.ldj, J, m.W);
      gemm<double>(n, K, n, transposed(m.W, kStep), m.Q, s.ldk, m.dx, s.ldk, Add{});
      lower(n, m.Q, m.Kf, s.ldk, K, m.P);
      gemm<double>(n, J, n, transposed(m.P, kStep), G, s.ldj, m.O, s.ldj, Add{});
    }
    store_inputs(args.k, grads.dk, first, n, true);
    for (int i = 0; i < n; ++i) {
      if (!present(first + i)) {
        no_value(first + i, grads.dv);
        continue;
      }
      double* const du = m.O + i * s.ldj;
      values(first + i);
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        X::store(du + s.ldv + c, at(m.beta + c) * at(m.U + i * s.ldj + s.ldv + c) * at(du + s.ldv + c));
      }
      finish_value(first + i, du, du + s.ldv, grads.dv);
    }
    if (args.causal) write_chunk(n, m.c[n - 1], m.Q, m.c, G, m.adjoint);
  }
  void linear_backward(const FemReadGrads& grads) const {
    clear(m.state, s.state());
    clear(m.adjoint, s.state());
    if (!args.causal) {
      each_chunk([&](int64_t, int n) { write_keys(n); });
      each_chunk([&](int64_t first, int n) {
        queries_back(first, n, grads);
        write_chunk(n, 1, m.Q, m.ones, m.rows + first * s.ldj, m.adjoint);
      });
      return each_chunk([&](int64_t first, int n) { keys_back(first, n, nullptr, grads); });
    }
    each_chunk([&](int64_t first, int n) {
      __builtin_memcpy(m.kept + first / kStep * s.state(), m.state, static_cast<size_t>(s.state()) * 8);
      queries_back(first, n, grads);
      write_keys(n);
    });
    for (int64_t first = (s.T - 1) / kStep * kStep; first >= 0; first -= kStep) {
      const int n = static_cast<int>(smaller(kStep, s.T - first));
      load_chunk(first, n);
      keys_back(first, n, m.kept + first / kStep * s.state(), grads);
    }
  }

  // ---- aft: sums [E | S | Z | m] of ldv each

  void load_gate(int64_t t) const {  // gate = x sqrt(V) / max(|x|, 1e-5), x = softplus(q) + 1e-6; x stays in m.q
    fem_load(args.q, fem_row(args.q, b, t, h), s.V, m.q);
    Vector squares = X::zero();
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector x = select(X::prefix(static_cast<int>(s.V - c)), softplus(at(m.q + c)) + all(1e-6), X::zero());
      X::store(m.q + c, x);
      squares = fma(x, x, squares);
    }
    const double length = __builtin_sqrt(sum(squares)), factor = gate_factor(length);
    for (int64_t c = 0; c < s.ldv; c += X::W) X::store(m.gate + c, at(m.q + c) * all(factor));
  }
  double gate_factor(double length) const { return __builtin_sqrt(static_cast<double>(s.V)) / (length > 1e-5 ? length : 1e-5); }
  void add(int64_t t) const {
    if (!inputs(t)) return;
    fem_load(args.k, fem_row(args.k, b, t, h), s.V, m.k);
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      double *const e = m.sums + c, *const sum_of = e + s.ldv, *const z = sum_of + s.ldv, *const top = z + s.ldv;
      const Vector k = at(m.k + c), m0 = at(top), m1 = max(k, m0), old = exp(m0 - m1), w = exp(k - m1);
      X::store(top, m1);
      X::store(e, fma(at(e), old, w));
      X::store(sum_of, fma(at(sum_of), old, w * at(m.u + c)));
      X::store(z, fma(at(z), old, w * at(m.u + s.ldv + c)));
    }
  }
  bool mix() const {  // mu and F of the row whose gate is loaded
    const bool empty = m.sums[0] == 0;
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector e = at(m.sums + c), share = at(m.gate + c) / e;
      X::store(m.mu + c, empty ? X::zero() : at(m.sums + s.ldv + c) * share);
      X::store(m.free + c, empty ? X::zero() : energy(c, at(m.sums + 2 * s.ldv + c) * share));
    }
    return !empty;
  }
  void begin_aft() const {
    clear(m.sums, 3 * s.ldv);
    for (int64_t c = 0; c < s.ldv; ++c) m.sums[3 * s.ldv + c] = kLowest<double>;
    for (int64_t t = 0; !args.causal && t < s.T; ++t) add(t);
  }
  void aft_forward(const FemReadOut& out) const {
    begin_aft();
    for (int64_t t = 0; t < s.T; ++t) {
      if (args.causal) add(t);
      load_gate(t);
      mix();
      m.gates.forward(args, out, b, t, h, s.V, m.mu, m.free);
    }
  }
  // Rows kept per token: log sum exp(k), log sum exp(k + beta vc - M), gate dmu, dF, e = dmu mu + dF / beta.
  void aft_backward(const FemReadGrads& grads) const {
    begin_aft();
    for (int64_t t = 0; t < s.T; ++t) {
      if (args.causal) add(t);
      load_gate(t);
      const bool some = mix();
      m.gates.backward(args, grads, b, t, h, s.V, m.mu, m.free, m.dmu, m.dfree);
      clear_padding();
      double* const row = m.rows + t * 5 * s.ldv;
      Vector squares = X::zero(), mixed = X::zero();
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        const Vector dmu = some ? at(m.dmu + c) : X::zero(), dfree = some ? at(m.dfree + c) : X::zero(), x = at(m.q + c);
        const Vector e = fma(dmu, at(m.mu + c), dfree / at(m.beta + c)), top = at(m.sums + 3 * s.ldv + c);
        X::store(row + c, top + log(at(m.sums + c)));
        X::store(row + s.ldv + c, top + log(max(at(m.sums + 2 * s.ldv + c), all(kSmallest))));
        X::store(row + 2 * s.ldv + c, at(m.gate + c) * dmu);
        X::store(row + 3 * s.ldv + c, dfree);
        X::store(row + 4 * s.ldv + c, e);
        squares = fma(x, x, squares);
        const Vector dgate = select(gt(x, X::zero()), e / at(m.gate + c), X::zero());
        mixed = fma(dgate, x, mixed);
        X::store(m.row + c, dgate);
      }
      if (some) lose_free(t);
      if (!grads.dq.given()) continue;
      // dx = sqrt(V) / |x| (dgate - x <dgate, x> / |x|^2), dq = dx sigmoid(q); 1 - exp(-softplus(q)) = sigmoid(q)
      const double square = sum(squares), length = __builtin_sqrt(square), factor = gate_factor(length);
      const double less = length > 1e-5 ? sum(mixed) / square : 0;
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        const Vector x = at(m.q + c), dx = all(factor) * (at(m.row + c) - x * all(less));
        X::store(m.row + c, dx * -expm1(all(1e-6) - x));
      }
      fem_store(grads.dq, fem_row(grads.dq, b, t, h), s.V, m.row);
    }
    // Sums over the rows t >= i, each relative to the row where they stand: U = U exp(L_i - L_{i+1}) + row i.
    double *const mean = m.sums, *const tilted = mean + s.ldv, *const energy_of = tilted + s.ldv;
    clear(m.sums, 3 * s.ldv);
    const auto gather_row = [&](int64_t t, bool first) {
      const double *const row = m.rows + t * 5 * s.ldv, *const later = row + 5 * s.ldv;
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        const bool moved = args.causal && !first;
        const Vector f1 = moved ? exp(at(row + c) - at(later + c)) : all(1);
        const Vector f2 = moved ? exp(at(row + s.ldv + c) - at(later + s.ldv + c)) : all(1);
        X::store(mean + c, fma(at(mean + c), f1, at(row + 2 * s.ldv + c)));
        X::store(tilted + c, fma(at(tilted + c), f2, at(row + 3 * s.ldv + c)));
        X::store(energy_of + c, fma(at(energy_of + c), f1, at(row + 4 * s.ldv + c)));
      }
    };
    for (int64_t t = s.T - 1; !args.causal && t >= 0; --t) gather_row(t, true);
    for (int64_t t = s.T - 1; t >= 0; --t) {
      if (args.causal) gather_row(t, t == s.T - 1);
      if (!inputs(t)) {
        no_value(t, grads.dv);
        if (grads.dk.given()) fem_store(grads.dk, fem_row(grads.dk, b, t, h), s.V, m.row);
        continue;
      }
      fem_load(args.k, fem_row(args.k, b, t, h), s.V, m.k);
      const double* const row = m.rows + t * 5 * s.ldv;
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        const Vector k = at(m.k + c), beta = at(m.beta + c), vc = at(m.vc + c), p = exp(k - at(row + c));
        const Vector plain = p * at(mean + c);
        const Vector more = exp(k + (beta * vc - at(m.shift + c)) - at(row + s.ldv + c)) * at(tilted + c);
        X::store(m.g + c, plain);
        X::store(m.g + s.ldv + c, more);
        X::store(m.dmu + c, fma(plain, vc, more / beta) - p * at(energy_of + c));
      }
      if (grads.dk.given()) fem_store(grads.dk, fem_row(grads.dk, b, t, h), s.V, m.dmu);
      finish_value(t, m.g, m.g + s.ldv, grads.dv);
    }
  }

  // ---- ssm: state [3, R, ldv], one slice for each u

  void begin_ssm() const {
    clear(m.state, s.state());
    for (int64_t r = 0; r < s.R; ++r) {
      for (int64_t j = 0; j < s.ldv; ++j) {
        const int64_t place = h * args.A.stride[0] + j * args.A.stride[1] + r * args.A.stride[2];
        m.rates[r * s.ldv + j] = j < s.V ? number(args.A, place) : 0;
      }
    }
    for (int64_t j = 0; j < s.ldv; ++j) {
      m.diagonal[j] = j < s.V ? number(args.D, h * args.D.stride[0] + j * args.D.stride[1]) : 0;
    }
  }
  bool load_step(int64_t t) const {  // delta in m.k, B and C in m.bc, u
    fem_load(args.delta, fem_row(args.delta, b, t, h), s.V, m.k);
    for (int64_t r = 0; r < s.R; ++r) {
      m.bc[r] = number(args.Bm, b * args.Bm.stride[0] + t * args.Bm.stride[1] + r * args.Bm.stride[2]);
      m.bc[s.R + r] = number(args.Cm, b * args.Cm.stride[0] + t * args.Cm.stride[1] + r * args.Cm.stride[2]);
    }
    return inputs(t);
  }
  Vector input(int n, int64_t c) const { return n < 2 ? at(m.u + n * s.ldv + c) : all(m.u[2 * s.ldv]); }
  void step(int64_t t, double* state) const {  // h and y [3, ldv]
    load_step(t);
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector delta = at(m.k + c);
      for (int n = 0; n < 3; ++n) X::store(m.y + n * s.ldv + c, at(m.diagonal + c) * input(n, c));
      for (int64_t r = 0; r < s.R; ++r) {
        const Vector f = exp(delta * at(m.rates + r * s.ldv + c)), more = delta * all(m.bc[r]), read_of = all(m.bc[s.R + r]);
        for (int n = 0; n < 3; ++n) {
          double *const x = state + (n * s.R + r) * s.ldv + c, *const y = m.y + n * s.ldv + c;
          const Vector next = fma(f, at(x), more * input(n, c));
          X::store(x, next);
          X::store(y, fma(read_of, next, at(y)));
        }
      }
    }
  }
  // mu and F from y; the denominators go to m.g, 0 where nothing is seen, their slopes to m.g + ldv.
  void mix_ssm() const {
    const FemDenominator rule = fem_denominator(args.prior, args.denominator);
    for (int64_t c = 0; c < s.ldv; c += X::W) {
      const Vector weights = at(m.y + 2 * s.ldv + c);
      const auto none = eq(weights, X::zero()), bound = lt(weights, all(rule == FemDenominator::max ? 1e-6 : -1));
      const Vector den = rule == FemDenominator::plus ? weights + all(1e-5) : select(bound, all(1e-6), weights);
      X::store(m.mu + c, select(none, X::zero(), at(m.y + c) / den));
      X::store(m.free + c, select(none, X::zero(), energy(c, at(m.y + s.ldv + c) / den)));
      X::store(m.g + c, select(none, X::zero(), den));
      X::store(m.g + s.ldv + c, select(bound, X::zero(), all(1)));
    }
  }
  void ssm_forward(const FemReadOut& out) const {
    begin_ssm();
    for (int64_t t = 0; t < s.T; ++t) {
      step(t, m.state);
      mix_ssm();
      m.gates.forward(args, out, b, t, h, s.V, m.mu, m.free);
    }
  }
  void ssm_backward(const FemReadGrads& grads, double* dA, double* dD, double* dB, double* dC) const {
    begin_ssm();
    const size_t bytes = static_cast<size_t>(s.state()) * 8;
    for (int64_t t = 0; t < s.T; ++t) {
      if (t % kSegment == 0) __builtin_memcpy(m.kept + t / kSegment * s.state(), m.state, bytes);
      step(t, m.state);
      mix_ssm();
      m.gates.backward(args, grads, b, t, h, s.V, m.mu, m.free, m.dmu, m.dfree);
      clear_padding();
      double* const dy = m.rows + t * 3 * s.ldv;
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        const Vector den = at(m.g + c), dmu = at(m.dmu + c), dfree = at(m.dfree + c) / at(m.beta + c);
        const auto some = gt(den, X::zero());
        const Vector z = max(at(m.y + s.ldv + c), all(kSmallest));
        X::store(dy + c, select(some, dmu / den, X::zero()));
        X::store(dy + s.ldv + c, select(some, dfree / z, X::zero()));
        X::store(dy + 2 * s.ldv + c, select(some, -fma(dmu, at(m.mu + c), dfree) * at(m.g + s.ldv + c) / den, X::zero()));
        X::store(m.dfree + c, select(some, at(m.dfree + c), X::zero()));
      }
      lose_free(t);
    }
    double *const slopes = m.slopes, *const slope = slopes + s.R * s.ldv;  // of A [R, ldv], of D [ldv]
    clear(slopes, (s.R + 1) * s.ldv);
    clear(m.adjoint, s.state());
    for (int64_t first = (s.segments() - 1) * kSegment; first >= 0; first -= kSegment) {
      const int64_t end = smaller(first + kSegment, s.T);
      __builtin_memcpy(m.segment, m.kept + first / kSegment * s.state(), bytes);
      for (int64_t t = first; t < end; ++t) {
        double* const next = m.segment + (t + 1 - first) * s.state();
        __builtin_memcpy(next, next - s.state(), bytes);
        step(t, next);
      }
      for (int64_t t = end - 1; t >= first; --t) {
        const double *const before = m.segment + (t - first) * s.state(), *const after = before + s.state();
        const double* const dy = m.rows + t * 3 * s.ldv;
        const bool there = load_step(t);
        clear(m.lanes, 2 * s.R * X::W);
        for (int64_t c = 0; c < s.ldv; c += X::W) {
          const Vector delta = at(m.k + c);
          Vector du[3], ddelta = X::zero(), through = X::zero();
          for (int n = 0; n < 3; ++n) {
            du[n] = at(m.diagonal + c) * at(dy + n * s.ldv + c);
            through = fma(input(n, c), at(dy + n * s.ldv + c), through);
          }
          X::store(slope + c, at(slope + c) + through);
          for (int64_t r = 0; r < s.R; ++r) {
            const Vector rate = at(m.rates + r * s.ldv + c), f = exp(delta * rate), B = all(m.bc[r]), C = all(m.bc[s.R + r]);
            Vector reads = X::zero(), writes = X::zero(), decays = X::zero();
            for (int n = 0; n < 3; ++n) {
              const int64_t place = (n * s.R + r) * s.ldv + c;
              const Vector d = at(dy + n * s.ldv + c), g = fma(C, d, at(m.adjoint + place)), u = input(n, c);
              reads = fma(at(after + place), d, reads);
              writes = fma(u, g, writes);
              decays = fma(g, f * at(before + place), decays);
              du[n] = fma(delta * B, g, du[n]);
              X::store(m.adjoint + place, f * g);
            }
            ddelta = fma(rate, decays, fma(B, writes, ddelta));
            double *const a = slopes + r * s.ldv + c, *const lane = m.lanes + 2 * r * X::W;
            X::store(a, fma(delta, decays, at(a)));
            X::store(lane, fma(delta, writes, at(lane)));
            X::store(lane + X::W, at(lane + X::W) + reads);
          }
          X::store(m.dmu + c, ddelta);
          X::store(m.g + c, du[0]);
          X::store(m.g + s.ldv + c, at(m.beta + c) * at(m.u + s.ldv + c) * du[1]);
        }
        for (int64_t r = 0; r < s.R; ++r) {
          dB[t * s.R + r] = sum(at(m.lanes + 2 * r * X::W));
          dC[t * s.R + r] = sum(at(m.lanes + (2 * r + 1) * X::W));
        }
        if (grads.ddelta.given()) fem_store(grads.ddelta, fem_row(grads.ddelta, b, t, h), s.V, m.dmu);
        if (there) {
          finish_value(t, m.g, m.g + s.ldv, grads.dv);
        } else {
          no_value(t, grads.dv);
        }
      }
    }
    for (int64_t j = 0; j < s.V; ++j) {
      dD[j] = slope[j];
      for (int64_t r = 0; r < s.R; ++r) dA[j * s.R + r] = slopes[r * s.ldv + j];
    }
  }
};

// Runs f(unit, its number) for every head.
template <class F>
void for_heads(const FemReadArgs& args, const Sizes& s, Pass pass, const Partial& partial, const Launch& launch, const F& f) {
  const double work = static_cast<double>(s.B * s.T * s.H) * static_cast<double>(s.state() + 40 * s.V);
  run_tasks(launch, s.T > 0 ? s.B * s.H : 0, 4 * work, [&](int64_t task, int worker) {
    const Scratch scratch(partial.workers + worker * partial.worker_bytes, s, pass);
    const Unit unit{args, s, scratch, task / s.H, task % s.H};
    unit.channels();
    f(unit, task);
  });
}

// x [outer, rest] = the sum over batch rows (or heads) of parts [outer, count, rest].
void add_up(const View& x, int64_t outer, int64_t count, int64_t rest, const double* parts) {
  for (int64_t i = 0; x.given() && i < outer * rest; ++i) {
    double sum_of = 0;
    for (int64_t n = 0; n < count; ++n) sum_of += parts[(i / rest * count + n) * rest + i % rest];
    int64_t left = i, offset = 0;
    for (int d = x.rank - 1; d >= 0; --d) {
      offset += left % x.size[d] * x.stride[d];
      left /= x.size[d];
    }
    store_f64(x.data, x.dtype, offset, sum_of);
  }
}

}  // namespace

int64_t fem_scan_workspace(const FemReadArgs& args, Pass pass, int workers) {
  return Partial(nullptr, Sizes(args), pass, workers).bytes;
}

void fem_scan_forward(const FemReadArgs& args, const FemReadOut& out, const Launch& launch) {
  const Sizes s(args);
  const Partial partial(launch.workspace, s, Pass::forward, launch.workers);
  for_heads(args, s, Pass::forward, partial, launch, [&](const Unit& unit, int64_t) {
    if (s.aft) return unit.aft_forward(out);
    if (s.ssm) return unit.ssm_forward(out);
    unit.linear_forward(out);
  });
}

void fem_scan_backward(const FemReadArgs& args, const FemReadGrads& grads, const Launch& launch) {
  const Sizes s(args);
  const Partial partial(launch.workspace, s, Pass::backward, launch.workers);
  for_heads(args, s, Pass::backward, partial, launch, [&](const Unit& unit, int64_t task) {
    if (s.aft) {
      unit.aft_backward(grads);
    } else if (s.ssm) {
      unit.ssm_backward(grads, partial.dA + task * s.V * s.R, partial.dD + task * s.V, partial.dB + task * s.T * s.R,
                        partial.dC + task * s.T * s.R);
    } else {
      unit.linear_backward(grads);
    }
    for (int64_t j = 0; j < s.V; ++j) partial.dbeta[task * s.V + j] = unit.m.dbeta[j];
  });
  const int64_t batch = s.T > 0 ? s.B : 0;
  add_up(grads.dbeta, 1, batch, s.H * s.V, partial.dbeta);
  if (!s.ssm) return;
  add_up(grads.dA, 1, batch, s.H * s.V * s.R, partial.dA);
  add_up(grads.dD, 1, batch, s.H * s.V, partial.dD);
  add_up(grads.dBm, s.B, s.H, s.T * s.R, partial.dB);
  add_up(grads.dCm, s.B, s.H, s.T * s.R, partial.dC);
}

}  // namespace linnet::LINNET_ISA
