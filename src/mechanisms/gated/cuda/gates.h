// The gate alone on the GPU (gates.cu), for host and device code.
#pragma once

#include "mechanisms/softmax/cuda/problem.h"

namespace linnet::cuda {

struct Gates {
  AttendRows y;             // what is gated, where it is known,
  AttendRows out;           // otherwise (gradients) its gated form; the forward's result
  AttendRows g;             // logits [B, T, H, width], or [B, T, H]
  AttendRows dout;          // gradients: incoming,
  AttendRows dy, dg;        // results; either may be absent
  AttendRows dlse, delta;   // delta given (multiplied gates): sum_c dout out - dlse, f32
  float* shared = nullptr;  // the mean over heads of act(g), [B, T, width] or [B, T]
  int64_t B = 0, T = 0;
  int32_t H = 0, width = 0;
  AttendAct act = AttendAct::sigmoid;
  bool adds = false, per_head = false, is_shared = false;
};

}  // namespace linnet::cuda
