// Elementwise operators on the GPU: what the kernels are told (plain data).
#pragma once

#include "activation.h"

namespace linnet::cuda {

enum class Elementwise : int32_t { activation, activation_back, glu, glu_back, add, add_back };

// [B, T, H, D] each; absent ones are zeros (results: not wanted). dense: all of them are one run of elements.
struct Elements {
  int64_t T = 0, pieces = 0;  // pieces: of one vector, over all rows
  int32_t H = 0, D = 0, per_row = 0;
  bool dense = false, whole = false;
  View x, y, dout;   // read: x or gate, y or up
  View out, dx, dy;  // written
  Elementwise op = Elementwise::activation;
  Activation act = Activation::silu;
  float cap = 1, scale = 1;
};

}  // namespace linnet::cuda
