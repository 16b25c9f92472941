#include "layer_norm.h"

#include "core/op.h"

namespace linnet {
namespace {

Cost cost_norm(const LayerNormArgs& args, const Dims&, Pass pass) {
  const double elements = static_cast<double>(args.x.elements()), size = static_cast<double>(dtype_size(args.x.dtype));
  return pass == Pass::forward ? Cost{7 * elements, 2 * size * elements} : Cost{14 * elements, 3 * size * elements};
}

}  // namespace

// clang-format off
const Op& layer_norm_op() {
  using A = LayerNormArgs;
  using O = LayerNormOut;
  using G = LayerNormGrads;
  static const Op op =
      Declare<A, O, G>("layer_norm", "layer_norm", "rows of mean 0 and variance 1")
          .equation("out = (x - mean x) / sqrt(var x + eps) weight + bias")
          .input("x", &A::x, "B T H D", "rows; or [B, T, D]").or_shape("B T D").grad(&G::dx)
          .input("weight", &A::weight, "D", "multiplies the normed row; ones when absent").element(Element::param).optional().grad(&G::dweight)
          .input("bias", &A::bias, "D", "added at the end; zeros when absent").element(Element::param).optional().grad(&G::dbias)
          .output("out", &O::out, "B T H D", "the normed rows").or_shape("B T D").grad(&G::dout)
          .option("eps", &A::eps, 0, kAnyReal, "added to the variance")
          .always_causal()
          .cost<cost_norm>()
          .bench("B=1 T=8192 H=1 D=768 with=weight,bias dtype=f32|bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 H=1 D=2048 with=weight,bias dtype=bf16|f32 pass=fwd|fwd+bwd")
          .impl<ref::layer_norm_forward, ref::layer_norm_backward, ref::layer_norm_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(layer_norm)
          .cuda<cuda::layer_norm_forward, cuda::layer_norm_backward, cuda::layer_norm_workspace, cuda::layer_norm_refuses>();
  return op;
}
// clang-format on

Status layer_norm(const LayerNormArgs& args, const LayerNormOut& out, const Context& context) {
  return run(layer_norm_op(), Pass::forward, &args, &out, nullptr, context);
}
Status layer_norm_backward(const LayerNormArgs& args, const LayerNormOut& out, const LayerNormGrads& grads,
                           const Context& context) {
  return run(layer_norm_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t layer_norm_workspace(const LayerNormArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(layer_norm_op(), pass, &args, context);
}

}  // namespace linnet
