// Kernels of ptx_test.cc: each runs one function of this folder and stores what it gave.
#include <cuda_fp16.h>

#include "core/cuda/driver.h"
#include "ptx/cluster.cuh"
#include "ptx/layout.h"
#include "ptx/matrix.cuh"
#include "ptx/numbers.cuh"
#include "ptx/rows.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace linnet::ptx {
namespace {

__device__ char* aligned(char* memory) {
  const uint32_t base = shared_address(memory);
  return memory + ((base + 1023) / 1024 * 1024 - base);
}

// Tile [rows, 64 * panels] of f16 from x [rows, columns], by ordinary stores.
__device__ void fill(char* tile, const float* x, int rows, int columns) {
  for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
    *reinterpret_cast<__half*>(tile + tile_byte(rows, i / columns, i % columns)) = __float2half(x[i]);
  }
  fence_async_shared();
  __syncthreads();
}

template <int count>
__device__ void store_result(const float (&d)[count], float* out, int columns) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < count; ++j) {
    out[(16 * warp + lane / 4 + ptx::Fragment::below(j)) * columns + ptx::Fragment{lane}.column(j)] = d[j];
  }
}

}  // namespace

// out [64, 64] = A [64, 128] B [64, 128]^T, both K-major in shared memory.
extern "C" __global__ void __launch_bounds__(128) product_shared(const float* a, const float* b, float* out) {
  extern __shared__ char memory[];
  char *ta = aligned(memory), *tb = ta + 16384;
  fill(ta, a, 64, 128);
  fill(tb, b, 64, 128);
  float d[32];
  wgmma_fence();
  for (int k = 0; k < 8; ++k) {
    wgmma_shared<false, false, false>(d, descriptor_k_major(shared_address(ta), 64, k),
                                      descriptor_k_major(shared_address(tb), 64, k), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(d);
  store_result(d, out, 64);
}

// out [64, 64] = A [64 (K), 64]^T B [64 (N), 64]^T: A MN-major, B K-major.
extern "C" __global__ void __launch_bounds__(128) product_transposed_a(const float* a, const float* b, float* out) {
  extern __shared__ char memory[];
  char *ta = aligned(memory), *tb = ta + 16384;
  fill(ta, a, 64, 64);
  fill(tb, b, 64, 64);
  float d[32];
  wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    wgmma_shared<false, true, false>(d, descriptor_mn_major(shared_address(ta), 64, k),
                                     descriptor_k_major(shared_address(tb), 64, k), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(d);
  store_result(d, out, 64);
}

// out [64, 128] = A^T B with A [64 (K), 64] by transposed matrices in registers, B [64 (K), 128] MN-major.
extern "C" __global__ void __launch_bounds__(128) product_registers(const float* a, const float* b, float* out) {
  extern __shared__ char memory[];
  char *ta = aligned(memory), *tb = ta + 16384;
  fill(ta, a, 64, 64);
  fill(tb, b, 64, 128);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t r[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int row = 16 * k + lane / 16 * 8 + lane % 8, column = 16 * warp + lane / 8 % 2 * 8;
    load_matrices_transposed(r[k], shared_address(ta) + tile_byte(64, row, column));
    hold(r[k]);
  }
  float d[64];
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<false, true>(d, r[k], descriptor_mn_major(shared_address(tb), 64, k), k > 0);
  wgmma_commit();
  wgmma_wait<0>();
  hold(d);
  store_result(d, out, 128);
}

// out [64, 64] = A [64, 16] [B B]^T, A from registers, B [64, 8] in rows of 16 bytes.
extern "C" __global__ void __launch_bounds__(128) product_pieces(const float* a, const float* b, float* out) {
  extern __shared__ char memory[];
  char* tile = aligned(memory);
  for (int i = threadIdx.x; i < 64 * 8; i += 128) reinterpret_cast<__half*>(tile)[i] = __float2half(b[i]);
  fence_async_shared();
  __syncthreads();
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  uint32_t r[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const at = a + (row + i % 2 * 8) * 16 + column + i / 2 * 8;
    r[i] = pack<false>(at[0], at[1]);
  }
  hold(r);
  float d[32];
  wgmma_fence();
  wgmma<false, false>(d, r, descriptor_pieces(shared_address(tile)), false);
  wgmma_commit();
  wgmma_wait<0>();
  hold(d);
  store_result(d, out, 64);
}

// out [64, 64] (f16 as float) = x [64, 64]^T through the accumulators' layout and transposed stores.
extern "C" __global__ void __launch_bounds__(128) store_transposed(const float* x, const float*, float* out) {
  extern __shared__ char memory[];
  char* tile = aligned(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 16 * warp + lane / 4;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    uint32_t r[4];
    for (int i = 0; i < 4; ++i) {
      const float* at = x + (row + i % 2 * 8) * 64 + 8 * (j + i / 2) + lane % 4 * 2;
      r[i] = pack<false>(at[0], at[1]);
    }
    const int to_row = 8 * (j + lane / 16) + lane % 8, column = 16 * warp + lane / 8 % 2 * 8;
    store_matrices_transposed(shared_address(tile) + tile_byte(64, to_row, column), r[0], r[1], r[2], r[3]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 4096; i += 128) {
    out[i] = __half2float(*reinterpret_cast<const __half*>(tile + tile_byte(64, i / 64, i % 64)));
  }
}

// out [64, 64] (f16 as float) = x [64, 64] through the accumulators' layout and stores as they are.
extern "C" __global__ void __launch_bounds__(128) store_plain(const float* x, const float*, float* out) {
  extern __shared__ char memory[];
  char* tile = aligned(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 16 * warp + lane / 4;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    uint32_t r[4];
    for (int i = 0; i < 4; ++i) {
      const float* at = x + (row + i % 2 * 8) * 64 + 8 * (j + i / 2) + lane % 4 * 2;
      r[i] = pack<false>(at[0], at[1]);
    }
    const int to_row = 16 * warp + lane / 8 % 2 * 8 + lane % 8, column = 8 * (j + lane / 16);
    store_matrices(shared_address(tile) + tile_byte(64, to_row, column), r[0], r[1], r[2], r[3]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 4096; i += 128) {
    out[i] = __half2float(*reinterpret_cast<const __half*>(tile + tile_byte(64, i / 64, i % 64)));
  }
}

// out [64, 64] = 2 x, through shared memory and back by copies of bytes.
extern "C" __global__ void __launch_bounds__(128) copy_bytes(const float* x, const float*, float* out) {
  extern __shared__ char memory[];
  __shared__ uint64_t barrier;
  auto* tile = reinterpret_cast<float*>(aligned(memory));
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(&barrier, 16384);
    load_bytes(tile, x, 16384, &barrier);
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
  for (int i = threadIdx.x; i < 4096; i += 128) tile[i] *= 2;
  fence_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_bytes(out, tile, 16384);
    wait_stores_read();
    wait_stores();
  }
}

// out [64, 128] = the box of a tensor [B, T, H, 128] at (t, h, b), zeros outside.
extern "C" __global__ void __launch_bounds__(128)
    copy_box(const __grid_constant__ cuda::TensorMap map, float* out, int t, int h, int b) {
  extern __shared__ char memory[];
  __shared__ uint64_t barrier;
  char* tile = aligned(memory);
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(&barrier, 16384);
    load_box(tile, &map, &barrier, 0, t, 0, h, b);
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
  for (int i = threadIdx.x; i < 8192; i += 128) {
    out[i] = __half2float(*reinterpret_cast<const __half*>(tile + tile_byte(64, i / 128, i % 128)));
  }
}

// Each of 16 blocks sends 32 pieces to the next one, waits for what the one before sends, and tells it so.
// out [16, 129]: what came, and how many threads of a warp were elected.
extern "C" __global__ void __cluster_dims__(16) __launch_bounds__(32) exchange(float* out) {
  __shared__ float4 got[32];
  __shared__ uint64_t arrived, taken;
  const uint32_t rank = cluster_rank(), next = (rank + 1) % 16, before = (rank + 15) % 16, lane = threadIdx.x;
  if (lane == 0) {
    barrier_init(&arrived, 1), barrier_init(&taken, 1);
    barrier_init_fence();
    barrier_arrive_expect(&arrived, sizeof got);
  }
  cluster_sync();
  const uint32_t there = address_in(shared_address(&arrived), next);
  send_16(address_in(shared_address(&got[lane]), next), make_uint4(rank, lane, 2, 3), there);
  const bool is = elect();
  barrier_wait(&arrived, 0);
  if (is) barrier_arrive_in(address_in(shared_address(&taken), before));
  __syncwarp();
  barrier_wait(&taken, 0);
  float* const mine = out + rank * 129;
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(&got[lane]);
  for (int i = 0; i < 4; ++i) mine[lane * 4 + i] = static_cast<float>(words[i]);
  const int votes = __popc(__ballot_sync(0xffffffffu, is));
  if (is) mine[128] = static_cast<float>(votes);
  cluster_sync();  // nobody leaves while others may send here
}

// 256 vectors of 16 bytes: y = x + 1 in the same type; sums [3, 256]: over 16 lanes, 32 lanes and the block, of each vector.
template <class T>
__device__ void add_one(const void* x, void* y, float* sums) {
  __shared__ float parts[8];
  float v[kVector<T>], sum = 0;
  to_floats<T>(load_once(static_cast<const uint4*>(x) + threadIdx.x), v);
  for (float& each : v) sum += each++;
  store_once(static_cast<uint4*>(y) + threadIdx.x, from_floats<T>(v));
  sums[threadIdx.x] = sum_lanes<16>(sum);
  sums[256 + threadIdx.x] = sum_lanes<32>(sum);
  sums[512 + threadIdx.x] = sum_block<256>(sum, parts);
}
extern "C" __global__ void __launch_bounds__(256) add_one_f32(const void* x, void* y, float* sums) {
  add_one<float>(x, y, sums);
}
extern "C" __global__ void __launch_bounds__(256) add_one_bf16(const void* x, void* y, float* sums) {
  add_one<__nv_bfloat16>(x, y, sums);
}
extern "C" __global__ void __launch_bounds__(256) add_one_f16(const void* x, void* y, float* sums) {
  add_one<__half>(x, y, sums);
}

extern "C" __global__ void __launch_bounds__(256) logarithm(const float* x, float* y) {
  y[threadIdx.x] = log2_fast(x[threadIdx.x]);
}

// y = logistic(x), both ways.
extern "C" __global__ void __launch_bounds__(256) logistic_both(const float* x, float* y) {
  y[threadIdx.x] = logistic<false>(x[threadIdx.x]);
  y[256 + threadIdx.x] = logistic<true>(x[threadIdx.x]);
}

}  // namespace linnet::ptx
