// `hierarchical` on the GPU: its memory, and the order of its kernels (hierarchical.cu).
#include "mechanisms/hierarchical/cuda/hierarchical.h"
#include "mechanisms/hierarchical/hierarchical_tree.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(hierarchical)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "hierarchical/cuda/hierarchical";

HierarchicalCall call_of(const HierarchicalArgs& args) {
  HierarchicalCall c;
  c.q = strided(args.q), c.k = strided(args.k), c.v = strided(args.v), c.pos = strided(args.pos), c.mask = strided(args.mask);
  c.B = args.q.size[0], c.T = args.q.size[1], c.H = args.q.size[2], c.K = args.q.size[3], c.V = args.v.size[3];
  c.E = args.pos.given() ? args.pos.size[2] : 0;
  c.pos_nodes = args.pos.given() ? args.pos.size[0] : 0;
  c.tie = args.tie;
  c.include_self = args.include_self;
  c.causal = args.causal;
  c.scale = args.scale.value_or(c.K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(c.K)));
  c.kl_rows = args.kl_rows == 0 || args.kl_rows > c.T ? c.T : args.kl_rows;
  // The levels; a token that is alone gets a root, which changes nothing.
  int64_t nodes = c.T;
  c.nodes[0] = c.span[0] = 1;
  c.nodes[0] = nodes;
  while (nodes > 1 || (c.depth == 0 && nodes == 1)) {
    const int l = ++c.depth;
    const bool listed = args.branching.count > 0;
    const int64_t size = nodes == 1                  ? 1
                         : !listed                   ? args.arity
                         : l <= args.branching.count ? args.branching.value[l - 1]
                                                     : nodes;
    c.size[l] = size < nodes ? size : nodes;
    c.base[l] = c.base[l - 1] + nodes;
    c.span[l] = c.span[l - 1] * c.size[l];
    nodes = divide_up(nodes, size);
    c.nodes[l] = nodes;
  }
  c.N = c.base[c.depth] + c.nodes[c.depth];
  c.I = c.N - c.T;
  for (int l = 0; l <= c.depth; ++l) {
    const int64_t rows = c.tie == HierarchicalTie::block ? c.nodes[l] : c.T;
    c.rows_at[l] = c.all_rows;
    c.all_rows += rows;
    if (l == c.depth) break;
    c.pairs_at[l] = c.pairs;
    c.pairs += rows * c.size[l + 1];
  }
  return c;
}
void cut(Arena& arena, HierarchicalCall* c, bool kl, Pass pass) {
  const int64_t units = c->B * c->H;
  const bool block = c->tie == HierarchicalTie::block, prefix = c->tie == HierarchicalTie::prefix;
  const auto take = [&](int64_t count) { return arena.take<double>(units * count); };
  c->n = arena.take<float>(units * c->N);
  if (c->tie != HierarchicalTie::row) c->mean_q = take(c->I * c->K);
  c->mean_k = take(c->I * c->K);
  c->mean_v = take(c->I * c->V);
  c->w = take(c->pairs);
  c->lambda = take(c->all_rows);
  c->g = take(c->all_rows);
  c->mass = take(c->all_rows);
  c->total = take(3);
  if (kl) c->kls = take(2 * c->kl_rows);
  if (prefix) {
    c->count = take(c->all_rows);
    c->sums = take(c->T * c->K);
  }
  if (block) c->node_out = take(c->I * c->V);
  if (pass == Pass::forward) return;
  c->ds = take(c->pairs);
  c->r = take(c->all_rows);
  c->dg = take(c->all_rows);
  c->dkv = take(c->N * (c->K + c->V));
  if (block) c->dquery = take(c->N * c->K);
  if (prefix) {
    c->later = take(c->N);
    c->dquery = take(c->T * c->K);
    c->steps = take(c->T * c->K);
  }
  c->dpos = arena.take<float>(c->B * c->pos_nodes * c->H * c->E);
}

struct Runner {
  const Launch& launch;
  const HierarchicalCall& c;

  int64_t rows(int l) const { return c.tie == HierarchicalTie::block ? c.nodes[l] : c.T; }
  Grid grid(int64_t elements) const { return {divide_up(c.B * c.H * elements, 256)}; }
  void at_level(const char* kernel, int64_t elements, int l) const {
    enqueue(launch, {kImage, kernel, 256}, grid(elements), c, l);
  }
  void once(const char* kernel, int64_t elements) const { enqueue(launch, {kImage, kernel, 256}, grid(elements), c); }

