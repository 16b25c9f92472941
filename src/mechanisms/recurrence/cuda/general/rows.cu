// Rows before and behind the general engine: a warp has a row.
#include "mechanisms/recurrence/cuda/general/planes.cuh"
#include "mechanisms/recurrence/cuda/general/rows.h"

namespace linnet::cuda {
namespace {

struct At {
  int64_t row, b, t;
  int head, lane;
};
__device__ __forceinline__ At row_at(int64_t T, int heads) {
  At a;
  a.row = blockIdx.x * 8ll + threadIdx.x / 32;
  a.lane = threadIdx.x % 32;
  const int64_t token = a.row / heads;
  a.head = static_cast<int>(a.row - token * heads);
  a.b = token / T;
  a.t = token - a.b * T;
  return a;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) general_copy(const __grid_constant__ CopyRows c) {
  const At a = row_at(c.T, c.heads);
  if (a.row >= c.B * c.T * c.heads) return;
  void* to = const_cast<void*>(c.to.data);
  const int64_t place = row_of(c.to, a.b, a.t, a.head), source = row_of(c.from, a.b, a.t, a.head);
  const bool there = c.from.data != nullptr && (c.mask == nullptr || c.mask[a.b * c.mask_stride_b + a.t] != 0);
  float factor = 1, dot = 0;
  if (c.den.data != nullptr) {
    const float sum = ptx::load(c.den.data, c.den.dtype, row_of(c.den, a.b, a.t, a.head));
    factor = sum == 0 ? 0 : 1 / sum;
    const int64_t result = row_of(c.out, a.b, a.t, a.head);
    for (int i = a.lane; i < c.channels && there; i += 32)
      dot = fmaf(ptx::load(c.from.data, c.from.dtype, source + i), ptx::load(c.out.data, c.out.dtype, result + i), dot);
    dot = ptx::sum_lanes<32>(dot);
  }
  for (int i = a.lane; i < c.width; i += 32) {
    float x = 0;
    if (there && i < c.channels) x = factor * apply(c.from.map, ptx::load(c.from.data, c.from.dtype, source + i));
    if (i == c.channels && c.ones) x = c.den.data != nullptr ? -dot * factor : 1;
    ptx::store(to, c.to.dtype, place + i, x);
  }
}

namespace {

// 8 channels from `c` on, zeros behind the last one.
template <class T>
__device__ __forceinline__ void load_piece(const T* row, int c, int channels, float (&x)[8]) {
  const T* at = row + c;
  if (c + 8 > channels || reinterpret_cast<uintptr_t>(at) % 16 != 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = c + i < channels ? static_cast<float>(at[i]) : 0;
  } else if constexpr (sizeof(T) == 4) {
    float low[4], high[4];
    ptx::to_floats<float>(ptx::load_once(at), low);
    ptx::to_floats<float>(ptx::load_once(at + 4), high);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = low[i], x[4 + i] = high[i];
  } else {
    ptx::to_floats<T>(ptx::load_once(at), x);
  }
}
template <class T>
__device__ __forceinline__ void store_piece(T* row, int c, int channels, const float (&x)[8]) {
  T* at = row + c;
  if (c + 8 > channels || reinterpret_cast<uintptr_t>(at) % 16 != 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (c + i < channels) at[i] = static_cast<T>(x[i]);
    }
  } else if constexpr (sizeof(T) == 4) {
    ptx::store_once(at, ptx::from_floats<float>({x[0], x[1], x[2], x[3]}));
    ptx::store_once(at + 4, ptx::from_floats<float>({x[4], x[5], x[6], x[7]}));
  } else {
    ptx::store_once(at, ptx::from_floats<T>(x));
  }
}

// 8 channels to a thread, 16 threads to a row, two rows at once. The source has the type of the result.
template <class From, class To>
__device__ __forceinline__ void fit(const FitRows& f) {
  const uint32_t heads = f.heads, T = static_cast<uint32_t>(f.T), rows = static_cast<uint32_t>(f.B * f.T * heads);
  const int c = threadIdx.x % 16 * 8;
  const bool back = f.source.data != nullptr;
  float x[2][8] = {}, d[2][8] = {};
  uint32_t b[2], t[2], head[2];
  bool there[2], wanted[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t row = blockIdx.x * 32u + 16 * i + threadIdx.x / 16, token = row / heads;
    head[i] = row - token * heads;
    b[i] = token / T;
    t[i] = token - b[i] * T;
    there[i] = row < rows;
    wanted[i] = there[i] && c < f.channels && (f.mask == nullptr || f.mask[b[i] * f.mask_stride_b + t[i]] != 0);
    if (wanted[i]) {
      load_piece(static_cast<const From*>(f.from.data) + row_of(f.from, b[i], t[i], head[i]), c, f.channels, d[i]);
      if (back) load_piece(static_cast<const To*>(f.source.data) + row_of(f.source, b[i], t[i], head[i]), c, f.channels, x[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (f.l2_norm) {
      float squares = 0, dots = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float y = back ? x[i][j] : d[i][j];
        squares = fmaf(y, y, squares);
        dots = fmaf(y, d[i][j], dots);
      }
      squares = ptx::sum_lanes<16>(squares);
      dots = ptx::sum_lanes<16>(dots);
      const float r = 1 / sqrtf(squares + 1e-6f), cube = r * r * r;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float across = f.channels == 1 ? 0 : squares * d[i][j] - x[i][j] * dots;
        d[i][j] = back ? cube * fmaf(1e-6f, d[i][j], across) : r * d[i][j];
      }
    } else if (f.from.map != Map::identity || f.source.map != Map::identity) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (wanted[i] && c + j < f.channels)
          d[i][j] = back ? d[i][j] * derivative(f.source.map, x[i][j]) : apply(f.from.map, d[i][j]);
      }
    }
    if (there[i] && c < f.width) {
      To* to = static_cast<To*>(const_cast<void*>(f.to.data)) + row_of(f.to, b[i], t[i], head[i]);
      store_piece(to, c, f.width, d[i]);
    }
  }
}

}  // namespace

