// The calls of mamba_ssd on the rows of the GPU's table (recurrence/cuda/rows.h); what Declare::cuda_row asks for.
#pragma once

#include "mechanisms/recurrence/cuda/rows.h"
#include "ssd.h"

namespace linnet::cuda {

struct SsdTable {
  static constexpr int64_t slow_from(Row row) { return row_slow_from(row); }
  static const char* refuses(Row row, const SsdArgs& args, const SsdOut* out, Pass pass);
  static int64_t workspace(Row row, const SsdArgs& args, Pass pass);
  static void forward(Row row, const SsdArgs& args, const SsdOut& out, const Launch& launch);
  static void backward(Row row, const SsdArgs& args, const SsdOut& out, const SsdGrads& grads, const Launch& launch);
};

struct SsdDecodeTable {
  static constexpr int64_t slow_from(Row row) { return row_slow_from(row); }
  static const char* refuses(Row row, const SsdDecodeArgs& args, const SsdDecodeOut* out, Pass pass);
  static int64_t workspace(Row, const SsdDecodeArgs&, Pass) { return 0; }
  static void forward(Row row, const SsdDecodeArgs& args, const SsdDecodeOut& out, const Launch& launch);
};

}  // namespace linnet::cuda
