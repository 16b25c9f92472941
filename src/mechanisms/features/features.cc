#include "features.h"

#include <algorithm>
#include <cmath>

#include "core/op.h"
#include "features_shape.h"

namespace linnet {
namespace {

const std::vector<std::string>& maps() {
  static const std::vector<std::string> names = {"identity",   "cosine",   "elu1",         "relu",           "relu2",
                                                 "exp",        "focused",  "cosformer",    "favor",          "favor_hyp",
                                                 "favor_relu", "hedgehog", "hedgehog_exp", "hedgehog_joint", "t2r",
                                                 "rebased",    "dpfp",     "taylor",       "efficient"};
  return names;
}
const std::vector<std::pair<std::string, std::string>>& widths() {
  static const std::vector<std::pair<std::string, std::string>> table = {{"identity", "K"},
                                                                         {"cosine", "K"},
                                                                         {"elu1", "K"},
                                                                         {"relu", "K"},
                                                                         {"relu2", "K"},
                                                                         {"exp", "K"},
                                                                         {"focused", "K"},
                                                                         {"cosformer", "2*K"},
                                                                         {"favor", "M"},
                                                                         {"favor_hyp", "2*M"},
                                                                         {"favor_relu", "M"},
                                                                         {"hedgehog", "2*R"},
                                                                         {"hedgehog_exp", "2*R"},
                                                                         {"hedgehog_joint", "2*K"},
                                                                         {"t2r", "R"},
                                                                         {"rebased", "K*(K+1)//2"},
                                                                         {"dpfp", "2*K*dpfp_nu"},
                                                                         {"taylor", "1+K+K*(K+1)//2"},
                                                                         {"efficient", "K"}};
  return table;
}

// Each parameter is given exactly when the map has it.
template <class Args>
Status check_map(const std::string& op, const Args& args, const Dims& dims) {
  const FeaturesMap m = args.map;
  const std::string name = maps()[static_cast<size_t>(m)];
  const bool w =
      m == FeaturesMap::hedgehog || m == FeaturesMap::hedgehog_exp || m == FeaturesMap::hedgehog_joint || m == FeaturesMap::t2r;
  const bool b = m == FeaturesMap::hedgehog_joint || m == FeaturesMap::t2r;
  const bool proj = m == FeaturesMap::favor || m == FeaturesMap::favor_hyp || m == FeaturesMap::favor_relu;
  const struct {
    const char* tensor;
    const View& view;
    bool needed;
  } table[] = {{"w", args.w, w},
               {"b", args.b, b},
               {"scale", args.scale, m == FeaturesMap::focused},
               {"proj", args.proj, proj},
               {"gamma", args.gamma, m == FeaturesMap::rebased},
               {"beta", args.beta, m == FeaturesMap::rebased}};
  for (const auto& row : table) {
    if (row.needed == row.view.given()) continue;
    return bad_input(op + ": " + row.tensor +
                     (row.needed ? " is missing; map " + name + " needs it" : " is given, expected none with map " + name));
  }
  const int rank = m == FeaturesMap::hedgehog_joint ? 2 : 3;
  if (w && args.w.rank != rank) {
    return bad_input(op + ": w has rank " + std::to_string(args.w.rank) + ", expected " + std::to_string(rank) + " with map " +
                     name);
  }
  if (b && args.b.rank != rank - 1) {
    return bad_input(op + ": b has rank " + std::to_string(args.b.rank) + ", expected " + std::to_string(rank - 1) +
                     " with map " + name);
  }
  if (w && rank == 3 && dims["R"] == 0) return bad_input(op + ": w has 0 columns, expected at least 1");
  if (proj && dims["M"] == 0) {
    return bad_input(op + ": proj has 0 rows, expected at least 1");
  }
  const bool is_signed = m == FeaturesMap::identity || m == FeaturesMap::cosine;
  if (is_signed && (args.normalizer == Normalizer::add || args.normalizer == Normalizer::max)) {
    return bad_input(op + ": normalizer with map " + name + " can divide by zero, expected none");
  }
  const bool packed = m == FeaturesMap::rebased || m == FeaturesMap::taylor;
  if (packed && dims["K"] > 512) {
    return bad_input(op + ": q has " + std::to_string(dims["K"]) + " channels, expected at most 512 with map " + name);
  }
  return {};
}

// Exponents of keys less the largest of all keys: what is not divided out (no normaliser, eps, favor_eps) is in that unit.
bool shares_top(const FeaturesArgs& args) { return args.key_top == KeyTop::global && features_shape(args).has_top(); }

Status check_features(const FeaturesArgs& args, const Dims& dims) {
  LINNET_TRY(check_map("features", args, dims));
  if (args.causal && dims["S"] != dims["T"]) {
    return bad_input("features: k has " + std::to_string(dims["S"]) + " tokens, expected " + std::to_string(dims["T"]) +
                     " (same as q) when causal");
  }
  const bool given = args.key_top == KeyTop::given;
  if (given && !features_shape(args).has_top()) {
    return bad_input("features: key_top is given, expected global with map " + maps()[static_cast<size_t>(args.map)] +
                     (args.map == FeaturesMap::efficient ? " that is not causal" : ""));
  }
  if (given != args.key_tops.given()) {
    return bad_input(given ? "features: key_tops is missing; key_top given needs it"
                           : "features: key_tops is given, expected none unless key_top is given");
  }
  const int64_t longest = dims["T"] > dims["S"] ? dims["T"] : dims["S"];
  if (args.map == FeaturesMap::cosformer && args.max_length > 0 && longest > args.max_length) {
    return bad_input("features: max_length is " + std::to_string(args.max_length) + ", expected at least the " +
                     std::to_string(longest) + " tokens of the call");
  }
  return {};
}

Status check_decode(const FeaturesDecodeArgs& args, const Dims& dims) {
  LINNET_TRY(check_map("features_decode", args, dims));
  if (args.key_tops.given() && !features_shape(args).has_top()) {
    return bad_input("features_decode: key_tops is given, expected none with map " + maps()[static_cast<size_t>(args.map)]);
  }
  if (args.map == FeaturesMap::cosformer && args.max_length - args.position < dims["T"]) {
    return bad_input("features_decode: max_length is " + std::to_string(args.max_length) + ", expected at least position + " +
                     std::to_string(dims["T"]) + " tokens = " + std::to_string(args.position) + " + " +
                     std::to_string(dims["T"]));
  }
  return {};
}

// The largest exponent of the maps that exponentiate, on a prepared f64 call.
template <class Args>
double largest_logit(const Args& args) {
  const FeaturesMap m = args.map;
  const bool projects = m == FeaturesMap::hedgehog || m == FeaturesMap::hedgehog_exp || m == FeaturesMap::hedgehog_joint;
  const bool favor = m == FeaturesMap::favor || m == FeaturesMap::favor_hyp;
  const bool plain = m == FeaturesMap::exp || m == FeaturesMap::efficient;
  if (!plain && !projects && !favor) return 0;
  const auto value = [](const View& view, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
    return static_cast<const double*>(
        view.data)[i * view.stride[0] + j * view.stride[1] + k * view.stride[2] + l * view.stride[3]];
  };
  double largest = 0;
  for (const View* x : {&args.q, &args.k}) {
    for (int64_t row = 0; row < x->size[0] * x->size[1] * x->size[2]; ++row) {
      const int64_t h = row % x->size[2], t = row / x->size[2] % x->size[1], b = row / (x->size[2] * x->size[1]),
                    K = x->size[3];
      if constexpr (requires { args.key_mask; }) {
        if (x == &args.k && args.key_mask.given() && *args.key_mask.template at<const uint8_t>(b, t) == 0) continue;
      }
      double squares = 0;
      for (int64_t c = 0; c < K; ++c) {
        const double e = value(*x, b, t, h, c);
        squares += e * e;
        if (plain) largest = std::max(largest, std::abs((m == FeaturesMap::exp ? args.temperature : 1) * e));
      }
      const double width = std::sqrt(static_cast<double>(K));
      const int64_t outputs = favor ? args.proj.size[0] : projects ? args.w.size[args.w.rank - 1] : 0;
      for (int64_t r = 0; r < outputs; ++r) {
        double y = 0;
        for (int64_t c = 0; c < K; ++c) {
          const double w = favor              ? value(args.proj, r, c) / std::sqrt(width)
                           : args.w.rank == 2 ? value(args.w, r, c)
                                              : value(args.w, h, c, r);
          y += w * value(*x, b, t, h, c);
        }
        largest =
            std::max(largest, std::abs(y) * (m == FeaturesMap::hedgehog_joint ? 2 : 1) + (favor ? squares / (2 * width) : 0));
      }
    }
  }
  return largest;
}

// linear's reads and writes of the state, and the products of maps that project.
Cost cost_features(const FeaturesArgs& args, const Dims& dims, Pass pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double B = size("B"), T = size("T"), S = size("S"), H = size("H"), K = size("K"), V = size("V"), F = size("F");
  const double element = static_cast<double>(dtype_size(args.q.dtype)), C = args.causal ? 32 : 0;
  const double rows = element * B * H * (T + S) * (K + V);
  const double wide = args.w.given() ? static_cast<double>(args.w.size[args.w.rank - 1]) : args.proj.given() ? size("M") : 0;
  const double maps_cost = 2 * (T + S) * K * wide;
  if (pass == Pass::forward) return {B * H * (2 * F * (V + 1) * (T + S) + C * (F + V) * T + maps_cost), rows};
  return {B * H * (2 * F * (V + 1) * (2 * T + 3 * S) + C * (3 * F + 2 * V) * T + 4 * maps_cost), 2 * rows};
}
Cost cost_decode(const FeaturesDecodeArgs&, const Dims& dims, Pass) {
  const double state = static_cast<double>(dims["B"] * dims["H"] * dims["F"] * dims["V"]);
  return {4 * state * static_cast<double>(dims["T"]), 8 * state};
}

}  // namespace

// clang-format off
// NOLINTBEGIN(bugprone-macro-parentheses): the arguments are calls of the chain
#define FEATURES_PARAMETERS(with_grad_w, with_grad_b, with_grad_scale, with_grad_gamma, with_grad_beta)                              \
  .input("w", &A::w, "H K R", "hedgehog, hedgehog_exp, t2r: y = x w of the head; hedgehog_joint: y = w x").or_shape("K K").element(Element::param).optional() with_grad_w \
  .input("b", &A::b, "H R", "t2r, hedgehog_joint: added to y").or_shape("K").element(Element::param).optional() with_grad_b          \
  .input("scale", &A::scale, "H*K", "focused: softplus(scale) divides the channels; 0 at first").element(Element::param).optional() with_grad_scale \
  .input("proj", &A::proj, "M K", "favor maps: the random directions").element(Element::param).optional()                           \
  .input("gamma", &A::gamma, "K", "rebased: weight of the norm").element(Element::param).optional() with_grad_gamma                   \
  .input("beta", &A::beta, "K", "rebased: bias of the norm").element(Element::param).optional() with_grad_beta                        \
  .input("key_tops", &A::key_tops, "B H", "what exponents of keys are taken less of, key_top given").element(Element::acc).optional()
// NOLINTEND(bugprone-macro-parentheses)
// Random cases bound two options, beyond which no kernel in float agrees with double: a favor_eps near 1 outweighs features of
// size exp(-|y|^2 / 2), so that gradients are what is left of equal weights; temperature times unit inputs is a logit, and nothing
// bounds it where key_tops is given: with 10 and rows of size 3, den came to 1e37 and dout / den below float's normal numbers.
#define FEATURES_OPTIONS                                                                                                              \
  .option("map", &A::map, maps(), "the feature map")                                                                                  \
  .option("normalizer", &A::normalizer, {"none", "add", "max", "standard"}, "what divides: nothing, den + eps, max(den, eps), or what the map's source uses") \
  .option("eps", &A::eps, 0, kAnyReal, "of the normaliser; default as in the map's source")                                           \
  .option("dpfp_nu", &A::dpfp_nu, 1, 64, "map dpfp: number of rolls")                                                                 \
  .option("focused_power", &A::focused_power, 1, 16, "map focused: the power p")                                                      \
  .option("favor_eps", &A::favor_eps, 0, 1, "maps favor, favor_hyp: added to each feature").sampled_to(1e-3)                          \
  .option("temperature", &A::temperature, -1e3, 1e3, "map exp: exp(temperature x)").sampled_to(5)
const Op& features_op() {
  using A = FeaturesArgs;
  using O = FeaturesOut;
  using G = FeaturesGrads;
  static const Op op =
      Declare<A, O, G>("features", "features", "linear attention through a feature map of the literature")
          .equation("o_i = sum_j (phi(q_i).phi(k_j)) v_j / (sum_j phi(q_i).phi(k_j) + eps)")
          .decode("features_decode")
          .input("q", &A::q, "B T H K", "queries, before the map").grad(&G::dq)
          .input("k", &A::k, "B S H K", "keys, before the map; S = T when causal").grad(&G::dk)
          .input("v", &A::v, "B S H V", "values").grad(&G::dv)
          .input("key_mask", &A::key_mask, "B S", "keys with 0 take no part").element(Element::mask).optional()
          FEATURES_PARAMETERS(.grad(&G::dw), .grad(&G::db), .grad(&G::dscale), .grad(&G::dgamma), .grad(&G::dbeta))
          .output("out", &O::out, "B T H V", "the output").grad(&G::dout).saved()
          .output("den", &O::den, "B T H", "what the sums were divided by").element(Element::acc).optional().saved()
          .output("phi_q", &O::phi_q, "B T H F", "the features of q").element(Element::acc).optional()
          .output("phi_k", &O::phi_k, "B S H F", "the features of k").element(Element::acc).optional()
          .output("final_state", &O::final_state, "B H F V", "sum of phi(k) v^T").element(Element::acc).optional()
          .output("final_z", &O::final_z, "B H F", "sum of phi(k)").element(Element::acc).optional()
          FEATURES_OPTIONS
          .option("causal", &A::causal, "a token sees no later key")
          .option("key_top", &A::key_top, {"global", "running", "given"}, "exp, favor, favor_hyp, causal efficient: what exponents of keys are taken less of")
          .option("max_length", &A::max_length, 0, kAnyCount, "map cosformer: M; 0: the longer of q and k").unsampled()
          .letter_by("F", "map", widths())
          .growing()
          .largest_logit<largest_logit<FeaturesArgs>>()
          .check<check_features>()
          .earlier_rows(EarlierRows::numbers)
          .shares_units<shares_top>()
          .cost<cost_features>()
          .bench("B=1 T=8192 S=T H=8 K=64 V=K map=elu1|cosine|relu2|exp|cosformer|dpfp causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 S=T H=8 K=64 V=K R=64 with=w map=hedgehog|hedgehog_exp causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 S=T H=8 K=64 V=K M=256 with=proj map=favor|favor_relu causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=1024|4096|16384|65536 S=T H=4 K=64 V=K map=elu1 causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 S=T H=8 K=64 V=K map=elu1|efficient causal=0 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .compare("elu1", "map=elu1")
          .compare("relu2", "map=relu2")
          .compare("exp", "map=exp")
          .compare("cosformer", "map=cosformer")
          .compare("dpfp 2", "map=dpfp dpfp_nu=2")
          .compare("taylor", "map=taylor")
          .compare("focused", "map=focused scale=0")
          .compare("favor 64", "map=favor proj=normal M=64")
          .compare("hedgehog", "map=hedgehog w=identity R=K")
          .compare("rebased", "map=rebased gamma=1 beta=0")
          .compare("efficient", "map=efficient")
          .gpu_bench("B=16 T=2048 S=T H=16 K=64 V=K map=elu1 causal=1 dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 S=T H=16 K=64 V=K R=64 with=w map=hedgehog causal=1 dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 T=2048 S=T H=16 K=64 V=K map=elu1 causal=0 dtype=bf16 pass=fwd|fwd+bwd")
          .impl<ref::features_forward, ref::features_backward, ref::features_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(features)
          .cuda<cuda::features_forward, cuda::features_backward, cuda::features_workspace, cuda::features_refuses>();
  return op;
}

const Op& features_decode_op() {
  using A = FeaturesDecodeArgs;
  using O = FeaturesDecodeOut;
  static const Op op =
      Declare<A, O, FeaturesDecodeGrads>("features_decode", "features", "continues attention through a feature map token by token")
          .equation("S += phi(k) v^T;  z += phi(k);  o = phi(q) S / (phi(q).z + eps)")
          .input("q", &A::q, "B T H K", "queries of the new tokens")
          .input("k", &A::k, "B T H K", "keys of the new tokens")
          .input("v", &A::v, "B T H V", "values of the new tokens")
          .input("state", &A::state, "B H F V", "S; read and overwritten").element(Element::acc).mutated()
          .input("z", &A::z, "B H F", "z; read and overwritten").element(Element::acc).values(Values::feature_sums).mutated()
          .input("top", &A::top, "B H", "the largest exponent of the keys so far, -inf at first; untouched where key_tops is given")
          .element(Element::acc).mutated().needed_by("map", {"exp", "favor", "favor_hyp", "efficient"})
          .input("sums", &A::sums, "B H V+1", "sums of v and of 1; untouched where key_tops is given")
          .element(Element::acc).values(Values::unit_interval).mutated().needed_by("map", {"favor", "favor_hyp"})
          FEATURES_PARAMETERS(, , , , )
          .output("out", &O::out, "B T H V", "the output")
          FEATURES_OPTIONS.unsampled()  // key_tops are drawn at random: they bound no exponent
          .option("max_length", &A::max_length, 0, kAnyCount, "map cosformer: M, fixed beforehand")
          .option("position", &A::position, 0, kAnyCount, "map cosformer: how many tokens came before").unsampled()
          .letter_by("F", "map", widths())
          .largest_logit<largest_logit<FeaturesDecodeArgs>>()
          .growing()
          .check<check_decode>()
          .earlier_rows(EarlierRows::numbers)  // many tokens go in chunks
          .cost<cost_decode>()
          .bench("B=1|16 T=1 H=32 K=128 V=K map=elu1 dtype=f32 pass=fwd")
          .impl<ref::features_decode_forward, nullptr, ref::features_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(features_decode)
          .cuda<cuda::features_decode_forward, nullptr, cuda::features_decode_workspace, cuda::features_decode_refuses>();
  return op;
}
// clang-format on

Status features(const FeaturesArgs& args, const FeaturesOut& out, const Context& context) {
  return run(features_op(), Pass::forward, &args, &out, nullptr, context);
}
Status features_backward(const FeaturesArgs& args, const FeaturesOut& out, const FeaturesGrads& grads, const Context& context) {
  return run(features_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t features_workspace(const FeaturesArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(features_op(), pass, &args, context);
}
Status features_decode(const FeaturesDecodeArgs& args, const FeaturesDecodeOut& out, const Context& context) {
  return run(features_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t features_decode_workspace(const FeaturesDecodeArgs& args, const Context& context) {
  return workspace_bytes(features_decode_op(), Pass::forward, &args, context);
}

}  // namespace linnet
