// The specification of `mamba_ssd` and its decode step: delta x and delta A in double, then the plain loop of `recurrence`,
// then skip and gate. (q = C, k = B, v = delta x, g = delta A, scale 1.)
#include <cmath>

#include "core/element.h"
#include "mechanisms/recurrence/recurrence.h"
#include "ssd.h"

namespace linnet::ref {
namespace {

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double softplus(double x) { return std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x))); }

template <class Args>
struct Step {
  const Args& args;
  double raw(int64_t b, int64_t t, int64_t h) const {
    return element(args.dt, b, t, h) + (args.dt_bias.given() ? element(args.dt_bias, h) : 0);
  }
  double delta(int64_t b, int64_t t, int64_t h) const {
    const double x = std::fmax(softplus(raw(b, t, h)), args.dt_min);
    return args.dt_max.given ? std::fmin(x, args.dt_max.value) : x;
  }
  double slope(int64_t b, int64_t t, int64_t h) const {  // of delta in dt; 0 where clamped
    const double x = softplus(raw(b, t, h));
    return x < args.dt_min || (args.dt_max.given && x > args.dt_max.value) ? 0 : sigmoid(raw(b, t, h));
  }
  double skip(int64_t h, int64_t j) const {
    if (!args.D.given()) return 0;
    return args.D.rank == 2 ? element(args.D, h, j) : element(args.D, h);
  }
  double gate(int64_t b, int64_t t, int64_t h, int64_t j) const {
    if (!args.z.given()) return 1;
    const double z = element(args.z, b, t, h, j);
    return z * sigmoid(z);
  }
};

template <class Body>
void each_token(const View& x, const Body& body) {
  for (int64_t b = 0; b < x.size[0]; ++b) {
    for (int64_t t = 0; t < x.size[1]; ++t) {
      for (int64_t h = 0; h < x.size[2]; ++h) body(b, t, h);
    }
  }
}

View dense(Arena& arena, const View& like, int rank) {
  return View::dense(arena.take<double>(View::dense(nullptr, Dtype::f64, like.size, rank).elements()), Dtype::f64, like.size,
                     rank);
}
void copy(const View& from, const View& to) {
  for (int64_t i = 0; i < to.size[0]; ++i) {
    for (int64_t j = 0; j < to.size[1]; ++j) {
      for (int64_t k = 0; k < to.size[2]; ++k) {
        for (int64_t l = 0; l < to.size[3]; ++l) set_element(to, element(from, i, j, k, l), i, j, k, l);
      }
    }
  }
}

// The recurrence's inputs in double.
template <class Target, class Args>
Target inner_args(Arena& arena, const Args& args, bool fill) {
  Target r;
  r.q = dense(arena, args.C, 4);
  r.k = dense(arena, args.B, 4);
  r.v = dense(arena, args.x, 4);
  r.g = dense(arena, args.x, 3);
  r.scale = 1.0;
  if (!fill) return r;
  copy(args.C, r.q);
  copy(args.B, r.k);
  const Step<Args> step{args};
  each_token(args.x, [&](int64_t b, int64_t t, int64_t h) {
    const double delta = step.delta(b, t, h);
    set_element(r.g, delta == 0 ? 0 : delta * element(args.A, h), b, t, h);
    for (int64_t j = 0; j < args.x.size[3]; ++j) set_element(r.v, delta * element(args.x, b, t, h, j), b, t, h, j);
  });
  return r;
}
RecurrenceArgs inner(Arena& arena, const SsdArgs& args, bool fill) {
  RecurrenceArgs r = inner_args<RecurrenceArgs>(arena, args, fill);
  r.cu_seqlens = args.cu_seqlens;
  if (args.initial_state.given()) {
    r.initial_state = dense(arena, args.initial_state, 4);
    if (fill) copy(args.initial_state, r.initial_state);
  }
  return r;
}

template <class Args>
void finish(const Args& args, const View& read, const View& out) {
  const Step<Args> step{args};
  each_token(args.x, [&](int64_t b, int64_t t, int64_t h) {
    for (int64_t j = 0; j < args.x.size[3]; ++j) {
      const double y = element(read, b, t, h, j) + step.skip(h, j) * element(args.x, b, t, h, j);
      set_element(out, y * step.gate(b, t, h, j), b, t, h, j);
    }
  });
}

int64_t sequences(const SsdArgs& args) { return args.cu_seqlens.given() ? args.cu_seqlens.size[0] - 1 : args.x.size[0]; }
View state_shape(const SsdArgs& args) {
  View v;
  v.size[0] = sequences(args);
  v.size[1] = args.x.size[2];
  v.size[2] = args.B.size[3];
  v.size[3] = args.x.size[3];
  return v;
}

}  // namespace

void mamba_ssd_forward(const SsdArgs& args, const SsdOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const RecurrenceArgs r = inner(arena, args, true);
  RecurrenceOut o;
  o.out = dense(arena, args.x, 4);
  o.final_state = dense(arena, state_shape(args), 4);
  Launch rest = launch;
  rest.workspace = launch.workspace + arena.used();
  recurrence_forward(r, o, rest);
  finish(args, o.out, out.out);
  if (out.final_state.given()) copy(o.final_state, out.final_state);
}

