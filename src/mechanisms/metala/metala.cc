#include "metala.h"

#include "core/op.h"
#include "metala_rows.h"

namespace linnet {
namespace {

const std::vector<std::string>& augs() {
  static const std::vector<std::string> names = {"sigmoid", "linear", "none"};
  return names;
}

template <class Args>
Status check_numbers(const char* op, const Args& args) {
  if constexpr (requires { args.tau; }) {
    if (!(args.tau > 0))
      return bad_input(std::string(op) + ": tau is " + std::to_string(args.tau) + ", expected a positive number");
  }
  if (args.floor < 0) return {};
  return bad_input(std::string(op) + ": floor is " + std::to_string(args.floor) + ", expected a negative number");
}
Status check_mixer(const MetalaMixerArgs& args, const Dims&) { return check_numbers("metala_mixer", args); }
Status check_decode(const MetalaMixerDecodeArgs& args, const Dims&) { return check_numbers("metala_mixer_decode", args); }
Status check_core(const MetalaCoreArgs& args, const Dims&) { return check_numbers("metala_core", args); }

// As `gla` (recurrence.cc), chunks of 32.
template <class Args>
Cost cost_of(const Args& args, const Dims& dims, Pass pass) {
  const double K = static_cast<double>(dims["K"]), V = static_cast<double>(dims["V"]), H = static_cast<double>(dims["H"]);
  const double tokens = static_cast<double>(dims["B"] * dims["T"]), size = static_cast<double>(dtype_size(args.q.dtype));
  const double flops = tokens * H * (32 * (K + V) + 4 * K * V);
  const double bytes = size * tokens * H * 2 * (K + V) + 4 * static_cast<double>(dims["N"]) * H * K * V;
  return pass == Pass::forward ? Cost{flops, bytes} : Cost{2.5 * flops, 2 * bytes};
}
Cost cost_mixer(const MetalaMixerArgs& args, const Dims& dims, Pass pass) { return cost_of(args, dims, pass); }
Cost cost_core(const MetalaCoreArgs& args, const Dims& dims, Pass pass) { return cost_of(args, dims, pass); }
Cost cost_decode(const MetalaMixerDecodeArgs&, const Dims& dims, Pass) {
  const double state = static_cast<double>(dims["B"] * dims["H"] * dims["K"] * dims["V"]);
  return {5 * state * static_cast<double>(dims["T"]), 8 * state};
}

}  // namespace

// clang-format off
const Op& metala_mixer_op() {
  using A = MetalaMixerArgs;
  using O = MetalaMixerOut;
  using G = MetalaMixerGrads;
  static const Op op =
      Declare<A, O, G>("metala_mixer", "metala", "MetaLA: key = 1 - decay, with self-augmentation")
          .equation("g = max(logsigmoid(a)/tau, floor), k = 1 - exp(g);  S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t + sigmoid((q_t.(w_aug k_t)) v_t)")
          .decode("metala_mixer_decode")
          .input("q", &A::q, "B T H K", "queries").grad(&G::dq)
          .input("a", &A::a, "B T H K", "decay logits").grad(&G::da)
          .input("v", &A::v, "B T H V", "values").grad(&G::dv)
          .input("w_aug", &A::w_aug, "H K", "self-augmentation weights; zeros when absent").element(Element::param).optional().grad(&G::dw_aug)
          .input("mask", &A::mask, "B T", "tokens with 0 have v = 0").element(Element::mask).values(Values::normal, "v").optional()
          .input("cu_seqlens", &A::cu_seqlens, "N+1", "offsets of packed sequences; q is then [total, H, K]")
          .element(Element::index).values(Values::offsets, "T").optional()
          .input("state", &A::state, "N H K V", "the state before the first token; zeros when absent")
          .element(Element::acc).optional().grad(&G::dstate)
          .output("out", &O::out, "B T H V", "the read of the state and the augmentation").grad(&G::dout)
          .output("final_state", &O::final_state, "N H K V", "the state after the last token").element(Element::acc).optional().grad(&G::dfinal_state)
          .option("tau", &A::tau, 0, kAnyReal, "decay temperature")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "of q in the recurrence; default K^-0.5")
          .option("floor", &A::floor, -kAnyReal, 0, "lower bound of the log decay")
          .option("aug", &A::aug, augs(), "self-augmentation: sigmoid(u v), u v, or none")
          .option("skip_masked", &A::skip_masked, "masked tokens leave the state alone; else they decay it")
          .letter("N", "B")
          .check<check_mixer>()
          .always_causal()
          .cost<cost_mixer>()
          .bench("B=1 T=8192 H=8 K=64 V=128 with=w_aug dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=4 T=2048 H=8 K=64 V=128 with=w_aug,mask skip_masked=1 dtype=f32 pass=fwd")
          .bench("B=1 T=33 H=2 K=16 V=32 with=w_aug dtype=f32 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 H=16 K=128 V=K with=w_aug dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=1 T=32768 H=16 K=128 V=K with=w_aug dtype=bf16 pass=fwd|fwd+bwd")
          .compare("", "q=unit@q a=@k aug=none")
          .impl<ref::metala_mixer_forward, ref::metala_mixer_backward, ref::metala_mixer_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(metala_mixer)
          .cuda_rows<cuda::MetalaMixerTable, cuda::Row::step, cuda::Row::general, cuda::Row::chunk, cuda::Row::channel>();
  return op;
}

