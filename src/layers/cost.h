// What a call of a record costs: the sums over its steps, from the operators' own declarations.
#pragma once

#include "layers/record.h"

namespace linnet::layers {

// `tokens` new tokens of `batch` rows after `position` others; with position > 0 or one token the operators with a state count
// in their decode form. Bytes: every step's inputs, weights and states read once, results written once, in `activations`.
Status record_cost(const Record& record, int64_t batch, int64_t tokens, int64_t position, Dtype activations, Cost* cost);

}  // namespace linnet::layers
