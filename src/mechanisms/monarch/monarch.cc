#include "monarch.h"

#include "core/op.h"
#include "cuda/dispatch.h"
#include "grid.h"

namespace linnet {
namespace {

Status check_monarch(const MonarchArgs& args, const Dims& dims) {
  if (dims["S"] != dims["T"]) {
    return bad_input("monarch: k has " + std::to_string(dims["S"]) + " tokens, expected " + std::to_string(dims["T"]) +
                     " (same as q; monarch_tiled takes different lengths)");
  }
  if (args.block == 0) return bad_input("monarch: block is 0, expected at least 1 (or -1: about the square root of T)");
  if (!args.causal) return {};
  if (args.steps != 1) {
    return bad_input("monarch: steps is " + std::to_string(args.steps) +
                     ", expected 1 when causal: a second step would let later tokens into earlier blocks");
  }
  if (args.pad != MonarchPad::post) return bad_input("monarch: pad is pre, expected post when causal");
  if (args.mask.given()) return bad_input("monarch: mask is given, but the causal form has no mask");
  return {};
}

Status check_tiled(const MonarchTiledArgs& args, const Dims&) {
  if (args.causal) {
    return bad_input(
        "monarch_tiled: causal is 1, expected 0: inside a tile attention runs both ways; group makes tiles causal");
  }
  return {};
}

Status check_decode(const MonarchDecodeArgs& args, const Dims& dims) {
  const int64_t block = dims["block"], capacity = block * dims["M"], tokens = dims["T"];
  if (block < 1) return bad_input("monarch_decode: q_block has 0 tokens, expected at least 1");
  if (args.lengths.device == Device::cuda) return {};  // the kernel leaves a state without room alone
  for (int64_t b = 0; b < dims["B"]; ++b) {
    const int64_t length = index_value(args.lengths, b);
    if (length + tokens <= capacity) continue;
    return bad_input("monarch_decode: the state of item " + std::to_string(b) + " holds " + std::to_string(length) + " of " +
                     std::to_string(capacity) + " tokens, no room for " + std::to_string(tokens) + " more");
  }
  return {};
}

// Multiply-adds of the page: block programs 3 widths x cols per place (2 before the last step), slot programs 2 x rows.
Cost cost_of(const MonarchGrid& g, Pass pass) {
  const double K = static_cast<double>(g.K), V = static_cast<double>(g.V), heads = static_cast<double>(g.B * g.H);
  const double cols = static_cast<double>(g.cols), rows = static_cast<double>(g.rows), steps = static_cast<double>(g.steps);
  double pairs = 0;  // visible pairs of tiles
  for (int64_t a = 0; a < g.q_tiles; ++a) {
    const int64_t seen = g.group == 0 ? g.k_tiles : (a / g.group + 1) * g.group;
    pairs += static_cast<double>(seen < g.k_tiles ? seen : g.k_tiles);
  }
  const double places = pairs * rows * cols, half = g.causal ? 0.5 : 1;
  const double block = cols * (2 * K + V) + (g.causal ? 0.5 * cols * (K + V) : 0), slot = half * rows * (K + V);
  const double forward = places * ((steps - 1) * 2 * K * (cols + rows) + block + slot);
  const double element = static_cast<double>(dtype_size(g.q.dtype));
  const double bytes = element * heads * (static_cast<double>(g.T) * (K + V) + static_cast<double>(g.S) * (K + V));
  if (pass == Pass::forward) return {2 * heads * forward, bytes};
  return {2 * heads * 2.5 * forward, 2 * bytes};
}
Cost cost_monarch(const MonarchArgs& args, const Dims&, Pass pass) { return cost_of(monarch_grid(args), pass); }
Cost cost_tiled(const MonarchTiledArgs& args, const Dims&, Pass pass) { return cost_of(monarch_grid(args), pass); }
// Representatives of one slot and the unfinished block; a finished block costs three products of block x block once per block.
Cost cost_decode(const MonarchDecodeArgs& args, const Dims& dims, Pass) {
  const double K = static_cast<double>(dims["K"]), V = static_cast<double>(dims["V"]),
               block = static_cast<double>(dims["block"]);
  double rows = 0;
  for (int64_t b = 0; b < dims["B"]; ++b) {
    const double length = args.lengths.device == Device::cuda ? block * static_cast<double>(dims["M"])  // stays on the GPU
                                                              : static_cast<double>(index_value(args.lengths, b));
    rows += block > 0 ? length / block + block : 0;
  }
  const double tokens = static_cast<double>(dims["T"] * dims["H"]);
  return {2 * tokens * (rows * (K + V) + static_cast<double>(dims["B"]) * block * (2 * K + V)), 4 * tokens * rows * (K + V)};
}

}  // namespace

// clang-format off
const Op& monarch_op() {
  using A = MonarchArgs;
  using O = MonarchOut;
  using G = MonarchGrads;
  static const Op op =
      Declare<A, O, G>("monarch", "monarch", "softmax attention approximated by a Monarch matrix, in N sqrt(N)")
          .equation("A[(l,j),(k,i)] = L[j,k,l] R[k,j,i];  R = softmax_i(scale mean[k,j].k[k,i]);  L = softmax_k(scale a[j,k].q[l,j] + entropy(R))")
          .decode("monarch_decode")
          .input("q", &A::q, "B T H K", "queries").grad(&G::dq)
          .input("k", &A::k, "B S H K", "keys, as many as queries").grad(&G::dk)
          .input("v", &A::v, "B S H V", "values").grad(&G::dv)
          .input("mask", &A::mask, "B S", "1: valid token; blocks without one are left out").element(Element::mask).optional()
          .output("out", &O::out, "B T H V", "weighted averages of the values").grad(&G::dout)
          .output("lse", &O::lse, "B T H", "natural logarithm of each row's normaliser, a lower bound of the exact one")
          .element(Element::acc).values(Values::logits).optional().grad(&G::dlse)
          .option("block", &A::block, -1, kAnyCount, "tokens of a block; -1: the largest whole number whose square is at most T")
          .option("steps", &A::steps, 1, 1000, "alternating updates of the two factors; 1 to 3 in practice").sampled_to(2)
          .option("pad", &A::pad, {"post", "pre"}, "the end at which the sequence is filled up to whole blocks")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies q.k; default K^-0.5")
          .option("causal", &A::causal, "the strictly causal form: one step, the own block exact")
          .check<check_monarch>()
          .largest_logit<ref::monarch_largest_logit>()
          .cost<cost_monarch>()
          .bench("B=1 T=256|1024|4096|16384 S=T H=8 K=64 V=K dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=4096 S=T H=8 K=64 V=K dtype=bf16 pass=fwd|fwd+bwd")
          .bench("B=1 T=4096 S=T H=8 K=64 V=K steps=3 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=1 T=4096 S=T H=8 K=64 V=K causal=1 dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=8 T=197 S=T H=12 K=64 V=K block=14 pad=pre steps=2 dtype=f32 pass=fwd")
          .gpu_bench("B=256 T=256 S=T H=12 K=64 V=K dtype=f16 pass=fwd")
          .gpu_bench("B=1|16 T=4096 S=T H=12 K=64 V=K dtype=f16 pass=fwd")
          .gpu_bench("B=1|4 T=16384 S=T H=12 K=64 V=K dtype=f16 pass=fwd")
          .gpu_bench("B=16 T=4096 S=T H=12 K=64 V=K dtype=bf16 pass=fwd")
          .gpu_bench("B=16 T=4096 S=T H=6 K=128 V=K dtype=bf16 pass=fwd")
          .gpu_bench("B=1 T=4096 S=T H=12 K=64 V=K dtype=f32 pass=fwd")
          .gpu_bench("B=1 T=4096 S=T H=12 K=64 V=K steps=3 dtype=f16 pass=fwd")
          .gpu_bench("B=16 T=4096 S=T H=12 K=64 V=K dtype=f16 pass=fwd+bwd")
          .compare("", "state.block=sqrt state.M=sqrt")
          .compare("3 steps", "steps=3")
          .compare("causal", "causal=1 state.block=sqrt state.M=sqrt")
          .impl<ref::monarch_forward, ref::monarch_backward, ref::monarch_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(monarch)
          .cuda_rows<cuda::MonarchTable, cuda::MonarchRow::plain, cuda::MonarchRow::tile, cuda::MonarchRow::cluster, cuda::MonarchRow::head>();
  return op;
}

const Op& monarch_tiled_op() {
  using A = MonarchTiledArgs;
  using O = MonarchOut;
  using G = MonarchGrads;
  static const Op op =
      Declare<A, O, G>("monarch_tiled", "monarch", "Monarch attention in tiles: block-causal, lengths may differ")
          .equation("as monarch for each pair of tiles, with L normalised over the blocks of all visible tiles")
          .input("q", &A::q, "B T H K", "queries").grad(&G::dq)
          .input("k", &A::k, "B S H K", "keys").grad(&G::dk)
          .input("v", &A::v, "B S H V", "values").grad(&G::dv)
          .input("mask", &A::mask, "B S", "1: valid key; blocks without one are left out").element(Element::mask).optional()
          .output("out", &O::out, "B T H V", "weighted averages of the values").grad(&G::dout)
          .output("lse", &O::lse, "B T H", "natural logarithm of each row's normaliser, a lower bound of the exact one")
          .element(Element::acc).values(Values::logits).optional().grad(&G::dlse)
          .option("tile_rows", &A::tile_rows, 1, kAnyCount, "blocks of a tile")
          .option("tile_cols", &A::tile_cols, 1, kAnyCount, "tokens of a block")
          .option("steps", &A::steps, 1, 1000, "alternating updates of the two factors").sampled_to(2)
          .option("group", &A::group, 0, kAnyCount, "g > 0: query tile a sees key tile f when f // g <= a // g; 0: all tiles")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies q.k; default K^-0.5")
          .option("causal", &A::causal, "must stay false").unsampled()
          .check<check_tiled>()
          .largest_logit<ref::monarch_tiled_largest_logit>()
          .cost<cost_tiled>()
          .bench("B=1 T=4096 S=T H=8 K=64 V=K tile_rows=32 tile_cols=32 group=0|1 dtype=f32 pass=fwd|fwd+bwd")
          .compare("tiles of 64", "tile_rows=8 tile_cols=8")
          .impl<ref::monarch_tiled_forward, ref::monarch_tiled_backward, ref::monarch_tiled_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(monarch_tiled)
          .cuda_rows<cuda::MonarchTiledTable, cuda::MonarchRow::plain, cuda::MonarchRow::tile, cuda::MonarchRow::cluster, cuda::MonarchRow::head>();
  return op;
}

const Op& monarch_decode_op() {
  using A = MonarchDecodeArgs;
  using O = MonarchOut;
  static const Op op =
      Declare<A, O, MonarchNoGrads>("monarch_decode", "monarch", "the strictly causal Monarch form token by token")
          .equation("finished blocks k through a, c, y of the token's slot, the unfinished block exactly, one softmax over both")
          .input("q", &A::q, "B T H K", "queries of the new tokens")
          .input("k", &A::k, "B T H K", "keys of the new tokens")
          .input("v", &A::v, "B T H V", "values of the new tokens")
          .input("q_block", &A::q_block, "B block H K", "queries of the unfinished block").mutated()
          .input("k_block", &A::k_block, "B block H K", "keys of the unfinished block").mutated()
          .input("v_block", &A::v_block, "B block H V", "values of the unfinished block").mutated()
          .input("a", &A::a, "B H block M K", "mean keys of finished blocks").element(Element::acc).mutated()
          .input("c", &A::c, "B H block M", "minus the entropies of finished blocks").element(Element::acc).mutated()
          .input("y", &A::y, "B H block M V", "mean values of finished blocks").element(Element::acc).mutated()
          .input("lengths", &A::lengths, "B", "tokens so far; increased by T")
          .element(Element::index).values(Values::lengths, "block*M").mutated()
          .output("out", &O::out, "B T H V", "weighted averages of the values")
          .output("lse", &O::lse, "B T H", "natural logarithm of each row's normaliser").element(Element::acc).values(Values::logits).optional()
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies q.k; default K^-0.5")
          .check<check_decode>()
          .largest_logit<ref::monarch_decode_largest_logit>()
          .cost<cost_decode>()
          .bench("B=1 T=1 H=32 K=128 V=K block=64 M=64 lengths=4000 dtype=f32|bf16 pass=fwd")
          .gpu_bench("B=1|64 T=1 H=32 K=128 V=K block=64 M=64 lengths=4000 dtype=bf16 pass=fwd")
          .impl<ref::monarch_decode_forward, nullptr, ref::monarch_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(monarch_decode)
          .cuda<cuda::monarch_decode_forward, nullptr, cuda::monarch_decode_workspace, cuda::monarch_decode_refuses>();
  return op;
}
// clang-format on

Status monarch(const MonarchArgs& args, const MonarchOut& out, const Context& context) {
  return run(monarch_op(), Pass::forward, &args, &out, nullptr, context);
}
Status monarch_backward(const MonarchArgs& args, const MonarchOut& out, const MonarchGrads& grads, const Context& context) {
  return run(monarch_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t monarch_workspace(const MonarchArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(monarch_op(), pass, &args, context);
}
Status monarch_tiled(const MonarchTiledArgs& args, const MonarchOut& out, const Context& context) {
  return run(monarch_tiled_op(), Pass::forward, &args, &out, nullptr, context);
}
Status monarch_tiled_backward(const MonarchTiledArgs& args, const MonarchOut& out, const MonarchGrads& grads,
                              const Context& context) {
  return run(monarch_tiled_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t monarch_tiled_workspace(const MonarchTiledArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(monarch_tiled_op(), pass, &args, context);
}
Status monarch_decode(const MonarchDecodeArgs& args, const MonarchOut& out, const Context& context) {
  return run(monarch_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t monarch_decode_workspace(const MonarchDecodeArgs& args, const Context& context) {
  return workspace_bytes(monarch_decode_op(), Pass::forward, &args, context);
}

}  // namespace linnet
