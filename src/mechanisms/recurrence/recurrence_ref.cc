// The plain double-precision loop of the recurrence: the specification of `recurrence` and of all that stand on it.
// One sequence and head at a time, one token at a time (recurrence.h). The backward is the adjoint walk from the last token to
// the first; it reads the state before every token, kept every sqrt(T) tokens and recomputed in between.
#include <cmath>

#include "core/element.h"
#include "shape.h"

namespace linnet::ref {
namespace {

// Token t of head h as doubles.
struct Token {
  double *q, *k, *v, *a, *u, *r;  // a = exp(g); u = the write; r = v - S'^T k
  double q_norm, k_norm;          // reciprocal norms, 1 without l2_norm
  double beta;                    // doubled where asked; 1 without
};

template <class Args>
struct Walk {
  const Args& args;
  const RecurrenceShape& s;
  Token token;
  int64_t b, h;

  bool has_beta() const { return args.beta.given(); }

  double load_row(const View& view, int64_t t, int64_t head, int64_t width, bool norm, double* row) const {
    double squares = 0;
    for (int64_t c = 0; c < width; ++c) {
      row[c] = element(view, b, t, head, c);
      squares += row[c] * row[c];
    }
    if (!norm) return 1;
    const double reciprocal = 1 / std::sqrt(squares + kL2NormEpsilon);
    for (int64_t c = 0; c < width; ++c) row[c] *= reciprocal;
    return reciprocal;
  }
  double log_decay(int64_t t, int64_t c) const {
    if (args.g.given()) return s.per_channel ? element(args.g, b, t, h, c) : element(args.g, b, t, h);
    if constexpr (requires { args.g_head; }) {
      if (args.g_head.given()) return element(args.g_head, h);
    }
    return 0;
  }
  void load(int64_t t) {
    bool norm = false, doubled = false;
    if constexpr (requires { args.l2_norm; }) {
      norm = args.l2_norm;
      doubled = args.double_beta;
    }
    token.q_norm = load_row(args.q, t, s.q_head(h), s.K, norm, token.q);
    token.k_norm = load_row(args.k, t, s.k_head(h), s.K, norm, token.k);
    load_row(args.v, t, s.v_head(h), s.V, false, token.v);
    for (int64_t c = 0; c < s.K; ++c) token.a[c] = std::exp(log_decay(t, c));
    token.beta = has_beta() ? element(args.beta, b, t, h) * (doubled ? 2 : 1) : 1;
  }

