// The calls of gated on the rows of softmax's table on the GPU (softmax/cuda/launch.h). At G1 the gate is part of the read. G2
// gates the values in a pass of its own, rounded to the call's type on the matrix units. Gated keys and queries (G3, G4) are
// kept in f32 and take the plain row: rounded to 16 bits, their errors grow with the logits.
#pragma once

#include "mechanisms/gated/gated.h"
#include "mechanisms/softmax/cuda/launch.h"

namespace linnet::cuda {

struct GatedTable {
  static constexpr int64_t slow_from(AttendRow row) { return row_slow_from(row); }
  static const char* refuses(AttendRow row, const GatedArgs& args, const GatedOut* out, Pass pass);
  static int64_t workspace(AttendRow row, const GatedArgs& args, Pass pass);
  static void forward(AttendRow row, const GatedArgs& args, const GatedOut& out, const Launch& launch);
  static void backward(AttendRow row, const GatedArgs& args, const GatedOut& out, const GatedGrads& grads,
                       const Launch& launch);
};
struct GatedDecodeTable {
  static constexpr int64_t slow_from(AttendRow row) { return row_slow_from(row); }
  static const char* refuses(AttendRow row, const GatedDecodeArgs& args, const SoftmaxOut* out, Pass pass);
  static int64_t workspace(AttendRow row, const GatedDecodeArgs& args, Pass pass);
  static void forward(AttendRow row, const GatedDecodeArgs& args, const SoftmaxOut& out, const Launch& launch);
};

}  // namespace linnet::cuda

namespace linnet {
LINNET_CUDA_KERNELS(gated_gate, GatedGateArgs, GatedGateOut, GatedGateGrads)
}  // namespace linnet
