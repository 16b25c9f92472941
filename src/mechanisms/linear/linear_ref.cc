// The plain double-precision loop of linear attention: the specification of `linear` and `linear_decode`.
//
// One sequence and head at a time, one token at a time. The only liberty against the equations of linear.h: with map exp and
// the normaliser (`shifted`) feature c of S and z is kept in units of exp(m_c), m_c the largest k_c so far, and each query in
// units of its largest q_c + m_c, so that no finite input overflows; out does not depend on the units, `den` is the logarithm.
#include <cmath>
#include <limits>

#include "core/half.h"
#include "linear.h"
#include "linear_shape.h"

namespace linnet::ref {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double relu(double x) { return x <= 0 ? 0 : x; }  // keeps NaN

// phi with its Jacobian's transpose. `w` is the head's [F, K] in doubles, map t2r only.
struct Map {
  FeatureMap map;
  int64_t K, F, nu;
  const double* w;

  int64_t rolled(int64_t i, int64_t s) const { return ((i - s) % (2 * K) + 2 * K) % (2 * K); }
  double rectified(const double* x, int64_t i) const { return i < K ? relu(x[i]) : relu(-x[i - K]); }  // of [x, -x]

  void apply(const double* x, double* f) const {
    switch (map) {
      case FeatureMap::identity:
        for (int64_t c = 0; c < K; ++c) f[c] = x[c];
        break;
      case FeatureMap::elu1:
        for (int64_t c = 0; c < K; ++c) f[c] = x[c] > 0 ? x[c] + 1 : std::exp(x[c]);
        break;
      case FeatureMap::relu:
        for (int64_t c = 0; c < K; ++c) f[c] = relu(x[c]);
        break;
      case FeatureMap::relu2:
        for (int64_t c = 0; c < K; ++c) f[c] = relu(x[c]) * relu(x[c]);
        break;
      case FeatureMap::silu:
        for (int64_t c = 0; c < K; ++c) f[c] = x[c] * sigmoid(x[c]);
        break;
      case FeatureMap::softplus:
        for (int64_t c = 0; c < K; ++c) f[c] = relu(x[c]) + std::log1p(std::exp(-std::fabs(x[c])));
        break;
      case FeatureMap::exp:
        for (int64_t c = 0; c < K; ++c) f[c] = std::exp(x[c]);
        break;
      case FeatureMap::hedgehog: {
        double largest = 0, sum = 0;
        for (int64_t c = 0; c < K; ++c) largest = std::fmax(largest, std::fabs(x[c]));
        for (int64_t c = 0; c < K; ++c) {
          f[c] = std::exp(x[c] - largest);
          f[K + c] = std::exp(-x[c] - largest);
          sum += f[c] + f[K + c];
        }
        for (int64_t c = 0; c < F; ++c) f[c] /= sum;
        break;
      }
      case FeatureMap::taylor2: {
        const double width = static_cast<double>(K), linear = 1 / std::sqrt(std::sqrt(width));
        int64_t at = 0;
        f[at++] = 1;
        for (int64_t i = 0; i < K; ++i) f[at++] = x[i] * linear;
        for (int64_t i = 0; i < K; ++i) {
          for (int64_t j = i; j < K; ++j) f[at++] = x[i] * x[j] * std::sqrt((i == j ? 1 : 2) / (2 * width));
        }
        break;
      }
      case FeatureMap::dpfp:
        for (int64_t s = 1; s <= nu; ++s) {
          for (int64_t i = 0; i < 2 * K; ++i) f[(s - 1) * 2 * K + i] = rectified(x, i) * rectified(x, rolled(i, s));
        }
        break;
      case FeatureMap::t2r:
        for (int64_t r = 0; r < F; ++r) {
          double sum = 0;
          for (int64_t c = 0; c < K; ++c) sum += w[r * K + c] * x[c];
          f[r] = relu(sum);
        }
        break;
    }
  }

