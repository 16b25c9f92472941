// Tiles of numbers as sums of bf16 numbers in shared memory, and their products by one warp.
#pragma once

#include "mechanisms/recurrence/cuda/general/general.h"
#include "mechanisms/recurrence/cuda/map.cuh"
#include "ptx/mma.cuh"
#include "ptx/rows.cuh"

namespace linnet::cuda {
namespace {

using bf16 = __nv_bfloat16;

// A tile: planes of rows of bf16. Rows are 16 bytes longer than their columns, so that 8 rows of a matrix lie in all banks.
struct Planes {
  bf16* data;
  int ld, plane;  // elements of a row, of a plane
};
template <int kPlanes>
__device__ __forceinline__ Planes cut_planes(char*& at, int rows, int columns) {
  const Planes p = {reinterpret_cast<bf16*>(at), columns + 8, rows * (columns + 8)};
  at += kPlanes * general_plane(rows, columns);
  return p;
}
__device__ __forceinline__ float* cut_floats(char*& at, int count) {
  float* p = reinterpret_cast<float*>(at);
  at += count * 4;
  return p;
}

template <int kPlanes>
__device__ __forceinline__ void put(const Planes& p, int row, int column, float x) {
#pragma unroll
  for (int i = 0; i < kPlanes; ++i) {
    const bf16 part = __float2bfloat16_rn(x);
    p.data[i * p.plane + row * p.ld + column] = part;
    x -= __bfloat162float(part);
  }
}
// Two neighbours, the first at an even column.
template <int kPlanes>
__device__ __forceinline__ void put2(const Planes& p, int row, int column, float x, float y) {
#pragma unroll
  for (int i = 0; i < kPlanes; ++i) {
    const uint32_t part = ptx::pack<true>(x, y);
    *reinterpret_cast<uint32_t*>(&p.data[i * p.plane + row * p.ld + column]) = part;
    const float2 two = ptx::unpack<true>(part);
    x -= two.x;
    y -= two.y;
  }
}
template <int kPlanes>
__device__ __forceinline__ float get(const Planes& p, int row, int column) {
  float x = 0;
#pragma unroll
  for (int i = kPlanes - 1; i >= 0; --i) x += __bfloat162float(p.data[i * p.plane + row * p.ld + column]);
  return x;
}

// Rows in memory: `width` channels (a multiple of 8) are there, from the first row's first element on. Those of the workspace
// are planes, `plane` elements apart.
struct Source {
  const void* data;
  Dtype dtype;
  int64_t stride;
  int width;
  int planes = 0;
  int64_t plane = 0;
};
__device__ __forceinline__ Source source_of(const Rows& r, int64_t b, int64_t t, int h, int width) {
  const char* at = static_cast<const char*>(r.data) + row_of(r, b, t, h) * (r.dtype == Dtype::f32 ? 4 : 2);
  return {at, r.dtype, r.stride_t, width};
}
__device__ __forceinline__ void load_8(const Source& s, int64_t row, int column, float (&x)[8]) {
  const int64_t place = row * s.stride + column;
  if (s.dtype == Dtype::f32) {
    const float4* at = reinterpret_cast<const float4*>(static_cast<const float*>(s.data) + place);
    const float4 low = at[0], high = at[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  } else {
    const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(s.data) + place);
    if (s.dtype == Dtype::bf16) {
      ptx::to_floats<__nv_bfloat16>(raw, x);
    } else {
      ptx::to_floats<__half>(raw, x);
    }
  }
}
// Two neighbours, or zeros behind the last channel.
__device__ __forceinline__ float2 load_2(const Source& s, int64_t row, int column) {
  if (column >= s.width) return {0, 0};
  const int64_t place = row * s.stride + column;
  if (s.dtype == Dtype::f32) return *reinterpret_cast<const float2*>(static_cast<const float*>(s.data) + place);
  const uint32_t raw = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(s.data) + place);
  return s.dtype == Dtype::bf16 ? ptx::unpack<true>(raw) : ptx::unpack<false>(raw);
}
// The workspace's planes of a tensor, from `first` on; `plane`: elements of a whole one.
template <int kPlanes>
__device__ __forceinline__ Source planes_at(const void* data, int64_t plane, int64_t first, int width) {
  return {static_cast<const bf16*>(data) + first, Dtype::bf16, width, width, kPlanes, plane};
}
template <int kPlanes>
__device__ __forceinline__ void store_planes(void* data, int64_t plane, int64_t place, float x, float y) {
#pragma unroll
  for (int i = 0; i < kPlanes; ++i) {
    const uint32_t part = ptx::pack<true>(x, y);
    *reinterpret_cast<uint32_t*>(static_cast<bf16*>(data) + i * plane + place) = part;
    const float2 two = ptx::unpack<true>(part);
    x -= two.x;
    y -= two.y;
  }
}

// Two neighbours of a result, the second only where it is wanted; one store where they may share it.
__device__ __forceinline__ void store_results(const Rows& r, int64_t place, bool both, float x, float y) {
  void* data = const_cast<void*>(r.data);
  const int size = r.dtype == Dtype::f32 ? 4 : 2;
  if (both && (reinterpret_cast<uintptr_t>(data) + place * size) % (2 * size) == 0) {
    if (r.dtype == Dtype::f32) {
      *reinterpret_cast<float2*>(static_cast<float*>(data) + place) = float2{x, y};
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(data) + place) =
          r.dtype == Dtype::bf16 ? ptx::pack<true>(x, y) : ptx::pack<false>(x, y);
    }
    return;
  }
  ptx::store(data, r.dtype, place, x);
  if (both) ptx::store(data, r.dtype, place + 1, y);
}

