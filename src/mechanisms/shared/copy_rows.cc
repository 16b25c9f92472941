#include "mechanisms/shared/copy_rows.h"

#include "core/cuda/driver.h"

LINNET_USES_IMAGES(shared)

namespace linnet::cuda {

void copy_rows(const Launch& launch, const Rows& to, const Rows& from, int64_t B, int64_t T, int64_t heads, int64_t width) {
  const int counts[2] = {static_cast<int>(heads), static_cast<int>(width)};
  enqueue(launch, {"shared/copy_rows", "copy_rows", 256}, {(B * T * heads * width + 255) / 256}, to, from, T, counts[0],
          counts[1], B * T * heads * width);
}

}  // namespace linnet::cuda
