#include "rms_norm.h"

#include "core/op.h"

namespace linnet {
namespace {

Cost cost_norm(const RmsNormArgs& args, const Dims&, Pass pass) {
  const double elements = static_cast<double>(args.x.elements()), size = static_cast<double>(dtype_size(args.x.dtype));
  return pass == Pass::forward ? Cost{4 * elements, 2 * size * elements} : Cost{10 * elements, 3 * size * elements};
}

}  // namespace

// clang-format off
const Op& rms_norm_op() {
  using A = RmsNormArgs;
  using O = RmsNormOut;
  using G = RmsNormGrads;
  static const Op op =
      Declare<A, O, G>("rms_norm", "rms_norm", "rows divided by their root mean square")
          .equation("out = x / sqrt(mean x^2 + eps) weight;  plus_one: (1 + weight)")
          .input("x", &A::x, "B T H D", "rows; or [B, T, D]").or_shape("B T D").grad(&G::dx)
          .input("weight", &A::weight, "D", "multiplies the normed row; ones when absent").element(Element::param).optional().grad(&G::dweight)
          .output("out", &O::out, "B T H D", "the normed rows").or_shape("B T D").grad(&G::dout)
          .option("eps", &A::eps, 0, kAnyReal, "added to the mean of squares")
          .option("plus_one", &A::plus_one, "multiply by 1 + weight")
          .always_causal()
          .cost<cost_norm>()
          .bench("B=1 T=8192 H=1 D=576 with=weight dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 H=16 D=128 with=weight dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=1 H=1 D=576 with=weight dtype=f32 pass=fwd")
          .gpu_bench("B=16 T=2048 H=1 D=2048 with=weight dtype=bf16|f32 pass=fwd|fwd+bwd")
          .impl<ref::rms_norm_forward, ref::rms_norm_backward, ref::rms_norm_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(rms_norm)
          .cuda<cuda::rms_norm_forward, cuda::rms_norm_backward, cuda::rms_norm_workspace, cuda::rms_norm_refuses>();
  return op;
}
// clang-format on

Status rms_norm(const RmsNormArgs& args, const RmsNormOut& out, const Context& context) {
  return run(rms_norm_op(), Pass::forward, &args, &out, nullptr, context);
}
Status rms_norm_backward(const RmsNormArgs& args, const RmsNormOut& out, const RmsNormGrads& grads, const Context& context) {
  return run(rms_norm_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t rms_norm_workspace(const RmsNormArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(rms_norm_op(), pass, &args, context);
}

}  // namespace linnet