void mamba_ssd_backward(const SsdArgs& args, const SsdOut&, const SsdGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const RecurrenceArgs r = inner(arena, args, true);
  RecurrenceOut o;
  o.out = dense(arena, args.x, 4);
  o.final_state = dense(arena, state_shape(args), 4);
  RecurrenceGrads d;
  d.dout = dense(arena, args.x, 4);
  d.dq = dense(arena, args.C, 4);
  d.dk = dense(arena, args.B, 4);
  d.dv = dense(arena, args.x, 4);
  d.dg = dense(arena, args.x, 3);
  if (grads.dfinal_state.given()) {
    d.dfinal_state = dense(arena, state_shape(args), 4);
    copy(grads.dfinal_state, d.dfinal_state);
  }
  d.dinitial_state = args.initial_state.given() ? dense(arena, args.initial_state, 4) : View();
  const int64_t H = args.x.size[2], V = args.x.size[3];
  double* dA = arena.take<double>(H);
  double* dbias = arena.take<double>(H);
  double* dD = arena.take<double>(H * V);
  Launch rest = launch;
  rest.workspace = launch.workspace + arena.used();
  recurrence_forward(r, o, rest);
  const Step<SsdArgs> step{args};
  for (int64_t i = 0; i < H; ++i) dA[i] = dbias[i] = 0;
  for (int64_t i = 0; i < H * V; ++i) dD[i] = 0;
  each_token(args.x, [&](int64_t b, int64_t t, int64_t h) {  // undo the gate
    for (int64_t j = 0; j < V; ++j) {
      const double x = element(args.x, b, t, h, j), y = element(o.out, b, t, h, j) + step.skip(h, j) * x;
      const double dout = grads.dout.given() ? element(grads.dout, b, t, h, j) : 0, dy = dout * step.gate(b, t, h, j);
      set_element(d.dout, dy, b, t, h, j);
      dD[h * V + j] += dy * x;
      if (!grads.dz.given()) continue;
      const double z = element(args.z, b, t, h, j), s = sigmoid(z);
      set_element(grads.dz, dout * y * s * (1 + z * (1 - s)), b, t, h, j);
    }
  });
  recurrence_backward(r, o, d, rest);
  each_token(args.x, [&](int64_t b, int64_t t, int64_t h) {
    const double delta = step.delta(b, t, h), dg = element(d.dg, b, t, h);
    double ddelta = element(args.A, h) * dg;
    for (int64_t j = 0; j < V; ++j) {
      const double x = element(args.x, b, t, h, j), dv = element(d.dv, b, t, h, j);
      ddelta += dv * x;
      if (grads.dx.given()) set_element(grads.dx, delta * dv + step.skip(h, j) * element(d.dout, b, t, h, j), b, t, h, j);
    }
    const double ddt = ddelta * step.slope(b, t, h);
    dA[h] += delta * dg;
    dbias[h] += ddt;
    if (grads.ddt.given()) set_element(grads.ddt, ddt, b, t, h);
  });
  if (grads.dC.given()) copy(d.dq, grads.dC);
  if (grads.dB.given()) copy(d.dk, grads.dB);
  if (grads.dinitial_state.given()) copy(d.dinitial_state, grads.dinitial_state);
  for (int64_t h = 0; h < H; ++h) {
    if (grads.dA.given()) set_element(grads.dA, dA[h], h);
    if (grads.ddt_bias.given()) set_element(grads.ddt_bias, dbias[h], h);
    double sum = 0;
    for (int64_t j = 0; grads.dD.given() && j < V; ++j) {
      sum += dD[h * V + j];
      if (grads.dD.rank == 2) set_element(grads.dD, dD[h * V + j], h, j);
    }
    if (grads.dD.given() && grads.dD.rank == 1) set_element(grads.dD, sum, h);
  }
}

int64_t mamba_ssd_workspace(const SsdArgs& args, Pass pass, int workers) {
  Arena arena;
  const RecurrenceArgs r = inner(arena, args, false);
  for (int i = 0; i < 3; ++i) dense(arena, args.x, 4);
  dense(arena, args.C, 4);
  dense(arena, args.B, 4);
  dense(arena, args.x, 4);
  dense(arena, args.x, 3);
  for (int i = 0; i < 3; ++i) dense(arena, state_shape(args), 4);
  arena.take<double>(args.x.size[2] * (args.x.size[3] + 2) + 64);
  const int64_t forward = recurrence_workspace(r, Pass::forward, workers);
  const int64_t backward = pass == Pass::backward ? recurrence_workspace(r, Pass::backward, workers) : 0;
  return arena.used() + (forward > backward ? forward : backward);
}

void mamba_ssd_decode_forward(const SsdDecodeArgs& args, const SsdDecodeOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  RecurrenceDecodeArgs r = inner_args<RecurrenceDecodeArgs>(arena, args, true);
  r.state = dense(arena, args.state, 4);
  copy(args.state, r.state);
  const RecurrenceDecodeOut o{dense(arena, args.x, 4)};
  Launch rest = launch;
  rest.workspace = launch.workspace + arena.used();
  recurrence_decode_forward(r, o, rest);
  finish(args, o.out, out.out);
  copy(r.state, args.state);
}

int64_t mamba_ssd_decode_workspace(const SsdDecodeArgs& args, Pass, int workers) {
  Arena arena;
  RecurrenceDecodeArgs r = inner_args<RecurrenceDecodeArgs>(arena, args, false);
  r.state = dense(arena, args.state, 4);
  dense(arena, args.x, 4);
  return arena.used() + recurrence_decode_workspace(r, Pass::forward, workers);
}

}  // namespace linnet::ref
