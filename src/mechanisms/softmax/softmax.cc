#include "softmax.h"

#include <cmath>

#include "core/op.h"
#include "cuda/dispatch.h"
#include "softmax_checks.h"
#include "softmax_mask.h"

namespace linnet {
namespace {

Status check_softmax(const SoftmaxArgs& args, const Dims&) {
  if (args.cu_seqlens_q.given() != args.cu_seqlens_k.given()) {
    return bad_input("softmax: cu_seqlens_q and cu_seqlens_k go together, only one is given");
  }
  if (args.cu_seqlens_q.given() && args.key_len.given()) {
    return bad_input("softmax: key_len is given for packed sequences, expected cu_seqlens_k to say it");
  }
  return {};
}

Status check_decode(const SoftmaxDecodeArgs& args, const Dims& dims) {
  return check_softmax_cache("softmax_decode", args, dims);
}

Status check_paged(const SoftmaxPagedArgs& args, const Dims& dims) {
  const int64_t page = dims["page"];
  if (page < 1) return bad_input("softmax_paged: k_pages has 0 tokens per page, expected at least 1");
  if (args.lengths.device == Device::cuda) return {};  // the kernels bound lengths and pages
  for (int64_t b = 0; b < dims["B"]; ++b) {
    const int64_t used = (index_value(args.lengths, b) + page - 1) / page;
    for (int64_t i = 0; i < used; ++i) {
      const int64_t entry = index_value(args.page_table, b, i);
      if (entry >= 0 && entry < dims["P"]) continue;
      return bad_input("softmax_paged: page_table[" + std::to_string(b) + "][" + std::to_string(i) + "] is " +
                       std::to_string(entry) + ", expected 0 to " + std::to_string(dims["P"] - 1));
    }
  }
  return {};
}

// A length or offset; what lies on the GPU stays there, and counts as `otherwise`.
int64_t known_value(const View& view, int64_t i, int64_t otherwise) {
  return view.device == Device::cuda ? otherwise : index_value(view, i);
}

// Visible (query, key) pairs of one sequence.
double visible_pairs(const SoftmaxArgs& args, int64_t tq, int64_t n) {
  const Mask mask = make_mask(args.causal, args.window, args.prefix, args.chunk);
  if (!mask.limits()) return static_cast<double>(tq) * static_cast<double>(n);
  double pairs = 0;
  for (int64_t i = 0; i < tq; ++i) {
    const auto [first, rest] = mask.keys(i + n - tq, n);
    if (first.end > first.begin) pairs += static_cast<double>(first.end - first.begin);
    if (rest.end > rest.begin) pairs += static_cast<double>(rest.end - rest.begin);
  }
  return pairs;
}

Cost cost_softmax(const SoftmaxArgs& args, const Dims& dims, Pass pass) {
  const double H = static_cast<double>(dims["H"]), Hkv = static_cast<double>(dims["Hkv"]), K = static_cast<double>(dims["K"]),
               V = static_cast<double>(dims["V"]), B = static_cast<double>(dims["B"]);
  double pairs = 0;
  if (args.cu_seqlens_q.given()) {
    const int64_t count = dims["N"], tq = count > 0 ? dims["Tq"] / count : 0, tk = count > 0 ? dims["Tk"] / count : 0;
    for (int64_t n = 0; n < count; ++n) {
      pairs += visible_pairs(args, known_value(args.cu_seqlens_q, n + 1, tq) - known_value(args.cu_seqlens_q, n, 0),
                             known_value(args.cu_seqlens_k, n + 1, tk) - known_value(args.cu_seqlens_k, n, 0));
    }
  } else if (args.key_len.given()) {
    for (int64_t b = 0; b < dims["B"]; ++b) {
      pairs += visible_pairs(args, dims["Tq"], known_value(args.key_len, b, dims["Tk"]));
    }
  } else {
    pairs = B * visible_pairs(args, dims["Tq"], dims["Tk"]);
  }
  const double element = static_cast<double>(dtype_size(args.q.dtype));
  const double q_rows = B * static_cast<double>(dims["Tq"]) * H, k_rows = B * static_cast<double>(dims["Tk"]) * Hkv;
  const double forward_bytes = element * (q_rows * (K + V) + k_rows * (K + V)) + 4 * q_rows;
  if (pass == Pass::forward) return {2 * (K + V) * pairs * H, forward_bytes};
  return {2 * (3 * K + 2 * V) * pairs * H, forward_bytes + element * (q_rows * (K + V) + k_rows * (K + V))};
}

// The cache is read once per step.
Cost cost_decode(const SoftmaxDecodeArgs& args, const Dims& dims, Pass) {
  double keys = 0;
  for (int64_t b = 0; b < dims["B"]; ++b) {
    keys += static_cast<double>(known_value(args.lengths, b, dims["capacity"] - dims["T"]) + dims["T"]);
  }
  const double width = static_cast<double>(dims["K"] + dims["V"]);
  return {2 * width * keys * static_cast<double>(dims["H"] * dims["T"]),
          static_cast<double>(dtype_size(args.q.dtype)) * keys * width * static_cast<double>(dims["Hkv"])};
}
Cost cost_paged(const SoftmaxPagedArgs& args, const Dims& dims, Pass) {
  double keys = 0;
  for (int64_t b = 0; b < dims["B"]; ++b) {
    keys += static_cast<double>(known_value(args.lengths, b, dims["pages"] * dims["page"]));
  }
  const double width = static_cast<double>(dims["K"] + dims["V"]);
  return {2 * width * keys * static_cast<double>(dims["H"] * dims["Tq"]),
          static_cast<double>(dtype_size(args.q.dtype)) * keys * width * static_cast<double>(dims["Hkv"])};
}
Cost cost_merge(const SoftmaxMergeArgs& args, const Dims& dims, Pass) {
  const double rows = static_cast<double>(dims["B"] * dims["T"] * dims["H"]), parts = static_cast<double>(dims["P"]);
  const double width = static_cast<double>(dims["V"]), element = static_cast<double>(dtype_size(args.out_parts.dtype));
  return {2 * rows * parts * width, rows * (parts + 1) * (width * element + 4)};
}

}  // namespace

Status check_softmax_cache(const char* op, const SoftmaxDecodeArgs& args, const Dims& dims) {
  if (args.lengths.device == Device::cuda) return {};  // the kernels leave a cache without room alone
  const int64_t capacity = dims["capacity"], tokens = dims["T"];
  for (int64_t b = 0; b < dims["B"]; ++b) {
    const int64_t length = index_value(args.lengths, b);
    if (length + tokens > capacity) {
      return bad_input(std::string(op) + ": the cache of item " + std::to_string(b) + " holds " + std::to_string(length) +
                       " of " + std::to_string(capacity) + " tokens, no room for " + std::to_string(tokens) + " more");
    }
    if (!args.cache_start.given()) continue;
    if (const int64_t start = index_value(args.cache_start, b); start > length) {
      return bad_input(std::string(op) + ": cache_start[" + std::to_string(b) + "] is " + std::to_string(start) +
                       ", expected at most " + std::to_string(length) + " (its length)");
    }
  }
  return {};
}

std::string bf16_dots_available() {
#if defined(__x86_64__)
  if (const std::string reason = isa_available<2>(); !reason.empty()) return reason;
  return __builtin_cpu_supports("avx512bf16") ? "" : "this machine has no AVX512_BF16";
#else
  return "this build is not for x86-64";
#endif
}

// clang-format off
const Op& softmax_op() {
  using A = SoftmaxArgs;
  using O = SoftmaxOut;
  using G = SoftmaxGrads;
  static const Op op =
      Declare<A, O, G>("softmax", "softmax", "exact softmax attention in tiles, with every usual mask")
          .equation("out_i = sum_j exp(s_ij - lse_i) v_j,  s_ij = scale q_i.k_j,  lse_i = log sum_j exp(s_ij)")
          .decode("softmax_decode")
          .input("q", &A::q, "B Tq H K", "queries").grad(&G::dq)
          .input("k", &A::k, "B Tk Hkv K", "keys; query head h reads key head h / (H / Hkv)").grad(&G::dk)
          .input("v", &A::v, "B Tk Hkv V", "values").grad(&G::dv)
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
          .output("out", &O::out, "B Tq H V", "weighted averages of the values").grad(&G::dout).saved()
          .output("lse", &O::lse, "B Tq H", "natural logarithm of each row's normaliser, sink included")
          .element(Element::acc).values(Values::logits).optional().grad(&G::dlse).saved()
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies q.k; default K^-0.5")
          .option("causal", &A::causal, "a query sees no later key; aligned to the last key")
          .option("window", &A::window, "keys seen to the left and right of a query's position; -1: all")
          .option("prefix", &A::prefix, 0, kAnyCount, "the first keys, which escape the window's left limit")
          .option("softcap", &A::softcap, 0, kAnyReal, "logits become softcap tanh(logit / softcap); 0: off")
          .option("chunk", &A::chunk, 0, kAnyCount, "a query sees only its own block of this many positions; 0: off")
          .multiple("H", "Hkv")
          .check<check_softmax>()
          .largest_logit<ref::softmax_largest_logit>()
          .cost<cost_softmax>()
          .bench("B=1 Tq=4096 Tk=Tq H=8 Hkv=H K=64|128 V=K causal=1|0 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 Tq=4096 Tk=Tq H=8 Hkv=2 K=64 V=K causal=1 dtype=f16 pass=fwd|fwd+bwd")
          .bench("B=1 Tq=4096 Tk=Tq H=8 Hkv=H K=64 V=K causal=1 window=255,0 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=32 Tq=64 Tk=Tq H=8 Hkv=H K=64 V=K causal=0 dtype=f32|bf16 pass=fwd|fwd+bwd")
          .bench("B=1 Tq=17 Tk=Tq H=2 Hkv=H K=24 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 Tq=1 Tk=4096 H=1 Hkv=H K=64 V=K causal=0 dtype=f32 pass=fwd")
          .gpu_bench("B=16 Tq=2048 Tk=Tq H=16 Hkv=H K=128 V=K causal=1|0 dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=4 Tq=8192 Tk=Tq H=16 Hkv=H K=128 V=K causal=1 dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=1 Tq=32768 Tk=Tq H=16 Hkv=H K=128 V=K causal=1 dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=1 Tq=32768 Tk=Tq H=16 Hkv=H K=128 V=K causal=1 window=1023,0 dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=16 Tq=2048 Tk=Tq H=32 Hkv=4 K=64 V=K causal=1 dtype=bf16|f16 pass=fwd|fwd+bwd")
          .gpu_bench("B=4 Tq=2048 Tk=Tq H=16 Hkv=H K=128 V=K causal=1 softcap=50 dtype=bf16 pass=fwd|fwd+bwd")
          .gpu_bench("B=4 Tq=2048 Tk=Tq H=16 Hkv=H K=64 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .compare("exact", "")
          .compare("causal", "causal=1")
          .compare("window 64", "window=64,64")
          .compare("window 32 + 16 first", "window=32,32 prefix=16")
          .compare("blocks of 64", "chunk=64")
          .impl<ref::softmax_forward, ref::softmax_backward, ref::softmax_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(softmax) LINNET_BF16_IMPL(softmax, avx512_bf16::softmax_backward)
          .cuda_rows<cuda::SoftmaxTable, cuda::AttendRow::plain, cuda::AttendRow::tile, cuda::AttendRow::hopper>();
  return op;
}

const Op& softmax_decode_op() {
  using A = SoftmaxDecodeArgs;
  using O = SoftmaxOut;
  static const Op op =
      Declare<A, O, SoftmaxNoGrads>("softmax_decode", "softmax", "appends tokens to a contiguous cache and attends to it causally")
          .equation("cache[lengths .. lengths+T-1] = k, v;  lengths += T;  out = softmax(q, cache, causal)")
          .input("q", &A::q, "B T H K", "queries of the new tokens")
          .input("k", &A::k, "B T Hkv K", "keys of the new tokens")
          .input("v", &A::v, "B T Hkv V", "values of the new tokens")
          .input("k_cache", &A::k_cache, "B capacity Hkv K", "keys so far").mutated()
          .input("v_cache", &A::v_cache, "B capacity Hkv V", "values so far").mutated()
          .input("lengths", &A::lengths, "B", "tokens in each cache; increased by T")
          .element(Element::index).values(Values::lengths, "capacity").mutated()
          .input("cache_start", &A::cache_start, "B", "first valid position of a left-padded cache; positions count from there")
          .element(Element::index).values(Values::starts, "capacity").optional()
          .input("sinks", &A::sinks, "H", "one more logit per head that has no value")
          .element(Element::param).values(Values::logits).optional()
          .output("out", &O::out, "B T H V", "weighted averages of the values")
          .output("lse", &O::lse, "B T H", "natural logarithm of each row's normaliser").element(Element::acc).values(Values::logits).optional()
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies q.k; default K^-0.5")
          .option("window", &A::window, "keys seen to the left of a query's position; -1: all")
          .option("prefix", &A::prefix, 0, kAnyCount, "the first keys, which escape the window's left limit")
          .option("softcap", &A::softcap, 0, kAnyReal, "logits become softcap tanh(logit / softcap); 0: off")
          .multiple("H", "Hkv")
          .check<check_decode>()
          .largest_logit<ref::softmax_decode_largest_logit>()
          .cost<cost_decode>()
          .bench("B=1|16 T=1 H=32 Hkv=8 K=128 V=K capacity=4096 lengths=4000 dtype=f32|bf16 pass=fwd")
          .bench("B=1 T=1 H=32 Hkv=8 K=128 V=K capacity=65536 lengths=65000 dtype=bf16 pass=fwd")
          .bench("B=1 T=1 H=8 Hkv=H K=64 V=K capacity=256 lengths=200 dtype=f32 pass=fwd")
          .gpu_bench("B=1|16|64 T=1 H=32 Hkv=8 K=128 V=K capacity=32768 lengths=32000 dtype=bf16 pass=fwd")
          .impl<ref::softmax_decode_forward, nullptr, ref::softmax_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(softmax_decode) LINNET_BF16_IMPL(softmax_decode, nullptr)
          .cuda_rows<cuda::SoftmaxDecodeTable, cuda::AttendRow::plain, cuda::AttendRow::tile>();
  return op;
}

const Op& softmax_paged_op() {
  using A = SoftmaxPagedArgs;
  using O = SoftmaxOut;
  static const Op op =
      Declare<A, O, SoftmaxNoGrads>("softmax_paged", "softmax", "attention over a paged cache")
          .equation("k_t = k_pages[page_table[b][t // page]][t % page];  out = softmax(q, k, v)")
          .input("q", &A::q, "B Tq H K", "queries")
          .input("k_pages", &A::k_pages, "P page Hkv K", "pages of keys; the newest tokens are already in them")
          .input("v_pages", &A::v_pages, "P page Hkv V", "pages of values")
          .input("page_table", &A::page_table, "B pages", "the page of each block of tokens; unused entries are never read")
          .element(Element::index).values(Values::page_table, "P")
          .input("lengths", &A::lengths, "B", "tokens of each item").element(Element::index).values(Values::lengths, "pages*page")
          .input("sinks", &A::sinks, "H", "one more logit per head that has no value")
          .element(Element::param).values(Values::logits).optional()
          .output("out", &O::out, "B Tq H V", "weighted averages of the values")
          .output("lse", &O::lse, "B Tq H", "natural logarithm of each row's normaliser").element(Element::acc).values(Values::logits).optional()
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies q.k; default K^-0.5")
          .option("causal", &A::causal, "a query sees no later key; aligned to the last key")
          .option("window", &A::window, "keys seen to the left and right of a query's position; -1: all")
          .option("prefix", &A::prefix, 0, kAnyCount, "the first keys, which escape the window's left limit")
          .option("softcap", &A::softcap, 0, kAnyReal, "logits become softcap tanh(logit / softcap); 0: off")
          .multiple("H", "Hkv")
          .check<check_paged>()
          .largest_logit<ref::softmax_paged_largest_logit>()
          .cost<cost_paged>()
          .bench("B=1|16 Tq=1 H=32 Hkv=8 K=128 V=K P=256*B page=16 pages=256 lengths=4000 causal=1 dtype=f32|bf16 pass=fwd")
          .impl<ref::softmax_paged_forward, nullptr, ref::softmax_paged_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(softmax_paged) LINNET_BF16_IMPL(softmax_paged, nullptr)
          .cuda_rows<cuda::SoftmaxPagedTable, cuda::AttendRow::plain, cuda::AttendRow::tile>();
  return op;
}

const Op& softmax_merge_op() {
  using A = SoftmaxMergeArgs;
  using O = SoftmaxOut;
  using G = SoftmaxMergeGrads;
  static const Op op =
      Declare<A, O, G>("softmax_merge", "softmax", "joins attention over disjoint key sets")
          .equation("w_p = exp(lse_p - max lse);  out = sum_p w_p out_p / sum_p w_p;  lse = max lse + log sum_p w_p")
          .input("out_parts", &A::out_parts, "P B T H V", "results over each key set").grad(&G::dout_parts)
          .input("lse_parts", &A::lse_parts, "P B T H", "their normalisers; a part with -inf is skipped")
          .element(Element::acc).values(Values::logits).grad(&G::dlse_parts)
          .output("out", &O::out, "B T H V", "the result over all keys").grad(&G::dout).saved()
          .output("lse", &O::lse, "B T H", "its normaliser").element(Element::acc).values(Values::logits).optional().grad(&G::dlse).saved()
          .cost<cost_merge>()
          .bench("P=4 B=1 T=4096 H=8 V=64 dtype=f32 pass=fwd|fwd+bwd")
          .impl<ref::softmax_merge_forward, ref::softmax_merge_backward, ref::softmax_merge_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(softmax_merge)
          .cuda<cuda::softmax_merge_forward, cuda::softmax_merge_backward, cuda::softmax_merge_workspace, cuda::softmax_merge_refuses>();
  return op;
}
// clang-format on

Status softmax(const SoftmaxArgs& args, const SoftmaxOut& out, const Context& context) {
  return run(softmax_op(), Pass::forward, &args, &out, nullptr, context);
}
Status softmax_backward(const SoftmaxArgs& args, const SoftmaxOut& out, const SoftmaxGrads& grads, const Context& context) {
  return run(softmax_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t softmax_workspace(const SoftmaxArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(softmax_op(), pass, &args, context);
}
Status softmax_decode(const SoftmaxDecodeArgs& args, const SoftmaxOut& out, const Context& context) {
  return run(softmax_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t softmax_decode_workspace(const SoftmaxDecodeArgs& args, const Context& context) {
  return workspace_bytes(softmax_decode_op(), Pass::forward, &args, context);
}
Status softmax_paged(const SoftmaxPagedArgs& args, const SoftmaxOut& out, const Context& context) {
  return run(softmax_paged_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t softmax_paged_workspace(const SoftmaxPagedArgs& args, const Context& context) {
  return workspace_bytes(softmax_paged_op(), Pass::forward, &args, context);
}
Status softmax_merge(const SoftmaxMergeArgs& args, const SoftmaxOut& out, const Context& context) {
  return run(softmax_merge_op(), Pass::forward, &args, &out, nullptr, context);
}
Status softmax_merge_backward(const SoftmaxMergeArgs& args, const SoftmaxOut& out, const SoftmaxMergeGrads& grads,
                              const Context& context) {
  return run(softmax_merge_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t softmax_merge_workspace(const SoftmaxMergeArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(softmax_merge_op(), pass, &args, context);
}

}  // namespace linnet
