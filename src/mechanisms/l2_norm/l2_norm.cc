#include "l2_norm.h"

#include "core/op.h"

namespace linnet {
namespace {

Cost cost_norm(const L2NormArgs& args, const Dims&, Pass pass) {
  const double elements = static_cast<double>(args.x.elements()), size = static_cast<double>(dtype_size(args.x.dtype));
  return pass == Pass::forward ? Cost{3 * elements, 2 * size * elements} : Cost{8 * elements, 3 * size * elements};
}

}  // namespace

// clang-format off
const Op& l2_norm_op() {
  using A = L2NormArgs;
  using O = L2NormOut;
  using G = L2NormGrads;
  static const Op op =
      Declare<A, O, G>("l2_norm", "l2_norm", "rows of length one, head by head")
          .equation("out = x / sqrt(sum x^2 + eps)")
          .input("x", &A::x, "B T H K", "queries or keys").grad(&G::dx)
          .output("out", &O::out, "B T H K", "the same rows with length one").grad(&G::dout)
          .option("eps", &A::eps, 0, kAnyReal, "added to the sum of squares")
          .always_causal()
          .cost<cost_norm>()
          .bench("B=1 T=8192 H=16 K=128 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 H=16 K=128 dtype=bf16|f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=1 H=16 K=128 dtype=f32 pass=fwd")
          .impl<ref::l2_norm_forward, ref::l2_norm_backward, ref::l2_norm_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(l2_norm)
          .cuda<cuda::l2_norm_forward, cuda::l2_norm_backward, cuda::l2_norm_workspace, cuda::l2_norm_refuses>();
  return op;
}
// clang-format on

Status l2_norm(const L2NormArgs& args, const L2NormOut& out, const Context& context) {
  return run(l2_norm_op(), Pass::forward, &args, &out, nullptr, context);
}
Status l2_norm_backward(const L2NormArgs& args, const L2NormOut& out, const L2NormGrads& grads, const Context& context) {
  return run(l2_norm_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t l2_norm_workspace(const L2NormArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(l2_norm_op(), pass, &args, context);
}

}  // namespace linnet
