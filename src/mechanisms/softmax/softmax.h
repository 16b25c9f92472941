// softmax: exact scaled dot-product attention, in tiles; nothing of size Tq x Tk is ever held.
//
//   s_ij  = scale q_i.k_j;  s = softcap tanh(s / softcap) if softcap > 0;  s += bias_ij;  s = -inf where j is not visible to i
//   lse_i = log( sum_j exp(s_ij) + exp(sink_h) )            the sink only when given
//   out_i = sum_j exp(s_ij - lse_i) v_j                     a row that sees nothing: out 0, lse -inf (or the sink)
//
// Query i stands at key position t = i + n - Tq (bottom-right alignment), n = Tk, key_len[b] or the packed sequence's length.
// Key j is visible when 0 <= j < n; j <= t + right (right = 0 when causal); j >= t - left or j < prefix; and, with chunk c > 0,
// j lies in the same block of c positions as t. Query head h reads key head h / (H / Hkv).
//
//   SoftmaxArgs args{.q = q, .k = k, .v = v, .causal = true};
//   std::vector<char> memory(softmax_workspace(args, Pass::forward, {}));
//   Status status = softmax(args, {.out = out, .lse = lse}, {.workspace = memory.data(), .workspace_bytes = memory.size()});
#pragma once

#include "../../core/args.h"

namespace linnet {

struct SoftmaxArgs {
  View q;                           // [B, Tq, H, K]
  View k;                           // [B, Tk, Hkv, K]
  View v;                           // [B, Tk, Hkv, V]
  View bias;                        // optional, broadcastable to [B, H, Tq, Tk]; -inf masks
  View sinks;                       // optional [H]: one more logit per head, with no value; -inf: none
  View key_len;                     // optional [B]: valid keys of each item
  View cu_seqlens_q, cu_seqlens_k;  // optional [N+1]: packed sequences, q [total_q, H, K] (or with B = 1)
  Maybe scale;                      // default K^-0.5
  bool causal = false;
  Window window;
  int64_t prefix = 0;  // the first `prefix` keys escape window.left
  double softcap = 0;  // 0: off
  int64_t chunk = 0;   // 0: off
};
struct SoftmaxOut {
  View out;  // [B, Tq, H, V]
  View lse;  // [B, Tq, H], f32 (f64 for f64); natural logarithm
};
struct SoftmaxGrads {
  View dout, dlse;                 // incoming; absent = zero
  View dq, dk, dv, dbias, dsinks;  // results, in the shapes of the inputs; absent = not wanted
};

const Op& softmax_op();
Status softmax(const SoftmaxArgs& args, const SoftmaxOut& out, const Context& context);
// Reads out.out and out.lse of the forward.
Status softmax_backward(const SoftmaxArgs& args, const SoftmaxOut& out, const SoftmaxGrads& grads, const Context& context);
// Bytes of workspace the call needs, 0 for a call that would be refused.
int64_t softmax_workspace(const SoftmaxArgs& args, Pass pass, const Context& context);

// One or few tokens with a contiguous cache: writes k, v at positions lengths[b] .. lengths[b]+T-1, adds T to lengths, then
// attends causally over positions cache_start[b] .. lengths[b]-1.
struct SoftmaxDecodeArgs {
  View q;                 // [B, T, H, K]
  View k;                 // [B, T, Hkv, K]
  View v;                 // [B, T, Hkv, V]
  View k_cache, v_cache;  // [B, capacity, Hkv, K], [.., V]: written at the new positions
  View lengths;           // [B] i32 or i64: read, then increased by T
  View cache_start;       // optional [B]: first valid position of a left-padded cache; positions count from there
  View sinks;             // optional [H]
  Maybe scale;
  Window window;
  int64_t prefix = 0;
  double softcap = 0;
};
struct SoftmaxNoGrads {};
const Op& softmax_decode_op();
Status softmax_decode(const SoftmaxDecodeArgs& args, const SoftmaxOut& out, const Context& context);
int64_t softmax_decode_workspace(const SoftmaxDecodeArgs& args, const Context& context);

// Attention over a paged cache: token t of item b lies in page page_table[b][t / page] at row t % page. The newest tokens are
// already in the pages; entries of page_table past the last used page are never read.
struct SoftmaxPagedArgs {
  View q;                 // [B, Tq, H, K]
  View k_pages, v_pages;  // [P, page, Hkv, K], [P, page, Hkv, V]
  View page_table;        // [B, pages] i32 or i64
  View lengths;           // [B]
  View sinks;             // optional [H]
  Maybe scale;
  bool causal = false;
  Window window;
  int64_t prefix = 0;
  double softcap = 0;
};
const Op& softmax_paged_op();
Status softmax_paged(const SoftmaxPagedArgs& args, const SoftmaxOut& out, const Context& context);
int64_t softmax_paged_workspace(const SoftmaxPagedArgs& args, const Context& context);

// Joins attention over disjoint key sets; a part with lse = -inf is skipped whatever its out holds.
struct SoftmaxMergeArgs {
  View out_parts;  // [P, B, T, H, V]
  View lse_parts;  // [P, B, T, H] f32 (f64 for f64)
};
struct SoftmaxMergeGrads {
  View dout, dlse;              // incoming
  View dout_parts, dlse_parts;  // results
};
const Op& softmax_merge_op();
Status softmax_merge(const SoftmaxMergeArgs& args, const SoftmaxOut& out, const Context& context);
Status softmax_merge_backward(const SoftmaxMergeArgs& args, const SoftmaxOut& out, const SoftmaxMergeGrads& grads,
                              const Context& context);
int64_t softmax_merge_workspace(const SoftmaxMergeArgs& args, Pass pass, const Context& context);

LINNET_KERNELS(softmax, SoftmaxArgs, SoftmaxOut, SoftmaxGrads)
LINNET_KERNELS(softmax_decode, SoftmaxDecodeArgs, SoftmaxOut, SoftmaxNoGrads)
LINNET_KERNELS(softmax_paged, SoftmaxPagedArgs, SoftmaxOut, SoftmaxNoGrads)
// With the bf16 dot products of AVX512_BF16.
LINNET_KERNELS_IN(avx512_bf16, softmax, SoftmaxArgs, SoftmaxOut, SoftmaxGrads)
LINNET_KERNELS_IN(avx512_bf16, softmax_decode, SoftmaxDecodeArgs, SoftmaxOut, SoftmaxNoGrads)
LINNET_KERNELS_IN(avx512_bf16, softmax_paged, SoftmaxPagedArgs, SoftmaxOut, SoftmaxNoGrads)
LINNET_KERNELS(softmax_merge, SoftmaxMergeArgs, SoftmaxOut, SoftmaxMergeGrads)

// The largest finite |logit| of a prepared call, which its tolerances grow with (tolerance.h).
namespace ref {
double softmax_largest_logit(const SoftmaxArgs& args);
double softmax_decode_largest_logit(const SoftmaxDecodeArgs& args);
double softmax_paged_largest_logit(const SoftmaxPagedArgs& args);
}  // namespace ref

}  // namespace linnet