  // dx += J^T df, dw += its part; f = phi(x). For exp f and df may be in any units whose product is right.
  void backward(const double* x, const double* f, const double* df, double* dx, double* dw) const {
    switch (map) {
      case FeatureMap::identity:
        for (int64_t c = 0; c < K; ++c) dx[c] += df[c];
        break;
      case FeatureMap::elu1:
        for (int64_t c = 0; c < K; ++c) dx[c] += x[c] > 0 ? df[c] : f[c] * df[c];
        break;
      case FeatureMap::relu:
        for (int64_t c = 0; c < K; ++c) dx[c] += x[c] > 0 ? df[c] : 0;
        break;
      case FeatureMap::relu2:
        for (int64_t c = 0; c < K; ++c) dx[c] += 2 * relu(x[c]) * df[c];
        break;
      case FeatureMap::silu:
        for (int64_t c = 0; c < K; ++c) dx[c] += sigmoid(x[c]) * (1 + x[c] * sigmoid(-x[c])) * df[c];
        break;
      case FeatureMap::softplus:
        for (int64_t c = 0; c < K; ++c) dx[c] += sigmoid(x[c]) * df[c];
        break;
      case FeatureMap::exp:
        for (int64_t c = 0; c < K; ++c) dx[c] += f[c] * df[c];
        break;
      case FeatureMap::hedgehog: {
        double mean = 0;
        for (int64_t c = 0; c < F; ++c) mean += f[c] * df[c];
        for (int64_t c = 0; c < K; ++c) dx[c] += f[c] * (df[c] - mean) - f[K + c] * (df[K + c] - mean);
        break;
      }
      case FeatureMap::taylor2: {
        const double width = static_cast<double>(K), linear = 1 / std::sqrt(std::sqrt(width));
        int64_t at = 1;
        for (int64_t i = 0; i < K; ++i) dx[i] += df[at++] * linear;
        for (int64_t i = 0; i < K; ++i) {
          for (int64_t j = i; j < K; ++j) {
            const double slope = df[at++] * std::sqrt((i == j ? 1 : 2) / (2 * width));
            dx[i] += slope * x[j];
            dx[j] += slope * x[i];
          }
        }
        break;
      }
      case FeatureMap::dpfp:
        for (int64_t s = 1; s <= nu; ++s) {
          for (int64_t i = 0; i < 2 * K; ++i) {
            const int64_t j = rolled(i, s);
            const double slope = df[(s - 1) * 2 * K + i];
            add_rectified(x, i, slope * rectified(x, j), dx);
            add_rectified(x, j, slope * rectified(x, i), dx);
          }
        }
        break;
      case FeatureMap::t2r:
        for (int64_t r = 0; r < F; ++r) {
          if (!(f[r] > 0)) continue;
          for (int64_t c = 0; c < K; ++c) {
            dx[c] += w[r * K + c] * df[r];
            dw[r * K + c] += df[r] * x[c];
          }
        }
        break;
    }
  }

  void add_rectified(const double* x, int64_t i, double slope, double* dx) const {
    if (i < K) {
      if (x[i] > 0) dx[i] += slope;
    } else {
      if (x[i - K] < 0) dx[i - K] -= slope;
    }
  }
};

// Row (b, t, h) of a 4-dimensional view, to and from doubles.
void load_row(const View& view, int64_t b, int64_t t, int64_t h, double* row) {
  const int64_t offset = b * view.stride[0] + t * view.stride[1] + h * view.stride[2];
  for (int64_t c = 0; c < view.size[3]; ++c) row[c] = load_f64(view.data, view.dtype, offset + c);
}
void store_row(const View& view, int64_t b, int64_t t, int64_t h, const double* row) {
  const int64_t offset = b * view.stride[0] + t * view.stride[1] + h * view.stride[2];
  for (int64_t c = 0; c < view.size[3]; ++c) store_f64(view.data, view.dtype, offset + c, row[c]);
}
double load_at(const View& view, int64_t i, int64_t j, int64_t k) {
  return load_f64(view.data, view.dtype, i * view.stride[0] + j * view.stride[1] + k * view.stride[2]);
}
void store_at(const View& view, int64_t i, int64_t j, int64_t k, double x) {
  store_f64(view.data, view.dtype, i * view.stride[0] + j * view.stride[1] + k * view.stride[2], x);
}

// A sum over tokens per feature: matrix [F, V] and vector [F], row c in units of exp(unit[c]) when shifted, of 1 otherwise.
struct Sums {
  double* matrix;
  double* vector;
  double* unit;

