// The plain double-precision loops of Taylor attention: features as written on the page, sums token by token.
#include <cmath>

#include "mechanisms/shared/mapped_ref.h"
#include "mechanisms/shared/ref_rows.h"
#include "taylor.h"

namespace linnet::ref {
namespace {

// dx += J^T dy of y = x / (|x| + eps)
void unit_backward(int64_t n, const double* x, const double* dy, double eps, double* dx) {
  double square = 0, dot = 0;
  for (int64_t c = 0; c < n; ++c) {
    square += x[c] * x[c];
    dot += x[c] * dy[c];
  }
  const double norm = std::sqrt(square);
  if (norm == 0) return;
  for (int64_t c = 0; c < n; ++c) dx[c] += (dy[c] - x[c] * dot / (norm * (norm + eps))) / (norm + eps);
}
void unit(int64_t n, const double* x, double eps, double* y) {
  double square = 0;
  for (int64_t c = 0; c < n; ++c) square += x[c] * x[c];
  const double norm = std::sqrt(square) + eps;
  for (int64_t c = 0; c < n; ++c) y[c] = norm == 0 ? 0 : x[c] / norm;
}

class Map final : public RowMap {
 public:
  explicit Map(const TaylorMap& map) : m_(map) {
    K = map.K;
    F = map.F;
  }
  View ape;                // qt_layer: added to keys, [T, H, K]
  View dape;               // its gradient, doubles
  double* rows = nullptr;  // [4, K] scratch
  double scalars[3] = {};  // gradients of alpha, beta, gamma, or of the constant

  void apply(const RowPlace& at, const double* given, double* f) const override {
    const double* x = moved(at, given);
    switch (m_.mode) {
      case TaylorMode::exact: {
        const double root = std::sqrt(m_.scale);
        int64_t n = 0;
        f[n++] = 1;
        for (int64_t i = 0; i < K; ++i) f[n++] = root * x[i];
        for (int64_t i = 0; i < K; ++i) f[n++] = root * x[i] * root * x[i] / std::sqrt(2.0);
        for (int64_t i = 0; i < K; ++i) {
          for (int64_t j = i + 1; j < K; ++j) f[n++] = root * x[i] * root * x[j];
        }
        break;
      }
      case TaylorMode::compact:
        for (int64_t i = 0; i < K; ++i) {
          f[i] = std::sqrt(0.5) * m_.alpha * x[i] * x[i];
          f[K + i] = std::sqrt(0.5) * m_.beta * std::sqrt(2 * m_.scale) * x[i];
        }
        f[2 * K] = std::sqrt(0.5) * m_.gamma;
        f[2 * K + 1] = std::sqrt(0.5);
        break;
      case TaylorMode::compact_l2: {
        double* x1 = rows;
        unit(K, x, m_.eps, x1);
        for (int64_t i = 0; i < K; ++i) x1[i] *= x1[i];
        unit(K, x1, m_.eps, f);
        f[K] = m_.constant;
        break;
      }
    }
  }
  void backward(const RowPlace& at, const double* given, const double* df, double* dx) override {
    const double* x = moved(at, given);
    switch (m_.mode) {
      case TaylorMode::exact: {
        const double root = std::sqrt(m_.scale);
        int64_t n = 1;
        for (int64_t i = 0; i < K; ++i) dx[i] += root * df[n++];
        for (int64_t i = 0; i < K; ++i) dx[i] += std::sqrt(2.0) * m_.scale * x[i] * df[n++];
        for (int64_t i = 0; i < K; ++i) {
          for (int64_t j = i + 1; j < K; ++j, ++n) {
            dx[i] += m_.scale * x[j] * df[n];
            dx[j] += m_.scale * x[i] * df[n];
          }
        }
        break;
      }
      case TaylorMode::compact:
        for (int64_t i = 0; i < K; ++i) {
          dx[i] += std::sqrt(0.5) * (2 * m_.alpha * x[i] * df[i] + m_.beta * std::sqrt(2 * m_.scale) * df[K + i]);
          scalars[0] += std::sqrt(0.5) * x[i] * x[i] * df[i];
          scalars[1] += std::sqrt(0.5) * std::sqrt(2 * m_.scale) * x[i] * df[K + i];
        }
        scalars[2] += std::sqrt(0.5) * df[2 * K];
        break;
      case TaylorMode::compact_l2: {
        double *x1 = rows, *x2 = rows + K, *dx2 = rows + 2 * K, *dx1 = rows + 3 * K;
        unit(K, x, m_.eps, x1);
        for (int64_t i = 0; i < K; ++i) {
          x2[i] = x1[i] * x1[i];
          dx2[i] = 0;
        }
        unit_backward(K, x2, df, m_.eps, dx2);
        for (int64_t i = 0; i < K; ++i) dx1[i] = 2 * x1[i] * dx2[i];
        for (int64_t i = 0; i < K; ++i) dx2[i] = 0;
        unit_backward(K, x, dx1, m_.eps, dx2);
        for (int64_t i = 0; i < K; ++i) {
          dx[i] += dx2[i];
          if (at.key && dape.given()) *dape.at<double>(at.t, at.h, i) += dx2[i];
        }
        scalars[0] += df[K];
        break;
      }
    }
  }

