// The specification of `zeros`: every row of weights written out, in double.
#include <cmath>

#include "core/half.h"
#include "core/op.h"
#include "zeros.h"

namespace linnet::ref {
namespace {

double at(const View& x, int64_t b, int64_t t, int64_t h, int64_t c = 0) {
  if (!x.given()) return 0;
  return load_f64(x.data, x.dtype, b * x.stride[0] + t * x.stride[1] + h * x.stride[2] + (x.rank > 3 ? c * x.stride[3] : 0));
}
void put(const View& x, int64_t b, int64_t t, int64_t h, int64_t c, double value) {
  if (!x.given()) return;
  store_f64(x.data, x.dtype, b * x.stride[0] + t * x.stride[1] + h * x.stride[2] + (x.rank > 3 ? c * x.stride[3] : 0), value);
}
void load(const View& x, int64_t b, int64_t h, int64_t width, double* to) {  // [T, width] of one head
  for (int64_t t = 0; t < x.size[1]; ++t) {
    for (int64_t c = 0; c < width; ++c) to[t * width + c] = at(x, b, t, h, c);
  }
}
void store(const View& x, int64_t b, int64_t h, int64_t width, const double* from) {
  for (int64_t t = 0; x.given() && t < x.size[1]; ++t) {
    for (int64_t c = 0; c < width; ++c) put(x, b, t, h, c, from[t * width + c]);
  }
}
double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}
void add_scaled(double* y, double a, const double* x, int64_t n) {
  for (int64_t c = 0; c < n; ++c) y[c] += a * x[c];
}
void clear(double* x, int64_t n) {
  for (int64_t c = 0; c < n; ++c) x[c] = 0;
}

struct Gates {
  double s1, sh, s0;
};
template <class Args>
Gates gates_of(const Args& args, int64_t b, int64_t t, int64_t h) {
  return {at(args.s1, b, t, h), at(args.sh, b, t, h), at(args.s0, b, t, h)};
}

// The orders of one row's softmax: delta_i and expm1(s_i - log mean exp(s)) = n p_i - 1, over the keys it sees.
struct Orders {
  double n = 0;
  double *delta, *excess;  // [T]; excess: n p - 1
  // s: the logits; seen(i)
  template <class Seen>
  void make(const double* s, int64_t T, const Seen& seen) {
    double mean = 0, top = -HUGE_VAL, sum = 0;
    n = 0;
    for (int64_t i = 0; i < T; ++i) {
      if (!seen(i)) continue;
      n += 1;
      top = std::fmax(top, s[i]);
    }
    for (int64_t i = 0; i < T; ++i) mean += seen(i) ? s[i] / n : 0;
    double rest = 0;  // what rounding took from the mean
    for (int64_t i = 0; i < T; ++i) rest += seen(i) ? (s[i] - mean) / n : 0;
    for (int64_t i = 0; i < T; ++i) sum += seen(i) ? std::exp(s[i] - top) : 0;
    const double ell = std::log(sum / n);
    for (int64_t i = 0; i < T; ++i) {
      delta[i] = seen(i) ? (s[i] - mean) - rest : 0;
      excess[i] = seen(i) ? std::expm1((s[i] - top) - ell) : 0;
    }
    // Small deviations: log mean exp(s) = mean + log1p(mean(expm1(delta) - delta)) loses nothing to the size of s.
    double largest = 0, more = 0;
    for (int64_t i = 0; i < T; ++i) largest = std::fmax(largest, std::fabs(delta[i]));
    if (largest > 8) return;
    for (int64_t i = 0; i < T; ++i) more += seen(i) ? (std::expm1(delta[i]) - delta[i]) / n : 0;
    const double gap = std::log1p(more);
    for (int64_t i = 0; i < T; ++i) excess[i] = seen(i) ? std::expm1(delta[i] - gap) : 0;
  }
  double weight(const Gates& g, int64_t i) const { return (g.s1 * delta[i] + g.sh * (excess[i] - delta[i]) + g.s0) / n; }
};

struct Scratch {
  double *q, *k, *v, *s, *d, *dq, *dk, *dv, *ds, *x;
  Orders orders;
  Scratch(Arena& arena, int64_t T, int64_t K, int64_t V) {
    for (double** p : {&q, &k, &dq, &dk}) *p = arena.take<double>(T * K);
    for (double** p : {&v, &d, &dv}) *p = arena.take<double>(T * V);
    for (double** p : {&s, &ds, &x, &orders.delta, &orders.excess}) *p = arena.take<double>(T);
  }
};

bool present(const ZerosArgs& args, int64_t b, int64_t i) {
  return !args.key_mask.given() || *args.key_mask.at<const uint8_t>(b, i) != 0;
}

// X, Y and the gradients of the gates of one row from x_i, the gradient of r_i.
struct RowSums {
  double X = 0, Y = 0, ds1 = 0, dsh = 0;
  template <class Seen>
  RowSums(const Orders& o, const double* x, int64_t T, const Seen& seen) {
    for (int64_t i = 0; i < T; ++i) {
      if (!seen(i)) continue;
      X += (1 + o.excess[i]) / o.n * x[i];
      Y += x[i] / o.n;
      ds1 += o.delta[i] / o.n * x[i];
      dsh += (o.excess[i] - o.delta[i]) / o.n * x[i];
    }
  }
};

}  // namespace

