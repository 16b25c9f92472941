#include "linear.h"

#include "core/op.h"
#include "linear_cuda.h"

namespace linnet {
namespace {

// Functions, not constants: declarations are read while libraries are still being loaded, before constants here are set.
const std::vector<std::string>& maps() {
  static const std::vector<std::string> names = {"identity", "elu1",     "relu",    "relu2", "silu", "softplus",
                                                 "exp",      "hedgehog", "taylor2", "dpfp",  "t2r"};
  return names;
}

const std::vector<std::pair<std::string, std::string>>& features() {
  static const std::vector<std::pair<std::string, std::string>> widths = {
      {"identity", "K"},
      {"elu1", "K"},
      {"relu", "K"},
      {"relu2", "K"},
      {"silu", "K"},
      {"softplus", "K"},
      {"exp", "K"},
      {"hedgehog", "2*K"},
      {"taylor2", "1+K+K*(K+1)//2"},
      {"dpfp", "2*K*dpfp_nu"},
      {"t2r", "R"},
  };
  return widths;
}

template <class Args>
Status check_map(const char* op, const Args& args, const Dims& dims) {
  const std::string name = op;
  const bool t2r = args.map == FeatureMap::t2r;
  if (t2r && !args.w.given()) return bad_input(name + ": w is missing; map t2r needs it");
  if (!t2r && args.w.given()) {
    return bad_input(name + ": w is given, expected none with map " + maps()[static_cast<size_t>(args.map)]);
  }
  if (t2r && dims["Hq"] != dims["Hk"]) {
    return bad_input(name + ": k has " + std::to_string(dims["Hk"]) + " heads, expected " + std::to_string(dims["Hq"]) +
                     " (same as q) with map t2r");
  }
  const bool is_signed = args.map == FeatureMap::identity || args.map == FeatureMap::silu;
  if (args.normalize && is_signed && !args.allow_signed) {
    return bad_input(name + ": normalize with map " + maps()[static_cast<size_t>(args.map)] +
                     " can divide by zero; choose a positive map or set allow_signed");
  }
  if (args.normalize && args.map == FeatureMap::exp && args.scale.given && !(args.scale.value > 0)) {
    return bad_input(name + ": scale is " + std::to_string(args.scale.value) +
                     ", expected a positive number with normalize and map exp");
  }
  return {};
}

Status check_linear(const LinearArgs& args, const Dims& dims) {
  LINNET_TRY(check_map("linear", args, dims));
  if ((args.causal || args.cu_seqlens.given()) && dims["S"] != dims["T"]) {
    return bad_input("linear: k has " + std::to_string(dims["S"]) + " tokens, expected " + std::to_string(dims["T"]) +
                     " (same as q) when causal or packed");
  }
  return {};
}

Status check_decode(const LinearDecodeArgs& args, const Dims& dims) {
  LINNET_TRY(check_map("linear_decode", args, dims));
  if (args.normalize && !args.z.given()) return bad_input("linear_decode: z is missing; normalize needs it");
  return {};
}

// Useful multiply-adds as two flops, with chunks of C = 32 and the half of each triangle that counts.
//   forward   read and write of the state 4 F V, scores and their use C (F + V)               per token and head
//   backward  S, R and three reads of them 10 F V, scores twice and their use C (3 F + 2 V)
// The walks compute more than that: R twice, scores once more, and the triangles' other half in part.
Cost cost_linear(const LinearArgs& args, const Dims& dims, Pass pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double B = size("B"), T = size("T"), S = size("S"), H = size("H"), F = size("F"), V = size("V");
  const double element = static_cast<double>(dtype_size(args.q.dtype)), C = args.causal ? 32 : 0;
  const double rows = element * B * (T * size("Hq") * size("K") + S * size("Hk") * size("K") + S * size("Hv") * V);
  const double results = element * B * T * H * V, states = 4 * size("N") * H * F * (V + 1);
  if (pass == Pass::forward) return {B * H * (2 * F * V * (T + S) + C * (F + V) * T), rows + results + states};
  return {B * H * (2 * F * V * (2 * T + 3 * S) + C * (3 * F + 2 * V) * T), 2 * rows + results + states};
}

Cost cost_decode(const LinearDecodeArgs&, const Dims& dims, Pass) {
  const double state = static_cast<double>(dims["B"] * dims["H"] * dims["F"] * dims["V"]);
  return {4 * state * static_cast<double>(dims["T"]), 8 * state};
}

}  // namespace

// clang-format off
const Op& linear_op() {
  using A = LinearArgs;
  using O = LinearOut;
  using G = LinearGrads;
  static const Op op =
      Declare<A, O, G>("linear", "linear", "linear attention with a feature map")
          .equation("S_t = S_{t-1} + phi(k_t) v_t^T;  o_t = scale S_t^T phi(q_t), divided by scale phi(q_t).z_t + eps when normalised")
          .decode("linear_decode")
          .input("q", &A::q, "B T Hq K", "queries, before the map").grad(&G::dq)
          .input("k", &A::k, "B S Hk K", "keys, before the map; S = T when causal").grad(&G::dk)
          .input("v", &A::v, "B S Hv V", "values").grad(&G::dv)
          .input("w", &A::w, "Hq R K", "map t2r: phi(x) = relu(w x)").element(Element::param).optional().grad(&G::dw)
          .input("key_mask", &A::key_mask, "B S", "keys with 0 are dropped from the sums").element(Element::mask).optional()
          .input("cu_seqlens", &A::cu_seqlens, "N+1", "offsets of packed sequences; q is then [total, H, K]")
          .element(Element::index).values(Values::offsets, "T").optional()
          .input("initial_state", &A::initial_state, "N H F V", "S before the first token; zeros when absent")
          .element(Element::acc).optional().grad(&G::dinitial_state)
          .input("initial_z", &A::initial_z, "N H F", "z before the first token; zeros when absent")
          .element(Element::acc).values(Values::feature_sums).optional().grad(&G::dinitial_z)
          .output("out", &O::out, "B T H V", "the read of the state").grad(&G::dout).saved()
          .output("final_state", &O::final_state, "N H F V", "S after the last key").element(Element::acc).optional().grad(&G::dfinal_state)
          .output("final_z", &O::final_z, "N H F", "z after the last key").element(Element::acc).optional().grad(&G::dfinal_z)
          .output("den", &O::den, "B T H*normalize", "the denominators; map exp: their logarithms").element(Element::acc).optional().saved()
          .option("map", &A::map, maps(), "the feature map phi")
          .option("causal", &A::causal, "a token sees no later key")
          .option("normalize", &A::normalize, "divide by the sum of the weights").effect(Effect::averages)
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies the weights; default 1 when normalised, K^-0.5 otherwise")
          .option("eps", &A::eps, 0, kAnyReal, "added to the denominator")
          .option("dpfp_nu", &A::dpfp_nu, 1, 64, "map dpfp: number of rolls")
          .option("allow_signed", &A::allow_signed, "normalise although identity and silu can make the denominator zero").unsampled()
          .letter("H", "max(Hq,max(Hk,Hv))")
          .least_size("K", 3, "map", "dpfp")  // dpfp of two channels has one feature, the product of their magnitudes
          .letter("N", "B")
          .letter_by("F", "map", features())
          .multiple("H", "Hq").multiple("H", "Hk").multiple("H", "Hv")
          .growing()
          .check<check_linear>()
          .earlier_rows(EarlierRows::numbers)  // map exp: the exponents of a chunk have one unit
          .cost<cost_linear>()
          .bench("B=1 T=8192 S=T Hq=8 Hk=Hq Hv=Hq K=64|128 V=K causal=1 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=1024|4096|16384|65536|262144 S=T Hq=4 Hk=Hq Hv=Hq K=64 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 S=T Hq=8 Hk=Hq Hv=Hq K=64 V=K map=elu1 normalize=1 causal=1|0 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=4096 S=T Hq=8 Hk=Hq Hv=Hq K=16 V=64 map=taylor2 normalize=1 causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 S=T Hq=1 Hk=Hq Hv=Hq K=128 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=32 T=64 S=T Hq=8 Hk=Hq Hv=Hq K=64 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=17 S=T Hq=2 Hk=Hq Hv=Hq K=24 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 S=T Hq=16 Hk=Hq Hv=Hq K=128 V=K causal=1 dtype=bf16|f16 pass=fwd|fwd+bwd")
          .gpu_bench("B=1 T=32768 S=T Hq=16 Hk=Hq Hv=Hq K=128 V=K causal=1 dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 S=T Hq=32 Hk=Hq Hv=Hq K=64 V=K causal=1 dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=1 T=2048 S=T Hq=16 Hk=Hq Hv=Hq K=128 V=K causal=1 dtype=bf16|f32 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 S=T Hq=16 Hk=Hq Hv=Hq K=128 V=K map=elu1 normalize=1 causal=1 dtype=bf16 pass=fwd")
          .compare("elu1", "map=elu1 normalize=1")
          .compare("relu", "map=relu normalize=1")
          .compare("softplus", "map=softplus normalize=1")
          .compare("exp", "map=exp normalize=1")
          .compare("hedgehog", "map=hedgehog normalize=1")
          .compare("dpfp 3", "map=dpfp dpfp_nu=3 normalize=1")
          .compare("taylor2", "map=taylor2 normalize=1")
          .impl<ref::linear_forward, ref::linear_backward, ref::linear_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(linear)
          .cuda_rows<cuda::LinearRows, cuda::Row::step, cuda::Row::general, cuda::Row::chunk, cuda::Row::tile>();
  return op;
}

const Op& linear_decode_op() {
  using A = LinearDecodeArgs;
  using O = LinearDecodeOut;
  static const Op op =
      Declare<A, O, LinearDecodeGrads>("linear_decode", "linear", "continues linear attention token by token, the state in place")
          .equation("S += phi(k) v^T;  z += phi(k);  o = scale S^T phi(q), divided by scale phi(q).z + eps when normalised")
          .input("q", &A::q, "B T Hq K", "queries of the new tokens, before the map")
          .input("k", &A::k, "B T Hk K", "keys of the new tokens, before the map")
          .input("v", &A::v, "B T Hv V", "values of the new tokens")
          .input("w", &A::w, "Hq R K", "map t2r: phi(x) = relu(w x)").element(Element::param).optional()
          .input("state", &A::state, "B H F V", "S; read and overwritten").element(Element::acc).mutated()
          .input("z", &A::z, "B H F", "z; read and overwritten; required when normalised")
          .element(Element::acc).values(Values::feature_sums).mutated().optional()
          .input("compensation", &A::compensation, "B H F V", "what rounding took from the state, zeros at first; for very long decoding")
          .element(Element::acc).values(Values::rounding).mutated().optional()
          .output("out", &O::out, "B T H V", "the read of the state")
          .option("map", &A::map, maps(), "the feature map phi")
          .option("normalize", &A::normalize, "divide by the sum of the weights").effect(Effect::averages)
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies the weights; default 1 when normalised, K^-0.5 otherwise")
          .option("eps", &A::eps, 0, kAnyReal, "added to the denominator")
          .option("dpfp_nu", &A::dpfp_nu, 1, 64, "map dpfp: number of rolls")
          .option("allow_signed", &A::allow_signed, "normalise although identity and silu can make the denominator zero").unsampled()
          .letter("H", "max(Hq,max(Hk,Hv))")
          .letter_by("F", "map", features())
          .multiple("H", "Hq").multiple("H", "Hk").multiple("H", "Hv")
          .growing()
          .check<check_decode>()
          .cost<cost_decode>()
          .bench("B=1|4|16|64 T=1 Hq=32 Hk=Hq Hv=Hq K=128 V=K dtype=f32|bf16 pass=fwd")
          .gpu_bench("B=1|16|64|256 T=1 Hq=32 Hk=Hq Hv=Hq K=128 V=K dtype=bf16 pass=fwd")
          .bench("B=1 T=1 Hq=4 Hk=Hq Hv=Hq K=64 V=K map=elu1 normalize=1 with=z dtype=f32 pass=fwd")
          .impl<ref::linear_decode_forward, nullptr, ref::linear_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(linear_decode)
          .cuda_rows<cuda::LinearDecodeRows, cuda::Row::step, cuda::Row::tile, cuda::Row::decode>();
  return op;
}
// clang-format on

Status linear(const LinearArgs& args, const LinearOut& out, const Context& context) {
  return run(linear_op(), Pass::forward, &args, &out, nullptr, context);
}
Status linear_backward(const LinearArgs& args, const LinearOut& out, const LinearGrads& grads, const Context& context) {
  return run(linear_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t linear_workspace(const LinearArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(linear_op(), pass, &args, context);
}
Status linear_decode(const LinearDecodeArgs& args, const LinearDecodeOut& out, const Context& context) {
  return run(linear_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t linear_decode_workspace(const LinearDecodeArgs& args, const Context& context) {
  return workspace_bytes(linear_decode_op(), Pass::forward, &args, context);
}

}  // namespace linnet