// to[0 .. all)[0 .. columns) = rows from `first` column on, times a factor of each row; zeros behind the last row and channel.
// What needs no arithmetic is copied by itself: tiles_ready() waits for it.
template <int kPlanes>
__device__ __forceinline__ void load_tile(const Planes& to, const Source& from, int rows, int all, int first, int columns,
                                          const float* factor) {
  const int pieces = columns / 8, step = blockDim.x / pieces;
  const int column = threadIdx.x % pieces * 8;
  if (factor == nullptr && (from.planes == kPlanes || (kPlanes == 1 && from.dtype == Dtype::bf16))) {
    const bf16* source = static_cast<const bf16*>(from.data);
    const bool is = first + column < from.width;
    for (int row = threadIdx.x / pieces; row < all && threadIdx.x / pieces < step; row += step) {
      const bool there = is && row < rows;
      const bf16* at = there ? source + row * from.stride + first + column : source;
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        ptx::copy_16(ptx::shared_address(&to.data[p * to.plane + row * to.ld + column]), there ? at + p * from.plane : source,
                     there ? 16 : 0);
      }
    }
    return;
  }
  for (int row = threadIdx.x / pieces; row < all && threadIdx.x / pieces < step; row += step) {
    float x[8] = {};
    if (row < rows && first + column < from.width) {
      load_8(from, row, first + column, x);
      const float f = factor == nullptr ? 1 : factor[row];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] *= f;
    }
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      const uint4 words = ptx::from_floats<__nv_bfloat16>(x);
      *reinterpret_cast<uint4*>(&to.data[p * to.plane + row * to.ld + column]) = words;
      if (p + 1 < kPlanes) {
        float part[8];
        ptx::to_floats<__nv_bfloat16>(words, part);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] -= part[j];
      }
    }
  }
}
__device__ __forceinline__ void tiles_ready() {
  ptx::copy_commit();
  ptx::copy_wait<0>();
  __syncthreads();
}

