// The backward of softmax for one instruction set.
#include "softmax_backward.h"

namespace linnet::LINNET_ISA {

int64_t attend_backward_workspace(const Problem& p, int workers) {
  const bool wide = p.q.dtype == Dtype::f64;
  return wide ? backward_workspace<DirectBackward<double>>(p, workers) : backward_workspace<DirectBackward<float>>(p, workers);
}
void attend_backward(const Problem& p, const Gradients& g, const Launch& launch) {
  if (p.q.dtype == Dtype::f64) {
    backward<DirectBackward<double>>(p, g, launch);
  } else {
    backward<DirectBackward<float>>(p, g, launch);
  }
}

int64_t softmax_workspace(const SoftmaxArgs& args, Pass pass, int workers) {
  const Problem p = problem_of(args);
  return pass == Pass::forward ? attend_workspace(p, workers) : attend_backward_workspace(p, workers);
}

void softmax_backward(const SoftmaxArgs& args, const SoftmaxOut& out, const SoftmaxGrads& grads, const Launch& launch) {
  attend_backward(problem_of(args),
                  {grads.dout, grads.dlse, grads.dq, grads.dk, grads.dv, grads.dbias, grads.dsinks, out.out, out.lse}, launch);
}

}  // namespace linnet::LINNET_ISA
