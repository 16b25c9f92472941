// softmax, softmax_decode and softmax_paged, forward, for one instruction set: the tile engine of softmax_tile.h on the
// caller's tensors.
#include "softmax_forward.h"

namespace linnet::LINNET_ISA {

int64_t attend_workspace(const Problem& p, int workers) {
  return p.q.dtype == Dtype::f64 ? forward_workspace<Direct<double>>(p, workers) : forward_workspace<Direct<float>>(p, workers);
}
void attend(const Problem& p, const Launch& launch) {
  if (p.q.dtype == Dtype::f64) {
    forward<Direct<double>>(p, launch);
  } else {
    forward<Direct<float>>(p, launch);
  }
}
static void run_forward(Problem p, const SoftmaxOut& out, const Launch& launch) {
  p.out = out.out;
  p.lse = out.lse;
  attend(p, launch);
}

void softmax_forward(const SoftmaxArgs& args, const SoftmaxOut& out, const Launch& launch) {
  run_forward(problem_of(args), out, launch);
}

int64_t softmax_decode_workspace(const SoftmaxDecodeArgs& args, Pass, int workers) {
  return attend_workspace(problem_of(args), workers);
}
void softmax_decode_forward(const SoftmaxDecodeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  append(args);
  run_forward(problem_of(args), out, launch);
}

int64_t softmax_paged_workspace(const SoftmaxPagedArgs& args, Pass, int workers) {
  return attend_workspace(problem_of(args), workers);
}
void softmax_paged_forward(const SoftmaxPagedArgs& args, const SoftmaxOut& out, const Launch& launch) {
  run_forward(problem_of(args), out, launch);
}

}  // namespace linnet::LINNET_ISA
