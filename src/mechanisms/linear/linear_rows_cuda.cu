// Rows with one column more, for the gradients of the normaliser (linear_cuda.cc): a warp has a row.
#include "mechanisms/recurrence/cuda/map.cuh"
#include "ptx/rows.cuh"

namespace linnet::cuda {

// wide [rows, V+1] = dout / den, then -(out . dout) / den.
extern "C" __global__ void __launch_bounds__(256)
    widen_gradient(const __grid_constant__ Rows dout, const __grid_constant__ Rows out, const __grid_constant__ Rows den,
                   int64_t rows, int64_t T, int H, int V, float* wide) {
  const int64_t row = blockIdx.x * 8ll + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, h = static_cast<int>(row % H);
  if (row >= rows) return;
  const int64_t t = row / H % T, b = row / H / T;
  const float sum = ptx::load(den.data, den.dtype, row_of(den, b, t, h)), factor = sum == 0 ? 0 : 1 / sum;
  float dot = 0;
  for (int c = lane; c < V; c += 32) {
    const float d = dout.data == nullptr ? 0 : ptx::load(dout.data, dout.dtype, row_of(dout, b, t, h) + c);
    dot = fmaf(d, ptx::load(out.data, out.dtype, row_of(out, b, t, h) + c), dot);
    wide[row * (V + 1) + c] = d * factor;
  }
  dot = ptx::sum_lanes<32>(dot);
  if (lane == 0) wide[row * (V + 1) + V] = -dot * factor;
}

// wide [rows, V+1] = v, then 1.
extern "C" __global__ void __launch_bounds__(256)
    widen_values(const __grid_constant__ Rows v, int64_t rows, int64_t S, int H, int V, float* wide) {
  const int64_t row = blockIdx.x * 8ll + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, h = static_cast<int>(row % H);
  if (row >= rows) return;
  const int64_t t = row / H % S, b = row / H / S;
  for (int c = lane; c <= V; c += 32) {
    wide[row * (V + 1) + c] = c == V ? 1 : ptx::load(v.data, v.dtype, row_of(v, b, t, h) + c);
  }
}

}  // namespace linnet::cuda
