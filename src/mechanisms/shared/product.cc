#include "mechanisms/shared/product.h"

#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(shared)

namespace linnet::cuda {

void run_product(const Launch& launch, const Product& p) {
  const int64_t tiles = divide_up(p.M, 64) * divide_up(p.N, 64);
  if (tiles == 0) return;
  enqueue(launch, {"shared/product", "product", 256}, {tiles * p.B * p.H, p.slices}, p);
}

void run_column_sums(const Launch& launch, const float* x, int64_t rows, int64_t columns, float* parts) {
  enqueue(launch, {"shared/product", "column_sums", 256}, {divide_up(columns, 32), product_slices(rows)}, x, rows, columns,
          parts);
}

}  // namespace linnet::cuda
