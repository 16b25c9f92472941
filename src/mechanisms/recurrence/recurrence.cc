#include "recurrence.h"

#include "core/op.h"
#include "declare.h"
#include "mechanisms/recurrence/cuda/dispatch.h"

namespace linnet {
namespace {

template <class Args>
Status check_decay_choice(const Args& args, const Dims&) {
  if (args.g.given() && args.g_head.given()) return bad_input("decay: g and g_head are both given, expected one of them");
  return {};
}

// Flops of the chunked form, the triangles counted as halves, C = 32: scores and apply C (K + V); state 4 K V; with beta
// C (2 K + V) + 2 K V more for A, the solve and the read of the state.
Cost cost_recurrence(const RecurrenceArgs& args, const Dims& dims, Pass pass) {
  constexpr double kChunk = 32;
  const double K = static_cast<double>(dims["K"]), V = static_cast<double>(dims["V"]), H = static_cast<double>(dims["H"]);
  const double tokens = static_cast<double>(dims["B"] * dims["T"]);
  double flops = kChunk * (K + V) + 4 * K * V;
  if (args.beta.given()) flops += kChunk * (K + V) + 2 * K * V;
  const double element = static_cast<double>(dtype_size(args.q.dtype));
  const double rows = static_cast<double>(dims["Hq"] + dims["Hk"]) * K + static_cast<double>(dims["Hv"]) * V;
  const double gates = (args.g.given() ? (args.g.rank == 4 ? K : 1) : 0) + (args.beta.given() ? 1 : 0);
  const double states = 4 * static_cast<double>(dims["N"]) * H * K * V;
  const double bytes = tokens * (element * (rows + H * V) + 4 * H * gates) + states;
  if (pass == Pass::forward) return {tokens * H * flops, bytes};
  return {2.5 * tokens * H * flops, 2 * bytes};
}

Cost cost_decode(const RecurrenceDecodeArgs& args, const Dims& dims, Pass) {
  const double state = static_cast<double>(dims["B"] * dims["H"] * dims["K"] * dims["V"]);
  const double flops = 4 + (args.g.given() || args.g_head.given() ? 1 : 0) + (args.beta.given() ? 2 : 0);
  return {flops * state * static_cast<double>(dims["T"]), 8 * state};
}

// The states of a segment are those of V + K columns of values: B beside A.
Cost cost_segments(const RecurrenceSegmentsArgs& args, const Dims& dims, Pass) {
  const double K = static_cast<double>(dims["K"]), V = static_cast<double>(dims["V"]), H = static_cast<double>(dims["H"]);
  const double tokens = static_cast<double>(dims["B"] * dims["T"]), columns = V + K;
  const int64_t count = (dims["T"] + args.segment - 1) / args.segment;
  const double segments = static_cast<double>(count);
  const double states = 4 * static_cast<double>(dims["B"]) * H * K * columns * (segments + 1);
  return {tokens * H * (args.beta.given() ? 6 : 4) * K * columns, tokens * H * 4 * (2 * K + 2 * V) + states};
}

bool general(const RecurrenceMember& member) { return std::string_view(member.name) == "recurrence"; }

// g, as the member has it.
template <class Builder, class Args>
void declare_decay(Builder& op, View Args::*g, const RecurrenceMember& member) {
  if (member.decay == Decay::none) return;
  op.input("g", g, member.decay == Decay::scalar ? "B T H" : "B T H K",
           "natural logarithm of the decay, at most 0; -inf forgets");
  op.element(Element::param).values(Values::log_decay);
  if (member.decay == Decay::either) op.or_shape("B T H");
  if (member.g_head || general(member)) op.optional();
}

// The rows of the GPU's table that a member can use.
template <class Rows, class Builder>
void declare_rows(Builder& op, const RecurrenceMember& member) {
  using cuda::Row;
  const bool channels = member.decay == Decay::channel || member.decay == Decay::either;
  const bool heads = member.decay != Decay::channel, plain = !member.beta || general(member);
  op.template cuda_row<Rows, Row::step>().template cuda_row<Rows, Row::general>().template cuda_row<Rows, Row::chunk>();
  if (plain && heads) op.template cuda_row<Rows, Row::tile>();
  if (plain && channels) op.template cuda_row<Rows, Row::channel>();
  if (member.beta && channels) op.template cuda_row<Rows, Row::kda>();
  if (member.beta && heads) op.template cuda_row<Rows, Row::delta>();
}
template <class Rows, class Builder>
void declare_decode_rows(Builder& op, const RecurrenceMember& member) {
  using cuda::Row;
  op.template cuda_row<Rows, Row::step>();
  if (!member.beta || general(member)) {  // several tokens; the delta rules need the state as it was
    if (member.decay != Decay::channel) op.template cuda_row<Rows, Row::tile>();
    if (member.decay == Decay::channel || general(member)) op.template cuda_row<Rows, Row::channel>();
  }
  op.template cuda_row<Rows, Row::decode>();
}

}  // namespace

// clang-format off
Op declare_recurrence(const RecurrenceMember& member) {
  using A = RecurrenceArgs;
  using O = RecurrenceOut;
  using G = RecurrenceGrads;
  const std::string name = member.name;
  Declare<A, O, G> op(name, name, member.summary);
  op.equation(member.equation).decode(name + "_decode")
      .input("q", &A::q, "B T Hq K", "queries").grad(&G::dq)
      .input("k", &A::k, "B T Hk K", "keys").grad(&G::dk);
  if (member.beta) op.values(Values::unit_rows);
  op.input("v", &A::v, "B T Hv V", "values").grad(&G::dv);
  if (member.decay != Decay::none) {
    declare_decay(op, &A::g, member);
    op.grad(&G::dg);
  }
  if (member.g_head) {
    op.input("g_head", &A::g_head, "H", "a constant log decay per head, in place of g")
        .element(Element::acc).values(Values::log_decay).optional().grad(&G::dg_head);
  }
  if (member.beta) {
    op.input("beta", &A::beta, "B T H", "write strength, 0 to 2").element(Element::param).values(Values::write_strength).grad(&G::dbeta);
    if (general(member)) op.optional();
  }
  op.input("cu_seqlens", &A::cu_seqlens, "N+1", "offsets of packed sequences; q is then [total, H, K]")
      .element(Element::index).values(Values::offsets, "T").optional()
      .input("initial_state", &A::initial_state, "N H K V", "the state before the first token; zeros when absent")
      .element(Element::acc).optional().grad(&G::dinitial_state)
      .output("out", &O::out, "B T H V", "the read of the state").grad(&G::dout)
      .output("final_state", &O::final_state, "N H K V", "the state after the last token")
      .element(Element::acc).optional().grad(&G::dfinal_state)
      .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies the output; default K^-0.5");
  if (member.beta) {
    op.option("l2_norm", &A::l2_norm, "q and k become x / sqrt(sum x^2 + 1e-6)").effect(Effect::unit_norm)
        .option("double_beta", &A::double_beta, "2 beta in place of beta, which allows negative eigenvalues")
        .effect(Effect::doubles_strength);
  }
  op.option("chunk", &A::chunk, 0, kAnyCount,
            "tokens per chunk, at most the kernel's largest; 0: its choice; changes rounding alone")
      .unsampled()  // single steps round the state at every token: recurrence_test.cc
      .letter("H", "max(Hq,max(Hk,Hv))").letter("N", "B")
      .multiple("H", "Hq").multiple("H", "Hk").multiple("H", "Hv")
      .cost<cost_recurrence>()
      .impl<ref::recurrence_forward, ref::recurrence_backward, ref::recurrence_workspace>("ref", always_available)
      LINNET_ISA_IMPLS(recurrence);
  declare_rows<cuda::RecurrenceRows>(op, member);
  if (member.g_head) op.check<check_decay_choice<RecurrenceArgs>>().grows_without({"g", "g_head"});
  if (general(member)) op.grows_without({"g", "beta"});
  op.always_causal();
  if (member.decay == Decay::none) op.absent("g", &A::g).absent_gradient("dg", &G::dg);
  if (!member.g_head) op.absent("g_head", &A::g_head).absent_gradient("dg_head", &G::dg_head);
  if (!member.beta) {
    op.absent("beta", &A::beta).absent_gradient("dbeta", &G::dbeta);
    op.absent("l2_norm", &A::l2_norm).absent("double_beta", &A::double_beta);
  }
  const std::string given = general(member) ? "with=g,beta " : member.g_head ? "with=g " : "";
  const std::string shapes[] = {"B=1 T=8192 Hq=8 Hk=Hq Hv=Hq K=128 V=K " + given,
                                "B=1 T=8192 Hq=16 Hk=Hq Hv=Hq K=64 V=K " + given};
  for (const std::string& shape : shapes) {
    op.bench(shape + "dtype=f32 pass=fwd|fwd+bwd");
    if (member.decay == Decay::either) op.bench(shape + "other=g dtype=f32 pass=fwd|fwd+bwd");
  }
  for (const char* other : {"", "other=g "}) {
    if (*other != '\0' && member.decay != Decay::either) continue;
    const std::string last = given + other + "dtype=bf16 pass=fwd|fwd+bwd";
    op.gpu_bench("B=16 T=2048 Hq=16 Hk=Hq Hv=Hq K=128 V=K " + last)
        .gpu_bench("B=1 T=32768 Hq=16 Hk=Hq Hv=Hq K=128 V=K " + last)
        .gpu_bench("B=16 T=2048 Hq=32 Hk=Hq Hv=Hq K=64 V=K " + last);
  }
  op.bench(shapes[0] + "dtype=bf16 pass=fwd|fwd+bwd")
      .bench("B=1 T=65536 Hq=1 Hk=1 Hv=1 K=128 V=K " + given + "dtype=f32 pass=fwd|fwd+bwd")
      .bench("B=4 T=200 Hq=4 Hk=4 Hv=4 K=64 V=K " + given + "dtype=f32 pass=fwd|fwd+bwd");
  if (!general(member)) {  // half-lives of 23 tokens; the scale of a read that averages
    const std::string words = std::string(member.beta ? "l2_norm=1 beta=0.25 scale=1" : "q=unit@q k=unit@k scale=0.03") +
                              (member.decay != Decay::none ? " g=-0.03" : "");
    op.compare(member.decay == Decay::either ? "per channel" : "", words);
    if (member.decay == Decay::either) op.compare("per head", words + " other=g");
  }
  return op;
}

Op declare_recurrence_decode(const RecurrenceMember& member) {
  using A = RecurrenceDecodeArgs;
  using O = RecurrenceDecodeOut;
  const std::string name = member.name;
  Declare<A, O, RecurrenceDecodeGrads> op(name + "_decode", name, "continues " + name + " token by token, the state in place");
  op.equation(member.equation)
      .input("q", &A::q, "B T Hq K", "queries of the new tokens")
      .input("k", &A::k, "B T Hk K", "keys of the new tokens");
  if (member.beta) op.values(Values::unit_rows);
  op.input("v", &A::v, "B T Hv V", "values of the new tokens");
  declare_decay(op, &A::g, member);
  if (member.g_head) {
    op.input("g_head", &A::g_head, "H", "a constant log decay per head, in place of g")
        .element(Element::acc).values(Values::log_decay).optional();
  }
  if (member.beta) {
    op.input("beta", &A::beta, "B T H", "write strength, 0 to 2").element(Element::param).values(Values::write_strength);
    if (general(member)) op.optional();
  }
  op.input("state", &A::state, "B H K V", "the state; read and overwritten").element(Element::acc).mutated()
      .output("out", &O::out, "B T H V", "the read of the state")
      .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies the output; default K^-0.5");
  if (member.beta) {
    op.option("l2_norm", &A::l2_norm, "q and k become x / sqrt(sum x^2 + 1e-6)").effect(Effect::unit_norm)
        .option("double_beta", &A::double_beta, "2 beta in place of beta, which allows negative eigenvalues")
        .effect(Effect::doubles_strength);
  }
  op.letter("H", "max(Hq,max(Hk,Hv))")
      .multiple("H", "Hq").multiple("H", "Hk").multiple("H", "Hv")
      .cost<cost_decode>()
      .impl<ref::recurrence_decode_forward, nullptr, ref::recurrence_decode_workspace>("ref", always_available)
      LINNET_ISA_IMPLS_FORWARD(recurrence_decode);
  declare_decode_rows<cuda::RecurrenceDecodeRows>(op, member);
  if (member.g_head) op.check<check_decay_choice<RecurrenceDecodeArgs>>();
  if (member.decay == Decay::none) op.absent("g", &A::g);
  if (!member.g_head) op.absent("g_head", &A::g_head);
  if (!member.beta) op.absent("beta", &A::beta).absent("l2_norm", &A::l2_norm).absent("double_beta", &A::double_beta);
  const std::string given = general(member) ? "with=g,beta " : member.g_head ? "with=g " : "";
  op.gpu_bench("B=16|256 T=1 Hq=32 Hk=32 Hv=32 K=128 V=128 " + given + "dtype=bf16 pass=fwd");
  op.bench("B=1|4|16|64 T=1 Hq=32 Hk=32 Hv=32 K=128 V=128 " + given + "dtype=f32 pass=fwd");
  if (member.decay == Decay::either) {
    op.bench("B=1|4|16|64 T=1 Hq=32 Hk=32 Hv=32 K=128 V=128 " + given + "other=g dtype=f32 pass=fwd");
  }
  return op;
}

const Op& recurrence_segments_op() {
  using A = RecurrenceSegmentsArgs;
  using O = RecurrenceSegmentsOut;
  static const Op op =
      Declare<A, O, RecurrenceSegmentsGrads>("recurrence_segments", "recurrence", "the affine map of each segment of a sequence, and of the whole")
          .equation("S_out = A S_in + B;  A = A_n ... A_1,  A_t = (I - beta_t k_t k_t^T) diag(exp(g_t));  B = S_out for S_in = 0")
          .input("q", &A::q, "B T Hq K", "queries")
          .input("k", &A::k, "B T Hk K", "keys").values(Values::unit_rows)
          .input("v", &A::v, "B T Hv V", "values")
          .input("g", &A::g, "B T H K", "natural logarithm of the decay").or_shape("B T H")
          .element(Element::param).values(Values::log_decay).optional()
          .input("beta", &A::beta, "B T H", "write strength, 0 to 2").element(Element::param).values(Values::write_strength).optional()
          .output("out", &O::out, "B T H V", "the whole sequence read from a zero state")
          .output("final_state", &O::final_state, "B H K V", "B of the whole").element(Element::acc).optional()
          .output("A", &O::A, "B H K K", "A of the whole").element(Element::acc).optional()
          .output("segment_A", &O::segment_A, "(T+segment-1)//segment B H K K", "A of each segment").element(Element::acc).optional()
          .output("segment_states", &O::segment_states, "(T+segment-1)//segment B H K V", "B of each segment")
          .element(Element::acc).optional()
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies the output; default K^-0.5")
          .option("segment", &A::segment, 1, kAnyCount, "tokens per segment; the last may be shorter")
          .letter("H", "max(Hq,max(Hk,Hv))")
          .multiple("H", "Hq").multiple("H", "Hk").multiple("H", "Hv")
          .always_causal()
          .cost<cost_segments>()
          .bench("B=1 T=8192 Hq=1 Hk=1 Hv=1 K=128 V=128 with=g,beta,A,final_state segment=1024 dtype=f32 pass=fwd")
          .impl<ref::recurrence_segments_forward, nullptr, ref::recurrence_segments_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(recurrence_segments)
          .cuda<cuda::recurrence_segments_forward, nullptr, cuda::recurrence_segments_workspace, cuda::recurrence_segments_refuses>();
  return op;
}
// clang-format on

Status recurrence_segments(const RecurrenceSegmentsArgs& args, const RecurrenceSegmentsOut& out, const Context& context) {
  return run(recurrence_segments_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t recurrence_segments_workspace(const RecurrenceSegmentsArgs& args, const Context& context) {
  return workspace_bytes(recurrence_segments_op(), Pass::forward, &args, context);
}

namespace {
constexpr RecurrenceMember kRecurrence = {
    "recurrence",
    "the general recurrence: optional decay per head or channel, optional delta rule",
    "S' = diag(exp(g_t)) S_{t-1};  u_t = beta_t (v_t - S'^T k_t), or v_t;  S_t = S' + k_t u_t^T;  o_t = scale S_t^T q_t",
    Decay::either,
    true,
    false};
}  // namespace
LINNET_RECURRENCE_MEMBER(recurrence, kRecurrence)

}  // namespace linnet
