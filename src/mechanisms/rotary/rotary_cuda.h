// rotary on the GPU: what the kernel is told (plain data).
#pragma once

#include "rotary.h"

namespace linnet::cuda {

struct Turn {
  RotaryArgs args;
  View x, out;  // [B, T, H, D]; x absent: zeros
  int64_t tokens = 0;
  int32_t H = 0, D = 0, half = 0, lanes = 0;  // lanes: numbers of a row that a thread each has, pairs first, then copies
  float sign = 1;
};

}  // namespace linnet::cuda
