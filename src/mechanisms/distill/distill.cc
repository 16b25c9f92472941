#include "distill.h"

#include <algorithm>
#include <cmath>

#include "core/op.h"

namespace linnet {
namespace {

// The largest |log feature|, on a prepared f64 call: exponents are what rounds.
double largest_logit(const DistillArgs& args) {
  const int64_t B = args.q.size[0], T = args.q.size[1], H = args.q.size[2], K = args.q.size[3], M = args.z.size[1];
  const double root = std::sqrt(std::sqrt(static_cast<double>(K))), factor = distill_scale(args.scale, K);
  double largest = 0;
  for (int64_t i = 0; i < B * T * H; ++i) {
    const int64_t h = i % H, t = i / H % T, b = i / H / T;
    for (const bool key : {false, true}) {
      if (key && args.key_mask.given() && *args.key_mask.at<const uint8_t>(b, t) == 0) continue;
      const double* x = (key ? args.k : args.q).at<const double>(b, t, h);
      double norm = 0;
      for (int64_t c = 0; c < K; ++c) norm += x[c] * x[c];
      for (int64_t m = 0; m < M; ++m) {
        double dot = 0;
        for (int64_t c = 0; c < K; ++c) dot += args.z.at<const double>(h, m)[c] * x[c];
        largest = std::max(largest, std::abs((key ? 1 : factor) * dot / root - (key ? norm / (2 * root * root) : 0)));
      }
    }
  }
  return largest;
}

// Features of q and k 4 M K, read and write of the state 4 M V, scores and their use C (M + V).
Cost cost_distill(const DistillArgs& args, const Dims& dims, Pass pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double rows = size("B") * size("T") * size("H"), M = size("M"), K = size("K"), V = size("V"), C = args.causal ? 32 : 0;
  const double forward = rows * (4 * M * K + 4 * M * V + C * (M + V));
  return {(pass == Pass::forward ? 1 : 3) * forward,
          static_cast<double>(dtype_size(args.q.dtype)) * rows * 2 * (K + V) * (pass == Pass::forward ? 1 : 2)};
}
// The losses, in every run of a check, and the reference take two exponentials per pair and feature.
double check_distill_flops(const DistillArgs&, const Dims& dims, Pass pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double pairs = size("B") * size("H") * size("T") * size("T");
  return pairs * (100 * size("M") + 20 * (size("K") + size("V")) + 200) * (pass == Pass::forward ? 1 : 0.5);
}
Cost cost_decode(const DistillDecodeArgs&, const Dims& dims, Pass) {
  const double state = static_cast<double>(dims["B"] * dims["H"] * dims["M"]);
  const double width = static_cast<double>(dims["V"]), T = static_cast<double>(dims["T"]);
  return {state * (4 * width + 4 * static_cast<double>(dims["K"])) * T, 8 * state * width};
}
Cost cost_dof(const DistillDofArgs&, const Dims& dims, Pass) {
  const double J = static_cast<double>(dims["T"]);
  return {2 * J * J * static_cast<double>(dims["D"]) + 8.0 / 3 * J * J * J, 8 * J * J};
}
Cost cost_balance(const DistillBalanceArgs&, const Dims& dims, Pass) {
  const double rows = static_cast<double>(dims["E"] * dims["H"] * dims["T"]), T = static_cast<double>(dims["T"]);
  const double K = static_cast<double>(dims["K"]), V = static_cast<double>(dims["V"]), M = static_cast<double>(dims["M"]);
  // Three of the four results weigh each pair by M exponentials, 16 flops each; two matrices of K x K per head take about
  // eight sweeps of Jacobi rotations each.
  const double pairs = rows * T * (8 * (K + V) + 3 * 20 * M), moments = 8 * rows * K * K;
  return {pairs + moments + static_cast<double>(dims["H"]) * 72 * K * K * K, rows * 8 * (2 * K + 2 * V)};
}
// The sliding hybrid alone: features 4 K F twice, the state's read and write 8 F V, scores and their use in the window.
Cost cost_window(const DistillWindowArgs& args, const Dims& dims, Pass pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double rows = size("B") * size("T") * size("H"), K = size("K"), V = size("V"), F = size("F");
  const double window = std::min(static_cast<double>(args.window), size("T"));
  const double forward = rows * (4 * K * F + 8 * F * (V + 1) + 2 * window * (K + V + 1));
  return {(pass == Pass::forward ? 1 : 4) * forward,
          static_cast<double>(dtype_size(args.q.dtype)) * rows * 2 * (K + V) * (pass == Pass::forward ? 1 : 2)};
}
Cost cost_window_decode(const DistillWindowDecodeArgs& args, const Dims& dims, Pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double rows = size("B") * size("T") * size("H"), K = size("K"), V = size("V"), F = size("F");
  const double window = static_cast<double>(args.window), state = size("B") * size("H") * 2 * F * (V + 1);
  return {rows * (4 * K * F + 8 * F * (V + 1) + 2 * window * (K + V + 1)),
          8 * state + static_cast<double>(dtype_size(args.q.dtype)) * size("B") * size("H") * window * (K + V)};
}
// The reference goes by pairs, and a check asks for the statistics and ranks in every run.
double check_window_flops(const DistillWindowArgs&, const Dims& dims, Pass) {
  const double T = static_cast<double>(dims["T"]), block = std::min<double>(512, T);
  const double heads = static_cast<double>(dims["B"] * dims["H"]);
  return heads * (T * T * 8 * static_cast<double>(dims["K"] + dims["V"] + 2 * dims["F"] + 64) + 20 * block * block * block);
}
// The largest |score| and |exponent of a feature|, on a prepared f64 call.
double largest_window_logit(const DistillWindowArgs& args) {
  const int64_t T = args.q.size[1], H = args.q.size[2], K = args.q.size[3], F = args.wq.size[2];
  double largest = 0;
  for (int64_t row = 0; row < args.q.size[0] * H * T; ++row) {
    const int64_t i = row % T, h = row / T % H, b = row / T / H;
    const double *q = args.q.at<const double>(b, i, h), *k = args.k.at<const double>(b, i, h);
    for (int64_t j = 0; j <= i; ++j) {
      double score = 0;
      for (int64_t c = 0; c < K; ++c) score += q[c] * args.k.at<const double>(b, j, h)[c];
      largest = std::max(largest, std::abs(score) / std::sqrt(static_cast<double>(std::max<int64_t>(K, 1))));
    }
    for (int64_t f = 0; f < F; ++f) {
      double y = 0, z = 0;
      for (int64_t c = 0; c < K; ++c) {
        y += q[c] * args.wq.at<const double>(h, c)[f];
        z += k[c] * args.wk.at<const double>(h, c)[f];
      }
      largest = std::max({largest, std::abs(y), std::abs(z)});
    }
  }
  return largest;
}

// The bisection of dims_exact; each dimension that dims_greedy gives goes to the best of all layers.
Cost cost_alloc(const DistillAllocArgs& args, const Dims& dims, Pass) {
  const double S = static_cast<double>(dims["S"]), entries = S * static_cast<double>(dims["H"]);
  return {200 * S + entries + S * S * (8 + 4 * std::min(args.cost, static_cast<double>(dims["R"]))), 8 * entries};
}

Status check_distill(const DistillArgs&, const Dims& dims) {
  if (dims["S"] != dims["T"]) {
    return bad_input("distill: k has " + std::to_string(dims["S"]) + " tokens, expected " + std::to_string(dims["T"]) +
                     " (same as q)");
  }
  if (dims["M"] == 0) return bad_input("distill: z has 0 directions, expected at least 1");
  return {};
}
Status check_decode(const DistillDecodeArgs&, const Dims& dims) {
  if (dims["M"] == 0) return bad_input("distill_decode: z has 0 directions, expected at least 1");
  return {};
}
Status check_balance(const DistillBalanceArgs&, const Dims& dims) {
  if (dims["M"] == 0) return bad_input("distill_balance: z has 0 directions, expected at least 1");
  if (dims["K"] == 0) return bad_input("distill_balance: q has 0 channels, expected at least 1");
  return {};
}
Status check_window(const DistillWindowArgs&, const Dims& dims) {
  if (dims["F"] == 0) return bad_input("distill_window: wq has 0 columns, expected at least 1");
  return {};
}
Status check_window_decode(const DistillWindowDecodeArgs&, const Dims& dims) {
  if (dims["F"] == 0) return bad_input("distill_window_decode: wq has 0 columns, expected at least 1");
  return {};
}
Status check_hybrid(const DistillHybridArgs&, const Dims& dims) {
  if (dims["M"] == 0) return bad_input("distill_hybrid: z has 0 features, expected at least 1");
  return {};
}
Status check_hybrid_decode(const DistillHybridDecodeArgs&, const Dims& dims) {
  if (dims["M"] == 0) return bad_input("distill_hybrid_decode: z has 0 features, expected at least 1");
  return {};
}
template <class Args>
Cost cost_hybrid(const Args& args, const Dims& dims, Pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  const double rows = size("B") * size("T") * size("H"), K = size("K"), V = size("V"), M = size("M");
  return {rows * (4 * K * M + 4 * M * (V + 1) + 2 * static_cast<double>(args.window + args.sinks) * (K + V + 1)),
          static_cast<double>(dtype_size(args.q.dtype)) * rows * (4 * K + 2 * V)};
}
double check_hybrid_flops(const DistillHybridArgs&, const Dims& dims, Pass) {
  const auto size = [&](const char* letter) { return static_cast<double>(dims[letter]); };
  return size("B") * size("H") * size("T") * size("T") * (size("K") + size("V") + 4 * size("M"));
}
Status check_dof(const DistillDofArgs&, const Dims& dims) {
  if (dims["T"] == 0) return bad_input("distill_dof: x has 0 samples, expected at least 1");
  if (dims["D"] == 0) return bad_input("distill_dof: x has 0 channels, expected at least 1");
  return {};
}
Status check_alloc(const DistillAllocArgs& args, const Dims& dims) {
  if (args.high > 0 && args.low > args.high) {
    return bad_input("distill_alloc: low is " + std::to_string(args.low) + ", expected at most high, " +
                     std::to_string(args.high));
  }
  if (args.low % args.multiple != 0 || args.high % args.multiple != 0) {
    return bad_input("distill_alloc: low and high are " + std::to_string(args.low) + " and " + std::to_string(args.high) +
                     ", expected multiples of " + std::to_string(args.multiple));
  }
  if (dims["S"] > 0 && dims["H"] == 0) return bad_input("distill_alloc: dof has 0 heads, expected at least 1");
  return {};
}

}  // namespace

// clang-format off
// Random cases draw scales up to 1, sqrt(K) times the default: beyond it exponents z.q grow past 100, one feature and one key
// hold all the weight, and gradients of z and alpha are rounding.
const Op& distill_op() {
  using A = DistillArgs;
  using O = DistillOut;
  using G = DistillGrads;
  static const Op op =
      Declare<A, O, G>("distill", "distill", "linear attention with learned positive features, and its losses against softmax")
          .equation("out_i = sum_j a_ij v_j / sum_j a_ij,  log a_ij = logsumexp_m(l(q_i)_m + l(k_j)_m + key_logw_j)")
          .decode("distill_decode")
          .input("q", &A::q, "B T H K", "queries, as they enter the score").grad(&G::dq)
          .input("k", &A::k, "B S H K", "keys, as they enter the score; S = T").grad(&G::dk)
          .input("v", &A::v, "B S H V", "values").grad(&G::dv)
          .input("z", &A::z, "H M K", "feature directions").element(Element::param).grad(&G::dz)
          .input("alpha", &A::alpha, "H M", "feature weights; 0 switches one off").element(Element::param).values(Values::weights).grad(&G::dalpha)
          .input("key_mask", &A::key_mask, "B S", "keys with 0 take no part").element(Element::mask).optional()
          .input("key_logw", &A::key_logw, "B S H", "added to the logarithm of each key's weight").element(Element::acc).optional().grad(&G::dkey_logw)
          .output("out", &O::out, "B T H V", "the output").grad(&G::dout)
          .output("out_softmax", &O::out_softmax, "B T H V", "softmax attention, the teacher").optional()
          .output("loss_l2", &O::loss_l2, "H", "squared error of the kernel, per row").element(Element::acc).optional()
          .output("loss_l2rel", &O::loss_l2rel, "H", "squared error of the kernel over its square").element(Element::acc).optional()
          .output("loss_ce", &O::loss_ce, "H", "cross entropy of the rows of weights").element(Element::acc).optional()
          .output("loss_kl", &O::loss_kl, "H", "cross entropy less the teacher's entropy").element(Element::acc).optional()
          .output("loss_mse", &O::loss_mse, "H", "squared error of the outputs").element(Element::acc).optional()
          .output("dz_l2", &O::dz_l2, "H M K", "gradient of the sum of loss_l2").element(Element::acc).optional()
          .output("dz_l2rel", &O::dz_l2rel, "H M K", "gradient of the sum of loss_l2rel").element(Element::acc).optional()
          .output("dz_ce", &O::dz_ce, "H M K", "gradient of the sum of loss_ce").element(Element::acc).optional()
          .output("dz_mse", &O::dz_mse, "H M K", "gradient of the sum of loss_mse").element(Element::acc).optional()
          .output("dalpha_l2", &O::dalpha_l2, "H M", "gradient of the sum of loss_l2").element(Element::acc).optional()
          .output("dalpha_l2rel", &O::dalpha_l2rel, "H M", "gradient of the sum of loss_l2rel").element(Element::acc).optional()
          .output("dalpha_ce", &O::dalpha_ce, "H M", "gradient of the sum of loss_ce").element(Element::acc).optional()
          .output("dalpha_mse", &O::dalpha_mse, "H M", "gradient of the sum of loss_mse").element(Element::acc).optional()
          .option("causal", &A::causal, "a token sees no later key")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "of the scores; default K^-0.5").sampled_to(1)
          .growing()
          .largest_logit<largest_logit>()
          .check<check_distill>()
          .earlier_rows(EarlierRows::numbers)  // means of the first chunk are taken off, unless they are not finite
          .cost<cost_distill>()
          .check_flops<check_distill_flops>()
          .bench("B=1 T=8192 S=T H=8 K=64 V=K M=64|128 causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .compare("64 random", "z=normal alpha=1 M=64")
          .impl<ref::distill_forward, ref::distill_backward, ref::distill_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(distill)
          .cuda<cuda::distill_forward, cuda::distill_backward, cuda::distill_workspace, cuda::distill_refuses>();
  return op;
}

const Op& distill_decode_op() {
  using A = DistillDecodeArgs;
  using O = DistillDecodeOut;
  static const Op op =
      Declare<A, O, DistillDecodeGrads>("distill_decode", "distill", "continues attention with learned features token by token")
          .equation("c' = max(c, l(k));  S = exp(c - c') S + exp(l(k) - c') v^T;  n alike;  out = exp(l(q) + c') S / exp(l(q) + c') n")
          .input("q", &A::q, "B T H K", "queries of the new tokens")
          .input("k", &A::k, "B T H K", "keys of the new tokens")
          .input("v", &A::v, "B T H V", "values of the new tokens")
          .input("z", &A::z, "H M K", "feature directions").element(Element::param)
          .input("alpha", &A::alpha, "H M", "feature weights; 0 switches one off").element(Element::param).values(Values::weights)
          .input("state", &A::state, "B H M V", "sums of values, in units of exp(c); read and overwritten").element(Element::acc).mutated()
          .input("n", &A::n, "B H M", "sums of weights, in units of exp(c); read and overwritten").element(Element::acc).values(Values::unit_interval).mutated()
          .input("c", &A::c, "B H M", "largest log feature of the keys so far, -inf at first; read and overwritten").element(Element::acc).mutated()
          .input("key_logw", &A::key_logw, "B T H", "added to the logarithm of each key's weight").element(Element::acc).optional()
          .output("out", &O::out, "B T H V", "the output")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "of the scores; default K^-0.5").sampled_to(1)
          .growing()
          .earlier_rows(EarlierRows::numbers)  // of a prompt, as in distill
          .check<check_decode>()
          .cost<cost_decode>()
          .bench("B=1|16 T=1 H=12 K=64 V=64 M=64 dtype=f32 pass=fwd")
          .bench("B=1 T=1024 H=12 K=64 V=64 M=64 dtype=f32 pass=fwd")
          .impl<ref::distill_decode_forward, nullptr, ref::distill_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(distill_decode)
          .cuda<cuda::distill_decode_forward, nullptr, cuda::distill_decode_workspace, cuda::distill_decode_refuses>();
  return op;
}

