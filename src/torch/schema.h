// Torch schemas of an operator, made from its declaration.
//
//   softmax(Tensor q, Tensor k, Tensor v, Tensor? bias=None, ..., *, float? scale=None, bool causal=False, int[] window=[-1,
//   -1],
//           ...) -> (Tensor out, Tensor lse)
//   softmax_backward(Tensor? dout, Tensor? dlse, Tensor q, ..., Tensor out, Tensor lse, *, float? scale=None, ..., bool[]
//   wanted)
//           -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)
//
// Tensors come in declared order, then the options by keyword. A state that is overwritten is Tensor(a!). Outputs that the
// backward reads are always computed; any other optional output only with return_<name>=True, and is empty otherwise, as is a
// gradient that is not `wanted`.
#pragma once

#include <string>

#include "core/op.h"

namespace linnet {

// Whether an output is computed only when return_<name> asks for it.
inline bool on_request(const TensorDecl& output) { return output.optional && !output.saved; }

std::string forward_schema(const Op& op);
std::string backward_schema(const Op& op);  // only of a differentiable operator

}  // namespace linnet
