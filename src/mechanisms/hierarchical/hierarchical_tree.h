// HierarchicalTree: the tree of a call as arrays, made once per call from whatever describes it.
#pragma once

#include "hierarchical.h"

namespace linnet {

struct HierarchicalTree {
  int64_t T = 0, N = 0;        // leaves, nodes
  int64_t* parent = nullptr;   // [N], -1: root
  int64_t* first = nullptr;    // [N]: smallest leaf
  int64_t* last = nullptr;     // [N]: largest leaf
  int64_t* slot = nullptr;     // [N]: place among the children of the parent
  int64_t* offsets = nullptr;  // [N - T + 1]: children of inner node x at child[offsets[x - T] .. offsets[x - T + 1])
  int64_t* child = nullptr;    // [N], by smallest leaf

  LINNET_INLINE int64_t inner() const { return N - T; }
  LINNET_INLINE const int64_t* children(int64_t x) const { return child + offsets[x - T]; }
  LINNET_INLINE int64_t family(int64_t x) const { return offsets[x - T + 1] - offsets[x - T]; }
};

// The number of nodes of the call's tree. Not for sizes that hierarchical_check would refuse.
int64_t hierarchical_nodes(const HierarchicalArgs& args);
// The largest family, the most siblings on a path (the family itself counted) and the most inner nodes on one.
struct HierarchicalWidths {
  int64_t family = 0, list = 0, depth = 0;
};
HierarchicalWidths hierarchical_widths(const HierarchicalArgs& args);
// Cuts the tree's arrays from the arena and, unless the arena is only counting, fills them. always_inner: a token that is the
// root gets an inner node above it, which changes nothing and leaves one case less.
HierarchicalTree hierarchical_tree(const HierarchicalArgs& args, Arena& arena, bool fill, bool always_inner = false);
// What is wrong with the tree.
Status hierarchical_check_tree(const HierarchicalArgs& args);

}  // namespace linnet