const Op& distill_dof_op() {
  using A = DistillDofArgs;
  using O = DistillDofOut;
  static const Op op =
      Declare<A, O, DistillDofGrads>("distill_dof", "distill", "degrees of freedom of the softmax kernel on samples, and leverage scores")
          .equation("N(lambda) = sum_i e_i / (e_i + lambda),  e the eigenvalues of the Gram matrix: whole (gram), / J (mean), / trace (trace)")
          .input("x", &A::x, "T D", "samples of one head's queries and keys").values(Values::number)
          .input("lambda", &A::lambda, "N", "tolerances, > 0").element(Element::param).values(Values::positive)
          .input("z", &A::z, "P D", "candidate directions for the leverage scores; none: 0 rows").element(Element::param)
          .output("dof_softmax_mean", &O::dof_softmax_mean, "N", "kernel exp(x.y / sqrt D), eigenvalues / J").element(Element::acc).optional()
          .output("dof_softmax_gram", &O::dof_softmax_gram, "N", "eigenvalues as they are").element(Element::acc).optional()
          .output("dof_softmax_trace", &O::dof_softmax_trace, "N", "eigenvalues over their sum").element(Element::acc).optional()
          .output("dof_gauss_mean", &O::dof_gauss_mean, "N", "kernel exp(-|x-y|^2 / (2 sqrt D)), eigenvalues / J").element(Element::acc).optional()
          .output("dof_gauss_gram", &O::dof_gauss_gram, "N", "eigenvalues as they are").element(Element::acc).optional()
          .output("dof_gauss_trace", &O::dof_gauss_trace, "N", "eigenvalues over their sum").element(Element::acc).optional()
          .output("eig_softmax_mean", &O::eig_softmax_mean, "T", "eigenvalues / J, descending").element(Element::acc).optional()
          .output("eig_gauss_mean", &O::eig_gauss_mean, "T", "eigenvalues / J, descending").element(Element::acc).optional()
          .output("leverage", &O::leverage, "P", "leverage scores of the directions, softmax kernel, mean norm").element(Element::acc).optional()
          .output("unresolved", &O::unresolved, "6 N", "1 where rounding hides the small eigenvalues; rows as the six results").element(Element::acc).optional()
          .option("leverage_lambda", &A::leverage_lambda, 1e-300, kAnyReal, "lambda of the leverage scores")
          .check<check_dof>()
          .cost<cost_dof>()
          .bench("T=2048|8192 D=64 N=1 P=0 with=dof_gauss_mean dtype=f32 pass=fwd")
          .impl<ref::distill_dof_forward, nullptr, ref::distill_dof_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(distill_dof);
  return op;
}

