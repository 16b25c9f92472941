// Softmax attention of few rows (few.cuh), bf16.
#include "mechanisms/softmax/cuda/few.cuh"

namespace linnet::cuda {

#define LINNET_FEW(D)                                                                           \
  extern "C" __global__ void __launch_bounds__(128) few_##D(const __grid_constant__ Attend p) { \
    extern __shared__ char memory[];                                                            \
    attend_few<true, D>(p, memory);                                                             \
  }

LINNET_FEW(64)
LINNET_FEW(128)
LINNET_FEW(256)

}  // namespace linnet::cuda
