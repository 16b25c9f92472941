// fem_read_decode for one instruction set: one head of one batch row is a task, its memory read and written once per token,
// sums in double whatever the memory's type. Several tokens of the priors linear and gated go in the chunks of fem_read.
#include "fem_rows.h"
#include "fem_scan_linear.h"

namespace linnet::LINNET_ISA {
namespace {

using X = Vec<double>;

struct Rows {
  double *beta, *limit, *shift, *less, *v, *vc, *u, *y, *mu, *free, *gate, *q, *k, *s, *top;
  FemGates<double> gates;
  int64_t ldv, J, bytes;
  Rows(char* base, const FemReadDecodeArgs& args) : Rows(Arena(base), args) {}

 private:
  Rows(Arena arena, const FemReadDecodeArgs& args) : gates(arena, args.v.size[3]) {
    const int64_t V = args.v.size[3], K = args.q.given() ? args.q.size[3] : 0, R = args.A.given() ? args.A.size[2] : 0;
    ldv = round_up<double>(V);
    J = 2 * V + 1;
    beta = arena.take<double>(ldv);
    limit = arena.take<double>(ldv);
    shift = arena.take<double>(ldv);
    v = arena.take<double>(ldv);
    vc = arena.take<double>(ldv);
    mu = arena.take<double>(ldv);
    free = arena.take<double>(ldv);
    gate = arena.take<double>(ldv);
    top = arena.take<double>(ldv);
    less = arena.take<double>(3 * ldv);
    u = arena.take<double>(3 * ldv);
    y = arena.take<double>(3 * ldv);
    q = arena.take<double>(round_up<double>(K) + ldv);
    k = arena.take<double>(round_up<double>(K) + ldv + 2 * R);
    s = arena.take<double>(args.k_cache.given() ? args.k_cache.size[1] : 0);
    bytes = arena.used();
  }
};

// x = f(x), vector by vector; x padded to whole vectors.
template <class F>
LINNET_INLINE void each(double* x, int64_t n, const F& f) {
  for (int64_t c = 0; c < n; c += X::W) X::store(x + c, f(X::load(x + c)));
}
template <class Vector>
LINNET_INLINE Vector exponential(Vector x) {
  return exp(x);
}

template <class T>
struct Head {
  const FemReadDecodeArgs& args;
  const Rows& m;
  int64_t b, h, V, K, R;

  double number(const View& x, int64_t offset) const { return load_f64(x.data, x.dtype, offset); }
  T* memory(const View& x) const { return static_cast<T*>(x.data) + b * x.stride[0] + h * x.stride[1]; }
  double normaliser(double sum) const {
    const FemDenominator rule = fem_denominator(args.prior, args.denominator);
    if (rule == FemDenominator::plus) return sum + 1e-5;
    return rule == FemDenominator::max && sum < 1e-6 ? 1e-6 : sum;
  }
  void channels() const {
    for (int64_t j = 0; j < m.ldv; ++j) {
      m.beta[j] = j < V ? number(args.beta, h * args.beta.stride[0] + j * args.beta.stride[1]) : 1;
      m.limit[j] = fem_cap(args.cap) / m.beta[j];
    }
  }
  void clip(const double* v) const {
    for (int64_t j = 0; j < m.ldv; ++j) m.vc[j] = v[j] > m.limit[j] ? m.limit[j] : v[j] < -m.limit[j] ? -m.limit[j] : v[j];
  }
  // mu = y0 gate / den, F = (shift + log(y1 gate / den)) / beta
  void mix(const double* den) const {
    for (int64_t j = 0; j < m.ldv; ++j) {
      m.mu[j] = m.y[j] * m.gate[j] / den[j];
      m.free[j] = j < V ? m.y[m.ldv + j] * m.gate[j] / den[j] : 1;
      if (m.free[j] < 0x1p-1022) m.free[j] = 0x1p-1022;
    }
    each(m.free, m.ldv, [](X::V x) { return log(x); });
    for (int64_t j = 0; j < m.ldv; ++j) m.free[j] = (m.shift[j] + m.free[j]) / m.beta[j];
  }