const Op& distill_alloc_op() {
  using A = DistillAllocArgs;
  using O = DistillAllocOut;
  static const Op op =
      Declare<A, O, DistillAllocGrads>("distill_alloc", "distill", "feature dimensions per layer under a budget")
          .equation("M_s = round(cost S n_s / sum n),  n_s = max over heads of dof")
          .input("dof", &A::dof, "S H", "degrees of freedom of each layer's heads").values(Values::weights)
          .input("spectra", &A::spectra, "S R", "eigenvalues of each layer, descending, for dims_greedy").values(Values::unit_interval).optional()
          .input("weights", &A::weights, "S", "what an error in a layer costs; 1 when absent").values(Values::unit_interval).optional()
          .output("dims", &O::dims, "S", "the paper's rule").element(Element::index).optional()
          .output("dims_clip", &O::dims_clip, "S", "at most high").element(Element::index).optional()
          .output("dims_aligned", &O::dims_aligned, "S", "multiples, between low and high").element(Element::index).optional()
          .output("dims_exact", &O::dims_exact, "S", "the same, summing to the budget").element(Element::index).optional()
          .output("dims_greedy", &O::dims_greedy, "S", "least tail of the spectra; 0 without spectra").element(Element::index).optional()
          .option("cost", &A::cost, 1, 1e9, "mean dimension per layer").unsampled()
          .option("low", &A::low, 0, int64_t{1} << 30, "least dimension of a layer")
          .option("high", &A::high, 0, int64_t{1} << 30, "largest dimension of a layer; 0: no limit")
          .option("multiple", &A::multiple, 1, int64_t{1} << 20, "dimensions are multiples of this")
          .option("greedy_total", &A::greedy_total, 0, int64_t{1} << 40, "sum of dims_greedy; 0: cost times layers")
          .check<check_alloc>()
          .cost<cost_alloc>()
          .bench("S=12|32 H=S with=dims_exact dtype=f64 pass=fwd")
          .impl<ref::distill_alloc_forward, nullptr, ref::distill_alloc_workspace>("ref", always_available);
  return op;
}