#define LINNET_FIT(name, From, To) \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ FitRows f) { fit<From, To>(f); }
LINNET_FIT(fit_rows_bf16, __nv_bfloat16, __nv_bfloat16)
LINNET_FIT(fit_rows_f16, __half, __half)
LINNET_FIT(fit_rows_f32_bf16, float, __nv_bfloat16)
LINNET_FIT(fit_rows_f32, float, float)

extern "C" __global__ void __launch_bounds__(256) general_norms(const __grid_constant__ NormOfRows n) {
  const At a = row_at(n.T, n.heads);
  if (a.row >= n.B * n.T * n.heads) return;
  const int64_t place = row_of(n.from, a.b, a.t, a.head);
  float sum = 0;
  for (int i = a.lane; i < n.channels; i += 32) {
    const float x = ptx::load(n.from.data, n.from.dtype, place + i);
    sum = fmaf(x, x, sum);
  }
  sum = ptx::sum_lanes<32>(sum);
  if (a.lane == 0) n.norms[a.row] = 1 / sqrtf(sum + 1e-6f);
}

// dx = r^3 (eps d + (x.x d - x (x.d))), for f32 with the bracket in double: it cancels where d is along x.
extern "C" __global__ void __launch_bounds__(256) general_finish(const __grid_constant__ FinishRows f) {
  const At a = row_at(f.T, f.heads);
  if (a.row >= f.B * f.T * f.heads) return;
  const int64_t place = row_of(f.result, a.b, a.t, a.head), source = row_of(f.source, a.b, a.t, a.head);
  const int64_t all = static_cast<int64_t>(f.heads) * f.group;
  const float* part = f.parts + ((a.b * f.T + a.t) * all + a.head * f.group) * f.channels;
  const bool there = f.mask == nullptr || f.mask[a.b * f.mask_stride_b + a.t] != 0;
  int64_t n = a.b;
  if (f.bias.data != nullptr && f.offsets != nullptr) {
    n = 0;  // the last sequence that begins at or before the token
    for (int64_t i = 0; i < f.N; ++i) {
      const int64_t begin =
          f.offsets_64 ? static_cast<const int64_t*>(f.offsets)[i] : static_cast<const int32_t*>(f.offsets)[i];
      if (begin <= a.t) n = i;
    }
  }
  // 4 neighbours to a lane, twice: the parts lie dense.
  const bool exact = f.source.dtype == Dtype::f32;
  float d[8], x[8];
  double squares = 0, dots = 0;
  float squares_quick = 0, dots_quick = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int i = j / 4 * 128 + 4 * a.lane + j % 4;
    d[j] = x[j] = 0;
    if (i >= f.channels) continue;
    for (int h = 0; h < f.group; ++h) {
      d[j] += part[h * f.channels + i];
      if (f.bias.data != nullptr)
        d[j] += f.bias.data[n * f.bias.stride_n + (a.head * f.group + h) * f.bias.stride_h + i * f.bias.stride_row];
    }
    if (f.norms != nullptr || f.source.map != Map::identity) x[j] = ptx::load(f.source.data, f.source.dtype, source + i);
    if (exact) {
      squares += static_cast<double>(x[j]) * x[j];
      dots += static_cast<double>(x[j]) * d[j];
    } else {
      squares_quick = fmaf(x[j], x[j], squares_quick);
      dots_quick = fmaf(x[j], d[j], dots_quick);
    }
  }
  if (f.norms != nullptr) {
    if (exact) {
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        squares += __shfl_xor_sync(0xffffffff, squares, step);
        dots += __shfl_xor_sync(0xffffffff, dots, step);
      }
    } else {
      squares_quick = ptx::sum_lanes<32>(squares_quick);
      dots_quick = ptx::sum_lanes<32>(dots_quick);
    }
  }
  const float r = f.norms != nullptr ? f.norms[a.row] : 1;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int i = j / 4 * 128 + 4 * a.lane + j % 4;
    if (i >= f.channels) continue;
    float y[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      y[k] = d[j + k];
      if (f.norms != nullptr) {
        if (exact) {
          const double across = f.channels == 1 ? 0 : squares * d[j + k] - static_cast<double>(x[j + k]) * dots;
          y[k] = static_cast<float>(static_cast<double>(r) * r * r * (1e-6 * d[j + k] + across));
        } else {
          const float across = f.channels == 1 ? 0 : squares_quick * d[j + k] - x[j + k] * dots_quick;
          y[k] = r * r * r * fmaf(1e-6f, d[j + k], across);
        }
      } else if (f.source.map != Map::identity) {
        y[k] *= derivative(f.source.map, x[j + k]);
      }
      if (!there) y[k] = 0;
    }
    store_results(f.result, place + i, i + 1 < f.channels, y[0], y[1]);
  }
}

