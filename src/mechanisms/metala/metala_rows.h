// The calls of MetaLA on the rows of the GPU's table (recurrence/cuda/rows.h); what Declare::cuda_row asks for.
#pragma once

#include "mechanisms/recurrence/cuda/rows.h"
#include "metala.h"

namespace linnet::cuda {

struct MetalaMixerTable {
  static constexpr int64_t slow_from(Row row) { return row_slow_from(row); }
  static const char* refuses(Row row, const MetalaMixerArgs& args, const MetalaMixerOut* out, Pass pass);
  static int64_t workspace(Row row, const MetalaMixerArgs& args, Pass pass);
  static void forward(Row row, const MetalaMixerArgs& args, const MetalaMixerOut& out, const Launch& launch);
  static void backward(Row row, const MetalaMixerArgs& args, const MetalaMixerOut& out, const MetalaMixerGrads& grads,
                       const Launch& launch);
};

struct MetalaCoreTable {
  static constexpr int64_t slow_from(Row row) { return row_slow_from(row); }
  static const char* refuses(Row row, const MetalaCoreArgs& args, const MetalaCoreOut* out, Pass pass);
  static int64_t workspace(Row row, const MetalaCoreArgs& args, Pass pass);
  static void forward(Row row, const MetalaCoreArgs& args, const MetalaCoreOut& out, const Launch& launch);
  static void backward(Row row, const MetalaCoreArgs& args, const MetalaCoreOut& out, const MetalaCoreGrads& grads,
                       const Launch& launch);
};

struct MetalaDecodeTable {
  static constexpr int64_t slow_from(Row row) { return row_slow_from(row); }
  static const char* refuses(Row row, const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut* out, Pass pass);
  static int64_t workspace(Row row, const MetalaMixerDecodeArgs& args, Pass pass);
  static void forward(Row row, const MetalaMixerDecodeArgs& args, const MetalaMixerDecodeOut& out, const Launch& launch);
};

}  // namespace linnet::cuda