  // From caller's memory, zeros where a view is absent. A row of zeros has no unit yet: -infinity.
  void load(const View& state, const View& z, int64_t n, int64_t h, const LinearShape& s) {
    for (int64_t c = 0; c < s.F; ++c) {
      vector[c] = z.given() ? load_at(z, n, h, c) : 0;
      bool zeros = vector[c] == 0;
      for (int64_t j = 0; j < s.V; ++j) {
        double& x = matrix[c * s.V + j];
        x = state.given()
                ? load_f64(state.data, state.dtype, n * state.stride[0] + h * state.stride[1] + c * state.stride[2] + j)
                : 0;
        zeros = zeros && x == 0;
      }
      unit[c] = zeros && s.shifted ? kMinusInfinity : 0;
    }
  }
  void store(const View& state, const View& z, int64_t n, int64_t h, const LinearShape& s) const {
    for (int64_t c = 0; c < s.F; ++c) {
      const double factor = std::exp(unit[c]);
      if (z.given()) store_at(z, n, h, c, vector[c] == 0 ? 0 : factor * vector[c]);
      for (int64_t j = 0; state.given() && j < s.V; ++j) {
        const double x = matrix[c * s.V + j];
        store_f64(state.data, state.dtype, n * state.stride[0] + h * state.stride[1] + c * state.stride[2] + j,
                  x == 0 ? 0 : factor * x);
      }
    }
  }
  // Shifted: feature c of the next summand is exp(exponent). Returns it in the row's unit, which grows when needed.
  double enter(int64_t c, double exponent, int64_t V) {
    if (exponent > unit[c]) {
      const double factor = std::exp(unit[c] - exponent);
      vector[c] *= factor;
      for (int64_t j = 0; j < V; ++j) matrix[c * V + j] *= factor;
      unit[c] = exponent;
    }
    return unit[c] == kMinusInfinity ? 0 : std::exp(exponent - unit[c]);
  }
  // += f [row | last]^T
  void add(const double* f, const double* row, double last, const LinearShape& s) {
    for (int64_t c = 0; c < s.F; ++c) {
      vector[c] += f[c] * last;
      for (int64_t j = 0; j < s.V; ++j) matrix[c * s.V + j] += f[c] * row[j];
    }
  }
};

struct Scratch {
  double *x, *f, *df, *dx, *v, *o, *w;
  Sums sums;
  double *dq, *dk, *dv, *dw;  // backward: sums over the heads of a group
};

template <class Args>
Scratch cut(Arena& arena, const Args& args, const LinearShape& s, bool backward) {
  Scratch r{};
  for (double** row : {&r.x, &r.dx}) *row = arena.take<double>(s.K);
  for (double** row : {&r.f, &r.df, &r.sums.vector, &r.sums.unit}) *row = arena.take<double>(s.F);
  for (double** row : {&r.v, &r.o}) *row = arena.take<double>(s.V);
  r.sums.matrix = arena.take<double>(s.F * s.V);
  r.w = arena.take<double>(args.w.elements());
  if (backward) {
    r.dq = arena.take<double>(s.B * s.T * s.Hq * s.K);
    r.dk = arena.take<double>(s.B * s.S * s.Hk * s.K);
    r.dv = arena.take<double>(s.B * s.S * s.Hv * s.V);
    r.dw = arena.take<double>(args.w.elements());
  }
  return r;
}

// One sequence and head.
struct Walk {
  const LinearShape& s;
  Scratch& r;
  Map map;
  double eps;
  bool normalize;

  template <class Args>
  Walk(const Args& args, const LinearShape& shape, Scratch& scratch, int64_t h)
      : s(shape), r(scratch), map{args.map, shape.K, shape.F, args.dpfp_nu, nullptr}, eps(args.eps), normalize(args.normalize) {
    if (!args.w.given()) return;
    const int64_t head = s.q_head(h);
    map.w = r.w + head * s.F * s.K;
    for (int64_t i = 0; i < s.F; ++i) {
      for (int64_t c = 0; c < s.K; ++c) r.w[(head * s.F + i) * s.K + c] = load_at(args.w, head, i, c);
    }
  }

