// The rows around the walks of mapped_cuda.h: a warp has one.
#include "mechanisms/shared/mapped_cuda.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

__device__ __forceinline__ bool takes_part(const MappedCall& c, int64_t b, int64_t s) {
  return !is_given(c.t.key_mask) || static_cast<const uint8_t*>(c.t.key_mask.data)[place(c.t.key_mask, b, s)] != 0;
}

struct TokenRow {
  int64_t row, b, t;
  int h, lane;
};
__device__ __forceinline__ bool row_at(const MappedCall& c, int64_t tokens, TokenRow* r) {
  r->row = blockIdx.x * 8ll + threadIdx.x / 32;
  r->lane = threadIdx.x % 32;
  r->h = static_cast<int>(r->row % c.H);
  r->t = r->row / c.H % (tokens > 0 ? tokens : 1);
  r->b = r->row / c.H / (tokens > 0 ? tokens : 1);
  return r->row < c.B * tokens * c.H;
}
// Column `column` of a row of the parts, its tiles added.
__device__ __forceinline__ float part_at(const MappedCall& c, const TokenRow& r, int column) {
  float sum = 0;
  for (int tile = 0; tile < c.tiles; ++tile) sum += c.parts[(r.row * c.tiles + tile) * c.padded + column];
  return sum;
}

}  // namespace

// v0 [B, H, V]: the mean of the first 64 tokens' values that take part; causal: the first of them, which no later token
// changes. 0 where nothing is divided out.
extern "C" __global__ void __launch_bounds__(128) mapped_means(const __grid_constant__ MappedCall c) {
  const int64_t b = blockIdx.x / c.H;
  const int h = static_cast<int>(blockIdx.x % c.H);
  for (int j = threadIdx.x; j < c.V; j += 128) {
    float sum = 0, count = 0;
    for (int64_t s = 0; s < min(c.S, int64_t{64}) && !(c.causal && count > 0); ++s) {
      if (!takes_part(c, b, s)) continue;
      sum += get(c.t.v, b, s, h, j);
      count += 1;
    }
    const float mean = count == 0 || c.normalizer == Normalizer::none ? 0 : sum / count;
    c.v0[(b * c.H + h) * c.V + j] = isfinite(mean) ? mean : 0;
  }
}

// What is not finite must not reach earlier rows through the products of a chunk: such keys and values are zeros in the walks,
// and the rows from the first of them on become nan afterwards.
extern "C" __global__ void __launch_bounds__(256) mapped_begin(int* first, int64_t count) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i < count) first[i] = 0x7fffffff;
}
extern "C" __global__ void __launch_bounds__(256)
    mapped_clean(float* keys, int key_width, float* values, int value_width, int64_t T, int H, int64_t rows, int* first) {
  const int64_t row = blockIdx.x * 8ll + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  bool bad = false;
  for (int c = lane; c < key_width; c += 32) bad = bad || !isfinite(keys[row * key_width + c]);
  for (int c = lane; c < value_width; c += 32) bad = bad || !isfinite(values[row * value_width + c]);
  if (!__any_sync(0xffffffff, bad)) return;
  for (int c = lane; c < key_width; c += 32) keys[row * key_width + c] = 0;
  for (int c = lane; c < value_width; c += 32) values[row * value_width + c] = 0;
  if (lane == 0) atomicMin(first + row / H / T * H + row % H, static_cast<int>(row / H % T));
}
extern "C" __global__ void __launch_bounds__(256)
    mapped_poison(float* parts, int width, int64_t T, int H, int64_t rows, const int* first) {
  const int64_t row = blockIdx.x * 8ll + threadIdx.x / 32;
  if (row >= rows || row / H % T < first[row / H / T * H + row % H]) return;
  for (int c = threadIdx.x % 32; c < width; c += 32) parts[row * width + c] = NAN;
}

// values [B, S, H, padded] = [v - v0 | 1], 0 where a key takes no part and behind the columns.
extern "C" __global__ void __launch_bounds__(256) mapped_values(const __grid_constant__ MappedCall c) {
  TokenRow r;
  if (!row_at(c, c.S, &r)) return;
  const bool part = takes_part(c, r.b, r.t);
  for (int j = r.lane; j < c.padded; j += 32) {
    float x = 0;
    if (part && j < c.V) x = get(c.t.v, r.b, r.t, r.h, j) - c.v0[(r.b * c.H + r.h) * c.V + j];
    if (part && j == c.V) x = 1;
    c.values[r.row * c.padded + j] = x;
  }
}

// out = (num + d v0) / den, and den.
extern "C" __global__ void __launch_bounds__(256) mapped_finish(const __grid_constant__ MappedCall c) {
  TokenRow r;
  if (!row_at(c, c.T, &r)) return;
  float inverse = 1, share = 1, den = 1;
  const bool divides = c.normalizer != Normalizer::none;
  if (divides) {
    const float d = part_at(c, r, c.V);
    den = c.normalizer == Normalizer::add ? d + c.eps : d > c.eps || d != d ? d : c.eps;
    inverse = den == 0 || d == 0 ? 0 : 1 / den;
    share = d * inverse;
  }
  for (int j = r.lane; j < c.V; j += 32) {
    const float num = part_at(c, r, j), mean = divides ? c.v0[(r.b * c.H + r.h) * c.V + j] : 0;
    put(c.t.out, fmaf(num, inverse, mean * share), r.b, r.t, r.h, j);
  }
  if (r.lane == 0 && is_given(c.t.den)) put(c.t.den, den, r.b, r.t, r.h);
}