const Op& distill_balance_op() {
  using A = DistillBalanceArgs;
  using O = DistillBalanceOut;
  static const Op op =
      Declare<A, O, DistillBalanceGrads>("distill_balance", "distill", "balancing of queries and keys, with features before and after it")
          .equation("q' = A (q - q0), k' = A^-1 (k - k0), key_logw = D^-1/2 q0.k: softmax attention does not change")
          .input("q", &A::q, "E T H K", "queries of E sequences; means and A are taken over all of them")
          .input("k", &A::k, "E T H K", "keys")
          .input("v", &A::v, "E T H V", "values")
          .input("z", &A::z, "H M K", "feature directions").element(Element::param)
          .input("alpha", &A::alpha, "H M", "feature weights; 0 switches one off").element(Element::param).values(Values::weights)
          .output("q_mean", &O::q_mean, "H K", "mean query").element(Element::acc).optional()
          .output("k_mean", &O::k_mean, "H K", "mean key").element(Element::acc).optional()
          .output("A", &O::A, "H K K", "symmetric, A Sq A = A^-1 Sk A^-1").element(Element::acc).optional()
          .output("q_balanced", &O::q_balanced, "E T H K", "q'").element(Element::acc).optional()
          .output("k_balanced", &O::k_balanced, "E T H K", "k'").element(Element::acc).optional()
          .output("key_logw", &O::key_logw, "E T H", "log-weights of the keys").element(Element::acc).optional()
          .output("out", &O::out, "E T H V", "attention with balanced features").optional()
          .output("out_plain", &O::out_plain, "E T H V", "the same features without balancing").optional()
          .output("out_softmax", &O::out_softmax, "E T H V", "softmax attention").optional()
          .output("out_hybrid", &O::out_hybrid, "E T H V", "hybrid-exact: softmax in the window, balanced features beyond it").optional()
          .option("causal", &A::causal, "a token sees no later key; out_hybrid is causal always")
          .option("ridge", &A::ridge, 0, 1, "added to the second moments, times their mean eigenvalue").unsampled()
          .option("window", &A::window, 1, kAnyCount, "keys of out_hybrid that keep their exact score, the current one included")
          .check<check_balance>()
          .earlier_rows(EarlierRows::nothing)  // the balance is made of all tokens
          .cost<cost_balance>()
          .bench("E=2 T=64 H=2 K=16 V=16 M=16 window=16 with=out,out_hybrid dtype=f32 pass=fwd")
          .bench("E=4 T=512 H=1 K=128 V=128 M=1 window=1 with=A dtype=f32 pass=fwd")
          .impl<ref::distill_balance_forward, nullptr, ref::distill_balance_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(distill_balance);
  return op;
}

