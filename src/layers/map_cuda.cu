// Map programs on the GPU: a thread runs the whole program for its element, registers are its own. With reductions a block has
// a row, and runs the program up to each reduction for all of its elements before the next.
#include "layers/map_cuda.h"
#include "ptx/numbers.cuh"

namespace linnet::cuda {
namespace {

using layers::kMapRank;
using layers::kMapRegisters;
using layers::MapCode;
using layers::MapStep;
using layers::MapTensor;

constexpr int kMost = 16;  // reductions of a program

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0) + log1pf(expf(-fabsf(x))); }
__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }
__device__ __forceinline__ bool is_reduction(MapCode code) {
  return code == MapCode::sum || code == MapCode::mean || code == MapCode::amax;
}

struct Place {
  int64_t index[kMapRank];  // of all dimensions but the last
};
__device__ Place place_of(const MapLaunch& m, int64_t row) {
  Place p;
  for (int d = m.rank - 2; d >= 0; --d) {
    p.index[d] = row % m.size[d];
    row /= m.size[d];
  }
  return p;
}
__device__ int64_t offset_of(const MapLaunch& m, const MapTensor& x, const Place& p) {
  int64_t offset = 0;
  for (int d = 0; d < m.rank - 1; ++d) offset += p.index[d] * x.stride[d];
  return offset;
}

__device__ float apply(MapCode code, float a, float b) {
  switch (code) {
    case MapCode::add: return a + b;
    case MapCode::sub: return a - b;
    case MapCode::mul: return a * b;
    case MapCode::div: return a / b;
    case MapCode::min: return a < b || isnan(a) ? a : b;
    case MapCode::max: return a > b || isnan(a) ? a : b;
    case MapCode::neg: return -a;
    case MapCode::exp: return expf(a);
    case MapCode::expm1: return expm1f(a);
    case MapCode::log: return logf(a);
    case MapCode::log1p: return log1pf(a);
    case MapCode::sqrt: return sqrtf(a);
    case MapCode::rsqrt: return 1 / sqrtf(a);
    case MapCode::abs: return fabsf(a);
    case MapCode::square: return a * a;
    case MapCode::tanh: return tanhf(a);
    case MapCode::erf: return erff(a);
    case MapCode::sin: return static_cast<float>(sin(static_cast<double>(a)));  // of positions: large arguments
    case MapCode::cos: return static_cast<float>(cos(static_cast<double>(a)));
    case MapCode::sigmoid: return sigmoid(a);
    case MapCode::silu: return a * sigmoid(a);
    case MapCode::softplus: return softplus(a);
    case MapCode::logsigmoid: return -softplus(-a);
    case MapCode::relu: return a > 0 || isnan(a) ? a : 0;
    case MapCode::gelu: return 0.5f * a * (1 + erff(a * 0.70710678118654752440f));
    case MapCode::gelu_tanh: return 0.5f * a * (1 + tanhf(0.79788456080286535588f * (a + 0.044715f * a * a * a)));
    default: return a;
  }
}

// Register `wanted` of element i of a row after the first `steps` steps; totals: of the reductions among them.
__device__ float evaluate(const MapLaunch& m, const Place& p, int64_t i, int steps, int wanted, const float* totals) {
  float r[kMapRegisters];
  int reductions = 0;
  for (int s = 0; s < steps; ++s) {
    const MapStep& step = m.program.step[s];
    const float value = static_cast<float>(step.value);
    if (step.code == MapCode::load) {
      const MapTensor& x = m.input[step.a];
      r[step.to] = ptx::load(x.data, x.dtype, offset_of(m, x, p) + i * x.stride[m.rank - 1]);
    } else if (step.code == MapCode::constant) {
      r[step.to] = value;
    } else if (is_reduction(step.code)) {
      r[step.to] = totals[reductions++];
    } else {
      r[step.to] = apply(step.code, step.a < 0 ? value : r[step.a], step.b < 0 ? value : r[step.b]);
    }
  }
  return r[wanted];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) map_elements(const __grid_constant__ MapLaunch m) {
  const int64_t at = blockIdx.x * 256ll + threadIdx.x, width = m.size[m.rank - 1], row = at / width, i = at % width;
  int64_t rows = 1;
  for (int d = 0; d < m.rank - 1; ++d) rows *= m.size[d];
  if (row >= rows) return;
  const Place p = place_of(m, row);
  const float y = evaluate(m, p, i, m.program.steps, 0, nullptr);
  ptx::store(m.out.data, m.out.dtype, offset_of(m, m.out, p) + i * m.out.stride[m.rank - 1], y);
}

extern "C" __global__ void __launch_bounds__(128) map_rows(const __grid_constant__ MapLaunch m) {
  __shared__ double parts[128];
  __shared__ float totals[kMost];
  const int64_t width = m.size[m.rank - 1];
  const Place p = place_of(m, blockIdx.x);
  int reductions = 0;
  for (int s = 0; s < m.program.steps; ++s) {
    const MapStep& step = m.program.step[s];
    if (!is_reduction(step.code)) continue;
    const bool largest = step.code == MapCode::amax;
    double mine = largest ? -INFINITY : 0;
    for (int64_t i = threadIdx.x; i < width; i += 128) {
      const double x = evaluate(m, p, i, s, step.a, totals);
      mine = !largest ? mine + x : x > mine || isnan(x) ? x : mine;
    }
    parts[threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
      double all = parts[0];
      for (int t = 1; t < 128; ++t) all = !largest ? all + parts[t] : parts[t] > all || isnan(parts[t]) ? parts[t] : all;
      totals[reductions] = static_cast<float>(step.code == MapCode::mean ? all / static_cast<double>(width) : all);
    }
    __syncthreads();
    ++reductions;
  }
  const int64_t offset = offset_of(m, m.out, p);
  for (int64_t i = threadIdx.x; i < (m.program.drops ? 1 : width); i += 128) {
    const float y = evaluate(m, p, i, m.program.steps, 0, totals);
    ptx::store(m.out.data, m.out.dtype, offset + (m.program.drops ? 0 : i * m.out.stride[m.rank - 1]), y);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    copy_elements(const __grid_constant__ View from, const __grid_constant__ View to) {
  int64_t rest = blockIdx.x * 256ll + threadIdx.x, source = 0, target = 0;
  for (int d = from.rank - 1; d >= 0; --d) {
    const int64_t index = rest % from.size[d];
    rest /= from.size[d];
    source += index * from.stride[d];
    target += index * to.stride[d];
  }
  if (rest > 0) return;
  switch (from.dtype) {
    case Dtype::f64:
    case Dtype::i64: static_cast<int64_t*>(to.data)[target] = static_cast<const int64_t*>(from.data)[source]; break;
    case Dtype::f32:
    case Dtype::i32: static_cast<int32_t*>(to.data)[target] = static_cast<const int32_t*>(from.data)[source]; break;
    case Dtype::bf16:
    case Dtype::f16: static_cast<uint16_t*>(to.data)[target] = static_cast<const uint16_t*>(from.data)[source]; break;
    default: static_cast<uint8_t*>(to.data)[target] = static_cast<const uint8_t*>(from.data)[source]; break;
  }
}

extern "C" __global__ void __launch_bounds__(256) set_lengths(const __grid_constant__ View lengths, int64_t value) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i < lengths.size[0]) static_cast<int64_t*>(lengths.data)[i * lengths.stride[0]] = value;
}
extern "C" __global__ void __launch_bounds__(256) set_positions(float* to, int64_t count, int64_t first) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i < count) to[i] = static_cast<float>(first + i);
}

}  // namespace linnet::cuda
