// The tensors of one (batch, head) slice of a vector file, under the names that mixers read (mixers.h).
#pragma once

#include <string>

#include "analysis/mixers.h"

namespace linnet::analysis {

// A dsf file as it is; a file of an operator's call (softmax, linear, gla, delta, gated_delta, decay, mamba's) with [B, T, H,
// D] tensors cut to one batch row and head. *mixer: the mixer that it belongs to, or what the file says.
Status read_slice(const std::string& path, int64_t batch, int64_t head, MixerInputs* inputs, std::string* mixer);

}  // namespace linnet::analysis
