// gated: softmax attention with a gate (Qiu et al. 2025, arXiv 2505.06708), fused into the read.
//
//   y_i   = softmax attention of row i (softmax.h)
//   out_i = y_i act(g_i)          mode multiply;   y_i + act(g_i)   mode add
//
// Position G1 gates the output of each query head, as above; G2 gates the values, G3 the keys and G4 the queries before the
// attention. (G5 gates the output of the layer's last projection: gated_gate.) A gate has one logit per channel (elementwise)
// or one per head (headwise); shared: all heads use the mean over heads of act(g).
#pragma once

#include "../softmax/softmax.h"

namespace linnet {

enum class GatePosition : int32_t { G1, G2, G3, G4, G5 };
enum class GateGranularity : int32_t { elementwise, headwise };
enum class GateMode : int32_t { multiply, add };
enum class GateAct : int32_t { sigmoid, ns_sigmoid, silu, identity };  // ns_sigmoid: 0.5 + 0.5 sigmoid(g), in [0.5, 1]

struct GateOptions {
  GatePosition position = GatePosition::G1;
  GateGranularity granularity = GateGranularity::elementwise;
  GateAct act = GateAct::sigmoid;
  GateMode mode = GateMode::multiply;
  bool shared = false;
};

struct GatedArgs : SoftmaxArgs {
  View g;  // logits, [B, T, H, D] of the gated tensor, or [B, T, H] headwise
  GatePosition position = GatePosition::G1;
  GateGranularity granularity = GateGranularity::elementwise;
  GateAct act = GateAct::sigmoid;
  GateMode mode = GateMode::multiply;
  bool shared = false;
  LINNET_INLINE GateOptions gate() const { return {position, granularity, act, mode, shared}; }
};
struct GatedOut {
  View out;   // [B, Tq, H, V]
  View lse;   // [B, Tq, H] f32 (f64 for f64): the gate leaves it alone
  View y;     // optional [B, Tq, H, V]: the read before its gate (G1; otherwise the same as out)
  View kept;  // what the backward needs beside out: y where out does not tell it (silu, identity, add), else [B, Tq, H, 0]
};
struct GatedGrads {
  View dout, dlse;                     // incoming; absent = zero
  View dq, dk, dv, dbias, dsinks, dg;  // results; absent = not wanted
};
const Op& gated_op();
Status gated(const GatedArgs& args, const GatedOut& out, const Context& context);
// Reads out.out, out.lse and out.kept of the forward.
Status gated_backward(const GatedArgs& args, const GatedOut& out, const GatedGrads& grads, const Context& context);
int64_t gated_workspace(const GatedArgs& args, Pass pass, const Context& context);

// softmax_decode with the gate at G1. (G2, G3: give gated values or keys, which the cache then holds; G4: gated queries.)
struct GatedDecodeArgs : SoftmaxDecodeArgs {
  View g;  // [B, T, H, V], or [B, T, H] headwise
  GateGranularity granularity = GateGranularity::elementwise;
  GateAct act = GateAct::sigmoid;
  GateMode mode = GateMode::multiply;
  bool shared = false;
  LINNET_INLINE GateOptions gate() const { return {GatePosition::G1, granularity, act, mode, shared}; }
};
const Op& gated_decode_op();
Status gated_decode(const GatedDecodeArgs& args, const SoftmaxOut& out, const Context& context);
int64_t gated_decode_workspace(const GatedDecodeArgs& args, const Context& context);

// The gate alone, for the output of any read (linear attention, a recurrence, ...) and for G5: out = y act(g) or y + act(g).
struct GatedGateArgs {
  View y;  // [B, T, H, V]
  View g;  // [B, T, H, V], or [B, T, H] headwise
  GateGranularity granularity = GateGranularity::elementwise;
  GateAct act = GateAct::sigmoid;
  GateMode mode = GateMode::multiply;
  bool shared = false;
  LINNET_INLINE GateOptions gate() const { return {GatePosition::G1, granularity, act, mode, shared}; }
};
struct GatedGateOut {
  View out;  // [B, T, H, V]
};
struct GatedGateGrads {
  View dout;    // incoming
  View dy, dg;  // results
};
const Op& gated_gate_op();
Status gated_gate(const GatedGateArgs& args, const GatedGateOut& out, const Context& context);
Status gated_gate_backward(const GatedGateArgs& args, const GatedGateOut& out, const GatedGateGrads& grads,
                           const Context& context);
int64_t gated_gate_workspace(const GatedGateArgs& args, Pass pass, const Context& context);

LINNET_KERNELS(gated, GatedArgs, GatedOut, GatedGrads)
LINNET_KERNELS(gated_decode, GatedDecodeArgs, SoftmaxOut, SoftmaxNoGrads)
LINNET_KERNELS(gated_gate, GatedGateArgs, GatedGateOut, GatedGateGrads)
LINNET_KERNELS_IN(avx512_bf16, gated, GatedArgs, GatedOut, GatedGrads)
LINNET_KERNELS_IN(avx512_bf16, gated_decode, GatedDecodeArgs, SoftmaxOut, SoftmaxNoGrads)

// Whether the backward of a gate at G1 needs the read itself: out / act(g) does not tell it where act has zeros, and out -
// act(g) cancels.
LINNET_INLINE bool gate_keeps_read(const GateOptions& gate) {
  return gate.position == GatePosition::G1 &&
         (gate.mode == GateMode::add || gate.act == GateAct::silu || gate.act == GateAct::identity);
}
// The tensor that a position gates.
LINNET_INLINE const View& gated_tensor(const GatedArgs& args) {
  switch (args.position) {
    case GatePosition::G2: return args.v;
    case GatePosition::G3: return args.k;
    default: return args.q;
  }
}

}  // namespace linnet