double zeros_largest_logit(const ZerosArgs& args) {
  double most = 0;
  for (int64_t b = 0; b < args.s.size[0]; ++b) {
    for (int64_t h = 0; h < args.s.size[2]; ++h) {
      for (int64_t t = 0; t < args.s.size[1]; ++t) {
        const double x = present(args, b, t) ? at(args.s, b, t, h) : 0;
        if (std::isfinite(x)) most = std::fmax(most, std::fabs(x));
      }
    }
  }
  return most;
}

int64_t zeros_workspace(const ZerosArgs& args, Pass, int) {
  Arena arena;
  Scratch(arena, args.q.size[1], args.q.size[3], args.v.size[3]);
  return arena.used();
}

void zeros_forward(const ZerosArgs& args, const ZerosOut& out, const Launch& launch) {
  const int64_t T = args.q.size[1], K = args.q.size[3], V = args.v.size[3];
  Arena arena(launch.workspace);
  Scratch m(arena, T, K, V);
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    for (int64_t h = 0; h < args.q.size[2]; ++h) {
      load(args.q, b, h, K, m.q);
      load(args.k, b, h, K, m.k);
      load(args.v, b, h, V, m.v);
      load(args.s, b, h, 1, m.s);
      for (int64_t t = 0; t < T; ++t) {
        const int64_t end = args.causal ? t + 1 : T;
        const auto seen = [&](int64_t i) { return present(args, b, i); };
        m.orders.make(m.s, end, seen);
        const Gates gates = gates_of(args, b, t, h);
        double* const row = m.d;
        clear(row, V);
        for (int64_t i = 0; i < end; ++i) {
          if (seen(i)) add_scaled(row, m.orders.weight(gates, i) * dot(m.q + t * K, m.k + i * K, K), m.v + i * V, V);
        }
        for (int64_t c = 0; c < V; ++c) put(out.out, b, t, h, c, row[c]);
      }
    }
  }
}

void zeros_backward(const ZerosArgs& args, const ZerosOut&, const ZerosGrads& grads, const Launch& launch) {
  const int64_t T = args.q.size[1], K = args.q.size[3], V = args.v.size[3];
  Arena arena(launch.workspace);
  Scratch m(arena, T, K, V);
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    for (int64_t h = 0; h < args.q.size[2]; ++h) {
      load(args.q, b, h, K, m.q);
      load(args.k, b, h, K, m.k);
      load(args.v, b, h, V, m.v);
      load(args.s, b, h, 1, m.s);
      for (int64_t i = 0; i < T * V; ++i) m.d[i] = at(grads.dout, b, i / V, h, i % V);
      clear(m.dq, T * K);
      clear(m.dk, T * K);
      clear(m.dv, T * V);
      clear(m.ds, T);
      for (int64_t t = 0; t < T; ++t) {
        const int64_t end = args.causal ? t + 1 : T;
        const auto seen = [&](int64_t i) { return present(args, b, i); };
        m.orders.make(m.s, end, seen);
        const Gates gates = gates_of(args, b, t, h);
        const double *const q = m.q + t * K, *const d = m.d + t * V;
        for (int64_t i = 0; i < end; ++i) {
          if (!seen(i)) continue;
          const double r = m.orders.weight(gates, i), a = dot(q, m.k + i * K, K), e = dot(d, m.v + i * V, V);
          m.x[i] = a * e;
          add_scaled(m.dq + t * K, r * e, m.k + i * K, K);
          add_scaled(m.dk + i * K, r * e, q, K);
          add_scaled(m.dv + i * V, r * a, d, V);
        }
        const RowSums sums(m.orders, m.x, end, seen);
        put(grads.ds1, b, t, h, 0, sums.ds1);
        put(grads.dsh, b, t, h, 0, sums.dsh);
        put(grads.ds0, b, t, h, 0, sums.Y);
        for (int64_t i = 0; i < end; ++i) {
          if (!seen(i)) continue;
          const double p = (1 + m.orders.excess[i]) / m.orders.n;
          m.ds[i] += gates.sh * p * (m.x[i] - sums.X) + (gates.s1 - gates.sh) / m.orders.n * (m.x[i] - sums.Y);
        }
      }
      store(grads.dq, b, h, K, m.dq);
      store(grads.dk, b, h, K, m.dk);
      store(grads.dv, b, h, V, m.dv);
      store(grads.ds, b, h, 1, m.ds);
    }
  }
}

