// Sums of parts: a block has 32 columns, 8 threads each.
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {

extern "C" __global__ void __launch_bounds__(256)
    sum_parts(const float* parts, int64_t count, int64_t width, const __grid_constant__ View out) {
  __shared__ double sums[8][32];
  const int lane = threadIdx.x % 32, slot = threadIdx.x / 32;
  const int64_t column = blockIdx.x * 32ll + lane;
  double sum = 0;
  if (column < width) {
    for (int64_t i = slot; i < count; i += 8) sum += parts[i * width + column];
  }
  sums[slot][lane] = sum;
  __syncthreads();
  if (slot != 0 || column >= width) return;
  for (int i = 1; i < 8; ++i) sum += sums[i][lane];
  int64_t rest = column, offset = 0;
  for (int i = out.rank - 1; i >= 0; --i) {
    offset += rest % out.size[i] * out.stride[i];
    rest /= out.size[i];
  }
  ptx::store(out.data, out.dtype, offset, static_cast<float>(sum));
}

}  // namespace linnet::cuda