  // S -> S' -> S_t, for the loaded token; leaves r and u. A decay of 0 forgets whatever was there, NaN included.
  void decay(double* S, int64_t width) const {
    for (int64_t c = 0; c < s.K; ++c) {
      for (int64_t j = 0; j < width; ++j) S[c * width + j] = token.a[c] == 0 ? 0 : token.a[c] * S[c * width + j];
    }
  }
  void write(double* S) {
    for (int64_t j = 0; j < s.V; ++j) {
      double read = 0;
      for (int64_t c = 0; has_beta() && c < s.K; ++c) read += S[c * s.V + j] * token.k[c];
      token.r[j] = token.v[j] - read;
      token.u[j] = token.beta * token.r[j];
    }
    for (int64_t c = 0; c < s.K; ++c) {
      for (int64_t j = 0; j < s.V; ++j) S[c * s.V + j] += token.k[c] * token.u[j];
    }
  }
  void step(double* S) {
    decay(S, s.V);
    write(S);
  }
  void read(const double* S, const View& out, int64_t t) const {
    for (int64_t j = 0; j < s.V; ++j) {
      double sum = 0;
      for (int64_t c = 0; c < s.K; ++c) sum += S[c * s.V + j] * token.q[c];
      set_element(out, s.scale * sum, b, t, h, j);
    }
  }
};

Token cut_token(Arena& arena, const RecurrenceShape& s) {
  return {arena.take<double>(s.K),
          arena.take<double>(s.K),
          arena.take<double>(s.V),
          arena.take<double>(s.K),
          arena.take<double>(s.V),
          arena.take<double>(s.V),
          1,
          1,
          1};
}

void load_state(const View& state, int64_t n, int64_t h, const RecurrenceShape& s, double* S) {
  for (int64_t c = 0; c < s.K; ++c) {
    for (int64_t j = 0; j < s.V; ++j) S[c * s.V + j] = state.given() ? element(state, n, h, c, j) : 0;
  }
}
void store_state(const View& state, int64_t n, int64_t h, const RecurrenceShape& s, const double* S) {
  for (int64_t c = 0; state.given() && c < s.K; ++c) {
    for (int64_t j = 0; j < s.V; ++j) set_element(state, S[c * s.V + j], n, h, c, j);
  }
}

// Tokens between two kept states: the root of T keeps both the kept and the recomputed states near sqrt(T).
int64_t span(int64_t tokens) {
  int64_t root = 1;
  while (root * root < tokens) ++root;
  return root;
}

struct Adjoint {
  double *S, *before;                        // [K, V]; states after each token of a span [span + 1, K, V]
  double* kept;                              // states at span starts [spans, K, V]
  double *D, *du, *dq, *dk;                  // gradient of the state; of u; of this token's normalised q and k
  double *sum_q, *sum_k, *sum_v, *sum_head;  // over the heads of a group [B T Hq K], ..., and of g_head [H]
};

Adjoint cut_adjoint(Arena& arena, const RecurrenceShape& s) {
  const int64_t state = s.K * s.V, root = span(s.T);
  Adjoint r;
  r.S = arena.take<double>(state);
  r.before = arena.take<double>((root + 1) * state);
  r.kept = arena.take<double>((root + 1) * state);
  r.D = arena.take<double>(state);
  r.du = arena.take<double>(s.V);
  r.dq = arena.take<double>(s.K);
  r.dk = arena.take<double>(s.K);
  r.sum_q = arena.take<double>(s.B * s.T * s.Hq * s.K);
  r.sum_k = arena.take<double>(s.B * s.T * s.Hk * s.K);
  r.sum_v = arena.take<double>(s.B * s.T * s.Hv * s.V);
  r.sum_head = arena.take<double>(s.H);
  return r;
}

void copy(double* to, const double* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}
void clear(double* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = 0;
}

// dx += r (dy - y (y.dy)) for y = r x, r = 1 / sqrt(sum x^2 + eps), by pairs of channels: with 1 = |y|^2 + eps r^2 the part of
// dy along y goes without a subtraction. r = 1 and no projection without the norm.
void add_normed(const double* y, const double* dy, double reciprocal, bool norm, int64_t width, double* dx) {
  for (int64_t c = 0; c < width; ++c) {
    double across = norm ? kL2NormEpsilon * reciprocal * reciprocal * dy[c] : dy[c];
    for (int64_t j = 0; norm && j < width; ++j) {
      if (j != c) across += y[j] * (y[j] * dy[c] - y[c] * dy[j]);
    }
    dx[c] += reciprocal * across;
  }
}

void store_sums(const View& gradient, const double* sums) {
  if (!gradient.given()) return;
  for (int64_t b = 0; b < gradient.size[0]; ++b) {
    for (int64_t t = 0; t < gradient.size[1]; ++t) {
      for (int64_t h = 0; h < gradient.size[2]; ++h) {
        for (int64_t c = 0; c < gradient.size[3]; ++c) set_element(gradient, *sums++, b, t, h, c);
      }
    }
  }
}

}  // namespace

void recurrence_forward(const RecurrenceArgs& args, const RecurrenceOut& out, const Launch& launch) {
  const RecurrenceShape s = recurrence_shape(args);
  Arena arena(launch.workspace);
  const Token token = cut_token(arena, s);
  double* S = arena.take<double>(s.K * s.V);
  for (int64_t n = 0; n < s.N; ++n) {
    const RecurrenceSequence at = recurrence_sequence(args, n);
    for (int64_t h = 0; h < s.H; ++h) {
      Walk<RecurrenceArgs> walk{args, s, token, at.b, h};
      load_state(args.initial_state, n, h, s, S);
      for (int64_t t = at.begin; t < at.end; ++t) {
        walk.load(t);
        walk.step(S);
        walk.read(S, out.out, t);
      }
      store_state(out.final_state, n, h, s, S);
    }
  }
}

void recurrence_backward(const RecurrenceArgs& args, const RecurrenceOut&, const RecurrenceGrads& grads, const Launch& launch) {
  const RecurrenceShape s = recurrence_shape(args);
  const int64_t K = s.K, V = s.V, state = K * V;
  Arena arena(launch.workspace);
  const Token token = cut_token(arena, s);
  const Adjoint r = cut_adjoint(arena, s);
  clear(r.sum_q, s.B * s.T * s.Hq * K);
  clear(r.sum_k, s.B * s.T * s.Hk * K);
  clear(r.sum_v, s.B * s.T * s.Hv * V);
  clear(r.sum_head, s.H);
  for (int64_t n = 0; n < s.N; ++n) {
    const RecurrenceSequence at = recurrence_sequence(args, n);
    const int64_t tokens = at.end - at.begin, root = span(tokens);
    for (int64_t h = 0; h < s.H; ++h) {
      Walk<RecurrenceArgs> walk{args, s, token, at.b, h};
      Token& w = walk.token;
      load_state(args.initial_state, n, h, s, r.S);
      for (int64_t t = 0; t < tokens; ++t) {
        if (t % root == 0) copy(r.kept + t / root * state, r.S, state);
        walk.load(at.begin + t);
        walk.step(r.S);
      }
      load_state(grads.dfinal_state, n, h, s, r.D);
      for (int64_t first = (tokens - 1) / root * root; tokens > 0 && first >= 0; first -= root) {
        const int64_t last = first + root < tokens ? first + root : tokens;
        copy(r.before, r.kept + first / root * state, state);
        for (int64_t t = first; t < last; ++t) {  // before[t - first]: the state that token t finds
          double* next = r.before + (t - first + 1) * state;
          copy(next, r.before + (t - first) * state, state);
          walk.load(at.begin + t);
          walk.step(next);
        }
        for (int64_t i = last - 1; i >= first; --i) {
          const int64_t t = at.begin + i;
          const double* after = r.before + (i - first + 1) * state;
          copy(r.S, r.before + (i - first) * state, state);
          walk.load(t);
          walk.decay(r.S, V);  // S' of the token
          copy(r.kept + root * state, r.S, state);
          walk.write(r.S);
          copy(r.S, r.kept + root * state, state);

          clear(r.dq, K);
          clear(r.dk, K);
          clear(r.du, V);
          for (int64_t c = 0; c < K; ++c) {
            for (int64_t j = 0; j < V; ++j) {
              const double dout = grads.dout.given() ? s.scale * element(grads.dout, at.b, t, h, j) : 0;
              r.dq[c] += after[c * V + j] * dout;
              double& D = r.D[c * V + j];
              D += w.q[c] * dout;
              r.du[j] += D * w.k[c];
              r.dk[c] += D * w.u[j];
            }
          }
          if (walk.has_beta()) {
            double dbeta = 0;
            for (int64_t j = 0; j < V; ++j) {
              dbeta += r.du[j] * w.r[j];
              r.du[j] *= w.beta;  // now dv
            }
            if (grads.dbeta.given()) set_element(grads.dbeta, dbeta * (args.double_beta ? 2 : 1), at.b, t, h);
            for (int64_t c = 0; c < K; ++c) {
              for (int64_t j = 0; j < V; ++j) {
                r.dk[c] -= r.S[c * V + j] * r.du[j];
                r.D[c * V + j] -= w.k[c] * r.du[j];
              }
            }
          }
          double dg_sum = 0;
          for (int64_t c = 0; c < K; ++c) {
            double dg = 0;
            for (int64_t j = 0; j < V; ++j) {
              dg += r.S[c * V + j] * r.D[c * V + j];
              r.D[c * V + j] = w.a[c] == 0 ? 0 : w.a[c] * r.D[c * V + j];
            }
            dg_sum += dg;
            if (grads.dg.given() && s.per_channel) set_element(grads.dg, dg, at.b, t, h, c);
          }
          if (grads.dg.given() && !s.per_channel) set_element(grads.dg, dg_sum, at.b, t, h);
          r.sum_head[h] += dg_sum;
          const int64_t row = at.b * s.T + t;
          add_normed(w.q, r.dq, w.q_norm, args.l2_norm, K, r.sum_q + (row * s.Hq + s.q_head(h)) * K);
          add_normed(w.k, r.dk, w.k_norm, args.l2_norm, K, r.sum_k + (row * s.Hk + s.k_head(h)) * K);
          double* dv = r.sum_v + (row * s.Hv + s.v_head(h)) * V;
          for (int64_t j = 0; j < V; ++j) dv[j] += r.du[j];
        }
      }
      store_state(grads.dinitial_state, n, h, s, r.D);
    }
  }
  store_sums(grads.dq, r.sum_q);
  store_sums(grads.dk, r.sum_k);
  store_sums(grads.dv, r.sum_v);
  for (int64_t h = 0; grads.dg_head.given() && h < s.H; ++h) set_element(grads.dg_head, r.sum_head[h], h);
}

int64_t recurrence_workspace(const RecurrenceArgs& args, Pass pass, int) {
  const RecurrenceShape s = recurrence_shape(args);
  Arena arena;
  cut_token(arena, s);
  if (pass == Pass::forward) {
    arena.take<double>(s.K * s.V);
  } else {
    cut_adjoint(arena, s);
  }
  return arena.used();
}

void recurrence_decode_forward(const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const Launch& launch) {
  const RecurrenceShape s = recurrence_shape(args);
  Arena arena(launch.workspace);
  const Token token = cut_token(arena, s);
  double* S = arena.take<double>(s.K * s.V);
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t h = 0; h < s.H; ++h) {
      Walk<RecurrenceDecodeArgs> walk{args, s, token, b, h};
      load_state(args.state, b, h, s, S);
      for (int64_t t = 0; t < s.T; ++t) {
        walk.load(t);
        walk.step(S);
        walk.read(S, out.out, t);
      }
      store_state(args.state, b, h, s, S);
    }
  }
}

