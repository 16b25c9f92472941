// Products of strided matrices on the GPU, one for each batch row and head, in f32: C = A B, or its parts over slices of the
// sum.
#pragma once

#include "core/launch.h"
#include "core/view.h"

namespace linnet::cuda {

// A matrix for each batch row and head: element (i, j) of (b, h) is data[b batch + h head + i row + j column].
struct Matrix {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
  int64_t batch = 0, head = 0, row = 0, column = 0;
};
struct Product {
  Matrix a, b, c;  // [M, K], [K, N], [M, N]
  int64_t M = 0, N = 0, K = 0;
  int32_t B = 0, H = 0, slices = 1;
  int64_t slice_stride = 0;       // of c (f32), from the part of one slice of K to the next
  const uint8_t* mask = nullptr;  // [B, K]: terms with 0 are left out
  int64_t mask_stride = 0;
};

// Slices of a sum over `count` tokens, by the shape alone.
constexpr int64_t product_slices(int64_t count) { return count <= 512 ? 1 : count >= 32768 ? 64 : (count + 511) / 512; }

void run_product(const Launch& launch, const Product& product);

// parts [slices, H, width] = sums over rows of x [B, T, H, width] (f32, dense); slices = product_slices(B T).
void run_column_sums(const Launch& launch, const float* x, int64_t rows, int64_t columns, float* parts);

}  // namespace linnet::cuda
