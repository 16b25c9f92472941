// The gradients of softmax attention in tiles (gradients.cuh), bf16.
#include "mechanisms/softmax/cuda/gradients.cuh"

namespace linnet::cuda {

#define LINNET_GRADIENTS(D, blocks)                                                                                          \
  extern "C" __global__ void __launch_bounds__(128, blocks) query_gradients_##D(const __grid_constant__ Attend p) {          \
    extern __shared__ char memory[];                                                                                         \
    query_gradients<true, D>(p, memory);                                                                                     \
  }                                                                                                                          \
  extern "C" __global__ void __launch_bounds__(D > 128 ? 256 : 128, 1) key_gradients_##D(const __grid_constant__ Attend p) { \
    extern __shared__ char memory[];                                                                                         \
    key_gradients<true, D>(p, memory);                                                                                       \
  }

LINNET_GRADIENTS(64, 2)
LINNET_GRADIENTS(128, 2)
LINNET_GRADIENTS(256, 1)

}  // namespace linnet::cuda
