// copy_rows.h: a thread for each number.
#include "mechanisms/shared/rows.h"

namespace linnet::cuda {

extern "C" __global__ void __launch_bounds__(256) copy_rows(const __grid_constant__ Rows to, const __grid_constant__ Rows from,
                                                            int64_t T, int heads, int width, int64_t total) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= total) return;
  const int64_t c = i % width, h = i / width % heads, t = i / width / heads % T, b = i / width / heads / T;
  const auto at = [&](const Rows& rows) { return b * rows.stride_b + t * rows.stride_t + h * rows.stride_h + c; };
  static_cast<uint16_t*>(const_cast<void*>(to.data))[at(to)] =
      from.data == nullptr ? 0 : static_cast<const uint16_t*>(from.data)[at(from)];
}

}  // namespace linnet::cuda
