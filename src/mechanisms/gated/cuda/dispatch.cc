#include "mechanisms/gated/cuda/dispatch.h"

#include "core/cuda/driver.h"
#include "mechanisms/gated/cuda/gates.h"

LINNET_USES_IMAGES(gated)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "gated/cuda/gates";

// The gate of a call on a tensor y [B, T, H, width].
Gates gates_of(const GateOptions& gate, const View& g, const View& y) {
  Gates p;
  p.g = attend_rows(g);
  p.B = y.size[0];
  p.T = y.size[1];
  p.H = static_cast<int32_t>(y.size[2]);
  p.width = static_cast<int32_t>(y.size[3]);
  p.act = static_cast<AttendAct>(gate.act);
  p.adds = gate.mode == GateMode::add;
  p.per_head = gate.granularity == GateGranularity::headwise;
  p.is_shared = gate.shared;
  return p;
}
int64_t shared_numbers(const GateOptions& gate, const View& g) {
  return gate.shared ? g.size[0] * g.size[1] * (g.rank == 4 ? g.size[3] : 1) : 0;
}
void share(const Launch& launch, const Gates& p) {
  if (!p.is_shared || p.H == 0) return;
  enqueue(launch, {kImage, "share_gates", 256}, {(p.B * p.T * (p.per_head ? 1 : p.width) + 255) / 256}, p);
}
void gate_forward(const Launch& launch, Gates p, const View& y, const View& out) {
  p.y = attend_rows(y);
  p.out = attend_rows(out);
  share(launch, p);
  enqueue(launch, {kImage, "gate_rows", 256}, {(p.B * p.T * p.H * p.width + 255) / 256}, p);
}
void gate_backward(const Launch& launch, const Gates& p) {
  enqueue(launch, {kImage, "gate_gradients", 256}, {(p.B * p.T * p.H + 7) / 8}, p);
}
// The gate at the end of a read.
void set_gate(Attend* p, const GateOptions& gate, const View& g, float* shared) {
  p->act = static_cast<AttendAct>(gate.act);
  p->gate_adds = gate.mode == GateMode::add;
  p->gate_per_head = gate.granularity == GateGranularity::headwise;
  p->gate = attend_rows(g);
  if (!gate.shared) return;
  const int64_t width = g.rank == 4 ? g.size[3] : 1;
  p->gate = {shared, g.size[1] * width, width, 0, Dtype::f32, false};
  p->act = AttendAct::identity;
}

View dense(Arena& arena, const View& like, int rank, int64_t width, Dtype dtype) {
  const int64_t size[4] = {like.size[0], like.size[1], like.size[2], width};
  int64_t bytes = dtype_size(dtype);
  for (int d = 0; d < rank; ++d) bytes *= size[d];
  return View::dense(arena.take<char>(bytes), dtype, size, rank);
}

// Memory beside that of the attention.
struct Scratch {
  float* shared;
  View replaced, dreplaced, dy, delta;
  View exact;  // G2, rounded: the gated values in f32, for dbias
  Scratch(Arena& arena, AttendRow row, const GatedArgs& args, Pass pass) {
    shared = arena.take<float>(shared_numbers(args.gate(), args.g));
    const Dtype dtype = row != AttendRow::plain ? args.q.dtype : Dtype::f32;
    if (args.position != GatePosition::G1) {
      const View& tensor = gated_tensor(args);
      replaced = dense(arena, tensor, 4, tensor.size[3], dtype);
      if (pass == Pass::backward) dreplaced = dense(arena, tensor, 4, tensor.size[3], Dtype::f32);
      if (pass == Pass::backward && args.bias.given() && dtype != Dtype::f32) {
        exact = dense(arena, tensor, 4, tensor.size[3], Dtype::f32);
      }
    } else if (pass == Pass::backward) {
      dy = dense(arena, args.q, 4, args.v.size[3], dtype);
      delta = dense(arena, args.q, 3, 0, Dtype::f32);
    }
  }
};
Attend inner(const GatedArgs& args, const View& replaced) {
  SoftmaxArgs plain = args;
  if (args.position == GatePosition::G2) plain.v = replaced;
  if (args.position == GatePosition::G3) plain.k = replaced;
  if (args.position == GatePosition::G4) plain.q = replaced;
  return attend_of(plain);
}

}  // namespace

