// Rows normed on the GPU, for rms_norm_gated and l2_norm: what the kernels are told, for host and device (plain data).
//
//   u = x, or x gate(z);   r = 1 / sqrt(unit sum u^2 + eps);   out = u r weight, times gate(z) where the norm comes first
//
// unit is 1 / V for the mean of squares and 1 for the length. A group of threads has a row: 16 or 32 threads a row of few
// vectors of 16 bytes, a block a longer one; other rows (not aligned, or too long for registers) go element by element.
#pragma once

#include <cstdint>

#include "core/launch.h"
#include "core/view.h"

namespace linnet::cuda {

// A tensor [B, T, H, V], strides in elements, the last dimension contiguous.
struct NormTensor {
  void* data = nullptr;  // null: absent
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
};

struct NormRows {
  int64_t B = 0, T = 0, rows = 0;  // B T H rows
  int32_t H = 0, V = 0;
  NormTensor x, z, out;          // forward
  NormTensor dout, dx, dz;       // backward
  const void* weight = nullptr;  // [H, V]
  Dtype weight_dtype = Dtype::none;
  int64_t weight_stride_h = 0, weight_stride_v = 0;
  bool weight_vectors = false;  // contiguous and aligned
  float weight_plus = 0;        // added to every weight
  float unit = 1, eps = 0;
  bool silu = true;       // the gate is z sigmoid(z), else sigmoid(z)
  bool first = false;     // the norm comes before the gate
  int32_t parts = 0;      // backward: blocks that share the rows of a head (or all rows, when `together`)
  bool together = false;  // one weight for all heads
  bool narrow = false;    // fewer than 2^31 rows
  bool dense = false;     // row i of every tensor is its elements from i V on, and the weight is the same for all of them
  float* sums = nullptr;  // backward: [heads of the weight, parts, V]: what each block adds to the weight's gradient
};

// The rows of x, normed as a whole, without gate and weight; and in how many parts the backward does them.
NormRows norm_rows(const View& x, double eps);
int64_t norm_parts(const NormRows& rows);
void run_norm(const Launch& launch, const NormRows& rows, Dtype dtype);
void run_norm_backward(const Launch& launch, const NormRows& rows, Dtype dtype, const View& dweight);

NormTensor norm_tensor(const View& view);

}  // namespace linnet::cuda
