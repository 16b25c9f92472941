#include "hierarchical.h"

#include <vector>

#include "core/op.h"
#include "hierarchical_tree.h"

namespace linnet {
namespace {

// Every node must cover consecutive tokens.
Status check_consecutive(const HierarchicalArgs& args) {
  if (!args.parent.given()) return {};
  const int64_t T = args.q.size[1], N = args.parent.size[0];
  std::vector<int64_t> first(static_cast<size_t>(N), T), last(first.size(), -1), count(first.size(), 0);
  for (int64_t i = 0; i < N; ++i) {
    const auto x = static_cast<size_t>(i);
    if (i < T) first[x] = last[x] = i, count[x] = 1;
    if (last[x] - first[x] + 1 != count[x]) {
      return bad_input("hierarchical: the node " + std::to_string(i) + " covers " + std::to_string(count[x]) +
                       " tokens between " + std::to_string(first[x]) + " and " + std::to_string(last[x]) +
                       ", expected consecutive ones when causal");
    }
    const int64_t parent = index_value(args.parent, i);
    if (parent < 0) break;
    const auto p = static_cast<size_t>(parent);
    first[p] = first[x] < first[p] ? first[x] : first[p];
    last[p] = last[x] > last[p] ? last[x] : last[p];
    count[p] += count[x];
  }
  return {};
}

Status check_hierarchical(const HierarchicalArgs& args, const Dims& dims) {
  const bool pooled = args.tie != HierarchicalTie::row;
  if (args.tie == HierarchicalTie::prefix && !args.causal) return bad_input("hierarchical: tie is prefix, which needs causal");
  if (args.causal && pooled && !args.include_self) {
    return bad_input(std::string("hierarchical: causal with tie ") + (args.tie == HierarchicalTie::block ? "block" : "prefix") +
                     " needs include_self: the first token of a family has nothing else to attend to");
  }
  LINNET_TRY(hierarchical_check_tree(args));
  if (args.pos.given() && dims["nodes"] != hierarchical_nodes(args)) {
    return bad_input("hierarchical: pos has " + std::to_string(dims["nodes"]) + " nodes, expected " +
                     std::to_string(hierarchical_nodes(args)) + " (those of the tree)");
  }
  return args.causal ? check_consecutive(args) : Status();
}

// Pairs in families (block), or of tokens and nodes (prefix, row), by counting them.
Cost cost_hierarchical(const HierarchicalArgs& args, const Dims& dims, Pass pass) {
  const int64_t N = hierarchical_nodes(args), T = dims["T"];
  std::vector<char> memory;
  Arena count;
  hierarchical_tree(args, count, false);
  memory.resize(static_cast<size_t>(count.used()) + 128);
  Arena arena(memory.data());
  const HierarchicalTree tree = hierarchical_tree(args, arena, true);
  double pairs = 0;
  for (int64_t x = T; x < N; ++x) {
    const double family = static_cast<double>(tree.family(x));
    if (args.tie == HierarchicalTie::block) {
      pairs += family * family;
    } else {
      for (int64_t i = 0; i < tree.family(x); ++i) {
        const int64_t c = tree.children(x)[i];
        pairs += (family - 1) * static_cast<double>(tree.last[c] - tree.first[c] + 1) * (args.causal ? 0.5 : 1);
      }
    }
  }
  const double heads = static_cast<double>(dims["B"] * dims["H"]), K = static_cast<double>(dims["K"] + dims["E"]);
  const double V = static_cast<double>(dims["V"]), tokens = static_cast<double>(T);
  const double element = static_cast<double>(dtype_size(args.q.dtype)), bytes = heads * tokens * (2 * K + 2 * V) * element;
  const double forward = heads * (pairs * ((args.tie == HierarchicalTie::block ? 4 : 2) * K + 2 * V) + 3 * tokens * (K + V));
  return pass == Pass::forward ? Cost{forward, bytes} : Cost{3 * forward, 2 * bytes};
}

}  // namespace

// clang-format off
const Op& hierarchical_op() {
  using A = HierarchicalArgs;
  using O = HierarchicalOut;
  using G = HierarchicalGrads;
  static const Op op =
      Declare<A, O, G>("hierarchical", "hierarchical", "attention over a tree of tokens, the nearest to softmax with tied weights")
          .equation("S[c,c'] = scale rho_q(c).rho_k(c') + log n_c', S[c,c] = g(c);  g(A) = sum_c n_c/n_A logsumexp S[c,:];  out from the root down")
          .input("q", &A::q, "B T H K", "queries").grad(&G::dq)
          .input("k", &A::k, "B T H K", "keys").grad(&G::dk)
          .input("v", &A::v, "B T H V", "values").grad(&G::dv)
          .input("parent", &A::parent, "nodes", "the tree: parent of each node, tokens first, children before parents, -1 for the root, the last")
          .element(Element::index).values(Values::tree, "T").optional()
          .input("level_starts", &A::level_starts, "windows", "the tree by levels: first child of every window, levels one after the other")
          .element(Element::index).optional()
          .input("level_offsets", &A::level_offsets, "levels+1", "where each level begins in level_starts").element(Element::index).optional()
          .input("pos", &A::pos, "nodes H E", "position of every node in its family").element(Element::param).optional().grad(&G::dpos)
          .input("mask", &A::mask, "B T", "tokens with 0 are removed from the tree").element(Element::mask).optional()
          .output("out", &O::out, "B T H V", "weighted averages of the values").grad(&G::dout)
          .output("energy", &O::energy, "B H", "mean log-normaliser of the rows: g(root)").element(Element::acc).values(Values::logits).optional().grad(&G::denergy)
          .output("kl", &O::kl, "B H", "mean over rows of the KL divergence to softmax, in nats; from kl_rows rows").element(Element::acc).values(Values::logits).optional()
          .option("tie", &A::tie, {"block", "prefix", "row"}, "what is shared: weights of blocks, the same strictly causal, or keys and values only")
          .option("include_self", &A::include_self, "a token attends to itself too")
          .option("causal", &A::causal, "only siblings to the left; strict for prefix and row, not for block")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies q.k; default K^-0.5")
          .option("branching", &A::branching, 1, kAnyCount, "windows of so many nodes, from the bottom; what is left belongs to one root")
          .option("arity", &A::arity, 2, kAnyCount, "without another tree: windows of this many nodes until one is left")
          .option("kl_rows", &A::kl_rows, 0, kAnyCount, "kl from so many evenly spaced rows; 0: all").unsampled()
          .check<check_hierarchical>()
          .largest_logit<ref::hierarchical_largest_logit>()
          .cost<cost_hierarchical>()
          .bench("B=1 T=4096|16384|65536|262144 H=8 K=64 V=K include_self=1 dtype=f32 pass=fwd")
          .bench("B=1 T=4096|16384 H=8 K=64 V=K include_self=1 dtype=f32|bf16 pass=fwd+bwd")
          .bench("B=1 T=4096|16384 H=8 K=64 V=K include_self=1 causal=1 tie=prefix|row dtype=f32 pass=fwd|fwd+bwd")
          .bench("B=8 T=100 H=12 K=64 V=K branching=2,4,8,16 dtype=f32 pass=fwd")
          .compare("hierarchical", "include_self=1")
          .compare("hierarchical row", "include_self=1 tie=row")
          .impl<ref::hierarchical_forward, ref::hierarchical_backward, ref::hierarchical_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(hierarchical);
  return op;
}
// clang-format on

Status hierarchical(const HierarchicalArgs& args, const HierarchicalOut& out, const Context& context) {
  return run(hierarchical_op(), Pass::forward, &args, &out, nullptr, context);
}
Status hierarchical_backward(const HierarchicalArgs& args, const HierarchicalOut& out, const HierarchicalGrads& grads,
                             const Context& context) {
  return run(hierarchical_op(), Pass::backward, &args, &out, &grads, context);
}
int64_t hierarchical_workspace(const HierarchicalArgs& args, Pass pass, const Context& context) {
  return workspace_bytes(hierarchical_op(), pass, &args, context);
}

}  // namespace linnet
