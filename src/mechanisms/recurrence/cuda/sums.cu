// Sums over keys and groups of heads, and copies of states, for all kernels of the recurrence.
#include "mechanisms/recurrence/cuda/engine.h"
#include "mechanisms/recurrence/cuda/map.cuh"
#include "ptx/rows.cuh"

namespace linnet::cuda {

constexpr int kPart = 64;  // tokens whose sum is kept apart

// final_z = initial_z + the sum of the keys, per (sequence, head): 8 rows of tokens in parallel, 64 tokens at a time apart.
extern "C" __global__ void __launch_bounds__(256) sum_keys(const __grid_constant__ Engine e) {
  __shared__ float parts[8][32];
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32, c = blockIdx.y * 32 + lane, h = blockIdx.x % e.H;
  const int64_t n = blockIdx.x / e.H;
  int64_t b = n, begin = 0, end = e.T;
  if (e.offsets != nullptr) {
    b = 0;
    begin = offset(e, n);
    end = offset(e, n + 1);
  }
  float sum = 0, some = 0;
  for (int64_t t = begin + part, i = 1; t < end && c < e.K; t += 8, ++i) {
    if (e.write_mask == nullptr || e.write_mask[b * e.mask_stride_b + t] != 0) {
      some += apply(e.k.map, ptx::load(e.k.data, e.k.dtype, row_of(e.k, b, t, h) + c));
    }
    if (i % kPart != 0) continue;
    sum += some;
    some = 0;
  }
  parts[part][lane] = sum + some;
  __syncthreads();
  if (part != 0 || c >= e.K) return;
  const auto at = [&](const States& s) { return n * s.stride_n + h * s.stride_h + c * s.stride_row; };
  float all = parts[0][lane];
  for (int i = 1; i < 8; ++i) all += parts[i][lane];
  e.final_z.data[at(e.final_z)] = e.initial_z.data == nullptr ? all : e.initial_z.data[at(e.initial_z)] + all;
}

namespace {

template <class T>
__device__ void sum_pieces(const Rows& out, const T* part, int64_t B, int64_t T_, int heads, int group, int width) {
  constexpr int W = ptx::kVector<T>, kAhead = 8;  // parts on their way at once
  const int pieces = width / W;
  const int64_t total = B * T_ * heads * pieces;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < total; i += gridDim.x * 256ll) {
    const int64_t row = i / pieces, c = i % pieces * W, head = row % heads, t = row / heads % T_, b = row / heads / T_;
    const T* from = part + row * group * width + c;
    float sums[W] = {};
    for (int j = 0; j < group; j += kAhead) {
      uint4 raw[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) raw[k] = j + k < group ? ptx::load_once(from + (j + k) * width) : uint4{0, 0, 0, 0};
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        float x[W];
        ptx::to_floats<T>(raw[k], x);
#pragma unroll
        for (int n = 0; n < W; ++n) sums[n] += x[n];
      }
    }
    const int64_t place = b * out.stride_b + t * out.stride_t + head * out.stride_h + c;
#pragma unroll
    for (int n = 0; n < W; ++n) ptx::store(const_cast<void*>(out.data), out.dtype, place + n, sums[n]);
  }
}

}  // namespace

// Adds the heads of each group in order: out[b, t, head, c] = sum of part[b, t, head * group + i, c]; part is dense.
extern "C" __global__ void __launch_bounds__(256) sum_groups(const __grid_constant__ Rows out, const void* part, int type,
                                                             int64_t B, int64_t T, int heads, int group, int width) {
  const Dtype dtype = static_cast<Dtype>(type);
  if (width % (dtype == Dtype::f32 ? 4 : 8) == 0) {  // the parts lie dense, from a multiple of 16 bytes on
    if (dtype == Dtype::f32) return sum_pieces(out, static_cast<const float*>(part), B, T, heads, group, width);
    if (dtype == Dtype::bf16) return sum_pieces(out, static_cast<const __nv_bfloat16*>(part), B, T, heads, group, width);
    return sum_pieces(out, static_cast<const __half*>(part), B, T, heads, group, width);
  }
  const int64_t total = B * T * heads * width;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < total; i += gridDim.x * 256ll) {
    const int64_t c = i % width, head = i / width % heads, t = i / width / heads % T, b = i / width / heads / T;
    const int64_t from = ((b * T + t) * heads * group + head * group) * width + c;
    float sum = 0;
    for (int j = 0; j < group; ++j) sum += ptx::load(part, dtype, from + j * width);
    ptx::store(const_cast<void*>(out.data), out.dtype, b * out.stride_b + t * out.stride_t + head * out.stride_h + c, sum);
  }
}

// to := from, or zeros where `from` is absent.
extern "C" __global__ void __launch_bounds__(256)
    copy_states(const __grid_constant__ States to, const __grid_constant__ States from, int64_t N, int H, int rows,
                int columns) {
  const int64_t total = N * H * rows * columns;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < total; i += gridDim.x * 256ll) {
    const int64_t c = i % columns, r = i / columns % rows, h = i / columns / rows % H, n = i / columns / rows / H;
    const auto at = [&](const States& s) { return n * s.stride_n + h * s.stride_h + r * s.stride_row + c * s.stride_column; };
    to.data[at(to)] = from.data == nullptr ? 0 : from.data[at(from)];
  }
}

}  // namespace linnet::cuda
