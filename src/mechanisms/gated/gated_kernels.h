// The gate's own passes, for one instruction set: everything that is not attention.
//
// Forward, G1: none; the gate acts where the tile engine stores its rows (softmax_problem.h). A shared gate is averaged over
// the heads first. Backward, G1: one pass over (dout, out, g) gives dy, delta and dg, and the backward of softmax runs on dy
// and delta. G2 to G4 gate an input into scratch and pass its gradient back through the gate.
#pragma once

#include "mechanisms/softmax/softmax_problem.h"

namespace linnet::LINNET_ISA {

inline constexpr int64_t kGateTokens = 16;  // of a task

template <class T>
inline constexpr Dtype kDtype = sizeof(T) == 8 ? Dtype::f64 : Dtype::f32;

template <class T>
void load_row(const View& x, int64_t offset, int width, T* to) {
  using X = Vec<T>;
  with_type<T>(x, offset, [&](const auto* p) {
    int c = 0;
    for (; c + X::W <= width; c += X::W) X::store(to + c, X::load(p + c));
    if (c < width) X::store(to + c, X::load(p + c, width - c));
  });
}
template <class T>
void store_row(const View& x, int64_t offset, int width, const T* from) {
  using X = Vec<T>;
  with_type<T>(x, offset, [&](auto* p) {
    int c = 0;
    for (; c + X::W <= width; c += X::W) X::store(p + c, X::load(from + c));
    if (c < width) X::store(p + c, X::load(from + c), width - c);
  });
}
LINNET_INLINE int64_t row_at(const View& x, int64_t b, int64_t t, int64_t h) {
  return b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
}

// Runs f(b, t, worker) for every token.
template <class F>
void for_tokens(const Launch& launch, int64_t B, int64_t T, int64_t elements, const F& f) {
  const int64_t blocks = divide_up(T, kGateTokens);
  run_tasks(launch, B * blocks, static_cast<double>(elements) * 8, [&](int64_t task, int worker) {
    const int64_t b = task / blocks, begin = task % blocks * kGateTokens, end = smaller(begin + kGateTokens, T);
    for (int64_t t = begin; t < end; ++t) f(b, t, worker);
  });
}

// The rows of one token, head by head [H, ld].
template <class T>
struct TokenRows {
  T *g, *a, *d, *y, *sum, *result;
  int64_t ld;
  LINNET_INLINE TokenRows(Arena& arena, int64_t H, int64_t width) : ld(round_up<T>(width > 0 ? width : 1)) {
    g = arena.take<T>(H * ld);
    a = arena.take<T>(H * ld);
    d = arena.take<T>(H * ld);
    y = arena.take<T>(H * ld);
    sum = arena.take<T>(2 * ld);
    result = arena.take<T>(ld);
  }
};
template <class T>
LINNET_INLINE int64_t token_bytes(int64_t H, int64_t width) {
  Arena arena;
  TokenRows<T>(arena, H, width);
  return arena.used();
}

// The logits of one token, one head per row; headwise: repeated over the channels.
template <class T>
void load_logits(const View& g, int64_t b, int64_t t, int64_t H, int width, T* to, int64_t ld) {
  using X = Vec<T>;
  for (int64_t h = 0; h < H; ++h) {
    if (g.rank == 4) {
      load_row<T>(g, row_at(g, b, t, h), width, to + h * ld);
      continue;
    }
    const typename X::V x = X::broadcast(element_at<T>(g, row_at(g, b, t, h)));
    for (int64_t c = 0; c < ld; c += X::W) X::store(to + h * ld + c, x);
  }
}

// The mean over heads of act(g), into s [B, T, V] (headwise [B, T]) of T.
template <class T>
void share_gates(const GateOptions& gate, const View& g, T* s, char* workers, int64_t worker_bytes, const Launch& launch) {
  using X = Vec<T>;
  const int64_t H = g.size[2], width = g.rank == 4 ? g.size[3] : 1;
  for_tokens(launch, g.size[0], g.size[1], g.elements(), [&](int64_t b, int64_t t, int worker) {
    Arena own(workers + worker * worker_bytes);
    const TokenRows<T> rows(own, H, width);
    load_logits<T>(g, b, t, H, static_cast<int>(width), rows.g, rows.ld);
    for (int64_t c = 0; c < width; c += X::W) {
      typename X::V sum = X::zero();
      for (int64_t h = 0; h < H; ++h) sum = sum + gate_value(gate.act, X::load(rows.g + h * rows.ld + c));
      X::store(s + (b * g.size[1] + t) * width + c, sum / X::broadcast(static_cast<T>(H)), static_cast<int>(width - c));
    }
  });
}
// What the tile engine applies: the logits, or the shared gates as they are, the same for every head.
template <class T>
Gate gate_of(const GateOptions& gate, const View& g, const T* shared) {
  if (!gate.shared) return {g, gate.act, gate.mode == GateMode::add};
  const int64_t width = g.rank == 4 ? g.size[3] : 1;
  View view = g;
  view.data = const_cast<T*>(shared);
  view.dtype = kDtype<T>;
  view.stride[0] = g.size[1] * width;
  view.stride[1] = width;
  view.stride[2] = 0;
  view.stride[3] = 1;
  return {view, GateAct::identity, gate.mode == GateMode::add};
}
template <class T>
LINNET_INLINE int64_t shared_elements(const GateOptions& gate, const View& g) {
  return gate.shared ? g.size[0] * g.size[1] * (g.rank == 4 ? g.size[3] : 1) : 0;
}

// out = y gated, row by row.
template <class T>
void gate_forward(const Gate& gate, const View& y, const View& out, char* workers, int64_t worker_bytes, const Launch& launch) {
  const int64_t H = y.size[2];
  const int width = static_cast<int>(y.size[3]);
  for_tokens(launch, y.size[0], y.size[1], y.elements(), [&](int64_t b, int64_t t, int worker) {
    Arena own(workers + worker * worker_bytes);
    const TokenRows<T> rows(own, H, width);
    for (int64_t h = 0; h < H; ++h) {
      load_row<T>(y, row_at(y, b, t, h), width, rows.y);
      gate_row<T>(gate, row_at(gate.g, b, t, h), width, rows.y, rows.y);
      store_row<T>(out, row_at(out, b, t, h), width, rows.y);
    }
  });
}

struct GateGradients {
  View y;            // what was gated, where it is known
  View out;          // otherwise its gated form, which tells it (sigmoid and ns_sigmoid, multiplied)
  View g, dout;      // logits, incoming gradient
  View dy, dg;       // results; either may be absent
  View dlse, delta;  // delta given (multiplied gates): dlse - sum_c dout out, in T [B, T, H]
};

template <class T>
void gate_backward(const GateOptions& gate, const GateGradients& v, char* workers, int64_t worker_bytes, const Launch& launch) {
  using X = Vec<T>;
  using V = typename X::V;
  const View& shape = v.dout.given() ? v.dout : v.y.given() ? v.y : v.out;
  const int64_t H = shape.size[2];
  const int width = static_cast<int>(shape.size[3]);
  const bool add = gate.mode == GateMode::add, known = v.y.given();
  const bool direct = !known && !gate.shared && gate.act == GateAct::sigmoid;  // dg = dout out sigmoid(-g)
  for_tokens(launch, shape.size[0], shape.size[1], 4 * shape.elements(), [&](int64_t b, int64_t t, int worker) {
    Arena own(workers + worker * worker_bytes);
    const TokenRows<T> rows(own, H, width);
    const int64_t ld = rows.ld;
    load_logits<T>(v.g, b, t, H, width, rows.g, ld);
    for (int64_t h = 0; h < H; ++h) {
      if (v.dout.given()) {
        load_row<T>(v.dout, row_at(v.dout, b, t, h), width, rows.d + h * ld);
      } else {
        for (int64_t c = 0; c < ld; ++c) rows.d[h * ld + c] = 0;
      }
      const View& read = known ? v.y : v.out;
      load_row<T>(read, row_at(read, b, t, h), width, rows.y + h * ld);
      for (int64_t c = 0; c < ld; c += X::W) X::store(rows.a + h * ld + c, gate_value(gate.act, X::load(rows.g + h * ld + c)));
    }
    // The gradient of the activated gate: dout, or dout y.
    const auto inner = [&](int64_t h, int64_t c, V a) {
      const V d = X::load(rows.d + h * ld + c);
      if (add) return d;
      V product = d * X::load(rows.y + h * ld + c);
      if (!known) product = select(eq(a, X::zero()), X::zero(), product / a);
      return select(eq(d, X::zero()), X::zero(), product);  // the input behind a zero gradient may hold anything
    };
    if (gate.shared) {
      const V heads = X::broadcast(static_cast<T>(H));
      for (int64_t c = 0; c < ld; c += X::W) {
        V a = X::zero(), da = X::zero();
        for (int64_t h = 0; h < H; ++h) a = a + X::load(rows.a + h * ld + c);
        a = a / heads;
        for (int64_t h = 0; h < H; ++h) da = da + inner(h, c, a);
        X::store(rows.sum + c, a);
        X::store(rows.sum + ld + c, da / heads);
      }
    }
    for (int64_t h = 0; h < H; ++h) {
      V delta = X::zero(), total = X::zero();
      T *const y = rows.y + h * ld, *const dy = rows.d + h * ld;
      for (int64_t c = 0; c < ld; c += X::W) {
        const V g = X::load(rows.g + h * ld + c), d = X::load(dy + c), read = X::load(y + c);
        const V a = gate.shared ? X::load(rows.sum + c) : X::load(rows.a + h * ld + c);
        const typename X::M there = X::prefix(static_cast<int>(width - c));
        if (v.delta.given()) delta = delta + select(there, d * read, X::zero());
        V dg;
        if (direct) {
          dg = select(eq(d, X::zero()), X::zero(), d * read * sigmoid(-g));
        } else {
          const V da = gate.shared ? X::load(rows.sum + ld + c) : inner(h, c, a);
          dg = da * gate_slope(gate.act, g);
        }
        total = total + select(there, dg, X::zero());
        X::store(rows.result + c, dg);
        X::store(dy + c, add ? d : d * a);
      }
      if (v.dy.given()) store_row<T>(v.dy, row_at(v.dy, b, t, h), width, dy);
      if (v.delta.given() && v.dy.dtype != kDtype<T>) {  // dy is rounded: so that dP - delta keeps its digits, delta takes that
        delta = X::zero();
        load_row<T>(v.dy, row_at(v.dy, b, t, h), width, dy);
        for (int64_t c = 0; c < width; c += X::W) {
          const V a = gate.shared ? X::load(rows.sum + c) : X::load(rows.a + h * ld + c);
          const typename X::M there = X::prefix(static_cast<int>(width - c));
          const V product = select(eq(a, X::zero()), X::zero(), X::load(dy + c) / a * X::load(y + c));
          delta = delta + select(there, product, X::zero());
        }
      }
      if (v.delta.given()) {
        const T given = v.dlse.given() ? static_cast<const T*>(v.dlse.data)[row_at(v.dlse, b, t, h)] : T(0);
        static_cast<T*>(v.delta.data)[row_at(v.delta, b, t, h)] = given - sum(delta);
      }
      if (!v.dg.given()) continue;
      if (v.g.rank == 4) {
        store_row<T>(v.dg, row_at(v.dg, b, t, h), width, rows.result);
      } else {
        set_element<T>(v.dg, row_at(v.dg, b, t, h), sum(total));
      }
    }
  });
}

// ---- the operators ----------------------------------------------------------------------------------------------------------

template <class T>
LINNET_INLINE View scratch_like(Arena& arena, const View& x, Dtype dtype) {
  void* const data = dtype == Dtype::bf16 ? static_cast<void*>(arena.take<Bf16>(x.elements())) : arena.take<T>(x.elements());
  return View::dense(data, dtype, x.size, x.rank);
}

// Scratch of one call. `dy_type`: of the gradient that the backward of softmax reads.
template <class T>
struct GatedMemory {
  T* shared;
  View replaced, dreplaced, dy, delta;
  char* workers;
  int64_t worker_bytes, used;
  GatedMemory(char* base, const GatedArgs& args, Pass pass, int worker_count, Dtype dy_type) {
    Arena arena(base);
    const GateOptions gate = args.gate();
    shared = arena.take<T>(shared_elements<T>(gate, args.g));
    worker_bytes = token_bytes<T>(args.g.size[2], gated_width(args));
    workers = arena.take<char>(worker_bytes * worker_count);
    if (gate.position != GatePosition::G1) {
      replaced = scratch_like<T>(arena, gated_tensor(args), kDtype<T>);
      if (pass == Pass::backward) dreplaced = scratch_like<T>(arena, gated_tensor(args), kDtype<T>);
    } else if (pass == Pass::backward) {
      const int64_t size[4] = {args.q.size[0], args.q.size[1], args.q.size[2], args.v.size[3]};
      dy = scratch_like<T>(arena, View::dense(nullptr, kDtype<T>, size, 4), dy_type);
      delta = scratch_like<T>(arena, View::dense(nullptr, kDtype<T>, size, 3), kDtype<T>);
    }
    used = arena.used();
  }
  static int64_t gated_width(const GatedArgs& args) {
    const bool values = args.position == GatePosition::G1 || args.position == GatePosition::G2;
    return values ? args.v.size[3] : args.k.size[3];
  }
};

// The attention that a gated call makes.
LINNET_INLINE Problem gated_problem(const GatedArgs& args, const View& replaced) {
  Problem p = problem_of(static_cast<const SoftmaxArgs&>(args));
  if (args.position == GatePosition::G2) p.v = replaced;
  if (args.position == GatePosition::G3) p.k = replaced;
  if (args.position == GatePosition::G4) p.q = replaced;
  return p;
}

template <class T>
int64_t gated_bytes(const GatedArgs& args, Pass pass, int workers, Dtype dy_type) {
  const GatedMemory<T> memory(nullptr, args, pass, workers, dy_type);
  const Problem p = gated_problem(args, memory.replaced);
  return memory.used + (pass == Pass::forward ? attend_workspace(p, workers) : attend_backward_workspace(p, workers));
}

template <class T>
void run_gated(const GatedArgs& args, const GatedOut& out, const Launch& launch, Dtype dy_type) {
  const GatedMemory<T> memory(launch.workspace, args, Pass::forward, launch.workers, dy_type);
  Launch rest = launch;
  rest.workspace += memory.used;
  const GateOptions gate = args.gate();
  if (gate.shared) share_gates<T>(gate, args.g, memory.shared, memory.workers, memory.worker_bytes, launch);
  const Gate applied = gate_of<T>(gate, args.g, memory.shared);
  Problem p = gated_problem(args, memory.replaced);
  p.out = out.out;
  p.lse = out.lse;
  p.read = out.y;
  if (gate.position == GatePosition::G1) {
    p.gate = applied;
    if (gate_keeps_read(gate)) p.kept = out.kept;
  } else {
    gate_forward<T>(applied, gated_tensor(args), memory.replaced, memory.workers, memory.worker_bytes, launch);
  }
  attend(p, rest);
}

template <class T>
void run_gated_backward(const GatedArgs& args, const GatedOut& out, const GatedGrads& grads, const Launch& launch,
                        Dtype dy_type) {
  const GatedMemory<T> memory(launch.workspace, args, Pass::backward, launch.workers, dy_type);
  Launch rest = launch;
  rest.workspace += memory.used;
  const GateOptions gate = args.gate();
  Gradients g{grads.dout, grads.dlse, grads.dq, grads.dk, grads.dv, grads.dbias, grads.dsinks, out.out, out.lse};
  if (gate.position == GatePosition::G1) {
    GateGradients v{.out = out.out, .g = args.g, .dout = grads.dout, .dy = memory.dy, .dg = grads.dg};
    if (gate_keeps_read(gate)) {  // softmax makes its own delta, dy . y
      v.y = g.out = out.kept;
    } else {
      v.dlse = grads.dlse;
      v.delta = g.dlse = memory.delta;
      g.out = View();
    }
    gate_backward<T>(gate, v, memory.workers, memory.worker_bytes, launch);
    g.dout = memory.dy;
    return attend_backward(problem_of(static_cast<const SoftmaxArgs&>(args)), g, rest);
  }
  if (gate.shared) share_gates<T>(gate, args.g, memory.shared, memory.workers, memory.worker_bytes, launch);
  const View& tensor = gated_tensor(args);
  gate_forward<T>(gate_of<T>(gate, args.g, memory.shared), tensor, memory.replaced, memory.workers, memory.worker_bytes,
                  launch);
  View& result = gate.position == GatePosition::G2 ? g.dv : gate.position == GatePosition::G3 ? g.dk : g.dq;
  const View to = result;
  result = memory.dreplaced;
  attend_backward(gated_problem(args, memory.replaced), g, rest);
  gate_backward<T>(gate, {.y = tensor, .g = args.g, .dout = memory.dreplaced, .dy = to, .dg = grads.dg}, memory.workers,
                   memory.worker_bytes, launch);
}

template <class T>
struct DecodeMemory {
  T* shared;
  char* workers;
  int64_t worker_bytes, used;
  DecodeMemory(char* base, const GatedDecodeArgs& args, int worker_count) {
    Arena arena(base);
    shared = arena.take<T>(shared_elements<T>(args.gate(), args.g));
    worker_bytes = token_bytes<T>(args.g.size[2], args.v.size[3]);
    workers = arena.take<char>(worker_bytes * worker_count);
    used = arena.used();
  }
};
template <class T>
int64_t gated_decode_bytes(const GatedDecodeArgs& args, int workers) {
  return DecodeMemory<T>(nullptr, args, workers).used +
         attend_workspace(problem_of(static_cast<const SoftmaxDecodeArgs&>(args)), workers);
}
template <class T>
void run_gated_decode(const GatedDecodeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  const DecodeMemory<T> memory(launch.workspace, args, launch.workers);
  Launch rest = launch;
  rest.workspace += memory.used;
  append(args);
  const GateOptions gate = args.gate();
  if (gate.shared) share_gates<T>(gate, args.g, memory.shared, memory.workers, memory.worker_bytes, launch);
  Problem p = problem_of(static_cast<const SoftmaxDecodeArgs&>(args));
  p.out = out.out;
  p.lse = out.lse;
  p.gate = gate_of<T>(gate, args.g, memory.shared);
  attend(p, rest);
}

}  // namespace linnet::LINNET_ISA
