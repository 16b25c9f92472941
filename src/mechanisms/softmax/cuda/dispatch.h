// The calls of softmax on the rows of the GPU's table (launch.h); the functions that Declare::cuda_row asks for.
#pragma once

#include "mechanisms/softmax/cuda/launch.h"

namespace linnet::cuda {

struct SoftmaxTable {
  static constexpr int64_t slow_from(AttendRow row) { return row_slow_from(row); }
  static const char* refuses(AttendRow row, const SoftmaxArgs& args, const SoftmaxOut* out, Pass pass);
  static int64_t workspace(AttendRow row, const SoftmaxArgs& args, Pass pass);
  static void forward(AttendRow row, const SoftmaxArgs& args, const SoftmaxOut& out, const Launch& launch);
  static void backward(AttendRow row, const SoftmaxArgs& args, const SoftmaxOut& out, const SoftmaxGrads& grads,
                       const Launch& launch);
};
struct SoftmaxDecodeTable {
  static constexpr int64_t slow_from(AttendRow row) { return row_slow_from(row); }
  static const char* refuses(AttendRow row, const SoftmaxDecodeArgs& args, const SoftmaxOut* out, Pass pass);
  static int64_t workspace(AttendRow row, const SoftmaxDecodeArgs& args, Pass pass);
  static void forward(AttendRow row, const SoftmaxDecodeArgs& args, const SoftmaxOut& out, const Launch& launch);
};
struct SoftmaxPagedTable {
  static constexpr int64_t slow_from(AttendRow row) { return row_slow_from(row); }
  static const char* refuses(AttendRow row, const SoftmaxPagedArgs& args, const SoftmaxOut* out, Pass pass);
  static int64_t workspace(AttendRow row, const SoftmaxPagedArgs& args, Pass pass);
  static void forward(AttendRow row, const SoftmaxPagedArgs& args, const SoftmaxOut& out, const Launch& launch);
};

}  // namespace linnet::cuda

namespace linnet {
LINNET_CUDA_KERNELS(softmax_merge, SoftmaxMergeArgs, SoftmaxOut, SoftmaxMergeGrads)
}  // namespace linnet
