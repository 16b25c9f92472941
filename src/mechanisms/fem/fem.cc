#include "fem.h"

#include <cmath>

#include "core/op.h"
#include "cuda/softmax.h"

namespace linnet {
namespace {

const std::vector<std::string>& priors() {
  static const std::vector<std::string> names = {"softmax", "linear", "gated", "aft", "ssm", "delta", "zeros"};
  return names;
}

Status check_prior(const char* op, FemPrior prior) {
  if (prior != FemPrior::delta && prior != FemPrior::zeros) return {};
  return bad_input(std::string(op) + ": prior " + priors()[static_cast<size_t>(prior)] +
                   " has weights of both signs, whose sum may have no logarithm; expected softmax, linear, gated, aft or ssm");
}

Status check_read(const FemReadArgs& args, const Dims& dims) {
  LINNET_TRY(check_prior("fem_read", args.prior));
  if (args.prior == FemPrior::aft && dims["K"] != dims["V"]) {
    return bad_input("fem_read: q has " + std::to_string(dims["K"]) + " channels, expected " + std::to_string(dims["V"]) +
                     " (same as v) with prior aft");
  }
  if (!args.causal && (args.prior == FemPrior::gated || args.prior == FemPrior::ssm)) {
    return bad_input("fem_read: causal is 0, expected 1 with prior " + priors()[static_cast<size_t>(args.prior)] +
                     ", whose weights decay with time");
  }
  const bool exact = args.denominator == FemDenominator::exact || args.denominator == FemDenominator::automatic;
  if (!exact && (args.prior == FemPrior::softmax || args.prior == FemPrior::aft)) {
    return bad_input("fem_read: prior " + priors()[static_cast<size_t>(args.prior)] +
                     " is normalised exactly, expected denominator exact");
  }
  if (args.masked && !args.key_mask.given()) return bad_input("fem_read: key_mask is missing; masked needs it");
  return {};
}

Status check_decode(const FemReadDecodeArgs& args, const Dims& dims) {
  LINNET_TRY(check_prior("fem_read_decode", args.prior));
  if (args.prior == FemPrior::aft && dims["K"] != dims["V"]) {
    return bad_input("fem_read_decode: q has " + std::to_string(dims["K"]) + " channels, expected " +
                     std::to_string(dims["V"]) + " (same as v) with prior aft");
  }
  const bool exact = args.denominator == FemDenominator::exact || args.denominator == FemDenominator::automatic;
  if (!exact && (args.prior == FemPrior::softmax || args.prior == FemPrior::aft)) {
    return bad_input("fem_read_decode: prior " + priors()[static_cast<size_t>(args.prior)] +
                     " is normalised exactly, expected denominator exact");
  }
  const bool known = args.lengths.given() && args.lengths.device != Device::cuda;  // kernels leave a cache without room alone
  for (int64_t b = 0; known && b < dims["B"]; ++b) {
    const int64_t length = index_value(args.lengths, b);
    if (length + dims["T"] <= dims["capacity"]) continue;
    return bad_input("fem_read_decode: the cache of item " + std::to_string(b) + " holds " + std::to_string(length) + " of " +
                     std::to_string(dims["capacity"]) + " tokens, no room for " + std::to_string(dims["T"]) + " more");
  }
  return {};
}
Cost cost_decode(const FemReadDecodeArgs& args, const Dims& dims, Pass) {
  double state = 0;
  for (const View* x : {&args.state, &args.sums, &args.scan}) state += x->given() ? static_cast<double>(x->elements()) : 0;
  double keys = 0;
  for (int64_t b = 0; args.lengths.given() && b < dims["B"]; ++b) {
    const int64_t tokens = args.lengths.device == Device::cuda ? dims["capacity"] : index_value(args.lengths, b) + dims["T"];
    keys += static_cast<double>(tokens * dims["H"] * (dims["K"] + 2 * dims["V"]));
  }
  const double tokens = static_cast<double>(dims["T"]);
  return {(4 * state + 2 * keys) * tokens, 8 * state + static_cast<double>(dtype_size(args.v.dtype)) * keys};
}

// Multiply-adds as two flops; values are read twice as wide, and the backward reads them as the prior's own backward does.
Cost cost_read(const FemReadArgs& args, const Dims& dims, Pass pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double T = size("T"), K = size("K"), V = size("V"), R = size("R"), heads = size("B") * size("H"), rows = heads * T;
  const bool forward = pass == Pass::forward;
  double flops = 0;
  switch (args.prior) {
    case FemPrior::softmax: {
      const double pairs = heads * (args.causal ? T * (T + 1) / 2 : T * T);
      flops = 2 * pairs * (forward ? K + 2 * V : 3 * K + 4 * V);
      break;
    }
    case FemPrior::ssm: flops = rows * V * R * 3 * (forward ? 4 : 16); break;
    case FemPrior::aft: flops = rows * V * (forward ? 12 : 40); break;
    default: flops = rows * ((forward ? 4 : 10) * K * (2 * V + 1) + 32 * (K + 2 * V)); break;
  }
  const double bytes = static_cast<double>(dtype_size(args.v.dtype)) * rows * (2 * K + 5 * V);
  return {flops, forward ? bytes : 2 * bytes};
}

// The reference writes every row of the prior out, with exponentials for each channel; prior ssm runs its scan.
double check_read_flops(const FemReadArgs& args, const Dims& dims, Pass pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double T = size("T"), K = size("K"), V = size("V"), rows = size("B") * size("H") * T,
               times = pass == Pass::forward ? 1 : 3;
  if (args.prior == FemPrior::ssm) return times * rows * V * (size("R") * 3 * 20 + 40);
  return times * rows * T * (4 * K + (args.prior == FemPrior::aft ? 100 : 50) * V);
}

}  // namespace

// clang-format off
const Op& fem_read_op() {
  using A = FemReadArgs;
  using O = FemReadOut;
  using G = FemReadGrads;
  static const Op op =
      Declare<A, O, G>("fem_read", "fem", "free energy mixer: values read through a log-sum-exp over a prior")
          .equation("o = g ((1 - lam) mu + lam F),  mu = sum_i p_i v_i,  F = log(sum_i p_i exp(beta v_i)) / beta")
          .decode("fem_read_decode")
          .input("v", &A::v, "B S H V", "values").grad(&G::dv)
          .input("beta", &A::beta, "H V", "the largest inverse temperature of each channel, above 0").element(Element::param).values(Values::positive).grad(&G::dbeta)
          .input("lam", &A::lam, "B T H V", "inner gate, in (0, 1): from the mean to the free energy").values(Values::unit_interval).grad(&G::dlam)
          .input("q", &A::q, "B T H K", "queries; aft: as wide as v; ssm: none").needed_by("prior", {"softmax", "linear", "gated", "aft", "delta", "zeros"}).grad(&G::dq)
          .input("k", &A::k, "B S H K", "keys; aft: as wide as v; ssm: none").needed_by("prior", {"softmax", "linear", "gated", "aft", "delta", "zeros"}).grad(&G::dk)
          .input("a", &A::a, "B T H", "prior gated: log decay of each step, at most 0").element(Element::param).values(Values::log_decay).needed_by("prior", {"gated"}).grad(&G::da)
          .input("delta", &A::delta, "B T H V", "prior ssm: step sizes, above 0").element(Element::param).values(Values::unit_interval).needed_by("prior", {"ssm"}).grad(&G::ddelta)
          .input("A", &A::A, "H V R", "prior ssm: rates, below 0").element(Element::param).values(Values::log_decay).needed_by("prior", {"ssm"}).grad(&G::dA)
          .input("Bm", &A::Bm, "B T R", "prior ssm: what each step writes, at least 0").element(Element::param).values(Values::unit_interval).needed_by("prior", {"ssm"}).grad(&G::dBm)
          .input("Cm", &A::Cm, "B T R", "prior ssm: what each step reads, at least 0").element(Element::param).values(Values::unit_interval).needed_by("prior", {"ssm"}).grad(&G::dCm)
          .input("D", &A::D, "H V", "prior ssm: weight of a step's own value, at least 0").element(Element::param).values(Values::unit_interval).needed_by("prior", {"ssm"}).grad(&G::dD)
          .input("g", &A::g, "B T H V", "outer gate; 1 when absent").values(Values::unit_interval).optional().grad(&G::dg)
          .input("key_mask", &A::key_mask, "B S", "keys with 0 have no weight").element(Element::mask).optional()
          .output("out", &O::out, "B T H V", "the mixed read").grad(&G::dout)
          .output("mu", &O::mu, "B T H V", "the mean under the prior").element(Element::acc).optional().saved()
          .output("free", &O::free, "B T H V", "the free energy").element(Element::acc).optional().saved()
          .output("norm", &O::norm, "B T Hn", "softmax: log of the normaliser; linear, gated: the sum of the weights").element(Element::acc).values(Values::logits).optional().saved()
          .option("prior", &A::prior, priors(), "the weights that are tilted by the values")
          .option("causal", &A::causal, "a token sees no later key")
          .option("cap", &A::cap, 0, HUGE_VAL, "bound on |beta v|; none or 0: no bound")
          .option("denominator", &A::denominator, {"automatic", "exact", "max 1e-6", "plus 1e-5"}, "how weights are normalised; automatic: as the prior says").unsampled()
          .option("feature_eps", &A::feature_eps, 0, kAnyReal, "linear, gated: added to relu(q) and relu(k)").unsampled()
          .option("masked", &A::masked, "key_mask must be given").unsampled()
          .letter("T", "S")  // keys: what key_mask leaves out may hold anything
          .letter_by("Hn", "prior", {{"softmax", "H"}, {"linear", "H"}, {"gated", "H"}, {"aft", "0"}, {"ssm", "0"}, {"delta", "0"}, {"zeros", "0"}})
          .check<check_read>()
          .largest_logit<ref::fem_read_largest_logit>()
          .earlier_rows(EarlierRows::numbers)  // values are shifted tile by tile
          .cost<cost_read>()
          .check_flops<check_read_flops>()
          .bench("B=1 S=4096 H=8 K=64|128 V=K//2 prior=softmax with=q,k,g dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 S=1024 H=2 K=64 V=K//2 prior=linear with=q,k,g dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 S=1024 H=2 K=64 V=K//2 prior=gated with=q,k,a,g dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 S=512 H=2 K=64 V=K prior=aft with=q,k,g dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 S=1024 H=8 V=32 R=16 prior=ssm with=delta,A,Bm,Cm,D,g dtype=f32 pass=fwd|fwd+bwd")
          .gpu_bench("B=4 S=2048 H=16 K=128 V=K//2 prior=softmax with=q,k,g dtype=bf16 pass=fwd|fwd+bwd")
          .compare("softmax", "beta=1 lam=0.5")
          .compare("linear", "beta=1 lam=0.5 prior=linear")
          .gpu_bench("B=16 S=2048 H=16 K=64 V=K//2 prior=linear with=q,k,g dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 S=2048 H=16 K=64 V=K//2 prior=gated with=q,k,a,g dtype=bf16 pass=fwd|fwd+bwd")
          .impl<ref::fem_read_forward, ref::fem_read_backward, ref::fem_read_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(fem_read)
          .cuda<cuda::fem_read_forward, cuda::fem_read_backward, cuda::fem_read_workspace, cuda::fem_read_refuses>()
          .cuda_rows<cuda::FemSoftmaxTable, cuda::AttendRow::plain, cuda::AttendRow::tile>();
  return op;
}
const Op& fem_read_decode_op() {
  using A = FemReadDecodeArgs;
  using O = FemReadDecodeOut;
  static const Op op =
      Declare<A, O, FemReadDecodeGrads>("fem_read_decode", "fem", "continues the free energy mixer token by token, the prior's memory in place")
          .equation("the memory takes in the new key;  o = g ((1 - lam) mu + lam F)")
          .input("v", &A::v, "B T H V", "values of the new tokens")
          .input("beta", &A::beta, "H V", "the largest inverse temperature of each channel, above 0").element(Element::param).values(Values::positive)
          .input("lam", &A::lam, "B T H V", "inner gate, in (0, 1)").values(Values::unit_interval)
          .input("q", &A::q, "B T H K", "queries; aft: as wide as v; ssm: none").needed_by("prior", {"softmax", "linear", "gated", "aft", "delta", "zeros"})
          .input("k", &A::k, "B T H K", "keys; aft: as wide as v; ssm: none").needed_by("prior", {"softmax", "linear", "gated", "aft", "delta", "zeros"})
          .input("a", &A::a, "B T H", "prior gated: log decay of each step, at most 0").element(Element::param).values(Values::log_decay).needed_by("prior", {"gated"})
          .input("delta", &A::delta, "B T H V", "prior ssm: step sizes, above 0").element(Element::param).values(Values::unit_interval).needed_by("prior", {"ssm"})
          .input("A", &A::A, "H V R", "prior ssm: rates, below 0").element(Element::param).values(Values::log_decay).needed_by("prior", {"ssm"})
          .input("Bm", &A::Bm, "B T R", "prior ssm: what each step writes, at least 0").element(Element::param).values(Values::unit_interval).needed_by("prior", {"ssm"})
          .input("Cm", &A::Cm, "B T R", "prior ssm: what each step reads, at least 0").element(Element::param).values(Values::unit_interval).needed_by("prior", {"ssm"})
          .input("D", &A::D, "H V", "prior ssm: weight of a step's own value, at least 0").element(Element::param).values(Values::unit_interval).needed_by("prior", {"ssm"})
          .input("g", &A::g, "B T H V", "outer gate; 1 when absent").values(Values::unit_interval).optional()
          .input("k_cache", &A::k_cache, "B capacity H K", "prior softmax: keys so far").needed_by("prior", {"softmax"}).mutated()
          .input("v_cache", &A::v_cache, "B capacity H V", "prior softmax: values so far").needed_by("prior", {"softmax"}).mutated()
          .input("lengths", &A::lengths, "B", "prior softmax: tokens in each cache; increased by T")
          .element(Element::index).values(Values::lengths, "capacity").needed_by("prior", {"softmax"}).mutated()
          .input("state", &A::state, "B H K 2*V+1", "priors linear and gated: sums of phi(k) [vc, exp(beta vc - shift), 1]")
          .element(Element::acc).values(Values::unit_interval).needed_by("prior", {"linear", "gated"}).mutated()
          .input("sums", &A::sums, "B H 4 V", "prior aft: sums of exp(k - m) [1, vc, exp(beta vc - shift)], then m, -inf at first")
          .element(Element::acc).values(Values::unit_interval).needed_by("prior", {"aft"}).mutated()
          .input("scan", &A::scan, "B H 3 R V", "prior ssm: the scans of vc, exp(beta vc - shift) and 1")
          .element(Element::acc).values(Values::unit_interval).needed_by("prior", {"ssm"}).mutated()
          .input("shift", &A::shift, "B H V", "all but softmax: the running maximum of beta vc, -inf at first")
          .element(Element::acc).values(Values::unit_interval).needed_by("prior", {"linear", "gated", "aft", "ssm"}).mutated()
          .output("out", &O::out, "B T H V", "the mixed read")
          .option("prior", &A::prior, priors(), "the weights that are tilted by the values")
          .option("cap", &A::cap, 0, HUGE_VAL, "bound on |beta v|; none or 0: no bound")
          .option("denominator", &A::denominator, {"automatic", "exact", "max 1e-6", "plus 1e-5"}, "how weights are normalised; automatic: as the prior says").unsampled()
          .option("feature_eps", &A::feature_eps, 0, kAnyReal, "linear, gated: added to relu(q) and relu(k)").unsampled()
          .check<check_decode>()
          .earlier_rows(EarlierRows::numbers)  // several tokens share one shift
          .cost<cost_decode>()
          .bench("B=1 T=1 H=8 V=64 K=2*V capacity=4096 lengths=4000 prior=softmax with=q,k,k_cache,v_cache,lengths dtype=f32 pass=fwd")
          .bench("B=1 T=1 H=32 V=64 K=64 prior=gated with=q,k,a,state,shift dtype=f32 pass=fwd")
          .impl<ref::fem_read_decode_forward, nullptr, ref::fem_read_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(fem_read_decode)
          .cuda<cuda::fem_read_decode_forward, nullptr, cuda::fem_read_decode_workspace, cuda::fem_read_decode_refuses>()
          .cuda_rows<cuda::FemSoftmaxDecodeTable, cuda::AttendRow::plain, cuda::AttendRow::tile>();
  return op;
}
// clang-format on

Status fem_read(const FemReadArgs& args, const FemReadOut& out, const Context& context) {
  return run(fem_read_op(), Pass::forward, &args, &out, nullptr, context);
}
Status fem_read_backward(const FemReadArgs& args, const FemReadOut& out, const FemReadGrads& grads, const Context& context) {
  return run(fem_read_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t fem_read_workspace(const FemReadArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(fem_read_op(), pass, &args, context);
}

Status fem_read_decode(const FemReadDecodeArgs& args, const FemReadDecodeOut& out, const Context& context) {
  return run(fem_read_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t fem_read_decode_workspace(const FemReadDecodeArgs& args, const Context& context) {
  return workspace_bytes(fem_read_decode_op(), Pass::forward, &args, context);
}

}  // namespace linnet
