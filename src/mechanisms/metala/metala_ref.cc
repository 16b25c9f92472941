// The specification of `metala_mixer`, `metala_core` and the decode step: log decays and keys in double, then the plain loop of
// `recurrence` with a decay per channel, then the augmentation. Backward: the tie k = 1 - exp(g) adds -exp(g) dk to dg.
#include <cmath>

#include "core/element.h"
#include "mechanisms/recurrence/recurrence.h"
#include "metala.h"

namespace linnet::ref {
namespace {

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double logsigmoid(double x) { return std::fmin(x, 0) - std::log1p(std::exp(-std::fabs(x))); }

View dense(Arena& arena, const View& like) {
  const View shape = View::dense(nullptr, Dtype::f64, like.size, 4);
  return View::dense(arena.take<double>(shape.elements()), Dtype::f64, like.size, 4);
}
template <class Body>
void each(const View& x, const Body& body) {  // body(b, t, h, c)
  for (int64_t i = 0; i < x.size[0]; ++i) {
    for (int64_t j = 0; j < x.size[1]; ++j) {
      for (int64_t k = 0; k < x.size[2]; ++k) {
        for (int64_t l = 0; l < x.size[3]; ++l) body(i, j, k, l);
      }
    }
  }
}
void copy(const View& from, const View& to) {
  each(to, [&](auto... at) { set_element(to, element(from, at...), at...); });
}

template <class Args>
double raw_decay(const Args& args, int64_t b, int64_t t, int64_t h, int64_t c) {  // before the floor
  if constexpr (requires { args.tau; }) {
    return logsigmoid(element(args.a, b, t, h, c)) / args.tau;
  } else {
    return element(args.g, b, t, h, c);
  }
}
template <class Args>
double log_decay(const Args& args, int64_t b, int64_t t, int64_t h, int64_t c) {
  if (metala_skipped(args, b, t)) return 0;
  return std::fmax(raw_decay(args, b, t, h, c), args.floor);
}

template <class Target, class Args>
Target inner(Arena& arena, const Args& args, bool fill) {
  Target r;
  r.q = dense(arena, args.q);
  r.k = dense(arena, args.q);
  r.g = dense(arena, args.q);
  r.v = dense(arena, args.v);
  r.scale = args.scale;
  View Target::*before;
  if constexpr (requires { r.state; }) {
    before = &Target::state;
  } else {
    before = &Target::initial_state;
    r.cu_seqlens = args.cu_seqlens;
  }
  if (args.state.given()) r.*before = dense(arena, args.state);
  if (!fill) return r;
  copy(args.q, r.q);
  if (args.state.given()) copy(args.state, r.*before);
  each(args.q, [&](int64_t b, int64_t t, int64_t h, int64_t c) {
    const double g = log_decay(args, b, t, h, c);
    set_element(r.g, g, b, t, h, c);
    set_element(r.k, -std::expm1(g), b, t, h, c);
  });
  each(args.v, [&](int64_t b, int64_t t, int64_t h, int64_t c) {
    set_element(r.v, metala_masked(args, b, t) ? 0 : element(args.v, b, t, h, c), b, t, h, c);
  });
  return r;
}

// u_t = sum_d q_td w_aug_d k_td
template <class Args, class Inner>
double strength(const Args& args, const Inner& r, int64_t b, int64_t t, int64_t h) {
  double u = 0;
  for (int64_t c = 0; args.w_aug.given() && c < r.q.size[3]; ++c) {
    u += element(r.q, b, t, h, c) * element(args.w_aug, h, c) * element(r.k, b, t, h, c);
  }
  return u;
}
template <class Args, class Inner>
void finish(const Args& args, const Inner& r, const View& read, const View& out) {
  for (int64_t b = 0; b < out.size[0]; ++b) {
    for (int64_t t = 0; t < out.size[1]; ++t) {
      for (int64_t h = 0; h < out.size[2]; ++h) {
        double u = 0;
        if constexpr (requires { args.w_aug; }) u = strength(args, r, b, t, h);
        for (int64_t j = 0; j < out.size[3]; ++j) {
          double y = element(read, b, t, h, j);
          if constexpr (requires { args.aug; }) {
            const double x = u * element(r.v, b, t, h, j);
            y += args.aug == MetalaAug::sigmoid ? sigmoid(x) : args.aug == MetalaAug::linear ? x : 0;
          }
          set_element(out, y, b, t, h, j);
        }
      }
    }
  }
}

template <class Args>
View state_shape(const Args& args) {
  View v;
  v.size[0] = args.cu_seqlens.given() ? args.cu_seqlens.size[0] - 1 : args.q.size[0];
  v.size[1] = args.q.size[2];
  v.size[2] = args.q.size[3];
  v.size[3] = args.v.size[3];
  return v;
}

template <class Args, class Out>
void forward(const Args& args, const Out& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const auto r = inner<RecurrenceArgs>(arena, args, true);
  const RecurrenceOut o{dense(arena, args.v), dense(arena, state_shape(args))};
  Launch rest = launch;
  rest.workspace = launch.workspace + arena.used();
  recurrence_forward(r, o, rest);
  finish(args, r, o.out, out.out);
  if (out.final_state.given()) copy(o.final_state, out.final_state);
}

template <class Args, class Grads>
void backward(const Args& args, const Grads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const auto r = inner<RecurrenceArgs>(arena, args, true);
  RecurrenceGrads d;
  d.dout = dense(arena, args.v);
  d.dq = dense(arena, args.q);
  d.dk = dense(arena, args.q);
  d.dg = dense(arena, args.q);
  d.dv = dense(arena, args.v);
  if (grads.dfinal_state.given()) {
    d.dfinal_state = dense(arena, state_shape(args));
    copy(grads.dfinal_state, d.dfinal_state);
  }
  if (args.state.given()) d.dinitial_state = dense(arena, args.state);
  const int64_t H = args.q.size[2], K = args.q.size[3], V = args.v.size[3];
  double* dw = arena.take<double>(H * K);
  for (int64_t i = 0; i < H * K; ++i) dw[i] = 0;
  Launch rest = launch;
  rest.workspace = launch.workspace + arena.used();
  each(args.v, [&](auto... at) { set_element(d.dout, grads.dout.given() ? element(grads.dout, at...) : 0, at...); });
  recurrence_backward(r, {}, d, rest);
  if constexpr (requires { args.aug; }) {
    for (int64_t row = 0; args.aug != MetalaAug::none && row < args.q.size[0] * args.q.size[1] * H; ++row) {
      const int64_t b = row / H / args.q.size[1], t = row / H % args.q.size[1], h = row % H;
      const double u = strength(args, r, b, t, h);
      double du = 0;
      for (int64_t j = 0; j < V; ++j) {
        const double v = element(r.v, b, t, h, j), y = sigmoid(u * v);
        const double slope = element(d.dout, b, t, h, j) * (args.aug == MetalaAug::sigmoid ? y * (1 - y) : 1);
        du += slope * v;
        set_element(d.dv, element(d.dv, b, t, h, j) + u * slope, b, t, h, j);
      }
      for (int64_t c = 0; args.w_aug.given() && c < K; ++c) {
        const double q = element(r.q, b, t, h, c), k = element(r.k, b, t, h, c), w = element(args.w_aug, h, c);
        set_element(d.dq, element(d.dq, b, t, h, c) + du * w * k, b, t, h, c);
        set_element(d.dk, element(d.dk, b, t, h, c) + du * w * q, b, t, h, c);
        dw[h * K + c] += du * q * k;
      }
    }
  }
  if (grads.dq.given()) copy(d.dq, grads.dq);
  each(args.v, [&](int64_t b, int64_t t, int64_t h, int64_t c) {
    if (grads.dv.given()) set_element(grads.dv, metala_masked(args, b, t) ? 0 : element(d.dv, b, t, h, c), b, t, h, c);
  });
  const View& wanted = [&]() -> const View& {
    if constexpr (requires { args.tau; }) {
      return grads.da;
    } else {
      return grads.dg;
    }
  }();
  each(args.q, [&](int64_t b, int64_t t, int64_t h, int64_t c) {
    if (!wanted.given()) return;
    double dg = element(d.dg, b, t, h, c) - std::exp(element(r.g, b, t, h, c)) * element(d.dk, b, t, h, c);
    if constexpr (requires { args.tau; }) {
      const bool still = metala_skipped(args, b, t) || raw_decay(args, b, t, h, c) <= args.floor;
      dg = still ? 0 : dg * sigmoid(-element(args.a, b, t, h, c)) / args.tau;
    } else if (raw_decay(args, b, t, h, c) < args.floor) {
      dg = 0;
    }
    set_element(wanted, dg, b, t, h, c);
  });
  if (grads.dstate.given()) copy(d.dinitial_state, grads.dstate);
  if constexpr (requires { grads.dw_aug; }) {
    for (int64_t i = 0; grads.dw_aug.given() && i < H * K; ++i) set_element(grads.dw_aug, dw[i], i / K, i % K);
  }
}

template <class Args>
int64_t workspace(const Args& args, Pass pass, int workers) {
  Arena arena;
  const auto r = inner<RecurrenceArgs>(arena, args, false);
  for (int i = 0; i < 3; ++i) dense(arena, args.q);
  for (int i = 0; i < 3; ++i) dense(arena, args.v);
  for (int i = 0; i < 2; ++i) dense(arena, state_shape(args));
  arena.take<double>(args.q.size[2] * args.q.size[3]);
  return arena.used() + recurrence_workspace(r, pass, workers);
}

}  // namespace

void metala_mixer_forward(const MetalaMixerArgs& args, const MetalaMixerOut& out, const Launch& launch) {
  forward(args, out, launch);
}
void metala_mixer_backward(const MetalaMixerArgs& args, const MetalaMixerOut&, const MetalaMixerGrads& grads,
                           const Launch& launch) {
  backward(args, grads, launch);
}
int64_t metala_mixer_workspace(const MetalaMixerArgs& args, Pass pass, int workers) { return workspace(args, pass, workers); }

void metala_core_forward(const MetalaCoreArgs& args, const MetalaCoreOut& out, const Launch& launch) {
  forward(args, out, launch);
}
void metala_core_backward(const MetalaCoreArgs& args, const MetalaCoreOut&, const MetalaCoreGrads& grads,
                          const Launch& launch) {
  backward(args, grads, launch);
}
int64_t metala_core_workspace(const MetalaCoreArgs& args, Pass pass, int workers) { return workspace(args, pass, workers); }

void metala_mixer_decode_forward(const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const auto r = inner<RecurrenceDecodeArgs>(arena, args, true);
  const RecurrenceDecodeOut o{dense(arena, args.v)};
  Launch rest = launch;
  rest.workspace = launch.workspace + arena.used();
  recurrence_decode_forward(r, o, rest);
  finish(args, r, o.out, out.out);
  copy(r.state, args.state);
}
int64_t metala_mixer_decode_workspace(const MetalaMixerDecodeArgs& args, Pass, int workers) {
  Arena arena;
  const auto r = inner<RecurrenceDecodeArgs>(arena, args, false);
  dense(arena, args.v);
  return arena.used() + recurrence_decode_workspace(r, Pass::forward, workers);
}

}  // namespace linnet::ref
