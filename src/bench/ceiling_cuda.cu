// What this GPU can do at most, for `linnet bench`: products on its matrix units with both operands at hand, and multiply-adds.
#include <cstdint>

#include "ptx/layout.h"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

namespace linnet::ptx {

// 2^15 products 64 x 128 x 16 per block of 128 threads, f16, on numbers that are no zeros: those would cost less power.
extern "C" __global__ void __launch_bounds__(128) products(float* out) {
  extern __shared__ char memory[];
  const uint32_t base = (shared_address(memory) + 1023) / 1024 * 1024;
  auto* words = reinterpret_cast<uint32_t*>(memory + (base - shared_address(memory)));
  uint32_t state = threadIdx.x * 2654435761u + blockIdx.x + 1;
  for (int i = threadIdx.x; i < 16384 / 4; i += 128) {
    state = state * 1664525u + 1013904223u;
    words[i] = (state & 0x83ff83ffu) | 0x24002400u;  // +-2^-6 (1 to 2)
  }
  fence_async_shared();
  __syncthreads();
  float d[64];
  uint32_t a[4][4];
  for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = words[threadIdx.x + 128 * i];
  for (int i = 0; i < 64; ++i) d[i] = 0;
  for (int round = 0; round < (1 << 15) / 16; ++round) {
    hold(d);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 16; ++i) wgmma<false, false>(d, a[i % 4], descriptor_k_major(base, 128, i % 4), true);
    wgmma_commit();
    wgmma_wait<0>();
    hold(d);
  }
  float sum = 0;
  for (int i = 0; i < 64; ++i) sum += d[i];
  out[blockIdx.x * 128 + threadIdx.x] = sum;
}

// 2^18 multiply-adds per thread, in 8 chains.
extern "C" __global__ void __launch_bounds__(256) multiply_adds(float* out) {
  float x[8];
  for (int i = 0; i < 8; ++i) x[i] = threadIdx.x + i;
  const float a = 0.999f + 1e-9f * threadIdx.x, b = 1e-3f * blockIdx.x;
  for (int round = 0; round < (1 << 18) / 64; ++round) {
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i % 8] = fmaf(a, x[i % 8], b);
  }
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += x[i];
  out[blockIdx.x * 256 + threadIdx.x] = sum;
}

}  // namespace linnet::ptx
