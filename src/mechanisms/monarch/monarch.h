// monarch: softmax attention approximated by a Monarch matrix in work N sqrt(N), without training.
//
// Tokens stand in a grid: token n = (block n / b, slot n % b). The weight of query (l, j) for key (k, i) is L[j,k,l] R[k,j,i]:
// all queries of slot j share one distribution R[k,j,:] inside block k, and L says how much of it they take. With S = scale Q
// K^T alternating maximisation of <A, S> + entropy(A), `steps` times, from mean[k,j] = q[k,j]:
//
//   R[k,j,:] = softmax_i(z),  z_i = scale mean[k,j].k[k,i]            over the valid keys of block k
//   a[j,k]   = sum_i R k[k,i],   c[j,k] = sum_i R z - logsumexp_i z   (minus the entropy of R)
//   L[j,:,l] = softmax_k(beta),  beta = scale a[j,k].q[l,j] - c[j,k]  over the blocks with a valid key
//   mean[k,j] = sum_l W q[l,j],  W[j,k,:] = softmax_l(log L[j,k,:])   for the next step, over valid queries
//   out[l,j] = sum_k L[j,k,l] y[j,k],  y[j,k] = sum_i R v[k,i];   lse[l,j] = logsumexp_k beta
//
// Yaras et al. 2025 (arXiv 2505.18698), in the stable form: no epsilon, and a block without a valid key is left out. Strictly
// causal (one step, blocks from the front): earlier blocks as above, the own block exact, one softmax over both. Tiled
// (MonarchRT, arXiv 2602.12271): queries and keys in tiles of r x c tokens, factors per pair of tiles, L normalised over all.
#pragma once

#include "../../core/args.h"

namespace linnet {

enum class MonarchPad : int32_t { post, pre };

struct MonarchArgs {
  View q;              // [B, T, H, K]
  View k;              // [B, S, H, K], S = T
  View v;              // [B, S, H, V]
  View mask;           // optional [B, S] u8: 0 = not a valid token
  int64_t block = -1;  // tokens of a block; -1: the largest whole number whose square does not exceed T, at least 1
  int64_t steps = 1;
  MonarchPad pad = MonarchPad::post;  // which end of the sequence is filled up to whole blocks
  Maybe scale;                        // default K^-0.5
  bool causal = false;                // the strictly causal form: steps 1, pad post, no mask
};
struct MonarchOut {
  View out;  // [B, T, H, V]
  View lse;  // [B, T, H], f32 (f64 for f64): a lower bound of the exact one
};
struct MonarchGrads {
  View dout, dlse;  // incoming; absent = zero
  View dq, dk, dv;  // results; absent = not wanted
};
const Op& monarch_op();
Status monarch(const MonarchArgs& args, const MonarchOut& out, const Context& context);
// Reads nothing of the forward: `out` may be empty.
Status monarch_backward(const MonarchArgs& args, const MonarchOut& out, const MonarchGrads& grads, const Context& context);
int64_t monarch_workspace(const MonarchArgs& args, Pass pass, const Context& context);

// The tiled form; queries and keys may differ in length, the last tile of each is filled up behind.
struct MonarchTiledArgs {
  View q;     // [B, T, H, K]
  View k;     // [B, S, H, K]
  View v;     // [B, S, H, V]
  View mask;  // optional [B, S] u8: 0 = not a valid key
  int64_t tile_rows = 1, tile_cols = 1;
  int64_t steps = 1;
  int64_t group = 0;  // g > 0: tile a sees tile f when f / g <= a / g; 0: all
  Maybe scale;
  bool causal = false;  // stays false: inside a tile attention runs both ways
};
const Op& monarch_tiled_op();
Status monarch_tiled(const MonarchTiledArgs& args, const MonarchOut& out, const Context& context);
Status monarch_tiled_backward(const MonarchTiledArgs& args, const MonarchOut& out, const MonarchGrads& grads,
                              const Context& context);
int64_t monarch_tiled_workspace(const MonarchTiledArgs& args, Pass pass, const Context& context);

// The strictly causal form token by token. The last, unfinished block is kept as it is; of a finished one the representatives
// of its slots remain. A step reads `block` rows at most and those of its own slot: T / block + block rows instead of T.
struct MonarchDecodeArgs {
  View q;                 // [B, T, H, K]
  View k;                 // [B, T, H, K]
  View v;                 // [B, T, H, V]
  View q_block, k_block;  // [B, block, H, K]: the tokens of the unfinished block
  View v_block;           // [B, block, H, V]
  View a;                 // [B, H, block, M, K] f32: a[j, k] of finished blocks k
  View c;                 // [B, H, block, M] f32
  View y;                 // [B, H, block, M, V] f32
  View lengths;           // [B]: tokens so far; increased by T
  Maybe scale;
};
struct MonarchNoGrads {};
const Op& monarch_decode_op();
Status monarch_decode(const MonarchDecodeArgs& args, const MonarchOut& out, const Context& context);
int64_t monarch_decode_workspace(const MonarchDecodeArgs& args, const Context& context);

LINNET_KERNELS(monarch, MonarchArgs, MonarchOut, MonarchGrads)
LINNET_KERNELS(monarch_tiled, MonarchTiledArgs, MonarchOut, MonarchGrads)
LINNET_KERNELS(monarch_decode, MonarchDecodeArgs, MonarchOut, MonarchNoGrads)
LINNET_CUDA_KERNELS(monarch_decode, MonarchDecodeArgs, MonarchOut, MonarchNoGrads)

// The largest |logit| of a prepared call, which its tolerances grow with (tolerance.h).
namespace ref {
double monarch_largest_logit(const MonarchArgs& args);
double monarch_tiled_largest_logit(const MonarchTiledArgs& args);
double monarch_decode_largest_logit(const MonarchDecodeArgs& args);
}  // namespace ref

}  // namespace linnet
