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
  if (args.tie == HierarchicalTie::prefix && !args.causal) return bad_input("hierarchical: tie is prefix, which needs causal");
  if (args.causal && args.tie == HierarchicalTie::block) {
    return bad_input(
        "hierarchical: tie is block, expected prefix (the same, strictly causal) or row when causal: block pools queries of "
        "whole "
        "subtrees, so that later tokens would change earlier rows");
  }
  if (args.tie == HierarchicalTie::prefix && !args.include_self) {
    return bad_input("hierarchical: tie prefix needs include_self: the first token of a family has nothing else to attend to");
  }
  // A tree that lies on the GPU is not read here; its kernels refuse it.
  if (args.q.device == Device::cuda && (args.parent.given() || args.level_starts.given())) return {};
  LINNET_TRY(hierarchical_check_tree(args));
  if (args.pos.given() && dims["nodes"] != hierarchical_nodes(args)) {
    return bad_input("hierarchical: pos has " + std::to_string(dims["nodes"]) + " nodes, expected " +
                     std::to_string(hierarchical_nodes(args)) + " (those of the tree)");
  }
  return args.causal ? check_consecutive(args) : Status();
}

// Pairs in families (block), or of tokens and nodes (prefix, row), by counting them.
Cost cost_hierarchical(const HierarchicalArgs& args, const Dims& dims, Pass pass) {
  if (args.q.device == Device::cuda && (args.parent.given() || args.level_starts.given())) return {};
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

Status check_decode(const HierarchicalDecodeArgs& args, const Dims& dims) {
  const int64_t levels = dims["levels"], width = dims["width"];
  const auto text = [](int64_t x) { return std::to_string(x); };
  if (args.tie == HierarchicalTie::block) return bad_input("hierarchical_decode: tie is block, expected prefix or row");
  if (args.tie == HierarchicalTie::prefix && !args.include_self) {
    return bad_input("hierarchical_decode: tie prefix needs include_self");
  }
  if (levels < 1) return bad_input("hierarchical_decode: list_k has 0 levels, expected at least 1");
  if (args.list_count.device == Device::cuda) return {};  // the kernel leaves a list without room alone
  for (int64_t b = 0; b < dims["B"]; ++b) {
    std::vector<int64_t> count(static_cast<size_t>(levels));
    for (int64_t l = 0; l < levels; ++l) {
      count[static_cast<size_t>(l)] = index_value(args.list_count, b, l);
      if (count[static_cast<size_t>(l)] >= 0 && count[static_cast<size_t>(l)] <= width) continue;
      return bad_input("hierarchical_decode: list_count[" + text(b) + "][" + text(l) + "] is " +
                       text(count[static_cast<size_t>(l)]) + ", expected 0 to " + text(width));
    }
    for (int64_t t = 0; t < dims["T"]; ++t) {
      const int64_t close = hierarchical_closing(args, b, t, index_value(args.lengths, b) + t);
      if (close < 0 || close >= levels) {
        return bad_input("hierarchical_decode: close[" + text(b) + "][" + text(t) + "] is " + text(close) + ", expected 0 to " +
                         text(levels - 1) + " (the root never ends)");
      }
      for (int64_t l = 0; l < close; ++l) count[static_cast<size_t>(l)] = 0;
      if (count[static_cast<size_t>(close)]++ < width) continue;
      return bad_input("hierarchical_decode: the list of level " + text(close) + " of item " + text(b) + " holds " +
                       text(width) + " nodes, no room for another at token " + text(t));
    }
  }
  return {};
}

Cost cost_decode(const HierarchicalDecodeArgs& args, const Dims& dims, Pass) {
  double rows = 0;
  for (int64_t b = 0; b < dims["B"]; ++b) {
    for (int64_t l = 0; l < dims["levels"]; ++l) {
      const bool known = args.list_count.device != Device::cuda;
      rows += static_cast<double>(known ? index_value(args.list_count, b, l) : dims["width"]) + 3;
    }
  }
  const double width = static_cast<double>(dims["K"] + dims["V"]), tokens = static_cast<double>(dims["T"] * dims["H"]);
  return {2 * rows * width * tokens, 4 * rows * width * tokens};
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
          .decode("hierarchical_decode")
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
          .option("causal", &A::causal, "only siblings to the left, and no later token; with tie prefix or row")
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
          .compare("", "include_self=1 state.levels=log8 state.width=8")
          .compare("row", "include_self=1 tie=row state.levels=log8 state.width=8")
          .compare("prefix, causal", "include_self=1 tie=prefix causal=1 state.levels=log8 state.width=8")
          .impl<ref::hierarchical_forward, ref::hierarchical_backward, ref::hierarchical_workspace>("ref", always_available)
          LINNET_ISA_IMPLS(hierarchical)
          .cuda<cuda::hierarchical_forward, cuda::hierarchical_backward, cuda::hierarchical_workspace, cuda::hierarchical_refuses>();
  return op;
}

const Op& hierarchical_decode_op() {
  using A = HierarchicalDecodeArgs;
  using O = HierarchicalDecodeOut;
  static const Op op =
      Declare<A, O, HierarchicalNoGrads>("hierarchical_decode", "hierarchical", "attention over a growing tree, token by token")
          .equation("as hierarchical with tie prefix or row, causal; finished nodes of each level in lists, sums of the open ones")
          .input("q", &A::q, "B T H K", "queries of the new tokens")
          .input("k", &A::k, "B T H K", "keys of the new tokens")
          .input("v", &A::v, "B T H V", "values of the new tokens")
          .input("list_k", &A::list_k, "B H levels width K", "mean keys of the finished children of each open node").element(Element::acc).mutated()
          .input("list_v", &A::list_v, "B H levels width V", "their mean values").element(Element::acc).mutated()
          .input("list_n", &A::list_n, "B levels width", "their leaves").element(Element::acc).values(Values::unit_interval).mutated()
          .input("list_count", &A::list_count, "B levels", "how many there are").element(Element::index).values(Values::lengths, "width").mutated()
          .input("sum_q", &A::sum_q, "B H levels K", "sums of queries over the leaves of the open nodes").element(Element::acc).mutated()
          .input("sum_k", &A::sum_k, "B H levels K", "sums of keys").element(Element::acc).mutated()
          .input("sum_v", &A::sum_v, "B H levels V", "sums of values").element(Element::acc).mutated()
          .input("sum_g", &A::sum_g, "B H levels", "sums of n Lambda over finished children").element(Element::acc).mutated()
          .input("open_n", &A::open_n, "B levels", "leaves of the open nodes").element(Element::acc).values(Values::unit_interval).mutated()
          .input("lengths", &A::lengths, "B", "tokens so far; increased by T").element(Element::index).values(Values::lengths, "1000000").mutated()
          .input("close", &A::close, "B T", "how many inner levels end behind each token; absent: windows of arity")
          .element(Element::index).values(Values::lengths, "levels-1").optional()
          .output("out", &O::out, "B T H V", "weighted averages of the values")
          .option("tie", &A::tie, {"block", "prefix", "row"}, "prefix or row")
          .option("include_self", &A::include_self, "a token attends to itself too")
          .option("scale", &A::scale, -kAnyReal, kAnyReal, "multiplies q.k; default K^-0.5")
          .option("arity", &A::arity, 2, kAnyCount, "without close: children of a node")
          .check<check_decode>()
          .largest_logit<ref::hierarchical_decode_largest_logit>()
          .cost<cost_decode>()
          .bench("B=1 T=1 H=32 K=128 V=K levels=6 width=8 list_count=4 lengths=100 dtype=f32|bf16 pass=fwd")
          .impl<ref::hierarchical_decode_forward, nullptr, ref::hierarchical_decode_workspace>("ref", always_available)
          LINNET_ISA_IMPLS_FORWARD(hierarchical_decode)
          .cuda<cuda::hierarchical_decode_forward, nullptr, cuda::hierarchical_decode_workspace, cuda::hierarchical_decode_refuses>();
  return op;
}
// clang-format on

Status hierarchical_decode(const HierarchicalDecodeArgs& args, const HierarchicalDecodeOut& out, const Context& context) {
  return run(hierarchical_decode_op(), Pass::forward, &args, &out, nullptr, context);
}
int64_t hierarchical_decode_workspace(const HierarchicalDecodeArgs& args, const Context& context) {
  return workspace_bytes(hierarchical_decode_op(), Pass::forward, &args, context);
}
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
