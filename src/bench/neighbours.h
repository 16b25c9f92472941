// neighbours: the cases around one, each of which differs from it in one thing, made from the operator's declaration alone.
// Where one of them is much less efficient than the case in the middle, a user who takes one step beside it falls off a cliff.
#pragma once

#include <string>
#include <vector>

#include "bench/cases.h"

namespace linnet::bench {

struct Neighbour {
  std::string changed;  // "l2_norm=1", "K=V=96", "packed"
  Case what;
};

// Every boolean and choice option, every optional tensor and second shape, types, widths, K other than V, grouped heads, packed
// sequences, other lengths and batches. Those that the operator does not accept are left out.
std::vector<Neighbour> neighbours_of(const Case& base);

}  // namespace linnet::bench