  // S += phi(k) v^T, z += phi(k); r.x holds k, r.v holds v.
  void absorb() {
    if (s.shifted) {
      for (int64_t c = 0; c < s.F; ++c) r.f[c] = r.sums.enter(c, r.x[c], s.V);
    } else {
      map.apply(r.x, r.f);
    }
    r.sums.add(r.f, r.v, 1, s);
  }
  // r.f = phi(q) in the units of the sums, itself in units of exp(the result); r.x holds q.
  double query() {
    if (!s.shifted) return map.apply(r.x, r.f), 0;
    double unit = kMinusInfinity;
    for (int64_t c = 0; c < s.F; ++c) unit = std::fmax(unit, r.x[c] + r.sums.unit[c]);
    for (int64_t c = 0; c < s.F; ++c) r.f[c] = unit == kMinusInfinity ? 0 : std::exp(r.x[c] + r.sums.unit[c] - unit);
    return unit;
  }
  // r.o = the output row; returns what `den` stores.
  double read() {
    const double unit = query();
    double dot = 0;
    for (int64_t c = 0; c < s.F; ++c) dot += r.f[c] * r.sums.vector[c];
    const bool empty = s.shifted && unit == kMinusInfinity;  // no key yet: numerator 0, denominator eps
    const double den = !normalize ? 1 : s.scale * dot + (eps == 0 ? 0 : eps * (s.shifted && !empty ? std::exp(-unit) : 1));
    for (int64_t j = 0; j < s.V; ++j) {
      double sum = 0;
      for (int64_t c = 0; c < s.F; ++c) sum += r.f[c] * r.sums.matrix[c * s.V + j];
      r.o[j] = den == 0 ? 0 : s.scale * sum / den;
    }
    if (!s.shifted) return den;
    if (empty) return std::log(eps);
    // log(exp(unit) den), taken where no exponential overflows
    return unit <= 0 && eps > 0 ? std::log(s.scale * dot * std::exp(unit) + eps) : unit + std::log(den);
  }
};

bool kept(const LinearArgs& args, int64_t b, int64_t j) {
  return !args.key_mask.given() || *args.key_mask.at<const uint8_t>(b, j) != 0;
}

}  // namespace

void linear_forward(const LinearArgs& args, const LinearOut& out, const Launch& launch) {
  const LinearShape s = linear_shape(args);
  Arena arena(launch.workspace);
  Scratch r = cut(arena, args, s, false);
  for (int64_t n = 0; n < s.N; ++n) {
    const LinearSequence at = linear_sequence(args, n);
    for (int64_t h = 0; h < s.H; ++h) {
      Walk walk(args, s, r, h);
      r.sums.load(args.initial_state, args.initial_z, n, h, s);
      const auto absorb = [&](int64_t j) {
        if (!kept(args, at.b, j)) return;
        load_row(args.k, at.b, j, s.k_head(h), r.x);
        load_row(args.v, at.b, j, s.v_head(h), r.v);
        walk.absorb();
      };
      if (!args.causal) {
        for (int64_t j = at.k0; j < at.k1; ++j) absorb(j);
      }
      for (int64_t t = at.q0; t < at.q1; ++t) {
        if (args.causal) absorb(t);
        load_row(args.q, at.b, t, s.q_head(h), r.x);
        const double den = walk.read();
        store_row(out.out, at.b, t, h, r.o);
        if (args.normalize && out.den.given()) store_at(out.den, at.b, t, h, den);
      }
      r.sums.store(out.final_state, out.final_z, n, h, s);
    }
  }
}

