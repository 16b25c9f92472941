// dense on the GPU (dense_cuda.cu, dense_blas.h).
#include "dense_cuda.h"

#include "dense_blas.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(dense)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "dense/dense_cuda";
constexpr int64_t kFewRows = 8;  // tokens of a batch row: the choice must not depend on how many rows are in the batch
constexpr int64_t kMostInt = 0x7fffffff;

int64_t rows_of(const DenseArgs& args) { return args.x.size[0] * args.x.size[1]; }

// Rows of a matrix for cuBLAS: the distance between them is at least their width.
bool is_matrix(const View& view, int row) { return view.size[row] <= 1 || view.stride[row] >= view.size[row + 1]; }

const char* blas_refuses(const DenseArgs& args, const DenseOut* out) {
  if (!has_blas()) return "cuBLAS (libcublas.so) is not on this machine";
  if (args.x.size[1] <= kFewRows) return "at most 8 tokens are left to a kernel that reads the weights once";
  if (args.weight.dtype != args.x.dtype) return "x and weight are not of one type";
  if (args.bias.given() && args.bias.dtype != args.x.dtype) return "x and bias are not of one type";
  if (args.rounding == DenseRounding::bf16 && args.x.dtype != Dtype::bf16) return "it does not round x";
  if (args.x.size[2] == 0 || args.weight.size[0] == 0) return "there is nothing to multiply";
  const bool fits = args.x.size[1] <= kMostInt && args.x.stride[1] <= kMostInt && args.weight.stride[0] <= kMostInt;
  if (!fits || !is_matrix(args.x, 1) || !is_matrix(args.weight, 0) || (out != nullptr && !is_matrix(out->out, 1))) {
    return "its rows do not lie one behind the other";
  }
  return nullptr;
}

// Whether the matrix units take it: weights in 16 bits, rows of both in pieces of 16 bytes.
bool is_matrix_row(const DenseCall& d) {
  const bool types = d.weight.dtype == Dtype::bf16 ? d.x.dtype == Dtype::bf16 || d.x.dtype == Dtype::f32
                                                   : d.weight.dtype == Dtype::f16 && d.x.dtype == Dtype::f16 && !d.to_bf16;
  return types && d.whole && has_whole_rows(d.x) && d.x.size[2] % 8 == 0 && d.x.size[2] > 0;
}

}  // namespace

const char* DenseRows::refuses(DenseRow row, const DenseArgs& args, const DenseOut* out, Pass) {
  if (const char* reason = refuses_f64(args.x.dtype)) return reason;
  if (row == DenseRow::blas) return blas_refuses(args, out);
  if (row == DenseRow::row && args.x.size[1] > kFewRows) return "it takes at most 8 tokens";
  return nullptr;
}

int64_t DenseRows::workspace(DenseRow row, const DenseArgs&, Pass) { return row == DenseRow::blas ? kBlasWorkspace : 0; }

void DenseRows::forward(DenseRow row, const DenseArgs& args, const DenseOut& out, const Launch& launch) {
  DenseCall d;
  d.x = args.x;
  d.weight = args.weight;
  d.bias = args.bias;
  d.out = out.out;
  d.rows = rows_of(args);
  d.to_bf16 = args.rounding == DenseRounding::bf16;
  d.whole = has_whole_rows(args.weight);
  const int64_t outputs = args.weight.size[0];
  if (row == DenseRow::row && is_matrix_row(d)) {
    const int64_t tiles = d.rows <= 8 ? 1 : d.rows <= 16 ? 2 : 8;
    const Dtype dtype = d.x.dtype;
    const auto name_of = [&](const char* bf16, const char* f16, const char* rounded, const char* whole) {
      return dtype == Dtype::bf16 ? bf16 : dtype == Dtype::f16 ? f16 : d.to_bf16 ? rounded : whole;
    };
    const char* name =
        tiles == 1   ? name_of("dense_rows_1_bf16", "dense_rows_1_f16", "dense_rows_1_rounded", "dense_rows_1_whole")
        : tiles == 2 ? name_of("dense_rows_2_bf16", "dense_rows_2_f16", "dense_rows_2_rounded", "dense_rows_2_whole")
                     : name_of("dense_rows_8_bf16", "dense_rows_8_f16", "dense_rows_8_rounded", "dense_rows_8_whole");
    return enqueue(launch, {"dense/dense_rows_cuda", name, 256}, {divide_up(outputs, 16), divide_up(d.rows, 8 * tiles)}, d);
  }
  if (row == DenseRow::row) {
    const char* name = d.rows == 1 ? LINNET_BY_TYPE(few_rows_1, d.weight.dtype) : LINNET_BY_TYPE(few_rows_8, d.weight.dtype);
    return enqueue(launch, {kImage, name, 256}, {divide_up(outputs, 8), d.rows == 1 ? 1 : divide_up(d.rows, kFewRows)}, d);
  }
  if (row == DenseRow::tile) {
    return enqueue(launch, {kImage, "dense_tile", 256}, {divide_up(d.rows, 64), divide_up(outputs, 64)}, d);
  }
  if (args.bias.given()) enqueue(launch, {kImage, "fill_bias", 256}, {divide_up(d.rows * outputs, 256)}, d);
  if (*launch.error != nullptr || is_recording()) return;
  *launch.error = multiply_blas(launch, d.x, d.weight, d.out, args.bias.given(), launch.workspace);
}

}  // namespace linnet::cuda
