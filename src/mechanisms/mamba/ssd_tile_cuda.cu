// The tiled recurrence of mamba_ssd: step sizes from dt, the skip and the gate in the same kernel.
#include "mechanisms/recurrence/cuda/tile/tile.cuh"

namespace linnet::cuda {

LINNET_TILES_OF_SSD(ssd, false)

}  // namespace linnet::cuda