void linear_backward(const LinearArgs& args, const LinearOut& out, const LinearGrads& grads, const Launch& launch) {
  const LinearShape s = linear_shape(args);
  Arena arena(launch.workspace);
  Scratch r = cut(arena, args, s, true);
  for (int64_t i = 0; i < s.B * s.T * s.Hq * s.K; ++i) r.dq[i] = 0;
  for (int64_t i = 0; i < s.B * s.S * s.Hk * s.K; ++i) r.dk[i] = 0;
  for (int64_t i = 0; i < s.B * s.S * s.Hv * s.V; ++i) r.dv[i] = 0;
  for (int64_t i = 0; i < args.w.elements(); ++i) r.dw[i] = 0;

  for (int64_t n = 0; n < s.N; ++n) {
    const LinearSequence at = linear_sequence(args, n);
    for (int64_t h = 0; h < s.H; ++h) {
      Walk walk(args, s, r, h);
      double* dw = r.dw + s.q_head(h) * s.F * s.K;

      // dn = dout / den in r.v, dd = -(dout . out) / den returned. `unit` as in query(): den in units of exp(unit).
      const auto incoming = [&](int64_t t, double unit) -> double {
        if (!grads.dout.given()) {
          for (int64_t j = 0; j < s.V; ++j) r.v[j] = 0;
          return 0;
        }
        load_row(grads.dout, at.b, t, h, r.v);
        if (!args.normalize) return 0;
        load_row(out.out, at.b, t, h, r.o);
        const double saved = load_at(out.den, at.b, t, h);
        const double den = s.shifted ? std::exp(saved - unit) : saved;
        const double inverse = den == 0 ? 0 : 1 / den;
        double dd = 0;
        for (int64_t j = 0; j < s.V; ++j) {
          dd -= r.v[j] * r.o[j] * inverse;
          r.v[j] *= inverse;
        }
        return dd;
      };

      // Forward in time: dq_t = scale (S_t dn_t + dd_t z_t) phi'(q_t).
      r.sums.load(args.initial_state, args.initial_z, n, h, s);
      const auto absorb = [&](int64_t j) {
        if (!kept(args, at.b, j)) return;
        load_row(args.k, at.b, j, s.k_head(h), r.x);
        load_row(args.v, at.b, j, s.v_head(h), r.v);
        walk.absorb();
      };
      if (!args.causal) {
        for (int64_t j = at.k0; j < at.k1; ++j) absorb(j);
      }
      for (int64_t t = at.q0; t < at.q1; ++t) {
        if (args.causal) absorb(t);
        load_row(args.q, at.b, t, s.q_head(h), r.x);
        const double unit = walk.query();
        if (s.shifted && unit == kMinusInfinity) continue;
        const double dd = incoming(t, unit);
        for (int64_t c = 0; c < s.F; ++c) {
          double sum = dd * r.sums.vector[c];
          for (int64_t j = 0; j < s.V; ++j) sum += r.sums.matrix[c * s.V + j] * r.v[j];
          r.df[c] = s.scale * sum;
        }
        walk.map.backward(r.x, r.f, r.df, r.dq + ((at.b * s.T + t) * s.Hq + s.q_head(h)) * s.K, dw);
      }

      // Backward in time: R_t = dfinal_state + scale sum_{i >= t} phi(q_i) dn_i^T, r_t = dfinal_z + scale sum phi(q_i) dd_i;
      // dphi(k_t) = R_t v_t + r_t, dv_t = R_t^T phi(k_t). Shifted: phi(q_i) / den_i = exp(q_i - den_i) as one exponential.
      r.sums.load(grads.dfinal_state, grads.dfinal_z, n, h, s);
      const auto absorb_query = [&](int64_t t) {
        load_row(args.q, at.b, t, s.q_head(h), r.x);
        double dd;
        if (s.shifted) {
          const double saved = load_at(out.den, at.b, t, h);
          if (saved == kMinusInfinity) return;
          dd = incoming(t, saved);
          for (int64_t c = 0; c < s.F; ++c) r.f[c] = s.scale * r.sums.enter(c, r.x[c] - saved, s.V);
        } else {
          dd = incoming(t, 0);
          walk.map.apply(r.x, r.f);
          for (int64_t c = 0; c < s.F; ++c) r.f[c] *= s.scale;
        }
        r.sums.add(r.f, r.v, dd, s);
      };
      const auto key = [&](int64_t j) {
        if (!kept(args, at.b, j)) return;
        load_row(args.k, at.b, j, s.k_head(h), r.x);
        load_row(args.v, at.b, j, s.v_head(h), r.v);
        if (s.shifted) {
          for (int64_t c = 0; c < s.F; ++c) r.f[c] = std::exp(r.x[c] + r.sums.unit[c]);
        } else {
          walk.map.apply(r.x, r.f);
        }
        double* dv = r.dv + ((at.b * s.S + j) * s.Hv + s.v_head(h)) * s.V;
        for (int64_t c = 0; c < s.F; ++c) {
          double sum = r.sums.vector[c];
          for (int64_t i = 0; i < s.V; ++i) {
            sum += r.sums.matrix[c * s.V + i] * r.v[i];
            dv[i] += r.sums.matrix[c * s.V + i] * r.f[c];
          }
          r.df[c] = sum;
        }
        walk.map.backward(r.x, r.f, r.df, r.dk + ((at.b * s.S + j) * s.Hk + s.k_head(h)) * s.K, dw);
      };
      if (!args.causal) {
        for (int64_t t = at.q1; t-- > at.q0;) absorb_query(t);
      }
      for (int64_t j = at.k1; j-- > at.k0;) {
        if (args.causal) absorb_query(j);
        key(j);
      }
      r.sums.store(grads.dinitial_state, grads.dinitial_z, n, h, s);
    }
  }

  const auto store = [](const View& view, const double* rows) {
    if (!view.given()) return;
    for (int64_t b = 0; b < view.size[0]; ++b) {
      for (int64_t t = 0; t < view.size[1]; ++t) {
        for (int64_t h = 0; h < view.size[2]; ++h, rows += view.size[3]) store_row(view, b, t, h, rows);
      }
    }
  };
  store(grads.dq, r.dq);
  store(grads.dk, r.dk);
  store(grads.dv, r.dv);
  for (int64_t i = 0; grads.dw.given() && i < args.w.elements(); ++i) {
    store_at(grads.dw, i / (s.F * s.K), i / s.K % s.F, i % s.K, r.dw[i]);
  }
}

