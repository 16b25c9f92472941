// rms_norm_gated: the norm and the output gate that follow most recurrent mixers, in one pass.
//
//   gate first (Mamba-2):                  u = x gate(z),   out = u / sqrt(mean u^2 + eps) * weight
//   norm_before_gate (Gated DeltaNet):     out = x / sqrt(mean x^2 + eps) * weight * gate(z)
//
// gate(z) = z sigmoid(z) (silu) or sigmoid(z); without z there is no gate. The mean runs over V: heads of a mixer, or the
// groups of channels of Mamba-2 as [B, T, G, E / G].
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class NormGate : int32_t { silu, sigmoid };

struct RmsNormGatedArgs {
  View x;       // [B, T, H, V]
  View z;       // optional [B, T, H, V]: the gate before its activation
  View weight;  // optional [H, V], or broadcastable: [V]
  double eps = 1e-5;
  NormGate gate = NormGate::silu;
  bool norm_before_gate = false;
};
struct RmsNormGatedOut {
  View out;  // [B, T, H, V]
};
struct RmsNormGatedGrads {
  View dout;             // incoming; absent = zero
  View dx, dz, dweight;  // results; absent = not wanted
};
const Op& rms_norm_gated_op();
Status rms_norm_gated(const RmsNormGatedArgs& args, const RmsNormGatedOut& out, const Context& context);
Status rms_norm_gated_backward(const RmsNormGatedArgs& args, const RmsNormGatedOut& out, const RmsNormGatedGrads& grads,
                               const Context& context);
int64_t rms_norm_gated_workspace(const RmsNormGatedArgs& args, Pass pass, const Context& context);

LINNET_KERNELS(rms_norm_gated, RmsNormGatedArgs, RmsNormGatedOut, RmsNormGatedGrads)
LINNET_CUDA_KERNELS(rms_norm_gated, RmsNormGatedArgs, RmsNormGatedOut, RmsNormGatedGrads)

}  // namespace linnet
