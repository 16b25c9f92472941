// dense_quantised and dense_heads on the GPU, in f32 on the multiply-add units.
//
// dense_quantised: a block has 4 rows of x and a panel of 16 outputs, a warp one of the rows. A group of 32 inputs is brought
// by the warp's lanes, rounded where it is wanted, and read from shared memory; lane 16 half + r takes output r and every other
// four inputs, whose codes lie side by side for the 16 outputs. Weights of a panel are read once for 4 rows.
// dense_heads: a warp has 32 outputs of a row and head; weights of neighbouring outputs lie side by side.
#include "mechanisms/dense/dense_quantised.cuh"

namespace linnet::cuda {

extern "C" __global__ void __launch_bounds__(128)
    dense_quantised(const __grid_constant__ DenseQuantisedArgs args, const __grid_constant__ View out, int64_t rows) {
  __shared__ float groups[4][32];
  const int64_t panels = args.codes.size[0], panel = blockIdx.x % panels, row = blockIdx.x / panels * 4 + threadIdx.x / 32;
  if (row >= rows) return;  // the whole warp
  const int lane = threadIdx.x % 32, r = lane % 16, half = lane / 16;
  float* const x = groups[threadIdx.x / 32];
  const int64_t T = args.x.size[1], b = row / T, t = row % T;
  const int digits = args.rounding == QuantisedRounding::int16 ? 2 : args.rounding == QuantisedRounding::int8 ? 1 : 0;
  float sum = 0;
  for (int64_t g = 0; g < args.codes.size[1]; ++g) {
    float mine = get(args.x, b, t, 32 * g + lane);
    if (digits > 0) {  // 8 bits of the group, then of what they leave
      float left = mine;
      mine = 0;
      for (int digit = 0; digit < digits; ++digit) {
        float largest = fabsf(left);
        for (int step = 1; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        const float scale = largest * (1.0f / 127), code = rintf(left * (largest == 0 ? 0 : 127 / largest));
        mine = fmaf(scale, code, mine);
        left = fmaf(-scale, code, left);
      }
    }
    __syncwarp();
    x[lane] = mine;
    __syncwarp();
    const QuantisedGroup group = group_of(args.bits, args.codes, args.scale, args.offset, panel, g, r);
    float part = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // the weight first: code and offset may cancel
      const int k = (2 * (i / 4) + half) * 4 + i % 4;
      part = fmaf(x[k], fmaf(group.scale, static_cast<float>(code_of(args.bits, group.codes, r, k)), group.offset), part);
    }
    sum += part;
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 16);
  const int64_t o = 16 * panel + r;
  if (half == 0 && o < out.size[2]) put(out, sum + get_or(0, args.bias, o), b, t, o);
}

extern "C" __global__ void __launch_bounds__(256)
    dense_heads(const __grid_constant__ DenseHeadsArgs args, const __grid_constant__ View out) {
  const int64_t T = args.x.size[1], H = args.x.size[2], K = args.x.size[3], F = args.weight.size[2];
  const int64_t across = (F + 31) / 32, warp = blockIdx.x * 8ll + threadIdx.x / 32, row = warp / across;
  const int64_t f = warp % across * 32 + threadIdx.x % 32;
  if (row >= args.x.size[0] * T * H || f >= F) return;
  const int64_t b = row / (T * H), t = row / H % T, h = row % H;
  float total = get_or(0, args.bias, h, f);
  for (int64_t first = 0; first < K; first += 16) {  // sums of 16: one long sum rounds more
    float sum = 0;
    for (int64_t k = first; k < min(K, first + 16); ++k) sum = fmaf(get(args.x, b, t, h, k), get(args.weight, h, k, f), sum);
    total += sum;
  }
  put(out, total, b, t, h, f);
}

}  // namespace linnet::cuda
