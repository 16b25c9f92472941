// fem_read with the priors linear and gated: a state [K, ldj] of features times u, in chunks of kChunk tokens.
//
//   S = exp(a) S + phi(k) u^T,   [mu den | z den | sum w] = phi(q) S
//
// Backward: the chunks again with their states kept, then backward in time with the gradient of the state.
#pragma once

#include "fem_scan.h"

namespace linnet::LINNET_ISA {

struct FemLinear : FemHead {
  static constexpr int kChunk = 32;  // tokens
  static int64_t state_size(const FemSizes& s) { return s.K * s.ldj; }
  int64_t state_size() const { return state_size(s); }

  // Scratch of one worker.
  struct Rows {
    double *q, *k;             // one row of either
    double *Q, *Kf, *dx;       // rows of a chunk: [kChunk, ldk]
    double *U, *O;             // [kChunk, ldj]
    double *P, *W, *E;         // pairs: [kChunk, kChunk]
    double *c, *ones;          // cumulative decays
    double* turned;            // a transposed operand
    double *state, *adjoint;   // and its gradient
    double *kept, *rows, *da;  // backward: states before each chunk; of every token its row's gradient, da
    Rows(Arena& arena, const FemSizes& s, Pass pass) {
      const bool backward = pass == Pass::backward;
      for (double** p : {&q, &k}) *p = arena.take<double>(larger(s.ldk, s.ldv));
      for (double** p : {&Q, &Kf, &dx}) *p = arena.take<double>(kChunk * s.ldk);
      for (double** p : {&U, &O}) *p = arena.take<double>(kChunk * s.ldj);
      for (double** p : {&P, &W, &E}) *p = arena.take<double>(kChunk * kChunk);
      for (double** p : {&c, &ones}) *p = arena.take<double>(kChunk);
      turned = arena.take<double>(larger(s.ldj, s.ldk) * larger(kChunk, s.ldk));
      state = arena.take<double>(state_size(s));
      adjoint = arena.take<double>(backward ? state_size(s) : 0);
      kept = arena.take<double>(backward ? (s.T + kChunk - 1) / kChunk * state_size(s) : 0);
      rows = arena.take<double>(backward ? s.T * s.ldj : 0);
      da = arena.take<double>(backward ? s.T : 0);
    }
  };
  const Rows& w;

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
      features(args.q, t, w.Q + i * s.ldk);
      if (inputs(t)) {
        features(args.k, t, w.Kf + i * s.ldk);
      } else {
        clear(w.Kf + i * s.ldk, s.ldk);
      }
      __builtin_memcpy(w.U + i * s.ldj, m.u, static_cast<size_t>(s.ldj) * 8);
      w.c[i] = a * (i == 0 ? 1 : w.c[i - 1]);
      for (int j = 0; j < kChunk; ++j) w.E[i * kChunk + j] = j < i ? a * w.E[(i - 1) * kChunk + j] : j == i ? 1 : 0;
    }
  }
  const double* ends(int n) const { return w.E + (n - 1) * kChunk; }  // e
  // to = E o (A B^T), rows of A and B of `width`, lower triangle.
  void lower(int n, const double* A, const double* B, int64_t ld, int width, double* to) const {
    load_tile_transposed<double>(B, ld, n, width, w.turned, kChunk);
    gemm<double>(n, n, width, as_is(A, ld), w.turned, kChunk, to, kChunk, Store{});
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < kChunk; ++j) to[i * kChunk + j] = j <= i ? to[i * kChunk + j] * w.E[i * kChunk + j] : 0;
    }
  }
  void read_chunk(int n, const double* state) const {  // w.O
    const int K = static_cast<int>(s.K), J = static_cast<int>(s.ldj);
    if (!args.causal) return gemm<double>(n, J, K, as_is(w.Q, s.ldk), state, s.ldj, w.O, s.ldj, Store{});
    gemm<double>(n, J, K, as_is(w.Q, s.ldk), state, s.ldj, w.O, s.ldj, RowScale<double>{w.c});
    lower(n, w.Q, w.Kf, s.ldk, K, w.P);
    for (int i = 0; i < n; ++i) {  // to the diagonal alone: a value that is not a number reaches no earlier row
      gemm<double>(1, J, i + 1, as_is(w.P + i * kChunk, kChunk), w.U, s.ldj, w.O + i * s.ldj, s.ldj, Add{});
    }
  }
  // state = last state + rows^T values, the rows times `factor`
  void write_chunk(int n, double last, double* rows, const double* factor, const double* values, double* state) const {
    for (int64_t i = 0; last != 1 && i < state_size(); i += X::W) X::store(state + i, at(state + i) * all(last));
    for (int i = 0; i < n; ++i) {
      for (int64_t c = 0; factor[i] != 1 && c < s.ldk; c += X::W)
        X::store(rows + i * s.ldk + c, at(rows + i * s.ldk + c) * all(factor[i]));
    }
    gemm<double>(static_cast<int>(s.K), static_cast<int>(s.ldj), n, transposed(rows, s.ldk), values, s.ldj, state, s.ldj,
                 Add{});
  }
  void write_keys(int n) const {
    write_chunk(n, args.causal ? w.c[n - 1] : 1, w.Kf, args.causal ? ends(n) : w.ones, w.U, w.state);
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
    for (int64_t first = 0; first < s.T; first += kChunk) {
      const int n = static_cast<int>(smaller(kChunk, s.T - first));
      load_chunk(first, n);
      f(first, n);
    }
  }
  void begin() const {
    clear(w.state, state_size());
    for (int i = 0; i < kChunk; ++i) w.ones[i] = 1;
  }
  void forward(const FemReadOut& out) const {
    begin();
    if (!args.causal) each_chunk([&](int64_t, int n) { write_keys(n); });
    read(out);
  }
  // From the memory of fem_read_decode, state [K, 2 V + 1] and shift [V] of this head, which take in the tokens of the call.
  template <class T>
  void resume(T* state, int64_t row, T* shift, int64_t step, const FemReadOut& out) const {
    double *const before = m.dmu, *const less = m.dfree;  // of the backward pass elsewhere
    for (int64_t j = 0; j < s.ldv; ++j) before[j] = j < s.V ? static_cast<double>(shift[j * step]) : 0;
    channels(before);
    begin();
    for (int64_t j = 0; j < s.V; ++j) {
      shift[j * step] = static_cast<T>(m.shift[j]);
      m.shift[j] = static_cast<double>(shift[j * step]);  // as stored: memory and shift must agree
      less[j] = __builtin_exp(before[j] - m.shift[j]);
    }
    for (int64_t c = 0; c < s.K; ++c) {
      const T* const from = state + c * row;
      double* const to = w.state + c * s.ldj;
      for (int64_t j = 0; j < s.V; ++j) to[j] = static_cast<double>(from[j]);
      for (int64_t j = 0; j < s.V; ++j) to[s.ldv + j] = static_cast<double>(from[s.V + j]) * less[j];
      to[2 * s.ldv] = static_cast<double>(from[2 * s.V]);
    }
    read(out);
    for (int64_t c = 0; c < s.K; ++c) {
      T* const to = state + c * row;
      const double* const from = w.state + c * s.ldj;
      for (int64_t j = 0; j < s.V; ++j) to[j] = static_cast<T>(from[j]);
      for (int64_t j = 0; j < s.V; ++j) to[s.V + j] = static_cast<T>(from[s.ldv + j]);
      to[2 * s.V] = static_cast<T>(from[2 * s.ldv]);
    }
  }
  void read(const FemReadOut& out) const {
    each_chunk([&](int64_t first, int n) {
      read_chunk(n, w.state);
      for (int i = 0; i < n; ++i) {
        double slope;
        means(w.O + i * s.ldj, &slope);
        if (out.norm.given()) {
          store_f64(out.norm.data, out.norm.dtype, fem_row(out.norm, b, first + i, h), w.O[i * s.ldj + 2 * s.ldv]);
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
    lose_free();
  }
  // Rows of gradients of phi(x), through phi, to dx.
  void store_inputs(const View& x, const View& dx, int64_t first, int n, bool keys) const {
    for (int i = 0; dx.given() && i < n; ++i) {
      const bool there = !keys || present(first + i);
      if (there) fem_load(x, fem_row(x, b, first + i, h), s.K, w.q);
      for (int64_t c = 0; c < s.K; ++c) w.k[c] = there && w.q[c] > 0 ? w.dx[i * s.ldk + c] : 0;
      fem_store(dx, fem_row(dx, b, first + i, h), s.K, w.k);
    }
  }
  // dx = factor (A state^T) for rows of A [n, ldj]
  void through_state(int n, const double* A, const double* state, const double* factor) const {
    load_tile_transposed<double>(state, s.ldj, static_cast<int>(s.K), static_cast<int>(s.ldj), w.turned, s.ldk);
    gemm<double>(n, static_cast<int>(s.K), static_cast<int>(s.ldj), as_is(A, s.ldj), w.turned, s.ldk, w.dx, s.ldk,
                 RowScale<double>{factor});
  }
  // Gradients of the rows of a chunk in G, dq, and what the chunk's own pairs and its rows on older keys give to da:
  // da_l = sum over t >= l > i of w_ti dw_ti.
  void queries_back(int64_t first, int n, const FemReadGrads& grads) const {
    const int K = static_cast<int>(s.K);
    double* const G = w.rows + first * s.ldj;
    read_chunk(n, w.state);
    for (int i = 0; i < n; ++i) row_gradient(first + i, w.O + i * s.ldj, grads, G + i * s.ldj);
    through_state(n, G, w.state, args.causal ? w.c : w.ones);
    double* const da = w.da + first;
    double older = 0;
    for (int i = n - 1; args.causal && i >= 0; --i) {
      for (int64_t c = 0; c < s.K; ++c) older += w.Q[i * s.ldk + c] * w.dx[i * s.ldk + c];
      da[i] = older;
    }
    if (args.causal) {
      lower(n, G, w.U, s.ldj, static_cast<int>(s.ldj), w.W);
      gemm<double>(n, K, n, as_is(w.W, kChunk), w.Kf, s.ldk, w.dx, s.ldk, Add{});
      for (int i = 0; i < n; ++i) {
        double run = 0;
        for (int l = 0; l <= i; ++l) {
          da[l] += run;
          // both triangles carry E: once is enough
          run += w.E[i * kChunk + l] == 0 ? 0 : w.P[i * kChunk + l] * w.W[i * kChunk + l] / w.E[i * kChunk + l];
        }
      }
    }
    store_inputs(args.q, grads.dq, first, n, false);
  }
  // dk, dv of a chunk from its own rows and, in w.adjoint, all later ones; then its rows join them.
  void keys_back(int64_t first, int n, const double* before, const FemReadGrads& grads) const {
    const int K = static_cast<int>(s.K), J = static_cast<int>(s.ldj);
    const double* const G = w.rows + first * s.ldj;
    const double* const e = args.causal ? ends(n) : w.ones;
    through_state(n, w.U, w.adjoint, e);
    if (grads.da.given()) {
      double both = 0, run = 0;  // older keys with later rows, and this chunk's older keys with them
      for (int64_t i = 0; i < state_size(); ++i) both += before[i] * w.adjoint[i];
      both *= w.c[n - 1];
      for (int l = 0; l < n; ++l) {
        const double a = w.da[first + l] + both + run;
        store_f64(grads.da.data, grads.da.dtype, fem_row(grads.da, b, first + l, h), decay(first + l) == 0 ? 0 : a);
        for (int64_t c = 0; c < s.K; ++c) run += w.Kf[l * s.ldk + c] * w.dx[l * s.ldk + c];
      }
    }
    gemm<double>(n, J, K, as_is(w.Kf, s.ldk), w.adjoint, s.ldj, w.O, s.ldj, RowScale<double>{e});
    if (args.causal) {
      lower(n, G, w.U, s.ldj, J, w.W);
      gemm<double>(n, K, n, transposed(w.W, kChunk), w.Q, s.ldk, w.dx, s.ldk, Add{});
      lower(n, w.Q, w.Kf, s.ldk, K, w.P);
      gemm<double>(n, J, n, transposed(w.P, kChunk), G, s.ldj, w.O, s.ldj, Add{});
    }
    store_inputs(args.k, grads.dk, first, n, true);
    for (int i = 0; i < n; ++i) {
      if (!present(first + i)) {
        no_value(first + i, grads.dv);
        continue;
      }
      double* const du = w.O + i * s.ldj;
      values(first + i);
      for (int64_t c = 0; c < s.ldv; c += X::W) {
        X::store(du + s.ldv + c, at(m.beta + c) * at(w.U + i * s.ldj + s.ldv + c) * at(du + s.ldv + c));
      }
      finish_value(first + i, du, du + s.ldv, grads.dv);
    }
    if (args.causal) write_chunk(n, w.c[n - 1], w.Q, w.c, G, w.adjoint);
  }
  void backward(const FemReadGrads& grads) const {
    begin();
    clear(w.adjoint, state_size());
    if (!args.causal) {
      each_chunk([&](int64_t, int n) { write_keys(n); });
      each_chunk([&](int64_t first, int n) {
        queries_back(first, n, grads);
        write_chunk(n, 1, w.Q, w.ones, w.rows + first * s.ldj, w.adjoint);
      });
      return each_chunk([&](int64_t first, int n) { keys_back(first, n, nullptr, grads); });
    }
    each_chunk([&](int64_t first, int n) {
      __builtin_memcpy(w.kept + first / kChunk * state_size(), w.state, static_cast<size_t>(state_size()) * 8);
      queries_back(first, n, grads);
      write_keys(n);
    });
    for (int64_t first = (s.T - 1) / kChunk * kChunk; first >= 0; first -= kChunk) {
      const int n = static_cast<int>(smaller(kChunk, s.T - first));
      load_chunk(first, n);
      keys_back(first, n, w.kept + first / kChunk * state_size(), grads);
    }
  }
};

}  // namespace linnet::LINNET_ISA
