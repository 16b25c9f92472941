#include "activation.h"

#include "core/op.h"

namespace linnet {
namespace {

const std::vector<std::string>& activations() {
  static const std::vector<std::string> names = {"relu",     "silu",  "gelu", "gelu_tanh", "sigmoid", "tanh",
                                                 "softplus", "relu2", "elu1", "exp",       "softcap"};
  return names;
}
const std::vector<std::string>& gates() {
  static const std::vector<std::string> names = {"silu", "gelu", "gelu_tanh", "sigmoid", "relu"};
  return names;
}

// A second tensor of another rank would be one for all heads, whose gradient is a sum that nobody asked for yet.
Status check_ranks(const char* op, const char* name, const View& x, const View& y, const char* like) {
  if (x.rank == y.rank) return {};
  return bad_input(std::string(op) + ": " + name + " has rank " + std::to_string(y.rank) + ", expected " +
                   std::to_string(x.rank) + " (same as " + like + ")");
}
Status check_glu(const GluArgs& args, const Dims&) { return check_ranks("glu", "up", args.gate, args.up, "gate"); }
Status check_add(const AddArgs& args, const Dims&) { return check_ranks("add", "y", args.x, args.y, "x"); }

// `tensors` of a call are read or written; an elementary function counts 16.
Cost cost_of(const View& x, double flops, double tensors) {
  const double elements = static_cast<double>(x.elements());
  return {flops * elements, tensors * static_cast<double>(dtype_size(x.dtype)) * elements};
}
Cost cost_activation(const ActivationArgs& args, const Dims&, Pass pass) {
  return pass == Pass::forward ? cost_of(args.x, 16, 2) : cost_of(args.x, 20, 3);
}
Cost cost_glu(const GluArgs& args, const Dims&, Pass pass) {
  return pass == Pass::forward ? cost_of(args.gate, 17, 3) : cost_of(args.gate, 22, 5);
}
Cost cost_add(const AddArgs& args, const Dims&, Pass pass) {
  return pass == Pass::forward ? cost_of(args.x, 2, 3) : cost_of(args.x, 1, 3);
}

}  // namespace

// clang-format off
const Op& activation_op() {
  using A = ActivationArgs;
  using O = ActivationOut;
  using G = ActivationGrads;
  static const Op op =
      Declare<A, O, G>("activation", "activation", "a function of each element")
          .equation("out = act(x)")
          .input("x", &A::x, "B T H D", "any numbers; or [B, T, D]").or_shape("B T D").grad(&G::dx)
          .output("out", &O::out, "B T H D", "act(x)").or_shape("B T D").grad(&G::dout)
          .option("act", &A::act, activations(), "relu, x sigmoid(x), x Phi(x) and its tanh form, sigmoid, tanh, log(1 + e^x), max(x, 0)^2, elu(x) + 1, e^x, cap tanh(x / cap)")
          .option("cap", &A::cap, 1e-6, kAnyReal, "of softcap")
          .always_causal()
          .cost<cost_activation>()
          .bench("B=1 T=2048 H=1 D=1536 act=silu|gelu|gelu_tanh|softplus dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=2048 H=1 D=1536 act=silu dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 H=1 D=4096 act=silu|gelu dtype=bf16 pass=fwd|fwd+bwd")
          .impl<ref::activation_forward, ref::activation_backward, ref::activation_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(activation)
          .cuda<cuda::activation_forward, cuda::activation_backward, cuda::activation_workspace, cuda::activation_refuses>();
  return op;
}

const Op& glu_op() {
  using A = GluArgs;
  using O = ActivationOut;
  using G = GluGrads;
  static const Op op =
      Declare<A, O, G>("glu", "activation", "a gate's function times a second tensor")
          .equation("out = act(gate) up")
          .input("gate", &A::gate, "B T H D", "the gate before its function; or [B, T, D]").or_shape("B T D").grad(&G::dgate)
          .input("up", &A::up, "B T H D", "what is gated; or [B, T, D]").or_shape("B T D").grad(&G::dup)
          .output("out", &O::out, "B T H D", "act(gate) up").or_shape("B T D").grad(&G::dout)
          .option("act", &A::act, gates(), "x sigmoid(x), x Phi(x) and its tanh form, sigmoid, relu")
          .always_causal()
          .check<check_glu>()
          .cost<cost_glu>()
          .bench("B=1 T=2048 H=1 D=1536 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=2048 H=1 D=1536 act=gelu|gelu_tanh dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=1 H=1 D=1536 dtype=f32 pass=fwd")
          .gpu_bench("B=16 T=2048 H=1 D=4096 dtype=bf16 pass=fwd|fwd+bwd")
          .impl<ref::glu_forward, ref::glu_backward, ref::glu_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(glu)
          .cuda<cuda::glu_forward, cuda::glu_backward, cuda::glu_workspace, cuda::glu_refuses>();
  return op;
}

const Op& add_op() {
  using A = AddArgs;
  using O = ActivationOut;
  using G = AddGrads;
  static const Op op =
      Declare<A, O, G>("add", "activation", "a residual: the sum of two tensors, the second scaled")
          .equation("out = x + scale y")
          .input("x", &A::x, "B T H D", "or [B, T, D]").or_shape("B T D").grad(&G::dx)
          .input("y", &A::y, "B T H D", "or [B, T, D]").or_shape("B T D").grad(&G::dy)
          .output("out", &O::out, "B T H D", "x + scale y").or_shape("B T D").grad(&G::dout)
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies y")
          .always_causal()
          .check<check_add>()
          .cost<cost_add>()
          .bench("B=1 T=8192 H=1 D=576 dtype=f32|bf16 pass=fwd")
          .gpu_bench("B=16 T=2048 H=1 D=2048 dtype=bf16 pass=fwd")
          .impl<ref::add_forward, ref::add_backward, ref::add_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(add)
          .cuda<cuda::add_forward, cuda::add_backward, cuda::add_workspace, cuda::add_refuses>();
  return op;
}
// clang-format on

Status activation(const ActivationArgs& args, const ActivationOut& out, const Context& context) {
  return run(activation_op(), Pass::forward, &args, &out, nullptr, context);
}
Status activation_backward(const ActivationArgs& args, const ActivationOut& out, const ActivationGrads& grads,
                           const Context& context) {
  return run(activation_op(), Pass::backward, &args, &out, &grads, context);
}
Status glu(const GluArgs& args, const ActivationOut& out, const Context& context) {
  return run(glu_op(), Pass::forward, &args, &out, nullptr, context);
}
Status glu_backward(const GluArgs& args, const ActivationOut& out, const GluGrads& grads, const Context& context) {
  return run(glu_op(), Pass::backward, &args, &out, &grads, context);
}
Status add(const AddArgs& args, const ActivationOut& out, const Context& context) {
  return run(add_op(), Pass::forward, &args, &out, nullptr, context);
}
Status add_backward(const AddArgs& args, const ActivationOut& out, const AddGrads& grads, const Context& context) {
  return run(add_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t activation_workspace(const ActivationArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(activation_op(), pass, &args, context);
}
int64_t glu_workspace(const GluArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(glu_op(), pass, &args, context);
}
int64_t add_workspace(const AddArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(add_op(), pass, &args, context);
}

}  // namespace linnet