int64_t recurrence_decode_workspace(const RecurrenceDecodeArgs& args, Pass, int) {
  const RecurrenceShape s = recurrence_shape(args);
  Arena arena;
  cut_token(arena, s);
  arena.take<double>(s.K * s.V);
  return arena.used();
}

// A by its definition: A_t = (I - beta_t k_t k_t^T) diag(a_t), multiplied from the left token by token.
void recurrence_segments_forward(const RecurrenceSegmentsArgs& args, const RecurrenceSegmentsOut& out, const Launch& launch) {
  const RecurrenceShape s = recurrence_shape(args);
  const int64_t K = s.K, V = s.V;
  Arena arena(launch.workspace);
  const Token token = cut_token(arena, s);
  double* whole_S = arena.take<double>(K * V);
  double* part_S = arena.take<double>(K * V);
  double* whole_A = arena.take<double>(K * K);
  double* part_A = arena.take<double>(K * K);
  const auto identity = [&](double* A) {
    clear(A, K * K);
    for (int64_t c = 0; c < K; ++c) A[c * K + c] = 1;
  };
  const auto store_A = [&](const View& view, const double* A, auto... index) {
    for (int64_t c = 0; view.given() && c < K; ++c) {
      for (int64_t j = 0; j < K; ++j) set_element(view, A[c * K + j], index..., c, j);
    }
  };
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t h = 0; h < s.H; ++h) {
      Walk<RecurrenceSegmentsArgs> walk{args, s, token, b, h};
      const Token& w = walk.token;
      const auto advance = [&](double* A) {
        walk.decay(A, K);
        if (!walk.has_beta()) return;
        for (int64_t j = 0; j < K; ++j) {
          double read = 0;
          for (int64_t c = 0; c < K; ++c) read += w.k[c] * A[c * K + j];
          for (int64_t c = 0; c < K; ++c) A[c * K + j] -= w.beta * w.k[c] * read;
        }
      };
      clear(whole_S, K * V);
      identity(whole_A);
      for (int64_t t = 0; t < s.T; ++t) {
        if (t % args.segment == 0) {
          clear(part_S, K * V);
          identity(part_A);
        }
        walk.load(t);
        walk.step(part_S);
        walk.step(whole_S);
        walk.read(whole_S, out.out, t);
        advance(part_A);
        advance(whole_A);
        if ((t + 1) % args.segment == 0 || t + 1 == s.T) {
          const int64_t i = t / args.segment;
          store_A(out.segment_A, part_A, i, b, h);
          for (int64_t c = 0; out.segment_states.given() && c < K; ++c) {
            for (int64_t j = 0; j < V; ++j) set_element(out.segment_states, part_S[c * V + j], i, b, h, c, j);
          }
        }
      }
      store_state(out.final_state, b, h, s, whole_S);
      store_A(out.A, whole_A, b, h);
    }
  }
}

int64_t recurrence_segments_workspace(const RecurrenceSegmentsArgs& args, Pass, int) {
  const RecurrenceShape s = recurrence_shape(args);
  Arena arena;
  cut_token(arena, s);
  for (const int64_t count : {s.K * s.V, s.K * s.V, s.K * s.K, s.K * s.K}) arena.take<double>(count);
  return arena.used();
}

}  // namespace linnet::ref