int64_t linear_workspace(const LinearArgs& args, Pass pass, int) {
  Arena arena;
  cut(arena, args, linear_shape(args), pass == Pass::backward);
  return arena.used();
}

void linear_decode_forward(const LinearDecodeArgs& args, const LinearDecodeOut& out, const Launch& launch) {
  const LinearShape s = linear_shape(args);
  Arena arena(launch.workspace);
  Scratch r = cut(arena, args, s, false);
  if (s.T == 0) return;  // nothing moves, not even between state and compensation
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t h = 0; h < s.H; ++h) {
      Walk walk(args, s, r, h);
      r.sums.load(args.state, args.z, b, h, s);
      const auto rest = [&](int64_t c, int64_t j) {  // index into args.compensation
        return b * args.compensation.stride[0] + h * args.compensation.stride[1] + c * args.compensation.stride[2] + j;
      };
      for (int64_t i = 0; args.compensation.given() && i < s.F * s.V; ++i) {
        r.sums.matrix[i] += load_f64(args.compensation.data, args.compensation.dtype, rest(i / s.V, i % s.V));
      }
      for (int64_t t = 0; t < s.T; ++t) {
        load_row(args.k, b, t, s.k_head(h), r.x);
        load_row(args.v, b, t, s.v_head(h), r.v);
        walk.absorb();
        load_row(args.q, b, t, s.q_head(h), r.x);
        walk.read();
        store_row(out.out, b, t, h, r.o);
      }
      r.sums.store(args.state, args.z, b, h, s);
      // What the state's type could not hold.
      for (int64_t i = 0; args.compensation.given() && i < s.F * s.V; ++i) {
        const int64_t c = i / s.V, j = i % s.V;
        const double held = load_f64(args.state.data, args.state.dtype,
                                     b * args.state.stride[0] + h * args.state.stride[1] + c * args.state.stride[2] + j);
        const double exact = r.sums.matrix[i] == 0 ? 0 : std::exp(r.sums.unit[c]) * r.sums.matrix[i];
        store_f64(args.compensation.data, args.compensation.dtype, rest(c, j), exact - held);
      }
    }
  }
}

int64_t linear_decode_workspace(const LinearDecodeArgs& args, Pass, int) {
  Arena arena;
  cut(arena, args, linear_shape(args), false);
  return arena.used();
}

}  // namespace linnet::ref
