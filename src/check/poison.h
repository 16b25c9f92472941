// Poison: NaN or infinity in one token of a causal call. Every earlier row of every result must keep its bits, and so must the
// rows of other sequences of the batch.
#pragma once

#include "check/problem.h"

namespace linnet::check {

// The problem with one token's numbers replaced. False when the call is not causal, or has no token with one before it.
// `token` is the poisoned one, of batch row `row`; `apart` tells that nothing poisoned is shared by the rows of the batch.
struct Poisoned {
  Problem problem;
  int64_t token = 0, row = 0;
  bool apart = true;
};
bool poison(const Problem& problem, uint64_t seed, Poisoned* poisoned);

// A sentence for each result whose rows changed although they may not depend on the poisoned token.
std::vector<std::string> poison_faults(const Poisoned& poisoned, const std::vector<Array>& before,
                                       const std::vector<Array>& after);

}  // namespace linnet::check