  // Everything but the values' way down.
  void weights() const {
    const bool row = c.tie == HierarchicalTie::row, prefix = c.tie == HierarchicalTie::prefix;
    once("hierarchical_leaves", c.T);
    for (int l = 1; l <= c.depth; ++l) at_level("hierarchical_pool", c.nodes[l] * (2 * c.K + c.V + 1), l);
    for (int l = 0; l < c.depth; ++l) {
      if (prefix) at_level("hierarchical_sums", c.T * c.K, l);
      at_level("hierarchical_logits", rows(l) * c.size[l + 1], l);
      if (row) continue;
      at_level("hierarchical_softmax", rows(l), l);
      at_level("hierarchical_raise", rows(l + 1), l + 1);
    }
    if (row) once("hierarchical_row_softmax", c.T);
    if (prefix) once("hierarchical_masses", c.T);
    enqueue(launch, {kImage, "hierarchical_total", 256}, {c.B * c.H}, c);
  }
};

}  // namespace

const char* hierarchical_refuses(const HierarchicalArgs& args, Pass) {
  if (const char* reason = refuses_f64(args.q.dtype)) return reason;
  if (args.parent.given() || args.level_starts.given()) {
    return "the CUDA kernels take trees of windows (branching or arity), not parent or level_starts";
  }
  return nullptr;
}
int64_t hierarchical_workspace(const HierarchicalArgs& args, Pass pass, int) {
  Arena arena;
  HierarchicalCall c = call_of(args);
  cut(arena, &c, true, pass);
  return arena.used();
}
void hierarchical_forward(const HierarchicalArgs& args, const HierarchicalOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  HierarchicalCall c = call_of(args);
  cut(arena, &c, true, Pass::forward);
  c.out = strided(out.out), c.energy = strided(out.energy), c.kl = strided(out.kl);
  const Runner run{launch, c};
  run.weights();
  if (c.tie == HierarchicalTie::block) {
    for (int l = c.depth - 1; l >= 0; --l) run.at_level("hierarchical_down", c.nodes[l] * c.V, l);
  } else {
    run.once("hierarchical_out", c.T * c.V);
  }
  if (!out.kl.given()) return;
  enqueue(launch, {kImage, "hierarchical_kl", 256}, {c.B * c.H * c.kl_rows}, c);
  run.once("hierarchical_kl_mean", 1);
}
void hierarchical_backward(const HierarchicalArgs& args, const HierarchicalOut&, const HierarchicalGrads& grads,
                           const Launch& launch) {
  Arena arena(launch.workspace);
  HierarchicalCall c = call_of(args);
  cut(arena, &c, true, Pass::backward);
  c.dout = strided(grads.dout), c.denergy = strided(grads.denergy);
  c.dq = strided(grads.dq), c.dk = strided(grads.dk), c.dv = strided(grads.dv);
  const Runner run{launch, c};
  const bool block = c.tie == HierarchicalTie::block, prefix = c.tie == HierarchicalTie::prefix;
  run.weights();
  for (int l = c.depth - 1; block && l >= 0; --l) run.at_level("hierarchical_down_masses", c.nodes[l], l);
  for (int l = 0; l < c.depth; ++l) {
    run.at_level("hierarchical_reads", run.rows(l) * c.size[l + 1], l);
    if (!block) continue;
    run.at_level("hierarchical_returns", c.nodes[l], l);
    run.at_level("hierarchical_pool_dout", c.nodes[l + 1] * c.V, l + 1);
  }
  if (!block) run.once("hierarchical_token_returns", c.T);
  for (int l = c.depth - 1; (block || prefix) && l >= 0; --l) {
    if (prefix) run.at_level("hierarchical_later", c.nodes[l], l);
    run.at_level("hierarchical_slopes", run.rows(l), l);
  }
  if (grads.dq.given()) {
    for (int l = c.depth - 1; block && l >= 0; --l) run.at_level("hierarchical_queries", c.nodes[l] * c.K, l);
    if (c.tie == HierarchicalTie::row) run.at_level("hierarchical_queries", c.T * c.K, 0);
    for (int l = 0; prefix && l < c.depth; ++l) {
      run.at_level("hierarchical_queries", c.T * c.K, l);
      run.at_level("hierarchical_suffix", c.nodes[l] * c.K, l);
    }
  }
  if (grads.dk.given() || grads.dv.given()) {
    for (int l = 0; l < c.depth; ++l) {
      if (prefix) run.at_level("hierarchical_sums", c.T * c.K, l);  // again: they stood at the last level
      run.at_level("hierarchical_gather", c.nodes[l] * (c.K + c.V), l);
    }
    for (int l = c.depth - 1; l >= 0; --l) run.at_level("hierarchical_spread", c.nodes[l] * (c.K + c.V), l);
  }
  if (!grads.dpos.given()) return;
  for (int l = 0; l <= c.depth; ++l) run.at_level("hierarchical_positions", c.nodes[l] * c.E, l);
  sum_parts(launch, c.dpos, c.B, grads.dpos);
}

}  // namespace linnet::cuda
