// The walk of mamba_ssd's dv, which leaves dx and what ddt and dD stand on (Engine::back).
#include "mechanisms/recurrence/recurrence_tile.cuh"

namespace linnet::cuda {

LINNET_TILE_STEPS(ssd_back_bf16_64_64, true, 64, 64, true, true, true)
LINNET_TILE_STEPS(ssd_back_bf16_64_128, true, 64, 128, true, true, true)
LINNET_TILE_STEPS(ssd_back_bf16_128_64, true, 128, 64, true, true, true)
LINNET_TILE_STEPS(ssd_back_bf16_128_128, true, 128, 128, true, true, true)
LINNET_TILE_STEPS(ssd_back_f16_64_64, false, 64, 64, true, true, true)
LINNET_TILE_STEPS(ssd_back_f16_64_128, false, 64, 128, true, true, true)
LINNET_TILE_STEPS(ssd_back_f16_128_64, false, 128, 64, true, true, true)
LINNET_TILE_STEPS(ssd_back_f16_128_128, false, 128, 128, true, true, true)

}  // namespace linnet::cuda