const Op& distill_window_op() {
  using A = DistillWindowArgs;
  using O = DistillWindowOut;
  using G = DistillWindowGrads;
  static const Op op =
      Declare<A, O, G>("distill_window", "distill", "hybrids of a window with features, and statistics of causal heads")
          .equation("a_ij = sigmoid(window_factor) exp(s_ij - top_i) in the window, f(q_i).f(k_j) before it;  out = sum a v / sum a")
          .decode("distill_window_decode")
          .input("q", &A::q, "B T H K", "queries").grad(&G::dq)
          .input("k", &A::k, "B T H K", "keys").grad(&G::dk)
          .input("v", &A::v, "B T H V", "values").grad(&G::dv)
          .input("wq", &A::wq, "H K F", "hedgehog map of the queries").element(Element::param).grad(&G::dwq)
          .input("wk", &A::wk, "H K F", "hedgehog map of the keys").element(Element::param).grad(&G::dwk)
          .input("window_factor", &A::window_factor, "H", "logit of the window's share").element(Element::param).grad(&G::dwindow_factor)
          .output("out_sliding", &O::out_sliding, "B T H V", "window: the last `window` keys").grad(&G::dout_sliding).optional()
          .output("out_terraced", &O::out_terraced, "B T H V", "window: the current and the previous block").grad(&G::dout_terraced).optional()
          .output("fq", &O::fq, "B T H 2*F", "features of the queries").element(Element::acc).optional()
          .output("fk", &O::fk, "B T H 2*F", "features of the keys").element(Element::acc).optional()
          .output("entropy", &O::entropy, "H", "mean entropy of the rows").element(Element::acc).optional()
          .output("entropy_ratio", &O::entropy_ratio, "H", "over that of uniform rows").element(Element::acc).optional()
          .output("distance", &O::distance, "H", "mean distance attended to").element(Element::acc).optional()
          .output("window_mass", &O::window_mass, "H windows", "weight within each of the windows").element(Element::acc).optional()
          .output("sink_mass", &O::sink_mass, "H", "weight on the first keys").element(Element::acc).optional()
          .output("stable_rank", &O::stable_rank, "H", "|P|_F^2 / |P|_2^2, blocks of 512 tokens").element(Element::acc).optional()
          .output("effective_rank", &O::effective_rank, "H", "exp of the entropy of the squared singular values").element(Element::acc).optional()
          .output("gate_dt_bias", &O::gate_dt_bias, "H", "start of a gated delta rule: bias of the decay").element(Element::acc).optional()
          .output("gate_beta", &O::gate_beta, "H", "its write strength").element(Element::acc).optional()
          .output("gate_beta_logit", &O::gate_beta_logit, "H", "and the logit of that").element(Element::acc).optional()
          .option("window", &A::window, 1, kAnyCount, "keys of the window, the current one included; blocks of the terraced form")
          .option("windows", &A::windows, 1, kAnyCount, "widths of window_mass").unsampled()
          .option("sinks", &A::sinks, 0, kAnyCount, "first keys counted by sink_mass")
          .growing()
          .largest_logit<largest_window_logit>()
          .check<check_window>()
          .always_causal()
          .cost<cost_window>()
          .check_flops<check_window_flops>()
          .bench("B=1 T=8192 H=8 K=64 V=64 F=64 window=64 with=out_sliding dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=8192 H=8 K=64 V=64 F=64 window=64 with=out_terraced dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=2048 H=8 K=64 V=64 F=64 window=64 with=entropy|stable_rank dtype=f32 pass=fwd")
          .impl<ref::distill_window_forward, ref::distill_window_backward, ref::distill_window_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(distill_window)
          .cuda<cuda::distill_window_forward, cuda::distill_window_backward, cuda::distill_window_workspace, cuda::distill_window_refuses>();
  return op;
}