int64_t zeros_decode_workspace(const ZerosDecodeArgs&, Pass, int) { return 0; }

void zeros_decode_forward(const ZerosDecodeArgs& args, const ZerosDecodeOut& out, const Launch&) {
  const int64_t T = args.q.size[1], K = args.q.size[3], V = args.v.size[3];
  const View& S = args.state;
  const View& M = args.moments;
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    for (int64_t h = 0; h < args.q.size[2]; ++h) {
      const auto moment = [&](int64_t i) { return b * M.stride[0] + h * M.stride[1] + i * M.stride[2]; };
      const auto cell = [&](int64_t r, int64_t i, int64_t j) {
        return b * S.stride[0] + h * S.stride[1] + r * S.stride[2] + i * S.stride[3] + j;
      };
      const auto number = [&](int64_t i) { return load_f64(M.data, M.dtype, moment(i)); };
      double ell = number(0) + number(1), mean = number(2) + number(3), n = number(4);
      for (int64_t t = 0; t < T; ++t) {
        const double s = at(args.s, b, t, h), N = n + 1, nu = n / N;
        // log mean exp: log(nu e^ell + e^s / N)
        const double top = n > 0 ? std::fmax(ell, s) : s;
        const double next = n > 0 ? top + std::log(nu * std::exp(ell - top) + std::exp(s - top) / N) : s;
        const double next_mean = mean * nu + s / N, lam = n > 0 ? nu * std::exp(ell - next) : 0,
                     shift = n > 0 ? mean - next_mean : 0;
        const double w0 = 1 / N, w1 = (s - next_mean) / N, wp = std::expm1(s - next) / N;
        const Gates g = gates_of(args, b, t, h);
        for (int64_t j = 0; j < V; ++j) {
          double o = 0;
          for (int64_t i = 0; i < K; ++i) {
            const double kv = at(args.k, b, t, h, i) * at(args.v, b, t, h, j);
            const double r0 = load_f64(S.data, S.dtype, cell(0, i, j)), r1 = load_f64(S.data, S.dtype, cell(1, i, j)),
                         rp = load_f64(S.data, S.dtype, cell(2, i, j));
            const double n0 = nu * r0 + w0 * kv, n1 = nu * r1 + nu * shift * r0 + w1 * kv,
                         np = lam * rp + (lam - nu) * r0 + wp * kv;
            store_f64(S.data, S.dtype, cell(0, i, j), n0);
            store_f64(S.data, S.dtype, cell(1, i, j), n1);
            store_f64(S.data, S.dtype, cell(2, i, j), np);
            o += at(args.q, b, t, h, i) * (g.sh * np + (g.s1 - g.sh) * n1 + g.s0 * n0);
          }
          put(out.out, b, t, h, j, o);
        }
        ell = next;
        mean = next_mean;
        n = N;
      }
      if (T == 0) continue;
      const double moments[5] = {ell, 0, mean, 0, n};
      for (int64_t i = 0; i < 5; ++i) store_f64(M.data, M.dtype, moment(i), moments[i]);
    }
  }
}

double zeros_softmax_largest_logit(const ZerosSoftmaxArgs& args) {
  const int64_t K = args.q.size[3];
  const double scale = args.scale.value_or(1 / std::sqrt(static_cast<double>(K)));
  double most = 0;
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    for (int64_t h = 0; h < args.q.size[2]; ++h) {
      for (int64_t t = 0; t < args.q.size[1]; ++t) {
        for (int64_t i = 0; i < (args.causal ? t + 1 : args.q.size[1]); ++i) {
          double s = 0;
          for (int64_t c = 0; c < K; ++c) s += scale * at(args.q, b, t, h, c) * at(args.k, b, i, h, c);
          if (std::isfinite(s)) most = std::fmax(most, std::fabs(s));
        }
      }
    }
  }
  return most;
}