// acc [16, 8 kTiles] += A [16, 16 steps] B [16 steps, 8 kTiles] of one warp. A lies as [m][k], or as [k][m] when turned; B as
// [n][k], or as [k][n] when turned; from element (m, k) and (n, k) on, where B's k may begin elsewhere (kb). `pairs`: of tiles
// that are wanted. keep(i): changes A's registers of step i.
struct KeepAll {
  __device__ void operator()(uint32_t (&)[4], int) const {}
};
template <int kA, int kB, bool turned_a, bool turned_b, int kTiles, class Keep = KeepAll>
__device__ __forceinline__ void multiply(float (&acc)[kTiles][4], const Planes& A, int m, int ka, const Planes& B, int n,
                                         int kb, int steps, int pairs = kTiles / 2, const Keep& keep = {}) {
  static_assert(kTiles % 2 == 0);
  constexpr int kMost = kA > kB ? kA : kB;
  const int lane = threadIdx.x % 32, low = lane % 8, second = lane / 8 % 2 * 8, upper = lane / 16 * 8;
  uint32_t a_at = ptx::shared_address(turned_a ? &A.data[(ka + low + upper) * A.ld + m + second]
                                               : &A.data[(m + low + second) * A.ld + ka + upper]);
  uint32_t b_at = ptx::shared_address(turned_b ? &B.data[(kb + low + second) * B.ld + n + upper]
                                               : &B.data[(n + low + upper) * B.ld + kb + second]);
  const uint32_t a_step = turned_a ? 32 * A.ld : 32, b_step = turned_b ? 32 * B.ld : 32, b_pair = turned_b ? 32 : 32 * B.ld;
#pragma unroll 2
  for (int step = 0; step < steps; ++step) {
    uint32_t a[kA][4];
#pragma unroll
    for (int i = 0; i < kA; ++i) {
      const uint32_t at = a_at + step * a_step + i * 2 * A.plane;
      if constexpr (turned_a) {
        ptx::load_matrices_transposed(a[i], at);
      } else {
        ptx::load_matrices(a[i], at);
      }
      keep(a[i], step);
    }
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      if (pair >= pairs) break;
      uint32_t b[kB][4];
#pragma unroll
      for (int i = 0; i < kB; ++i) {
        const uint32_t at = b_at + step * b_step + pair * b_pair + i * 2 * B.plane;
        if constexpr (turned_b) {
          ptx::load_matrices_transposed(b[i], at);
        } else {
          ptx::load_matrices(b[i], at);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&d)[4] = acc[2 * pair + half];
        if constexpr (kMost == 3) {
          // The unit cuts its sums off: small terms first, and the whole added with rounding.
          float sum[4] = {};
#pragma unroll
          for (int order = 2; order >= 0; --order) {
#pragma unroll
            for (int i = 0; i <= order; ++i) {
              if (i < kA && order - i < kB)
                ptx::mma<true>(sum, a[i < kA ? i : 0], b[order - i < kB ? order - i : 0][2 * half],
                               b[order - i < kB ? order - i : 0][2 * half + 1]);
            }
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) d[i] += sum[i];
        } else {
#pragma unroll
          for (int i = 0; i < kA; ++i) {
#pragma unroll
            for (int j = 0; j < kB; ++j) {
              if (i + j < kMost) ptx::mma<true>(d, a[i], b[j][2 * half], b[j][2 * half + 1]);
            }
          }
        }
      }
    }
  }
}

// Where a lane's four numbers of a 16 x 8 tile lie: rows row() and row() + 8, columns column() and the next.
__device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_column() { return threadIdx.x % 4 * 2; }

// A chunk of a sequence.
struct Place {
  int64_t b, begin, length, tile;  // batch row; first token of the sequence and its tokens; the tile of this chunk and head
  int64_t n, first;                // the sequence; first token of the chunk
  int h, rows;                     // head; tokens of the chunk, 0: there is none
};
__device__ __forceinline__ Place sequence_of(const Engine& e, int64_t block) {
  Place p;
  p.n = block / e.H;
  p.h = static_cast<int>(block - p.n * e.H);
  p.b = p.n;
  p.begin = 0;
  p.length = e.T;
  if (e.offsets != nullptr) {
    p.b = 0;
    p.begin = offset(e, p.n);
    const int64_t end = offset(e, p.n + 1);
    p.length = end > p.begin ? end - p.begin : 0;
  }
  return p;
}
__device__ __forceinline__ void go_to(Place& p, const Engine& e, int64_t chunk) {
  const int64_t left = p.length - chunk * kGeneralChunk;
  p.rows = left <= 0 ? 0 : left < kGeneralChunk ? static_cast<int>(left) : kGeneralChunk;
  p.first = p.begin + chunk * kGeneralChunk;
  p.tile = saved_slot(e, p.n, p.begin, chunk) * e.H + p.h;
}
__device__ __forceinline__ Place chunk_of(const Engine& e) {
  Place p = sequence_of(e, blockIdx.x);
  go_to(p, e, blockIdx.y);
  return p;
}

template <int kPlanes>
__device__ __forceinline__ float decay_of(float sum) {
  if constexpr (kPlanes == 3) return expf(sum);
  return __expf(sum);
}
__device__ __forceinline__ float beta_of(const General& g, const Place& p, int row) {
  return g.e.beta_factor * ptx::load(g.e.beta.data, g.e.beta.dtype, row_of(g.e.beta, p.b, p.first + row, p.h));
}

}  // namespace
}  // namespace linnet::cuda