const Op& metala_mixer_decode_op() {
  using A = MetalaMixerDecodeArgs;
  using O = MetalaMixerDecodeOut;
  static const Op op =
      Declare<A, O, MetalaMixerDecodeGrads>("metala_mixer_decode", "metala", "continues MetaLA token by token, the state in place")
          .equation("g = max(logsigmoid(a)/tau, floor), k = 1 - exp(g);  S = diag(exp(g)) S + k v^T;  o = scale S^T q + sigmoid((q.(w_aug k)) v)")
          .input("q", &A::q, "B T H K", "queries of the new tokens")
          .input("a", &A::a, "B T H K", "decay logits of the new tokens")
          .input("v", &A::v, "B T H V", "values of the new tokens")
          .input("w_aug", &A::w_aug, "H K", "self-augmentation weights; zeros when absent").element(Element::param).optional()
          .input("mask", &A::mask, "B T", "tokens with 0 have v = 0").element(Element::mask).values(Values::normal, "v").optional()
          .input("state", &A::state, "B H K V", "the state; read and overwritten").element(Element::acc).mutated()
          .output("out", &O::out, "B T H V", "the read of the state and the augmentation")
          .option("tau", &A::tau, 0, kAnyReal, "decay temperature")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "of q in the recurrence; default K^-0.5")
          .option("floor", &A::floor, -kAnyReal, 0, "lower bound of the log decay")
          .option("aug", &A::aug, augs(), "self-augmentation: sigmoid(u v), u v, or none")
          .option("skip_masked", &A::skip_masked, "masked tokens leave the state alone; else they decay it")
          .check<check_decode>()
          .cost<cost_decode>()
          .bench("B=1|16|64 T=1 H=16 K=64 V=128 with=w_aug dtype=f32|bf16 pass=fwd")
          .impl<ref::metala_mixer_decode_forward, nullptr, ref::metala_mixer_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(metala_mixer_decode)
          .cuda_rows<cuda::MetalaDecodeTable, cuda::Row::step, cuda::Row::channel, cuda::Row::decode>();
  return op;
}

const Op& metala_core_op() {
  using A = MetalaCoreArgs;
  using O = MetalaCoreOut;
  using G = MetalaCoreGrads;
  static const Op op =
      Declare<A, O, G>("metala_core", "metala", "the recurrence of MetaLA on given log decays")
          .equation("k = 1 - exp(g);  S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t")
          .input("q", &A::q, "B T H K", "queries").grad(&G::dq)
          .input("g", &A::g, "B T H K", "log decays; those below floor count as floor").element(Element::acc).values(Values::log_decay).grad(&G::dg)
          .input("v", &A::v, "B T H V", "values").grad(&G::dv)
          .input("cu_seqlens", &A::cu_seqlens, "N+1", "offsets of packed sequences; q is then [total, H, K]")
          .element(Element::index).values(Values::offsets, "T").optional()
          .input("state", &A::state, "N H K V", "the state before the first token; zeros when absent")
          .element(Element::acc).optional().grad(&G::dstate)
          .output("out", &O::out, "B T H V", "the read of the state").grad(&G::dout)
          .output("final_state", &O::final_state, "N H K V", "the state after the last token").element(Element::acc).optional().grad(&G::dfinal_state)
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "of q; default K^-0.5")
          .option("floor", &A::floor, -kAnyReal, 0, "lower bound of the log decay")
          .letter("N", "B")
          .check<check_core>()
          .always_causal()
          .cost<cost_core>()
          .bench("B=1 T=8192 H=8 K=64 V=128 dtype=f32 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 H=16 K=128 V=K dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=1 T=32768 H=16 K=128 V=K dtype=bf16 pass=fwd|fwd+bwd")
          .compare("", "q=unit@q g=logsigmoid@k")
          .impl<ref::metala_core_forward, ref::metala_core_backward, ref::metala_core_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(metala_core)
          .cuda_rows<cuda::MetalaCoreTable, cuda::Row::step, cuda::Row::general, cuda::Row::chunk, cuda::Row::channel>();
  return op;
}
// clang-format on

Status metala_mixer(const MetalaMixerArgs& args, const MetalaMixerOut& out, const Context& context) {
  return run(metala_mixer_op(), Pass::forward, &args, &out, nullptr, context);
}
Status metala_mixer_backward(const MetalaMixerArgs& args, const MetalaMixerOut& out, const MetalaMixerGrads& grads,
                             const Context& context) {
  return run(metala_mixer_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t metala_mixer_workspace(const MetalaMixerArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(metala_mixer_op(), pass, &args, context);
}
Status metala_mixer_decode(const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, const Context& context) {
  return run(metala_mixer_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t metala_mixer_decode_workspace(const MetalaMixerDecodeArgs& args, const Context& context) {
  return workspace_bytes(metala_mixer_decode_op(), Pass::forward, &args, context);
}
Status metala_core(const MetalaCoreArgs& args, const MetalaCoreOut& out, const Context& context) {
  return run(metala_core_op(), Pass::forward, &args, &out, nullptr, context);
}
Status metala_core_backward(const MetalaCoreArgs& args, const MetalaCoreOut& out, const MetalaCoreGrads& grads,
                            const Context& context) {
  return run(metala_core_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t metala_core_workspace(const MetalaCoreArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(metala_core_op(), pass, &args, context);
}

}  // namespace linnet