const Op& distill_window_decode_op() {
  using A = DistillWindowDecodeArgs;
  using O = DistillWindowDecodeOut;
  static const Op op =
      Declare<A, O, DistillWindowDecodeGrads>("distill_window_decode", "distill", "continues a hybrid of a window with features, by tokens or a prompt")
          .equation("keys that leave the window: S += f(k) v^T, n += f(k);  out = (sum near a v + f(q) S) / (sum near a + f(q) n)")
          .input("q", &A::q, "B T H K", "queries of the new tokens")
          .input("k", &A::k, "B T H K", "keys of the new tokens")
          .input("v", &A::v, "B T H V", "values of the new tokens")
          .input("wq", &A::wq, "H K F", "hedgehog map of the queries").element(Element::param)
          .input("wk", &A::wk, "H K F", "hedgehog map of the keys").element(Element::param)
          .input("window_factor", &A::window_factor, "H", "logit of the window's share").element(Element::param)
          .input("k_near", &A::k_near, "B 2*window H K", "the newest keys").mutated()
          .input("v_near", &A::v_near, "B 2*window H V", "the newest values").mutated()
          .input("held", &A::held, "B", "how many of them there are; at 2 window the older half moves out")
          .element(Element::index).values(Values::lengths, "2*window").mutated()
          .input("state", &A::state, "B H 2*F V", "sums of features times values; read and overwritten").element(Element::acc).mutated()
          .input("n", &A::n, "B H 2*F", "sums of features; read and overwritten").element(Element::acc).values(Values::unit_interval).mutated()
          .output("out", &O::out, "B T H V", "the output")
          .option("window", &A::window, 1, kAnyCount, "keys of the window, the current one included; blocks of the terraced form").sampled_to(9)
          .option("form", &A::form, {"sliding", "terraced"}, "near: the last keys, or the current and the previous block")
          .growing()
          .check<check_window_decode>()
          .cost<cost_window_decode>()
          .bench("B=1|16 T=1 H=8 K=64 V=64 F=64 window=64 held=100 dtype=f32|bf16 pass=fwd")
          .bench("B=1 T=1024 H=8 K=64 V=64 F=64 window=64 held=0 dtype=f32 pass=fwd")
          .impl<ref::distill_window_decode_forward, nullptr, ref::distill_window_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(distill_window_decode)
          .cuda<cuda::distill_window_decode_forward, nullptr, cuda::distill_window_decode_workspace, cuda::distill_window_decode_refuses>();
  return op;
}