 private:
  const double* moved(const RowPlace& at, const double* x) const {
    if (!at.key || !ape.given()) return x;
    double* row = rows + 4 * K;
    for (int64_t i = 0; i < K; ++i) row[i] = x[i] + get(ape, at.t, at.h, i);
    return row;
  }
  TaylorMap m_;
};

template <class Args>
MappedCall call_of(const Args& args, double eps) {
  MappedCall call;
  call.q = args.q;
  call.k = args.k;
  call.v = args.v;
  call.eps = eps;
  return call;
}
template <class Args>
MappedCall masked_call_of(const Args& args) {
  MappedCall call = call_of(args, args.eps);
  call.key_mask = args.key_mask;
  call.causal = args.causal;
  return call;
}
template <class Out>
void set_out(MappedCall* call, const Out& out) {
  call->out = out.out;
  call->den = out.den;
  call->phi_q = out.phi_q;
  call->final_state = out.final_state;
  call->final_z = out.final_z;
}
template <class Grads>
void set_grads(MappedCall* call, const Grads& grads) {
  call->dout = grads.dout;
  call->dq = grads.dq;
  call->dk = grads.dk;
  call->dv = grads.dv;
}

TaylorMap map_of(const TaylorExactArgs& args) {
  return taylor_map(TaylorMode::exact, args.q.size[3], taylor_scale(args.scale, args.q.size[3]));
}
TaylorMap map_of(const TaylorCompactArgs& args) {
  TaylorMap m = taylor_map(TaylorMode::compact, args.q.size[3], taylor_scale(args.scale, args.q.size[3]));
  m.alpha = get(args.alpha, 0);
  m.beta = get(args.beta, 0);
  m.gamma = get(args.gamma, 0);
  return m;
}
TaylorMap map_of(const TaylorCompactL2Args& args) {
  TaylorMap m = taylor_map(TaylorMode::compact_l2, args.q.size[3], 1);
  m.constant = get(args.constant, 0);
  m.eps = args.eps;
  return m;
}
TaylorMap map_of(const TaylorQtArgs& args) {
  TaylorMap m = taylor_map(TaylorMode::compact_l2, args.q.size[3], 1);
  m.constant = get(args.constant, 0);
  m.eps = args.eps;
  return m;
}
TaylorMap map_of(const TaylorDecodeArgs& args) {
  TaylorMap m = taylor_map(args.mode, args.q.size[3], taylor_scale(args.scale, args.q.size[3]));
  if (args.mode == TaylorMode::compact) {
    m.alpha = get(args.alpha, 0);
    m.beta = get(args.beta, 0);
    m.gamma = get(args.gamma, 0);
  }
  if (args.mode == TaylorMode::compact_l2) m.constant = get(args.constant, 0);
  m.eps = args.eps.value_or(args.mode == TaylorMode::compact_l2 ? 1e-15 : 1e-12);
  return m;
}

void put_scalar(const View& view, double x) {
  if (view.given()) put(view, x, 0);
}

}  // namespace

#define TAYLOR_REF(stem, Args, Out, Grads)                                                           \
  void stem##_forward(const Args& args, const Out& out, const Launch& launch) {                      \
    Arena arena(launch.workspace);                                                                   \
    Map map(map_of(args));                                                                           \
    MappedCall call = masked_call_of(args);                                                          \
    set_out(&call, out);                                                                             \
    map.rows = arena.take<double>(5 * map.K);                                                        \
    mapped_forward(call, map, cut_mapped(arena, map, call));                                         \
  }                                                                                                  \
  int64_t stem##_workspace(const Args& args, Pass, int) {                                            \
    Arena arena;                                                                                     \
    TaylorMap shape = shape_of(args);                                                                \
    const Map map(shape);                                                                            \
    arena.take<double>(5 * map.K);                                                                   \
    cut_mapped(arena, map, masked_call_of(args));                                                    \
    return arena.used();                                                                             \
  }                                                                                                  \
  void stem##_backward(const Args& args, const Out& out, const Grads& grads, const Launch& launch) { \
    Arena arena(launch.workspace);                                                                   \
    Map map(map_of(args));                                                                           \
    MappedCall call = masked_call_of(args);                                                          \
    set_out(&call, out);                                                                             \
    set_grads(&call, grads);                                                                         \
    map.rows = arena.take<double>(5 * map.K);                                                        \
    mapped_backward(call, map, cut_mapped(arena, map, call));                                        \
    put_scalars(grads, map.scalars);                                                                 \
  }

