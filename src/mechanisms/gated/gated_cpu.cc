// gated, gated_decode and gated_gate for one instruction set.
#include "gated_kernels.h"

namespace linnet::LINNET_ISA {

int64_t gated_workspace(const GatedArgs& args, Pass pass, int workers) {
  if (args.q.dtype == Dtype::f64) return gated_bytes<double>(args, pass, workers, Dtype::f64);
  return gated_bytes<float>(args, pass, workers, Dtype::f32);
}
void gated_forward(const GatedArgs& args, const GatedOut& out, const Launch& launch) {
  if (args.q.dtype == Dtype::f64) return run_gated<double>(args, out, launch, Dtype::f64);
  run_gated<float>(args, out, launch, Dtype::f32);
}
void gated_backward(const GatedArgs& args, const GatedOut& out, const GatedGrads& grads, const Launch& launch) {
  if (args.q.dtype == Dtype::f64) return run_gated_backward<double>(args, out, grads, launch, Dtype::f64);
  run_gated_backward<float>(args, out, grads, launch, Dtype::f32);
}

int64_t gated_decode_workspace(const GatedDecodeArgs& args, Pass, int workers) {
  return args.q.dtype == Dtype::f64 ? gated_decode_bytes<double>(args, workers) : gated_decode_bytes<float>(args, workers);
}
void gated_decode_forward(const GatedDecodeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  if (args.q.dtype == Dtype::f64) return run_gated_decode<double>(args, out, launch);
  run_gated_decode<float>(args, out, launch);
}

namespace {

template <class T>
struct GateMemory {
  T* shared;
  char* workers;
  int64_t worker_bytes, used;
  GateMemory(char* base, const GatedGateArgs& args, int worker_count) {
    Arena arena(base);
    shared = arena.take<T>(shared_elements<T>(args.gate(), args.g));
    worker_bytes = token_bytes<T>(args.y.size[2], args.y.size[3]);
    workers = arena.take<char>(worker_bytes * worker_count);
    used = arena.used();
  }
};
template <class T>
void run_gate(const GatedGateArgs& args, const GatedGateOut& out, const Launch& launch) {
  const GateMemory<T> memory(launch.workspace, args, launch.workers);
  const GateOptions gate = args.gate();
  if (gate.shared) share_gates<T>(gate, args.g, memory.shared, memory.workers, memory.worker_bytes, launch);
  gate_forward<T>(gate_of<T>(gate, args.g, memory.shared), args.y, out.out, memory.workers, memory.worker_bytes, launch);
}
template <class T>
void run_gate_backward(const GatedGateArgs& args, const GatedGateGrads& grads, const Launch& launch) {
  const GateMemory<T> memory(launch.workspace, args, launch.workers);
  gate_backward<T>(args.gate(), {.y = args.y, .g = args.g, .dout = grads.dout, .dy = grads.dy, .dg = grads.dg}, memory.workers,
                   memory.worker_bytes, launch);
}

}  // namespace

int64_t gated_gate_workspace(const GatedGateArgs& args, Pass, int workers) {
  return args.y.dtype == Dtype::f64 ? GateMemory<double>(nullptr, args, workers).used
                                    : GateMemory<float>(nullptr, args, workers).used;
}
void gated_gate_forward(const GatedGateArgs& args, const GatedGateOut& out, const Launch& launch) {
  if (args.y.dtype == Dtype::f64) return run_gate<double>(args, out, launch);
  run_gate<float>(args, out, launch);
}
void gated_gate_backward(const GatedGateArgs& args, const GatedGateOut&, const GatedGateGrads& grads, const Launch& launch) {
  if (args.y.dtype == Dtype::f64) return run_gate_backward<double>(args, grads, launch);
  run_gate_backward<float>(args, grads, launch);
}

}  // namespace linnet::LINNET_ISA
