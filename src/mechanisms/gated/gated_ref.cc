// The specification of `gated`: the reference of softmax between two plain loops over the gate. Everything in double.
#include <cmath>

#include "core/half.h"
#include "core/op.h"
#include "gated.h"

namespace linnet::ref {
namespace {

double at(const View& x, int64_t b, int64_t t, int64_t h, int64_t c) {
  if (!x.given()) return 0;
  return load_f64(x.data, x.dtype, b * x.stride[0] + t * x.stride[1] + h * x.stride[2] + (x.rank > 3 ? c * x.stride[3] : 0));
}
void put(const View& x, int64_t b, int64_t t, int64_t h, int64_t c, double value) {
  if (!x.given()) return;
  store_f64(x.data, x.dtype, b * x.stride[0] + t * x.stride[1] + h * x.stride[2] + (x.rank > 3 ? c * x.stride[3] : 0), value);
}

double sigmoid(double g) {
  const double e = std::exp(-std::fabs(g));
  return g >= 0 ? 1 / (1 + e) : e / (1 + e);
}
double act(GateAct kind, double g) {
  switch (kind) {
    case GateAct::sigmoid: return sigmoid(g);
    case GateAct::ns_sigmoid: return 0.5 + 0.5 * sigmoid(g);
    case GateAct::silu: return g == -HUGE_VAL ? 0 : g * sigmoid(g);
    case GateAct::identity: break;
  }
  return g;
}
double slope(GateAct kind, double g) {
  switch (kind) {
    case GateAct::sigmoid: return sigmoid(g) * sigmoid(-g);
    case GateAct::ns_sigmoid: return 0.5 * sigmoid(g) * sigmoid(-g);
    case GateAct::silu: return std::isinf(g) ? (g > 0 ? 1 : 0) : sigmoid(g) * (1 + g * sigmoid(-g));
    case GateAct::identity: break;
  }
  return 1;
}

// The activated gate of one element.
double gate_at(const GateOptions& gate, const View& g, int64_t b, int64_t t, int64_t h, int64_t c) {
  if (!gate.shared) return act(gate.act, at(g, b, t, h, c));
  double sum = 0;
  for (int64_t i = 0; i < g.size[2]; ++i) sum += act(gate.act, at(g, b, t, i, c));
  return sum / static_cast<double>(g.size[2]);
}

// out = y gated. Any of them may be double scratch.
void apply(const GateOptions& gate, const View& y, const View& g, const View& out) {
  for (int64_t b = 0; b < y.size[0]; ++b) {
    for (int64_t t = 0; t < y.size[1]; ++t) {
      for (int64_t h = 0; h < y.size[2]; ++h) {
        for (int64_t c = 0; c < y.size[3]; ++c) {
          const double a = gate_at(gate, g, b, t, h, c), x = at(y, b, t, h, c);
          put(out, b, t, h, c, gate.mode == GateMode::add ? x + a : x * a);
        }
      }
    }
  }
}

// y dout of one element, where y is known (`y`), or from the gated output alone.
double read_times_dout(const View& y, const View& out, double a, double dout, int64_t b, int64_t t, int64_t h, int64_t c) {
  if (dout == 0) return 0;  // a key behind key_len: it may hold anything
  if (y.given()) return dout * at(y, b, t, h, c);
  return a == 0 ? 0 : dout * at(out, b, t, h, c) / a;
}

// dy and dg of a gate. y: what was gated; not given: its gated output tells it (sigmoid and ns_sigmoid, multiplied).
void gate_backward(const GateOptions& gate, const View& y, const View& out, const View& g, const View& dout, const View& dy,
                   const View& dg) {
  const View& shape = dy;
  const int64_t H = shape.size[2];
  const bool add = gate.mode == GateMode::add, headwise = gate.granularity == GateGranularity::headwise;
  for (int64_t b = 0; b < shape.size[0]; ++b) {
    for (int64_t t = 0; t < shape.size[1]; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        double head_sum = 0;
        for (int64_t c = 0; c < shape.size[3]; ++c) {
          const double a = gate_at(gate, g, b, t, h, c), d = at(dout, b, t, h, c);
          put(dy, b, t, h, c, add ? d : d * a);
          double da = 0;  // gradient of the activated gate
          if (gate.shared) {
            for (int64_t i = 0; i < H; ++i) {
              const double di = at(dout, b, t, i, c);
              da += add ? di : read_times_dout(y, out, a, di, b, t, i, c);
            }
            da /= static_cast<double>(H);
          } else {
            da = add ? d : read_times_dout(y, out, a, d, b, t, h, c);
          }
          const double one = da * slope(gate.act, at(g, b, t, h, c));
          head_sum += one;
          if (!headwise) put(dg, b, t, h, c, one);
        }
        if (headwise) put(dg, b, t, h, 0, head_sum);
      }
    }
  }
}

View dense_like(const View& x, Arena& arena) {
  return View::dense(arena.take<double>(x.elements()), Dtype::f64, x.size, x.rank);
}
View sized(Arena& arena, int64_t B, int64_t T, int64_t H, int64_t D) {
  return View::dense(arena.take<double>(B * T * H * D), Dtype::f64, {B, T, H, D});
}
View rows(Arena& arena, const View& q) {
  return View::dense(arena.take<double>(q.size[0] * q.size[1] * q.size[2]), Dtype::f64, {q.size[0], q.size[1], q.size[2]});
}
View read_of(Arena& arena, const GatedArgs& args) {
  return sized(arena, args.q.size[0], args.q.size[1], args.q.size[2], args.v.size[3]);
}
void copy(const View& from, const View& to) {
  for (int64_t b = 0; to.given() && b < to.size[0]; ++b) {
    for (int64_t t = 0; t < to.size[1]; ++t) {
      for (int64_t h = 0; h < to.size[2]; ++h) {
        for (int64_t c = 0; c < to.size[3]; ++c) put(to, b, t, h, c, at(from, b, t, h, c));
      }
    }
  }
}
void clear(const View& x) {
  for (int64_t i = 0; i < x.elements(); ++i) static_cast<double*>(x.data)[i] = 0;
}

// The call of softmax that a gated one makes: G2 to G4 replace one input by its gated form.
SoftmaxArgs inner(const GatedArgs& args, const View& replaced) {
  SoftmaxArgs plain = args;
  if (args.position == GatePosition::G2) plain.v = replaced;
  if (args.position == GatePosition::G3) plain.k = replaced;
  if (args.position == GatePosition::G4) plain.q = replaced;
  return plain;
}

}  // namespace

