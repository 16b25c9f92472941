// Kernels with a fault each, for src/emulate/emulate_test.cc: the emulated GPU has to notice. Never part of the library.
#include "ptx/copy.cuh"
#include "ptx/layout.h"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace linnet::cuda {

extern "C" __global__ void __launch_bounds__(64) no_fault(float* out) {
  __shared__ float x[64];
  x[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = x[63 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(64) no_barrier(float* out) {
  __shared__ float x[64];
  x[threadIdx.x] = static_cast<float>(threadIdx.x);
  out[threadIdx.x] = x[63 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(64) not_waited_for(float* out) {
  __shared__ __align__(16) float x[4];
  if (threadIdx.x == 0) ptx::copy_16(ptx::shared_address(x), out, 16);
  ptx::copy_commit();
  ptx::copy_wait<1>();
  __syncthreads();
  out[threadIdx.x] = x[threadIdx.x % 4];
}
extern "C" __global__ void __launch_bounds__(64) behind_the_end(float* out) { out[threadIdx.x + 1024] = 1; }
extern "C" __global__ void __launch_bounds__(64) beside_the_end(float* out) { out[threadIdx.x + 2] = 1; }
extern "C" __global__ void __launch_bounds__(64) misaligned(float* out) { *reinterpret_cast<float4*>(out + 1) = {1, 2, 3, 4}; }
extern "C" __global__ void __launch_bounds__(64) too_much_shared(float* out) {
  extern __shared__ char memory[];
  memory[1024 + threadIdx.x] = 0;
  out[threadIdx.x] = 0;
}
extern "C" __global__ void __launch_bounds__(64) ended_lanes(float* out) {
  if (threadIdx.x % 32 > 20) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
extern "C" __global__ void __launch_bounds__(64) different_places(float* out) {
  if (threadIdx.x % 2 == 0) {
    __syncwarp();
  } else {
    out[threadIdx.x] = __shfl_sync(0xffffffffu, 1.0f, 0);
  }
}
extern "C" __global__ void __launch_bounds__(64) half_a_barrier(float* out) {
  if (threadIdx.x < 32) ptx::group_sync<1, 64>();
  out[threadIdx.x] = 0;
}

// ---- Hopper's instructions: 128 threads, 64 floats ------------------------------------------------------------------------

// The 64 floats in shared memory, by the copy engine. Read early: before they are waited for.
__device__ void copy_floats(float* out, bool early) {
  __shared__ __align__(16) float x[64];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&barrier, 1);
    x[0] = 7;
    ptx::barrier_arrive_expect(&barrier, 256);
    ptx::load_bytes(x, out, 256, &barrier);
  }
  __syncthreads();
  if (!early) ptx::barrier_wait(&barrier, 0);
  const float first = x[0];
  __syncthreads();
  ptx::barrier_wait(&barrier, 0);
  if (threadIdx.x < 64) out[threadIdx.x] = first;
}
extern "C" __global__ void __launch_bounds__(128) copied(float* out) { copy_floats(out, false); }
extern "C" __global__ void __launch_bounds__(128) copied_too_late(float* out) { copy_floats(out, true); }

// D = A B of ones in f16, 64 x 64 x 16: 16 everywhere. What goes wrong: `unwaited`: D is read at once; `overwritten`: B is
// before the product has read it.
__device__ void multiply_ones(float* out, bool unwaited, bool overwritten) {
  extern __shared__ char memory[];
  uint32_t* const tile = &ptx::shared_as<uint32_t>(memory);
  for (int i = threadIdx.x; i < 2048; i += 128) tile[i] = 0x3c003c00;
  ptx::fence_async_shared();
  __syncthreads();
  const uint32_t a[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
  float d[32] = {};
  ptx::wgmma_fence();
  ptx::wgmma<false, false>(d, a, ptx::descriptor_k_major(ptx::shared_address(tile), 64, 0), true);
  ptx::wgmma_commit();
  const float early = d[0];
  if (overwritten) {
    for (int i = threadIdx.x; i < 2048; i += 128) tile[i] = 0;
    __syncthreads();
  }
  ptx::wgmma_wait<0>();
  ptx::hold(d);
  if (threadIdx.x < 64) out[threadIdx.x] = unwaited ? early : d[0];
}
extern "C" __global__ void __launch_bounds__(128) product(float* out) { multiply_ones(out, false, false); }
extern "C" __global__ void __launch_bounds__(128) product_not_waited_for(float* out) { multiply_ones(out, true, false); }
extern "C" __global__ void __launch_bounds__(128) operand_overwritten(float* out) { multiply_ones(out, false, true); }

extern "C" __global__ void __launch_bounds__(128) product_left_behind(float* out) {
  extern __shared__ char memory[];
  float d[32] = {};
  const uint32_t a[4] = {};
  ptx::wgmma<false, false>(d, a, ptx::descriptor_k_major(ptx::shared_address(&ptx::shared_as<char>(memory)), 64, 0), true);
  ptx::wgmma_wait<0>();  // it was never committed
  out[threadIdx.x % 64] = d[0];
}
extern "C" __global__ void __launch_bounds__(128) products_of_two_warps(float* out) {
  extern __shared__ char memory[];
  float d[32] = {};
  const uint32_t a[4] = {};
  if (threadIdx.x < 64) {
    ptx::wgmma<false, false>(d, a, ptx::descriptor_k_major(ptx::shared_address(&ptx::shared_as<char>(memory)), 64, 0), true);
    ptx::wgmma_commit();
  }
  ptx::wgmma_wait<0>();
  out[threadIdx.x % 64] = d[0];
}
extern "C" __global__ void __launch_bounds__(128) copy_left_behind(float* out) {
  __shared__ __align__(16) float x[64];
  __shared__ uint64_t barrier;
  if (threadIdx.x != 0) return;
  ptx::barrier_init(&barrier, 1);
  ptx::barrier_arrive_expect(&barrier, 256);
  ptx::load_bytes(x, out, 256, &barrier);
  out[0] = 1;
}
extern "C" __global__ void __launch_bounds__(128) barrier_without_beginning(float* out) {
  __shared__ uint64_t barrier;
  ptx::barrier_arrive(&barrier);
  out[0] = 1;
}
extern "C" __global__ void __launch_bounds__(128) one_arrival_too_few(float* out) {
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) ptx::barrier_init(&barrier, 128);
  __syncthreads();
  if (threadIdx.x != 5) ptx::barrier_arrive(&barrier);
  ptx::barrier_wait(&barrier, 0);
  out[0] = 1;
}

}  // namespace linnet::cuda
