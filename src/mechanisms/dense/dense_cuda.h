// dense on the GPU: a row of its table for each way to run it, best last.
//
//   tile   any types, on the multiply-add units
//   blas   x, weight and bias of one type: cuBLAS, when it is found at run time like the driver
//   row    at most 8 tokens: the weights are read once for 8 rows, a warp has an output
#pragma once

#include "dense.h"

namespace linnet::cuda {

enum class DenseRow : int32_t { tile, blas, row };
constexpr const char* row_name(DenseRow row) { return row == DenseRow::tile ? "tile" : row == DenseRow::blas ? "blas" : "row"; }
constexpr bool row_rounds(DenseRow) { return false; }

struct DenseRows {
  static constexpr int64_t slow_from(DenseRow) { return 0; }
  static const char* refuses(DenseRow row, const DenseArgs& args, const DenseOut* out, Pass pass);
  static int64_t workspace(DenseRow row, const DenseArgs& args, Pass pass);
  static void forward(DenseRow row, const DenseArgs& args, const DenseOut& out, const Launch& launch);
};

// What the kernels are told.
struct DenseCall {
  View x, weight, bias, out;  // [B, T, I], [O, I], [O], [B, T, O]
  int64_t rows = 0;           // B T
  bool to_bf16 = false;       // x is rounded first
  bool whole = false;         // rows of the weight in pieces of 16 bytes
};

}  // namespace linnet::cuda