namespace {
// The workspace is asked for before values exist: widths alone.
TaylorMap shape_of(const TaylorExactArgs& args) { return taylor_map(TaylorMode::exact, args.q.size[3], 1); }
TaylorMap shape_of(const TaylorCompactArgs& args) { return taylor_map(TaylorMode::compact, args.q.size[3], 1); }
TaylorMap shape_of(const TaylorCompactL2Args& args) { return taylor_map(TaylorMode::compact_l2, args.q.size[3], 1); }
void put_scalars(const TaylorExactGrads&, const double*) {}
void put_scalars(const TaylorCompactGrads& grads, const double* scalars) {
  put_scalar(grads.dalpha, scalars[0]);
  put_scalar(grads.dbeta, scalars[1]);
  put_scalar(grads.dgamma, scalars[2]);
}
void put_scalars(const TaylorCompactL2Grads& grads, const double* scalars) { put_scalar(grads.dconstant, scalars[0]); }
}  // namespace

TAYLOR_REF(taylor_exact, TaylorExactArgs, TaylorOut, TaylorExactGrads)
TAYLOR_REF(taylor_compact, TaylorCompactArgs, TaylorOut, TaylorCompactGrads)
TAYLOR_REF(taylor_compact_l2, TaylorCompactL2Args, TaylorOut, TaylorCompactL2Grads)

// ---- QT-ViT's module

namespace {

double gelu(double x) { return 0.5 * x * std::erfc(-x * std::sqrt(0.5)); }
double gelu_slope(double x) {
  return 0.5 * std::erfc(-x * std::sqrt(0.5)) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * 3.14159265358979323846);
}

struct Qt {
  View rows, den, dape;
  MappedScratch s;
  double* map_rows;
};
Qt cut_qt(Arena& arena, const TaylorQtArgs& args, const Map& map) {
  Qt qt;
  qt.rows = View::dense(arena.take<double>(args.q.elements()), Dtype::f64, args.q.size, 4);
  qt.den = View::dense(arena.take<double>(args.q.size[0] * args.q.size[1] * args.q.size[2]), Dtype::f64, args.q.size, 3);
  qt.dape = View::dense(arena.take<double>(args.ape.elements()), Dtype::f64, args.ape.size, 3);
  qt.map_rows = arena.take<double>(5 * map.K);
  qt.s = cut_mapped(arena, map, call_of(args, args.eps));
  return qt;
}

}  // namespace

