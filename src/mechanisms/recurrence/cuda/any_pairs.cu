// The gradient of one decay for all channels of a head (tile/gradients.h) where the tiled kernels do not go, on every GPU: a
// block has one chunk of 64 tokens of a head.
#include "mechanisms/recurrence/cuda/tile/dg.cuh"

namespace linnet::cuda {
namespace {

// Any width up to 256 and any type, in f32: products of 64 x 64 by 256 threads with 4 x 4 sums each.
struct AnyShared {
  float a[C][33], b[C][33];
  float parts[16][C];
  float reads[C], writes[C], rows[C], columns[C];
  double sums[C];
  float block[8];
};
template <class A, class B>
__device__ void multiply(AnyShared& s, int depth, const A& a, const B& b, float (&x)[4][4]) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  for (int i = 0; i < 16; ++i) x[i / 4][i % 4] = 0;
  for (int from = 0; from < depth; from += 32) {
    __syncthreads();
    for (int i = threadIdx.x; i < C * 32; i += 256) {
      const int k = from + i % 32;
      s.a[i / 32][i % 32] = k < depth ? a(i / 32, k) : 0;
      s.b[i / 32][i % 32] = k < depth ? b(i / 32, k) : 0;
    }
    __syncthreads();
    for (int k = 0; k < 32; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] = fmaf(s.a[ty + 16 * i][k], s.b[tx + 16 * j][k], x[i][j]);
      }
    }
  }
}
__device__ float over_columns(float x) {  // the sum over tx
  for (int step = 1; step < 16; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) pairs_any(const __grid_constant__ Pairs pairs) {
  __shared__ AnyShared s;
  const Engine& e = pairs.e;
  const int h = blockIdx.x % e.H, chunk = blockIdx.y, tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int64_t n = blockIdx.x / e.H;
  const Walk w = walk_of(e, n, 0, false);
  if (chunk >= w.count) return;
  const int rows = static_cast<int>(min(static_cast<int64_t>(C), w.length - static_cast<int64_t>(chunk) * C));
  const int64_t begin = w.begin + static_cast<int64_t>(chunk) * C;
  const auto row = [&](const Rows& from) {
    return [&from, &w, begin, rows, h](int i, int k) {
      return i < rows && from.data != nullptr ? ptx::load(from.data, from.dtype, row_of(from, w.b, begin + i, h) + k) : 0;
    };
  };
  if (threadIdx.x == 0) {  // in double: differences of sums keep all that f32 has
    double sum = 0;
    for (int i = 0; i < C; ++i) {
      const double g = i < rows ? ptx::load(e.g.data, e.g.dtype, row_of(e.g, w.b, begin + i, h)) : 0;
      s.sums[i] = sum += g < -1e4 ? -1e4 : g;
    }
  }
  float p[4][4], x[4][4];
  multiply(s, e.V, row(e.out), row(e.v), p);
  multiply(s, e.K, row(e.q), row(e.k), x);
  float columns[4] = {};
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int j = 0; j < 4; ++j) {
      const int r = ty + 16 * i, c = tx + 16 * j;
      const float pair = c < r && r < rows ? p[i][j] * x[i][j] * expf(static_cast<float>(s.sums[r] - s.sums[c])) : 0;
      sum += pair;
      columns[j] += pair;
    }
    sum = over_columns(sum);
    if (tx == 0) s.rows[ty + 16 * i] = sum;
  }
  for (int j = 0; j < 4; ++j) s.parts[ty][tx + 16 * j] = columns[j];
  __syncthreads();
  if (threadIdx.x < C) {
    float sum = 0;
    for (int i = 0; i < 16; ++i) sum += s.parts[i][threadIdx.x];
    s.columns[threadIdx.x] = sum;
  }
  // reads and writes: rows of q times S_0 (kept as [V, K]), then with dout; the same of k, dS_C and v
  const int64_t place = (saved_slot(e, n, w.begin, chunk) * e.H + h) * e.K * e.V;
  const Dtype kept = saved_dtype(e.q.dtype, e.K, e.V);
  for (int which = 0; which < 2; ++which) {
    const Rows &left = which == 0 ? e.q : e.k, &right = which == 0 ? e.out : e.v;
    float sums[4] = {};
    for (int from = 0; from < e.V; from += C) {
      multiply(
          s, e.K, row(left),
          [&](int v, int k) {
            return from + v < e.V ? ptx::load(pairs.saved[which], kept, place + static_cast<int64_t>(from + v) * e.K + k) : 0;
          },
          x);
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
          const int v = from + tx + 16 * j;
          if (v < e.V) sums[i] = fmaf(x[i][j], row(right)(ty + 16 * i, v), sums[i]);
        }
      }
    }
    for (int i = 0; i < 4; ++i) {
      const float sum = over_columns(sums[i]);
      if (tx == 0) (which == 0 ? s.reads : s.writes)[ty + 16 * i] = sum;
    }
  }
  float over = 0;
  for (int i = threadIdx.x; i < e.K * e.V; i += 256) {
    over = fmaf(ptx::load(pairs.saved[0], kept, place + i), ptx::load(pairs.saved[1], kept, place + i), over);
  }
  for (int step = 1; step < 32; step *= 2) over += __shfl_xor_sync(0xffffffff, over, step);
  if (threadIdx.x % 32 == 0) s.block[threadIdx.x / 32] = over;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  over = 0;
  for (int i = 0; i < 8; ++i) over += s.block[i];
  const double all = s.sums[C - 1];
  float whole[2], write[2];
  for (int i = 0; i < 2; ++i) {
    const int t = threadIdx.x + 32 * i;
    whole[i] = t < rows ? e.scale * (s.rows[t] - s.columns[t] + expf(static_cast<float>(s.sums[t])) * s.reads[t]) : 0;
    write[i] = t < rows ? e.scale * expf(static_cast<float>(all - s.sums[t])) * s.writes[t] : 0;
  }
  store_dg(pairs, w, h, chunk, threadIdx.x, whole, write, e.scale * expf(static_cast<float>(all)) * over,
           load_gates(pairs, w, h, chunk, threadIdx.x).g);
}

// out[h] = the sum of x [rows, H] over its rows: each thread every 256th row, then in order.
extern "C" __global__ void __launch_bounds__(256)
    sum_tokens(const float* x, int64_t rows, int H, void* out, int type, int64_t stride) {
  __shared__ double parts[256];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < rows; i += 256) sum += x[i * H + blockIdx.x];
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) ptx::store(out, static_cast<Dtype>(type), blockIdx.x * stride, static_cast<float>(parts[0]));
}

}  // namespace linnet::cuda
