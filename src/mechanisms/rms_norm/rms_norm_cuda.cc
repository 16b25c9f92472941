// rms_norm on the GPU: the rows of shared/norm_rows.h with one weight for all heads, without a gate.
#include "core/heads.h"
#include "mechanisms/shared/norm_rows.h"
#include "mechanisms/shared/pieces.h"
#include "rms_norm.h"

namespace linnet::cuda {
namespace {

NormRows rows_of(const RmsNormArgs& args) {
  NormRows r = norm_rows(with_heads(args.x), args.eps);
  if (args.weight.given()) {
    r.weight = args.weight.data;
    r.weight_dtype = args.weight.dtype;
    r.weight_stride_v = args.weight.stride[0];
    r.weight_vectors = r.weight_stride_v == 1 && reinterpret_cast<uintptr_t>(r.weight) % 16 == 0;
    r.weight_plus = args.plus_one ? 1 : 0;
  }
  r.unit = r.V == 0 ? 1 : 1 / static_cast<float>(r.V);
  return r;
}

}  // namespace

const char* rms_norm_refuses(const RmsNormArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t rms_norm_workspace(const RmsNormArgs& args, Pass pass, int) {
  Arena arena;
  const NormRows r = rows_of(args);
  if (pass == Pass::backward && args.weight.given()) arena.take<float>(static_cast<int64_t>(r.parts) * r.V);
  return arena.used();
}
void rms_norm_forward(const RmsNormArgs& args, const RmsNormOut& out, const Launch& launch) {
  NormRows r = rows_of(args);
  r.out = norm_tensor(with_heads(out.out));
  run_norm(launch, r, args.x.dtype);
}
void rms_norm_backward(const RmsNormArgs& args, const RmsNormOut&, const RmsNormGrads& grads, const Launch& launch) {
  NormRows r = rows_of(args);
  r.dout = norm_tensor(with_heads(grads.dout));
  r.dx = norm_tensor(with_heads(grads.dx));
  Arena arena(launch.workspace);
  View dweight = grads.dweight;
  if (dweight.given()) {
    r.sums = arena.take<float>(static_cast<int64_t>(r.parts) * r.V);
    dweight = View::dense(dweight.data, dweight.dtype, {1, dweight.size[0]});
    dweight.stride[1] = grads.dweight.stride[0];
  }
  run_norm_backward(launch, r, args.x.dtype, dweight);
}

}  // namespace linnet::cuda
