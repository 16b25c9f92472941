#include "rms_norm_gated.h"

#include "core/op.h"

namespace linnet {
namespace {

const std::vector<std::string>& gates() {
  static const std::vector<std::string> names = {"silu", "sigmoid"};
  return names;
}

Cost cost_norm(const RmsNormGatedArgs& args, const Dims&, Pass pass) {
  const double elements = static_cast<double>(args.x.elements()), size = static_cast<double>(dtype_size(args.x.dtype));
  const double tensors = args.z.given() ? 3 : 2;
  if (pass == Pass::forward) return {(args.z.given() ? 16 : 5) * elements, tensors * size * elements};
  return {(args.z.given() ? 30 : 12) * elements, (2 * tensors - 1) * size * elements};
}

}  // namespace

// clang-format off
const Op& rms_norm_gated_op() {
  using A = RmsNormGatedArgs;
  using O = RmsNormGatedOut;
  using G = RmsNormGatedGrads;
  static const Op op =
      Declare<A, O, G>("rms_norm_gated", "rms_norm_gated", "RMS norm over each head's channels, with the output gate")
          .equation("u = x gate(z);  out = u / sqrt(mean u^2 + eps) weight;  norm_before_gate: out = x / sqrt(mean x^2 + eps) weight gate(z)")
          .input("x", &A::x, "B T H V", "outputs of a mixer").grad(&G::dx)
          .input("z", &A::z, "B T H V", "the gate before its activation; none: no gate").optional().grad(&G::dz)
          .input("weight", &A::weight, "H V", "multiplies the normed row; ones when absent").element(Element::param).broadcast().optional().grad(&G::dweight)
          .output("out", &O::out, "B T H V", "normed and gated").grad(&G::dout)
          .option("eps", &A::eps, 0, kAnyReal, "added to the mean of squares")
          .option("gate", &A::gate, gates(), "the gate's activation: z sigmoid(z) or sigmoid(z)")
          .option("norm_before_gate", &A::norm_before_gate, "the gate multiplies the normed row instead of the row")
          .always_causal()
          .cost<cost_norm>()
          .bench("B=1 T=8192 H=16 V=128 with=z,weight norm_before_gate=1 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 H=1 V=2048 with=z,weight dtype=f32 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 H=16 V=128 with=z,weight norm_before_gate=1 dtype=bf16|f32 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 H=1 V=2048 with=z,weight dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=256 T=1 H=32 V=128 with=z,weight norm_before_gate=1 dtype=bf16 pass=fwd")
          .bench("B=1 T=1 H=16 V=128 with=z,weight dtype=f32 pass=fwd")
          .impl<ref::rms_norm_gated_forward, ref::rms_norm_gated_backward, ref::rms_norm_gated_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(rms_norm_gated)
          .cuda<cuda::rms_norm_gated_forward, cuda::rms_norm_gated_backward, cuda::rms_norm_gated_workspace, cuda::rms_norm_gated_refuses>();
  return op;
}
// clang-format on

Status rms_norm_gated(const RmsNormGatedArgs& args, const RmsNormGatedOut& out, const Context& context) {
  return run(rms_norm_gated_op(), Pass::forward, &args, &out, nullptr, context);
}
Status rms_norm_gated_backward(const RmsNormGatedArgs& args, const RmsNormGatedOut& out, const RmsNormGatedGrads& grads,
                               const Context& context) {
  return run(rms_norm_gated_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t rms_norm_gated_workspace(const RmsNormGatedArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(rms_norm_gated_op(), pass, &args, context);
}

}  // namespace linnet
