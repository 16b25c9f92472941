#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(shared)

namespace linnet::cuda {

void sum_parts(const Launch& launch, const float* parts, int64_t count, const View& out) {
  if (!out.given()) return;
  enqueue(launch, {"shared/pieces", "sum_parts", 256}, {divide_up(out.elements(), 32)}, parts, count, out.elements(), out);
}

}  // namespace linnet::cuda