int64_t gated_workspace(const GatedArgs& args, Pass pass, int workers) {
  Arena arena;
  if (args.position == GatePosition::G1) {
    read_of(arena, args);
    read_of(arena, args);
    rows(arena, args.q);
  } else {
    for (int i = 0; i < 3; ++i) dense_like(gated_tensor(args), arena);
  }
  return arena.used() + softmax_workspace(args, pass, workers);
}

void gated_forward(const GatedArgs& args, const GatedOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  Launch rest = launch;
  const GateOptions gate = args.gate();
  if (gate.position != GatePosition::G1) {
    const View replaced = dense_like(gated_tensor(args), arena);
    rest.workspace += arena.used();
    apply(gate, gated_tensor(args), args.g, replaced);
    softmax_forward(inner(args, replaced), {.out = out.out, .lse = out.lse}, rest);
    return copy(out.out, out.y);
  }
  const View y = read_of(arena, args);
  rest.workspace += arena.used();
  softmax_forward(args, {.out = y, .lse = out.lse}, rest);
  apply(gate, y, args.g, out.out);
  copy(y, out.y);
  copy(y, out.kept);
}

void gated_backward(const GatedArgs& args, const GatedOut& out, const GatedGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  Launch rest = launch;
  const GateOptions gate = args.gate();
  SoftmaxGrads inner_grads{grads.dout, grads.dlse, grads.dq, grads.dk, grads.dv, grads.dbias, grads.dsinks};
  if (gate.position != GatePosition::G1) {
    const View& tensor = gated_tensor(args);
    const View replaced = dense_like(tensor, arena), dreplaced = dense_like(tensor, arena), dtensor = dense_like(tensor, arena);
    rest.workspace += arena.used();
    apply(gate, tensor, args.g, replaced);
    clear(dreplaced);
    View& result = gate.position == GatePosition::G2   ? inner_grads.dv
                   : gate.position == GatePosition::G3 ? inner_grads.dk
                                                       : inner_grads.dq;
    const View to = result;
    result = dreplaced;
    softmax_backward(inner(args, replaced), {.out = out.out, .lse = out.lse}, inner_grads, rest);
    gate_backward(gate, tensor, View(), args.g, dreplaced, dtensor, grads.dg);
    return copy(dtensor, to);
  }
  // delta = sum_c dy y: from the saved read where it is kept, else (a multiplied gate) dout out. It reaches softmax as -dlse
  // beside a read of 0.
  const View dy = read_of(arena, args), zero = read_of(arena, args), dlse = rows(arena, args.q);
  rest.workspace += arena.used();
  const bool keeps = gate_keeps_read(gate);
  gate_backward(gate, keeps ? out.kept : View(), out.out, args.g, grads.dout, dy, grads.dg);
  clear(zero);
  for (int64_t b = 0; b < dy.size[0]; ++b) {
    for (int64_t t = 0; t < dy.size[1]; ++t) {
      for (int64_t h = 0; h < dy.size[2]; ++h) {
        double delta = 0;
        for (int64_t c = 0; c < dy.size[3]; ++c) {
          delta += keeps ? at(dy, b, t, h, c) * at(out.kept, b, t, h, c) : at(grads.dout, b, t, h, c) * at(out.out, b, t, h, c);
        }
        put(dlse, b, t, h, 0, at(grads.dlse, b, t, h, 0) - delta);
      }
    }
  }
  inner_grads.dout = dy;
  inner_grads.dlse = dlse;
  softmax_backward(args, {.out = zero, .lse = out.lse}, inner_grads, rest);
}

int64_t gated_decode_workspace(const GatedDecodeArgs& args, Pass pass, int workers) {
  Arena arena;
  sized(arena, args.q.size[0], args.q.size[1], args.q.size[2], args.v.size[3]);
  return arena.used() + softmax_decode_workspace(args, pass, workers);
}
void gated_decode_forward(const GatedDecodeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const View y = sized(arena, args.q.size[0], args.q.size[1], args.q.size[2], args.v.size[3]);
  Launch rest = launch;
  rest.workspace += arena.used();
  softmax_decode_forward(args, {.out = y, .lse = out.lse}, rest);
  apply(args.gate(), y, args.g, out.out);
}

int64_t gated_gate_workspace(const GatedGateArgs& args, Pass pass, int) {
  Arena arena;
  if (pass == Pass::backward) dense_like(args.y, arena);
  return arena.used();
}
void gated_gate_forward(const GatedGateArgs& args, const GatedGateOut& out, const Launch&) {
  apply(args.gate(), args.y, args.g, out.out);
}
void gated_gate_backward(const GatedGateArgs& args, const GatedGateOut&, const GatedGateGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const View dy = dense_like(args.y, arena);
  gate_backward(args.gate(), args.y, View(), args.g, grads.dout, dy, grads.dg);
  copy(dy, grads.dy);
}

}  // namespace linnet::ref