// rows [B, T, H, padded] = [dout / den | -(dout . (out - v0)) / den]; [max] where the clamp is active: the last is that of a
// constant den.
extern "C" __global__ void __launch_bounds__(256) mapped_gradient(const __grid_constant__ MappedCall c) {
  TokenRow r;
  if (!row_at(c, c.T, &r)) return;
  const bool divides = c.normalizer != Normalizer::none, given = is_given(c.t.dout);
  const float den = divides ? get(c.t.den, r.b, r.t, r.h) : 1, inverse = den == 0 ? 0 : 1 / den;
  const bool clamped = c.normalizer == Normalizer::max && den <= c.eps;
  float dot = 0;
  for (int j = r.lane; j < c.padded; j += 32) {
    const float g = given && j < c.V ? get(c.t.dout, r.b, r.t, r.h, j) * inverse : 0;
    if (divides && j < c.V) {
      const float mean = c.v0[(r.b * c.H + r.h) * c.V + j], o = clamped ? -mean : get(c.t.out, r.b, r.t, r.h, j) - mean;
      dot = fmaf(g, o, dot);
    }
    if (j < c.V || j >= c.columns) c.rows[r.row * c.padded + j] = g;
  }
  dot = ptx::sum_lanes<32>(dot);
  if (r.lane == 0) c.rows[r.row * c.padded + c.V] = -dot;
}

extern "C" __global__ void __launch_bounds__(256) mapped_dv(const __grid_constant__ MappedCall c) {
  TokenRow r;
  if (!row_at(c, c.S, &r)) return;
  const bool part = takes_part(c, r.b, r.t);
  for (int j = r.lane; j < c.V; j += 32) put(c.t.dv, part ? part_at(c, r, j) : 0, r.b, r.t, r.h, j);
}

// final_state [B, H, F, V] = states + z v0^T, final_z = z: a warp has a row of them.
extern "C" __global__ void __launch_bounds__(256) mapped_states(const __grid_constant__ MappedCall c) {
  const int64_t row = blockIdx.x * 8ll + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, f = static_cast<int>(row % c.F), h = static_cast<int>(row / c.F % c.H);
  const int64_t b = row / c.F / c.H;
  if (row >= c.B * c.H * c.F) return;
  const float* from = c.states + (((b * c.H + h) * c.tiles + f / c.tile) * c.tile + f % c.tile) * c.padded;
  const float z = from[c.V];
  for (int j = lane; j < c.V && is_given(c.t.final_state); j += 32) {
    put(c.t.final_state, fmaf(z, c.v0[(b * c.H + h) * c.V + j], from[j]), b, h, f, j);
  }
  if (lane == 0 && is_given(c.t.final_z)) put(c.t.final_z, z, b, h, f);
}

// Decode, first: z += phi(k), d = phi(q).z token by token; a block has a head. den becomes what the output is divided by.
extern "C" __global__ void __launch_bounds__(256)
    mapped_decode_sums(const __grid_constant__ MappedCall c, const float* phi_q, const float* phi_k,
                       const __grid_constant__ View z, float* den) {
  __shared__ float parts[8];
  const int64_t b = blockIdx.x / c.H;
  const int h = static_cast<int>(blockIdx.x % c.H);
  for (int64_t t = 0; t < c.T; ++t) {
    const int64_t row = (b * c.T + t) * c.H + h;
    float dot = 0;
    for (int f = threadIdx.x; f < c.F; f += 256) {
      const float sum = get(z, b, h, f) + phi_k[row * c.F + f];
      put(z, sum, b, h, f);
      dot = fmaf(phi_q[row * c.F + f], sum, dot);
    }
    const float d = ptx::sum_block<256>(dot, parts);
    if (threadIdx.x == 0) {
      const float x = c.normalizer == Normalizer::none  ? 1
                      : c.normalizer == Normalizer::add ? d + c.eps
                      : d > c.eps || d != d             ? d
                                                        : c.eps;
      den[row] = x == 0 || (d == 0 && c.normalizer != Normalizer::none) ? 0 : 1 / x;
    }
  }
}
// Then the state, 32 columns to a block, 8 threads each.
extern "C" __global__ void __launch_bounds__(256)
    mapped_decode_states(const __grid_constant__ MappedCall c, const float* phi_q, const float* phi_k,
                         const __grid_constant__ View state, const float* den) {
  __shared__ float parts[8][32];
  const int64_t b = blockIdx.x / c.H;
  const int h = static_cast<int>(blockIdx.x % c.H), lane = threadIdx.x % 32, slot = threadIdx.x / 32;
  const int column = blockIdx.y * 32 + lane;
  float* own = static_cast<float*>(state.data) + place(state, b, h) + column;
  for (int64_t t = 0; t < c.T; ++t) {
    const int64_t row = (b * c.T + t) * c.H + h;
    const float v = column < c.V ? get(c.t.v, b, t, h, column) : 0;
    float sum = 0;
    if (column < c.V) {
#pragma unroll 4
      for (int f = slot; f < c.F; f += 8) {
        const float x = fmaf(phi_k[row * c.F + f], v, own[f * state.stride[2]]);
        own[f * state.stride[2]] = x;
        sum = fmaf(phi_q[row * c.F + f], x, sum);
      }
    }
    parts[slot][lane] = sum;
    __syncthreads();
    if (slot == 0 && column < c.V) {
      for (int i = 1; i < 8; ++i) sum += parts[i][lane];
      put(c.t.out, sum * den[row], b, t, h, column);
    }
    __syncthreads();
  }
}

}  // namespace linnet::cuda