  // Softmax over the cache: scores, then sums of p [1, vc, exp(beta vc - top)].
  void softmax(int64_t t, int64_t length) const {
    const int64_t keys = length + t + 1;
    const double scale = 1 / __builtin_sqrt(static_cast<double>(K));
    fem_load(args.q, fem_row(args.q, b, t, h), K, m.q);
    double most = kLowest<double>, total = 0;
    for (int64_t j = 0; j < m.ldv; ++j) m.shift[j] = kLowest<double>;
    for (int64_t i = 0; i < keys; ++i) {
      fem_load(args.k_cache, fem_row(args.k_cache, b, i, h), K, m.k);
      X::V dot = X::zero();
      for (int64_t c = 0; c < K; c += X::W) {
        dot = fma(X::load(m.q + c), select(X::prefix(static_cast<int>(K - c)), X::load(m.k + c), X::zero()), dot);
      }
      m.s[i] = sum(dot) * scale;
      most = m.s[i] > most ? m.s[i] : most;
      fem_load(args.v_cache, fem_row(args.v_cache, b, i, h), V, m.v);
      clip(m.v);
      for (int64_t j = 0; j < m.ldv; ++j) m.shift[j] = m.beta[j] * m.vc[j] > m.shift[j] ? m.beta[j] * m.vc[j] : m.shift[j];
    }
    for (int64_t j = 0; j < 2 * m.ldv; ++j) m.y[j] = 0;
    for (int64_t i = 0; i < keys; ++i) {
      const double p = __builtin_exp(m.s[i] - most);
      total += p;
      fem_load(args.v_cache, fem_row(args.v_cache, b, i, h), V, m.v);
      clip(m.v);
      for (int64_t c = 0; c < m.ldv; c += X::W) {
        const X::V vc = X::load(m.vc + c), x = exp(X::load(m.beta + c) * vc - X::load(m.shift + c)), weight = X::broadcast(p);
        X::store(m.y + c, fma(weight, vc, X::load(m.y + c)));
        X::store(m.y + m.ldv + c, fma(weight, x, X::load(m.y + m.ldv + c)));
      }
    }
    for (int64_t j = 0; j < m.ldv; ++j) {
      m.gate[j] = 1;
      m.top[j] = total;
    }
    mix(m.top);
  }
  // u = [vc | exp(beta vc - shift) | 1] with the running maximum raised; less = exp(old - new shift) for what stands in memory.
  void inputs(int64_t t) const {
    fem_load(args.v, fem_row(args.v, b, t, h), V, m.v);
    clip(m.v);
    T* const shift = memory(args.shift);
    for (int64_t j = 0; j < m.ldv; ++j) {
      const double before = j < V ? static_cast<double>(shift[j * args.shift.stride[2]]) : 0, x = m.beta[j] * m.vc[j];
      // as stored: memory and shift must agree
      m.shift[j] = static_cast<double>(static_cast<T>(before > x ? before : x));
      m.less[j] = before - m.shift[j];
      m.u[j] = m.vc[j];
      m.u[m.ldv + j] = x - m.shift[j];
      m.gate[j] = 1;
      if (j < V) shift[j * args.shift.stride[2]] = static_cast<T>(m.shift[j]);
    }
    each(m.less, m.ldv, [](X::V x) { return exponential(x); });
    each(m.u + m.ldv, m.ldv, [](X::V x) { return exponential(x); });
  }
  void features(const View& x, int64_t t, double* to) const {
    fem_load(x, fem_row(x, b, t, h), K, to);
    for (int64_t c = 0; c < K; ++c) to[c] = (to[c] > 0 ? to[c] : 0) + args.feature_eps;
  }
  void linear(int64_t t) const {
    inputs(t);
    features(args.q, t, m.q);
    features(args.k, t, m.k);
    const double decay =
        args.a.given() ? __builtin_exp(number(args.a, b * args.a.stride[0] + t * args.a.stride[1] + h * args.a.stride[2])) : 1;
    double total = 0;
    for (int64_t j = 0; j < 2 * m.ldv; ++j) m.y[j] = 0;
    for (int64_t c = 0; c < K; ++c) {
      T* const row = memory(args.state) + c * args.state.stride[2];
      const double q = m.q[c], k = m.k[c];
      for (int64_t j = 0; j < V; ++j) {
        const double x = decay * static_cast<double>(row[j]) + k * m.u[j];
        const double z = decay * m.less[j] * static_cast<double>(row[V + j]) + k * m.u[m.ldv + j];
        row[j] = static_cast<T>(x);
        row[V + j] = static_cast<T>(z);
        m.y[j] += q * x;
        m.y[m.ldv + j] += q * z;
      }
      const double n = decay * static_cast<double>(row[2 * V]) + k;
      row[2 * V] = static_cast<T>(n);
      total += q * n;
    }
    for (int64_t j = 0; j < m.ldv; ++j) m.top[j] = normaliser(total);
    mix(m.top);
  }
  void aft(int64_t t) const {
    inputs(t);
    fem_load(args.k, fem_row(args.k, b, t, h), V, m.k);
    fem_load(args.q, fem_row(args.q, b, t, h), V, m.q);
    T* const sums = memory(args.sums);
    const int64_t step = args.sums.stride[2];
    double* const old = m.less + m.ldv;
    for (int64_t j = 0; j < m.ldv; ++j) {
      const double k = j < V ? m.k[j] : 0, before = j < V ? static_cast<double>(sums[3 * step + j]) : 0;
      const double high = static_cast<double>(static_cast<T>(before > k ? before : k));
      if (j < V) sums[3 * step + j] = static_cast<T>(high);
      old[j] = before - high;
      m.k[j] = k - high;
    }
    each(old, m.ldv, [](X::V x) { return exponential(x); });
    each(m.k, m.ldv, [](X::V x) { return exponential(x); });
    each(m.q, m.ldv, [](X::V x) { return softplus(x) + X::broadcast(1e-6); });
    double squares = 0;
    for (int64_t j = 0; j < V; ++j) squares += m.q[j] * m.q[j];
    const double length = __builtin_sqrt(squares),
                 factor = __builtin_sqrt(static_cast<double>(V)) / (length > 1e-5 ? length : 1e-5);
    for (int64_t j = 0; j < m.ldv; ++j) {
      const auto past = [&](int n) { return j < V ? static_cast<double>(sums[n * step + j]) * old[j] : 0; };
      m.gate[j] = m.q[j] * factor;
      m.top[j] = past(0) + m.k[j];
      m.y[j] = past(1) + m.k[j] * m.u[j];
      m.y[m.ldv + j] = past(2) * m.less[j] + m.k[j] * m.u[m.ldv + j];
      if (j >= V) continue;
      sums[j] = static_cast<T>(m.top[j]);
      sums[step + j] = static_cast<T>(m.y[j]);
      sums[2 * step + j] = static_cast<T>(m.y[m.ldv + j]);
    }
    mix(m.top);
  }
  void ssm(int64_t t) const {
    inputs(t);
    fem_load(args.delta, fem_row(args.delta, b, t, h), V, m.v);
    for (int64_t j = 0; j < m.ldv; ++j) {
      const double diagonal = j < V ? number(args.D, h * args.D.stride[0] + j * args.D.stride[1]) : 0;
      m.u[2 * m.ldv + j] = 1;
      for (int n = 0; n < 3; ++n) m.y[n * m.ldv + j] = diagonal * m.u[n * m.ldv + j];
    }
    double* const f = m.top;
    for (int64_t r = 0; r < R; ++r) {
      const double B = number(args.Bm, b * args.Bm.stride[0] + t * args.Bm.stride[1] + r * args.Bm.stride[2]);
      const double C = number(args.Cm, b * args.Cm.stride[0] + t * args.Cm.stride[1] + r * args.Cm.stride[2]);
      for (int64_t j = 0; j < m.ldv; ++j) {
        const int64_t place = h * args.A.stride[0] + j * args.A.stride[1] + r * args.A.stride[2];
        f[j] = j < V ? m.v[j] * number(args.A, place) : 0;
      }
      each(f, m.ldv, [](X::V x) { return exponential(x); });
      for (int n = 0; n < 3; ++n) {
        T* const state = memory(args.scan) + n * args.scan.stride[2] + r * args.scan.stride[3];
        for (int64_t j = 0; j < V; ++j) {
          const double past = f[j] * (n == 1 ? m.less[j] : 1) * static_cast<double>(state[j]);
          const double x = past + m.v[j] * B * m.u[n * m.ldv + j];
          state[j] = static_cast<T>(x);
          m.y[n * m.ldv + j] += C * x;
        }
      }
    }
    for (int64_t j = 0; j < m.ldv; ++j) m.top[j] = j < V ? normaliser(m.y[2 * m.ldv + j]) : 1;
    mix(m.top);
  }
};

// Several tokens at once of the priors linear and gated: the chunks of fem_read, from the memory and back into it.
constexpr int64_t kChunkTokens = 8;  // from so many tokens on

bool in_chunks(const FemReadDecodeArgs& args) {
  return (args.prior == FemPrior::linear || args.prior == FemPrior::gated) && args.v.size[1] >= kChunkTokens;
}
FemReadArgs whole_call(const FemReadDecodeArgs& args) {
  FemReadArgs call;
  call.v = args.v;
  call.beta = args.beta;
  call.lam = args.lam;
  call.q = args.q;
  call.k = args.k;
  call.a = args.a;
  call.g = args.g;
  call.prior = args.prior;
  call.causal = true;
  call.cap = args.cap;
  call.denominator = args.denominator;
  call.feature_eps = args.feature_eps;
  return call;
}
int64_t chunk_bytes(const FemReadDecodeArgs& args) {
  const FemSizes s(whole_call(args));
  Arena arena;
  const FemChannels channels(arena, s);
  const FemLinear::Rows rows(arena, s, Pass::forward);
  return arena.used();
}
template <class T>
void decode_chunks(const FemReadDecodeArgs& args, const FemReadDecodeOut& out, const Launch& launch) {
  const FemReadArgs call = whole_call(args);
  const FemSizes s(call);
  const int64_t bytes = chunk_bytes(args);
  const double work = static_cast<double>(s.B * s.T * s.H) * static_cast<double>(FemLinear::state_size(s) + 40 * s.V);
  run_tasks(launch, s.B * s.H, 4 * work, [&](int64_t task, int worker) {
    Arena arena(launch.workspace + worker * bytes);
    const FemChannels channels(arena, s);
    const FemLinear::Rows rows(arena, s, Pass::forward);
    const FemLinear walk{{call, s, channels, task / s.H, task % s.H}, rows};
    const auto memory = [&](const View& x) { return static_cast<T*>(x.data) + walk.b * x.stride[0] + walk.h * x.stride[1]; };
    walk.resume(memory(args.state), args.state.stride[2], memory(args.shift), args.shift.stride[2], {.out = out.out});
  });
}

// The gates read their tensors as those of fem_read.
LINNET_INLINE FemReadArgs gates_of(const FemReadDecodeArgs& args) {
  FemReadArgs one;
  one.lam = args.lam;
  one.g = args.g;
  return one;
}

template <class T>
void decode(const FemReadDecodeArgs& args, const FemReadDecodeOut& out, const Launch& launch) {
  const int64_t B = args.v.size[0], tokens = args.v.size[1], H = args.v.size[2], V = args.v.size[3];
  const int64_t K = args.q.given() ? args.q.size[3] : 0, R = args.A.given() ? args.A.size[2] : 0,
                bytes = Rows(nullptr, args).bytes;
  const bool softmax = args.prior == FemPrior::softmax;
  double work = static_cast<double>(B * tokens * H * V) * static_cast<double>(K + 3 * R + 8) * 8;
  for (int64_t b = 0; softmax && b < B; ++b) {
    const int64_t length = index_at(args.lengths, b);
    append_rows(args.k, args.k_cache, b, length);
    append_rows(args.v, args.v_cache, b, length);
    work += static_cast<double>(length * tokens * H * (K + 2 * V)) * 4;
  }
  run_tasks(launch, B * H, work, [&](int64_t task, int worker) {
    const Rows rows(launch.workspace + worker * bytes, args);
    const Head<T> head{args, rows, task / H, task % H, V, K, R};
    const FemReadArgs gates = gates_of(args);
    const FemReadOut result{.out = out.out};
    head.channels();
    for (int64_t t = 0; t < tokens; ++t) {
      switch (args.prior) {
        case FemPrior::softmax: head.softmax(t, index_at(args.lengths, head.b)); break;
        case FemPrior::aft: head.aft(t); break;
        case FemPrior::ssm: head.ssm(t); break;
        default: head.linear(t); break;
      }
      rows.gates.forward(gates, result, head.b, t, head.h, V, rows.mu, rows.free);
    }
  });
  for (int64_t b = 0; softmax && b < B; ++b) {
    const int64_t length = index_at(args.lengths, b) + tokens;
    if (args.lengths.dtype == Dtype::i32) {
      static_cast<int32_t*>(args.lengths.data)[b * args.lengths.stride[0]] = static_cast<int32_t>(length);
    } else {
      static_cast<int64_t*>(args.lengths.data)[b * args.lengths.stride[0]] = length;
    }
  }
}

}  // namespace

int64_t fem_read_decode_workspace(const FemReadDecodeArgs& args, Pass, int workers) {
  if (in_chunks(args)) return workers * chunk_bytes(args);
  return workers * Rows(nullptr, args).bytes;
}
void fem_read_decode_forward(const FemReadDecodeArgs& args, const FemReadDecodeOut& out, const Launch& launch) {
  if (in_chunks(args)) {
    if (args.v.dtype == Dtype::f64) return decode_chunks<double>(args, out, launch);
    return decode_chunks<float>(args, out, launch);
  }
  if (args.v.dtype == Dtype::f64) return decode<double>(args, out, launch);
  decode<float>(args, out, launch);
}

}  // namespace linnet::LINNET_ISA
