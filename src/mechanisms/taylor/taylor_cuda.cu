// The maps of taylor, forward and backward: a warp has a row of one head, its channels in shared memory.
#include "mechanisms/shared/pieces.cuh"
#include "taylor_cuda.h"

namespace linnet::cuda {
namespace {

constexpr float kRootHalf = 0.70710678118654752440f;

struct Row {
  const TaylorRows& r;
  float *x, *y, *d;  // [K] each
  int64_t b, t;
  int h, lane, K;

  __device__ float scalar(const View& view) const { return get_or(1, view, 0); }
  __device__ void load() {
    for (int c = lane; c < K; c += 32) x[c] = get(r.x, b, t, h, c);
    __syncwarp();
  }
  __device__ int pair_at(int i, int j) const { return 1 + 2 * K + i * (K - 1) - i * (i - 1) / 2 + j - i - 1; }
  // to = from / (|from| + eps); returns the length
  __device__ float unit(const float* from, float* to) const {
    float square = 0;
    for (int c = lane; c < K; c += 32) square = fmaf(from[c], from[c], square);
    const float length = sqrtf(ptx::sum_lanes<32>(square)), norm = length + static_cast<float>(r.map.eps);
    for (int c = lane; c < K; c += 32) to[c] = norm == 0 ? 0 : from[c] / norm;
    __syncwarp();
    return length;
  }
  // d = J^T d of unit, `length` that of x
  __device__ void unit_backward(const float* from, float length, float* to) const {
    float dot = 0;
    for (int c = lane; c < K; c += 32) dot = fmaf(from[c], to[c], dot);
    dot = ptx::sum_lanes<32>(dot);
    const float norm = length + static_cast<float>(r.map.eps);
    for (int c = lane; c < K; c += 32) to[c] = length == 0 ? 0 : (to[c] - from[c] * (dot / length / norm)) / norm;
    __syncwarp();
  }
  template <class Put>
  __device__ void apply(const Put& put) {
    const float root = sqrtf(static_cast<float>(r.map.scale));
    switch (r.map.mode) {
      case TaylorMode::exact:
        if (lane == 0) put(0, 1);
        for (int i = lane; i < K; i += 32) {
          put(1 + i, root * x[i]);
          put(1 + K + i, root * x[i] * (root * x[i]) * kRootHalf);
        }
        for (int i = 0; i + 1 < K; ++i) {
          for (int j = i + 1 + lane; j < K; j += 32) put(pair_at(i, j), root * x[i] * (root * x[j]));
        }
        break;
      case TaylorMode::compact: {
        const float alpha = scalar(r.alpha), beta = scalar(r.beta);
        for (int i = lane; i < K; i += 32) {
          put(i, kRootHalf * alpha * x[i] * x[i]);
          put(K + i, beta * root * x[i]);
        }
        if (lane == 0) put(2 * K, kRootHalf * scalar(r.gamma)), put(2 * K + 1, kRootHalf);
        break;
      }
      case TaylorMode::compact_l2:
        unit(x, y);
        for (int i = lane; i < K; i += 32) y[i] *= y[i];
        __syncwarp();
        unit(y, d);
        for (int i = lane; i < K; i += 32) put(i, d[i]);
        if (lane == 0) put(K, scalar(r.constant));
        break;
    }
  }
  template <class Get, class Put>
  __device__ void backward(const Get& df, const Put& put, float* scalars) {
    const float root = sqrtf(static_cast<float>(r.map.scale)), scale = static_cast<float>(r.map.scale);
    switch (r.map.mode) {
      case TaylorMode::exact:
        for (int i = lane; i < K; i += 32) {
          float sum = root * df(1 + i) + 2 * kRootHalf * scale * x[i] * df(1 + K + i);
          for (int j = 0; j < K; ++j) {
            if (j != i) sum = fmaf(scale * x[j], df(j < i ? pair_at(j, i) : pair_at(i, j)), sum);
          }
          put(i, sum);
        }
        break;
      case TaylorMode::compact: {
        const float alpha = scalar(r.alpha), beta = scalar(r.beta);
        float square = 0, line = 0;
        for (int i = lane; i < K; i += 32) {
          put(i, 2 * kRootHalf * alpha * x[i] * df(i) + beta * root * df(K + i));
          square = fmaf(kRootHalf * x[i] * x[i], df(i), square);
          line = fmaf(root * x[i], df(K + i), line);
        }
        square = ptx::sum_lanes<32>(square);
        line = ptx::sum_lanes<32>(line);
        if (lane == 0 && scalars != nullptr) scalars[0] = square, scalars[1] = line, scalars[2] = kRootHalf * df(2 * K);
        break;
      }
      case TaylorMode::compact_l2: {
        const float first = unit(x, y);
        float square = 0;
        for (int i = lane; i < K; i += 32) {
          const float s = y[i] * y[i];
          square = fmaf(s, s, square);
          d[i] = df(i);
        }
        __syncwarp();
        const float second = sqrtf(ptx::sum_lanes<32>(square));
        // of unit(y^2): with y^2 in place of x
        float dot = 0;
        for (int i = lane; i < K; i += 32) dot = fmaf(y[i] * y[i], d[i], dot);
        dot = ptx::sum_lanes<32>(dot);
        const float norm = second + static_cast<float>(r.map.eps);
        for (int i = lane; i < K; i += 32) {
          d[i] = second == 0 ? 0 : 2 * y[i] * (d[i] - y[i] * y[i] * (dot / second / norm)) / norm;
        }
        __syncwarp();
        unit_backward(x, first, d);
        for (int i = lane; i < K; i += 32) put(i, d[i]);
        if (lane == 0 && scalars != nullptr) scalars[0] = df(K), scalars[1] = scalars[2] = 0;
        break;
      }
    }
  }
};

__device__ __forceinline__ bool takes_part(const TaylorRows& r, int64_t b, int64_t t) {
  return !is_given(r.key_mask) || static_cast<const uint8_t*>(r.key_mask.data)[place(r.key_mask, b, t)] != 0;
}
__device__ __forceinline__ Row row_of(const TaylorRows& r, float* memory, int64_t number) {
  const int K = static_cast<int>(r.map.K);
  float* own = memory + threadIdx.x / 32 * 3 * K;
  const int64_t bt = number / r.H;
  return {r, own, own + K, own + 2 * K, bt / r.T, bt % r.T, static_cast<int>(number % r.H), static_cast<int>(threadIdx.x % 32),
          K};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128) taylor_map(const __grid_constant__ TaylorRows r) {
  extern __shared__ float memory[];
  const int64_t number = blockIdx.x * int64_t{kTaylorWarps} + threadIdx.x / 32;
  if (number >= r.rows) return;
  Row row = row_of(r, memory, number);
  float* phi = r.phi + number * r.padded;
  const bool part = takes_part(r, row.b, row.t);
  for (int f = (part ? static_cast<int>(r.map.F) : 0) + row.lane; f < r.padded; f += 32) phi[f] = 0;
  if (!part) return;
  row.load();
  row.apply([&](int f, float value) {
    phi[f] = value;
    if (is_given(r.phi_out)) put(r.phi_out, value, row.b, row.t, row.h, f);
  });
}

extern "C" __global__ void __launch_bounds__(128) taylor_back(const __grid_constant__ TaylorRows r) {
  extern __shared__ float memory[];
  const int64_t number = blockIdx.x * int64_t{kTaylorWarps} + threadIdx.x / 32;
  if (number >= r.rows) return;
  Row row = row_of(r, memory, number);
  float* scalars = r.scalars == nullptr ? nullptr : r.scalars + 3 * number;
  if (!takes_part(r, row.b, row.t)) {
    for (int c = row.lane; c < row.K && is_given(r.dx); c += 32) put(r.dx, 0, row.b, row.t, row.h, c);
    if (row.lane < 3 && scalars != nullptr) scalars[row.lane] = 0;
    return;
  }
  row.load();
  const float* dphi = r.dphi + number * r.padded;
  row.backward(
      [&](int f) {
        float sum = dphi[f];
        for (int i = 1; i < r.parts; ++i) sum += dphi[i * r.part_stride + f];
        return sum;
      },
      [&](int c, float value) {
        if (is_given(r.dx)) put(r.dx, value, row.b, row.t, row.h, c);
      },
      scalars);
}

}  // namespace linnet::cuda
