// The walk of mamba_ssd's dv, which leaves dx and what ddt and dD stand on (Engine::back).
#include "mechanisms/recurrence/cuda/tile/tile.cuh"

namespace linnet::cuda {

LINNET_TILES_OF_SSD(ssd_back, true)

}  // namespace linnet::cuda