const Op& distill_hybrid_op() {
  using A = DistillHybridArgs;
  using O = DistillHybridOut;
  static const Op op =
      Declare<A, O, DistillHybridGrads>("distill_hybrid", "distill", "exact scores in a window and for the first keys, balanced features between them")
          .equation("a_ij = exp(K^-1/2 q_i.k_j) in the window and for sinks, sum_m exp(l(q'_i)_m + l(k'_j)_m + query_logw_i + key_logw_j) else;  out = sum a v / sum a")
          .decode("distill_hybrid_decode")
          .input("q", &A::q, "B T H K", "queries")
          .input("k", &A::k, "B T H K", "keys")
          .input("v", &A::v, "B T H V", "values")
          .input("q_balanced", &A::q_balanced, "B T H K", "A (q - q0)")
          .input("k_balanced", &A::k_balanced, "B T H K", "A^-1 (k - k0)")
          .input("query_logw", &A::query_logw, "B T H", "K^-1/2 (q - q0).k0").element(Element::acc)
          .input("key_logw", &A::key_logw, "B T H", "K^-1/2 q0.k").element(Element::acc)
          .input("z", &A::z, "H M K", "feature directions").element(Element::param)
          .input("alpha", &A::alpha, "H M", "feature weights; 0 switches one off").element(Element::param).values(Values::weights)
          .output("out", &O::out, "B T H V", "the output")
          .option("window", &A::window, 1, kAnyCount, "keys with their exact score, the current one included").sampled_to(9)
          .option("sinks", &A::sinks, 0, kAnyCount, "first keys that always have theirs").sampled_to(5)
          .growing()
          .always_causal()
          .check<check_hybrid>()
          .cost<cost_hybrid<A>>()
          .check_flops<check_hybrid_flops>()
          .bench("B=1 T=4096 H=8 K=64 V=64 M=64 window=64 sinks=4 dtype=f32 pass=fwd")
          .impl<ref::distill_hybrid_forward, nullptr, ref::distill_hybrid_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(distill_hybrid)
          .cuda<cuda::distill_hybrid_forward, nullptr, cuda::distill_hybrid_workspace, cuda::distill_hybrid_refuses>();
  return op;
}

