#include "hierarchical_tree.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/op.h"

namespace linnet {
namespace {

std::string text(int64_t x) { return std::to_string(x); }

// Calls level(children, windows) for each level of windows over T leaves, from the bottom, until one node is left. The factors
// of `branching` first, then one root for the rest; without them windows of `arity`.
template <class F>
void for_levels(const HierarchicalArgs& args, const F& level) {
  int64_t nodes = args.q.size[1];
  for (int64_t i = 0; nodes > 1; ++i) {
    const bool listed = args.branching.count > 0;
    const int64_t size = !listed ? args.arity : i < args.branching.count ? args.branching.value[i] : nodes;
    const int64_t windows = (nodes + size - 1) / size;
    level(nodes, size, windows);
    nodes = windows;
  }
}

// The windows of level l given by level_starts: [begin, end) in it.
int64_t level_begin(const HierarchicalArgs& args, int64_t level) { return index_value(args.level_offsets, level); }
int64_t levels(const HierarchicalArgs& args) { return args.level_offsets.size[0] - 1; }

Status check_parent(const HierarchicalArgs& args) {
  const int64_t T = args.q.size[1], N = args.parent.size[0];
  const std::string name = "hierarchical: parent";
  if (N < T || (T == 0 && N > 0) || (N == T && T > 1)) {
    return bad_input(name + " has " + text(N) + " nodes, expected " + (T == 0 ? "0" : "at least " + text(T == 1 ? 1 : T + 1)) +
                     " for " + text(T) + " tokens");
  }
  std::vector<bool> has_child(static_cast<size_t>(N - T));
  for (int64_t i = 0; i < N; ++i) {
    const int64_t p = index_value(args.parent, i);
    const std::string node = name + "[" + text(i) + "] is " + text(p);
    if (i + 1 == N) {
      if (p != -1) return bad_input(node + ", expected -1: the last node is the root");
      break;
    }
    if (p == -1) return bad_input(node + ", but only the last node, " + text(N - 1) + ", may be the root: an orphan");
    if (p < T || p >= N) return bad_input(node + ", expected an inner node, " + text(T) + " to " + text(N - 1));
    if (p <= i) return bad_input(node + ", expected a larger number than the node's own: children stand before parents");
    has_child[static_cast<size_t>(p - T)] = true;
  }
  for (int64_t i = T; i < N; ++i) {
    if (!has_child[static_cast<size_t>(i - T)]) return bad_input(name + ": the inner node " + text(i) + " has no children");
  }
  return {};
}

Status check_levels(const HierarchicalArgs& args) {
  if (!args.level_offsets.given() || !args.level_starts.given()) {
    return bad_input("hierarchical: level_starts and level_offsets go together, only one is given");
  }
  const int64_t windows = args.level_starts.size[0];
  if (args.level_offsets.size[0] < 1 || level_begin(args, 0) != 0 || level_begin(args, levels(args)) != windows) {
    return bad_input("hierarchical: level_offsets must begin with 0 and end with " + text(windows) +
                     ", the number of windows in level_starts");
  }
  int64_t below = args.q.size[1];
  for (int64_t l = 0; l < levels(args); ++l) {
    const int64_t begin = level_begin(args, l), end = level_begin(args, l + 1);
    if (end < begin || (end == begin && below > 0)) {
      return bad_input("hierarchical: level " + text(l) + " has " + text(end - begin) + " windows, expected at least 1");
    }
    for (int64_t i = begin; i < end; ++i) {
      const int64_t start = index_value(args.level_starts, i);
      const bool good = i == begin ? start == 0 : start > index_value(args.level_starts, i - 1) && start < below;
      if (good && start < below) continue;
      return bad_input("hierarchical: level_starts[" + text(i) + "] is " + text(start) + ", expected " +
                       (i == begin ? "0, the first window of level " + text(l)
                                   : "ascending starts below " + text(below) + " in level " + text(l)));
    }
    below = end - begin;
  }
  return {};
}

}  // namespace

Status hierarchical_check_tree(const HierarchicalArgs& args) {
  if (args.parent.given()) return check_parent(args);
  if (args.level_starts.given() || args.level_offsets.given()) return check_levels(args);
  return {};
}

int64_t hierarchical_nodes(const HierarchicalArgs& args) {
  if (args.parent.given()) return args.parent.size[0];
  int64_t nodes = args.q.size[1];
  if (args.level_starts.given()) {
    const int64_t top = levels(args) == 0 ? nodes : level_begin(args, levels(args)) - level_begin(args, levels(args) - 1);
    return nodes + args.level_starts.size[0] + (top > 1 ? 1 : 0);
  }
  for_levels(args, [&](int64_t, int64_t, int64_t windows) { nodes += windows; });
  return nodes;
}

HierarchicalWidths hierarchical_widths(const HierarchicalArgs& args) {
  HierarchicalWidths w;
  if (!args.parent.given() && !args.level_starts.given()) {
    for_levels(args, [&](int64_t nodes, int64_t size, int64_t) {
      w.family = std::max(w.family, std::min(nodes, size));
      w.list += std::min(nodes, size);
      ++w.depth;
    });
    return w;
  }
  Arena count;
  hierarchical_tree(args, count, false);
  std::vector<char> memory(static_cast<size_t>(count.used()) + 128);
  Arena arena(memory.data());
  const HierarchicalTree t = hierarchical_tree(args, arena, true);
  std::vector<int64_t> list(static_cast<size_t>(t.inner())), depth(list);
  for (int64_t x = t.N - 1; x >= t.T; --x) {
    const auto at = static_cast<size_t>(x - t.T);
    const auto above = static_cast<size_t>(t.parent[x] - t.T);
    list[at] = t.family(x) + (t.parent[x] < 0 ? 0 : list[above]);
    depth[at] = 1 + (t.parent[x] < 0 ? 0 : depth[above]);
    w.family = std::max(w.family, t.family(x));
    w.list = std::max(w.list, list[at]);
    w.depth = std::max(w.depth, depth[at]);
  }
  return w;
}

HierarchicalTree hierarchical_tree(const HierarchicalArgs& args, Arena& arena, bool fill, bool always_inner) {
  HierarchicalTree t;
  t.T = args.q.size[1];
  t.N = hierarchical_nodes(args);
  const bool lonely = always_inner && t.N == 1;
  if (lonely) t.N = 2;
  t.parent = arena.take<int64_t>(t.N);
  t.first = arena.take<int64_t>(t.N);
  t.last = arena.take<int64_t>(t.N);
  t.slot = arena.take<int64_t>(t.N);
  t.offsets = arena.take<int64_t>(t.N - t.T + 1);
  t.child = arena.take<int64_t>(t.N);
  if (!fill || t.N == 0) return t;
  if (lonely) {
    t.parent[0] = 1;
  } else if (args.parent.given()) {
    for (int64_t i = 0; i < t.N; ++i) t.parent[i] = index_value(args.parent, i);
  } else if (args.level_starts.given()) {
    int64_t base = 0, count = t.T;  // nodes of the level below
    for (int64_t l = 0; l < levels(args); ++l) {
      const int64_t begin = level_begin(args, l), end = level_begin(args, l + 1);
      for (int64_t w = begin; w < end; ++w) {
        const int64_t stop = w + 1 < end ? index_value(args.level_starts, w + 1) : count;
        for (int64_t i = index_value(args.level_starts, w); i < stop; ++i) t.parent[base + i] = base + count + w - begin;
      }
      base += count;
      count = end - begin;
    }
    for (int64_t i = 0; count > 1 && i < count; ++i) t.parent[base + i] = t.N - 1;
  } else {
    int64_t base = 0;
    for_levels(args, [&](int64_t count, int64_t size, int64_t) {
      for (int64_t i = 0; i < count; ++i) t.parent[base + i] = base + count + i / size;
      base += count;
    });
  }
  t.parent[t.N - 1] = -1;
  // Smallest and largest leaf, family sizes; children before parents.
  for (int64_t i = 0; i < t.N; ++i) {
    t.first[i] = i < t.T ? i : t.T;
    t.last[i] = i < t.T ? i : -1;
  }
  for (int64_t x = 0; x <= t.N - t.T; ++x) t.offsets[x] = 0;
  for (int64_t i = 0; i + 1 < t.N; ++i) {
    const int64_t p = t.parent[i];
    if (t.first[i] < t.first[p]) t.first[p] = t.first[i];
    if (t.last[i] > t.last[p]) t.last[p] = t.last[i];
    ++t.offsets[p - t.T + 1];
  }
  for (int64_t x = 0; x < t.N - t.T; ++x) t.offsets[x + 1] += t.offsets[x];
  // A node takes its place among its siblings when its smallest leaf comes: leaves in order, each with the nodes it begins.
  for (int64_t i = 0; i < t.N; ++i) t.slot[i] = 0;  // of inner nodes: children placed so far
  for (int64_t leaf = 0; leaf < t.T; ++leaf) {
    for (int64_t x = leaf; t.parent[x] != -1 && t.first[x] == leaf; x = t.parent[x]) {
      const int64_t p = t.parent[x];
      t.child[t.offsets[p - t.T] + t.slot[p]++] = x;
    }
  }
  for (int64_t x = t.T; x < t.N; ++x) {
    for (int64_t i = 0; i < t.family(x); ++i) t.slot[t.children(x)[i]] = i;
  }
  t.slot[t.N - 1] = 0;
  return t;
}

}  // namespace linnet
