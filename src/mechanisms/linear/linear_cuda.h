// The calls of linear attention on the rows of the GPU's table (recurrence/cuda/rows.h); what Declare::cuda_row asks for.
#pragma once

#include "linear.h"
#include "mechanisms/recurrence/cuda/rows.h"

namespace linnet::cuda {

struct LinearRows {
  static constexpr int64_t slow_from(Row row) { return row_slow_from(row); }
  static auto missing(Row row) { return row_missing(row); }
  static const char* refuses(Row row, const LinearArgs& args, const LinearOut* out, Pass pass);
  static int64_t workspace(Row row, const LinearArgs& args, Pass pass);
  static void forward(Row row, const LinearArgs& args, const LinearOut& out, const Launch& launch);
  static void backward(Row row, const LinearArgs& args, const LinearOut& out, const LinearGrads& grads, const Launch& launch);
};

struct LinearDecodeRows {
  static constexpr int64_t slow_from(Row row) { return row_slow_from(row); }
  static const char* refuses(Row row, const LinearDecodeArgs& args, const LinearDecodeOut* out, Pass pass);
  static int64_t workspace(Row, const LinearDecodeArgs&, Pass) { return 0; }
  static void forward(Row row, const LinearDecodeArgs& args, const LinearDecodeOut& out, const Launch& launch);
};

}  // namespace linnet::cuda