void taylor_qt_layer_forward(const TaylorQtArgs& args, const TaylorQtOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  Map map(map_of(args));
  const Qt qt = cut_qt(arena, args, map);
  map.rows = qt.map_rows;
  map.ape = args.ape;
  MappedCall call = call_of(args, args.eps);
  call.causal = args.causal;
  call.out = qt.rows;
  mapped_forward(call, map, qt.s);
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    for (int64_t t = 0; t < args.q.size[1]; ++t) {
      for (int64_t h = 0; h < args.q.size[2]; ++h) {
        for (int64_t c = 0; c < map.K; ++c) {
          const double slope = get(args.bn_weight, c) / std::sqrt(get(args.bn_var, c) + args.bn_eps);
          const double y = (get(args.v, b, t, h, c) - get(args.bn_mean, c)) * slope + get(args.bn_bias, c);
          put(out.out, *qt.rows.at<double>(b, t, h, c) + gelu(y), b, t, h, c);
        }
      }
    }
  }
}

void taylor_qt_layer_backward(const TaylorQtArgs& args, const TaylorQtOut&, const TaylorQtGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  Map map(map_of(args));
  const Qt qt = cut_qt(arena, args, map);
  map.rows = qt.map_rows;
  map.ape = args.ape;
  map.dape = qt.dape;
  for (int64_t i = 0; i < args.ape.elements(); ++i) static_cast<double*>(qt.dape.data)[i] = 0;
  MappedCall call = call_of(args, args.eps);
  call.causal = args.causal;
  call.out = qt.rows;
  call.den = qt.den;
  call.forward_mean = true;
  mapped_forward(call, map, qt.s);
  set_grads(&call, grads);
  call.dv = View();
  // dv is written over the attention's output, row by row, after the last use of that row: it needs rows of its own
  const View dv = View::dense(arena.take<double>(args.q.elements()), Dtype::f64, args.q.size, 4);
  call.dv = dv;
  mapped_backward(call, map, qt.s);
  put_scalar(grads.dconstant, map.scalars[0]);
  for (int64_t i = 0; grads.dape.given() && i < args.ape.elements(); ++i) {
    const int64_t c = i % map.K, h = i / map.K % args.q.size[2], t = i / (map.K * args.q.size[2]);
    put(grads.dape, static_cast<double*>(qt.dape.data)[i], t, h, c);
  }
  for (int64_t c = 0; c < map.K; ++c) {
    double dweight = 0, dbias = 0;
    const double inverse = 1 / std::sqrt(get(args.bn_var, c) + args.bn_eps), weight = get(args.bn_weight, c);
    for (int64_t b = 0; b < args.q.size[0]; ++b) {
      for (int64_t t = 0; t < args.q.size[1]; ++t) {
        for (int64_t h = 0; h < args.q.size[2]; ++h) {
          const double normal = (get(args.v, b, t, h, c) - get(args.bn_mean, c)) * inverse;
          const double g = grads.dout.given() ? get(grads.dout, b, t, h, c) : 0;
          const double d = g * gelu_slope(normal * weight + get(args.bn_bias, c));
          dweight += d * normal;
          dbias += d;
          if (grads.dv.given()) put(grads.dv, *dv.at<double>(b, t, h, c) + d * weight * inverse, b, t, h, c);
        }
      }
    }
    if (grads.dbn_weight.given()) put(grads.dbn_weight, dweight, c);
    if (grads.dbn_bias.given()) put(grads.dbn_bias, dbias, c);
  }
}
int64_t taylor_qt_layer_workspace(const TaylorQtArgs& args, Pass, int) {
  Arena arena;
  const Map map(taylor_map(TaylorMode::compact_l2, args.q.size[3], 1));
  cut_qt(arena, args, map);
  arena.take<double>(args.q.elements());
  return arena.used();
}

void taylor_decode_forward(const TaylorDecodeArgs& args, const TaylorDecodeOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  Map map(map_of(args));
  map.rows = arena.take<double>(5 * map.K);
  MappedCall call = call_of(args, args.eps.value_or(args.mode == TaylorMode::compact_l2 ? 1e-15 : 1e-12));
  call.out = out.out;
  call.final_state = args.state;
  call.final_z = args.z;
  mapped_decode(call, map, 0, cut_mapped(arena, map, call));
}
int64_t taylor_decode_workspace(const TaylorDecodeArgs& args, Pass, int) {
  Arena arena;
  const Map map(taylor_map(args.mode, args.q.size[3], 1));
  arena.take<double>(5 * map.K);
  cut_mapped(arena, map, call_of(args, 0));
  return arena.used();
}

}  // namespace linnet::ref