const Op& distill_hybrid_decode_op() {
  using A = DistillHybridDecodeArgs;
  using O = DistillHybridOut;
  static const Op op =
      Declare<A, O, DistillHybridGrads>("distill_hybrid_decode", "distill", "continues hybrid-exact attention from a bounded state")
          .equation("keys that leave the window: c' = max(c, l(k)), S = exp(c - c') S + exp(l(k) - c') v^T;  out = (sum exact a v + exp(l(q) + c) S) / (sum exact a + exp(l(q) + c) n)")
          .input("q", &A::q, "B T H K", "queries of the new tokens")
          .input("k", &A::k, "B T H K", "keys of the new tokens")
          .input("v", &A::v, "B T H V", "values of the new tokens")
          .input("q_balanced", &A::q_balanced, "B T H K", "A (q - q0)")
          .input("k_balanced", &A::k_balanced, "B T H K", "A^-1 (k - k0)")
          .input("query_logw", &A::query_logw, "B T H", "K^-1/2 (q - q0).k0").element(Element::acc)
          .input("key_logw", &A::key_logw, "B T H", "K^-1/2 q0.k").element(Element::acc)
          .input("z", &A::z, "H M K", "feature directions").element(Element::param)
          .input("alpha", &A::alpha, "H M", "feature weights; 0 switches one off").element(Element::param).values(Values::weights)
          .input("k_first", &A::k_first, "B sinks H K", "the first keys").mutated()
          .input("v_first", &A::v_first, "B sinks H V", "the first values").mutated()
          .input("first", &A::first, "B", "how many of them there are").element(Element::index).values(Values::lengths, "sinks").mutated()
          .input("k_near", &A::k_near, "B 2*window H K", "the newest keys behind them").mutated()
          .input("v_near", &A::v_near, "B 2*window H V", "their values").mutated()
          .input("l_near", &A::l_near, "B 2*window H M", "their log features").element(Element::acc).mutated()
          .input("held", &A::held, "B", "how many of them there are; at 2 window the older half moves out")
          .element(Element::index).values(Values::lengths, "2*window").mutated()
          .input("state", &A::state, "B H M V", "sums of values, in units of exp(c); read and overwritten").element(Element::acc).mutated()
          .input("n", &A::n, "B H M", "sums of weights, in units of exp(c); read and overwritten").element(Element::acc).values(Values::unit_interval).mutated()
          .input("c", &A::c, "B H M", "largest log feature of the keys so far, -inf at first; read and overwritten").element(Element::acc).mutated()
          .output("out", &O::out, "B T H V", "the output")
          .option("window", &A::window, 1, kAnyCount, "keys with their exact score, the current one included").sampled_to(9)
          .option("sinks", &A::sinks, 0, kAnyCount, "first keys that always have theirs").sampled_to(5)
          .growing()
          .check<check_hybrid_decode>()
          .cost<cost_hybrid<A>>()
          .bench("B=1|16 T=1 H=8 K=64 V=64 M=64 window=64 sinks=4 first=4 held=100 dtype=f32 pass=fwd")
          .impl<ref::distill_hybrid_decode_forward, nullptr, ref::distill_hybrid_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(distill_hybrid_decode)
          .cuda<cuda::distill_hybrid_decode_forward, nullptr, cuda::distill_hybrid_decode_workspace, cuda::distill_hybrid_decode_refuses>();
  return op;
}
// clang-format on

Status distill_hybrid(const DistillHybridArgs& args, const DistillHybridOut& out, const Context& context) {
  return run(distill_hybrid_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t distill_hybrid_workspace(const DistillHybridArgs& args, const Context& context) {
  return workspace_bytes(distill_hybrid_op(), Pass::forward, &args, context);
}
Status distill_hybrid_decode(const DistillHybridDecodeArgs& args, const DistillHybridOut& out, const Context& context) {
  return run(distill_hybrid_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t distill_hybrid_decode_workspace(const DistillHybridDecodeArgs& args, const Context& context) {
  return workspace_bytes(distill_hybrid_decode_op(), Pass::forward, &args, context);
}
Status distill(const DistillArgs& args, const DistillOut& out, const Context& context) {
  return run(distill_op(), Pass::forward, &args, &out, nullptr, context);
}
Status distill_backward(const DistillArgs& args, const DistillOut& out, const DistillGrads& grads, const Context& context) {
  return run(distill_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t distill_workspace(const DistillArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(distill_op(), pass, &args, context);
}
Status distill_decode(const DistillDecodeArgs& args, const DistillDecodeOut& out, const Context& context) {
  return run(distill_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t distill_decode_workspace(const DistillDecodeArgs& args, const Context& context) {
  return workspace_bytes(distill_decode_op(), Pass::forward, &args, context);
}
Status distill_dof(const DistillDofArgs& args, const DistillDofOut& out, const Context& context) {
  return run(distill_dof_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t distill_dof_workspace(const DistillDofArgs& args, const Context& context) {
  return workspace_bytes(distill_dof_op(), Pass::forward, &args, context);
}
Status distill_alloc(const DistillAllocArgs& args, const DistillAllocOut& out, const Context& context) {
  return run(distill_alloc_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t distill_alloc_workspace(const DistillAllocArgs& args, const Context& context) {
  return workspace_bytes(distill_alloc_op(), Pass::forward, &args, context);
}
Status distill_balance(const DistillBalanceArgs& args, const DistillBalanceOut& out, const Context& context) {
  return run(distill_balance_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t distill_balance_workspace(const DistillBalanceArgs& args, const Context& context) {
  return workspace_bytes(distill_balance_op(), Pass::forward, &args, context);
}
Status distill_window(const DistillWindowArgs& args, const DistillWindowOut& out, const Context& context) {
  return run(distill_window_op(), Pass::forward, &args, &out, nullptr, context);
}
Status distill_window_backward(const DistillWindowArgs& args, const DistillWindowOut& out, const DistillWindowGrads& grads,
                               const Context& context) {
  return run(distill_window_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t distill_window_workspace(const DistillWindowArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(distill_window_op(), pass, &args, context);
}
Status distill_window_decode(const DistillWindowDecodeArgs& args, const DistillWindowDecodeOut& out, const Context& context) {
  return run(distill_window_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t distill_window_decode_workspace(const DistillWindowDecodeArgs& args, const Context& context) {
  return workspace_bytes(distill_window_decode_op(), Pass::forward, &args, context);
}

}  // namespace linnet
