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
  int64_t tile = 1;  // rows so many tokens before it are held to this, nearer ones may share its products
};
bool poison(const Problem& problem, uint64_t seed, Poisoned* poisoned);

// A sentence for each result whose rows changed although they may not depend on the poisoned token.
std::vector<std::string> poison_faults(const Poisoned& poisoned, const std::vector<Array>& before,
                                       const std::vector<Array>& after);

}  // namespace linnet::check