// dg of one number for a head, from the sums of rows of a chunk: sums [3, parts, tiles, 64].
extern "C" __global__ void __launch_bounds__(64) general_gates(const __grid_constant__ General g, int parts) {
  const Engine& e = g.e;
  const Place p = chunk_of(e);
  if (p.rows == 0) return;
  __shared__ float rows[64], writes[64];
  const int t = threadIdx.x;
  float sums[3] = {};
  for (int kind = 0; kind < 3; ++kind) {
    for (int part = 0; part < parts; ++part)
      sums[kind] += g.sums[((kind * parts + part) * g.tiles + p.tile) * 64 + (kind == 2 ? 0 : t)];
  }
  rows[t] = sums[0];
  writes[t] = sums[1];
  __syncthreads();
  if (t >= p.rows) return;
  float sum = sums[2];
  for (int i = 0; i < t; ++i) sum += writes[i];
  float later = 0;
  for (int i = 63; i >= t; --i) later += rows[i];
  const float gate = ptx::load(e.g.data, e.g.dtype, row_of(e.g, p.b, p.first + t, p.h));
  ptx::store(const_cast<void*>(g.dg.data), g.dg.dtype, row_of(g.dg, p.b, p.first + t, p.h), expf(gate) == 0 ? 0 : sum + later);
}

// result[head] = the sum over tokens of [tokens, H], by a block a head.
extern "C" __global__ void __launch_bounds__(256)
    general_sum_tokens(const float* from, int64_t tokens, int H, void* to, int dtype, int64_t stride) {
  __shared__ float parts[8];
  double sum = 0;
  for (int64_t t = threadIdx.x; t < tokens; t += 256) sum += from[t * H + blockIdx.x];
  const float all = ptx::sum_block<256>(static_cast<float>(sum), parts);
  if (threadIdx.x == 0) ptx::store(to, static_cast<Dtype>(dtype), blockIdx.x * stride, all);
}

}  // namespace linnet::cuda
