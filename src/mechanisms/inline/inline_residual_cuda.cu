// The residual of inline_residual on the GPU, behind the attention of inline_cuda.cu, which leaves f32 rows. The coefficients
// of a batch row and head are small products, summed in double by one block; a thread has an element of everything else.
#include "mechanisms/inline/inline_residual_cuda.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

__device__ __forceinline__ double gelu(double x) { return x * normcdf(x); }
__device__ __forceinline__ double gelu_slope(double x) { return normcdf(x) + x * exp(-0.5 * x * x) * 0.3989422804014327; }

__device__ __forceinline__ bool takes_part(const View& mask, int64_t b, int64_t t) {
  return !is_given(mask) || static_cast<const uint8_t*>(mask.data)[place(mask, b, t)] != 0;
}
// The token that lies by `tap` from token t of the grid, or, back, the one from which t lies so; -1: none.
__device__ __forceinline__ int64_t neighbour(const InlineResidualArgs& args, int64_t t, int tap, bool back) {
  const int64_t place = t - args.prefix;
  if (place < 0) return -1;
  const int dy = tap / 3 - 1, dx = tap % 3 - 1;
  const int64_t y = place / args.width + (back ? -dy : dy), x = place % args.width + (back ? -dx : dx);
  return y < 0 || y >= args.height || x < 0 || x >= args.width ? -1 : args.prefix + y * args.width + x;
}

}  // namespace

// r = w2 gelu(w1 pooled + b1) + b2; a block has a batch row and head.
extern "C" __global__ void __launch_bounds__(128) residual_coefficients(const __grid_constant__ InlineResidualRows rows) {
  const InlineResidualArgs& args = rows.args;
  const int64_t H = args.q.size[2], D = args.q.size[3], b = blockIdx.x / H, h = blockIdx.x % H;
  float *const pre = rows.pre + blockIdx.x * D, *const r = rows.r + blockIdx.x * 9 * D;
  for (int64_t i = threadIdx.x; i < D; i += 128) {
    double sum = get(args.b1, h, i);
    for (int64_t c = 0; c < D; ++c) sum += static_cast<double>(get(args.w1, h, i, c)) * get(args.pooled, b, h, c);
    pre[i] = static_cast<float>(sum);
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < 9 * D; i += 128) {
    double sum = get(args.b2, h, i);
    for (int64_t c = 0; c < D; ++c) sum += get(args.w2, h, i, c) * gelu(pre[c]);
    r[i] = static_cast<float>(sum);
    if (is_given(rows.out.r)) put(rows.out.r, r[i], b, h, i / 9, i % 9);
  }
}

// out = attention + residual, or dv, whose rows are read the other way.
extern "C" __global__ void __launch_bounds__(256) residual_add(const __grid_constant__ InlineResidualRows rows, bool back) {
  const InlineResidualArgs& args = rows.args;
  const int64_t T = args.q.size[1], H = args.q.size[2], D = args.q.size[3], i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= args.q.size[0] * T * H * D) return;
  const int64_t c = i % D, h = i / D % H, t = i / D / H % T, b = i / D / H / T;
  const View& from = back ? rows.grads.dout : args.v;
  float sum = rows.attention[i];
  for (int tap = 0; tap < 9 && is_given(from); ++tap) {
    const int64_t other = neighbour(args, t, tap, back);
    if (other < 0 || !takes_part(args.mask, b, back ? t : other)) continue;
    sum = fmaf(rows.r[(b * H + h) * 9 * D + c * 9 + tap], get(from, b, other, h, c), sum);
  }
  put(back ? rows.grads.dv : rows.out.out, sum, b, t, h, c);
}

// dr and dpre of a batch row and head, and dpooled.
extern "C" __global__ void __launch_bounds__(128) residual_gradients(const __grid_constant__ InlineResidualRows rows) {
  const InlineResidualArgs& args = rows.args;
  const int64_t T = args.q.size[1], H = args.q.size[2], D = args.q.size[3], b = blockIdx.x / H, h = blockIdx.x % H;
  const float* const pre = rows.pre + blockIdx.x * D;
  float *const dr = rows.dr + blockIdx.x * 9 * D, *const dpre = rows.dpre + blockIdx.x * D;
  for (int64_t i = threadIdx.x; i < 9 * D; i += 128) {
    const int64_t c = i / 9;
    double sum = 0;
    for (int64_t t = args.prefix; t < T && is_given(rows.grads.dout); ++t) {
      const int64_t from = neighbour(args, t, static_cast<int>(i % 9), false);
      if (from < 0 || !takes_part(args.mask, b, from)) continue;
      sum += static_cast<double>(get(rows.grads.dout, b, t, h, c)) * get(args.v, b, from, h, c);
    }
    dr[i] = static_cast<float>(sum);
  }
  __syncthreads();
  for (int64_t c = threadIdx.x; c < D; c += 128) {
    double sum = 0;
    for (int64_t i = 0; i < 9 * D; ++i) sum += static_cast<double>(get(args.w2, h, i, c)) * dr[i];
    dpre[c] = static_cast<float>(sum * gelu_slope(pre[c]));
  }
  __syncthreads();
  if (!is_given(rows.grads.dpooled)) return;
  for (int64_t c = threadIdx.x; c < D; c += 128) {
    double sum = 0;
    for (int64_t i = 0; i < D; ++i) sum += static_cast<double>(get(args.w1, h, i, c)) * dpre[i];
    put(rows.grads.dpooled, static_cast<float>(sum), b, h, c);
  }
}

// Gradients of both maps and their biases, summed over the batch: rows i < D of the first, then those of the second; column D
// is the bias.
extern "C" __global__ void __launch_bounds__(256) residual_parameters(const __grid_constant__ InlineResidualRows rows) {
  const InlineResidualArgs& args = rows.args;
  const int64_t B = args.q.size[0], H = args.q.size[2], D = args.q.size[3], at = blockIdx.x * 256ll + threadIdx.x;
  if (at >= H * 10 * D * (D + 1)) return;
  const int64_t c = at % (D + 1), row = at / (D + 1) % (10 * D), h = at / (D + 1) / (10 * D);
  const bool first = row < D, bias = c == D;
  const int64_t i = first ? row : row - D;
  const View& to = first ? (bias ? rows.grads.db1 : rows.grads.dw1) : (bias ? rows.grads.db2 : rows.grads.dw2);
  if (!is_given(to)) return;
  double sum = 0;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t unit = b * H + h;
    const double left = first ? rows.dpre[unit * D + i] : rows.dr[unit * 9 * D + i];
    sum += left * (bias ? 1 : first ? get(args.pooled, b, h, c) : gelu(rows.pre[unit * D + c]));
  }
  if (bias) {
    put(to, static_cast<float>(sum), h, i);
  } else {
    put(to, static_cast<float>(sum), h, i, c);
  }
}

}  // namespace linnet::cuda
