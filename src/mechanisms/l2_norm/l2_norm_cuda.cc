// l2_norm on the GPU: the rows of norm_rows.h without gate and weight.
#include "l2_norm.h"
#include "mechanisms/rms_norm_gated/norm_rows.h"

namespace linnet::cuda {
namespace {

NormRows rows_of(const L2NormArgs& args) {
  NormRows r;
  r.B = args.x.size[0];
  r.T = args.x.size[1];
  r.H = static_cast<int32_t>(args.x.size[2]);
  r.V = static_cast<int32_t>(args.x.size[3]);
  r.x = norm_tensor(args.x);
  r.eps = static_cast<float>(args.eps);
  r.first = r.together = true;
  r.parts = static_cast<int32_t>(norm_parts(r));
  return r;
}

}  // namespace

const char* l2_norm_refuses(const L2NormArgs& args, Pass) {
  return args.x.dtype == Dtype::f64 ? "the CUDA kernels have no f64" : nullptr;
}
int64_t l2_norm_workspace(const L2NormArgs&, Pass, int) { return 0; }
void l2_norm_forward(const L2NormArgs& args, const L2NormOut& out, const Launch& launch) {
  NormRows r = rows_of(args);
  r.out = norm_tensor(out.out);
  run_norm(launch, r, args.x.dtype);
}
void l2_norm_backward(const L2NormArgs& args, const L2NormOut&, const L2NormGrads& grads, const Launch& launch) {
  if (!grads.dx.given()) return;
  NormRows r = rows_of(args);
  r.dout = norm_tensor(grads.dout);
  r.dx = norm_tensor(grads.dx);
  run_norm_backward(launch, r, args.x.dtype, View());
}

}  // namespace linnet::cuda
