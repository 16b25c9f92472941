#include "gated.h"

#include "core/op.h"
#include "cuda/dispatch.h"
#include "mechanisms/softmax/softmax_checks.h"

namespace linnet {
namespace {

// Functions, not constants: declarations are read while libraries are still being loaded.
const std::vector<std::string>& granularities() {
  static const std::vector<std::string> names = {"elementwise", "headwise"};
  return names;
}
const std::vector<std::string>& acts() {
  static const std::vector<std::string> names = {"sigmoid", "ns_sigmoid", "silu", "identity"};
  return names;
}
const std::vector<std::string>& modes() {
  static const std::vector<std::string> names = {"multiply", "add"};
  return names;
}

Status check_rank(const char* op, const View& g, GateGranularity granularity) {
  const bool headwise = granularity == GateGranularity::headwise;
  if (g.rank == (headwise ? 3 : 4)) return {};
  return bad_input(std::string(op) + ": g has rank " + std::to_string(g.rank) + ", expected " + (headwise ? "3" : "4") + " (" +
                   (headwise ? "one logit per head, granularity headwise" : "one logit per channel, granularity elementwise") +
                   ")");
}

Status check_gated(const GatedArgs& args, const Dims&) {
  if (args.position == GatePosition::G5) {
    return bad_input("gated: position G5 gates the output projection, which is not part of this operator; use gated_gate");
  }
  if (args.cu_seqlens_q.given() != args.cu_seqlens_k.given()) {
    return bad_input("gated: cu_seqlens_q and cu_seqlens_k go together, only one is given");
  }
  if (args.cu_seqlens_q.given() && args.key_len.given()) {
    return bad_input("gated: key_len is given for packed sequences, expected cu_seqlens_k to say it");
  }
  return check_rank("gated", args.g, args.granularity);
}
Status check_decode(const GatedDecodeArgs& args, const Dims& dims) {
  LINNET_TRY(check_rank("gated_decode", args.g, args.granularity));
  return check_softmax_cache("gated_decode", args, dims);
}
Status check_gate(const GatedGateArgs& args, const Dims&) { return check_rank("gated_gate", args.g, args.granularity); }

double largest_logit(const GatedArgs& args) { return ref::softmax_largest_logit(args); }
double decode_largest_logit(const GatedDecodeArgs& args) { return ref::softmax_decode_largest_logit(args); }

double logits(const View& g) { return static_cast<double>(g.elements()) * static_cast<double>(dtype_size(g.dtype)); }

Cost cost_gated(const GatedArgs& args, const Dims& dims, Pass pass) {
  Cost cost = softmax_op().cost(static_cast<const SoftmaxArgs*>(&args), dims, pass);
  cost.flops += static_cast<double>(args.q.size[0] * args.q.size[1] * args.q.size[2] * args.v.size[3]);
  cost.bytes += logits(args.g) * (pass == Pass::forward ? 1 : 2);
  return cost;
}
Cost cost_decode(const GatedDecodeArgs& args, const Dims& dims, Pass pass) {
  return softmax_decode_op().cost(static_cast<const SoftmaxDecodeArgs*>(&args), dims, pass);
}
Cost cost_gate(const GatedGateArgs& args, const Dims&, Pass pass) {
  const double elements = static_cast<double>(args.y.elements()), bytes = static_cast<double>(dtype_size(args.y.dtype));
  return {elements * (pass == Pass::forward ? 1 : 3), bytes * elements * (pass == Pass::forward ? 2 : 3) + logits(args.g) * 2};
}

}  // namespace

// clang-format off
const Op& gated_op() {
  using A = GatedArgs;
  using O = GatedOut;
  using G = GatedGrads;
  static const Op op =
      Declare<A, O, G>("gated", "gated", "softmax attention with a gate on its output, values, keys or queries")
          .equation("out_i = y_i act(g_i)  (mode add: y_i + act(g_i)),  y = softmax attention")
          .decode("gated_decode")
          .input("q", &A::q, "B Tq H K", "queries").grad(&G::dq)
          .input("k", &A::k, "B Tk Hkv K", "keys; query head h reads key head h / (H / Hkv)").grad(&G::dk)
          .input("v", &A::v, "B Tk Hkv V", "values").grad(&G::dv)
          .input("g", &A::g, "B Tg Hg G", "gate logits, in the shape of the gated tensor; headwise [B, T, heads]")
          .or_shape("B Tg Hg").grad(&G::dg)
          .input("bias", &A::bias, "B H Tq Tk", "added to the logits after the soft cap; -inf masks")
          .element(Element::param).values(Values::logits).broadcast().optional().grad(&G::dbias)
          .input("sinks", &A::sinks, "H", "one more logit per head that has no value; -inf: none")
          .element(Element::param).values(Values::logits).optional().grad(&G::dsinks)
          .input("key_len", &A::key_len, "B", "number of valid keys of each item")
          .element(Element::index).values(Values::lengths, "Tk").optional()
          .input("cu_seqlens_q", &A::cu_seqlens_q, "N+1", "offsets of packed query sequences; q is then [total, H, K]")
          .element(Element::index).values(Values::offsets, "Tq").optional()
          .input("cu_seqlens_k", &A::cu_seqlens_k, "N+1", "offsets of packed key sequences")
          .element(Element::index).values(Values::offsets, "Tk").optional()
          .output("out", &O::out, "B Tq H V", "the gated read").grad(&G::dout).saved()
          .output("lse", &O::lse, "B Tq H", "natural logarithm of each row's normaliser, sink included")
          .element(Element::acc).values(Values::logits).optional().grad(&G::dlse).saved()
          .output("y", &O::y, "B Tq H V", "the read before its gate").optional()
          .output("kept", &O::kept, "B Tq H kept", "the read, where the backward needs it beside out; empty otherwise").optional().saved()
          .option("position", &A::position, {"G1", "G2", "G3", "G4", "G5"}, "what is gated: G1 the read, G2 values, G3 keys, G4 queries")
          .option("granularity", &A::granularity, granularities(), "one logit per channel, or one per head")
          .option("act", &A::act, acts(), "the gate's activation")
          .option("mode", &A::mode, modes(), "multiply by the gate, or add it")
          .option("shared", &A::shared, "every head uses the mean over heads of the activated gates")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies q.k; default K^-0.5").sampled_to(100)
          .option("causal", &A::causal, "a query sees no later key; aligned to the last key")
          .option("window", &A::window, "keys seen to the left and right of a query's position; -1: all")
          .option("prefix", &A::prefix, 0, kAnyCount, "the first keys, which escape the window's left limit")
          .option("softcap", &A::softcap, 0, kAnyReal, "logits become softcap tanh(logit / softcap); 0: off")
          .option("chunk", &A::chunk, 0, kAnyCount, "a query sees only its own block of this many positions; 0: off")
          .letter_by("Tg", "position", {{"G1", "Tq"}, {"G2", "Tk"}, {"G3", "Tk"}, {"G4", "Tq"}, {"G5", "Tq"}})
          .letter_by("Hg", "position", {{"G1", "H"}, {"G2", "Hkv"}, {"G3", "Hkv"}, {"G4", "H"}, {"G5", "H"}})
          .letter_by("G", "position", {{"G1", "V"}, {"G2", "V"}, {"G3", "K"}, {"G4", "K"}, {"G5", "V"}})
          .letter_by("kept", "position", {{"G1", "kept_mode"}, {"G2", "0"}, {"G3", "0"}, {"G4", "0"}, {"G5", "0"}})
          .letter_by("kept_mode", "mode", {{"multiply", "kept_act"}, {"add", "V"}})
          .letter_by("kept_act", "act", {{"sigmoid", "0"}, {"ns_sigmoid", "0"}, {"silu", "V"}, {"identity", "V"}})
          .multiple("H", "Hkv")
          .check<check_gated>()
          .largest_logit<largest_logit>()
          .cost<cost_gated>()
          .bench("B=1 Tq=4096 Tk=Tq H=8 Hkv=H K=64|128 V=K causal=1 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 Tq=4096 Tk=Tq H=8 Hkv=H K=64 V=K causal=1 act=silu dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 Tq=4096 Tk=Tq H=8 Hkv=H K=64 V=K causal=1 shared=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 Tq=4096 Tk=Tq H=8 Hkv=H K=64 V=K causal=1 position=G2 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=32 Tq=64 Tk=Tq H=8 Hkv=H K=64 V=K causal=0 dtype=f32 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 Tq=2048 Tk=Tq H=16 Hkv=H K=128 V=K causal=1 dtype=bf16 pass=fwd|fwd+bwd")
          .compare("open", "g=30")
          .impl<ref::gated_forward, ref::gated_backward, ref::gated_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(gated) LINNET_BF16_IMPL(gated, avx512_bf16::gated_backward)
          .cuda_rows<cuda::GatedTable, cuda::AttendRow::plain, cuda::AttendRow::tile, cuda::AttendRow::hopper>();
  return op;
}

const Op& gated_decode_op() {
  using A = GatedDecodeArgs;
  using O = SoftmaxOut;
  static const Op op =
      Declare<A, O, SoftmaxNoGrads>("gated_decode", "gated", "appends tokens to a contiguous cache, attends to it causally, gates the read")
          .equation("cache[lengths .. lengths+T-1] = k, v;  lengths += T;  out = softmax(q, cache, causal) act(g)")
          .input("q", &A::q, "B T H K", "queries of the new tokens")
          .input("k", &A::k, "B T Hkv K", "keys of the new tokens")
          .input("v", &A::v, "B T Hkv V", "values of the new tokens")
          .input("g", &A::g, "B T H V", "gate logits; headwise [B, T, H]").or_shape("B T H")
          .input("k_cache", &A::k_cache, "B capacity Hkv K", "keys so far").mutated()
          .input("v_cache", &A::v_cache, "B capacity Hkv V", "values so far").mutated()
          .input("lengths", &A::lengths, "B", "tokens in each cache; increased by T")
          .element(Element::index).values(Values::lengths, "capacity").mutated()
          .input("cache_start", &A::cache_start, "B", "first valid position of a left-padded cache; positions count from there")
          .element(Element::index).values(Values::starts, "capacity").optional()
          .input("sinks", &A::sinks, "H", "one more logit per head that has no value")
          .element(Element::param).values(Values::logits).optional()
          .output("out", &O::out, "B T H V", "the gated read")
          .output("lse", &O::lse, "B T H", "natural logarithm of each row's normaliser").element(Element::acc).values(Values::logits).optional()
          .option("granularity", &A::granularity, granularities(), "one logit per channel, or one per head")
          .option("act", &A::act, acts(), "the gate's activation")
          .option("mode", &A::mode, modes(), "multiply by the gate, or add it")
          .option("shared", &A::shared, "every head uses the mean over heads of the activated gates")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies q.k; default K^-0.5").sampled_to(100)
          .option("window", &A::window, "keys seen to the left of a query's position; -1: all")
          .option("prefix", &A::prefix, 0, kAnyCount, "the first keys, which escape the window's left limit")
          .option("softcap", &A::softcap, 0, kAnyReal, "logits become softcap tanh(logit / softcap); 0: off")
          .multiple("H", "Hkv")
          .check<check_decode>()
          .largest_logit<decode_largest_logit>()
          .cost<cost_decode>()
          .bench("B=1|16 T=1 H=32 Hkv=8 K=128 V=K capacity=4096 lengths=4000 dtype=f32|bf16 pass=fwd")
          .impl<ref::gated_decode_forward, nullptr, ref::gated_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(gated_decode) LINNET_BF16_IMPL(gated_decode, nullptr)
          .cuda_rows<cuda::GatedDecodeTable, cuda::AttendRow::plain, cuda::AttendRow::tile>();
  return op;
}

const Op& gated_gate_op() {
  using A = GatedGateArgs;
  using O = GatedGateOut;
  using G = GatedGateGrads;
  static const Op op =
      Declare<A, O, G>("gated_gate", "gated", "a gate on the output of any read, or of any projection")
          .equation("out = y act(g)  (mode add: y + act(g))")
          .input("y", &A::y, "B T H V", "what is gated").grad(&G::dy)
          .input("g", &A::g, "B T H V", "gate logits; headwise [B, T, H]").or_shape("B T H").grad(&G::dg)
          .output("out", &O::out, "B T H V", "y gated").grad(&G::dout)
          .option("granularity", &A::granularity, granularities(), "one logit per channel, or one per head")
          .option("act", &A::act, acts(), "the gate's activation")
          .option("mode", &A::mode, modes(), "multiply by the gate, or add it")
          .option("shared", &A::shared, "every head uses the mean over heads of the activated gates")
          .check<check_gate>()
          .always_causal()
          .cost<cost_gate>()
          .bench("B=1 T=4096 H=8 V=64 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .impl<ref::gated_gate_forward, ref::gated_gate_backward, ref::gated_gate_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(gated_gate)
          .cuda<cuda::gated_gate_forward, cuda::gated_gate_backward, cuda::gated_gate_workspace, cuda::gated_gate_refuses>();
  return op;
}
// clang-format on

Status gated(const GatedArgs& args, const GatedOut& out, const Context& context) {
  return run(gated_op(), Pass::forward, &args, &out, nullptr, context);
}
Status gated_backward(const GatedArgs& args, const GatedOut& out, const GatedGrads& grads, const Context& context) {
  return run(gated_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t gated_workspace(const GatedArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(gated_op(), pass, &args, context);
}
Status gated_decode(const GatedDecodeArgs& args, const SoftmaxOut& out, const Context& context) {
  return run(gated_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t gated_decode_workspace(const GatedDecodeArgs& args, const Context& context) {
  return workspace_bytes(gated_decode_op(), Pass::forward, &args, context);
}
Status gated_gate(const GatedGateArgs& args, const GatedGateOut& out, const Context& context) {
  return run(gated_gate_op(), Pass::forward, &args, &out, nullptr, context);
}
Status gated_gate_backward(const GatedGateArgs& args, const GatedGateOut& out, const GatedGateGrads& grads,
                           const Context& context) {
  return run(gated_gate_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t gated_gate_workspace(const GatedGateArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(gated_gate_op(), pass, &args, context);
}

}  // namespace linnet
