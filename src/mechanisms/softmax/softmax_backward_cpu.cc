// The backward of softmax for one instruction set.
#include "softmax_backward.h"

namespace linnet::LINNET_ISA {

int64_t softmax_workspace(const SoftmaxArgs& args, Pass pass, int workers) {
  const Problem p = problem_of(args);
  const bool wide = args.q.dtype == Dtype::f64, forward = pass == Pass::forward;
  if (forward) return wide ? forward_workspace<Direct<double>>(p, workers) : forward_workspace<Direct<float>>(p, workers);
  return wide ? backward_workspace<DirectBackward<double>>(p, workers) : backward_workspace<DirectBackward<float>>(p, workers);
}

void softmax_backward(const SoftmaxArgs& args, const SoftmaxOut& out, const SoftmaxGrads& grads, const Launch& launch) {
  const Problem p = problem_of(args);
  const Gradients g{grads.dout, grads.dlse, grads.dq, grads.dk, grads.dv, grads.dbias, grads.dsinks, out.out, out.lse};
  if (args.q.dtype == Dtype::f64) {
    backward<DirectBackward<double>>(p, g, launch);
  } else {
    backward<DirectBackward<float>>(p, g, launch);
  }
}

}  // namespace linnet::LINNET_ISA
