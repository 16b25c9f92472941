#include "causal_conv.h"

#include "core/op.h"

namespace linnet {
namespace {

const std::vector<std::string>& activations() {
  static const std::vector<std::string> names = {"none", "silu"};
  return names;
}

Status check_taps(const char* op, const Dims& dims) {
  if (dims["W"] > 0) return {};
  return bad_input(std::string(op) + ": weight has no taps, expected at least 1");
}
Status check_conv(const CausalConvArgs&, const Dims& dims) { return check_taps("causal_conv", dims); }
Status check_decode(const CausalConvDecodeArgs&, const Dims& dims) { return check_taps("causal_conv_decode", dims); }

// Forward: W multiply-adds per element. Backward: the same for dx, dweight and the recomputed sums.
Cost cost_conv(const CausalConvArgs& args, const Dims& dims, Pass pass) {
  const double elements = static_cast<double>(dims["B"] * dims["T"] * dims["E"]), taps = static_cast<double>(dims["W"]);
  const double bytes = elements * static_cast<double>(dtype_size(args.x.dtype));
  if (pass == Pass::forward) return {2 * taps * elements, 2 * bytes};
  return {6 * taps * elements, 3 * bytes};
}
Cost cost_decode(const CausalConvDecodeArgs& args, const Dims& dims, Pass) {
  const double elements = static_cast<double>(dims["B"] * dims["E"]), taps = static_cast<double>(dims["W"]);
  const double size = static_cast<double>(dtype_size(args.x.dtype)), tokens = static_cast<double>(dims["T"]);
  return {2 * taps * elements * tokens, size * elements * (2 * (taps - 1) + 2 * tokens)};
}

}  // namespace

// clang-format off
const Op& causal_conv_op() {
  using A = CausalConvArgs;
  using O = CausalConvOut;
  using G = CausalConvGrads;
  static const Op op =
      Declare<A, O, G>("causal_conv", "causal_conv", "short depthwise causal convolution with SiLU, a state and packing")
          .equation("out_t = act(bias + sum_j weight_j x_{t-W+1+j}), channel by channel")
          .decode("causal_conv_decode")
          .input("x", &A::x, "B T E", "inputs").grad(&G::dx)
          .input("weight", &A::weight, "E W", "the taps of each channel; the last is for the current token").element(Element::param).grad(&G::dweight)
          .input("bias", &A::bias, "E", "added before the activation").element(Element::param).optional().grad(&G::dbias)
          .input("cu_seqlens", &A::cu_seqlens, "N+1", "offsets of packed sequences; x is then [total, E]")
          .element(Element::index).values(Values::offsets, "T").optional()
          .input("initial_state", &A::initial_state, "N E W-1", "the W-1 inputs before the first token, the oldest first; zeros when absent")
          .optional().grad(&G::dinitial_state)
          .output("out", &O::out, "B T E", "the convolved inputs").grad(&G::dout)
          .output("final_state", &O::final_state, "N E W-1", "the last W-1 inputs").optional().grad(&G::dfinal_state)
          .option("activation", &A::activation, activations(), "what follows the sum")
          .letter("N", "B")
          .check<check_conv>()
          .always_causal()
          .cost<cost_conv>()
          .bench("B=1 T=8192 E=2048 W=4 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 E=2048 W=4 dtype=bf16|f32 pass=fwd|fwd+bwd")
          .gpu_bench("B=1 T=32768 E=2048 W=4 dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=1 T=2048 E=2048 W=4 dtype=bf16 pass=fwd|fwd+bwd")
          .bench("B=8 T=64 E=512 W=4 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=33 E=24 W=4 dtype=f32 pass=fwd|fwd+bwd")
          .impl<ref::causal_conv_forward, ref::causal_conv_backward, ref::causal_conv_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(causal_conv)
          .cuda<cuda::causal_conv_forward, cuda::causal_conv_backward, cuda::causal_conv_workspace, cuda::causal_conv_refuses>();
  return op;
}

const Op& causal_conv_decode_op() {
  using A = CausalConvDecodeArgs;
  using O = CausalConvDecodeOut;
  static const Op op =
      Declare<A, O, CausalConvDecodeGrads>("causal_conv_decode", "causal_conv", "continues the convolution token by token, the state in place")
          .equation("out_t = act(bias + sum_j weight_j x_{t-W+1+j}), channel by channel")
          .input("x", &A::x, "B T E", "inputs of the new tokens")
          .input("weight", &A::weight, "E W", "the taps of each channel; the last is for the current token").element(Element::param)
          .input("bias", &A::bias, "E", "added before the activation").element(Element::param).optional()
          .input("state", &A::state, "B E W-1", "the last W-1 inputs, the oldest first; read and overwritten").mutated()
          .output("out", &O::out, "B T E", "the convolved inputs")
          .option("activation", &A::activation, activations(), "what follows the sum")
          .check<check_decode>()
          .cost<cost_decode>()
          .gpu_bench("B=16|256 T=1 E=6144 W=4 dtype=bf16 pass=fwd")
          .bench("B=1|16|64 T=1 E=2048 W=4 dtype=f32|bf16 pass=fwd")
          .bench("B=1024 T=1 E=2048 W=4 dtype=f32 pass=fwd")
          .impl<ref::causal_conv_decode_forward, nullptr, ref::causal_conv_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(causal_conv_decode)
          .cuda<cuda::causal_conv_decode_forward, nullptr, cuda::causal_conv_decode_workspace, cuda::causal_conv_decode_refuses>();
  return op;
}
// clang-format on

Status causal_conv(const CausalConvArgs& args, const CausalConvOut& out, const Context& context) {
  return run(causal_conv_op(), Pass::forward, &args, &out, nullptr, context);
}
Status causal_conv_backward(const CausalConvArgs& args, const CausalConvOut& out, const CausalConvGrads& grads,
                            const Context& context) {
  return run(causal_conv_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t causal_conv_workspace(const CausalConvArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(causal_conv_op(), pass, &args, context);
}
Status causal_conv_decode(const CausalConvDecodeArgs& args, const CausalConvDecodeOut& out, const Context& context) {
  return run(causal_conv_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t causal_conv_decode_workspace(const CausalConvDecodeArgs& args, const Context& context) {
  return workspace_bytes(causal_conv_decode_op(), Pass::forward, &args, context);
}

}  // namespace linnet
