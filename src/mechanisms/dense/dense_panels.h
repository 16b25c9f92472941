// The product of many rows: tasks of up to kRows rows and kColumns outputs; weights come as panels [kDepth, kColumns] in
// scratch, which `pack` makes of whatever the weights are.
#pragma once

#include "dense_rows.h"
#include "simd/gemm.h"

namespace linnet::LINNET_ISA {

// Rows of a task: all of them up to kRows, fewer where that leaves workers idle. Cuts change no bit of the result.
LINNET_INLINE int64_t rows_of_task(int64_t rows, int64_t panels, int workers) {
  int64_t cuts = (rows + kRows - 1) / kRows;
  while (cuts * panels < 4 * workers && rows / (cuts + 1) >= 96) ++cuts;
  const int64_t each = cuts > 0 ? (rows + cuts - 1) / cuts : 0;
  return each < 6 ? 6 : (each + 5) / 6 * 6 > kRows ? kRows : (each + 5) / 6 * 6;
}

// pack(output, columns, input, depth, panel): weights of `columns` outputs and `depth` inputs, transposed, rows kColumns apart.
template <class T, class E, class Pack>
void multiply_panels(const Rows<T>& x, int64_t rows, int64_t inputs, int64_t outputs, int64_t per_batch, const View& bias,
                     const View& out, const Scratch<T>& scratch, const Launch& launch, const Pack& pack) {
  const int64_t panels = (outputs + kColumns - 1) / kColumns, each = rows_of_task(rows, panels, launch.workers);
  const int64_t cuts = (rows + each - 1) / each, most = rows < kRows ? rows : kRows;
  parallel(launch, panels * cuts, [&](int64_t task, int worker) {
    T *panel = scratch.panel + worker * kDepth * kColumns, *sums = scratch.sums + worker * most * kColumns;
    const int64_t first = task % cuts * each, column = task / cuts * kColumns;
    const int m = static_cast<int>(first + each < rows ? each : rows - first);
    const int n = static_cast<int>(column + kColumns < outputs ? kColumns : outputs - column);
    for (int64_t k = 0; k < inputs; k += kDepth) {
      const int depth = static_cast<int>(k + kDepth < inputs ? kDepth : inputs - k);
      pack(column, n, k, depth, panel);
      const Left<T> left = as_is(x.data + first * x.stride + k, x.stride);
      if (k == 0) {
        gemm<T>(m, n, depth, left, panel, kColumns, sums, kColumns, Store{});
      } else {
        gemm<T>(m, n, depth, left, panel, kColumns, sums, kColumns, Add{});
      }
    }
    for (int i = 0; i < m; ++i) {
      const int64_t row = first + i;
      store_row<T>(sums + i * kColumns, bias, column, n, out.at<E>(row / per_batch, row % per_batch, column));
    }
  });
}

}  // namespace linnet::LINNET_ISA