int64_t zeros_softmax_workspace(const ZerosSoftmaxArgs& args, Pass, int) {
  Arena arena;
  Scratch(arena, args.q.size[1], args.q.size[3], args.v.size[3]);
  return arena.used();
}

void zeros_softmax_forward(const ZerosSoftmaxArgs& args, const ZerosOut& out, const Launch& launch) {
  const int64_t T = args.q.size[1], K = args.q.size[3], V = args.v.size[3];
  const double scale = args.scale.value_or(1 / std::sqrt(static_cast<double>(K)));
  Arena arena(launch.workspace);
  Scratch m(arena, T, K, V);
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    for (int64_t h = 0; h < args.q.size[2]; ++h) {
      load(args.q, b, h, K, m.q);
      load(args.k, b, h, K, m.k);
      load(args.v, b, h, V, m.v);
      for (int64_t t = 0; t < T; ++t) {
        const int64_t end = args.causal ? t + 1 : T;
        const auto seen = [](int64_t) { return true; };
        for (int64_t i = 0; i < end; ++i) m.s[i] = scale * dot(m.q + t * K, m.k + i * K, K);
        m.orders.make(m.s, end, seen);
        const Gates gates = gates_of(args, b, t, h);
        double* const row = m.d;
        clear(row, V);
        for (int64_t i = 0; i < end; ++i) {
          if (seen(i)) add_scaled(row, m.orders.weight(gates, i), m.v + i * V, V);
        }
        for (int64_t c = 0; c < V; ++c) put(out.out, b, t, h, c, row[c]);
      }
    }
  }
}

void zeros_softmax_backward(const ZerosSoftmaxArgs& args, const ZerosOut&, const ZerosSoftmaxGrads& grads,
                            const Launch& launch) {
  const int64_t T = args.q.size[1], K = args.q.size[3], V = args.v.size[3];
  const double scale = args.scale.value_or(1 / std::sqrt(static_cast<double>(K)));
  Arena arena(launch.workspace);
  Scratch m(arena, T, K, V);
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    for (int64_t h = 0; h < args.q.size[2]; ++h) {
      load(args.q, b, h, K, m.q);
      load(args.k, b, h, K, m.k);
      load(args.v, b, h, V, m.v);
      for (int64_t i = 0; i < T * V; ++i) m.d[i] = at(grads.dout, b, i / V, h, i % V);
      clear(m.dq, T * K);
      clear(m.dk, T * K);
      clear(m.dv, T * V);
      for (int64_t t = 0; t < T; ++t) {
        const int64_t end = args.causal ? t + 1 : T;
        const auto seen = [](int64_t) { return true; };
        const double *const q = m.q + t * K, *const d = m.d + t * V;
        for (int64_t i = 0; i < end; ++i) {
          m.s[i] = scale * dot(q, m.k + i * K, K);
          m.x[i] = dot(d, m.v + i * V, V);
        }
        m.orders.make(m.s, end, seen);
        const Gates gates = gates_of(args, b, t, h);
        const RowSums sums(m.orders, m.x, end, seen);
        put(grads.ds1, b, t, h, 0, sums.ds1);
        put(grads.dsh, b, t, h, 0, sums.dsh);
        put(grads.ds0, b, t, h, 0, sums.Y);
        for (int64_t i = 0; i < end; ++i) {
          if (!seen(i)) continue;
          const double p = (1 + m.orders.excess[i]) / m.orders.n;
          const double ds = gates.sh * p * (m.x[i] - sums.X) + (gates.s1 - gates.sh) / m.orders.n * (m.x[i] - sums.Y);
          add_scaled(m.dv + i * V, m.orders.weight(gates, i), d, V);
          // The gradients of a row's scores sum to zero: keys minus the first give the same dq, without its rounding.
          for (int64_t c = 0; c < K; ++c) m.dq[t * K + c] += scale * ds * (m.k[i * K + c] - m.k[c]);
          add_scaled(m.dk + i * K, scale * ds, q, K);
        }
      }
      store(grads.dq, b, h, K, m.dq);
      store(grads.dk, b, h, K, m.dk);
      store(grads.dv, b, h, V, m.dv);
    }
  }
}

}  // namespace linnet::ref
