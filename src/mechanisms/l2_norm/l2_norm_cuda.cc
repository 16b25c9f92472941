// l2_norm on the GPU: the rows of shared/norm_rows.h without gate and weight.
#include "l2_norm.h"
#include "mechanisms/shared/norm_rows.h"

namespace linnet::cuda {

const char* l2_norm_refuses(const L2NormArgs& args, Pass) {
  return args.x.dtype == Dtype::f64 ? "the CUDA kernels have no f64" : nullptr;
}
int64_t l2_norm_workspace(const L2NormArgs&, Pass, int) { return 0; }
void l2_norm_forward(const L2NormArgs& args, const L2NormOut& out, const Launch& launch) {
  NormRows r = norm_rows(args.x, args.eps);
  r.out = norm_tensor(out.out);
  run_norm(launch, r, args.x.dtype);
}
void l2_norm_backward(const L2NormArgs& args, const L2NormOut&, const L2NormGrads& grads, const Launch& launch) {
  if (!grads.dx.given()) return;
  NormRows r = norm_rows(args.x, args.eps);
  r.dout = norm_tensor(grads.dout);
  r.dx = norm_tensor(grads.dx);
  run_norm_backward(launch, r, args.x.dtype, View());
}

}  // namespace linnet::cuda
