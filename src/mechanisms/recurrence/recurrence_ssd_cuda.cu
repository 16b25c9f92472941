// The tiled recurrence of mamba_ssd: step sizes from dt, the skip and the gate in the same kernel.
#include "mechanisms/recurrence/recurrence_tile.cuh"

namespace linnet::cuda {

LINNET_TILE_STEPS(ssd_bf16_64_64, true, 64, 64, true, true, false)
LINNET_TILE_STEPS(ssd_bf16_64_128, true, 64, 128, true, true, false)
LINNET_TILE_STEPS(ssd_bf16_128_64, true, 128, 64, true, true, false)
LINNET_TILE_STEPS(ssd_bf16_128_128, true, 128, 128, true, true, false)
LINNET_TILE_STEPS(ssd_f16_64_64, false, 64, 64, true, true, false)
LINNET_TILE_STEPS(ssd_f16_64_128, false, 64, 128, true, true, false)
LINNET_TILE_STEPS(ssd_f16_128_64, false, 128, 64, true, true, false)
LINNET_TILE_STEPS(ssd_f16_128_128, false, 128, 128, true, true, false)

}  // namespace linnet::cuda
