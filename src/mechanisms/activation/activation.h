// activation: a function of each element. glu: a gate's function times a second tensor. add: residuals.
//
//   activation   out = act(x)
//   glu          out = act(gate) up
//   add          out = x + scale y
//
//   relu max(x, 0)                    silu x sigmoid(x)                sigmoid 1 / (1 + e^-x)
//   gelu x (1 + erf(x / sqrt 2)) / 2  gelu_tanh x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
//   tanh, exp                         softplus log(1 + e^x)            relu2 max(x, 0)^2
//   elu1 elu(x) + 1: x + 1 for x > 0, e^x else                         softcap cap tanh(x / cap)
//
// Tensors are [B, T, D] or [B, T, H, D].
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class Activation : int32_t { relu, silu, gelu, gelu_tanh, sigmoid, tanh, softplus, relu2, elu1, exp, softcap };

struct ActivationArgs {
  View x;  // [B, T, H, D] or [B, T, D]
  Activation act = Activation::silu;
  double cap = 30;  // of softcap
};
struct ActivationOut {
  View out;  // as x
};
struct ActivationGrads {
  View dout;  // incoming; absent = zero
  View dx;    // result; absent = not wanted
};
const Op& activation_op();
Status activation(const ActivationArgs& args, const ActivationOut& out, const Context& context);
Status activation_backward(const ActivationArgs& args, const ActivationOut& out, const ActivationGrads& grads,
                           const Context& context);
int64_t activation_workspace(const ActivationArgs& args, Pass pass, const Context& context);

enum class GluActivation : int32_t { silu, gelu, gelu_tanh, sigmoid, relu };
struct GluArgs {
  View gate, up;  // [B, T, H, D] or [B, T, D]
  GluActivation act = GluActivation::silu;
};
struct GluGrads {
  View dout;        // incoming; absent = zero
  View dgate, dup;  // results; absent = not wanted
};
const Op& glu_op();
Status glu(const GluArgs& args, const ActivationOut& out, const Context& context);
Status glu_backward(const GluArgs& args, const ActivationOut& out, const GluGrads& grads, const Context& context);
int64_t glu_workspace(const GluArgs& args, Pass pass, const Context& context);

struct AddArgs {
  View x, y;  // [B, T, H, D] or [B, T, D]
  double scale = 1;
};
struct AddGrads {
  View dout;    // incoming; absent = zero
  View dx, dy;  // results; absent = not wanted
};
const Op& add_op();
Status add(const AddArgs& args, const ActivationOut& out, const Context& context);
Status add_backward(const AddArgs& args, const ActivationOut& out, const AddGrads& grads, const Context& context);
int64_t add_workspace(const AddArgs& args, Pass pass, const Context& context);

LINNET_KERNELS(activation, ActivationArgs, ActivationOut, ActivationGrads)
LINNET_KERNELS(glu, GluArgs, ActivationOut, GluGrads)
LINNET_KERNELS(add, AddArgs, ActivationOut, AddGrads)
LINNET_CUDA_KERNELS(activation, ActivationArgs, ActivationOut, ActivationGrads)
LINNET_CUDA_KERNELS(glu, GluArgs, ActivationOut, GluGrads)
LINNET_CUDA_KERNELS(add, AddArgs, ActivationOut, AddGrads)

}  // namespace linnet
