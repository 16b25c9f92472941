// The forward of softmax attention in tiles (tile.cuh), f16.
#include "mechanisms/softmax/cuda/tile.cuh"

namespace linnet::cuda {

#define LINNET_TILE(D, blocks)                                                                             \
  extern "C" __global__ void __launch_bounds__(256, blocks) attend_##D(const __grid_constant__ Attend p) { \
    extern __shared__ char memory[];                                                                       \
    attend_tile<false, D, 8>(p, memory);                                                                   \
  }

LINNET_TILE(64, 2)
LINNET_TILE(128, 2)
LINNET_TILE(256, 1)

}  // namespace linnet::cuda
