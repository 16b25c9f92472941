// The calls of the recurrence family on the rows of the GPU's table (rows.h); the functions that Declare::cuda_row asks for.
#pragma once

#include "mechanisms/recurrence/cuda/rows.h"
#include "mechanisms/recurrence/recurrence.h"

namespace linnet::cuda {

struct RecurrenceRows {
  static constexpr int64_t slow_from(Row row) { return row_slow_from(row); }
  static auto missing(Row row) { return row_missing(row); }
  static const char* refuses(Row row, const RecurrenceArgs& args, const RecurrenceOut* out, Pass pass);
  static int64_t workspace(Row row, const RecurrenceArgs& args, Pass pass);
  static void forward(Row row, const RecurrenceArgs& args, const RecurrenceOut& out, const Launch& launch);
  static void backward(Row row, const RecurrenceArgs& args, const RecurrenceOut& out, const RecurrenceGrads& grads,
                       const Launch& launch);
};

struct RecurrenceDecodeRows {
  static constexpr int64_t slow_from(Row row) { return row_slow_from(row); }
  static const char* refuses(Row row, const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut* out, Pass pass);
  static int64_t workspace(Row, const RecurrenceDecodeArgs&, Pass) { return 0; }
  static void forward(Row row, const RecurrenceDecodeArgs& args, const RecurrenceDecodeOut& out, const Launch& launch);
};

}  // namespace linnet::cuda