const char* GatedTable::refuses(AttendRow row, const GatedArgs& args, const GatedOut*, Pass pass) {
  const bool gates_scores = args.position == GatePosition::G3 || args.position == GatePosition::G4;
  if (row != AttendRow::plain && gates_scores) return "it gates the read or the values; gated keys and queries stay in f32";
  return attend_refuses(row, attend_of(static_cast<const SoftmaxArgs&>(args)), pass);
}
int64_t GatedTable::workspace(AttendRow row, const GatedArgs& args, Pass pass) {
  Arena arena;
  const Scratch scratch(arena, row, args, pass);
  const Attend p = attend_of(static_cast<const SoftmaxArgs&>(args));
  return arena.used() + (pass == Pass::forward ? attend_workspace(row, p) : attend_gradients_workspace(p));
}
void GatedTable::forward(AttendRow row, const GatedArgs& args, const GatedOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Scratch scratch(arena, row, args, Pass::forward);
  const GateOptions gate = args.gate();
  Attend p = inner(args, scratch.replaced);
  p.out = attend_rows(out.out);
  p.lse = attend_rows(out.lse);
  p.read = attend_rows(out.y);
  Gates gates = gates_of(gate, args.g, gated_tensor(args));
  gates.shared = scratch.shared;
  if (gate.position == GatePosition::G1) {
    gates.width = static_cast<int32_t>(args.v.size[3]);
    share(launch, gates);
    set_gate(&p, gate, args.g, scratch.shared);
    if (gate_keeps_read(gate)) p.kept = attend_rows(out.kept);
  } else {
    gate_forward(launch, gates, gated_tensor(args), scratch.replaced);
  }
  run_attend(launch, row, p, launch.workspace + arena.used());
}
void GatedTable::backward(AttendRow row, const GatedArgs& args, const GatedOut& out, const GatedGrads& grads,
                          const Launch& launch) {
  Arena arena(launch.workspace);
  const Scratch scratch(arena, row, args, Pass::backward);
  const GateOptions gate = args.gate();
  char* const rest = launch.workspace + arena.used();
  Attend p = inner(args, scratch.replaced);
  p.out = attend_rows(out.out);
  p.lse = attend_rows(out.lse);
  p.dout = attend_rows(grads.dout);
  p.dlse = attend_rows(grads.dlse);
  p.dq = attend_rows(grads.dq);
  p.dk = attend_rows(grads.dk);
  p.dv = attend_rows(grads.dv);
  if (gate.position == GatePosition::G1) {
    Gates gates = gates_of(gate, args.g, out.out);
    gates.out = attend_rows(out.out);
    gates.dout = attend_rows(grads.dout);
    gates.dy = attend_rows(scratch.dy);
    gates.dg = attend_rows(grads.dg);
    if (gate_keeps_read(gate)) {  // softmax makes its own delta, dy . y
      gates.y = p.out = attend_rows(out.kept);
    } else {
      gates.dlse = attend_rows(grads.dlse);
      gates.delta = p.delta = attend_rows(scratch.delta);
    }
    gate_backward(launch, gates);
    p.dout = attend_rows(scratch.dy);
    return run_attend_gradients(launch, row, p, grads.dbias, grads.dsinks, rest);
  }
  const View& tensor = gated_tensor(args);
  Gates gates = gates_of(gate, args.g, tensor);
  gates.shared = scratch.shared;
  gate_forward(launch, gates, tensor, scratch.replaced);
  AttendRows& result = gate.position == GatePosition::G2 ? p.dv : gate.position == GatePosition::G3 ? p.dk : p.dq;
  const AttendRows to = result;
  result = attend_rows(scratch.dreplaced);
  if (scratch.exact.given() && grads.dbias.given()) {
    gate_forward(launch, gates, tensor, scratch.exact);
    p.exact_v = attend_rows(scratch.exact);
  }
  run_attend_gradients(launch, row, p, grads.dbias, grads.dsinks, rest);
  gates.y = attend_rows(tensor);
  gates.dout = attend_rows(scratch.dreplaced);
  gates.dy = to;
  gates.dg = attend_rows(grads.dg);
  gate_backward(launch, gates);
}

const char* GatedDecodeTable::refuses(AttendRow row, const GatedDecodeArgs& args, const SoftmaxOut*, Pass pass) {
  return attend_refuses(row, attend_of(static_cast<const SoftmaxDecodeArgs&>(args)), pass);
}
int64_t GatedDecodeTable::workspace(AttendRow row, const GatedDecodeArgs& args, Pass) {
  Arena arena;
  arena.take<float>(shared_numbers(args.gate(), args.g));
  return arena.used() + attend_workspace(row, attend_of(static_cast<const SoftmaxDecodeArgs&>(args)));
}
void GatedDecodeTable::forward(AttendRow row, const GatedDecodeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  float* const shared = arena.take<float>(shared_numbers(args.gate(), args.g));
  append_tokens(launch, args);
  Gates gates = gates_of(args.gate(), args.g, out.out);
  gates.shared = shared;
  share(launch, gates);
  Attend p = attend_of(static_cast<const SoftmaxDecodeArgs&>(args));
  p.out = attend_rows(out.out);
  p.lse = attend_rows(out.lse);
  set_gate(&p, args.gate(), args.g, shared);
  run_attend(launch, row, p, launch.workspace + arena.used());
}

const char* gated_gate_refuses(const GatedGateArgs& args, Pass) {
  return args.y.dtype == Dtype::f64 ? "the CUDA kernels have no f64" : nullptr;
}
int64_t gated_gate_workspace(const GatedGateArgs& args, Pass, int) {
  Arena arena;
  arena.take<float>(shared_numbers(args.gate(), args.g));
  return arena.used();
}
void gated_gate_forward(const GatedGateArgs& args, const GatedGateOut& out, const Launch& launch) {
  Gates gates = gates_of(args.gate(), args.g, args.y);
  gates.shared = reinterpret_cast<float*>(launch.workspace);
  gate_forward(launch, gates, args.y, out.out);
}
void gated_gate_backward(const GatedGateArgs& args, const GatedGateOut&, const GatedGateGrads& grads, const Launch& launch) {
  Gates gates = gates_of(args.gate(), args.g, args.y);
  gates.y = attend_rows(args.y);
  gates.dout = attend_rows(grads.dout);
  gates.dy = attend_rows(grads.dy);
  gates.dg = attend_rows(grads.dg);
  gate_backward(launch, gates);
}

}  // namespace linnet::cuda
