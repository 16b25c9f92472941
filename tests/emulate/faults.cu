// Kernels with a fault each, for src/emulate/emulate_test.cc: the emulated GPU has to notice. Never part of the library.
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"

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

}  // namespace linnet::cuda
