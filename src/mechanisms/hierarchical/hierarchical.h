// hierarchical: softmax attention over a tree. For sibling subtrees A, B all weights from a leaf of A to a leaf of B are one
// shared number; among the matrices tied in this way it is the one nearest to softmax (in summed KL divergence), in O(T b)
// work.
//
// In every family (the children c of a node A; n_c leaves under c; rho = mean over the leaves):
//
//   S[c,c'] = scale rho_q(c).rho_k(c') + pos(c).pos(c') + log n_c',   S[c,c] = g(c)
//   Lambda_c = logsumexp_c' S[c,c'],   g(A) = sum_c (n_c / n_A) Lambda_c,   W = exp(S - Lambda)
//   O(c) = O(A) + M(A) sum_{c' != c} W[c,c'] rho_v(c'),   M(c) = M(A) W[c,c];   root: M = 1, O = 0
//   leaf:  g = -inf, or scale q.k + pos.pos with include_self;   out = O + M v
//
// Amizadeh et al. 2025 (arXiv 2509.15448); docs/mechanisms/hierarchical.md tells what was corrected. tie = block is this form
// and not causal: it pools queries of whole subtrees. prefix is its causal form: row i of block on the tree cut behind token i.
// row pools keys and values only: one softmax over all siblings on the path, causal or not.
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class HierarchicalTie : int32_t { block, prefix, row };

struct HierarchicalArgs {
  View q;              // [B, T, H, K]
  View k;              // [B, T, H, K]
  View v;              // [B, T, H, V]
  View parent;         // optional [nodes]: nodes 0 .. T-1 are the tokens, a parent has a larger number, the root is last: -1
  View level_starts;   // optional [windows]: for each level the first child of every window, levels one after the other
  View level_offsets;  // with level_starts, [levels+1]: where each level begins in level_starts
  View pos;            // optional [nodes, H, E]: position of every node in its family
  View mask;           // optional [B, T] u8: tokens with 0 are removed from the tree
  HierarchicalTie tie = HierarchicalTie::block;
  bool include_self = false;
  bool causal = false;
  Maybe scale;           // default K^-0.5
  Sizes branching;       // windows of so many nodes, from the bottom; what is left belongs to one root
  int64_t arity = 8;     // when no other tree is given: windows of this many nodes, level by level, until one is left
  int64_t kl_rows = 64;  // kl from so many evenly spaced rows; 0: all of them
};
struct HierarchicalOut {
  View out;     // [B, T, H, V]
  View energy;  // [B, H] f32: mean log-normaliser of the rows, g(root); prefix: that of the last token
  View kl;      // [B, H] f32: mean over rows of KL(tied row || softmax row); costs T K per row of kl_rows
};
struct HierarchicalGrads {
  View dout, denergy;     // incoming; absent = zero
  View dq, dk, dv, dpos;  // results
};
const Op& hierarchical_op();
Status hierarchical(const HierarchicalArgs& args, const HierarchicalOut& out, const Context& context);
Status hierarchical_backward(const HierarchicalArgs& args, const HierarchicalOut& out, const HierarchicalGrads& grads,
                             const Context& context);
int64_t hierarchical_workspace(const HierarchicalArgs& args, Pass pass, const Context& context);

// tie = prefix and tie = row, causal, token by token. A path has `levels` inner nodes, the root the last: of each the finished
// children are kept (mean key, mean value, leaves), and of the unfinished subtree sums. A level that never branches changes
// nothing, so too many levels do no harm; the root never ends, its list grows by one entry per finished child.
struct HierarchicalDecodeArgs {
  View q;               // [B, T, H, K]
  View k;               // [B, T, H, K]
  View v;               // [B, T, H, V]
  View list_k, list_v;  // [B, H, levels, width, K], [.., V] f32: finished children of the open node of each level
  View list_n;          // [B, levels, width] f32: their leaves
  View list_count;      // [B, levels]: how many there are
  View sum_q, sum_k;    // [B, H, levels, K] f32: sums over the leaves of the open nodes (row: sum_q is not used)
  View sum_v;           // [B, H, levels, V] f32
  View sum_g;           // [B, H, levels] f32: sum over finished children of n Lambda (row: not used)
  View open_n;          // [B, levels] f32: leaves of the open nodes
  View lengths;         // [B]: tokens so far; increased by T
  View close;           // optional [B, T]: how many inner levels end behind each token; absent: windows of `arity`
  HierarchicalTie tie = HierarchicalTie::prefix;
  bool include_self = true;
  Maybe scale;
  int64_t arity = 8;
};
struct HierarchicalDecodeOut {
  View out;  // [B, T, H, V]
};
struct HierarchicalNoGrads {};
const Op& hierarchical_decode_op();
Status hierarchical_decode(const HierarchicalDecodeArgs& args, const HierarchicalDecodeOut& out, const Context& context);
int64_t hierarchical_decode_workspace(const HierarchicalDecodeArgs& args, const Context& context);

// How many inner levels end behind token t of batch row b, which is the `at`-th of its sequence.
LINNET_INLINE int64_t hierarchical_closing(const HierarchicalDecodeArgs& args, int64_t b, int64_t t, int64_t at) {
  const View& close = args.close;
  if (close.given()) {
    const int64_t offset = b * close.stride[0] + t * close.stride[1];
    return close.dtype == Dtype::i32 ? static_cast<const int32_t*>(close.data)[offset]
                                     : static_cast<const int64_t*>(close.data)[offset];
  }
  int64_t levels = 0;
  for (int64_t size = at + 1; levels + 1 < args.list_count.size[1] && size % args.arity == 0; size /= args.arity) ++levels;
  return levels;
}

LINNET_KERNELS(hierarchical, HierarchicalArgs, HierarchicalOut, HierarchicalGrads)
LINNET_KERNELS(hierarchical_decode, HierarchicalDecodeArgs, HierarchicalDecodeOut, HierarchicalNoGrads)
LINNET_CUDA_KERNELS(hierarchical, HierarchicalArgs, HierarchicalOut, HierarchicalGrads)
LINNET_CUDA_KERNELS(hierarchical_decode, HierarchicalDecodeArgs, HierarchicalDecodeOut, HierarchicalNoGrads)

namespace ref {
double hierarchical_largest_logit(const HierarchicalArgs& args);
double hierarchical_decode_largest_logit(const HierarchicalDecodeArgs& args);
}  // namespace ref

}  // namespace linnet
