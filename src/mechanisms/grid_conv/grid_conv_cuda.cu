// grid_conv on the GPU, in f32. A thread has one channel of one token: neighbours in a warp are channels, which lie side by
// side, and the W^2 tokens around come from the caches. Gradients of the taps: a block has 32 channels of one tap (or of the
// bias), its 8 warps take turns at the rows of the grid; a row is summed in f32, rows in double, warps in order.
#include "mechanisms/grid_conv/grid_conv.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {

// out from x, or, back, dx from dout, which reads the taps the other way.
extern "C" __global__ void __launch_bounds__(256)
    grid_conv_rows(const __grid_constant__ GridConvArgs args, const __grid_constant__ View from,
                   const __grid_constant__ View to, bool back) {
  const int64_t T = to.size[1], E = to.size[2], at = blockIdx.x * 256ll + threadIdx.x;
  if (at >= to.size[0] * T * E) return;
  const int64_t e = at % E, t = at / E % T, b = at / E / T, W = args.weight.size[1];
  const int64_t y = t / args.width, x = t % args.width;
  float sum = back ? 0 : get_or(0, args.bias, e);
  for (int64_t i = 0; i < W && is_given(from); ++i) {
    const int64_t v = back ? y - i + W / 2 : y + i - W / 2;
    if (v < 0 || v >= args.height) continue;
    for (int64_t j = 0; j < W; ++j) {
      const int64_t u = back ? x - j + W / 2 : x + j - W / 2;
      if (u < 0 || u >= args.width) continue;
      sum = fmaf(get(args.weight, e, i, j), get(from, b, v * args.width + u, e), sum);
    }
  }
  put(to, sum, b, t, e);
}

// dweight, and, as tap W^2, dbias.
extern "C" __global__ void __launch_bounds__(256)
    grid_conv_taps(const __grid_constant__ GridConvArgs args, const __grid_constant__ GridConvGrads grads) {
  __shared__ double parts[8][32];
  const int64_t W = args.weight.size[1], tap = blockIdx.x % (W * W + 1), e = blockIdx.x / (W * W + 1) * 32 + threadIdx.x % 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool bias = tap == W * W, here = e < args.x.size[2];
  const int64_t dy = bias ? 0 : tap / W - W / 2, dx = bias ? 0 : tap % W - W / 2;
  double sum = 0;
  for (int64_t row = warp; here && is_given(grads.dout) && row < args.x.size[0] * args.height; row += 8) {
    const int64_t b = row / args.height, y = row % args.height;
    if (y + dy < 0 || y + dy >= args.height) continue;
    float part = 0;
    for (int64_t x = max(int64_t{0}, -dx); x < min(args.width, args.width - dx); ++x) {
      const float d = get(grads.dout, b, y * args.width + x, e);
      part = bias ? part + d : fmaf(d, get(args.x, b, (y + dy) * args.width + x + dx, e), part);
    }
    sum += static_cast<double>(part);
  }
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || !here) return;
  for (int i = 1; i < 8; ++i) sum += parts[i][lane];
  if (bias) {
    if (is_given(grads.dbias)) put(grads.dbias, static_cast<float>(sum), e);
  } else if (is_given(grads.dweight)) {
    put(grads.dweight, static_cast<float>(sum), e, tap / W, tap % W);
  }
}

}  // namespace linnet::cuda
