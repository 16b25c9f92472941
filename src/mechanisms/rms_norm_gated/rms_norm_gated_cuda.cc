// rms_norm_gated on the GPU (shared/norm_rows.h).
#include "mechanisms/shared/norm_rows.h"
#include "rms_norm_gated.h"

namespace linnet::cuda {
namespace {

NormRows rows_of(const RmsNormGatedArgs& args) {
  NormRows r = norm_rows(args.x, args.eps);
  r.z = norm_tensor(args.z);
  if (args.weight.given()) {
    r.weight = args.weight.data;
    r.weight_dtype = args.weight.dtype;
    r.weight_stride_h = args.weight.size[0] == 1 ? 0 : args.weight.stride[0];
    r.weight_stride_v = args.weight.size[1] == 1 ? 0 : args.weight.stride[1];
    r.weight_vectors = r.weight_stride_v == 1 && r.weight_stride_h % 4 == 0 && reinterpret_cast<uintptr_t>(r.weight) % 16 == 0;
  }
  r.unit = r.V == 0 ? 1 : 1 / static_cast<float>(r.V);
  r.silu = args.gate == NormGate::silu;
  r.first = args.norm_before_gate || !args.z.given();
  r.together = !args.weight.given() || r.weight_stride_h == 0;
  r.parts = static_cast<int32_t>(norm_parts(r));
  return r;
}
int64_t sum_count(const NormRows& r) { return static_cast<int64_t>(r.together ? 1 : r.H) * r.parts * r.V; }

}  // namespace

const char* rms_norm_gated_refuses(const RmsNormGatedArgs& args, Pass) {
  return args.x.dtype == Dtype::f64 ? "the CUDA kernels have no f64" : nullptr;
}
int64_t rms_norm_gated_workspace(const RmsNormGatedArgs& args, Pass pass, int) {
  Arena arena;
  if (pass == Pass::backward && args.weight.given()) arena.take<float>(sum_count(rows_of(args)));
  return arena.used();
}
void rms_norm_gated_forward(const RmsNormGatedArgs& args, const RmsNormGatedOut& out, const Launch& launch) {
  NormRows r = rows_of(args);
  r.out = norm_tensor(out.out);
  run_norm(launch, r, args.x.dtype);
}
void rms_norm_gated_backward(const RmsNormGatedArgs& args, const RmsNormGatedOut&, const RmsNormGatedGrads& grads,
                             const Launch& launch) {
  NormRows r = rows_of(args);
  r.dout = norm_tensor(grads.dout);
  r.dx = norm_tensor(grads.dx);
  r.dz = norm_tensor(grads.dz);
  Arena arena(launch.workspace);
  if (grads.dweight.given()) r.sums = arena.take<float>(sum_count(r));
  run_norm_backward(launch, r, args.x.dtype, grads.dweight);
}

}  // namespace linnet::cuda
